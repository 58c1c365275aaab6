"""Near-far attention: near and heavy keys exactly, all others by cells, in one softmax; what that takes: __init__.py.

Legend: B batch, H query heads, Hkv key heads, G = H / Hkv, Z = B Hkv, L queries x, S keys y, d, values v (., S, dv); N
blocks of b tokens, n heavy keys, K cells. A query of block t sees

- the keys of blocks t - 1, t and t + 1 (causal: those of t - 1, and of its own up to itself) exactly: near;
- the heavy keys, whose score is largest, exactly: causal, those among the blocks up to t - 2;
- causal, `sizes.open` others exactly, those of the largest logits, each query its own: opened;
- a cell's other keys as one key, their mean, whose weight and value are sums over those that are far from t.

Each unmasked key is in exactly one of these sets of each query. The choice of the sets, and what keys are measured
by (crt_exp/nearfar/choice.py), carry no gradient, all sums do. Derived here.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.baselines import VECTOR, exact_attention, fused_attention
from crt_exp.attention.checks import (
    all_finite,
    check_entries,
    check_gradient,
    check_inputs,
    compute_dtype,
    transformed,
)
from crt_exp.attention.padding import Shift, first_kept
from crt_exp.attention.compiling import end_graph, left_open, outside_graphs
from crt_exp.features.base import can_ask
from crt_exp.nearfar.both import Both
from crt_exp.nearfar.choice import KeyMetric, Sizes
from crt_exp.nearfar.engine import native
from crt_exp.nearfar.exact import exactly
from crt_exp.nearfar.recall import RecallNearFar, renewals
from crt_exp.samplers.precision import as_given
from crt_exp.samplers.noise import transforming

PART = 2**15     # keys of the heads that are computed together: larger temporaries are slower, memory being fresh
KEPT = 2**17     # keys of all heads of which a call keeps what its backward pass needs; of more, only the sets
# Blocks, renewals and parts are unrolled, and their numbers depend on the length: where it is left open, a graph takes
# minutes for each.
LEFT_OPEN = ("causal near-far attention has no graph for lengths that are left open: compile it with dynamic=False, or "
             "without fullgraph=True, or take favorpp")


class Result(NamedTuple):
    out: Tensor          # (B, H, L, dv)
    predicted: Tensor    # (B, Hkv): mean far weight of a query times (sum_k N_k tau_k)^(1/2), N_k as parts of 1


def near_far_attention(x: Tensor, y: Tensor, v: Tensor, sizes: Sizes, *, causal: bool = False,
                       cross: bool = False, metric: KeyMetric | None = None, key_mask: Tensor | None = None,
                       factor: float = 1.0) -> Result:
    """Softmax attention of queries x (B,H,L,d) to keys y (B,Hkv,S,d), v (B,Hkv,S,dv) with logits x.y, approximated; of
    factor x and factor y, where a factor is given.

    Exact where no more than `sizes.exact_until` keys count. Else, in both directions: measure, heavy keys and cells of
    the sequence itself. `cross`: queries are of another sequence, so that none is near: heavy keys and cells alone,
    with the moments of earlier queries in `metric` (B Hkv, ...), or without one as if queries were as large as the
    keys. causal: query i stands at i + S - L; what is known comes from the sequence's own past (recall.py), of which
    each query reads `sizes.open` keys. key_mask (B, S), True = keep; a query that sees no key gets 0. No more heavy
    keys and cells than keys are taken, and a length that the block does not divide is padded; blocks are counted from
    the first real token of each row. Also exact where block >= S, heavy >= S, or every key is the only one of its cell.
    Differentiable in x, y and v, sets and measure constant.

    Time O(L (b + n + K) (d + dv)), causal also O(L S d) in products of 8 bits; memory
    O(L (b + n + K + d + dv) + L / b K dv) of a part of the heads at a time: nothing of size L x S. Raises
    ValueError where shapes or mask do not fit, and where queries or keys are not finite (CPU).
    """
    check_inputs(x, y, v, None, (), causal, key_mask)
    check_sizes(sizes, causal)
    _check(x, y, causal, cross)
    own, until = not cross and x.shape[2] == y.shape[2], sizes.exact_until
    exact = partial(_exactly, causal=causal, factor=factor, own=own)
    if y.shape[2] <= (renewals(sizes, 0)[0] if causal else until):
        return exact(x, y, v, key_mask)
    if causal and left_open(x, y):
        end_graph(LEFT_OPEN)
        return _outside(x, y, v, sizes, causal=causal, cross=cross, key_mask=key_mask, factor=factor)
    x = _clean(x, key_mask) if own else x
    if causal:
        return _by_first_token(RecallNearFar(sizes), x, y, v, key_mask, factor)
    rest = partial(_from_first_token, Both(sizes, cross, metric), factor=factor)
    if key_mask is None or not until:
        return rest(x, y, v, key_mask)
    return by_rows(key_mask.sum(1) <= until, exact, rest, x, y, v, key_mask)


_outside = outside_graphs(near_far_attention)


def by_rows(which: Tensor, first: Callable[..., Result], second: Callable[..., Result], *inputs: Tensor) -> Result:
    """What `first` gives for the rows of a batch that `which` (B,) says, and `second` for the others: no row's outputs
    depend on the others."""
    if torch.compiler.is_compiling() or transforming():
        parts = (call(*inputs) for call in (first, second))
        return Result(*(torch.where(which.view(-1, *[1] * (a.ndim - 1)), a, b) for a, b in zip(*parts)))
    if which.all() or not which.any():
        return (first if which.any() else second)(*inputs)
    parts = [call(*(t[rows] for t in inputs)) for rows, call in ((which, first), (~which, second))]
    order = torch.cat([rows.nonzero().squeeze(1) for rows in (which, ~which)]).argsort()
    return Result(*(torch.cat(both)[order] for both in zip(*parts)))


def _clean(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Queries of one sequence with its keys, whose padding may hold NaN."""
    return x if key_mask is None else torch.where(key_mask[:, None, :, None] | x.isfinite(), x, 0.0)


def _exactly(x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None, causal: bool, factor: float,
             own: bool) -> Result:
    B, Hkv = y.shape[:2]
    if transformed(x, y, v):
        x = _clean(x, key_mask) if own else x
        keep = None if key_mask is None else key_mask.repeat_interleave(Hkv, 0)
        heads = (t.flatten(0, 1) for t in (x.unflatten(1, (Hkv, -1)), y, v))
        out = exactly(*heads, keep, factor**2, causal).unflatten(0, (B, Hkv)).flatten(1, 2)
    else:
        out = _fused(x, y, v, key_mask, causal, factor**2, own)
    return Result(out, out.new_zeros(B, Hkv))


def _fused(x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None, causal: bool, scale: float, own: bool) -> Tensor:
    """Padding that holds NaN, which is seldom, shows in the result, where that may be asked: then it is left out. The
    kernel for few keys hides it."""
    few = y.shape[2] < VECTOR
    if key_mask is None or can_ask(x):
        out = fused_attention(x, y, v, causal, key_mask, scale)
        if all_finite(out) and (not few or all_finite(y)):
            return out
    if key_mask is not None:
        x, y = _clean(x, key_mask) if own else x, torch.where(key_mask[:, None, :, None], y, 0.0)
        out = exact_attention(x, y, v, causal=causal, key_mask=key_mask, scale=scale)
    check_entries(out)
    if few:
        check_entries(y)
    return out


def _from_first_token(call: Both, x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None,
                      factor: float) -> Result:
    """Blocks are counted from the first real token of each row."""
    shift = None if call.cross else Shift.of(key_mask, call.sizes.block)
    if shift is None:
        return _result(call, x, y, v, key_mask, factor)
    out, predicted = _result(call, *map(shift.there, (x, y, v)), shift.mask(key_mask), factor)
    return Result(shift.back(out), predicted)


def _by_first_token(call: RecallNearFar, x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None,
                    factor: float) -> Result:
    """Rows of a batch by the place of their first real token, from which renewals are counted."""
    if key_mask is None:
        return _result(call, x, y, v, None, factor)
    if torch.compiler.is_compiling() or transforming():
        raise ValueError("causal near-far attention counts its renewals from the first real token of each row, which "
                         "torch.compile, torch.export and torch.func cannot follow: leave the mask out, or take "
                         "favorpp")
    firsts, before = first_kept(key_mask), y.shape[2] - x.shape[2]
    if not bool(firsts.any()):
        return _result(call, x, y, v, key_mask, factor)
    parts, order = [], []
    for first in firsts.unique().tolist():
        rows = (firsts == first).nonzero().squeeze(1)
        lead = max(0, first - before)
        own = (x[rows, :, lead:], y[rows, :, first:], v[rows, :, first:], key_mask[rows, first:])
        result = _result(call, *own, factor)
        none = v.new_zeros(len(rows), x.shape[1], lead, v.shape[3])
        parts.append(Result(torch.cat([none, result.out], 2), result.predicted))
        order.append(rows)
    back = torch.cat(order).argsort()
    return Result(*(torch.cat(both)[back] for both in zip(*parts)))


def _result(call: Both | RecallNearFar, x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None,
            factor: float) -> Result:
    B, Hkv = y.shape[:2]
    x = x.unflatten(1, (Hkv, x.shape[1] // Hkv))
    tensors = tuple(t.flatten(0, 1) for t in (x, y, v))                                     # (Z, G, L, d), (Z, S, .)
    if compute_dtype(*tensors) == torch.float64:
        tensors = tuple(t.double() for t in tensors)
    keep = None if key_mask is None else key_mask.repeat_interleave(Hkv, 0)
    if native.applies(*tensors) and torch.get_num_threads() <= native.THREADS * len(y) * Hkv:
        call = replace(call, factor=factor, native=True)
    elif factor != 1:
        tensors = tensors[0] * factor, tensors[1] * factor, tensors[2]
    with as_given(x):
        out, predicted = _computed(call, *tensors, keep)
    out = out.unflatten(0, (B, Hkv)).flatten(1, 2)
    if key_mask is not None:  # of a query without keys what was gathered means nothing
        causal = not isinstance(call, Both)
        seen = key_mask.cumsum(-1)[:, None, y.shape[2] - x.shape[3]:] if causal else key_mask.any(-1)[:, None, None]
        out = torch.where((seen > 0).unsqueeze(-1), out, 0.0)
    return Result(out, predicted.view(B, Hkv))


def check_sizes(sizes: Sizes, causal: bool) -> None:
    for name, least in (("block", 1), ("heavy", 0), ("cells", 1), ("open", int(causal)), ("exact_until", 0)):
        if getattr(sizes, name) < least:
            raise ValueError(f"{name} = {getattr(sizes, name)}: it must be at least {least}")


def _check(x: Tensor, y: Tensor, causal: bool, cross: bool) -> None:
    if isinstance(y.shape[2], torch.SymInt) and torch.compiler.is_exporting():
        raise ValueError("near-far attention cannot be exported with a length that is left open, on which its blocks, "
                         "heavy keys and cells depend: export it for each length, or take favorpp")
    if not causal and not cross and x.shape[2] != y.shape[2]:
        raise ValueError(f"near-far attention of {x.shape[2]} queries to {y.shape[2]} keys: one sequence needs as many "
                         "of both; give cross=True where queries and keys are of different ones")


# ---- parts of the heads ----------------------------------------------------------------------------------------------


def _computed(call: Both | RecallNearFar, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None
              ) -> tuple[Tensor, Tensor]:
    """A part of the heads at a time."""
    (Z, S), size = y.shape[:2], max(1, PART // y.shape[1])
    if call.native or torch.compiler.is_compiling() or transformed(x, y, v):
        size = Z
    elif size < Z and Z * S > KEPT:
        return _InParts.apply(call, keep, size, x, y, v)
    results = []
    for i, part in enumerate(zip(*(t.split(size) for t in (x, y, v)))):
        rows = slice(i * size, min(i * size + size, Z))
        here = None if keep is None else keep[rows]
        results.append(call.attend(*part, here, call.choose(*part[:2], here, rows)))
    out, predicted = results[0] if len(results) == 1 else map(torch.cat, zip(*results))
    return out.to(v.dtype), predicted


class _InParts(torch.autograd.Function):
    """Keeps the sets alone, and computes each part again in the backward pass."""

    @staticmethod
    def forward(ctx, call, keep, size, x, y, v):
        out, predicted, ctx.parts = v.new_empty(*x.shape[:3], v.shape[-1]), [], []
        for start in range(0, len(y), size):
            rows = slice(start, min(start + size, len(y)))
            here = None if keep is None else keep[rows]
            chosen = call.choose(x[rows], y[rows], here, rows)
            out[rows], each = call.attend(x[rows], y[rows], v[rows], here, chosen)
            predicted.append(each)
            ctx.parts.append((rows, here, chosen))
        ctx.call, predicted = call, torch.cat(predicted)
        ctx.save_for_backward(x, y, v)
        ctx.mark_non_differentiable(predicted)
        return out, predicted

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        check_gradient(grad)
        inputs = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in inputs]
        for rows, keep, chosen in ctx.parts:
            part = [t[rows].detach().requires_grad_() for t in inputs]
            _write_gradients(ctx.call, part, keep, chosen, grad[rows], [total[rows] for total in grads])
        return None, None, None, *grads


def _write_gradients(call: Both | RecallNearFar, inputs: list[Tensor], keep: Tensor | None, chosen, grad: Tensor,
                     totals: list[Tensor]) -> None:
    """Those of one part; what they need is gone before the next one."""
    with torch.enable_grad(), as_given(grad):
        out, _ = call.attend(*inputs, keep, chosen)
        gradients = torch.autograd.grad(out, inputs, grad.to(out.dtype))
    for total, g in zip(totals, gradients):
        total.copy_(g)
