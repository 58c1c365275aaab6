"""A table of one's own: a csv file with a header, one column of which is to be predicted.

Columns of numbers are numbers, other columns categories. Missing values become the mean of the training part in a
column of numbers, a level of their own in a category. Words such as NA are missing values among numbers alone. Columns
of identifiers are left out. Numbers with decimal commas are read; a column that can be read in two ways, or that mixes
numbers and words, is refused.
"""

import gzip
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from crt_exp.config import unknown
from crt_exp.data import DataError
from crt_exp.data.tabular import Column, Table

MOST_CLASSES = 20      # different whole numbers in a target of classes, where task.kind does not decide
MOST_LEVELS = 100      # of a category
LARGEST = 1e150        # whose square is a number too
FEWEST_ROWS = 20       # in which whole numbers can be seen to count the rows
MISSING = {"na", "n/a", "n.a.", "n.d.", "nan", "none", "null", "nil", "-", "--", ".", "...", "missing", "unknown",
           "<na>", "#na", "#n/a", "#null!", "#value!", "#div/0!", "#ref!", "#num!", "#name?"}
DECIMAL_COMMA = r"[-+]?(?:[1-9]\d{0,2}(?:\.\d{3})+|\d+)(?:,\d*)?(?:[eE][-+]?\d+)?"   # 1.234,5
TWO_WAYS = r"[-+]?[1-9]\d{0,2}(?:[.,]\d{3})*"                                         # 1,234: of thousands or decimals
LIKE_NUMBER = r"\W*\d[\d\s.,'’]*(?:[eE][-+]?\d+)?(?:[^\w\s]|[A-Z]{3}|\s[A-Za-z]{1,3})?"  # in any style, with a unit
Kind = Literal["classification", "regression"]


def read(path: str | Path, target: str | None, kind: Kind | None = None) -> tuple[Table, str]:
    """The table, and a sentence on what is unusual in it. Raises DataError naming file, column and row."""
    path, notes, features = Path(path).expanduser(), [], []
    frame = cells(path)
    if target not in frame:
        raise unknown(f"task.target of {path}", str(target), list(frame.columns[:50]))
    commas = any(matches(stated(texts), DECIMAL_COMMA) and not matches(stated(texts), TWO_WAYS)
                 for _, texts in frame.items() if texts.str.contains(",").any())
    for name, texts in frame.items():
        try:
            column = numbers(texts, commas, name == target and kind == "classification", notes)
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


def stated(texts: pd.Series) -> pd.Series:
    return texts[~texts.str.lower().isin(MISSING)].dropna()


def matches(texts: pd.Series, pattern: str) -> bool:
    return all(part.str.fullmatch(pattern).all() for part in (texts.iloc[:100], texts))   # a few cells rule most out


def numbers(texts: pd.Series, commas: bool, mixed: bool, notes: list[str]) -> pd.Series:
    """A column as float64, or as it is where it holds words. Raises ValueError.

    commas: some column has decimal commas. mixed: the column may hold numbers and words.
    """
    known = stated(texts)
    values = pd.to_numeric(known, errors="coerce").astype(np.float64).where(lambda value: value.abs() <= LARGEST)
    odd = known[values.isna()]
    if (not odd.empty or (commas and known.str.contains(".", regex=False).any())) and matches(known, DECIMAL_COMMA):
        if matches(known, TWO_WAYS) and (odd.empty or not commas):
            row = known.str.contains("[.,]").idxmax()
            raise ValueError(f"row {row}: {known[row]!r} may hold decimals or thousands: expected 1234.5")
        notes.append(f"{texts.name}: read with decimal commas")
        values = pd.to_numeric(known.str.replace(".", "", regex=False).str.replace(",", ".")).astype(np.float64)
    elif not odd.empty:
        lines = known.str.contains("\n")
        if lines.any():
            raise ValueError(f"row {lines.idxmax()}: a cell holds a line end: does a quotation mark not end?")
        if not mixed and known.str.fullmatch(LIKE_NUMBER).mean() > 0.5:
            raise ValueError(f"row {odd.index[0]}: {odd.iloc[0]!r} among numbers: expected one as 1234.5, or no value")
        return texts
    return values.reindex(texts.index)


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
    """Whether whole numbers identify the rows: all differ, and they are evenly spaced, or fill a range almost. In a
    file that is sorted by class such a number knows the class."""
    steps, moves = np.diff(np.sort(values)), np.diff(values)
    if len(values) < FEWEST_ROWS or (values % 1 != 0).any() or (steps == 0).any():
        return False
    in_order = (moves > 0).all() or (moves < 0).all()
    return bool((steps == steps[0]).all() or np.ptp(values) < (10 if in_order else 2) * len(values))
