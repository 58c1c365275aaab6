"""The picture of a page, panel by panel as its file declares them.

A panel is {kind, title, settings, arms, metric, table, ...}; it is drawn for each of `settings` (default: all).

    kind: lines     mean of `metric` over x, one line an arm, with a band of its 95% interval; log: [x, y]; scale: log,
                    the geometric mean, without the band; dotted: arms with another line than their colour's;
                    less: an arm whose value is subtracted, paired by unit; within: [low, high], the values that are
                    shown, where some are as good as 0
    kind: points    mean of `metric` against the mean of `against`, one point an arm, named; log: [x]; relative: an
                    arm by whose means both are divided
    kind: dots      one row an arm: its mean with the 95% interval; log: [x]; less: an arm whose value is subtracted,
                    paired by unit
    kind: units     one row an arm: `metric` of every unit over that of the arm `over`, its median as a bar; log: [x]

`columns` of the file sets how many panels stand side by side (default: as many as there are settings).
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from crt_exp import drawing
from crt_exp.drawing import label_ends, new_figure, plain_ticks
from crt_exp.oldreport.page import Page

WIDTH, HEIGHT = 5.2, 3.9  # of a panel, inches


def figure(page: Page):
    """A matplotlib figure, or None where the file declares no panel."""
    panels = [(panel, setting) for panel in page.spec.get("panels", [])
              for setting in panel.get("settings", page.settings) or [None]]
    if not panels:
        return None
    across = page.spec["panels"][0].get("columns", min(len(panels), 3))
    down = math.ceil(len(panels) / across)
    fig, axes = new_figure(down, across, figsize=(WIDTH * across, HEIGHT * down), squeeze=False)
    for ax, (panel, setting) in zip(axes.flat, panels):
        DRAWN[panel["kind"]](ax, page, panel, setting)
    for ax in axes.flat[len(panels):]:
        ax.set_axis_off()
    fig.tight_layout()
    return fig


def colour(page: Page, arm: str) -> str:
    """Of an attention or map: the same on all pages; controls in grey, but for peers, which have a colour."""
    name = re.split("[ ,]", arm)[0]
    if arm in page.controls and name not in drawing.PEERS:
        return drawing.CONTROL
    shade = drawing.colour(arm)
    return drawing.colour_by_rule(name) if shade == drawing.CONTROL else shade


def arms_of(page: Page, panel: dict[str, Any]) -> list[str]:
    return panel.get("arms", page.arms)


def name_axes(ax, page: Page, panel: dict[str, Any], setting: str | None, x: str, y: str) -> None:
    for axis in panel.get("log", []):
        ax.set(**{f"{axis}scale": "log"})
    title = panel.get("title", "{setting}").format(setting=setting or "")
    ax.set(xlabel=panel.get("xlabel", x), ylabel=panel.get("ylabel", y), title=title)


def lines(ax, page: Page, panel: dict[str, Any], setting: str | None) -> None:
    metric, ends = page.metric(panel["metric"]), []
    for arm in arms_of(page, panel):
        groups = [(x, values) for x, values in groups_of(page, panel, setting, arm) if len(values)]
        if not groups:
            continue
        log = panel.get("scale") == "log"
        places, means = [x for x, _ in groups], [mean_of(values, log) for _, values in groups]
        shade = colour(page, arm)
        style = "--" if arm in page.controls else ":" if arm.endswith(" x iid") else "-"
        ax.plot(places, means, color=shade, lw=1.5, marker="o", ms=2.5, ls=style)
        if all(len(values) > 1 for _, values in groups) and not log:
            halves = np.array([page.interval(values).half for _, values in groups])
            ax.fill_between(places, np.subtract(means, halves), np.add(means, halves), color=shade, alpha=0.12, lw=0)
        ends.append((page.label(arm), places[-1], means[-1], shade))
    if "less" in panel:
        ax.axhline(0, color=drawing.EXACT, lw=1)
    name_axes(ax, page, panel, setting, "step", metric.heading)
    if "x" in panel.get("log", []):
        plain_ticks(ax.xaxis)
    if "within" in panel:
        ax.set_ylim(panel["within"])
    label_ends(ax, ends)


def groups_of(page: Page, panel: dict[str, Any], setting: str | None, arm: str) -> Iterator[tuple[Any, np.ndarray]]:
    """(x, the value of each unit), less that of the arm `less` at the same x."""
    metric, less = page.metric(panel["metric"]), panel.get("less")
    by_unit = [frame.assign(value=metric.scale * frame["value"].astype(float)).groupby(["x", "unit"])["value"].mean()
               for frame in (page.select(panel["metric"], setting, each, panel.get("table"))
                             for each in ((arm, less) if less else (arm,)))]
    if arm != less:
        values = (by_unit[0] - by_unit[1]).dropna() if less else by_unit[0]
        for x, group in values.groupby(level="x"):
            yield x, group.to_numpy()


def mean_of(values: np.ndarray, log: bool) -> float:
    return float(np.exp(np.log(values).mean()) if log else values.mean())


def points(ax, page: Page, panel: dict[str, Any], setting: str | None) -> None:
    across, up = page.metric(panel["against"]), page.metric(panel["metric"])
    named, (over_x, over_y) = [], (1.0, 1.0)
    if "relative" in panel:
        over_x, over_y = (each.mean() for each in pair(page, panel, setting, panel["relative"]))
    for arm in arms_of(page, panel):
        x, y = pair(page, panel, setting, arm)
        x, y = x / over_x, y / over_y
        if len(x) and len(y):
            shade = colour(page, arm)
            half = page.interval(y).half if len(y) > 1 else 0.0
            ax.errorbar(x.mean(), y.mean(), yerr=half, color=shade, marker="o", ms=5, capsize=2, lw=1)
            named.append((page.label(arm), x.mean(), y.mean(), shade))
    name_axes(ax, page, panel, setting, across.heading, up.heading)
    ax.margins(0.15, 0.15)
    if "x" in panel.get("log", []):
        plain_ticks(ax.xaxis)
    name_points(ax, named, fontsize=8)


def pair(page: Page, panel: dict[str, Any], setting: str | None, arm: str):
    """The values of an arm on both axes, by unit."""
    return (page.values(panel["against"], setting, arm, panel.get("against_table")),
            page.values(panel["metric"], setting, arm, panel.get("table"), panel.get("x")))


def dots(ax, page: Page, panel: dict[str, Any], setting: str | None) -> None:
    metric, rows = page.metric(panel["metric"]), []
    for arm in arms_of(page, panel):
        values = page.values(panel["metric"], setting, arm, panel.get("table"), panel.get("x"),
                             log="x" in panel.get("log", []))
        if "less" in panel:
            values = (values - page.values(panel["metric"], setting, panel["less"], panel.get("table"), panel.get("x"))
                      ).dropna()
        if len(values) and arm != panel.get("less"):
            rows.append((arm, values))
    for place, (arm, values) in enumerate(reversed(rows)):
        low, middle, high = ends_of(page, values, "x" in panel.get("log", []))
        ax.errorbar(middle, place, xerr=[[middle - low], [high - middle]], color=colour(page, arm), marker="o", ms=5,
                    capsize=2, lw=1)
    ax.set_yticks(range(len(rows)), [page.label(arm) for arm, _ in reversed(rows)])
    if "less" in panel:
        ax.axvline(0, color=drawing.EXACT, lw=1)
    if "x" not in panel.get("log", []):
        ax.locator_params(axis="x", nbins=6)
    name_axes(ax, page, panel, setting, metric.heading, "")
    low, high = ax.get_xlim()
    if "x" in panel.get("log", []) and high < 1e3 * low:
        plain_ticks(ax.xaxis)


def units(ax, page: Page, panel: dict[str, Any], setting: str | None) -> None:
    where = {"setting": setting, "table": panel.get("table"), "x": panel.get("x")}
    sign, arms = page.metric(panel["metric"]).sign, arms_of(page, panel)
    for place, arm in enumerate(reversed(arms)):
        ratios = np.exp(sign * page.gain(panel["metric"], arm, panel["over"], log=True, **where))
        ax.scatter(ratios, np.full(len(ratios), place), color=colour(page, arm), s=16, alpha=0.6, lw=0)
        ax.plot([np.median(ratios)] * 2, [place - 0.3, place + 0.3], color=colour(page, arm), lw=1.5)
    ax.axvline(1, color=drawing.CONTROL, lw=0.8)
    ax.set_yticks(range(len(arms)), [page.label(arm) for arm in reversed(arms)])
    name_axes(ax, page, panel, setting, f"{page.metric(panel['metric']).heading} over {page.label(panel['over'])}", "")
    low, high = ax.get_xlim()
    if "x" in panel.get("log", []) and high < 1e3 * low:
        plain_ticks(ax.xaxis)


def ends_of(page: Page, values: pd.Series, log: bool) -> tuple[float, float, float]:
    """Low end of the 95% interval, mean, high end; of a geometric mean with `log`."""
    if len(values) < 2:
        return (float(values.mean()),) * 3
    interval = page.interval(np.log(values) if log else values)
    ends = (interval.low, interval.mean, interval.high)
    return tuple(math.exp(end) for end in ends) if log else ends


DRAWN = {"lines": lines, "points": points, "dots": dots, "units": units}
OFFSETS = (9, -18, 19, -28, 29, -38)  # of names from their points, in points of print
RADIUS = 8                            # of a point, about


def name_points(ax, names: list[tuple[str, float, float, str]], **style) -> None:
    """Writes (name, x, y, colour) above or below its point, by the first of OFFSETS at which it covers no name before
    it and no other point, with a line to it. The scales and limits of the axes must be set."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    ax.figure.canvas.draw()
    radius = RADIUS * ax.figure.dpi / 72
    places = [ax.transData.transform((x, y)) for _, x, y, _ in names]
    discs = [Bbox([place - radius, place + radius]) for place in places]
    taken: list[Bbox] = []
    for i in sorted(range(len(names)), key=lambda i: names[i][1]):
        name, x, y, shade = names[i]
        line = {"arrowstyle": "-", "color": shade, "lw": 0.7, "shrinkB": 0}
        label = ax.annotate(name, (x, y), color=shade, textcoords="offset points", xytext=(0, 0), ha="center",
                            va="bottom", arrowprops=line, **style)
        others = [*discs[:i], *discs[i + 1:], *taken]
        for offset in OFFSETS:
            label.set_position((0, offset))
            label.update_positions(ax.figure.canvas.get_renderer())
            box = Text.get_window_extent(label)
            if not any(box.overlaps(other) for other in others):
                break
        taken.append(box)
