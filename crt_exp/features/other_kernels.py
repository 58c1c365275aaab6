"""Random Fourier features of other kernels, arc-cosine kernels, sums and products.

Notation: r = |x - y|; W spectral rows with E cos(w.(x - y)) = kernel.

W is a monotone function of Gaussian projections g. It transforms the length |g| or the coordinates g_l to the spectral
distribution. Radial kernels preserve the coupling of directions by the sampler.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from crt_exp.features.base import (
    BoundMap,
    Composite,
    FeatureMap,
    Features,
    Params,
    check_gaussian,
    check_independent,
    concatenate,
    outer,
    requests_of,
)
from crt_exp.features.exponential import TrigRF
from crt_exp.features.statistics import angle
from crt_exp.samplers.noise import (
    DenseNoise,
    Nested,
    Noise,
    transforming,
)
from crt_exp.validation import Positive

NODES = 400  # of the quadrature over the mixture of the rational quadratic kernel
POINTS = 1500  # of the table of its distribution


@dataclass(frozen=True)
class SpectralRF(TrigRF):
    """Base class for shift-invariant kernels other than the Gaussian kernel."""

    own_kernel = True

    def log_relative_second_moment(self, x, y, params=()) -> Tensor:
        """Return the moment from E cos^2 = (1 + K(2 (x - y))) / 2."""
        x = x.double()
        y = y.double()
        twice = self.log_kernel(2 * x, 2 * y)
        return torch.log1p(torch.expm1(twice) / 2) - 2 * self.log_kernel(x, y)


@dataclass(frozen=True)
class RadialRF(SpectralRF):
    """Base class for kernels of |x - y|: rescales the projections to spectral lengths."""

    def directions(self, noise: Noise) -> Noise:
        """Rescale the projections.

        Raises:
            ValueError: all projections have one length, so their lengths are not chi-distributed; or torch.func maps
                over projections.
        """
        name = type(self).__name__
        sq_norm = noise.sq_norm.double().clamp(min=1e-300).cpu()
        values = torch.func.debug_unwrap(sq_norm) if transforming() else sq_norm
        if values.shape != sq_norm.shape:
            raise ValueError(
                f"{name}: torch.func cannot map over projections; map over the vectors"
            )
        # inside torch.func, numpy() fails
        squares = np.array(values.tolist()).reshape(values.shape)
        spread = squares.max() - squares.min()
        if not noise.gaussian and noise.m > 1 and spread < 1e-6 * squares.max():
            raise ValueError(
                f"lengths=sqrt_d or fixed: {name} needs chi-distributed lengths; use chi"
            )
        factor = np.sqrt(self.squared_length(squares, noise.d) / squares)
        return noise.scaled(torch.from_numpy(factor).mT.to(noise.sq_norm))

    @abstractmethod
    def squared_length(self, sq_norm: np.ndarray, d: int) -> np.ndarray:
        """Return |w|^2 as a function of |g|^2 (chi-squared, d degrees of freedom)."""


@dataclass(frozen=True)
class MaternRF(RadialRF):
    """Matern kernel of smoothness nu in r = |x - y|.

    The kernel is e^-r for nu = 1/2. With t = sqrt(2 nu) r it is (1 + t) e^-t for 3/2 and (1 + t + t^2/3) e^-t for 5/2.
    The spectral distribution is the multivariate t with 2 nu degrees of freedom. Small nu gives heavy tails.

    >>> phi = MaternRF(nu=0.5)
    >>> phi.log_kernel(torch.zeros(2), torch.tensor([3.0, 4.0])).item()
    -5.0
    """

    kernel: Literal["matern"] = "matern"  # type: ignore[assignment]
    nu: Literal[0.5, 1.5, 2.5] = 1.5  # type: ignore[valid-type]

    def squared_length(self, sq_norm, d):
        """Return the quantile of d F(d, 2 nu), from the closer tail of a beta."""
        from scipy.special import betaincinv, gammainc, gammaincc

        low = gammainc(d / 2, sq_norm / 2)
        b = betaincinv(d / 2, self.nu, low)
        rest = betaincinv(self.nu, d / 2, gammaincc(d / 2, sq_norm / 2))
        with np.errstate(divide="ignore"):  # from the tail that np.where discards
            return 2 * self.nu * np.where(low < 0.5, b / (1 - b), (1 - rest) / rest)

    def log_kernel(self, x, y):
        t = (2 * self.nu) ** 0.5 * (x - y).norm(dim=-1)
        if self.nu == 0.5:
            return -t
        if self.nu == 1.5:
            return torch.log1p(t) - t
        return torch.log1p(t + t * t / 3) - t


@dataclass(frozen=True)
class RationalQuadraticRF(RadialRF):
    """Rational quadratic kernel (1 + r^2 / (2 alpha))^-alpha, r = |x - y|.

    It is a scale mixture of Gaussian kernels with gamma(alpha) distributed precision.

    >>> phi = RationalQuadraticRF(alpha=0.5)
    >>> phi.log_kernel(torch.zeros(2), torch.zeros(2)).exp().item()
    1.0
    """

    kernel: Literal["rational_quadratic"] = "rational_quadratic"  # type: ignore[assignment]
    alpha: Positive = 1.0

    def squared_length(self, sq_norm, d):
        """Interpolate a table of the distribution of |g|^2 G / alpha, G ~ gamma(alpha)."""
        from scipy.special import gammainc, gammaincc

        log_square, low, high = rational_quadratic_distribution(float(self.alpha), d)
        p = gammainc(d / 2, sq_norm / 2)
        q = gammaincc(d / 2, sq_norm / 2)
        below = np.interp(np.log(np.maximum(p, 1e-300)), low, log_square)
        above = np.interp(-np.log(np.maximum(q, 1e-300)), -high, log_square)
        return np.exp(np.where(p < 0.5, below, above))

    def log_kernel(self, x, y):
        return -self.alpha * torch.log1p((x - y).square().sum(-1) / (2 * self.alpha))


@lru_cache(maxsize=32)
def rational_quadratic_distribution(
    alpha: float, d: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return log |w|^2 on a grid, and the log CDF and log survival function there."""
    from scipy.special import gammainc, gammaincc, gammainccinv, gammaincinv

    low = np.log(gammaincinv(alpha, 1e-14))
    high = np.log(gammainccinv(alpha, 1e-14))
    log_g = np.linspace(max(low, -600), high, NODES)
    log_weight = alpha * log_g - np.exp(log_g)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    first = np.log(2 * gammaincinv(d / 2, 1e-13)) + log_g[0]
    last = np.log(2 * gammainccinv(d / 2, 1e-13)) + log_g[-1]
    log_square = np.linspace(first, last, POINTS) - math.log(alpha)
    halves = np.exp(log_square[:, None] + math.log(alpha) - log_g) / 2
    with np.errstate(divide="ignore"):
        log_cdf = np.log(gammainc(d / 2, halves) @ weight)
        log_survival = np.log(gammaincc(d / 2, halves) @ weight)
    inner = np.flatnonzero((log_cdf > -60) & (log_survival > -60))
    log_cdf = np.maximum.accumulate(log_cdf[inner])
    return log_square[inner], log_cdf, np.minimum.accumulate(log_survival[inner])


@dataclass(frozen=True)
class LaplaceRF(SpectralRF):
    """Laplace kernel exp(-sum_l |x_l - y_l|).

    The spectral rows have independent Cauchy entries. They need exactly Gaussian projections and lose orthogonality.
    The kernel e^-|x - y| is MaternRF(nu=0.5).

    >>> LaplaceRF().log_kernel(torch.zeros(2), torch.tensor([3.0, 4.0])).item()
    -7.0
    """

    kernel: Literal["laplace"] = "laplace"  # type: ignore[assignment]

    def directions(self, noise: Noise) -> Noise:
        check_gaussian(noise, "LaplaceRF")
        g = noise.rows().double()
        cauchy = g.sign() / torch.tan(math.pi * torch.special.ndtr(-g.abs()))
        return DenseNoise(cauchy.to(noise.dtype), gaussian=False)

    def log_kernel(self, x, y):
        return -(x - y).abs().sum(-1)


@dataclass(frozen=True)
class ArcCosineRF(FeatureMap):
    """Arc-cosine kernels of order 0 and 1 (Cho and Saul 2009).

    theta is the angle between x and y. The kernel is 1 - theta / pi for order 0. It is |x| |y| (sin theta + (pi -
    theta) cos theta) / pi for order 1. The features are random step functions (order 0) or ReLUs (order 1).

    >>> x = torch.tensor([1.0, 0.0])
    >>> ArcCosineRF(order=0).log_kernel(x, x.flip(0)).exp().item()  # a right angle
    0.5
    """

    kernel: Literal["arccosine"] = "arccosine"  # type: ignore[assignment]
    order: Literal[0, 1] = 1

    own_kernel = True

    def bind(self, noise, params=()) -> BoundMap:
        def phi(x: Tensor) -> Features:
            projected = noise.project(x)
            half = projected.new_tensor(0.5)  # value of the step function at 0
            value = projected.relu() if self.order else torch.heaviside(projected, half)
            return Features(value, torch.full_like(projected[..., :1], math.log(2 / noise.m) / 2))

        return BoundMap(phi, phi)

    def log_kernel(self, x, y):
        x = x.double()
        y = y.double()
        theta = angle(x, y)
        if self.order == 0:
            return torch.log1p(-theta / math.pi)
        shape = (theta.sin() + (math.pi - theta) * theta.cos()) / math.pi
        return (x.norm(dim=-1) * y.norm(dim=-1) * shape.clamp(min=0)).log()

    def log_relative_second_moment(self, x, y, params=()):
        """Return the moment; E Z^2 is twice the kernel of order 2 * order.

        The value is 0 for opposite and zero vectors, whose estimate is constant.
        """
        kernel = self.log_kernel(x, y)
        ratio = math.log(2) - kernel
        if self.order == 1:
            x = x.double()
            y = y.double()
            theta = angle(x, y)
            curve = (math.pi - theta) * (1 + 2 * theta.cos().square())
            shape = (3 * theta.sin() * theta.cos() + curve) / math.pi
            log_norms = (x.norm(dim=-1) * y.norm(dim=-1)).log()
            ratio = ratio - kernel + shape.clamp(min=0).log() + 2 * log_norms
        return torch.where(kernel == -torch.inf, 0.0, ratio.clamp(min=0))


@dataclass(frozen=True, init=False)
class Algebra(Composite):
    """Base class of sums and products of independent estimates."""

    kernel: str | None = None  # type: ignore[assignment]
    parts: tuple[FeatureMap, ...] = ()

    def __init__(self, *parts: FeatureMap):
        # the kernel of the parts; if they differ, one that is not softmax
        kernel = min((part.kernel for part in parts), key=lambda kernel: kernel == "softmax")
        vars(self).update(parts=parts)
        super().__init__(kernel)

    def projections(self, m: int) -> Nested:
        return requests_of(self.parts, m, [str(i) for i in range(len(self.parts))])

    def zip_parts(self, *values: tuple) -> Iterator[tuple]:
        """Iterate over the parts and their entries of tuples.

        Raises:
            ValueError: a tuple has not one entry per part.
        """
        for value in values:
            if len(value) != len(self.parts):
                raise ValueError(
                    f"noise, params: {len(value)} entries, expected {len(self.parts)}, one per part"
                )
        return zip(self.parts, *values)

    def bind_parts(self, noise: Nested, params: Params) -> list[BoundMap]:
        """Bind each part."""
        return [part.bind(n, p) for part, n, p in self.zip_parts(noise, params)]


@dataclass(frozen=True, init=False)
class Sum(Algebra):
    """Estimates sum_i weights_i K_i by concatenated features with independent projections.

    Args:
        weights: may be negative; default 1.

    Raises:
        ValueError: there are no parts, or another number of weights.

    >>> from crt_exp.features import PosRF, TrigRF
    >>> Sum(TrigRF(), PosRF(), weights=[0.5, 0.5]).width(8)
    24
    """

    weights: tuple[float, ...] = ()

    def __init__(self, *parts: FeatureMap, weights: Sequence[float] | None = None):
        if not parts:
            raise ValueError("parts: empty; expected at least one")
        if weights is None:
            weights = (1.0,) * len(parts)
        if len(weights) != len(parts):
            raise ValueError(f"weights: {len(weights)}, expected {len(parts)}, one per part")
        vars(self).update(weights=tuple(weights))
        super().__init__(*parts)

    def width(self, m: int) -> int:
        return sum(part.width(m) for part in self.parts)

    def bind(self, noise, params) -> BoundMap:
        bound = self.bind_parts(noise, params)
        key_scales = [abs(weight) ** 0.5 for weight in self.weights]
        scales = [math.copysign(abs(weight) ** 0.5, weight) for weight in self.weights]

        def phi_q(x: Tensor) -> Features:
            return concatenate([_scaled(p.phi_q(x), scale) for p, scale in zip(bound, scales)])

        def phi_k(y: Tensor) -> Features:
            return concatenate([_scaled(p.phi_k(y), scale) for p, scale in zip(bound, key_scales)])

        return BoundMap(phi_q, phi_k)

    def log_kernel(self, x, y) -> Tensor:
        """Return the log of the weighted sum; NaN if the sum is negative."""
        logs = [part.log_kernel(x, y) for part in self.parts]
        return _log_weighted_sum(torch.stack(logs), self.weights)

    def log_relative_second_moment(self, x, y, params) -> Tensor:
        log_kernel = self.log_kernel(x.double(), y.double())
        return torch.log1p((self.log_variance(x, y, params) - 2 * log_kernel).exp())

    def log_variance(self, x, y, params) -> Tensor:
        logs = [part.log_variance(x, y, p) for part, p in self.zip_parts(params)]
        return _log_weighted_sum(torch.stack(logs), [weight**2 for weight in self.weights])


@dataclass(frozen=True, init=False)
class Product(Algebra):
    """Estimates K_1 K_2 by the outer product of features with independent projections.

    M = M1 M2. Feature (i, j) has index i * M2 + j.

    >>> from crt_exp.features import PosRF, TrigRF
    >>> Product(TrigRF(), PosRF()).width(8)
    128
    """

    def __init__(self, first: FeatureMap, second: FeatureMap):
        super().__init__(first, second)

    def width(self, m: int) -> int:
        return math.prod(part.width(m) for part in self.parts)

    def bind(self, noise, params) -> BoundMap:
        check_independent(noise)
        first, second = self.bind_parts(noise, params)
        return BoundMap(
            lambda x: outer(first.phi_q(x).dense(), second.phi_q(x).dense()),
            lambda y: outer(first.phi_k(y).dense(), second.phi_k(y).dense()),
        )

    def log_kernel(self, x, y) -> Tensor:
        return self.parts[0].log_kernel(x, y) + self.parts[1].log_kernel(x, y)

    def log_relative_second_moment(self, x, y, params) -> Tensor:
        moments = [part.log_relative_second_moment(x, y, p) for part, p in self.zip_parts(params)]
        return moments[0] + moments[1]


def _scaled(f: Features, scale: float) -> Features:
    value, log_scale = f.dense()
    if scale == 0:
        return Features(torch.zeros_like(value), log_scale)
    return Features(math.copysign(1.0, scale) * value, log_scale + math.log(abs(scale)))


def _log_weighted_sum(logs: Tensor, weights: Sequence[float]) -> Tensor:
    """Return log sum_i w_i exp(logs_i) over the first axis; NaN for negative sums."""
    top = logs.amax(0)
    top = torch.where(top.isinf(), 0.0, top)
    w = logs.new_tensor(weights).view(-1, *[1] * (logs.ndim - 1))
    return (w * (logs - top).exp()).sum(0).log() + top
