"""What is made of texts and tables once and kept: arrays in safetensors, made again where their checksum differs."""

import fcntl
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from crt_exp.data.ranks import rank
from crt_exp.atomic_write import whole


def cached(directory: str | Path | None, key: str, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """`make()`, kept as KEY.safetensors in `directory` (None: not kept) with a checksum. A file that is not as it was
    written is made again, and one line says so; so it is where the directory cannot be written, and then nothing is
    kept.

    The key must hold all that the result depends on.
    """
    if directory is None:
        return make()
    path = Path(directory).expanduser() / f"{key}.safetensors"
    arrays = stored(path)
    if arrays is None:
        with alone(path.parent):
            arrays = stored(path)
            if arrays is None:
                if path.exists():
                    warn("the token cache %s is not as it was written: the tokens are made again", path)
                arrays = make()
                store(path, arrays)
    return arrays


@contextmanager
def alone(directory: Path) -> Iterator[bool]:
    """Waits for other processes that make something for this directory: the ranks of a run then tokenize once. Whether
    there are locks; where there are none they all do the work."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY)
    except OSError:
        yield False                                          # who writes tells what is wrong
        return
    locked = False
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
            locked = True
        yield locked
    finally:
        os.close(handle)


def stored(path: Path) -> dict[str, np.ndarray] | None:
    """The arrays of a file, None where it cannot be read or a byte of it differs."""
    try:
        content = path.read_bytes()
        arrays = load(content)
        header = json.loads(content[8:8 + int.from_bytes(content[:8], "little")])
    except (OSError, SafetensorError, ValueError):
        return None
    return arrays if header.get("__metadata__", {}).get("sha256") == checksum(arrays) else None


def store(path: Path, arrays: dict[str, np.ndarray]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as part:
            part.write_bytes(save(arrays, {"sha256": checksum(arrays)}))
    except OSError as error:
        warn("the token cache %s cannot be written (%s): tokens are made in every run. Give another directory "
             "(task.cache_dir=DIR), or none (null)", path.parent, error.strerror or error)


def checksum(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


@functools.cache
def warn(message: str, *about: Any) -> None:
    """Once in a process for the same thing, and by the first process of a run alone."""
    if rank() == 0:
        logging.getLogger(__name__).warning(message, *about)


def key_of(*parts: Any) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]
