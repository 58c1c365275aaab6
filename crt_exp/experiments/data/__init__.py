"""Readers of data sets; `python -m crt_exp data` lists, fetches, verifies files.

This module holds the error, the warnings, the reader of lines and the process number that all readers share. It imports
no heavy library, so that an error about data appears at once.
"""

import functools
import logging
import os
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

Folder = str | Path | None  # None: the default, or none


class DataError(Exception):
    """A data set cannot be used.

    The message states the problem, its position (file and line) and the fix: the file to get, where to put it, or
    the option to set.
    """


@functools.cache
def warn(message: str, *about: Any) -> None:
    """Log a warning once in a process, on the first process of a run only."""
    if rank() == 0:
        logging.getLogger(__name__).warning(message, *about)


def check_classes(labels: Iterable[Hashable], where: str) -> None:
    """Raise DataError if there are fewer than two classes.

    labels: those of the training rows, or the names of the classes. With one class, every model has accuracy 1.
    """
    different = set(labels)
    if len(different) < 2:
        raise DataError(
            f"{where}: one class only ({', '.join(map(str, different)) or 'none'}); expected at least 2"
        )


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line, without line end and byte order mark.

    Raises DataError.
    """
    try:
        with open(path, "rb") as stream:
            for number, raw in enumerate(stream, 1):
                raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                yield number, raw.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise DataError(f"{path}, line {number}: expected UTF-8 text") from None
    except OSError as error:
        raise DataError(f"{path}: not readable ({error.strerror or error})") from None


# ---- process number, from the environment variables of torchrun ------------------------------------------------------


def rank() -> int:
    """Rank of this process under torchrun, else 0."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def inside_torchrun() -> bool:
    return "LOCAL_RANK" in os.environ


def full_tensor(tensor: Any) -> Any:
    """Gather a sharded tensor on all processes (collective); return others unchanged."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
