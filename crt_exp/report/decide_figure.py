"""The picture of decide.md: quality against time, setting by setting, and FAVOR++ against FAVOR+."""

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



def figure(decision: "Decision"):
    settings = [each for each in decision.settings if decision.times.get(each[0]["direction"])]
    across = max(2, min(4, len(settings)))
    down = math.ceil(len(settings) / across)
    height = 1.2 + 0.24 * len(decision.forest)
    fig, axes = new_figure(down + 1, across, figsize=(4 * across, 3 * down + height), squeeze=False,
                           layout="constrained", gridspec_kw={"height_ratios": [3] * down + [height]})
    for ax, (entry, shares) in zip(axes[:down].flat, settings):
        panel(ax, decision, entry, shares)
    for ax in axes[:down].flat[len(settings):]:
        ax.set_axis_off()
    for ax in axes[down]:
        ax.remove()
    plot_forest(fig.add_subplot(axes[down, 0].get_gridspec()[down, :]), decision.forest)
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
            ax.scatter(ratios, [min(share, MOST)] * len(ratios), s=[14, 34, 64][:len(ratios)], color=shade)
            named.append((method, max(ratios), share, shade))
        else:
            ax.axhline(min(share, MOST), color=shade, lw=0.8, ls=":")
            ax.annotate(method, (0, min(share, MOST)), xycoords=("axes fraction", "data"), xytext=(2, 2),
                        textcoords="offset points", fontsize=7, color=shade)
    ax.axvline(1, color=drawing.EXACT, lw=0.8)
    ax.set(xscale="log", title=f"{entry['name']}, d = {entry['d']}", xlabel="time over exact attention's",
           ylabel="lost of uniform's cost", ylim=(min(-0.1, *shares.values()), MOST))
    label_ends(ax, [(method, x, min(share, MOST), shade) for method, x, share, shade in named], size=7)


def plot_forest(ax, forest: list[tuple[dict[str, Any], Interval]]) -> None:
    for place, (entry, interval) in enumerate(reversed(forest)):
        ax.errorbar(100 * interval.mean, place, xerr=100 * interval.half, color=SHADES[entry["when"]], marker="o", ms=4,
                    capsize=2, lw=1)
    ax.axvline(0, color=drawing.EXACT, lw=0.8)
    ax.set_yticks(range(len(forest)), [f"{entry['name']}, {WHEN[entry['when']]}" for entry, _ in reversed(forest)],
                  fontsize=7)
    ax.set(title="FAVOR++ nearer than FAVOR+", xlabel="% of what uniform attention costs there")
