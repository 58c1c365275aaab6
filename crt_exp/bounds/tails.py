"""Bounds on the probability that an estimate is far from its kernel."""

import math

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from crt_exp.bounds.laws import Law, OPRFLaw, SMREGLaw, log_mgf
from crt_exp.features import OPRF, SMREG, FeatureMap, TrigRF
from crt_exp.features.base import align

MAX_TILT = 2e4  # largest theta Z_max of the Chernoff bounds


def log_range(phi: FeatureMap, x: Tensor, y: Tensor, params=()) -> Tensor:
    """log of the length of an interval that holds Z; +inf where Z is unbounded (PosRF, HypRF, A >= 0)
    or no range is known."""
    x, y = x.double(), y.double()
    weight = 0.5 if phi.kernel == "softmax" else 1.0
    norms = x.square().sum(-1) + y.square().sum(-1)
    if isinstance(phi, SMREG):
        return SMREGLaw.of(x, y, phi.kernel).log_max
    if isinstance(phi, TrigRF):
        return math.log(2) + (1 - weight) * norms
    if isinstance(phi, OPRF):
        return OPRFLaw.of(x, y, align(params.A.double(), x, y)[..., 0], phi.kernel).log_max
    return torch.full_like(norms, torch.inf)


def log_hoeffding_tail(epsilon: Tensor | float, m: int, log_range: Tensor | float) -> Tensor:
    """log of min(1, 2 exp(-2 m epsilon^2 / range^2)) >= P(|hat K - K| >= epsilon), m iid projections (CRT Theorem 4.2).

    CRT bounds the range of OPRF by Z_max <= (1 - 4A)^(d/2) e^(-N/(4A)), A < 0, so that range^2 has the exponent d: the
    printed (1 - 4A)^(-d/2) in place of (1 - 4A)^(-d) is false. This takes the exact Z_max of `log_range`.
    """
    epsilon, log_range = (torch.as_tensor(t, dtype=torch.float64) for t in (epsilon, log_range))
    return (math.log(2) - 2 * m * (2 * (epsilon.log() - log_range)).exp()).clamp(max=0)


def log_chernoff_tail(law: Law, epsilon: float, m: int) -> float:
    """log of a bound on P(hat K - K >= epsilon): -m L(K + epsilon), L(a) = sup_theta theta a - log E e^(theta Z).

    m iid projections, any m; or orthogonal ones, m <= d (CRT Theorem 4.2, Performers Theorem 3). One pair, bounded Z.
    The supremum is taken over theta Z_max <= 2e4: further on the bound stays valid but is not the best.
    """
    tilt, exponent = _best_tilt(law, epsilon)
    return -m * exponent if tilt else -math.inf


def _best_tilt(law: Law, epsilon: float) -> tuple[float, float]:
    """theta Z_max and L(K + epsilon); (0, 0) where K + epsilon > Z_max, which Z never reaches."""
    if not bool(torch.isfinite(law.log_max)):
        raise ValueError("Z is unbounded: the bound needs A < 0 (or SMREG)")
    log_max = float(law.log_max)
    level = math.exp(float(law.log_moment(1)) - log_max) + epsilon * math.exp(-log_max)
    if level > 1:
        return 0.0, 0.0

    def loss(u: float) -> Tensor:
        return log_mgf(law, math.exp(u)) - math.exp(u) * level

    bounds = (math.log(1e-6), math.log(MAX_TILT))
    result = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-4})
    return math.exp(result.x), max(0.0, -float(result.fun))


def log_smreg_orthogonal_tail(law: SMREGLaw, epsilon: float, m: int) -> float:
    """log of a bound on P(hat K - K >= epsilon) for orthogonal SMREG rows, m <= d (Performers Theorem 3, corrected).

    e^(-theta m a) (M(theta)^m - Lambda^4 theta^4 m (m - 1) |x + y|^4 / (4 (d + 2))), Lambda = e^offset. The paper
    prints Lambda^m, which is false for m = 2 and 3 (the bracket can be negative) and weaker for m > 4.
    """
    if m > law.d:
        raise ValueError(f"m = {m}: the bound is for one block, m <= d = {law.d}")
    tilt, exponent = _best_tilt(law, epsilon)
    if not tilt:
        return -math.inf
    log_gap = log_smreg_gap(law, tilt, m) - m * log_mgf(law, tilt)
    return -m * exponent + math.log1p(-math.exp(log_gap))


def log_smreg_gap(law: SMREGLaw, tilt: float, m: int) -> float:
    """log of Lambda^4 theta^4 m (m - 1) |x + y|^4 / (4 (d + 2)), a lower bound on E_iid - E_ort of e^(theta sum Z)."""
    log_theta_lambda = math.log(tilt) - math.sqrt(law.d * float(law.s_plus))
    square = float(law.s_plus) ** 2 * m * (m - 1) / (4 * (law.d + 2))
    return 4 * log_theta_lambda + math.log(square) if square else -math.inf
