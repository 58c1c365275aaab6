"""Hybrid maps for clustered queries and keys (HRF 2.4, appendix H).

Notation: I clusters of queries, J clusters of keys. Each pair (i, j) has a complex-exponential base with a diagonal M
in closed form. Feature blocks are in the order (i, j).

`fit` runs k-means on the vectors. An attention layer fits once and stores the clusters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from crt_exp.features.base import (
    ONE,
    BoundMap,
    FeatureMap,
    Features,
    broadcast_matrix,
    check_dimension,
    check_finite,
    fit_sets,
)
from crt_exp.features.blocks import (
    Blocks,
    DistanceCoefficient,
    InBlocks,
    select_cluster,
    take_rows,
)
from crt_exp.features.complex_exponential import (
    CERF,
    Diagonal,
    Field,
    diagonal_by_centres,
    diagonal_by_moments,
    exponential,
)
from crt_exp.features.hybrid import BASES, HybridMap
from crt_exp.features.statistics import Statistics
from crt_exp.samplers.noise import Noise, at_least_float32, map_leaves, no_autocast
from crt_exp.validation import Count, Positive

SEED = 0  # random state of k-means
STARTS = 4  # initialisations of k-means


class Clusters(NamedTuple):
    """Cluster centres, and the diagonal M of each pair of clusters.

    The entries of M are those of `Diagonal`.
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

    def fit(self, stats: Statistics) -> Clusters:
        """Run k-means for each batch entry and return the clusters.

        Raises:
            ValueError: the statistics hold no vectors.
        """
        return fit_sets(stats, self.cluster_pairs)

    def cluster_pairs(self, x: Tensor, y: Tensor) -> Clusters:
        """Return the clusters of queries (L, d) and keys (S, d)."""
        r = k_means(x, self.queries, "queries")
        t = k_means(y, self.keys, "keys")
        if self.by == "centres":
            M = diagonal_by_centres(r[:, None], t[None], self.field)
        else:
            x_mean, x_mean_sq = moments_by_cluster(x, r)
            y_mean, y_mean_sq = moments_by_cluster(y, t)
            M = diagonal_by_moments(
                x_mean[:, None], x_mean_sq[:, None], y_mean[None], y_mean_sq[None], self.field
            )
        shape = (self.queries, self.keys, -1)
        size = M.size.expand(shape).flatten(0, 1)
        return Clusters(r, t, size, M.imaginary.expand(shape).flatten(0, 1).double())

    def unfitted(self, d: int) -> Clusters:
        """Return initial clusters with M = 1 for all pairs, so that every base is PosRF."""
        counts = (self.queries, self.keys, self.pairs, self.pairs)
        r, t, size, imaginary = (torch.zeros(n, d, dtype=torch.float64) for n in counts)
        return Clusters(r, t, size + 1, imaginary)


@dataclass(frozen=True)
class ClusteredHybrid(ClusteredMap):
    """Zero-one mixture: each pair uses the base of its clusters (HRF eq. (101)-(104)).

    M = I J m features (complex: 2 I J m). A query has J non-zero blocks, a key I. All bases share their projections,
    since each pair uses one base. The variance is that of this base. A tie goes to the first centre.

    >>> ClusteredHybrid(queries=2, keys=3).width(8)
    48
    """

    def width(self, m: int) -> int:
        columns = 2 * m if self.field == "complex" else m
        return self.pairs * columns

    def admitted(self, params: Clusters) -> Clusters:
        return params._replace(imaginary=params.imaginary.round())

    def bind(self, noise: Noise, params: Clusters) -> BoundMap:
        shape = (self.queries, self.keys)
        size = params.size.unflatten(-2, shape)
        imaginary = params.imaginary.unflatten(-2, shape)
        key_size = (1 / size).transpose(-3, -2)
        key_imaginary = -imaginary.transpose(-3, -2)
        return BoundMap(
            features_of_side(self, noise, params.queries, size, imaginary, key=False),
            features_of_side(self, noise, params.keys, key_size, key_imaginary, key=True),
        )

    def log_relative_variance(self, x: Tensor, y: Tensor, params: Clusters) -> Tensor:
        """Return log(Var / K^2) of the active base."""
        x = x.double()
        y = y.double()
        check_dimension("cluster centres", params.queries, x)
        clusters = map_leaves(lambda t: broadcast_matrix(t.double(), max(x.ndim, y.ndim)), params)
        r = nearest_centre(x.unsqueeze(-2), clusters.queries)
        t = nearest_centre(y.unsqueeze(-2), clusters.keys)
        pair = r * self.keys + t
        size = torch.take_along_dim(clusters.size, pair, -2)
        M = Diagonal(size, torch.take_along_dim(clusters.imaginary, pair, -2))
        return CERF(self.kernel).log_relative_variance(x, y, M)


def features_of_side(
    phi: ClusteredHybrid,
    noise: Noise,
    centres: Tensor,
    size: Tensor,
    imaginary: Tensor,
    key: bool,
) -> Callable[[Tensor], Blocks]:
    """Return the features of queries or of keys as a function of the vectors.

    Features are those of the bases that a token's cluster forms with all clusters of the other side.
    """
    others = size.shape[-2]
    of_re = (size * (1 - imaginary.abs())).flatten(-2)  # (..., C, others d)
    of_im = (size * imaginary).flatten(-2) if phi.field == "complex" else None
    # coefficients of x_l^2 in Re (Mx)^2/2, plus |x|^2/2 for the Gaussian kernel
    squares = size.square() * (1 - 2 * imaginary.abs()) + (phi.kernel == "gaussian")
    of_half = squares.flatten(-3, -2) / 2

    def scaled(x: Tensor, cluster: Tensor, factors: Tensor) -> Tensor:
        factors = take_rows(factors.to(x), cluster).unflatten(-1, (others, x.shape[-1]))
        return (x.unsqueeze(-3) * factors.movedim(-2, -3)).flatten(-3, -2)

    def to_columns(t: Tensor) -> Tensor:
        """Reshape (..., others L, D) to (..., L, others D)."""
        return t.unflatten(-2, (others, -1)).movedim(-3, -2).flatten(-2)

    def features(x: Tensor) -> Blocks:
        noise.check(x)
        check_dimension("cluster centres", centres, x)
        x = at_least_float32(x)
        cluster = nearest_centre(x, centres)  # (..., L, 1)
        re = scaled(x, cluster, of_re)  # (..., others L, d)
        im = None if of_im is None else scaled(x, cluster, of_im)
        halves = product(x.square(), of_half.to(x)).unflatten(-1, (-1, others))
        half = take_rows(halves, cluster.unsqueeze(-1)).squeeze(-2)  # (..., L, others)
        half = half.mT.flatten(-2).unsqueeze(-1)
        value, log_scale = exponential(noise, re, im, 0.0, False, key, half)
        if value is not ONE:
            value = to_columns(value)
        base = Features(value, to_columns(log_scale))
        groups = others if key else 1
        return Blocks((select_cluster(cluster, centres.shape[-2], base, groups),))

    return features


@dataclass(frozen=True)
class PairCoefficient(DistanceCoefficient):
    """The coefficient lambda = exp(-|M x + M^-T y|^2 / (2 tau^2)) (HRF eq. (93)).

    Imaginary entries of M enter with their modulus. lambda is 1 where the base of the pair is exact.
    """

    tau: Positive = 1.0

    def scaled(self, x, params: Diagonal, key):
        factor = (2 * params.imaginary - 1) / params.size if key else params.size
        return x * (factor / self.tau).to(x)


@dataclass(frozen=True)
class GaussianMixtureHybrid(ClusteredMap, HybridMap):
    """Gaussian mixture of the bases of all pairs of clusters (HRF eq. (97)-(100)).

    The base of pair (i, j) has weight lambda^ij = exp(-|M^ij x + (M^ij)^-T y|^2 / (2 tau^2)). The last base has weight
    1 - sum lambda^ij, which may be negative. All coefficients share their projections.

    Args:
        default: the last base, "trig", "pos" or "hyp"; None: that of the last pair of clusters.
        n: projections of the coefficients; None: as many as each base.
        shared: all bases use the same projections.

    >>> hybrid = GaussianMixtureHybrid(queries=1, keys=2)
    >>> len(hybrid.parts[1])  # a base of each pair of clusters, and the last
    3
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

    @property
    def coefficient(self) -> PairCoefficient:
        """The coefficient of every pair of clusters."""
        return PairCoefficient(tau=self.tau)

    def _build_parts(self):
        bases: tuple[FeatureMap, ...] = (CERF(self.kernel, field=self.field),) * self.pairs
        if self.default is not None:
            bases = (*bases, BASES[self.default](self.kernel))
        return (self.coefficient,) * (len(bases) - 1), bases

    def fit(self, stats: Statistics):
        return self._params(super().fit(stats))

    def unfitted(self, d: int):
        return self._params(super().unfitted(d))

    def admitted(self, params):
        def rounded(pair: Diagonal | tuple) -> Diagonal | tuple:
            if isinstance(pair, Diagonal):
                return pair._replace(imaginary=pair.imaginary.round())
            return pair

        coefficients, bases = params
        return tuple(map(rounded, coefficients)), tuple(map(rounded, bases))

    def _params(self, clusters: Clusters) -> tuple[tuple, tuple]:
        pairs = []
        for k in range(self.pairs):
            row = slice(k, k + 1)
            pairs.append(Diagonal(clusters.size[..., row, :], clusters.imaginary[..., row, :]))
        if self.default is None:
            return tuple(pairs[:-1]), tuple(pairs)
        return tuple(pairs), (*pairs, ())

    def _covariances(self, x, y, params):
        """Return those of all pairs of coefficients, which share their projections."""
        v = torch.stack([self.coefficient.difference(x, y, p) for p in params])
        u = v.unsqueeze(1)
        difference = torch.exp(-(u - v).square().sum(-1) / 2)
        total = torch.exp(-(u + v).square().sum(-1) / 2)
        return (difference + total) / 2 - torch.exp(-(u.square() + v.square()).sum(-1) / 2)


# ---- clusters of vectors


def k_means(points: Tensor, count: int, name: str) -> Tensor:
    """Return cluster centres (count, d) of points (n, d), float64 (scikit-learn).

    Raises:
        ValueError: there are fewer distinct points than clusters.
    """
    check_finite(points, f"centre of the {name}")
    if len(points.unique(dim=0)) < count:
        raise ValueError(
            f"{name}: fewer than {count} distinct vectors (n_samples={len(points)}); use fewer clusters"
        )
    if count == 1:
        return points.mean(0, keepdim=True)
    from sklearn.cluster import KMeans

    k_means = KMeans(count, n_init=STARTS, random_state=SEED).fit(points.cpu().numpy())
    return torch.from_numpy(k_means.cluster_centers_).to(points)


def moments_by_cluster(points: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and mean squares (C, d) of the points of each cluster."""
    numbers = torch.arange(len(centres), device=points.device)
    own = (nearest_centre(points, centres) == numbers).to(points)
    count = own.sum(0).unsqueeze(-1).clamp(min=1)
    return own.mT @ points / count, own.mT @ points.square() / count


@torch.no_grad()
def nearest_centre(x: Tensor, centres: Tensor) -> Tensor:
    """Return the index of the nearest centre of x (..., L, d), (..., L, 1).

    A tie goes to the first centre.
    """
    centres = centres.to(x)
    scores = product(x, centres) - centres.square().sum(-1).unsqueeze(-2) / 2
    return scores.argmax(-1, keepdim=True)


def product(x: Tensor, rows: Tensor) -> Tensor:
    """Return x rows^T, (..., L, C), without autocast, for rows (..., C, d)."""
    with no_autocast(x):
        return x @ rows.mT
