"""Readers of data sets, data that comes along, and the command `python -m crt_exp.data` that lists, fetches, verifies.

This file holds what all readers share: their error, warnings that appear once, and the number of the process. It
imports no heavy library, so that an error about data costs no waiting.
"""

import functools
import logging
import os
from collections.abc import Hashable, Iterable
from typing import Any


class DataError(Exception):
    """A data set that cannot be used. The message is for the user: what is wrong, where (file and line), and what to
    do (which file to get from where, where to put it, which option to set)."""


@functools.cache
def warn(message: str, *about: Any) -> None:
    """Once in a process for the same thing, and by the first process of a run alone."""
    if rank() == 0:
        logging.getLogger(__name__).warning(message, *about)


def check_classes(labels: Iterable[Hashable], where: str) -> None:
    """labels: of the training rows, or the names of the classes. Raises DataError where there is only one: whatever is
    learnt of it has accuracy 1."""
    different = set(labels)
    if len(different) < 2:
        raise DataError(f"{where}: every example is of one class ({', '.join(map(str, different)) or 'none'}): "
                        "classification takes examples of at least 2")


# ---- which of the processes of a run this is, from what torchrun sets ------------------------------------------------


def rank() -> int:
    """This process's number under torchrun; 0 without."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def inside_torchrun() -> bool:
    return "LOCAL_RANK" in os.environ


def whole(tensor: Any) -> Any:
    """A tensor that is sharded over processes, put together (all processes must take part); others as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
