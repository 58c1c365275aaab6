"""Heavy hitters, clusters of the other keys, and what a cluster amounts to.

Notation: Z = batch x key heads, S keys y, d, dv, K clusters. Queries have mean b and second moments Sigma_x about it;
keys are taken as y - c. z = (y - c) root with root root^T = Sigma_x, so that |z_j - z_l|^2 is the mean over queries of
the squared difference of the logits of two keys, and w_j = b.(y_j - c) what the mean query gives a key. Everything that
is chosen here carries no gradient; all sums do. Derived here.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.attention.baselines import exact_attention
from crt_exp.attention.checks import check_result, transformed
from crt_exp.attention.engines import numbers

_NUMBERS = numbers(Path(__file__).with_name("near_far.h"))        # which the C sources share
PICKS, RENEWED, PART, GROWS, DRAWN, MIXED, TURNED, SIGNS, WIDEST = (
    int(_NUMBERS[name])
    for name in ("PICKS", "RENEWED", "PART", "GROWS", "DRAWN", "MIXED", "TURNED", "SIGNS", "WIDEST"))
RIDGE, LEAST, HIDDEN, AWAY, SAME, SHARPEST = (
    float(_NUMBERS[name]) for name in ("RIDGE", "LEAST", "HIDDEN", "AWAY", "SAME", "SHARPEST"))


class Sizes(NamedTuple):
    """block: b, tokens; heavy: n, keys; cells: K, clusters; first_order: values of a cluster to first order in the
    query, if not causal; open: keys of clusters that each causal query retrieves, and `opens` of a long past, at least
    1; exact_until: the position up to which causal queries see all keys exactly, and the number of keys up to which
    other ones do."""

    block: int = 32
    heavy: int = 16
    cells: int = 64
    first_order: bool = False
    open: int = 0
    exact_until: int = 0

    def opens(self, position: int) -> int:
        """Keys that causal queries behind a renewal at this position retrieve: what a fixed number of them leaves out
        grows with the past, and as the root of it they keep up at a cost that does not double with it."""
        return math.isqrt(self.open**2 * max(position, GROWS) // GROWS)


class KeyMetric(NamedTuple):
    """What keys are measured by: constants of (Z or 1, ...)."""

    shift: Tensor   # c (., 1, d)
    tilt: Tensor    # b (., 1, d)
    root: Tensor    # (., d, d)

    @classmethod
    @torch.no_grad()
    def of(cls, x: Tensor | None, y: Tensor, x_keep: Tensor | None, y_keep: Tensor | None) -> "KeyMetric":
        """Of queries x (Z, n, d) and keys y (Z, S, d), those kept by masks (Z, n) and (Z, S); None: of no queries but
        as many as the keys, of either sign. Raises NotFinite where they are not finite (CPU)."""
        shift, keys = mean_of(y, y_keep)
        if x is None:
            tilt, moments = torch.zeros_like(shift), _second_moments(y - shift, y_keep, keys)
        else:
            tilt, queries = mean_of(x, x_keep)
            moments = _second_moments(x - tilt, x_keep, queries)
        check_result(moments.diagonal(dim1=-2, dim2=-1).sum(-1) + shift.square().sum((-2, -1)))
        size = moments.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        ridge = RIDGE * size + torch.finfo(moments.dtype).tiny**0.5
        return cls(shift, tilt, _root(moments, ridge, size))

    def measured(self, y: Tensor, keep: Tensor) -> Tensor:
        """z (Z, S, d) of keys as they come; 0 for those that are not kept."""
        return torch.where(keep.unsqueeze(-1), y - self.shift, 0.0) @ self.root

    def log_weights(self, y: Tensor) -> Tensor:
        """w (Z, S) of keys less the shift."""
        return (y * self.tilt).sum(-1)


def mean_of(x: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mean (Z, 1, d) of those of (Z, n, d) that are kept, and how many they are, at least 1."""
    if keep is None:
        return x.mean(1, keepdim=True), x.new_full((1, 1, 1), x.shape[1])
    count = keep.sum(1).clamp(min=1).to(x.dtype)[:, None, None]
    return torch.where(keep.unsqueeze(-1), x, 0.0).sum(1, keepdim=True) / count, count


def _root(moments: Tensor, ridge: Tensor, size: Tensor) -> Tensor:
    """The Cholesky factor of (., d, d) with the ridge (., 1, 1) on its diagonal. Where rounding left more below zero
    than the ridge lifts, all directions are as long as `size`: such a factor, half computed, would be no metric."""
    eye = torch.eye(moments.shape[-1]).to(moments)
    root, failed = torch.linalg.cholesky_ex(moments + ridge * eye)
    return torch.where((failed != 0)[:, None, None], (size + ridge).sqrt() * eye, root)


def _second_moments(x: Tensor, keep: Tensor | None, count: Tensor) -> Tensor:
    x = x if keep is None else torch.where(keep.unsqueeze(-1), x, 0.0)
    return x.mT @ x / count


# ---- which keys ------------------------------------------------------------------------------------------------------


def largest(t: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of (..., n), k <= n, from the largest on, and their positions: of equal ones the first, whatever
    stands behind them, which topk does not promise."""
    values, positions = t.topk(k)
    if not k:
        return values, positions
    least, slot = values[..., -1:], torch.arange(k, device=t.device)
    above = (values > least).sum(-1, keepdim=True)
    position = torch.arange(t.shape[-1], device=t.device)
    ties = torch.where(t == least, position, t.shape[-1]).topk(k, largest=False).values
    return values, torch.where(slot < above, positions, ties.gather(-1, (slot - above).clamp(min=0)))


def scores(y: Tensor, root: Tensor, w: Tensor | float, keep: Tensor | None) -> Tensor:
    """|z|^2 / 2 + w (Z, S) of keys less the shift, the log of the mean of e^(x.y) under Gaussian queries; -inf for
    masked keys. Computed in float64 and rounded to float32: a matrix product may round equal rows differently."""
    score = (_squares(y.double() @ root.double()) / 2 + w).float()
    return score if keep is None else score.masked_fill(~keep, -torch.inf)


def centres_of(z: Tensor, log_u: Tensor, clusters: int) -> Tensor:
    """Centres (Z, K, d) of clusters of the vectors z (Z, S, d) with weights e^log_u (Z, S), -inf for those that do not
    count; clusters <= S. PICKS at a time those of the largest u_j D_j, D_j the squared distance to the nearest centre
    so far or at first to the mean, of equal vectors one alone; and one pass of Lloyd's algorithm. Where fewer vectors
    differ than there are clusters, the last centres are AWAY."""
    u = torch.exp(log_u - log_u.amax(1, keepdim=True).clamp(min=torch.finfo(z.dtype).min)).unsqueeze(-1)
    squares = _squares(z)
    mean = (u * z).sum(1, keepdim=True) / u.sum(1, keepdim=True).clamp(min=LEAST)
    D, picked = _to_nearest(z, squares, mean).clamp(min=LEAST), []     # a key that is the mean comes last
    log_u = log_u.masked_fill(_seen_before(z, squares, log_u > -torch.inf), -torch.inf)
    while (left := clusters - PICKS * len(picked)) > 0:
        values, chosen = largest(log_u + D.log(), min(PICKS, left))                             # (Z, PICKS)
        new = values > -torch.inf                   # fewer different keys than clusters: no key is near to the rest
        here = z.gather(1, chosen.unsqueeze(-1).expand(-1, -1, z.shape[-1]))
        picked.append(here.masked_fill(~new.unsqueeze(-1), AWAY))
        if len(picked) == 1:
            picked[0][:, :1] = torch.where(new[:, :1, None], here[:, :1], mean)
        D = torch.minimum(D, _to_nearest(z, squares, picked[-1])).scatter(1, chosen, 0.0)
    centres = torch.cat(picked, 1)
    members = u * one_hot(nearest(z, centres), clusters, u.dtype)
    N = members.sum(1).unsqueeze(-1)
    return torch.where(N > LEAST, members.mT @ z / N.clamp(min=LEAST), centres)


def _squares(z: Tensor) -> Tensor:
    return torch.linalg.vector_norm(z, dim=-1).square()


def nearest(z: Tensor, centres: Tensor) -> Tensor:
    """Which of the centres (Z, K, d) is nearest to each of z (Z, S, d): (Z, S)."""
    return (z @ centres.mT - centres.square().sum(-1).unsqueeze(-2) / 2).argmax(-1)


def _to_nearest(z: Tensor, squares: Tensor, centres: Tensor) -> Tensor:
    """Squared distances (Z, S) to the nearest of the centres (Z, k, d), 0 to one that is the same; squares |z|^2."""
    offsets = centres.square().sum(-1).unsqueeze(-2)
    near = torch.add(offsets, z @ centres.mT, alpha=-2).amin(-1).add(squares)
    return torch.where(near > SAME * squares, near, 0.0)


def _seen_before(z: Tensor, squares: Tensor, counted: Tensor) -> Tensor:
    """Which of z (Z, S, d) are the same as one of those that are `counted` (Z, S); squares |z|^2. Along a line that
    tells vectors apart equal ones are neighbours."""
    slope = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype).sqrt().cos()
    order = (z * slope).sum(-1).masked_fill(~counted, torch.inf).sort(dim=1, stable=True).indices
    along = z.gather(1, order.unsqueeze(-1).expand_as(z))
    apart = (along[:, 1:] - along[:, :-1]).square().sum(-1)
    same = torch.zeros_like(squares, dtype=torch.bool)
    same[:, 1:] = apart <= SAME * squares.gather(1, order[:, 1:])
    return torch.zeros_like(same).scatter(1, order, same)


class Choice(NamedTuple):
    """The sets of the keys of a sequence, besides those near to each query."""

    heavy: Tensor     # (Z, n): their positions
    there: Tensor     # (Z, n): whether there are as many
    pool: Tensor      # (Z, S): which keys are in clusters
    cluster: Tensor      # (Z, S): in which
    centres: Tensor   # (Z, K, d), as z

    @classmethod
    @torch.no_grad()
    def of(cls, y: Tensor, metric: KeyMetric, heavy: int, clusters: int, keep: Tensor | None) -> "Choice":
        """Of keys y (Z, S, d) less their shift; keep (Z, S). No more heavy hitters and clusters than keys are taken.
        Raises NotFinite where squared norms overflow (CPU)."""
        z, w = y @ metric.root, metric.log_weights(y)
        check_result(z.square().sum((1, 2)) + w.square().sum(1))
        score, positions = largest(scores(y, metric.root, w, keep), min(heavy, y.shape[1]))
        pool = (torch.ones_like(w, dtype=torch.bool) if keep is None else keep).scatter(1, positions, False)
        centres = centres_of(z, w.masked_fill(~pool, -torch.inf), min(clusters, y.shape[1]))
        return cls(positions, score > -torch.inf, pool, nearest(z, centres), centres)


# ---- what they amount to ---------------------------------------------------------------------------------------------


class Clusters(NamedTuple):
    """Keys that stand for clusters: mean mu (Z, ., K, d), logit x.mu + bias (Z, ., K), to be weighted by the u of the
    keys that are summed; spread = tau (Z, ., K)."""

    mu: Tensor
    bias: Tensor
    spread: Tensor


def moments(y: Tensor, u: Tensor, metric: KeyMetric, cluster: Tensor, centres: Tensor) -> Tensor:
    """Of each key [u y, u |z - centre|^2, u] (Z, S, d + 2): what the sums over a cluster are taken of."""
    apart = y @ metric.root - centres.gather(1, cluster.unsqueeze(-1).expand(-1, -1, y.shape[-1]))
    u = u.unsqueeze(-1)
    return torch.cat([u * y, u * apart.square().sum(-1, keepdim=True), u], -1)


def summed(sums: Tensor, metric: KeyMetric, centres: Tensor, level: Tensor, mass: bool = True) -> Clusters:
    """Clusters of sums (Z, n, K, d + 2) of `moments`. `mass`: with the factor 1 + tau / 2, which makes up to second
    order for e^(x.mu) being less than the mean of e^(x.y)."""
    N = sums[..., -1]
    mean = sums[..., :-1] / N.clamp(min=LEAST).unsqueeze(-1)
    mu = mean[..., :-1]
    off = (mu @ metric.root.unsqueeze(1) - centres.unsqueeze(1)).square().sum(-1)
    spread = torch.where(N > LEAST, (mean[..., -1] - off).clamp(min=0), 0.0)
    bias = level.unsqueeze(1) - (mu * metric.tilt.unsqueeze(1)).sum(-1)
    return Clusters(mu, bias + torch.log1p(spread / 2) if mass else bias, spread)


# ---- blocks ----------------------------------------------------------------------------------------------------------


def blocks(t: Tensor, b: int) -> Tensor:
    """(Z, S, ...) -> (Z, N, b, ...), zeros after the last."""
    padding = -t.shape[1] % b
    if padding:
        t = torch.cat([t, t.new_zeros(len(t), padding, *t.shape[2:])], 1)
    return t.unflatten(1, (t.shape[1] // b, b))    # no -1: a batch may be empty


def without(t: Tensor, keep: Tensor | None) -> Tensor:
    """Zeros in place of what lies at padded positions (Z, S, .), which may be NaN."""
    return t if keep is None else torch.where(keep.unsqueeze(-1), t, 0.0)


def grouped(x: Tensor, b: int) -> Tensor:
    """Queries (Z, G, L, d) in blocks (Z, N, G b, d), the heads of a group one after the other."""
    return blocks(x.transpose(1, 2), b).transpose(2, 3).flatten(2, 3)


def ungrouped(t: Tensor, heads: int, length: int) -> Tensor:
    """(Z, N, G b, k) -> (Z, G, L, k)."""
    return t.unflatten(2, (heads, t.shape[2] // heads)).transpose(1, 2).flatten(2, 3)[:, :, :length]


# ---- rows


def one_hot(cluster: Tensor, clusters: int, dtype: torch.dtype) -> Tensor:
    """(..., clusters): 1 at the cluster of each row."""
    zeros = torch.zeros(*cluster.shape, clusters, dtype=dtype, device=cluster.device)
    return zeros.scatter(-1, cluster.unsqueeze(-1), 1.0)


def rows_at(t: Tensor, index: Tensor) -> Tensor:
    """Rows (Z, ..., k) of t (Z, S, k) at index (Z, ...)."""
    gathered = t.gather(1, index.flatten(1).unsqueeze(-1).expand(-1, -1, t.shape[-1]))
    return gathered.view(*index.shape, t.shape[-1])


# ---- all keys


def exactly(x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, scale: float = 1.0, causal: bool = True) -> Tensor:
    """Queries (Z, G, l, d) see all keys (Z, S, d), of which causal ones are the last: those that are not later; logits
    are scale x.y."""
    mask = None if keep is None else keep[:, :y.shape[1]]
    if not transformed(x, y, v):      # the fused kernel knows the backward pass alone
        if x.shape[2] == 1 and mask is None:    # the last query sees all keys: those of a group are as of one head
            x, y, v = x.transpose(1, 2), y.unsqueeze(1), v.unsqueeze(1)
            return F.scaled_dot_product_attention(x, y, v, scale=scale).transpose(1, 2)
        return exact_attention(x, y.unsqueeze(1), v.unsqueeze(1), causal=causal, key_mask=mask, scale=scale)
    seen = torch.ones(x.shape[2], y.shape[1], dtype=torch.bool, device=x.device)
    seen = seen.tril(y.shape[1] - x.shape[2]) if causal else seen
    seen = seen if mask is None else seen & mask[:, None, None]
    logits = (scale * x @ y.unsqueeze(1).mT).masked_fill(~seen, HIDDEN)
    return torch.where(seen.any(-1, keepdim=True), logits.softmax(-1) @ v.unsqueeze(1), 0.0)
