"""Attention with any feature map, chunk by chunk: functions of autograd around the work of `chunks`, which the
backward pass computes again.

`chunked_attention` gives outputs, `chunked_partial` what goes into them.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from crt_exp.attention.checks import check_gradient, learning, transformed
from crt_exp.attention.engines.chunks import Call, KeptStates, Rows, plain_attention
from crt_exp.attention.partials import Partial
from crt_exp.samplers.nested_tensors import leaves
from crt_exp.samplers.precision import as_given


def chunked_attention(x: Tensor, y: Tensor, v: Tensor, call: Call) -> Tensor:
    """Attention of checked arguments, with as many key heads as query heads; the result of the call is Outputs."""
    if _plain(x, y, v, call):
        return call.result.of(plain_attention(x, y, v, call.whole()))[0].to(v.dtype)
    if learning(call.noise, call.params):
        return call.result.of(_learned(x, y, v, call))[0].to(v.dtype)
    return _Chunked.apply(x, y, v, call)[0]


def chunked_partial(x: Tensor, y: Tensor, v: Tensor, call: Call) -> Partial:
    """What goes into it; the result of the call is Rows."""
    if _plain(x, y, v, call):
        return plain_attention(x, y, v, call.whole())
    if learning(call.noise, call.params):
        return _learned(x, y, v, call)
    return Partial(*_Chunked.apply(x, y, v, call))


def _learned(x: Tensor, y: Tensor, v: Tensor, call: Call) -> Partial:
    """Of a map that is trained. What its noise keeps is computed before: chunks that are computed again find it."""
    for noise in leaves(call.noise):
        noise.sq_norm  # noqa: B018 (a property that is kept)
    return plain_attention(x, y, v, call.whole(call.large(x, y)))


def _plain(x: Tensor, y: Tensor, v: Tensor, call: Call) -> bool:
    """Whether torch has to follow every operation."""
    if torch.jit.is_tracing():
        raise ValueError(f"torch.jit.trace cannot record attention with {type(call.phi).__name__}: it would keep the "
                         "masks and statistics of this call. Use torch.export.export, or a positive map such as "
                         "OPRF")
    return torch.compiler.is_compiling() or transformed(x, y, v)


def plain_gradients(function: Callable, inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> list[Tensor | None]:
    """Gradients to the inputs of a function in plain operations, given those to its results: they can be differentiated
    themselves, and taken for many `grads` at once."""
    for grad in grads:
        check_gradient(grad)
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [t.view_as(t) for t in inputs]  # three nodes of the graph, also where they are one tensor
        results = function(*inputs)
    wanted = [t for t in inputs if t.requires_grad]
    gradients = iter(torch.autograd.grad(results, wanted, grads, create_graph=again, materialize_grads=True))
    return [next(gradients) if t.requires_grad else None for t in inputs]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, v, call):
        results, kept = call.result.empty(x, y, v), []
        with as_given(x):
            for rows, part in call.parts(x):
                run = part.causal_forward if call.causal else part.forward
                kept.append(run(x[rows], y[rows], v[rows], [t[rows] for t in results]))
        _save(ctx, (x, y, v), [state for k in kept for state in k.states])
        ctx.call, ctx.kept = replace(call, counter=None), [(len(k.states), k.lengths) for k in kept]
        ctx.mark_non_differentiable(*results[2:])
        return results

    @staticmethod
    def backward(ctx, *given):
        (x, y, v), states = _saved(ctx, 3)
        call = ctx.call
        given = given[:2] if isinstance(call.result, Rows) else given
        for grad in given:
            check_gradient(grad)
        if torch.is_grad_enabled() or transformed(*given):
            def again(x: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, ...]:
                rows = call.result.differentiable(plain_attention(x, y, v, call.whole()))
                return tuple(t.to(g.dtype) for t, g in zip(rows, given))

            return *plain_gradients(again, (x, y, v), given), None
        states, grads = iter(states), [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (x, y, v)]
        with as_given(x):
            for (rows, part), (count, lengths) in zip(call.parts(x), ctx.kept):
                kept = KeptStates([next(states) for _ in range(count)], lengths)
                run = part.causal_backward if call.causal else part.backward
                run(x[rows], y[rows], v[rows], [t[rows] for t in given], kept, [t[rows] for t in grads])
        return *grads, None


def _save(ctx, inputs: tuple[Tensor, ...], states: list[Partial | None]) -> None:
    ctx.save_for_backward(*inputs, *(t for state in states for t in state or (None,) * 4))


def _saved(ctx, inputs: int) -> tuple[tuple[Tensor, ...], list[Partial | None]]:
    tensors = ctx.saved_tensors
    flat = tensors[inputs:]
    return tensors[:inputs], [Partial(*flat[i:i + 4]) if flat[i] is not None else None for i in range(0, len(flat), 4)]
