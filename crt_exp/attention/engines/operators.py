"""The closed-form engines as operators of torch: opaque to torch.compile, so that nothing breaks its graphs."""


import torch
from torch import Tensor

from crt_exp.attention.checks import check_gradient, check_result, compute_dtype, learning, transformed
from crt_exp.attention.engines import closed_form, native
from crt_exp.attention.engines.chunks import Chunked
from crt_exp.attention.engines.protocol import Form, Gradients, Kept
from crt_exp.attention.partials import Partial, finish, normalised
from crt_exp.features.base import ONE, BoundMap, Features
from crt_exp.features.exponential import PositiveExponential, sq_norm
from crt_exp.samplers.noise import as_given

ENGINES = {"native": native.bidirectional, "native causal": native.causal,
           "products": closed_form.bidirectional, "products causal": closed_form.causal}


def positive_attention(x: Tensor, y: Tensor, v: Tensor, phi: PositiveExponential, noise, params, causal: bool,
                       keep: Tensor | None, factor: float) -> Tensor:
    """Attention of checked arguments with a map of the positive exponential family; as many key heads as query heads.

    The factor of x and y goes into what multiplies them: log phi = (factor scale) rows.x + bias - (factor^2
    norm_weight) |x|^2.
    """
    x, y, form = entered(x, y, v, phi, noise, params, keep, factor)
    if torch.compiler.is_exporting() or transformed(x, y, v):
        return finish(plain(form, causal).rows(x, y, v)).to(v.dtype)
    return torch.ops.crt_exp.attention(x, y, v, *form, _engine(x, y, v, form, causal))[0]


def positive_partial(x: Tensor, y: Tensor, v: Tensor, phi: PositiveExponential, noise, params, causal: bool,
                     keep: Tensor | None, factor: float) -> Partial:
    """The same as a partial: the outputs with their log-sums."""
    x, y, form = entered(x, y, v, phi, noise, params, keep, factor)
    work = plain(form, causal)
    if torch.compiler.is_exporting() or transformed(x, y, v):
        return work.rows(x, y, v)
    engine = _engine(x, y, v, form, causal)
    out, logsum, *_ = torch.ops.crt_exp.attention(x, y, v, *form, engine)
    logsum = ENGINES[engine].unit * logsum + form.shared_logs(x)
    if keep is not None:
        seen = work.seen(y.shape[2] - x.shape[2]) if causal else keep.any(-1)[:, None, None]
        logsum = torch.where(seen, logsum, -torch.inf)
    return normalised(out.to(logsum.dtype), logsum.unsqueeze(-1))


def entered(x: Tensor, y: Tensor, v: Tensor, phi: PositiveExponential, noise, params, keep: Tensor | None,
            factor: float) -> tuple[Tensor, Tensor, Form]:
    """Queries and keys as they enter the formula of the map, and that formula."""
    if keep is not None and learning(noise, params):  # padding may hold NaN: no gradient to parameters may come of it
        y = y.masked_fill(~keep[:, None, :, None], 0)
    (x, left), (y, _) = phi.enter(x, params, factor=factor), phi.enter(y, params, key=True, factor=factor)
    return x, y, form_of(x, y, v, phi, noise, params, keep, left)


def form_of(x: Tensor, y: Tensor, v: Tensor, phi: PositiveExponential, noise, params, keep: Tensor | None,
            factor: float = 1.0) -> Form:
    """Rows (.,.,M,d), scale (.,.,1,1) and bias (.,.,M) of the log features of factor x, for what has entered."""
    rows, scale, bias = phi.exponent(noise, params)
    scale = rows.new_full((1, 1), factor) if scale is None else scale * factor
    dtype = compute_dtype(x, y, v)
    rows, scale, bias = (t.to(x.device, dtype)[(None,) * (4 - t.ndim)] for t in (rows, scale, bias))
    return Form(rows, scale, bias.squeeze(-2), phi.norm_weight * factor**2, keep, learning(noise, params))


def plain(form: Form, causal: bool) -> Chunked:
    """The map for the engine of all maps, which knows every transform."""
    weight, bias = (form.rows * form.scale).mT, form.bias.unsqueeze(-2)

    def phi(t: Tensor) -> Features:
        t = t.to(weight.dtype)
        return Features(ONE, t @ weight + bias - form.norm_weight * sq_norm(t))

    return Chunked(BoundMap(phi, phi), form.keep, causal)


@torch.no_grad()
def positive_state(y: Tensor, v: Tensor, phi: PositiveExponential, noise, params,
                   keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """What keys y (B,H,S,d), v (B,H,S,dv) leave in the features: exp(-top) sum_j [v_j, 1] phi(y_j) (B,H,dv+1,M), and
    top (B,H,M).

    The bidirectional engine computes it for its queries; one of zeros asks for no more.
    """
    y, _ = phi.enter(y, params, key=True)
    form = form_of(y, y, v, phi, noise, params, keep)
    engine = ENGINES[_engine(y, y, v, form, causal=False)]
    kept = engine.forward(torch.zeros_like(y[:, :, :1]), y, v, form)
    top = kept.logs + form.bias
    return kept.states, top if keep is None else top.masked_fill(~keep.any(-1)[:, None, None], -torch.inf)


def _engine(x: Tensor, y: Tensor, v: Tensor, form: Form, causal: bool) -> str:
    """The name of the engine for a call, chosen once: the operator and its backward pass are given it."""
    return ("native" if native.applies(x, y, v, form.rows) else "products") + " causal" * causal


@torch.library.custom_op("crt_exp::attention", mutates_args=())
def _forward(x: Tensor, y: Tensor, v: Tensor, rows: Tensor, scale: Tensor, bias: Tensor, norm_weight: float,
             keep: Tensor | None, learned: bool, engine: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with as_given(x):
        kept = ENGINES[engine].forward(x, y, v, Form(rows, scale, bias, norm_weight, keep, learned))
    check_result(kept.logsum)
    return tuple(kept)


@torch.library.custom_op("crt_exp::attention_backward", mutates_args=())
def _backward(grad: Tensor, grad_logsum: Tensor | None, x: Tensor, y: Tensor, v: Tensor, rows: Tensor,
              scale: Tensor, bias: Tensor, norm_weight: float, keep: Tensor | None, learned: bool, engine: str,
              kept: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    form = Form(rows, scale, bias, norm_weight, keep, learned)
    with as_given(x):
        return tuple(ENGINES[engine].backward(x, y, v, form, Kept(*kept), grad, grad_logsum))


@_forward.register_fake
def _(x, y, v, rows, scale, bias, norm_weight, keep, learned, engine):
    return tuple(ENGINES[engine].empty(x, v, rows))


@_backward.register_fake
def _(grad, grad_logsum, x, y, v, *rest):
    return tuple(Gradients.empty(x, y, v, Form(*rest[:6])))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.norm_weight, keep, ctx.learned, ctx.engine = inputs
    ctx.save_for_backward(*tensors, keep, *output)
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad, grad_logsum, *_):
    x, y, v, rows, scale, bias, keep, *kept = ctx.saved_tensors
    grad = torch.zeros_like(kept[0]) if grad is None else grad
    check_gradient(grad)
    form = Form(rows, scale, bias, ctx.norm_weight, keep, ctx.learned)
    grads = Gradients(*_backward(grad, grad_logsum, x, y, v, *form, ctx.engine, kept))
    return *grads[:3], *(grads.of_map(form) if form.learned else (None,) * 3), *(None,) * 4


_forward.register_autograd(_gradients, setup_context=_save)
