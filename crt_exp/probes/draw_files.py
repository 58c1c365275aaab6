"""Files of draws, plain or gz, read whole or refused: one that is cut would give other verdicts without a word."""

import csv
import gzip
import io
import zlib
from pathlib import Path


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
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        fields = next(reader, [])
        for row in reader:
            if len(row) != len(fields):
                raise damaged(path, f"line {reader.line_num} has {len(row)} fields, the first line {len(fields)}")
    except csv.Error as error:
        raise damaged(path, f"line {reader.line_num} is not csv ({error})") from None
    if reader.line_num < 2:
        raise damaged(path, "it holds no draws" if fields else "it is empty")
    if not text.endswith("\n"):
        raise damaged(path, f"line {reader.line_num}, the last, has no end: the file is cut off")


def damaged(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path}: {reason}. Get the committed file again, or measure it with "
                      f"`make {path.name.removesuffix('.gz').removesuffix('.csv')}`")
