"""Causal near-far attention: what each block of queries sees of the blocks before it, in parallel and token by token.

Legend: Z = batch x key heads, G query heads of a group, L queries, S keys y, d, dv; N blocks of b tokens, n heavy keys,
K cells. Queries of block t see their own block up to themselves and block t - 1; of the keys up to block t - 2 the n
with the largest score are heavy, and the others lie in the cells of the nearest centres. Where block t begins, the keys
of block t - 2 leave the window: of these and the heavy ones so far those of the lowest scores go to their cells. Metric
and centres are of earlier sequences; weights, values, means and spreads of the cells are sums over their keys.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.attention.checks import check_result, compute_dtype
from crt_exp.nearfar.choice import (
    Cells,
    KeyMetric,
    Sizes,
    blocks,
    grouped,
    mean_spread,
    moments,
    nearest,
    scores,
    summed,
    ungrouped,
    weights,
    without,
)
from crt_exp.nearfar.engine import native
from crt_exp.nearfar.engine.block_sums import block_sums
from crt_exp.nearfar.engine.constants import AWAY, HIDDEN, LEAST
from crt_exp.nearfar.engine.sets import Weighted, KeyWindow
from crt_exp.nearfar.engine.windows import gather


class Codebook(NamedTuple):
    """What causal attention measures keys by and sorts them into: of earlier sequences."""

    metric: KeyMetric
    centres: Tensor   # (Z or 1, K, d), keys as they come; a copy of the first is no centre, there being too few

    def at(self, rows: slice) -> "Codebook":
        return Codebook(self.metric.at(rows), self.centres if len(self.centres) == 1 else self.centres[rows])

    def to(self, dtype: torch.dtype) -> "Codebook":
        return Codebook(KeyMetric(*(t.to(dtype) for t in self.metric)), self.centres.to(dtype))

    @property
    def measured(self) -> Tensor:
        """The centres as z, (Z or 1, K, d), AWAY where they are none: between equal ones rounding would decide."""
        copies = (self.centres == self.centres[:, :1]).all(-1, keepdim=True)
        copies = copies & (torch.arange(copies.shape[1], device=copies.device) > 0).unsqueeze(-1)
        return ((self.centres - self.metric.shift) @ self.metric.root).masked_fill(copies, AWAY)

    @property
    def level(self) -> Tensor:
        """w of the centres, (Z or 1, K): what the weights of the keys of a cell are relative to."""
        return self.metric.log_weights(self.centres - self.metric.shift)


class Left(NamedTuple):
    """Where the keys are at the beginning of each block: places among all S keys."""

    heavy: Tensor     # (Z, N, n)
    there: Tensor     # (Z, N, n): whether there are as many
    left: Tensor      # (Z, N, b): those that go to their cells
    joins: Tensor     # (Z, N, b): whether there are as many


class ChosenPlaces(NamedTuple):
    """The codebook alone where the C engine does the rest."""

    book: Codebook
    cell: Tensor | None = None      # (Z, S): of every key, where it will go
    places: Left | None = None


def displaced(held: Tensor, score: Tensor, new: Tensor, new_score: Tensor) -> tuple[Tensor, Tensor]:
    """Places held (Z, n) and new (Z, b), from the largest of their scores to the lowest, and these; of equal ones those
    that came first. The first n stay or become heavy."""
    order = torch.cat([score, new_score], 1).sort(dim=1, descending=True, stable=True)
    return torch.cat([held, new], 1).gather(1, order.indices), order.values


def kept_and_left(score: Tensor, b: int, heavy: int) -> Left:
    """Of scores (Z, S), -inf for masked keys, block by block."""
    (Z, S), N = score.shape, -(-score.shape[1] // b)
    padded = F.pad(score, (0, N * b - S), value=-torch.inf)
    held = torch.zeros(Z, heavy, dtype=torch.long, device=score.device)
    values = score.new_full((Z, heavy), -torch.inf)
    none = held.new_zeros(Z, heavy + b), score.new_full((Z, heavy + b), -torch.inf)
    steps = [none] * min(N, 2)
    for t in range(2, N):
        new = torch.arange((t - 2) * b, (t - 1) * b, device=score.device)
        steps.append(displaced(held, values, new.expand(Z, -1), padded[:, (t - 2) * b:(t - 1) * b]))
        held, values = (top[:, :heavy] for top in steps[-1])
    order, top = (torch.stack(parts, 1) for parts in zip(*steps))
    there = top > -torch.inf
    return Left(order[..., :heavy], there[..., :heavy], order[..., heavy:], there[..., heavy:])


@dataclass(frozen=True)
class CausalNearFar:
    sizes: Sizes
    codebook: Codebook
    factor: float = 1.0             # in the C engine: of queries and keys as they are given
    native: bool = False            # whether the C engine does it: `in_c`, asked once of all tensors of a call

    def in_c(self, *tensors: Tensor) -> bool:
        """Whether the C engine does it, all heads in one call."""
        return not self.sizes.first_order and native.applies(*tensors)

    @torch.no_grad()
    def choose(self, x: Tensor, y: Tensor, keep: Tensor | None, rows: slice) -> ChosenPlaces:
        book = self.codebook.at(rows).to(compute_dtype(x, y))
        y = without(y.to(book.centres.dtype), keep)
        check_result(torch.linalg.vector_norm(x, dim=(1, 2, 3)) + torch.linalg.vector_norm(y, dim=(1, 2)))
        if self.native:
            return ChosenPlaces(book)
        y = without(y - book.metric.shift, keep)
        z = y @ book.metric.root
        score = scores(z, book.metric.log_weights(y), keep)
        places = kept_and_left(score, min(self.sizes.block, y.shape[1]), min(self.sizes.heavy, y.shape[1]))
        return ChosenPlaces(book, nearest(z, book.measured), places)

    def attend(self, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None,
               chosen: ChosenPlaces) -> tuple[Tensor, Tensor]:
        """(Z, G, L, dv) and the predicted error (Z,) of the last queries."""
        (book, cell, places), dtype, precise = chosen, compute_dtype(x, y, v), x.dtype == torch.float32
        if self.native:
            return self._in_c(x, without(y, keep), without(v, keep), keep, book)
        metric, S, (L, b) = book.metric, y.shape[1], (x.shape[2], min(self.sizes.block, y.shape[1]))
        start = (S - L) // b                                      # the block of the first query
        lead = S - L - start * b                                  # its place there
        x, y, v = x.to(dtype), without(y.to(dtype) - metric.shift, keep), without(v, keep).to(dtype)
        window = KeyWindow(blocks(y, b), blocks(v, b), _bias(keep, S, b, x), False, _future(b, x))
        heavy = _heavy(y, v, places, start)
        queries = torch.cat([x.new_zeros(*x.shape[:2], lead, x.shape[3]), x], 2) if lead else x
        u = weights(y, metric, torch.ones_like(cell, dtype=torch.bool), cell, book.level)
        rows = torch.cat([v * u.unsqueeze(-1), moments(y, u, metric, cell, book.measured)], -1)
        rows = taken(rows, places.left) * places.joins.unsqueeze(-1)
        cell = cell.gather(1, places.left.flatten(1)).view(places.left.shape)
        sums = block_sums(rows, cell, book.centres.shape[1], lag=0, both=False)[:, start:]
        far, cells = codebook_cells(sums, v.shape[-1], book)
        gathered = gather(grouped(queries, b), window, (*heavy, Weighted(cells.mu, far, cells.bias)), precise=precise)
        out, share = (ungrouped(t, x.shape[1], lead + L)[:, :, lead:] for t in (gathered.out, gathered.share))
        if self.sizes.first_order:
            outers = outer(rows[..., :v.shape[-1]], taken(y, places.left), cell, book).cumsum(1)[:, start:]
            step = (grouped(queries, b) - metric.tilt.unsqueeze(1)) @ slope(outers, far, cells.mu, book).mT
            out = out + share * ungrouped(step, x.shape[1], lead + L)[:, :, lead:]
        spread = mean_spread(far[:, -1:, :, -1].detach(), book.level, cells.spread[:, -1:].detach())
        return out, share.detach().mean((1, 2, 3)) * spread.sqrt()

    def _in_c(self, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, book: Codebook) -> tuple[Tensor, Tensor]:
        learned = (*book.metric, book.measured, book.level)
        shift, tilt, root, centres, level = (t.expand(len(y), *t.shape[1:]) for t in learned)
        most = {"block": min(self.sizes.block, y.shape[1]), "heavy": min(self.sizes.heavy, y.shape[1])}
        sizes = {**most, "cells": centres.shape[1], "open": 0, "until": 0, "bounds": 0}
        given = native.Given(keep, shift, root, sizes, self.factor, native.Book(tilt, centres, level))
        result = native.recall(x.float(), y.float(), v.float(), given)
        return result.out, result.share.mean((1, 2)) * result.spread.sqrt()


def codebook_cells(sums: Tensor, dv: int, book: Codebook) -> tuple[Tensor, Cells]:
    """[V, N] and the cells of sums (Z, N, K, dv + d + 2) of [u v] and the moments of the keys."""
    far = torch.cat([sums[..., :dv], sums[..., -1:]], -1)
    return far, summed(sums[..., dv:], book.metric, book.measured, book.level)


def taken(t: Tensor, places: Tensor) -> Tensor:
    """Rows (Z, N, k, .) of t (Z, S, .) at places (Z, N, k); F.embedding adds up gradients faster than indexing does."""
    first = torch.arange(len(t), device=t.device)[:, None, None] * t.shape[1]
    return F.embedding(places + first, t.flatten(0, 1))


def _heavy(y: Tensor, v: Tensor, places: Left, start: int) -> tuple[Weighted, ...]:
    if not places.heavy.shape[2]:
        return ()
    at, there = places.heavy[:, start:], places.there[:, start:].unsqueeze(-1).to(v.dtype)
    keys = taken(y, at)
    return Weighted(keys, torch.cat([taken(v, at) * there, there], -1), keys.new_zeros(keys.shape[:3])),


def _bias(keep: Tensor | None, S: int, b: int, like: Tensor) -> Tensor:
    """HIDDEN for keys that are masked or beyond the last, (Z, N, b)."""
    keep = torch.ones(len(like), S, dtype=torch.bool, device=like.device) if keep is None else keep
    return torch.where(blocks(keep, b), 0.0, HIDDEN).to(like.dtype)


def _future(b: int, x: Tensor) -> Tensor:
    """(G b, 2 b): HIDDEN where a key of the own block is later than the query."""
    later = torch.ones(b, 2 * b, dtype=torch.bool, device=x.device).triu(b + 1)
    return torch.where(later, HIDDEN, 0.0).to(x.dtype).repeat(x.shape[1], 1)


def outer(uv: Tensor, y: Tensor, cell: Tensor, book: Codebook) -> Tensor:
    """Sums of u e^level v y^T over keys (Z, N, b, .): (Z, N, dv, d). uv: u v."""
    scale = _relative(book).expand(len(y), -1).gather(1, cell.flatten(1)).view(*cell.shape, 1)
    return (uv * scale).mT @ y


def slope(outers: Tensor, far: Tensor, mu: Tensor, book: Codebook) -> Tensor:
    """C (Z, N, dv, d) as `choice.slopes`, of the keys in the cells; outers: sums of `outer` over them."""
    weighted = far * _relative(book)[:, None, :, None]
    mass = weighted[..., -1].sum(-1).clamp(min=LEAST)[..., None, None]
    return (outers - weighted[..., :-1].mT @ mu) / mass


def _relative(book: Codebook) -> Tensor:
    return torch.exp(book.level - book.level.amax(-1, keepdim=True))
