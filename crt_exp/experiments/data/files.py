"""Files of a folder by suffix, and arrays in a cache folder."""

import hashlib
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from filelock import FileLock

from crt_exp.experiments.data import DataError, warn
from crt_exp.registry import written_folder

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


def hidden(name: str) -> bool:
    """Whether an entry of a folder is hidden or made by a system program."""
    return name.startswith(".") or name in SYSTEM


def leads_up(link: str, folder: str | Path) -> bool:
    """Whether a symbolic link in a folder leads to this folder or one above."""
    target = os.path.realpath(link)
    return os.path.commonpath([target, os.path.realpath(folder)]) == target


def files_ending(folder: str | Path, endings: tuple[str, ...], deep: bool = True) -> list[str]:
    """The files of one folder; see `files_of_each`."""
    return files_of_each([folder], endings, deep)[0]


def files_of_each(
    folders: Sequence[str | Path], endings: tuple[str, ...], deep: bool = True
) -> list[list[str]]:
    """Sorted files with these lower-case suffixes in each folder, without hidden files.

    Symbolic links are followed, but each file is listed once, at its own place if that is in one of the folders. Warns
    about links that are left out and about files with other suffixes. deep: whether to enter subfolders. Raises
    DataError for a subfolder that is not readable.
    """
    found, links = walk(folders, deep)
    taken = []
    for folder, paths in zip(folders, found):
        files = [path for path in paths if path.lower().endswith(endings)]
        others = set(paths) - set(files)
        if others:
            warn_of_others(folder, others, endings)
        taken.append(sorted(files))
    return without_copies(taken, links) if links else taken


def walk(folders: Sequence[str | Path], deep: bool) -> tuple[list[list[str]], set[str]]:
    """Visible files of each folder, and which of them are symbolic links.

    A folder is entered once, at its own place before a link to it. Links to a folder above are not followed.
    """
    found = [[] for _ in folders]
    links = set()
    entered = set()
    starts = [(number, str(folder)) for number, folder in enumerate(folders)]
    pending = deque(sorted(starts, key=lambda start: os.path.islink(start[1])))
    while pending:
        number, place = pending.popleft()
        real = os.path.realpath(place)
        if real in entered:
            warn("%s: left out: leads to a folder that is read already", place)
            continue
        entered.add(real)
        for entry in visible_entries(place):
            is_link = entry.is_symlink()
            is_folder = os.path.isdir(entry.path) if is_link else entry.is_dir()
            if not (deep and is_folder):
                found[number].append(entry.path)
                if is_link:
                    links.add(entry.path)
            elif not is_link:
                pending.appendleft((number, entry.path))
            elif leads_up(entry.path, place):
                warn("%s: left out: leads to a folder above", entry.path)
            else:
                pending.append((number, entry.path))
    return found, links


def visible_entries(folder: str) -> list[os.DirEntry]:
    """Entries of a folder by name; none if it does not exist. Raises DataError."""
    try:
        entries = [entry for entry in os.scandir(folder) if not hidden(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DataError(f"{folder}: not readable ({error.strerror})") from None
    return sorted(entries, key=lambda entry: entry.name)


def warn_of_others(folder: str | Path, others: Iterable[str], endings: tuple[str, ...]) -> None:
    kinds = sorted(os.path.splitext(path)[1].lower() or "without one" for path in others)
    counts = ", ".join(f"{count} {ending}" for ending, count in Counter(kinds).most_common(6))
    warn("%s: ignored files: %s (expected %s)", folder, counts, " ".join(endings))


def without_copies(groups: list[list[str]], links: set[str]) -> list[list[str]]:
    """Leave out links to a file that is listed already."""
    paths = list(chain.from_iterable(groups))
    listed = {identity(path) for path in paths if path not in links}
    copies = []
    for path in paths:
        if path not in links:
            continue
        file = identity(path)
        if file in listed:
            copies.append(path)
        listed.add(file)
    if not copies:
        return groups
    warn("%s: left out, with %d other links to listed files", copies[0], len(copies) - 1)
    rest = []
    left_out = set(copies)
    for group in groups:
        rest.append([path for path in group if path not in left_out])
    return rest


def identity(path: str | Path) -> tuple:
    """Equal for paths of the same file."""
    try:
        state = os.stat(path)
    except OSError:  # reading the file reports the error
        return (os.path.realpath(path),)
    return state.st_dev, state.st_ino


# ---- arrays in a cache folder ----------------------------------------------------------------------------------------


def cached(directory: str | Path | None, key: str, make: Callable[[], Arrays]) -> Arrays:
    """Arrays of `make()`, memory-mapped from a cache folder.

    The arrays lie in `directory`/`key`; None keeps them in memory. The key must contain everything that determines the
    arrays. Raises DataError if the directory is not writable or a file is truncated.
    """
    if directory is None:
        return make()
    folder = written_folder(directory, "task.cache_dir") / key
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
