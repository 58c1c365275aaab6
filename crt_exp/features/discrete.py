"""Discrete random features: Poisson and geometric, and their positive variants.

Notation: c shift, lambda rate of the Poisson distribution, p of the geometric distribution. The counts omega_l = 0, 1,
... have distribution P(omega_l). The features of the Gaussian kernel are

    f(omega, x) = e^(-|x|^2/2) prod_l x_l^omega_l / sqrt(omega_l! P(omega_l))

(CRT eq. (9), (10)). The softmax kernel drops e^(-|x|^2/2).

Counts are the quantiles of u = Phi(g) for Gaussian projections g. Every sampler with exactly Gaussian rows works, and
new parameters need no new sample.

log|f| is a matrix product of counts with log|x|. |x_l| is clamped at 1e-30 (float64: 1e-300), where the value
underflows; the gradient there is zero.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from crt_exp.features.base import (
    ONE,
    BoundMap,
    FeatureMap,
    Features,
    align,
    check_finite,
    check_gaussian,
    scalar,
    values_readable,
)
from crt_exp.features.exponential import sq_norm
from crt_exp.features.statistics import Statistics
from crt_exp.samplers.noise import Noise, at_least_float32, no_autocast, transforming
from crt_exp.validation import Positive

MAX_COUNT = 10_000
MIN_RATE = 1e-8
P_RANGE = (1e-6, 1 - 1e-9)


class DiscreteParams(NamedTuple):
    """Parameters of discrete maps.

    `rate` is lambda or p, (..., 1, 1) or (..., 1, d). `shift` is c, (..., 1, d) or None.
    """

    rate: Tensor
    shift: Tensor | None = None


@dataclass(frozen=True)
class DiscreteRF(FeatureMap):
    """Base class of discrete maps; the sign of a feature is prod_l sgn(x_l)^omega_l."""

    @abstractmethod
    def _rate(self, stats: Statistics, shift: Tensor | None) -> Tensor:
        """Return the fitted rate of the distribution of counts."""

    @abstractmethod
    def _quantile(self, g: Tensor, rate: Tensor) -> Tensor:
        """Return the counts (..., m, d) of Gaussian projections g."""

    @abstractmethod
    def _log_weights(self, counts: Tensor, rate: Tensor) -> Tensor:
        """Return -1/2 sum_l log(omega_l! P(omega_l)), (..., 1, m)."""

    def fit(self, stats: Statistics) -> DiscreteParams:
        shift = self._shift(stats)
        return DiscreteParams(self._rate(stats, shift), shift)

    def _shift(self, stats: Statistics) -> Tensor | None:
        """Return c (..., 1, d), or None for maps without shift."""
        return None

    def bind(self, noise: Noise, params: DiscreteParams) -> BoundMap:
        weight, half_odd = self._weights(noise, params)
        phi = partial(self._phi, noise=noise, weight=weight, half_odd=half_odd, shift=params.shift)
        return BoundMap(phi, phi)

    def _weights(self, noise: Noise, params: DiscreteParams) -> tuple[Tensor, Tensor]:
        """Return [counts, bias, 1] (..., m, d + 2), and 1/2 at odd counts (..., m, d)."""
        counts = self.counts(noise, params)  # (..., m, d)
        log_weights = self._log_weights(counts, params.rate.double().to(counts.device))
        bias = (log_weights - math.log(noise.m) / 2).mT  # (..., m, 1)
        counts = counts.expand(*bias.shape[:-2], *counts.shape[-2:])
        weight = torch.cat([counts, bias, torch.ones_like(bias)], -1)
        dtype = noise.sq_norm.dtype
        return weight.to(dtype), (counts % 2 / 2).to(dtype)

    def _phi(
        self,
        x: Tensor,
        noise: Noise,
        weight: Tensor,
        half_odd: Tensor,
        shift: Tensor | None,
    ) -> Features:
        """Compute log|phi| as [log|x|, 1, norm term] [counts, bias, 1]^T, and the sign."""
        noise.check(x)
        with no_autocast(x):
            x = at_least_float32(x)
            shifted = x if shift is None else x - shift.to(x)
            positive = _all_positive(shifted)
            sizes = shifted if positive else shifted.abs()
            least = 1e-300 if x.dtype == torch.float64 else 1e-30
            logs = sizes.clamp(min=least).log_()  # (..., L, d)
            ones = torch.ones_like(logs[..., :1])
            inputs = torch.cat([logs, ones, self._norm_term(x, shifted)], -1)
            log_scale = inputs @ weight.to(x.dtype).mT
            if positive:
                return Features(ONE, log_scale)
            # prod_l (-1)^omega_l over negative entries
            odd = ((shifted < 0).to(x.dtype) @ half_odd.to(x.dtype).mT).frac_()  # 0 or 1/2
            return Features(odd.mul_(-4).add_(1), log_scale)

    def _norm_term(self, x: Tensor, shifted: Tensor) -> Tensor:
        """Return the term that makes the shifted features estimate the chosen kernel.

        It is -|x - c|^2/2 for the Gaussian kernel and (|x|^2 - |x - c|^2)/2 for the softmax kernel.
        """
        if self.kernel == "gaussian":
            return -sq_norm(shifted) / 2
        if shifted is x:
            return torch.zeros_like(x[..., :1])
        return (sq_norm(x) - sq_norm(shifted)) / 2

    def counts(self, noise: Noise, params: DiscreteParams) -> Tensor:
        """Return omega (..., m, d), float64, from the Gaussian projections.

        Raises:
            ValueError: the projections are not exactly Gaussian.
        """
        check_gaussian(noise, type(self).__name__)
        return self._quantile(noise.rows().double(), params.rate.double().to(noise.sq_norm.device))

    def _shifted(self, x: Tensor, y: Tensor, params: DiscreteParams) -> tuple[Tensor, Tensor]:
        x = x.double()
        y = y.double()
        if params.shift is None:
            return x, y
        c = align(params.shift.double(), x, y)
        return x - c, y - c


def _all_positive(x: Tensor) -> bool:
    """Whether no entry is negative; False where values cannot be read cheaply."""
    known = values_readable(x) and not transforming()
    return known and (x.numel() == 0 or bool(x.detach().amin() >= 0))


@dataclass(frozen=True)
class PoisRF(DiscreteRF):
    """Poisson features with one rate for all coordinates (CRT 3.2, Theorem 3.4).

    Args:
        rate: fixed lambda instead of the fit (CRT eq. (12)).

    >>> x = torch.tensor([[2.0, 0.0]])
    >>> PoisRF().fit(Statistics.of(x, x)).rate  # the root of the mean of x_l^2 y_l^2
    tensor([[2.8284]], dtype=torch.float64)
    """

    rate: Positive | None = None

    fixed = "rate"
    each_coordinate = False  # one rate per coordinate

    def _rate(self, stats, shift):
        if self.rate is not None:
            return scalar(self.rate)
        products = _mean_sq_products(stats, shift)
        if not self.each_coordinate:
            products = products.mean(-1, keepdim=True)
        rate = products.sqrt().clamp(min=MIN_RATE)
        return check_finite(rate, "Poisson rate").unsqueeze(-2)

    def _quantile(self, g, rate):
        return poisson_quantile(g, rate.expand(*rate.shape[:-1], g.shape[-1]).squeeze(-2))

    def _log_weights(self, counts, rate):
        rate = rate.expand(*rate.shape[:-1], counts.shape[-1])
        return rate.sum(-1, keepdim=True) / 2 - rate.log() / 2 @ counts.mT

    def log_relative_second_moment(self, x, y, params):
        """Return sum_l (lambda_l - x_l y_l)^2 / lambda_l, free of cancellation."""
        x, y = self._shifted(x, y, params)
        rate = align(params.rate.double(), x, y)
        return ((rate - x * y).square() / rate).sum(-1)


@dataclass(frozen=True)
class PoisCoordRF(PoisRF):
    """Poisson features with one rate per coordinate.

    For a fixed pair their variance is the least of all discrete features.

    >>> x = torch.tensor([[2.0, 1.0]])
    >>> PoisCoordRF().fit(Statistics.of(x, x)).rate
    tensor([[4., 1.]], dtype=torch.float64)
    """

    each_coordinate = True


@dataclass(frozen=True)
class GeomRF(DiscreteRF):
    """Geometric features (CRT 3.2, Theorem 3.5): bounded.

    Args:
        p: fixed value instead of the numerical fit (CRT eq. (14)).

    >>> x = torch.tensor([[2.0, 1.0]])
    >>> 0 < GeomRF().fit(Statistics.of(x, x)).rate.item() < 1
    True
    """

    p: Annotated[float, Field(gt=0, lt=1)] | None = None

    fixed = "p"

    def _rate(self, stats, shift):
        if self.p is not None:
            return scalar(self.p)
        if shift is None:
            products = stats.x.mean_abs.double() * stats.y.mean_abs.double()
        else:  # x - c > 0, so the mean of |x - c| is mean(x) - c
            c = shift.squeeze(-2)
            products = (stats.x.mean.double() - c) * (stats.y.mean.double() - c)
        return check_finite(optimal_p(products), "p")[..., None, None]

    def _quantile(self, g, rate):
        """Return floor(log(1 - u) / log(1 - p)) with 1 - u = Phi(-g)."""
        return torch.floor(torch.special.log_ndtr(-g) / torch.log1p(-rate)).clamp(max=MAX_COUNT)

    def _log_weights(self, counts, rate):
        of_counts = (counts * torch.log1p(-rate) + torch.lgamma(counts + 1)).sum(-1)
        return -counts.shape[-1] / 2 * rate.log() - of_counts.unsqueeze(-2) / 2

    def log_relative_second_moment(self, x, y, params):
        x, y = self._shifted(x, y, params)
        p = align(params.rate.double(), x, y)[..., 0]
        q = 2 * (x * y).abs() / torch.sqrt(1 - p).unsqueeze(-1)
        moment = -x.shape[-1] * p.log() + (torch.special.i0e(q).log() + q).sum(-1)
        return (moment - 2 * (x * y).sum(-1)).clamp(min=0)


@dataclass(frozen=True)
class _Shifted(DiscreteRF):
    """Base class of discrete maps on x - c, y - c, with positive features (CRT 3.2.3).

    c lies below all coordinates of the fitted vectors. Features of later vectors below c may be negative; the estimate
    stays unbiased.

    Args:
        margin: distance of c below the minimum, in standard deviations of the coordinate.
    """

    margin: Positive = 1e-2
    fitted = True

    def _shift(self, stats: Statistics) -> Tensor:
        low = torch.minimum(stats.x.minimum, stats.y.minimum).double()
        variance = (stats.x.variance + stats.y.variance) / 2
        spread = torch.where(variance > 0, variance.sqrt(), 1.0)
        return check_finite(low - self.margin * spread, "shift").unsqueeze(-2)


@dataclass(frozen=True)
class PoisRFPlus(_Shifted, PoisRF):
    """PoisRF on shifted vectors: positive features (CRT 3.2.3).

    >>> from crt_exp.samplers import iid
    >>> x = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    >>> params = PoisRFPlus().fit(Statistics.of(x, x))
    >>> bool((PoisRFPlus().phi_q(x, iid(8, 2), params).exp() >= 0).all())
    True
    """


@dataclass(frozen=True)
class GeomRFPlus(_Shifted, GeomRF):
    """GeomRF on shifted vectors: positive, bounded features (CRT 3.2.3).

    >>> x = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    >>> bool((GeomRFPlus().fit(Statistics.of(x, x)).shift < x.amin(0)).all())
    True
    """


def _mean_sq_products(stats: Statistics, shift: Tensor | None) -> Tensor:
    """Return mean (x_l - c_l)^2 times mean (y_l - c_l)^2, (..., d), float64."""
    squares = []
    for side in (stats.x, stats.y):
        square = side.mean_sq.double()
        if shift is not None:
            c = shift.squeeze(-2)
            square = (square - 2 * c * side.mean.double() + c * c).clamp(min=0)
        squares.append(square)
    return squares[0] * squares[1]


def optimal_p(t: Tensor, steps: int = 44) -> Tensor:
    """Return the p of least variance for t_l = |x_l y_l| (..., d), or its average.

    The shape is (...); p is clamped to [1e-6, 1 - 1e-9]. The objective is strictly convex in v = (1 - p)^(-1/2). The
    function bisects its derivative in log(v - 1).
    """
    bounds = []
    for p in P_RANGE:
        root = math.sqrt(1 - p)
        bounds.append(torch.full_like(t[..., 0], math.log(p / (root * (1 + root)))))
    lo, hi = bounds
    double = 2 * t
    pole = 2 * t.shape[-1]
    for _ in range(steps):
        mid = (lo + hi) / 2
        e = mid.exp()
        q = double * (1 + e).unsqueeze(-1)
        slope = (double * torch.special.i1e(q) / torch.special.i0e(q)).sum(-1)
        rising = slope > pole / ((1 + e) * e * (2 + e))
        lo = torch.where(rising, lo, mid)
        hi = torch.where(rising, mid, hi)
    v = 1 + ((lo + hi) / 2).exp()
    return ((v - 1) * (v + 1) / (v * v)).clamp(*P_RANGE)


def poisson_quantile(g: Tensor, rate: Tensor) -> Tensor:
    """Return Poisson counts (..., m, d) at u = Phi(g), for g (..., m, d).

    `rate` has shape (..., d). The function tabulates the survival function once per rate and uses 1 - u, which is
    accurate near u = 1.

    Raises:
        ValueError: the largest rate needs a table of more than 10,000 counts.
    """
    # under vmap, the largest rate of all mapped entries
    rates = torch.func.debug_unwrap(rate) if transforming() else rate
    top = float(rates.max()) if rates.numel() else 0.0  # none in an empty batch
    size = int(top + 12 * math.sqrt(top) + 40)
    if size > MAX_COUNT:
        raise ValueError(
            f"Poisson rate {top:.3g}: expected <= {MAX_COUNT:.3g}; scale the vectors down, or use another "
            "map"
        )
    k = torch.arange(size, dtype=torch.float64, device=g.device)
    rate = rate.unsqueeze(-1)
    log_pmf = k * rate.log() - rate - torch.lgamma(k + 1)  # (..., d, size)
    survival = log_pmf.exp().flip(-1).cumsum(-1).flip(-1)  # P(omega >= k), exact in the tail
    # torch.broadcast_shapes would import sympy
    batch = np.broadcast_shapes(survival.shape[:-2], g.shape[:-2])
    g = g.expand(*batch, *g.shape[-2:]).mT.contiguous()  # (..., d, m)
    survival = survival.expand(*batch, *survival.shape[-2:])
    tail = torch.special.ndtr(-g)  # 1 - u
    if transforming():  # searchsorted under vmap needs both arguments mapped
        tail = tail + 0 * survival[..., :1]
    # omega is the number of k >= 1 with P(omega >= k) > 1 - u
    below = torch.searchsorted(-survival[..., 1:].contiguous(), -tail)
    return below.to(torch.float64).mT
