"""Causal near-far attention: each query retrieves keys of its past and sees the rest by cells.

Notation: Z = batch x key heads, G query heads of a group, L queries, S keys y, d, dv; blocks of b tokens, n heavy keys,
K cells. Queries before the place `exact_until` see all earlier keys exactly. After that, queries of block t see their
own block up to themselves and block t - 1; of the keys up to block t - 2 some are heavy, and the others lie in cells. A
query scores all of these in 8 bits (retrieval.py) and retrieves those of the largest scores: `open` of them, from GROWS
tokens on as the root of the last renewal's place more. It sees these exactly. They leave their cells, and what is left
there lies below them (`left_in_cells`). So each key counts once, and nothing is subtracted.

What keys are measured by is of those before the first renewal, about the means of their blocks; heavy keys and centres
of cells are of the keys before the last one. Renewals lie where the sequence has grown by a half or so, at places that
no sequence decides: outputs depend on places and past alone. Keys that come between two of them go to the nearest
cells. Derived here.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from crt_exp.attention.checks import check_result, compute_dtype, transformed
from crt_exp.nearfar.choice import (
    Cells,
    KeyMetric,
    Sizes,
    blocks,
    centres_of,
    exactly,
    grouped,
    largest,
    left_in_cells,
    mean_of,
    moments,
    nearest,
    one_hot,
    rows_at,
    scores,
    summed,
    ungrouped,
    without,
)
from crt_exp.nearfar import native
from crt_exp.nearfar.choice import DRAWN, HIDDEN, MIXED, PART, RENEWED
from crt_exp.nearfar.retrieval import retrieved

NUMBERS = 2**24            # of the keys that the queries of a chunk read


def renewals(sizes: Sizes, length: int) -> list[int]:
    """The places of the renewals, multiples of the block, up to the first that is not below `length`: attention is
    exact before the first of them."""
    places = [max(_whole(sizes.exact_until, sizes.block), 2 * sizes.block)]
    while places[-1] < length:
        places.append(places[-1] + _whole(max(RENEWED, places[-1] // PART), sizes.block))
    return places


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
    common to a block is its place, by which rotary positions turn all keys alike: about one mean of all keys it would
    be the most of their moments, and cells would tell places apart. The norm of root root^T, these second moments, is
    made 1: |x root|^2 tau is the variance of the logits of a query x over a cell shaped like the keys of a block."""
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
    """What the queries from one renewal to the next know of the keys before it; no gradient."""

    start: int        # the place of the renewal
    stop: int         # of the next one
    metric: KeyMetric
    heavy: Tensor     # (Z, n): places
    there: Tensor     # (Z, n): whether there are as many
    pool: Tensor      # (Z, start - b): which keys lie in cells
    cell: Tensor      # (Z, start - b): in which
    centres: Tensor   # (Z, K, d), as z

    @classmethod
    def of(cls, y: Tensor, keep: Tensor, sizes: Sizes, start: int, stop: int, metric: KeyMetric) -> "Epoch":
        """Of keys y (Z, .., d), those before the window of the first block from `start` on; keep (Z, ..). Centres are
        of some of them, DRAWN to 2 DRAWN for each cell."""
        far = start - sizes.block
        keep = keep[:, :far]
        z = metric.measured(y[:, :far], keep)
        score = scores(without(y[:, :far] - metric.shift, keep), metric.root, 0.0, keep)
        highest, places = largest(score, min(sizes.heavy, far))
        pool = keep.scatter(1, places, False)
        at = drawn(far, DRAWN * sizes.cells, y.device)
        centres = centres_of(z[:, at], torch.where(pool[:, at], 0.0, -torch.inf).to(z.dtype), min(sizes.cells, len(at)))
        return cls(start, stop, metric, places, highest > -torch.inf, pool, nearest(z, centres), centres)

    def cells(self, y: Tensor, keep: Tensor) -> Tensor:
        """The nearest ones of keys y (Z, m, d), (Z, m)."""
        return nearest(self.metric.measured(y, keep), self.centres)


@dataclass(frozen=True)
class RecallNearFar:
    sizes: Sizes
    factor: float = 1.0             # in the C engine: of queries and keys as they are given
    native: bool = False            # whether the C engine does it, all heads in one call

    @torch.no_grad()
    def choose(self, x: Tensor, y: Tensor, keep: Tensor | None, rows: slice) -> ChosenEpochs:
        """For queries (Z, G, L, d), the last ones of keys (Z, S, d)."""
        kept = without(y, keep)
        check_result(torch.linalg.vector_norm(x, dim=(1, 2, 3)) + torch.linalg.vector_norm(kept, dim=(1, 2)))
        places, y, first = renewals(self.sizes, y.shape[1]), kept.to(compute_dtype(x, y)), y.shape[1] - x.shape[2]
        if places[0] >= y.shape[1]:
            return ChosenEpochs()
        metric = metric_of(y, keep, self.sizes, self.factor)
        if self.native:
            return ChosenEpochs(metric)
        keep = kept_of(y, keep)
        return ChosenEpochs(metric, [Epoch.of(y, keep, self.sizes, a, e, metric)
                                     for a, e in zip(places, places[1:]) if e > first])

    def attend(self, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, chosen: ChosenEpochs) -> Tensor:
        """(Z, G, L, dv) of the last queries."""
        (metric, epochs), dtype, (L, S) = chosen, compute_dtype(x, y, v), (x.shape[2], y.shape[1])
        x, y, v = x.to(dtype), without(y, keep).to(dtype), without(v, keep).to(dtype)
        first, until, parts = S - L, min(renewals(self.sizes, S)[0], S), []
        if first < until:
            parts.append(exactly(x[:, :, :until - first], y[:, :until], v[:, :until], keep, self.factor**2))
        if metric is not None and self.native:
            given = native.Given(keep, metric.shift, metric.root, options_of(self.sizes, S), self.factor)
            parts.append(native.recall(x[:, :, max(0, until - first):], y, v, given))
        for epoch in epochs:
            a, e = max(first, epoch.start), min(S, epoch.stop)
            parts.append(self.within(epoch, x[:, :, a - first:e - first], y[:, :e], v[:, :e], keep))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def within(self, epoch: Epoch, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        """Of queries (Z, G, l, d), the last ones of keys (Z, S, d), all in one epoch."""
        S, b, keep = y.shape[1], self.sizes.block, kept_of(y, keep)
        first = (S - x.shape[2]) // b                             # the block of the first query
        lead = S - x.shape[2] - first * b
        x = torch.cat([x.new_zeros(*x.shape[:2], lead, x.shape[3]), x], 2)
        q, start = grouped(x, b), epoch.start - b
        stop = (first + q.shape[1] - 2) * b                       # of the keys that are far from the last block
        with torch.no_grad():
            cell = torch.cat([epoch.cell, epoch.cells(y[:, start:stop], keep[:, start:stop])], 1)
            member = torch.cat([epoch.pool, keep[:, start:stop]], 1)
        far, cells = epoch_cells(far_sums(epoch, member, cell, y, v, b, first), v.shape[-1], epoch)
        here = Seen(y, v, keep, member, cell, far, cells, first)
        return ungrouped(in_chunks(epoch, here, q, self.sizes), x.shape[1], x.shape[2])[:, :, lead:]


def kept_of(y: Tensor, keep: Tensor | None) -> Tensor:
    """Which of the keys (Z, S, d) are there, (Z, S)."""
    return torch.ones(y.shape[:2], dtype=torch.bool, device=y.device) if keep is None else keep[:, :y.shape[1]]


def rows_of(y: Tensor, v: Tensor, member: Tensor, cell: Tensor, epoch: Epoch) -> Tensor:
    """[v] and the moments of keys (Z, m, d) with values (Z, m, dv), 0 for those that are no `member` (Z, m)."""
    y = torch.where(member.unsqueeze(-1), y - epoch.metric.shift, 0.0)
    u = member.to(y.dtype)                                        # keys count alike: the mean query is not known
    return torch.cat([v * u.unsqueeze(-1), moments(y, u, epoch.metric, cell, epoch.centres)], -1)


def far_sums(epoch: Epoch, member: Tensor, cell: Tensor, y: Tensor, v: Tensor, b: int, first: int) -> Tensor:
    """Sums (Z, N, K, dv + d + 2) of `rows_of` the keys in cells, for each of N blocks from `first` on; member and cell
    (Z, far): of the keys that are far from the last of them."""
    stop, K = cell.shape[1], epoch.centres.shape[1]
    rows = rows_of(y[:, :stop], v[:, :stop], member, cell, epoch)
    at = max(epoch.start - b, (first - 1) * b)                    # the keys that are far from the first block
    sums = (one_hot(cell[:, :at], K, rows.dtype).mT @ rows[:, :at]).unsqueeze(1)
    if stop > at:
        later = one_hot(blocks(cell[:, at:], b), K, rows.dtype).mT @ blocks(rows[:, at:], b)
        sums = torch.cat([sums, sums + later.cumsum(1)], 1)
    return sums


def epoch_cells(sums: Tensor, dv: int, epoch: Epoch) -> tuple[Tensor, Cells]:
    """[V, N] and the cells of sums (Z, N, K, dv + d + 2) of `rows_of` the keys."""
    far, metric = torch.cat([sums[..., :dv], sums[..., -1:]], -1), epoch.metric
    cells = summed(sums[..., dv:], metric, epoch.centres, far.new_zeros(1, 1), mass=False)
    return far, cells._replace(mu=cells.mu + metric.shift.unsqueeze(1))


class Seen(NamedTuple):
    """What the queries of some blocks see, besides the heavy keys."""

    y: Tensor         # (Z, S, d)
    v: Tensor         # (Z, S, dv)
    keep: Tensor      # (Z, S)
    member: Tensor    # (Z, far): whether a key lies in a cell,
    cell: Tensor      # (Z, far): and in which
    far: Tensor       # (Z, N, K, dv + 1)
    cells: Cells      # (Z, N, K, .)
    first: int        # the first block


def drawn(keys: int, wanted: int, device: torch.device) -> Tensor:
    """Places of `wanted` of so many keys, or up to twice as many: one of each run of as many, of which none is first or
    last in all runs."""
    step = max(1, keys // wanted)
    run = torch.arange(keys // step, device=device)
    return run * step + run * MIXED % step


def in_chunks(epoch: Epoch, seen: Seen, q: Tensor, sizes: Sizes, own: Tensor | None = None) -> Tensor:
    """What queries (Z, N, r, d) gather (Z, N, r, dv): some blocks at a time, and again in the backward pass.

    own (r,): their places within a block; None: the tokens of a whole block, for each head of a group."""
    own = torch.arange(sizes.block, device=q.device).repeat(q.shape[2] // sizes.block) if own is None else own
    open, of_blocks = sizes.opens(epoch.start), (q, seen.far, *seen.cells)
    read = min(open, seen.v.shape[1])
    size = max(1, NUMBERS // max(1, q[:, 0, :, 0].numel() * read * (q.shape[-1] + seen.v.shape[-1])))
    again = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not transformed(*of_blocks)
    results = []
    for at in range(0, q.shape[1], size):
        here = tuple(t[:, at:at + size] for t in of_blocks)
        places = chosen_keys(seen, here[0], at, sizes.block, open)
        reading = partial(gathered, epoch, seen, own, sizes.block, at, places)
        results.append(checkpoint(reading, *here, use_reentrant=False) if again else reading(*here))
    return torch.cat(results, 1)


@torch.no_grad()
def chosen_keys(seen: Seen, q: Tensor, at: int, b: int, open: int) -> Tensor:
    """Places (Z, m, r, o) of the keys that queries (Z, m, r, d) of blocks from seen.first + at on read, -1 for none."""
    far = (seen.first + at + torch.arange(q.shape[1], device=q.device) - 1) * b                 # keys of each block
    place = torch.arange(seen.member.shape[1], device=q.device)
    member = seen.member[:, None, None] & (place < far[:, None, None])
    return retrieved(seen.y[:, :len(place)], member, q, open)


def gathered(epoch: Epoch, seen: Seen, own: Tensor, b: int, at: int, places: Tensor, q: Tensor, far: Tensor,
             *cells: Tensor) -> Tensor:
    """What queries (Z, m, r, d) of the blocks from seen.first + at on gather: a softmax over near, heavy and retrieved
    keys and what is left in the cells, (Z, m, K, .), of these blocks."""
    cells, m = Cells(*cells), q.shape[1]
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
    there, places = places >= 0, places.clamp(min=0)
    exact = (rows_at(seen.y, places) @ q.unsqueeze(-1)).squeeze(-1).masked_fill(~there, HIDDEN)  # (Z, m, r, o)
    cell = seen.cell.gather(1, places.flatten(1)).view(places.shape)
    with torch.no_grad():    # a cell is shaped like all keys
        variance = (q @ epoch.metric.root.unsqueeze(1)).square().sum(-1, keepdim=True) * cells.spread.unsqueeze(-2)
    left, each = left_in_cells(q @ cells.mu.mT, variance.sqrt(), far[..., -1].unsqueeze(-2),
                               exact.masked_fill(~there, torch.inf), cell)
    top = torch.cat([*logits, exact], -1).amax(-1, keepdim=True).detach()
    shares, read, each = [torch.exp(t - top) for t in logits], torch.exp(exact - top), torch.exp(each - top)
    total = sum(t.sum(-1, keepdim=True) for t in (*shares, read, each * left))
    more = read - each.gather(-1, cell).masked_fill(~there, 0.0)      # than as one of those that are left
    out = sum(share @ value for share, value in zip(shares, values))
    out = out + each @ far[..., :-1] + (more.unsqueeze(-2) @ rows_at(seen.v, places)).squeeze(-2)
    return out / total
