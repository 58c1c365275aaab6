"""Leaves of keys that lie together, and which of them a query reads: the keys that it asks for.

Legend: Z = batch x key heads, m keys y with z as in choice.py, R queries q. A level has N nodes, each with at most LEAF
of those below, keys at the lowest. It is all called without a gradient. Derived here.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.nearfar.choice import Metric, centres_of, nearest
from crt_exp.attention.nearfar.engine.block_sums import one_hot
from crt_exp.attention.nearfar.engine.constants import LEAST, PICKS
from crt_exp.samplers.noise import transforming

LEAF = 16       # keys of a leaf, and nodes of one above, at most
EACH = 5        # of them for each centre
CHUNK = 2048    # keys whose centres are found together
TURNS = 4       # of the power iteration that finds a main axis
ROUNDS = 4      # in which centres are picked, where there are many
LLOYD = 1       # passes of Lloyd's algorithm after the one of the picks
TOP = 4096      # nodes of the level at which a descent begins, at most
SPREADS = 2     # roots of the mean squared distance by which the best key of a node is guessed to exceed its mean
WIDE = 64       # nodes that are kept at a level above the leaves, at least


class Level(NamedTuple):
    """Nodes: places of those below (Z, N, LEAF), -1 where there are fewer; how many keys there are in each (Z, N),
    their mean (Z, N, d) and SPREADS times the root of their mean squared distance to it, in z (Z, N)."""

    below: Tensor
    count: Tensor
    mean: Tensor
    spread: Tensor

    def rank(self, q: Tensor) -> Tensor:
        """x.mu + 2 sqrt(tau) (Z, R, N) of queries (Z, R, d), a guess at the best logit of a node; -inf: empty ones."""
        return (q @ self.mean.mT + self.spread.unsqueeze(-2)).masked_fill(self.count.unsqueeze(-2) == 0, -torch.inf)

    def rank_of(self, q: Tensor, nodes: Tensor) -> Tensor:
        """The same of some nodes (Z, R, k) of each query, -1 for none."""
        at = nodes.clamp(min=0).flatten(1)
        mean = self.mean.gather(1, at.unsqueeze(-1).expand(-1, -1, q.shape[-1])).view(*nodes.shape, q.shape[-1])
        spread, count = (t.gather(1, at).view(nodes.shape) for t in (self.spread, self.count))
        found = (mean @ q.unsqueeze(-1)).squeeze(-1) + spread
        return found.masked_fill((count == 0) | (nodes < 0), -torch.inf)


class Tree(NamedTuple):
    """Levels from the lowest, whose nodes are the leaves, up to one of at most TOP nodes."""

    levels: tuple[Level, ...]

    @classmethod
    def of(cls, y: Tensor, metric: Metric, there: Tensor, top: int = TOP) -> "Tree":
        """Of keys y (Z, m, d) less their shift, those that are `there` (Z, m); m >= 1."""
        z = torch.where(there.unsqueeze(-1), y @ metric.root, 0.0)
        ones = there.to(y.dtype).unsqueeze(-1)
        sums = torch.cat([y * ones, z, z.square().sum(-1, keepdim=True), ones], -1)
        levels = []
        while not levels or sums.shape[1] > top:
            below, sums = _grouped(z, there, sums)
            count = sums[..., -1]
            mean = sums / count.clamp(min=LEAST).unsqueeze(-1)
            z, there, d = mean[..., y.shape[-1]:2 * y.shape[-1]], count > 0, y.shape[-1]
            spread = SPREADS * (mean[..., 2 * d] - z.square().sum(-1)).clamp(min=0).sqrt()
            levels.append(Level(below, count, mean[..., :d].contiguous(), spread))
        return cls(tuple(levels))

    def best(self, q: Tensor, leaves: int) -> tuple[Tensor, Tensor]:
        """Leaves (Z, R, k) that promise much to queries (Z, R, d), and their ranks: below the best nodes of each level
        above, WIDE or as many as hold so many leaves twice."""
        *rest, level = self.levels
        rank = level.rank(q)
        nodes = torch.arange(rank.shape[-1], device=q.device).expand_as(rank)
        for below in reversed(rest):
            kept = min(max(WIDE, -(-2 * leaves // EACH)), rank.shape[-1])
            at = nodes.gather(-1, rank.topk(kept, -1).indices)
            below_them = level.below.gather(1, at.flatten(1).unsqueeze(-1).expand(-1, -1, LEAF))
            nodes = below_them.view(*at.shape[:2], kept * LEAF)
            level, rank = below, below.rank_of(q, nodes)
        return nodes.clamp(min=0), rank


def _grouped(z: Tensor, there: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Places (Z, N, LEAF) of what each of N new nodes holds, and sums (Z, N, k) over them, of m nodes z (Z, m, d) with
    sums (Z, m, k): by centres of chunks of them."""
    (Z, m), h = there.shape, max(0, math.ceil(math.log2(there.shape[1] / CHUNK)))
    pad = -m % 2**h
    if pad:
        z, there = (torch.cat([t, t.new_zeros(Z, pad, *t.shape[2:])], 1) for t in (z, there))
    order = torch.arange(m + pad, device=z.device).expand(Z, -1)
    for level in range(h):
        order = _halved(order, z, there, 2**level)
    size = (m + pad) // 2**h
    part = lambda t: t.gather(1, order.unsqueeze(-1).expand(-1, -1, t.shape[-1])).view(Z * 2**h, size, t.shape[-1])
    kept = part(there.unsqueeze(-1)).squeeze(-1)
    leaf, nodes = _leaves(part(z), kept)                                         # within each chunk
    leaf = leaf + nodes * torch.arange(2**h, device=z.device).repeat(Z).unsqueeze(1)
    leaf, kept, nodes = leaf.view(order.shape), kept.view(order.shape), nodes * 2**h
    leaf = torch.where(kept, leaf, nodes)
    slot = leaf.argsort(dim=1, stable=True)                                      # those of a leaf side by side
    leaf, order = leaf.gather(1, slot), order.gather(1, slot)
    at = torch.arange(leaf.shape[1], device=z.device).expand(Z, -1)
    new = torch.cat([torch.ones_like(leaf[:, :1], dtype=torch.bool), leaf[:, 1:] != leaf[:, :-1]], 1)
    within = at - torch.where(new, at, 0).cummax(1).values
    node = (new | (within % LEAF == 0)).cumsum(1) - 1                            # of at most LEAF each
    count = nodes + leaf.shape[1] // LEAF + 1
    if not (torch.compiler.is_compiling() or transforming()):
        count = int(node.masked_fill(leaf == nodes, -1).max()) + 1 if len(node) else 1
    count = max(1, count)
    spot = torch.where(leaf == nodes, count * LEAF, node * LEAF + within % LEAF)
    below = order.new_full((Z, count * LEAF + 1), -1).scatter(1, spot.clamp(max=count * LEAF), order)
    below = below[:, :-1].unflatten(1, (count, LEAF))
    rows = sums.gather(1, below.clamp(min=0).flatten(1).unsqueeze(-1).expand(-1, -1, sums.shape[-1]))
    rows = torch.where((below >= 0).flatten(1).unsqueeze(-1), rows, 0.0)
    return below, rows.unflatten(1, (count, LEAF)).sum(2)


def _leaves(z: Tensor, there: Tensor) -> tuple[Tensor, int]:
    """The nearest of some centres to each of z (C, m, d), (C, m), and how many of these there are."""
    count = max(1, z.shape[1] // EACH)
    weight = torch.where(there, 0.0, -torch.inf).to(z)
    centres = centres_of(z, weight, count, max(PICKS, count // ROUNDS))
    for _ in range(LLOYD):
        member = one_hot(nearest(z, centres), count, z.dtype) * there.unsqueeze(-1)
        N = member.sum(1).unsqueeze(-1)
        centres = torch.where(N > 0, member.mT @ z / N.clamp(min=1), centres)
    return nearest(z, centres), count


def _halved(order: Tensor, z: Tensor, there: Tensor, nodes: int) -> Tensor:
    """What each node holds from one end of its main axis to the other; those that are not there come last."""
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
