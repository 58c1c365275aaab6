"""Building blocks of hybrid maps: features in blocks, and coefficients.

Notation: R weights per token, D features of a base map, n projections tau of a coefficient, lambda = a + E
rho(x).rho'(y).

A block stores the product of weights and base features as two factors. Attention multiplies them for one chunk of
tokens at a time (attention/partials.py), so no tensor of size L x R D exists. Negative signs of a and of products are
on the query side.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crt_exp.features.base import (
    ONE,
    FeatureMap,
    Features,
    align,
    all_true,
    check_dimension,
    check_finite,
    concatenate,
    cos_sin,
    outer,
    scalar,
    values_readable,
)
from crt_exp.features.statistics import Statistics, angle
from crt_exp.samplers.noise import Noise, at_least_float32, map_leaves
from crt_exp.validation import Positive, Several

LEAST = 1e-3  # limit of sigma r; lambda tends to 0 / 0 below it


@dataclass(frozen=True)
class InBlocks(FeatureMap):
    """Base class of maps with features in blocks and a known relative variance."""

    one_map = False

    @abstractmethod
    def log_relative_variance(self, x: Tensor, y: Tensor, params) -> Tensor:
        """Return log(Var / K^2) in nats, float64."""

    def log_relative_second_moment(self, x, y, params) -> Tensor:
        return torch.nn.functional.softplus(self.log_relative_variance(x, y, params))


@dataclass(frozen=True)
class Block:
    """The product of weights and base features; column r D + d is weight_r feature_d."""

    weight: Tensor  # (..., L, R), bounded
    base: Features  # (..., L, D)
    cluster: Any = None  # of `Selected`: (..., L, 1), index of the token's cluster
    groups: int = 1

    @property
    def columns(self) -> int:
        value, log_scale = self.base
        return log_scale.shape[-1] if value is ONE else value.shape[-1]

    @property
    def width(self) -> int:
        return self.weight.shape[-1] * self.columns

    def column_maxima(self, log: Tensor) -> Tensor:
        """Return the maxima over tokens of log features, (..., width, 1).

        `log` has shape (..., L, D or 1).
        """
        top = log.amax(-2)
        top = top.expand(*top.shape[:-1], self.columns)
        return torch.cat([top] * self.weight.shape[-1], -1).unsqueeze(-1)

    def to_base(self, top: Tensor) -> Tensor:
        """Map maxima per column (..., width, 1) to the base features, (..., 1, D or 1)."""
        return top[..., : self.base.log_scale.shape[-1], :].mT

    def dense(self) -> Features:
        return outer(Features(self.weight, self.weight.new_zeros(())), self.base)


@dataclass(frozen=True)
class Selected(Block):
    """A block with one non-zero group per token, that of the token's cluster.

    With A groups and C clusters, block (a, c) has index a C + c and D / A columns, those of group a of the base.
    """

    def column_maxima(self, log: Tensor) -> Tensor:
        tops = []
        for own in self.weight.unbind(-1):
            top = log.masked_fill(own.unsqueeze(-1) == 0, -torch.inf).amax(-2)
            tops.append(top.unflatten(-1, (self.groups, -1)))
        return torch.stack(tops, -2).flatten(-3).unsqueeze(-1)

    def to_base(self, top: Tensor) -> Tensor:
        shape = (self.groups, self.weight.shape[-1], -1)
        of_clusters = top.squeeze(-1).unflatten(-1, shape).transpose(-3, -2)
        return take_rows(of_clusters.flatten(-2), self.cluster)

    def dense(self) -> Features:
        value, log_scale = self.base
        if value is not ONE:
            value = self._fill_others(value, 0.0)
        return Features(value, self._fill_others(log_scale, -torch.inf))

    def _fill_others(self, t: Tensor, empty: float) -> Tensor:
        """Return the columns of all clusters, with `empty` for those of other clusters."""
        t = t.unflatten(-1, (self.groups, 1, -1))
        return torch.where(self.weight[..., None, :, None] > 0, t, empty).flatten(-3)


def select_cluster(cluster: Tensor, clusters: int, base: Features, groups: int = 1) -> Selected:
    """Return the block with the base features of the cluster (..., L, 1) of each token."""
    own = cluster == torch.arange(clusters, device=cluster.device)
    return Selected(own.to(base.log_scale), base, cluster, groups)


def take_rows(table: Tensor, index: Tensor) -> Tensor:
    """Return rows of a table (..., C, k) by index (..., L, 1): (..., L, k).

    C passes of `where` over k columns are faster than a gather.
    """
    ones = [1] * (index.ndim - table.ndim)
    rows = table[..., :1, :].expand(*ones, *table.shape[:-2], index.shape[-2], -1)
    for c in range(1, table.shape[-2]):
        rows = torch.where(index == c, table[..., c : c + 1, :], rows)
    return rows


@dataclass(frozen=True)
class Blocks:
    """Concatenated blocks, an alternative to `Features`."""

    parts: tuple[Block, ...]

    def dense(self) -> Features:
        """Return the features."""
        return concatenate([part.dense() for part in self.parts])


@dataclass(frozen=True)
class Coefficient(FeatureMap):
    """Base class: a weight lambda(x, y), estimated without bias by a + rho(x).rho'(y).

    The entries of rho are bounded.
    """

    kernel: None = None  # type: ignore[assignment]
    has_constant = False  # `a` may be non-zero

    def width(self, m: int) -> int:
        return int(self.has_constant) + 2 * m

    def constant(self, params) -> Tensor | float:
        """Return a, a number or (..., 1, 1)."""
        return 0.0

    def scaled(self, x: Tensor, params, key: bool) -> Tensor:
        """Return the vectors that are projected, for queries or keys x (..., d)."""
        return x

    @abstractmethod
    def of_projections(self, projected: Tensor, params, key: bool) -> Tensor:
        """Return rho of queries or rho' of keys, (..., L, 2n), for projections (..., L, n).

        The result includes 1/sqrt(n) and the sign.
        """

    def rho(self, x: Tensor, noise: Noise, params, key: bool) -> Tensor:
        """Return rho of queries or rho' of keys x (..., L, d)."""
        x = self.scaled(at_least_float32(x), params, key)
        return self.of_projections(noise.project(x), params, key)

    def lambda_columns(self, rho: Tensor, params, key: bool) -> Tensor:
        """Return the columns of lambda: [sqrt|a|, rho], with sgn(a) on the query side."""
        if not self.has_constant:
            return rho
        return torch.cat([column(self.constant(params), rho, key), rho], -1)

    @abstractmethod
    def mean(self, x: Tensor, y: Tensor, params=()) -> Tensor:
        """Return lambda for each pair, float64."""

    @abstractmethod
    def variance(self, x: Tensor, y: Tensor, params=()) -> Tensor:
        """Return the variance with one projection, float64; n i.i.d. ones divide it by n."""


@dataclass(frozen=True)
class AngularCoefficient(Coefficient):
    """The coefficient theta / pi of the angle between x and y (HRF Lemma 3.2).

    The estimate is the share of n projections in which the signs of x and y differ. It lies in [0, 1] and is exact at
    angles 0 and pi. Its gradient is zero. sgn(0) = 1; `mean` takes the angle pi/2 for zero vectors.

    rho holds indicators, [1_+, 1_-]/sqrt(n) for queries and [1_-, 1_+]/sqrt(n) for keys. The paper's form, a = 1/2
    with one column fewer per projection, suffers from cancellation where lambda or 1 - lambda is 0.

    >>> x = torch.tensor([1.0, 0.0])
    >>> y = torch.tensor([0.0, 1.0])
    >>> AngularCoefficient().mean(x, y).item()
    0.5
    """

    def of_projections(self, projected, params, key):
        negative = projected.detach() < 0
        columns = [negative, ~negative] if key else [~negative, negative]
        return torch.cat(columns, -1).to(projected) / math.sqrt(projected.shape[-1])

    def mean(self, x, y, params=()):
        return angle(x.double(), y.double()) / math.pi

    def variance(self, x, y, params=()):
        share = self.mean(x, y)
        return share * (1 - share)


def indicators_of_equal_signs(rho: Tensor, key: bool) -> Tensor:
    """Return the columns of 1 - lambda, [1_+, 1_-] for both sides, from rho of `AngularCoefficient`."""
    return torch.cat(rho.chunk(2, -1)[::-1], -1) if key else rho


class GaussianParams(NamedTuple):
    sigma: Tensor  # (..., 1, 1)
    norm: Tensor  # (..., 1, 1): varrho = 1 - exp(-2 sigma^2 r^2)


@dataclass(frozen=True)
class BipolarGaussianCoefficient(Coefficient):
    """The bipolar Gaussian coefficient (HRF appendix F, normalised).

    lambda = (1 - exp(-sigma^2 |x - y|^2 / 2)) / varrho with varrho = 1 - exp(-2 sigma^2 r^2). For vectors of norm r it
    is 0 at x = y and 1 at x = -y. The parametrisation by sigma is reconstructed.

    The estimate lies in [0, 2 / varrho]. Clipping it to [0, 1] would bias the hybrid. Statistics of zero vectors give
    varrho = 1.

    Args:
        sigma: None: 1 / r.
        r: None: fitted, the root mean square norm of queries and keys.

    Raises:
        ValueError: (in `fit`) sigma r < 1e-3.

    >>> coefficient = BipolarGaussianCoefficient(r=1.0)
    >>> x = torch.tensor([1.0, 0.0])
    >>> coefficient.mean(x, -x, coefficient.fit(None)).item()
    1.0
    """

    sigma: Positive | None = None
    r: Positive | None = None

    fixed = "r"
    has_constant = True

    def fit(self, stats: Statistics) -> GaussianParams:
        if self.r is not None:
            r = scalar(self.r)
        else:
            r = check_finite((stats.mean_norms / 2).sqrt(), "r")[..., None, None]
        if self.sigma is not None:
            sigma = torch.full_like(r, self.sigma)
        else:
            sigma = torch.where(r > 0, 1 / r, 1.0)
        product = torch.where(r > 0, sigma * r, torch.inf)
        if values_readable(product) and not all_true(product >= LEAST):
            least = float(product.min())
            raise ValueError(f"sigma * r={least:.3g}: expected >= {LEAST}; use a larger sigma")
        return GaussianParams(sigma, -torch.expm1(-2 * product.square()))

    def constant(self, params):
        return 1 / params.norm

    def of_projections(self, projected, params, key):
        phase = projected * params.sigma.to(projected)
        size = (params.norm * projected.shape[-1]).rsqrt().to(projected)
        if not key:
            size = -size
        return cos_sin(phase) * size

    def mean(self, x, y, params):
        exponent, norm = self._exponent(x, y, params)
        return -torch.expm1(exponent / 2) / norm

    def variance(self, x, y, params):
        exponent, norm = self._exponent(x, y, params)
        return (torch.expm1(exponent) / norm).square() / 2

    def _exponent(self, x: Tensor, y: Tensor, params: GaussianParams) -> tuple[Tensor, Tensor]:
        """Return -sigma^2 |x - y|^2 and varrho, to broadcast with the pairs."""
        sigma, norm = (align(t.double(), x, y)[..., 0] for t in params)
        distance = (x.double() - y.double()).square().sum(-1)
        return -sigma.square() * distance, norm


@dataclass(frozen=True)
class DistanceCoefficient(Coefficient):
    """Base class of coefficients lambda = exp(-|u - w|^2 / 2) with u and w linear in x and y.

    The estimate uses n trigonometric projections. It may be negative and is not clipped.
    """

    @abstractmethod
    def scaled(self, x: Tensor, params, key: bool) -> Tensor:
        """Return u of queries or w of keys x (..., d)."""

    def of_projections(self, projected, params, key):
        return cos_sin(projected) / math.sqrt(projected.shape[-1])

    def difference(self, x: Tensor, y: Tensor, params) -> Tensor:
        """Return u - w for each pair, float64 (..., d)."""
        params = map_leaves(lambda t: align(t.double(), x, y), params)
        u = self.scaled(x.double(), params, key=False)
        return u - self.scaled(y.double(), params, key=True)

    def mean(self, x, y, params=()):
        return torch.exp(-self.difference(x, y, params).square().sum(-1) / 2)

    def variance(self, x, y, params=()):
        return torch.expm1(-self.difference(x, y, params).square().sum(-1)).square() / 2


@dataclass(frozen=True)
class GaussianCoefficient(DistanceCoefficient):
    """The coefficient lambda = exp(-|x + M y|^2 / (2 c^2)) (HRF eq. (20)).

    It is large where x is near -M y. Combine it with a base that is exact there: M = 1 with positive features, M = -1
    with trigonometric features.

    Args:
        M: a real number, or the d numbers of a diagonal.

    >>> x = torch.ones(3)
    >>> GaussianCoefficient().mean(x, -x).item()
    1.0
    """

    M: float | Several[float] = 1.0
    c: Positive = 1.0

    def scaled(self, x, params, key):
        M = torch.as_tensor(self.M, dtype=x.dtype, device=x.device)
        if M.ndim:
            check_dimension("M", M, x)
        return (-M * x if key else x) / self.c


def column(constant: Tensor | float, like: Tensor, key: bool) -> Tensor:
    """Return sqrt|a| as a column (..., L, 1), with sgn(a) on the query side."""
    constant = torch.as_tensor(constant, dtype=torch.float64).to(like)
    size = constant.abs().sqrt()
    if not key:
        size = torch.where(constant < 0, -size, size)
    return size.expand(like[..., :1].shape)
