"""Sums over rows, all that ridge regression needs of them.

Legend: n rows, M features z, T targets y, w weights, W their sum.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from crt_exp.estimators.random_features import blocks
from crt_exp.samplers.draws import free_memory

AT_ONCE = 128  # rows


@dataclass
class Sums:
    """sum w z z^T, w z y^T, w z, w y, w y^2 and w, in float64; y is counted from `origin`, which rounding gains by.

    Products of float32 features are taken in float32, a block at a time, and added up in float64.
    """

    gram: Tensor     # (M, M)
    right: Tensor    # (M, T)
    features: Tensor  # (M,)
    targets: Tensor  # (T,)
    squares: Tensor  # (T,)
    weight: float
    rows: int
    origin: Tensor   # (T,)

    @classmethod
    def empty(cls, columns: int, origin: Tensor) -> "Sums":
        def zeros(*shape):
            return torch.zeros(shape, dtype=torch.float64)
        count = len(origin)
        return cls(zeros(columns, columns), zeros(columns, count), zeros(columns), zeros(count), zeros(count), 0.0,
                   0, origin)

    def add(self, z: Tensor, y: Tensor, w: Tensor) -> None:
        """z (n, M), float32 or float64, which it writes to; y (n, T) and w (n,) float64."""
        root = w.sqrt()
        y = (y - self.origin) * root[:, None]
        z *= root[:, None].to(z.dtype)
        self.gram += symmetric_product(z)
        sides = double_product(z, torch.cat([root[:, None], y], 1))
        self.features += sides[:, 0]
        self.right += sides[:, 1:]
        self.targets += root @ y
        self.squares += y.square().sum(0)
        self.weight += float(w.sum())
        self.rows += len(w)

    def copy(self) -> "Sums":
        return Sums(*(part.clone() if isinstance(part, Tensor) else part for part in vars(self).values()))

    def place(self, places: list[int], count: int) -> None:
        """Its targets become columns `places` of `count`; the others are zero so far."""
        for name in ("right", "targets", "squares", "origin"):
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:-1], count)
            new[..., places] = old
            setattr(self, name, new)


@dataclass
class Centred:
    """Sums of what features and targets are beyond their means."""

    gram: Tensor     # (M, M)
    right: Tensor    # (M, T)
    squares: Tensor  # (T,)
    features: Tensor  # (M,) means
    targets: Tensor  # (T,)
    weight: float
    rows: int
    trace: float     # sum w |z|^2

    @classmethod
    def of(cls, sums: Sums) -> "Centred":
        """Takes over the Gram matrix of `sums`. Raises ValueError where features overflow."""
        if not bool(sums.gram.diagonal().isfinite().all()):
            raise ValueError("features overflow: the rows lie too far apart for this mechanism; scale them down, take "
                             "longer length scales, or mechanism='trig', which is bounded")
        z, y = sums.features / sums.weight, sums.targets / sums.weight
        trace = float(sums.gram.trace())
        gram = sums.gram.addr_(sums.features, z, alpha=-1)
        right = sums.right - sums.features[:, None] * y
        squares = (sums.squares - sums.targets * y).clamp(min=0)
        return cls(gram, right, squares, z, y + sums.origin, sums.weight, sums.rows, trace)


def symmetric_product(z: Tensor) -> Tensor:
    """z^T z (M, M), by NumPy, which computes one triangle: half the time of a product that does not know."""
    rows = z.numpy()
    with np.errstate(invalid="ignore", over="ignore"):  # infinite features are refused when the sums are solved
        return torch.from_numpy(rows.T @ rows)


def double_product(z: Tensor, y: Tensor) -> Tensor:
    """z^T y (M, T) in float64 of z (n, M) and y (n, T) float64, by rows that fit a cache when they are made double."""
    if z.dtype == y.dtype:
        return z.mT @ y
    total = y.new_zeros(z.shape[1], y.shape[1])
    for rows in blocks(len(z), AT_ONCE):
        total.addmm_(z[rows].double().mT, y[rows])
    return total


def check_memory(columns: int, rows: int) -> None:
    """Raises ValueError where sums of so many columns, and what is solved with them, do not fit the free memory."""
    need = 32 * columns**2 + 12 * rows * columns
    if need > 2**28 and need > (free := free_memory(torch.device("cpu"))):
        raise ValueError(f"n_components = {columns}: sums over that many columns and their solution take "
                         f"{need / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of memory are free; choose fewer")
