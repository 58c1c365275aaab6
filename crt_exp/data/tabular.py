"""Tables of numbers and categories: the UCI files, and the sets that need no file.

`load("car")` reads $CRT_DATA/uci/car.data as UCI published it. Types, units and the orders of categories follow the
documentation that UCI gives with each set (columns.csv). The task scales, shuffles and splits, on the training part.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from crt_exp.config import unknown
from crt_exp.data import DataError, chess
from crt_exp.data.sources import SOURCES, missing, no_folder, task_folder

BLANKS = ("yeast", "wifi", "boston")  # files whose columns are separated by blanks, the others by commas
EMBEDDED = ("wine", "chess", "digits", "breast_cancer", "iris")


@dataclass(frozen=True, eq=False)
class Column:
    """One feature of n rows: float64 values, or int64 codes into `levels` where the feature is categorical."""

    name: str
    values: np.ndarray                    # (n,)
    levels: tuple[str, ...] | None = None
    ordered: bool = False                 # levels are listed from low to high

    def encode(self, coding: str) -> np.ndarray:
        """(n, width) float64: the number, the place in the order, or one indicator per level; see `Table.encode`."""
        if self.levels is not None and not (coding == "ordinal" and self.ordered):
            return np.eye(len(self.levels))[self.values]
        return self.values[:, None].astype(np.float64)


@dataclass(frozen=True, eq=False)
class Table:
    """A data set: features and one target for each of n rows, in the order of the source."""

    name: str
    columns: tuple[Column, ...]
    target: np.ndarray                    # (n,) int64 codes into `classes`; float64 for regression
    classes: tuple[str, ...] | None       # None: regression
    source: str                           # where the rows come from

    def __len__(self) -> int:
        return len(self.target)

    def encode(self, coding: str = "ordinal") -> np.ndarray:
        """All features as numbers: (n, width) float64, not scaled.

        "ordinal": a category becomes its place 0, 1, ... in the documented order; where no order exists, indicators.
        "onehot": every category becomes one 0/1 indicator per level.
        """
        return np.hstack([column.encode(coding) for column in self.columns])


# by table, the columns of its file in their order: name, role (target, or dropped for what identifies the row), kind,
# levels (in order, where there is one; two levels are ordered: 0 and 1 lose nothing) and another spelling of a level
LAYOUTS = {name: [*rows.itertuples()] for name, rows in pd.read_csv(
    Path(__file__).with_name("columns.csv"), dtype=str, keep_default_na=False).groupby("table", sort=False)}


def load(name: str, data_dir: str | Path | None = None) -> Table:
    """Read or make the data set `name`.

    Official files are read from `data_dir` (the option task.data_dir), by default $CRT_DATA/uci. A set that needs no
    file is made on the spot; wine and chess are read from their files where `data_dir` is given. Raises DataError for
    an unknown name, and for a file that is missing or is not the published one, down to its number of rows.
    """
    if name in EMBEDDED and not (data_dir and name in LAYOUTS):
        no_folder(data_dir, f"task.dataset={name}, which is embedded")
        return embedded(name)
    if name not in LAYOUTS:
        raise unknown("task.dataset", str(name), list(dict.fromkeys([*LAYOUTS, *EMBEDDED])))
    return read_official(name, file_of(name, data_dir))


def file_of(name: str, data_dir: str | Path | None) -> Path | None:
    """The official file that is read; None for a set that needs none, and where nobody says where the files are."""
    folder = task_folder("uci", data_dir)
    if folder is None or name not in LAYOUTS or (name in EMBEDDED and not data_dir):
        return None
    return folder / Path(SOURCES[f"uci/{name}"].files[0].path).name


def read_official(name: str, path: Path | None) -> Table:
    """The published file of `name`. Raises DataError where it is missing or another one."""
    source, layout = SOURCES[f"uci/{name}"], LAYOUTS[name]
    if path is None or not path.is_file():
        raise missing(f"uci/{name}", path)
    try:
        frame = pd.read_csv(path, sep=r"\s+" if name in BLANKS else ",", header=None, dtype=str, quoting=csv.QUOTE_NONE,
                            keep_default_na=False, encoding="utf-8-sig")
        if frame.shape != (source.files[0].rows, len(layout)):
            raise ValueError(f"it has (rows, columns) {frame.shape}, expected {source.files[0].rows, len(layout)}")
        arrays = [values_of(field, frame[i].str.strip()) for i, field in enumerate(layout) if field.role != "dropped"]
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {str(error).strip()}; get the published file by "
                        f"`python -m crt_exp.data fetch uci/{name}`, or from {source.page}") from None
    return table_of(name, arrays, f"{path} ({source.page})")


def values_of(field: NamedTuple, cells: pd.Series) -> np.ndarray:
    """(n,) numbers, or codes. Raises ValueError naming the row of a cell that is no finite number, or no level."""
    levels, alias = field.levels.split(), field.aliases.split(" = ")
    if levels:
        values = pd.Index(levels).get_indexer(cells.replace(alias[0], alias[-1])).astype(np.int64)
        wrong = values < 0
    else:
        values = pd.to_numeric(cells, errors="coerce").to_numpy(np.float64)
        wrong = ~np.isfinite(values)
    if wrong.any():
        row = int(wrong.argmax())
        expected = f"one of {', '.join(levels)}" if levels else "a finite number"
        raise ValueError(f"row {row + 1}, column {field.column}: {cells[row]!r} is not {expected}")
    return values


def table_of(name: str, arrays: Sequence[np.ndarray], source: str) -> Table:
    """arrays: the values of each column of the layout, in its order."""
    columns = {field.role or field.column: Column(field.column, values, tuple(field.levels.split()) or None,
                                                  field.kind == "ordered")
               for field, values in zip((field for field in LAYOUTS[name] if field.role != "dropped"), arrays)}
    target = columns.pop("target")
    return Table(name, tuple(columns.values()), target.values, target.levels, source)


def embedded(name: str) -> Table:
    """Chess from its rules, the others as scikit-learn carries them, in its own row order."""
    if name == "chess":
        return table_of(name, np.ascontiguousarray(chess.positions().T), "embedded: computed from the rules of chess")
    from sklearn import datasets

    bunch, source = getattr(datasets, f"load_{name}")(), f"embedded: scikit-learn's load_{name}"
    arrays, target = np.ascontiguousarray(bunch.data.T, np.float64), bunch.target.astype(np.int64)
    if name in LAYOUTS:
        return table_of(name, [target, *arrays], source)
    columns = tuple(Column(str(label).replace(" ", "_"), values) for label, values in zip(bunch.feature_names, arrays))
    return Table(name, columns, target, tuple(map(str, bunch.target_names)), source)
