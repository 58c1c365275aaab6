"""Maps of other kernels: random Fourier features, arc-cosine kernels, and sums and products of maps.

Legend as in base.py; r = |x - y|; W spectral rows, E cos(w.(x - y)) = kernel. Rows of W are made of Gaussian ones g by
monotone functions, the length |g| or the coordinates g_l through their own distribution to the distribution that the
kernel has. So directions stay as coupled as the sampler made them, and a map needs no numbers of its own.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from crt_exp.features.base import BoundMap, FeatureMap, Features, Params
from crt_exp.features.exponential import Trigonometric
from crt_exp.features.statistics import Kernel, Statistics, angle
from crt_exp.options import Positive
from crt_exp.samplers.noise import DenseNoise, Nested, Noise, mapped, precise, shared

NODES, POINTS = 400, 1500  # of the mixture of the rational quadratic kernel, and of the table of its distribution


@dataclass(frozen=True)
class SpectralRF(Trigonometric):
    """Base of the maps of shift-invariant kernels other than the Gaussian one."""

    own_kernel = True

    def log_relative_second_moment(self, x, y, params=()) -> Tensor:
        """E cos^2 = (1 + K(2 (x - y))) / 2."""
        x, y = x.double(), y.double()
        twice = self.log_kernel(2 * x, 2 * y)
        return torch.log1p(torch.expm1(twice) / 2) - 2 * self.log_kernel(x, y)


@dataclass(frozen=True)
class RadialRF(SpectralRF):
    """Kernels of r = |x - y|: the directions of the noise, with lengths of the kernel's radial distribution."""

    def directions(self, noise: Noise) -> Noise:
        """Raises ValueError for rows of one length, which cannot become rows of a distribution."""
        sq_norm = noise.sq_norm.double()
        if not noise.gaussian and noise.m > 1 and bool((sq_norm.amax() - sq_norm.amin()) < 1e-6 * sq_norm.amax()):
            raise ValueError(f"{type(self).__name__} needs rows whose lengths vary as those of Gaussian rows do, which "
                             "lengths of sqrt_d or fixed do not: take chi")
        squares = sq_norm.clamp(min=1e-300).cpu().numpy()
        factor = np.sqrt(self.squared_length(squares, noise.d) / squares)
        return noise.scaled(torch.from_numpy(factor).mT.to(noise.sq_norm))

    @abstractmethod
    def squared_length(self, sq_norm: np.ndarray, d: int) -> np.ndarray:
        """|w|^2 at |g|^2, which is chi^2 of d degrees of freedom."""


@dataclass(frozen=True)
class MaternRF(RadialRF):
    """Matern kernel of smoothness nu: nu = 1/2 is e^-r, 3/2 (1 + t) e^-t, 5/2 (1 + t + t^2/3) e^-t, t = sqrt(2 nu) r.

    Rows are of the multivariate t distribution with 2 nu degrees of freedom. More of them lie far out the smaller nu
    is.
    """

    kernel: Literal["matern"] = "matern"
    nu: Literal[0.5, 1.5, 2.5] = 1.5

    def squared_length(self, sq_norm, d):
        """d F(d, 2 nu) = 2 nu B / (1 - B) for B of the beta distribution (d/2, nu), from the nearer end of it."""
        from scipy.special import betaincinv, gammainc, gammaincc

        low, high = gammainc(d / 2, sq_norm / 2), gammaincc(d / 2, sq_norm / 2)
        b, rest = betaincinv(d / 2, self.nu, low), betaincinv(self.nu, d / 2, high)
        with np.errstate(divide="ignore"):  # of the end that is not taken
            return 2 * self.nu * np.where(low < 0.5, b / (1 - b), (1 - rest) / rest)

    def log_kernel(self, x, y):
        t = (2 * self.nu) ** 0.5 * (x - y).norm(dim=-1)
        if self.nu == 0.5:
            return -t
        return (torch.log1p(t) if self.nu == 1.5 else torch.log1p(t + t * t / 3)) - t


@dataclass(frozen=True)
class RationalQuadraticRF(RadialRF):
    """(1 + r^2 / (2 alpha))^-alpha: a mixture of Gaussian kernels, their precisions gamma(alpha)."""

    kernel: Literal["rational_quadratic"] = "rational_quadratic"
    alpha: Positive = 1.0

    def squared_length(self, sq_norm, d):
        """By a table of the distribution of |w|^2 = |g|^2 G / alpha, G of the gamma distribution of shape alpha."""
        from scipy.special import gammainc, gammaincc

        log_square, low, high = rational_quadratic_distribution(float(self.alpha), d)
        p, q = gammainc(d / 2, sq_norm / 2), gammaincc(d / 2, sq_norm / 2)
        below = np.interp(np.log(np.maximum(p, 1e-300)), low, log_square)
        above = np.interp(-np.log(np.maximum(q, 1e-300)), -high, log_square)
        return np.exp(np.where(p < 0.5, below, above))

    def log_kernel(self, x, y):
        return -self.alpha * torch.log1p((x - y).square().sum(-1) / (2 * self.alpha))


@lru_cache(maxsize=32)
def rational_quadratic_distribution(alpha: float, d: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """log |w|^2 on a grid, and the logs of how likely it is to be less, and more, strictly monotone."""
    from scipy.special import gammainc, gammaincc, gammaincinv, gammainccinv

    low, high = np.log(gammaincinv(alpha, 1e-14)), np.log(gammainccinv(alpha, 1e-14))
    log_g = np.linspace(max(low, -600), high, NODES)
    log_weight = alpha * log_g - np.exp(log_g)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    edges = np.log(2 * gammaincinv(d / 2, 1e-13)), np.log(2 * gammainccinv(d / 2, 1e-13))
    log_square = np.linspace(edges[0] + log_g[0], edges[1] + log_g[-1], POINTS) - math.log(alpha)
    halves = np.exp(log_square[:, None] + math.log(alpha) - log_g) / 2
    with np.errstate(divide="ignore"):
        less, more = (np.log(cdf(d / 2, halves) @ weight) for cdf in (gammainc, gammaincc))
    inner = np.flatnonzero((less > -60) & (more > -60))
    return log_square[inner], np.maximum.accumulate(less[inner]), np.minimum.accumulate(more[inner])


@dataclass(frozen=True)
class LaplaceRF(SpectralRF):
    """exp(-sum_l |x_l - y_l|), of the distances of single coordinates: rows of independent Cauchy numbers.

    Coordinates, not lengths, are brought to another distribution, so that rows must be exactly Gaussian, and directions
    are no longer orthogonal. e^-|x - y| is MaternRF(nu=0.5).
    """

    kernel: Literal["laplace"] = "laplace"

    def directions(self, noise: Noise) -> Noise:
        if not noise.gaussian:
            raise ValueError("LaplaceRF needs noise with exactly Gaussian rows (iid, orthogonal, simplex, "
                             "scrambled halton or sobol)")
        g = noise.rows().double()
        cauchy = g.sign() / torch.tan(math.pi * torch.special.ndtr(-g.abs()))
        return DenseNoise(cauchy.to(noise.dtype), gaussian=False)

    def log_kernel(self, x, y):
        return -(x - y).abs().sum(-1)


@dataclass(frozen=True)
class ArcCosineRF(FeatureMap):
    """Arc-cosine kernels (Cho and Saul 2009) of the angle theta: 1 - theta / pi for order 0, and for order 1
    |x| |y| (sin theta + (pi - theta) cos theta) / pi. Features are those of a layer of steps, or of ReLUs, at random.
    """

    kernel: Literal["arccosine"] = "arccosine"
    order: Literal[0, 1] = 1

    own_kernel = True

    def bind(self, noise, params=()) -> BoundMap:
        def phi(x: Tensor) -> Features:
            projected = precise(noise, x.dtype).project(x)
            half = projected.new_tensor(0.5)  # of a step at 0, as for a zero vector
            value = projected.relu() if self.order else torch.heaviside(projected, half)
            return Features(value, torch.full_like(projected[..., :1], math.log(2 / noise.m) / 2))
        return BoundMap(phi, phi)

    def log_kernel(self, x, y):
        x, y = x.double(), y.double()
        theta = angle(x, y)
        if self.order == 0:
            return torch.log1p(-theta / math.pi)
        shape = (theta.sin() + (math.pi - theta) * theta.cos()) / math.pi
        return (x.norm(dim=-1) * y.norm(dim=-1) * shape.clamp(min=0)).log()

    def log_relative_second_moment(self, x, y, params=()):
        """E Z^2 is twice the kernel of order 2 n. Of opposite and of zero vectors Z is 0: no variance."""
        kernel, x, y = self.log_kernel(x, y), x.double(), y.double()
        ratio = math.log(2) - kernel
        if self.order == 1:
            theta = angle(x, y)
            shape = (3 * theta.sin() * theta.cos() + (math.pi - theta) * (1 + 2 * theta.cos().square())) / math.pi
            ratio = ratio - kernel + shape.clamp(min=0).log() + 2 * (x.norm(dim=-1) * y.norm(dim=-1)).log()
        return torch.where(kernel == -torch.inf, 0.0, ratio.clamp(min=0))


@dataclass(frozen=True, init=False)
class Composite(FeatureMap):
    """A map made of others. Noise and parameters are tuples with an entry for each part, and so is m where it differs.

    `kernel` is that of the parts, where all have the same; those without one (None), as coefficients, do not count.
    """

    parts: tuple[FeatureMap, ...] = ()

    one_map = False

    def _set(self, **fields) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def fitted(self) -> bool:
        return any(p.fitted for p in self.parts)

    @property
    def second_moments(self) -> bool:
        return any(p.second_moments for p in self.parts)

    def projections(self, m) -> Nested:
        needed = zip(self.parts, _spread(m, self.parts))
        return tuple(mapped(lambda p, i=i: p.of_part(i), part.projections(k)) for i, (part, k) in enumerate(needed))

    def fit(self, stats: Statistics) -> Params:
        return tuple(p.fit(stats) for p in self.parts)

    def _bound(self, noise: Nested, params: Params) -> list[BoundMap]:
        """Of each part."""
        return [p.bind(n, q) for p, n, q in zip(self.parts, _spread(noise, self.parts), _each(params, self.parts))]


@dataclass(frozen=True, init=False)
class Sum(Composite):
    """Estimates sum_i weights_i K_i by concatenating the features of its parts. Weights may be negative.

    The parts have independent projections, or with `shared` the same ones: as unbiased, but they are then correlated.
    Parts that are sums or products themselves share place by place. One Noise may be given for all, whatever `shared`
    says, but `log_variance` counts no correlation.
    """

    weights: tuple[float, ...] | None = None
    shared: bool = False

    def __init__(self, *parts: FeatureMap, weights: Sequence[float] | None = None, shared: bool = False):
        if not parts:
            raise ValueError("a Sum needs at least one part")
        if weights is not None and len(weights) != len(parts):
            raise ValueError(f"{len(weights)} weights for {len(parts)} parts")
        self._set(kernel=_common_kernel(parts), parts=parts, shared=shared,
                  weights=tuple(weights) if weights is not None else (1.0,) * len(parts))

    def projections(self, m) -> Nested:
        if not self.shared:
            return super().projections(m)
        return tuple(part.projections(k) for part, k in zip(self.parts, _spread(m, self.parts)))

    def width(self, m) -> int:
        return sum(p.width(k) for p, k in zip(self.parts, _spread(m, self.parts)))

    def bind(self, noise, params) -> BoundMap:
        bound = self._bound(noise, params)
        return BoundMap(lambda x: _concatenate([b.phi_q(x) for b in bound], self.weights, signed=True),
                        lambda y: _concatenate([b.phi_k(y) for b in bound], self.weights, signed=False))

    def log_kernel(self, x, y) -> Tensor:
        """log of the weighted sum, where that is positive."""
        logs = torch.stack([p.log_kernel(x, y) for p in self.parts])
        return _log_weighted_sum(logs, self.weights)

    def log_relative_second_moment(self, x, y, params) -> Tensor:
        return torch.log1p((self.log_variance(x, y, params) - 2 * self.log_kernel(x.double(), y.double())).exp())

    def log_variance(self, x, y, params) -> Tensor:
        """That of independent parts. Raises NotImplementedError where they are shared, and so correlated."""
        if self.shared:
            raise NotImplementedError("the parts of this Sum share their projections: its variance has no closed form")
        logs = torch.stack([p.log_variance(x, y, q) for p, q in zip(self.parts, _each(params, self.parts))])
        return _log_weighted_sum(logs, [w * w for w in self.weights])


@dataclass(frozen=True, init=False)
class Product(Composite):
    """Estimates K_1 K_2 by the outer product of two feature vectors, made of independent noises (given as a pair).

    `width((m1, m2))` = M1 M2; feature (i, j) is at i * M2 + j.
    """

    def __init__(self, first: FeatureMap, second: FeatureMap):
        self._set(kernel=_common_kernel((first, second)), parts=(first, second))

    def width(self, m) -> int:
        return math.prod(p.width(k) for p, k in zip(self.parts, _spread(m, self.parts)))

    def bind(self, noise, params) -> BoundMap:
        if not isinstance(noise, tuple) or len(noise) != 2 or shared(*noise):
            raise ValueError("a Product needs a pair of two independent noises: with shared ones it is biased")
        first, second = self._bound(noise, params)
        return BoundMap(lambda x: _outer(first.phi_q(x), second.phi_q(x)),
                        lambda y: _outer(first.phi_k(y), second.phi_k(y)))

    def log_kernel(self, x, y) -> Tensor:
        return self.parts[0].log_kernel(x, y) + self.parts[1].log_kernel(x, y)

    def log_relative_second_moment(self, x, y, params) -> Tensor:
        return sum(p.log_relative_second_moment(x, y, q) for p, q in zip(self.parts, _each(params, self.parts)))


def _common_kernel(parts: Sequence[FeatureMap]) -> Kernel | None:
    """The kernel of the parts that have one; where they differ, one that is not softmax: nor is the result."""
    kernels = [p.kernel for p in parts if p.kernel is not None]
    return next((k for k in kernels if k != "softmax"), kernels[0] if kernels else None)


def _spread(given: Nested, parts: Sequence[FeatureMap]) -> tuple:
    """One entry per part: a tuple as it is, anything else repeated."""
    return _each(given, parts) if isinstance(given, tuple) else (given,) * len(parts)


def _each(given: tuple, parts: Sequence[FeatureMap]) -> tuple:
    if len(given) != len(parts):
        raise ValueError(f"{len(given)} entries for {len(parts)} parts: noise and parameters of a Sum or Product are "
                         "tuples with one entry for each part")
    return given


def _full(f: Features, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """value and log_scale, both (..., L, M), with `scale` multiplied in."""
    f = f.dense()
    value, log_scale = torch.broadcast_tensors(f.value.to(f.log_scale), f.log_scale)
    if scale == 0:
        return torch.zeros_like(value), log_scale
    return math.copysign(1.0, scale) * value, log_scale + math.log(abs(scale))


def _concatenate(fs: list[Features], weights: Sequence[float], signed: bool) -> Features:
    """Each side carries the square root of |weight|; the query side the sign."""
    scales = [math.copysign(abs(w) ** 0.5, w if signed else 1.0) for w in weights]
    values, logs = zip(*(_full(f, s) for f, s in zip(fs, scales)))
    return Features(torch.cat(values, -1), torch.cat(logs, -1))


def _outer(a: Features, b: Features) -> Features:
    (va, la), (vb, lb) = _full(a), _full(b)
    values, logs = va[..., :, None] * vb[..., None, :], la[..., :, None] + lb[..., None, :]
    return Features(values.flatten(-2), logs.flatten(-2))


def _log_weighted_sum(logs: Tensor, weights: Sequence[float]) -> Tensor:
    """log sum_i w_i exp(logs_i) over the first axis; NaN where the sum is negative."""
    top = logs.amax(0)
    top = torch.where(top.isinf(), 0.0, top)
    w = logs.new_tensor(weights).view(-1, *[1] * (logs.ndim - 1))
    return (w * (logs - top).exp()).sum(0).log() + top
