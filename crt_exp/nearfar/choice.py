"""Metric of keys, choice of heavy hitters and clusters, and summary of clusters.

Queries have the mean b and second moments Sigma_x about it; keys are taken as y - c. z = (y - c) root with root root^T
= Sigma_x, so that |z_j - z_l|^2 is the mean over queries of the squared difference of two keys' logits. w_j = b.(y_j -
c) is the logit of the mean query.
Choices carry no gradient; all sums do. The method was derived for this project.

Notation: Z = batch x key heads, S keys y, d, dv, K clusters.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.baselines import fused_attention
from crt_exp.attention.checks import check_result, transformed
from crt_exp.attention.reference import softmax_attention

# those of near_far.h, which describes them
CENTRE_BATCH = 8
CENTRE_SAMPLES = 16
SAMPLE_FACTOR = 40507
MIN_RENEWAL = 128
RENEWAL_DIVISOR = 2
GROWTH_START = 2304
QUANTIZED_PAD = 16
SIGN_FACTOR = 2654435769
MAX_GAP = 255
RIDGE = 1e-4
MIN_WEIGHT = 1e-30
MASKED = -1e30
EMPTY_CENTRE = 1e15
EQUAL_TOLERANCE = 1e-6
MIN_SD = 1e-6


class Sizes(NamedTuple):
    """Sizes of the sets of near-far attention.

    block: tokens b of a block. heavy: heavy hitters n. cells: clusters K.
    first_order: add to cluster values a first-order term in the query (not causal).
    open: keys that each causal query retrieves, at least 1; a long past needs more (`retrieval_count`).
    exact_until: position up to which causal queries see all keys exactly; for other attention, number of keys up to
    which it is exact.

    >>> Sizes(open=96).retrieval_count(4 * 2304)
    192
    """

    block: int = 32
    heavy: int = 16
    cells: int = 64
    first_order: bool = False
    open: int = 0
    exact_until: int = 0

    @property
    def first_renewal(self) -> int:
        """Position of the first renewal of causal attention, which is exact before it; a multiple of the block."""
        return max(round_up(self.exact_until, self.block), 2 * self.block)

    def retrieval_count(self, position: int) -> int:
        """Return how many keys causal queries retrieve after a renewal at this position.

        The error of a fixed number grows with the past. Growth with the square root of the position compensates at a
        moderate cost.
        """
        growth = max(position, GROWTH_START)
        return math.isqrt(self.open**2 * growth // GROWTH_START)


def round_up(tokens: int, block: int) -> int:
    """Round up to whole blocks."""
    return -(-tokens // block) * block


class KeyMetric(NamedTuple):
    """Constants (Z or 1, ...) that define the metric of keys."""

    shift: Tensor  # c (., 1, d)
    tilt: Tensor  # b (., 1, d)
    root: Tensor  # (., d, d)

    @classmethod
    @torch.no_grad()
    def fit(
        cls,
        x: Tensor | None,
        y: Tensor,
        x_keep: Tensor | None,
        y_keep: Tensor | None,
    ) -> "KeyMetric":
        """Compute the metric from queries x (Z, n, d) and keys y (Z, S, d).

        Masks x_keep (Z, n) and y_keep (Z, S). Without x, queries are assumed to have the second moments of the keys and
        mean 0. Raises NotFinite if the moments are not finite (CPU).
        """
        shift = masked_mean(y, y_keep)
        if x is None:
            tilt = torch.zeros_like(shift)
            moments = _second_moments(y - shift, y_keep)
        else:
            tilt = masked_mean(x, x_keep)
            moments = _second_moments(x - tilt, x_keep)
        squares = moments.diagonal(dim1=-2, dim2=-1)
        check_result(squares.sum(-1) + shift.square().sum((-2, -1)))
        size = squares.mean(-1)[:, None, None]
        ridge = RIDGE * size + torch.finfo(moments.dtype).tiny ** 0.5
        return cls(shift, tilt, _cholesky_root(moments, ridge, size))

    def transform(self, y: Tensor, keep: Tensor) -> Tensor:
        """Return z (Z, S, d) of unshifted keys; 0 for masked keys."""
        return zero_masked(y - self.shift, keep) @ self.root

    def log_weights(self, y: Tensor) -> Tensor:
        """Return w (Z, S) of shifted keys."""
        return (y * self.tilt).sum(-1)


def masked_mean(x: Tensor, keep: Tensor | None) -> Tensor:
    """Return the mean (Z, 1, d) of the unmasked rows, 0 if there is none."""
    if keep is None:
        return x.mean(1, keepdim=True)
    return zero_masked(x, keep).sum(1, keepdim=True) / _count_unmasked(x, keep)


def _second_moments(x: Tensor, keep: Tensor | None) -> Tensor:
    x = zero_masked(x, keep)
    return x.mT @ x / _count_unmasked(x, keep)


def _count_unmasked(x: Tensor, keep: Tensor | None) -> Tensor:
    """Return the number of unmasked rows (Z or 1, 1, 1), at least 1."""
    if keep is None:
        return x.new_full((1, 1, 1), x.shape[1])
    return keep.sum(1).clamp(min=1).to(x.dtype)[:, None, None]


def _cholesky_root(moments: Tensor, ridge: Tensor, size: Tensor) -> Tensor:
    """Return the Cholesky factor of moments (., d, d) plus a ridge (., 1, 1).

    If the factorization fails because of rounding, a multiple of the identity of the same `size` replaces it.
    """
    eye = torch.eye(moments.shape[-1]).to(moments)
    root, failed = torch.linalg.cholesky_ex(moments + ridge * eye)
    return torch.where((failed != 0)[:, None, None], (size + ridge).sqrt() * eye, root)


# ---- choice of keys


def find_largest(t: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of (..., n) in descending order, and their positions.

    k <= n. Of equal values the first positions are taken, which topk does not guarantee.
    """
    values, positions = t.topk(k)
    if not k:
        return values, positions
    least = values[..., -1:]
    slot = torch.arange(k, device=t.device)
    above = (values > least).sum(-1, keepdim=True)
    position = torch.arange(t.shape[-1], device=t.device)
    ties = torch.where(t == least, position, t.shape[-1]).topk(k, largest=False).values
    tied = ties.gather(-1, (slot - above).clamp(min=0))
    return values, torch.where(slot < above, positions, tied)


def heavy_scores(y: Tensor, root: Tensor, w: Tensor, keep: Tensor | None) -> Tensor:
    """Return |z|^2 / 2 + w (Z, S) of shifted keys, -inf for masked keys.

    It is the log of the mean of e^(x.y) over Gaussian queries. It is computed in float64 and rounded to float32,
    because a matrix product may round equal rows differently.
    """
    z = y.double() @ root.double()
    score = (_square_norms(z) / 2 + w).float()
    if keep is None:
        return score
    return score.masked_fill(~keep, -torch.inf)


def find_centres(z: Tensor, log_u: Tensor, clusters: int) -> Tensor:
    """Return the centres (Z, K, d) of clusters of z (Z, S, d), K <= S.

    Vectors have the weights e^log_u (Z, S); -inf excludes a vector. Let D_j be the squared distance to the nearest
    centre, at first to the mean.
    Repeatedly the CENTRE_BATCH vectors with the largest u_j D_j become centres, only one of equal vectors. One step of
    Lloyd's algorithm follows.
    If there are fewer different vectors than clusters, the last centres are EMPTY_CENTRE.
    """
    top = log_u.amax(1, keepdim=True).clamp(min=torch.finfo(z.dtype).min)
    u = torch.exp(log_u - top).unsqueeze(-1)
    squares = _square_norms(z)
    mean = (u * z).sum(1, keepdim=True) / u.sum(1, keepdim=True).clamp(min=MIN_WEIGHT)
    # a key equal to the mean comes last
    D = _square_distances(z, squares, mean).clamp(min=MIN_WEIGHT)
    log_u = log_u.masked_fill(_equal_earlier(z, squares, log_u > -torch.inf), -torch.inf)
    batches = []
    for start in range(0, clusters, CENTRE_BATCH):
        count = min(CENTRE_BATCH, clusters - start)
        values, positions = find_largest(log_u + D.log(), count)  # (Z, count)
        new = values > -torch.inf  # False if there are fewer different keys than clusters
        vectors = rows_at(z, positions)
        batch = vectors.masked_fill(~new.unsqueeze(-1), EMPTY_CENTRE)
        if start == 0:
            batch[:, :1] = torch.where(new[:, :1, None], vectors[:, :1], mean)
        batches.append(batch)
        D = torch.minimum(D, _square_distances(z, squares, batch))
        D = D.scatter(1, positions, 0.0)
    centres = torch.cat(batches, 1)
    members = u * one_hot(nearest_centre(z, centres), clusters, u.dtype)
    N = members.sum(1).unsqueeze(-1)
    means = members.mT @ z / N.clamp(min=MIN_WEIGHT)
    return torch.where(N > MIN_WEIGHT, means, centres)


def _square_norms(z: Tensor) -> Tensor:
    return torch.linalg.vector_norm(z, dim=-1).square()


def nearest_centre(z: Tensor, centres: Tensor) -> Tensor:
    """Return the index (Z, S) of the centre (Z, K, d) nearest to each z (Z, S, d)."""
    offsets = centres.square().sum(-1).unsqueeze(-2) / 2
    return (z @ centres.mT - offsets).argmax(-1)


def _square_distances(z: Tensor, squares: Tensor, centres: Tensor) -> Tensor:
    """Return the squared distances (Z, S) to the nearest of the centres (Z, k, d).

    The distance is 0 to an equal centre. squares: |z|^2.
    """
    offsets = centres.square().sum(-1).unsqueeze(-2)
    distances = torch.add(offsets, z @ centres.mT, alpha=-2).amin(-1).add(squares)
    return torch.where(distances > EQUAL_TOLERANCE * squares, distances, 0.0)


def _equal_earlier(z: Tensor, squares: Tensor, counted: Tensor) -> Tensor:
    """Return which vectors z (Z, S, d) equal an earlier `counted` (Z, S) vector.

    Vectors are sorted along a direction on which different vectors differ, so that equal vectors are neighbours.
    squares: |z|^2.
    """
    slope = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype).sqrt().cos()
    projections = (z * slope).sum(-1).masked_fill(~counted, torch.inf)
    order = projections.sort(dim=1, stable=True).indices
    steps = rows_at(z, order).diff(dim=1).square().sum(-1)
    same = torch.zeros_like(squares, dtype=torch.bool)
    same[:, 1:] = steps <= EQUAL_TOLERANCE * squares.gather(1, order[:, 1:])
    return torch.zeros_like(same).scatter(1, order, same)


class KeySets(NamedTuple):
    """Heavy hitters and clusters of a sequence, and the metric that defines them."""

    metric: KeyMetric
    heavy: Tensor  # (Z, n): positions
    there: Tensor  # (Z, n): False for missing ones
    pool: Tensor  # (Z, S): which keys are in clusters
    cluster: Tensor  # (Z, S): cluster of each key
    centres: Tensor  # (Z, K, d), in the space of z


@torch.no_grad()
def choose_sets(
    y: Tensor,
    metric: KeyMetric,
    sizes: Sizes,
    keep: Tensor | None,
    sample: Tensor | slice = slice(None),
) -> KeySets:
    """Choose heavy hitters and clusters of keys y (Z, S, d); keep (Z, S).

    Centres come from a sample of the keys. There are at most as many hitters and centres as keys. Raises NotFinite if
    squared norms overflow (CPU).
    """
    y = zero_masked(y - metric.shift, keep)
    z = y @ metric.root
    w = metric.log_weights(y)
    check_result(z.square().sum((1, 2)) + w.square().sum(1))
    scores = heavy_scores(y, metric.root, w, keep)
    score, heavy = find_largest(scores, min(sizes.heavy, y.shape[1]))
    pool = unmasked_keys(y, keep).scatter(1, heavy, False)
    log_u = w.masked_fill(~pool, -torch.inf)[:, sample]
    centres = find_centres(z[:, sample], log_u, min(sizes.cells, log_u.shape[1]))
    return KeySets(
        metric=metric,
        heavy=heavy,
        there=score > -torch.inf,
        pool=pool,
        cluster=nearest_centre(z, centres),
        centres=centres,
    )


# ---- summaries of clusters


class Clusters(NamedTuple):
    """Means mu (Z, ., K, d) of the keys of clusters, and their variance in z, tau (Z, ., K)."""

    mu: Tensor
    tau: Tensor


def key_moments(y: Tensor, u: Tensor, sets: KeySets) -> Tensor:
    """Return [u y, u |z - centre|^2, u] (Z, S, d + 2) of each shifted key, to be summed."""
    residuals = y @ sets.metric.root - rows_at(sets.centres, sets.cluster)
    squares = residuals.square().sum(-1, keepdim=True)
    u = u.unsqueeze(-1)
    return torch.cat([u * y, u * squares, u], -1)


def log_number(N: Tensor) -> Tensor:
    """Return log N, MASKED for empty clusters."""
    return torch.where(N > MIN_WEIGHT, N.clamp(min=MIN_WEIGHT).log(), MASKED)


def summarize_clusters(sums: Tensor, sets: KeySets) -> Clusters:
    """Return the clusters of summed `key_moments` (Z, n, K, d + 2)."""
    N = sums[..., -1]
    means = sums[..., :-1] / N.clamp(min=MIN_WEIGHT).unsqueeze(-1)
    mu = means[..., :-1]
    offsets = mu @ sets.metric.root.unsqueeze(1) - sets.centres.unsqueeze(1)
    tau = (means[..., -1] - offsets.square().sum(-1)).clamp(min=0)
    return Clusters(mu, torch.where(N > MIN_WEIGHT, tau, 0.0))


# ---- blocks


def split_blocks(t: Tensor, b: int) -> Tensor:
    """Split (Z, S, ...) into blocks (Z, N, b, ...), padded with zeros."""
    padding = -t.shape[1] % b
    if padding:
        t = torch.cat([t, t.new_zeros(len(t), padding, *t.shape[2:])], 1)
    return t.unflatten(1, (t.shape[1] // b, b))  # no -1: a batch may be empty


def split_queries(x: Tensor, b: int) -> Tensor:
    """Split queries (Z, G, L, d) into blocks (Z, N, G b, d).

    The heads of a group follow each other.
    """
    return split_blocks(x.transpose(1, 2), b).transpose(2, 3).flatten(2, 3)


def join_queries(t: Tensor, heads: int, length: int) -> Tensor:
    """Undo `split_queries`: (Z, N, G b, k) -> (Z, G, L, k)."""
    by_head = t.unflatten(2, (heads, t.shape[2] // heads))
    return by_head.transpose(1, 2).flatten(2, 3)[:, :, :length]


# ---- rows


def unmasked_keys(y: Tensor, keep: Tensor | None) -> Tensor:
    """Return which of the keys (Z, S, d) are unmasked, (Z, S)."""
    if keep is None:
        return torch.ones(y.shape[:2], dtype=torch.bool, device=y.device)
    return keep[:, : y.shape[1]]


def zero_masked(t: Tensor, keep: Tensor | None) -> Tensor:
    """Replace padded positions (Z, S, .), which may hold NaN, by zeros."""
    if keep is None:
        return t
    return torch.where(keep.unsqueeze(-1), t, 0.0)


def one_hot(cluster: Tensor, clusters: int, dtype: torch.dtype) -> Tensor:
    """Return (..., clusters) with 1 at the cluster of each row."""
    return (cluster.unsqueeze(-1) == torch.arange(clusters, device=cluster.device)).to(dtype)


def rows_at(t: Tensor, index: Tensor) -> Tensor:
    """Return the rows (Z, ..., k) of t (Z, S, k) at index (Z, ...)."""
    rows = t.take_along_dim(index.flatten(1).unsqueeze(-1), 1)
    return rows.view(*index.shape, t.shape[-1])


# ---- all keys


def exact_attention(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    causal: bool,
    key_mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Compute softmax attention with logits scale x.y by the fused kernel where it serves.

    Masked keys and values must be finite.
    """
    if transformed(x, y, v):  # the fused kernel supports only reverse mode
        return softmax_attention(scale * x, y, v, causal=causal, key_mask=key_mask)
    return fused_attention(x, y, v, causal, key_mask, scale)
