"""Atomic file writes: a file is written completely or not at all."""

import csv
import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}  # disk full, file size limit, quota


@contextmanager
def atomic_path(path: Path, kind: str = "") -> Iterator[Path]:
    """Yield a temporary path whose file replaces `path` at the end.

    Symbolic links are followed, and the mode of an existing file is kept. `kind` is the suffix of the temporary file.
    Raises OSError, naming `path`, if `path` is not a regular file or cannot be written; an existing file is unchanged.
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
    """Return the system's error message, with advice if the disk is full."""
    message = str(error.strerror or error)
    if error.errno in FULL:
        message += "; free space and start again, with resume=auto in a run"
    return message


def write_rows(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write a csv file atomically."""
    with atomic_path(path) as part, open(part, "w", newline="") as file:
        csv.writer(file).writerows(rows)
