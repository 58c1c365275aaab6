"""Pathfinder: pictures of dashed curves, two of which end in dots, and whether one curve joins both dots
(Linsley et al., 2018).

A curve is drawn dash by dash: `dash` pixels in a row, `gap` empty ones, and a turn of at most `turn` radians. Pixels of
different curves are at least `apart` pixels from each other, more than a gap, so that gaps can be crossed in one way
only. Two long curves and some short ones are in each picture; one dot is at an end of the first, the other at its other
end (label 1) or at an end of the second (label 0): nothing else tells the labels.

Legend: n pictures of `size` x `size` pixels, grey values of 0 to 255.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from crt_exp.data import DataError
from crt_exp.options import Count, NotNegative, Whole

LINE, DOT = 160, 255                                         # grey values
TRIES, PICTURES = 200, 20                                    # of a curve, and of all curves of a picture


class PathfinderRules(NamedTuple):
    """Pictures of each split, pixels of a side, dashes of a long curve and of a short one, and short curves."""

    train: Count
    validation: Count
    test: Count
    size: Count
    dashes: Count
    short: Count
    distractors: Whole
    dash: Count = 3
    gap: Whole = 1
    apart: Count = 3
    turn: NotNegative = 0.6


PRESETS = {"small": PathfinderRules(4000, 500, 500, 16, 3, 2, 1),
           # 1024 pixels and 200,000 pictures, as in the Arena
           "full": PathfinderRules(160_000, 20_000, 20_000, 32, 6, 3, 4)}


def drawn(rules: PathfinderRules, seed: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Pictures (n, size, size) uint8 and labels (n,) of each split; every second picture has label 1.

    Raises DataError where the curves do not fit into a picture.
    """
    counts = {"train": rules.train, "validation": rules.validation, "test": rules.test}
    return {split: drawn_split(rules, count, np.random.default_rng([seed, which]))
            for which, (split, count) in enumerate(counts.items())}


def drawn_split(rules: PathfinderRules, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(count) % 2
    return np.stack([picture(rules, bool(label), rng) for label in labels]), labels


def picture(rules: PathfinderRules, joined: bool, rng: np.random.Generator) -> np.ndarray:
    for _ in range(PICTURES):
        curves = laid(rules, rng)
        if curves is not None:
            ends = (curves[0][0], curves[0][-1] if joined else curves[1][0])
            return painted(rules.size, curves, ends)
    raise DataError(f"{rules.distractors + 2} curves of {rules.dashes} and {rules.short} dashes do not fit into "
                    f"pictures of {rules.size} x {rules.size} pixels: choose a larger task.rules.size, or fewer and "
                    "shorter curves")


def painted(size: int, curves: list[np.ndarray], ends: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Lines, and a dot on each of two ends."""
    image = np.zeros((size, size), np.uint8)
    for curve in curves:
        image[tuple(curve.T)] = LINE
    for end in ends:
        image[tuple(end)] = DOT
    return image


def laid(rules: PathfinderRules, rng: np.random.Generator) -> list[np.ndarray] | None:
    """The pixels (., 2) of each curve from end to end, the two long ones first; None where one has no room."""
    taken, curves = np.zeros((0, 2), np.int64), []
    for length in (rules.dashes, rules.dashes, *[rules.short] * rules.distractors):
        tries = (walked(rules, length, taken, rng) for _ in range(TRIES))
        curve = next((curve for curve in tries if curve is not None), None)
        if curve is None:
            return None
        curves.append(curve)
        taken = np.concatenate([taken, curve])
    return curves


def walked(rules: PathfinderRules, dashes: int, taken: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
    """A curve that keeps its distance; None where it came too near to something."""
    place, heading, pixels = rng.uniform(0, rules.size, 2), rng.uniform(0, 2 * np.pi), []
    for _ in range(dashes):
        ahead = np.array([np.sin(heading), np.cos(heading)])
        new = np.unique(np.floor(place + np.arange(rules.dash)[:, None] * ahead).astype(np.int64), axis=0)
        new = new[np.argsort((new - place) @ ahead, kind="stable")]
        before = np.concatenate([taken, *pixels[:-2]]) if pixels[:-2] else taken
        if new.min() < 0 or new.max() >= rules.size or near(new, before, rules.apart):
            return None
        pixels.append(new)
        place = place + (rules.dash + rules.gap) * ahead
        heading += rng.uniform(-rules.turn, rules.turn)
    return np.concatenate(pixels)


def near(pixels: np.ndarray, others: np.ndarray, apart: int) -> bool:
    """Whether a pixel is less than `apart` away from one of the others, along either axis the farther one counts."""
    return bool(len(others)) and bool((np.abs(pixels[:, None] - others).max(-1) < apart).any())


def joined(grey: np.ndarray, gap: int) -> bool:
    """The answer by the rules: whether steps over at most `gap` empty pixels lead from one dot to the other."""
    pixels, (first, last) = np.argwhere(grey > 0), np.argwhere(grey == DOT)
    return any((pixel == last).all() for pixel in reached(pixels, first, gap + 1))


def reached(pixels: np.ndarray, first: np.ndarray, step: int) -> Iterator[np.ndarray]:
    """Pixels that can be walked to from the first by steps of at most `step`."""
    left, going = pixels.tolist(), [first]
    while going:
        here = going.pop()
        yield here
        close = [pixel for pixel in left if np.abs(np.array(pixel) - here).max() <= step]
        left = [pixel for pixel in left if pixel not in close]
        going += map(np.array, close)
