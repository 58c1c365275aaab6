"""Micro-batches of images, decoded and augmented in worker processes.

They are the same for any number of workers and after any resume, for nothing is drawn from a generator that outlives a
row: before a row is augmented, the generators of Python, NumPy and torch are seeded from the row's own, and put back
afterwards. The order of rows is made in the process that trains.
"""

import os
import random
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from crt_exp.config import ConfigError
from crt_exp.data import DataError
from crt_exp.data.images import Images, Unreadable
from crt_exp.data.plan import Plan

Draw = np.random.Generator
MOST_WORKERS = 8                                             # of a process, where nothing else is said


class Example(NamedTuple):
    """A row that a worker is asked for: its number (which decides what is drawn), what `read` takes, and its label."""

    row: int
    source: Any
    label: int


@dataclass(eq=False)
class Micro(Dataset):
    """Makes micro-batches of lists of Examples, wherever it is called.

    read: a source to a PIL.Image, raises Unreadable. transform: that to a tensor (3, H, W), drawing from global
    generators. finish: images (B, 3, H, W), labels (B,) and the rows' generators to the batch. rng: a row's generator.
    """

    read: Callable[[Any], Any]
    transform: Callable[[Any], Tensor]
    finish: Callable[[Tensor, Tensor, list[Draw]], dict[str, Tensor]]
    rng: Callable[[int], Draw]

    def __getitem__(self, examples: Sequence[Example]) -> tuple[dict[str, Tensor] | None, list[str]]:
        """The batch of those that can be read (None: of none), and what is wrong with the others."""
        images, labels, draws, problems = [], [], [], []
        for example in examples:
            try:
                image = self.read(example.source)
            except Unreadable as error:                      # an error that leaves a worker loses its class and words
                problems.append(str(error))
                continue
            draw = self.rng(example.row)
            with drawing(draw):
                images.append(self.transform(image))
            labels.append(example.label)
            draws.append(draw)
        if not images:
            return None, problems
        return self.finish(torch.stack(images), torch.tensor(labels), draws), problems


@contextmanager
def drawing(draw: Draw) -> Iterator[None]:
    """Global generators seeded from `draw`, put back at the end. Raises ConfigError in a thread next to training."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("task.workers=0 augments images in the process that trains, and then nothing may be read "
                          "ahead: set trainer.prefetch=0, or task.workers=1")
    kept = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    seeds = draw.integers(2**32, size=3).tolist()
    random.seed(seeds[0])
    np.random.seed(seeds[1])
    torch.default_generator.manual_seed(seeds[2])            # torch.manual_seed would seed GPUs too
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.default_generator.set_state(kept[2])


class Folders:
    """Images that are listed: splits by name, all with the same classes."""

    def __init__(self, splits: dict[str, Images]):
        self.splits, self.classes = splits, splits["train"].classes

    def length(self, split: str) -> int:
        return len(self.splits[split])

    def asked(self, split: str, plan: Plan, repeats: int = 1) -> Iterator[list[Example]]:
        """The micro-batches that `plan` names, yet to be read."""
        images = self.splits[split]
        for rows in plan.rows(len(images), split, repeats):
            places = rows % len(images)
            yield [Example(int(row), images.sources[i], int(images.labels[i])) for row, i in zip(rows, places)]

    def read(self, source: Any) -> Any:
        return self.splits["train"].read(source)


class Loader:
    """Micro-batches of lists of Examples by `workers` processes (0: this one); names and counts what cannot be read.

    skip: images that cannot be read are left out, each named once; without it the first one ends the run (DataError).
    """

    def __init__(self, workers: int, skip: bool):
        self.workers, self.skip = workers, skip
        self.unreadable: set[str] = set()
        self.left_out = 0                                    # images, each time that one was

    def __call__(self, asked: Iterable[list[Example]], micro: Micro) -> Iterator[dict[str, Tensor]]:
        own = torch.Generator()                              # else each epoch would draw from the global one
        loader = DataLoader(micro, sampler=asked, batch_size=None, num_workers=self.workers, collate_fn=as_it_is,
                            worker_init_fn=leave_signals, generator=own)
        for batch, problems in loader:
            self.note(problems)
            if batch is None:
                raise DataError(f"None of the {len(problems)} images of a micro-batch can be read. {problems[0]}")
            yield batch

    def note(self, problems: list[str]) -> None:
        for problem in problems:
            if not self.skip:
                raise DataError(f"{problem}\nReplace or remove it, or leave such images out: task.unreadable=skip.")
            self.left_out += 1
            if problem not in self.unreadable:
                self.unreadable.add(problem)
                warnings.warn(f"{problem} It is left out ({len(self.unreadable)} so far).", stacklevel=3)


def as_it_is(item: Any) -> Any:
    return item


def leave_signals(worker: int) -> None:
    """The process that trains decides what ^C and a closed terminal mean."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)


def fitting_workers() -> int:
    """As many as this process has cores, shared by the processes of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_WORKERS, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
