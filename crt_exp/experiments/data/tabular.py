"""Tables of numbers and categories: UCI files, embedded sets and your own csv.

`load("car")` reads $CRT_DATA/uci/car.data as published by UCI. Columns and their levels follow UCI's documentation of
each set (columns.csv). The task scales, shuffles and splits; it fits the scaling on the training part.

`read_own` reads a csv, tsv, jsonl or parquet table with a header and predicts one of its columns. Columns of numbers
are numeric, other columns are categories. Classes and categories are text: 01 and 1 differ. A missing number becomes
the mean of the training part; a missing category is a level of its own. A column of numbers with a few words is
rejected.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from crt_exp.experiments.data import DataError, Folder
from crt_exp.experiments.data.files import read_table
from crt_exp.experiments.data.sources import SOURCES, missing_file, refuse_data_dir, task_folder
from crt_exp.registry import unknown

BLANKS = ("yeast", "wifi", "boston")  # blank-separated files; others are comma-separated
EMBEDDED = ("wine", "digits", "breast_cancer", "iris")


@dataclass(frozen=True, eq=False)
class Column:
    """One feature of n rows: float64 numbers, or int64 codes into `levels`."""

    name: str
    values: np.ndarray  # (n,)
    levels: tuple[str, ...] | None = None

    def encode(self) -> np.ndarray:
        """(n, width) float64 encoding; see `Table.encode`."""
        if self.levels is not None and len(self.levels) > 2:
            return np.eye(len(self.levels))[self.values]
        return self.values[:, None].astype(np.float64)


@dataclass(frozen=True, eq=False)
class Table:
    """A data set: features and one target of n rows, in source order."""

    name: str
    columns: tuple[Column, ...]
    target: np.ndarray  # (n,) int64 codes into `classes`; float64 for regression
    classes: tuple[str, ...] | None  # None: regression
    source: str  # origin of the rows

    def __len__(self) -> int:
        return len(self.target)

    def encode(self) -> np.ndarray:
        """All features as numbers: (n, width) float64, not scaled.

        A category is one 0/1 indicator for each level, or one column of 0 and 1 if it has two levels.
        """
        return np.hstack([column.encode() for column in self.columns])


# Columns of each table's file, in file order: name, role (target, or dropped for row identifiers), levels of a category
# and an alias of a level.
LAYOUTS = {
    name: [*rows.itertuples()]
    for name, rows in pd.read_csv(
        Path(__file__).with_name("columns.csv"), dtype=str, keep_default_na=False
    ).groupby("table", sort=False)
}


def load(name: str, data_dir: Folder = None) -> Table:
    """Read or make the data set `name`.

    Official files are read from `data_dir` (option task.data_dir), by default $CRT_DATA/uci. Embedded sets come from
    scikit-learn; wine is read from its file if `data_dir` is given. Raises DataError if a file is missing, differs from
    the published file, or is given to a set that reads none. Raises ConfigError for an unknown name.
    """
    if name in EMBEDDED and not (data_dir and name in LAYOUTS):
        refuse_data_dir(data_dir, f"task.dataset={name}, which is embedded")
        return embedded(name)
    if name not in LAYOUTS:
        raise unknown("task.dataset", str(name), list(dict.fromkeys([*LAYOUTS, *EMBEDDED])))
    return read_official(name, file_of(name, data_dir))


def file_of(name: str, data_dir: Folder) -> Path | None:
    """Path of the official file; None for an embedded set or an unknown folder."""
    folder = task_folder("uci", data_dir)
    if folder is None or name not in LAYOUTS or (name in EMBEDDED and not data_dir):
        return None
    return folder / Path(SOURCES[f"uci/{name}"].files[0].path).name


def read_official(name: str, path: Path | None) -> Table:
    """Read the published file of `name`; raises DataError if missing or different."""
    source = SOURCES[f"uci/{name}"]
    layout = LAYOUTS[name]
    if path is None or not path.is_file():
        raise missing_file(f"uci/{name}", path)
    separator = r"\s+" if name in BLANKS else ","
    try:
        frame = pd.read_csv(
            path,
            sep=separator,
            header=None,
            dtype=str,
            quoting=csv.QUOTE_NONE,
            keep_default_na=False,
            encoding="utf-8-sig",
        )
        if frame.shape != (source.files[0].rows, len(layout)):
            raise ValueError(
                f"(rows, columns) = {frame.shape}, expected {source.files[0].rows, len(layout)}"
            )
        arrays = [
            values_of(field, frame[i].str.strip())
            for i, field in enumerate(layout)
            if field.role != "dropped"
        ]
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: {str(error).strip()}; run `python -m crt_exp data fetch uci/{name}`, or get the file "
            f"from {source.page}"
        ) from None
    return table_of(name, arrays, f"{path} ({source.page})")


def values_of(field: NamedTuple, cells: pd.Series) -> np.ndarray:
    """(n,) numbers, or codes of levels.

    Raises ValueError with the row of a cell that is neither a finite number nor a level.
    """
    levels = field.levels.split()
    alias = field.aliases.split(" = ")
    if levels:
        values = codes_of(cells.replace(alias[0], alias[-1]), levels)
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
    """Table from the values of each column, in the order of its layout."""
    fields = [field for field in LAYOUTS[name] if field.role != "dropped"]
    columns = {}
    for field, values in zip(fields, arrays):
        levels = tuple(field.levels.split()) or None
        columns[field.role or field.column] = Column(field.column, values, levels)
    target = columns.pop("target")
    return Table(name, tuple(columns.values()), target.values, target.levels, source)


def embedded(name: str) -> Table:
    """A set of scikit-learn, in its row order."""
    from sklearn import datasets

    bunch = getattr(datasets, f"load_{name}")()
    source = f"embedded: scikit-learn's load_{name}"
    arrays = np.ascontiguousarray(bunch.data.T, np.float64)
    target = bunch.target.astype(np.int64)
    if name in LAYOUTS:
        return table_of(name, [target, *arrays], source)
    columns = tuple(
        Column(str(label).replace(" ", "_"), values)
        for label, values in zip(bunch.feature_names, arrays)
    )
    return Table(name, columns, target, tuple(map(str, bunch.target_names)), source)


# ---- your own csv file -----------------------------------------------------------------------------------------------
MOST_CLASSES = 20  # distinct whole numbers of a target that counts as classes if task.kind is null
MOST_LEVELS = 100  # levels of a category
ABSENT = "(missing)"  # level of a category
Kind = Literal["classification", "regression"]


def read_own(path: str | Path, target: str | None, kind: Kind | None = None) -> tuple[Table, str]:
    """Read a table; return it and a sentence on unusual columns.

    Raises DataError with file, column and row. Raises ConfigError for an unknown target.
    """
    path = Path(path).expanduser()
    # a question mark is a missing value, too
    frame = read_table(path, f"task.csv={path}", na_values="?").dropna(how="all")
    if target not in frame:
        raise unknown(f"task.target of {path}", str(target), list(frame.columns[:50]))
    notes: list[str] = []
    features: list[Column] = []
    for name, texts in frame.items():
        try:
            values = numbers_of(texts, name == target and kind == "classification")
            if name == target:
                goal, classes = target_of(texts, values, kind)
            else:
                features += feature_of(texts, values, notes)
        except ValueError as error:
            raise DataError(f"task.csv={path}: column {name}, {error}") from None
    if not features:
        raise DataError(
            f"task.csv={path}: no usable column in addition to {target}: {'; '.join(notes)}"
        )
    name = path.stem.removesuffix(".csv")
    return Table(name, tuple(features), goal, classes, str(path)), "; ".join(notes)


def numbers_of(texts: pd.Series, mixed: bool) -> pd.Series | None:
    """Column as float64 with NaN for missing values; None if it holds words.

    Raises ValueError for a few words among numbers, such as <0.1, unless the column may be mixed.
    """
    values = pd.to_numeric(texts, errors="coerce").astype(np.float64)
    values = values.where(np.isfinite(values))
    words = texts[values.isna()].dropna()
    if words.empty:
        return values
    if len(words) < values.count() and not mixed:
        raise ValueError(
            f"row {words.index[0]}: {words.iloc[0]!r}; expected a number such as 1234.5, or no value"
        )
    return None


def target_of(
    texts: pd.Series, values: pd.Series | None, kind: Kind | None
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Numbers and None, or codes and the names of their classes. Raises ValueError.

    texts: the cells; values: their `numbers_of`.
    """
    if texts.isna().any():
        raise ValueError(f"row {texts.isna().idxmax()} has no value; fill it in, or remove the row")
    if kind == "regression" and values is None:
        raise ValueError("task.kind=regression: the target holds words; expected numbers")
    if kind is None:
        whole = values is not None and (values % 1 == 0).all()
        few = whole and texts.nunique() <= MOST_CLASSES
        kind = "classification" if values is None or few else "regression"
    if kind == "regression":
        return values.to_numpy(), None
    classes = sorted(texts.unique())
    if values is not None:
        classes.sort(key=float)
    if len(classes) == 1:
        raise ValueError(f"one class only ({classes[0]}); expected at least 2")
    if not 2 <= len(classes) <= len(texts) / 2:
        raise ValueError(
            f"{len(classes)} distinct values in {len(texts)} rows; expected at least 2 classes with "
            "several rows each, or task.kind=regression"
        )
    return codes_of(texts, classes), tuple(classes)


def feature_of(texts: pd.Series, values: pd.Series | None, notes: list[str]) -> list[Column]:
    """The feature column, or no column and a note if it carries no information.

    texts: the cells; values: their `numbers_of`.
    """
    name = texts.name
    absent = int(texts.isna().sum())
    if absent == len(texts):
        notes.append(f"{name} is empty and is left out")
        return []
    levels = sorted(texts.dropna().unique())
    if values is None and len(levels) > max(2, min(MOST_LEVELS, len(texts) // 2)):
        notes.append(f"{name} has {len(levels)} different texts and is left out")
        return []
    if absent:
        notes.append(f"{name}: {absent} of {len(texts)} values are missing")
    if values is not None:
        return [Column(name, values.to_numpy())]
    if absent:
        levels.append(ABSENT)
    return [Column(name, codes_of(texts.fillna(ABSENT), levels), tuple(levels))]


def codes_of(texts: pd.Series, levels: Sequence[str]) -> np.ndarray:
    """Index of each cell in `levels`, (n,) int64; -1 for others."""
    return pd.Index(levels).get_indexer(texts).astype(np.int64)
