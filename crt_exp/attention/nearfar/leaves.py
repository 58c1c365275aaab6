"""Leaves of keys that lie together, by which a query finds the keys that it asks for.

The blocks of keys that have left the window are grouped in pages, of 1, 4, 16, ... blocks: as many of the largest as
fit, then of the next ones. A page of P keys is halved along its main axis until a leaf has P / 2^h keys, at least LEAF.
So the leaves depend on how many blocks there are and on their keys alone, and each key is sorted log4(blocks) times.

Legend: Z = batch x key heads, blocks of b tokens, w keys of a leaf, N leaves, R queries. It is all called without a
gradient. Derived here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.nearfar.engine.constants import GROWN, LEAF, LEAST, SAMPLED, SPREADS, TURNS


def width(b: int) -> int:
    """Keys of a leaf: b halved as often as LEAF are left."""
    while b % 2 == 0 and b >= 2 * LEAF:
        b //= 2
    return b


def pages(blocks: int) -> list[tuple[int, int]]:
    """(first, blocks) of the pages of so many blocks."""
    result, first, size = [], 0, 1
    while size * GROWN <= blocks:
        size *= GROWN
    while first < blocks:
        while size > blocks - first:
            size //= GROWN
        result.append((first, size))
        first += size
    return result


class Leaves(NamedTuple):
    """order (Z, N, w): places of the keys of each leaf. Of those that are there: how many (Z, N), their mean mu
    (Z, N, d), and SPREADS times the root of their mean squared distance to it over d (Z, N)."""

    order: Tensor
    count: Tensor
    mean: Tensor
    reach: Tensor

    @classmethod
    def of(cls, y: Tensor, there: Tensor, w: int, first: int = 0) -> "Leaves":
        """Of a page of keys y (Z, P, d), those that are `there` (Z, P), from the place `first` on."""
        order, nodes = torch.arange(y.shape[1], device=y.device).expand(len(y), -1), 1
        while y.shape[1] // nodes > w:
            order = _halved(order, y, there, nodes)
            nodes *= 2
        at = order.unsqueeze(-1)
        keys, u = (t.take_along_dim(at, 1).unflatten(1, (nodes, w)) for t in (y, there.unsqueeze(-1).to(y.dtype)))
        count = u.sum((2, 3))
        mean = (keys * u).sum(2) / count.unsqueeze(-1).clamp(min=LEAST)
        spread = ((keys - mean.unsqueeze(2)) * u).square().sum((2, 3)) / count.clamp(min=LEAST) / y.shape[-1]
        return cls(order.unflatten(1, (nodes, w)) + first, count, mean, SPREADS * spread.sqrt())

    def rank(self, q: Tensor) -> Tensor:
        """q.mu + |q| reach (Z, R, N) of queries (Z, R, d), a guess at the best logit of a leaf, with q and mu in
        bfloat16; -inf: empty ones."""
        reach = torch.linalg.vector_norm(q, dim=-1, keepdim=True) * self.reach.unsqueeze(-2)
        q, mean = (t.to(torch.bfloat16).to(t.dtype) for t in (q, self.mean))
        return (q @ mean.mT + reach).masked_fill(self.count.unsqueeze(-2) == 0, -torch.inf)

    def best(self, q: Tensor, leaves: int) -> Tensor:
        """Places (Z, R, k) of the keys of so many leaves that promise most to queries (Z, R, d)."""
        at = self.rank(q).topk(min(leaves, self.count.shape[1]), -1).indices
        w = self.order.shape[-1]
        places = self.order.gather(1, at.flatten(1).unsqueeze(-1).expand(-1, -1, w))
        return places.view(*at.shape[:2], at.shape[2] * w)


class Pages:
    """The leaves of any number of blocks of keys, each page sorted once."""

    def __init__(self, b: int, sorted: dict[tuple[int, int], Leaves] | None = None):
        self.b, self.sorted = b, sorted or {}

    def of(self, blocks: int, y: Tensor, there: Tensor) -> Leaves:
        """Of the first `blocks` of keys y (Z, S, d), those that are `there` (Z, S)."""
        wanted = pages(blocks)
        for page in wanted:
            if page not in self.sorted:
                first, size = (number * self.b for number in page)
                own, kept = (t[:, first:first + size] for t in (y, there))
                self.sorted[page] = Leaves.of(own, kept, width(self.b), first)
        return Leaves(*(torch.cat(parts, 1) for parts in zip(*(self.sorted[page] for page in wanted))))

    def only(self, blocks: int) -> "Pages":
        """Without the pages that so many blocks, and more, have no use for."""
        return Pages(self.b, {page: self.sorted[page] for page in pages(blocks) if page in self.sorted})


def _halved(order: Tensor, y: Tensor, there: Tensor, nodes: int) -> Tensor:
    """What each node holds from one end of its main axis to the other; those that are not there come last."""
    size = order.shape[1] // nodes
    parts = y.gather(1, order.unsqueeze(-1).expand(-1, -1, y.shape[-1])).unflatten(1, (nodes, size))
    kept, order = (t.unflatten(1, (nodes, size)) for t in (there.gather(1, order), order))
    sample = (kept & (order % max(1, size // SAMPLED) == 0)).unsqueeze(-1)
    mean = torch.where(sample, parts, 0.0).sum(2, keepdim=True) / sample.sum(2, keepdim=True).clamp(min=1)
    parts = parts - mean
    seen = torch.where(sample, parts, 0.0)
    far = seen.square().sum(-1).argmax(-1)[..., None, None].expand(-1, -1, 1, y.shape[-1])
    axis = seen.gather(2, far).mT                                                         # (Z, nodes, d, 1)
    for _ in range(TURNS):
        axis = seen.mT @ (seen @ axis)
        axis = axis / axis.norm(dim=2, keepdim=True).clamp(min=LEAST)
    along = (parts @ axis).squeeze(-1).masked_fill(~kept, torch.inf)
    return order.gather(2, along.argsort(dim=-1, stable=True)).flatten(1)
