"""Attention with any feature map, chunk by chunk: autograd on the chunk, recomputed in the backward pass.

Legend: B, H, L queries, S keys, M features, C tokens of a chunk. Works on `Features` and `Partial` alone, so that every map that
gives phi_q and phi_k is served: signed, trigonometric, discrete, sums and products. Kept for the backward pass: the inputs and
states of M (dv + 1) numbers (causal: one for every KEPT chunks); nothing of size L x M.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from crt_exp.attention.checks import check_gradient, check_result, compute_dtype, transformed
from crt_exp.attention.partials import (
    DenominatorCount,
    Partial,
    ScaledKeys,
    finish,
    merge,
    read,
    scale_keys,
    summarise,
    underflowed,
    within,
)
from crt_exp.features.base import Bound, FeatureMap
from crt_exp.nested import Nested, leaves, mapped

CHUNK = 128                      # tokens of a chunk
PIECES = (CHUNK, 32, 8, 1)       # tokens of the pieces of a causal chunk, shorter where a row underflows
KEPT = 8                         # causal chunks for each state that is kept
ELEMENTS = 2**21                 # of one feature tensor, at most, by taking fewer batch entries at a time


@dataclass(frozen=True)
class Call:
    """Everything of one call but the differentiable tensors; `keep` is the key mask (B, S)."""

    phi: FeatureMap
    noise: Any
    params: Any
    causal: bool = False
    keep: Tensor | None = None
    policy: str = "none"
    normalize: bool = True
    counter: DenominatorCount | None = None

    def whole(self) -> "Part":
        """The whole batch at once."""
        return Part(self, self.phi.bind(self.noise, self.params), self.keep)

    def parts(self, x: Tensor) -> Iterator[tuple[slice, "Part"]]:
        """Ranges of the batch, each with its own features."""
        B, H, L, d = x.shape
        at_once = max(1, ELEMENTS // (H * min(CHUNK, L) * _width(self.phi, self.noise, d))) if _batch_free(self.noise) else B
        for start in range(0, B, at_once):
            rows = slice(start, min(start + at_once, B))
            bound = self.phi.bind(self.noise, _take(self.params, rows, B))
            yield rows, Part(self, bound, None if self.keep is None else self.keep[rows])


def chunked_attention(x: Tensor, y: Tensor, v: Tensor, call: Call) -> Tensor:
    """Attention of checked arguments, with as many key heads as query heads."""
    if torch.jit.is_tracing():
        raise ValueError(f"torch.jit.trace cannot record attention with {type(call.phi).__name__}: it would keep the masks and "
                         "statistics of this call. Use torch.export.export with dynamic_shapes, or a positive map such as OPRF")
    if torch.compiler.is_compiling() or transformed(x, y, v):
        return plain_attention(x, y, v, call.whole())
    return _Chunked.apply(x, y, v, call)


def plain_attention(x: Tensor, y: Tensor, v: Tensor, part: "Part") -> Tensor:
    """The same in plain operations, which all transforms of torch follow, to any order: autograd through all chunks, whose
    features it may keep. torch.compile cannot look into what depends on numbers: there without the check of inputs and without
    shorter pieces where a row underflows."""
    offset, sizes = y.shape[2] - x.shape[2], PIECES if part.call.causal and not torch.compiler.is_compiling() else (CHUNK,)
    with torch.autocast(x.device.type, enabled=False):
        for size in sizes:
            rows = list(part.gathered(x, y, v, size))
            if size == sizes[-1] or not underflowed(rows, part.seen(offset)):
                break
        return torch.cat([part.checked(r) for r in rows], 2).to(v.dtype)


def plain_gradients(x: Tensor, y: Tensor, v: Tensor, grad: Tensor, part: "Part") -> list[Tensor | None]:
    """Those of `plain_attention`: they can be differentiated themselves, and taken for many `grad` at once."""
    check_gradient(grad)
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [t.view_as(t) for t in (x, y, v)]  # three nodes of the graph, also where they are one tensor
        out = plain_attention(*inputs, part)
    wanted = [t for t in inputs if t.requires_grad]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=again))
    return [next(found) if t.requires_grad else None for t in inputs]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, v, call):
        out, states, lengths = v.new_empty(*x.shape[:3], v.shape[3]), [], []
        with torch.autocast(x.device.type, enabled=False):
            for rows, part in call.parts(x):
                run = part.causal_forward if call.causal else part.forward
                kept, taken = run(x[rows], y[rows], v[rows], out[rows])
                states.append(kept)
                lengths.append(taken)
        ctx.save_for_backward(x, y, v, *(t for kept in states for s in kept for t in s or (None,) * 4))
        ctx.call, ctx.lengths, ctx.counts = replace(call, counter=None), lengths, [len(kept) for kept in states]
        return out

    @staticmethod
    def backward(ctx, grad):
        x, y, v, *flat = ctx.saved_tensors
        check_gradient(grad)
        if torch.is_grad_enabled() or transformed(grad):
            return *plain_gradients(x, y, v, grad, ctx.call.whole()), None
        states = iter(Partial(*flat[i:i + 4]) if flat[i] is not None else None for i in range(0, len(flat), 4))
        grads = tuple(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (x, y, v))
        with torch.autocast(x.device.type, enabled=False):
            for (rows, part), count, lengths in zip(ctx.call.parts(x), ctx.counts, ctx.lengths):
                run = part.causal_backward if ctx.call.causal else part.backward
                kept = [next(states) for _ in range(count)]
                run(*(t[rows] for t in (x, y, v, grad)), kept, lengths, [t[rows] for t in grads])
        return *grads, None


@dataclass(frozen=True)
class Part:
    """The work on a range of the batch. x (b,H,L,d), y (b,H,S,d), v (b,H,S,dv), keep (b,S)."""

    call: Call
    bound: Bound
    keep: Tensor | None

    @property
    def modulus(self) -> bool:
        return self.call.policy == "clamp"

    # One chunk, differentiable in its tensors. `tokens` says which keys it holds.

    def keys(self, y: Tensor, v: Tensor, tokens: slice, top: Tensor | None = None) -> tuple[ScaledKeys, Tensor]:
        dtype = compute_dtype(y, v)
        y, v = y.to(dtype), v.to(dtype)
        if self.keep is None:
            return scale_keys(self.bound.phi_k(y), None, top), v
        keep = self.keep[:, None, tokens]
        y, v = (torch.where(keep[..., None], t, 0.0) for t in (y, v))  # padding may hold NaN
        return scale_keys(self.bound.phi_k(y), keep, top), v

    def summary(self, y: Tensor, v: Tensor, tokens: slice, top: Tensor | None = None) -> Partial:
        return summarise(*self.keys(y, v, tokens, top), self.modulus)

    def read(self, x: Tensor, state: Partial) -> Partial:
        return read(self.bound.phi_q(x.to(state.numerator.dtype)), state)

    def step(self, x: Tensor, y: Tensor, v: Tensor, tokens: slice, state: Partial | None) -> tuple[Partial, Partial]:
        """What the queries of a chunk gather from the state and from each other's keys, and the state after the chunk."""
        keys, v = self.keys(y, v, tokens)
        fq = self.bound.phi_q(x.to(v.dtype))
        own = within(fq, keys, v, self.modulus)
        rows = own if state is None else merge(read(fq, state), own)
        return rows, merge(state, summarise(keys, v, self.modulus))

    def finish(self, rows: Partial) -> Tensor:
        return finish(rows, self.call.policy, self.call.normalize)

    def checked(self, rows: Partial) -> Tensor:
        """The same, once it is known that the inputs were finite; counts denominators."""
        check_result(rows.log_scale)
        if self.call.counter is not None:
            self.call.counter.add(rows)
        return self.finish(rows)

    def write(self, rows: Partial, out: Tensor) -> None:
        out.copy_(self.checked(rows))

    def gathered(self, x: Tensor, y: Tensor, v: Tensor, size: int) -> Iterator[Partial]:
        """What the queries of each chunk of `size` tokens gather."""
        offset = y.shape[2] - x.shape[2]
        state = self.state(y, v, offset if self.call.causal else y.shape[2])
        for t in chunks(x.shape[2], size):
            if self.call.causal:
                keys = shifted(t, offset)
                rows, state = self.step(x[:, :, t], y[:, :, keys], v[:, :, keys], keys, state)
            else:
                rows = self.read(x[:, :, t], state)
            yield rows

    def seen(self, offset: int) -> Tensor | None:
        """Which queries of causal attention see a key (b,1,L); None: all do."""
        return None if self.keep is None else self.keep.cumsum(-1)[:, None, offset:] > 0

    # Bidirectional.

    def forward(self, x, y, v, out) -> tuple[list[Partial], None]:
        state = self.state(y, v, y.shape[2])
        for t in chunks(x.shape[2]):
            self.write(self.read(x[:, :, t], state), out[:, :, t])
        return [state], None

    def state(self, y: Tensor, v: Tensor, length: int) -> Partial | None:
        """What the first keys leave in the features."""
        state = None
        for t in chunks(length):
            state = merge(state, self.summary(y[:, :, t], v[:, :, t], t))
        return state

    def backward(self, x, y, v, grad, kept, _, grads) -> None:
        state, gathered = kept[0], None
        for t in chunks(x.shape[2]):
            respond = lambda x, *sums: self.finish(self.read(x, _with(state, sums)))
            dx, *dsums = vjp(respond, (x[:, :, t], *state[:2]), grad[:, :, t])
            grads[0][:, :, t] = dx
            gathered = dsums if gathered is None else [a + b for a, b in zip(gathered, dsums)]
        self.state_backward(y, v, state.log_scale, gathered, y.shape[2], grads)

    def state_backward(self, y, v, top: Tensor, dsums: list[Tensor], length: int, grads) -> None:
        for t in chunks(length):
            summary = lambda y, v, t=t: self.summary(y, v, t, top)[:2]
            grads[1][:, :, t], grads[2][:, :, t] = vjp(summary, (y[:, :, t], v[:, :, t]), dsums)

    # Causal. `lengths` holds the tokens of the pieces that each chunk took.

    def causal_forward(self, x, y, v, out) -> tuple[list[Partial | None], list[int]]:
        offset = y.shape[2] - x.shape[2]
        state, kept, lengths, seen = self.state(y, v, offset), [], [], self.seen(offset)
        for i, chunk in enumerate(chunks(x.shape[2])):
            if i % KEPT == 0:
                kept.append(state)
            for length in PIECES:
                after = self.pieces(x, y, v, offset, chunk, length, state, seen, out)
                if after is not None:
                    break
            state = after
            lengths.append(length)
        return kept, lengths

    def pieces(self, x, y, v, offset, chunk, length, state, seen, out) -> Partial | None:
        """Writes a chunk in pieces and returns the state after it, or None where a row underflowed."""
        for t in chunks(chunk.stop, length, chunk.start):
            keys = shifted(t, offset)
            rows, state = self.step(x[:, :, t], y[:, :, keys], v[:, :, keys], keys, state)
            if length > 1 and underflowed([rows], None if seen is None else seen[:, :, t]):
                return None
            self.write(rows, out[:, :, t])
        return state

    def causal_backward(self, x, y, v, grad, kept, lengths, grads) -> None:
        offset = y.shape[2] - x.shape[2]
        whole, dsums = list(chunks(x.shape[2])), None
        for i in range(len(kept) - 1, -1, -1):
            ours = slice(i * KEPT, (i + 1) * KEPT)
            for t, state in reversed(self.entering(y, v, offset, whole[ours], lengths[ours], kept[i])):
                dsums = self.step_backward(x, y, v, grad, offset, t, state, dsums, grads)
        if offset:
            self.state_backward(y, v, kept[0].log_scale, dsums, offset, grads)

    def entering(self, y, v, offset, whole, lengths, state) -> list[tuple[slice, Partial | None]]:
        """Every piece of these chunks with the state before it."""
        found = []
        for chunk, length in zip(whole, lengths):
            for t in chunks(chunk.stop, length, chunk.start):
                found.append((t, state))
                keys = shifted(t, offset)
                state = merge(state, self.summary(y[:, :, keys], v[:, :, keys], keys))
        return found

    def step_backward(self, x, y, v, grad, offset, t, state, dsums, grads) -> list[Tensor]:
        keys = shifted(t, offset)

        def step(x, y, v, *sums):
            rows, after = self.step(x, y, v, keys, _with(state, sums) if sums else None)
            return self.finish(rows), *(after[:2] if dsums else ())

        inputs = (x[:, :, t], y[:, :, keys], v[:, :, keys], *(state[:2] if state else ()))
        dx, dy, dv, *before = vjp(step, inputs, [grad[:, :, t], *(dsums or ())])
        grads[0][:, :, t], grads[1][:, :, keys], grads[2][:, :, keys] = dx, dy, dv
        return before


def vjp(function: Callable, inputs: tuple[Tensor, ...], grads) -> tuple[Tensor, ...]:
    """Gradients to the inputs, given those to what the function returns."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in inputs]
        outputs = function(*leaves)
    return torch.autograd.grad(outputs, leaves, grads, allow_unused=True, materialize_grads=True)


def chunks(stop: int, size: int | None = None, start: int = 0) -> Iterator[slice]:
    size = size or CHUNK
    for a in range(start, stop, size):
        yield slice(a, min(a + size, stop))


def shifted(tokens: slice, by: int) -> slice:
    return slice(tokens.start + by, tokens.stop + by)


def _with(state: Partial, sums) -> Partial:
    return state._replace(numerator=sums[0], denominator=sums[1])


def _batch_free(noise: Nested) -> bool:
    return all(len(n.batch) < 2 or n.batch[0] == 1 for n in leaves(noise))


def _width(phi: FeatureMap, noise: Nested, d: int) -> int:
    return phi.width(mapped(lambda n: n.m, noise, empty=d))


def _take(params: Nested, rows: slice, batch: int) -> Nested:
    """The parameters of a range of the batch: those with a leading dimension (B, H, ...) are cut."""
    return mapped(lambda t: t[rows] if t.ndim == 4 and t.shape[0] == batch else t, params)
