"""Who reads which rows, in which order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


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

        Costs are positive. Raises ValueError for one above the budget, and for fewer rows than a step has
        micro-batches.
        """
        costs = np.asarray(costs, np.float64)
        if costs.max(initial=0) > budget:
            raise ValueError(f"a row costs {costs.max():g}: expected at most the budget of {budget:g}")
        return self._packed(costs, budget) if split == "train" else self._cut(costs, budget)

    def steps(self, costs: Sequence[float], budget: float) -> int:
        """Optimiser steps of an epoch that is read by cost: the same in every epoch, and on all processes together."""
        group = self.micro * self.world
        return len(self._sizes(np.sort(costs), budget)) // group

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
            raise ValueError(f"{len(ascending)} rows do not fill the {group} micro-batches of a step; set a smaller "
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


# ---- rows of unequal length ------------------------------------------------------------------------------------------


def by_length(lengths: np.ndarray, split: str, plan: Plan, like_together: bool) -> Iterator[np.ndarray]:
    """Rows of each batch. Evaluation goes by length, for metrics do not depend on the order and batches then hold
    little padding; training does where rows of like length are to be together."""
    if split == "train":
        return bucketed(lengths, plan) if like_together else plan.rows(len(lengths), split)
    order = np.argsort(lengths, kind="stable")
    return (order[places] for places in plan.rows(len(lengths), split))


def bucketed(lengths: np.ndarray, plan: Plan, pool: int = 50) -> Iterator[np.ndarray]:
    """Rows of each training micro-batch, as `plan.rows(n, "train")`, but with examples of like length together.

    Of `pool` batches at a time, so that batches still vary; it saves padding. The same rows as without, in other
    batches; as there, a pure function of the plan, and a process has its share of every batch.
    """
    n, share = len(lengths), plan.batch // plan.world
    steps = n // plan.batch
    every = replace(plan, micro=1, start=0, rank=0, world=1)
    places = np.array([*every.rows(n, "train")]).reshape(steps, plan.batch)
    for start in range(0, steps, pool):
        group = places[start:start + pool]
        group[:] = group.reshape(-1)[np.argsort(lengths[group.reshape(-1)], kind="stable")].reshape(group.shape)
    places = places[np.random.default_rng([plan.seed, plan.epoch, 0]).permutation(steps)]
    mine = places[plan.start:, plan.rank * share:(plan.rank + 1) * share]
    yield from mine.reshape(-1, share // plan.micro)


def padded(rows: Sequence[np.ndarray], pad: int) -> Tensor:
    """(B, L) int64, L the longest: `pad` behind the shorter ones."""
    result = torch.full((len(rows), max(map(len, rows))), pad)
    for i, row in enumerate(rows):
        result[i, :len(row)] = torch.from_numpy(np.asarray(row, np.int64))
    return result


def masked(tokens: Tensor, lengths: Sequence[int]) -> dict[str, Tensor]:
    """tokens (B, L), and key_mask (B, L), True = keep, where there is padding."""
    if min(lengths) == tokens.shape[1]:
        return {"tokens": tokens}
    return {"tokens": tokens, "key_mask": torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]}


def few(rows: int, count: int | None) -> np.ndarray:
    """`count` row numbers in their order, drawn once and for all; all where there are no more, or count is None."""
    if count is None or count >= rows:
        return np.arange(rows)
    return np.sort(np.random.default_rng(0).permutation(rows)[:count])
