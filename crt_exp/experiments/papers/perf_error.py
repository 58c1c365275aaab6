"""Performers: errors of kernel estimates, of attention, and through layers.

Reproduces Figures 2, 4 and 14.
"""

import numpy as np
import pandas as pd

from crt_exp.experiments.report import (
    Claim,
    Page,
    PlannedRun,
    Rows,
    filters_over,
    geometric_interval,
    geometric_mean_ci,
    line_plot,
    mean_table,
    panels,
    sweep,
)
from crt_exp.experiments.report.small_models import ENCODERS

COMPARED = {}
for name, text in {"trig": "trigonometric", "pos": "FAVOR+", "oprf": "FAVOR++"}.items():
    for sampler in ["iid", "orthogonal"]:
        COMPARED[f"{name} sampler={sampler}"] = f"{text}, {sampler}"
NEARFAR = {"nearfar exact_until=0": "near-far"}
LAYERED = {
    "trig m=256": "trigonometric",
    "pos m=256": "FAVOR+",
    "oprf m=256": "FAVOR++",
    "uniform": "uniform",
}
HEADS = {"Gaussian": "task.length=4096", "matched": "task.length=256 task.turn=0.3"}
SUMS = [1, 2, 4, 8, 16, 24]
MODELS = {
    "random weights, |x + y|^2 = 16": {"model": "random", "sum": 16},
    "random weights, |x + y|^2 = 4": {"model": "random", "sum": 4},
    "trained encoder": {"model": "trained"},
}
HEAD = {
    "options": "task=head_errors",
    "heads": HEADS,
    "task.sum": SUMS,
    "samples": {
        "15": "task.samples=15 task.ms=[8,16,32,64,128]",
        "150": "task.samples=150 task.ms=[256]",
    },
}

JUDGED = sweep(  # fresh samples, for the claims on Figure 4
    "task=head_errors task.length=4096 task.samples=600 seed=1",
    heads="Gaussian",
    **{"task.sum": [8]},
    features=COMPARED,
)


def layer_runs(seeds: int, **axes) -> list[PlannedRun]:
    """Errors through the layers of a model, of feature maps and of uniform attention."""
    features = [method for method in LAYERED if method != "uniform"]
    return [
        *sweep("task=error_by_layer", **axes, features=features, seed=range(seeds)),
        *sweep("task=error_by_layer", **axes, attention=["uniform"], seed=range(seeds)),
    ]


small = {
    "performers-fig2": sweep(
        "task=variance_by_angle", features=["pos", "oprf"], **{"task.length": [0.5, 1, 2]}
    ),
    "performers-fig4": sweep(**HEAD, features=COMPARED) + sweep(**HEAD, attention=NEARFAR),
    "performers-fig4/judged": JUDGED,
    "performers-fig14": [
        *layer_runs(24, model="random", **{"task.sum": [16, 4]}),
        *layer_runs(8, model={"trained": "task.init={runs}/encoder/34_0 task.length=34"}),
    ],
}


def finding(rows: Rows) -> str:
    ratios = {}
    for m in (8, 256):
        settings = {8: AT_SCALE[f"m = {m}"], 4: {**FIGURE, "heads": "Gaussian", "sum": 4, "m": m}}
        for value, where in settings.items():
            ratio = rows.ratio("pos sampler=iid", "trig sampler=iid", "mse", **where)
            ratios[value, m] = f"{geometric_interval(np.exp(ratio), '.2g')} (n = {len(ratio)})"
    return (
        "On Gaussian heads with iid projections, the MSE of attention with FAVOR+ over that with trigonometric "
        f"features is {ratios[8, 8]} with m = 8 and {ratios[8, 256]} with m = 256 at |x + y|^2 = 8, the scale of "
        f"N(0, 1) inputs. At |x + y|^2 = 4 the ratio is {ratios[4, 8]} and {ratios[4, 256]} (95% CI)."
    )


MS = [8, 16, 32, 64, 128, 256]
FIGURE = {"sweep": "performers-fig4"}
AT_SCALE = filters_over("m", MS, "m = {}", sweep="performers-fig4/judged")
FIGURE_4 = {  # claim -> methods
    "FAVOR+: orthogonal below iid": ("pos orthogonal", "pos iid"),
    "trigonometric: orthogonal below iid": ("trig orthogonal", "trig iid"),
    "iid: FAVOR+ below trigonometric": ("pos iid", "trig iid"),
    "orthogonal: FAVOR+ below trigonometric": ("pos orthogonal", "trig orthogonal"),
}


def claims(rows: Rows) -> list[Claim]:
    closed_forms = {}
    for length in [0.5, 1, 2]:
        values = rows.values("log_ratio", "pos", length=length, angle=120)
        if len(values):
            closed_forms[f"length {length}"] = values.item()
    claims = [
        Claim(
            "positive features have less error than trigonometric ones at 120 degrees",
            closed_forms,
            above=0,
            power=True,
            paper="where kernel values are small",
            reason="its error is proportional to a power of the kernel itself",
        )
    ]
    for text, methods in FIGURE_4.items():
        first, second = (method.replace(" ", " sampler=") for method in methods)
        claims.append(
            Claim(
                f"MSE of attention at |x + y|^2 = 8, {text}",
                rows.paired_by_case(first, second, "mse", AT_SCALE, log=True),
                below=1,
                log=True,
                paper="below",
                needs="more samples",
            )
        )
    largest = {"m = 256": AT_SCALE["m = 256"]}
    methods = "oprf sampler=orthogonal", "oprf sampler=iid"
    claims.append(
        Claim(
            "MSE of attention at |x + y|^2 = 8, FAVOR++: orthogonal below iid",
            rows.paired_by_case(*methods, "mse", largest, log=True),
            below=1,
            log=True,
        )
    )
    for baseline, words in {"": "", "uniform": ", more than with uniform attention"}.items():
        for method in ["pos m=256", "trig m=256"]:
            claims.append(
                Claim(
                    f"{LAYERED[method]}: the error grows through layers{words}",
                    growth(rows, method, baseline),
                    above=1,
                    log=True,
                    paper="" if baseline else "errors propagate, no number",
                    reason="errors of uniform attention grow too" if baseline else "",
                    needs="more samples",
                )
            )
    return claims


def growth(rows: Rows, method: str, baseline: str) -> dict[str, pd.Series]:
    """Log growth of the error through layers by model, relative to a baseline if there is one."""
    growth = {}
    for name, where in MODELS.items():
        if baseline:
            growth[name] = rows.ratio(method, baseline, "growth", **where)
        else:
            growth[name] = rows.values("growth", method, log=True, **where)
    return growth


def two_digits(values: pd.Series) -> str:
    mean = geometric_mean_ci(values)[0]
    return f"{float(f'{mean:.2g}'):,.9g}"


def interval(values: pd.Series) -> str:
    return geometric_interval(values, ".3g")


def ratio_table(rows: Rows, heads: str, first: str, second: str) -> pd.DataFrame:
    """Ratio of the MSE of two methods by m (rows) and |x + y|^2 (columns), with 95% CI."""
    table = {}
    for value in SUMS:
        column = table.setdefault(f"{heads}, {value}", {})
        for m in MS:
            ratio = rows.ratio(first, second, "mse", **FIGURE, heads=heads, sum=value, m=m)
            column[f"m = {m}"] = geometric_interval(np.exp(ratio), ".2g")
    return pd.DataFrame(table).rename_axis("projections")


def head_columns(heads: str, sums: list[int]) -> dict[str, dict]:
    return filters_over("sum", sums, heads + ", {}", metric="mse", **FIGURE, heads=heads, m=256)


def tables(rows: Rows) -> dict[str, pd.DataFrame]:
    methods = COMPARED | NEARFAR
    columns = head_columns("Gaussian", [2, 8, 24]) | head_columns("matched", [2, 8, 24])
    title = "Figure 4: MSE relative to uniform attention (lower is better), m = 256, by |x + y|^2"
    tables = {title: mean_table(rows, columns, methods, format=two_digits)}
    for heads in HEADS:
        tables[f"Figure 4, {heads} heads: the same with 95% CI"] = mean_table(
            rows, head_columns(heads, SUMS), methods, format=interval
        )
    for heads in HEADS:
        title = f"Figure 4, {heads} heads: MSE of FAVOR+ over that of trigonometric features, iid"
        methods = "pos sampler=iid", "trig sampler=iid"
        tables[title] = ratio_table(rows, heads, *methods)
    columns = {name: {"metric": "growth", **where} for name, where in MODELS.items()}
    title = "Figure 14: error after the last layer over error after the first, with 95% CI"
    tables[title] = mean_table(rows, columns, LAYERED, format=interval)
    return tables


def figure(rows: Rows):
    fig, axes = panels(4, columns=2)
    degrees = pd.to_numeric(rows.frame["angle"], errors="coerce")
    angles = Rows(rows.frame[degrees.between(0, 150)])
    line_plot(axes[0], angles, "angle", "log_ratio", {"pos": "FAVOR+", "oprf": "FAVOR++"}, length=1)
    axes[0].axhline(0, color="black", lw=1)
    axes[0].set(
        title="Figure 2: MSE of trigonometric features / MSE",
        xlabel="angle of x and y, degrees",
        ylabel="log ratio at length 1 (higher is better)",
    )
    style = {"geometric": True, "dotted": [name for name in COMPARED if name.endswith("iid")]}
    for ax, value in zip(axes[1:3], [2, 8]):
        ax.axhline(1, color="grey", lw=1, ls="--", label="uniform attention")
        where = {**FIGURE, "heads": "Gaussian", "sum": value}
        line_plot(ax, rows, "m", "mse", COMPARED | NEARFAR, log="xy", **style, **where)
        title = f"Figure 4: Gaussian heads, |x + y|^2 = {value}"
        ax.set(title=title, xlabel="projections m", ylabel="MSE relative to uniform attention")
        ax.legend(loc="upper right", fontsize=8, frameon=False)
    where = {"model": "random", "sum": 16}
    line_plot(axes[3], rows, "layer", "error", LAYERED, log="y", geometric=True, **where)
    title = "Figure 14: random weights, |x + y|^2 = 16"
    axes[3].set(title=title, xlabel="layers", ylabel="relative error of hidden states")
    return fig


page = Page(
    "perf_error",
    title="Performers Figures 2, 4 and 14: error of estimates, of attention, and through layers",
    finding=finding,
    small=small,
    full=small,
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
