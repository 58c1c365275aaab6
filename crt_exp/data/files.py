"""Files of a folder by suffix, and arrays in a cache folder."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from filelock import FileLock

from crt_exp.data import DataError, warn

SYSTEM = (
    "__MACOSX",
    "@eaDir",
    "@Recycle",
    "#recycle",
    "$RECYCLE.BIN",
    "System Volume Information",
    "lost+found",
)
AUDIO = (
    ".wav",
    ".flac",
    ".ogg",
    ".oga",
    ".opus",
    ".mp3",
    ".aiff",
    ".aif",
    ".aifc",
    ".au",
    ".snd",
    ".w64",
    ".caf",
    ".rf64",
)
IMAGES = (
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".png",
    ".gif",
    ".bmp",
    ".ppm",
    ".pgm",
    ".tif",
    ".tiff",
    ".webp",
)
Arrays = dict[str, np.ndarray]


# ---- files of a folder -----------------------------------------------------------------------------------------------


def hidden(path: str | Path) -> bool:
    """Whether a relative path is hidden or made by a system program."""
    return any(part.startswith(".") or part in SYSTEM for part in str(path).split(os.sep))


def files_ending(
    folder: Path, endings: tuple[str, ...], paths: Iterable[str | Path] | None = None
) -> list[str]:
    """Sorted files with these lower-case suffixes, without hidden files.

    paths: the candidates; None: all files in the folder. Warns about files with other suffixes.
    """
    if paths is None:
        paths = (
            os.path.join(root, name)
            for root, _, names in os.walk(folder, followlinks=True)
            for name in names
        )
    start = len(str(folder)) + 1
    files = sorted(path for path in map(str, paths) if not hidden(path[start:]))
    taken = [path for path in files if path.lower().endswith(endings)]
    if len(taken) < len(files):
        others = sorted(
            os.path.splitext(path)[1].lower() or "without one" for path in set(files) - set(taken)
        )
        counts = ", ".join(f"{count} {ending}" for ending, count in Counter(others).most_common(6))
        warn("%s: ignored files: %s (expected %s)", folder, counts, " ".join(endings))
    return taken


# ---- arrays in a cache folder ----------------------------------------------------------------------------------------


def cached(directory: str | Path | None, key: str, make: Callable[[], Arrays]) -> Arrays:
    """Arrays of `make()`, memory-mapped from a cache folder.

    The arrays lie in `directory`/`key`; None keeps them in memory. The key must contain everything that determines the
    arrays. Raises DataError if the directory is not writable or a file is truncated.
    """
    if directory is None:
        return make()
    folder = Path(directory).expanduser() / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder.parent}.lock"):  # only one rank makes the arrays
            if not folder.exists():
                with TemporaryDirectory(dir=folder.parent) as place:
                    part = Path(place, key)
                    part.mkdir()
                    for name, array in make().items():
                        np.save(part / name, array)
                    part.rename(folder)  # atomic
    except OSError as error:
        raise DataError(
            f"task.cache_dir={directory}: {error}; expected a writable folder, or null"
        ) from None
    try:
        return {path.stem: np.load(path, "r") for path in folder.iterdir()}
    except ValueError as error:
        raise DataError(f"{folder}: {error}; remove this folder to rebuild it") from None


def key_of(*parts: Any) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]
