"""Near-far attention of a sequence to itself in both directions, or to another one: see call.py, whose legend is that
of this file.

With `sizes.open` each query also reads that many keys of cells exactly, those of the largest logits as whole numbers
tell them (looks.py); they leave their cells, and what is left there lies below them, as in recall.py. Keys then count
alike in their cells: queries are measured about 0, so that their mean is one more direction in which keys differ.
Derived here.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.checks import compute_dtype
from crt_exp.nearfar.causal import Codebook
from crt_exp.nearfar.choice import (
    Cells,
    Choice,
    KeyMetric,
    Sizes,
    blocks,
    grouped,
    left_in_cells,
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
        return native.applies(*tensors)

    @torch.no_grad()
    def choose(self, x: Tensor, y: Tensor, keep: Tensor | None, rows: slice) -> ChosenSets:
        """Of queries (Z, G, L, d) and keys (Z, S, d) of these rows of all."""
        metric = self._metric(x, y, keep, rows) if self.cross or self.sizes.open else None
        if self.native:
            sets = native.choose(x.float(), y.float(), self.sizes.heavy, self.sizes.cells, keep, self.factor, metric)
            return ChosenSets(KeyMetric(*sets[:3]), Choice(*sets[3:]))
        y = y.to(compute_dtype(x, y))
        metric = self._metric(x, y, keep, rows) if metric is None else metric
        y = without(y - metric.shift, keep)
        choice = Choice.of(y, metric, self.sizes.heavy, self.sizes.cells, keep)
        return ChosenSets(metric, choice)

    def _metric(self, x: Tensor, y: Tensor, keep: Tensor | None, rows: slice) -> KeyMetric:
        """Of queries factor x (Z, G, L, d) and keys factor y (Z, S, d)."""
        dtype, factor = compute_dtype(x, y), self.factor if self.native else 1.0
        y = y.to(dtype) if factor == 1 else y.to(dtype) * factor
        if self.cross:
            metric = self._across(y, keep, rows)
            return metric.untilted() if self.sizes.open else metric
        queries = None if keep is None else keep.repeat(1, x.shape[1])
        x = x.flatten(1, 2).to(dtype)
        return (KeyMetric.about_zero(x, y, queries, keep, factor) if self.sizes.open else
                KeyMetric.of(x, y, queries, keep))

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
            sets, tensors = native.Sets(*metric, *choice), (x.float(), y.float(), v.float())
            along = metric.along() if self.sizes.open else None
            result = native.attend(*tensors, sets, self.sizes.block, self.sizes.first_order, self.factor, self.cross,
                                   self.sizes.open, along)
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
        cells = summed(sums, metric, choice.centres, level, mass=not self.sizes.open)
        if self.cross:
            far = (one_hot(choice.cell, K, dtype).mT @ rows).unsqueeze(1)
        else:
            far = block_sums(blocks(rows, b), blocks(choice.cell, b), K, lag=2, both=True)
        q = grouped(x, b)
        if self.sizes.open:
            near = gather(q, window, heavy or (no_keys(y, v),), True, precise)
            out, share = self._read(q, near, far, Celled(y, v, choice.pool, choice.cell, cells, metric.along()))
        else:
            out, share, _ = gather(q, window, (*heavy, Weighted(cells.mu, far, cells.bias)), precise=precise)
        out, share = (ungrouped(t, *x.shape[1:3]) for t in (out, share))
        if self.sizes.first_order:
            g = torch.where(choice.pool, torch.exp(metric.log_weights(y) - level.amax(1, keepdim=True)), 0.0)
            slope = slopes(y, v, g, one_hot(choice.cell, K, dtype), cells.mu.squeeze(1)).unsqueeze(1)
            out = out + share * ((x - metric.tilt.unsqueeze(1)) @ slope.mT)
        spread = mean_spread(sums[..., -1].detach(), level, cells.spread.detach())
        return out, share.detach().mean((1, 2, 3)) * spread.sqrt()

    def _read(self, q: Tensor, near: Gathered, far: Tensor, given: "Celled") -> tuple[Tensor, Tensor]:
        """Outputs and shares of the cells, where each query (Z, N, r, d) reads the keys that it asks for besides what
        is near or heavy; far (Z, N or 1, K, dv + 1)."""
        b = None if self.cross else self.sizes.block

        def choose(q: Tensor, at: int) -> Tensor:
            return torch.stack([opened(given.y, given.far(at + t, b).unsqueeze(1), q[:, t], self.sizes.open)
                                for t in range(q.shape[1])], 1)

        def read(q: Tensor, places: Tensor, far: Tensor, out: Tensor, logsum: Tensor, at: int) -> tuple[Tensor, Tensor]:
            return with_cells(q, out, logsum, far, given, places)
        of_blocks = far.expand(-1, q.shape[1], -1, -1), near.out, near.logsum
        return in_parts(choose, read, parts_of(q, given.v, self.sizes.open), q, *of_blocks)


class Celled(NamedTuple):
    """Keys of cells: keys y (Z, S, d) less their shift, values (Z, S, dv), which of them lie in cells and in which
    (Z, S), the cells (Z, 1, K, .), and `KeyMetric.along` (Z or 1, d, d)."""

    y: Tensor
    v: Tensor
    pool: Tensor
    cell: Tensor
    cells: Cells
    along: Tensor

    def far(self, t: int, b: int | None) -> Tensor:
        """Which keys lie in cells for the queries of block t; b: tokens of a block, None: no key is near."""
        if b is None:
            return self.pool
        away = (torch.arange(self.pool.shape[1], device=self.pool.device).div(b, rounding_mode="floor") - t).abs() > 1
        return self.pool & away


def with_cells(q: Tensor, out: Tensor, logsum: Tensor, far: Tensor, given: Celled,
               places: Tensor) -> tuple[Tensor, Tensor]:
    """What queries (Z, m, r, d) gather that have `out` of keys whose weights add up to e^logsum, of the keys at
    `places` (Z, m, r, o), -1 for none, and of what these leave in the cells, of sums `far` (Z, m, K, dv + 1); and the
    share of the latter."""
    cell = given.cell.gather(1, places.clamp(min=0).flatten(1)).view(places.shape)
    exact, mu = reads.logits(q, given.y, places), q @ given.cells.mu.mT
    with torch.no_grad():
        along = torch.linalg.vector_norm(q @ given.along.unsqueeze(1), dim=-1, keepdim=True)
        sd = along * given.cells.spread.unsqueeze(2).sqrt()
    left, each = left_in_cells(mu, sd, far[..., -1].unsqueeze(-2), exact.masked_fill(places < 0, torch.inf), cell)
    top = torch.cat([logsum, exact], -1).amax(-1, keepdim=True).detach()
    others, read, each = torch.exp(logsum - top), torch.exp(exact - top), torch.exp(each - top)
    share = (each * left).sum(-1, keepdim=True)
    total = others + read.sum(-1, keepdim=True) + share
    more = read - each.gather(-1, cell).masked_fill(places < 0, 0.0)      # than as one of those that are left
    return (others * out + each @ far[..., :-1] + reads.sums(more, given.v, places)) / total, share / total


def no_keys(y: Tensor, v: Tensor) -> Weighted:
    """A set that weighs nothing."""
    return Weighted(y.new_zeros(len(y), 1, 1, y.shape[2]), v.new_zeros(len(v), 1, 1, v.shape[2] + 1),
                    y.new_zeros(len(y), 1, 1))


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
