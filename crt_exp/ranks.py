"""Which of a run's processes this is, from what torchrun sets: known before torch is imported."""

import os


def rank() -> int:
    """This process's number under torchrun; 0 without."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def inside_torchrun() -> bool:
    return "LOCAL_RANK" in os.environ
