"""Attention with feature maps: Y = diag(A 1)^-1 A V with A = phi_q(x) phi_k(y)^T.

Positive exponential maps use engines in C (CPUs) or Triton (GPUs), behind one torch operator that torch.compile does
not trace. Everything else uses chunks of plain operations; engines/selection.py chooses.

Notation: B batch, H query heads, Hkv key heads, L queries, S keys, d, values of dimension dv, M features.
"""

from typing import Any

import torch
from torch import Tensor

from crt_exp.attention.checks import (
    check_gradient,
    check_inputs,
    finite,
    repeat_heads,
    without_padding,
)
from crt_exp.attention.compiled import compiled
from crt_exp.attention.engines import PLAIN, TRITON, C, Form, Gradients, Saved
from crt_exp.attention.engines.chunks import chunked_partial
from crt_exp.attention.engines.selection import choose_engine, find_engine
from crt_exp.attention.partials import POLICIES, DenominatorCount, Partial, finish, with_ones
from crt_exp.features.base import FeatureMap
from crt_exp.samplers.noise import at_least_float32, leaves, match_float64


def attention(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    phi: FeatureMap,
    noise,
    params=(),
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    denominator: str = "none",
    normalize: bool = True,
    counter: DenominatorCount | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Estimate softmax attention with random features, in linear time and memory.

    The logits are scale^2 x.y. For scaled dot products pass x = d^(-1/4) q and y = d^(-1/4) k, or q and k with scale =
    d^(-1/4), which saves a pass over both.

    Time is O((L + S) M (d + dv)). Memory is O(L + M dv) beyond inputs and outputs, in the backward pass too.
    Positive exponential maps have closed-form gradients. Autograd recomputes the chunks of other maps where their
    features are large (causal: from a state of M dv numbers for every 512 tokens).
    torch.func transforms, forward-mode differentiation and torch.export use plain operations with O(L M) memory.
    Second derivatives by autograd alone exist only where plain operations compute (see engines/selection.py).
    Half precision is computed in float32; on GPUs, products of half precision have float32 sums. Nothing is added to
    features or denominators.
    With one projection the feature of a query cancels, and its gradient is zero up to rounding.

    Args:
        x: queries (B,H,L,d).
        y: keys (B,Hkv,S,d). Hkv divides H, and consecutive query heads share a key head.
        v: values (B,Hkv,S,dv).
        phi: feature map.
        noise: random projections, a Noise of batch (), (1,) or (H,); a tuple for Sum and Product.
        params: result of `phi.fit` on the scaled vectors; leading dimensions broadcast to (B, H).
        causal: query i sees keys j <= i + S - L.
        key_mask: (B, S), True for keys to keep. Masked keys may hold any value.
        denominator: treatment of the denominators of signed maps. "none" leaves them, "clamp" keeps them away from 0
            (at 1e-6 of the sum of absolute values), "abs" takes absolute values.
        normalize: False returns the numerator phi_q(x) phi_k(y)^T v.
        counter: counts non-positive denominators. Without a counter a warning reports them (CPU only).
        scale: factor of x and y.

    Returns:
        Outputs (B,H,L,dv), 0 for queries that see no key. They are differentiable in x, y and v, and in projections and
        parameters that require a gradient.

    Raises:
        ValueError: shapes, mask, projections or parameters do not fit, or queries or keys are not finite. The latter is
            checked on CPUs only, because other devices would have to wait for the result.

    >>> from crt_exp.features import PosRF
    >>> from crt_exp.samplers import orthogonal
    >>> generator = torch.Generator().manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 2, 50, 16, generator=generator)
    >>> out = attention(q, k, v, PosRF(), orthogonal(256, 16, generator), scale=16**-0.25)
    >>> exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    >>> bool((out - exact).norm() < exact.norm())
    True
    """
    if denominator not in POLICIES:
        raise ValueError(f"denominator={denominator!r}: expected one of {', '.join(POLICIES)}")
    dtype = check_inputs(x, y, v, noise, params, causal, key_mask)
    if dtype == torch.float64:
        noise = match_float64(noise, dtype)
    out_dtype = v.dtype
    engine = choose_engine(phi, x, y, v, noise, params) if normalize else PLAIN
    groups = 1  # of query heads that became one longer set of queries
    if x.shape[1] != y.shape[1] and not _serves_groups(engine, phi):
        if not causal and _shared_by_heads(noise, params):
            groups = x.shape[1] // y.shape[1]
            x = x.unflatten(1, (-1, groups)).flatten(2, 3)
        y = repeat_heads(y, x.shape[1])
        v = repeat_heads(v, x.shape[1])
    if engine == PLAIN:
        if scale != 1:
            x = at_least_float32(x) * scale
            y = at_least_float32(y) * scale
        modulus = denominator == "clamp"
        rows = chunked_partial(x, y, v, phi, noise, params, causal, key_mask, modulus)
        count = counter or DenominatorCount()
        count.add(rows)
        if counter is None and normalize and not torch.compiler.is_compiling():
            count.warn()
        out = finish(rows, denominator, normalize)
    else:
        if engine == C:
            x, y, v = x.float(), y.float(), v.float()
        x, y, form = positive_form(x, y, phi, noise, params, key_mask, scale, dtype)
        out = torch.ops.crt_exp.attention(x, y, v, *form, engine, causal)[0]
    if groups > 1:
        out = out.unflatten(2, (groups, -1)).flatten(1, 2)
    return out.to(out_dtype)


def partial_attention(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    phi: FeatureMap,
    noise,
    params=(),
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    modulus: bool = False,
    scale: float = 1.0,
) -> Partial:
    """Return the partial sums of attention to a set of keys.

    The Partial has one row for each query, (B,H,L,.). `merge` adds the partials of disjoint sets of keys. `finish` and
    `.output` divide by the denominator, and `.logsum` is its log in nats. Outputs and log-sums are differentiable like
    the outputs of `attention`, which also has the other arguments and the errors.

    Args:
        modulus: also compute the sums of absolute values that `finish(..., "clamp")` needs.

    >>> from crt_exp.features import PosRF
    >>> from crt_exp.samplers import iid
    >>> x, y, v = torch.randn(3, 1, 2, 6, 4)
    >>> method = (PosRF(), iid(8, 4))
    >>> out = partial_attention(x, y, v, *method).output
    >>> torch.allclose(out, attention(x, y, v, *method), atol=1e-6)
    True
    """
    dtype = check_inputs(x, y, v, noise, params, causal, key_mask)
    if dtype == torch.float64:
        noise = match_float64(noise, dtype)
    engine = PLAIN if modulus else choose_engine(phi, x, y, v, noise, params)
    if not _serves_groups(engine, phi):
        y = repeat_heads(y, x.shape[1])
        v = repeat_heads(v, x.shape[1])
    if engine == PLAIN:
        x = at_least_float32(x) * scale
        y = at_least_float32(y) * scale
        return chunked_partial(x, y, v, phi, noise, params, causal, key_mask, modulus)
    if engine == C:
        x, y, v = x.float(), y.float(), v.float()
    x, y, form = positive_form(x, y, phi, noise, params, key_mask, scale, dtype)
    out, logsum, *_ = torch.ops.crt_exp.attention(x, y, v, *form, engine, causal)
    logsum = find_engine(engine, causal).unit * logsum
    logsum = logsum - form.norm_weight * x.to(dtype).square().sum(-1)
    if key_mask is not None:
        seen = key_mask.any(-1, keepdim=True)
        if causal:
            seen = key_mask.cumsum(-1)[:, y.shape[2] - x.shape[2] :] > 0
        logsum = torch.where(seen.unsqueeze(1), logsum, -torch.inf)
    top = logsum.detach().unsqueeze(-1)
    # 1, or 0 in rows without keys; carries the gradient of the log-sum
    weight = torch.exp(logsum.unsqueeze(-1) - finite(top))
    return Partial(weight * with_ones(out.to(dtype)), top)


def _serves_groups(engine: str, phi: FeatureMap) -> bool:
    """Return whether an engine reads the keys of several query heads without copies."""
    return engine == TRITON and not phi.transforms_inputs


def _shared_by_heads(noise, params) -> bool:
    """Return whether all heads have the same projections and parameters."""
    batches = [part.batch for part in leaves(noise)]
    batches += [part.shape[:-2] for part in leaves(params)]
    return all(not batch or batch[-1] == 1 for batch in batches)


def positive_form(
    x: Tensor,
    y: Tensor,
    phi: Any,
    noise,
    params,
    keep: Tensor | None,
    factor: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Form]:
    """Return queries and keys, with equal numbers of heads, and the exponent of a `PositiveExponential`.

    The factor of x and y enters the exponent: log phi = (factor scale) rows.x + bias - (factor^2 norm_weight) |x|^2.
    """
    remaining = factor
    if phi.transforms_inputs:
        x, remaining = phi.transform_inputs(x, params, factor=factor)
    rows, scale, bias = compiled(exponent, x.device)(phi, noise, params, remaining, dtype)
    rows, scale, bias = (t.to(x.device) for t in (rows, scale, bias))
    parts = (rows, scale, bias, *leaves(params))
    learned = torch.is_grad_enabled() and any(t.requires_grad for t in parts)
    if learned:  # NaN of padding would reach the gradients of parameters
        (y,) = without_padding(keep, y)
    if phi.transforms_inputs:
        y, _ = phi.transform_inputs(y, params, key=True, factor=factor)
    norm_weight = phi.norm_weight * remaining**2
    return x, y, Form(rows, scale, bias, norm_weight, keep, learned)


def exponent(
    phi: Any, noise, params, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows (., ., M, d), scale (., ., 1, 1) and bias (., ., M) of the features of factor * x."""
    rows, scale, bias = phi.exponent(noise, params)
    scale = rows.new_full((1, 1), factor) if scale is None else scale * factor
    rows, scale, bias = (t.to(dtype)[(None,) * (4 - t.ndim)] for t in (rows, scale, bias))
    return rows, scale, bias.squeeze(-2)


@torch.no_grad()
def positive_state(
    y: Tensor,
    v: Tensor,
    phi: FeatureMap,
    noise,
    params,
    keep: Tensor | None,
    dtype: torch.dtype,
    engine: str,
) -> tuple[Tensor, Tensor]:
    """Summarize keys y (B,H,S,d) and values v (B,H,S,dv) for decoding.

    Returns exp(-top) sum_j [v_j, 1] phi(y_j), (B,H,dv+1,M), and top (B,H,M).
    """
    _, y, form = positive_form(y, y, phi, noise, params, keep, 1.0, dtype)
    sums, top = find_engine(engine, causal=False).sum_keys(y, v, form)
    if keep is not None:
        top = top.masked_fill(~keep.any(-1)[:, None, None], -torch.inf)
    return sums, top


@torch.library.custom_op("crt_exp::attention", mutates_args=())
def _forward(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    rows: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: float,
    keep: Tensor | None,
    learned: bool,
    engine: str,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    form = Form(rows, scale, bias, norm_weight, keep, learned)
    saved = find_engine(engine, causal).forward(x, y, v, form)
    return saved.out, saved.logsum, saved.states, saved.logs, saved.levels


@torch.library.custom_op("crt_exp::attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    grad_logsum: Tensor | None,
    x: Tensor,
    y: Tensor,
    v: Tensor,
    rows: Tensor,
    scale: Tensor,
    bias: Tensor,
    norm_weight: float,
    keep: Tensor | None,
    learned: bool,
    engine: str,
    causal: bool,
    saved: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    form = Form(rows, scale, bias, norm_weight, keep, learned)
    inputs = (x, y, v, form, Saved(*saved), grad, grad_logsum)
    grads = find_engine(engine, causal).backward(*inputs)
    return grads.x, grads.y, grads.v, grads.weights, grads.bias


@_forward.register_fake
def _(x, y, v, rows, scale, bias, norm_weight, keep, learned, engine, causal):
    form = Form(rows, scale, bias, norm_weight, keep, learned)
    return tuple(find_engine(engine, causal).empty(x, y, v, form))


@_backward.register_fake
def _(
    grad,
    grad_logsum,
    x,
    y,
    v,
    rows,
    scale,
    bias,
    norm_weight,
    keep,
    learned,
    engine,
    causal,
    saved,
):
    return tuple(Gradients.empty(x, y, v, rows, learned))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.norm_weight, keep, ctx.learned, ctx.engine, ctx.causal = inputs
    ctx.save_for_backward(*tensors, keep, *output)
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad, grad_logsum, *_):
    x, y, v, rows, scale, bias, keep, *saved = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(Saved(*saved).out)
    check_gradient(grad)
    form = Form(rows, scale, bias, ctx.norm_weight, keep, ctx.learned)
    grads = Gradients(*_backward(grad, grad_logsum, x, y, v, *form, ctx.engine, ctx.causal, saved))
    of_map = grads.of_map(form) if form.learned else (None, None, None)
    of_options = (None,) * 5
    return grads.x, grads.y, grads.v, *of_map, *of_options


_forward.register_autograd(_gradients, setup_context=_save)
