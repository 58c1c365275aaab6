"""What a kernel machine keeps while it reads rows: the model's sums, rows held out for the test, and how far it came.

Legend: n rows, d columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from crt_exp.data import DataError
from crt_exp.data.own_table import MOST_LEVELS, plain
from crt_exp.data.row_files import Columns, RowFile
from crt_exp.ridge import RandomFeatureClassifier, RandomFeatureRidge
from crt_exp.ridge.batches import Batch, Spread
from crt_exp.ridge.sums import SUMMED
from crt_exp.runner.processes import Alone, World
from crt_exp.whole_files import whole

Model = RandomFeatureRidge | RandomFeatureClassifier


@dataclass(frozen=True)
class Coded:
    """Columns of a file as numbers (n, d): of words an indicator for each of `levels`, all zero for any other word."""

    columns: Sequence[str]
    levels: Mapping[str, Sequence[str]]   # of columns of words

    @classmethod
    def of(cls, look: Columns, columns: Sequence[str], words: Sequence[str], file: RowFile) -> "Coded":
        """Levels are those of the rows looked at. Raises DataError where they are too many."""
        levels = {name: np.unique(plain_words(look[name])).tolist() for name in words}
        for name, found in levels.items():
            if len(found) > MOST_LEVELS:
                raise DataError(f"{file.path}, column {name}: {len(found)} different words in {len(look[name])} rows "
                                f"from all over the file: task.onehot makes a column of each, at most {MOST_LEVELS}")
        return cls(columns, levels)

    @property
    def names(self) -> list[str]:
        return [f"{name}={level}" if level is not None else name
                for name in self.columns for level in self.levels.get(name, [None])]

    def __call__(self, columns: Columns) -> np.ndarray:
        return np.concatenate([plain_words(columns[name])[:, None] == np.array(self.levels[name])
                               if name in self.levels else columns[name][:, None] for name in self.columns],
                              1, dtype=np.float64)


def plain_words(words: np.ndarray) -> np.ndarray:
    """(n,), without blanks around them, and numbers in one spelling."""
    different, place = np.unique(words, return_inverse=True)
    return np.array([plain(word) for word in different.tolist()])[place]


@dataclass(frozen=True)
class Scale:
    """(X - mean) / width, in a precision."""

    mean: np.ndarray     # (d,)
    width: np.ndarray    # (d,)
    dtype: np.dtype

    @classmethod
    def of(cls, X: np.ndarray, names: Sequence[str], file: RowFile, precision: str) -> "Scale":
        """Raises DataError for a column without two values."""
        if len(X) < 2:
            raise DataError(f"{file.path} has {len(X)} row: it takes more")
        for name, low, high in zip(names, X.min(0), X.max(0)):
            if low == high:
                raise DataError(f"{file.path}, column {name}: it is {low:g} in all of {len(X)} rows from all over the "
                                "file: a constant says nothing, so leave it out (task.columns=[...] names the others)")
        return cls(X.mean(0), X.std(0), np.dtype(precision))

    def __call__(self, X: np.ndarray) -> np.ndarray:
        return ((X - self.mean) / self.width).astype(self.dtype)


@dataclass
class Reading:
    """next: the number of the chunk from which this process goes on; rows: that it has read, in so many seconds."""

    model: Model
    held: Spread
    scale: Scale
    next: int = 0
    rows: int = 0
    seconds: float = 0.0

    def take(self, batch: Batch, held: np.ndarray, places: np.ndarray) -> None:
        """Sums the rows but those held out (n,). places: of the rows in the file. A chunk ends a block: sums do not
        depend on who reads the next one."""
        self.rows += len(batch)
        self.held.add(batch.cut(np.flatnonzero(held)), places[held])
        left = batch.cut(np.flatnonzero(~held))
        if len(left):
            y = left.y if left.y.ndim == 1 else left.y[:, 0]
            self.model._take(self.scale(left.X), y, left.weight, places[~held])
            self.model._close()

    def save(self, path: Path | None) -> None:
        if path is None:
            return
        held = {f"held.{name}": part for name, part in self.held.state().items()}
        with whole(path) as part, part.open("wb") as file:
            np.savez(file, next=self.next, read=self.rows, seconds=self.seconds, **self.model._state(), **held)

    def load(self, path: Path | None) -> None:
        """What `save` left, if it did. Raises DataError for a file that is none."""
        if path is None or not path.is_file():
            return
        try:
            with np.load(path, allow_pickle=False) as file:
                state = dict(file)
            self.next, self.rows, self.seconds = (state.pop(name).item() for name in ("next", "read", "seconds"))
            held = {name: state.pop(name) for name in list(state) if name.startswith("held.")}
            self.held.restored({name.removeprefix("held."): part for name, part in held.items()})
            self.model._restore(state)
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise DataError(f"{path} holds no sums to go on from: {error}; take it away to begin anew") from None

    def gather(self, world: World | Alone) -> None:
        """The sums of all processes, on each of them, and all rows held out."""
        if world.size == 1:
            return
        model, parts = self.model, world.gather((self.held, self.rows, getattr(self.model, "_spread", None)))
        for labels in world.gather(getattr(model, "classes_", None)):
            if labels is not None:
                model._know(labels)
        for name in SUMMED:
            world.sum(getattr(model.sums_, name))
        counts = world.gather((model.sums_.weight, model.sums_.rows, model.rows_))
        model.sums_.weight, model.sums_.rows, model.rows_ = (sum(each) for each in zip(*counts))
        for number, (held, rows, spread) in enumerate(parts):
            if number != world.rank:
                self.held.merge(held)
                self.rows += rows
                if spread is not None:
                    model._spread.merge(spread)
        model._solved = None
