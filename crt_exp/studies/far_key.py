"""One far key that matters: heads in which each query gives 0.9 of its weight to a key of its own, far behind it.

What a mean of many keys cannot give back: the hardest case for attention that does not look at each key. Causal, L
tokens of d dimensions; the last queries are measured.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention import exact_attention, uniform_attention, window_attention
from crt_exp.nearfar import near_far_attention
from crt_exp.nearfar.choice import Sizes
from crt_exp.nearfar.engine.reads import rows
from crt_exp.nearfar.layer import NearFar

HEADS, D, QUERIES, FAR, WEIGHT, CLUSTERS = 4, 32, 256, 96, 0.9, 32
BLOCK, HEAVY, FIRST = 32, 16, 128      # of near-far attention; the place up to which it is exact
CELLS, AT = 64, 512                    # as the root of the length: so many at that length
PAGE = 16                              # keys of a page
NEAR = 64                              # keys that the peers read around the query


class Heads(NamedTuple):
    """q (1, H, QUERIES, d), the last queries of keys k and values v (1, H, L, d), to be scaled by 1."""

    q: Tensor
    k: Tensor
    v: Tensor


def drawn(length: int, clustered: bool, seed: int) -> Heads:
    g = torch.Generator().manual_seed(seed)
    k, places = keys_of(length, clustered, g), torch.arange(length - QUERIES, length)
    target = (torch.rand(HEADS, QUERIES, generator=g) * (places - FAR)).long()
    q = towards(k, target, torch.arange(length) > places.unsqueeze(1))
    return Heads(*(t.unsqueeze(0) for t in (q, k, torch.randn(HEADS, length, D, generator=g))))


def keys_of(length: int, clustered: bool, g: torch.Generator) -> Tensor:
    """(H, L, d): iid normal, or in CLUSTERS normal clusters with 0.64 of the variance between them."""
    k = torch.randn(HEADS, length, D, generator=g)
    if clustered:
        at = torch.randint(CLUSTERS, (HEADS, length), generator=g)
        k = 0.6 * k + 0.8 * rows(torch.randn(HEADS, CLUSTERS, D, generator=g), at)
    return k


def towards(k: Tensor, target: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Queries (H, R, d) that point to keys k (H, L, d) at `target` (H, R), as long as gives these WEIGHT of the weight
    among the keys that are not hidden (R, L); less where a longer key lies in the same direction, as in clusters."""
    unit = torch.nn.functional.normalize(rows(k, target), dim=-1)
    logits = unit @ k.mT
    logits = logits if hidden is None else logits.masked_fill(hidden, -torch.inf)
    low, high = torch.zeros(*target.shape, 1), torch.full((*target.shape, 1), 50.0)
    for _ in range(40):
        middle = (low + high) / 2
        less = (middle * logits).softmax(-1).gather(-1, target.unsqueeze(-1)) < WEIGHT
        low, high = torch.where(less, middle, low), torch.where(less, high, middle)
    return low * unit


def cells_at(length: int) -> int:
    return 8 * round(CELLS * (length / AT) ** 0.5 / 8)


@torch.no_grad()
def errors(length: int, clustered: bool, seed: int, opened: list[int]) -> dict[str, float]:
    """Relative error of the output of each arm, over the queries of all heads."""
    heads = drawn(length, clustered, seed)
    exact = exact_attention(*heads, causal=True)
    arms = {"uniform attention": lambda: uniform_attention(*heads, causal=True),
            "window and first tokens": lambda: window_attention(*heads, causal=True),
            "near-far, bounded": lambda: bounded(length, clustered, seed, heads)}
    ago = torch.arange(length - QUERIES, length).unsqueeze(1) - torch.arange(length)
    near, far = (ago >= 0) & (ago < NEAR), ago >= NEAR
    for count in opened:
        arms |= {f"near-far, {count} keys": opening(heads, count, length),
                 f"pages, {count} keys": partial(reading, heads, of_pages(heads.q, heads.k), near, far, count),
                 f"largest weights, {count} keys": partial(reading, heads, heads.q @ heads.k.mT, near, far, count)}
    return {name: float((arm() - exact).norm() / exact.norm()) for name, arm in arms.items()}


def opening(heads: Heads, count: int, length: int) -> Callable[[], Tensor]:
    sizes = Sizes(BLOCK, HEAVY, cells_at(length), open=count, exact_until=FIRST)
    return lambda: near_far_attention(*heads, sizes, causal=True).out


def bounded(length: int, clustered: bool, seed: int, heads: Heads) -> Tensor:
    """With a codebook of other keys of the same law, and their queries."""
    layer = NearFar(HEADS, D, preset="bounded", cells=cells_at(length), causal=True, scaling=1.0).eval()
    other = drawn(length, clustered, seed + 1000)
    with layer.calibration():
        layer(*other)
    return layer(*heads)


def of_pages(q: Tensor, k: Tensor) -> Tensor:
    """After Quest (Tang et al., 2024): a bound on the best logit of each page of consecutive keys, at its keys,
    (1, H, R, L)."""
    pages = k.unflatten(2, (-1, PAGE))
    low, high = pages.amin(3), pages.amax(3)
    return (q.clamp(min=0) @ high.mT + q.clamp(max=0) @ low.mT).repeat_interleave(PAGE, -1)


def reading(heads: tuple[Tensor, Tensor, Tensor], rank: Tensor, near: Tensor, far: Tensor, count: int) -> Tensor:
    """Softmax over the keys that are near each query and, of those that are far from it (R, L), the `count` of the
    largest rank (1, H, R, L). By the logits themselves: the largest weights, which no one knows without all of them."""
    q, k, v = heads
    best = rank.masked_fill(~far, -torch.inf).topk(min(count, rank.shape[-1]), -1).indices
    read = torch.zeros_like(rank, dtype=torch.bool).scatter(-1, best, True) & far
    return (q @ k.mT).masked_fill(~(near | read), -torch.inf).softmax(-1) @ v
