"""Hybrid maps for clustered queries and keys (HRF 2.4, appendix H).

Notation: I clusters of queries, J clusters of keys. Each pair (i, j) has a complex-exponential base with a diagonal M
in closed form. Feature blocks are in the order (i, j).

`fit` runs k-means on the vectors. An attention layer fits once and stores the clusters.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from crt_exp.features.base import (
    ONE,
    BoundMap,
    Features,
    align,
    broadcast_matrix,
    check_finite,
    log_expm1,
)
from crt_exp.features.blocks import Blocks, Coefficient, InBlocks, Selected, rows_of
from crt_exp.features.complex_exponential import (
    CERF,
    Diagonal,
    Field,
    diagonal_by_centres,
    diagonal_by_moments,
    exponential,
)
from crt_exp.features.exponential import HypRF, PosRF, TrigRF, log_mean_exp2
from crt_exp.features.hybrid import HybridMap
from crt_exp.features.statistics import Statistics
from crt_exp.samplers.noise import Noise, at_least_float32, match_float64, no_autocast
from crt_exp.validation import Count, Positive

SEED = 0  # random state of k-means
STARTS = 4  # initialisations of k-means


class Clusters(NamedTuple):
    """Cluster centres, and the diagonal M of each pair of clusters.

    The entries of M are `size`, times i where `imaginary` is 1.
    """

    queries: Tensor  # (..., I, d)
    keys: Tensor  # (..., J, d)
    size: Tensor  # (..., I J, d)
    imaginary: Tensor  # (..., I J, d), 0 or 1


@dataclass(frozen=True)
class ClusteredMap(InBlocks):
    """Base class of clustered hybrids.

    Args:
        queries: number of query clusters.
        keys: number of key clusters.
        field: "real" M gives positive features. "complex" M gives less variance where centres have equal signs;
            estimates may be negative.
        by: "moments" fits M to the means and mean squares of the two clusters, "centres" to their centres alone (HRF
            eq. (86)-(88)).

    Raises:
        ValueError: (in `fit`) there are more clusters than vectors, or a cluster is empty; (in use) the dimension
            differs from the centres.
    """

    queries: Count = 2
    keys: Count = 2
    field: Field = "real"
    by: Literal["moments", "centres"] = "moments"
    fitted = on_vectors = True
    until_fitted = "using one cluster with M = 1 (FAVOR+)"

    @property
    def pairs(self) -> int:
        return self.queries * self.keys

    def clusters(self, stats: Statistics) -> Clusters:
        """Run k-means for each batch entry and return the clusters.

        Raises:
            ValueError: the statistics hold no vectors.
        """
        (batch, xs), (_, ys) = stats.x.sets(), stats.y.sets()
        clusters = [self._clusters_of(x.double(), y.double()) for x, y in zip(xs, ys, strict=True)]
        return Clusters(
            *(torch.stack(t).reshape(*batch, *t[0].shape).to(xs[0].device) for t in zip(*clusters))
        )

    def _clusters_of(self, x: Tensor, y: Tensor) -> Clusters:
        r = k_means(x, self.queries, "queries")
        t = k_means(y, self.keys, "keys")
        if self.by == "centres":
            M = diagonal_by_centres(*torch.broadcast_tensors(r[:, None], t[None]), self.field)
        else:
            (mx, sx), (my, sy) = moments_by_cluster(x, r), moments_by_cluster(y, t)
            M = diagonal_by_moments(mx[:, None], sx[:, None], my[None], sy[None], self.field)
        size, imaginary = (u.expand(self.queries, self.keys, -1).flatten(0, 1) for u in M)
        return Clusters(r, t, size, imaginary.double())

    def initial_clusters(self, d: int) -> Clusters:
        """Return initial clusters with M = 1 for all pairs, so that every base is PosRF."""
        r, t, size, imaginary = (
            torch.zeros(count, d, dtype=torch.float64)
            for count in (self.queries, self.keys, self.pairs, self.pairs)
        )
        return Clusters(r, t, size + 1, imaginary)


@dataclass(frozen=True)
class ClusteredHybrid(ClusteredMap):
    """Zero-one mixture: each pair uses the base of its clusters (HRF eq. (101)-(104)).

    M = I J m features (complex: 2 I J m). A query has J non-zero blocks, a key I. All bases share their projections,
    since each pair uses one base. The variance is that of this base. A tie goes to the first centre.
    """

    def width(self, m: int) -> int:
        return self.pairs * m * (2 if self.field == "complex" else 1)

    def fit(self, stats: Statistics) -> Clusters:
        return self.clusters(stats)

    def unfitted(self, d: int) -> Clusters:
        return self.initial_clusters(d)

    def admitted(self, params: Clusters) -> Clusters:
        return params._replace(imaginary=params.imaginary.round())

    def bind(self, noise: Noise, params: Clusters) -> BoundMap:
        size, imaginary = (t.unflatten(-2, (self.queries, self.keys)) for t in params[2:])
        inverse = 1 / size
        of_queries = _Side(self, noise, params.queries, size, imaginary, key=False)
        of_keys = _Side(
            self,
            noise,
            params.keys,
            inverse.transpose(-3, -2),
            -imaginary.transpose(-3, -2),
            key=True,
        )
        return BoundMap(of_queries.features, of_keys.features)

    def log_relative_variance(self, x: Tensor, y: Tensor, params: Clusters, m: int = 1) -> Tensor:
        """Return log(Var / K^2) of the active base, with m i.i.d. projections."""
        x = x.double()
        y = y.double()
        r = _paired(params.queries, x, y)
        t = _paired(params.keys, x, y)
        pair = nearest(x, r) * self.keys + nearest(y, t)
        size, imaginary = (_row(_paired(u, x, y), pair) for u in params[2:])
        return log_expm1(_log_second_moment(x, y, size, imaginary)) - math.log(m)


class _Side:
    """Computes the features of queries or of keys, with the cluster of each token.

    Features are those of the bases that the token's cluster forms with all clusters of the other side.
    """

    def __init__(
        self,
        phi: ClusteredHybrid,
        noise: Noise,
        centres: Tensor,
        size: Tensor,
        imaginary: Tensor,
        key: bool,
    ):
        self.phi = phi
        self.noise = noise
        self.centres = centres
        self.key = key
        self.others = size.shape[-2]
        self.re = (size * (1 - imaginary.abs())).flatten(-2)  # (..., C, others d)
        self.im = (size * imaginary).flatten(-2) if phi.field == "complex" else None
        # coefficients of x_l^2 in Re (Mx)^2/2, plus |x|^2/2 for the Gaussian kernel
        self.half = (
            size.square() * (1 - 2 * imaginary.abs()) + (phi.kernel == "gaussian")
        ).flatten(-3, -2) / 2

    def features(self, x: Tensor) -> Blocks:
        self.noise.check(x)
        check_dimension(self.centres, x)
        x = at_least_float32(x)
        cluster = nearest_centre(x, self.centres)  # (..., L, 1)
        re = self._scaled(x, cluster, self.re)  # (..., others L, d)
        im = None if self.im is None else self._scaled(x, cluster, self.im)
        half = rows_of(
            product(x.square(), self.half.to(x)).unflatten(-1, (-1, self.others)),
            cluster.unsqueeze(-1),
        )
        f = exponential(
            self.noise, re, im, 0.0, False, self.key, half.squeeze(-2).mT.flatten(-2).unsqueeze(-1)
        )
        f = Features(*(self._together(t) for t in f))
        return Blocks(
            (Selected.of(cluster, self.centres.shape[-2], f, self.others if self.key else 1),)
        )

    def _scaled(self, x: Tensor, cluster: Tensor, factors: Tensor) -> Tensor:
        factors = rows_of(factors.to(x), cluster).unflatten(-1, (self.others, x.shape[-1]))
        return (x.unsqueeze(-3) * factors.movedim(-2, -3)).flatten(-3, -2)

    def _together(self, t: Tensor) -> Tensor:
        """Reshape (..., others L, D) to (..., L, others D)."""
        return t if t is ONE else t.unflatten(-2, (self.others, -1)).movedim(-3, -2).flatten(-2)


class PairParams(NamedTuple):
    """Diagonal M of the base of one pair of clusters, with real or imaginary entries."""

    size: Tensor  # (..., 1, d)
    imaginary: Tensor  # (..., 1, d), 0 or 1

    @property
    def M(self) -> Tensor:
        return Diagonal(self.size, self.imaginary > 0).matrix


@dataclass(frozen=True)
class PairCoefficient(Coefficient):
    """The coefficient lambda = exp(-|M x + M^-T y|^2 / (2 tau^2)) (HRF eq. (93)).

    Imaginary entries of M enter with their modulus. lambda is 1 where the base of the pair is exact. The estimate uses
    n trigonometric projections of the transformed vectors.
    """

    tau: Positive = 1.0
    has_constant = False

    def rho(self, x, noise, params, key):
        noise = match_float64(noise, x.dtype)
        x = at_least_float32(x)
        factor = (2 * params.imaginary - 1) / params.size if key else params.size
        phase = noise.project(x * (factor / self.tau).to(x))
        return torch.cat([phase.cos(), phase.sin()], -1) / math.sqrt(noise.m)

    def between(self, x: Tensor, y: Tensor, params: PairParams) -> Tensor:
        """Return v (..., d) with lambda = exp(-|v|^2 / 2)."""
        size, imaginary = (align(t.double(), x, y) for t in params)
        return (size * x.double() + (1 - 2 * imaginary) * y.double() / size) / self.tau

    def mean(self, x, y, params):
        return torch.exp(-self.between(x, y, params).square().sum(-1) / 2)

    def variance(self, x, y, params):
        return torch.expm1(-self.between(x, y, params).square().sum(-1)).square() / 2


@dataclass(frozen=True)
class GaussianMixtureHybrid(ClusteredMap, HybridMap):
    """Gaussian mixture of the bases of all pairs of clusters (HRF eq. (97)-(100)).

    The base of pair (i, j) has weight lambda^ij = exp(-|M^ij x + (M^ij)^-T y|^2 / (2 tau^2)). The last base has weight
    1 - sum lambda^ij, which may be negative. All coefficients share their projections.

    Args:
        default: the last base, "trig", "pos" or "hyp"; None: that of the last pair of clusters.
        n: projections of the coefficients; None: as many as each base.
        shared: all bases use the same projections.
    """

    tau: Positive = 1.0
    default: Literal["trig", "pos", "hyp"] | None = "trig"
    one_coefficient_noise = True

    def __post_init__(self):
        super().__post_init__()
        if self.default is None and self.pairs == 1:
            raise ValueError(
                "default=None with one pair of clusters: expected a base; set default=trig, or use CERF"
            )

    def _build_components(self):
        default = {"trig": TrigRF, "pos": PosRF, "hyp": HypRF, None: None}[self.default]
        bases = (CERF(self.kernel, field=self.field),) * self.pairs
        if default is not None:
            bases = (*bases, default(self.kernel))
        return (PairCoefficient(tau=self.tau),) * (len(bases) - 1), bases

    def fit(self, stats: Statistics):
        return self._params(self.clusters(stats))

    def unfitted(self, d: int):
        return self._params(self.initial_clusters(d))

    def admitted(self, params):
        def rounded(pair: PairParams | tuple) -> PairParams | tuple:
            return pair._replace(imaginary=pair.imaginary.round()) if pair else pair

        coefficients, bases = params
        return tuple(map(rounded, coefficients)), tuple(map(rounded, bases))

    def _params(self, clusters: Clusters) -> tuple[tuple, tuple]:
        pairs = []
        for k in range(self.pairs):
            pairs.append(PairParams(*(t[..., k : k + 1, :] for t in clusters[2:])))
        if self.default is None:
            return tuple(pairs[:-1]), tuple(pairs)
        return tuple(pairs), (*pairs, ())

    def _moments(self, x, y, params, n):
        """Include covariances of coefficients, which share their projections."""
        coefficients = self.components()[0]
        vectors = [c.between(x, y, p) for c, p in zip(coefficients, params)]
        means = [c.mean(x, y, p) for c, p in zip(coefficients, params)]
        moments = []
        remainders = []  # E lambda_k (1 - sum)
        for mean, vector in zip(means, vectors):
            row = []
            for other_mean, other_vector in zip(means, vectors):
                product = mean * other_mean
                row.append(product + (_both_signs(vector, other_vector) - product) / n)
            remainders.append(mean - sum(row))
            moments.append([*row, remainders[-1]])
        last = 1 - sum(means) - sum(remainders)
        return [*moments, [*remainders, last]]


def _both_signs(u: Tensor, v: Tensor) -> Tensor:
    """Return the mean of exp(-|u - v|^2 / 2) and exp(-|u + v|^2 / 2)."""
    difference = torch.exp(-(u - v).square().sum(-1) / 2)
    total = torch.exp(-(u + v).square().sum(-1) / 2)
    return (difference + total) / 2


# ---- clusters of vectors


def k_means(points: Tensor, count: int, what: str) -> Tensor:
    """Return cluster centres (count, d) of points (n, d), float64 (scikit-learn).

    Raises:
        ValueError: there are fewer points than clusters, or a cluster is empty.
    """
    check_finite(points, f"centre of the {what}")
    if len(points) < count:
        samples = "1 sample" if len(points) == 1 else f"{len(points)} samples"
        raise ValueError(f"{what}: {samples} for {count} clusters; use fewer clusters")
    if count == 1:
        return points.mean(0, keepdim=True)
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    values = points.cpu().numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        try:
            centres = KMeans(count, n_init=STARTS, random_state=SEED).fit(values).cluster_centers_
        except ConvergenceWarning:
            raise ValueError(
                f"{what}: fewer than {count} distinct vectors; use fewer clusters"
            ) from None
    return torch.from_numpy(centres).to(points)


def moments_by_cluster(points: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and mean squares (C, d) of the points of each cluster."""
    own = (nearest_centre(points, centres) == torch.arange(len(centres), device=points.device)).to(
        points
    )
    count = own.sum(0).unsqueeze(-1).clamp(min=1)
    return own.mT @ points / count, own.mT @ points.square() / count


@torch.no_grad()
def nearest_centre(x: Tensor, centres: Tensor) -> Tensor:
    """Return the index of the nearest centre of x (..., L, d), (..., L, 1).

    A tie goes to the first centre.
    """
    centres = centres.to(x)
    return (product(x, centres) - centres.square().sum(-1).unsqueeze(-2) / 2).argmax(
        -1, keepdim=True
    )


def product(x: Tensor, rows: Tensor) -> Tensor:
    """Return x rows^T, (..., L, C), without autocast, for rows (..., C, d)."""
    with no_autocast(x):
        return x @ rows.mT


def nearest(x: Tensor, centres: Tensor) -> Tensor:
    """Return the index of the nearest of centres (..., C, d), for each x (..., d)."""
    return (x.unsqueeze(-2) - centres).square().sum(-1).argmin(-1)


def check_dimension(centres: Tensor, x: Tensor) -> None:
    if centres.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"cluster centres: {centres.shape[-1]} dimensions, expected {x.shape[-1]} as the vectors"
        )


def _paired(rows: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Reshape (*batch, C, d) to (*batch, 1, ..., 1, C, d) to broadcast with pairs."""
    check_dimension(rows, x)
    return broadcast_matrix(rows.double(), max(x.ndim, y.ndim))


def _row(rows: Tensor, index: Tensor) -> Tensor:
    """Return the row of each pair: (..., C, d) and (...) -> (..., d)."""
    return torch.take_along_dim(rows, index[..., None, None], -2).squeeze(-2)


def _log_second_moment(x: Tensor, y: Tensor, size: Tensor, imaginary: Tensor) -> Tensor:
    """Return log E (Re Z)^2 / K^2 for diagonal M with real or imaginary entries."""
    parts = (size * x.double() + (1 - 2 * imaginary) * y.double() / size).square()
    return log_mean_exp2(parts.sum(-1), ((1 - 2 * imaginary) * parts).sum(-1))
