"""Exponential random features: TrigRF, PosRF, HypRF, SMREG, GERF and OPRF.

Notation: S_s = |x + s y|^2 for s = +-1, N = |x|^2 + |y|^2, w = 1 - 8A. The features have the form

    f(omega, x) = D exp(A |omega|^2 + B omega.x + C |x|^2)

with B = sqrt(s (1 - 4A)), log D = d/4 log(1 - 4A), and C = -(s + 1)/2 for the Gaussian kernel, -s/2 for the softmax
kernel (CRT eq. (4), (5)). The variance is finite for Re w > 0.

Second moments are relative to the squared kernel: they are then equal for both kernels and free of cancellation.
"""

import cmath
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from crt_exp.features.base import (
    LOG2,
    ONE,
    BoundMap,
    FeatureMap,
    Features,
    align,
    all_true,
    check_finite,
    log_cosh,
    values_readable,
)
from crt_exp.features.statistics import Statistics, log_0f1
from crt_exp.samplers.noise import (
    Noise,
    at_least_float32,
    match_float64,
    no_autocast,
    transforming,
)
from crt_exp.validation import Complex

LARGEST_A = 0.12  # limit of a trained A; the variance is infinite at 1/8


class OPRFParams(NamedTuple):
    A: Tensor  # real, (..., 1, 1)


class GERFParams(NamedTuple):
    A: Tensor  # real or complex, (..., 1, 1)
    s: Tensor  # +-1, (..., 1, 1)


def sq_norm(x: Tensor) -> Tensor:
    """Return |x|^2, (..., L, 1)."""
    return x.square().sum(-1, keepdim=True)


@dataclass(frozen=True)
class Trigonometric(FeatureMap):
    """Base class: cosines and sines of projections, M = 2m, cosines first.

    Subclasses transform the random projections in `directions`.
    """

    def width(self, m: int) -> int:
        return 2 * m

    def directions(self, noise: Noise) -> Noise:
        return noise

    def bind(self, noise, params=()) -> BoundMap:
        phi = partial(self._phi, noise=self.directions(noise))
        return BoundMap(phi, phi)

    def _phi(self, x: Tensor, noise: Noise) -> Features:
        phase = match_float64(noise, x.dtype).project(x)
        return Features(torch.cat([phase.cos(), phase.sin()], -1), self._log_scale(x, phase))

    def writer(self, noise, params=()):
        noise = self.directions(noise)

        def write(x: Tensor, out: Tensor) -> None:
            phase = match_float64(noise, x.dtype).project(x)
            scale = self._log_scale(x, phase).exp_()
            torch.mul(phase.cos(), scale, out=out[..., : noise.m])
            torch.mul(phase.sin_(), scale, out=out[..., noise.m :])

        return write

    def _log_scale(self, x: Tensor, phase: Tensor) -> Tensor:
        return torch.full_like(phase[..., :1], -math.log(phase.shape[-1]) / 2)


@dataclass(frozen=True)
class TrigRF(Trigonometric):
    """Random Fourier features (CRT 2.2, Performers 2.3).

    Features are bounded for the Gaussian kernel. Estimates are exact at x = y and may be negative. M = 2m: cosines,
    then sines.
    """

    def _log_scale(self, x: Tensor, phase: Tensor) -> Tensor:
        log_scale = super()._log_scale(x, phase)
        return (
            log_scale + sq_norm(at_least_float32(x)) / 2 if self.kernel == "softmax" else log_scale
        )

    def log_relative_second_moment(self, x, y, params=()) -> Tensor:
        return log_cosh((x.double() - y.double()).square().sum(-1))  # Performers Lemma 2


@dataclass(frozen=True)
class PositiveExponential(FeatureMap):
    """Base class of positive features log phi = scale omega.x + bias - c |x|^2.

    c is 1/2 for the softmax kernel and 1 for the Gaussian kernel.

    Args:
        antithetic: use omega and -omega: M = 2m features. Their variance is lower than that of 2m independent
            features.
    """

    antithetic: bool = False

    trainable = True

    @property
    def norm_weight(self) -> float:
        return 0.5 if self.kernel == "softmax" else 1.0

    def width(self, m: int) -> int:
        return 2 * m if self.antithetic else m

    def affine(self, noise: Noise, params) -> tuple[Tensor | None, Tensor | float]:
        """Return scale (..., 1, 1), or None for 1, and bias (..., 1, m).

        The bias holds log D + A |omega|^2 - log(M)/2.
        """
        return None, -math.log(self.width(noise.m)) / 2

    def directions(self, noise: Noise) -> Noise:
        return noise

    def transform_inputs(
        self, x: Tensor, params, key: bool = False, factor: float = 1.0
    ) -> tuple[Tensor, float]:
        """Map factor * x to the vector in the formula of phi, and the remaining factor."""
        return x, factor

    def bind(self, noise, params=()) -> BoundMap:
        if noise.matrix_free:
            noise = self.directions(noise)
            phi = partial(self._phi_matrix_free, noise=noise, affine=self.affine(noise, params))
        else:
            phi = partial(self._phi, noise=noise, weight=self._weight(noise, params))
        return BoundMap(phi, phi)

    def writer(self, noise, params=()):
        if noise.matrix_free:
            return super().writer(noise, params)
        weight = self._weight(match_float64(noise, torch.float64), params)
        return lambda x, out: torch.matmul(
            self._inputs(x, noise), weight.to(out.dtype).mT, out=out
        ).exp_()

    def _weight(self, noise: Noise, params) -> Tensor:
        """Return W (..., M, d + 2) with log phi = [x, 1, |x|^2] W^T."""
        rows, scale, bias = self.exponent(noise, params)
        rows = rows if scale is None else rows * scale.to(rows.dtype)
        bias = bias.mT.expand(*rows.shape[:-1], 1)
        return torch.cat([rows, bias, torch.full_like(bias, -self.norm_weight)], -1)

    def _phi(self, x: Tensor, noise: Noise, weight: Tensor) -> Features:
        with no_autocast(x):
            inputs = self._inputs(x, noise)
            return Features(ONE, inputs @ weight.to(inputs.dtype).mT)

    def _inputs(self, x: Tensor, noise: Noise) -> Tensor:
        noise.check(x)
        x = at_least_float32(x)
        return torch.cat([x, torch.ones_like(x[..., :1]), sq_norm(x)], -1)

    def _phi_matrix_free(self, x: Tensor, noise: Noise, affine: tuple) -> Features:
        x, (scale, bias) = at_least_float32(x), affine
        bias = bias.to(x.dtype) if isinstance(bias, Tensor) else bias
        offset = bias - self.norm_weight * sq_norm(x)
        projected = noise.project(x if scale is None else x * scale.to(x.dtype))
        signed = (
            [offset + projected, offset - projected] if self.antithetic else [offset + projected]
        )
        return Features(ONE, torch.cat(signed, -1))

    def exponent(self, noise: Noise, params=()) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return rows (..., M, d), scale (..., 1, 1) or None, and bias (..., 1, M).

        log phi = scale rows.x + bias - norm_weight |x|^2, where x is the result of `transform_inputs`. Attention
        engines compute features from these tensors. Antithetic maps return both signs of each row.
        """
        noise = self.directions(noise)
        scale, bias = self.affine(noise, params)
        rows = noise.rows()
        bias = torch.as_tensor(bias, dtype=rows.dtype, device=rows.device)
        bias = bias.expand(*bias.shape[:-1] or (1,), noise.m)
        if self.antithetic:
            rows, bias = torch.cat([rows, -rows], -2), torch.cat([bias, bias], -1)
        return rows, scale, bias

    def log_relative_second_moment(self, x, y, params=()) -> Tensor:
        s_plus = (x.double() + y.double()).square().sum(-1)
        log_rho = self._log_rho(params, x, y)
        log_alpha = x.shape[-1] * log_cosh(log_rho / 2)
        hi = log_alpha + torch.exp(log_rho) * s_plus
        return log_mean_exp2(hi, log_alpha - s_plus) if self.antithetic else hi

    def _log_rho(self, params, x: Tensor, y: Tensor) -> Tensor:
        """Return log rho, rho = 1 / (1 - 8A), to broadcast with the pairs."""
        return torch.zeros((), dtype=torch.float64)


@dataclass(frozen=True)
class PosRF(PositiveExponential):
    """Positive random features of FAVOR+ (Performers Lemma 1): exact at x = -y."""


@dataclass(frozen=True)
class HypRF(PositiveExponential):
    """Hyperbolic positive features: PosRF with antithetic pairs, M = 2m.

    Sources: Performers Lemma 1, HRF eq. (3).
    """

    antithetic: bool = True


@dataclass(frozen=True)
class SMREG(PositiveExponential):
    """Positive features with projections of length sqrt(d) (Performers 2.3).

    The features are bounded. They estimate the regularised softmax kernel SMREG(x, y) = e^(-N/2) 0F1(; d/2; d |x+y|^2
    / 4) <= SM(x, y) without bias (Performers Theorem 1), not SM itself. With `kernel="gaussian"` they estimate SMREG
    e^(-N/2).

    All samplers are allowed: the map rescales the projections.
    """

    trainable = False

    def directions(self, noise: Noise) -> Noise:
        return noise.on_sphere()

    def log_kernel(self, x, y) -> Tensor:
        n, s_plus = _norms(x, y)
        return log_0f1(x.shape[-1] / 2, x.shape[-1] * s_plus / 4) - self.norm_weight * n

    def log_relative_second_moment(self, x, y, params=()) -> Tensor:
        d = x.shape[-1]
        _, s_plus = _norms(x, y)
        first = 2 * log_0f1(d / 2, d * s_plus / 4)
        second = log_0f1(d / 2, d * s_plus)
        return log_mean_exp2(second - first, -first) if self.antithetic else second - first


@dataclass(frozen=True)
class OPRF(PositiveExponential):
    """Optimal positive random features of FAVOR++ (CRT Theorem 3.3, eq. (7)).

    `fit` chooses the real A <= 0 of least variance at the mean of |x_i + y_j|^2 over all pairs. A = 0 is FAVOR+.
    Features are bounded if A < 0. The estimate is unbiased for all A < 1/8 that do not depend on omega.

    Args:
        A: fixed value instead of the fit.
        antithetic: use omega and -omega: M = 2m features.
    """

    A: Annotated[float, Field(lt=1 / 8)] | None = None

    until_fitted = "using A = 0"

    @property
    def fitted(self) -> bool:
        return self.A is None

    def fit(self, stats: Statistics) -> OPRFParams:
        if self.A is not None:
            return OPRFParams(torch.tensor([[float(self.A)]], dtype=torch.float64))
        return OPRFParams(
            check_finite(optimal_a(stats.mean_sq_sum / stats.d), "A")[..., None, None]
        )

    def unfitted(self, d: int) -> OPRFParams:
        return OPRFParams(torch.zeros(1, 1, dtype=torch.float64))

    def admitted(self, params: OPRFParams) -> OPRFParams:
        return OPRFParams(params.A.clamp(max=LARGEST_A))

    def affine(self, noise, params):
        A = params.A.to(noise.sq_norm.device)
        log_d = noise.d / 4 * torch.log1p(-4 * A) - math.log(self.width(noise.m)) / 2
        bias = log_d.to(noise.sq_norm.dtype) + A.to(noise.sq_norm.dtype) * noise.sq_norm
        return torch.sqrt(1 - 4 * A), bias

    def _log_rho(self, params, x, y) -> Tensor:
        check_a(params.A)
        return -torch.log1p(-8 * align(params.A.double(), x, y)[..., 0])


@dataclass(frozen=True)
class GERF(FeatureMap):
    """Generalised exponential random features (CRT 3.1): real or complex A, s = +-1.

    `fit` minimises the mean log second moment. Estimates may be negative. M = 2m: real parts, then imaginary parts.

    Args:
        s: sign in CRT eq. (5); "auto" takes the sign of smaller mean log second moment.
        A: fixed value instead of the fit; needs a fixed s. Real A > 0 gives unbounded features, whose sample variance
            is infinite for A >= 1/16.
        search: "complex" also searches complex A and keeps it if the gain exceeds 1e-9. Numerical searches found no
            gain.

    Raises:
        ValueError: A is fixed without s, or Re(1 - 8A) <= 0.
    """

    s: Literal["auto", 1, -1] = "auto"
    A: Complex | None = None
    search: Literal["real", "complex"] = "real"

    def __post_init__(self):
        super().__post_init__()
        if self.A is not None:
            object.__setattr__(self, "A", complex(self.A))
            check_a(self.A)
            if self.s == "auto":
                raise ValueError(f"A={self.A} with s='auto': expected s=1 or s=-1")

    def width(self, m: int) -> int:
        return 2 * m

    @property
    def fitted(self) -> bool:
        return self.A is None

    def fit(self, stats: Statistics) -> GERFParams:
        if self.A is not None:
            A = torch.tensor([[self.A]], dtype=torch.complex128)
            return GERFParams(A if self.A.imag else A.real, torch.tensor([[self.s]]))
        candidates = [self._best(stats, s) for s in ([1, -1] if self.s == "auto" else [self.s])]
        A, moment, s = candidates[0]
        for other_a, other_moment, other_s in candidates[1:]:
            better = other_moment < moment
            A, s = torch.where(better, other_a, A), torch.where(better, other_s, s)
        return GERFParams(A[..., None, None], s[..., None, None])

    def _best(self, stats: Statistics, s: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return A, log second moment and s, each of the batch shape."""
        mean_s, mean_n = (stats.mean_sq_sum if s == 1 else stats.mean_sq_diff), stats.mean_norms
        A = optimal_a(mean_s / stats.d) if s == 1 else optimal_a_trig(mean_s, stats.d)
        if self.search == "complex":
            A = search_complex_a(A, mean_s, s, stats.d)
        A = check_finite(A, "A")
        ratio = gerf_log_relative_second_moment(A, s, mean_s, stats.d)
        log_kernel_sq = (
            mean_s - 2 * mean_n if s == 1 else -mean_s
        )  # Gaussian kernel at the mean statistics
        return A, ratio + log_kernel_sq, torch.full_like(mean_s, s, dtype=torch.long)

    def phi_q(self, x, noise, params) -> Features:
        return self._phi(x, noise, params, key=False)

    def phi_k(self, y, noise, params) -> Features:
        return self._phi(y, noise, params, key=True)

    def _phi(self, x, noise, params, key: bool) -> Features:
        """Return [Re f, Im f] for queries and [Re f, -Im f] for keys."""
        x, noise = at_least_float32(x), match_float64(noise, x.dtype)
        A, s = (t.to(noise.sq_norm.device) for t in (params.A.to(torch.complex128), params.s))
        B = torch.sqrt(s * (1 - 4 * A)) * (s if key else 1)
        log_d = noise.d / 4 * torch.log(1 - 4 * A)
        C = -s / 2 if self.kernel == "softmax" else -(s + 1) / 2
        projected = noise.project(x)
        scale, of_norms, turn, turn_of_norms = (
            t.to(x.dtype)
            for t in (
                log_d.real - math.log(noise.m) / 2,
                A.real * noise.sq_norm,
                torch.remainder(log_d.imag, 2 * math.pi),
                A.imag * noise.sq_norm,
            )
        )
        log_scale = scale + of_norms + B.real.to(x.dtype) * projected + C.to(x.dtype) * sq_norm(x)
        phase = turn + turn_of_norms + B.imag.to(x.dtype) * projected
        value = torch.cat([phase.cos(), -phase.sin() if key else phase.sin()], -1)
        return Features(value, torch.cat([log_scale, log_scale], -1))

    def log_relative_second_moment(self, x, y, params) -> Tensor:
        x, y = x.double(), y.double()
        A, s = (align(t, x, y)[..., 0] for t in params)
        s_s = torch.where(s > 0, (x + y).square().sum(-1), (x - y).square().sum(-1))
        return gerf_log_relative_second_moment(A, s, s_s, x.shape[-1])


def gerf_log_relative_second_moment(A: Tensor, s: Tensor | int, s_s: Tensor, d: int) -> Tensor:
    """Return log E (Re Z)^2 / K^2 of one GERF feature (CRT eq. (6), stable form).

    Args:
        A: real or complex tensor.
        s_s: S_s = |x + s y|^2.
    """
    check_a(A)
    a = torch.log1p(-8 * A.double()) if not A.is_complex() else torch.log(1 - 8 * A)
    if not a.is_complex():
        lcosh = d * log_cosh(a / 2)
        low = lcosh + s * torch.exp(-a) * s_s
        high = lcosh + torch.where(torch.as_tensor(s) > 0, torch.exp(-a), 1.0) * s_s
        return log_mean_exp2(high, low)
    re, im = a.real, a.imag
    low = d * torch.log(torch.cosh(a / 2)) + s * torch.exp(-a) * s_s
    double = 2 * (torch.cosh(re) + im.cos())  # |1 + w|^2 e^-a
    slope = (s * (1 + re.exp() * im.cos()) + torch.sqrt(re.exp() * double)) / (
        2 * re.exp() * im.cos()
    ) - s
    high = d / 2 * torch.log(double / (4 * im.cos())) + slope * s_s
    return log_mean_exp2(high, low.real, low.imag)


def log_mean_exp2(high: Tensor, low: Tensor, phase: Tensor | float = 0.0) -> Tensor:
    """Return log((e^high + e^low cos(phase)) / 2) for low <= high.

    The result is accurate if both are near 0.
    """
    low = torch.minimum(low, high)
    mid, half = (high + low) / 2, (high - low) / 2
    phase = torch.as_tensor(phase, dtype=high.dtype)
    near = half.clamp(max=1.0)
    small = mid + torch.log1p(
        2 * torch.sinh(near / 2).square() - torch.exp(-near) * torch.sin(phase / 2).square()
    )
    large = high - LOG2 + torch.log1p(torch.exp(-2 * half) * phase.cos())
    return torch.where(half > 1, large, small)


def optimal_a(u: Tensor) -> Tensor:
    """Return the A <= 0 of OPRF for u = |x+y|^2 / d >= 0, float64 (CRT eq. (7)).

    The form is accurate as u -> 0.
    """
    u = u.double()
    root = torch.sqrt(1 + 12 * u + 4 * u * u)
    return torch.where(u < 0.5, -u / (1 - 2 * u + root), (1 - 2 * u - root) / 16)


def optimal_a_trig(s_minus: Tensor, d: int) -> Tensor:
    """Return the real A of least variance for s = -1, by a search in log(1 - 8A).

    The second moment d log cosh(a/2) + log1p(exp(-(1 + e^-a) S_-)), a = log(1 - 8A), has one minimum, in [-0.82, 0].
    """
    s_minus = s_minus.double()

    def moment(a: Tensor) -> Tensor:
        return d * log_cosh(a / 2) + torch.log1p(
            torch.exp(-(1 + torch.exp(-a)) * s_minus.unsqueeze(-1))
        )

    a = grid_search(s_minus, -1.0, 0.0, lambda grid: moment(grid).argmin(-1, keepdim=True))
    candidates = torch.stack(
        [a, torch.zeros_like(a)], -1
    )  # 0 is TrigRF itself, exact where it is the optimum
    a = candidates.gather(-1, moment(candidates).argmin(-1, keepdim=True)).squeeze(-1)
    return -torch.expm1(a) / 8


def grid_search(
    like: Tensor, low: float, high: float, pick, rounds: int = 6, points: int = 49
) -> Tensor:
    """Return a point of [low, high] per entry of `like`, by repeated grid search.

    Each round evaluates a grid (..., points) and continues between the neighbours of the point chosen by `pick`. The
    error is (high - low) 24^-rounds.
    """
    lo, hi = torch.full_like(like, low).unsqueeze(-1), torch.full_like(like, high).unsqueeze(-1)
    steps = torch.linspace(0, 1, points, dtype=like.dtype, device=like.device)
    for _ in range(rounds):
        grid = lo + (hi - lo) * steps
        best = pick(grid)
        lo, hi = (
            grid.gather(-1, (best - 1).clamp(min=0)),
            grid.gather(-1, (best + 1).clamp(max=points - 1)),
        )
    return ((lo + hi) / 2).squeeze(-1)


def search_complex_a(start: Tensor, s_s: Tensor, s: int, d: int) -> Tensor:
    """Return the complex A of least second moment, by Nelder-Mead.

    The search starts from the real optimum. The variables are (a, beta) with 1 - 8A = e^(a + ib), b = pi/2 tanh(beta).
    The real A stays unless the log second moment drops by more than 1e-9.

    Raises:
        ValueError: inside torch.func, which cannot trace the search.
    """
    if transforming():
        raise ValueError("search=complex: torch.func cannot trace the search; use search=real")
    values = [
        _search_one(complex(A), float(t), s, d) for A, t in zip(start.flatten(), s_s.flatten())
    ]
    return torch.tensor(values, dtype=torch.complex128, device=start.device).view(start.shape)


def _search_one(start: complex, s_s: float, s: int, d: int) -> complex:
    from scipy.optimize import minimize

    target = torch.tensor(s_s, dtype=torch.float64)

    def moment(A: complex) -> float:
        return float(
            gerf_log_relative_second_moment(torch.tensor(A, dtype=torch.complex128), s, target, d)
        )

    begin = cmath.log(1 - 8 * start).real
    best, best_moment = start, moment(start)
    for v0 in ([begin, 0.0], [begin, 0.1], [0.0, 0.1]):
        result = minimize(
            lambda point: moment(_complex_a(point)),
            v0,
            method="Nelder-Mead",
            options={"xatol": 1e-10, "fatol": 1e-13},
        )
        if result.fun < best_moment - 1e-9:
            best, best_moment = _complex_a(result.x), result.fun
    return best


def _complex_a(point: Sequence[float]) -> complex:
    """Return A at (a, beta)."""
    return (1 - cmath.exp(complex(point[0], math.pi / 2 * math.tanh(point[1])))) / 8


def check_a(A: Tensor | complex) -> None:
    """Check that the second moment is finite.

    Values on other devices than the CPU are not checked.

    Raises:
        ValueError: Re(1 - 8A) <= 0.
    """
    A = torch.as_tensor(A)
    w = 1 - 8 * A
    if values_readable(w) and not all_true((w.real if w.is_complex() else w) > 0):
        raise ValueError(
            f"A={format_entries(A)}: expected Re(1 - 8A) > 0 (A < 1/8 for real A) for a finite variance"
        )


def format_entries(t: Tensor) -> str:
    """Format the first entries of a tensor in one line; inside torch.func the mapped ones too."""
    values = torch.func.debug_unwrap(t) if transforming() else t
    return ", ".join(f"{value:g}" for value in values.flatten()[:4].tolist())


def _norms(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return N and |x + y|^2, float64."""
    x, y = x.double(), y.double()
    return x.square().sum(-1) + y.square().sum(-1), (x + y).square().sum(-1)
