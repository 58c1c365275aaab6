"""What the reports on errors of kernel estimates share: arms and their cells, ratios of errors, lines with labels.

An arm is a choice of conf/features with m projections of some sampler and, where they differ, options of its file. The
draws of a cell come in independent groups; what is judged are logarithms of the groups' errors, paired by group.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from crt_exp.mechanism import OF_MAP, Mechanism
from crt_exp.report import palette
from crt_exp.report.evidence import LEVEL, Claim, detectable, exactly, holm, independent, paired
from crt_exp.report.writing import new_figure

NAMES = {"trig": "trigonometric", "pos": "FAVOR+ (pos)", "hyp": "hyperbolic", "oprf": "OPRF", "gerf": "GERF",
         "angular": "angular hybrid", "gaussian": "Gaussian hybrid", "clustered": "clustered hybrid"}
UNIT = "in the logarithm"
SHOWN = 6     # of arms that cannot be told apart from the least, so many by name
FLOOR = 1e-6  # an error below it is that of rounding, and none is drawn


class Arm(NamedTuple):
    features: str
    m: int
    sampler: str = "iid"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> dict[str, Any]:
        return self._asdict() | {"options": dict(self.options)}

    @property
    def mechanism(self) -> Mechanism:
        return mechanism_of(**self.key)

    @property
    def columns(self) -> int:
        """As the papers count them."""
        return self.mechanism.map().rank(self.m)


def mechanism_of(features: str, m: int, sampler: str, options: Mapping[str, Any]) -> Mechanism:
    return Mechanism.of(features=features, m=m, sampler=sampler, **{OF_MAP + key: v for key, v in options.items()})


def of_columns(features: str, columns: int, sampler: str = "iid", options: tuple[tuple[str, Any], ...] = ()) -> Arm:
    """The arm with as many projections as make at most so many columns."""
    one = Arm(features, 1, sampler, options).columns
    return Arm(features, columns // one, sampler, options)


def below(text: str, better: Sequence[float], worse: Sequence[float]) -> Claim:
    """The claim that errors of one arm are below those of another, a number for each group or repetition."""
    return Claim(text, paired(np.log(worse), np.log(better)), UNIT)


def truly_below(text: str, better: float, worse: float, measured: Claim) -> Claim:
    """The same by the closed forms of both errors, which no draw disturbs, with what was measured beside it.

    Errors of positive features have tails that few draws see, so that the mean of logarithms of measured ones lies far
    below the truth, and a verdict by them can be wrong however small its p-value is.
    """
    return Claim(f"{text} (closed forms; measured {measured.difference:+.3g})", exactly(math.log(worse / better)), UNIT)


def over(first: Sequence[float], second: Sequence[float]) -> str:
    """The ratio of two arms' errors, geometric mean over groups, with its interval."""
    found = paired(np.log(first), np.log(second))
    return f"{math.exp(found.mean):.2f} ({math.exp(found.low):.2f} to {math.exp(found.high):.2f})"


def least(errors: Mapping[str, Sequence[float]]) -> str:
    """The arm with the least geometric mean, and which others are not shown to be above it: of each a number for every
    draw, the draws the same for all; paired differences, p by Holm over the arms. The least is chosen by these same
    draws, so that some of what is not told apart from it may be below it."""
    first = min(errors, key=lambda name: np.mean(np.log(errors[name])))
    others = [name for name in errors if name != first]
    p = holm([paired(np.log(errors[name]), np.log(errors[first])).p for name in others])
    near = [f"{name} ({over(errors[name], errors[first])} times)" for name, value in zip(others, p) if value > LEVEL]
    shown = f"{'; '.join(near[:SHOWN])}{f' and {len(near) - SHOWN} more' if len(near) > SHOWN else ''}"
    return (f"{first}; not told apart from it: {shown}" if near else
            f"{first}; each of the {len(others)} others is above it")


def resolution(what: str, first: Sequence[float], second: Sequence[float]) -> str:
    """What difference of two arms' errors so many groups show."""
    least = detectable(np.subtract(np.log(first), np.log(second)))
    return f"A difference of {least:.2g} in the logarithm of {what} would be shown with a probability of 80%, alone."


def distinct(keys: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each key of a cell once."""
    found: list[dict[str, Any]] = []
    for key in keys:
        found += [key] if key not in found else []
    return found


def spread(values: Sequence[float], digits: int = 3) -> str:
    return f"{independent(values):.{digits}g}"


def grid(rows: Collection[Any], columns: Collection[Any], draw: Callable[[Any, Any, Any], None],
         title: Callable[[Any, Any], str], along: str, **how: Any):
    """Relative errors along something, one picture for each row and column: draw(ax, row, column)."""
    fig, axes = new_figure(len(rows), len(columns), squeeze=False, **how)
    for line_of, row in zip(axes, rows):
        for ax, column in zip(line_of, columns):
            draw(ax, row, column)
            ax.set_title(title(row, column))
    for ax in axes[-1]:
        ax.set_xlabel(f"{along}; lines: closed form, points: measured")
    for ax in axes[:, 0]:
        ax.set_ylabel("relative error")
    fig.tight_layout()
    return fig


def line(ax, x: Iterable[float], y: Iterable[float], features: str, style: str = "-", points: bool = False) -> None:
    """A curve, or points, of a map in its colour; what is at the floor or below is left out."""
    kept = [(a, b) for a, b in zip(x, y) if b is not None and b > FLOOR]
    if not kept:
        return
    how = {"ls": "", "marker": "o", "ms": 2.6} if points else {"ls": style, "lw": 1.5}
    ax.plot(*zip(*kept), color=palette.colour(features), **how)
