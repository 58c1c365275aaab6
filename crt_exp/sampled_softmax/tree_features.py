"""`TreeFeatures`: draws in proportion to a random-feature estimate of the softmax, sublinear in the classes.

Legend: a = phi_q(h), (M,); f_c = phi_k(e_c) e^{b_c}, (M,), both with the constants of `ClassFeatures`; the estimate of
class c is s_c = a.f_c. No number is made for each pair of a query and a class.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.features.base import FeatureMap
from crt_exp.mechanism import Mechanism
from crt_exp.sampled_softmax.base import Drawn
from crt_exp.sampled_softmax.feature_law import FeatureLaw
from crt_exp.sampled_softmax.tree import EXHAUSTED, FAN, SumTree, choose

GATHERED = 2**22  # features of drawn classes that are gathered at once
SHARED = 100      # a level of fewer nodes than SHARED k is multiplied with all queries: cheaper than k gathers a query


class TreeFeatures(FeatureLaw):
    """q' in proportion to s_c, in O(M + log V) a draw where the features are positive.

    Positive maps, by composition: feature i with probability a_i T_i / sum_j a_j T_j, T the sums of f over all classes
    but the target, then a class in proportion to its feature i, down a tree of sums: the law of the dense estimate.

    Signed maps: down a tree of sums of f, a child in proportion to the positive part of a.(its sum), or to its number
    of classes where no part is positive, O(M log V) a draw. The law is that of the tree, known exactly by its path.
    Where all sums are positive it is in proportion to s_c; else it is near that, and positive by the uniform share.

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
