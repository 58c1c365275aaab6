"""Assignment of data rows to processes and micro-batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

IGNORED = -100  # label of tokens that the loss ignores
SPLITS = ("train", "validation", "test")


@dataclass(eq=False)
class Limit:
    """Maximum number of micro-batches that each process reads in an evaluation.

    Attributes:
        partial: Whether rows were left out.
    """

    batches: int
    partial: bool = False


@dataclass(frozen=True)
class Plan:
    """Rows that one process reads, in order.

    The rows are a pure function of the fields, so that a run can stop and resume at any step.

    Args:
        batch: rows of an optimiser step over all processes and micro-batches. In evaluation: rows that a process reads
            at once.
        micro: micro-batches of a process in a step.
        start: completed steps of this epoch.
        world: number of processes.
        limit: in evaluation, None for all rows. Else the rows are a fixed random sample, the same for each seed.
    """

    batch: int
    micro: int = 1
    seed: int = 0
    epoch: int = 0
    start: int = 0
    rank: int = 0
    world: int = 1
    limit: Limit | None = None

    def rows(self, n: int, split: str, repeats: int = 1) -> Iterator[np.ndarray]:
        """Yield the row numbers of each micro-batch of this process.

        The "train" split is a new permutation each epoch, the same on every process; its last n mod batch rows are left
        out. Other splits yield every row once, in order, or those of a sample within the limit. Joined in rank order,
        the rows are those of the evaluation.

        Args:
            n: rows of the split.
            repeats: copies of each training row, numbered row, row + n, row + 2n, ..., so that `rng` differs between
                copies. The epoch keeps its length and covers n / repeats of the rows.
        """
        if split == "train":
            yield from self.mine(self.epoch_rows(n, repeats))
            return
        mine = self._share(self.evaluated(n), self.rank)
        for i in range(0, len(mine), self.batch):
            yield mine[i : i + self.batch]

    def epoch_rows(self, n: int, repeats: int = 1) -> np.ndarray:
        """Rows of the training steps of an epoch over all processes, (steps, batch)."""
        order = np.random.default_rng([self.seed, self.epoch]).permutation(n)
        copies = (order[:, None] + n * np.arange(repeats)).reshape(-1)
        return copies[: n // self.batch * self.batch].reshape(-1, self.batch)

    def mine(self, steps: np.ndarray) -> np.ndarray:
        """Rows of this process's training micro-batches, from rows (steps, batch)."""
        share = self.batch // self.world
        mine = steps[self.start :, self.rank * share : (self.rank + 1) * share]
        return mine.reshape(-1, share // self.micro)

    def evaluated(self, n: int) -> np.ndarray:
        """Rows of an evaluation of n rows over all processes, sorted."""
        if self.limit is None:
            return np.arange(n)
        rows = row_sample(n, self.limit.batches * self.batch * self.world)
        self.limit.partial |= len(rows) < n
        return rows

    def _share(self, rows: np.ndarray, rank: int) -> np.ndarray:
        """Consecutive rows of one process."""
        return rows[len(rows) * rank // self.world : len(rows) * (rank + 1) // self.world]

    def by_cost(self, costs: Sequence[float], budget: float, split: str) -> Iterator[np.ndarray]:
        """Yield row numbers in micro-batches that keep a cost budget.

        Costs are positive, such as seconds of audio, pixels or tokens. A micro-batch is padded to its most expensive
        row. So rows x largest cost <= budget.

        "train": rows of similar cost are grouped. Each epoch reads every row once and shuffles the steps. Only rows
        of equal cost are permuted; round costs up if batches should differ between epochs. Other splits are read as
        by `rows`.

        Micro-batches differ in size. The task's `weight` must return the normaliser of its loss. Its `epoch_steps` must
        return `plan.steps(costs, budget)`.

        Raises:
            ValueError: a cost exceeds the budget, or the rows are fewer than the micro-batches of a step.
        """
        costs = np.asarray(costs, np.float64)
        if costs.max(initial=0) > budget:
            raise ValueError(
                f"a row costs {costs.max():g}; expected at most the budget of {budget:g}"
            )
        if split != "train":
            mine = self._share(self._evaluated_at_cost(costs, budget), self.rank)
            yield from cut(mine, packed(costs[mine], budget))
            return
        rng = np.random.default_rng([self.seed, self.epoch, 2])
        order = np.lexsort((rng.permutation(len(costs)), costs))
        batches = cut(order, self._sizes(costs[order], budget))
        group = self.micro * self.world
        for step in rng.permutation(len(batches) // group)[self.start :]:
            yield from batches[step * group + self.rank * self.micro :][: self.micro]

    def steps(self, costs: Sequence[float], budget: float) -> int:
        """Optimiser steps of an epoch that is read with `by_cost`.

        The number is the same in every epoch and on every process.
        """
        group = self.micro * self.world
        return len(self._sizes(np.sort(costs), budget)) // group

    def _sizes(self, ascending: np.ndarray, budget: float) -> list[int]:
        """Rows of each micro-batch; the largest are halved until all steps are full."""
        group = self.micro * self.world
        if len(ascending) < group:
            raise ValueError(
                f"{len(ascending)} rows for {group} micro-batches per step; set trainer.accumulate lower"
            )
        sizes = packed(ascending, budget)
        while len(sizes) % group:
            largest = max(range(len(sizes)), key=sizes.__getitem__)
            size = sizes[largest]
            sizes[largest : largest + 1] = [size - size // 2, size // 2]
        return sizes

    def _evaluated_at_cost(self, costs: np.ndarray, budget: float) -> np.ndarray:
        """Rows of an evaluation, sorted: the largest sample within the limit."""
        every = np.arange(len(costs))
        if self.limit is None or self._is_within_limit(costs, budget, every):
            return every
        self.limit.partial = True
        count = self.limit.batches * self.world
        excess = len(costs)
        while excess - count > 1:
            middle = (count + excess) // 2
            if self._is_within_limit(costs, budget, row_sample(len(costs), middle)):
                count = middle
            else:
                excess = middle
        return row_sample(len(costs), count)

    def _is_within_limit(self, costs: np.ndarray, budget: float, rows: np.ndarray) -> bool:
        """Whether each process can read its share of the rows."""
        shares = [self._share(rows, rank) for rank in range(self.world)]
        return all(len(packed(costs[share], budget)) <= self.limit.batches for share in shares)

    def rng(self, row: int) -> np.random.Generator:
        """Generator of a row for values that are drawn each epoch, such as masks.

        The generator depends neither on the process nor on the batch, and is the same after a resume.
        """
        return np.random.default_rng([self.seed, self.epoch, int(row), 1])


def packed(costs: np.ndarray, budget: float) -> list[int]:
    """Numbers of consecutive rows per batch, where rows x largest cost <= budget."""
    sizes = []
    dearest = 0.0
    for cost in costs.tolist():
        dearest = max(dearest, cost)
        if sizes and (sizes[-1] + 1) * dearest <= budget:
            sizes[-1] += 1
        else:
            sizes.append(1)
            dearest = cost
    return sizes


def cut(rows: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Consecutive parts of the rows, of the given sizes."""
    return np.split(rows, np.cumsum(sizes, dtype=np.int64))[:-1]


# ---- rows of unequal length ------------------------------------------------------------------------------------------


def by_length(
    lengths: np.ndarray, split: str, plan: Plan, group_lengths: bool
) -> Iterator[np.ndarray]:
    """Yield the rows of each batch, with rows of similar length together.

    Evaluation always sorts by length, to reduce padding. Training groups by length only with `group_lengths`.
    """
    if split == "train":
        return bucketed(lengths, plan) if group_lengths else plan.rows(len(lengths), split)
    order = np.argsort(lengths, kind="stable")
    return (order[places] for places in plan.rows(len(lengths), split))


def bucketed(lengths: np.ndarray, plan: Plan, pool: int = 50) -> Iterator[np.ndarray]:
    """Yield the rows of each training micro-batch, grouped by length.

    The function sorts `pool` batches at a time, which reduces padding and still varies the batches. It reads the same
    rows as `plan.rows(n, "train")`. The order is a pure function of the plan, and a process has its share of every
    batch.
    """
    rows = plan.epoch_rows(len(lengths)).reshape(-1)
    pools = np.arange(len(rows)) // (pool * plan.batch)
    by_pool_and_length = np.lexsort((lengths[rows], pools))
    steps = rows[by_pool_and_length].reshape(-1, plan.batch)
    order = np.random.default_rng([plan.seed, plan.epoch, 0]).permutation(len(steps))
    yield from plan.mine(steps[order])


def pad_rows(rows: Sequence[np.ndarray], pad: int) -> Tensor:
    """Stack rows into (B, L) int64, L the longest; `pad` fills the shorter rows."""
    tensors = [torch.from_numpy(np.asarray(row, np.int64)) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=pad)


def length_mask(lengths: Tensor, longest: int) -> Tensor:
    """Lengths (B,) -> mask (B, longest), True within the length."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


def token_batch(
    rows: Sequence[np.ndarray], pad: int, labels: Sequence[np.ndarray] | None = None
) -> dict[str, Tensor]:
    """tokens (B, L) of `pad_rows`, and key_mask (B, L), True = token, if there is padding.

    labels: those of each token; padding is -100.
    """
    batch = {"tokens": pad_rows(rows, pad)}
    mask = length_mask(torch.tensor([len(row) for row in rows]), batch["tokens"].shape[1])
    if not mask.all():
        batch["key_mask"] = mask
    if labels is not None:
        batch["labels"] = pad_rows(labels, IGNORED)
    return batch


def counts_of(
    read: Callable[[int], np.ndarray], rows: int, counted: int, symbols: int
) -> np.ndarray:
    """Counts of the first `symbols` symbols in at most `counted` rows, which are spread evenly.

    read: row number to symbols (L,).
    """
    chosen = np.linspace(0, rows - 1, min(counted, rows)).astype(np.int64)
    return sum(np.bincount(read(i), minlength=symbols)[:symbols] for i in chosen)


def row_sample(rows: int, count: int | None) -> np.ndarray:
    """Fixed random sample of `count` row numbers, sorted; None: all rows."""
    if count is None or count >= rows:
        return np.arange(rows)
    return np.sort(np.random.default_rng(0).permutation(rows)[:count])
