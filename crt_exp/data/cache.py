"""Arrays that are made once, kept in a cache folder, and memory-mapped from there."""

import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from filelock import FileLock

from crt_exp.data import DataError
from crt_exp.data.ranks import rank

Arrays = dict[str, np.ndarray]


def cached(directory: str | Path | None, key: str, make: Callable[[], Arrays]) -> Arrays:
    """The arrays of `make()`, kept in the folder KEY of `directory` and mapped from there (None: in memory).

    The key must hold all that the arrays depend on. Raises DataError where the directory cannot be written, and for
    a file that is too short.
    """
    if directory is None:
        return make()
    folder = Path(directory).expanduser() / key
    try:
        with alone(folder.parent):                           # the ranks of a run then make them once
            if not folder.exists():
                with TemporaryDirectory(dir=folder.parent) as place:
                    part = Path(place, key)
                    part.mkdir()
                    for name, array in make().items():
                        np.save(part / name, array)
                    part.rename(folder)                      # whole or not at all
    except OSError as error:
        raise DataError(f"task.cache_dir={directory}: {error}; expected a writable folder, or null") from None
    try:
        return {path.stem: np.load(path, "r") for path in folder.iterdir()}
    except ValueError as error:
        raise DataError(f"{folder}: {error}; remove this folder, and it is made again") from None


def alone(directory: Path) -> FileLock:
    """Create the directory and wait until no other process makes something for it."""
    directory.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{directory}.lock")


@functools.cache
def warn(message: str, *about: Any) -> None:
    """Once in a process for the same thing, and by the first process of a run alone."""
    if rank() == 0:
        logging.getLogger(__name__).warning(message, *about)


def key_of(*parts: Any) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]
