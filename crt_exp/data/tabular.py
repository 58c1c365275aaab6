"""Tables of numbers and categories: the UCI files, and the sets that need no file.

`load("car")` reads $CRT_DATA/uci/car.data as UCI published it. Types, units and the orders of categories follow the
documentation that UCI gives with each set. Nothing is scaled, shuffled or split here: that is the task's work, on the
training part.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np

from crt_exp.data import DataError, chess
from crt_exp.data.sources import SOURCES, Source, missing, no_folder, rows_of, task_folder

CODINGS = ("ordinal", "onehot")
BLANKS = ("yeast", "wifi", "boston")  # files whose columns stand apart by blanks, not by commas


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
        "onehot": every category becomes one 0/1 indicator per level. Raises DataError for another coding.
        """
        return np.hstack([column.encode(checked(coding)) for column in self.columns])


def checked(coding: str) -> str:
    if coding not in CODINGS:
        raise DataError(f"coding={coding} is unknown; use {' or '.join(CODINGS)}.")
    return coding


# ------------------------------------------------------------------------------------------------- file layouts
@dataclass(frozen=True)
class Field:
    """One column of a file: a number, or a category with its allowed levels (in order, where there is one).

    `aliases` maps other spellings that circulate to the published level.
    """

    name: str
    levels: tuple[str, ...] | None = None
    ordered: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """Columns of a file in their order; `target` names the one to predict, `dropped` the one that identifies the row.

    The separator None means any run of blanks. A two-level category counts as ordered: 0 and 1 lose nothing.
    """

    fields: tuple[Field, ...]
    target: str
    separator: str | None
    dropped: str | None


def read_layouts() -> dict[str, Layout]:
    """Of columns.csv, a line for each column in the order of its file."""
    fields: dict[str, dict[str, Field]] = {}
    roles: dict[tuple[str, str], str] = {}
    for row in rows_of("columns.csv"):
        aliases = dict([row["aliases"].split(" = ")]) if row["aliases"] else {}
        field = Field(row["column"], tuple(row["levels"].split()) or None, row["kind"] == "ordered", aliases)
        fields.setdefault(row["table"], {})[field.name] = field
        roles[row["table"], row["role"]] = field.name
    return {name: Layout(tuple(each.values()), roles[name, "target"], None if name in BLANKS else ",",
                         roles.get((name, "dropped"))) for name, each in fields.items()}


LAYOUTS = read_layouts()


# ------------------------------------------------------------------------------------------------------ loading
def load(name: str, data_dir: str | Path | None = None) -> Table:
    """Read or make the data set `name` (see `names`).

    Official files are read from `data_dir` (the option task.data_dir), by default $CRT_DATA/uci. A set that needs no
    file is made on the spot; of those, wine and chess are read from their files where `data_dir` is given, and the
    others refuse it. Raises DataError for an unknown name, and for a file that is missing or is not the published one,
    down to its number of rows.
    """
    if is_embedded(name, data_dir):
        no_folder(data_dir, f"task.dataset={name}, which is embedded")
        return EMBEDDED[name](name)
    if name not in LAYOUTS:
        near = difflib.get_close_matches(str(name), names(), n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise DataError(f"There is no table {name!r}.{hint} Known: {', '.join(names())}.")
    path = file_of(name, data_dir)
    if path is None:
        raise missing(f"uci/{name}", None)
    return read(name, path)


def is_embedded(name: str, data_dir: str | Path | None) -> bool:
    return name in EMBEDDED and not (data_dir and name in LAYOUTS)


def file_of(name: str, data_dir: str | Path | None) -> Path | None:
    """The official file that is read; None for a set that needs none, and where nobody says where the files are."""
    folder = task_folder("uci", data_dir)
    if folder is None or is_embedded(name, data_dir):
        return None
    return folder / Path(source_of(name).files[0].path).name


def names() -> list[str]:
    """Every table that `load` knows."""
    return list(dict.fromkeys([*LAYOUTS, *EMBEDDED]))


def target_field(layout: Layout) -> Field:
    return next(field for field in layout.fields if field.name == layout.target)


def source_of(name: str) -> Source:
    return SOURCES[f"uci/{name}"]


# ------------------------------------------------------------------------------------------------------ reading
@dataclass(frozen=True)
class TableReader:
    """The records of one file, with what its error messages need."""

    name: str
    path: Path
    lines: tuple[int, ...]                # line number of each record
    records: list[list[str]]

    def fail(self, problem: str, record: int | None = None, field: Field | None = None) -> NoReturn:
        """Raise DataError: where, what, and how to get the file as published."""
        source, line = source_of(self.name), "" if record is None else f", line {self.lines[record]}"
        if record is not None and record + 1 == len(self.records) < source.files[0].rows:
            problem += f" (the last of {record + 1} rows, {source.files[0].rows} expected: the file looks truncated)"
        raise DataError(f"{self.path}{line}{f', column {field.name}' if field else ''}: {problem}.\n"
                        "To get the file as published: "
                        f"`python -m crt_exp.data fetch {source.name}`, or {source.page}.")

    def number(self, field: Field, texts: Sequence[str]) -> np.ndarray:
        """The finite numbers of one column: (n,) float64."""
        try:
            values = np.array([as_number(text) for text in texts])
        except ValueError:
            record = next(i for i, text in enumerate(texts) if not is_number(text))
            self.fail(f"{texts[record]!r} is not a number", record, field)
        if not np.isfinite(values).all():
            record = int(np.argmin(np.isfinite(values)))
            self.fail(f"{texts[record]!r} is not a finite number", record, field)
        return values

    def codes(self, field: Field, texts: Sequence[str]) -> np.ndarray:
        """The places of one column's categories in `field.levels`: (n,) int64."""
        place = {level: code for code, level in enumerate(field.levels)}
        place |= {alias: place[level] for alias, level in field.aliases.items()}
        place = {text: place.get(text.strip(), -1) for text in set(texts)}
        codes = np.fromiter(map(place.__getitem__, texts), np.int64, len(texts))
        if codes.min() < 0:
            record = int(np.argmin(codes))
            self.fail(f"{texts[record].strip()!r} is not one of {', '.join(field.levels)}", record, field)
        return codes

    def column(self, field: Field, texts: Sequence[str]) -> Column:
        values = self.codes(field, texts) if field.levels else self.number(field, texts)
        return Column(field.name, values, field.levels, field.ordered)


def read(name: str, path: Path) -> Table:
    """The official file of `name` at `path`. Line ends, a missing last one and blank lines do not matter."""
    layout, published = LAYOUTS[name], source_of(name).files[0].rows
    reader = records_of(name, path, layout)
    for record, fields in enumerate(reader.records):
        if len(fields) != len(layout.fields):
            reader.fail(f"{len(fields)} columns, {len(layout.fields)} expected", record)
    columns = {field.name: reader.column(field, texts) for field, texts in zip(layout.fields, zip(*reader.records))
               if field.name != layout.dropped}
    if len(reader.records) != published:
        extent = "truncated" if len(reader.records) < published else "not the published one"
        reader.fail(f"the file is {extent}: {len(reader.records)} rows, expected {published}")
    target = columns.pop(layout.target)
    return Table(name, tuple(columns.values()), target.values, target.levels, f"{path} ({source_of(name).page})")


def records_of(name: str, path: Path, layout: Layout) -> TableReader:
    """Split the file into fields. The byte order mark that some editors write is no part of them."""
    empty = TableReader(name, path, (), [])
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        raise missing(f"uci/{name}", path) from None
    except UnicodeDecodeError:
        empty.fail("this is not a text file")
    except OSError as error:
        empty.fail(f"the file cannot be read ({error.strerror or error})")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        empty.fail(f"the file is empty, {source_of(name).files[0].rows} rows expected")
    return TableReader(name, path, tuple(number for number, _ in lines),
                       [line.split(layout.separator) for _, line in lines])


def as_number(text: str) -> float:
    """float(text), without Python's own 1_000."""
    if "_" in text:
        raise ValueError(text)
    return float(text)


def is_number(text: str) -> bool:
    try:
        as_number(text)
    except ValueError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------- embedded
def sklearn_table(name: str) -> Table:
    """A set that scikit-learn carries, in its own row order."""
    from sklearn import datasets

    bunch = getattr(datasets, f"load_{name}")()
    columns = tuple(Column(str(label).replace(" ", "_"), np.ascontiguousarray(values, np.float64))
                    for label, values in zip(bunch.feature_names, bunch.data.T))
    return Table(name, columns, bunch.target.astype(np.int64), tuple(map(str, bunch.target_names)),
                 f"embedded: scikit-learn's load_{name}")


def wine_table(name: str) -> Table:
    """scikit-learn's copy of wine under the official file's names of columns and classes."""
    table, layout = sklearn_table(name), LAYOUTS[name]
    labels = [field.name for field in layout.fields if field.name != layout.target]
    columns = tuple(Column(label, column.values) for label, column in zip(labels, table.columns))
    return Table(name, columns, table.target, target_field(layout).levels, table.source)


def chess_table(name: str) -> Table:
    """The chess set from the rules of chess: the rows of the official file, in its order."""
    *squares, result = LAYOUTS[name].fields
    rows = chess.positions()
    *places, target = np.ascontiguousarray(rows.T)
    columns = tuple(Column(field.name, values, field.levels, field.ordered) for field, values in zip(squares, places))
    return Table(name, columns, target, result.levels, "embedded: computed from the rules of chess")


EMBEDDED: dict[str, Callable[[str], Table]] = {
    "wine": wine_table, "chess": chess_table, "digits": sklearn_table, "breast_cancer": sklearn_table,
    "iris": sklearn_table}
