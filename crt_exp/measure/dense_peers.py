"""Attention of others that no file of conf/attention holds, dense: what it gives, not what it costs.

All take queries q (1, H, R, d), the last R of keys k (1, H, L, d), to be scaled by 1, and values v (1, H, L, dv).
keys: how many a query reads beyond those near it, the `near` last and the `first` ones; both: in both directions, the
`near` around it, where R = L.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.nearfar.recall import rows_at

NEAR, PAGE = 64, 16    # keys that are read around a query; keys of a page
LLOYD = 10             # passes of k-means
CELLS, AT = 64, 512    # clusters, as the root of the length: so many at that length


def seen(q: Tensor, k: Tensor, near: int, first: int, both: bool) -> tuple[Tensor, Tensor]:
    """Which keys each query sees however they rank, and the others that it may see, (R, L) each."""
    places = torch.arange(k.shape[2])
    ago = places[len(places) - q.shape[2]:].unsqueeze(1) - places
    if both:
        return ago.abs() < near // 2, ago.abs() >= near // 2
    close = (ago >= 0) & ((ago < near) | (places < first))
    return close, (ago >= 0) & ~close


def reading(q: Tensor, k: Tensor, v: Tensor, rank: Tensor, near: Tensor, far: Tensor, keys: int) -> Tensor:
    """Softmax over the near keys of each query and, of those that are far from it (R, L), the `keys` of the largest
    rank (1, H, R, L)."""
    best = rank.masked_fill(~far, -torch.inf).topk(min(keys, rank.shape[-1]), -1).indices
    read = torch.zeros_like(rank, dtype=torch.bool).scatter(-1, best, True) & far
    return (q @ k.mT).masked_fill(~(near | read), -torch.inf).softmax(-1) @ v


def largest(q: Tensor, k: Tensor, v: Tensor, keys: int, near: int = NEAR, first: int = 0, both: bool = False) -> Tensor:
    """The largest weights, which no one knows without all of them, and no others."""
    return reading(q, k, v, q @ k.mT, *seen(q, k, near, first, both), keys)


def pages(q: Tensor, k: Tensor, v: Tensor, keys: int, near: int = NEAR, first: int = 0, both: bool = False) -> Tensor:
    """After Quest (Tang et al., 2024): pages of consecutive keys, by a bound on their best logit, and no others."""
    of_page = k.unflatten(2, (-1, PAGE))
    rank = q.clamp(min=0) @ of_page.amax(3).mT + q.clamp(max=0) @ of_page.amin(3).mT
    return reading(q, k, v, rank.repeat_interleave(PAGE, -1), *seen(q, k, near, first, both), keys)


def clusters(q: Tensor, k: Tensor, v: Tensor, keys: int, near: int = NEAR, first: int = 0) -> Tensor:
    """After Multipole Attention (Kim et al., 2025), R = L: the keys of the clusters whose centroids rank first, as many
    as `keys`, and the other clusters by centroid, number and mean value so far. Clusters are of the whole sequence,
    whose future they see: with less to go by it could do no better."""
    length, K = q.shape[2], cells_at(q.shape[2])
    centres, cell = kmeans(k, K)
    member = F.one_hot(cell, K).to(k)                                                        # (1, H, L, K)
    close, far = seen(q, k, near, first, False)
    there = member.clone()
    there[:, :, :first] = 0
    there = torch.cat([torch.zeros_like(there[:, :, :near]), there[:, :, :-near]], 2)        # the last are near
    N = there.cumsum(2)
    late = torch.cat([torch.zeros_like(v[:, :, :near]), v[:, :, :-near]], 2)
    V = (there.unsqueeze(-1) * late.unsqueeze(3)).cumsum(2) / N.clamp(min=1).unsqueeze(-1)   # (1, H, L, K, dv)
    rank = (q @ centres.mT).masked_fill(N == 0, -torch.inf)
    order = rank.argsort(-1, descending=True)
    held = N.gather(-1, order).cumsum(-1)
    opened = torch.zeros_like(rank, dtype=torch.bool).scatter(-1, order, held <= keys)
    read = opened.double() @ member.double().mT > 0
    logits = torch.cat([(q @ k.mT).masked_fill(~(close | read & far), -torch.inf),
                        (rank + N.log()).masked_fill(opened | (N == 0), -torch.inf)], -1)
    weights = logits.softmax(-1)
    return weights[..., :length] @ v + (weights[..., None, length:] @ V).squeeze(-2)


def query_clusters(q: Tensor, k: Tensor, v: Tensor, keys: int) -> Tensor:
    """Vyas et al. (2020), in both directions: queries in clusters, whose mean attends to all keys for all of them; on
    the `keys` that it weighs most each query has its own softmax, as heavy in all as the mean's."""
    centres, cell = kmeans(q, cells_at(q.shape[2]))
    weights = (centres @ k.mT).softmax(-1)                                                   # (1, H, C, L)
    mass, best = weights.topk(min(keys, k.shape[2]), -1)
    rest = weights.scatter(-1, best, 0.0) @ v                                                # (1, H, C, dv)
    at, mass, rest = (rows_at(t.flatten(0, 1), cell.flatten(0, 1)).unsqueeze(0)                  # (1, H, L, .)
                      for t in (best, mass.sum(-1, keepdim=True), rest))
    own = torch.empty_like(v)
    for i in range(0, q.shape[2], NEAR):
        part = slice(i, i + NEAR)
        near_k, near_v = (rows_at(t.flatten(0, 1), at[0, :, part]).unsqueeze(0) for t in (k, v))    # (1, H, n, keys, .)
        logits = (near_k @ q[:, :, part].unsqueeze(-1)).squeeze(-1)
        own[:, :, part] = (logits.softmax(-1).unsqueeze(-2) @ near_v).squeeze(-2)
    return mass * own + rest


def monarch(q: Tensor, k: Tensor, v: Tensor, turns: int) -> Tensor:
    """MonarchAttention (Yaras et al., 2025), in both directions: the weight of query (l, j) for key (m, i) is a product
    A[j, l, m] B[m, j, i] of two softmaxes, each in turn the best for the other in the variational form of softmax,
    <W, q.k> + entropy."""
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


def kmeans(k: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """Centroids (1, H, K, d) of keys (1, H, L, d), and the cluster of each (1, H, L)."""
    centres = k[:, :, torch.linspace(0, k.shape[2] - 1, K).round().long()]
    for _ in range(LLOYD):
        member = F.one_hot(torch.cdist(k, centres).argmin(-1), K).to(k)
        N = member.sum(2).unsqueeze(-1)
        centres = torch.where(N > 0, member.mT @ k / N.clamp(min=1), centres)
    return centres, torch.cdist(k, centres).argmin(-1)


def cells_at(length: int) -> int:
    return 8 * round(CELLS * (length / AT) ** 0.5 / 8)


PEERS: dict[str, Callable[..., Tensor]] = {"largest": largest, "pages": pages, "clusters": clusters,
                                           "query_clusters": query_clusters, "monarch": monarch}
