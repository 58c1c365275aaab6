"""Exponential random features: TrigRF, PosRF, HypRF, SMREG, GERF and OPRF.

Notation: S_s = |x + s y|^2 for s = +-1, N = |x|^2 + |y|^2, w = 1 - 8A. The features have the form

    f(omega, x) = D exp(A |omega|^2 + B omega.x + C |x|^2)

with B = sqrt(s (1 - 4A)), log D = d/4 log(1 - 4A), and C = -(s + 1)/2 for the Gaussian kernel, -s/2 for the softmax
kernel (CRT eq. (4), (5)). The variance is finite for Re w > 0.

Second moments are relative to the squared kernel: they are then equal for both kernels and free of cancellation.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from crt_exp.features.base import (
    ONE,
    BoundMap,
    FeatureMap,
    Features,
    align,
    all_true,
    both_signs,
    check_finite,
    cos_sin,
    log_cosh,
    log_mean_exp2,
    scalar,
    values_readable,
)
from crt_exp.features.statistics import Statistics, log_0f1
from crt_exp.samplers.noise import (
    Noise,
    at_least_float32,
    no_autocast,
)
from crt_exp.validation import Complex

POINTS = 49  # of a grid of the search for A; the error is 24^-ROUNDS
ROUNDS = 6
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
class TrigRF(FeatureMap):
    """Random Fourier features (CRT 2.2, Performers 2.3).

    Features are bounded for the Gaussian kernel. Estimates are exact at x = y and may be negative. M = 2m: cosines,
    then sines. Subclasses for other kernels transform the random projections in `directions`.

    >>> from crt_exp.samplers import orthogonal
    >>> phi = TrigRF(kernel="gaussian")
    >>> noise = orthogonal(64, 4, torch.Generator().manual_seed(0))
    >>> features = phi.phi_q(torch.ones(3, 4), noise).exp()
    >>> features.shape, float(features[0] @ features[1]) > 1 - 1e-5
    (torch.Size([3, 128]), True)
    """

    def width(self, m: int) -> int:
        return 2 * m

    def directions(self, noise: Noise) -> Noise:
        return noise

    def bind(self, noise, params=()) -> BoundMap:
        noise = self.directions(noise)

        def phi(x: Tensor) -> Features:
            return self.of_projections(x, noise.project(x))

        return BoundMap(phi, phi)

    def of_projections(self, x: Tensor, phase: Tensor) -> Features:
        """Return the features of x (..., L, d) with projections (..., L, m)."""
        log_scale = torch.full_like(phase[..., :1], -math.log(phase.shape[-1]) / 2)
        if self.kernel == "softmax":
            log_scale = log_scale + sq_norm(at_least_float32(x)) / 2
        return Features(cos_sin(phase), log_scale)

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

    def affine(self, noise: Noise, params) -> tuple[Noise, Tensor | None, Tensor]:
        """Return projections, scale (..., 1, 1), or None for 1, and bias (..., 1, m or 1).

        The bias holds log D + A |omega|^2 - log(M)/2.
        """
        log_width = math.log(self.width(noise.m))
        return noise, None, noise.tensors()[0].new_full((1, 1), -log_width / 2)

    def bind(self, noise, params=()) -> BoundMap:
        if noise.matrix_free:
            noise, scale, bias = self.affine(noise, params)
            phi = partial(self._phi_matrix_free, noise=noise, scale=scale, bias=bias)
        else:
            phi = partial(self._phi, noise=noise, weight=self._weight(noise, params))
        return BoundMap(phi, phi)

    def _weight(self, noise: Noise, params) -> Tensor:
        """Return W (..., M, d + 2) with log phi = [x, 1, |x|^2] W^T."""
        rows, scale, bias = self.exponent(noise, params)
        if scale is not None:
            rows = rows * scale.to(rows.dtype)
        bias = bias.mT.expand(*rows.shape[:-1], 1)
        return torch.cat([rows, bias, torch.full_like(bias, -self.norm_weight)], -1)

    def _phi(self, x: Tensor, noise: Noise, weight: Tensor) -> Features:
        noise.check(x)
        with no_autocast(x):
            x = at_least_float32(x)
            inputs = torch.cat([x, torch.ones_like(x[..., :1]), sq_norm(x)], -1)
            return Features(ONE, inputs @ weight.to(x.dtype).mT)

    def _phi_matrix_free(
        self,
        x: Tensor,
        noise: Noise,
        scale: Tensor | None,
        bias: Tensor,
    ) -> Features:
        x = at_least_float32(x)
        scaled = x if scale is None else x * scale.to(x.dtype)
        return self.of_projections(x, noise.project(scaled), bias)

    def of_projections(self, x: Tensor, projected: Tensor, bias: Tensor) -> Features:
        """Return the features of x (..., L, d) with scaled projections (..., L, m)."""
        offset = bias.to(x.dtype) - self.norm_weight * sq_norm(x)
        return Features(ONE, both_signs(offset, projected, self.antithetic))

    def exponent(self, noise: Noise, params=()) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return rows (..., M, d), scale (..., 1, 1) or None, and bias (..., 1, M).

        log phi = scale rows.x + bias - norm_weight |x|^2; maps with `transforms_inputs` first map x by their method
        `transform_inputs`. Attention engines compute features from these tensors. Antithetic maps return both signs of
        each row.
        """
        noise, scale, bias = self.affine(noise, params)
        rows = noise.rows()
        bias = bias.expand(*bias.shape[:-1], noise.m)
        if self.antithetic:
            rows = torch.cat([rows, -rows], -2)
            bias = torch.cat([bias, bias], -1)
        return rows, scale, bias

    def log_relative_second_moment(self, x, y, params=()) -> Tensor:
        s, log_rho = self._principal(x.double(), y.double(), params)
        squares = s.square()
        log_alpha = (log_cosh(log_rho / 2) + torch.zeros_like(s)).sum(-1)
        same_sign = log_alpha + (log_rho.exp() * squares).sum(-1)
        if not self.antithetic:
            return same_sign
        return log_mean_exp2(same_sign, log_alpha - squares.sum(-1))

    def _principal(self, x: Tensor, y: Tensor, params) -> tuple[Tensor, Tensor]:
        """Return x + y (..., d) and log rho, rho = 1 / (1 - 8A), in principal directions of A."""
        return x + y, torch.zeros((), dtype=torch.float64)


@dataclass(frozen=True)
class PosRF(PositiveExponential):
    """Positive random features of FAVOR+ (Performers Lemma 1): exact at x = -y.

    >>> from crt_exp.samplers import iid
    >>> noise = iid(8, 4, torch.Generator().manual_seed(0))
    >>> bool((PosRF().phi_q(torch.ones(3, 4), noise).exp() > 0).all())
    True
    """


@dataclass(frozen=True)
class HypRF(PositiveExponential):
    """Hyperbolic positive features: PosRF with antithetic pairs, M = 2m.

    Sources: Performers Lemma 1, HRF eq. (3).

    >>> HypRF().width(8)
    16
    """

    antithetic: bool = True


@dataclass(frozen=True)
class SMREG(PositiveExponential):
    """Positive features with projections of length sqrt(d) (Performers 2.3).

    The features are bounded. They estimate the regularised softmax kernel SMREG(x, y) = e^(-N/2) 0F1(; d/2; d |x+y|^2
    / 4) <= SM(x, y) without bias (Performers Theorem 1), not SM itself. With `kernel="gaussian"` they estimate SMREG
    e^(-N/2).

    All samplers are allowed: the map rescales the projections.

    >>> x = torch.ones(4)
    >>> float(SMREG().log_kernel(x, x)) < float(PosRF().log_kernel(x, x))
    True
    """

    trainable = False

    def affine(self, noise, params):
        return super().affine(noise.on_sphere(), params)

    def log_kernel(self, x, y) -> Tensor:
        x = x.double()
        y = y.double()
        d = x.shape[-1]
        squares = x.square().sum(-1) + y.square().sum(-1)
        s_plus = (x + y).square().sum(-1)
        return log_0f1(d / 2, d * s_plus / 4) - self.norm_weight * squares

    def log_relative_second_moment(self, x, y, params=()) -> Tensor:
        d = x.shape[-1]
        s_plus = (x.double() + y.double()).square().sum(-1)
        first = 2 * log_0f1(d / 2, d * s_plus / 4)
        second = log_0f1(d / 2, d * s_plus)
        if not self.antithetic:
            return second - first
        return log_mean_exp2(second - first, -first)


@dataclass(frozen=True)
class OPRF(PositiveExponential):
    """Optimal positive random features of FAVOR++ (CRT Theorem 3.3, eq. (7)).

    `fit` chooses the real A <= 0 of least variance at the mean of |x_i + y_j|^2 over all pairs. A = 0 is FAVOR+.
    Features are bounded if A < 0. The estimate is unbiased for all A < 1/8 that do not depend on omega.

    Args:
        A: fixed value instead of the fit.
        antithetic: use omega and -omega: M = 2m features.

    >>> from crt_exp.samplers import orthogonal
    >>> x, y = torch.full((5, 4), 0.5), torch.full((6, 4), 0.4)
    >>> params = OPRF().fit(Statistics.of(x, y))
    >>> noise = orthogonal(1024, 4, torch.Generator().manual_seed(0))
    >>> kernel = OPRF().phi_q(x, noise, params).exp() @ OPRF().phi_k(y, noise, params).exp().mT
    >>> kernel.shape, bool((kernel.log() - (x @ y.mT)).abs().max() < 0.1)
    (torch.Size([5, 6]), True)
    """

    A: Annotated[float, Field(lt=1 / 8)] | None = None

    until_fitted = "using A = 0"
    fixed = "A"
    moments = ("mean", "mean_sq")

    def fit(self, stats: Statistics) -> OPRFParams:
        if self.A is not None:
            return OPRFParams(scalar(self.A))
        A = check_finite(optimal_a(stats.mean_s(1), stats.x.d), "A")
        return OPRFParams(A[..., None, None])

    def unfitted(self, d: int) -> OPRFParams:
        return OPRFParams(scalar(0))

    def admitted(self, params: OPRFParams) -> OPRFParams:
        return OPRFParams(params.A.clamp(max=LARGEST_A))

    def affine(self, noise, params):
        norms = noise.sq_norm
        A = params.A.to(norms.device)
        square = torch.rsub(A, 1, alpha=4)  # 1 - 4A
        log_d = torch.rsub(square.log(), -math.log(self.width(noise.m)) / 2, alpha=-noise.d / 4)
        bias = torch.addcmul(log_d, A, norms).to(norms.dtype)
        return noise, square.sqrt(), bias

    def _principal(self, x, y, params):
        check_a(params.A)
        return x + y, -torch.log1p(-8 * align(params.A.double(), x, y))


@dataclass(frozen=True)
class GERF(FeatureMap):
    """Generalised exponential random features (CRT 3.1): real or complex A, s = +-1.

    `fit` minimises the mean log second moment over real A. Estimates may be negative. M = 2m: real parts, then
    imaginary parts.

    Args:
        s: sign in CRT eq. (5); "auto" takes the sign of smaller mean log second moment.
        A: fixed value instead of the fit; needs a fixed s. Real A > 0 gives unbounded features, whose sample variance
            is infinite for A >= 1/16.

    Raises:
        ValueError: A is fixed without s, or Re(1 - 8A) <= 0.

    >>> x = torch.ones(1, 4)
    >>> GERF("gaussian").fit(Statistics.of(x, x)).s.item()  # x = y: trigonometric features are exact
    -1
    """

    s: Literal["auto", 1, -1] = "auto"
    A: Complex | None = None

    one_map = False
    fixed = "A"
    moments = ("mean", "mean_sq")

    def __post_init__(self):
        super().__post_init__()
        if self.A is not None:
            check_a(complex(self.A))
            if self.s == "auto":
                raise ValueError(f"A={self.A} with s='auto': expected s=1 or s=-1")

    def width(self, m: int) -> int:
        return 2 * m

    def fit(self, stats: Statistics) -> GERFParams:
        if self.A is not None:
            A = torch.tensor([[complex(self.A)]], dtype=torch.complex128)
            if not A.imag.any():
                A = A.real
            return GERFParams(A, torch.tensor([[self.s]]))
        if self.s != "auto":
            A, _ = self._best(stats, self.s)
            s = torch.full_like(A, self.s, dtype=torch.long)
        else:
            positive, moment = self._best(stats, 1)
            negative, other = self._best(stats, -1)
            better = other < moment
            A = torch.where(better, negative, positive)
            s = torch.where(better, -1, 1)
        return GERFParams(A[..., None, None], s[..., None, None])

    def _best(self, stats: Statistics, s: int) -> tuple[Tensor, Tensor]:
        """Return A and the log second moment, each of the batch shape."""
        mean_s = stats.mean_s(s)
        if s == 1:
            A = optimal_a(mean_s, stats.d)
            log_kernel_sq = mean_s - 2 * stats.mean_norms
        else:
            A = optimal_a_trig(mean_s, stats.d)
            log_kernel_sq = -mean_s
        A = check_finite(A, "A")
        ratio = gerf_log_relative_second_moment(A, s, mean_s, stats.d)
        return A, ratio + log_kernel_sq

    def bind(self, noise, params=()) -> BoundMap:
        phi = partial(self._phi, noise=noise, params=params)
        return BoundMap(partial(phi, key=False), partial(phi, key=True))

    def _phi(self, x: Tensor, noise: Noise, params: GERFParams, key: bool) -> Features:
        """Return [Re f, Im f] for queries and [Re f, -Im f] for keys."""
        x = at_least_float32(x)
        norms = noise.sq_norm
        A = params.A.to(torch.complex128).to(norms.device)
        s = params.s.to(norms.device)
        B = torch.sqrt(s * (1 - 4 * A))
        if key:
            B = B * s
        C = -(s + 1) / 2
        if self.kernel == "softmax":
            C = -s / 2
        log_d = noise.d / 4 * torch.log(1 - 4 * A)
        projected = noise.project(x)
        log_scale = (log_d.real - math.log(noise.m) / 2).to(x.dtype)
        log_scale = log_scale + (A.real * norms).to(x.dtype)
        log_scale = log_scale + B.real.to(x.dtype) * projected
        log_scale = log_scale + C.to(x.dtype) * sq_norm(x)
        phase = torch.remainder(log_d.imag, 2 * math.pi).to(x.dtype)
        phase = phase + (A.imag * norms).to(x.dtype)
        phase = phase + B.imag.to(x.dtype) * projected
        return Features(cos_sin(phase, key), torch.cat([log_scale, log_scale], -1))

    def log_relative_second_moment(self, x, y, params) -> Tensor:
        x = x.double()
        y = y.double()
        A = align(params.A, x, y)[..., 0]
        s = align(params.s, x, y)[..., 0]
        s_s = torch.where(s > 0, (x + y).square().sum(-1), (x - y).square().sum(-1))
        return gerf_log_relative_second_moment(A, s, s_s, x.shape[-1])


def gerf_log_relative_second_moment(A: Tensor, s: Tensor | int, s_s: Tensor, d: int) -> Tensor:
    """Return log E (Re Z)^2 / K^2 of one GERF feature (CRT eq. (6), stable form).

    Args:
        A: real or complex tensor.
        s_s: S_s = |x + s y|^2.
    """
    check_a(A)
    if not A.is_complex():
        a = torch.log1p(-8 * A.double())
        lcosh = d * log_cosh(a / 2)
        low = lcosh + s * torch.exp(-a) * s_s
        factor = torch.where(torch.as_tensor(s) > 0, torch.exp(-a), 1.0)
        return log_mean_exp2(lcosh + factor * s_s, low)
    a = torch.log(1 - 8 * A)
    low = d * torch.log(torch.cosh(a / 2)) + s * torch.exp(-a) * s_s
    size = a.real.exp()
    cosine = a.imag.cos()
    double = 2 * (torch.cosh(a.real) + cosine)  # |1 + w|^2 e^-a
    slope = (s * (1 + size * cosine) + torch.sqrt(size * double)) / (2 * size * cosine) - s
    high = d / 2 * torch.log(double / (4 * cosine)) + slope * s_s
    return log_mean_exp2(high, low.real, low.imag)


def optimal_a(s: Tensor, d: int = 1) -> Tensor:
    """Return the A <= 0 of OPRF for s = |x+y|^2 >= 0 in d dimensions, float64 (CRT eq. (7)).

    A = s / (2s - d - root(d^2 + 12 d s + 4 s^2)). The relative error is about 1e-16 (1 + s/d), and infinity becomes
    NaN.
    """
    s = s.double()
    square = torch.addcmul(torch.rsub(s, d**2, alpha=-12 * d), s, s, value=4)
    return s / (torch.rsub(s, -d, alpha=-2) - square.sqrt())


def optimal_a_trig(s_minus: Tensor, d: int) -> Tensor:
    """Return the real A of least variance for s = -1, by a search in log(1 - 8A).

    The second moment d log cosh(a/2) + log1p(exp(-(1 + e^-a) S_-)), a = log(1 - 8A), has one minimum, in [-0.82, 0].
    """
    s_minus = s_minus.double()

    def moment(a: Tensor) -> Tensor:
        exponent = -(1 + torch.exp(-a)) * s_minus.unsqueeze(-1)
        return d * log_cosh(a / 2) + torch.log1p(torch.exp(exponent))

    # repeated grid search, between the neighbours of the least point of each grid
    lo = torch.full_like(s_minus, -1.0).unsqueeze(-1)
    hi = torch.zeros_like(lo)
    steps = torch.linspace(0, 1, POINTS, dtype=s_minus.dtype, device=s_minus.device)
    for _ in range(ROUNDS):
        grid = lo + (hi - lo) * steps
        least = moment(grid).argmin(-1, keepdim=True)
        lo = grid.gather(-1, (least - 1).clamp(min=0))
        hi = grid.gather(-1, (least + 1).clamp(max=POINTS - 1))
    a = (lo + hi) / 2
    # 0 is TrigRF itself, exact where it is the optimum
    candidates = torch.cat([a, torch.zeros_like(a)], -1)
    a = candidates.gather(-1, moment(candidates).argmin(-1, keepdim=True)).squeeze(-1)
    return -torch.expm1(a) / 8


def check_a(A: Tensor | complex) -> None:
    """Check that the second moment is finite.

    Values on other devices than the CPU are not checked.

    Raises:
        ValueError: Re(1 - 8A) <= 0.
    """
    A = torch.as_tensor(A)
    w = 1 - 8 * A
    if w.is_complex():
        w = w.real
    if values_readable(w) and not all_true(w > 0):
        raise ValueError(
            f"A={format_entries(A)}: expected Re(1 - 8A) > 0 (A < 1/8 for real A) for a finite variance"
        )


def format_entries(t: Tensor) -> str:
    """Format the first entries of a tensor in one line; inside torch.func the mapped ones too."""
    entries = torch.func.debug_unwrap(t).flatten()[:4]
    return ", ".join(f"{value:g}" for value in entries.tolist())
