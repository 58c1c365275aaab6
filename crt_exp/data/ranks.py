"""Which of a run's processes this is, from what torchrun sets, and what it holds; torch is not imported here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def rank() -> int:
    """This process's number under torchrun; 0 without."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def inside_torchrun() -> bool:
    return "LOCAL_RANK" in os.environ


def whole(tensor: Tensor) -> Tensor:
    """A tensor that is sharded over processes, put together (all processes must take part); others as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
