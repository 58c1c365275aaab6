"""CRT Table 1: kernel regression on eight UCI data sets; `make demo` uses sets of scikit-learn."""

from itertools import product

import numpy as np
import pandas as pd

from crt_exp.experiments.papers.parts.uci_runs import (
    AT_128_COLUMNS,
    DOUBLE,
    FULL,
    LABELS,
    OVERLAP,
    PAPER,
    SETS,
    SMALL,
)
from crt_exp.experiments.report import (
    Claim,
    Page,
    Rows,
    Tables,
    dot_plot,
    filters_over,
    label,
    mean_ci,
    mean_table,
    panels,
)


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
