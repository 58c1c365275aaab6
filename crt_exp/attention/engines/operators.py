"""The closed-form engines as operators of torch: opaque to torch.compile, so that nothing breaks its graphs."""

import torch
from torch import Tensor

from crt_exp.attention.checks import check_result, compute_dtype, transformed
from crt_exp.attention.engines import bidirectional as bidirectional_engine
from crt_exp.attention.engines import causal as causal_engine
from crt_exp.attention.engines import flash, native
from crt_exp.attention.engines.at_once import attend_at_once
from crt_exp.attention.engines.generic import Call, Part, plain_attention, plain_gradients
from crt_exp.attention.engines.tiles import Form
from crt_exp.features.base import ONE, Bound, Features
from crt_exp.features.exponential import PositiveExponential, sq_norm


def positive_attention(x: Tensor, y: Tensor, v: Tensor, phi: PositiveExponential, noise, params, causal: bool,
                       keep: Tensor | None, factor: float) -> Tensor:
    """Attention of checked arguments with a map of the positive exponential family; as many key heads as query heads.

    The factor of x and y goes into what multiplies them: log phi = (factor scale) rows.x + bias - (factor^2 norm_weight) |x|^2.
    """
    rows, scale, bias = _exponent(phi, noise, params, x.device, compute_dtype(x, y, v), factor)
    form = rows, scale, bias, keep, phi.norm_weight * factor**2
    if torch.compiler.is_exporting():  # torch's own operators alone: the program runs without this package
        return attend_at_once(x, y, v, _part(*form, causal))
    if transformed(x, y, v):
        return plain_attention(x, y, v, _part(*form, causal))
    return _forward(x, y, v, *form, causal)[0]


def _part(rows: Tensor, scale: Tensor, bias: Tensor, keep: Tensor | None, norm_weight: float, causal: bool) -> Part:
    """The map for the engine of all maps, which knows every transform."""
    weight, bias = (rows * scale).mT, bias.unsqueeze(-2)

    def phi(t: Tensor) -> Features:
        t = t.to(weight.dtype)
        return Features(ONE, t @ weight + bias - norm_weight * sq_norm(t))

    return Part(Call(None, None, None, causal, keep), Bound(phi, phi), keep)


@torch.no_grad()
def positive_state(y: Tensor, v: Tensor, phi: PositiveExponential, noise, params, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """What keys y (B,H,S,d), v (B,H,S,dv) leave in the features: exp(-top) sum_j [v_j, 1] phi(y_j) (B,H,dv+1,M), and top (B,H,M).

    The bidirectional engine computes it for its queries; one of zeros asks for no more.
    """
    rows, scale, bias = _exponent(phi, noise, params, y.device, compute_dtype(y, v))
    engine = native.bidirectional if native.applies(y, v, rows) else bidirectional_engine
    form = Form(rows, scale, bias, phi.norm_weight, keep)
    _, _, sums, logs, *_ = engine.forward(torch.zeros_like(y[:, :, :1]), y, v, form)
    top = logs + bias
    return sums, top if keep is None else top.masked_fill(~keep.any(-1)[:, None, None], -torch.inf)


def _exponent(phi: PositiveExponential, noise, params, device, dtype, factor: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (.,.,M,d), scale (.,.,1,1) and bias (.,.,M) of the log features of factor x."""
    rows, scale, bias = phi.exponent(noise, params)
    cast = lambda t: t.detach().to(device, dtype)
    scale = rows.new_full((1, 1), factor) if scale is None else scale * factor
    return _four(cast(rows)), _four(cast(scale)), _four(cast(bias)).squeeze(-2)


def _four(t: Tensor) -> Tensor:
    return t[(None,) * (4 - t.ndim)]


def _engine(x: Tensor, y: Tensor, v: Tensor, rows: Tensor, causal: bool):
    if native.applies(x, y, v, rows):
        return native.causal if causal else native.bidirectional
    if causal:
        return causal_engine
    return flash if flash.applies(x, y, v) else bidirectional_engine


def _five(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """out, log-sums and what else the engine keeps for its backward pass: an operator has a fixed number of results."""
    return *results, *(torch.empty(0, dtype=torch.uint8) for _ in range(5 - len(results)))


@torch.library.custom_op("crt_exp::positive_attention", mutates_args=())
def _forward(x: Tensor, y: Tensor, v: Tensor, rows: Tensor, scale: Tensor, bias: Tensor, keep: Tensor | None,
             norm_weight: float, causal: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        results = _engine(x, y, v, rows, causal).forward(x, y, v, Form(rows, scale, bias, norm_weight, keep))
    check_result(results[1])
    return _five(results)


@_forward.register_fake
def _(x, y, v, rows, scale, bias, keep, norm_weight, causal):
    return _five(_engine(x, y, v, rows, causal).saved(x, v, rows))


@torch.library.custom_op("crt_exp::positive_attention_backward", mutates_args=())
def _backward(grad: Tensor, x: Tensor, y: Tensor, v: Tensor, rows: Tensor, scale: Tensor, bias: Tensor, keep: Tensor | None,
              norm_weight: float, causal: bool, out: Tensor, logsum: Tensor, states: Tensor, tops: Tensor,
              levels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    saved = (out, logsum, states, tops, levels)
    with torch.autocast(x.device.type, enabled=False):
        return _engine(x, y, v, rows, causal).backward(x, y, v, Form(rows, scale, bias, norm_weight, keep), saved, grad)


@_backward.register_fake
def _(grad, x, y, v, *rest):
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, y, v))


def _keep_for_backward(ctx, inputs, output):
    x, y, v, rows, scale, bias, keep, ctx.norm_weight, ctx.causal = inputs
    ctx.save_for_backward(x, y, v, rows, scale, bias, keep, *output)


def _gradients(ctx, grad, *_):
    x, y, v, rows, scale, bias, keep, *output = ctx.saved_tensors
    if torch.is_grad_enabled() or transformed(grad):
        part = _part(rows, scale, bias, keep, ctx.norm_weight, ctx.causal)
        return *plain_gradients(x, y, v, grad, part), *(None,) * 6
    grads = _backward(grad, x, y, v, rows, scale, bias, keep, ctx.norm_weight, ctx.causal, *output)
    return *grads, *(None,) * 6


_forward.register_autograd(_gradients, setup_context=_keep_for_backward)
