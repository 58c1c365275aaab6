"""CRT Table 1: kernel regression on eight UCI data sets.

`make demo` uses the data sets that scikit-learn includes.
"""

import numpy as np
import pandas as pd

from crt_exp.experiments.report import (
    Claim,
    Page,
    PlannedRun,
    Rows,
    dot_plot,
    mean_ci,
    mean_table,
    panels,
    quoted_override,
    sweep,
)

PAPER = {  # map -> the paper's accuracy on each set, and the average
    "trig": "12.0 66.2 66.3 29.7 46.6 31.3 15.2 16.5 35.5",
    "pos": "16.0 83.4 69.2 34.4 45.1 77.4 88.8 20.2 54.3",
    "gerf": "17.0 92.4 70.9 42.9 47.8 63.8 93.3 20.4 56.1",
    "pois": "18.0 84.4 66.3 36.9 46.6 77.1 95.3 19.1 55.5",
    "geom": "18.3 94.5 66.3 35.9 47.3 77.1 95.8 19.5 56.8",
    "oprf": "17.1 92.6 69.5 44.4 46.3 78.9 93.3 20.2 57.8",
    "pois_plus": "14.0 80.1 66.3 29.7 35.5 77.3 77.2 19.2 49.9",
    "geom_plus": "15.1 85.6 67.2 31.0 43.5 71.0 82.9 22.5 52.3",
}
SETS = {
    "table1": ["abalone", "banknote", "car", "yeast", "cmc", "nursery", "wifi", "chess"],
    "demo": ["wine", "breast_cancer", "digits", "iris"],
}
OVERLAP = {"table1": 0.05 / 0.9, "demo": 0.25 / 0.6}  # test rows over training rows
DOUBLE = {
    "trig": "trig m=64",
    "gerf": "gerf m=64",
    "hyp": "hyp m=64",
}  # two columns of a projection
BASELINES = {
    name: quoted_override("task.baseline", name)
    for name in ("Nystroem m=128", "RBFSampler m=128", "majority")
}
METHODS = {
    "exact": "exact",
    "Nystroem m=128": "Nystroem",
    "geom": "GeomRF",
    "oprf": "OPRF",
    "trig": "TrigRF",
    "pois": "PoisRF",
    "RBFSampler m=128": "RBFSampler",
    "gerf": "GERF",
    "hyp": "HypRF",
    "geom_plus": "GeomRF+",
    "pos": "PosRF",
    "pois_plus": "PoisRF+",
    "majority": "majority class",
}


def method_runs(options: str, sets: dict[str, str], sampler: str) -> list[PlannedRun]:
    maps = f"task=uci {options} sampler={sampler} features.m=128"
    return [
        *sweep(f"task=uci {options}", attention=["exact"], dataset=sets),
        *sweep(maps, dataset=sets, features=[*PAPER, *DOUBLE.values()]),
        *sweep(f"task=uci {options} attention=exact", method=BASELINES, dataset=sets),
    ]


def table1(repeats: int, draws: int) -> dict[str, list[PlannedRun]]:
    """Seed 1: no split was looked at before the number of splits was fixed."""
    sets = {name: f"task.dataset={name}" for name in SETS["table1"]}
    options = f"seed=1 task.draws={draws} task.repeats={repeats}"
    return {"table1": method_runs(options, sets, "iid")}


def average(rows: Rows, method: str, sweep_name: str = "table1") -> pd.Series:
    """split -> mean accuracy over the data sets, for the splits that all sets have."""
    frame = rows.select("accuracy_percent", method, sweep=sweep_name)
    splits = frame.pivot(index="sample", columns="dataset", values="value")
    return splits.reindex(columns=SETS[sweep_name]).dropna().astype(float).mean(axis=1)


def sweeps_in_rows(rows: Rows) -> list[str]:
    return [name for name in SETS if (rows.frame["sweep"] == name).any()]


def finding(rows: Rows) -> str:
    """Compare OPRF with three maps; on the data sets of the demo if the rows are those."""
    name, sets = "demo", f"{len(SETS['demo'])} data sets of scikit-learn"
    if "table1" in sweeps_in_rows(rows):
        name, sets = "table1", "eight UCI sets"
    gains = []
    for method in ("pos", "trig", "geom"):
        gain = average(rows, "oprf", name) - average(rows, method, name)
        if len(gain):
            gains.append(f"{METHODS[method]} {mean_ci(gain, overlap=OVERLAP[name]):+.1f}")
    if not gains:
        return ""
    return (
        f"On {sets}, the mean accuracy of OPRF minus that of another map is, in points: {', '.join(gains)} (128 "
        f"projections, 95% CI, n = {len(gain)} splits)."
    )


CHANCE = (
    "a difference of the paper below twice its standard error over the sets may be chance; GERF and HypRF have twice "
    "the columns at equal projections"
)
BARE = "a trigonometric map whose second factor is not conjugated estimates K(x, -y)"
COMPARISONS = {  # claim -> pairs of maps, explanation
    "OPRF has a higher average accuracy than the other non-trigonometric maps": (
        [("oprf", name) for name in ("pos", "gerf", "pois", "geom", "pois_plus", "geom_plus")],
        CHANCE,
    ),
    "the new maps have a higher average accuracy than PosRF": (
        [("gerf", "pos"), ("pois", "pos"), ("geom", "pos")],
        CHANCE,
    ),
    "PosRF has a higher average accuracy than PoisRF+ and GeomRF+": (
        [("pos", "pois_plus"), ("pos", "geom_plus")],
        CHANCE,
    ),
    "the non-trigonometric maps have a higher average accuracy than TrigRF": (
        [(name, "trig") for name in PAPER if name != "trig"],
        f"hypothesis on the paper's TrigRF (average 35.5): {BARE}, and has 35.9 here",
    ),
}


def paper_gain(better: str, worse: str) -> str:
    """The paper's averages, and their difference with its standard error over the data sets."""
    first = np.array(PAPER[better].split(), float)
    second = np.array(PAPER[worse].split(), float)
    gains = (first - second)[:-1]
    error = gains.std(ddof=1) / np.sqrt(len(gains))
    return f"{first[-1]} against {second[-1]}, {gains.mean():+.2f} ± {error:.2f} (standard error over sets)"


def claims(rows: Rows) -> list[Claim]:
    """Compare maps at 128 projections, and at 128 columns where these differ."""
    claims = []
    for text, (pairs, reason) in COMPARISONS.items():
        gains, paper = {}, {}
        for better, worse in pairs:
            name = f"{METHODS[better]} against {METHODS[worse]}"
            samples = {f"{name}, 128 projections": (better, worse)}
            if {better, worse} & {*DOUBLE}:
                halves = DOUBLE.get(better, better), DOUBLE.get(worse, worse)
                samples[f"{name}, 128 columns"] = halves
            for case, (first, second) in samples.items():
                gains[case] = (average(rows, first) - average(rows, second)).dropna()
                paper[case] = paper_gain(better, worse)
        overlap = OVERLAP["table1"]
        claims.append(Claim(text, gains, paper, unit="points", overlap=overlap, reason=reason))
    return claims


def at_128_columns(rows: Rows, sweep_name: str) -> dict[str, pd.Series]:
    averages = {}
    for method in METHODS:
        averages[method] = average(rows, DOUBLE.get(method, method), sweep_name)
    return averages


def average_table(rows: Rows, name: str) -> pd.DataFrame:
    columns = {
        "128 columns": at_128_columns(rows, name),
        "128 projections": {method: average(rows, method, name) for method in PAPER},
    }
    table = {}
    for title, averages in columns.items():
        table[title] = {}
        for method, values in averages.items():
            if len(values):
                table[title][METHODS[method]] = f"{mean_ci(values, overlap=OVERLAP[name]):.1f}"
    return pd.DataFrame(table).rename_axis("method")


def dataset_table(rows: Rows, name: str) -> pd.DataFrame:
    columns = {}
    for dataset in SETS[name]:
        columns[dataset] = {"metric": "accuracy_percent", "sweep": name, "dataset": dataset}
    return mean_table(rows, columns, METHODS, spec=".1f", overlap=OVERLAP[name])


def tables(rows: Rows) -> dict[str, pd.DataFrame]:
    tables = {}
    for name in sweeps_in_rows(rows):
        averages, accuracies = average_table(rows, name), dataset_table(rows, name)
        if name == "table1":
            for method, values in PAPER.items():
                *paper, paper_average = values.split()
                averages.loc[METHODS[method], "paper"] = paper_average
                accuracies.loc[f"{METHODS[method]}, paper"] = paper
        tables[f"Average accuracy over {len(SETS[name])} data sets, % ({name})"] = averages
        tables[f"Accuracy with m = 128, % ({name})"] = accuracies
    return tables


def figure(rows: Rows):
    names = sweeps_in_rows(rows)
    if not names:
        return None
    fig, axes = panels(len(names))
    for ax, name in zip(axes, names):
        dot_plot(ax, at_128_columns(rows, name), overlap=OVERLAP[name], labels=METHODS)
        ax.set(
            title=f"{len(SETS[name])} data sets, 128 columns ({name})",
            xlabel="average test accuracy, % (higher is better)",
        )
    return fig


page = Page(
    "crt_uci",
    title="CRT Table 1: classification by kernel regression",
    finding=finding,
    small={
        **table1(15, 2),
        "demo": method_runs(
            "task.split=[0.6,0.15,0.25] task.repeats=5 task.sigmas=[0.05,0.1,0.15,0.2,0.3,0.4,0.55,0.75,"
            "1.0]",
            {name: f"task.dataset={name}" for name in SETS["demo"]},
            "orthogonal",
        ),
    },
    full=table1(50, 10),
    reduced=False,
    columns=["dataset", "method"],
    metrics=["accuracy_percent"],
    measured=[
        "Test accuracy with a Gaussian kernel. Its bandwidth is tuned on validation; columns are standardised.",
        "Categories are 0/1 indicators; the paper states no coding. With ordered categories as integers (rows of "
        "commit f821739a) maps but TrigRF differed from the paper by 5.4 points on average, instead of 3.6.",
        "Maps have iid projections, as in the paper's formula (2), and orthogonal ones in the demo.",
        "TrigRF, GERF and HypRF make two columns of a projection. Claims compare them at 128 projections, as in the "
        "paper, and at 128 columns.",
        "table1: all rows of the official files, 15 random 90/5/5 splits, each the mean of 2 sets of projections. The "
        "number was fixed before the first of these splits was measured. demo: 5 random 60/15/25 splits.",
        "The paper's TrigRF column is near a constant predictor: wifi (15.2) is below chance, and car 66.3, yeast 29.7 "
        "and cmc 46.6 recur in other columns.",
        "Hypothesis: the second factor is not conjugated, so that the map estimates K(x, -y). Such a map has an "
        "average of 35.9 here (paper: 35.5), a correct one 61.0 (5 splits).",
        "Splits overlap: intervals are those of Nadeau and Bengio. Averages are over the splits of all sets.",
        "RBFSampler and Nystroem are scikit-learn's. Where GERF takes the sign +1, it equals OPRF.",
    ],
    tables=tables,
    claims=claims,
    figure=figure,
)
