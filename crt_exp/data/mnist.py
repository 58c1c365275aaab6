"""MNIST from its idx files (gzip)."""

import gzip
import math
import struct
from pathlib import Path

import numpy as np

from crt_exp.data import DataError
from crt_exp.data.sources import missing, task_folder

FILES = {"train": "train-images-idx3-ubyte.gz", "test": "t10k-images-idx3-ubyte.gz"}
AGAIN = "get it again with `python -m crt_exp.data fetch mnist`."


def images(split: str = "train", data_dir: str | Path | None = None) -> np.ndarray:
    """Grey values 0-255, (n, 28, 28) uint8, from `data_dir` (default $CRT_DATA/mnist). Raises DataError."""
    return idx(FILES[split], 2051, "images", data_dir)


def labels(split: str = "train", data_dir: str | Path | None = None) -> np.ndarray:
    """Digits of `images`, (n,) uint8. Raises DataError."""
    return idx(FILES[split].replace("images-idx3", "labels-idx1"), 2049, "labels", data_dir)


def idx(name: str, magic: int, what: str, data_dir: str | Path | None) -> np.ndarray:
    """The array of an idx file of bytes: its magic number says how many dimensions there are."""
    folder = task_folder("mnist", data_dir)
    if folder is None:
        raise missing("mnist", None)
    path = folder / name
    if not path.is_file():
        raise missing("mnist", path)
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be unpacked ({error}); {AGAIN}") from None
    header = 4 * (1 + magic % 256)
    theirs, *shape = struct.unpack(f">{header // 4}i", raw[:header]) if len(raw) >= header else (0,)
    if theirs != magic or len(raw) != header + math.prod(shape):
        stated = f"header says {' x '.join(map(str, shape))}" if shape else "no whole header"
        raise DataError(f"{path}: not an idx file of {what}, or truncated ({len(raw)} bytes, {stated}); {AGAIN}")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)
