"""Micro-batches made in worker processes, and images to make them of.

Batches do not depend on the number of workers or on a resume: the training process determines the order. The global
generators of Python, NumPy and torch are seeded for each row before its augmentation, and restored afterwards.
"""

import os
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from joblib import cpu_count
from pydantic import Field
from torch import Tensor
from torch.utils.data import DataLoader

from crt_exp.experiments.data import DataError, images
from crt_exp.experiments.data.plan import Plan
from crt_exp.registry import ConfigError

Generator = np.random.Generator
Workers = Annotated[int, Field(ge=0, le=128)] | None


def listed_rows(n: int, split: str, plan: Plan, repeats: int = 1) -> Iterator[np.ndarray]:
    """Yield the row numbers of the micro-batches of `plan` over n listed images.

    Evaluation reads them in a fixed random order: they are listed by class, and any first batches are a sample.
    """
    order = evaluation_order(n)
    for rows in plan.rows(n, split, repeats):
        yield rows if split == "train" else order[rows]


def evaluation_order(n: int) -> np.ndarray:
    """The fixed random order in which an evaluation reads n listed images."""
    return np.random.default_rng(0).permutation(n)


# ---- batches ---------------------------------------------------------------------------------------------------------


def result_or_error(make: Callable[[Any], Any], key: Any) -> Any:
    """The result of `make`, or its DataError, whose message a worker would change."""
    try:
        return make(key)
    except DataError as error:
        return error


def by_workers(
    make: Callable[[Any], Any], asked: Iterable[Any], workers: int | None
) -> Iterator[Any]:
    """Apply `make` to each item in order, in worker processes. Raises its DataError.

    workers: number of processes; 0: in this process; None: one per core, at most 8.
    """
    if workers is None:  # the processes of a run share the machine's cores
        workers = max(1, min(8, cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    own = torch.Generator()  # else each epoch would draw from the global one
    loader = DataLoader(
        list(asked),
        batch_size=None,
        collate_fn=partial(result_or_error, make),
        num_workers=workers,
        worker_init_fn=leave_signals,
        generator=own,
    )
    for item in loader:
        if isinstance(item, DataError):
            raise item
        yield item


def image_batch(
    part: images.Images,
    rng: Callable[[int], Generator],
    transform: Callable[[Any], Tensor],
    finish: Callable[[Tensor, Tensor, list[Generator]], dict[str, Tensor]],
    rows: np.ndarray,
) -> dict[str, Tensor]:
    """Batch of some rows of images, in any process. Raises DataError.

    Args:
        rng: row number to the generator of its augmentation.
        transform: PIL.Image to tensor (3, H, W); draws from global generators.
        finish: images (B, 3, H, W), labels (B,) and row generators to a batch.
        rows: row numbers; rows i, i + n, ... are image i.
    """
    places = rows % len(part)
    pixels = []
    draws = []
    for row, place in zip(rows.tolist(), places.tolist()):
        image = part.read(part.sources[place])
        draw = rng(row)
        with seeded_globals(draw):
            pixels.append(transform(image))
        draws.append(draw)
    return finish(torch.stack(pixels), torch.from_numpy(part.labels[places]), draws)


@contextmanager
def seeded_globals(draw: Generator) -> Iterator[None]:
    """Seed the global generators from `draw`, and restore them at the end.

    Raises ConfigError outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "task.workers=0: not supported with trainer.prefetch; set trainer.prefetch=0"
        )
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    seeds = draw.integers(2**32, size=3).tolist()
    random.seed(seeds[0])
    np.random.seed(seeds[1])
    torch.default_generator.manual_seed(seeds[2])  # torch.manual_seed would also seed GPUs
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def leave_signals(worker: int) -> None:
    """Ignore SIGINT and SIGHUP in workers; the training process handles both."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
