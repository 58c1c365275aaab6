"""A table of one's own: a csv file with a header, one column of which is to be predicted.

What a column is, its values say: numbers, or categories where one of them is no number. Missing values are kept and
reported: of numbers they become the mean of the training part, of categories a level of their own. Words such as NA and
None are missing values among numbers, and values among categories. Rows without the target, and columns of identifiers,
are left out. Numbers that are not written as 1234.5 are told, or refused (numerals.py).
"""

import difflib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from crt_exp.data import DataError, read_text
from crt_exp.data.delimited import DelimitedRow, table
from crt_exp.data.numerals import EMPTY, Mixed, Numbers, numbers
from crt_exp.data.tabular import Column, Table, as_number, is_number

MOST_CLASSES = 20      # whole numbers of no more values are classes, where nothing else is said
MOST_LEVELS = 100      # of a category, encoded as so many columns
LARGEST = 1e150        # whose square is a number too
FEWEST_ROWS = 10       # in which whole numbers can be seen to count the rows
Kind = Literal["classification", "regression"]
Texts = list[str | None]


class Target(NamedTuple):
    """values (n,) of all rows, classes (None: regression), and which rows have one."""

    values: np.ndarray
    classes: tuple[str, ...] | None
    there: np.ndarray


def read(path: str | Path, target: str | None, kind: Kind | None = None) -> tuple[Table, str]:
    """The table, and a sentence on what is unusual in it. Raises DataError naming file, line and column."""
    path, notes = Path(path).expanduser(), []
    names, rows = cells(path)
    if target is None:
        raise DataError(f"task.csv={path} needs task.target, the column to predict: one of {shown(names)}")
    if target not in names:
        near = difflib.get_close_matches(target, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise DataError(f"task.target = {target}: {path} has no such column{hint}\n  columns: {shown(names)}")
    texts = {name: [None if cell.strip() in ("", "?") else cell.strip() for cell in column]
             for name, column in zip(names, zip(*(row.cells for row in rows)))}
    if len(names) == 1:
        raise DataError(f"{path}: {target} is its only column")
    values = numbers_of(path, texts, target if kind == "classification" else None, notes)
    goal = target_of(path, target, texts.pop(target), values.pop(target), kind)
    if not goal.there.any():
        raise DataError(f"{path}: no row has a {target}")
    if without := int((~goal.there).sum()):
        notes.insert(0, f"{without} of {len(rows)} rows have no {target} and are left out")
    made = [column_of(name, column, values[name], goal.there, notes) for name, column in texts.items()]
    columns = tuple(column for column in made if column is not None)
    if not columns:
        raise DataError(f"{path}: no column beside {target} can be used: {'; '.join(notes)}")
    return Table(path.stem, columns, goal.values[goal.there], goal.classes, str(path)), "; ".join(notes)


def cells(path: Path) -> tuple[list[str], list[DelimitedRow]]:
    """The names of the header, and the line number and cells of each row."""
    text = read_text(path, f"task.csv={path}")
    first = text.split("\n", 1)[0]
    separator = max(",;\t", key=first.count)
    names, rows = table(path, text, separator)
    if not rows:
        raise DataError(f"task.csv={path} has {len(rows) + bool(names)} lines: it takes a header with the names of the "
                        "columns, and a row for each example")
    if "" in names:
        raise DataError(f"{path}: the header must give each column a name of its own, and column {names.index('') + 1} "
                        "has none")
    if all(is_number(name) for name in names):
        raise DataError(f"{path}: these are numbers, {shown(names)}: the first line must name the columns")
    return names, rows


def shown(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 20 else f"{', '.join(names[:20])} and {len(names) - 20} more"


# ---- numbers ---------------------------------------------------------------------------------------------------------


def numbers_of(path: Path, texts: dict[str, Texts], names: str | None, notes: list[str]) -> dict[str, Numbers | None]:
    """Each column read as numbers; None where it holds texts. names: a column of classes, which may be any texts."""
    read = {name: taken(column, commas=False) for name, column in texts.items()}
    if any(isinstance(column, Numbers) and column.commas for column in read.values()):
        read = {name: taken(column, commas=True) for name, column in texts.items()}
    if isinstance(read.get(names), Mixed):
        read[names] = None
    for name, column in read.items():
        if isinstance(column, Mixed):
            raise DataError(f"{path}, column {name}: {column}")
        if column is not None and (abs(column.values) > LARGEST).any():
            raise DataError(f"{path}, column {name}: it holds an infinite number, or one above {LARGEST:g}")
        if column is not None and column.told:
            notes.append(f"{name}: {column.unusual} of {len(column.values)} values are read with {column.told}")
        if column is None and (words := sorted({text for text in texts[name] if text and text.lower() in EMPTY})):
            notes.append(f"{name}: {', '.join(words)} count as values of their own; a missing value is an empty cell")
    return read


def taken(column: Texts, commas: bool) -> Numbers | Mixed | None:
    try:
        return numbers(column, commas)
    except Mixed as error:
        return error


def target_of(path: Path, name: str, labels: Texts, read: Numbers | None, kind: Kind | None) -> Target:
    values = None if read is None else read.values
    if kind == "classification" or (kind is None and (values is None or few_whole(values[~np.isnan(values)]))):
        return classes_of(path, name, labels, values)
    if values is None:
        wrong = next((text for text in labels if text is not None and not is_number(text)), None)
        raise DataError(f"{path}, column {name}: {wrong!r} is not a number, which task.kind=regression predicts")
    there = ~np.isnan(values)
    if there.any() and np.ptp(values[there]) == 0:
        raise DataError(f"{path}, column {name}: every row has {values[there][0]:g}: there is nothing to predict")
    return Target(values, None, there)


def few_whole(values: np.ndarray) -> bool:
    return len(np.unique(values)) <= MOST_CLASSES and bool((values % 1 == 0).all())


def classes_of(path: Path, name: str, labels: Texts, values: np.ndarray | None) -> Target:
    if values is not None:
        labels = [None if np.isnan(value) else str(value) for value in values.tolist()]
    labels = [text if text is None else plain(text) for text in labels]
    counts = Counter(text for text in labels if text is not None)
    total = counts.total()
    if total and (len(counts) < 2 or len(counts) > total / 2):
        raise DataError(f"{path}, column {name}: {len(counts)} classes in {total} rows: classification takes at "
                        "least 2, with several rows each; numbers are predicted by task.kind=regression")
    classes = tuple(sorted(counts, key=lambda text: (not is_number(text), float(text) if is_number(text) else 0, text)))
    place = {text: code for code, text in enumerate(classes)}
    codes = np.array([place.get(text, -1) for text in labels], np.int64)
    return Target(codes, classes, codes >= 0)


def plain(text: str) -> str:
    """One name for 1, 1.0 and 1.; texts, and numbers that begin with a zero as codes do, stay."""
    if not is_number(text) or (text.lstrip("+-")[:1] == "0" and text.lstrip("+-")[1:2].isdigit()):
        return text
    value = as_number(text)
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


# ---- features --------------------------------------------------------------------------------------------------------


def column_of(name: str, texts: Texts, read: Numbers | None, there: np.ndarray, notes: list[str]) -> Column | None:
    """Of the rows that are there; None, and reported, for a column that says nothing about other rows."""
    kept = [None if text is None else plain(text) for text, keep in zip(texts, there) if keep]
    missing = kept.count(None) if read is None else int(np.isnan(read.values[there]).sum())
    if missing == len(kept):
        notes.append(f"{name} is empty and left out")
        return None
    if missing:
        notes.append(f"{name}: {missing} of {len(kept)} values are missing")
    if read is not None and counts_rows(read.values):
        notes.append(f"{name} counts the rows and is left out")
        return None
    if read is not None:
        return Column(name, read.values[there])
    levels = sorted({text for text in kept if text is not None})
    if len(levels) > max(2, min(MOST_LEVELS, len(kept) // 2)):
        notes.append(f"{name} has {len(levels)} different texts and is left out")
        return None
    levels += ["(missing)"] if missing else []
    place = {level: code for code, level in enumerate(levels)}
    return Column(name, np.array([place[text or "(missing)"] for text in kept], np.int64), tuple(levels))


def counts_rows(values: np.ndarray) -> bool:
    """Whether whole numbers identify the rows: all differ, and they rise or fall in even steps with the rows, or fill a
    range evenly or almost. In a file that is sorted by class such a number knows the class."""
    place = np.flatnonzero(~np.isnan(values))
    kept = values[place]
    ranked = np.sort(kept)
    steps = np.diff(ranked)
    if len(kept) < FEWEST_ROWS or (kept % 1 != 0).any() or (steps == 0).any():
        return False
    span, moves = ranked[-1] - ranked[0], np.diff(kept)
    even = (steps == steps[0]).all() or (moves == moves[0] * np.diff(place)).all()
    in_step = (moves > 0).all() or (moves < 0).all()
    return bool(even or (len(kept) >= 2 * FEWEST_ROWS and span < (10 if in_step else 2) * len(kept)))
