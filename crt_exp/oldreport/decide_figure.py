"""The pictures of decide.md, and of the front page: one panel each, whose names can be read on a telephone.

What attention loses against its time, both at one length; and FAVOR++ against FAVOR+.
"""

from typing import Any

from crt_exp import drawing
from crt_exp.drawing import new_figure
from crt_exp.oldreport.evidence import Interval

Decision = Any  # that of report/decide.py, which stands above

UNIFORM = "uniform"
WIDTH, SIZE = 4.6, 9  # inches, and points of every name: on a screen of 390 pixels these are 10 pixels high
MARKS = {"directly": "o", "early": "s", "to the end": "^"}
WHEN = {"directly": "directly after the swap", "early": "after little training", "to the end": "trained to the end"}


def figure(decision: "Decision"):
    """The setting `picture`: loss of a model at a length, and time of a training step of attention at the same one."""
    picture = decision.spec["picture"]
    entry, shares = next(each for each in decision.settings if each[0]["name"] == picture["setting"])
    times = decision.times[entry["direction"]]
    fig, ax = new_figure(1, 1, figsize=(WIDTH, 3.4), layout="constrained")
    for method, share in shares.items():
        shade = drawing.colour(decision.arms(entry)[method])
        if picture["length"] in times.get(method, {}):
            point(ax, method, times[method][picture["length"]], 100 * share, shade)
        else:
            ax.axhline(100 * share, color=shade, lw=1, ls=":")
            ax.annotate(f"{method} (not timed)", (0.02, 100 * share), color=shade, fontsize=SIZE, va="top",
                        xycoords=("axes fraction", "data"), xytext=(0, -3), textcoords="offset points")
    point(ax, "exact", 1.0, 0.0, drawing.EXACT)
    ax.set(xlim=(0, 1.12), ylim=(-8, 118), title=picture["title"], xlabel="time of a training step (exact: 1)",
           ylabel="% of what uniform attention loses")
    return fig


def point(ax, name: str, x: float, y: float, shade: str) -> None:
    ax.scatter([x], [y], color=shade, s=45, zorder=3)
    ax.annotate(name, (x, y), color=shade, fontsize=SIZE, xytext=(0, 7), textcoords="offset points",
                ha="right" if x > 0.9 else "center")


def forest_figure(forest: list[tuple[dict[str, Any], Interval]]):
    fig, ax = new_figure(1, 1, figsize=(WIDTH, 1.4 + 0.24 * len(forest)), layout="constrained")
    for place, (entry, interval) in enumerate(reversed(forest)):
        ax.errorbar(100 * interval.mean, place, xerr=100 * interval.half, color=nearer(interval),
                    marker=MARKS[entry["when"]], ms=4.5, capsize=2, lw=1.2)
    ax.axvline(0, color=drawing.EXACT, lw=0.8)
    ax.set_yticks(range(len(forest)), [entry["name"] for entry, _ in reversed(forest)], fontsize=SIZE)
    for when, mark in MARKS.items():
        ax.plot([], [], color=drawing.CONTROL, marker=mark, ms=4.5, lw=0, label=WHEN[when])
    ax.figure.legend(loc="outside lower center", fontsize=SIZE, ncols=1)
    ax.set(xlabel="nearer by, % of uniform's loss")
    ax.figure.suptitle("Nearer to exact attention: FAVOR++ (right) or FAVOR+ (left)", fontsize=SIZE + 1)
    return fig


def nearer(interval: Interval) -> str:
    """The colour of the map that is nearer; grey where the interval does not tell."""
    if interval.low > 0:
        return drawing.colour("favorpp")
    return drawing.colour("favorp") if interval.high < 0 else drawing.CONTROL
