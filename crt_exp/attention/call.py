"""Attention in linear time and memory with any feature map: Y = diag(A 1)^-1 A V with A = phi_q(x) phi_k(y)^T.

A call is checked, then goes to one engine. Positive maps: closed forms, in C for float32 on CPUs, behind one operator
of torch, opaque to torch.compile. Other maps, unnormalised sums, transforms of torch.func and exported programs: chunks
of plain operations. Notation: B batch, H query heads, Hkv key heads, L queries, S keys, d, values of dimension dv, M
features.
"""

import torch
from torch import Tensor

from crt_exp.attention.checks import check_gradient, check_inputs, check_result, learning, repeat_heads, transformed
from crt_exp.attention.engines import Form, Gradients, Kept, closed_form, native
from crt_exp.attention.engines.chunks import Chunked, chunked_partial
from crt_exp.attention.partials import DenominatorCount, Partial, check_policy, finish, normalised
from crt_exp.features.base import ONE, BoundMap, FeatureMap, Features
from crt_exp.features.exponential import PositiveExponential, sq_norm
from crt_exp.samplers.noise import as_given, at_least_float32, leaves, precise

# by whether in C, and causal: chosen once for a call, the operator and its backward pass are given the choice
ENGINES = {(True, False): native.bidirectional, (True, True): native.causal,
           (False, False): closed_form.bidirectional, (False, True): closed_form.causal}


def attention(x: Tensor, y: Tensor, v: Tensor, phi: FeatureMap, noise, params=(), *, causal: bool = False,
              key_mask: Tensor | None = None, denominator: str = "none", normalize: bool = True,
              counter: DenominatorCount | None = None, scale: float = 1.0) -> Tensor:
    """Estimates softmax attention of queries x (B,H,L,d) to keys y (B,Hkv,S,d) with values v (B,Hkv,S,dv): (B,H,L,dv).

    The logit is scale^2 x.y: for scaled dot products give x = d^(-1/4) q and y = d^(-1/4) k, or q and k and scale =
    d^(-1/4), which multiplies both without a pass over them. Hkv divides H, and consecutive query heads share a key
    head. `noise` is a Noise of batch (), (1,) or (H,) (a tuple of them for Sum and Product), `params` come from
    `phi.fit` of the scaled vectors, with leading dimensions that broadcast to (B, H). Differentiable in x, y and v, and
    in rows and parameters that require a gradient. Time O((L + S) M (d + dv)); memory O(L + M dv) beyond inputs and
    outputs, in the backward pass too: in closed form for positive exponential maps, while autograd computes the chunks
    of other maps again where the features are many (causal: with a state of M dv numbers for every 512 tokens). The
    transforms of torch.func (grad, vmap, jvp, ...), forward mode and torch.export go through plain operations: O(L M)
    memory; second derivatives by autograd alone exist for the other maps. With one projection a query's feature
    cancels: its gradient is zero up to rounding.

    `causal`: query i sees keys j <= i + S - L. `key_mask` (B, S), True = keep: masked keys may hold anything; a query
    that sees no key gets 0. Nothing is added to features or denominators. Half precision is computed in float32.

    Signed maps can have denominators that are not positive: `denominator` leaves them ("none"), keeps them off zero
    ("clamp", at 1e-6 of the sum of absolute values) or takes their absolute value ("abs"); `counter` counts them, and
    without one a warning gives their number (on the CPU). `normalize=False` gives the numerator phi_q(x)
    phi_k(y)^T v alone.

    Raises ValueError where shapes, mask, noise or parameters do not fit, and where queries or keys are not finite (CPU
    only: on other devices the check would wait for the result).
    """
    check_policy(denominator)
    dtype = check_inputs(x, y, v, noise, params, causal, key_mask)
    heads, noise, count = x.shape[1], precise(noise, dtype), counter or DenominatorCount()
    if heads != y.shape[1]:
        x, y, v = _together(x, y, v, noise, params, causal)
    if isinstance(phi, PositiveExponential) and normalize:
        x, y, form = positive_form(x, y, phi, noise, params, key_mask, scale, dtype)
        if torch.compiler.is_exporting() or transformed(x, y, v):
            out = finish(plain(form, causal).rows(x, y, v)).to(v.dtype)
        else:
            out = torch.ops.crt_exp.attention(x, y, v, *form, native.applies(x, y, v, form.rows), causal)[0]
    else:
        x, y = (x, y) if scale == 1 else (at_least_float32(x) * scale, at_least_float32(y) * scale)
        rows = chunked_partial(x, y, v, phi, noise, params, causal, key_mask, denominator == "clamp")
        count.add(rows)
        out = finish(rows, denominator, normalize).to(v.dtype)
    if counter is None and normalize and not torch.compiler.is_compiling():
        count.warn()
    return _apart(out, heads)


def partial_attention(x: Tensor, y: Tensor, v: Tensor, phi: FeatureMap, noise, params=(), *, causal: bool = False,
                      key_mask: Tensor | None = None, modulus: bool = False, scale: float = 1.0) -> Partial:
    """What the queries gather from these keys: a Partial with a row for each query, (B,H,L,.), to be merged with that
    of others.

    `merge` adds the partials of parts of the keys, `finish` or `.output` divide; `.logsum` is the log of the
    denominator in nats. Differentiable in x, y and v, through outputs and log-sums alike. `modulus`: with the sums of
    absolute values that `finish(..., "clamp")` needs. The rest as for `attention`. Raises ValueError as it does.
    """
    dtype = check_inputs(x, y, v, noise, params, causal, key_mask)
    heads, noise = x.shape[1], precise(noise, dtype)
    if heads != y.shape[1]:
        x, y, v = _together(x, y, v, noise, params, causal)
    if isinstance(phi, PositiveExponential) and not modulus:
        x, y, form = positive_form(x, y, phi, noise, params, key_mask, scale, dtype)
        work = plain(form, causal)
        if torch.compiler.is_exporting() or transformed(x, y, v):
            rows = work.rows(x, y, v)
        else:
            in_c = native.applies(x, y, v, form.rows)
            out, logsum, *_ = torch.ops.crt_exp.attention(x, y, v, *form, in_c, causal)
            logsum = ENGINES[in_c, causal].unit * logsum + form.shared_logs(x)
            if key_mask is not None:
                seen = work.seen(y.shape[2] - x.shape[2]) if causal else key_mask.any(-1)[:, None, None]
                logsum = torch.where(seen, logsum, -torch.inf)
            rows = normalised(out.to(logsum.dtype), logsum.unsqueeze(-1))
    else:
        x, y = at_least_float32(x) * scale, at_least_float32(y) * scale
        rows = chunked_partial(x, y, v, phi, noise, params, causal, key_mask, modulus)
    return Partial(*(None if t is None else _apart(t, heads) for t in rows))


def _together(x: Tensor, y: Tensor, v: Tensor, noise, params, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """With as many key heads as query heads: query heads that share keys and features become one longer set of queries,
    else the keys are repeated."""
    key_heads, batches = y.shape[1], [n.batch for n in leaves(noise)] + [t.shape[:-2] for t in leaves(params)]
    shared = all(not batch or batch[-1] == 1 for batch in batches)
    if shared and not causal:
        x = x.unflatten(1, (key_heads, -1)).flatten(2, 3)
    return x, repeat_heads(y, x.shape[1]), repeat_heads(v, x.shape[1])


def _apart(t: Tensor, heads: int) -> Tensor:
    """Rows of the query heads again."""
    groups = heads // t.shape[1]
    return t if groups == 1 else t.unflatten(2, (groups, -1)).flatten(1, 2)


def positive_form(x: Tensor, y: Tensor, phi: PositiveExponential, noise, params, keep: Tensor | None, factor: float,
                  dtype: torch.dtype) -> tuple[Tensor, Tensor, Form]:
    """Queries and keys as they enter the formula of a positive map, and that formula, for as many key heads as queries.

    The factor of x and y goes into what multiplies them: log phi = (factor scale) rows.x + bias - (factor^2
    norm_weight) |x|^2.
    """
    learned = learning(noise, params)
    if keep is not None and learned:  # padding may hold NaN: no gradient to parameters may come of it
        y = y.masked_fill(~keep[:, None, :, None], 0)
    (x, left), (y, _) = phi.enter(x, params, factor=factor), phi.enter(y, params, key=True, factor=factor)
    rows, scale, bias = phi.exponent(noise, params)
    scale = rows.new_full((1, 1), left) if scale is None else scale * left
    to = {"device": x.device, "dtype": dtype}
    rows, scale, bias = (t.to(**to)[(None,) * (4 - t.ndim)] for t in (rows, scale, bias))
    return x, y, Form(rows, scale, bias.squeeze(-2), phi.norm_weight * left**2, keep, learned)


def plain(form: Form, causal: bool) -> Chunked:
    """The map for the engine of all maps, which knows every transform."""
    weight, bias = (form.rows * form.scale).mT, form.bias.unsqueeze(-2)

    def phi(t: Tensor) -> Features:
        t = t.to(weight.dtype)
        return Features(ONE, t @ weight + bias - form.norm_weight * sq_norm(t))

    return Chunked(BoundMap(phi, phi), form.keep, causal)


@torch.no_grad()
def positive_state(y: Tensor, v: Tensor, phi: PositiveExponential, noise, params, keep: Tensor | None,
                   dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What keys y (B,H,S,d), v (B,H,S,dv) leave in the features: exp(-top) sum_j [v_j, 1] phi(y_j) (B,H,dv+1,M), and
    top (B,H,M).

    The bidirectional engine computes it for its queries; one of zeros asks for no more.
    """
    x, y, form = positive_form(torch.zeros_like(y[:, :, :1]), y, phi, noise, params, keep, 1.0, dtype)
    kept = ENGINES[native.applies(y, v, form.rows), False].forward(x, y, v, form)
    top = kept.logs + form.bias
    return kept.states, top if keep is None else top.masked_fill(~keep.any(-1)[:, None, None], -torch.inf)


@torch.library.custom_op("crt_exp::attention", mutates_args=())
def _forward(x: Tensor, y: Tensor, v: Tensor, rows: Tensor, scale: Tensor, bias: Tensor, norm_weight: float,
             keep: Tensor | None, learned: bool, in_c: bool,
             causal: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with as_given(rows):
        kept = ENGINES[in_c, causal].forward(x, y, v, Form(rows, scale, bias, norm_weight, keep, learned))
    check_result(kept.logsum)
    return tuple(kept)


@torch.library.custom_op("crt_exp::attention_backward", mutates_args=())
def _backward(grad: Tensor, grad_logsum: Tensor | None, x: Tensor, y: Tensor, v: Tensor, rows: Tensor,
              scale: Tensor, bias: Tensor, norm_weight: float, keep: Tensor | None, learned: bool, in_c: bool,
              causal: bool, kept: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    form = Form(rows, scale, bias, norm_weight, keep, learned)
    with as_given(rows):
        return tuple(ENGINES[in_c, causal].backward(x, y, v, form, Kept(*kept), grad, grad_logsum))


@_forward.register_fake
def _(x, y, v, rows, scale, bias, norm_weight, keep, learned, in_c, causal):
    return tuple(ENGINES[in_c, causal].empty(x, v, rows))


@_backward.register_fake
def _(grad, grad_logsum, x, y, v, *rest):
    return tuple(Gradients.empty(x, y, v, Form(*rest[:6])))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.norm_weight, keep, ctx.learned, ctx.in_c, ctx.causal = inputs
    ctx.save_for_backward(*tensors, keep, *output)
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad, grad_logsum, *_):
    x, y, v, rows, scale, bias, keep, *kept = ctx.saved_tensors
    grad = torch.zeros_like(kept[0]) if grad is None else grad
    check_gradient(grad)
    form = Form(rows, scale, bias, ctx.norm_weight, keep, ctx.learned)
    grads = Gradients(*_backward(grad, grad_logsum, x, y, v, *form, ctx.in_c, ctx.causal, kept))
    return *grads[:3], *(grads.of_map(form) if form.learned else (None,) * 3), *(None,) * 5


_forward.register_autograd(_gradients, setup_context=_save)
