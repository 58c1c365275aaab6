"""HRF Tables 1 and 3: errors of kernel estimates on tables of data and on clusters."""

from itertools import product

import numpy as np
import pandas as pd

from crt_exp.experiments.report import (
    Claim,
    PlannedRun,
    Rows,
    Tables,
    filters_over,
    mean_table,
    sweep,
)

# ---- Table 1

ORTHOGONAL = "angular m=8 sampler=orthogonal"
OTHERS = {
    "angular m=8 sampler=iid": "HRF-iid",
    "trig m=16 sampler=orthogonal": "ORF-reg",
    "trig m=16 sampler=hadamard": "ORF-Had",
    "trig m=16 sampler=halton": "Halton-R",
}
METHODS = {ORTHOGONAL: "HRF-ort", **OTHERS}  # 16 projections in all
DATASETS = ["wine", "boston"]
SCALES = [0.5, 1.0, 1.5, 2.0]  # of rows, root mean square


def table_runs(options: str) -> list[PlannedRun]:
    axes = {"task.dataset": DATASETS, "task.length": SCALES}
    return sweep(f"task=qmc {options}", features=METHODS, seed=range(100, 140), **axes)


TABLES = {}  # filters by data set and length
for dataset, length in product(DATASETS, SCALES):
    TABLES[f"{dataset}, {length:g}"] = {"metric": "mse", "dataset": dataset, "length": length}


def table_claim(rows: Rows) -> Claim:
    samples, fails = {}, {}
    for (other, label), dataset in product(OTHERS.items(), DATASETS):
        case = f"{label}, {dataset}"
        means = {}
        for length in SCALES:
            ratio = rows.ratio(ORTHOGONAL, other, **TABLES[f"{dataset}, {length:g}"])
            if length == 1:
                samples[case] = ratio
            if len(ratio):
                means[length] = np.exp(ratio.mean())
        if means and min(means.values()) < 1 < max(means.values()):
            listed = ", ".join(f"{mean:.2g} at {n:g}" for n, mean in means.items())
            fails[case] = (
                f"the scaling of the table, which the paper does not state, decides: {listed}"
            )
    return Claim(
        "HRF-ort has a smaller MSE than HRF-iid, ORF-reg, ORF-Had and Halton-R, length 1, 16 projections",
        samples,
        "HRFs outperform all other methods",
        "the scaling of the paper's tables",
        below=1,
        log=True,
        fails=fails,
    )


# ---- Table 3

SETS = {
    "set 1": "task.agreeing=0 task.spread=0.15",
    "set 2": "task.agreeing=0 task.spread=0.3",
    "set 3": "task.agreeing=0.25 task.spread=0.15",
    "set 4": "task.agreeing=0.25 task.spread=0.3",
    "set 5": "task.agreeing=0 task.spread=0.6",
}
HYBRID = "clustered by=centres sampler=iid"
BASELINES = {"pos sampler=iid": "FAVOR+", "trig sampler=iid": "trigonometric"}
CLUSTERED = {HYBRID: "hybrid-cluster", **BASELINES}
RANGES = {
    20: ["[0.0016, 0.0183]", "[0.0071, 0.1455]", "[0.0039, 0.0808]"],
    50: ["[0.0011, 0.0081]", "[0.0026, 0.2541]", "[0.0031, 0.0510]"],
    100: ["[0.0006, 0.0036]", "[0.0022, 0.0528]", "[0.0013, 0.0170]"],
    200: ["[0.0002, 0.0010]", "[0.0013, 0.0205]", "[0.0004, 0.0087]"],
}  # set 1: the methods of CLUSTERED


def cluster_sweeps(pairs: int) -> dict[str, list[PlannedRun]]:
    options = f"task=clusters task.pairs={pairs}"
    first = {"set 1": SETS["set 1"]}
    seeds = range(20, 120)
    once = f"{options} task.repeats=1 task.ms=[20]"
    return {
        "hrf-clusters": sweep(f"{options} task.repeats=20", features=CLUSTERED, dataset=first),
        "hrf-clusters/sets": sweep(once, features=CLUSTERED, dataset=SETS, seed=seeds),
    }


def range_table(rows: Rows) -> pd.DataFrame:
    columns = filters_over("m", RANGES, "m = {}", metric="mse_of_repeats")
    table = mean_table(rows, columns, CLUSTERED, format=four_digit_range)
    for m, ranges in RANGES.items():
        paper = dict(zip(CLUSTERED.values(), ranges))
        table[f"paper, m = {m}"] = table.index.map(paper)
    return table


def four_digit_range(values: pd.Series) -> str:
    return f"[{values.min():.4f}, {values.max():.4f}]"


# ---- claims and tables


def claims(rows: Rows) -> list[Claim]:
    ratio = {"below": 1, "log": True}
    sets = filters_over("dataset", SETS, sweep="hrf-clusters/sets")
    repetitions = filters_over("m", RANGES, "set 1, m = {}", dataset="set 1")
    in_sets = rows.paired_by_case(HYBRID, BASELINES, "closed_form", sets, log=True)
    in_repetitions = rows.paired_by_case(HYBRID, BASELINES, "mse_of_repeats", repetitions, log=True)
    return [
        table_claim(rows),
        Claim(
            "hybrid-cluster has a smaller MSE than FAVOR+ and trigonometric features",
            in_sets,
            {case: "a lower largest MSE on sets 1 to 4" for case in in_sets if "set 5" not in case},
            "the spreads of the paper's data sets",
            sign_test=True,
            reason="a hybrid fitted to centres gains little at a spread of 0.3 (sets 2 and 4), nothing at 0.6 (set 5)",
            **ratio,
        ),
        Claim(
            "hybrid-cluster has a smaller MSE in a repetition than FAVOR+ and trigonometric features",
            in_repetitions,
            "ranges of Table 3 below those of the others",
            "more repetitions",
            **ratio,
        ),
    ]


def tables(rows: Rows) -> Tables:
    errors = filters_over("dataset", DATASETS, metric="mse", length=1.0)
    return {
        "HRF Table 3, set 1: range of the MSE over 20 repetitions (lower is better)": range_table(
            rows
        ),
        "HRF Table 1: MSE of HRF-ort over that of others, 16 projections, by length": mean_table(
            rows, TABLES, OTHERS, spec=".2f", over=ORTHOGONAL
        ),
        "HRF Table 1: MSE on tables, length 1, 16 projections": mean_table(rows, errors, METHODS),
    }
