"""A tree over keys, and which of its leaves a query reads: the keys that it asks for, in time logarithmic in their
number.

Legend: Z = batch x key heads, m keys y with z as in choice.py, R queries q, h levels; a node of a level holds as many
keys as any other. Nothing here carries a gradient. Derived here.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.nearfar.choice import Metric
from crt_exp.attention.nearfar.engine.constants import LEAST

LEAF = 16       # keys of a leaf at most
TURNS = 4       # of the power iteration that finds the main axis of a node
FIRST = 64      # nodes of the level at which a descent begins, at most
WIDE = 4        # nodes that are kept at a level for each leaf that is to be read


class Level(NamedTuple):
    """The nodes of one level: their mean keys (Z, N, d), root mean squared distances sqrt(tau) (Z, N), how many keys
    there are in each (Z, N)."""

    mean: Tensor
    spread: Tensor
    count: Tensor

    def rank(self, q: Tensor) -> Tensor:
        """x.mu + sqrt(tau) (Z, R, N) of queries (Z, R, d), a guess at the best logit of a node; -inf for empty ones."""
        found = q @ self.mean.mT + self.spread.unsqueeze(-2)
        return found.masked_fill(self.count.unsqueeze(-2) == 0, -torch.inf)


class Tree(NamedTuple):
    """Keys split by halves along the main axis of their z until at most LEAF are left. places (Z, N, c): of the keys of
    each leaf, -1 where there is none; levels: from the one where a descent begins down to the leaves."""

    places: Tensor
    levels: tuple[Level, ...]

    @classmethod
    @torch.no_grad()
    def of(cls, y: Tensor, metric: Metric, there: Tensor, first: int = FIRST) -> "Tree":
        """Of keys y (Z, m, d) less their shift, those that are `there` (Z, m); m >= 1."""
        (Z, m), h = y.shape[:2], max(0, math.ceil(math.log2(y.shape[1] / LEAF)))
        size = -(-m // 2**h)
        pad = size * 2**h - m
        if pad:
            y, there = (torch.cat([t, t.new_zeros(Z, pad, *t.shape[2:])], 1) for t in (y, there))
        z = torch.where(there.unsqueeze(-1), y @ metric.root, 0.0)
        order = torch.arange(m + pad, device=y.device).expand(Z, -1)
        for level in range(h):
            order = _halved(order, z, there, 2**level)
        taken = lambda t: t.gather(1, order.unsqueeze(-1).expand(-1, -1, t.shape[-1]))
        kept = taken(there.unsqueeze(-1))
        rows = torch.cat([taken(y), taken(z), taken(z.square().sum(-1, keepdim=True)), torch.ones_like(z[..., :1])], -1)
        sums = torch.where(kept, rows, 0.0).unflatten(1, (2**h, size)).sum(2)
        levels = [_level(sums, y.shape[-1])]
        while sums.shape[1] > first:
            sums = sums.unflatten(1, (sums.shape[1] // 2, 2)).sum(2)
            levels.append(_level(sums, y.shape[-1]))
        return cls(torch.where(kept.squeeze(-1), order, -1).unflatten(1, (2**h, size)), tuple(reversed(levels)))

    @torch.no_grad()
    def best(self, q: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Numbers (Z, R, k) of the leaves that promise most to queries (Z, R, d) and their ranks, k >= count where
        there are as many: level by level the best WIDE * count nodes go on."""
        kept = WIDE * count
        rank = self.levels[0].rank(q)
        nodes = torch.arange(rank.shape[-1], device=q.device).expand_as(rank)
        for level in self.levels[1:]:
            if rank.shape[-1] > kept:
                rank, at = rank.topk(kept, -1)
                nodes = nodes.gather(-1, at)
            nodes = (2 * nodes.unsqueeze(-1) + torch.arange(2, device=q.device)).flatten(-2)
            rank = level.rank(q).gather(-1, nodes) if level.mean.shape[1] <= 4 * kept else _rank_of(level, q, nodes)
        return nodes, rank


def _rank_of(level: Level, q: Tensor, nodes: Tensor) -> Tensor:
    """`Level.rank` of some nodes (Z, R, k) of each query."""
    at = nodes.flatten(1)
    mean = level.mean.gather(1, at.unsqueeze(-1).expand(-1, -1, q.shape[-1])).view(*nodes.shape, q.shape[-1])
    spread, count = (t.gather(1, at).view(nodes.shape) for t in (level.spread, level.count))
    return ((mean @ q.unsqueeze(-1)).squeeze(-1) + spread).masked_fill(count == 0, -torch.inf)


def _level(sums: Tensor, d: int) -> Level:
    """Of sums (Z, N, 2 d + 2) of [y, z, |z|^2, 1]."""
    count = sums[..., -1]
    mean = sums / count.clamp(min=LEAST).unsqueeze(-1)
    spread = (mean[..., 2 * d] - mean[..., d:2 * d].square().sum(-1)).clamp(min=0)
    return Level(mean[..., :d].contiguous(), spread.sqrt(), count)


def _halved(order: Tensor, z: Tensor, there: Tensor, nodes: int) -> Tensor:
    """The keys of each node from one end of its main axis to the other; those that are not there come last."""
    Z, m = order.shape
    parts = z.gather(1, order.unsqueeze(-1).expand(-1, -1, z.shape[-1])).unflatten(1, (nodes, m // nodes))
    kept = there.gather(1, order).unflatten(1, (nodes, m // nodes))
    mean = parts.sum(2, keepdim=True) / kept.sum(2)[..., None, None].clamp(min=1)
    parts = torch.where(kept.unsqueeze(-1), parts - mean, 0.0)
    far = parts.square().sum(-1).argmax(-1)[..., None, None].expand(-1, -1, 1, z.shape[-1])
    axis = parts.gather(2, far).mT                                                        # (Z, nodes, d, 1)
    for _ in range(TURNS):
        axis = parts.mT @ (parts @ axis)
        axis = axis / axis.norm(dim=2, keepdim=True).clamp(min=LEAST)
    along = (parts @ axis).squeeze(-1).masked_fill(~kept, torch.inf)
    return order.unflatten(1, (nodes, m // nodes)).gather(2, along.argsort(dim=-1, stable=True)).flatten(1)
