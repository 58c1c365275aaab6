"""Line plots and dot plots of result rows with 95% intervals."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from crt_exp.experiments.drawing import (
    CONTROLS,
    EXACT,
    colour,
    label_ends,
    new_figure,
    plain_ticks,
)
from crt_exp.experiments.intervals import Mean, mean_ci
from crt_exp.experiments.report.rows import Rows
from crt_exp.experiments.report.tables import label

WIDTH, HEIGHT = 5.2, 3.9  # size of a panel, inches


def panels(count: int, columns: int = 3) -> tuple[Any, list[Any]]:
    """Create a figure and `count` axes, at most `columns` side by side."""
    across = min(count, columns)
    down = -(-count // across)
    figure, axes = new_figure(down, across, figsize=(WIDTH * across, HEIGHT * down), squeeze=False)
    for ax in axes.flat[count:]:
        ax.set_axis_off()
    return figure, [*axes.flat[:count]]


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
    labels = methods if isinstance(methods, Mapping) else None
    ends = []
    for method in methods or rows.methods(metric, **where):
        if method == less:
            continue
        places, means = _means(rows, x, metric, method, less, geometric, where)
        if not means:
            continue
        intervals = [interval(mean, geometric) for mean in means]
        low, middle, high = scale * np.array(intervals).T
        shade = colour(method)
        style = "--" if method.split(" ")[0] in CONTROLS else "-"
        if method in dotted:
            style = ":"
        ax.plot(places, middle, color=shade, lw=1.5, marker="o", ms=2.5, ls=style)
        if all(mean.n > 1 for mean in means):
            ax.fill_between(places, low, high, color=shade, alpha=0.12, lw=0)
        ends.append((label(method, labels), places[-1], middle[-1], shade))
    if not ends:
        return
    if less:
        ax.axhline(1 if geometric else 0, color=EXACT, lw=1)
    for axis in log:
        ax.set(**{f"{axis}scale": "log"})
    if "x" in log:
        plain_ticks(ax.xaxis)
    label_ends(ax, ends)


def interval(mean: Mean, log: bool) -> np.ndarray:
    """Return low end, mean and high end; log: exponentials of these. A single sample has no width."""
    half = mean.half if mean.n > 1 else 0
    ends = mean.mean + half * np.array([-1, 0, 1])
    return np.exp(ends) if log else ends


def _means(
    rows: Rows, x: str, metric: str, method: str, less: str, log: bool, where: Mapping[str, Any]
) -> tuple[list[float], list[Mean]]:
    """Return the values of column x that have samples, and the mean of each."""
    places, means = [], []
    frame = rows.select(metric, method, **where)
    for place in sorted({*pd.to_numeric(frame[x])}):
        filters = {**where, x: place}
        if less:
            samples = rows.paired(method, less, metric, log, **filters)
        else:
            samples = rows.values(metric, method, log, **filters)
        if len(samples):
            places.append(place)
            means.append(mean_ci(samples))
    return places, means


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
    samples = {method: samples for method, samples in values.items() if len(samples)}
    if not samples:
        return
    methods = [*reversed(samples)]
    for place, method in enumerate(methods):
        numbers = np.asarray(samples[method], float)
        mean = mean_ci(np.log(numbers) if log else numbers, overlap=overlap)
        low, middle, high = interval(mean, log)
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
    ax.set_yticks(range(len(methods)), [label(method, labels) for method in methods])
    if zero:
        ax.axvline(0, color=EXACT, lw=1)
    if log:
        ax.set_xscale("log")
        plain_ticks(ax.xaxis)
