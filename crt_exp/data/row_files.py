"""Tables of any number of rows, read a chunk at a time: a csv file, a Parquet file, or a folder of npy arrays.

Columns hold numbers; those that are asked for as texts are labels. Chunks have the same borders whoever reads them and
wherever reading begins, so that processes, and a run that goes on, share out the same ones. Rows are counted from 0.
"""

import csv
import difflib
import io
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from crt_exp.data import DataError, check_regular
from crt_exp.data.own_table import shown
from crt_exp.data.tabular import is_number

PLACES = 64             # of a csv file that rows are taken from to see how they spread
SMALL = 2**24           # bytes of a csv file that is read whole for that
Wanted = Callable[[int], bool]
Columns = dict[str, np.ndarray]   # name -> (n,) float64, or texts


class Chunk(NamedTuple):
    number: int
    row: int             # the first one
    columns: Columns


class RowFile(ABC):
    """names: of the columns. count: of the rows; None where only reading tells."""

    count: int | None = None

    def __init__(self, path: Path):
        self.path = path

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Raises DataError."""

    @abstractmethod
    def chunks(self, names: Sequence[str], texts: Collection[str], size: int, wanted: Wanted) -> Iterator[Chunk]:
        """Those whose number is wanted, `size` rows each or less. Raises DataError, naming the row, for a cell that is
        no number and for one that is empty."""

    @abstractmethod
    def spread(self, names: Sequence[str], texts: Collection[str], most: int) -> Columns:
        """At most so many rows from all over the file."""

    def line(self, row: int) -> str:
        """What messages call it."""
        return f"row {row}"

    def checked(self, row: int, columns: Columns) -> Columns:
        """Raises DataError for the first number that is missing or infinite."""
        for name, values in columns.items():
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                bad = int(np.flatnonzero(~np.isfinite(values))[0])
                raise DataError(f"{self.path}, {self.line(row + bad)}, column {name}: it is {values[bad]:g}, or empty: "
                                "fill it in, or leave the row out")
        return columns


def open_rows(path: str | Path) -> RowFile:
    """By what lies there. Raises DataError."""
    path = Path(path).expanduser()
    if path.is_dir():
        return Arrays(path)
    try:
        check_regular(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise DataError(f"{path} is {error}: it takes a csv or Parquet file, or a folder of npy arrays") from None
    return Parquet(path) if path.suffix in (".parquet", ".pq") else Csv(path)


def check_names(file: RowFile, wanted: Mapping[str, str]) -> None:
    """wanted: column -> the option that names it. Raises DataError for one that is not there."""
    for name, option in wanted.items():
        if name not in file.names:
            near = difflib.get_close_matches(name, file.names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise DataError(f"{option} = {name}: {file.path} has no such column{hint}\n  columns: {shown(file.names)}")


def evenly(count: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(most, count)).astype(np.int64))


# ---- csv -------------------------------------------------------------------------------------------------------------


class Csv(RowFile):
    """A header, then a row a line."""

    def line(self, row):
        return f"line {row + 2}"

    @cached_property
    def separator(self) -> str:
        return max(",;\t", key=self._header.count)

    @cached_property
    def names(self) -> list[str]:
        names = [name.strip() for name in next(csv.reader([self._header], delimiter=self.separator))]
        if all(map(is_number, names)):
            raise DataError(f"{self.path}: these are numbers, {shown(names)}: the first line must name the columns")
        if "" in names or len({*names}) < len(names):
            raise DataError(f"{self.path}: the header must give each column a name of its own: {shown(names)}")
        return names

    @cached_property
    def _header(self) -> str:
        with self.path.open("rb") as file:
            return self._decoded(file.readline()).removeprefix("\ufeff").strip("\r\n")

    def chunks(self, names, texts, size, wanted):
        with self.path.open("rb") as file:
            file.readline()
            for number in itertools.count():
                lines = list(itertools.islice(file, size))
                if not lines:
                    return
                if wanted(number):
                    rows = number * size + np.arange(len(lines))
                    yield Chunk(number, number * size, self._parsed(lines, rows, names, texts))

    def spread(self, names, texts, most):
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            begin = len(file.readline())
            if size <= SMALL:
                every = file.readlines()
                rows = evenly(len(every), most) if every else []
                lines = [every[i] for i in rows]
            else:
                rows, lines = self._sampled(file, begin, size, most)
        if not lines:
            raise DataError(f"{self.path} has no row: it takes a header with the names of the columns, and a row for "
                            "each example")
        return self._parsed(lines, np.asarray(rows), names, texts)

    def _sampled(self, file, begin: int, size: int, most: int) -> tuple[np.ndarray, list[bytes]]:
        """Lines from PLACES of a large file, at the numbers that they have where all lines before them are as long as
        these on average: exact ones would take a pass over all."""
        lines, places = [], []
        for place in np.linspace(begin, size, PLACES, endpoint=False).astype(int):
            file.seek(int(place))
            file.readline()
            found = list(itertools.islice(file, most // PLACES))
            places += [place + offset for offset in np.cumsum([0, *map(len, found[:-1])])] if found else []
            lines += found
        return ((np.array(places) - begin) / np.mean([*map(len, lines)] or [1])).astype(int), lines

    def _parsed(self, lines: list[bytes], rows: np.ndarray, names: Sequence[str], texts: Collection[str]) -> Columns:
        """rows (n,): their numbers."""
        import pandas as pd

        text = self._decoded(b"".join(lines))
        kinds = {name: str if name in texts else np.float64 for name in names}
        blank = [i for i, line in enumerate(lines) if not line.strip()]
        if text.count(self.separator) != (len(lines) - len(blank)) * (len(self.names) - 1):
            self._check_cells(text, rows, names, texts)
        try:
            frame = pd.read_csv(io.StringIO(text), sep=self.separator, header=None, names=self.names, usecols=[*names],
                                dtype=kinds, skip_blank_lines=False, index_col=False, skipinitialspace=True)
        except (ValueError, pd.errors.ParserError) as error:
            self._check_cells(text, rows, names, texts)
            raise DataError(f"{self.path}: {error}") from None
        columns = {name: np.delete(frame[name].fillna("").to_numpy(str) if name in texts else frame[name].to_numpy(),
                                   blank) for name in names}
        if any(not np.isfinite(values).all() if values.dtype.kind == "f" else (values == "").any()
               for values in columns.values()):
            self._check_cells(text, rows, names, texts)
        return self.checked(int(rows[0]), columns)

    def _check_cells(self, text: str, rows: np.ndarray, names: Sequence[str], texts: Collection[str]) -> None:
        """Raises DataError for the first line that has another number of cells, or no number where one belongs."""
        for row, cells in zip(rows, csv.reader(text.splitlines(), delimiter=self.separator)):
            place = f"{self.path}, {self.line(row)}"
            if cells and len(cells) != len(self.names):
                raise DataError(f"{place}: {len(cells)} cells, {len(self.names)} expected")
            for name, cell in zip(self.names, map(str.strip, cells)):
                if name in names and not cell:
                    raise DataError(f"{place}, column {name}: it is empty: fill it in, or leave the row out")
                if name in names and name not in texts and not is_number(cell):
                    raise DataError(f"{place}, column {name}: {cell!r} is not a number: code it as one, list the "
                                    "column in task.onehot, or name the columns to read by task.columns=[...]")
                if name in names and name not in texts and not np.isfinite(float(cell)):
                    raise DataError(f"{place}, column {name}: it is {cell}: fill it in, or leave the row out")

    def _decoded(self, content: bytes) -> str:
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise DataError(f"{self.path} is not UTF-8 text: save it as UTF-8") from None


# ---- Parquet ---------------------------------------------------------------------------------------------------------


class Parquet(RowFile):
    """Chunks end where groups of rows do."""

    @cached_property
    def file(self):
        try:
            from pyarrow import ArrowInvalid
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise DataError(f"{self.path}: Parquet files need pyarrow: pip install pyarrow") from None
        try:
            return ParquetFile(self.path)
        except ArrowInvalid as error:
            raise DataError(f"{self.path} is no Parquet file: {str(error).splitlines()[0]}") from None

    @property
    def names(self):
        return self.file.schema_arrow.names

    @property
    def count(self):
        return self.file.metadata.num_rows

    def chunks(self, names, texts, size, wanted):
        number = row = 0
        for group in range(self.file.num_row_groups):
            rows = self.file.metadata.row_group(group).num_rows
            each = -(-rows // size)
            if any(wanted(number + i) for i in range(each)):
                batches = self.file.iter_batches(size, [group], [*names])
                for i, batch in enumerate(batches):
                    if wanted(number + i):
                        yield Chunk(number + i, row + i * size, self._columns(batch, row + i * size, texts))
            number, row = number + each, row + rows

    def spread(self, names, texts, most):
        places = evenly(self.count, most) if self.count else []
        if not len(places):
            raise DataError(f"{self.path} has no row")
        ends = np.cumsum([self.file.metadata.row_group(i).num_rows for i in range(self.file.num_row_groups)])
        parts = []
        for group in np.unique(np.searchsorted(ends, places, side="right")):
            within = places[np.searchsorted(ends, places, side="right") == group] - (ends[group - 1] if group else 0)
            table = self.file.read_row_group(int(group), [*names])
            parts.append(self._columns(table.take(within), 0, texts))
        return {name: np.concatenate([part[name] for part in parts]) for name in names}

    def _columns(self, batch, row: int, texts: Collection[str]) -> Columns:
        from pyarrow import types

        columns = {}
        for name in batch.schema.names:
            kind, values = batch.schema.field(name).type, batch.column(name)
            number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
            if not number and name not in texts:
                raise DataError(f"{self.path}, column {name}: it holds {kind}, not numbers: code it as numbers, list "
                                "it in task.onehot, or name the columns to read by task.columns=[...]")
            if name in texts and values.null_count:
                bad = values.is_null().to_pylist().index(True)
                raise DataError(f"{self.path}, {self.line(row + bad)}, column {name}: it is empty: fill it in, or "
                                "leave the row out")
            values = values.to_numpy(zero_copy_only=False) if hasattr(values, "offset") else values.to_numpy()
            columns[name] = values.astype(str) if name in texts else values.astype(np.float64)
        return self.checked(row, columns)


# ---- npy -------------------------------------------------------------------------------------------------------------


class Arrays(RowFile):
    """Of a folder: y.npy (n,) is column y, X.npy (n, d) columns X.0, X.1, ... Mapped for each chunk anew:
    what was read through a map counts as memory of the process as long as the map is there."""

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        arrays = {path.stem: self._mapped(path) for path in sorted(self.path.glob("*.npy"))}
        if not arrays:
            raise DataError(f"{self.path} holds no npy file: it takes arrays of as many rows each, such as X.npy "
                            "(n, d) and y.npy (n,)")
        counts = {name: len(array) for name, array in arrays.items()}
        if len({*counts.values()}) > 1:
            raise DataError(f"{self.path}: its arrays have different numbers of rows: "
                            + ", ".join(f"{name}.npy {count}" for name, count in counts.items()))
        return arrays

    def _mapped(self, path: Path) -> np.ndarray:
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise DataError(f"{path} is no array that can be mapped: {error}") from None
        if array.ndim not in (1, 2) or array.dtype.kind not in "biufU":
            raise DataError(f"{path} is an array of {array.dtype} {array.shape}: it takes numbers or texts, (n,) or "
                            "(n, d)")
        return array

    @cached_property
    def places(self) -> dict[str, tuple[str, int | None]]:
        """Column -> array, and the column within it."""
        return {f"{name}.{i}" if array.ndim == 2 else name: (name, i if array.ndim == 2 else None)
                for name, array in self.arrays.items() for i in range(array.shape[1] if array.ndim == 2 else 1)}

    @property
    def names(self):
        return [*self.places]

    @property
    def count(self):
        return len(next(iter(self.arrays.values())))

    def chunks(self, names, texts, size, wanted):
        for number in range(-(-self.count // size)):
            if wanted(number):
                row = number * size
                yield Chunk(number, row, self._columns(slice(row, row + size), row, names, texts))

    def spread(self, names, texts, most):
        if not self.count:
            raise DataError(f"{self.path} has no row")
        return self._columns(evenly(self.count, most), 0, names, texts)

    def _columns(self, rows, row: int, names: Sequence[str], texts: Collection[str]) -> Columns:
        arrays = {self.places[name][0] for name in names}
        blocks = {array: np.asarray(self._mapped(self.path / f"{array}.npy")[rows]) for array in arrays}
        columns = {}
        for name in names:
            array, i = self.places[name]
            values = blocks[array] if i is None else blocks[array][:, i]
            if values.dtype.kind == "U" and name not in texts:
                raise DataError(f"{self.path / array}.npy holds texts, not numbers: list it in task.onehot, or "
                                "name the columns to read by task.columns=[...]")
            columns[name] = values.astype(str if name in texts else np.float64)
        return self.checked(row, columns)
