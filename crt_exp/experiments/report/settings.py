"""Comparisons of attention methods across pages: each in one model, relative to uniform attention."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from crt_exp.experiments.drawing import colour, label_ends, new_figure
from crt_exp.experiments.intervals import Mean, mean_ci
from crt_exp.experiments.report.rows import Rows

FAMILIES = {
    "near-far": "nearfar",
    "mixture": "favormix",
    "FAVOR#": "favorsharp",
    "FAVOR++": "favorpp",
    "FAVOR+": "favorp",
    "Hedgehog": "hedgehog",
    "ReLU": "relu",
    "window": "window",
}
REFERENCE = "FAVOR++"  # measured in every setting, so that each method is compared with it on shared settings
HIGHER = ("accuracy", "spearman", "cosine")  # metrics of which more is better


class Setting(NamedTuple):
    """The rows of a page that compare attention methods in one model.

    metric: "above" is a loss increase over exact attention; of other metrics, exact attention is subtracted. m: number
    of projections, where a family has several.
    """

    name: str
    page: str
    metric: str
    where: Mapping[str, Any]
    m: int = 256

    def increase(self, rows: Rows, method: str) -> pd.Series:
        """By how much a method is worse than exact attention, sample by sample."""
        if self.metric == "above":
            return rows.values(self.metric, method, **self.where)
        increase = rows.paired(method, "exact", self.metric, **self.where)
        return -increase if self.metric in HIGHER else increase

    def method(self, rows: Rows, name: str) -> str:
        """The method with this name, such as "favorpp m=256"; of several, that with m and the fewest options."""
        methods = rows.methods(self.metric, **self.where)
        methods = [method for method in methods if method.split()[0] == name]
        if len(methods) > 1:
            methods = [method for method in methods if f"m={self.m}" in method.split()]
        return min(methods, key=len, default="")

    def mean(self, pages: Mapping[str, Rows], family: str) -> Mean:
        """Return the mean loss increase of a family."""
        rows = pages[self.page]
        return mean_ci(self.increase(rows, self.method(rows, FAMILIES[family])))

    def costs(self, pages: Mapping[str, Rows]) -> pd.Series:
        """Return the loss increase of each family, relative to that of uniform attention."""
        rows = pages[self.page]
        means = {}
        for family, name in FAMILIES.items():
            means[family] = self.increase(rows, self.method(rows, name)).mean()
        title = f"[{self.name}]({self.page}.md)"
        return pd.Series(means, name=title) / self.increase(rows, "uniform").mean()


def costs_of(settings: Sequence[Setting], pages: Mapping[str, Rows]) -> pd.DataFrame:
    """Return the loss increases of all families (columns) in all settings (rows)."""
    return pd.DataFrame([setting.costs(pages) for setting in settings])


def shared_medians(
    costs: pd.DataFrame, family: str, other: str = REFERENCE
) -> tuple[str, str, int]:
    """Medians of two families over the settings that both have, and the number of these settings."""
    shared = costs.dropna(subset=[family, other])
    medians = shared.median()
    return percentage(medians[family]), percentage(medians[other]), len(shared)


def median_cell(costs: pd.DataFrame, family: str) -> str:
    """Format the median of a family against that of FAVOR++, with the number of settings."""
    first, second, n = shared_medians(costs, family)
    if not n:
        return ""
    return f"{first} ({n})" if family == REFERENCE else f"{first} against {second} ({n})"


def percentage(share: float) -> str:
    return "" if np.isnan(share) else f"{share:.0%}".replace("-0%", "0%")


def setting_table(costs: pd.DataFrame) -> pd.DataFrame:
    """One row a setting: the loss increase of each family in percent of that of uniform attention."""
    return costs.dropna(axis=1, how="all").map(percentage).rename_axis("setting")


def loss_against_time(shares: pd.Series, times: Mapping[str, Mapping[str, float]]):
    """Plot the loss increase of each family against its time, one marker for each of two builds of the code."""
    builds = next(iter(times.values()))
    fig, ax = new_figure(1, 1, figsize=(4.2, 3.2), layout="constrained")
    ends = []
    for family, built in {"exact": dict.fromkeys(builds, 1.0), **times}.items():
        share = 0.0 if family == "exact" else shares[family]
        if np.isnan(share):
            continue
        shade = colour(FAMILIES.get(family, family).lower())
        y = 100 * share
        for x, filling in zip(built.values(), (shade, "none")):
            ax.scatter([x], [y], edgecolors=shade, facecolors=filling, s=40, zorder=3)
        ends.append((family, max(built.values()), y, shade))
    for build, filling in zip(builds, ("grey", "none")):
        ax.scatter([], [], edgecolors="grey", facecolors=filling, s=40, label=build)
    ax.legend(fontsize=8, frameon=False, loc="upper left")
    ax.set(ylim=(-8, 118), title="SmolLM2, repeated passage of 4096 tokens")
    ax.set_xlim(left=0)
    ax.set_xlabel("time of its forward pass relative to exact attention")
    ax.set_ylabel("loss increase, % of that of uniform attention")
    label_ends(ax, ends)
    return fig
