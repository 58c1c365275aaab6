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
    weights,
    without,
)
from crt_exp.attention.nearfar.engine.block_sums import one_hot
from crt_exp.attention.nearfar.engine.constants import HIDDEN
from crt_exp.attention.nearfar.engine.sets import log_weight, over
from crt_exp.attention.nearfar.tree import LEAF, Tree

RENEWED, PART = 128, 4     # tokens between renewals at least, and as a part of the sequence so far: a quarter
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
    tree: Tree

    @classmethod
    @torch.no_grad()
    def of(cls, y: Tensor, keep: Tensor | None, sizes: Sizes, start: int, stop: int) -> "Epoch":
        """Of keys y (Z, .. , d), those before the window of the first block from `start` on, and keep (Z, ..)."""
        far = start - sizes.block
        y, keep = y[:, :far], None if keep is None else keep[:, :far]
        metric = Metric.of(None, y, None, keep)
        y = without(y - metric.shift, keep)
        choice = Choice.of(y, metric, sizes.heavy, sizes.cells, keep)
        centres = torch.linalg.solve_triangular(metric.root, choice.centres, upper=False, left=False) + metric.shift
        return cls(start, stop, Codebook(metric, centres), choice.heavy, choice.there, choice.pool,
                   Tree.of(y, metric, choice.pool))


class Keys(NamedTuple):
    """The keys of an epoch, less its shift, with what they add to their cells."""

    y: Tensor         # (Z, S, d)
    v: Tensor         # (Z, S, dv)
    keep: Tensor      # (Z, S)
    cell: Tensor      # (Z, S)
    log_u: Tensor     # (Z, S)


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
        check_result(torch.linalg.vector_norm(x, dim=(1, 2, 3)) + torch.linalg.vector_norm(without(y, keep), dim=(1, 2)))
        return self.epochs(y.to(compute_dtype(x, y)), keep, y.shape[1] - x.shape[2])

    def epochs(self, y: Tensor, keep: Tensor | None, first: int) -> list[Epoch]:
        """Those of queries from the place `first` on."""
        places = renewals(self.sizes, y.shape[1])
        return [Epoch.of(y, keep, self.sizes, a, e) for a, e in zip(places, places[1:]) if e > first]

    def attend(self, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None,
               epochs: list[Epoch]) -> tuple[Tensor, Tensor]:
        """(Z, G, L, dv) and the predicted error (Z,) of the last queries."""
        dtype, (L, S) = compute_dtype(x, y, v), (x.shape[2], y.shape[1])
        x, y, v = x.to(dtype), without(y, keep).to(dtype), without(v, keep).to(dtype)
        first, until = S - L, min(renewals(self.sizes, S)[0], S)
        parts, predicted = [], x.new_zeros(len(y))
        if first < until:
            mask = None if keep is None else keep[:, :until]
            parts.append(exact_attention(x[:, :, :until - first], y[:, None, :until], v[:, None, :until], causal=True,
                                         key_mask=mask))
        for epoch in epochs:
            a, e = max(first, epoch.start), min(S, epoch.stop)
            mask = None if keep is None else keep[:, :e]
            out, predicted = self.within(epoch, x[:, :, a - first:e - first], y[:, :e], v[:, :e], mask)
            parts.append(out)
        return torch.cat(parts, 2), predicted

    def within(self, epoch: Epoch, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of queries (Z, G, l, d), the last ones of keys (Z, S, d), all in one epoch."""
        S, b, book = y.shape[1], self.sizes.block, epoch.book
        keys = keys_of(epoch, y, v, keep)
        first = (S - x.shape[2]) // b                             # the block of the first query
        lead = S - x.shape[2] - first * b
        x = torch.cat([x.new_zeros(*x.shape[:2], lead, x.shape[3]), x], 2)
        q = grouped(x, b)
        far, cells = cells_of(far_sums(epoch, keys, b, first, q.shape[1]), v.shape[-1], book)
        places = opened(epoch, keys, q.detach(), first, self.sizes)
        parts = []
        for at in chunks(q, places, v.shape[-1]):
            here = Part(q[:, at], places[:, at], far[:, at], Cells(*(t[:, at] for t in cells)))
            given = (epoch, keys, here, first + at.start, b)
            again = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not transformed(x, y, v)
            parts.append(checkpoint(gathered, *given, use_reentrant=False) if again else gathered(*given))
        out, share = (ungrouped(torch.cat(t, 1), x.shape[1], x.shape[2])[:, :, lead:] for t in zip(*parts))
        spread = mean_spread(far[:, -1:, :, -1].detach(), book.level, cells.spread[:, -1:].detach())
        return out, share.detach().mean((1, 2, 3)) * spread.sqrt()


def keys_of(epoch: Epoch, y: Tensor, v: Tensor, keep: Tensor | None) -> Keys:
    keep = torch.ones(y.shape[:2], dtype=torch.bool, device=y.device) if keep is None else keep
    book = epoch.book
    y = without(y - book.metric.shift, keep)
    cell = nearest(y.detach() @ book.metric.root, book.measured)
    level = book.level.expand(len(y), -1).gather(1, cell)
    return Keys(y, v, keep, cell, book.metric.log_weights(y) - level)


def far_sums(epoch: Epoch, keys: Keys, b: int, first: int, count: int) -> Tensor:
    """Sums (Z, count, K, dv + d + 2) of [u v] and the moments of the keys in cells, for each of `count` blocks from
    `first` on: of the pool and of the blocks from the renewal on that have left the window."""
    book, (Z, S), start = epoch.book, keys.cell.shape, epoch.start - b
    K, stop = book.centres.shape[1], max(start, (first + count - 2) * b)
    member = torch.cat([epoch.pool, keys.keep[:, start:stop]], 1)[:, :stop]
    cell = keys.cell[:, :stop]
    u = weights(keys.y[:, :stop], book.metric, member, cell, book.level)
    rows = moments(keys.y[:, :stop], u, book.metric, cell, book.measured)
    rows = torch.cat([keys.v[:, :stop] * u.unsqueeze(-1), rows], -1)
    at = max(start, (first - 1) * b)                              # the keys that are far from the first block
    sums = (one_hot(cell[:, :at], K, rows.dtype).mT @ rows[:, :at]).unsqueeze(1)
    if stop > at:
        later = one_hot(blocks(cell[:, at:], b), K, rows.dtype).mT @ blocks(rows[:, at:], b)
        sums = torch.cat([sums, sums + later.cumsum(1)], 1)
    return sums


@torch.no_grad()
def opened(epoch: Epoch, keys: Keys, q: Tensor, first: int, sizes: Sizes) -> Tensor:
    """Places (Z, N, r, o) of the keys that each of the queries (Z, N, r, d) of blocks from `first` on reads, -1 where
    there are fewer: those of the leaves that rank highest, as many as `open` keys hold."""
    (Z, N, r, d), b, start = q.shape, sizes.block, epoch.start - sizes.block
    flat = q.flatten(1, 2)
    least = min(epoch.tree.places.shape[2], LEAF)
    leaf, rank = epoch.tree.best(flat, -(-sizes.open // least))
    tables = [epoch.tree.places]
    joined = max(0, (first + N - 2) * b - start) // b
    if joined:                                                    # leaves of each block that came since
        y = keys.y[:, start:start + joined * b].unflatten(1, (joined, b)).flatten(0, 1)
        there = keys.keep[:, start:start + joined * b].unflatten(1, (joined, b)).flatten(0, 1)
        metric = Metric(*(t if len(t) == 1 else t.repeat_interleave(joined, 0) for t in epoch.book.metric))
        tree = Tree.of(y, metric, there)
        each = tree.places.shape[1]
        begin = start + torch.arange(joined, device=q.device) * b
        places = torch.where(tree.places < 0, -1, tree.places.unflatten(0, (Z, joined)).flatten(0, 1)
                             + begin.repeat(Z)[:, None, None])
        tables.append(places.unflatten(0, (Z, joined)).flatten(1, 2))
        level = tree.levels[-1]
        level = type(level)(*(t.unflatten(0, (Z, joined)).flatten(1, 2) for t in level))
        block = start // b + torch.arange(joined, device=q.device)
        past = block <= (first + torch.arange(N, device=q.device) - 2).unsqueeze(1)              # (N, joined)
        seen = past.repeat_interleave(each, 1)[:, None].expand(-1, r, -1).flatten(0, 1)           # (N r, leaves)
        found = level.rank(flat).masked_fill(~seen, -torch.inf)
        more = tables[0].shape[1] + torch.arange(found.shape[-1], device=q.device).expand_as(found)
        leaf, rank = torch.cat([leaf, more], -1), torch.cat([rank, found], -1)
    table, least = padded(tables), min(t.shape[2] for t in tables)
    rank, at = rank.topk(min(-(-sizes.open // least), rank.shape[-1]), -1)
    leaf = leaf.gather(-1, at)
    places = table.gather(1, leaf.flatten(1).unsqueeze(-1).expand(-1, -1, table.shape[2])).view(*leaf.shape, -1)
    held = (places >= 0).sum(-1)
    read = (rank > -torch.inf) & (held.cumsum(-1) <= sizes.open)
    return torch.where(read.unsqueeze(-1), places, -1).flatten(-2).unflatten(1, (N, r))


def padded(tables: list[Tensor]) -> Tensor:
    """Tables of leaves (Z, N, c) one after the other, as wide as the widest."""
    width = max(t.shape[2] for t in tables)
    return torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[2]), value=-1) for t in tables], 1)


class Part(NamedTuple):
    """Some blocks of queries, the places that they read, and the cells that they see."""

    q: Tensor         # (Z, m, r, d)
    places: Tensor    # (Z, m, r, o)
    far: Tensor       # (Z, m, K, dv + 1)
    cells: Cells


def chunks(q: Tensor, places: Tensor, dv: int) -> list[slice]:
    Z, N, r, d = q.shape
    size = max(1, NUMBERS // max(1, Z * r * places.shape[-1] * (d + dv)))
    return [slice(at, min(at + size, N)) for at in range(0, N, size)]


def gathered(epoch: Epoch, keys: Keys, part: Part, first: int, b: int) -> tuple[Tensor, Tensor]:
    """What the queries of a part gather, (Z, m, r, dv), and how much of their weight lies in cells (Z, m, r, 1)."""
    (q, places, far, cells), (Z, m, r, d) = part, part.q.shape
    here = first + torch.arange(m, device=q.device).unsqueeze(1)
    near = (here - 1) * b + torch.arange(2 * b, device=q.device)                               # (m, 2 b)
    at = near.clamp(max=keys.y.shape[1] - 1)
    own = (here * b + torch.arange(b, device=q.device)).repeat(1, r // b)                       # (m, r)
    seen = (near[:, None] <= own.unsqueeze(-1)) & keys.keep[:, at].unsqueeze(2)                 # (Z, m, r, 2 b)
    logits = [(q @ keys.y[:, at].mT).masked_fill(~seen, HIDDEN)]
    values = [keys.v[:, at]]
    rows = lambda t, index: t.gather(1, index.flatten(1).unsqueeze(-1).expand(-1, -1, t.shape[-1])).view(
        *index.shape, t.shape[-1])
    if epoch.heavy.shape[1]:
        logits.append((q @ rows(keys.y, epoch.heavy).unsqueeze(1).mT).masked_fill(~epoch.there[:, None, None], HIDDEN))
        values.append(rows(keys.v, epoch.heavy).unsqueeze(1))
    of_cells = q @ cells.mu.mT + cells.bias.unsqueeze(-2)                                       # (Z, m, r, K)
    logits.append(of_cells + log_weight(far).unsqueeze(-2))
    values.append(far[..., :-1] * over(far[..., -1:]))
    there, places = places >= 0, places.clamp(min=0)
    read = rows(keys.y, places)                                                                 # (Z, m, r, o, d)
    cell, log_u = (t.gather(1, places.flatten(1)).view(places.shape) for t in (keys.cell, keys.log_u))
    exactly = (read @ q.unsqueeze(-1)).squeeze(-1).masked_fill(~there, HIDDEN)
    before = (of_cells.gather(-1, cell) + log_u).masked_fill(~there, HIDDEN)
    top = torch.cat([*logits, exactly], -1).amax(-1, keepdim=True).detach()
    shares = [torch.exp(t - top) for t in logits]
    less = torch.exp(before - top)
    change = torch.exp(exactly - top) - less
    total = sum(t.sum(-1, keepdim=True) for t in shares) + change.sum(-1, keepdim=True)
    out = sum(share @ value for share, value in zip(shares, values))
    out = out + (change.unsqueeze(-2) @ rows(keys.v, places)).squeeze(-2)
    return out / total, (shares[-1].sum(-1, keepdim=True) - less.sum(-1, keepdim=True)) / total
