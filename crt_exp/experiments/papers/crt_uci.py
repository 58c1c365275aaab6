"""CRT Table 1: kernel regression on eight UCI data sets.

`make demo` uses the data sets that scikit-learn includes.
"""

import numpy as np
import pandas as pd

from crt_exp.experiments.papers.parts.uci_runs import (
    AT_128_COLUMNS,
    DOUBLE,
    METHODS,
    OVERLAP,
    SETS,
    demo,
    table1,
)
from crt_exp.experiments.report import (
    Claim,
    Page,
    Rows,
    Tables,
    dot_plot,
    filters_over,
    mean_ci,
    mean_table,
    panels,
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


def averages(rows: Rows, name: str = "table1") -> Rows:
    """Mean accuracy over the data sets of a sweep, for the splits that all sets have."""
    frame = rows.select("accuracy_percent", sweep=name)
    splits = frame.pivot(index=["method", "sample"], columns="dataset", values="value")
    means = splits.reindex(columns=SETS[name]).dropna().astype(float).mean(axis=1)
    return Rows(means.rename("value").reset_index().assign(metric="average"))


def sweeps_in_rows(rows: Rows) -> list[str]:
    return [name for name in SETS if (rows.frame["sweep"] == name).any()]


def finding(rows: Rows) -> str:
    """Compare OPRF with three maps; on the data sets of the demo if the rows are those."""
    name, sets = "demo", f"{len(SETS['demo'])} data sets of scikit-learn"
    if "table1" in sweeps_in_rows(rows):
        name, sets = "table1", "eight UCI sets"
    gains = []
    for method in ("pos", "trig", "geom"):
        gain = averages(rows, name).paired("oprf", method, "average")
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
    means = averages(rows)
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
                gains[case] = means.paired(first, second, "average")
                paper[case] = paper_gain(better, worse)
        overlap = OVERLAP["table1"]
        claims.append(Claim(text, gains, paper, unit="points", overlap=overlap, reason=reason))
    return claims


def average_table(rows: Rows, name: str) -> pd.DataFrame:
    means = averages(rows, name)
    maps = {method: METHODS[method] for method in PAPER}
    tables = []
    for title, methods in {"128 columns": AT_128_COLUMNS, "128 projections": maps}.items():
        column = {title: {"metric": "average"}}
        tables.append(mean_table(means, column, methods, spec=".1f", overlap=OVERLAP[name]))
    return pd.concat(tables, axis=1)


def dataset_table(rows: Rows, name: str) -> pd.DataFrame:
    columns = filters_over("dataset", SETS[name], metric="accuracy_percent", sweep=name)
    return mean_table(rows, columns, METHODS, spec=".1f", overlap=OVERLAP[name])


def tables(rows: Rows) -> Tables:
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
        means = averages(rows, name).by_method("average", AT_128_COLUMNS)
        dot_plot(ax, means, overlap=OVERLAP[name], labels=AT_128_COLUMNS)
        ax.set_title(f"{len(SETS[name])} data sets, 128 columns ({name})")
        ax.set_xlabel("average test accuracy, % (higher is better)")
    return fig


page = Page(
    "crt_uci",
    title="CRT Table 1: classification by kernel regression",
    finding=finding,
    small={**table1(15, 2), **demo()},
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
