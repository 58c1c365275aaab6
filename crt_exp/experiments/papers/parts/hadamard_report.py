"""Attention errors at the setting of Adda and Allen (2021), with the rows of their code and of their text."""

import numpy as np
import pandas as pd

from crt_exp.experiments.report import (
    Claim,
    Rows,
    filters_over,
    geometric_interval,
    line_plot,
    mean_table,
    sweep,
)

MAPS = {"trig": "trigonometric", "pos": "FAVOR+"}
CODE = {"iid": "iid", "orthogonal": "orthogonal", "hadamard": "Hadamard"}  # rows of their code
HADAMARD = "hadamard sampler.blocks=1"
THREE = "hadamard sampler.blocks=3"
SAMPLERS = {
    "iid": "iid",
    "orthogonal": "orthogonal",
    "simplex": "simplex",
    HADAMARD: "Hadamard, k = 1",
    "hadamard sampler.blocks=2": "Hadamard, k = 2",
    THREE: "Hadamard, k = 3",
    "givens": "givens",
}
TEXT = [name for name in SAMPLERS if name not in ("simplex", "givens")]  # of their text
REPORTED = (
    "task=projections task.scale=1.5 task.value_scale=1.5 task.samples=60 "
    "task.ms=[16,32,64,128,256,512,2048]"
)
FRESH_SAMPLES = {"trig": "task.samples=2000 seed=2", "pos": "task.samples=400 seed=1"}
REPORT, FRESH = [], []
for name in MAPS:
    code = {f"{name} code={kind}": f"features={name} task.code={kind}" for kind in CODE}
    text = [f"{name} sampler={sampler}" for sampler in TEXT]
    judged = [f"{name} sampler={sampler}" for sampler in ("iid", "orthogonal", HADAMARD, THREE)]
    options = f"{REPORTED} {FRESH_SAMPLES[name]} task.ms=[16,512]"
    REPORT += sweep(REPORTED, scale={1.5: ""}, method=code)
    REPORT += sweep(REPORTED, scale={1.5: ""}, features=text)
    FRESH += sweep(options, scale={1.5: ""}, features=judged)
SWEEPS = {"hadamard/report": REPORT, "hadamard/gaussian": FRESH}


def finding(rows: Rows) -> str:
    where = {"sweep": "hadamard/report", "m": 512}
    mse = {}
    for method in ("pos code=iid", "pos code=orthogonal", "pos sampler=orthogonal"):
        mse[method] = geometric_interval(rows.values("errors", method, **where), ".3f")
    uniform = rows.values("uniform", "pos code=iid", **where)
    return (
        "The code of the report samples orthogonal rows near 0, so that FAVOR+ nearly is uniform attention: the MSE is "
        f"{mse['pos code=orthogonal']} with these rows, {geometric_interval(uniform, '.3f')} with uniform attention "
        f"and {mse['pos code=iid']} with iid rows (m = 512, 95% CI, n = {len(uniform)}). "
        f"With orthogonal rows of Gaussian length the MSE is {mse['pos sampler=orthogonal']}."
    )


# ---- claims: rows, others, cases (map and number of projections), the report's result

LARGE = [("trig", 512)]
POSITIVE = [("pos", 16), ("pos", 512)]
LESS = [
    ("orthogonal", "iid", LARGE + POSITIVE, "much lower"),
    ("hadamard", "iid", LARGE + POSITIVE, "much lower"),
    ("orthogonal", "hadamard", LARGE, "appears lower"),
]
EQUAL = {"for many features": [("trig", 2048)], "from few features on": POSITIVE}
GAUSSIAN = {
    "orthogonal and iid rows": ("orthogonal", "iid"),
    "orthogonal and Hadamard rows": ("orthogonal", HADAMARD),
    "Hadamard rows of three blocks and of one": (THREE, HADAMARD),
}
EQUALITY = {"above": 0.8, "below": 1.25}
SHORT = "rows of the code have length sqrt(d / m) in place of sqrt(d), and with rows near 0 all weights are alike"


def claims(rows: Rows) -> list[Claim]:
    def ratio_claim(
        text: str, first: str, second: str, cases: list, sweep: str, **options
    ) -> Claim:
        """A claim on the MSE with two kinds of rows."""
        ratios = {}
        for name, m in cases:
            methods = f"{name} {first}", f"{name} {second}"
            ratios[f"{MAPS[name]}, m = {m}"] = rows.ratio(*methods, "errors", sweep=sweep, m=m)
        return Claim(text, ratios, log=True, needs="more repetitions", **options)

    claims = []
    for first, second, cases, paper in LESS:
        text = (
            f"rows of the report's code: {CODE[first]} rows have less MSE than {CODE[second]} rows"
        )
        methods = f"code={first}", f"code={second}"
        options = {"paper": paper, "below": 1, "reason": SHORT}
        claims.append(ratio_claim(text, *methods, cases, "hadamard/report", **options))
    for words, cases in EQUAL.items():
        text = f"rows of the report's code: orthogonal and Hadamard rows have equal MSE {words}"
        methods = "code=orthogonal", "code=hadamard"
        options = {"paper": f"equally efficient {words}", "reason": SHORT, **EQUALITY}
        claims.append(ratio_claim(text, *methods, cases, "hadamard/report", **options))
    for words, (first, second) in GAUSSIAN.items():
        text = f"rows of Gaussian length: {words} have equal MSE"
        methods = f"sampler={first}", f"sampler={second}"
        cases = [("trig", 16), *LARGE, *POSITIVE]
        claims.append(ratio_claim(text, *methods, cases, "hadamard/gaussian", **EQUALITY))
    return claims


def error_table(rows: Rows) -> pd.DataFrame:
    """MSE by method and m, last of uniform attention."""
    labels = {}
    for name, words in MAPS.items():
        for kind, label in CODE.items():
            labels[f"{name} code={kind}"] = f"{words}, code: {label}"
        for sampler in TEXT:
            labels[f"{name} sampler={sampler}"] = f"{words}, Gaussian length: {SAMPLERS[sampler]}"
    tables = []
    uniform = {"pos code=iid": "uniform attention"}
    for metric, methods in {"errors": labels, "uniform": uniform}.items():
        where = {"metric": metric, "sweep": "hadamard/report"}
        columns = filters_over("m", [16, 512, 2048], "m = {}", **where)
        tables.append(mean_table(rows, columns, methods, geometric=True))
    return pd.concat(tables)


def plot_both(ax, rows: Rows, name: str) -> None:
    """Plot the errors of a map, with the rows of the code and with those of the text."""
    names, labels = {}, {}
    for kind, label in CODE.items():
        names[f"{name} code={kind}"] = f"{kind} code"
        labels[f"{kind} code"] = f"{label}, code"
    for sampler, (kind, label) in zip(("iid", "orthogonal", HADAMARD), CODE.items()):
        names[f"{name} sampler={sampler}"] = f"{kind} sampler"
        labels[f"{kind} sampler"] = f"{label}, Gaussian length"
    dotted = [shown for shown in labels if shown.endswith("sampler")]
    plot_errors(ax, rows, name, 1.5, names, labels, dotted, sweep="hadamard/report")


def plot_errors(
    ax, rows: Rows, name: str, scale: float, names: dict, labels: dict, dotted=(), **where
) -> None:
    """Plot the errors of a map by m; names: method -> its key in labels."""
    at_scale = Rows(rows.frame[rows.frame["scale"] == scale])
    uniform = at_scale.values("uniform", f"{name} sampler=iid", log=True, **where)
    ax.axhline(np.exp(uniform.mean()), color="grey", lw=1, ls="--")
    style = {"log": "xy", "geometric": True, "dotted": dotted}
    line_plot(ax, at_scale.renamed(names), "m", "errors", labels, **style, **where)
    title = f"{MAPS[name]}, scale {scale} (dashed: uniform attention)"
    ax.set(title=title, xlabel="projections m", ylabel="MSE (lower is better)")
