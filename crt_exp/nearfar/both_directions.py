"""Bidirectional near-far attention and cross-attention, in PyTorch.

forward.c is the C version, which is faster for float32 on CPUs. A set of weighted keys with logits q.k + bias adds N
e^logit to the denominator and V e^logit to the numerator. A single key has N = 1 and V = v; a cluster sums over its
keys. So

    out = (sum_near e^(q.k) v + sum_sets e^(q.k + bias) V) / (sum_near e^(q.k) + sum_sets e^(q.k + bias) N).

The method was derived for this project. Notation as in call.py.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.nearfar import native
from crt_exp.nearfar.choice import (
    MASKED,
    MIN_WEIGHT,
    Choice,
    KeyMetric,
    Sizes,
    blocks,
    from_blocks,
    moments,
    one_hot,
    rows_at,
    sum_clusters,
    to_blocks,
)

LAG = 2  # distance in blocks from which keys are far


class ChosenSets(NamedTuple):
    metric: KeyMetric
    choice: Choice


@dataclass(frozen=True)
class Both:
    """Bidirectional self-attention or cross-attention."""

    sizes: Sizes
    cross: bool
    metric: KeyMetric | None  # of earlier queries, if `cross`
    factor: float = 1.0  # of queries and keys, applied by the C engine
    native: bool = False  # whether the C engine computes all heads in one call

    @torch.no_grad()
    def choose(self, x: Tensor, y: Tensor, keep: Tensor | None, rows: slice) -> ChosenSets:
        """Choose metric, heavy hitters and clusters.

        x (Z, G, L, d) and y (Z, S, d) are the given rows of all.
        """
        metric = self._across(y, keep, rows) if self.cross else None
        if self.native:
            return ChosenSets(*native.choose(x, y, self.sizes, keep, self.factor, metric))
        if metric is None:
            metric = KeyMetric.of(
                x.flatten(1, 2), y, None if keep is None else keep.repeat(1, x.shape[1]), keep
            )
        return ChosenSets(
            metric, Choice.of(y - metric.shift, metric, self.sizes.heavy, self.sizes.cells, keep)
        )

    def _across(self, y: Tensor, keep: Tensor | None, rows: slice) -> KeyMetric:
        """Return the metric for keys of another sequence, factor y (Z, S, d).

        It uses the moments of earlier queries, because queries of the call may lie in the future of each other. Without
        them queries are assumed to be as large as keys.
        """
        metric = KeyMetric.of(None, y if self.factor == 1 else y * self.factor, None, keep)
        if self.metric is not None:
            metric = KeyMetric(metric.shift, *(t[rows].to(y.dtype) for t in self.metric[1:]))
        return metric

    def attend(
        self, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, chosen: ChosenSets
    ) -> Tensor:
        """Return the outputs (Z, G, L, dv)."""
        (metric, choice), dtype = chosen, x.dtype
        if self.native:
            return native.attend(x, y, v, *chosen, self.sizes, self.factor, self.cross)
        y = y - metric.shift
        b, K = x.shape[2] if self.cross else self.sizes.block, choice.centres.shape[1]
        level, members = levels(y.detach(), metric, choice), one_hot(choice.cluster, K, dtype)
        u = weights(y, metric, choice.pool, choice.cluster, level)
        sums = members.mT @ moments(y, u, metric, choice.cluster, choice.centres)
        clusters = sum_clusters(sums.unsqueeze(1), metric, choice.centres, level)
        rows = torch.cat([v * u.unsqueeze(-1), u.unsqueeze(-1)], -1)  # [u v, u]
        far = (
            (members.mT @ rows).unsqueeze(1)
            if self.cross
            else far_sums(blocks(members, b).mT @ blocks(rows, b))
        )
        q = to_blocks(x, b)  # (Z, N, G b, d)
        keys, values = (rows_at(t, choice.heavy) for t in (y, v))
        shared = torch.cat([keys, clusters.mu.squeeze(1)], 1)  # heavy hitters, then clusters
        logits = _of_all_blocks(q, shared.mT)
        plain = (
            torch.where(choice.there, 0.0, MASKED)
            .to(dtype)
            .unsqueeze(1)
            .expand(-1, far.shape[1], -1)
        )
        N, V = far[..., -1:], far[..., :-1]
        weight = torch.where(N > MIN_WEIGHT, N.clamp(min=MIN_WEIGHT).log(), MASKED).squeeze(-1)
        logits = [logits + torch.cat([plain, clusters.bias + weight], -1).unsqueeze(2)]
        if not self.cross:
            near = torch.ones_like(choice.pool) if keep is None else keep
            hidden = torch.where(blocks(near.scatter(1, choice.heavy, False), b), 0.0, MASKED).to(
                dtype
            )
            logits.append(q @ _windows(blocks(y, b)).mT + _windows(hidden.unsqueeze(-1), MASKED).mT)
        of_heavy, of_clusters, *of_near = (
            torch.cat(logits, -1)
            .softmax(-1)
            .split([keys.shape[1], K, *(t.shape[-1] for t in logits[1:])], -1)
        )
        means = torch.where(N > MIN_WEIGHT, V / N.clamp(min=MIN_WEIGHT), 0.0)
        out = _of_all_blocks(of_heavy, values) + of_clusters @ means
        if of_near:
            out = out + of_near[0] @ _windows(blocks(v, b))
        out = from_blocks(out, *x.shape[1:3])
        if self.sizes.first_order:
            g = torch.where(
                choice.pool, torch.exp(metric.log_weights(y) - level.amax(1, keepdim=True)), 0.0
            )
            slope = slopes(y, v, g, members, clusters.mu.squeeze(1)).unsqueeze(1)
            share = from_blocks(of_clusters.sum(-1, keepdim=True), *x.shape[1:3])
            out = out + share * ((x - metric.tilt.unsqueeze(1)) @ slope.mT)
        return out


def weights(y: Tensor, metric: KeyMetric, pool: Tensor, cluster: Tensor, level: Tensor) -> Tensor:
    """Return u_j = exp(w_j - level of its cluster) (Z, S), 0 outside the pool.

    level (Z, K).
    """
    return (metric.log_weights(y) - level.gather(1, cluster)).masked_fill(~pool, -torch.inf).exp()


@torch.no_grad()
def levels(y: Tensor, metric: KeyMetric, choice: Choice) -> Tensor:
    """Return the largest w of each cluster's keys (Z, K); 0 if it is empty."""
    w = metric.log_weights(y).masked_fill(~choice.pool, -torch.inf)
    highest = w.new_full(choice.centres.shape[:2], -torch.inf).scatter_reduce(
        1, choice.cluster, w, "amax"
    )
    return torch.where(highest.isinf(), 0.0, highest)


def slopes(y: Tensor, v: Tensor, g: Tensor, members: Tensor, mu: Tensor) -> Tensor:
    """Return C (Z, dv, d), the mean of v_j (y_j - mu of its cluster)^T.

    The first-order term of values is C (x - b). Weights are g (Z, S); mu (Z, K, d).
    """
    v = v * g.unsqueeze(-1)
    return (v.mT @ y - (members.mT @ v).mT @ mu) / g.sum(1).clamp(min=MIN_WEIGHT)[:, None, None]


def _of_all_blocks(t: Tensor, shared: Tensor) -> Tensor:
    """Multiply t (Z, N, r, k) by shared (Z, k, l), common to all blocks."""
    return (t.flatten(1, 2) @ shared).unflatten(1, t.shape[1:3])


def _windows(t: Tensor, beyond: float = 0.0) -> Tensor:
    """Concatenate each block (Z, N, b, .) with its neighbours: (Z, N, 3 b, .).

    `beyond` fills positions beyond the ends.
    """
    padded = torch.nn.functional.pad(t, (0, 0, 0, 0, 1, 1), value=beyond)
    return torch.cat([padded[:, i : i + t.shape[1]] for i in range(3)], 2)


def far_sums(own: Tensor) -> Tensor:
    """Add the sums (Z, N, K, k) of single blocks over the blocks far from each block.

    Only far blocks are added; nothing is subtracted from a total. Positive columns therefore stay exactly 0 without far
    keys.
    """
    none, n = torch.zeros_like(own[:, :LAG]), max(0, own.shape[1] - LAG)
    before = torch.cat([none, own[:, :n].cumsum(1)], 1)
    return before + torch.cat([own[:, LAG:].flip(1).cumsum(1).flip(1), none], 1)
