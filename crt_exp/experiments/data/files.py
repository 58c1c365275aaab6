"""Files of a folder by suffix, tables with a header, and arrays in a cache folder."""

import csv
import gzip
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from crt_exp.experiments.data import DataError, Folder, warn

if TYPE_CHECKING:  # pandas is imported at the first table, because the import takes half a second
    import pandas as pd

SYSTEM = ("__MACOSX", "@eaDir", "@Recycle", "#recycle", "$RECYCLE.BIN", "lost+found")
AUDIO = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".au", ".w64", ".caf")
IMAGES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
Arrays = dict[str, np.ndarray]


# ---- files of a folder -----------------------------------------------------------------------------------------------


def is_hidden(name: str) -> bool:
    """Whether an entry of a folder is hidden or made by a system program.

    >>> is_hidden(".git"), is_hidden("train")
    (True, False)
    """
    return name.startswith(".") or name in SYSTEM


def subfolders(folder: str | Path) -> list[str]:
    """Names of the visible folders in a folder, sorted."""
    folders = filter(os.DirEntry.is_dir, os.scandir(folder))
    return sorted(entry.name for entry in folders if not is_hidden(entry.name))


def files_ending(folder: str | Path, endings: tuple[str, ...], deep: bool = True) -> list[Path]:
    """Sorted visible files with these lower-case suffixes; none if there is no folder.

    Links are followed. Warns about files with other suffixes. deep: whether to enter subfolders. Raises DataError for a
    subfolder that is not readable.
    """
    files = []
    ignored = 0
    for place, inner, names in os.walk(folder, onerror=refuse_folder, followlinks=True):
        inner[:] = [name for name in sorted(inner) if deep and not is_hidden(name)]
        for name in names:
            if name.lower().endswith(endings) and not is_hidden(name):
                files.append(os.path.join(place, name))
            elif not is_hidden(name):
                ignored += 1
    if ignored:
        warn("%s: ignored %d files (expected %s)", folder, ignored, " ".join(endings))
    return [Path(file) for file in sorted(files)]


def refuse_folder(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise DataError(f"{error.filename}: not readable ({error.strerror})")


# ---- tables with a header --------------------------------------------------------------------------------------------


def read_table(path: Path, named: str, **options: Any) -> "pd.DataFrame":
    """Cells of a table as strings without outer blanks, NaN for missing cells.

    Row 1 is the row below the header. The separator of a csv file is the most frequent one of the header. Each line of
    a jsonl file is an object. Files except parquet may be compressed by gzip.

    Args:
        named: name of the table in errors, such as task.csv=mine.csv.
        options: arguments of pandas.read_csv.

    Raises:
        DataError: the file is missing or not readable, or its suffix is unknown.
    """
    import pandas as pd

    kind = Path(path.name.lower().removesuffix(".gz")).suffix
    if path.is_file() and kind not in TABLES:
        raise DataError(f"{named}: expected a {', '.join(TABLES[:-1])} or {TABLES[-1]} file")
    try:
        if kind == ".parquet":
            frame = pd.read_parquet(path, dtype_backend="numpy_nullable").apply(strings_of)
        elif kind == ".jsonl":
            frame = read_json_lines(path).apply(strings_of)
        else:
            frame = read_separated(path, options)
    except FileNotFoundError:
        raise DataError(f"{named}: no such file") from None
    except (OSError, EOFError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error).strip()
        raise DataError(f"{named}: not readable as a UTF-8 table: {problem}") from None
    frame.index = pd.RangeIndex(1, len(frame) + 1)
    frame.columns = frame.columns.astype(str).str.strip()
    return frame.apply(lambda cells: cells.str.strip())


def read_text_table(path: Path, named: str) -> "pd.DataFrame":
    """Read a table whose cells are text: words such as NA are text, and empty cells are "".

    Cells of a tsv file are not quoted, because texts hold unpaired quotes. Raises DataError.
    """
    options: dict[str, Any] = {"keep_default_na": False}
    if ".tsv" in path.name.lower():
        options["quoting"] = csv.QUOTE_NONE
    return read_table(path, named, **options).fillna("")


def check_columns(
    cells: "pd.DataFrame", columns: Iterable[str], named: str, instead: str = ""
) -> None:
    """Raise DataError if a column is missing; `instead` ends the advice."""
    for column in columns:
        if column not in cells:
            present = ", ".join(cells.columns[:20]) or "no column"
            raise DataError(
                f"{named}: no column {column}; its header has {present}; rename a column{instead}"
            )


def check_cells(cells: "pd.DataFrame", columns: Iterable[str], named: str) -> None:
    """Raise DataError for a missing column and for the first empty cell."""
    check_columns(cells, columns, named)
    for column in columns:
        empty = cells[column] == ""
        if empty.any():
            raise DataError(
                f"{named}: row {empty.idxmax()}, column {column} is empty; fill it in, or remove the row"
            )


def open_text(path: Path):
    open_file = gzip.open if path.suffix == ".gz" else open
    return open_file(path, "rt", encoding="utf-8-sig")


def read_separated(path: Path, options: dict[str, Any]) -> "pd.DataFrame":
    """Cells of a csv or tsv file. Raises ValueError if the first row is longer than the header."""
    import pandas as pd

    with open_text(path) as stream:
        header = stream.readline()
    separator = max(",;\t", key=header.count)
    frame = pd.read_csv(
        path, sep=separator, dtype=str, skipinitialspace=True, encoding="utf-8-sig", **options
    )
    if not isinstance(frame.index, pd.RangeIndex):  # pandas takes the first cells as row names
        raise ValueError(
            f"row 1 has more cells than the header; put cells that contain {separator!r} in quotes"
        )
    return frame


def read_json_lines(path: Path) -> "pd.DataFrame":
    """Objects of a jsonl file as rows. Raises ValueError with the line of another value."""
    import pandas as pd

    rows = []
    with open_text(path) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise ValueError(f"line {number}: expected a JSON object")
            rows.append(row)
    return pd.DataFrame(rows, index=range(1, len(rows) + 1), dtype=object)


def strings_of(cells: "pd.Series") -> "pd.Series":
    """Cells as strings; raises ValueError for a cell that is a list or an object."""
    for row, cell in cells.items():
        if isinstance(cell, list | dict | bytes | np.ndarray):
            raise ValueError(f"row {row}, column {cells.name}: expected a string or a number")
    return cells.astype("str")


# ---- arrays in a cache folder ----------------------------------------------------------------------------------------


def cached(
    directory: Folder, make: Callable[[], Arrays], *parts: Any, files: Iterable[Path] = ()
) -> Arrays:
    """Arrays of `make()`, memory-mapped from a folder in `directory`; None keeps them in memory.

    The name of the folder is a hash of `parts` and of the content of `files`, which determine the arrays. Raises
    DataError if the directory is not writable or a file is truncated.
    """
    if directory is None:
        return make()

    def write(folder: Path) -> None:
        for name, array in make().items():
            np.save(folder / name, array)

    contents = [f"{file.suffix}:{sha256(file)}" for file in files]
    folder = cached_folder(directory, key_of(*parts, *contents), write)
    try:
        return {path.stem: np.load(path, "r") for path in folder.iterdir()}
    except ValueError as error:
        raise DataError(f"{folder}: {error}; remove this folder to rebuild it") from None


def cached_folder(directory: str | Path, key: str, write: Callable[[Path], None]) -> Path:
    """Folder `directory`/`key`; `write` fills it once, and only one process does.

    The key must contain everything that determines the content. Raises DataError if the directory is not writable.
    """
    folder = Path(directory).expanduser() / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder.parent}.lock"):
            if not folder.exists():
                with TemporaryDirectory(dir=folder.parent) as place:
                    part = Path(place, key)
                    part.mkdir()
                    write(part)
                    part.rename(folder)  # atomic
    except OSError as error:
        raise DataError(
            f"task.cache_dir={directory}: {error}; expected a writable folder, or null"
        ) from None
    return folder


def sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def key_of(*parts: Any) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]
