"""Files that are written whole or not at all, and whose errors say which file it is."""

import csv
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}  # a full disk, a limit to the size of files, a quota


@contextmanager
def whole(path: Path, kind: str = "") -> Iterator[Path]:
    """A name beside `path` to write to, which takes its place in the end; kind: how that name must end.

    Raises OSError, naming `path`, where it cannot be written: nothing is left of the new file, and an older one stays.
    """
    part = path.with_name(f"{path.name}.tmp{kind}")
    try:
        yield part
        os.replace(part, path)
    except OSError as error:
        raise type(error)(f"{path} cannot be written: {reason(error)}") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def reason(error: OSError) -> str:
    """What the system says, and of a full disk what to do."""
    said = str(error.strerror or error)
    return f"{said}; free space and start again, with resume=auto in a run" if error.errno in FULL else said


def write_rows(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """A csv file, as `whole` writes it."""
    with whole(path) as part, open(part, "w", newline="") as file:
        csv.writer(file).writerows(rows)
