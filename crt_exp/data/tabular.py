"""Tables of numbers and categories: UCI files, embedded sets and your own csv.

`load("car")` reads $CRT_DATA/uci/car.data as published by UCI. Types, units and the order of categories follow UCI's
documentation of each set (columns.csv). The task scales, shuffles and splits; it fits the scaling on the training part.

`read_own` reads a csv file with a header and predicts one of its columns. Columns of numbers are numeric, other columns
are categories. A missing number becomes the mean of the training part; a missing category is a level of its own. Words
such as NA mark missing values only in columns of numbers. Columns of row identifiers are left out. Decimal commas are
accepted. A column that is ambiguous, or that mixes numbers and words, is rejected.
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

BLANKS = ("yeast", "wifi", "boston")  # blank-separated files; others are comma-separated
EMBEDDED = ("wine", "chess", "digits", "breast_cancer", "iris")


@dataclass(frozen=True, eq=False)
class Column:
    """One feature of n rows: float64 numbers, or int64 codes into `levels`."""

    name: str
    values: np.ndarray                    # (n,)
    levels: tuple[str, ...] | None = None
    ordered: bool = False                 # levels run from low to high

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
    target: np.ndarray                    # (n,) int64 codes into `classes`; float64 for regression
    classes: tuple[str, ...] | None       # None: regression
    source: str                           # origin of the rows

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
LAYOUTS = {name: [*rows.itertuples()] for name, rows in pd.read_csv(
    Path(__file__).with_name("columns.csv"), dtype=str, keep_default_na=False).groupby("table", sort=False)}


def load(name: str, data_dir: str | Path | None = None) -> Table:
    """Read or make the data set `name`.

    Official files are read from `data_dir` (option task.data_dir), by default $CRT_DATA/uci. Embedded sets need no
    file; wine and chess are read from files if `data_dir` is given. Raises DataError if a file is missing, differs from
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
    columns = {field.role or field.column: Column(field.column, values, tuple(field.levels.split()) or None,
                                                  field.kind == "ordered")
               for field, values in zip((field for field in LAYOUTS[name] if field.role != "dropped"), arrays)}
    target = columns.pop("target")
    return Table(name, tuple(columns.values()), target.values, target.levels, source)


def embedded(name: str) -> Table:
    """Chess computed from its rules, other sets from scikit-learn."""
    if name == "chess":
        return table_of(name, np.ascontiguousarray(chess_positions().T), "embedded: computed from the rules of chess")
    from sklearn import datasets

    bunch, source = getattr(datasets, f"load_{name}")(), f"embedded: scikit-learn's load_{name}"
    arrays, target = np.ascontiguousarray(bunch.data.T, np.float64), bunch.target.astype(np.int64)
    if name in LAYOUTS:
        return table_of(name, [target, *arrays], source)
    columns = tuple(Column(str(label).replace(" ", "_"), values) for label, values in zip(bunch.feature_names, arrays))
    return Table(name, columns, target, tuple(map(str, bunch.target_names)), source)


# ---- your own csv file -----------------------------------------------------------------------------------------------
MOST_CLASSES = 20      # distinct whole numbers of a target that counts as classes if task.kind is null
MOST_LEVELS = 100      # levels of a category
LARGEST = 1e150        # squares stay finite
FEWEST_ROWS = 20       # minimum for recognising row numbers
MISSING = {"na", "n/a", "n.a.", "n.d.", "nan", "none", "null", "nil", "-", "--", ".", "...", "missing", "unknown",
           "<na>", "#na", "#n/a", "#null!", "#value!", "#div/0!", "#ref!", "#num!", "#name?"}
DECIMAL_COMMA = r"[-+]?(?:[1-9]\d{0,2}(?:\.\d{3})+|\d+)(?:,\d*)?(?:[eE][-+]?\d+)?"   # 1.234,5
TWO_WAYS = r"[-+]?[1-9]\d{0,2}(?:[.,]\d{3})*"                                         # 1,234: thousands or decimals
LIKE_NUMBER = r"\W*\d[\d\s.,'’]*(?:[eE][-+]?\d+)?(?:[^\w\s]|[A-Z]{3}|\s[A-Za-z]{1,3})?"  # in any style, with a unit
Kind = Literal["classification", "regression"]


def read_own(path: str | Path, target: str | None, kind: Kind | None = None) -> tuple[Table, str]:
    """Read a csv file; return the table and a sentence on unusual columns.

    Raises DataError with file, column and row. Raises ConfigError for an unknown target.
    """
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
    """All cells as strings, NaN if empty or a question mark.

    Row 1 is the row below the header.
    """
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as opened:
            separator = max(",;\t", key=opened.readline().count)
        parse = partial(pd.read_csv, path, sep=separator, header=None, dtype=str, keep_default_na=False,
                        skipinitialspace=True, encoding="utf-8-sig")
        frame = parse()
        if (frame.iloc[:, -1] == "").any():                      # the fast parser fills short rows so
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
    return all(part.str.fullmatch(pattern).all() for part in (texts.iloc[:100], texts))   # 100 cells rule most out


def numbers(texts: pd.Series, commas: bool, mixed: bool, notes: list[str]) -> pd.Series:
    """Column as float64, or unchanged if it holds words. Raises ValueError.

    Args:
        commas: whether some column has decimal commas.
        mixed: whether the column may hold both numbers and words.
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
    """Numbers and None, or codes and the names of their classes. Raises ValueError."""
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
    """The feature column, or no column and a note if it carries no information."""
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
    """Whether whole numbers identify the rows.

    All values must differ, and be evenly spaced or nearly fill a range.
    """
    steps, moves = np.diff(np.sort(values)), np.diff(values)
    if len(values) < FEWEST_ROWS or (values % 1 != 0).any() or (steps == 0).any():
        return False
    in_order = (moves > 0).all() or (moves < 0).all()
    return bool((steps == steps[0]).all() or np.ptp(values) < (10 if in_order else 2) * len(values))


# ---- the endgame king and rook against king, solved from the rules of chess ------------------------------------------
# White has king and rook, Black has a king and is to move. The class is White's number of moves to mate under best
# play ("zero": mate on the board) or "draw". The rows are those of UCI's krkopt.data, by Bain and van Hoff. A square
# is 8 * file + rank (a1 = 0, a2 = 1, h8 = 63). Arrays of positions have axes (white king, rook, black king).
FILE, RANK = np.divmod(np.arange(64), 8)
FILES, RANKS = abs(FILE[:, None] - FILE), abs(RANK[:, None] - RANK)          # (64, 64) distances
NEAR = np.maximum(FILES, RANKS) <= 1                                         # includes the square itself
STEPS = (NEAR & (FILES + RANKS > 0)).astype(np.float32)                      # of a king
ROOK_STEPS = (FILES == 0) ^ (RANKS == 0)                                     # of a rook on an empty board
# [a, b, c]: a rook that moves from a to b passes c, a and b included
PASSED = ROOK_STEPS[:, :, None] & ((FILES + RANKS)[:, None] + (FILES + RANKS) == (FILES + RANKS)[:, :, None])


def chess_positions() -> np.ndarray:
    """All positions with Black to move up to board symmetry, as in krkopt.data.

    Returns (28056, 7) integers: file and rank (0-7, 0 = a and 1) of white king, rook and black king, then the class.
    Class 0 is "draw", else 1 + moves to mate. Rows are sorted by class, then by squares. The computation takes about
    0.6 s.
    """
    code = canonical(solve())
    squares = np.nonzero(code >= 0)
    label = code[squares]
    rows = np.stack([part[square] for square in squares for part in (FILE, RANK)] + [label], axis=1)
    return rows[np.argsort(label, kind="stable")]


def solve() -> np.ndarray:
    """Class of every position with Black to move, (64, 64, 64); -1 if impossible."""
    king, rook, black = np.ix_(*[np.arange(64)] * 3)
    attacked = ROOK_STEPS & ~PASSED.transpose(2, 0, 1)       # the king does not shield squares behind it
    legal = (king != rook) & (rook != black) & ~NEAR[:, None]
    safe = ~NEAR[:, None] & ~attacked                        # for Black, who may take an unguarded rook
    mobile, won = safe @ STEPS > 0, np.zeros_like(legal)
    code = np.where(legal, 0, -1)
    lost, mobile, depth = legal & attacked & ~mobile, legal & mobile, 0
    while lost.any():
        depth += 1
        code[lost] = depth
        won |= white_moves_into(lost, attacked)
        escapes = (safe & ~won) @ STEPS > 0
        lost, mobile = mobile & ~escapes, mobile & escapes
    return code


def white_moves_into(lost: np.ndarray, attacked: np.ndarray) -> np.ndarray:
    """Positions with White to move from which one move reaches one of `lost`."""
    result = np.tensordot(STEPS, lost, 1) > 0
    for rook in range(64):
        free = attacked[:, rook, :, None] & ~PASSED[rook]    # the black king blocks the rook
        result[:, rook] |= (free & lost).any(1)
    return result


def canonical(code: np.ndarray) -> np.ndarray:
    """Keep one position of each symmetry class; set the others to -1.

    The published set puts the white king into the triangle a1-d1-d4. If the white king is on the diagonal, the black
    king lies on or below a1-h8. If both are on the diagonal, the rook does.
    """
    king, rook, black = np.ix_(*[np.arange(64)] * 3)
    side = np.sign(RANK - FILE)                              # -1 below the diagonal, 0 on it
    first_off = np.where(side[king] != 0, side[king], np.where(side[black] != 0, side[black], side[rook]))
    return np.where((FILE[king] < 4) & (first_off <= 0) & (side[king] <= 0), code, -1)
