"""Line plots and dot plots of result rows with 95% intervals."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from crt_exp.experiments import drawing
from crt_exp.experiments.drawing import label_ends, new_figure, plain_ticks
from crt_exp.experiments.report.pages import label
from crt_exp.experiments.report.rows import Rows, mean_ci

WIDTH, HEIGHT = 5.2, 3.9  # size of a panel, inches
CONTROLS = (
    "uniform",
    "identity",
    "zero",
    "majority",
    "majority class",
    "word overlap",
    "no model",
    "average",
    "random",
)


def panels(count: int, columns: int = 3) -> tuple[Any, list[Any]]:
    """Create a figure and `count` axes, at most `columns` side by side."""
    across = min(count, columns)
    down = -(-count // across)
    figure, axes = new_figure(down, across, figsize=(WIDTH * across, HEIGHT * down), squeeze=False)
    for ax in axes.flat[count:]:
        ax.set_axis_off()
    return figure, [*axes.flat[:count]]


def colour(method: str) -> str:
    """Return the colour of a method: equal on all pages, grey for controls."""
    name = re.split("[ ,]", method)[0]
    if name in CONTROLS or method in CONTROLS:
        return drawing.CONTROL
    shade = drawing.colour(method)
    return drawing.colour_by_rule(name) if shade == drawing.CONTROL else shade


def line_plot(
    ax,
    rows: Rows,
    x: str,
    metric: str,
    methods: Sequence[str] | Mapping[str, str] = (),
    scale: float = 1.0,
    log: str = "",
    less: str = "",
    dotted: Sequence[str] = (),
    geometric: bool = False,
    **where: Any,
) -> None:
    """Plot the mean of a metric against column x, one labelled line per method.

    Args:
        methods: Methods, or a mapping from methods to labels. Default: all methods with the metric.
        log: Logarithmic axes: "x", "y" or "xy".
        less: Method whose values are subtracted, sample by sample.
        dotted: Methods with a dotted line.
        geometric: Use geometric means, for heavy-tailed values.
        where: Column values that select the rows.
    """
    ends = []
    for method in methods or rows.methods(metric, **where):
        if method == less:
            continue
        frame = rows.select(metric, method, **where)
        found = {
            place: rows.paired(method, less, metric, geometric, **where, **{x: place})
            if less
            else rows.values(metric, method, geometric, **where, **{x: place})
            for place in sorted({*pd.to_numeric(frame[x])})
        }
        means = {place: mean_ci(values) for place, values in found.items() if len(values)}
        if not means:
            continue
        mean, half, _, n = np.array([*means.values()]).T
        places, shade = [*means], colour(method)
        low, middle, high = (
            scale * (np.exp(each) if geometric else each)
            for each in (mean - half, mean, mean + half)
        )
        ax.plot(
            places,
            middle,
            color=shade,
            lw=1.5,
            marker="o",
            ms=2.5,
            ls=":" if method in dotted else "--" if method in CONTROLS else "-",
        )
        if (n > 1).all():
            ax.fill_between(places, low, high, color=shade, alpha=0.12, lw=0)
        ends.append(
            (
                label(method, methods if isinstance(methods, Mapping) else None),
                places[-1],
                middle[-1],
                shade,
            )
        )
    if not ends:
        return
    if less:
        ax.axhline(1 if geometric else 0, color=drawing.EXACT, lw=1)
    for axis in log:
        ax.set(**{f"{axis}scale": "log"})
    if "x" in log:
        plain_ticks(ax.xaxis)
    label_ends(ax, ends)


def dot_plot(
    ax,
    values: Mapping[str, Sequence[float]],
    log: bool = False,
    zero: bool = False,
    overlap: float = 0.0,
    labels: Mapping[str, str] | None = None,
) -> None:
    """Plot the mean and 95% interval of each method as one row.

    Args:
        log: Use geometric means on a logarithmic axis.
        zero: Draw a line at 0 (exact attention).
        overlap: See `mean_ci`.
    """
    shown = [(method, np.asarray(each, float)) for method, each in values.items() if len(each)]
    if not shown:
        return
    for place, (method, each) in enumerate(reversed(shown)):
        found = mean_ci(np.log(each) if log else each, overlap=overlap)
        ends = found.mean + np.array([-1, 0, 1]) * (found.half if found.n > 1 else 0)
        low, middle, high = np.exp(ends) if log else ends
        ax.errorbar(
            middle,
            place,
            xerr=[[middle - low], [high - middle]],
            color=colour(method),
            marker="o",
            ms=5,
            capsize=2,
            lw=1,
        )
    ax.set_yticks(range(len(shown)), [label(method, labels) for method, _ in reversed(shown)])
    if zero:
        ax.axvline(0, color=drawing.EXACT, lw=1)
    if log:
        ax.set_xscale("log")
        plain_ticks(ax.xaxis)
