"""Interface of random-feature maps, and checks for non-finite numbers.

Notation: L queries x, S keys y, d dimension, m projections, M features. Projections are the rows omega of a random
matrix. A map computes M features from m projections.

Features are represented as value * exp(log_scale), so that attention can stabilise them before the exponential.
"""

import math
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crt_exp.features.statistics import Kernel, Statistics, log_kernel
from crt_exp.samplers.noise import Nested, Noise, leaves, map_leaves, match_float64, transforming
from crt_exp.validation import check_values

ONE = torch.ones(
    ()
)  # value of positive features; zero-dimensional tensors combine with every device and dtype
LOG2 = math.log(2)

# nested tensors (samplers/noise.py), mostly (..., 1, 1), (..., 1, d) or (..., d, d); () for maps without parameters
Params = Any


class Features(NamedTuple):
    """Real features phi = value * exp(log_scale); both broadcast to (..., L, M)."""

    value: Tensor  # 1 for positive maps, +-1 for signed ones, cos and sin for trigonometric ones
    log_scale: Tensor  # log phi for positive and signed maps, (..., L, 1) for trigonometric ones

    def dense(self) -> "Features":
        """Return the features as one tensor pair; blocks.py overrides this for blocks."""
        return self

    def exp(self) -> Tensor:
        """Return phi (..., L, M), including the factor 1/sqrt(m).

        phi may overflow or underflow for large |x|.
        """
        phi = self.log_scale.exp()
        return phi if self.value is ONE else self.value * phi

    def write(self, out: Tensor) -> None:
        """Write phi into `out` (..., L, M), without gradient.

        Raises:
            ValueError: the features have another shape than `out`, which torch would resize.
        """
        shape = torch.broadcast_shapes(self.value.shape, self.log_scale.shape)
        if shape != out.shape:
            raise ValueError(f"features: shape {tuple(shape)}, expected {tuple(out.shape)}")
        if self.log_scale.shape[-1] < out.shape[-1]:
            torch.mul(self.value, self.log_scale.exp(), out=out)
        else:
            torch.exp(self.log_scale, out=out)
            if self.value is not ONE:
                out.mul_(self.value)


class BoundMap(NamedTuple):
    """A feature map with its projections and parameters filled in.

    Quantities that depend on the projections and parameters alone are computed once.
    """

    phi_q: Callable[[Tensor], Features]
    phi_k: Callable[[Tensor], Features]


@dataclass(frozen=True)
class Projections:
    """A request for m random projections.

    Requests with equal names receive the same projections. Requests with different names receive independent ones.

    Args:
        begin: name of the request whose sample initialises trained projections; None: `name`.
    """

    m: int
    name: str = ""
    begin: str | None = None

    @property
    def drawn_as(self) -> str:
        """The name under which the projections are sampled."""
        return self.name if self.begin is None else self.begin

    def of_part(self, part: int) -> "Projections":
        """Return the request renamed for part number `part` of a composite map."""
        name, begin = (
            None if name is None else f"{part}_{name}" if name else str(part)
            for name in (self.name, self.begin)
        )
        return replace(self, name=name, begin=begin)


@dataclass(frozen=True)
class FeatureMap:
    """A pair of feature maps with E <phi_q(x), phi_k(y)> = kernel(x, y).

    A map has no random state: projections and parameters are arguments. The estimate is unbiased for all parameters
    that do not depend on the projections. Outdated parameters therefore increase the variance only.

    Subclasses define `phi_q` (and `phi_k`, if keys use another map) or `bind`. Each default implementation calls the
    other. Subclasses define `log_relative_second_moment` if the variance has a closed form.

    Raises:
        ValueError: an option does not fit its annotation.
    """

    kernel: Kernel = "softmax"

    estimates = True  # the features estimate a kernel without bias; False for learned features
    fixes_scale = (
        True  # the features estimate the kernel, not only its ratios over the keys of a query
    )
    own_kernel = (
        False  # the kernel is neither softmax nor Gaussian; such maps do not serve attention
    )
    learned = False  # the projections are always parameters of the layer
    trainable = False  # a layer can train the parameters and projections (attention.learn)
    fitted = False  # `fit` uses statistics; if False, call `fit(None)`
    # `fit` uses the vectors themselves, so an attention layer fits once and stores the result. Such a map also defines
    # `unfitted(d)`, the parameters before the fit, and `until_fitted`, which describes them.
    on_vectors = False
    # `fit_sequences` uses sequences: which keys each query attends to matters.
    on_sequences = False
    second_moments = False  # `fit` uses covariances: O(L d^2) time, d^2 stored numbers

    def __post_init__(self):
        check_values("", type(self), vars(self))

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

    def rank(self, m: int) -> int:
        """Return the feature dimension as the papers count it.

        This is the least number of features that gives the same estimate in exact arithmetic.
        """
        return self.width(m)

    def projections(self, m: Nested) -> Nested:
        """Return the requests for projections: a `Projections` or None.

        Composite maps return a tuple with one entry for each part. Their m is one number, or a tuple with one entry
        for each part.
        """
        return Projections(m)

    def noise(self, m: Nested, draw: Callable[[Projections], Noise]) -> Nested:
        """Sample the projections; `draw` is called once for each independent request."""
        needed = self.projections(m)
        drawn = {}
        for p in distinct(needed):
            if p.drawn_as not in drawn:
                drawn[p.drawn_as] = draw(p)
        return map_leaves(lambda p: drawn[p.drawn_as], needed)

    def fit(self, stats: Statistics) -> Params:
        """Return the parameters of least mean log variance for these statistics."""
        return ()

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
        return BoundMap(
            phi_q, phi_q if self.one_map else partial(self.phi_k, noise=noise, params=params)
        )

    def writer(self, noise: Noise, params: Params = ()) -> Callable[[Tensor, Tensor], None]:
        """Return a function that writes phi_q(x) into `out` (..., L, M).

        The function has no gradient and needs few passes over memory.
        """
        phi = self.bind(match_float64(noise, torch.float64), params).phi_q
        return lambda x, out: phi(x).dense().write(out)

    def log_relative_second_moment(self, x: Tensor, y: Tensor, params: Params = ()) -> Tensor:
        """Return log(E Z^2 / (E Z)^2) of the estimate Z from one projection.

        The value is the same for the softmax and the Gaussian kernel.

        Raises:
            ValueError: the map has no closed form.
        """
        raise ValueError(
            f"features={type(self).__name__}: no closed-form variance; define log_relative_second_moment"
        )

    def log_mse(self, x: Tensor, y: Tensor, params: Params, m: int) -> Tensor:
        """Return the log variance with m i.i.d. projections; shapes as `log_variance`."""
        return self.log_variance(x, y, params) - math.log(m)

    def log_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the log of the estimated kernel; x and y (..., d) broadcast."""
        return log_kernel(self.kernel, x, y)

    def log_variance(self, x: Tensor, y: Tensor, params: Params = ()) -> Tensor:
        """Return the log variance with one projection, in nats, float64.

        The shape is that of x[..., 0] broadcast with y[..., 0]. The value is -inf for variance zero and +inf for
        infinite variance. With m i.i.d. projections the variance is divided by m.
        """
        x = x.double()
        y = y.double()
        return 2 * self.log_kernel(x, y) + log_expm1(self.log_relative_second_moment(x, y, params))


def distinct(needed: Nested) -> list[Projections]:
    """Return one request per name.

    Raises:
        ValueError: parts share projections but need different numbers of them.
    """
    named = {}
    for p in leaves(needed):
        if named.setdefault(p.name, p).m != p.m:
            raise ValueError(
                f"shared projections: parts need {named[p.name].m} and {p.m} rows; use equal m"
            )
    return list(named.values())


def align(param: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Reshape (*batch, 1, k) to (*batch, 1, ..., 1, k) to broadcast with x and y."""
    return broadcast_matrix(param, max(x.ndim, y.ndim))[..., 0, :]


def broadcast_matrix(M: Tensor, ndim: int) -> Tensor:
    """Reshape a matrix (*batch, k, d) to broadcast with vectors of `ndim` dimensions."""
    batch = M.shape[:-2]
    return M.reshape(*batch, *[1] * (ndim - 1 - len(batch)), *M.shape[-2:])


def log_expm1(t: Tensor) -> Tensor:
    """Return log(exp(t) - 1) for t >= 0, accurate at both ends; -inf at t <= 0."""
    t = t.clamp(min=0)
    small = t.clamp(max=20.0)
    return torch.where(t > 20, t + torch.log1p(-torch.exp(-t)), torch.log(torch.expm1(small)))


def log_cosh(t: Tensor) -> Tensor:
    """Return log cosh t, to full relative accuracy near 0."""
    t = t.abs()
    near = t.clamp(max=1.0)
    return torch.where(
        t > 1,
        t - LOG2 + torch.log1p(torch.exp(-2 * t)),
        torch.log1p(2 * torch.sinh(near / 2).square()),
    )


def all_true(condition: Tensor) -> bool:
    """Whether a condition is true everywhere; under vmap, for all mapped entries."""
    return bool((torch.func.debug_unwrap(condition) if transforming() else condition).all())


def values_readable(t: Tensor) -> bool:
    """Whether reading the values of a tensor is possible and cheap.

    Compiled code cannot read values. Reading from another device than the CPU would synchronise.
    """
    return t.device.type == "cpu" and not torch.compiler.is_compiling()


def check_finite(value: Tensor, name: str) -> Tensor:
    """Return a fitted parameter if it is finite.

    In compiled code and on other devices than the CPU, non-finite values become NaN instead of an error.

    Raises:
        NotFinite: the parameter holds an infinity or NaN.
    """
    if not values_readable(value):
        return torch.where(value.isfinite(), value, torch.nan)
    if not all_true(value.isfinite()):
        raise NotFinite(
            f"fitted {name}: not finite; expected vectors without NaN, infinity or overflow"
        )
    return value


class NotFinite(ValueError):
    """Raised when a computation that needs finite numbers receives others."""


def first_nonfinite(
    model: nn.Module, batches: Iterable[Any], loss: Callable[[nn.Module, Any], Tensor]
) -> str | None:
    """Name the first non-finite parameter, layer output, loss or gradient.

    The function recomputes the forward and backward passes of `batches`. It checks layers in execution order, inner
    layers first, and gradients in backward order. It leaves gradients behind.

    Args:
        model: the uncompiled model, because compiled code runs no hooks.

    Returns:
        A description, or None if everything is finite.
    """
    names = nonfinite_parameters(model)
    model.zero_grad()
    for batch in batches:
        replay(model, batch, loss, names)
    if not names:  # only the sum over micro-batches or processes overflowed; backward reaches the last layer first
        late = [
            name
            for name, p in model.named_parameters()
            if p.grad is not None and not finite(p.grad)
        ]
        names = [f"gradient of {name}" for name in reversed(late)]
    return names[0] if names else None


def nonfinite_parameters(model: nn.Module) -> list[str]:
    return [
        f"parameter {name}" for name, parameter in model.named_parameters() if not finite(parameter)
    ]


def layer_of(error: BaseException, model: nn.Module) -> str:
    """Return the innermost layer that ran when `error` was raised, with its message."""
    names = {module: name for name, module in model.named_modules()}
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    layers = [module for module in frames if isinstance(module, nn.Module) and names.get(module)]
    return f"{names[layers[-1]]} ({type(layers[-1]).__name__}): {error}" if layers else str(error)


def replay(
    model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor], names: list[str]
) -> None:
    """Run one micro-batch forward and backward; append the first problem to `names`."""
    hooks = [
        module.register_forward_hook(output_hook(name, names))
        for name, module in model.named_modules()
    ]
    hooks += [
        p.register_hook(gradient_hook(name, names))
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    try:
        value = loss(model, batch)
        if not names and not finite(value):
            names.append("the loss itself")
        value.backward()
    except NotFinite as error:
        if not names:
            names.append(layer_of(error, model))
    finally:
        for hook in hooks:
            hook.remove()


def output_hook(name: str, names: list[str]):
    def hook(module, args, output):
        if not names and not all(finite(t) for t in tensors_in(output)):
            names.append(f"output of {name or 'the model'} ({type(module).__name__})")

    return hook


def gradient_hook(name: str, names: list[str]):
    def hook(gradient):
        if not names and not finite(gradient):
            names.append(f"gradient of {name}")

    return hook


def finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return not local.is_floating_point() or bool(torch.isfinite(local).all())


def tensors_in(value: Any) -> Iterable[Tensor]:
    """Yield the tensors of nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "values"):
        for item in value.values():
            yield from tensors_in(item)
