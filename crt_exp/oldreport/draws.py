"""The committed draws of a page: outputs/report/<name>.csv, one schema for all (`crt_exp.measure.cells.Draw`)."""

import csv
import gzip
import zlib
from collections.abc import Iterable
from dataclasses import asdict, fields
from io import StringIO
from pathlib import Path

import pandas as pd

from crt_exp.measure.cells import PAGES, Draw
from crt_exp.runner.run import write_atomic

COLUMNS = [field.name for field in fields(Draw)]
FOLDER = PAGES
LARGEST = 2**20  # bytes of a file that is not compressed


def read(name: str, folder: Path = FOLDER) -> pd.DataFrame:
    """The draws of a page; settings, arms, units and tables are strings, empty where they do not apply.

    Raises FileNotFoundError where none are committed, ValueError for a file that is not of this schema or not whole.
    """
    path = path_of(name, folder)
    text = dict.fromkeys(("table", "setting", "arm", "unit", "commit", "date", "versions"), str)
    frame = pd.read_csv(StringIO(whole_text(path)), dtype=text, keep_default_na=False, na_values={}, low_memory=False)
    if [*frame.columns] != COLUMNS:
        raise ValueError(f"{path}: got the columns {', '.join(frame.columns)}, expected {', '.join(COLUMNS)}")
    frame["seconds"] = pd.to_numeric(frame["seconds"]).fillna(0.0)
    for column in ("x", "value"):
        frame[column] = numbers(frame[column])
    return frame


def numbers(column: pd.Series) -> pd.Series:
    """As numbers where all that is not empty is one."""
    if column.dtype != object and not pd.api.types.is_string_dtype(column):
        return column
    values = pd.to_numeric(column.where(column != ""), errors="coerce")
    return values if (values.notna() | (column == "")).all() else column


def there(name: str, folder: Path = FOLDER) -> bool:
    """Whether a page has draws."""
    return any((folder / f"{name}{end}").is_file() for end in (".csv", ".csv.gz"))


def path_of(name: str, folder: Path = FOLDER) -> Path:
    for path in (folder / f"{name}.csv", folder / f"{name}.csv.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder / name}.csv: no draws of this page; `make {name}` measures them")


def write(name: str, draws: Iterable[Draw], folder: Path = FOLDER) -> Path:
    """Writes the file atomically, compressed where it is above 1 MB. Raises ValueError where there are none."""
    frame = pd.DataFrame([asdict(draw) for draw in draws], columns=COLUMNS)
    if frame.empty:
        raise ValueError(f"{name}: the measurement gave no draws, so nothing is written")
    text = frame.to_csv(index=False, lineterminator="\n").encode()
    folder.mkdir(parents=True, exist_ok=True)
    plain, packed = folder / f"{name}.csv", folder / f"{name}.csv.gz"
    path, other = (plain, packed) if len(text) <= LARGEST else (packed, plain)
    write_atomic(path, text if path == plain else gzip.compress(text, mtime=0))
    other.unlink(missing_ok=True)
    return path


# ---- files that are cut are refused: they would give other verdicts without a word


def whole_text(path: Path) -> str:
    """The text of a csv file whose lines have as many fields as the first, at least one of them below it, and the last
    one its end. Raises ValueError, naming the file and where it breaks off."""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise damaged(path, f"cut off or damaged ({error})") from None
    check_rows(path, text)
    return text


def check_rows(path: Path, text: str) -> None:
    reader = csv.reader(StringIO(text, newline=""), strict=True)
    try:
        names = next(reader, [])
        for row in reader:
            if len(row) != len(names):
                raise damaged(path, f"line {reader.line_num} has {len(row)} fields, the first line {len(names)}")
    except csv.Error as error:
        raise damaged(path, f"line {reader.line_num} is not csv ({error})") from None
    if reader.line_num < 2:
        raise damaged(path, "it holds no draws" if names else "it is empty")
    if not text.endswith("\n"):
        raise damaged(path, f"line {reader.line_num}, the last, has no end: the file is cut off")


def damaged(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path}: {reason}. Get the committed file again, or measure it with "
                      f"`make {path.name.removesuffix('.gz').removesuffix('.csv')}`")
