"""Comparisons of attention methods across pages: each in one model, relative to uniform attention."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

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
Costs = dict[
    str, float
]  # family -> loss increase over exact attention, as a share of that of uniform attention


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

    def costs(self, pages: Mapping[str, Rows]) -> Costs:
        """Return the loss increase of each family, relative to that of uniform attention."""
        rows = pages[self.page]
        uniform = self.increase(rows, "uniform").mean()
        costs = {}
        for family, name in FAMILIES.items():
            increase = self.increase(rows, self.method(rows, name))
            if len(increase):
                costs[family] = float(increase.mean()) / uniform
        return costs


def shared_medians(
    settings: Sequence[Costs], family: str, other: str = REFERENCE
) -> tuple[str, str, int]:
    """Medians of two families over the settings that both have, and the number of these settings."""
    shared = [costs for costs in settings if family in costs and other in costs]
    if not shared:
        return "", "", 0
    first = median(costs[family] for costs in shared)
    second = median(costs[other] for costs in shared)
    return percentage(first), percentage(second), len(shared)


def median_cell(settings: Sequence[Costs], family: str) -> str:
    """Format the median of a family against that of FAVOR++, with the number of settings."""
    first, second, n = shared_medians(settings, family)
    if not n:
        return ""
    return f"{first} ({n})" if family == REFERENCE else f"{first} against {second} ({n})"


def percentage(share: float) -> str:
    return f"{share:.0%}".replace("-0%", "0%")


def setting_table(settings: Sequence[Setting], rows: Mapping[str, Rows]) -> pd.DataFrame:
    """One row a setting: the loss increase of each family in percent of that of uniform attention."""
    table = {}
    for setting in settings:
        shares = {family: percentage(cost) for family, cost in setting.costs(rows).items()}
        table[f"[{setting.name}]({setting.page}.md)"] = shares
    frame = pd.DataFrame.from_dict(table, orient="index").reindex(columns=[*FAMILIES])
    return frame.dropna(axis=1, how="all").fillna("").rename_axis("setting")


def loss_against_time(shares: Mapping[str, float], times: Mapping[str, Mapping[str, float]]):
    """Plot the loss increase of each family against its time, one marker for each of two builds of the code."""
    builds = next(iter(times.values()))
    fig, ax = new_figure(1, 1, figsize=(4.2, 3.2), layout="constrained")
    ends = []
    for family, built in {"exact": dict.fromkeys(builds, 1.0), **times}.items():
        share = 0.0 if family == "exact" else shares.get(family)
        if share is None:
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
