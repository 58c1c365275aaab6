"""Performers: errors of kernel estimates, of attention, and through layers.

Reproduces Figures 2, 4 and 14.
"""

import pandas as pd

from crt_exp.experiments.papers.parts import layer_errors
from crt_exp.experiments.report import (
    Claim,
    Page,
    Rows,
    Tables,
    filters_over,
    geometric_mean_ci,
    line_plot,
    mean_table,
    panels,
    ratio_interval,
    sweep,
)

COMPARED = {}
for name, text in {"trig": "trigonometric", "pos": "FAVOR+", "oprf": "FAVOR++"}.items():
    for sampler in ["iid", "orthogonal"]:
        COMPARED[f"{name} sampler={sampler}"] = f"{text}, {sampler}"
NEARFAR = {"nearfar exact_until=0": "near-far"}
HEADS = {"Gaussian": "task.length=4096", "matched": "task.length=256 task.turn=0.3"}
SUMS = [1, 2, 4, 8, 16, 24]
MS = [8, 16, 32, 64, 128, 256]
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
ANGLES = sweep("task=variance_by_angle", features=["pos", "oprf"], **{"task.length": [0.5, 1, 2]})
SMALL = {
    "performers-fig2": ANGLES,
    "performers-fig4": sweep(**HEAD, features=COMPARED) + sweep(**HEAD, attention=NEARFAR),
    "performers-fig4/judged": JUDGED,
    "performers-fig14": layer_errors.RUNS,
}
FIGURE = {"sweep": "performers-fig4"}
AT_SCALE = filters_over("m", MS, "m = {}", sweep="performers-fig4/judged")
FIGURE_4 = {  # claim -> methods
    "FAVOR+: orthogonal below iid": ("pos orthogonal", "pos iid"),
    "trigonometric: orthogonal below iid": ("trig orthogonal", "trig iid"),
    "iid: FAVOR+ below trigonometric": ("pos iid", "trig iid"),
    "orthogonal: FAVOR+ below trigonometric": ("pos orthogonal", "trig orthogonal"),
}


def finding(rows: Rows) -> str:
    ratios = {}
    for m in (8, 256):
        settings = {8: AT_SCALE[f"m = {m}"], 4: {**FIGURE, "heads": "Gaussian", "sum": 4, "m": m}}
        for value, where in settings.items():
            ratio = rows.ratio("pos sampler=iid", "trig sampler=iid", "mse", **where)
            ratios[value, m] = f"{ratio_interval(ratio, '.2g')} (n = {len(ratio)})"
    return (
        "On Gaussian heads with iid projections, the MSE of attention with FAVOR+ over that with trigonometric "
        f"features is {ratios[8, 8]} with m = 8 and {ratios[8, 256]} with m = 256 at |x + y|^2 = 8, the scale of "
        f"N(0, 1) inputs. At |x + y|^2 = 4 the ratio is {ratios[4, 8]} and {ratios[4, 256]} (95% CI)."
    )


def claims(rows: Rows) -> list[Claim]:
    closed_forms = {}
    for length in (0.5, 1, 2):
        values = rows.values("log_ratio", "pos", length=length, angle=120)
        if len(values):
            closed_forms[f"length {length}"] = values.item()
    text = "positive features have less error than trigonometric ones at 120 degrees"
    paper = "where kernel values are small"
    reason = "its error is proportional to a power of the kernel itself"
    claims = [Claim(text, closed_forms, paper, above=0, power=True, reason=reason)]
    for words, methods in FIGURE_4.items():
        text = f"MSE of attention at |x + y|^2 = 8, {words}"
        first, second = (method.replace(" ", " sampler=") for method in methods)
        ratios = rows.paired_by_case(first, second, "mse", AT_SCALE, log=True)
        claims.append(Claim(text, ratios, "below", "more samples", below=1, log=True))
    text = "MSE of attention at |x + y|^2 = 8, FAVOR++: orthogonal below iid"
    methods = "oprf sampler=orthogonal", "oprf sampler=iid"
    largest = {"m = 256": AT_SCALE["m = 256"]}
    ratios = rows.paired_by_case(*methods, "mse", largest, log=True)
    claims.append(Claim(text, ratios, below=1, log=True))
    return claims + layer_errors.claims(rows)


def two_digits(values: pd.Series) -> str:
    mean = geometric_mean_ci(values)[0]
    return f"{float(f'{mean:.2g}'):,.9g}"


def ratio_table(rows: Rows, heads: str) -> pd.DataFrame:
    """MSE of FAVOR+ over that of trigonometric features, by m (rows) and |x + y|^2 (columns)."""
    table = {}
    for value in SUMS:
        column = table.setdefault(f"{heads}, {value}", {})
        for m in MS:
            where = {**FIGURE, "heads": heads, "sum": value, "m": m}
            ratio = rows.ratio("pos sampler=iid", "trig sampler=iid", "mse", **where)
            column[f"m = {m}"] = ratio_interval(ratio, ".2g")
    return pd.DataFrame(table).rename_axis("projections")


def head_columns(heads: str, sums: list[int]) -> dict[str, dict]:
    return filters_over("sum", sums, heads + ", {}", metric="mse", **FIGURE, heads=heads, m=256)


def tables(rows: Rows) -> Tables:
    methods = COMPARED | NEARFAR
    columns = head_columns("Gaussian", [2, 8, 24]) | head_columns("matched", [2, 8, 24])
    title = "Figure 4: MSE relative to uniform attention (lower is better), m = 256, by |x + y|^2"
    tables = {title: mean_table(rows, columns, methods, format=two_digits)}
    for heads in HEADS:
        title = f"Figure 4, {heads} heads: the same with 95% CI"
        columns = head_columns(heads, SUMS)
        tables[title] = mean_table(rows, columns, methods, geometric=True)
    for heads in HEADS:
        title = f"Figure 4, {heads} heads: MSE of FAVOR+ over that of trigonometric features, iid"
        tables[title] = ratio_table(rows, heads)
    title = "Figure 14: error after the last layer over error after the first, with 95% CI"
    tables[title] = layer_errors.table(rows)
    return tables


def figure(rows: Rows):
    fig, axes = panels(4, columns=2)
    degrees = pd.to_numeric(rows.frame["angle"], errors="coerce")
    angles = Rows(rows.frame[degrees.between(0, 150)])
    line_plot(axes[0], angles, "angle", "log_ratio", {"pos": "FAVOR+", "oprf": "FAVOR++"}, length=1)
    axes[0].axhline(0, color="black", lw=1)
    title = "Figure 2: MSE of trigonometric features / MSE"
    axes[0].set(title=title, xlabel="angle of x and y, degrees")
    axes[0].set_ylabel("log ratio at length 1 (higher is better)")
    style = {"geometric": True, "dotted": [name for name in COMPARED if name.endswith("iid")]}
    for ax, value in zip(axes[1:3], [2, 8]):
        ax.axhline(1, color="grey", lw=1, ls="--", label="uniform attention")
        where = {**FIGURE, "heads": "Gaussian", "sum": value}
        line_plot(ax, rows, "m", "mse", COMPARED | NEARFAR, log="xy", **style, **where)
        title = f"Figure 4: Gaussian heads, |x + y|^2 = {value}"
        ax.set(title=title, xlabel="projections m", ylabel="MSE relative to uniform attention")
        ax.legend(loc="upper right", fontsize=8, frameon=False)
    layer_errors.plot_layers(axes[3], rows)
    return fig


page = Page(
    "perf_error",
    title="Performers Figures 2, 4 and 14: error of estimates, of attention, and through layers",
    finding=finding,
    small=SMALL,
    full=SMALL,
    reduced=False,
    models=layer_errors.MODELS,
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
