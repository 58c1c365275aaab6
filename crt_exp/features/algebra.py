"""Sums and products of feature maps: hybrids are made of these.

Legend as in base.py: L queries x, S keys y, m projections, M features made of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crt_exp.features.base import BoundMap, FeatureMap, Features, Params
from crt_exp.features.statistics import Statistics
from crt_exp.features.kernels import Kernel
from crt_exp.samplers.nested_tensors import Nested, mapped, shared


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
