"""Near-far attention of a sequence to itself in both directions, or to another one: see call.py, whose legend is that
of this file. Derived here.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.checks import compute_dtype
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
from crt_exp.nearfar.engine import native
from crt_exp.nearfar.engine.block_sums import block_sums, one_hot
from crt_exp.nearfar.engine.constants import HIDDEN
from crt_exp.nearfar.engine.sets import KeyWindow, Weighted, gather

QUERIES = 256    # of a block, where there is no window


class ChosenSets(NamedTuple):
    metric: KeyMetric
    choice: Choice


@dataclass(frozen=True)
class Both:
    """Attention of a sequence to itself in both directions, or to another one."""

    sizes: Sizes
    cross: bool
    metric: KeyMetric | None        # of earlier queries, where `cross`
    factor: float = 1.0             # in the C engine: of queries and keys as they are given
    native: bool = False            # whether the C engine does it, all heads in one call

    @torch.no_grad()
    def choose(self, x: Tensor, y: Tensor, keep: Tensor | None, rows: slice) -> ChosenSets:
        """Of queries (Z, G, L, d) and keys (Z, S, d) of these rows of all."""
        metric = self._across(y, keep, rows) if self.cross else None
        if self.native:
            sets = native.choose(x.float(), y.float(), self.sizes.heavy, self.sizes.cells, keep, self.factor, metric)
            return ChosenSets(KeyMetric(*sets[:3]), Choice(*sets[3:]))
        y = y.to(compute_dtype(x, y))
        if metric is None:
            queries = None if keep is None else keep.repeat(1, x.shape[1])
            metric = KeyMetric.of(x.flatten(1, 2).to(y.dtype), y, queries, keep)
        y = without(y - metric.shift, keep)
        choice = Choice.of(y, metric, self.sizes.heavy, self.sizes.cells, keep)
        return ChosenSets(metric, choice)

    def _across(self, y: Tensor, keep: Tensor | None, rows: slice) -> KeyMetric:
        """Of keys factor y (Z, S, d) of another sequence than the queries, which earlier ones stand for. Without these
        queries are taken to be as large as keys: those at hand may lie in the future of each other."""
        y = y.to(compute_dtype(y))
        metric = KeyMetric.of(None, y if self.factor == 1 else y * self.factor, None, keep)
        if self.metric is not None:
            metric = KeyMetric(metric.shift, *(t[rows].to(y.dtype) for t in self.metric[1:]))
        return metric

    def attend(self, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, chosen: ChosenSets) -> tuple[Tensor, Tensor]:
        """(Z, G, L, dv) and the predicted error (Z,)."""
        (metric, choice), dtype = chosen, compute_dtype(x, y, v)
        if self.native:
            sets, tensors = native.Sets(*metric, *choice), (x.float(), y.float(), v.float())
            result = native.attend(*tensors, sets, self.sizes.block, self.sizes.first_order, self.factor, self.cross)
            spread = mean_spread(result.sums[:, None, :, -1], result.level, result.spread.unsqueeze(1))
            return result.out, result.share.mean((1, 2)) * spread.sqrt()
        x, y, v = x.to(dtype), without(y.to(dtype) - metric.shift, keep), without(v, keep).to(dtype)
        b = min(QUERIES if self.cross else self.sizes.block, x.shape[2])
        window = None if self.cross else KeyWindow(blocks(y, b), blocks(v, b), _bias(choice, keep, b))
        heavy = heavy_set(y, v, choice)
        level = levels(y.detach(), metric, choice)
        K = choice.centres.shape[1]
        rows, sums = sums_of_cells(y, v, metric, choice, level)
        sums = sums.unsqueeze(1)
        cells = summed(sums, metric, choice.centres, level)
        if self.cross:
            far = (one_hot(choice.cell, K, dtype).mT @ rows).unsqueeze(1)
        else:
            far = block_sums(blocks(rows, b), blocks(choice.cell, b), K)
        gathered = gather(grouped(x, b), window, (*heavy, Weighted(cells.mu, far, cells.bias)))
        out, share = (ungrouped(t, *x.shape[1:3]) for t in gathered)
        if self.sizes.first_order:
            g = torch.where(choice.pool, torch.exp(metric.log_weights(y) - level.amax(1, keepdim=True)), 0.0)
            slope = slopes(y, v, g, one_hot(choice.cell, K, dtype), cells.mu.squeeze(1)).unsqueeze(1)
            out = out + share * ((x - metric.tilt.unsqueeze(1)) @ slope.mT)
        spread = mean_spread(sums[..., -1].detach(), level, cells.spread.detach())
        return out, share.detach().mean((1, 2, 3)) * spread.sqrt()


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
