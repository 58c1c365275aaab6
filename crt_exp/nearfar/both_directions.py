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
    Clusters,
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
            x_keep = None if keep is None else keep.repeat(1, x.shape[1])
            metric = KeyMetric.of(x.flatten(1, 2), y, x_keep, keep)
        shifted = y - metric.shift
        choice = Choice.of(shifted, metric, self.sizes.heavy, self.sizes.cells, keep)
        return ChosenSets(metric, choice)

    def _across(self, y: Tensor, keep: Tensor | None, rows: slice) -> KeyMetric:
        """Return the metric for keys of another sequence, factor y (Z, S, d).

        It uses the moments of earlier queries, because queries of the call may lie in the future of each other. Without
        them queries are assumed to be as large as keys.
        """
        if self.factor != 1:
            y = y * self.factor
        metric = KeyMetric.of(None, y, None, keep)
        if self.metric is not None:
            tilt = self.metric.tilt[rows].to(y.dtype)
            root = self.metric.root[rows].to(y.dtype)
            metric = KeyMetric(metric.shift, tilt, root)
        return metric

    def attend(
        self, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, chosen: ChosenSets
    ) -> Tensor:
        """Return the outputs (Z, G, L, dv)."""
        metric, choice = chosen
        if self.native:
            return native.attend(x, y, v, metric, choice, self.sizes, self.factor, self.cross)
        y = y - metric.shift
        block = x.shape[2] if self.cross else self.sizes.block
        level = levels(y.detach(), metric, choice)
        members = one_hot(choice.cluster, choice.centres.shape[1], x.dtype)
        u = weights(y, metric, choice.pool, choice.cluster, level)
        sums = members.mT @ moments(y, u, metric, choice.cluster, choice.centres)
        clusters = sum_clusters(sums.unsqueeze(1), metric, choice.centres, level)
        rows = torch.cat([v * u.unsqueeze(-1), u.unsqueeze(-1)], -1)  # [u v, u]
        if self.cross:
            far = (members.mT @ rows).unsqueeze(1)
        else:
            far = far_sums(blocks(members, block).mT @ blocks(rows, block))
        V = far[..., :-1]
        N = far[..., -1:]
        q = to_blocks(x, block)  # (Z, N, G b, d)
        heavy = rows_at(y, choice.heavy)
        logits = [_shared_logits(q, heavy, clusters, choice, N)]
        if not self.cross:
            logits.append(_near_logits(q, y, choice, keep, block))
        # heavy hitters, clusters, near keys
        columns = [heavy.shape[1], V.shape[2], *(t.shape[-1] for t in logits[1:])]
        parts = torch.cat(logits, -1).softmax(-1).split(columns, -1)
        heavy_weights = parts[0]
        cluster_weights = parts[1]
        means = torch.where(N > MIN_WEIGHT, V / N.clamp(min=MIN_WEIGHT), 0.0)
        out = _of_all_blocks(heavy_weights, rows_at(v, choice.heavy)) + cluster_weights @ means
        if not self.cross:
            out = out + parts[2] @ _windows(blocks(v, block))
        out = from_blocks(out, *x.shape[1:3])
        if self.sizes.first_order:
            log_weight = metric.log_weights(y) - level.amax(1, keepdim=True)
            g = torch.where(choice.pool, torch.exp(log_weight), 0.0)
            slope = slopes(y, v, g, members, clusters.mu.squeeze(1)).unsqueeze(1)
            share = from_blocks(cluster_weights.sum(-1, keepdim=True), *x.shape[1:3])
            out = out + share * ((x - metric.tilt.unsqueeze(1)) @ slope.mT)
        return out


def _shared_logits(
    q: Tensor, heavy: Tensor, clusters: Clusters, choice: Choice, N: Tensor
) -> Tensor:
    """Return the logits (Z, N, G b, n + K) of heavy hitters and clusters."""
    keys = torch.cat([heavy, clusters.mu.squeeze(1)], 1)
    missing = torch.where(choice.there, 0.0, MASKED).to(q.dtype)
    missing = missing.unsqueeze(1).expand(-1, N.shape[1], -1)
    log_n = torch.where(N > MIN_WEIGHT, N.clamp(min=MIN_WEIGHT).log(), MASKED).squeeze(-1)
    bias = torch.cat([missing, clusters.bias + log_n], -1)
    return _of_all_blocks(q, keys.mT) + bias.unsqueeze(2)


def _near_logits(q: Tensor, y: Tensor, choice: Choice, keep: Tensor | None, block: int) -> Tensor:
    """Return the logits (Z, N, G b, 3 b) of the keys of neighbouring blocks."""
    near = torch.ones_like(choice.pool) if keep is None else keep
    near = near.scatter(1, choice.heavy, False)
    bias = torch.where(blocks(near, block), 0.0, MASKED).to(q.dtype)
    return q @ _windows(blocks(y, block)).mT + _windows(bias.unsqueeze(-1), MASKED).mT


def weights(y: Tensor, metric: KeyMetric, pool: Tensor, cluster: Tensor, level: Tensor) -> Tensor:
    """Return u_j = exp(w_j - level of its cluster) (Z, S), 0 outside the pool.

    level (Z, K).
    """
    log_weights = metric.log_weights(y) - level.gather(1, cluster)
    return log_weights.masked_fill(~pool, -torch.inf).exp()


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
    covariance = v.mT @ y - (members.mT @ v).mT @ mu
    return covariance / g.sum(1).clamp(min=MIN_WEIGHT)[:, None, None]


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
    none = torch.zeros_like(own[:, :LAG])
    far_blocks = max(0, own.shape[1] - LAG)
    before = torch.cat([none, own[:, :far_blocks].cumsum(1)], 1)
    after = torch.cat([own[:, LAG:].flip(1).cumsum(1).flip(1), none], 1)
    return before + after
