"""Causal near-far attention: some keys exactly, the others by clusters.

Queries before the position `exact_until` see all earlier keys exactly. Later queries of block t see block t - 1 and
block t up to themselves exactly. Of the keys up to block t - 2, some are heavy hitters and the others lie in clusters.
Each query scores the clustered keys in 8 bits (retrieval.py), retrieves those with the largest scores and sees them
exactly. It retrieves `open` keys. Beyond GROWTH_START tokens this number grows with the square root of the position of
the last renewal.
Retrieved keys leave their clusters, so that each key counts once. The logits of the remaining keys lie below theirs
(`cluster_remainder`). reference.py has the same sums for all pairs of queries and keys.

The metric comes from the keys before the first renewal, relative to the means of their blocks. Heavy hitters and
centres come from the keys before the last renewal. Keys that follow join the nearest clusters.
A renewal happens whenever the sequence has grown by about a half, at positions that do not depend on its contents.
Outputs therefore depend only on positions and the past. The method was derived for this project.

Notation: Z = batch x key heads, G query heads of a group, L queries, S keys y, d, dv; blocks of b tokens, n heavy
hitters, K clusters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from crt_exp.attention.checks import check_result, transformed
from crt_exp.nearfar import native
from crt_exp.nearfar.choice import (
    CENTRE_SAMPLES,
    MASKED,
    MIN_RENEWAL,
    RENEWAL_DIVISOR,
    SAMPLE_FACTOR,
    KeyMetric,
    KeySets,
    Sizes,
    choose_sets,
    exact_attention,
    join_queries,
    key_moments,
    masked_mean,
    nearest_centre,
    one_hot,
    round_up,
    rows_at,
    split_blocks,
    split_queries,
    summarize_clusters,
    unmasked_keys,
    zero_masked,
)
from crt_exp.nearfar.retrieval import cluster_remainder, retrieved_positions

CHUNK_NUMBERS = 2**24  # elements of the keys that the queries of a chunk retrieve


def renewals(sizes: Sizes, length: int) -> list[int]:
    """Return the positions of renewals, up to the first one that is at least `length`.

    They are multiples of the block.

    >>> renewals(Sizes(block=32, exact_until=512), 1000)
    [512, 768, 1152]
    """
    positions = [sizes.first_renewal]
    while positions[-1] < length:
        interval = max(MIN_RENEWAL, positions[-1] // RENEWAL_DIVISOR)
        positions.append(positions[-1] + round_up(interval, sizes.block))
    return positions


# ---- metric and state of the past


def fit_metric(y: Tensor, keep: Tensor | None, sizes: Sizes, factor: float = 1.0) -> KeyMetric:
    """Return the metric of the keys that are far at the first renewal.

    The keys are factor y (Z, S, d), each relative to the mean of its block, because rotary embeddings rotate the keys
    of a block alike. Relative to one mean of all keys, positions would dominate the moments and define the clusters.
    The norm of the second moments root root^T is set to 1. |x root|^2 tau is then the variance of the logits of a query
    x over a cluster that is shaped like the keys of a block.
    """
    far = sizes.first_renewal - sizes.block
    y = y[:, :far] * factor
    if keep is not None:
        keep = keep[:, :far]
    metric = KeyMetric.fit(subtract_block_means(y, keep, sizes.block), y, keep, keep)
    size = torch.linalg.matrix_norm(metric.root @ metric.root.mT, keepdim=True)
    root = metric.root * size.rsqrt()
    return metric._replace(tilt=torch.zeros_like(metric.shift), root=root)


def subtract_block_means(y: Tensor, keep: Tensor | None, block: int) -> Tensor:
    """Subtract from keys (Z, S, d) the mean of their block; S is in whole blocks."""
    rows = split_blocks(y, block).flatten(0, 1)
    if keep is not None:
        keep = split_blocks(keep, block).flatten(0, 1)
    return zero_masked(rows - masked_mean(rows, keep), keep).view(y.shape)


def sample_positions(keys: int, wanted: int, device: torch.device) -> Tensor:
    """Return positions of a sample of `wanted` to twice as many keys.

    Each run of consecutive keys contributes one, at a varying offset.
    """
    step = max(1, keys // wanted)
    run = torch.arange(keys // step, device=device)
    return run * step + run * SAMPLE_FACTOR % step


class Epoch(NamedTuple):
    """State of the past between two renewals: what queries know of their far keys.

    Heavy hitters and centres stay, and keys that become far join clusters (`advance`). Choices carry no gradient.
    """

    start: int  # position of the renewal
    stop: int  # position of the next renewal
    sets: KeySets  # of the keys that are far so far
    sums: Tensor  # (Z, K, dv + d + 2): of `cluster_rows` over the first `summed` keys; or 0
    summed: int = 0

    def advance(
        self,
        y: Tensor,
        v: Tensor,
        keep: Tensor,
        block: int,
        first: int,
        last: int,
    ) -> tuple["Epoch", Tensor]:
        """Return the state for block `last` and the sums for blocks `first` to `last`.

        In the new state the keys before block `last - 1` are far. The sums (Z, N, K, dv + d + 2) are over the keys that
        are far from each block.
        """
        start = (first - 1) * block
        stop = (last - 1) * block
        sets = self._assign_keys(y[:, :stop], keep[:, :stop])
        new = slice(self.summed, stop)
        unsummed = sets._replace(pool=sets.pool[:, new], cluster=sets.cluster[:, new])
        rows = cluster_rows(y[:, new], v[:, new], unsummed)
        members = one_hot(unsummed.cluster, sets.centres.shape[1], rows.dtype)
        before = start - self.summed  # rows that are far from block `first`
        sums = (self.sums + members[:, :before].mT @ rows[:, :before]).unsqueeze(1)
        if stop > start:
            later_members = split_blocks(members[:, before:], block)
            later = later_members.mT @ split_blocks(rows[:, before:], block)
            sums = torch.cat([sums, sums + later.cumsum(1)], 1)
        epoch = self._replace(sets=sets, sums=sums[:, -1], summed=stop)
        return epoch, sums

    @torch.no_grad()
    def _assign_keys(self, y: Tensor, keep: Tensor) -> KeySets:
        """Return the sets after all keys (Z, S, d) have become far."""
        sets = self.sets
        new = slice(sets.pool.shape[1], y.shape[1])
        z = sets.metric.transform(y[:, new], keep[:, new])
        return sets._replace(
            pool=torch.cat([sets.pool, keep[:, new]], 1),
            cluster=torch.cat([sets.cluster, nearest_centre(z, sets.centres)], 1),
        )


def list_epochs(
    y: Tensor,
    keep: Tensor | None,
    sizes: Sizes,
    first: int,
    metric: KeyMetric,
    current: Epoch | None = None,
) -> list[Epoch]:
    """Return the epochs of queries from position `first` on, at the positions of their renewals.

    The queries are the last ones of keys y (Z, S, d). Sets are chosen from the keys before the near window of the
    renewal, and centres from CENTRE_SAMPLES to 2 CENTRE_SAMPLES keys per cluster. `current` is reused if it is one of
    the epochs.
    """
    edges = renewals(sizes, y.shape[1])
    keep = unmasked_keys(y, keep)
    epochs = []
    for start, stop in zip(edges, edges[1:]):
        if stop <= first:
            continue
        if current is not None and current.start == start:
            epochs.append(current)
            continue
        far = start - sizes.block
        sample = sample_positions(far, CENTRE_SAMPLES * sizes.cells, y.device)
        sets = choose_sets(y[:, :far], metric, sizes, keep[:, :far], sample)
        epochs.append(Epoch(start, stop, sets, sums=y.new_zeros(())))
    return epochs


class ChosenEpochs(NamedTuple):
    """Mask of the keys, metric and epochs of the queries.

    Without a metric all queries see all earlier keys. The C engine needs only the metric.
    """

    keep: Tensor | None
    metric: KeyMetric | None = None
    epochs: Sequence[Epoch] = ()


@dataclass(frozen=True)
class Causal:
    """Attention of the last tokens of a sequence to their past."""

    sizes: Sizes
    factor: float = 1.0  # of queries and keys, applied by the C engine
    native: bool = False  # whether the C engine computes all heads in one call

    @torch.no_grad()
    def choose(
        self,
        x: Tensor,
        y: Tensor,
        keep: Tensor | None,
        rows: slice = slice(None),
    ) -> ChosenEpochs:
        """Return the epochs for queries (Z, G, L, d), the last ones of keys (Z, S, d)."""
        norms = torch.linalg.vector_norm(x, dim=(1, 2, 3))
        check_result(norms + torch.linalg.vector_norm(y, dim=(1, 2)))
        if self.sizes.first_renewal >= y.shape[1]:
            return ChosenEpochs(keep)
        metric = fit_metric(y, keep, self.sizes, self.factor)
        if self.native:
            return ChosenEpochs(keep, metric)
        first = y.shape[1] - x.shape[2]
        return ChosenEpochs(keep, metric, list_epochs(y, keep, self.sizes, first, metric))

    def attend(
        self,
        x: Tensor,
        y: Tensor,
        v: Tensor,
        chosen: ChosenEpochs,
    ) -> Tensor:
        """Return the outputs (Z, G, L, dv) of the last queries."""

        def attend_far(x: Tensor) -> Tensor:
            assert chosen.metric is not None
            if not self.native:
                return attend_epochs(chosen.epochs, x, y, v, chosen.keep, self.sizes)[0]
            past = native.PastMemory(chosen.metric, y.shape[1])
            fields = native.causal_fields(x, y, v, chosen.keep, self.sizes, past, self.factor)
            return native.causal(x, y, v, fields)

        return attend_past(attend_far, x, y, v, chosen.keep, self.sizes, self.factor)


def attend_past(
    attend_far: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    v: Tensor,
    keep: Tensor | None,
    sizes: Sizes,
    factor: float = 1.0,
) -> Tensor:
    """Return the outputs (Z, G, L, dv) of queries factor x, the last ones of keys factor y (Z, S, d).

    Queries before the first renewal see all earlier keys. `attend_far` computes the others.
    """
    L = x.shape[2]
    until = min(sizes.first_renewal, y.shape[1])
    exact = max(0, until - y.shape[1] + L)  # number of queries before the first renewal
    parts = []
    if exact:
        mask = None if keep is None else keep[:, :until]
        keys = y[:, None, :until]
        values = v[:, None, :until]
        parts.append(exact_attention(x[:, :, :exact], keys, values, True, mask, factor**2))
    if exact < L:
        parts.append(attend_far(x[:, :, exact:]))
    return join_parts(parts, 2)


def join_parts(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenate parts, without a copy of a single one."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim)


# ---- attention in PyTorch


def attend_epochs(
    epochs: Sequence[Epoch],
    x: Tensor,
    y: Tensor,
    v: Tensor,
    keep: Tensor | None,
    sizes: Sizes,
) -> tuple[Tensor, Epoch]:
    """Return the outputs of queries of these epochs in PyTorch, and the state after the last query.

    There is at least one epoch.
    """
    S = y.shape[1]
    first = S - x.shape[2]
    parts = []
    for epoch in epochs:
        stop = min(S, epoch.stop)
        queries = x[:, :, max(first, epoch.start) - first : stop - first]
        out, state = attend_epoch(epoch, queries, y[:, :stop], v[:, :stop], keep, sizes)
        parts.append(out)
    return join_parts(parts, 2), state


def attend_epoch(
    epoch: Epoch,
    x: Tensor,
    y: Tensor,
    v: Tensor,
    keep: Tensor | None,
    sizes: Sizes,
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
    start = S - L - first * block  # position of the first query within its block
    lead = 0
    if first < last:
        lead = start  # padding, so that the queries begin a block
        q = split_queries(F.pad(x, (0, 0, lead, 0)), block)
    else:
        q = split_queries(x, L)
    in_block = torch.arange(start - lead, start - lead + q.shape[2] // G, device=x.device)
    number = torch.arange(first, first + q.shape[1], device=x.device)
    far, mu, tau = split_sums(sums, v.shape[-1], epoch.sets)
    queries = QueryBlocks(q, number.unsqueeze(0), far, mu, tau)
    past = Past(y, v, keep, epoch.sets, in_block.repeat(G))
    out = attend_blocks(past, queries, sizes, epoch.start)
    return join_queries(out, G, lead + L)[:, :, lead:], epoch


def cluster_rows(y: Tensor, v: Tensor, sets: KeySets) -> Tensor:
    """Return values and moments of keys, (Z, S, dv + d + 2).

    Rows are 0 for keys outside clusters.
    """
    shifted = zero_masked(y - sets.metric.shift, sets.pool)
    u = sets.pool.to(y.dtype)  # equal weights: the mean query is not known
    return torch.cat([v * u.unsqueeze(-1), key_moments(shifted, u, sets)], -1)


def split_sums(sums: Tensor, dv: int, sets: KeySets) -> tuple[Tensor, Tensor, Tensor]:
    """Return [V, N], and means and variances of the clusters.

    sums (Z, N, K, dv + d + 2) are those of `cluster_rows` over the keys.
    """
    far = torch.cat([sums[..., :dv], sums[..., -1:]], -1)
    mu, tau = summarize_clusters(sums[..., dv:], sets)
    return far, mu + sets.metric.shift.unsqueeze(1), tau


class Past(NamedTuple):
    """Keys that queries see, and the sets of the far ones."""

    y: Tensor  # (Z, S, d)
    v: Tensor  # (Z, S, dv)
    keep: Tensor  # (Z, S)
    sets: KeySets
    in_block: Tensor  # (r,): positions of the queries within a block


class QueryBlocks(NamedTuple):
    """Queries of consecutive blocks, with the clusters of the keys far from each block."""

    q: Tensor  # (Z, m, r, d)
    number: Tensor  # (1, m): numbers of the blocks
    far: Tensor  # (Z, m, K, dv + 1): [V, N]
    mu: Tensor  # (Z, m, K, d)
    tau: Tensor  # (Z, m, K)


def attend_blocks(past: Past, queries: QueryBlocks, sizes: Sizes, renewal: int) -> Tensor:
    """Return the outputs (Z, N, r, dv), some blocks at a time.

    The backward pass recomputes them. renewal: position of the last renewal.
    """
    count = sizes.retrieval_count(renewal)
    retrieved = min(count, past.v.shape[1])
    columns = queries.q.shape[-1] + past.v.shape[-1]
    queries_of_block = queries.q[:, 0, :, 0].numel()
    size = max(1, CHUNK_NUMBERS // max(1, queries_of_block * retrieved * columns))
    recompute = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    recompute = recompute and not transformed(queries.q, queries.far, queries.mu, queries.tau)
    parts = []
    for tensors in zip(*(t.split(size, 1) for t in queries)):
        chunk = QueryBlocks(*tensors)
        positions = retrieve_keys(past, chunk, sizes.block, count)
        inputs = (past, chunk, positions, sizes.block)
        if recompute:
            parts.append(checkpoint(attend_queries, *inputs, use_reentrant=False))
        else:
            parts.append(attend_queries(*inputs))
    return torch.cat(parts, 1)


@torch.no_grad()
def retrieve_keys(past: Past, queries: QueryBlocks, block: int, count: int) -> Tensor:
    """Return the positions (Z, m, r, o) of retrieved keys, -1 for none."""
    far = (queries.number - 1) * block  # keys of each block
    pool = past.sets.pool
    position = torch.arange(pool.shape[1], device=pool.device)
    members = pool[:, None, None] & (position < far[:, :, None, None])
    return retrieved_positions(past.y[:, : len(position)], members, queries.q, count)


def near_logits(past: Past, queries: QueryBlocks, block: int) -> tuple[Tensor, Tensor]:
    """Return logits (Z, m, r, 2 b) and values (Z, m, 2 b, dv) of the near keys."""
    number = queries.number.mT
    window = torch.arange(2 * block, device=number.device)
    near = (number - 1) * block + window  # (m, 2 b)
    position = number * block + past.in_block  # (m, r)
    is_past = near.unsqueeze(1) <= position.unsqueeze(-1)
    index = near.clamp(max=past.y.shape[1] - 1)
    visible = is_past & past.keep[:, index].unsqueeze(2)
    logits = (queries.q @ past.y[:, index].mT).masked_fill(~visible, MASKED)
    return logits, past.v[:, index]


def heavy_logits(past: Past, queries: QueryBlocks) -> tuple[Tensor, Tensor]:
    """Return logits (Z, m, r, n) and values (Z, 1, n, dv) of the heavy hitters."""
    heavy = past.sets.heavy
    missing = ~past.sets.there[:, None, None]
    keys = rows_at(past.y, heavy).unsqueeze(1)
    logits = (queries.q @ keys.mT).masked_fill(missing, MASKED)
    return logits, rows_at(past.v, heavy).unsqueeze(1)


def attend_queries(past: Past, queries: QueryBlocks, positions: Tensor, block: int) -> Tensor:
    """Return the outputs (Z, m, r, dv) of queries with retrieved keys (Z, m, r, o).

    It is a softmax over near keys, heavy hitters, retrieved keys and the rest of the clusters.
    """
    q = queries.q
    single_keys = [near_logits(past, queries, block), heavy_logits(past, queries)]
    missing = positions < 0
    positions = positions.clamp(min=0)
    retrieved = (rows_at(past.y, positions) @ q.unsqueeze(-1)).squeeze(-1)
    retrieved = retrieved.masked_fill(missing, MASKED)  # (Z, m, r, o)
    cluster = past.sets.cluster.gather(1, positions.flatten(1)).view(positions.shape)
    with torch.no_grad():  # assumes that a cluster is shaped like all keys
        variance = (q @ past.sets.metric.root.unsqueeze(1)).square().sum(-1, keepdim=True)
        sd = (variance * queries.tau.unsqueeze(-2)).sqrt()
    remaining, log_weight = cluster_remainder(
        mu=q @ queries.mu.mT,
        sd=sd,
        number=queries.far[..., -1].unsqueeze(-2),
        retrieved=retrieved.masked_fill(missing, torch.inf),
        cluster=cluster,
    )
    logits = [logit for logit, _ in single_keys]
    top = torch.cat([*logits, retrieved], -1).amax(-1, keepdim=True).detach()
    retrieved_weight = torch.exp(retrieved - top)
    cluster_weight = torch.exp(log_weight - top)
    total = torch.zeros_like(top)
    out = q.new_zeros(())
    for logit, values in single_keys:
        weight = torch.exp(logit - top)
        total = total + weight.sum(-1, keepdim=True)
        out = out + weight @ values
    total = total + retrieved_weight.sum(-1, keepdim=True)
    total = total + (cluster_weight * remaining).sum(-1, keepdim=True)
    # weight of a retrieved key in addition to that in the mean of its cluster
    in_cluster = cluster_weight.gather(-1, cluster).masked_fill(missing, 0.0)
    excess = retrieved_weight - in_cluster
    out = out + cluster_weight @ queries.far[..., :-1]
    out = out + (excess.unsqueeze(-2) @ rows_at(past.v, positions)).squeeze(-2)
    return out / total
