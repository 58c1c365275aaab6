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
class Table:
    """A data set: features and one target of n rows, in source order."""

    name: str
    features: pd.DataFrame  # columns of float64 numbers or of categories
    target: np.ndarray  # (n,) int64 codes into `classes`; float64 for regression
    classes: tuple[str, ...] | None  # None: regression
    source: str  # origin of the rows

    def __len__(self) -> int:
        return len(self.target)

    def encode(self) -> np.ndarray:
        """All features as numbers: (n, width) float64, not scaled.

        A category is one 0/1 indicator for each level, or one column of 0 and 1 if it has two levels.
        """
        encoded = []
        for _, column in self.features.items():
            if column.dtype != "category":
                encoded.append(column)
            elif len(column.cat.categories) > 2:
                encoded += [column == level for level in column.cat.categories]
            else:
                encoded.append(column.cat.codes)
        return np.column_stack(encoded).astype(np.float64)


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
        columns = {}
        for i, field in enumerate(layout):
            if field.role != "dropped":
                columns[field.role or field.column] = values_of(field, frame[i].str.strip())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: {str(error).strip()}; run `python -m crt_exp data fetch uci/{name}`, or get the file "
            f"from {source.page}"
        ) from None
    target = columns.pop("target")
    classes = None
    if target.dtype == "category":
        classes = tuple(target.cat.categories)
        target = target.cat.codes.astype(np.int64)
    features = pd.DataFrame(columns)
    return Table(name, features, target.to_numpy(), classes, f"{path} ({source.page})")


def values_of(field: NamedTuple, cells: pd.Series) -> pd.Series:
    """Numbers, or a category with the levels of the field.

    Raises ValueError with the row of a cell that is neither a finite number nor a level.
    """
    levels = field.levels.split()
    alias = field.aliases.split(" = ")
    if levels:
        values = category(cells.replace(alias[0], alias[-1]), levels)
    else:
        values = pd.to_numeric(cells, errors="coerce").astype(np.float64)
    wrong = values.isin([np.nan, np.inf, -np.inf])
    if wrong.any():
        row = wrong.idxmax()
        expected = f"one of {', '.join(levels)}" if levels else "a finite number"
        raise ValueError(f"row {row + 1}, column {field.column}: {cells[row]!r} is not {expected}")
    return values


def embedded(name: str) -> Table:
    """A set of scikit-learn, in its row order."""
    from sklearn import datasets

    bunch = getattr(datasets, f"load_{name}")()
    features = pd.DataFrame(bunch.data, columns=bunch.feature_names)
    classes = tuple(map(str, bunch.target_names))
    if name in LAYOUTS:
        classes = tuple(LAYOUTS[name][0].levels.split())
    source = f"embedded: scikit-learn's load_{name}"
    return Table(name, features, bunch.target.astype(np.int64), classes, source)


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
    features: list[pd.Series] = []
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
    table = Table(name, pd.concat(features, axis=1), goal, classes, str(path))
    return table, "; ".join(notes)


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
    return category(texts, classes).cat.codes.to_numpy(np.int64), tuple(classes)


def feature_of(texts: pd.Series, values: pd.Series | None, notes: list[str]) -> list[pd.Series]:
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
        return [values]
    if absent:
        levels.append(ABSENT)
    return [category(texts.fillna(ABSENT), levels)]


def category(texts: pd.Series, levels: Sequence[str]) -> pd.Series:
    """Cells as a category with these levels; others are missing."""
    codes = pd.Index(levels).get_indexer(texts)
    return pd.Series(pd.Categorical.from_codes(codes, levels), texts.index, name=texts.name)
