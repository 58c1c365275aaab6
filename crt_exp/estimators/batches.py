"""Batches of rows, cut into blocks, and a spread of all rows that is kept.

Legend: n rows, d columns, T targets.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import issparse, vstack

from crt_exp.estimators.random_features import ROWS


class Batch(NamedTuple):
    """Rows, their targets (n, T) or labels (n,), and their weights."""

    X: Any
    y: np.ndarray
    weight: np.ndarray

    def __len__(self) -> int:
        return self.X.shape[0]

    def cut(self, rows: slice) -> "Batch":
        return Batch(*(part[rows] for part in self))

    def then(self, other: "Batch") -> "Batch":
        joined = vstack([self.X, other.X], "csr") if issparse(self.X) or issparse(other.X) else np.concatenate(
            [self.X, other.X])
        return Batch(joined, np.concatenate([self.y, other.y]), np.concatenate([self.weight, other.weight]))

    def keep(self) -> "Batch":
        """A copy, so that what the caller writes into its array later does not count."""
        return Batch(*(part.copy() for part in self))


class Blocks:
    """Cuts batches into blocks of `size` rows whose borders do not depend on how the rows were split into batches.

    Rounding then does not either. rest: what does not fill a block yet, or None.
    """

    def __init__(self, size: int):
        self.size, self.rest = size, None

    def of(self, batch: Batch) -> Iterator[Batch]:
        """The blocks that are full with this batch; the rest is kept."""
        start = 0
        while len(batch) - start >= (missing := self.size - (0 if self.rest is None else len(self.rest))):
            block = batch.cut(slice(start, start + missing))
            yield block if self.rest is None else self.rest.then(block)
            self.rest, start = None, start + missing
        if start < len(batch):
            last = batch.cut(slice(start, None)).keep()
            self.rest = last if self.rest is None else self.rest.then(last)


class Spread:
    """Every row, then every second, every fourth and so on of all that came, whatever batches they came in: at most
    `most`, and more than half of that where there are as many. kept: these rows, or None."""

    def __init__(self, most: int = 4000):
        self.most, self.stride, self.count, self.kept = most, 1, 0, None

    def add(self, batch: Batch) -> None:
        total, before = self.count + len(batch), self.stride
        while total > self.most * self.stride:
            self.stride *= 2
        new = batch.cut(slice(-self.count % self.stride, None, self.stride)).keep()
        old = None if self.kept is None else self.kept.cut(slice(None, None, self.stride // before))
        self.count, self.kept = total, new if old is None else old.then(new)


def block_rows(columns: int) -> int:
    """Rows of a block: fewer where there are many columns."""
    return max(256, min(ROWS, 2**23 // columns))
