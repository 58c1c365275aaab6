"""Hadamard-Rademacher projections (Adda and Allen 2021): error of attention, bias and time."""

from collections.abc import Iterable

import numpy as np
import pandas as pd

from crt_exp.report import Claim, Page, Rows, geometric_mean_ci, line_plot, mean_table, sweep
from crt_exp.report.plots import panels

MAPS, SCALES = {"trig": "trigonometric", "pos": "FAVOR+", "oprf": "OPRF"}, [0.25, 0.5, 0.75, 1.0]
SAMPLERS = {"iid": "iid", "orthogonal": "orthogonal", "simplex": "simplex",
            **{f"hadamard sampler.blocks={k}": f"Hadamard, k = {k}" for k in [1, 2, 3]}, "givens": "givens"}
HADAMARD, LENGTHS = "hadamard sampler.blocks=1", [256, 1024, 4096, 16384]


def methods(name: str, options: str = "") -> dict[str, str]:
    return {f"{name} sampler={sampler}{options}": text for sampler, text in SAMPLERS.items()}


TIMED = {name: methods(name, " m=300") for name in ["trig", "pos"]}
TIMED["pos"]["exact"] = "exact attention"


def turns(names: Iterable[str]) -> str:
    return "'task.methods=[{}]'".format(",".join(f'"{name}"' for name in names))


small = {
    "hadamard": sweep("task=projections task.samples=20", **{"task.scale": SCALES},
                      features=[method for name in MAPS for method in methods(name)]),
    "hadamard/bias": sweep("task=kernel_bias task.draws=20000", **{"task.d": [16, 64]}, features=methods("pos")),
    "hadamard/time": sweep("task=speed task.what=one_head task.rounds=3", alone=True, seed=range(5),
                           tokens={length: f"task.lengths=[{length}]" for length in LENGTHS},
                           map={name: turns(timed) for name, timed in TIMED.items()})}

page = Page(
    "hadamard",
    title="Hadamard-Rademacher projections: error of attention, bias and time",
    finding="Orthogonal and Hadamard rows lower the error of trigonometric features 4 to 10 times where vectors are "
            "short. For positive features the gain is small, and Hadamard rows save no time here.",
    small=small, full=small, reduced=False,
    columns=["scale", "d", "length", "m", "method"],
    metrics=["errors", "uniform", "at_unit", "at_unit_error", "at_spread", "at_spread_error", "ms"],
    measured=[
        "Source: Adda and Allen (2021); its scale is 1, and it has figures without numbers.",
        "Errors: mean squared error of the output against exact attention, q, k ~ N(0, scale^2), v ~ N(0, 1), "
        "L = 1024, d = 16, m = 16 to 512; 20 samples of data and projections (seed 0), the same data for all rows. "
        "Geometric means, for the errors of trigonometric features have heavy tails. At scale 1 uniform attention has "
        "less error than all of them.",
        "k: blocks of a Hadamard matrix and random signs. Discrete maps need exactly Gaussian rows and are left out.",
        "Bias: mean estimate over the exact kernel with its standard error, FAVOR+, 20,000 draws, at x = y = e_1 and "
        "at x = y = (1, ..., 1) / sqrt(d); 1 is no bias.",
        "Times: one head, forward, m = 300, d = 16, float32, 5 processes of each length, each the geometric mean of 3 "
        "interleaved rounds; drawing projections and fitting are not timed.",
        "Nearly equivalent: an MSE or a time at most 1.25 times as large; this margin was chosen with the results "
        "known."])


def claims(rows: Rows) -> list[Claim]:
    def errors(text: str, first: str, second: str, below: float = 1, paper: str = "", **where) -> Claim:
        return Claim(text, {f"{MAPS[name]}, scale {scale:g}": rows.ratio(
            f"{name} sampler={first}", f"{name} sampler={second}", "errors", scale=scale, **where)
            for name in ["trig", "pos"] for scale in SCALES}, log=True, unit="times", paper=paper,
                     **{"above": 0.8} if where else {"below": below})

    return [
        errors("orthogonal rows have less than half the MSE of iid rows", "orthogonal", "iid", 0.5, "much lower"),
        errors("Hadamard rows, k = 1, have less than half the MSE of iid rows", HADAMARD, "iid", 0.5, "much lower"),
        errors("orthogonal Gaussian rows have less MSE than Hadamard rows, k = 1", "orthogonal", HADAMARD, 1,
               "appears lower"),
        errors("MSE of orthogonal Gaussian rows over that of Hadamard rows, k = 1, is at least 0.8 at m = 512",
               "orthogonal", HADAMARD, paper="nearly equivalent", m=512),
        Claim("time with orthogonal Gaussian rows over that with Hadamard rows, k = 1, is at least 0.8 at L = 16384", {
            MAPS[name]: rows.ratio(f"{name} sampler=orthogonal m=300", f"{name} sampler={HADAMARD} m=300", "ms",
                                   length=16384) for name in TIMED},
              above=0.8, log=True, unit="times", paper="approximately the same")]


def tables(rows: Rows):
    def over_orthogonal(names, spec: str) -> pd.DataFrame:
        table = pd.DataFrame({f"{MAPS[name]}, {scale:g}": [spec.format(*geometric_mean_ci(np.exp(rows.ratio(
            f"{name} sampler={sampler}", f"{name} sampler=orthogonal", "errors", scale=scale))))
            for sampler in SAMPLERS if sampler != "orthogonal"] for name in names for scale in SCALES},
            index=[text for text in SAMPLERS.values() if text != "orthogonal"])
        table.index.name = "rows"
        return table

    made = {"MSE over that of orthogonal Gaussian rows (lower is better), by map and scale, all m":
            over_orthogonal(MAPS, "{:.2f}")}
    for name, text in MAPS.items():
        made[f"The same with 95% CI, {text}"] = over_orthogonal([name], "{:.2f} ({:.2f} to {:.2f})")
        for scale in SCALES:
            made[f"MSE, {text}, scale {scale:g}"] = mean_table(
                rows, {f"m = {m}": {"metric": "errors", "scale": scale, "m": m} for m in [16, 32, 64, 128, 256, 512]},
                methods(name), format=lambda values: f"{geometric_mean_ci(values)[0]:.2e}")
    places = {"at_unit": "x = y = e_1", "at_unit_error": "standard error", "at_spread": "x = y = (1, ..., 1) / sqrt(d)",
              "at_spread_error": "its standard error"}
    for d in [16, 64]:
        made[f"Bias of FAVOR+, d = {d}: mean estimate over the exact kernel"] = mean_table(
            rows, {text: {"metric": metric, "d": d} for metric, text in places.items()}, methods("pos"), spec=".3f")
    for name, timed in TIMED.items():
        made[f"Time of attention, {MAPS[name]}, ms"] = mean_table(
            rows, {f"L = {length}": {"metric": "ms", "length": length} for length in LENGTHS}, timed)
    return made


def figure(rows: Rows):
    fig, axes = panels(6)
    shown = {sampler: SAMPLERS[sampler] for sampler in ["iid", "orthogonal", "simplex", HADAMARD, "givens"]}
    for ax, (name, scale) in zip(axes, [("trig", 0.5), ("pos", 0.5), ("oprf", 0.5), ("trig", 1), ("pos", 1)]):
        ax.axhline(geometric_mean_ci(rows.values("uniform", "trig sampler=iid", scale=scale))[0], color="grey", lw=1,
                   ls="--")
        line_plot(ax, of_map(rows, name, scale), "m", "errors", shown, log="xy", geometric=True)
        ax.set(title=f"{MAPS[name]}, scale {scale} (dashed: uniform attention)", xlabel="projections m", ylabel="MSE")
    line_plot(axes[5], of_map(rows, "pos"), "length", "ms", shown, log="xy")
    axes[5].set(title="FAVOR+: time of attention", xlabel="tokens", ylabel="time, ms")
    fig.tight_layout()
    return fig


def of_map(rows: Rows, name: str, scale: float | None = None) -> Rows:
    """The rows of a map, whose methods are then the samplers."""
    frame = rows.frame[rows.frame["method"].str.startswith(f"{name} ")]
    frame = frame[frame["scale"] == scale] if scale else frame
    return Rows(frame.assign(method=frame["method"].str.removeprefix(f"{name} sampler=").str.removesuffix(" m=300")))
