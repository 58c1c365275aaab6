"""What `make performers-fig2` measures: log MSE of trigonometric over that of other estimates, by angle and length.

Softmax kernel, x and y of equal length, closed forms; parameters are fitted to each pair. zero: the estimate 0, whose
error is the kernel itself, against M projections of trig.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from crt_exp import drawing
from crt_exp.features import TrigRF
from crt_exp.studies.cells import Cells, Draw
from crt_exp.studies.variance import log_variances

DEGREES = range(-180, 181, 5)
LENGTHS = tuple(round(0.1 * i, 1) for i in range(1, 21))
WITHOUT = {"trig": "the map that the others are measured against", "smreg": "it estimates a kernel of its own",
           **drawing.APART,
           **dict.fromkeys(("gerf", "pois", "geom", "pois_coord"), "the figure is about positive features"),
           **dict.fromkeys(("pois_plus", "geom_plus"), "they depend on the axes, the figure on angle and length alone")}
ZERO, M = "zero", 64
LEAST = 1e-12  # |x - y|^2 or |x + y|^2 below which two vectors are equal or opposite, but for rounding


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """Settings "length <l>", x: the angle in degrees; no row where an estimate has no variance, at x = y and x = -y."""
    cells = Cells(name, sources, keep)
    keys = [{"arm": arm, "length": length} for arm in (*drawing.maps(WITHOUT), ZERO) for length in LENGTHS]
    cells.fill(keys, ratios, name, workers=1)
    for key in keys:
        for angle, value in zip(DEGREES, cells[key]):
            if math.isfinite(value):
                yield cells.draw(key, f"length {key['length']:g}", key["arm"], "log_ratio", round(value, 6), x=angle)


def ratios(arm: str, length: float) -> list[float]:
    """Of DEGREES; -inf where the error of trig vanishes (x = y), inf where that of a positive map does (x = -y)."""
    angle = torch.tensor([*DEGREES]).double().deg2rad()
    x = torch.stack([torch.full_like(angle, length), torch.zeros_like(angle)], -1)
    y = length * torch.stack([angle.cos(), angle.sin()], -1)
    values = log_variances(TrigRF(), x, y) - math.log(M) - log_mse(arm, x, y)
    same, opposite = ((v.square().sum(-1) < LEAST) for v in (x - y, x + y))
    values = values.masked_fill(same, -math.inf)
    return (values if arm == ZERO else values.masked_fill(opposite, math.inf)).tolist()


def log_mse(arm: str, x: Tensor, y: Tensor) -> Tensor:
    """Of pairs (n, 2): (n,), nats; of M projections, and of the estimate 0."""
    if arm == ZERO:
        return 2 * (x * y).sum(-1)
    return log_variances(drawing.feature_map(arm), x, y) - math.log(M)
