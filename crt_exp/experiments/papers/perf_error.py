"""Performers Figures 2, 4 and 14: error of estimates, of attention, and through layers."""

import pandas as pd
from scipy.stats import gmean

from crt_exp.experiments.papers.parts.small_encoders import ENCODERS
from crt_exp.experiments.report import (
    HOME,
    Claim,
    Page,
    PlannedRun,
    Rows,
    Tables,
    filters_over,
    line_plot,
    mean_table,
    panels,
    ratio_interval,
    sweep,
)

MAPS = {"trig": "trigonometric", "pos": "FAVOR+", "oprf": "FAVOR++"}
COMPARED = {}
for name, text in MAPS.items():
    for sampler in ("iid", "orthogonal"):
        COMPARED[f"{name} sampler={sampler}"] = f"{text}, {sampler}"
NEARFAR = {"nearfar exact_until=0": "near-far"}
METHODS = COMPARED | NEARFAR
PAIR = "pos sampler=iid", "trig sampler=iid"
MS = [8, 16, 32, 64, 128, 256]
SUMS = [1, 2, 4, 8, 16, 24]
HEADS = {"Gaussian": "task.length=4096", "matched": "task.length=256 task.turn=0.3"}
SAMPLES = {
    "15": "task.samples=15 task.ms=[8,16,32,64,128]",
    "150": "task.samples=150 task.ms=[256]",
}
AXES = {"heads": HEADS, "task.sum": SUMS, "samples": SAMPLES}
JUDGED = "task=head_errors task.length=4096 task.samples=600 seed=1"  # fresh samples, for claims

FEATURES = {f"{name} m=256": text for name, text in MAPS.items()}
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
    "performers-fig4": [
        *sweep("task=head_errors", **AXES, features=COMPARED),
        *sweep("task=head_errors", **AXES, attention=NEARFAR),
    ],
    "performers-fig4/judged": sweep(
        JUDGED, heads="Gaussian", **{"task.sum": [8]}, features=COMPARED
    ),
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

FIGURE = {"sweep": "performers-fig4"}
AT_SCALE = filters_over("m", MS, "m = {}", sweep="performers-fig4/judged")


def finding(rows: Rows) -> str:
    texts = {}
    for m in (8, 256):
        settings = {8: AT_SCALE[f"m = {m}"], 4: {**FIGURE, "heads": "Gaussian", "sum": 4, "m": m}}
        for value, where in settings.items():
            ratio = rows.ratio(*PAIR, "mse", **where)
            texts[value, m] = f"{ratio_interval(ratio, '.2g')} (n = {len(ratio)})"
    return (
        "On Gaussian heads with iid projections, the MSE of attention with FAVOR+ over that with trigonometric "
        f"features is {texts[8, 8]} with m = 8 and {texts[8, 256]} with m = 256 at |x + y|^2 = 8, the scale of "
        f"N(0, 1) inputs. At |x + y|^2 = 4 the ratio is {texts[4, 8]} and {texts[4, 256]} (95% CI)."
    )


COMPARISONS = {  # claim -> methods
    "FAVOR+: orthogonal below iid": ("pos sampler=orthogonal", "pos sampler=iid"),
    "trigonometric: orthogonal below iid": ("trig sampler=orthogonal", "trig sampler=iid"),
    "iid: FAVOR+ below trigonometric": PAIR,
    "orthogonal: FAVOR+ below trigonometric": ("pos sampler=orthogonal", "trig sampler=orthogonal"),
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
        )
    ]
    ratio = {"log": True, "needs": "more samples"}
    for comparison, methods in COMPARISONS.items():
        text = f"MSE of attention at |x + y|^2 = 8, {comparison}"
        ratios = rows.paired_by_case(*methods, "mse", AT_SCALE, log=True)
        claims.append(Claim(text, ratios, "below", below=1, **ratio))
    text = "MSE of attention at |x + y|^2 = 8, FAVOR++: orthogonal below iid"
    methods = "oprf sampler=orthogonal", "oprf sampler=iid"
    mse = {"m = 256": rows.ratio(*methods, "mse", **AT_SCALE["m = 256"])}
    claims.append(Claim(text, mse, below=1, log=True))
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


def two_digits(values: pd.Series) -> str:
    return f"{float(f'{gmean(values):.2g}'):,.9g}"


def columns(heads: str, sums: list[int]) -> dict[str, dict]:
    return filters_over("sum", sums, heads + ", {}", metric="mse", **FIGURE, heads=heads, m=256)


def ratio_table(rows: Rows, heads: str) -> pd.DataFrame:
    """MSE of FAVOR+ over that of trigonometric features by m (rows) and |x + y|^2 (columns)."""
    table = {}
    for value in SUMS:
        cases = filters_over("m", MS, "m = {}", **FIGURE, heads=heads, sum=value)
        ratios = rows.paired_by_case(*PAIR, "mse", cases, log=True)
        texts = {case: ratio_interval(ratio, ".2g") for case, ratio in ratios.items()}
        table[f"{heads}, {value}"] = texts
    return pd.DataFrame(table).rename_axis("projections")


def tables(rows: Rows) -> Tables:
    selected = columns("Gaussian", [2, 8, 24]) | columns("matched", [2, 8, 24])
    title = "Figure 4: MSE relative to uniform attention (lower is better), m = 256, by |x + y|^2"
    tables = {title: mean_table(rows, selected, METHODS, format=two_digits)}
    for heads in HEADS:
        title = f"Figure 4, {heads} heads: the same with 95% CI"
        tables[title] = mean_table(rows, columns(heads, SUMS), METHODS, geometric=True)
    for heads in HEADS:
        title = f"Figure 4, {heads} heads: MSE of FAVOR+ over that of trigonometric features, iid"
        tables[title] = ratio_table(rows, heads)
    growth = {model: {"metric": "growth", **where} for model, where in MODELS.items()}
    title = "Figure 14: error after the last layer over error after the first, with 95% CI"
    tables[title] = mean_table(rows, growth, LAYERED, geometric=True)
    return tables


def plot_heads(ax, rows: Rows, value: int) -> None:
    """Error against m on Gaussian heads with a value of |x + y|^2."""
    ax.axhline(1, color="grey", lw=1, ls="--", label="uniform attention")
    style = {"geometric": True, "dotted": [name for name in COMPARED if name.endswith("iid")]}
    where = {**FIGURE, "heads": "Gaussian", "sum": value}
    line_plot(ax, rows, "m", "mse", METHODS, log="xy", **style, **where)
    title = f"Figure 4: Gaussian heads, |x + y|^2 = {value}"
    ax.set(title=title, xlabel="projections m", ylabel="MSE relative to uniform attention")
    ax.legend(loc="upper right", fontsize=8, frameon=False)


def figure(rows: Rows):
    fig, (left, few, many, right) = panels(4, columns=2)
    degrees = pd.to_numeric(rows.frame["angle"], errors="coerce")
    angles = Rows(rows.frame[degrees.between(0, 150)])
    line_plot(left, angles, "angle", "log_ratio", {"pos": "FAVOR+", "oprf": "FAVOR++"}, length=1)
    left.axhline(0, color="black", lw=1)
    left.set(title="Figure 2: MSE of trigonometric features / MSE")
    left.set(xlabel="angle of x and y, degrees", ylabel="log ratio at length 1 (higher is better)")
    plot_heads(few, rows, 2)
    plot_heads(many, rows, 8)
    where = {"model": "random", "sum": 16}
    line_plot(right, rows, "layer", "error", LAYERED, log="y", geometric=True, **where)
    right.set(title="Figure 14: random weights, |x + y|^2 = 16")
    right.set(xlabel="layers", ylabel="relative error of hidden states")
    return fig


page = Page(
    "perf_error",
    title="Performers Figures 2, 4 and 14: error of estimates, of attention, and through layers",
    finding=finding,
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
