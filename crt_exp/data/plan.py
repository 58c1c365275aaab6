"""Who reads which rows, in which order."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Plan:
    """Which rows one process reads, in which order: a pure function of these numbers, so that a run can stop and go on anywhere.

    batch: rows of an optimiser step over all processes and micro-batches (evaluation: rows a process reads at once);
    micro: micro-batches a process makes of its share of a step; start: steps of this epoch that are already done.
    """

    batch: int
    micro: int = 1
    seed: int = 0
    epoch: int = 0
    start: int = 0
    rank: int = 0
    world: int = 1

    def rows(self, n: int, split: str) -> Iterator[np.ndarray]:
        """Row numbers of each micro-batch of this process: shuffled for "train", every row once and in order for other splits."""
        return self.shuffled(n) if split == "train" else self.ordered(n)

    def shuffled(self, n: int) -> Iterator[np.ndarray]:
        """A new permutation each epoch, the same on every process; the last n mod batch rows of it are left out."""
        order = np.random.default_rng([self.seed, self.epoch]).permutation(n)
        share = self.batch // self.world
        for step in range(self.start, n // self.batch):
            mine = order[step * self.batch + self.rank * share:][:share]
            yield from mine.reshape(self.micro, -1)

    def ordered(self, n: int) -> Iterator[np.ndarray]:
        """Consecutive blocks: joined in the order of ranks, they are 0 .. n - 1."""
        first, last = n * self.rank // self.world, n * (self.rank + 1) // self.world
        for i in range(first, last, self.batch):
            yield np.arange(i, min(i + self.batch, last))

    def rng(self, row: int) -> np.random.Generator:
        """For what is drawn anew each epoch (masks, crops): the same for a row on any process, in any batch, after any resume."""
        return np.random.default_rng([self.seed, self.epoch, int(row), 1])
