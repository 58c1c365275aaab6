"""Arrays that need not fit in memory: written piece by piece into a folder beside the caches of cache.py, and mapped
from there."""

import json
import os
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from crt_exp.data.cache import alone, warn

Pieces = Iterator[Mapping[str, np.ndarray]]
Types = Mapping[str, np.dtype]
SIZES = "sizes.json"


def mapped(directory: str | Path | None, key: str, make: Callable[[], Pieces], types: Types) -> dict[str, np.ndarray]:
    """The pieces of each array of one dimension, joined; kept in the folder KEY.arrays of `directory` and mapped from
    there, read only (None: in memory). No more than a piece is in memory while they are made.

    A folder whose files have other lengths than were written is made again, and one line says so; what they hold is not
    looked at, for that would read them whole. Where the directory cannot be written, a line says so and the arrays are
    in memory. The key must hold all that they depend on.
    """
    if directory is None:
        return joined(make(), types)
    folder = Path(directory).expanduser() / f"{key}.arrays"
    arrays = opened(folder, types)
    if arrays is None:
        with alone(folder.parent) as locked:
            arrays = opened(folder, types)
            if arrays is None:
                arrays = made(folder, make, types, locked)
    return arrays


def made(folder: Path, make: Callable[[], Pieces], types: Types, locked: bool) -> dict[str, np.ndarray]:
    if folder.exists():
        warn("the token cache %s is not as it was written: the tokens are made again", folder)
    for left in folder.parent.glob(f"{folder.name}.*.part") if locked else ():   # by processes that were killed
        shutil.rmtree(left, ignore_errors=True)
    try:
        write(folder, make(), types)
        return opened(folder, types)
    except OSError as error:
        warn("the token cache %s cannot be written (%s): tokens are made in every run, in memory. Give another "
             "directory (task.cache_dir=DIR)", folder.parent, error.strerror or error)
        return joined(make(), types)


def write(folder: Path, pieces: Pieces, types: Types) -> None:
    """All or nothing."""
    part = folder.with_name(f"{folder.name}.{socket.gethostname()}-{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        sizes = Counter(dict.fromkeys(types, 0))
        with ExitStack() as stack:
            files = {name: stack.enter_context(open(part / f"{name}.bin", "wb")) for name in types}
            for piece in pieces:
                for name, array in piece.items():
                    files[name].write(np.asarray(array, types[name]).tobytes())
                    sizes[name] += len(array)
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        (part / SIZES).write_text(json.dumps(sizes))
        shutil.rmtree(folder, ignore_errors=True)
        part.replace(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)   # gone where all went well


def opened(folder: Path, types: Types) -> dict[str, np.ndarray] | None:
    """None where a file is missing or has another length."""
    try:
        sizes = json.loads((folder / SIZES).read_text())
        return {name: of_file(folder / f"{name}.bin", int(sizes[name]), np.dtype(kind)) for name, kind in types.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def of_file(path: Path, size: int, kind: np.dtype) -> np.ndarray:
    """Raises ValueError for another length."""
    if path.stat().st_size != size * kind.itemsize:
        raise ValueError(f"{path}: {path.stat().st_size} bytes, expected {size * kind.itemsize}")
    return np.memmap(path, kind, "r", shape=(size,)) if size else np.zeros(0, kind)   # an empty file cannot be mapped


def joined(pieces: Pieces, types: Types) -> dict[str, np.ndarray]:
    parts: dict[str, list[np.ndarray]] = {name: [np.zeros(0, kind)] for name, kind in types.items()}
    for piece in pieces:
        for name, array in piece.items():
            parts[name].append(np.asarray(array, types[name]))
    return {name: np.concatenate(each) for name, each in parts.items()}
