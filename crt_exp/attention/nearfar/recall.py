"""Causal near-far attention that remembers: each query reads the keys of its past that it asks for.

Legend: Z = batch x key heads, G query heads of a group, L queries, S keys y, d, dv; blocks of b tokens, n heavy keys, K
cells. Queries before the place `exact_until` see all earlier keys exactly. After that, queries of block t see their own
block up to themselves and block t - 1; of the keys up to block t - 2 some are heavy, and the others lie in cells and,
beside that, in the leaves of a tree (tree.py). A query ranks the leaves by what their best key may give it and reads
the keys of the best ones exactly, at most `open` of them; these leave their cells. So each key counts once.

Measure, heavy keys, centres and tree are of the keys before a renewal. Renewals lie where the sequence has grown by a
quarter or so, at places that no sequence decides: outputs depend on places and past alone. Keys that come between two
of them go to the nearest cells, and to leaves of their own block. Derived here.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from crt_exp.attention.baselines import exact_attention
from crt_exp.attention.checks import check_result, compute_dtype, transformed
from crt_exp.attention.nearfar.causal import Codebook, cells_of
from crt_exp.attention.nearfar.choice import (
    Cells,
    Choice,
    Metric,
    Sizes,
    blocks,
    grouped,
    mean_spread,
    moments,
    nearest,
    ungrouped,
    without,
)
from crt_exp.attention.nearfar.engine import reads
from crt_exp.attention.nearfar.engine.block_sums import one_hot
from crt_exp.attention.nearfar.engine.constants import HIDDEN
from crt_exp.attention.nearfar.engine.sets import log_weight, over
from crt_exp.attention.nearfar.tree import LEAF, Level, Tree

RENEWED, PART = 128, 4     # tokens between renewals at least, and as a part of the sequence so far: a quarter
LEAST_HELD = 3             # keys of a leaf, few hold fewer: `open` keys are looked for in so many leaves as this makes
NUMBERS = 2**24            # of the keys that the queries of a chunk read


def renewals(sizes: Sizes, length: int) -> list[int]:
    """The places of the renewals, multiples of the block, up to the first that is not below `length`: attention is
    exact before the first of them."""
    up = lambda n: -(-n // sizes.block) * sizes.block
    found = [max(up(sizes.exact_until), 2 * sizes.block)]
    while found[-1] < length:
        found.append(found[-1] + up(max(RENEWED, found[-1] // PART)))
    return found


class Epoch(NamedTuple):
    """What the queries from one renewal to the next know of the keys before it; no gradient."""

    start: int        # the place of the renewal
    stop: int         # of the next one
    book: Codebook
    heavy: Tensor     # (Z, n): places
    there: Tensor     # (Z, n): whether there are as many
    pool: Tensor      # (Z, start - b): which keys lie in cells
    cell: Tensor      # (Z, start - b): in which
    tree: Tree

    @classmethod
    def of(cls, y: Tensor, keep: Tensor | None, sizes: Sizes, start: int, stop: int) -> "Epoch":
        """Of keys y (Z, .., d), those before the window of the first block from `start` on, and keep (Z, ..)."""
        far = start - sizes.block
        y, keep = y[:, :far], None if keep is None else keep[:, :far]
        metric = Metric.of(None, y, None, keep)
        y = without(y - metric.shift, keep)
        choice = Choice.of(y, metric, sizes.heavy, sizes.cells, keep)
        centres = torch.linalg.solve_triangular(metric.root, choice.centres, upper=False, left=False) + metric.shift
        book, tree = Codebook(metric, centres), Tree.of(y, metric, choice.pool)
        return cls(start, stop, book, choice.heavy, choice.there, choice.pool, choice.cell, tree)


class Joined(NamedTuple):
    """What came to the cells since the renewal: whole blocks of keys that have left the window; no gradient."""

    blocks: int              # how many
    cell: Tensor             # (Z, far): of each key that is far, those before the renewal too
    leaves: Level | None     # of these blocks
    block: Tensor            # (leaves,): that of each, counted from the first of them

    @classmethod
    def none(cls, epoch: Epoch) -> "Joined":
        return cls(0, epoch.cell, None, torch.zeros(0, dtype=torch.long, device=epoch.cell.device))

    def up_to(self, blocks: int, epoch: Epoch, y: Tensor, keep: Tensor | None, sizes: Sizes) -> "Joined":
        """With those of more blocks of keys y (Z, S, d)."""
        more, b, Z = blocks - self.blocks, sizes.block, len(y)
        if more <= 0:
            return self
        start, metric = epoch.start + (self.blocks - 1) * b, epoch.book.metric
        y, there = y[:, start:start + more * b], kept_of(y, keep)[:, start:start + more * b]
        y = torch.where(there.unsqueeze(-1), y - metric.shift, 0.0)
        cell = torch.cat([self.cell, nearest(y @ metric.root, epoch.book.measured)], 1)
        each = Metric(*(t if len(t) == 1 else t.repeat_interleave(more, 0) for t in metric))
        flat = lambda t: t.unflatten(1, (more, b)).flatten(0, 1)
        level = Tree.of(flat(y), each, flat(there), top=b).levels[0]
        begin = start + torch.arange(more, device=y.device) * b
        below = torch.where(level.below < 0, -1, level.below + begin.repeat(Z)[:, None, None])
        level = Level(*(t.unflatten(0, (Z, more)).flatten(1, 2) for t in (below, *level[1:])))
        block = self.blocks + torch.arange(more, device=y.device).repeat_interleave(level.count.shape[1] // more)
        if self.leaves is not None:
            level = Level(*(torch.cat(both, 1) for both in zip(self.leaves, level)))
        return Joined(blocks, cell, level, torch.cat([self.block, block]))


@dataclass(frozen=True)
class Recall:
    sizes: Sizes
    far: None = None

    def in_c(self, *tensors: Tensor) -> bool:
        """Whether the C engine does it: not yet."""
        return False

    @torch.no_grad()
    def choose(self, x: Tensor, y: Tensor, keep: Tensor | None, rows: slice) -> list[Epoch]:
        """The epochs of queries (Z, G, L, d), the last ones of keys (Z, S, d)."""
        kept = without(y, keep)
        check_result(torch.linalg.vector_norm(x, dim=(1, 2, 3)) + torch.linalg.vector_norm(kept, dim=(1, 2)))
        places, y = renewals(self.sizes, y.shape[1]), kept.to(compute_dtype(x, y))
        first = y.shape[1] - x.shape[2]
        return [Epoch.of(y, keep, self.sizes, a, e) for a, e in zip(places, places[1:]) if e > first]

    def attend(self, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None,
               epochs: list[Epoch]) -> tuple[Tensor, Tensor]:
        """(Z, G, L, dv) and the predicted error (Z,) of the last queries."""
        dtype, (L, S) = compute_dtype(x, y, v), (x.shape[2], y.shape[1])
        x, y, v = x.to(dtype), without(y, keep).to(dtype), without(v, keep).to(dtype)
        first, until = S - L, min(renewals(self.sizes, S)[0], S)
        parts, predicted = [], x.new_zeros(len(y))
        if first < until:
            parts.append(exactly(x[:, :, :until - first], y[:, :until], v[:, :until], keep))
        for epoch in epochs:
            a, e = max(first, epoch.start), min(S, epoch.stop)
            out, predicted = self.within(epoch, x[:, :, a - first:e - first], y[:, :e], v[:, :e], keep)
            parts.append(out)
        return torch.cat(parts, 2), predicted

    def within(self, epoch: Epoch, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of queries (Z, G, l, d), the last ones of keys (Z, S, d), all in one epoch."""
        S, b, keep = y.shape[1], self.sizes.block, kept_of(y, keep)
        first = (S - x.shape[2]) // b                             # the block of the first query
        lead = S - x.shape[2] - first * b
        x = torch.cat([x.new_zeros(*x.shape[:2], lead, x.shape[3]), x], 2)
        q = grouped(x, b)
        blocks_joined = first + q.shape[1] - 1 - epoch.start // b
        with torch.no_grad():
            joined = Joined.none(epoch).up_to(blocks_joined, epoch, y, keep, self.sizes)
        far, cells = cells_of(far_sums(epoch, joined, y, v, keep, b, first, q.shape[1]), v.shape[-1], epoch.book)
        here = Seen(y, v, keep, joined.cell, far, cells, first)
        out, share = in_chunks(epoch, joined, here, q, self.sizes)
        out, share = (ungrouped(t, x.shape[1], x.shape[2])[:, :, lead:] for t in (out, share))
        spread = mean_spread(far[:, -1:, :, -1].detach(), epoch.book.level, cells.spread[:, -1:].detach())
        return out, share.detach().mean((1, 2, 3)) * spread.sqrt()


def exactly(x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    """Queries (Z, G, l, d), the last ones of keys (Z, S, d), see all that are not later."""
    mask = None if keep is None else keep[:, :y.shape[1]]
    if transformed(x, y, v):      # the fused kernel knows the backward pass alone
        seen = torch.ones(x.shape[2], y.shape[1], dtype=torch.bool, device=x.device).tril(y.shape[1] - x.shape[2])
        seen = seen if mask is None else seen & mask[:, None, None]
        logits = (x @ y.unsqueeze(1).mT).masked_fill(~seen, HIDDEN)
        return logits.softmax(-1) @ v.unsqueeze(1)
    return exact_attention(x, y.unsqueeze(1), v.unsqueeze(1), causal=True, key_mask=mask)


def kept_of(y: Tensor, keep: Tensor | None) -> Tensor:
    """Which of the keys (Z, S, d) are there, (Z, S)."""
    return torch.ones(y.shape[:2], dtype=torch.bool, device=y.device) if keep is None else keep[:, :y.shape[1]]


def rows_of(y: Tensor, v: Tensor, member: Tensor, cell: Tensor, book: Codebook) -> Tensor:
    """[v] and the moments of keys (Z, m, d) with values (Z, m, dv), 0 for those that are no `member` (Z, m)."""
    y = torch.where(member.unsqueeze(-1), y - book.metric.shift, 0.0)
    u = member.to(y.dtype)                                        # keys count alike: the mean query is not known
    return torch.cat([v * u.unsqueeze(-1), moments(y, u, book.metric, cell, book.measured)], -1)


def far_sums(epoch: Epoch, joined: Joined, y: Tensor, v: Tensor, keep: Tensor, b: int, first: int,
             count: int) -> Tensor:
    """Sums (Z, count, K, dv + d + 2) of `rows_of` the keys in cells, for each of `count` blocks from `first` on: of the
    pool and of the blocks from the renewal on that have left the window."""
    start, stop, K = epoch.start - b, joined.cell.shape[1], epoch.book.centres.shape[1]
    member = torch.cat([epoch.pool, keep[:, start:stop]], 1)
    rows = rows_of(y[:, :stop], v[:, :stop], member, joined.cell, epoch.book)
    at = max(start, (first - 1) * b)                              # the keys that are far from the first block
    sums = (one_hot(joined.cell[:, :at], K, rows.dtype).mT @ rows[:, :at]).unsqueeze(1)
    if stop > at:
        later = one_hot(blocks(joined.cell[:, at:], b), K, rows.dtype).mT @ blocks(rows[:, at:], b)
        sums = torch.cat([sums, sums + later.cumsum(1)], 1)
    return sums


@torch.no_grad()
def opened(epoch: Epoch, joined: Joined, q: Tensor, first: int, sizes: Sizes) -> Tensor:
    """Places (Z, N, r, o) of the keys that each of the queries (Z, N, r, d) of blocks from `first` on reads, -1 where
    there are fewer: those of the leaves that rank highest, as many as `open` keys hold."""
    _, N, r, _ = q.shape
    flat, lowest = q.flatten(1, 2), epoch.tree.levels[0]
    most = max(1, sizes.open // LEAST_HELD)
    leaf, rank = epoch.tree.best(flat, most)
    table, count = lowest.below, lowest.count
    if joined.leaves is not None:
        last = first - epoch.start // sizes.block - 1 + torch.arange(N, device=q.device)         # that is far, of each
        past = joined.block <= last.unsqueeze(1)
        found = joined.leaves.rank(flat).masked_fill(~past.repeat_interleave(r, 0), -torch.inf)
        more = table.shape[1] + torch.arange(found.shape[-1], device=q.device).expand_as(found)
        leaf, rank = torch.cat([leaf, more], -1), torch.cat([rank, found], -1)
        table, count = torch.cat([table, joined.leaves.below], 1), torch.cat([count, joined.leaves.count], 1)
    rank, at = rank.topk(min(most, rank.shape[-1]), -1)
    leaf = leaf.gather(-1, at)
    held = count.gather(1, leaf.flatten(1)).view(leaf.shape)
    read = (rank > -torch.inf) & (held.cumsum(-1) <= sizes.open)
    places = table.gather(1, leaf.flatten(1).unsqueeze(-1).expand(-1, -1, LEAF)).view(*leaf.shape, LEAF)
    places = torch.where(read.unsqueeze(-1), places, -1).flatten(-2)
    return places.topk(min(sizes.open, places.shape[-1]), -1).values.unflatten(1, (N, r))


class Seen(NamedTuple):
    """What the queries of some blocks see, beside the heavy keys."""

    y: Tensor         # (Z, S, d)
    v: Tensor         # (Z, S, dv)
    keep: Tensor      # (Z, S)
    cell: Tensor      # (Z, far)
    far: Tensor       # (Z, N, K, dv + 1)
    cells: Cells      # (Z, N, K, .)
    first: int        # the first block

    def at(self, rows: slice) -> "Seen":
        return self._replace(far=self.far[:, rows], cells=Cells(*(t[:, rows] for t in self.cells)),
                             first=self.first + rows.start)


def in_chunks(epoch: Epoch, joined: Joined, seen: Seen, q: Tensor, sizes: Sizes,
              own: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`gathered` of queries (Z, N, r, d), whose keys are read for some blocks at a time, and again in the backward
    pass. own (r,): their places within a block; None: the tokens of a whole block, for each head of a group."""
    own = torch.arange(sizes.block, device=q.device).repeat(q.shape[2] // sizes.block) if own is None else own
    Z, N, r, d = q.shape
    size = max(1, NUMBERS // max(1, Z * r * sizes.open * (d + seen.v.shape[-1])))
    again = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not transformed(q, seen.y, seen.v)
    found = []
    for at in range(0, N, size):
        rows = slice(at, min(at + size, N))
        places = opened(epoch, joined, q[:, rows].detach(), seen.first + at, sizes)
        given = epoch, seen.at(rows), q[:, rows], places, own, sizes.block
        found.append(checkpoint(gathered, *given, use_reentrant=False) if again else gathered(*given))
    return tuple(torch.cat(t, 1) for t in zip(*found))


def gathered(epoch: Epoch, seen: Seen, q: Tensor, places: Tensor, own: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """What queries (Z, m, r, d) gather, (Z, m, r, dv), and how much of their weight lies in cells (Z, m, r, 1): a
    softmax over near, heavy and read keys and the cells, from each of which the keys that are read are taken away."""
    m, shift = q.shape[1], epoch.book.metric.shift
    here = seen.first + torch.arange(m, device=q.device).unsqueeze(1)
    near = (here - 1) * b + torch.arange(2 * b, device=q.device)                                # (m, 2 b)
    at = near.clamp(max=seen.y.shape[1] - 1)
    visible = (near[:, None] <= (here * b + own).unsqueeze(-1)) & seen.keep[:, at].unsqueeze(2)  # (Z, m, r, 2 b)
    logits = [(q @ (seen.y[:, at] - shift.unsqueeze(1)).mT).masked_fill(~visible, HIDDEN)]
    values = [seen.v[:, at]]
    if epoch.heavy.shape[1]:
        heavy = (reads.rows(seen.y, epoch.heavy) - shift).unsqueeze(1)
        logits.append((q @ heavy.mT).masked_fill(~epoch.there[:, None, None], HIDDEN))
        values.append(reads.rows(seen.v, epoch.heavy).unsqueeze(1))
    of_cells = q @ seen.cells.mu.mT + seen.cells.bias.unsqueeze(-2)                             # (Z, m, r, K)
    logits.append(of_cells + log_weight(seen.far).unsqueeze(-2))
    values.append(seen.far[..., :-1] * over(seen.far[..., -1:]))
    exact = reads.logits(q, seen.y, shift, places)                                              # (Z, m, r, o)
    there = places >= 0
    cell = seen.cell.gather(1, places.clamp(min=0).flatten(1)).view(places.shape)
    before = of_cells.gather(-1, cell).masked_fill(~there, HIDDEN)
    top = torch.cat([*logits, exact], -1).amax(-1, keepdim=True).detach()
    shares = [torch.exp(t - top) for t in logits]
    less = torch.exp(before - top)
    change = torch.exp(exact - top) - less
    total = sum(t.sum(-1, keepdim=True) for t in shares) + change.sum(-1, keepdim=True)
    out = sum(share @ value for share, value in zip(shares, values))
    out = out + reads.sums(change, seen.v, places)
    return out / total, (shares[-1].sum(-1, keepdim=True) - less.sum(-1, keepdim=True)) / total
