"""CRT Table 1: kernel regression on eight UCI data sets; `make demo` uses sets of scikit-learn."""

from itertools import product

import numpy as np
import pandas as pd

from crt_exp.experiments.report import (
    Claim,
    Page,
    PlannedRun,
    Rows,
    Tables,
    dot_plot,
    filters_over,
    label,
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
DOUBLE = {name: f"{name} m=64" for name in ("trig", "gerf", "hyp")}  # two columns of a projection
BASELINES = ["Nystroem m=128", "RBFSampler m=128", "majority"]
METHODS = ["exact", "Nystroem m=128", "geom", "oprf", "trig", "pois", "RBFSampler m=128", "gerf"]
METHODS += ["hyp", "geom_plus", "pos", "pois_plus", "majority"]
LABELS = {method: label(method.removesuffix(" m=128")) for method in METHODS}
LABELS["majority"] = "majority class"
AT_128_COLUMNS = {DOUBLE.get(method, method): name for method, name in LABELS.items()}


def method_runs(name: str, options: str, sampler: str) -> list[PlannedRun]:
    sets = {"task.dataset": SETS[name]}
    maps = f"task=uci {options} sampler={sampler} features.m=128"
    baselines = {method: quoted_override("task.baseline", method) for method in BASELINES}
    return [
        *sweep(f"task=uci {options}", attention=["exact"], **sets),
        *sweep(maps, **sets, features=[*PAPER, *DOUBLE.values()]),
        *sweep(f"task=uci {options} attention=exact", method=baselines, **sets),
    ]


SEED = "seed=1"  # no split of this seed was looked at before the number of splits was fixed
DEMO = "task.split=[0.6,0.15,0.25] task.repeats=5 task.sigmas=[0.05,0.1,0.15,0.2,0.3,0.4,0.55,0.75,1.0]"
SMALL = {
    "table1": method_runs("table1", f"{SEED} task.draws=2 task.repeats=15", "iid"),
    "demo": method_runs("demo", DEMO, "orthogonal"),
}
FULL = {"table1": method_runs("table1", f"{SEED} task.draws=10 task.repeats=50", "iid")}


def sweeps_in_rows(rows: Rows) -> list[str]:
    return [name for name in SETS if (rows.frame["sweep"] == name).any()]


def averages(rows: Rows, name: str) -> Rows:
    """Mean accuracy over the data sets of a sweep, for the splits that all sets have."""
    frame = rows.select("accuracy_percent", sweep=name)
    splits = frame.pivot(index=["method", "sample"], columns="dataset", values="value")
    means = splits.reindex(columns=SETS[name]).dropna().astype(float).mean(axis=1)
    return Rows(means.rename("value").reset_index().assign(metric="average"))


def finding(rows: Rows) -> str:
    """Compare OPRF with three maps; on the data sets of the demo if the rows are those."""
    sources = {"table1": "eight UCI sets", "demo": "4 data sets of scikit-learn"}
    for name in sweeps_in_rows(rows):
        means = averages(rows, name)
        gains = []
        for method in ("pos", "trig", "geom"):
            gain = means.paired("oprf", method, "average")
            if len(gain):
                gains.append(f"{label(method)} {mean_ci(gain, overlap=OVERLAP[name]):+.1f}")
        if gains:
            return (
                f"On {sources[name]}, the mean accuracy of OPRF minus that of another map is, in points: "
                f"{', '.join(gains)} (128 projections, 95% CI, n = {len(gain)} splits)."
            )
    return ""


CHANCE = "a difference of the paper below twice its standard error over the sets may be chance"
BARE = "hypothesis on the paper's TrigRF: without the conjugate of its second factor the average is 35.9 here"
NEW = ["gerf", "pois", "geom"]
PLUS = ["pois_plus", "geom_plus"]
COMPARISONS = [  # better maps, worse maps
    ("OPRF has", ["oprf"], "the other non-trigonometric maps", ["pos", *NEW, *PLUS]),
    ("the new maps have", NEW, "PosRF", ["pos"]),
    ("PosRF has", ["pos"], "PoisRF+ and GeomRF+", PLUS),
    ("the non-trigonometric maps have", ["pos", *NEW, "oprf", *PLUS], "TrigRF", ["trig"]),
]


def paper_gain(better: str, worse: str) -> str:
    """The paper's averages, and their difference with its standard error over the data sets."""
    first = np.array(PAPER[better].split(), float)
    second = np.array(PAPER[worse].split(), float)
    gains = (first - second)[:-1]
    error = gains.std(ddof=1) / np.sqrt(len(gains))
    return f"{first[-1]} against {second[-1]}, {gains.mean():+.2f} ± {error:.2f} (standard error over sets)"


def claims(rows: Rows) -> list[Claim]:
    """Compare maps at 128 projections, and at 128 columns where these differ."""
    means = averages(rows, "table1")
    claims = []
    for subject, betters, others, worses in COMPARISONS:
        gains, paper = {}, {}
        for better, worse in product(betters, worses):
            pairs = {"projections": (better, worse)}
            if {better, worse} & {*DOUBLE}:
                pairs["columns"] = DOUBLE.get(better, better), DOUBLE.get(worse, worse)
            for unit, (first, second) in pairs.items():
                case = f"{label(better)} against {label(worse)}, 128 {unit}"
                gains[case] = means.paired(first, second, "average")
                paper[case] = paper_gain(better, worse)
        text = f"{subject} a higher average accuracy than {others}"
        reason = BARE if others == "TrigRF" else CHANCE
        overlap = OVERLAP["table1"]
        claims.append(Claim(text, gains, paper, unit="points", overlap=overlap, reason=reason))
    return claims


def average_table(rows: Rows, name: str) -> pd.DataFrame:
    means = averages(rows, name)
    maps = {method: LABELS[method] for method in PAPER}
    columns = []
    for title, methods in {"128 columns": AT_128_COLUMNS, "128 projections": maps}.items():
        column = {title: {"metric": "average"}}
        columns.append(mean_table(means, column, methods, spec=".1f", overlap=OVERLAP[name]))
    return pd.concat(columns, axis=1)


def tables(rows: Rows) -> Tables:
    tables = {}
    for name in sweeps_in_rows(rows):
        where = {"metric": "accuracy_percent", "sweep": name}
        columns = filters_over("dataset", SETS[name], **where)
        averages = average_table(rows, name)
        accuracies = mean_table(rows, columns, LABELS, spec=".1f", overlap=OVERLAP[name])
        if name == "table1":
            for method, values in PAPER.items():
                *paper, paper_average = values.split()
                averages.loc[LABELS[method], "paper"] = paper_average
                accuracies.loc[f"{LABELS[method]}, paper"] = paper
        tables[f"Average accuracy over {len(SETS[name])} data sets, % ({name})"] = averages
        tables[f"Accuracy with m = 128, % ({name})"] = accuracies
    return tables


def figure(rows: Rows):
    names = sweeps_in_rows(rows)
    if not names:
        return None
    fig, axes = panels(len(names))
    for ax, name in zip(axes, names):
        means = averages(rows, name).by_method("average", AT_128_COLUMNS)
        dot_plot(ax, means, overlap=OVERLAP[name], labels=AT_128_COLUMNS)
        ax.set(title=f"{len(SETS[name])} data sets, 128 columns ({name})")
        ax.set(xlabel="average test accuracy, % (higher is better)")
    return fig


page = Page(
    "crt_uci",
    title="CRT Table 1: classification by kernel regression",
    finding=finding,
    small=SMALL,
    full=FULL,
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
