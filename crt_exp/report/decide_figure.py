"""The pictures of decide.md: quality against time, setting by setting; and FAVOR++ against FAVOR+."""

import math
from typing import Any

from crt_exp import drawing
from crt_exp.drawing import label_ends, new_figure
from crt_exp.report.evidence import Interval

Decision = Any  # that of report/decide.py, which stands above

UNIFORM = "uniform"
MOST = 1.3  # of uniform's cost; what loses more is drawn there
WHEN = {"directly": "directly after the swap", "early": "after little training", "to the end": "trained to the end"}
SHADES = {"directly": "#D55E00", "early": "#E69F00", "to the end": "#0072B2"}


MARKS = [14, 34, 64]     # sizes, from the shortest length to the longest


def figure(decision: "Decision"):
    """A panel for each setting whose times are known, and a key to the marks."""
    settings = [each for each in decision.settings if decision.times.get(each[0]["direction"])]
    across = max(2, min(4, len(settings) + 1))
    down = math.ceil((len(settings) + 1) / across)
    fig, axes = new_figure(down, across, figsize=(3.4 * across, 2.7 * down), squeeze=False, sharey=True,
                           layout="constrained")
    for ax, (entry, shares) in zip(axes.flat, settings):
        panel(ax, decision, entry, shares)
    for ax in axes.flat[len(settings):]:
        ax.set_axis_off()
    key(axes.flat[len(settings)], decision.spec["speed"]["lengths"])
    fig.supxlabel("time of a training step over that of exact attention (left: faster)", fontsize=10)
    fig.supylabel("lost of what uniform attention costs (0: nothing)", fontsize=10)
    return fig


def key(ax, lengths: list[float]) -> None:
    for size, length in zip(MARKS, lengths):
        ax.scatter([], [], s=size, color=drawing.CONTROL, label=f"{length:.0f} tokens")
    ax.plot([], [], color=drawing.CONTROL, ls=":", label="time not measured")
    ax.plot([], [], color=drawing.EXACT, lw=0.8, label="exact attention's time")
    ax.legend(loc="center")


def forest_figure(forest: list[tuple[dict[str, Any], Interval]]):
    fig, axes = new_figure(1, 1, figsize=(9, 1.2 + 0.24 * len(forest)), layout="constrained")
    plot_forest(axes, forest)
    return fig


def panel(ax, decision: "Decision", entry: dict[str, Any], shares: dict[str, float]) -> None:
    times, named = decision.times[entry["direction"]], []
    for method, share in (shares | {UNIFORM: 1.0}).items():
        ratios = [*times.get(method, {}).values()]
        given = decision.spec["methods"].get(method, {})
        shade = drawing.colour(given["colour"]) if "colour" in given else drawing.CONTROL
        if "colour" in given and shade == drawing.CONTROL:
            shade = drawing.colour_by_rule(given["colour"])
        if ratios:
            ax.plot(ratios, [min(share, MOST)] * len(ratios), color=shade, lw=1)
            ax.scatter(ratios, [min(share, MOST)] * len(ratios), s=MARKS[:len(ratios)], color=shade)
            named.append((method, max(ratios), share, shade))
        else:
            ax.axhline(min(share, MOST), color=shade, lw=0.8, ls=":")
            ax.annotate(method, (0, min(share, MOST)), xycoords=("axes fraction", "data"), xytext=(2, 2),
                        textcoords="offset points", fontsize=7, color=shade)
    ax.axvline(1, color=drawing.EXACT, lw=0.8)
    ax.set(xscale="log", title=f"{entry['name']}, d = {entry['d']}", ylim=(min(-0.1, *shares.values()), MOST + 0.05))
    label_ends(ax, [(method, x, min(share, MOST), shade) for method, x, share, shade in named], size=7)


def plot_forest(ax, forest: list[tuple[dict[str, Any], Interval]]) -> None:
    for place, (entry, interval) in enumerate(reversed(forest)):
        ax.errorbar(100 * interval.mean, place, xerr=100 * interval.half, color=SHADES[entry["when"]], marker="o", ms=4,
                    capsize=2, lw=1)
    ax.axvline(0, color=drawing.EXACT, lw=0.8)
    ax.set_yticks(range(len(forest)), [entry["name"] for entry, _ in reversed(forest)],
                  fontsize=7)
    for when, shade in SHADES.items():
        ax.plot([], [], color=shade, marker="o", ms=4, lw=1, label=WHEN[when])
    ax.legend(loc="lower right")
    ax.set(title="FAVOR++ nearer to exact attention than FAVOR+", xlabel="% of what uniform attention costs there")
