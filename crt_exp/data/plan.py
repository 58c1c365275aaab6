"""Who reads which rows, in which order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Plan:
    """Which rows one process reads, in which order: a pure function of these numbers,
    so that a run can stop and go on anywhere.

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

    def rows(self, n: int, split: str, repeats: int = 1) -> Iterator[np.ndarray]:
        """Row numbers of each micro-batch of this process:
        shuffled for "train", every row once and in order for other splits.

        repeats: a training row comes so many times in turn, as row, row + n, row + 2n, ...: `rng` draws again for each.
        The epoch keeps its length, so it sees n / repeats of the rows.
        """
        return self.shuffled(n, repeats) if split == "train" else self.ordered(n)

    def shuffled(self, n: int, repeats: int = 1) -> Iterator[np.ndarray]:
        """A new permutation each epoch, the same on every process; the last n mod batch rows of it are left out."""
        order = np.random.default_rng([self.seed, self.epoch]).permutation(n)
        if repeats > 1:
            order = (order[:, None] + n * np.arange(repeats)).reshape(-1)
        share = self.batch // self.world
        for step in range(self.start, n // self.batch):
            mine = order[step * self.batch + self.rank * share:][:share]
            yield from mine.reshape(self.micro, -1)

    def ordered(self, n: int) -> Iterator[np.ndarray]:
        """Consecutive blocks: joined in the order of ranks, they are 0 .. n - 1."""
        first, last = n * self.rank // self.world, n * (self.rank + 1) // self.world
        for i in range(first, last, self.batch):
            yield np.arange(i, min(i + self.batch, last))

    def by_cost(self, costs: Sequence[float], budget: float, split: str) -> Iterator[np.ndarray]:
        """`rows` for rows of unequal cost (seconds of audio, pixels, tokens), in micro-batches that keep a budget.

        A micro-batch is padded to its dearest row, so rows x dearest cost <= budget, and so is the sum. "train": rows
        of like cost together, every row once an epoch, steps in a new order each epoch; rows change places with those
        of equal cost alone, so round costs up where batches should differ between epochs. Other splits: every row once
        and in order. Micro-batches differ in size, so the task's `weight` must say what the mean in its loss runs over;
        its `epoch_steps` is `plan.steps(costs, budget)`.

        Raises ValueError for costs that are not positive or above the budget, and for fewer rows than a step has
        micro-batches.
        """
        costs = checked_costs(costs, budget)
        return self._packed(costs, budget) if split == "train" else self._cut(costs, budget)

    def steps(self, costs: Sequence[float], budget: float) -> int:
        """Optimiser steps of an epoch that is read by cost: the same in every epoch, and on all processes together."""
        group = self.micro * self.world
        return len(self._sizes(np.sort(checked_costs(costs, budget)), budget)) // group

    def _packed(self, costs: np.ndarray, budget: float) -> Iterator[np.ndarray]:
        """Neighbours in the order of costs make micro-batches, neighbours of those a step; steps are shuffled."""
        rng = np.random.default_rng([self.seed, self.epoch, 2])
        order = np.lexsort((rng.permutation(len(costs)), costs))
        batches = np.split(order, np.cumsum(self._sizes(costs[order], budget))[:-1])
        group = self.micro * self.world
        for step in rng.permutation(len(batches) // group)[self.start:]:
            yield from batches[step * group + self.rank * self.micro:][:self.micro]

    def _sizes(self, ascending: np.ndarray, budget: float) -> list[int]:
        """Rows of each micro-batch of an epoch, whole steps of them: the largest are halved until they are."""
        group = self.micro * self.world
        if len(ascending) < group:
            raise ValueError(f"{len(ascending)} rows do not fill the {group} micro-batches of a step: choose a smaller "
                             "trainer.accumulate, or fewer processes")
        sizes = packed(ascending, budget)
        while len(sizes) % group:
            largest = max(range(len(sizes)), key=sizes.__getitem__)
            size = sizes[largest]
            sizes[largest:largest + 1] = [size - size // 2, size // 2]
        return sizes

    def _cut(self, costs: np.ndarray, budget: float) -> Iterator[np.ndarray]:
        """This process's share of the rows, in order."""
        first, last = (len(costs) * each // self.world for each in (self.rank, self.rank + 1))
        for size in packed(costs[first:last], budget):
            yield np.arange(first, first + size)
            first += size

    def rng(self, row: int) -> np.random.Generator:
        """For what is drawn again each epoch (masks, crops):
        the same for a row on any process, in any batch, after any resume."""
        return np.random.default_rng([self.seed, self.epoch, int(row), 1])


def packed(costs: np.ndarray, budget: float) -> list[int]:
    """How many rows, one after another, each batch takes at most while rows x dearest cost keeps the budget."""
    sizes, dearest = [], 0.0
    for cost in costs.tolist():
        dearest = max(dearest, cost)
        if sizes and (sizes[-1] + 1) * dearest <= budget:
            sizes[-1] += 1
        else:
            sizes.append(1)
            dearest = cost
    return sizes


def checked_costs(costs: Sequence[float], budget: float) -> np.ndarray:
    """As float64. Raises ValueError naming the first row whose cost is not positive, not finite or above the budget."""
    costs = np.asarray(costs, np.float64)
    wrong = np.flatnonzero(~((costs > 0) & (costs <= budget)))
    if len(wrong):
        raise ValueError(f"row {wrong[0]} costs {costs[wrong[0]]:g}: every row must cost more than 0 and at most the "
                         f"budget of {budget:g}; raise the budget, or leave such rows out")
    return costs
