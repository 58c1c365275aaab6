"""What every feature map shares: stable features, set statistics, and the algebra of sums and products.

Legend: L queries x, S keys y, d dimension, m projections, M features made of them. S_s = |x + s y|^2 for s = +-1,
N = |x|^2 + |y|^2. phi is held as value * exp(log_scale); nothing is exponentiated before a stabiliser is known.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crt_exp.kernels import Kernel, check_kernel, log_kernel
from crt_exp.nested import Nested, leaves, mapped, shared
from crt_exp.nonfinite import NotFinite
from crt_exp.samplers.noise import Noise, at_least_float32, cached, precise, transforming

ONE = torch.ones(())  # the value of a positive feature: zero-dimensional, so it joins any device and dtype
LOG2 = math.log(2)

Params = Any  # tensors (..., 1, 1) or (..., 1, d), nested (see crt_exp/nested.py); () for maps without any


class Features(NamedTuple):
    """phi = value * exp(log_scale), real. Both broadcast to (..., L, M)."""

    value: Tensor      # 1 for positive maps, +-1 for signed ones, cos and sin for trigonometric ones
    log_scale: Tensor  # log phi for positive and signed maps, (..., L, 1) for trigonometric ones

    def exp(self) -> Tensor:
        """phi itself, (..., L, M), with 1/sqrt(m) inside; overflows where |x| is large."""
        phi = self.log_scale.exp()
        return phi if self.value is ONE else self.value * phi

    def write(self, out: Tensor) -> None:
        """phi itself into `out` (..., L, M), without gradient."""
        if self.log_scale.shape[-1] < out.shape[-1]:
            torch.mul(self.value, self.log_scale.exp(), out=out)
        else:
            torch.exp(self.log_scale, out=out)
            if self.value is not ONE:
                out.mul_(self.value)


class Bound(NamedTuple):
    """A feature map with its noise and parameters filled in, and what depends on these alone already computed."""

    phi_q: Callable[[Tensor], Features]
    phi_k: Callable[[Tensor], Features]


class Moments:
    """Moments of one set of vectors, each computed when first asked for, in O(L d), without gradient.

    `Moments.of(x, mask)` for a set x (..., L, d) with mask (..., L), True = keep; `Moments.known(mean=..., ...)` for
    moments kept from elsewhere, such as running averages. Masked positions may hold anything, NaN included.
    """

    @classmethod
    def of(cls, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> "Moments":
        """Moments of scale x, without that product."""
        if x.ndim < 2:
            raise ValueError(f"statistics need a set of vectors (..., L, d), not a tensor of shape {tuple(x.shape)}")
        if 0 in x.shape[-2:]:
            raise ValueError(f"the set is empty (shape {tuple(x.shape)}): there is nothing to take statistics of")
        if mask is not None and mask.shape[-1] != x.shape[-2]:
            raise ValueError(f"the mask has {mask.shape[-1]} positions but the set has {x.shape[-2]}")
        self = cls()
        x = at_least_float32(x.detach())
        self._mask = mask
        self._x = x if mask is None else torch.where(mask[..., None], x, x.new_zeros(()))
        self.d, self._scale = x.shape[-1], scale
        return self

    @classmethod
    def known(cls, **moments: Tensor) -> "Moments":
        self = cls()
        self.__dict__.update(moments)
        self.d = next(iter(moments.values())).shape[-1]
        return self

    def __getattr__(self, name):  # reached only for moments that are neither known nor computable
        raise AttributeError(f"these statistics do not hold {name!r}; they hold {sorted(self.__dict__)}")

    @cached
    def count(self) -> Tensor:
        """Number of vectors, (..., 1), at least 1 so that an empty set has zero moments."""
        if self._mask is None:
            return self._x.new_full((1,), self._x.shape[-2])
        return self._mask.sum(-1, keepdim=True).clamp(min=1).to(self._x.dtype)

    @cached
    def mean(self) -> Tensor:
        return self._average(self._x) * self._scale

    @cached
    def mean_sq(self) -> Tensor:
        """Mean of x_l^2 per coordinate, (..., d)."""
        return self._average(self._x.square()) * self._scale**2

    @cached
    def mean_norm(self) -> Tensor:
        """Mean of |x|^2, (...) float64; one pass that writes nothing where `mean_sq` is not there yet."""
        if "mean_sq" in self.__dict__:
            return self.mean_sq.double().sum(-1)
        norm = torch.linalg.vector_norm(self._x, dim=(-2, -1)).double()
        return (self._scale * norm).square() / self.count.squeeze(-1)

    @cached
    def mean_abs(self) -> Tensor:
        return self._average(self._x.abs()) * self._scale

    @cached
    def minimum(self) -> Tensor:
        if self._mask is None:
            return self._x.amin(-2) * self._scale
        low = self._x.masked_fill(~self._mask[..., None], torch.inf).amin(-2)
        return torch.where(low.isinf(), 0.0, low) * self._scale  # nothing but masked positions

    @cached
    def largest(self) -> Tensor:
        """The largest |x_l| of each coordinate, (..., d)."""
        return self._x.abs().amax(-2) * self._scale

    def _average(self, values: Tensor) -> Tensor:
        return values.sum(-2) / self.count


class Mirrored:
    """Moments of a set and its negatives together: what to expect of vectors of which no more is known than their size.

    The minimum lies half as far again below, since shifted maps lose their sign at vectors beyond it, which costs more.
    """

    def __init__(self, of: Moments):
        self._of, self.d = of, of.d

    def __getattr__(self, name):  # the squares and absolute values are those of the set
        if name == "mean":
            return torch.zeros_like(self._of.mean_sq)
        return -1.5 * self._of.largest if name == "minimum" else getattr(self._of, name)


class Chosen:
    """Moments of one set where `condition` holds, else of another, each computed when asked for;
    nothing waits for a device."""

    def __init__(self, condition: Tensor, first: Moments, other: "Moments | Mirrored"):
        self._condition, self._first, self._other, self.d = condition, first, other, other.d

    def __getattr__(self, name):
        return torch.where(self._condition, getattr(self._first, name), getattr(self._other, name))


@dataclass(frozen=True)
class Statistics:
    """Statistics of queries x and keys y, from which `FeatureMap.fit` takes its parameters (CRT (8)).

    Scalars have the shape (...) of the batch dimensions, float64: they feed closed forms.
    """

    x: Moments | Mirrored | Chosen
    y: Moments

    @classmethod
    def of(cls, x: Tensor, y: Tensor, x_mask: Tensor | None = None, y_mask: Tensor | None = None,
           scale: float = 1.0) -> "Statistics":
        """x (..., L, d), y (..., S, d), both times `scale`; masks (..., L) and (..., S), True = keep."""
        if x.shape[-1] != y.shape[-1]:
            raise ValueError(f"x has {x.shape[-1]} dimensions and y has {y.shape[-1]}: they must agree")
        if x.device != y.device:
            raise ValueError(f"x is on {x.device} and y on {y.device}: queries and keys must be on one device")
        return cls(Moments.of(x, x_mask, scale), Moments.of(y, y_mask, scale))

    @property
    def d(self) -> int:
        return self.x.d

    @cached
    def mean_norms(self) -> Tensor:
        """Mean of N = |x|^2 + |y|^2."""
        return self.x.mean_norm + self.y.mean_norm

    @cached
    def mean_sq_sum(self) -> Tensor:
        """Mean of |x + y|^2 over all pairs."""
        return self._mean_s(1)

    @cached
    def mean_sq_diff(self) -> Tensor:
        """Mean of |x - y|^2 over all pairs."""
        return self._mean_s(-1)

    def _mean_s(self, s: int) -> Tensor:
        cross = (self.x.mean.double() * self.y.mean.double()).sum(-1)
        return (self.mean_norms + 2 * s * cross).clamp(min=0)


@dataclass(frozen=True)
class Projections:
    """A noise that a map takes: m rows. Those of one name are one noise, those of other names are independent."""

    m: int
    name: str = ""

    def of_part(self, part: int) -> "Projections":
        """The same for part number `part` of a map whose parts are independent."""
        return replace(self, name=f"{part}_{self.name}" if self.name else str(part))


@dataclass(frozen=True)
class FeatureMap(ABC):
    """A pair of maps with E <phi_q(x), phi_k(y)> = kernel(x, y). Pure: noise and parameters are arguments.

    Unbiased for every value of the parameters that does not depend on the noise: a stale fit costs variance only.
    """

    kernel: Kernel = "softmax"

    def __post_init__(self):
        check_kernel(self.kernel)

    @property
    def fitted(self) -> bool:
        """Whether `fit` looks at statistics; where not, `fit(None)` gives the parameters."""
        return False

    def width(self, m: int) -> int:
        """M, the number of features made of m projections."""
        return m

    def projections(self, m: Nested) -> Nested:
        """The noise that this map takes where m projections are asked for: `Projections`, or None where it takes none.

        Of a map with parts, a tuple with what each of them takes; m is then one number for all, or a tuple with theirs.
        """
        return Projections(m)

    def noise(self, m: Nested, draw: Callable[[Projections], Noise]) -> Nested:
        """Noise for this map: `draw` is called once for each noise that is independent of the others."""
        needed = self.projections(m)
        drawn = {p: draw(p) for p in distinct(needed)}
        return mapped(drawn.__getitem__, needed)

    def fit(self, stats: Statistics) -> Params:
        """Parameters of least mean log variance for these statistics."""
        return ()

    @abstractmethod
    def phi_q(self, x: Tensor, noise: Noise, params: Params = ()) -> Features:
        """Query features of x (..., L, d): broadcast to (..., L, width(m)), float32 at least."""

    def phi_k(self, y: Tensor, noise: Noise, params: Params = ()) -> Features:
        """Key features; the same map unless said otherwise."""
        return self.phi_q(y, noise, params)

    def bind(self, noise: Noise, params: Params = ()) -> Bound:
        """Both maps as functions of the vectors alone, for callers that go through a set in chunks."""
        return Bound(partial(self.phi_q, noise=noise, params=params), partial(self.phi_k, noise=noise, params=params))

    def writer(self, noise: Noise, params: Params = ()) -> Callable[[Tensor, Tensor], None]:
        """A function of x and `out` (..., L, M) that writes phi_q(x) itself into `out`, without gradient,
        in few passes."""
        phi = self.bind(precise(noise, torch.float64), params).phi_q
        return lambda x, out: phi(x).write(out)

    @abstractmethod
    def log_relative_second_moment(self, x: Tensor, y: Tensor, params: Params = ()) -> Tensor:
        """log(E Z^2 / (E Z)^2) of one projection's estimate Z; the same for both kernels."""

    def log_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        """log of what is estimated, pair by pair: x and y (..., d) broadcast."""
        return log_kernel(self.kernel, x, y)

    def log_variance(self, x: Tensor, y: Tensor, params: Params = ()) -> Tensor:
        """log of the variance with ONE projection, iid: shape of x[..., 0] broadcast with y[..., 0], float64, nats.

        -inf where the variance is zero, +inf where it is infinite. m iid projections divide the variance by m.
        """
        x, y = x.double(), y.double()
        return 2 * self.log_kernel(x, y) + log_expm1(self.log_relative_second_moment(x, y, params))


@dataclass(frozen=True, init=False)
class Composite(FeatureMap):
    """A map made of others. Noise and parameters are tuples with an entry for each part, and so is m where it differs.

    `kernel` is that of the parts, where all have the same; those without one (None), as coefficients, do not count.
    """

    parts: tuple[FeatureMap, ...] = ()

    def _set(self, **fields) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def fitted(self) -> bool:
        return any(p.fitted for p in self.parts)

    def projections(self, m) -> Nested:
        needed = zip(self.parts, _spread(m, self.parts))
        return tuple(mapped(lambda p, i=i: p.of_part(i), part.projections(k)) for i, (part, k) in enumerate(needed))

    def fit(self, stats: Statistics) -> Params:
        return tuple(p.fit(stats) for p in self.parts)

    def phi_q(self, x, noise, params) -> Features:
        return self.bind(precise(noise, x.dtype), params).phi_q(x)

    def phi_k(self, y, noise, params) -> Features:
        return self.bind(precise(noise, y.dtype), params).phi_k(y)

    def _bound(self, noise: Nested, params: Params) -> list[Bound]:
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

    def bind(self, noise, params) -> Bound:
        bound = self._bound(noise, params)
        return Bound(lambda x: _concatenate([b.phi_q(x) for b in bound], self.weights, signed=True),
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

    def bind(self, noise, params) -> Bound:
        if not isinstance(noise, tuple) or len(noise) != 2 or shared(*noise):
            raise ValueError("a Product needs a pair of two independent noises: with shared ones it is biased")
        first, second = self._bound(noise, params)
        return Bound(lambda x: _outer(first.phi_q(x), second.phi_q(x)),
                     lambda y: _outer(first.phi_k(y), second.phi_k(y)))

    def log_kernel(self, x, y) -> Tensor:
        return self.parts[0].log_kernel(x, y) + self.parts[1].log_kernel(x, y)

    def log_relative_second_moment(self, x, y, params) -> Tensor:
        return sum(p.log_relative_second_moment(x, y, q) for p, q in zip(self.parts, _each(params, self.parts)))


def distinct(needed: Nested) -> list[Projections]:
    """Each of the independent noises once. Raises ValueError where parts that share one take other numbers of rows."""
    found = {}
    for p in leaves(needed):
        if found.setdefault(p.name, p).m != p.m:
            raise ValueError(f"parts that share their projections take {found[p.name].m} and {p.m} of them: they must "
                             "take as many")
    return list(found.values())


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


def align(param: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """A parameter (*batch, 1, k) as (*batch, 1, ..., 1, k), to broadcast with the product of x and y,
    batch dimensions first."""
    pair_dims = max(x.ndim, y.ndim) - 1
    batch = param.shape[:-2]
    return param.reshape(*batch, *[1] * (pair_dims - len(batch)), param.shape[-1])


def log_expm1(t: Tensor) -> Tensor:
    """log(exp(t) - 1) for t >= 0 without loss at either end; -inf where rounding made t <= 0."""
    t = t.clamp(min=0)
    small = t.clamp(max=20.0)
    return torch.where(t > 20, t + torch.log1p(-torch.exp(-t)), torch.log(torch.expm1(small)))


def log_cosh(t: Tensor) -> Tensor:
    """log cosh t, to full relative accuracy near 0."""
    t = t.abs()
    near = t.clamp(max=1.0)
    return torch.where(t > 1, t - LOG2 + torch.log1p(torch.exp(-2 * t)), torch.log1p(2 * torch.sinh(near / 2).square()))


def holds(condition: Tensor) -> bool:
    """Whether a condition holds everywhere; under vmap, for all that is mapped over."""
    return bool((torch.func.debug_unwrap(condition) if transforming() else condition).all())


def check_finite(value: Tensor, name: str) -> Tensor:
    """Raises NotFinite where a fitted parameter is not finite: the statistics held an infinity or a NaN.

    In compiled code, which cannot raise, it becomes NaN, and so does all that is made of it.
    """
    if torch.compiler.is_compiling():
        return torch.where(value.isfinite(), value, torch.nan)
    if not holds(value.isfinite()):
        raise NotFinite(f"the fitted {name} is not finite: the vectors hold NaN or infinite values, or overflow")
    return value
