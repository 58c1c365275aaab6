"""Exact variance with coupled projections.

Vectors x, y (..., d) broadcast pair by pair. Results are float64 on the CPU. Results that could overflow are natural
logarithms.

Notation: Z estimate of one projection, hat K mean of m estimates, K kernel (softmax or Gaussian, as the map states), d
dimension, S_s = |x + s y|^2, N = |x|^2 + |y|^2, Z_1 and Z_2 estimates of two projections of one block.

Sources: CRT (Chefs' Random Tables, 2022), Performers (2021). "own" marks results that are in neither paper.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.special import hyp1f1
from torch import Tensor

from crt_exp.features import GERF, SMREG, FeatureMap, TrigRF
from crt_exp.features.base import align
from crt_exp.features.dense import Dense
from crt_exp.features.exponential import PositiveExponential
from crt_exp.features.statistics import log_0f1

ENSEMBLES = ("iid", "orthogonal", "simplex")
NODES = 200  # Gauss-Legendre nodes of the simplex average: error 1e-13 up to d = 1024
TERMS = 2**22  # elements of the Poisson sums in memory at a time


def ensemble_log_variance(
    phi: FeatureMap, x: Tensor, y: Tensor, params=(), m: int = 1, ensemble: str = "iid"
) -> Tensor:
    """log Var(hat K) with m iid, orthogonal or simplex projections.

    Var = Var(Z) / m + Cov(Z_1, Z_2) sum_blocks b (b - 1) / m^2, with blocks of d projections, the last one shorter.
    Exact for the exponential maps (own: one pair moment serves every GERF, for all A). Raises ValueError for the
    discrete maps. -inf where the variance is zero.

    >>> x = torch.full((4,), 0.5)
    >>> independent = ensemble_log_variance(TrigRF(), x, -x, m=4, ensemble="iid")
    >>> bool(ensemble_log_variance(TrigRF(), x, -x, m=4, ensemble="orthogonal") < independent)
    True
    """
    x = x.double()
    y = y.double()
    log_one = phi.log_relative_variance(x, y, params)
    covariance, log_unit = relative_covariance(phi, x, y, params, ensemble)
    top = torch.maximum(log_one, log_unit)
    weight = _pairs_per_row(m, x.shape[-1])
    total = (log_one - top).exp() + covariance * (log_unit - top).exp() * weight
    return 2 * phi.log_kernel(x, y) + total.clamp(min=0).log() + top - math.log(m)


def couples(phi: FeatureMap) -> bool:
    """Whether the covariance of coupled projections is known.

    It is known for the exponential maps with one A for all directions.
    """
    return isinstance(phi, (TrigRF, PositiveExponential, GERF)) and not isinstance(phi, Dense)


def relative_covariance(
    phi: FeatureMap, x: Tensor, y: Tensor, params, ensemble: str
) -> tuple[Tensor, Tensor]:
    """Cov(Z_1, Z_2) / K^2 within a block, as (value, log unit): value * exp(log unit)."""
    if ensemble not in ENSEMBLES:
        raise ValueError(f"ensemble={ensemble!r}: expected one of {', '.join(ENSEMBLES)}")
    s_plus = (x + y).square().sum(-1)
    s_minus = (x - y).square().sum(-1)
    zero = torch.zeros_like(s_plus)
    if ensemble == "iid":
        return zero, zero
    if not couples(phi):
        raise ValueError(
            f"{type(phi).__name__}: no exact covariance of coupled rows; expected a map with scalar A"
        )
    d = x.shape[-1]
    cosine = _cosine(ensemble, d)
    if isinstance(phi, PositiveExponential):
        covariance = smreg_covariance if isinstance(phi, SMREG) else positive_covariance
        value = covariance(s_plus, d, cosine)
        if phi.antithetic:
            value = (value + covariance(s_plus, d, -cosine)) / 2
        return value, zero
    trig = trig_covariance(s_minus, d, cosine)
    if isinstance(phi, TrigRF):
        return trig, s_minus
    positive = align(params.s, x, y)[..., 0] > 0
    value = torch.where(positive, positive_covariance(s_plus, d, cosine), trig)
    return value, torch.where(positive, zero, s_minus)


def positive_covariance(s_plus: Tensor, d: int, cosine: float = 0.0) -> Tensor:
    """Cov(Z_1, Z_2) / K^2 for s = +1 and every A (own).

    `cosine` is the cosine between two projections. The value is between -1 and 0 for orthogonal projections.

    The moment E Z_1 Z_2 = e^(-2N) 1F1(d; d/2; S/2) of orthogonal projections is K^2 E r_k with k ~ Poisson(S) and
    r_k = prod_(i<k) (d + i) / (d + 2i). All terms have one sign, so nothing cancels.

    A cosine c replaces S by S (1 + c w), averaged over w = 2 r_1 r_2 / (r_1^2 + r_2^2). w is independent of
    r_1^2 + r_2^2.
    """
    if cosine == 0:
        return _poisson_mean(s_plus, lambda k: torch.expm1(_log_direction_ratio(k, d)))
    w, weight = _length_products(d)
    tilt = cosine * w * s_plus.unsqueeze(-1)
    covariance = positive_covariance(s_plus.unsqueeze(-1) + tilt, d)
    return (weight * (torch.expm1(tilt) * (1 + covariance) + covariance)).sum(-1)


def trig_covariance(s_minus: Tensor, d: int, cosine: float = 0.0) -> Tensor:
    """Cov(Z_1, Z_2) of the Gaussian kernel for s = -1 and every A (own).

    The value is 1F1(d; d/2; -S_-/2) - e^(-S_-) for orthogonal projections, of either sign. Estimates are real parts.
    cos a cos b is the mean of cos(a + b) and cos(a - b), so a cosine counts with both signs.
    """
    w = torch.zeros(1)
    weight = torch.ones(1)
    if cosine:
        w, weight = _length_products(d)
    scaled = -s_minus.unsqueeze(-1)
    positive = hyp1f1(d, d / 2, (scaled * (1 + cosine * w) / 2).numpy())
    negative = hyp1f1(d, d / 2, (scaled * (1 - cosine * w) / 2).numpy())
    moment = (weight * torch.from_numpy(positive + negative) / 2).sum(-1)
    return moment - torch.exp(-s_minus)


def smreg_covariance(s_plus: Tensor, d: int, cosine: float = 0.0) -> Tensor:
    """Cov(Z_1, Z_2) / SMREG^2 for projections of length sqrt(d) (own).

    `cosine` is the cosine between two projections.
    """
    pair = log_0f1(d / 2, d * s_plus * (1 + cosine) / 2)
    return torch.expm1(pair - 2 * log_0f1(d / 2, d * s_plus / 4))


def _cosine(ensemble: str, d: int) -> float:
    """Return the cosine between two projections of a block."""
    if ensemble == "simplex" and d > 1:
        return -1 / (d - 1)
    return 0.0


def _length_products(d: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of w = 2 r_1 r_2 / (r_1^2 + r_2^2), r ~ chi_d.

    w = cos t with density proportional to cos^(d-1) t.
    """
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    t = math.pi / 4 * (torch.from_numpy(nodes) + 1)
    weight = torch.from_numpy(weights) * t.cos() ** (d - 1)
    return t.cos(), weight / weight.sum()


def _poisson_mean(rate: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """E f(k), k ~ Poisson(rate), elementwise.

    The sum ends 12 standard deviations above the largest rate.
    """
    top = float(rate.max()) if rate.numel() else 0.0
    k = torch.arange(int(top + 12 * math.sqrt(top) + 40), dtype=torch.float64)
    values = f(k)
    log_factorial = torch.lgamma(k + 1)
    parts = rate.reshape(-1, 1).split(max(1, TERMS // len(k)))
    means = [(torch.xlogy(k, r) - r - log_factorial).exp() @ values for r in parts]
    return torch.cat(means).view(rate.shape)


def _log_direction_ratio(k: Tensor, d: int) -> Tensor:
    """log prod_(i<k) (d + i) / (d + 2i) for k = 0, 1, ..."""
    steps = torch.log1p(-k / (d + 2 * k))
    return steps.cumsum(-1) - steps


def _pairs_per_row(m: int, d: int) -> float:
    """Sum over blocks of b (b - 1) / m."""
    full, rest = divmod(m, d)
    return (full * d * (d - 1) + rest * (rest - 1)) / m
