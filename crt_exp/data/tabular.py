"""Tables of numbers and categories: the UCI files, the sets that need no file, and csv files of one's own.

`load("car")` reads $CRT_DATA/uci/car.data as UCI published it. Types, units and the orders of categories follow the
documentation that UCI gives with each set (columns.csv). The task scales, shuffles and splits, on the training part.

`read_own` reads a csv file with a header, one column of which is to be predicted. Columns of numbers are numbers, other
columns categories. Missing values become the mean of the training part in a column of numbers, a level of their own in
a category. Words such as NA are missing values among numbers alone. Columns of identifiers are left out. Numbers
in another style than 1234.5, and columns that mix numbers and words, are refused.
"""

import csv
import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from crt_exp.config import unknown
from crt_exp.data import DataError
from crt_exp.data.sources import SOURCES, missing, no_folder, task_folder

BLANKS = ("yeast", "wifi", "boston")  # files whose columns are separated by blanks, the others by commas
EMBEDDED = ("wine", "digits", "breast_cancer", "iris")


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
    file comes from scikit-learn; wine is read from its file where `data_dir` is given. Raises DataError for
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
    """A set of scikit-learn, in its row order."""
    from sklearn import datasets

    bunch, source = getattr(datasets, f"load_{name}")(), f"embedded: scikit-learn's load_{name}"
    arrays, target = np.ascontiguousarray(bunch.data.T, np.float64), bunch.target.astype(np.int64)
    if name in LAYOUTS:
        return table_of(name, [target, *arrays], source)
    columns = tuple(Column(str(label).replace(" ", "_"), values) for label, values in zip(bunch.feature_names, arrays))
    return Table(name, columns, target, tuple(map(str, bunch.target_names)), source)


# ---- a csv file of one's own -----------------------------------------------------------------------------------------
MOST_CLASSES = 20      # different whole numbers in a target of classes, where task.kind does not decide
MOST_LEVELS = 100      # of a category
LARGEST = 1e150        # whose square is a number too
FEWEST_ROWS = 20       # in which whole numbers can be seen to count the rows
MISSING = {"na", "n/a", "n.a.", "n.d.", "nan", "none", "null", "nil", "-", "--", ".", "...", "missing", "unknown",
           "<na>", "#na", "#n/a", "#null!", "#value!", "#div/0!", "#ref!", "#num!", "#name?"}
LIKE_NUMBER = r"\W*\d[\d\s.,'’]*(?:[eE][-+]?\d+)?(?:[^\w\s]|[A-Z]{3}|\s[A-Za-z]{1,3})?"  # in any style, with a unit
Kind = Literal["classification", "regression"]


def read_own(path: str | Path, target: str | None, kind: Kind | None = None) -> tuple[Table, str]:
    """The table, and a sentence on what is unusual in it. Raises DataError naming file, column and row."""
    path, notes, features = Path(path).expanduser(), [], []
    frame = cells(path)
    if target not in frame:
        raise unknown(f"task.target of {path}", str(target), list(frame.columns[:50]))
    for name, texts in frame.items():
        try:
            column = numbers(texts, name == target and kind == "classification")
            if name == target:
                goal, classes = target_of(column, kind)
            else:
                features += feature(column, notes)
        except ValueError as error:
            raise DataError(f"task.csv={path}: column {name}, {error}") from None
    if not features:
        raise DataError(f"task.csv={path}: no column beside {target} can be used: {'; '.join(notes)}")
    return Table(path.stem.removesuffix(".csv"), tuple(features), goal, classes, str(path)), "; ".join(notes)


def cells(path: Path) -> pd.DataFrame:
    """All cells as strings, NaN where they are empty or hold a question mark; the row below the header is row 1."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as opened:
            separator = max(",;\t", key=opened.readline().count)
        parse = partial(pd.read_csv, path, sep=separator, header=None, dtype=str, keep_default_na=False,
                        skipinitialspace=True, encoding="utf-8-sig")
        frame = parse()
        if (frame.iloc[:, -1] == "").any():                      # as the fast parser fills rows with too few cells
            short = parse(engine="python").isna().any(axis=1)
            if short.any():
                raise ValueError(f"row {short.idxmax()} has fewer cells than the header")
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"task.csv={path} cannot be read as a table of UTF-8 text: {str(error).strip()}") from None
    frame = frame.apply(lambda texts: texts.str.strip())
    names = frame.iloc[0].tolist()
    if "" in names or len({*names}) < len(names) or pd.to_numeric(frame.iloc[0], errors="coerce").notna().all():
        raise DataError(f"task.csv={path}: expected a first line that names each column, got {','.join(names[:50])}")
    return frame.iloc[1:].set_axis(names, axis=1).replace(["", "?"], np.nan).dropna(how="all")


def numbers(texts: pd.Series, mixed: bool) -> pd.Series:
    """A column as float64, or unchanged if it holds words. Raises ValueError for numbers in another style.

    mixed: the column may hold numbers and words.
    """
    known = texts[~texts.str.lower().isin(MISSING)].dropna()
    values = pd.to_numeric(known, errors="coerce").astype(np.float64).where(lambda value: value.abs() <= LARGEST)
    odd = known[values.isna()]
    if odd.empty:
        return values.reindex(texts.index)
    lines = known.str.contains("\n")
    if lines.any():
        raise ValueError(f"row {lines.idxmax()}: a cell holds a line end: does a quotation mark not end?")
    if not mixed and known.str.fullmatch(LIKE_NUMBER).mean() > 0.5:
        raise ValueError(f"row {odd.index[0]}: {odd.iloc[0]!r} among numbers: expected one as 1234.5, or no value")
    return texts


def target_of(labels: pd.Series, kind: Kind | None) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """The values to predict: numbers, or codes and the classes they stand for. Raises ValueError."""
    number = labels.dtype == np.float64
    if labels.isna().any():
        raise ValueError(f"row {labels.isna().idxmax()} has no value to learn: fill it in, or remove the row")
    if kind == "regression" and not number:
        raise ValueError("the target of task.kind=regression, holds words: expected numbers")
    if kind is None:
        few_whole = labels.nunique() <= MOST_CLASSES and number and (labels % 1 == 0).all()
        kind = "regression" if number and not few_whole else "classification"
    if kind == "regression" and labels.nunique() > 1:
        return labels.to_numpy(), None
    classes, codes = np.unique(labels.to_numpy(), return_inverse=True)
    if not 2 <= len(classes) <= len(codes) / 2:
        raise ValueError(f"{len(classes)} different values in {len(codes)} rows: it takes classes of several rows, or "
                         "different numbers with task.kind=regression")
    return codes, tuple(f"{each:.15g}" if number else each for each in classes)


def feature(column: pd.Series, notes: list[str]) -> list[Column]:
    """The column, or none and a note where it tells nothing about other rows."""
    name, missing, number = column.name, int(column.isna().sum()), column.dtype == np.float64
    levels = [] if number else sorted(column.dropna().unique())
    if missing == len(column) or (number and counts_rows(column.dropna().to_numpy())):
        notes.append(f"{name} {'counts the rows' if missing < len(column) else 'is empty'} and is left out")
        return []
    if len(levels) > max(2, min(MOST_LEVELS, len(column) // 2)):
        notes.append(f"{name} has {len(levels)} different texts and is left out")
        return []
    if missing:
        notes.append(f"{name}: {missing} of {len(column)} values are missing")
    if number:
        return [Column(name, column.to_numpy())]
    levels += ["(missing)"] if missing else []
    return [Column(name, pd.Index(levels).get_indexer(column.fillna("(missing)")).astype(np.int64), tuple(levels))]


def counts_rows(values: np.ndarray) -> bool:
    """Whether whole numbers identify the rows: all differ and are evenly spaced or fill a range almost."""
    steps, moves = np.diff(np.sort(values)), np.diff(values)
    if len(values) < FEWEST_ROWS or (values % 1 != 0).any() or (steps == 0).any():
        return False
    in_order = (moves > 0).all() or (moves < 0).all()
    return bool((steps == steps[0]).all() or np.ptp(values) < (10 if in_order else 2) * len(values))
