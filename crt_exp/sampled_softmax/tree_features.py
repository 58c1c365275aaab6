"""Samplers from a random-feature estimate of the softmax, by a tree or densely.

Notation: query features a = phi_q(h) (M,) and class features f_c = phi_k(e_c) e^{b_c} (M,), with the constants of
`ClassFeatures`; estimate s_c = a.f_c. Level 0 of a tree is the table (V, M) of f. Each row of level l + 1 is the sum
of FAN rows of level l.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.features.base import FeatureMap
from crt_exp.mechanism import Mechanism
from crt_exp.sampled_softmax.base import Drawn, choose_columns, draw_dense
from crt_exp.sampled_softmax.feature_distribution import FeatureDistribution, uniform_others

GATHER_BLOCK = 2**22  # features per block of gathered classes
SHARED = 100  # levels of at most SHARED k nodes use one product with all queries, faster than k gathers each
FAN = 16  # children per node
EXHAUSTED = 1e-9  # a sum minus one row counts as 0 below this share of the sum, because of rounding
FLAT = 2**12  # largest number of nodes of the level where the descent starts


class TreeFeatures(FeatureDistribution):
    """q' proportional to s_c, by a tree of sums: O(M + log V) per sample if positive.

    Positive maps use composition: feature i with probability proportional to a_i T_i, where T is the sum of f over all
    classes but the target. Then the tree gives a class in proportion to its feature i. This distribution is that of
    the dense estimate.

    Signed maps descend the tree of sums of f. A child has probability proportional to the positive part of a.(its
    sum); without positive parts, proportional to its number of classes. A sample takes O(M log V). Its probability is
    computed exactly from the path. The distribution is proportional to s_c if all sums are positive; else it is an
    approximation, and the uniform share keeps all probabilities positive.

    The table takes M V float32 numbers. The sums add 1/15 of its memory, or 2/15 for positive maps, whose sums are
    float64. An update of r classes takes O(r M log V).

    >>> head = nn.Linear(8, 100)
    >>> sampler = TreeFeatures("favorpp", 100, 8, m=16)
    >>> sampler.rebuild(head.weight, head.bias)
    >>> sampler.draw(torch.randn(3, 8), torch.tensor([0, 1, 2]), k=5).ids.shape
    torch.Size([3, 5])
    """

    def __init__(self, proposal: FeatureMap | Mechanism | str, classes: int, d: int, **options):
        super().__init__(proposal, classes, d, **options)
        # Probabilities of positive maps divide by the sums; those of signed maps follow the path, exact for any sums.
        dtype = torch.float64 if self.features.positive else torch.float32
        self.tree = SumTree(self.classes, self.features.width, dtype)

    def _table(self) -> Tensor:
        return self.tree.leaves

    def _finish_rebuild(self) -> None:
        self.tree.resum()

    def _update_rows(self, rows: Tensor, features: Tensor) -> None:
        self.tree.set(rows, features)

    def _draw(
        self,
        hidden: Tensor,
        targets: Tensor,
        uniform: Tensor,
    ) -> Drawn:
        if not self.features.positive:
            return self._walk(hidden, targets, uniform)
        _, log_a = self.features.of_queries(hidden)
        a = (log_a - log_a.amax(-1, keepdim=True)).exp_()
        total = self.tree.total
        left = total - F.embedding(targets, self.tree.leaves).double()
        left = torch.where(left > EXHAUSTED * total, left, 0.0)
        mass = a * left
        sums = mass.sum(-1, keepdim=True)
        ids = self.tree.draw(mass, uniform.shape[1], targets)
        # samples that hit the target by rounding, and queries whose other classes have a mass below the rounding error
        invalid = (sums == 0) | (ids == targets[:, None])
        if bool(invalid.any()):
            others = uniform_others(targets[:, None], ids.shape, self.classes)
            ids = torch.where(invalid, others, ids)
        log_q = self._products((a * (left > 0) / sums).float(), ids).log()
        return Drawn(ids, torch.where(sums == 0, -math.log(self.classes - 1), log_q))

    def _products(self, weight: Tensor, ids: Tensor) -> Tensor:
        """Return weight (B, M) times the features of ids (B, k), (B, k)."""
        step = max(1, GATHER_BLOCK // (ids.shape[1] * weight.shape[1]))
        parts = []
        for i, w in zip(ids.split(step), weight.split(step)):
            parts.append(F.embedding(i, self.tree.leaves) @ w[..., None])
        return torch.cat(parts).squeeze(-1)

    # ---- signed maps

    def _walk(self, hidden: Tensor, targets: Tensor, fixed: Tensor) -> Drawn:
        """Descend the tree.

        Entries of `fixed` (B, k) that are not -1 determine the class.
        """
        a = self.features.of_signed_queries(hidden)
        node = torch.zeros_like(fixed)
        log_q = torch.zeros(fixed.shape, device=fixed.device)
        fan = torch.arange(FAN, device=fixed.device)
        for number in reversed(range(self.tree.depth)):
            children = node[..., None] * FAN + fan
            weights = self._weights(a, number, children, targets)
            u = torch.rand(fixed.shape, dtype=torch.float64, device=fixed.device)
            step = choose(weights, u)
            step = torch.where(fixed >= 0, fixed // FAN**number % FAN, step)
            share = weights.gather(-1, step[..., None]).squeeze(-1) / weights.sum(-1)
            log_q += share.log()
            node = node * FAN + step
        return Drawn(node.clamp(max=self.classes - 1), log_q)

    def _weights(
        self,
        a: Tensor,
        number: int,
        children: Tensor,
        targets: Tensor,
    ) -> Tensor:
        """Return non-negative weights of children (B, k, FAN) of a level."""
        scores = self._scores(a, number, children)
        of_target = (a * self.tree.leaves[targets]).sum(-1)[:, None, None]
        mine = children == (targets // FAN**number)[:, None, None]
        scores = torch.where(mine, scores - of_target, scores)
        counts = self.tree.counts(number, children) - mine.long()
        scores = torch.where(counts > 0, scores.clamp(min=0), 0.0)
        return torch.where(scores.sum(-1, keepdim=True) > 0, scores, counts.to(scores.dtype))

    def _scores(self, a: Tensor, number: int, children: Tensor) -> Tensor:
        """Return a.(sum of f below each child), (B, k, FAN)."""
        level = self.tree.level(number)
        k = children.shape[1]
        width = level.shape[1]
        if number and len(level) <= SHARED * k:
            return (a @ level.mT).gather(1, children.flatten(1)).view_as(children)
        groups = level.view(-1, FAN * width)
        step = max(1, GATHER_BLOCK // (FAN * k * width))
        scores = []
        for node, w in zip((children[..., 0] // FAN).split(step), a.split(step)):
            sums = F.embedding(node, groups).view(len(w), k * FAN, width)
            scores.append(sums @ w[..., None])
        return torch.cat(scores).view_as(children)


class DenseFeatures(FeatureDistribution):
    """q' proportional to the positive part of the estimate, O(V M) per query.

    The distribution is uniform if no estimate is positive.

    >>> head = nn.Linear(8, 100)
    >>> sampler = DenseFeatures("favorpp", 100, 8, m=16)
    >>> sampler.rebuild(head.weight, head.bias)
    >>> sampler.weights(torch.randn(3, 8)).shape
    torch.Size([3, 100])
    """

    leaves: Tensor

    def __init__(self, proposal: FeatureMap | Mechanism | str, classes: int, d: int, **options):
        super().__init__(proposal, classes, d, **options)
        self.register_buffer("leaves", torch.zeros(self.classes, self.features.width))

    def _table(self) -> Tensor:
        return self.leaves

    def _draw(
        self,
        hidden: Tensor,
        targets: Tensor,
        uniform: Tensor,
    ) -> Drawn:
        k = uniform.shape[1]
        return draw_dense(self.weights, self.classes, hidden, targets, k, uniform)

    def weights(self, hidden: Tensor) -> Tensor:
        """Return q' (b, V) of queries (b, d), up to a factor per row."""
        estimates = self.features.of_signed_queries(hidden) @ self.leaves.mT
        if self.features.positive:
            return estimates
        estimates = estimates.clamp_(min=0)
        return estimates.masked_fill_(estimates.amax(-1, keepdim=True) == 0, 1.0)


class ExcludedRow(NamedTuple):
    """A row of the table that each query excludes, with its entries in the sampled columns."""

    row: Tensor  # (B, 1)
    entries: Tensor  # (B, k)


class SumTree(nn.Module):
    """A table of V rows with a tree of sums above it, stored as buffers.

    The sums take 1/15 of the rows of the table. An update of r rows takes O(r M log V): it adds differences, so
    rounding errors accumulate until `resum`.

    Args:
        dtype: dtype of the sums.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.rows = rows
        self.width = width
        self.depth = 1
        count = _padded(rows)
        self.register_buffer("level0", torch.zeros(count, width))
        while count > FAN:
            count = _padded(count // FAN)
            self.register_buffer(f"level{self.depth}", torch.zeros(count, width, dtype=dtype))
            self.depth += 1

    level0: Tensor

    def level(self, number: int) -> Tensor:
        """Return level `number`, padded with zero rows to a multiple of FAN."""
        return self.get_buffer(f"level{number}")

    @property
    def leaves(self) -> Tensor:
        """The table, (V, M)."""
        return self.level0[: self.rows]

    @property
    def total(self) -> Tensor:
        """The sum of all rows, (M,) float64."""
        return self.level(self.depth - 1).sum(0, dtype=torch.float64)

    def counts(self, number: int, nodes: Tensor) -> Tensor:
        """Return the number of table rows below each node of a level."""
        size = FAN**number
        return (self.rows - nodes * size).clamp(0, size)

    def set(self, rows: Tensor, values: Tensor) -> None:
        """Set sorted, distinct rows (r,) to values (r, M)."""
        change = values.double() - self.level0.index_select(0, rows).double()
        self.level0[rows] = values
        for number in range(1, self.depth):
            rows, members = torch.unique_consecutive(rows // FAN, return_counts=True)
            change = torch.segment_reduce(change, "sum", lengths=members, unsafe=True)
            level = self.level(number)
            sums = level.index_select(0, rows).double() + change
            level[rows] = sums.to(level.dtype)

    def resum(self) -> None:
        """Recompute all sums from the table."""
        for number in range(1, self.depth):
            self.level(number).copy_(self.child_sums(number))

    def child_sums(self, number: int) -> Tensor:
        """Return what level `number` should hold: the sums of the level below, padded."""
        level = self.level(number)
        children = self.level(number - 1).view(-1, FAN, self.width)
        sums = torch.zeros_like(level)
        sums[: len(children)] = children.sum(1, dtype=level.dtype)
        return sums

    def draw(
        self,
        mass: Tensor,
        k: int,
        without: Tensor,
    ) -> Tensor:
        """Sample k rows for each query, (B, k), but none of the rows `without` (B,).

        The method samples a column in proportion to mass (B, M), then a row in proportion to the column. All entries
        must be non-negative. It takes O(FAN log V) per sample, and O(FLAT M) in total.
        """
        u = torch.rand(len(mass), k, self.start + 2, dtype=torch.float64, device=mass.device)
        column, _ = choose_columns(mass, u[..., 0])
        entries = self.level0[without].gather(1, column).double()
        excluded = ExcludedRow(without[:, None], entries)
        node = self._invert(column, u[..., 1], excluded)
        for number in reversed(range(self.start)):
            level = self.level(number).view(-1, FAN, self.width)
            weights = level[node, :, column].double()  # (B, k, FAN)
            self._subtract_row(weights, number, node, excluded)
            node = node * FAN + choose(weights, u[..., self.start + 1 - number])
            node = node.clamp_(max=self._last(number))
        return node

    @property
    def start(self) -> int:
        """The level where the descent starts."""
        return next(number for number in range(self.depth) if len(self.level(number)) <= FLAT)

    def _invert(self, column: Tensor, u: Tensor, excluded: ExcludedRow) -> Tensor:
        """Return nodes (B, k) of level `start`, by inversion of cumulative sums.

        One search serves all columns: the distribution function of column i covers [i, i + 1).
        """
        ends = self.level(self.start).double().mT.contiguous().cumsum_(-1)  # (M, nodes)
        total = ends[:, -1:].clone()
        nodes = ends.shape[1]
        columns = torch.arange(len(ends), device=ends.device)[:, None]
        ends = (ends / total).add_(columns).flatten()
        # shorten the interval of the excluded row's node and shift later ones
        share = excluded.entries / total.flatten()[column]
        place = column * nodes + excluded.row // FAN**self.start
        u = u * (1 - share)
        u = torch.where(u + column >= ends[place] - share, u + share, u)
        places = torch.searchsorted(ends, u + column, right=True) - column * nodes
        return places.clamp_(0, self._last(self.start))

    def _last(self, number: int) -> int:
        """Return the last non-empty node of a level, a limit against rounding errors."""
        return (self.rows - 1) // FAN**number

    def _subtract_row(
        self,
        weights: Tensor,
        number: int,
        node: Tensor,
        excluded: ExcludedRow,
    ) -> None:
        """Subtract the excluded row from its ancestor in weights (B, k, FAN), in place."""
        ancestor = excluded.row // FAN**number
        place = (ancestor % FAN).expand_as(node)[..., None]
        total = weights.gather(-1, place)
        rest = total - excluded.entries[..., None] if number else torch.zeros_like(total)
        rest = torch.where(rest > EXHAUSTED * total, rest, 0.0)
        below = (ancestor // FAN == node)[..., None]
        weights.scatter_(-1, place, torch.where(below, rest, total))


def choose(weights: Tensor, u: Tensor) -> Tensor:
    """Sample an index of the last axis of weights (..., n) by uniform numbers u (...).

    Weights are non-negative.
    """
    columns, _ = choose_columns(weights.flatten(0, -2), u.reshape(-1, 1))
    return columns.view(u.shape)


def _padded(rows: int) -> int:
    return -(-rows // FAN) * FAN
