"""Causal near-far attention: some keys exactly, the others by clusters.

Queries before the position `exact_until` see all earlier keys exactly. Later queries of block t see block t - 1 and
block t up to themselves exactly. Of the keys up to block t - 2, some are heavy hitters and the others lie in clusters.
Each query scores the clustered keys in 8 bits (retrieval.py), retrieves those with the largest scores and sees them
exactly. It retrieves `open` keys. Beyond GROWTH_START tokens this number grows with the square root of the position of
the last renewal.
Retrieved keys leave their clusters, so that each key counts once. The logits of the remaining keys lie below theirs
(`cluster_remainder`).

The metric comes from the keys before the first renewal, relative to the means of their blocks. Heavy hitters and
centres come from the keys before the last renewal. Keys that follow join the nearest clusters.
A renewal happens whenever the sequence has grown by about a half, at positions that do not depend on its contents.
Outputs therefore depend only on positions and the past. The method was derived for this project.

Notation: Z = batch x key heads, G query heads of a group, L queries, S keys y, d, dv; blocks of b tokens, n heavy
hitters, K clusters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from crt_exp.attention.checks import check_result, transformed
from crt_exp.nearfar import native
from crt_exp.nearfar.choice import (
    CENTRE_SAMPLES,
    MASKED,
    MIN_RENEWAL,
    RENEWAL_DIVISOR,
    SAMPLE_FACTOR,
    Clusters,
    KeyMetric,
    Sizes,
    blocks,
    centres_of,
    exact_outputs,
    from_blocks,
    largest,
    mean_of,
    moments,
    nearest,
    one_hot,
    rows_at,
    scores,
    sum_clusters,
    to_blocks,
    zero_masked,
)
from crt_exp.nearfar.retrieval import cluster_remainder, retrieved_positions

NUMBERS = 2**24  # elements of the keys that the queries of a chunk retrieve


def first_renewal(sizes: Sizes) -> int:
    """Return the position of the first renewal, a multiple of the block.

    Attention is exact before it.
    """
    return max(_round_up(sizes.exact_until, sizes.block), 2 * sizes.block)


def renewals(sizes: Sizes, length: int) -> list[int]:
    """Return the positions of renewals, up to the first one that is at least `length`.

    They are multiples of the block.
    """
    positions = [first_renewal(sizes)]
    while positions[-1] < length:
        interval = max(MIN_RENEWAL, positions[-1] // RENEWAL_DIVISOR)
        positions.append(positions[-1] + _round_up(interval, sizes.block))
    return positions


def _round_up(tokens: int, block: int) -> int:
    """Round up to whole blocks."""
    return -(-tokens // block) * block


def options_of(sizes: Sizes, keys: int) -> dict[str, int]:
    """Return the sizes for the C engine with at most `keys` keys (more than a block)."""
    return {
        "heavy": min(sizes.heavy, keys),
        "clusters": min(sizes.cells, keys),
        "open": min(sizes.opens(keys), keys),
        "open_first": min(sizes.open, keys),
        "block": sizes.block,
        "first_renewal": first_renewal(sizes),
    }


def metric_of(y: Tensor, keep: Tensor | None, sizes: Sizes, factor: float = 1.0) -> KeyMetric:
    """Return the metric of the keys that are far at the first renewal.

    The keys are factor y (Z, S, d), each relative to the mean of its block, because rotary embeddings rotate the keys
    of a block alike. Relative to one mean of all keys, positions would dominate the moments and define the clusters.
    The norm of the second moments root root^T is set to 1. |x root|^2 tau is then the variance of the logits of a query
    x over a cluster that is shaped like the keys of a block.
    """
    far = first_renewal(sizes) - sizes.block
    y = y[:, :far] * factor
    if keep is not None:
        keep = keep[:, :far]
    metric = KeyMetric.of(subtract_block_means(y, keep, sizes.block), y, keep, keep)
    size = torch.linalg.matrix_norm(metric.root @ metric.root.mT, keepdim=True)
    return metric._replace(tilt=torch.zeros_like(metric.shift), root=metric.root * size.rsqrt())


def subtract_block_means(y: Tensor, keep: Tensor | None, block: int) -> Tensor:
    """Subtract from keys (Z, S, d) the mean of their block; S is in whole blocks."""
    rows = blocks(y, block).flatten(0, 1)
    if keep is not None:
        keep = blocks(keep, block).flatten(0, 1)
    mean, _ = mean_of(rows, keep)
    return zero_masked(rows - mean, keep).view(y.shape)


class ChosenEpochs(NamedTuple):
    """Metric and epochs of the queries.

    Empty if all queries see all earlier keys. The C engine needs only the metric.
    """

    metric: KeyMetric | None = None
    epochs: tuple["Epoch", ...] | list["Epoch"] = ()


class Epoch(NamedTuple):
    """State of the past between two renewals: what queries know of their far keys.

    Heavy hitters and centres stay, and keys that become far join clusters (`advance`). Choices carry no gradient.
    """

    start: int  # position of the renewal
    stop: int  # position of the next renewal
    metric: KeyMetric
    heavy: Tensor  # (Z, n): positions
    there: Tensor  # (Z, n): False for missing ones
    centres: Tensor  # (Z, K, d), in the space of z
    member: Tensor  # (Z, far): which keys are in clusters
    cluster: Tensor  # (Z, far): cluster of each key
    sums: Tensor  # (Z, K, dv + d + 2): of `cluster_rows` over the first `summed` keys; or 0
    summed: int = 0

    @classmethod
    @torch.no_grad()
    def of(
        cls, y: Tensor, keep: Tensor, sizes: Sizes, start: int, stop: int, metric: KeyMetric
    ) -> "Epoch":
        """Build the state at position `start` from the keys before its near window.

        y (Z, .., d), keep (Z, ..). Centres come from a sample of keys: CENTRE_SAMPLES to 2 CENTRE_SAMPLES per cluster.
        """
        far = start - sizes.block
        keep = keep[:, :far]
        z = metric.measured(y[:, :far], keep)
        score = scores(zero_masked(y[:, :far] - metric.shift, keep), metric.root, 0.0, keep)
        highest, heavy = largest(score, min(sizes.heavy, far))
        member = keep.scatter(1, heavy, False)
        at = sample(far, CENTRE_SAMPLES * sizes.cells, y.device)
        log_u = torch.where(member[:, at], 0.0, -torch.inf).to(z.dtype)
        centres = centres_of(z[:, at], log_u, min(sizes.cells, len(at)))
        return cls(
            start=start,
            stop=stop,
            metric=metric,
            heavy=heavy,
            there=highest > -torch.inf,
            centres=centres,
            member=member,
            cluster=nearest(z, centres),
            sums=z.new_zeros(()),
        )

    def advance(
        self, y: Tensor, v: Tensor, keep: Tensor, block: int, first: int, last: int
    ) -> tuple["Epoch", Tensor]:
        """Return the state for block `last` and the sums for blocks `first` to `last`.

        In the new state the keys before block `last - 1` are far. The sums (Z, N, K, dv + d + 2) are over the keys that
        are far from each block.
        """
        start = (first - 1) * block
        stop = (last - 1) * block
        with torch.no_grad():
            added = slice(self.member.shape[1], stop)
            member = torch.cat([self.member, keep[:, added]], 1)
            z = self.metric.measured(y[:, added], keep[:, added])
            cluster = torch.cat([self.cluster, nearest(z, self.centres)], 1)
        unsummed = slice(self.summed, stop)
        rows = cluster_rows(
            y[:, unsummed], v[:, unsummed], member[:, unsummed], cluster[:, unsummed], self
        )
        members = one_hot(cluster[:, unsummed], self.centres.shape[1], rows.dtype)
        before = start - self.summed  # rows that are far from block `first`
        sums = (self.sums + members[:, :before].mT @ rows[:, :before]).unsqueeze(1)
        if stop > start:
            later = blocks(members[:, before:], block).mT @ blocks(rows[:, before:], block)
            sums = torch.cat([sums, sums + later.cumsum(1)], 1)
        epoch = self._replace(member=member, cluster=cluster, sums=sums[:, -1], summed=stop)
        return epoch, sums

    def select(self, heads: Tensor) -> "Epoch":
        """Return the state of some heads (of batch x key heads)."""
        return tree_map(lambda t: t[heads] if isinstance(t, Tensor) else t, self)


def epochs_of(
    y: Tensor,
    keep: Tensor | None,
    sizes: Sizes,
    first: int,
    metric: KeyMetric,
    known: Epoch | None = None,
) -> list[Epoch]:
    """Return the epochs of queries from position `first` on.

    The queries are the last ones of keys y (Z, S, d). `known` is reused if it is one of the epochs.
    """
    edges = renewals(sizes, y.shape[1])
    keep = unmasked_keys(y, keep)
    epochs = []
    for start, stop in zip(edges, edges[1:]):
        if stop <= first:
            continue
        if known is not None and known.start == start:
            epochs.append(known)
        else:
            epochs.append(Epoch.of(y, keep, sizes, start, stop, metric))
    return epochs


@dataclass(frozen=True)
class Causal:
    """Attention of the last tokens of a sequence to their past."""

    sizes: Sizes
    factor: float = 1.0  # of queries and keys, applied by the C engine
    native: bool = False  # whether the C engine computes all heads in one call

    @torch.no_grad()
    def choose(self, x: Tensor, y: Tensor, keep: Tensor | None, rows: slice) -> ChosenEpochs:
        """Return the epochs for queries (Z, G, L, d), the last ones of keys (Z, S, d)."""
        norms = torch.linalg.vector_norm(x, dim=(1, 2, 3))
        check_result(norms + torch.linalg.vector_norm(y, dim=(1, 2)))
        if first_renewal(self.sizes) >= y.shape[1]:
            return ChosenEpochs()
        metric = metric_of(y, keep, self.sizes, self.factor)
        if self.native:
            return ChosenEpochs(metric, [])
        first = y.shape[1] - x.shape[2]
        return ChosenEpochs(metric, epochs_of(y, keep, self.sizes, first, metric))

    def attend(
        self, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, chosen: ChosenEpochs
    ) -> Tensor:
        """Return the outputs (Z, G, L, dv) of the last queries."""
        if not self.native:
            out, _ = attend_epochs(chosen.epochs, x, y, v, keep, self.sizes)
            return out
        shift = None
        root = None
        if chosen.metric is not None:
            shift = chosen.metric.shift
            root = chosen.metric.root
        sizes = options_of(self.sizes, y.shape[1])
        inputs = native.CausalInputs(keep, shift, root, sizes, self.factor)
        return attend_in_c(x, y, v, inputs)


def attend_in_c(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    inputs: native.CausalInputs,
    memory: native.PastMemory | None = None,
) -> Tensor:
    """Return the outputs (Z, G, L, dv) of the C engine.

    Queries are the last ones of keys (Z, S, d). `memory` is that of decoding, which is updated.
    """
    L = x.shape[2]
    S = y.shape[1]
    until = inputs.sizes["first_renewal"]
    exact = min(max(0, until - S + L), L)  # number of queries that see all earlier keys exactly
    parts = []
    if exact:
        keys = y[:, : min(until, S)]
        values = v[:, : min(until, S)]
        parts.append(exact_outputs(x[:, :, :exact], keys, values, inputs.keep, inputs.factor**2))
    if exact < L:
        parts.append(native.causal(x[:, :, exact:], y, v, inputs, memory))
    return concatenate(parts, 2)


def attend_epochs(
    epochs: Sequence[Epoch], x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, sizes: Sizes
) -> tuple[Tensor, Epoch | None]:
    """Return the outputs in PyTorch, and the state after the last query."""
    S = y.shape[1]
    until = min(first_renewal(sizes), S)
    first = S - x.shape[2]
    state = None
    parts = []
    if first < until:
        parts.append(exact_outputs(x[:, :, : until - first], y[:, :until], v[:, :until], keep))
    for epoch in epochs:
        stop = min(S, epoch.stop)
        queries = x[:, :, max(first, epoch.start) - first : stop - first]
        out, state = attend_epoch(epoch, queries, y[:, :stop], v[:, :stop], keep, sizes)
        parts.append(out)
    return concatenate(parts, 2), state


def attend_epoch(
    epoch: Epoch, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, sizes: Sizes
) -> tuple[Tensor, Epoch]:
    """Return the outputs of queries of one epoch, and its state after them.

    x (Z, G, l, d) are the last ones of keys (Z, S, d).
    """
    _, G, L, _ = x.shape
    S = y.shape[1]
    block = sizes.block
    keep = unmasked_keys(y, keep)
    first = (S - L) // block  # block of the first query
    last = (S - 1) // block
    epoch, sums = epoch.advance(y, v, keep, block, first, last)
    far, clusters = summed_clusters(sums, v.shape[-1], epoch)
    offset = S - L - first * block  # position of the first query within its block
    if first < last:
        lead = offset  # padding, so that the queries begin a block
        q = to_blocks(F.pad(x, (0, 0, lead, 0)), block)
    else:
        lead = 0
        q = to_blocks(x, L)
    start = offset - lead
    in_block = torch.arange(start, start + q.shape[2] // G, device=x.device).repeat(G)
    past = Past(y, v, keep, epoch, far, clusters, first)
    out = chunked_outputs(past, q, sizes, in_block)
    return from_blocks(out, G, lead + L)[:, :, lead:], epoch


def concatenate(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def unmasked_keys(y: Tensor, keep: Tensor | None) -> Tensor:
    """Return which of the keys (Z, S, d) are unmasked, (Z, S)."""
    if keep is None:
        return torch.ones(y.shape[:2], dtype=torch.bool, device=y.device)
    return keep[:, : y.shape[1]]


def cluster_rows(y: Tensor, v: Tensor, member: Tensor, cluster: Tensor, epoch: Epoch) -> Tensor:
    """Return values and moments of keys (Z, m, d), (Z, m, dv + d + 2).

    Rows are 0 for keys that are not in `member` (Z, m).
    """
    y = torch.where(member.unsqueeze(-1), y - epoch.metric.shift, 0.0)
    u = member.to(y.dtype)  # equal weights: the mean query is not known
    key_moments = moments(y, u, epoch.metric, cluster, epoch.centres)
    return torch.cat([v * u.unsqueeze(-1), key_moments], -1)


def summed_clusters(sums: Tensor, dv: int, epoch: Epoch) -> tuple[Tensor, Clusters]:
    """Return [V, N] and the clusters.

    sums (Z, N, K, dv + d + 2) are those of `cluster_rows` over the keys.
    """
    metric = epoch.metric
    far = torch.cat([sums[..., :dv], sums[..., -1:]], -1)
    level = far.new_zeros(1, 1)
    clusters = sum_clusters(sums[..., dv:], metric, epoch.centres, level, mass=False)
    return far, clusters._replace(mu=clusters.mu + metric.shift.unsqueeze(1))


class Past(NamedTuple):
    """Keys that the queries of some blocks see."""

    y: Tensor  # (Z, S, d)
    v: Tensor  # (Z, S, dv)
    keep: Tensor  # (Z, S)
    epoch: Epoch  # heavy hitters, members of clusters
    far: Tensor  # (Z, N, K, dv + 1)
    clusters: Clusters  # (Z, N, K, .)
    first: int  # the first block


def sample(keys: int, wanted: int, device: torch.device) -> Tensor:
    """Return positions of a sample of `wanted` to twice as many keys.

    Each run of consecutive keys contributes one, at a varying offset.
    """
    step = max(1, keys // wanted)
    run = torch.arange(keys // step, device=device)
    return run * step + run * SAMPLE_FACTOR % step


def chunked_outputs(past: Past, q: Tensor, sizes: Sizes, in_block: Tensor) -> Tensor:
    """Return the outputs (Z, N, r, dv) of queries (Z, N, r, d), some blocks at a time.

    The backward pass recomputes them. in_block (r,): positions of the queries within a block.
    """
    open = sizes.opens(past.epoch.start)
    retrieved = min(open, past.v.shape[1])
    columns = q.shape[-1] + past.v.shape[-1]
    numbers_of_block = q[:, 0, :, 0].numel() * retrieved * columns
    size = max(1, NUMBERS // max(1, numbers_of_block))
    by_block = (q, past.far, *past.clusters)
    recompute = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    recompute = recompute and not transformed(*by_block)
    results = []
    for start in range(0, q.shape[1], size):
        chunk = [t[:, start : start + size] for t in by_block]
        first = past.first + start
        numbers = torch.arange(first, first + chunk[0].shape[1], device=q.device)
        positions = chosen_keys(past, chunk[0], numbers, sizes.block, open)
        outputs = partial(retrieved_outputs, past, numbers, in_block, sizes.block, positions)
        if recompute:
            results.append(checkpoint(outputs, *chunk, use_reentrant=False))
        else:
            results.append(outputs(*chunk))
    return torch.cat(results, 1)


@torch.no_grad()
def chosen_keys(past: Past, q: Tensor, numbers: Tensor, block: int, open: int) -> Tensor:
    """Return the positions (Z, m, r, o) of retrieved keys, -1 for none.

    q (Z, m, r, d) belongs to the blocks of these numbers (m,).
    """
    far = (numbers - 1) * block  # keys of each block
    member = past.epoch.member
    position = torch.arange(member.shape[1], device=q.device)
    members = member[:, None, None] & (position < far[:, None, None])
    return retrieved_positions(past.y[:, : len(position)], members, q, open)


def near_logits(
    past: Past, q: Tensor, numbers: Tensor, in_block: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    """Return logits (Z, m, r, 2 b) and values (Z, m, 2 b, dv) of the near keys."""
    blocks_of_q = numbers.unsqueeze(1)
    near = (blocks_of_q - 1) * block + torch.arange(2 * block, device=q.device)  # (m, 2 b)
    at = near.clamp(max=past.y.shape[1] - 1)
    is_past = near[:, None] <= (blocks_of_q * block + in_block).unsqueeze(-1)
    visible = is_past & past.keep[:, at].unsqueeze(2)
    logits = (q @ past.y[:, at].mT).masked_fill(~visible, MASKED)
    return logits, past.v[:, at]


def heavy_logits(past: Past, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits (Z, m, r, n) and values (Z, 1, n, dv) of the heavy hitters."""
    epoch = past.epoch
    keys = rows_at(past.y, epoch.heavy).unsqueeze(1)
    logits = (q @ keys.mT).masked_fill(~epoch.there[:, None, None], MASKED)
    return logits, rows_at(past.v, epoch.heavy).unsqueeze(1)


def retrieved_outputs(
    past: Past,
    numbers: Tensor,
    in_block: Tensor,
    block: int,
    positions: Tensor,
    q: Tensor,
    far: Tensor,
    *clusters: Tensor,
) -> Tensor:
    """Return the outputs of queries (Z, m, r, d) of the blocks of these numbers (m,).

    It is a softmax over near keys, heavy hitters, retrieved keys and the rest of the clusters (Z, m, K, .).
    """
    clusters = Clusters(*clusters)
    single_keys = [near_logits(past, q, numbers, in_block, block)]
    if past.epoch.heavy.shape[1]:
        single_keys.append(heavy_logits(past, q))
    there = positions >= 0
    positions = positions.clamp(min=0)
    retrieved = (rows_at(past.y, positions) @ q.unsqueeze(-1)).squeeze(-1)
    retrieved = retrieved.masked_fill(~there, MASKED)  # (Z, m, r, o)
    cluster = past.epoch.cluster.gather(1, positions.flatten(1)).view(positions.shape)
    with torch.no_grad():  # assumes that a cluster is shaped like all keys
        variance = (q @ past.epoch.metric.root.unsqueeze(1)).square().sum(-1, keepdim=True)
        sd = (variance * clusters.spread.unsqueeze(-2)).sqrt()
    remaining, log_weight = cluster_remainder(
        q @ clusters.mu.mT,
        sd,
        far[..., -1].unsqueeze(-2),
        retrieved.masked_fill(~there, torch.inf),
        cluster,
    )
    logits = [logit for logit, _ in single_keys]
    top = torch.cat([*logits, retrieved], -1).amax(-1, keepdim=True).detach()
    weights = [torch.exp(logit - top) for logit in logits]
    retrieved_weight = torch.exp(retrieved - top)
    cluster_weight = torch.exp(log_weight - top)
    total = 0
    for weight in (*weights, retrieved_weight, cluster_weight * remaining):
        total = total + weight.sum(-1, keepdim=True)
    # weight of a retrieved key in addition to that in the mean of its cluster
    excess = retrieved_weight - cluster_weight.gather(-1, cluster).masked_fill(~there, 0.0)
    out = 0
    for weight, (_, values) in zip(weights, single_keys):
        out = out + weight @ values
    out = out + cluster_weight @ far[..., :-1]
    out = out + (excess.unsqueeze(-2) @ rows_at(past.v, positions)).squeeze(-2)
    return out / total
