"""MNIST from its idx files (gzip)."""

import gzip
import struct
from pathlib import Path

import numpy as np

from crt_exp.data import DataError
from crt_exp.data.sources import missing, task_folder

FILES = {"train": "train-images-idx3-ubyte.gz", "test": "t10k-images-idx3-ubyte.gz"}


def images(split: str = "train", data_dir: str | Path | None = None) -> np.ndarray:
    """Grey values 0-255, (n, 28, 28) uint8, from `data_dir` (default $CRT_DATA/mnist). Raises DataError."""
    folder = task_folder("mnist", data_dir)
    if folder is None:
        raise missing("mnist", None)
    path = folder / FILES[split]
    if not path.is_file():
        raise missing("mnist", path)
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be unpacked ({error}); "
                        "get it again: `python -m crt_exp.data fetch mnist`.") from None
    magic, count, height, width = struct.unpack(">4i", raw[:16])
    if magic != 2051 or len(raw) != 16 + count * height * width:
        raise DataError(f"{path}: not an idx file of images, or truncated ({len(raw)} bytes, header says {count} "
                        f"images of {height} x {width}); get it again with `python -m crt_exp.data fetch mnist`.")
    return np.frombuffer(raw, np.uint8, offset=16).reshape(count, height, width)
