"""Files of a folder by suffix, and arrays in a cache folder."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from filelock import FileLock

from crt_exp.experiments.data import DataError, warn
from crt_exp.registry import written_folder

SYSTEM = ("__MACOSX", "@eaDir", "@Recycle", "#recycle", "$RECYCLE.BIN", "lost+found")
AUDIO = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".au", ".w64", ".caf")
IMAGES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
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
    names = []
    for entry in os.scandir(folder):
        if entry.is_dir() and not is_hidden(entry.name):
            names.append(entry.name)
    return sorted(names)


def files_ending(folder: str | Path, endings: tuple[str, ...], deep: bool = True) -> list[str]:
    """Sorted visible files with these lower-case suffixes; none if there is no folder.

    Links are followed, but each folder is entered once. Warns about files with other suffixes. deep: whether to enter
    subfolders. Raises DataError for a subfolder that is not readable.
    """
    files = []
    ignored = 0
    entered = set()
    for place, inner, names in os.walk(folder, onerror=refuse_folder, followlinks=True):
        real = os.path.realpath(place)
        if real in entered:
            inner.clear()
            continue
        entered.add(real)
        inner[:] = [name for name in sorted(inner) if deep and not is_hidden(name)]
        for name in names:
            if name.lower().endswith(endings) and not is_hidden(name):
                files.append(os.path.join(place, name))
            elif not is_hidden(name):
                ignored += 1
    if ignored:
        warn("%s: ignored %d files (expected %s)", folder, ignored, " ".join(endings))
    return sorted(files)


def refuse_folder(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise DataError(f"{error.filename}: not readable ({error.strerror})")


# ---- arrays in a cache folder ----------------------------------------------------------------------------------------


def cached(directory: str | Path | None, key: str, make: Callable[[], Arrays]) -> Arrays:
    """Arrays of `make()`, memory-mapped from a cache folder.

    The arrays lie in `directory`/`key`; None keeps them in memory. Raises DataError if the directory is not writable or
    a file is truncated.
    """
    if directory is None:
        return make()

    def write(folder: Path) -> None:
        for name, array in make().items():
            np.save(folder / name, array)

    folder = cached_folder(directory, key, write)
    try:
        return {path.stem: np.load(path, "r") for path in folder.iterdir()}
    except ValueError as error:
        raise DataError(f"{folder}: {error}; remove this folder to rebuild it") from None


def cached_folder(directory: str | Path, key: str, write: Callable[[Path], None]) -> Path:
    """Folder `directory`/`key`; `write` fills it once, and only one process does.

    The key must contain everything that determines the content. Raises DataError if the directory is not writable.
    """
    folder = written_folder(directory, "task.cache_dir") / key
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


def key_of(*parts: Any) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]
