"""How many projections an accuracy takes."""

import math

import torch
from torch import Tensor

from crt_exp.bounds.coupling import relative_covariance
from crt_exp.bounds.tails import log_range
from crt_exp.features import FeatureMap
from crt_exp.features.base import log_expm1

OVERFLOW = 700.0  # logs from which a number of projections is called infinite


def required_m(phi: FeatureMap, x: Tensor, y: Tensor, params=(), *, epsilon: float, delta: float, relative: bool = True,
               method: str = "chebyshev", ensemble: str = "iid") -> Tensor:
    """A number of projections that gives |hat K - K| <= epsilon K (`relative=False`: <= epsilon) with
    probability 1 - delta.

    "chebyshev" uses the exact variance: m = Var(Z) / (delta epsilon^2) for iid rows; for coupled rows the least m among
    1..d and the multiples of d. "hoeffding" uses the range, iid rows and bounded features only: it grows with
    log(1 / delta) instead of 1 / delta, but the range is often far larger than the standard deviation. Per pair,
    float64; +inf where no m is enough by that method.
    """
    if not (epsilon > 0 and 0 < delta < 1):
        raise ValueError(f"epsilon = {epsilon} and delta = {delta}: they need epsilon > 0 and 0 < delta < 1")
    x, y = x.double(), y.double()
    log_kernel = phi.log_kernel(x, y)
    log_epsilon = math.log(epsilon) + torch.zeros_like(log_kernel) - (0 if relative else log_kernel)  # relative to K
    if method == "chebyshev":
        return _chebyshev_m(phi, x, y, params, math.log(delta) + 2 * log_epsilon, ensemble)
    if method != "hoeffding" or ensemble != "iid":
        raise ValueError(f"method {method!r} with {ensemble} rows: choose chebyshev, or hoeffding with iid rows")
    log_ratio = 2 * (log_range(phi, x, y, params) - log_kernel - log_epsilon)
    return _whole(log_ratio + math.log(math.log(2 / delta) / 2))


def _chebyshev_m(phi, x: Tensor, y: Tensor, params, log_target: Tensor, ensemble: str) -> Tensor:
    """Least m of those allowed with (one + covariance (b - 1)) / m <= 1, b = min(m, d), in units of the target."""
    d = x.shape[-1]
    log_one = log_expm1(phi.log_relative_second_moment(x, y, params)) - log_target
    value, log_unit = relative_covariance(phi, x, y, params, ensemble)
    one, covariance = log_one.clamp(max=OVERFLOW).exp(), value * (log_unit - log_target).clamp(max=OVERFLOW).exp()
    within = ((one - covariance) / (1 - covariance)).ceil().clamp(min=1)
    blocks = ((one + (d - 1) * covariance) / d).ceil().clamp(min=1)
    coupled = torch.where((covariance < 1) & (within <= d), within, d * blocks)
    m = _whole(log_one) if ensemble == "iid" or d == 1 else coupled
    return torch.where(log_one < OVERFLOW, m, torch.inf)


def _whole(log_m: Tensor) -> Tensor:
    """The next whole number, at least 1; inf where it would overflow."""
    return torch.where(log_m < OVERFLOW, log_m.exp().ceil().clamp(min=1), torch.inf)


def uniform_m(epsilon: float, delta: float, pairs: int, radius: float, d: int, A: float) -> float:
    """m that gives |hat SM - SM| <= epsilon for `pairs` given query-key pairs at once with probability 1 - delta (own).

    OPRF with A < 0, iid rows, |q|, |k| <= radius, x = d^(-1/4) q: Hoeffding and a union bound, m = b^2 / (2 epsilon^2)
    log(2 pairs / delta), b^2 = (1 - 4A)^d exp(radius^2 / (sqrt(d) |A|) + 2 radius^2 / sqrt(d)). Stands in for CRT
    Theorem 4.3, whose prefactor (1 - 4A)^(d/2) rests on the misprint in Theorem 4.2 and whose constants are open.
    """
    if not A < 0:
        raise ValueError(f"A = {A}: the features are bounded for A < 0 only")
    scaled = radius**2 / math.sqrt(d)
    log_b2 = d * math.log1p(-4 * A) + scaled / abs(A) + 2 * scaled
    log_m = log_b2 - math.log(2 * epsilon**2) + math.log(math.log(2 * pairs / delta))
    return float(_whole(torch.tensor(log_m, dtype=torch.float64)))


def trig_uniform_order(epsilon: float, radius: float, d: int) -> float:
    """d / delta^2 log(4 d^(3/4) radius / delta), delta = epsilon e^(-radius^2 / sqrt(d)) (Performers Theorem 4).

    An order of growth, not a bound: its constant is open. TrigRF with orthogonal rows, all |q|, |k| <= radius, accuracy
    epsilon of the attention matrix before normalisation, any constant probability, any length.
    """
    delta = epsilon * math.exp(-(radius**2) / math.sqrt(d))
    return d / delta**2 * math.log(4 * d**0.75 * radius / delta)
