"""Files that are written whole or not at all, and whose errors say which file it is."""

import csv
import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}  # a full disk, a limit to the size of files, a quota


@contextmanager
def whole(path: Path, kind: str = "") -> Iterator[Path]:
    """A private path to write to, whose file replaces `path` at the end; kind: the suffix of that file's name.

    Links are followed and the mode of an older file is kept. Raises OSError, naming `path`, where it cannot be written
    or is no regular file: nothing is left of the new file, and what was there stays.
    """
    target = Path(os.path.realpath(path))
    try:
        if os.path.lexists(target) and not target.is_file():
            raise OSError("expected a regular file; choose another name")
        with TemporaryDirectory(dir=target.parent, prefix=".", suffix=".tmp") as folder:
            part = Path(folder, f"new{kind}")
            yield part
            if target.exists():
                shutil.copymode(target, part)
            os.replace(part, target)
    except OSError as error:
        raise type(error)(f"{path} cannot be written: {reason(error)}") from None


def reason(error: OSError) -> str:
    """What the system says, and of a full disk what to do."""
    said = str(error.strerror or error)
    return f"{said}; free space and start again, with resume=auto in a run" if error.errno in FULL else said


def write_rows(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """A csv file, as `whole` writes it."""
    with whole(path) as part, open(part, "w", newline="") as file:
        csv.writer(file).writerows(rows)
