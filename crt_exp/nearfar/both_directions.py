"""Bidirectional near-far attention and cross-attention, in PyTorch.

forward.c is the C version, which is faster for float32 on CPUs. A set of weighted keys with logits q.k + bias adds N
e^logit to the denominator and V e^logit to the numerator. A single key has N = 1 and V = v; a cluster sums over its
keys. So

    out = (sum_near e^(q.k) v + sum_sets e^(q.k + bias) V) / (sum_near e^(q.k) + sum_sets e^(q.k + bias) N).

reference.py has the same formula for all pairs of queries and keys. The method was derived for this project. Notation
as in dispatch.py.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.nearfar import native
from crt_exp.nearfar.choice import (
    MASKED,
    MIN_WEIGHT,
    Clusters,
    KeyMetric,
    KeySets,
    Sizes,
    choose_sets,
    join_queries,
    key_moments,
    log_number,
    one_hot,
    rows_at,
    split_blocks,
    split_queries,
    summarize_clusters,
)

LAG = 2  # distance in blocks from which keys are far


@dataclass(frozen=True)
class Bidirectional:
    """Bidirectional self-attention or cross-attention."""

    sizes: Sizes
    cross: bool = False
    metric: KeyMetric | None = None  # of earlier queries, if `cross`
    factor: float = 1.0  # of queries and keys, applied by the C engine
    native: bool = False  # whether the C engine computes all heads in one call

    @torch.no_grad()
    def choose(
        self,
        x: Tensor,
        y: Tensor,
        keep: Tensor | None,
        rows: slice = slice(None),
    ) -> KeySets:
        """Choose metric, heavy hitters and clusters.

        x (Z, G, L, d) and y (Z, S, d) are the given rows of all.
        """
        metric = None
        if self.cross:
            metric = self._cross_metric(y, keep, rows)
        if self.native:
            return native.choose(x, y, self.sizes, keep, self.factor, metric)
        if metric is None:
            x_keep = None if keep is None else keep.repeat(1, x.shape[1])
            metric = KeyMetric.fit(x.flatten(1, 2), y, x_keep, keep)
        return choose_sets(y, metric, self.sizes, keep)

    def _cross_metric(self, y: Tensor, keep: Tensor | None, rows: slice) -> KeyMetric:
        """Return the metric for keys of another sequence, factor y (Z, S, d).

        It uses the moments of earlier queries, because queries of the call may lie in the future of each other. Without
        them queries are assumed to be as large as keys.
        """
        metric = KeyMetric.fit(None, y * self.factor, None, keep)
        if self.metric is None:
            return metric
        return metric._replace(
            tilt=self.metric.tilt[rows].to(y.dtype),
            root=self.metric.root[rows].to(y.dtype),
        )

    def attend(
        self,
        x: Tensor,
        y: Tensor,
        v: Tensor,
        sets: KeySets,
    ) -> Tensor:
        """Return the outputs (Z, G, L, dv)."""
        if self.native:
            return native.attend(x, y, v, sets, self.sizes, self.factor, self.cross)
        metric = sets.metric
        y = y - metric.shift
        block = x.shape[2] if self.cross else self.sizes.block
        level = cluster_levels(y.detach(), sets)
        u = key_weights(y, sets, level)
        members = one_hot(sets.cluster, sets.centres.shape[1], x.dtype)
        moments = key_moments(y, u, sets)
        sums = (members.mT @ moments).unsqueeze(1)
        clusters = summarize_clusters(sums, sets)
        V, N = self._far_clusters(members, v, u, block)
        queries = split_queries(x, block)  # (Z, N, G b, d)
        bias = cluster_biases(clusters, metric, level, N)
        logits = [shared_logits(queries, y, clusters.mu, bias, sets)]
        widths = [sets.heavy.shape[1], V.shape[2]]
        if not self.cross:
            logits.append(near_logits(queries, y, sets, block))
            widths.append(logits[1].shape[-1])
        weights = torch.cat(logits, -1).softmax(-1).split(widths, -1)
        means = torch.where(N > MIN_WEIGHT, V / N.clamp(min=MIN_WEIGHT), 0.0)
        out = _times_shared(weights[0], rows_at(v, sets.heavy)) + weights[1] @ means
        if not self.cross:
            out = out + weights[2] @ _windows(split_blocks(v, block))
        out = join_queries(out, *x.shape[1:3])
        if not self.sizes.first_order:
            return out
        slope = value_slopes(y, v, sets, members, clusters.mu.squeeze(1), level)
        share = join_queries(weights[1].sum(-1, keepdim=True), *x.shape[1:3])
        offsets = x - metric.tilt.unsqueeze(1)
        return out + share * (offsets @ slope.unsqueeze(1).mT)

    def _far_clusters(
        self,
        members: Tensor,
        v: Tensor,
        u: Tensor,
        block: int,
    ) -> tuple[Tensor, Tensor]:
        """Return V (Z, N, K, dv) and N (Z, N, K, 1) of the keys far from each block."""
        u = u.unsqueeze(-1)
        rows = torch.cat([v * u, u], -1)
        if self.cross:
            sums = (members.mT @ rows).unsqueeze(1)
        else:
            sums = far_sums(split_blocks(members, block).mT @ split_blocks(rows, block))
        return sums[..., :-1], sums[..., -1:]


def shared_logits(
    queries: Tensor,
    y: Tensor,
    mu: Tensor,
    cluster_bias: Tensor,
    sets: KeySets,
) -> Tensor:
    """Return the logits (Z, N, G b, n + K) of heavy hitters and clusters."""
    keys = torch.cat([rows_at(y, sets.heavy), mu.squeeze(1)], 1)
    missing = torch.where(sets.there, 0.0, MASKED).to(queries.dtype)
    missing = missing.unsqueeze(1).expand(-1, queries.shape[1], -1)
    bias = torch.cat([missing, cluster_bias], -1)
    return _times_shared(queries, keys.mT) + bias.unsqueeze(2)


def cluster_biases(clusters: Clusters, metric: KeyMetric, level: Tensor, N: Tensor) -> Tensor:
    """Return what the logits of clusters add to x.mu, (Z, N, K).

    e^(x.mu) is below the mean of e^(x.y), and the factor 1 + tau / 2 corrects that to second order.
    """
    tilt = (clusters.mu * metric.tilt.unsqueeze(1)).sum(-1)
    bias = level.unsqueeze(1) - tilt + torch.log1p(clusters.tau / 2)
    return bias + log_number(N).squeeze(-1)


def near_logits(
    queries: Tensor,
    y: Tensor,
    sets: KeySets,
    block: int,
) -> Tensor:
    """Return the logits (Z, N, G b, 3 b) of the keys of neighbouring blocks."""
    bias = torch.where(split_blocks(sets.pool, block), 0.0, MASKED).to(queries.dtype)
    keys = _windows(split_blocks(y, block))
    return queries @ keys.mT + _windows(bias.unsqueeze(-1), MASKED).mT


def key_weights(y: Tensor, sets: KeySets, level: Tensor) -> Tensor:
    """Return u_j = exp(w_j - level of its cluster) (Z, S), 0 outside the pool.

    level (Z, K).
    """
    log_weights = sets.metric.log_weights(y) - level.gather(1, sets.cluster)
    return log_weights.masked_fill(~sets.pool, -torch.inf).exp()


@torch.no_grad()
def cluster_levels(y: Tensor, sets: KeySets) -> Tensor:
    """Return the largest w of each cluster's keys (Z, K); 0 if it is empty."""
    w = sets.metric.log_weights(y).masked_fill(~sets.pool, -torch.inf)
    lowest = w.new_full(sets.centres.shape[:2], -torch.inf)
    highest = lowest.scatter_reduce(1, sets.cluster, w, "amax")
    return torch.where(highest.isinf(), 0.0, highest)


def value_slopes(
    y: Tensor,
    v: Tensor,
    sets: KeySets,
    members: Tensor,
    mu: Tensor,
    level: Tensor,
) -> Tensor:
    """Return C (Z, dv, d), the mean of v_j (y_j - mu of its cluster)^T.

    The first-order term of values is C (x - b). Weights are e^w; mu (Z, K, d).
    """
    log_weights = sets.metric.log_weights(y) - level.amax(1, keepdim=True)
    weights = torch.where(sets.pool, torch.exp(log_weights), 0.0)
    v = v * weights.unsqueeze(-1)
    covariance = v.mT @ y - (members.mT @ v).mT @ mu
    return covariance / weights.sum(1).clamp(min=MIN_WEIGHT)[:, None, None]


def _times_shared(t: Tensor, shared: Tensor) -> Tensor:
    """Multiply t (Z, N, r, k) by shared (Z, k, l), common to all blocks."""
    return (t.flatten(1, 2) @ shared).unflatten(1, t.shape[1:3])


def _windows(t: Tensor, beyond: float = 0.0) -> Tensor:
    """Concatenate each block (Z, N, b, .) with its neighbours: (Z, N, 3 b, .).

    `beyond` fills positions beyond the ends.
    """
    padded = F.pad(t, (0, 0, 0, 0, 1, 1), value=beyond)
    count = t.shape[1]
    return torch.cat([padded[:, i : i + count] for i in range(3)], 2)


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
