"""Laws that take a number for each pair of a query and a class, made for a block of queries at a time."""

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn

from crt_exp.features.base import FeatureMap
from crt_exp.mechanism import Mechanism
from crt_exp.sampled_softmax.base import ClassSampler, Drawn, blocks, joined
from crt_exp.sampled_softmax.feature_law import FeatureLaw

PAIRS = 2**20  # pairs of a query and a class at once, which stay in the cache


class DenseLaw(ClassSampler):
    """q in proportion to exp of `log_weights`, made of the logits, O(V d) a query.

    head: what the logits are of, with `weight` (V, d) and perhaps `bias` (V,), as it is at each draw.
    """

    def __init__(self, head: nn.Module):
        if not isinstance(getattr(head, "weight", None), Tensor):
            raise ValueError(f"{type(self).__name__}({head!r}): it takes the head itself, a module with `weight` "
                             "(V, d)")
        super().__init__(len(head.weight))
        self._head = [head]  # in a list: the parameters stay those of the head alone

    @torch.no_grad()
    def draw(self, hidden: Tensor, targets: Tensor | None, k: int) -> Drawn:
        return joined([draw_dense(self._weights(h), t, k) for h, t in blocks(PAIRS // self.classes, hidden, targets)])

    @torch.no_grad()
    def log_q(self, hidden: Tensor, ids: Tensor) -> Tensor:
        parts = [self.log_weights(self._logits(h)).log_softmax(-1).gather(1, i)
                 for h, i in blocks(PAIRS // self.classes, hidden, ids)]
        return torch.cat(parts)

    @abstractmethod
    def log_weights(self, logits: Tensor) -> Tensor:
        """Of logits (b, V), which are used up."""

    def _logits(self, hidden: Tensor) -> Tensor:
        head = self._head[0]
        return nn.functional.linear(hidden.to(head.weight.dtype), head.weight, getattr(head, "bias", None)).float()

    def _weights(self, hidden: Tensor) -> Tensor:
        logs = self.log_weights(self._logits(hidden))
        return logs.sub_(logs.amax(-1, keepdim=True)).exp_()


class ExactSoftmax(DenseLaw):
    """q = softmax(o), the law that is sought: what other laws are measured by."""

    def log_weights(self, logits: Tensor) -> Tensor:
        return logits


class Quadratic(DenseLaw):
    """q_c in proportion to alpha o_c^2 + 1: the quadratic kernel of Blanc and Rendle (2018), whose alpha is 100. Their
    tree draws from the same law in O(d^2 log V)."""

    def __init__(self, head: nn.Module, alpha: float = 100.0):
        super().__init__(head)
        self.alpha = float(alpha)
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"alpha = {alpha}: the weight of the squared logit is a finite number of at least 0")

    def log_weights(self, logits: Tensor) -> Tensor:
        if not self.alpha:
            return logits.zero_()
        return nn.functional.softplus(logits.abs_().log_().mul_(2).add_(math.log(self.alpha)))  # squares overflow


class DenseFeatures(FeatureLaw):
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


def draw_dense(weights: Tensor, targets: Tensor | None, k: int, given: Tensor | None = None) -> Drawn:
    """k classes a row in proportion to weights (B, V) >= 0, without the targets; those given (B, k), not -1, stand.

    Uniform where no other class has a weight. `weights` is used up.
    """
    of_target = 0.0
    if targets is not None:
        of_target = weights.gather(1, targets[:, None]).double()
        weights.scatter_(1, targets[:, None], 0.0)
    ends = weights.cumsum(-1, dtype=torch.float64)
    left = ends[:, -1:].clone()
    if bool((left == 0).any()):
        weights = torch.where(left == 0, 1.0, weights).scatter_(1, targets[:, None], 0.0)
        ends = weights.cumsum(-1, dtype=torch.float64)
    u = torch.rand(len(ends), k, dtype=torch.float64, device=ends.device) * ends[:, -1:]
    ids = torch.searchsorted(ends, u, right=True).clamp_(max=weights.shape[1] - 1)
    ids = ids if given is None else torch.where(given >= 0, given, ids)
    log_q = (weights.gather(1, ids) / ends[:, -1:]).log().float()
    return Drawn(ids, log_q, None if targets is None else (of_target / (of_target + left)).log().float().squeeze(1))
