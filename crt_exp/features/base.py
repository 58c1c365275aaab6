"""Interface of random-feature maps, and numerical helpers.

Notation: L queries x, S keys y, d dimension, m projections, M features. Projections are the rows omega of a random
matrix. A map computes M features from m projections.

Features are represented as value * exp(log_scale), so that attention can stabilise them before the exponential.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from crt_exp.features.statistics import Kernel, log_kernel
from crt_exp.samplers.noise import (
    Nested,
    Noise,
    leaves,
    map_leaves,
    match_float64,
)
from crt_exp.validation import check_options

# Value of positive features. Zero-dimensional tensors combine with every device and dtype.
ONE = torch.ones(())
LOG2 = math.log(2)

# nested tensors (samplers/noise.py), mostly (..., 1, 1), (..., 1, d) or (..., d, d); () for maps without parameters
Params = Any


class Features(NamedTuple):
    """Real features phi = value * exp(log_scale); both broadcast to (..., L, M).

    >>> Features(torch.tensor([[1.0, -1.0]]), torch.zeros(1, 1)).exp()
    tensor([[ 1., -1.]])
    """

    value: Tensor  # 1 for positive maps, +-1 for signed ones, cos and sin for trigonometric ones
    log_scale: Tensor  # log phi for positive and signed maps, (..., L, 1) for trigonometric ones

    def dense(self) -> "Features":
        """Return the features as one tensor pair; blocks.py overrides this for blocks."""
        return self

    def expanded(self) -> "Features":
        """Return the features with both tensors of shape (..., L, M) and of one dtype."""
        value = self.value.to(self.log_scale)
        return Features(*torch.broadcast_tensors(value, self.log_scale))

    def exp(self) -> Tensor:
        """Return phi (..., L, M), including the factor 1/sqrt(m).

        phi may overflow or underflow for large |x|.
        """
        phi = self.log_scale.exp()
        if self.value is ONE:
            return phi
        return self.value * phi


def concatenate(parts: Sequence[Features]) -> Features:
    """Return the features of all parts as one, (..., L, sum of M)."""
    if len(parts) == 1:
        return parts[0]
    values, logs = zip(*(part.expanded() for part in parts))
    return Features(torch.cat(values, -1), torch.cat(logs, -1))


def outer(one: Features, other: Features) -> Features:
    """Return all products of two features; (i, j) has index i * M2 + j."""
    value, log_scale = one.expanded()
    other_value, other_log = other.expanded()
    products = value.unsqueeze(-1) * other_value.unsqueeze(-2)
    logs = log_scale.unsqueeze(-1) + other_log.unsqueeze(-2)
    return Features(products.flatten(-2), logs.flatten(-2))


class BoundMap(NamedTuple):
    """A feature map with its projections and parameters filled in.

    Quantities that depend on the projections and parameters alone are computed once. The functions return `Features`,
    or `Blocks` of blocks.py.
    """

    phi_q: Callable[[Tensor], Any]
    phi_k: Callable[[Tensor], Any]


@dataclass(frozen=True)
class Projections:
    """A request for m random projections.

    Requests with equal names receive the same projections. Requests with different names receive independent ones.

    Args:
        begin: name of the request whose sample initialises trained projections; None: `name`.

    >>> Projections(8, "queries").of_part("0").name
    '0_queries'
    """

    m: int
    name: str = ""
    begin: str | None = None

    @property
    def drawn_as(self) -> str:
        """The name under which the projections are sampled."""
        return self.name if self.begin is None else self.begin

    @property
    def buffer(self) -> str:
        """The name of the buffer that holds the projections."""
        return _join("omega", self.name)

    def of_part(self, prefix: str) -> "Projections":
        """Return the request renamed for a part of a composite map."""
        begin = self.begin
        if begin is not None:
            begin = _join(prefix, begin)
        return replace(self, name=_join(prefix, self.name), begin=begin)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}_{name}" if name else prefix


@dataclass(frozen=True)
class FeatureMap:
    """A pair of feature maps with E <phi_q(x), phi_k(y)> = kernel(x, y).

    A map has no random state: projections and parameters are arguments. The estimate is unbiased for all parameters
    that do not depend on the projections. Outdated parameters therefore increase the variance only.

    Subclasses define `phi_q` (and `phi_k`, if keys use another map) or `bind`. Each default implementation calls the
    other. Subclasses define `log_relative_second_moment` if the variance has a closed form.

    Raises:
        ValueError: an option does not fit its annotation.

    >>> from crt_exp.features import PosRF
    >>> from crt_exp.samplers import iid
    >>> phi = PosRF(kernel="gaussian")
    >>> phi.phi_q(torch.zeros(5, 3), iid(8, 3)).exp().shape
    torch.Size([5, 8])
    """

    kernel: Kernel = "softmax"

    estimates = True  # the features estimate a kernel without bias; False for learned features
    # The features estimate the kernel, not only its ratios over the keys of a query.
    fixes_scale = True
    # The kernel is neither softmax nor Gaussian; such maps do not serve attention.
    own_kernel = False
    learned = False  # the projections are always parameters of the layer
    transforms_inputs = False  # whether the exponent is that of transformed queries and keys
    trainable = False  # a layer can train the parameters and projections (attention.learn)
    fixed = ""  # option whose value, unless it is None, replaces the fit
    # `fit` uses the vectors themselves, so an attention layer fits once and stores the result. Such a map also defines
    # `unfitted` and `until_fitted`, which describes the parameters before the fit.
    on_vectors = False
    until_fitted = ""
    # `fit_sequences` uses sequences: which keys each query attends to matters.
    on_sequences = False
    second_moments = False  # `fit` uses covariances: O(L d^2) time, d^2 stored numbers
    # `Moments` that `fit` uses, beside covariances; a layer with running statistics updates no others
    moments: ClassVar[tuple[str, ...]] = ("mean", "mean_sq", "mean_abs", "minimum")

    def __post_init__(self):
        check_options("", type(self), vars(self), complete=False)

    @property
    def fitted(self) -> bool:
        """Whether `fit` uses statistics; if False, call `fit(None)`."""
        return self.fixed != "" and getattr(self, self.fixed) is None

    @property
    def one_map(self) -> bool:
        """Whether queries and keys use the same map."""
        return type(self).phi_k is FeatureMap.phi_k

    def width(self, m: int) -> int:
        """Return M, the number of features computed from m projections."""
        return m

    def of_size(self, m: int) -> "FeatureMap":
        """Return the map for m projections; maps with m-dependent parameters override it."""
        return self

    def projections(self, m: int) -> Nested:
        """Return the requests for projections: a `Projections` or None.

        Composite maps return a tuple with one entry for each part.
        """
        return Projections(m)

    def noise(self, m: int, draw: Callable[[Projections], Noise]) -> Nested:
        """Sample the projections; `draw` is called once for each independent request."""
        needed = self.projections(m)
        noises: dict[str, Noise] = {}
        for request in distinct(needed):
            if request.drawn_as not in noises:
                noises[request.drawn_as] = draw(request)
        return map_leaves(lambda request: noises[request.drawn_as], needed)

    def fit(self, stats: Any) -> Params:
        """Return the parameters of least mean log variance for these `Statistics`.

        Maps with `fitted` False ignore the statistics; None will do.
        """
        return ()

    def unfitted(self, d: int) -> Params:
        """Return the parameters before the fit, for maps with `on_vectors`."""
        raise NotImplementedError

    def fit_sequences(self, x: Any, y: Any, causal: bool = False) -> Params:
        """Return the parameters fitted to sequences, for maps with `on_sequences`."""
        raise NotImplementedError

    def admitted(self, params: Params) -> Params:
        """Project trained or averaged parameters onto the domain of the map."""
        return params

    def phi_q(self, x: Tensor, noise: Noise, params: Params = ()) -> Features:
        """Return query features of x (..., L, d): (..., L, M), in float32 or float64."""
        return self.bind(match_float64(noise, x.dtype), params).phi_q(x).dense()

    def phi_k(self, y: Tensor, noise: Noise, params: Params = ()) -> Features:
        """Return key features; the default is `phi_q`."""
        return self.bind(match_float64(noise, y.dtype), params).phi_k(y).dense()

    def bind(self, noise: Noise, params: Params = ()) -> BoundMap:
        """Return both maps as functions of the vectors alone, for use on chunks."""
        phi_q = partial(self.phi_q, noise=noise, params=params)
        if self.one_map:
            return BoundMap(phi_q, phi_q)
        return BoundMap(phi_q, partial(self.phi_k, noise=noise, params=params))

    def log_relative_second_moment(self, x: Tensor, y: Tensor, params: Params = ()) -> Tensor:
        """Return log(E Z^2 / (E Z)^2) of the estimate Z from one projection.

        The value is the same for the softmax and the Gaussian kernel.

        Raises:
            ValueError: the map has no closed form.
        """
        name = type(self).__name__
        raise ValueError(
            f"features={name}: no closed-form variance; define log_relative_second_moment"
        )

    def log_mse(self, x: Tensor, y: Tensor, params: Params, m: int) -> Tensor:
        """Return the log variance with m i.i.d. projections; shapes as `log_variance`."""
        return self.log_variance(x, y, params) - math.log(m)

    def log_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the log of the estimated kernel; x and y (..., d) broadcast."""
        return log_kernel(self.kernel, x, y)

    def log_relative_variance(self, x: Tensor, y: Tensor, params: Params = ()) -> Tensor:
        """Return log(Var Z / (E Z)^2) of the estimate Z from one projection, float64."""
        return log_expm1(self.log_relative_second_moment(x.double(), y.double(), params))

    def log_variance(self, x: Tensor, y: Tensor, params: Params = ()) -> Tensor:
        """Return the log variance with one projection, in nats, float64.

        The shape is that of x[..., 0] broadcast with y[..., 0]. The value is -inf for variance zero and +inf for
        infinite variance. With m i.i.d. projections the variance is divided by m.
        """
        log_kernel = self.log_kernel(x.double(), y.double())
        return 2 * log_kernel + self.log_relative_variance(x, y, params)


def distinct(requests: Nested) -> list[Projections]:
    """Return one request per name."""
    return list({request.name: request for request in leaves(requests)}.values())


class Composite(FeatureMap):
    """Base class of maps with parts: projections and parameters are tuples like `parts`."""

    parts: tuple  # maps, or tuples of maps
    one_map = False

    @property
    def fitted(self) -> bool:
        return any(part.fitted for part in leaves(self.parts))

    @property
    def second_moments(self) -> bool:
        return any(part.second_moments for part in leaves(self.parts))

    def fit(self, stats: Any) -> Params:
        return map_leaves(lambda part: part.fit(stats), self.parts)


def requests_of(parts: Sequence[FeatureMap], m: int, names: Sequence[str]) -> tuple[Nested, ...]:
    """Return the requests of each part, renamed."""
    requests = []
    for part, name in zip(parts, names, strict=True):
        rename = partial(Projections.of_part, prefix=name)
        requests.append(map_leaves(rename, part.projections(m)))
    return tuple(requests)


def check_independent(noise: Nested) -> None:
    """Raise ValueError unless the projections are a pair without common ones."""
    if isinstance(noise, tuple) and len(noise) == 2:
        first = {id(leaf) for leaf in leaves(noise[0])}
        if first.isdisjoint(map(id, leaves(noise[1]))):
            return
    raise ValueError("noise: expected a pair of independent projections; use phi.noise(m, draw)")


def fit_sets(stats: Any, fit: Callable[[Tensor, Tensor], Any]) -> Any:
    """Return fit(x, y) for the vectors of each batch entry, with its fields stacked."""
    batch, xs = stats.x.sets()
    ys = stats.y.sets()[1]
    entries = [fit(x.double(), y.double()) for x, y in zip(xs, ys, strict=True)]
    return map_leaves(lambda t: t.reshape(*batch, *t.shape[1:]), stack_params(entries))


def stack_params(entries: list[Any]) -> Any:
    """Return named tuples of tensors as one, with their fields stacked."""
    return type(entries[0])(*map(torch.stack, zip(*entries)))


def scalar(value: float) -> Tensor:
    """Return a fixed parameter (1, 1), float64."""
    return torch.tensor([[float(value)]], dtype=torch.float64)


def align(param: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Reshape (*batch, 1, k) to (*batch, 1, ..., 1, k) to broadcast with x and y."""
    return broadcast_matrix(param, max(x.ndim, y.ndim))[..., 0, :]


def broadcast_matrix(M: Tensor, ndim: int) -> Tensor:
    """Reshape a matrix (*batch, k, d) to broadcast with vectors of `ndim` dimensions."""
    ones = [1] * (ndim + 1 - M.ndim)
    return M.reshape(*M.shape[:-2], *ones, *M.shape[-2:])


def check_dimension(name: str, t: Tensor, x: Tensor) -> None:
    """Raise ValueError unless rows t (..., d) and vectors x (..., d) have equal dimensions."""
    if t.shape[-1] != x.shape[-1]:
        raise ValueError(f"{name}: {t.shape[-1]} dimensions, expected {x.shape[-1]} as the vectors")


def cos_sin(phase: Tensor, key: bool = False) -> Tensor:
    """Return [cos, sin] of phases (..., m), or [cos, -sin] for keys."""
    sine = phase.sin()
    if key:
        sine = -sine
    return torch.cat([phase.cos(), sine], -1)


def both_signs(offset: Tensor, projected: Tensor, antithetic: bool) -> Tensor:
    """Return offset + projected, followed by offset - projected if antithetic."""
    if antithetic:
        return torch.cat([offset + projected, offset - projected], -1)
    return offset + projected


def log_expm1(t: Tensor) -> Tensor:
    """Return log(exp(t) - 1) for t >= 0, accurate at both ends; -inf at t <= 0."""
    t = t.clamp(min=0)
    large = t + torch.log1p(-torch.exp(-t))
    small = torch.log(torch.expm1(t.clamp(max=20.0)))
    return torch.where(t > 20, large, small)


def log_cosh(t: Tensor) -> Tensor:
    """Return log cosh t, to full relative accuracy near 0."""
    return log_mean_exp2(t.abs(), -t.abs())


def log_mean_exp2(high: Tensor, low: Tensor, phase: Tensor | float = 0.0) -> Tensor:
    """Return log((e^high + e^low cos(phase)) / 2) for low <= high.

    The result is accurate if both are near 0.
    """
    low = torch.minimum(low, high)
    mid = (high + low) / 2
    half = (high - low) / 2
    phase = torch.as_tensor(phase, dtype=high.dtype)
    near = half.clamp(max=1.0)
    excess = 2 * torch.sinh(near / 2).square()
    lost = torch.exp(-near) * torch.sin(phase / 2).square()
    small = mid + torch.log1p(excess - lost)
    large = high - LOG2 + torch.log1p(torch.exp(-2 * half) * phase.cos())
    return torch.where(half > 1, large, small)


def all_true(condition: Tensor) -> bool:
    """Whether a condition is true everywhere; under vmap, for all mapped entries."""
    return bool(torch.func.debug_unwrap(condition).all())


def values_readable(t: Tensor) -> bool:
    """Whether reading the values of a tensor is possible and cheap.

    Compiled code cannot read values. Reading from another device than the CPU would synchronise.
    """
    return t.device.type == "cpu" and not torch.compiler.is_compiling()


def check_finite(value: Tensor, name: str) -> Tensor:
    """Return a fitted parameter if it is finite.

    In compiled code and on other devices than the CPU it may hold others, and then so do the features.

    Raises:
        NotFinite: the parameter holds an infinity or NaN.
    """
    if values_readable(value) and not all_true(value.isfinite()):
        raise NotFinite(
            f"fitted {name}: not finite; expected vectors without NaN, infinity or overflow"
        )
    return value


def check_gaussian(noise: Noise, name: str) -> None:
    """Raise ValueError unless the projections are exactly Gaussian, naming the map."""
    if not noise.gaussian:
        raise ValueError(
            f"sampler: {name} needs exactly Gaussian projections; use iid, orthogonal with lengths=chi, "
            "simplex, halton or sobol"
        )


class NotFinite(ValueError):
    """Raised when a computation that needs finite numbers receives others."""
