"""Causal near-far attention: retrieved keys exactly, the others by clusters.

Notation: Z = batch x key heads, G query heads of a group, L queries, S keys y, d, dv; blocks of b tokens, n heavy
hitters, K clusters. Queries before the position `exact_until` see all earlier keys exactly. After that, queries of
block t see their own block up to themselves and block t - 1; of the keys up to block t - 2 some are heavy, and the
others lie in clusters. A query scores all of these in 8 bits (retrieval.py) and retrieves those of the largest scores:
`open` of them, from GROWS tokens on as the root of the last renewal's position more. It sees these exactly. They leave
their clusters, and what is left there lies below them (`left_in_clusters`). So each key counts once, and nothing is
subtracted.

What keys are measured by is of those before the first renewal, about the means of their blocks; heavy hitters and
centres of clusters are of the keys before the last one. Renewals lie where the sequence has grown by a half or so, at
positions that no sequence decides: outputs depend on positions and past alone. Keys that come between two of them go to
the nearest clusters. Derived here.
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
from crt_exp.nearfar.choice import (
    DRAWN, HIDDEN, MIXED, PART, RENEWED, Clusters, KeyMetric, Sizes, blocks, centres_of, exactly, grouped, largest,
    mean_of, moments, nearest, one_hot, rows_at, scores, summed, ungrouped, without,
)
from crt_exp.nearfar import native
from crt_exp.nearfar.retrieval import left_in_clusters, retrieved

NUMBERS = 2**24            # of the keys that the queries of a chunk retrieve


def renewals(sizes: Sizes, length: int) -> list[int]:
    """The positions of the renewals, multiples of the block, up to the first that is not below `length`: attention is
    exact before the first of them."""
    positions = [max(_whole(sizes.exact_until, sizes.block), 2 * sizes.block)]
    while positions[-1] < length:
        positions.append(positions[-1] + _whole(max(RENEWED, positions[-1] // PART), sizes.block))
    return positions


def _whole(tokens: int, block: int) -> int:
    """Rounded up to whole blocks."""
    return -(-tokens // block) * block


def options_of(sizes: Sizes, keys: int) -> dict[str, int]:
    """What the C engine is given for at most so many keys, which are more than a block."""
    most = {"heavy": sizes.heavy, "clusters": sizes.cells, "open": sizes.opens(keys), "least": sizes.open}
    return {name: min(number, keys) for name, number in most.items()} | {
        "block": sizes.block, "until": renewals(sizes, 0)[0]}


def metric_of(y: Tensor, keep: Tensor | None, sizes: Sizes, factor: float = 1.0) -> KeyMetric:
    """Of keys factor y (Z, S, d): of those that are far at the first renewal, each about the mean of its block. What is
    common to a block is its position, by which rotary positions turn all keys alike: about one mean of all keys it
    would be the most of their moments, and clusters would tell positions apart. The norm of root root^T, these second
    moments, is made 1: |x root|^2 tau is the variance of the logits of a query x over a cluster shaped like the keys of
    a block."""
    far = renewals(sizes, 0)[0] - sizes.block
    y, keep = y[:, :far] * factor, None if keep is None else keep[:, :far]
    metric = KeyMetric.of(about_means(y, keep, sizes.block), y, keep, keep)
    size = torch.linalg.matrix_norm(metric.root @ metric.root.mT, keepdim=True)
    return metric._replace(tilt=torch.zeros_like(metric.shift), root=metric.root * size.rsqrt())


def about_means(y: Tensor, keep: Tensor | None, block: int) -> Tensor:
    """Of keys (Z, S, d) in whole blocks, what each is more than the mean of its block; keep (Z, S)."""
    rows, kept = (None if t is None else blocks(t, block).flatten(0, 1) for t in (y, keep))
    return without(rows - mean_of(rows, kept)[0], kept).view(y.shape)


class ChosenEpochs(NamedTuple):
    """Nothing where all queries see all earlier keys; the metric alone where the C engine does the rest."""

    metric: KeyMetric | None = None
    epochs: tuple["Epoch", ...] | list["Epoch"] = ()


class Epoch(NamedTuple):
    """The state of the past from one renewal to the next: what queries know of the keys that are far from them.

    Heavy hitters and centres stay; keys that become far join the clusters (`advanced`). No choice has a gradient."""

    start: int        # the position of the renewal
    stop: int         # of the next one
    metric: KeyMetric
    heavy: Tensor     # (Z, n): positions
    there: Tensor     # (Z, n): whether there are as many
    centres: Tensor   # (Z, K, d), as z
    member: Tensor    # (Z, far): which keys lie in clusters
    cluster: Tensor   # (Z, far): in which
    sums: Tensor      # (Z, K, dv + d + 2): of `rows_of` the first `summed` keys; or 0
    summed: int = 0

    @classmethod
    @torch.no_grad()
    def of(cls, y: Tensor, keep: Tensor, sizes: Sizes, start: int, stop: int, metric: KeyMetric) -> "Epoch":
        """Of keys y (Z, .., d), those before the window of the first block from `start` on; keep (Z, ..). Centres are
        of some of them, DRAWN to 2 DRAWN for each cluster."""
        far = start - sizes.block
        keep = keep[:, :far]
        z = metric.measured(y[:, :far], keep)
        score = scores(without(y[:, :far] - metric.shift, keep), metric.root, 0.0, keep)
        highest, heavy = largest(score, min(sizes.heavy, far))
        member = keep.scatter(1, heavy, False)
        at = sample(far, DRAWN * sizes.cells, y.device)
        log_u = torch.where(member[:, at], 0.0, -torch.inf).to(z.dtype)
        centres = centres_of(z[:, at], log_u, min(sizes.cells, len(at)))
        return cls(start, stop, metric, heavy, highest > -torch.inf, centres, member, nearest(z, centres),
                   z.new_zeros(()))

    def advanced(self, y: Tensor, v: Tensor, keep: Tensor, b: int, first: int, last: int) -> tuple["Epoch", Tensor]:
        """The state where the keys before block `last - 1` are far, and the sums (Z, N, K, dv + d + 2) of those that
        are far from blocks `first` to `last` of queries."""
        known, start, stop = self.member.shape[1], (first - 1) * b, (last - 1) * b
        with torch.no_grad():
            new, there = y[:, known:stop], keep[:, known:stop]
            member = torch.cat([self.member, there], 1)
            cluster = torch.cat([self.cluster, nearest(self.metric.measured(new, there), self.centres)], 1)
        own, K = slice(self.summed, stop), self.centres.shape[1]
        rows = rows_of(y[:, own], v[:, own], member[:, own], cluster[:, own], self)
        members, at = one_hot(cluster[:, own], K, rows.dtype), start - self.summed
        sums = (self.sums + members[:, :at].mT @ rows[:, :at]).unsqueeze(1)
        if stop > start:
            later = blocks(members[:, at:], b).mT @ blocks(rows[:, at:], b)
            sums = torch.cat([sums, sums + later.cumsum(1)], 1)
        return self._replace(member=member, cluster=cluster, sums=sums[:, -1], summed=stop), sums

    def select(self, heads: Tensor) -> "Epoch":
        """That of some heads (of the batch and of keys)."""
        return tree_map(lambda t: t[heads] if isinstance(t, Tensor) else t, self)


def epochs_of(y: Tensor, keep: Tensor | None, sizes: Sizes, first: int, metric: KeyMetric,
              known: Epoch | None = None) -> list[Epoch]:
    """Those of queries from position `first` on, the last ones of keys (Z, S, d); `known`: one of them."""
    edges, keep = renewals(sizes, y.shape[1]), kept_of(y, keep)
    return [known if known is not None and known.start == start else Epoch.of(y, keep, sizes, start, stop, metric)
            for start, stop in zip(edges, edges[1:]) if stop > first]


@dataclass(frozen=True)
class Causal:
    """Attention of the last tokens of a sequence to their past."""

    sizes: Sizes
    factor: float = 1.0             # in the C engine: of queries and keys as they are given
    native: bool = False            # whether the C engine does it, all heads in one call

    @torch.no_grad()
    def choose(self, x: Tensor, y: Tensor, keep: Tensor | None, rows: slice) -> ChosenEpochs:
        """For queries (Z, G, L, d), the last ones of keys (Z, S, d)."""
        check_result(torch.linalg.vector_norm(x, dim=(1, 2, 3)) + torch.linalg.vector_norm(y, dim=(1, 2)))
        if renewals(self.sizes, 0)[0] >= y.shape[1]:
            return ChosenEpochs()
        metric = metric_of(y, keep, self.sizes, self.factor)
        first = y.shape[1] - x.shape[2]
        return ChosenEpochs(metric, [] if self.native else epochs_of(y, keep, self.sizes, first, metric))

    def attend(self, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, chosen: ChosenEpochs) -> Tensor:
        """(Z, G, L, dv) of the last queries."""
        if not self.native:
            return attend_epochs(chosen.epochs, x, y, v, keep, self.sizes)[0]
        shift, root = (None, None) if chosen.metric is None else (chosen.metric.shift, chosen.metric.root)
        return attend_in_c(x, y, v, native.Given(keep, shift, root, options_of(self.sizes, y.shape[1]), self.factor))


def attend_in_c(x: Tensor, y: Tensor, v: Tensor, given: native.Given, state: native.State | None = None) -> Tensor:
    """Outputs (Z, G, L, dv) of queries, the last ones of keys (Z, S, d); `state`: of decoding, which goes on."""
    L, S, until = x.shape[2], y.shape[1], given.sizes["until"]
    alone, parts = min(max(0, until - S + L), L), []
    if alone:
        stop = min(until, S)
        parts = [exactly(x[:, :, :alone], y[:, :stop], v[:, :stop], given.keep, given.factor**2)]
    if alone < L:
        parts.append(native.causal(x[:, :, alone:], y, v, given, state))
    return joined(parts, 2)


def attend_epochs(epochs: Sequence[Epoch], x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None,
                  sizes: Sizes) -> tuple[Tensor, Epoch | None]:
    """The same in PyTorch; and the state behind the last query."""
    S, until, state = y.shape[1], min(renewals(sizes, 0)[0], y.shape[1]), None
    first, parts = S - x.shape[2], []
    if first < until:
        parts = [exactly(x[:, :, :until - first], y[:, :until], v[:, :until], keep)]
    for epoch in epochs:
        start, stop = max(first, epoch.start), min(S, epoch.stop)
        out, state = attend_epoch(epoch, x[:, :, start - first:stop - first], y[:, :stop], v[:, :stop], keep, sizes)
        parts.append(out)
    return joined(parts, 2), state


def attend_epoch(epoch: Epoch, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None,
                 sizes: Sizes) -> tuple[Tensor, Epoch]:
    """Of queries (Z, G, l, d), the last ones of keys (Z, S, d), all in one epoch."""
    (_, G, L, _), S, b, keep = x.shape, y.shape[1], sizes.block, kept_of(y, keep)
    first, last = (S - L) // b, (S - 1) // b                  # the blocks of queries
    epoch, sums = epoch.advanced(y, v, keep, b, first, last)
    far, clusters = clusters_of(sums, v.shape[-1], epoch)
    before = S - L - first * b                                # tokens of the first block
    lead = before if first < last else 0
    q = grouped(F.pad(x, (0, 0, lead, 0)), b if first < last else L)
    own = torch.arange(before - lead, before - lead + q.shape[2] // G, device=x.device).repeat(G)
    seen = Seen(y, v, keep, epoch.member, epoch.cluster, far, clusters, first)
    return ungrouped(in_chunks(epoch, seen, q, sizes, own), G, lead + L)[:, :, lead:], epoch


def joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def kept_of(y: Tensor, keep: Tensor | None) -> Tensor:
    """Which of the keys (Z, S, d) are there, (Z, S)."""
    return torch.ones(y.shape[:2], dtype=torch.bool, device=y.device) if keep is None else keep[:, :y.shape[1]]


def rows_of(y: Tensor, v: Tensor, member: Tensor, cluster: Tensor, epoch: Epoch) -> Tensor:
    """[v] and the moments of keys (Z, m, d) with values (Z, m, dv), 0 for those that are no `member` (Z, m)."""
    y = torch.where(member.unsqueeze(-1), y - epoch.metric.shift, 0.0)
    u = member.to(y.dtype)                                        # keys count alike: the mean query is not known
    return torch.cat([v * u.unsqueeze(-1), moments(y, u, epoch.metric, cluster, epoch.centres)], -1)


def clusters_of(sums: Tensor, dv: int, epoch: Epoch) -> tuple[Tensor, Clusters]:
    """[V, N] and the clusters of sums (Z, N, K, dv + d + 2) of `rows_of` the keys."""
    far, metric = torch.cat([sums[..., :dv], sums[..., -1:]], -1), epoch.metric
    clusters = summed(sums[..., dv:], metric, epoch.centres, far.new_zeros(1, 1), mass=False)
    return far, clusters._replace(mu=clusters.mu + metric.shift.unsqueeze(1))


class Seen(NamedTuple):
    """What the queries of some blocks see, besides the heavy hitters."""

    y: Tensor         # (Z, S, d)
    v: Tensor         # (Z, S, dv)
    keep: Tensor      # (Z, S)
    member: Tensor    # (Z, far): whether a key lies in a cluster,
    cluster: Tensor   # (Z, far): and in which
    far: Tensor       # (Z, N, K, dv + 1)
    clusters: Clusters  # (Z, N, K, .)
    first: int        # the first block


def sample(keys: int, wanted: int, device: torch.device) -> Tensor:
    """Positions of a sample of keys, `wanted` to twice as many: one of each run of keys, at a position that varies."""
    step = max(1, keys // wanted)
    run = torch.arange(keys // step, device=device)
    return run * step + run * MIXED % step


def in_chunks(epoch: Epoch, seen: Seen, q: Tensor, sizes: Sizes, own: Tensor) -> Tensor:
    """What queries (Z, N, r, d) gather (Z, N, r, dv): some blocks at a time, and again in the backward pass.

    own (r,): their positions within a block."""
    open, of_blocks = sizes.opens(epoch.start), (q, seen.far, *seen.clusters)
    read = min(open, seen.v.shape[1])
    size = max(1, NUMBERS // max(1, q[:, 0, :, 0].numel() * read * (q.shape[-1] + seen.v.shape[-1])))
    again = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not transformed(*of_blocks)
    results = []
    for at in range(0, q.shape[1], size):
        here = tuple(t[:, at:at + size] for t in of_blocks)
        positions = chosen_keys(seen, here[0], at, sizes.block, open)
        reading = partial(gathered, epoch, seen, own, sizes.block, at, positions)
        results.append(checkpoint(reading, *here, use_reentrant=False) if again else reading(*here))
    return torch.cat(results, 1)


@torch.no_grad()
def chosen_keys(seen: Seen, q: Tensor, at: int, b: int, open: int) -> Tensor:
    """Places (Z, m, r, o) of the keys that queries (Z, m, r, d) of blocks from seen.first + at on read, -1 for none."""
    far = (seen.first + at + torch.arange(q.shape[1], device=q.device) - 1) * b                 # keys of each block
    position = torch.arange(seen.member.shape[1], device=q.device)
    member = seen.member[:, None, None] & (position < far[:, None, None])
    return retrieved(seen.y[:, :len(position)], member, q, open)


def gathered(epoch: Epoch, seen: Seen, own: Tensor, b: int, at: int, positions: Tensor, q: Tensor, far: Tensor,
             *clusters: Tensor) -> Tensor:
    """What queries (Z, m, r, d) of the blocks from seen.first + at on gather: a softmax over near, heavy and retrieved
    keys and what is left in the clusters, (Z, m, K, .), of these blocks."""
    clusters, m = Clusters(*clusters), q.shape[1]
    here = seen.first + at + torch.arange(m, device=q.device).unsqueeze(1)
    near = (here - 1) * b + torch.arange(2 * b, device=q.device)                                # (m, 2 b)
    held = near.clamp(max=seen.y.shape[1] - 1)
    visible = (near[:, None] <= (here * b + own).unsqueeze(-1)) & seen.keep[:, held].unsqueeze(2)  # (Z, m, r, 2 b)
    logits = [(q @ seen.y[:, held].mT).masked_fill(~visible, HIDDEN)]
    values = [seen.v[:, held]]
    if epoch.heavy.shape[1]:
        heavy = rows_at(seen.y, epoch.heavy).unsqueeze(1)
        logits.append((q @ heavy.mT).masked_fill(~epoch.there[:, None, None], HIDDEN))
        values.append(rows_at(seen.v, epoch.heavy).unsqueeze(1))
    there, positions = positions >= 0, positions.clamp(min=0)
    exact = (rows_at(seen.y, positions) @ q.unsqueeze(-1)).squeeze(-1).masked_fill(~there, HIDDEN)  # (Z, m, r, o)
    cluster = seen.cluster.gather(1, positions.flatten(1)).view(positions.shape)
    with torch.no_grad():    # a cluster is shaped like all keys
        variance = (q @ epoch.metric.root.unsqueeze(1)).square().sum(-1, keepdim=True) * clusters.spread.unsqueeze(-2)
    left, each = left_in_clusters(q @ clusters.mu.mT, variance.sqrt(), far[..., -1].unsqueeze(-2),
                               exact.masked_fill(~there, torch.inf), cluster)
    top = torch.cat([*logits, exact], -1).amax(-1, keepdim=True).detach()
    shares, read, each = [torch.exp(t - top) for t in logits], torch.exp(exact - top), torch.exp(each - top)
    total = sum(t.sum(-1, keepdim=True) for t in (*shares, read, each * left))
    more = read - each.gather(-1, cluster).masked_fill(~there, 0.0)      # than as one of those that are left
    out = sum(share @ value for share, value in zip(shares, values))
    out = out + each @ far[..., :-1] + (more.unsqueeze(-2) @ rows_at(seen.v, positions)).squeeze(-2)
    return out / total
