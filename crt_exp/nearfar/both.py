"""Near-far attention of a sequence to itself in both directions, or to another one: see call.py, whose legend is that
of this file.

With `sizes.open` each query also reads that many keys of cells exactly, those that it asks for most; they leave their
cells. Derived here.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.checks import compute_dtype
from crt_exp.nearfar.causal import Codebook
from crt_exp.nearfar.choice import (
    Choice,
    KeyMetric,
    Sizes,
    blocks,
    grouped,
    levels,
    mean_spread,
    slopes,
    summed,
    sums_of_cells,
    ungrouped,
    without,
)
from crt_exp.nearfar.engine import native, reads
from crt_exp.nearfar.engine.block_sums import block_sums, one_hot
from crt_exp.nearfar.engine.constants import HIDDEN
from crt_exp.nearfar.engine.sets import Gathered, Weighted, KeyWindow
from crt_exp.nearfar.engine.windows import gather
from crt_exp.nearfar.looks import opened
from crt_exp.nearfar.recall import in_parts, parts_of

QUERIES = 256    # of a block, where there is no window


class ChosenSets(NamedTuple):
    metric: KeyMetric
    choice: Choice


@dataclass(frozen=True)
class Both:
    """Attention of a sequence to itself in both directions, or to another one."""

    sizes: Sizes
    cross: bool
    codebook: Codebook | None
    factor: float = 1.0             # in the C engine: of queries and keys as they are given
    native: bool = False            # whether the C engine does it: `in_c`, asked once of all tensors of a call

    def in_c(self, *tensors: Tensor) -> bool:
        """Whether the C engine does it, all heads in one call."""
        return not self.sizes.open and native.applies(*tensors)

    @torch.no_grad()
    def choose(self, x: Tensor, y: Tensor, keep: Tensor | None, rows: slice) -> ChosenSets:
        """Of queries (Z, G, L, d) and keys (Z, S, d) of these rows of all."""
        if self.native:
            keys = y.float()
            measure = self._across(self.factor * keys, keep, rows) if self.cross else None
            sets = native.choose(x.float(), keys, self.sizes.heavy, self.sizes.cells, keep, self.factor, measure)
            return ChosenSets(KeyMetric(*sets[:3]), Choice(*sets[3:]))
        dtype = compute_dtype(x, y)
        y = y.to(dtype)
        if self.cross:
            metric = self._across(y, keep, rows)
        else:
            queries = None if keep is None else keep.repeat(1, x.shape[1])
            metric = KeyMetric.of(x.flatten(1, 2).to(dtype), y, queries, keep)
        y = without(y - metric.shift, keep)
        choice = Choice.of(y, metric, self.sizes.heavy, self.sizes.cells, keep)
        return ChosenSets(metric, choice)

    def _across(self, y: Tensor, keep: Tensor | None, rows: slice) -> KeyMetric:
        """Of keys (Z, S, d) of another sequence than the queries, which those of the codebook stand for. Without one
        queries are taken to be as large as keys: those at hand may lie in the future of each other."""
        metric = KeyMetric.of(None, y, None, keep)
        if self.codebook is not None:
            known = self.codebook.at(rows).to(y.dtype).metric
            metric = KeyMetric(metric.shift, *(t.expand(len(y), -1, -1) for t in known[1:]))
        return metric

    def attend(self, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, chosen: ChosenSets) -> tuple[Tensor, Tensor]:
        """(Z, G, L, dv) and the predicted error (Z,)."""
        (metric, choice), dtype, precise = chosen, compute_dtype(x, y, v), x.dtype == torch.float32
        if self.native:
            sets, sizes = native.Sets(*metric, *choice), self.sizes
            tensors = x.float(), y.float(), v.float()
            result = native.attend(*tensors, sets, sizes.block, sizes.first_order, self.factor, self.cross)
            spread = mean_spread(result.sums[:, None, :, -1], result.level, result.spread.unsqueeze(1))
            return result.out, result.share.mean((1, 2)) * spread.sqrt()
        x, y, v = x.to(dtype), without(y.to(dtype) - metric.shift, keep), without(v, keep).to(dtype)
        b = min(QUERIES if self.cross else self.sizes.block, x.shape[2])
        window = None if self.cross else KeyWindow(blocks(y, b), blocks(v, b), _bias(choice, keep, b), after=True)
        heavy = heavy_set(y, v, choice)
        level = levels(y.detach(), metric, choice)
        K = choice.centres.shape[1]
        rows, sums = sums_of_cells(y, v, metric, choice, level)
        sums = sums.unsqueeze(1)
        cells = summed(sums, metric, choice.centres, level)
        if self.cross:
            far = (one_hot(choice.cell, K, dtype).mT @ rows).unsqueeze(1)
        else:
            far = block_sums(blocks(rows, b), blocks(choice.cell, b), K, lag=2, both=True)
        q = grouped(x, b)
        result = gather(q, window, (*heavy, Weighted(cells.mu, far, cells.bias)), self.sizes.open > 0, precise)
        out, share = result.out, result.share
        if self.sizes.open:
            log_u = metric.log_weights(y) - level.gather(1, choice.cell)
            given = Celled(y, v, choice.pool, choice.cell, log_u, cells.mu.squeeze(1), cells.bias.squeeze(1))
            out, share = self._reopened(q, result, given)
        out, share = (ungrouped(t, *x.shape[1:3]) for t in (out, share))
        if self.sizes.first_order:
            g = torch.where(choice.pool, torch.exp(metric.log_weights(y) - level.amax(1, keepdim=True)), 0.0)
            slope = slopes(y, v, g, one_hot(choice.cell, K, dtype), cells.mu.squeeze(1)).unsqueeze(1)
            out = out + share * ((x - metric.tilt.unsqueeze(1)) @ slope.mT)
        spread = mean_spread(sums[..., -1].detach(), level, cells.spread.detach())
        return out, share.detach().mean((1, 2, 3)) * spread.sqrt()

    def _reopened(self, q: Tensor, gathered: Gathered, given: "Celled") -> tuple[Tensor, Tensor]:
        """Outputs and shares of the cells, where each query (Z, N, r, d) reads the keys that it asks for too."""
        b = None if self.cross else self.sizes.block

        def choose(q: Tensor, at: int) -> Tensor:
            return torch.stack([opened(given.y, given.far(at + t, b).unsqueeze(1), q[:, t], self.sizes.open)
                                for t in range(q.shape[1])], 1)

        def read(q: Tensor, places: Tensor, *now: Tensor, at: int) -> tuple[Tensor, Tensor]:
            return reopened(q, Gathered(*now), given, places)
        return in_parts(choose, read, parts_of(q, given.v, self.sizes.open), q, *gathered)


class Celled(NamedTuple):
    """Keys of cells: keys y (Z, S, d) less their shift, values (Z, S, dv), which of them lie in cells and in which
    (Z, S), the log of their weight there (Z, S), and the cells' mu (Z, K, d) and bias (Z, K)."""

    y: Tensor
    v: Tensor
    pool: Tensor
    cell: Tensor
    log_u: Tensor
    mu: Tensor
    bias: Tensor

    def far(self, t: int, b: int | None) -> Tensor:
        """Which keys lie in cells for the queries of block t; b: tokens of a block, None: no key is near."""
        if b is None:
            return self.pool
        away = (torch.arange(self.pool.shape[1], device=self.pool.device).div(b, rounding_mode="floor") - t).abs() > 1
        return self.pool & away


def reopened(q: Tensor, gathered: Gathered, given: Celled, places: Tensor) -> tuple[Tensor, Tensor]:
    """What queries (Z, m, r, d) have gathered, with the keys at `places` (Z, m, r, o), -1 for none, read exactly: each
    of them leaves its cell."""
    there, at = places >= 0, places.clamp(min=0).flatten(1)
    cell, log_u = (t.gather(1, at).view(places.shape) for t in (given.cell, given.log_u))
    exact = reads.logits(q, given.y, places)
    of_cells = q @ given.mu.unsqueeze(1).mT + given.bias[:, None, None]
    before = (of_cells.gather(-1, cell) + log_u).masked_fill(~there, HIDDEN)
    top = torch.cat([gathered.logsum, exact], -1).amax(-1, keepdim=True).detach()
    others, less = torch.exp(gathered.logsum - top), torch.exp(before - top)
    change = torch.exp(exact - top) - less
    total = others + change.sum(-1, keepdim=True)
    out = others * gathered.out + reads.sums(change, given.v, places)
    return out / total, (others * gathered.share - less.sum(-1, keepdim=True)) / total


def _bias(choice: Choice, keep: Tensor | None, b: int) -> Tensor:
    """HIDDEN for keys that are masked, heavy or beyond the last, (Z, N, b)."""
    near = torch.ones_like(choice.pool) if keep is None else keep
    near = near.scatter(1, choice.heavy, False)
    return torch.where(blocks(near, b), 0.0, HIDDEN)


def heavy_set(y: Tensor, v: Tensor, choice: Choice) -> tuple[Weighted, ...]:
    if not choice.heavy.shape[1]:
        return ()
    keys, values = (t.gather(1, choice.heavy.unsqueeze(-1).expand(-1, -1, t.shape[-1])) for t in (y, v))
    there = choice.there.unsqueeze(-1).to(v.dtype)
    return Weighted(keys.unsqueeze(1), torch.cat([values * there, there], -1).unsqueeze(1),
                    y.new_zeros(len(y), 1, keys.shape[1])),
