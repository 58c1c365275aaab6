"""Performers Figure 14: errors through the layers of a model."""

import pandas as pd

from crt_exp.experiments.papers.parts.small_encoders import ENCODERS
from crt_exp.experiments.report import (
    Claim,
    PlannedRun,
    Rows,
    line_plot,
    mean_table,
    sweep,
)

METHODS = {
    "trig m=256": "trigonometric",
    "pos m=256": "FAVOR+",
    "oprf m=256": "FAVOR++",
    "uniform": "uniform",
}
CASES = {
    "random weights, |x + y|^2 = 16": {"model": "random", "sum": 16},
    "random weights, |x + y|^2 = 4": {"model": "random", "sum": 4},
    "trained encoder": {"model": "trained"},
}


def layer_runs(seeds: int, **axes) -> list[PlannedRun]:
    """Errors of feature maps and of uniform attention."""
    features = [method for method in METHODS if method != "uniform"]
    return [
        *sweep("task=error_by_layer", **axes, features=features, seed=range(seeds)),
        *sweep("task=error_by_layer", **axes, attention=["uniform"], seed=range(seeds)),
    ]


RUNS = [
    *layer_runs(24, model="random", **{"task.sum": [16, 4]}),
    *layer_runs(8, model={"trained": "task.init={runs}/encoder/34_0 task.length=34"}),
]
JUDGED = ["pos m=256", "trig m=256"]
GROWS = {"above": 1, "log": True, "needs": "more samples"}
MODELS = {"encoder": ENCODERS["characters-16"].pretraining("encoder")}


def claims(rows: Rows) -> list[Claim]:
    claims = []
    for method in JUDGED:
        text = f"{METHODS[method]}: the error grows through layers"
        growth = {}
        for case, where in CASES.items():
            growth[case] = rows.values("growth", method, log=True, **where)
        paper = "errors propagate, no number"
        claims.append(Claim(text, growth, paper, **GROWS))
    for method in JUDGED:
        text = (
            f"{METHODS[method]}: the error grows through layers, more than with uniform attention"
        )
        growth = rows.paired_by_case(method, "uniform", "growth", CASES, log=True)
        claims.append(Claim(text, growth, **GROWS, reason="errors of uniform attention grow too"))
    return claims


def table(rows: Rows) -> pd.DataFrame:
    columns = {case: {"metric": "growth", **where} for case, where in CASES.items()}
    return mean_table(rows, columns, METHODS, geometric=True)


def plot_layers(ax, rows: Rows) -> None:
    where = {"model": "random", "sum": 16}
    line_plot(ax, rows, "layer", "error", METHODS, log="y", geometric=True, **where)
    title = "Figure 14: random weights, |x + y|^2 = 16"
    ax.set(title=title, xlabel="layers", ylabel="relative error of hidden states")
