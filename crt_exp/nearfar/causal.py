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


def renewals(sizes: Sizes, length: int) -> list[int]:
    """Return the positions of renewals, up to the first one that is at least `length`.

    They are multiples of the block. Attention is exact before the first one.
    """
    positions = [max(_round_up(sizes.exact_until, sizes.block), 2 * sizes.block)]
    while positions[-1] < length:
        positions.append(
            positions[-1]
            + _round_up(max(MIN_RENEWAL, positions[-1] // RENEWAL_DIVISOR), sizes.block)
        )
    return positions


def _round_up(tokens: int, block: int) -> int:
    """Round up to whole blocks."""
    return -(-tokens // block) * block


def options_of(sizes: Sizes, keys: int) -> dict[str, int]:
    """Return the sizes for the C engine with at most `keys` keys (more than a block)."""
    most = {
        "heavy": sizes.heavy,
        "clusters": sizes.cells,
        "open": sizes.opens(keys),
        "open_first": sizes.open,
    }
    return {name: min(number, keys) for name, number in most.items()} | {
        "block": sizes.block,
        "first_renewal": renewals(sizes, 0)[0],
    }


def metric_of(y: Tensor, keep: Tensor | None, sizes: Sizes, factor: float = 1.0) -> KeyMetric:
    """Return the metric of the keys that are far at the first renewal.

    The keys are factor y (Z, S, d), each relative to the mean of its block, because rotary embeddings rotate the keys
    of a block alike. Relative to one mean of all keys, positions would dominate the moments and define the clusters.
    The norm of the second moments root root^T is set to 1. |x root|^2 tau is then the variance of the logits of a query
    x over a cluster that is shaped like the keys of a block.
    """
    far = renewals(sizes, 0)[0] - sizes.block
    y, keep = y[:, :far] * factor, None if keep is None else keep[:, :far]
    metric = KeyMetric.of(subtract_block_means(y, keep, sizes.block), y, keep, keep)
    size = torch.linalg.matrix_norm(metric.root @ metric.root.mT, keepdim=True)
    return metric._replace(tilt=torch.zeros_like(metric.shift), root=metric.root * size.rsqrt())


def subtract_block_means(y: Tensor, keep: Tensor | None, block: int) -> Tensor:
    """Subtract from keys (Z, S, d) the mean of their block; S is in whole blocks."""
    rows, kept = (None if t is None else blocks(t, block).flatten(0, 1) for t in (y, keep))
    return zero_masked(rows - mean_of(rows, kept)[0], kept).view(y.shape)


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
    sums: Tensor  # (Z, K, dv + d + 2): of `rows_of` over the first `summed` keys; or 0
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
            start,
            stop,
            metric,
            heavy,
            highest > -torch.inf,
            centres,
            member,
            nearest(z, centres),
            z.new_zeros(()),
        )

    def advance(
        self, y: Tensor, v: Tensor, keep: Tensor, b: int, first: int, last: int
    ) -> tuple["Epoch", Tensor]:
        """Return the state for block `last` and the sums for blocks `first` to `last`.

        In the new state the keys before block `last - 1` are far. The sums (Z, N, K, dv + d + 2) are over the keys that
        are far from each block.
        """
        known, start, stop = self.member.shape[1], (first - 1) * b, (last - 1) * b
        with torch.no_grad():
            new, there = y[:, known:stop], keep[:, known:stop]
            member = torch.cat([self.member, there], 1)
            cluster = torch.cat(
                [self.cluster, nearest(self.metric.measured(new, there), self.centres)], 1
            )
        own, K = slice(self.summed, stop), self.centres.shape[1]
        rows = rows_of(y[:, own], v[:, own], member[:, own], cluster[:, own], self)
        members, at = one_hot(cluster[:, own], K, rows.dtype), start - self.summed
        sums = (self.sums + members[:, :at].mT @ rows[:, :at]).unsqueeze(1)
        if stop > start:
            later = blocks(members[:, at:], b).mT @ blocks(rows[:, at:], b)
            sums = torch.cat([sums, sums + later.cumsum(1)], 1)
        return self._replace(member=member, cluster=cluster, sums=sums[:, -1], summed=stop), sums

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
    edges, keep = renewals(sizes, y.shape[1]), unmasked_keys(y, keep)
    return [
        known
        if known is not None and known.start == start
        else Epoch.of(y, keep, sizes, start, stop, metric)
        for start, stop in zip(edges, edges[1:])
        if stop > first
    ]


@dataclass(frozen=True)
class Causal:
    """Attention of the last tokens of a sequence to their past."""

    sizes: Sizes
    factor: float = 1.0  # of queries and keys, applied by the C engine
    native: bool = False  # whether the C engine computes all heads in one call

    @torch.no_grad()
    def choose(self, x: Tensor, y: Tensor, keep: Tensor | None, rows: slice) -> ChosenEpochs:
        """Return the epochs for queries (Z, G, L, d), the last ones of keys (Z, S, d)."""
        check_result(
            torch.linalg.vector_norm(x, dim=(1, 2, 3)) + torch.linalg.vector_norm(y, dim=(1, 2))
        )
        if renewals(self.sizes, 0)[0] >= y.shape[1]:
            return ChosenEpochs()
        metric = metric_of(y, keep, self.sizes, self.factor)
        first = y.shape[1] - x.shape[2]
        return ChosenEpochs(
            metric, [] if self.native else epochs_of(y, keep, self.sizes, first, metric)
        )

    def attend(
        self, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, chosen: ChosenEpochs
    ) -> Tensor:
        """Return the outputs (Z, G, L, dv) of the last queries."""
        if not self.native:
            return attend_epochs(chosen.epochs, x, y, v, keep, self.sizes)[0]
        shift, root = (
            (None, None) if chosen.metric is None else (chosen.metric.shift, chosen.metric.root)
        )
        return attend_in_c(
            x,
            y,
            v,
            native.Given(keep, shift, root, options_of(self.sizes, y.shape[1]), self.factor),
        )


def attend_in_c(
    x: Tensor, y: Tensor, v: Tensor, given: native.Given, state: native.State | None = None
) -> Tensor:
    """Return the outputs (Z, G, L, dv) of the C engine.

    Queries are the last ones of keys (Z, S, d). `state` is a decoding state, which is updated.
    """
    L, S, until = x.shape[2], y.shape[1], given.sizes["first_renewal"]
    alone, parts = min(max(0, until - S + L), L), []
    if alone:
        stop = min(until, S)
        parts = [
            exact_outputs(x[:, :, :alone], y[:, :stop], v[:, :stop], given.keep, given.factor**2)
        ]
    if alone < L:
        parts.append(native.causal(x[:, :, alone:], y, v, given, state))
    return concatenate(parts, 2)


def attend_epochs(
    epochs: Sequence[Epoch], x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, sizes: Sizes
) -> tuple[Tensor, Epoch | None]:
    """Return the outputs in PyTorch, and the state after the last query."""
    S, until, state = y.shape[1], min(renewals(sizes, 0)[0], y.shape[1]), None
    first, parts = S - x.shape[2], []
    if first < until:
        parts = [exact_outputs(x[:, :, : until - first], y[:, :until], v[:, :until], keep)]
    for epoch in epochs:
        start, stop = max(first, epoch.start), min(S, epoch.stop)
        out, state = attend_epoch(
            epoch, x[:, :, start - first : stop - first], y[:, :stop], v[:, :stop], keep, sizes
        )
        parts.append(out)
    return concatenate(parts, 2), state


def attend_epoch(
    epoch: Epoch, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, sizes: Sizes
) -> tuple[Tensor, Epoch]:
    """Return the outputs of queries of one epoch, and its state after them.

    x (Z, G, l, d) are the last ones of keys (Z, S, d).
    """
    (_, G, L, _), S, b, keep = x.shape, y.shape[1], sizes.block, unmasked_keys(y, keep)
    first, last = (S - L) // b, (S - 1) // b  # the blocks of queries
    epoch, sums = epoch.advance(y, v, keep, b, first, last)
    far, clusters = clusters_of(sums, v.shape[-1], epoch)
    before = S - L - first * b  # tokens of the first block
    lead = before if first < last else 0
    q = to_blocks(F.pad(x, (0, 0, lead, 0)), b if first < last else L)
    own = torch.arange(before - lead, before - lead + q.shape[2] // G, device=x.device).repeat(G)
    seen = Seen(y, v, keep, epoch.member, epoch.cluster, far, clusters, first)
    return from_blocks(chunked_outputs(epoch, seen, q, sizes, own), G, lead + L)[:, :, lead:], epoch


def concatenate(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def unmasked_keys(y: Tensor, keep: Tensor | None) -> Tensor:
    """Return which of the keys (Z, S, d) are unmasked, (Z, S)."""
    return (
        torch.ones(y.shape[:2], dtype=torch.bool, device=y.device)
        if keep is None
        else keep[:, : y.shape[1]]
    )


def rows_of(y: Tensor, v: Tensor, member: Tensor, cluster: Tensor, epoch: Epoch) -> Tensor:
    """Return values and moments of keys (Z, m, d), (Z, m, dv + d + 2).

    Rows are 0 for keys that are not in `member` (Z, m).
    """
    y = torch.where(member.unsqueeze(-1), y - epoch.metric.shift, 0.0)
    u = member.to(y.dtype)  # equal weights: the mean query is not known
    return torch.cat([v * u.unsqueeze(-1), moments(y, u, epoch.metric, cluster, epoch.centres)], -1)


def clusters_of(sums: Tensor, dv: int, epoch: Epoch) -> tuple[Tensor, Clusters]:
    """Return [V, N] and the clusters.

    sums (Z, N, K, dv + d + 2) are those of `rows_of` over the keys.
    """
    far, metric = torch.cat([sums[..., :dv], sums[..., -1:]], -1), epoch.metric
    clusters = sum_clusters(sums[..., dv:], metric, epoch.centres, far.new_zeros(1, 1), mass=False)
    return far, clusters._replace(mu=clusters.mu + metric.shift.unsqueeze(1))


class Seen(NamedTuple):
    """Keys that the queries of some blocks see, in addition to heavy hitters."""

    y: Tensor  # (Z, S, d)
    v: Tensor  # (Z, S, dv)
    keep: Tensor  # (Z, S)
    member: Tensor  # (Z, far): which keys are in clusters
    cluster: Tensor  # (Z, far): cluster of each key
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


def chunked_outputs(epoch: Epoch, seen: Seen, q: Tensor, sizes: Sizes, own: Tensor) -> Tensor:
    """Return the outputs (Z, N, r, dv) of queries (Z, N, r, d), some blocks at a time.

    The backward pass recomputes them. own (r,): positions of the queries within a block.
    """
    open, of_blocks = sizes.opens(epoch.start), (q, seen.far, *seen.clusters)
    read = min(open, seen.v.shape[1])
    size = max(
        1, NUMBERS // max(1, q[:, 0, :, 0].numel() * read * (q.shape[-1] + seen.v.shape[-1]))
    )
    again = (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not transformed(*of_blocks)
    )
    results = []
    for at in range(0, q.shape[1], size):
        here = tuple(t[:, at : at + size] for t in of_blocks)
        positions = chosen_keys(seen, here[0], at, sizes.block, open)
        reading = partial(retrieved_outputs, epoch, seen, own, sizes.block, at, positions)
        results.append(checkpoint(reading, *here, use_reentrant=False) if again else reading(*here))
    return torch.cat(results, 1)


@torch.no_grad()
def chosen_keys(seen: Seen, q: Tensor, at: int, b: int, open: int) -> Tensor:
    """Return the positions (Z, m, r, o) of retrieved keys, -1 for none.

    q (Z, m, r, d) belongs to the blocks from seen.first + at on.
    """
    far = (
        seen.first + at + torch.arange(q.shape[1], device=q.device) - 1
    ) * b  # keys of each block
    position = torch.arange(seen.member.shape[1], device=q.device)
    member = seen.member[:, None, None] & (position < far[:, None, None])
    return retrieved_positions(seen.y[:, : len(position)], member, q, open)


def retrieved_outputs(
    epoch: Epoch,
    seen: Seen,
    own: Tensor,
    b: int,
    at: int,
    positions: Tensor,
    q: Tensor,
    far: Tensor,
    *clusters: Tensor,
) -> Tensor:
    """Return the outputs of queries (Z, m, r, d) of blocks from seen.first + at on.

    It is a softmax over near keys, heavy hitters, retrieved keys and the rest of the clusters (Z, m, K, .).
    """
    clusters, m = Clusters(*clusters), q.shape[1]
    here = seen.first + at + torch.arange(m, device=q.device).unsqueeze(1)
    near = (here - 1) * b + torch.arange(2 * b, device=q.device)  # (m, 2 b)
    held = near.clamp(max=seen.y.shape[1] - 1)
    visible = (near[:, None] <= (here * b + own).unsqueeze(-1)) & seen.keep[:, held].unsqueeze(
        2
    )  # (Z, m, r, 2 b)
    logits = [(q @ seen.y[:, held].mT).masked_fill(~visible, MASKED)]
    values = [seen.v[:, held]]
    if epoch.heavy.shape[1]:
        heavy = rows_at(seen.y, epoch.heavy).unsqueeze(1)
        logits.append((q @ heavy.mT).masked_fill(~epoch.there[:, None, None], MASKED))
        values.append(rows_at(seen.v, epoch.heavy).unsqueeze(1))
    there, positions = positions >= 0, positions.clamp(min=0)
    exact = (
        (rows_at(seen.y, positions) @ q.unsqueeze(-1)).squeeze(-1).masked_fill(~there, MASKED)
    )  # (Z, m, r, o)
    cluster = seen.cluster.gather(1, positions.flatten(1)).view(positions.shape)
    with torch.no_grad():  # assumes that a cluster is shaped like all keys
        variance = (q @ epoch.metric.root.unsqueeze(1)).square().sum(
            -1, keepdim=True
        ) * clusters.spread.unsqueeze(-2)
    left, each = cluster_remainder(
        q @ clusters.mu.mT,
        variance.sqrt(),
        far[..., -1].unsqueeze(-2),
        exact.masked_fill(~there, torch.inf),
        cluster,
    )
    top = torch.cat([*logits, exact], -1).amax(-1, keepdim=True).detach()
    shares, read, each = (
        [torch.exp(t - top) for t in logits],
        torch.exp(exact - top),
        torch.exp(each - top),
    )
    total = sum(t.sum(-1, keepdim=True) for t in (*shares, read, each * left))
    more = read - each.gather(-1, cluster).masked_fill(
        ~there, 0.0
    )  # excess over the weight of a remaining key
    out = sum(share @ value for share, value in zip(shares, values))
    out = out + each @ far[..., :-1] + (more.unsqueeze(-2) @ rows_at(seen.v, positions)).squeeze(-2)
    return out / total
