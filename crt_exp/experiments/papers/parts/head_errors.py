"""Performers Figure 4: error of the attention of one head, by map, sampler and number of projections."""

import pandas as pd
from scipy.stats import gmean

from crt_exp.experiments.report import (
    Claim,
    Rows,
    Tables,
    filters_over,
    line_plot,
    mean_table,
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
SWEEPS = {
    "performers-fig4": [
        *sweep("task=head_errors", **AXES, features=COMPARED),
        *sweep("task=head_errors", **AXES, attention=NEARFAR),
    ],
    "performers-fig4/judged": sweep(
        JUDGED, heads="Gaussian", **{"task.sum": [8]}, features=COMPARED
    ),
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
    claims = []
    for comparison, methods in COMPARISONS.items():
        text = f"MSE of attention at |x + y|^2 = 8, {comparison}"
        ratios = rows.paired_by_case(*methods, "mse", AT_SCALE, log=True)
        claims.append(Claim(text, ratios, "below", "more samples", below=1, log=True))
    text = "MSE of attention at |x + y|^2 = 8, FAVOR++: orthogonal below iid"
    methods = "oprf sampler=orthogonal", "oprf sampler=iid"
    mse = {"m = 256": rows.ratio(*methods, "mse", **AT_SCALE["m = 256"])}
    claims.append(Claim(text, mse, below=1, log=True))
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
