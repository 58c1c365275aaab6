"""Readers of data sets, data that comes along, and the command `python -m crt_exp.data` that lists, fetches, verifies.

Light on purpose: importing it pulls in no heavy library, so that an error about data costs no waiting.
"""

import os
import stat
from collections.abc import Hashable, Iterable
from pathlib import Path


class DataError(Exception):
    """A data set that cannot be used. The message is for the user: what is wrong, where (file and line), and what to
    do (which file to get from where, where to put it, which option to set)."""


def check_regular(path, least: int = 0) -> None:
    """Raises ValueError for a file of fewer bytes than `least`, and for what lies at a path and is no file: reading a
    pipe or a device may wait for ever."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device, not a file")
    if status.st_size < least:
        raise ValueError("the file is empty")


def check_classes(labels: Iterable[Hashable], where: str) -> None:
    """labels: of the training rows, or the names of the classes. Raises DataError where there is only one: whatever is
    learnt of it has accuracy 1."""
    different = set(labels)
    if len(different) < 2:
        raise DataError(f"{where}: every example is of one class ({', '.join(map(str, different)) or 'none'}): "
                        "classification takes examples of at least 2")


def read_text(path: str | Path, named: str) -> str:
    """A file of UTF-8 text, without the byte order mark that some editors write. named: as messages call it.
    Line ends become line feeds. Raises DataError, also for what is no regular file."""
    try:
        check_regular(Path(path).expanduser())
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{named} is not UTF-8 text: save it as UTF-8") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{named} cannot be read: {getattr(error, 'strerror', None) or error}") from None
