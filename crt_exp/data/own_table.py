"""A table of one's own: a csv file with a header, one column of which is to be predicted.

What a column is, its values say: numbers, or categories where one of them is no number. Missing values are kept and
reported: of numbers they become the mean of the training part, of categories a level of their own. Rows without the
target, and columns of identifiers, are left out.
"""

import csv
import difflib
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np

from crt_exp.data import DataError, read_text
from crt_exp.data.tabular import Column, Table, is_number

MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}
MOST_CLASSES = 20      # whole numbers of no more values are classes, where nothing else is said
MOST_LEVELS = 100      # of a category, encoded as so many columns
Kind = Literal["classification", "regression"]


def read(path: str | Path, target: str | None, kind: Kind | None = None) -> tuple[Table, str]:
    """The table, and a sentence on what is missing in it. Raises DataError naming file, line and column."""
    path = Path(path).expanduser()
    names, rows = cells(path)
    if target is None:
        raise DataError(f"task.csv={path} needs task.target, the column to predict: one of {', '.join(names)}")
    if target not in names:
        near = difflib.get_close_matches(target, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise DataError(f"task.target = {target}: {path} has no such column{hint}\n  columns: {', '.join(names)}")
    texts = {name: [None if row[i].strip().lower() in MISSING else row[i].strip() for _, row in rows]
             for i, name in enumerate(names)}
    there = np.array([text is not None for text in texts[target]])
    notes = [f"{(~there).sum()} of {len(rows)} rows have no {target} and are left out"] if not there.all() else []
    texts = {name: [text for text, kept in zip(column, there) if kept] for name, column in texts.items()}
    labels = texts.pop(target)
    if not labels or not texts:
        raise DataError(f"{path}: no row has a {target}" if texts else f"{path}: {target} is its only column")
    values, classes = target_of(path, target, labels, kind)
    columns = []
    for name, column in texts.items():
        made = column_of(path, name, column, notes)
        columns += [] if made is None else [made]
    if not columns:
        raise DataError(f"{path}: no column beside {target} can be used: {'; '.join(notes)}")
    return Table(path.stem, tuple(columns), values, classes, str(path)), "; ".join(notes)


def cells(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The names of the header, and the line number and cells of each row."""
    text = read_text(path, f"task.csv={path}")
    first = text.split("\n", 1)[0]
    separator = max(",;\t", key=first.count)
    reader = csv.reader(text.splitlines(), delimiter=separator)
    lines = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    if len(lines) < 2:
        raise DataError(f"task.csv={path} has {len(lines)} lines: it takes a header with the names of the columns, and "
                        "a row for each example")
    names = [name.strip() for name in lines[0][1]]
    if len(set(names)) < len(names) or "" in names:
        raise DataError(f"{path}, line {lines[0][0]}: the header must give each column a name of its own, and it is "
                        f"{separator.join(names)}")
    if all(is_number(name) for name in names):
        raise DataError(f"{path}, line {lines[0][0]}: these are numbers: the first line must name the columns")
    wrong = next((line for line in lines[1:] if len(line[1]) != len(names)), None)
    if wrong:
        raise DataError(f"{path}, line {wrong[0]}: {len(wrong[1])} cells, {len(names)} expected")
    return names, lines[1:]


def target_of(path: Path, name: str, labels: list[str], kind: Kind | None) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """(n,) and the classes; None for regression."""
    numbers = all(map(is_number, labels))
    if kind is None:
        few = len(set(labels)) <= MOST_CLASSES and (not numbers or all(float(text).is_integer() for text in labels))
        kind = "classification" if few or not numbers else "regression"
    if kind == "regression":
        wrong = next((text for text in labels if not is_number(text) or not np.isfinite(float(text))), None)
        if wrong is not None:
            raise DataError(f"{path}, column {name}: {wrong!r} is not a number, which task.kind=regression predicts")
        return np.array(labels, np.float64), None
    counts = Counter(labels)
    if len(counts) < 2 or len(counts) > len(labels) / 2:
        raise DataError(f"{path}, column {name}: {len(counts)} classes in {len(labels)} rows: classification takes at "
                        "least 2, with several rows each; numbers are predicted by task.kind=regression")
    classes = tuple(sorted(counts, key=lambda text: (not is_number(text), float(text) if is_number(text) else 0, text)))
    return np.array([classes.index(text) for text in labels], np.int64), classes


def column_of(path: Path, name: str, texts: list[str | None], notes: list[str]) -> Column | None:
    """None, and reported, for a column that says nothing about other rows."""
    present = [text for text in texts if text is not None]
    if missing := len(texts) - len(present):
        notes.append(f"{name}: {missing} of {len(texts)} values are missing")
    if not present:
        notes[-1] = f"{name} is empty and left out"
        return None
    if all(map(is_number, present)):
        values = np.array([np.nan if text is None else float(text) for text in texts])
        if np.isinf(values).any():
            raise DataError(f"{path}, column {name}: it holds an infinite number")
        return Column(name, values)
    levels = sorted(set(present))
    if len(levels) > max(2, min(MOST_LEVELS, len(texts) // 2)):
        notes.append(f"{name} has {len(levels)} different texts and is left out")
        return None
    levels += ["(missing)"] if missing else []
    return Column(name, np.array([levels.index(text or "(missing)") for text in texts], np.int64), tuple(levels))
