"""Tables of numbers and categories: UCI files, embedded sets and your own csv.

`load("car")` reads $CRT_DATA/uci/car.data as published by UCI. Types, units and the order of categories follow UCI's
documentation of each set (columns.csv). The task scales, shuffles and splits; it fits the scaling on the training part.

`read_own` reads a csv file with a header and predicts one of its columns. Columns of numbers are numeric, other columns
are categories. Classes and categories are text: 01 and 1 differ, as do 3.1 and 3.10. A column in which different whole
numbers of this kind have the same value holds categories. A missing number becomes the mean of the training part; a
missing category is a level of its own. Words such as NA mark missing values only in columns of numbers. Numbers in
another style than 1234.5, and columns that mix numbers and words, are rejected.
"""

import csv
import gzip
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from crt_exp.experiments.data import DataError
from crt_exp.experiments.data.sources import SOURCES, missing, no_folder, task_folder
from crt_exp.registry import unknown

BLANKS = ("yeast", "wifi", "boston")  # blank-separated files; others are comma-separated
EMBEDDED = ("wine", "digits", "breast_cancer", "iris")


@dataclass(frozen=True, eq=False)
class Column:
    """One feature of n rows: float64 numbers, or int64 codes into `levels`."""

    name: str
    values: np.ndarray  # (n,)
    levels: tuple[str, ...] | None = None
    ordered: bool = False  # levels run from low to high

    def encode(self, coding: str) -> np.ndarray:
        """(n, width) float64 encoding; see `Table.encode` for `coding`."""
        if self.levels is not None and not (coding == "ordinal" and self.ordered):
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

    def encode(self, coding: str = "ordinal") -> np.ndarray:
        """All features as numbers: (n, width) float64, not scaled.

        coding: "ordinal" encodes an ordered category as 0, 1, ..., and an unordered category as 0/1 indicators.
        "onehot" encodes every category as 0/1 indicators, one for each level.
        """
        return np.hstack([column.encode(coding) for column in self.columns])


# Columns of each table's file, in file order: name, role (target, or dropped for row identifiers), kind, levels (from
# low to high if ordered; two levels count as ordered, because 0/1 loses nothing) and an alias of a level.
LAYOUTS = {
    name: [*rows.itertuples()]
    for name, rows in pd.read_csv(
        Path(__file__).with_name("columns.csv"), dtype=str, keep_default_na=False
    ).groupby("table", sort=False)
}


def load(name: str, data_dir: str | Path | None = None) -> Table:
    """Read or make the data set `name`.

    Official files are read from `data_dir` (option task.data_dir), by default $CRT_DATA/uci. Embedded sets come from
    scikit-learn; wine is read from its file if `data_dir` is given. Raises DataError if a file is missing, differs from
    the published file, or is given to a set that reads none. Raises ConfigError for an unknown name.
    """
    if name in EMBEDDED and not (data_dir and name in LAYOUTS):
        no_folder(data_dir, f"task.dataset={name}, which is embedded")
        return embedded(name)
    if name not in LAYOUTS:
        raise unknown("task.dataset", str(name), list(dict.fromkeys([*LAYOUTS, *EMBEDDED])))
    return read_official(name, file_of(name, data_dir))


def file_of(name: str, data_dir: str | Path | None) -> Path | None:
    """Path of the official file; None for an embedded set or an unknown folder."""
    folder = task_folder("uci", data_dir)
    if folder is None or name not in LAYOUTS or (name in EMBEDDED and not data_dir):
        return None
    return folder / Path(SOURCES[f"uci/{name}"].files[0].path).name


def read_official(name: str, path: Path | None) -> Table:
    """Read the published file of `name`; raises DataError if missing or different."""
    source, layout = SOURCES[f"uci/{name}"], LAYOUTS[name]
    if path is None or not path.is_file():
        raise missing(f"uci/{name}", path)
    try:
        frame = pd.read_csv(
            path,
            sep=r"\s+" if name in BLANKS else ",",
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
    """Table from the values of each column, in the order of its layout."""
    fields = [field for field in LAYOUTS[name] if field.role != "dropped"]
    columns = {}
    for field, values in zip(fields, arrays):
        levels = tuple(field.levels.split()) or None
        column = Column(field.column, values, levels, field.kind == "ordered")
        columns[field.role or field.column] = column
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
LARGEST = 1e150  # squares stay finite
MISSING = {
    "na",
    "n/a",
    "n.a.",
    "n.d.",
    "nan",
    "none",
    "null",
    "nil",
    "-",
    "--",
    ".",
    "...",
    "missing",
    "unknown",
    "<na>",
    "#na",
    "#n/a",
    "#null!",
    "#value!",
    "#div/0!",
    "#ref!",
    "#num!",
    "#name?",
}
LIKE_NUMBER = r"\W*\d[\d\s.,'’]*(?:[eE][-+]?\d+)?(?:[^\w\s]|[A-Z]{3}|\s[A-Za-z]{1,3})?"  # in any style, with a unit
Kind = Literal["classification", "regression"]


def read_own(path: str | Path, target: str | None, kind: Kind | None = None) -> tuple[Table, str]:
    """Read a csv file; return the table and a sentence on unusual columns.

    Raises DataError with file, column and row. Raises ConfigError for an unknown target.
    """
    path = Path(path).expanduser()
    notes = []
    features = []
    frame = cells(path)
    if target not in frame:
        raise unknown(f"task.target of {path}", str(target), list(frame.columns[:50]))
    for name, texts in frame.items():
        try:
            column = numbers(texts, name == target and kind == "classification")
            if name == target:
                goal, classes = target_of(texts, column, kind, notes)
            else:
                features += feature(texts, column, notes)
        except ValueError as error:
            raise DataError(f"task.csv={path}: column {name}, {error}") from None
    if not features:
        raise DataError(
            f"task.csv={path}: no usable column in addition to {target}: {'; '.join(notes)}"
        )
    return Table(
        path.stem.removesuffix(".csv"), tuple(features), goal, classes, str(path)
    ), "; ".join(notes)


def cells(path: Path) -> pd.DataFrame:
    """All cells as strings, NaN if empty or a question mark.

    Row 1 is the row below the header.
    """
    try:
        with (gzip.open if path.suffix == ".gz" else open)(
            path, "rt", encoding="utf-8-sig"
        ) as opened:
            header = opened.readline().strip("\r\n")
        separator = max(",;\t", key=header.count)
        if header.strip() and separator not in header:
            raise DataError(
                f"task.csv={path}: one column found, {header!r}; is the separator a comma, semicolon "
                "or tab?"
            )
        parse = partial(
            pd.read_csv,
            path,
            sep=separator,
            header=None,
            dtype=str,
            keep_default_na=False,
            skipinitialspace=True,
            encoding="utf-8-sig",
        )
        frame = parse()
        if (frame.iloc[:, -1] == "").any():  # the fast parser fills short rows so
            short = parse(engine="python").isna().any(axis=1)
            if short.any():
                raise ValueError(f"row {short.idxmax()} has fewer cells than the header")
    except FileNotFoundError:
        raise DataError(f"task.csv={path}: no such file") from None
    except (OSError, EOFError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error).strip()
        raise DataError(f"task.csv={path}: not readable as a UTF-8 table: {problem}") from None
    frame = frame.apply(lambda texts: texts.str.strip())
    names = frame.iloc[0].tolist()
    for name, count in Counter(names).items():
        if name and count > 1:
            raise DataError(f"task.csv={path}: {count} columns {name}; expected different names")
    if "" in names or pd.to_numeric(frame.iloc[0], errors="coerce").notna().all():
        raise DataError(
            f"task.csv={path}: expected a first line that names each column, got {','.join(names[:50])}"
        )
    return frame.iloc[1:].set_axis(names, axis=1).replace(["", "?"], np.nan).dropna(how="all")


def numbers(texts: pd.Series, mixed: bool) -> pd.Series:
    """Column as float64, or unchanged if it holds words.

    mixed: whether the column may hold both numbers and words. Raises ValueError for numbers in another style.
    """
    known = texts[~texts.str.lower().isin(MISSING)].dropna()
    values = (
        pd.to_numeric(known, errors="coerce")
        .astype(np.float64)
        .where(lambda value: value.abs() <= LARGEST)
    )
    odd = known[values.isna()]
    if odd.empty:
        return values.reindex(texts.index)
    lines = known.str.contains("\n")
    if lines.any():
        raise ValueError(
            f"row {lines.idxmax()}: line end inside a cell; check for an unclosed quotation mark"
        )
    if not mixed and known.str.fullmatch(LIKE_NUMBER).mean() > 0.5:
        raise ValueError(
            f"row {odd.index[0]}: {odd.iloc[0]!r}; expected a number such as 1234.5, or no value"
        )
    return texts


def target_of(
    texts: pd.Series, column: pd.Series, kind: Kind | None, notes: list[str]
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Numbers and None, or codes and the names of their classes. Raises ValueError.

    texts: the cells; column: their `numbers`.
    """
    number = column.dtype == np.float64
    if column.isna().any():
        raise ValueError(
            f"row {column.isna().idxmax()} has no value; fill it in, or remove the row"
        )
    if kind == "regression" and not number:
        raise ValueError("task.kind=regression: the target holds words; expected numbers")
    if kind is None:
        few_whole = texts.nunique() <= MOST_CLASSES and number and (column % 1 == 0).all()
        kind = "regression" if number and not few_whole else "classification"
    if kind == "regression" and column.nunique() > 1:
        return column.to_numpy(), None
    classes = sorted(texts.unique())
    if number:
        values = column.groupby(texts).first()
        classes.sort(key=values.get)
        notes += [f"{column.name}: {pair} are different classes" for pair in equal(texts, column)]
    if not 2 <= len(classes) <= len(texts) / 2:
        raise ValueError(
            f"{len(classes)} distinct values in {len(texts)} rows; expected at least 2 classes with "
            "several rows each, or task.kind=regression"
        )
    return pd.Index(classes).get_indexer(texts).astype(np.int64), tuple(classes)


def equal(texts: pd.Series, column: pd.Series) -> list[str]:
    """The first two different cells of the same value, such as "01 and 1", or nothing."""
    different = texts[column.notna() & (texts != "-0")].drop_duplicates()
    values = column[different.index]
    again = values[values.duplicated()]
    if again.empty:
        return []
    return [" and ".join(different[values == again.iloc[0]].head(2))]


def feature(texts: pd.Series, column: pd.Series, notes: list[str]) -> list[Column]:
    """The feature column, or no column and a note if it carries no information.

    texts: the cells; column: their `numbers`.
    """
    name = column.name
    missing = int(column.isna().sum())
    number = column.dtype == np.float64
    if number:
        codes = equal(texts[~texts.str.contains(".", regex=False, na=False)], column)
        if codes:
            notes.append(f"{name}: {codes[0]} have the same value; read as categories")
            column = texts.where(column.notna())
            number = False
        else:
            notes += [f"{name}: {pair} are the same number" for pair in equal(texts, column)]
    levels = [] if number else sorted(column.dropna().unique())
    if missing == len(column):
        notes.append(f"{name} is empty and is left out")
        return []
    if len(levels) > max(2, min(MOST_LEVELS, len(column) // 2)):
        notes.append(f"{name} has {len(levels)} different texts and is left out")
        return []
    if missing:
        notes.append(f"{name}: {missing} of {len(column)} values are missing")
    if number:
        return [Column(name, column.to_numpy())]
    levels += ["(missing)"] if missing else []
    return [
        Column(
            name,
            pd.Index(levels).get_indexer(column.fillna("(missing)")).astype(np.int64),
            tuple(levels),
        )
    ]
