"""HRF Tables 1 and 3: errors of kernel estimates on tables of data and on clusters."""

import numpy as np
import pandas as pd

from crt_exp.experiments.report import (
    Claim,
    PlannedRun,
    Rows,
    Tables,
    filters_over,
    mean_table,
    ratio_interval,
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
LENGTHS = [0.5, 1.0, 1.5, 2.0]  # of rows, root mean square


def table_runs(options: str) -> list[PlannedRun]:
    axes = {"task.dataset": DATASETS, "task.length": LENGTHS}
    return sweep(f"task=qmc {options}", features=METHODS, seed=range(100, 140), **axes)


def ratios_by_length(rows: Rows, other: str, dataset: str) -> dict[float, pd.Series]:
    """Log ratio of the MSE of HRF-ort and of another method, by length and sample of pairs."""
    ratios = {}
    for length in LENGTHS:
        ratios[length] = rows.ratio(ORTHOGONAL, other, "mse", dataset=dataset, length=length)
    return ratios


def table_claim(rows: Rows) -> Claim:
    samples, fails = {}, {}
    for other, label in OTHERS.items():
        for dataset in DATASETS:
            case = f"{label}, {dataset}"
            ratios = ratios_by_length(rows, other, dataset)
            samples[case] = ratios[1.0]
            means = {n: np.exp(ratio.mean()) for n, ratio in ratios.items() if len(ratio)}
            if means and min(means.values()) < 1 < max(means.values()):
                listed = ", ".join(f"{mean:.2g} at {n:g}" for n, mean in means.items())
                fails[case] = (
                    f"the scaling of the table, which the paper does not state, decides: {listed}"
                )
    return Claim(
        "HRF-ort has a smaller MSE than HRF-iid, ORF-reg, ORF-Had and Halton-R, length 1, 16 projections",
        samples,
        below=1,
        log=True,
        paper="HRFs outperform all other methods",
        fails=fails,
        needs="the scaling of the paper's tables",
    )


def length_table(rows: Rows) -> pd.DataFrame:
    """Ratios of table_claim by length (columns)."""
    table = {}
    for dataset in DATASETS:
        for other, label in OTHERS.items():
            for length, ratio in ratios_by_length(rows, other, dataset).items():
                column = table.setdefault(f"{dataset}, {length:g}", {})
                column[label] = ratio_interval(ratio, ".2f")
    return pd.DataFrame(table).rename_axis("method")


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
PAPER = {
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


def cluster_claim(rows: Rows) -> Claim:
    samples, paper = {}, {}
    for other, label in BASELINES.items():
        for dataset in SETS:
            case = f"{label}, {dataset}"
            where = {"sweep": "hrf-clusters/sets", "dataset": dataset}
            samples[case] = rows.ratio(HYBRID, other, "closed_form", **where)
            if dataset != "set 5":
                paper[case] = "a lower largest MSE on sets 1 to 4"
    return Claim(
        "hybrid-cluster has a smaller MSE than FAVOR+ and trigonometric features",
        samples,
        below=1,
        log=True,
        sign_test=True,
        paper=paper,
        reason="a hybrid fitted to centres gains little at a spread of 0.3 (sets 2 and 4), nothing at 0.6 (set 5)",
        needs="the spreads of the paper's data sets",
    )


def repetition_claim(rows: Rows) -> Claim:
    samples = {}
    for other, label in BASELINES.items():
        for m in PAPER:
            ratio = rows.ratio(HYBRID, other, "mse_of_repeats", dataset="set 1", m=m)
            samples[f"{label}, set 1, m = {m}"] = ratio
    return Claim(
        "hybrid-cluster has a smaller MSE in a repetition than FAVOR+ and trigonometric features",
        samples,
        below=1,
        log=True,
        paper="ranges of Table 3 below those of the others",
        needs="more repetitions",
    )


def range_table(rows: Rows) -> pd.DataFrame:
    columns = filters_over("m", PAPER, "m = {}", metric="mse_of_repeats")
    table = mean_table(rows, columns, CLUSTERED, format=four_digit_range)
    for m, ranges in PAPER.items():
        paper = dict(zip(CLUSTERED.values(), ranges))
        table[f"paper, m = {m}"] = table.index.map(paper)
    return table


def four_digit_range(values: pd.Series) -> str:
    return f"[{values.min():.4f}, {values.max():.4f}]"


# ---- both


def claims(rows: Rows) -> list[Claim]:
    return [table_claim(rows), cluster_claim(rows), repetition_claim(rows)]


def tables(rows: Rows) -> Tables:
    errors = filters_over("dataset", DATASETS, metric="mse", length=1.0)
    ranges = range_table(rows)
    ratios = length_table(rows)
    return {
        "HRF Table 3, set 1: range of the MSE over 20 repetitions (lower is better)": ranges,
        "HRF Table 1: MSE of HRF-ort over that of others, 16 projections, by length": ratios,
        "HRF Table 1: MSE on tables, length 1, 16 projections": mean_table(rows, errors, METHODS),
    }
