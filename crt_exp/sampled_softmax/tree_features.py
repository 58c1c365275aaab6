"""Draws in proportion to a random-feature estimate of the softmax: down a tree of sums, or from all the estimates.

Legend: a = phi_q(h), (M,); f_c = phi_k(e_c) e^{b_c}, (M,), both with the constants of `ClassFeatures`; the estimate of
class c is s_c = a.f_c. Level 0 of a tree is the table (V, M) of f, a row of level l + 1 the sum of FAN rows of level l.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.features.base import FeatureMap
from crt_exp.mechanism import Mechanism
from crt_exp.sampled_softmax.base import PAIRS, Drawn, blocks, draw_dense, joined
from crt_exp.sampled_softmax.feature_distribution import FeatureDistribution

GATHERED = 2**22   # features of drawn classes that are gathered at once
SHARED = 100       # a level of fewer nodes than SHARED k is multiplied with all queries: cheaper than k gathers each
FAN = 16           # children of a node
EXHAUSTED = 1e-9   # a sum less one of its rows, as a share of it, below which rounding would decide: taken as 0
FLAT = 2**12       # nodes at most of a level whose distribution functions are inverted at once


class TreeFeatures(FeatureDistribution):
    """q' in proportion to s_c, in O(M + log V) a draw where the features are positive.

    Positive maps, by composition: feature i with probability a_i T_i / sum_j a_j T_j, T the sums of f over all classes
    but the target, then a class in proportion to its feature i, down a tree of sums: the distribution of the dense
    estimate.

    Signed maps: down a tree of sums of f, a child in proportion to the positive part of a.(its sum), or to its number
    of classes where no part is positive, O(M log V) a draw. The distribution is that of the tree, known exactly by its
    path. Where all sums are positive it is in proportion to s_c; else it is near that, and positive by the uniform
    share.

    The tables are m V numbers and a fifteenth (float64: two) above. An update of r classes takes O(r M log V).
    """

    def __init__(self, proposal: FeatureMap | Mechanism | str, classes: int, d: int, **options):
        super().__init__(proposal, classes, d, **options)
        # A positive map's probabilities are quotients by the sums; a signed one's are of the path, whatever the sums.
        dtype = torch.float64 if self.features.positive else torch.float32
        self.tree = SumTree(self.classes, self.features.width, dtype)

    def _restored(self, features: Tensor, rows: slice) -> None:
        self.tree.leaves[rows] = features

    def _completed(self) -> None:
        self.tree.resum()

    def _changed(self, rows: Tensor, features: Tensor) -> None:
        self.tree.set(rows, features)

    def _draw(self, hidden: Tensor, targets: Tensor | None, uniform: Tensor) -> Drawn:
        if not self.features.positive:
            target_log_q = None if targets is None else self._log_q(hidden, targets[:, None])[:, 0]
            return Drawn(*self._walk(hidden, uniform, targets), target_log_q)
        a, left, target_log_q = self._masses(hidden, targets)
        mass = a * left
        sums = mass.sum(-1, keepdim=True)
        ids = self.tree.draw(mass, uniform.shape[1], targets)
        ids = self._repaired(ids, sums == 0, targets)
        ids = torch.where(uniform >= 0, uniform, ids) if self.defensive else ids
        log_q = self._products((a * (left > 0) / sums).float(), ids).log()
        flat = -math.log(self.classes - (targets is not None))
        return Drawn(ids, torch.where(sums == 0, flat, log_q), target_log_q)

    def _log_q(self, hidden: Tensor, ids: Tensor) -> Tensor:
        if not self.features.positive:
            return self._walk(hidden, ids, None)[1]
        a, total, _ = self._masses(hidden, None)
        return self._products((a / (a @ total)[:, None]).float(), ids).log()

    # ---- positive maps

    def _masses(self, hidden: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """a (B, M) but for a factor of each row, the sums over all classes but the targets (B, M) or over all (M,), and
        the log probabilities of the targets among all (B,); float64, the last float32."""
        _, log_a = self.features.of_queries(hidden)
        a = (log_a - log_a.amax(-1, keepdim=True)).exp_()
        total = self.tree.total
        if targets is None:
            return a, total, None
        of_targets = F.embedding(targets, self.tree.leaves).double()
        left = total - of_targets
        left = torch.where(left > EXHAUSTED * total, left, 0.0)
        return a, left, ((a * of_targets).sum(-1) / (a @ total)).log().float()

    def _repaired(self, ids: Tensor, hopeless: Tensor, targets: Tensor | None) -> Tensor:
        """Uniform draws for queries whose other classes lie below the rounding of the target's own mass, and in place
        of the target, which rounding at an edge of its interval may give."""
        if targets is None:
            return ids
        wrong = hopeless | (ids == targets[:, None])
        if not bool(wrong.any()):
            return ids
        other = torch.randint(self.classes - 1, ids.shape, device=ids.device)
        return torch.where(wrong, other + (other >= targets[:, None]), ids)

    def _products(self, weight: Tensor, ids: Tensor) -> Tensor:
        """weight (B, M) times the features of ids (B, k), (B, k)."""
        step = max(1, GATHERED // (ids.shape[1] * weight.shape[1]))
        parts = [F.embedding(i, self.tree.leaves) @ w[..., None] for i, w in zip(ids.split(step), weight.split(step))]
        return torch.cat(parts).squeeze(-1)

    # ---- signed maps

    def _walk(self, hidden: Tensor, given: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor]:
        """Down the tree to a class for each entry of given (B, k): the one that is given, or where that is -1 a drawn
        one. ids and their log probabilities, (B, k) both."""
        a = self._signed_queries(hidden)
        taken = None if targets is None else (a * self.tree.leaves[targets]).sum(-1, keepdim=True)
        node, log_q = torch.zeros_like(given), torch.zeros(given.shape, device=given.device)
        for number in reversed(range(self.tree.depth)):
            children = node[..., None] * FAN + torch.arange(FAN, device=node.device)
            weights = self._weights(a, number, children, targets, taken)
            u = torch.rand(given.shape, dtype=torch.float64, device=given.device)
            step = torch.where(given >= 0, given // FAN**number % FAN, choose(weights.double(), u))
            log_q += (weights.gather(-1, step[..., None]).squeeze(-1) / weights.sum(-1)).log()
            node = node * FAN + step
        return node.clamp(max=self.classes - 1), log_q

    def _signed_queries(self, hidden: Tensor) -> Tensor:
        value, log_a = self.features.of_queries(hidden)
        return (value * (log_a - log_a.amax(-1, keepdim=True)).exp()).float()

    def _weights(self, a: Tensor, number: int, children: Tensor, targets: Tensor | None,
                 taken: Tensor | None) -> Tensor:
        """Of children (B, k, FAN) of a level, not negative, for each of the queries."""
        scores, counts = self._scores(a, number, children), self.tree.counts(number, children)
        if targets is not None:
            mine = children == (targets // FAN**number)[:, None, None]
            scores = torch.where(mine, scores - taken[..., None], scores)
            counts = counts - mine.long()
        scores = torch.where(counts > 0, scores.clamp(min=0), 0.0)
        return torch.where(scores.sum(-1, keepdim=True) > 0, scores, counts.to(scores.dtype))

    def _scores(self, a: Tensor, number: int, children: Tensor) -> Tensor:
        """a.(sum of f below each of the children), (B, k, FAN)."""
        level, k = self.tree.level(number), children.shape[1]
        if number and len(level) <= SHARED * k:
            return (a @ level.mT).gather(1, children.flatten(1)).view_as(children)
        groups, step = level.view(-1, FAN * level.shape[1]), max(1, GATHERED // (FAN * k * level.shape[1]))
        parts = zip((children[..., 0] // FAN).split(step), a.split(step))
        scores = [F.embedding(node, groups).view(len(w), k * FAN, level.shape[1]) @ w[..., None] for node, w in parts]
        return torch.cat(scores).view_as(children)


class DenseFeatures(FeatureDistribution):
    """q' in proportion to the positive part of the estimate, O(V M) a query; uniform where no part is positive."""

    def __init__(self, proposal: FeatureMap | Mechanism | str, classes: int, d: int, **options):
        super().__init__(proposal, classes, d, **options)
        self.register_buffer("leaves", torch.zeros(self.classes, self.features.width))

    def _restored(self, features: Tensor, rows: slice) -> None:
        self.leaves[rows] = features

    def _changed(self, rows: Tensor, features: Tensor) -> None:
        self.leaves[rows] = features

    def _draw(self, hidden: Tensor, targets: Tensor | None, uniform: Tensor) -> Drawn:
        parts = [draw_dense(self._weights(h), t, uniform.shape[1], u)
                 for h, t, u in blocks(PAIRS // self.classes, hidden, targets, uniform)]
        return joined(parts)

    def _log_q(self, hidden: Tensor, ids: Tensor) -> Tensor:
        parts = []
        for h, i in blocks(PAIRS // self.classes, hidden, ids):
            weights = self._weights(h)
            parts.append((weights.gather(1, i) / weights.sum(-1, keepdim=True, dtype=torch.float64)).log().float())
        return torch.cat(parts)

    def _weights(self, hidden: Tensor) -> Tensor:
        value, log_a = self.features.of_queries(hidden)
        a = (value * (log_a - log_a.amax(-1, keepdim=True)).exp()).float()
        if self.features.positive:
            return a @ self.leaves.mT
        estimates = (a @ self.leaves.mT).clamp_(min=0)
        return estimates.masked_fill_(estimates.amax(-1, keepdim=True) == 0, 1.0)


class SumTree(nn.Module):
    """A table of V rows and the sums above it, all of them buffers. The sums take a fifteenth of the table's rows.

    dtype: of the sums. A change of r rows takes O(r M log V): their differences are added to the sums above, and with
    rounding the sums drift from those of the rows; `resum` sums again.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.rows, self.width = rows, width
        self.register_buffer("level0", torch.zeros(_padded(rows), width))
        self.depth = 1
        while len(self.level(self.depth - 1)) > FAN:
            groups = len(self.level(self.depth - 1)) // FAN
            self.register_buffer(f"level{self.depth}", torch.zeros(_padded(groups), width, dtype=dtype))
            self.depth += 1

    def level(self, number: int) -> Tensor:
        """Rows of level `number`, with rows of zeros at the end up to a multiple of FAN."""
        return getattr(self, f"level{number}")

    @property
    def leaves(self) -> Tensor:
        """The table, (V, M)."""
        return self.level0[:self.rows]

    @property
    def total(self) -> Tensor:
        """The sum of all rows as the tree has it, (M,) float64."""
        return self.level(self.depth - 1).sum(0, dtype=torch.float64)

    def counts(self, number: int, nodes: Tensor) -> Tensor:
        """How many rows of the table lie below nodes of a level."""
        size = FAN**number
        return (self.rows - nodes * size).clamp(0, size)

    def set(self, rows: Tensor, values: Tensor) -> None:
        """New values (r, M) of sorted, distinct rows (r,)."""
        change = values.double() - self.level0.index_select(0, rows).double()
        self.level0[rows] = values
        for number in range(1, self.depth):
            rows, members = torch.unique_consecutive(rows // FAN, return_counts=True)
            change = torch.segment_reduce(change, "sum", lengths=members, unsafe=True)
            level = self.level(number)
            level[rows] = (level.index_select(0, rows).double() + change).to(level.dtype)

    def resum(self) -> None:
        """All sums, again, from the table."""
        for number in range(1, self.depth):
            self.level(number).copy_(self._sums(number))

    def _sums(self, number: int) -> Tensor:
        level, below = self.level(number), self.level(number - 1)
        summed = below.view(-1, FAN, self.width).sum(1, dtype=level.dtype)
        return torch.nn.functional.pad(summed, (0, 0, 0, len(level) - len(summed)))

    def draw(self, mass: Tensor, k: int, without: Tensor | None = None) -> Tensor:
        """k rows for each query, (B, k): a column in proportion to mass (B, M), then a row in proportion to the entries
        of that column, none of them negative.

        without: a row (B,) that is left out of the draws of its query. O(FAN log V) a draw, and O(FLAT M) for all.
        """
        u = torch.rand(len(mass), k, self.start + 2, dtype=torch.float64, device=mass.device)
        ends = self.level(self.start).double().mT.contiguous().cumsum_(-1)                # (M, nodes)
        return self.rows_of(ends, mass, u, without)

    @property
    def start(self) -> int:
        """The level at which the way down begins."""
        return next(number for number in range(self.depth) if len(self.level(number)) <= FLAT)

    def rows_of(self, ends: Tensor, mass: Tensor, u: Tensor, without: Tensor | None) -> Tensor:
        """The rows (B, k) that uniform numbers u (B, k, 2 + levels below `start`) stand for."""
        column = choose_columns(mass, u[..., 0])
        taken = None if without is None else self.level0[without].gather(1, column).double()
        node = self._invert(ends, column, u[..., 1], without, taken)
        for number in reversed(range(self.start)):
            weights = self.level(number).view(-1, FAN, self.width)[node, :, column].double()  # (B, k, FAN)
            if without is not None:
                self._leave_out(weights, number, node, without[:, None], taken)
            node = node * FAN + choose(weights, u[..., self.start + 1 - number])
            node = node.clamp_(max=self._last(number))
        return node

    def _invert(self, ends: Tensor, column: Tensor, u: Tensor, without: Tensor | None, taken: Tensor | None) -> Tensor:
        """Nodes (B, k) of level `start`, each in proportion to its column, whose sums up to each node are ends.

        One search for all draws: column i's distribution function takes the numbers from i to i + 1.
        """
        total, nodes = ends[:, -1:].clone(), ends.shape[1]
        ends = (ends / total).add_(torch.arange(len(ends), device=ends.device)[:, None]).flatten()
        if without is not None:  # the interval of the row's node is shorter by what is taken, those behind it move up
            taken = taken / total.flatten()[column]
            place = column * nodes + without[:, None] // FAN**self.start
            u = u * (1 - taken)
            u = torch.where(u + column >= ends[place] - taken, u + taken, u)
        places = torch.searchsorted(ends, u + column, right=True) - column * nodes
        return places.clamp_(0, self._last(self.start))

    def _last(self, number: int) -> int:
        """The last node of a level with rows: where little of a column is left, rounding can choose one behind it."""
        return (self.rows - 1) // FAN**number

    def _leave_out(self, weights: Tensor, number: int, node: Tensor, row: Tensor, taken: Tensor) -> None:
        """Takes the entries `taken` (B, k) of a row off the weights (B, k, FAN) of the child that it lies below."""
        ancestor = row // FAN**number
        place = (ancestor % FAN).expand_as(node)[..., None]
        held = weights.gather(-1, place)
        rest = held - taken[..., None] if number else torch.zeros_like(held)
        rest = torch.where(rest > EXHAUSTED * held, rest, 0.0)
        below = (ancestor // FAN == node)[..., None]
        weights.scatter_(-1, place, torch.where(below, rest, held))


def choose(weights: Tensor, u: Tensor) -> Tensor:
    """A number of the last axis for each of weights (..., n), none of them negative, in proportion: the one that the
    uniform number u (...) stands for."""
    ends = weights.cumsum(-1)
    return (ends <= u[..., None] * ends[..., -1:]).sum(-1).clamp_(max=weights.shape[-1] - 1)


def choose_columns(mass: Tensor, u: Tensor) -> Tensor:
    """The same with k uniform numbers (B, k) for each row of mass (B, M), (B, k)."""
    ends = mass.double().cumsum(-1)
    return torch.searchsorted(ends, u * ends[:, -1:], right=True).clamp_(max=mass.shape[1] - 1)


def _padded(rows: int) -> int:
    return -(-rows // FAN) * FAN
