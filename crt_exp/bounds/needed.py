"""How many projections an accuracy takes."""

import math

import torch
from torch import Tensor

from crt_exp.bounds.coupling import relative_covariance
from crt_exp.features import FeatureMap
from crt_exp.features.base import log_expm1

OVERFLOW = 700.0  # logs from which a number of projections is called infinite


def required_m(phi: FeatureMap, x: Tensor, y: Tensor, params=(), *, epsilon: float, delta: float, relative: bool = True,
               ensemble: str = "iid") -> Tensor:
    """A number of projections that gives |hat K - K| <= epsilon K (`relative=False`: <= epsilon) with
    probability 1 - delta, by Chebyshev's inequality.

    From the exact variance: m = Var(Z) / (delta epsilon^2) for iid rows; for coupled rows the least m among 1..d and
    the multiples of d. Per pair, float64; +inf where no m is enough.
    """
    if not (epsilon > 0 and 0 < delta < 1):
        raise ValueError(f"epsilon = {epsilon} and delta = {delta}: they need epsilon > 0 and 0 < delta < 1")
    x, y = x.double(), y.double()
    log_kernel = phi.log_kernel(x, y)
    log_epsilon = math.log(epsilon) + torch.zeros_like(log_kernel) - (0 if relative else log_kernel)  # relative to K
    log_target, d = math.log(delta) + 2 * log_epsilon, x.shape[-1]
    log_one = log_expm1(phi.log_relative_second_moment(x, y, params)) - log_target
    value, log_unit = relative_covariance(phi, x, y, params, ensemble)
    # the least m of those allowed with (one + covariance (b - 1)) / m <= 1, b = min(m, d), in units of the target
    one, covariance = log_one.clamp(max=OVERFLOW).exp(), value * (log_unit - log_target).clamp(max=OVERFLOW).exp()
    within = ((one - covariance) / (1 - covariance)).ceil().clamp(min=1)
    blocks = ((one + (d - 1) * covariance) / d).ceil().clamp(min=1)
    coupled = torch.where((covariance < 1) & (within <= d), within, d * blocks)
    m = one.ceil().clamp(min=1) if ensemble == "iid" or d == 1 else coupled
    return torch.where(log_one < OVERFLOW, m, torch.inf)
