"""Performers Figures 2, 4 and 14: error of estimates, of attention, and through layers."""

import pandas as pd

from crt_exp.experiments.papers.parts import head_errors
from crt_exp.experiments.papers.parts.small_encoders import ENCODERS
from crt_exp.experiments.report import (
    HOME,
    Claim,
    Page,
    PlannedRun,
    Rows,
    Tables,
    line_plot,
    mean_table,
    panels,
    sweep,
)

FEATURES = {f"{name} m=256": text for name, text in head_errors.MAPS.items()}
PROPAGATED = ("pos m=256", "trig m=256")
LAYERED = {**FEATURES, "uniform": "uniform"}
LENGTHS = [0.5, 1, 2]
TRAINED = {"trained": f"task.init={HOME}/encoder/34_0 task.length=34"}


def layer_runs(seeds: int, **axes) -> list[PlannedRun]:
    """Errors through the layers of a model, of feature maps and of uniform attention."""
    return [
        *sweep("task=error_by_layer", **axes, features=FEATURES, seed=range(seeds)),
        *sweep("task=error_by_layer", **axes, attention=["uniform"], seed=range(seeds)),
    ]


ANGLES = {"features": ["pos", "oprf"], "task.length": LENGTHS}
SMALL = {
    "performers-fig2": sweep("task=variance_by_angle", **ANGLES),
    **head_errors.SWEEPS,
    "performers-fig14": [
        *layer_runs(24, model="random", **{"task.sum": [16, 4]}),
        *layer_runs(8, model=TRAINED),
    ],
}
MODELS = {
    "random weights, |x + y|^2 = 16": {"model": "random", "sum": 16},
    "random weights, |x + y|^2 = 4": {"model": "random", "sum": 4},
    "trained encoder": {"model": "trained"},
}


def claims(rows: Rows) -> list[Claim]:
    closed_forms = {}
    for length in LENGTHS:
        values = rows.values("log_ratio", "pos", length=length, angle=120)
        if len(values):
            closed_forms[f"length {length}"] = values.item()
    claims = [
        Claim(
            "positive features have less error than trigonometric ones at 120 degrees",
            closed_forms,
            "where kernel values are small",
            above=0,
            power=True,
            reason="its error is proportional to a power of the kernel itself",
        ),
        *head_errors.claims(rows),
    ]
    ratio = {"log": True, "needs": "more samples"}
    for method in PROPAGATED:
        text = f"{LAYERED[method]}: the error grows through layers"
        growth = {}
        for model, where in MODELS.items():
            growth[model] = rows.values("growth", method, log=True, **where)
        claims.append(Claim(text, growth, "errors propagate, no number", above=1, **ratio))
    for method in PROPAGATED:
        text = (
            f"{LAYERED[method]}: the error grows through layers, more than with uniform attention"
        )
        ratios = rows.paired_by_case(method, "uniform", "growth", MODELS, log=True)
        reason = "errors of uniform attention grow too"
        claims.append(Claim(text, ratios, above=1, reason=reason, **ratio))
    return claims


def tables(rows: Rows) -> Tables:
    growth = {model: {"metric": "growth", **where} for model, where in MODELS.items()}
    title = "Figure 14: error after the last layer over error after the first, with 95% CI"
    growth_table = mean_table(rows, growth, LAYERED, geometric=True)
    return {**head_errors.tables(rows), title: growth_table}


def figure(rows: Rows):
    fig, (left, few, many, right) = panels(4, columns=2)
    degrees = pd.to_numeric(rows.frame["angle"], errors="coerce")
    angles = Rows(rows.frame[degrees.between(0, 150)])
    line_plot(left, angles, "angle", "log_ratio", {"pos": "FAVOR+", "oprf": "FAVOR++"}, length=1)
    left.axhline(0, color="black", lw=1)
    left.set(title="Figure 2: MSE of trigonometric features / MSE")
    left.set(xlabel="angle of x and y, degrees", ylabel="log ratio at length 1 (higher is better)")
    head_errors.plot_heads(few, rows, 2)
    head_errors.plot_heads(many, rows, 8)
    where = {"model": "random", "sum": 16}
    line_plot(right, rows, "layer", "error", LAYERED, log="y", geometric=True, **where)
    right.set(title="Figure 14: random weights, |x + y|^2 = 16")
    right.set(xlabel="layers", ylabel="relative error of hidden states")
    return fig


page = Page(
    "perf_error",
    title="Performers Figures 2, 4 and 14: error of estimates, of attention, and through layers",
    finding=head_errors.finding,
    small=SMALL,
    full=SMALL,
    reduced=False,
    models={"encoder": ENCODERS["characters-16"].pretraining("encoder")},
    columns=["length", "angle", "heads", "model", "sum", "m", "layer", "method"],
    metrics=["log_ratio", "mse", "error", "growth"],
    measured=[
        "Figure 2: closed forms at equal numbers of projections. FAVOR++ is fitted to each pair.",
        "Figure 4: one head, d = 16. Gaussian heads: L = 4096, independent q and k. Matched heads: L = 256, each "
        "query is the key at its position turned by 0.3 radians.",
        'The paper has "appropriately normalized" inputs of unstated scale. N(0, 1) entries give |x + y|^2 = 8, where '
        "its claims are judged, at each m. There all methods have more error than uniform attention.",
        "Figure 4: 15 samples of data and projections, 150 at m = 256, in tables and figure. Claims and finding use "
        "600 fresh samples at each m: the first ones had left them undecided.",
        "Figure 14: 24 samples (8 of the trained encoder), orthogonal projections. Random weights: 12 layers, 8 "
        "heads of d = 64, 512 tokens. "
        "Trained encoder: a BERT of characters with 3 layers on WikiText-2, 34 tokens.",
    ],
    tables=tables,
    claims=claims,
    figure=figure,
)
