"""What hybrids are made of: features in blocks, and the coefficients that weight the estimates of several bases.

Legend as in base.py; R weights of a token, D features of the base; n projections tau of a coefficient;
lambda = a + E rho(x).rho'(y). Columns that are products of a weight and a feature of a base are kept as the two
factors. Attention puts them together for the tokens of one chunk alone (attention/partials.py), after the exponential:
nothing of length L x R D is ever made there. The sign of a and of the products stands on the side of the queries.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crt_exp.features.base import ONE, FeatureMap, Features, align, can_ask, check_finite, holds
from crt_exp.features.statistics import Statistics, angle
from crt_exp.options import Positive
from crt_exp.samplers.noise import Noise, at_least_float32, precise

LEAST = 1e-3  # of sigma r: below it lambda is a quotient of two differences that vanish

@dataclass(frozen=True)
class InBlocks(FeatureMap):
    """A map whose `bind` gives features in blocks, and whose error is known relative to the kernel."""

    one_map = False

    @abstractmethod
    def log_relative_variance(self, x: Tensor, y: Tensor, params) -> Tensor:
        """log(Var / K^2), float64, nats."""

    def log_relative_second_moment(self, x, y, params) -> Tensor:
        return torch.nn.functional.softplus(self.log_relative_variance(x, y, params))

    def log_variance(self, x, y, params) -> Tensor:
        return 2 * self.log_kernel(x.double(), y.double()) + self.log_relative_variance(x, y, params)


@dataclass(frozen=True)
class Block:
    """Column r D + d is weight_r times feature d of the base."""

    weight: Tensor     # (..., L, R), bounded
    base: Features     # (..., L, D)
    groups = 1
    cluster = None

    @property
    def columns(self) -> int:
        return max(t.shape[-1] for t in self.base if t is not ONE)

    @property
    def width(self) -> int:
        return self.weight.shape[-1] * self.columns

    def top(self, log: Tensor) -> Tensor:
        """Of log features of the base (..., L, D or 1), the maxima over tokens for all columns, (..., width, 1)."""
        top = log.amax(-2).unsqueeze(-1)
        return top.expand(*top.shape[:-2], self.columns, 1).repeat(*[1] * (top.ndim - 2), self.weight.shape[-1], 1)

    def own(self, top: Tensor) -> Tensor:
        """Of what all columns have (..., width, 1), in the way of `top`, that of the base: (..., 1, D or 1)."""
        return top[..., :self.base.log_scale.shape[-1], :].mT

    def dense(self) -> Features:
        value, log = torch.broadcast_tensors(self.base.value.to(self.base.log_scale), self.base.log_scale)
        value = self.weight.unsqueeze(-1) * value.unsqueeze(-2)
        return Features(value.flatten(-2), log.unsqueeze(-2).expand(value.shape).flatten(-2))


@dataclass(frozen=True)
class Selected(Block):
    """A token has one block of each group, that of its cluster, and the others are zero: weight is 1 there, else 0.

    With A groups and C clusters, block (a, c) stands at a C + c and holds D / A columns, those of group a of the base.
    """

    cluster: Tensor    # (..., L, 1), the number of the token's cluster
    groups: int = 1

    @classmethod
    def of(cls, cluster: Tensor, clusters: int, base: Features, groups: int = 1) -> "Selected":
        own = cluster == torch.arange(clusters, device=cluster.device)
        return cls(own.to(base.log_scale), base, cluster, groups)

    def top(self, log: Tensor) -> Tensor:
        tops = [log.masked_fill(weight.unsqueeze(-1) == 0, -torch.inf).amax(-2) for weight in self.weight.unbind(-1)]
        return torch.stack([t.unflatten(-1, (self.groups, -1)) for t in tops], -2).flatten(-3).unsqueeze(-1)

    def own(self, top: Tensor) -> Tensor:
        of_cluster = top.squeeze(-1).unflatten(-1, (self.groups, self.weight.shape[-1], -1)).transpose(-3, -2)
        return rows_of(of_cluster.flatten(-2), self.cluster)

    def dense(self) -> Features:
        value, log = self.base
        value = ONE if value is ONE else self._spread(value, 0.0)
        return Features(value, self._spread(log, -torch.inf))

    def _spread(self, t: Tensor, empty: float) -> Tensor:
        t = t.unflatten(-1, (self.groups, 1, -1))
        return torch.where(self.weight[..., None, :, None] > 0, t, empty).flatten(-3)


def rows_of(table: Tensor, index: Tensor) -> Tensor:
    """Rows of a table (..., C, k) by their numbers (..., L, 1): (..., L, k), batch dimensions broadcast.

    A pass for each row: a few passes over k columns are faster than one that looks up every number.
    """
    rows = table[..., :1, :].expand(*[1] * (index.ndim - table.ndim), *table.shape[:-2], index.shape[-2], -1)
    for c in range(1, table.shape[-2]):
        rows = torch.where(index == c, table[..., c:c + 1, :], rows)
    return rows


@dataclass(frozen=True)
class Blocks:
    """Blocks side by side, in the place of `Features`."""

    parts: tuple[Block, ...]

    def dense(self) -> Features:
        """The features themselves."""
        parts = [part.dense() for part in self.parts]
        if len(parts) == 1:
            return parts[0]
        return Features(*(torch.cat(t, -1) for t in zip(*parts)))


@dataclass(frozen=True)
class Coefficient(FeatureMap):
    """A weight lambda(x, y), estimated without bias by a + rho(x).rho'(y), whose entries are bounded."""

    kernel: None = None
    has_constant = True  # whether `a` may be other than 0
    columns = 2          # of rho, for each projection

    def width(self, m: int) -> int:
        return int(self.has_constant) + self.columns * m

    def width_left(self, m: int) -> int:
        """Columns of `left`."""
        return 1 + self.columns * m

    def constant(self, params) -> Tensor | float:
        """a, a number or (..., 1, 1)."""
        return 0.0

    @abstractmethod
    def rho(self, x: Tensor, noise: Noise, params, key: bool) -> Tensor:
        """rho of x (..., L, d), or rho' for keys, (..., L, n columns), with 1/sqrt(n) and the sign inside."""

    def weighted(self, rho: Tensor, params, key: bool) -> Tensor:
        """The columns of lambda: [sqrt|a|, rho], with the sign of a on the side of the queries."""
        return torch.cat([column(self.constant(params), rho, key), rho], -1) if self.has_constant else rho

    def left(self, rho: Tensor, params, key: bool) -> Tensor:
        """The columns of 1 - lambda, from those of `rho`."""
        return torch.cat([column(1 - self.constant(params), rho, key), rho if key else -rho], -1)

    @abstractmethod
    def mean(self, x: Tensor, y: Tensor, params=()) -> Tensor:
        """lambda itself, float64, pair by pair."""

    @abstractmethod
    def variance(self, x: Tensor, y: Tensor, params=()) -> Tensor:
        """Of the estimate made of one projection, float64; n iid ones divide it by n."""

    def phi_q(self, x, noise, params=()) -> Features:
        return self._features(self.rho(x, noise, params, key=False), params, key=False)

    def phi_k(self, y, noise, params=()) -> Features:
        return self._features(self.rho(y, noise, params, key=True), params, key=True)

    def _features(self, rho: Tensor, params, key: bool) -> Features:
        columns = self.weighted(rho, params, key)
        return Features(columns, torch.zeros_like(columns[..., :1]))

    def log_kernel(self, x, y) -> Tensor:
        return self.mean(x, y, self.fit(None)).log()

    def log_relative_second_moment(self, x, y, params=()) -> Tensor:
        return torch.log1p(self.variance(x, y, params) / self.mean(x, y, params).square())


class BipolarCoefficient(Coefficient):
    """One whose rho is a function of the projections of the vectors as they are."""

    @abstractmethod
    def of_projections(self, projected: Tensor, params, key: bool) -> Tensor:
        """rho, given tau.x (..., L, n)."""

    def rho(self, x, noise, params, key):
        return self.of_projections(precise(noise, x.dtype).project(x), params, key)


@dataclass(frozen=True)
class AngularCoefficient(BipolarCoefficient):
    """lambda = theta / pi with the angle theta of x and y, from n projections (HRF Lemma 3.2): the share of those in
    which the signs of x and y differ.

    rho holds indicators, sqrt(n)^-1 [1_+, 1_-] for queries and [1_-, 1_+] for keys, which meet where signs differ; the
    constant 1/2 of the paper's form, with one column less for each projection, cancels only up to rounding where lambda
    or 1 - lambda is 0, and what it multiplies may be larger than the kernel by e^(2 |x|^2). The estimate lies in
    [0, 1]; it is exact at 0 and pi. A zero vector counts as orthogonal to its partner in `mean`; its estimate is made
    of the signs sgn(0) = 1. Piecewise constant: its gradient is zero.
    """

    has_constant = False

    def width_left(self, m):
        return self.columns * m

    def left(self, rho, params, key):
        """[1_+, 1_-] for both: they meet where signs agree."""
        return torch.cat(rho.chunk(2, -1)[::-1], -1) if key else rho

    def of_projections(self, projected, params, key):
        negative = projected.detach() < 0
        columns = [negative, ~negative] if key else [~negative, negative]
        return torch.cat(columns, -1).to(projected) / math.sqrt(projected.shape[-1])

    def mean(self, x, y, params=()):
        return angle(x.double(), y.double()) / math.pi

    def variance(self, x, y, params=()):
        share = self.mean(x, y)
        return share * (1 - share)


class GaussianParams(NamedTuple):
    sigma: Tensor  # (..., 1, 1)
    norm: Tensor   # (..., 1, 1): varrho = 1 - exp(-2 sigma^2 r^2)


@dataclass(frozen=True)
class BipolarGaussianCoefficient(BipolarCoefficient):
    """lambda = (1 - exp(-sigma^2 |x - y|^2 / 2)) / varrho, varrho = 1 - exp(-2 sigma^2 r^2): 0 at x = y, and 1 at x =
    -y for vectors of norm r (HRF F, normalised bipolar; the parametrisation by sigma is a reconstruction).

    Estimated by n trigonometric projections, it may leave [0, 1], up to 2 / varrho: it is never clipped, which would
    bias the hybrid. r: None is fitted, to the root of the mean squared norm of queries and keys; sigma: None is 1 / r.
    Statistics of zero vectors, which say nothing of r, give varrho = 1. Raises ValueError for sigma r < 1e-3.
    """

    sigma: Positive | None = None
    r: Positive | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.sigma is not None and self.r is not None:
            _check_product(self.sigma * self.r)

    @property
    def fitted(self) -> bool:
        return self.r is None

    def fit(self, stats: Statistics) -> GaussianParams:
        if self.r is not None:
            r = torch.tensor([[float(self.r)]], dtype=torch.float64)
        else:
            r = check_finite((stats.mean_norms / 2).sqrt(), "r")[..., None, None]
        known = r > 0
        sigma = torch.full_like(r, self.sigma) if self.sigma is not None else torch.where(known, 1 / r, 1.0)
        product = torch.where(known, sigma * r, torch.inf)
        if can_ask(product) and not holds(product >= LEAST):
            _check_product(float(product.min()))
        return GaussianParams(sigma, -torch.expm1(-2 * product.square()))

    def constant(self, params):
        return 1 / params.norm

    def of_projections(self, projected, params, key):
        phase = projected * params.sigma.to(projected)
        size = (params.norm * projected.shape[-1]).rsqrt().to(projected)
        return torch.cat([phase.cos(), phase.sin()], -1) * (size if key else -size)

    def mean(self, x, y, params):
        sigma, norm = (align(t.double(), x, y)[..., 0] for t in params)
        return -torch.expm1(-sigma.square() * _sq_distance(x, y) / 2) / norm

    def variance(self, x, y, params):
        sigma, norm = (align(t.double(), x, y)[..., 0] for t in params)
        return (torch.expm1(-sigma.square() * _sq_distance(x, y)) / norm).square() / 2


@dataclass(frozen=True)
class GaussianCoefficient(Coefficient):
    """lambda = exp(-|x + M y|^2 / (2 c^2)) for a real M, a number or the d numbers of a diagonal (HRF (20)).

    It fires where x is near -M y, so it belongs to a base that is exact there: M = 1 to positive features, M = -1 to
    trigonometric ones. Estimated by n trigonometric projections, of either sign; never clipped.
    """

    M: Any = 1.0
    c: Positive = 1.0
    has_constant = False

    def __post_init__(self):
        super().__post_init__()
        M = torch.as_tensor(self.M, dtype=torch.float64)
        if M.ndim > 1 or not bool(M.isfinite().all()):
            raise ValueError(f"M = {self.M!r}: give a real number, or the d numbers of a diagonal")
        object.__setattr__(self, "M", tuple(M.tolist()) if M.ndim else float(M))

    def rho(self, x, noise, params, key):
        noise, x = precise(noise, x.dtype), at_least_float32(x)
        phase = noise.project((-self._m(x) * x if key else x) / self.c)
        return torch.cat([phase.cos(), phase.sin()], -1) / math.sqrt(noise.m)

    def mean(self, x, y, params=()):
        return torch.exp(-_sq_distance(x, -self._m(y.double()) * y) / (2 * self.c**2))

    def variance(self, x, y, params=()):
        return torch.expm1(-_sq_distance(x, -self._m(y.double()) * y) / self.c**2).square() / 2

    def _m(self, x: Tensor) -> Tensor:
        M = x.new_tensor(self.M)
        if M.ndim and len(M) != x.shape[-1]:
            raise ValueError(f"M has {len(M)} numbers but the vectors have {x.shape[-1]} dimensions")
        return M


def _check_product(product: float) -> None:
    if product < LEAST:
        raise ValueError(f"sigma r = {product:.3g}: below {LEAST} the coefficient is 0 / 0 (varrho -> 0): choose a "
                         "larger sigma, or the vectors are too short for a Gaussian hybrid")


def column(constant: Tensor | float, like: Tensor, key: bool) -> Tensor:
    constant = torch.as_tensor(constant, dtype=torch.float64).to(like)
    size = constant.abs().sqrt()
    return (size if key else torch.where(constant < 0, -size, size)).expand(like[..., :1].shape)


def _sq_distance(x: Tensor, y: Tensor) -> Tensor:
    return (x.double() - y.double()).square().sum(-1)
