"""Rows as they come: arrays, memory maps, sparse matrices and iterators, checked and cut into blocks.

Legend: n rows, d columns, T targets. Rows are counted from 0 over all batches that came before.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Self

import numpy as np
from scipy.sparse import issparse, vstack

from crt_exp.estimators import ROWS, blocks

FLOATS = (np.float64, np.float32)


class Batch(NamedTuple):
    """Rows, their targets (n, T) or labels (n,), and their weights."""

    X: Any
    y: np.ndarray
    weight: np.ndarray

    def __len__(self) -> int:
        return self.X.shape[0]

    def cut(self, rows: slice | np.ndarray) -> "Batch":
        return Batch(*(part[rows] for part in self))

    def then(self, other: "Batch") -> "Batch":
        joined = vstack([self.X, other.X], "csr") if issparse(self.X) or issparse(other.X) else np.concatenate(
            [self.X, other.X])
        return Batch(joined, np.concatenate([self.y, other.y]), np.concatenate([self.weight, other.weight]))

    def keep(self) -> "Batch":
        """A copy, so that what the caller writes into its array later does not count."""
        return Batch(*(part.copy() for part in self))


def is_stream(X: Any, y: Any) -> bool:
    """Whether X is an iterator of batches (X, y) or (X, y, sample_weight), a DataLoader for one, and not rows."""
    rows = hasattr(X, "shape") or hasattr(X, "__array__") or isinstance(X, (list, tuple, str, bytes))
    return y is None and not rows and isinstance(X, Iterable)


def opened(batch: Any) -> tuple[Any, Any, Any]:
    """X, y and weights or None of a batch of an iterator. Raises ValueError for what is no such batch."""
    if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
        raise ValueError(f"a batch of the iterator is a {type(batch).__name__}: it must be (X, y) or (X, y, weights)")
    return (*batch, None) if len(batch) == 2 else tuple(batch)


def check_finite_rows(values: Any, name: str, before: int) -> None:
    """Raises ValueError for the first row with NaN or infinity. before: how many rows came in earlier batches."""
    for rows in blocks(values.shape[0]):
        part = values[rows]
        entries = part.data if issparse(part) else part
        if not np.isfinite(entries).all():
            part = part.toarray() if issparse(part) else part
            bad = rows.start + int(np.flatnonzero(~np.isfinite(part.reshape(len(part), -1)).all(1))[0])
            raise ValueError(f"row {before + bad} of {name} contains NaN or inf: fill it in or leave it out"
                             + (f" (row {bad} of this batch)" if before else ""))


def checked_weights(sample_weight: Any, n: int, before: int) -> np.ndarray:
    """(n,) float64, ones for None. Raises ValueError, naming the row, where one is negative or not finite."""
    if sample_weight is None:
        return np.ones(n)
    weight = np.asarray(sample_weight, dtype=np.float64)
    if weight.ndim == 0:
        weight = np.full(n, float(weight))
    if weight.ndim > 1:
        raise ValueError(f"Sample weights must be 1D array or scalar, got {weight.ndim}D array")
    if weight.shape != (n,):
        raise ValueError(f"sample_weight.shape == {weight.shape}, expected {(n,)}!")
    check_finite_rows(weight, "sample_weight", before)
    if not before and not weight.any():
        raise ValueError("Sample weights must contain at least one non-zero number: there is nothing to fit to")
    if (weight < 0).any():
        bad = int(np.flatnonzero(weight < 0)[0])
        raise ValueError(f"sample_weight of row {before + bad} is {weight[bad]:g}: weights must not be negative")
    return weight


class Blocks:
    """Cuts batches into blocks of `size` rows whose borders do not depend on how the rows were split into batches.

    Rounding then does not either. rest: what does not fill a block yet, or None.
    """

    def __init__(self, size: int):
        self.size, self.rest = size, None

    def of(self, batch: Batch) -> Iterator[Batch]:
        """The blocks that are full with this batch; the rest is kept."""
        start = 0
        while len(batch) - start >= (missing := self.size - self.left):
            block = batch.cut(slice(start, start + missing))
            yield block if self.rest is None else self.rest.then(block)
            self.rest, start = None, start + missing
        if start < len(batch):
            last = batch.cut(slice(start, None)).keep()
            self.rest = last if self.rest is None else self.rest.then(last)

    @property
    def left(self) -> int:
        return 0 if self.rest is None else len(self.rest)


class Spread:
    """Every row, then every second, every fourth and so on of those that came, whatever batches they came in: at most
    `most`, and more than half of that where there are so many. Which, their places among all rows say alone."""

    def __init__(self, most: int = 4000):
        self.most, self.stride, self.count, self.kept, self.places = most, 1, 0, None, np.zeros(0, np.int64)

    def add(self, batch: Batch, places: np.ndarray | None = None) -> None:
        """places: (n,) of the rows, by default behind those that came before."""
        places = np.arange(self.count, self.count + len(batch)) if places is None else places
        chosen = np.flatnonzero(places % self.stride == 0)
        self.count += len(batch)
        self._join(batch.cut(chosen).keep(), places[chosen])

    def merge(self, other: "Spread") -> None:
        self.stride, self.count = max(self.stride, other.stride), self.count + other.count
        if other.kept is not None:
            self._join(other.kept, other.places)

    def state(self) -> dict[str, np.ndarray]:
        """What came, in arrays; `restored` is the reverse."""
        kept = {} if self.kept is None else self.kept._asdict()
        return {"stride": np.array(self.stride), "count": np.array(self.count), "places": self.places, **kept}

    def restored(self, state: dict[str, np.ndarray]) -> Self:
        self.stride, self.count, self.places = int(state["stride"]), int(state["count"]), state["places"]
        self.kept = Batch(state["X"], state["y"], state["weight"]) if "X" in state else None
        return self

    def _join(self, batch: Batch, places: np.ndarray) -> None:
        places = np.concatenate([self.places, places])
        kept = batch if self.kept is None else self.kept.then(batch)
        while (left := np.flatnonzero(places % self.stride == 0)).size > self.most:
            self.stride *= 2
        left = left[np.argsort(places[left], kind="stable")]
        self.kept, self.places = kept.cut(left), places[left]


def block_rows(columns: int) -> int:
    """Rows of a block: fewer where there are many columns."""
    return max(256, min(ROWS, 2**23 // columns))
