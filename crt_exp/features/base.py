"""What every feature map shares: stable features, noise, the fit to statistics, and the closed form of its error.

Legend: L queries x, S keys y, d dimension, m projections, M features made of them. S_s = |x + s y|^2 for s = +-1,
N = |x|^2 + |y|^2. phi is held as value * exp(log_scale); nothing is exponentiated before a stabiliser is known.

At the end: where numbers stop being finite, in a fit or in a training run.
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
from crt_exp.options import check_values
from crt_exp.samplers.noise import Nested, Noise, leaves, mapped, precise, transforming

ONE = torch.ones(())  # the value of a positive feature: zero-dimensional, so it joins any device and dtype
LOG2 = math.log(2)

# tensors (..., 1, 1), (..., 1, d) or (..., d, d), nested (samplers/noise.py); () for maps without any
Params = Any


class Features(NamedTuple):
    """phi = value * exp(log_scale), real. Both broadcast to (..., L, M)."""

    value: Tensor      # 1 for positive maps, +-1 for signed ones, cos and sin for trigonometric ones
    log_scale: Tensor  # log phi for positive and signed maps, (..., L, 1) for trigonometric ones

    def dense(self) -> "Features":
        """Itself: the features of some maps come in blocks (features/blocks.py), which this puts together."""
        return self

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


class BoundMap(NamedTuple):
    """A feature map with its noise and parameters filled in, and what depends on these alone already computed."""

    phi_q: Callable[[Tensor], Features]
    phi_k: Callable[[Tensor], Features]


@dataclass(frozen=True)
class Projections:
    """A noise that a map takes: m rows. Those of one name are one noise, those of other names are independent.

    begin: the name of what rows that are trained begin as, where that is another one's.
    """

    m: int
    name: str = ""
    begin: str | None = None

    @property
    def drawn_as(self) -> str:
        """The name that its rows are drawn by."""
        return self.name if self.begin is None else self.begin

    def of_part(self, part: int) -> "Projections":
        """The same for part number `part` of a map whose parts are independent."""
        name, begin = (None if name is None else f"{part}_{name}" if name else str(part)
                       for name in (self.name, self.begin))
        return replace(self, name=name, begin=begin)


@dataclass(frozen=True)
class FeatureMap:
    """A pair of maps with E <phi_q(x), phi_k(y)> = kernel(x, y). Pure: noise and parameters are arguments.

    Unbiased for every value of the parameters that does not depend on the noise: a stale fit costs variance only. A map
    says what it computes in `phi_q` (and `phi_k`, where that is another map), or in `bind`: each is made of the other.
    Raises ValueError for options that do not fit their annotations.
    """

    kernel: Kernel = "softmax"

    estimates = True    # a kernel; maps that define one of their own, by a formula or by what they learn, do not
    own_kernel = False  # whether that is neither softmax nor the Gaussian one: a map of rows, and none of attention
    learned = False     # whether its projections are parameters of the layer that holds it, always
    trainable = False   # whether a layer can train its parameters and projections (attention.learn)
    fitted = False      # whether `fit` looks at statistics; where not, `fit(None)` gives the parameters
    # Whether `fit` looks at the vectors themselves: then an attention layer fits once, and keeps the result. Such a map
    # also has `unfitted(d)`, the parameters before that, and `until_fitted`, what these mean.
    on_vectors = False
    # Whether it is fitted to sequences, in which queries meet the keys that they see: then it has `fit_sequences`.
    on_sequences = False
    second_moments = False  # whether it looks at covariances: O(L d^2) to take, d^2 numbers for a layer to keep

    def __post_init__(self):
        check_values("", type(self), vars(self))

    @property
    def one_map(self) -> bool:
        """Whether phi_k is phi_q."""
        return type(self).phi_k is FeatureMap.phi_k

    def width(self, m: int) -> int:
        """M, the number of features made of m projections."""
        return m

    def of_size(self, m: int) -> "FeatureMap":
        """The map for m projections, where the size of its parameters depends on m."""
        return self

    def rank(self, m: int) -> int:
        """The least number of columns that gives the same estimates in exact arithmetic, as the papers count them."""
        return self.width(m)

    def projections(self, m: Nested) -> Nested:
        """The noise that this map takes where m projections are asked for: `Projections`, or None where it takes none.

        Of a map with parts, a tuple with what each of them takes; m is then one number for all, or a tuple with theirs.
        """
        return Projections(m)

    def noise(self, m: Nested, draw: Callable[[Projections], Noise]) -> Nested:
        """Noise for this map: `draw` is called once for each noise that is independent of the others."""
        needed, drawn = self.projections(m), {}
        for p in distinct(needed):
            if p.drawn_as not in drawn:
                drawn[p.drawn_as] = draw(p)
        return mapped(lambda p: drawn[p.drawn_as], needed)

    def fit(self, stats: Statistics) -> Params:
        """Parameters of least mean log variance for these statistics."""
        return ()

    def admitted(self, params: Params) -> Params:
        """Parameters that training or an average of states has moved, brought back to where the map is defined."""
        return params

    def phi_q(self, x: Tensor, noise: Noise, params: Params = ()) -> Features:
        """Query features of x (..., L, d): broadcast to (..., L, width(m)), float32 at least."""
        return self.bind(precise(noise, x.dtype), params).phi_q(x).dense()

    def phi_k(self, y: Tensor, noise: Noise, params: Params = ()) -> Features:
        """Key features; the same map unless said otherwise."""
        return self.bind(precise(noise, y.dtype), params).phi_k(y).dense()

    def bind(self, noise: Noise, params: Params = ()) -> BoundMap:
        """Both maps as functions of the vectors alone, for callers that go through a set in chunks."""
        phi_q = partial(self.phi_q, noise=noise, params=params)
        return BoundMap(phi_q, phi_q if self.one_map else partial(self.phi_k, noise=noise, params=params))

    def writer(self, noise: Noise, params: Params = ()) -> Callable[[Tensor, Tensor], None]:
        """A function of x and `out` (..., L, M) that writes phi_q(x) itself into `out`, without gradient,
        in few passes."""
        phi = self.bind(precise(noise, torch.float64), params).phi_q
        return lambda x, out: phi(x).dense().write(out)

    def log_relative_second_moment(self, x: Tensor, y: Tensor, params: Params = ()) -> Tensor:
        """log(E Z^2 / (E Z)^2) of one projection's estimate Z; the same for both kernels. Biased maps have none."""
        raise ValueError(f"features={type(self).__name__}: no closed form of its variance, which this needs: define "
                         "log_relative_second_moment")

    def log_mse(self, x: Tensor, y: Tensor, params: Params, m: int) -> Tensor:
        """log of the variance with m iid projections; as `log_variance`."""
        return self.log_variance(x, y, params) - math.log(m)

    def log_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        """log of what is estimated, pair by pair: x and y (..., d) broadcast."""
        return log_kernel(self.kernel, x, y)

    def log_variance(self, x: Tensor, y: Tensor, params: Params = ()) -> Tensor:
        """log of the variance with ONE projection, iid: shape of x[..., 0] broadcast with y[..., 0], float64, nats.

        -inf where the variance is zero, +inf where it is infinite. m iid projections divide the variance by m.
        """
        x, y = x.double(), y.double()
        return 2 * self.log_kernel(x, y) + log_expm1(self.log_relative_second_moment(x, y, params))


def distinct(needed: Nested) -> list[Projections]:
    """Each of the independent noises once. Raises ValueError where parts that share one take other numbers of rows."""
    named = {}
    for p in leaves(needed):
        if named.setdefault(p.name, p).m != p.m:
            raise ValueError(f"parts that share their projections take {named[p.name].m} and {p.m} of them: they must "
                             "take as many")
    return list(named.values())


def align(param: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """A parameter (*batch, 1, k) as (*batch, 1, ..., 1, k), to broadcast with the product of x and y,
    batch dimensions first."""
    return placed(param, max(x.ndim, y.ndim))[..., 0, :]


def placed(M: Tensor, ndim: int) -> Tensor:
    """A matrix (*batch, k, d) for vectors of so many dimensions, batch dimensions first."""
    batch = M.shape[:-2]
    return M.reshape(*batch, *[1] * (ndim - 1 - len(batch)), *M.shape[-2:])


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


def can_ask(t: Tensor) -> bool:
    """Whether a program may look at values: in compiled code it cannot, on another device it would have to wait."""
    return t.device.type == "cpu" and not torch.compiler.is_compiling()


def check_finite(value: Tensor, name: str) -> Tensor:
    """Raises NotFinite where a fitted parameter is not finite: the statistics held an infinity or a NaN.

    In compiled code and on other devices than the CPU it becomes NaN, and so does all that is made of it.
    """
    if not can_ask(value):
        return torch.where(value.isfinite(), value, torch.nan)
    if not holds(value.isfinite()):
        raise NotFinite(f"the fitted {name} is not finite: the vectors hold NaN or infinite values, or overflow")
    return value


class NotFinite(ValueError):
    """What a computation that needs finite numbers raises where it meets others, before they reach a loss."""


def first_nonfinite(model: nn.Module, batches: Iterable[Any], loss: Callable[[nn.Module, Any], Tensor]) -> str | None:
    """The first parameter, layer output, loss or gradient that is not finite when `batches` are computed again;
    None if all are.

    Layers are looked at in the order in which they ran, inner ones before those around them, gradients in backward
    order. Hooks do not run in compiled code: `model` must be the one that was not compiled. Everything is computed to
    the end, because the layers of a sharded model only work when all processes take part. Leaves gradients behind.
    """
    names = nonfinite_parameters(model)
    model.zero_grad()
    for batch in batches:
        replay(model, batch, loss, names)
    if not names:  # a gradient that only the sum over micro-batches or processes made so; the last layer's came first
        late = [name for name, p in model.named_parameters() if p.grad is not None and not finite(p.grad)]
        names = [f"gradient of {name}" for name in reversed(late)]
    return names[0] if names else None


def nonfinite_parameters(model: nn.Module) -> list[str]:
    return [f"parameter {name}" for name, parameter in model.named_parameters() if not finite(parameter)]


def layer_of(error: BaseException, model: nn.Module) -> str:
    """The innermost layer of `model` that was at work when `error` was raised, and what the error says."""
    names = {module: name for name, module in model.named_modules()}
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    layers = [module for module in frames if isinstance(module, nn.Module) and names.get(module)]
    return f"{names[layers[-1]]} ({type(layers[-1]).__name__}): {error}" if layers else str(error)


def replay(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor], names: list[str]) -> None:
    """Runs one micro-batch forward and backward with a hook on every module and parameter;
    appends to an empty `names`."""
    hooks = [module.register_forward_hook(output_hook(name, names)) for name, module in model.named_modules()]
    hooks += [p.register_hook(gradient_hook(name, names)) for name, p in model.named_parameters() if p.requires_grad]
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
    """The tensors of nested tuples, lists and mappings (such as the outputs of transformers)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "values"):
        for item in value.values():
            yield from tensors_in(item)
