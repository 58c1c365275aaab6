"""Exact variances for coupled projections, and the number of projections needed.

Notation: Z is the estimate of one projection, hat K the mean over m projections, K the kernel (softmax or Gaussian, as
the map defines), d the dimension, S_s = |x + s y|^2, N = |x|^2 + |y|^2, Z_1 and Z_2 the estimates of two projections of
one block.
Vectors x, y (..., d) broadcast pair by pair. Results are float64 on the CPU, and logs in nats where they could
overflow.

Sources: CRT = Chefs' Random Tables (2022), Performers (2021). Results that are in neither paper are marked own.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.special import hyp1f1
from torch import Tensor

from crt_exp.features import GERF, SMREG, FeatureMap, TrigRF
from crt_exp.features.base import align, log_expm1
from crt_exp.features.dense import Dense
from crt_exp.features.exponential import PositiveExponential
from crt_exp.features.statistics import log_0f1

OVERFLOW = 700.0  # logs from which the number of projections is infinite
ENSEMBLES = ("iid", "orthogonal", "simplex")
NODES = 200    # Gauss-Legendre nodes of the simplex average: 1e-13 up to d = 1024
TERMS = 2**22  # of Poisson sums in memory at a time


def required_m(phi: FeatureMap, x: Tensor, y: Tensor, params=(), *, epsilon: float, delta: float, relative: bool = True,
               ensemble: str = "iid") -> Tensor:
    """Return a number of projections for a given accuracy.

    |hat K - K| <= epsilon K then has probability at least 1 - delta, by Chebyshev's inequality with the exact variance:
    m = Var(Z) / (delta epsilon^2) for iid projections.
    For coupled projections the result is the least sufficient m among 1..d and the multiples of d.

    Args:
        epsilon: error relative to K.
        delta: probability of a larger error.
        relative: False makes epsilon the absolute error.
        ensemble: "iid", "orthogonal" or "simplex".

    Returns:
        m of each pair in float64, +inf where no m is sufficient.

    Raises:
        ValueError: epsilon or delta is out of range, or the covariance of the ensemble is not known.
    """
    if not (epsilon > 0 and 0 < delta < 1):
        raise ValueError(f"epsilon = {epsilon} and delta = {delta}: they need epsilon > 0 and 0 < delta < 1")
    x, y = x.double(), y.double()
    log_kernel = phi.log_kernel(x, y)
    log_epsilon = math.log(epsilon) + torch.zeros_like(log_kernel) - (0 if relative else log_kernel)  # relative to K
    log_target, d = math.log(delta) + 2 * log_epsilon, x.shape[-1]
    log_one = log_expm1(phi.log_relative_second_moment(x, y, params)) - log_target
    value, log_unit = relative_covariance(phi, x, y, params, ensemble)
    # the least allowed m with (one + covariance (b - 1)) / m <= 1, b = min(m, d), in units of the target
    one, covariance = log_one.clamp(max=OVERFLOW).exp(), value * (log_unit - log_target).clamp(max=OVERFLOW).exp()
    within = ((one - covariance) / (1 - covariance)).ceil().clamp(min=1)
    blocks = ((one + (d - 1) * covariance) / d).ceil().clamp(min=1)
    coupled = torch.where((covariance < 1) & (within <= d), within, d * blocks)
    m = one.ceil().clamp(min=1) if ensemble == "iid" or d == 1 else coupled
    return torch.where(log_one < OVERFLOW, m, torch.inf)


def ensemble_log_variance(phi: FeatureMap, x: Tensor, y: Tensor, params=(), m: int = 1,
                          ensemble: str = "iid") -> Tensor:
    """Return log Var(hat K) of m iid, orthogonal or simplex projections.

    Var = Var(Z) / m + Cov(Z_1, Z_2) sum_blocks b (b - 1) / m^2, with blocks of d projections, the last one possibly
    shorter; -inf where the variance is zero.
    Coupled projections are exact for exponential maps (own: one pair moment serves every GERF, whatever A). Other maps
    raise ValueError.
    """
    x, y = x.double(), y.double()
    log_one = log_expm1(phi.log_relative_second_moment(x, y, params))
    covariance, log_unit = relative_covariance(phi, x, y, params, ensemble)
    top = torch.maximum(log_one, log_unit)
    total = (log_one - top).exp() + covariance * (log_unit - top).exp() * _pairs_per_row(m, x.shape[-1])
    return 2 * phi.log_kernel(x, y) + total.clamp(min=0).log() + top - math.log(m)


def couples(phi: FeatureMap) -> bool:
    """Return whether the covariance of coupled projections is known.

    It is known for exponential maps with one A for all directions.
    """
    return isinstance(phi, (TrigRF, PositiveExponential, GERF)) and not isinstance(phi, Dense)


def relative_covariance(phi: FeatureMap, x: Tensor, y: Tensor, params, ensemble: str) -> tuple[Tensor, Tensor]:
    """Return Cov(Z_1, Z_2) / K^2 of two projections of one block.

    The result (value, log unit) means value * exp(log unit). Raises ValueError if the ensemble or its covariance is
    unknown.
    """
    if ensemble not in ENSEMBLES:
        raise ValueError(f"unknown ensemble {ensemble!r}: choose one of {', '.join(ENSEMBLES)}")
    s_plus, s_minus = ((x + s * y).square().sum(-1) for s in (1, -1))
    zero, d = torch.zeros_like(s_plus), x.shape[-1]
    if ensemble == "iid":
        return zero, zero
    if not couples(phi):
        raise ValueError(f"no exact covariance of coupled rows is known for {type(phi).__name__}, "
                         "only for exponential maps with one A for all directions")
    if isinstance(phi, PositiveExponential):
        covariance = smreg_covariance if isinstance(phi, SMREG) else positive_covariance
        cosines = [c * _cosine(ensemble, d) for c in ((1, -1) if phi.antithetic else (1,))]
        return sum(covariance(s_plus, d, c) for c in cosines) / len(cosines), zero
    trig = trig_covariance(s_minus, d, _cosine(ensemble, d))
    if isinstance(phi, TrigRF):
        return trig, s_minus
    positive = align(params.s, x, y)[..., 0] > 0
    value = torch.where(positive, positive_covariance(s_plus, d, _cosine(ensemble, d)), trig)
    return value, torch.where(positive, zero, s_minus)


def positive_covariance(s_plus: Tensor, d: int, cosine: float = 0.0) -> Tensor:
    """Return Cov(Z_1, Z_2) / K^2 for s = +1 and every A (own).

    cosine is that of the two projections; for orthogonal ones the result is between -1 and 0.
    Their moment E Z_1 Z_2 = e^(-2N) 1F1(d; d/2; S/2) is K^2 E r_k with k ~ Poisson(S) and r_k = prod_(i<k) (d + i) / (d
    + 2i): sums of one sign, without cancellation.
    A cosine c replaces S by S (1 + c w), averaged over w = 2 r_1 r_2 / (r_1^2 + r_2^2), which is independent of r_1^2 +
    r_2^2.
    """
    if cosine == 0:
        return _poisson_mean(s_plus, lambda k: torch.expm1(_log_direction_ratio(k, d)))
    w, weight = _length_products(d)
    tilt = cosine * w * s_plus.unsqueeze(-1)
    covariance = positive_covariance(s_plus.unsqueeze(-1) + tilt, d)
    return (weight * (torch.expm1(tilt) * (1 + covariance) + covariance)).sum(-1)


def trig_covariance(s_minus: Tensor, d: int, cosine: float = 0.0) -> Tensor:
    """Return Cov(Z_1, Z_2) of the Gaussian kernel for s = -1 and every A (own).

    It is 1F1(d; d/2; -S_-/2) - e^(-S_-), of either sign, for orthogonal projections.
    Estimates are real parts, and cos a cos b is the mean of cos(a + b) and cos(a - b), so that a cosine enters with
    both signs.
    """
    w, weight = _length_products(d) if cosine else (torch.zeros(1), torch.ones(1))
    moments = (hyp1f1(d, d / 2, (-s_minus.unsqueeze(-1) * (1 + c * w) / 2).numpy()) for c in (cosine, -cosine))
    return (weight * torch.from_numpy(sum(moments)) / 2).sum(-1) - torch.exp(-s_minus)


def smreg_covariance(s_plus: Tensor, d: int, cosine: float = 0.0) -> Tensor:
    """Return Cov(Z_1, Z_2) / SMREG^2 for projections of length sqrt(d) (own).

    cosine is that of the two projections.
    """
    return torch.expm1(log_0f1(d / 2, d * s_plus * (1 + cosine) / 2) - 2 * log_0f1(d / 2, d * s_plus / 4))


def _cosine(ensemble: str, d: int) -> float:
    return -1 / (d - 1) if ensemble == "simplex" and d > 1 else 0.0


def _length_products(d: int) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of w = 2 r_1 r_2 / (r_1^2 + r_2^2), r ~ chi_d.

    w = cos t with density proportional to cos^(d-1) t.
    """
    node, weight = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(NODES))
    t = math.pi / 4 * (node + 1)
    weight = weight * t.cos() ** (d - 1)
    return t.cos(), weight / weight.sum()


def _poisson_mean(rate: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """Return E f(k) for k ~ Poisson(rate), elementwise.

    Terms end 12 standard deviations above the largest rate.
    """
    top = float(rate.max()) if rate.numel() else 0.0
    k = torch.arange(int(top + 12 * math.sqrt(top) + 40), dtype=torch.float64)
    values, log_factorial = f(k), torch.lgamma(k + 1)
    parts = rate.reshape(-1, 1).split(max(1, TERMS // len(k)))
    means = [(torch.xlogy(k, r) - r - log_factorial).exp() @ values for r in parts]
    return torch.cat(means).view(rate.shape)


def _log_direction_ratio(k: Tensor, d: int) -> Tensor:
    """Return log prod_(i<k) (d + i) / (d + 2i) for k = 0, 1, ..."""
    steps = torch.log1p(-k / (d + 2 * k))
    return steps.cumsum(-1) - steps


def _pairs_per_row(m: int, d: int) -> float:
    """Return the sum over blocks of b (b - 1) / m."""
    full, rest = divmod(m, d)
    return (full * d * (d - 1) + rest * (rest - 1)) / m
