"""One far key that matters, in both directions: the trial of far_key.py with a query at every token, for peers that
need all queries at once. L tokens of d dimensions; a query's key is at least FAR tokens away, on either side."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from crt_exp.attention import exact_attention, uniform_attention
from crt_exp.nearfar import near_far_attention
from crt_exp.nearfar.choice import Sizes
from crt_exp.nearfar.engine.reads import rows
from crt_exp.studies.copying import kmeans
from crt_exp.studies.far_key import (
    BLOCK,
    D,
    FAR,
    HEADS,
    HEAVY,
    NEAR,
    Heads,
    cells_at,
    keys_of,
    of_pages,
    reading,
    towards,
)

READ = 128           # keys that a query reads, or the best of a cluster
TURNS = 3            # of MonarchAttention's updates


def drawn(length: int, clustered: bool, seed: int) -> Heads:
    g = torch.Generator().manual_seed(seed)
    k, places = keys_of(length, clustered, g), torch.arange(length)
    ahead = (torch.rand(HEADS, length, generator=g) * (length - 2 * FAR)).long() + FAR
    target = (places + ahead) % length           # as far on a circle, so at least FAR away or beyond an end
    return Heads(*(t.unsqueeze(0) for t in (towards(k, target), k, torch.randn(HEADS, length, D, generator=g))))


@torch.no_grad()
def errors(length: int, clustered: bool, seed: int) -> dict[str, float]:
    """Relative error of the output of each arm, over all queries of all heads."""
    heads = drawn(length, clustered, seed)
    exact, sizes = exact_attention(*heads), Sizes(BLOCK, HEAVY, cells_at(length))
    reading = sizes._replace(open=READ)
    arms: dict[str, Callable[[], Tensor]] = {
        "uniform attention": lambda: uniform_attention(*heads),
        "near-far, no key read": lambda: near_far_attention(*heads, sizes).out,
        f"near-far, {READ} keys": lambda: near_far_attention(*heads, reading).out,
        f"pages, {READ} keys": lambda: chosen(heads, of_pages(heads.q, heads.k)),
        f"clusters of queries, {READ} keys": lambda: improved_clustered(*heads),
        "MonarchAttention": lambda: monarch(*heads),
        f"largest weights, {READ} keys": lambda: chosen(heads, heads.q @ heads.k.mT)}
    return {name: float((arm() - exact).norm() / exact.norm()) for name, arm in arms.items()}


def chosen(heads: Heads, rank: Tensor) -> Tensor:
    """Softmax over the READ far keys of the largest rank (1, H, L, L) and those less than NEAR / 2 away."""
    places = torch.arange(heads.k.shape[2])
    near = (places.unsqueeze(1) - places).abs() < NEAR // 2
    return reading(heads, rank, near, ~near, READ)


def improved_clustered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Vyas et al. (2020): queries in clusters, whose mean attends to all keys for all of them; on the READ keys that it
    weighs most each query has its own softmax, as heavy in all as the mean's."""
    centres, cell = kmeans(q, cells_at(q.shape[2]))
    weights = (centres @ k.mT).softmax(-1)                                                   # (1, H, C, L)
    mass, best = weights.topk(min(READ, k.shape[2]), -1)
    rest = weights.scatter(-1, best, 0.0) @ v                                                # (1, H, C, dv)
    at, mass, rest = (rows(t.flatten(0, 1), cell.flatten(0, 1)).unsqueeze(0)                  # (1, H, L, .)
                      for t in (best, mass.sum(-1, keepdim=True), rest))
    own = torch.empty_like(v)
    for i in range(0, q.shape[2], NEAR):
        part = slice(i, i + NEAR)
        near_k, near_v = (rows(t.flatten(0, 1), at[0, :, part]).unsqueeze(0) for t in (k, v))    # (1, H, n, READ, .)
        logits = (near_k @ q[:, :, part].unsqueeze(-1)).squeeze(-1)
        own[:, :, part] = (logits.softmax(-1).unsqueeze(-2) @ near_v).squeeze(-2)
    return mass * own + rest


def monarch(q: Tensor, k: Tensor, v: Tensor, turns: int = TURNS) -> Tensor:
    """MonarchAttention (Yaras et al., 2025): the weight of query (l, j) for key (m, i) is a product A[j, l, m]
    B[m, j, i] of two softmaxes, each in turn the best for the other in the variational form of softmax, <W, q.k> +
    entropy."""
    width = next(w for w in range(math.isqrt(k.shape[2]), 0, -1) if k.shape[2] % w == 0)
    q, k, v = (t.unflatten(2, (-1, width)) for t in (q, k, v))                               # (1, H, M, b, .)
    M = k.shape[2]
    left = torch.eye(M).expand(*q.shape[:2], width, M, M)                                    # (1, H, j, l, m)
    for _ in range(turns):
        mean = torch.einsum("zhjlm,zhljd->zhmjd", left, q) / left.sum(-2).mT.unsqueeze(-1).clamp(min=1e-9)
        right = torch.einsum("zhmjd,zhmid->zhmji", mean, k).softmax(-1)
        entropy = -torch.special.xlogy(right, right).sum(-1)                                 # (1, H, m, j)
        keys = torch.einsum("zhmji,zhmid->zhmjd", right, k)
        left = (torch.einsum("zhljd,zhmjd->zhjlm", q, keys) + entropy.mT.unsqueeze(-2)).softmax(-1)
    values = torch.einsum("zhmji,zhmid->zhmjd", right, v)
    return torch.einsum("zhjlm,zhmjd->zhljd", left, values).flatten(2, 3)
