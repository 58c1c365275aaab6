"""Attention with any feature map, chunk by chunk: autograd on the chunk, recomputed in the backward pass.

Legend: B, H, L queries, S keys, M features, C tokens of a chunk. Works on `Features` and `Partial` alone, so that every
map that gives phi_q and phi_k is served: signed, trigonometric, discrete, sums and products. Kept for the backward
pass: the inputs and states of M (dv + 1) numbers (causal: one for every KEPT chunks); nothing of size L x M.

`chunked_attention` gives outputs, `chunked_partial` what goes into them. `keys_state` and `read_state` are the two
halves of bidirectional attention, for callers who add states of other keys in between. """

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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

CHUNK = 128                      # tokens of a causal chunk
WIDE = 512                       # tokens at most of one whose order does not matter: fewer, larger operations
PIECES = (CHUNK, 32, 8, 1)       # tokens of the pieces of a causal chunk, shorter where a row underflows
KEPT = 8                         # causal chunks for each state that is kept
ELEMENTS = 2**21                 # of one feature tensor, at most, by taking fewer batch entries at a time


class Outputs(NamedTuple):
    """What a call makes of the rows that it gathers: outputs (B,H,L,dv) in the dtype of the values."""

    policy: str = "none"
    normalize: bool = True

    @property
    def modulus(self) -> bool:
        return self.policy == "clamp"

    def empty(self, x: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (v.new_empty(*x.shape[:3], v.shape[3]),)

    def of(self, rows: Partial) -> tuple[Tensor, ...]:
        return (finish(rows, self.policy, self.normalize),)

    differentiable = of


class Rows(NamedTuple):
    """The rows as they are: the fields of a Partial, of which the first two have gradients."""

    modulus: bool = False

    def empty(self, x: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        widths = (v.shape[3], 1, 1, 1) if self.modulus else (v.shape[3], 1, 1)
        return tuple(v.new_empty(*x.shape[:3], width, dtype=compute_dtype(y, v)) for width in widths)

    def of(self, rows: Partial) -> tuple[Tensor, ...]:
        return tuple(t for t in rows if t is not None)

    def differentiable(self, rows: Partial) -> tuple[Tensor, ...]:
        return rows[:2]


class Kept(NamedTuple):
    """What the forward pass keeps of a range of the batch, besides the inputs."""

    states: list[Partial | None]   # after all keys, or before every KEPT-th causal chunk
    lengths: list[int]             # causal: tokens of the pieces that each chunk took


@dataclass(frozen=True)
class Call:
    """Everything of one call but the differentiable tensors; `keep` is the key mask (B, S)."""

    phi: FeatureMap
    noise: Any
    params: Any
    causal: bool = False
    keep: Tensor | None = None
    result: Outputs | Rows = Outputs()
    counter: DenominatorCount | None = None

    def whole(self) -> "Part":
        """The whole batch at once."""
        return Part(self, self.phi.bind(self.noise, self.params), self.keep)

    def parts(self, x: Tensor) -> Iterator[tuple[slice, "Part"]]:
        """Ranges of the batch, each with its own features."""
        B, H, L, d = x.shape
        width = H * _width(self.phi, self.noise, d)
        tokens = CHUNK if self.causal else max(CHUNK, min(WIDE, ELEMENTS // width))
        at_once = max(1, ELEMENTS // (min(tokens, L) * width)) if _batch_free(self.noise) else B
        for start in range(0, B, at_once):
            rows = slice(start, min(start + at_once, B))
            bound = self.phi.bind(self.noise, _take(self.params, rows, B))
            yield rows, Part(self, bound, None if self.keep is None else self.keep[rows], tokens)


def chunked_attention(x: Tensor, y: Tensor, v: Tensor, call: Call) -> Tensor:
    """Attention of checked arguments, with as many key heads as query heads; the result of the call is Outputs."""
    if _plain(x, y, v, call):
        return call.result.of(plain_attention(x, y, v, call.whole()))[0].to(v.dtype)
    return _Chunked.apply(x, y, v, call)[0]


def chunked_partial(x: Tensor, y: Tensor, v: Tensor, call: Call) -> Partial:
    """What goes into it; the result of the call is Rows."""
    if _plain(x, y, v, call):
        return plain_attention(x, y, v, call.whole())
    return Partial(*_Chunked.apply(x, y, v, call))


def _plain(x: Tensor, y: Tensor, v: Tensor, call: Call) -> bool:
    """Whether torch has to follow every operation."""
    if torch.jit.is_tracing():
        raise ValueError(f"torch.jit.trace cannot record attention with {type(call.phi).__name__}: it would keep the "
                         "masks and statistics of this call. Use torch.export.export with dynamic_shapes, or a "
                         "positive map such as OPRF")
    return torch.compiler.is_compiling() or transformed(x, y, v)


def plain_attention(x: Tensor, y: Tensor, v: Tensor, part: "Part") -> Partial:
    """The rows in plain operations, which all transforms of torch follow, to any order: autograd through all chunks,
    whose features it may keep. torch.compile cannot look into what depends on numbers: there without the check of
    inputs and without shorter pieces where a row underflows."""
    offset = y.shape[2] - x.shape[2]
    sizes = PIECES if part.call.causal and not torch.compiler.is_compiling() else (CHUNK,)
    with torch.autocast(x.device.type, enabled=False):
        for size in sizes:
            rows = list(part.gathered(x, y, v, size))
            if size == sizes[-1] or not underflowed(rows, part.seen(offset)):
                break
        fields = zip(*([t for t in piece.rows() if t is not None] for piece in rows))
        return part.checked(Partial(*(torch.cat(pieces, 2) for pieces in fields)))


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
    found = iter(torch.autograd.grad(results, wanted, grads, create_graph=again, materialize_grads=True))
    return [next(found) if t.requires_grad else None for t in inputs]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, v, call):
        results, kept = call.result.empty(x, y, v), []
        with torch.autocast(x.device.type, enabled=False):
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
            again = lambda x, y, v: tuple(t.to(g.dtype) for t, g in zip(
                call.result.differentiable(plain_attention(x, y, v, call.whole())), given))
            return *plain_gradients(again, (x, y, v), given), None
        states, grads = iter(states), [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (x, y, v)]
        with torch.autocast(x.device.type, enabled=False):
            for (rows, part), (count, lengths) in zip(call.parts(x), ctx.kept):
                kept = Kept([next(states) for _ in range(count)], lengths)
                run = part.causal_backward if call.causal else part.backward
                run(x[rows], y[rows], v[rows], [t[rows] for t in given], kept, [t[rows] for t in grads])
        return *grads, None


def _save(ctx, inputs: tuple[Tensor, ...], states: list[Partial | None]) -> None:
    ctx.save_for_backward(*inputs, *(t for state in states for t in state or (None,) * 4))


def _saved(ctx, inputs: int) -> tuple[tuple[Tensor, ...], list[Partial | None]]:
    tensors = ctx.saved_tensors
    flat = tensors[inputs:]
    return tensors[:inputs], [Partial(*flat[i:i + 4]) if flat[i] is not None else None for i in range(0, len(flat), 4)]


def keys_state(y: Tensor, v: Tensor, part: "Part") -> Partial:
    """What keys y (B,H,S,d), v (B,H,S,dv) leave in the features (B,H,M,.), differentiable, chunk by chunk."""
    found = _State.apply(y, v, part)
    return Partial(*found)


def read_state(x: Tensor, state: Partial, part: "Part") -> Partial:
    """What queries x (B,H,L,d) gather from a state, differentiable in both, chunk by chunk."""
    return Partial(*_Read.apply(x, part, *state))


class _State(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, v, part):
        with torch.autocast(y.device.type, enabled=False):
            state = part.state(y, v, y.shape[2])
        ctx.save_for_backward(y, v, state.log_scale)
        ctx.part = part
        ctx.mark_non_differentiable(*(t for t in state[2:] if t is not None))
        return tuple(t for t in state if t is not None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *dsums):
        y, v, top = ctx.saved_tensors
        grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (y, v)]
        with torch.autocast(y.device.type, enabled=False):
            ctx.part.state_backward(y, v, top, dsums[:2], y.shape[2], grads)
        return *grads, None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, part, *state):
        state = Partial(*state)
        results = Rows(state.modulus is not None).empty(x, state.numerator, state.numerator)
        with torch.autocast(x.device.type, enabled=False):
            for t in chunks(x.shape[2]):
                rows = part.read(x[:, :, t], state)
                check_result(rows.log_scale)
                _write(rows, results, t)
        _save(ctx, (x,), [state])
        ctx.part = part
        ctx.mark_non_differentiable(*results[2:])
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *given):
        (x,), (state,) = _saved(ctx, 1)
        dx = torch.zeros_like(x, memory_format=torch.contiguous_format)
        part = replace(ctx.part, call=replace(ctx.part.call, result=Rows(state.modulus is not None)))
        with torch.autocast(x.device.type, enabled=False):
            dsums = part.read_backward(x, state, given[:2], dx)
        return dx, None, *dsums, None, None


def _write(rows: tuple[Tensor, ...], results: tuple[Tensor, ...], tokens: slice) -> None:
    for result, t in zip(results, (t for t in rows if t is not None)):
        result[:, :, tokens] = t


@dataclass(frozen=True)
class Part:
    """The work on a range of the batch. x (b,H,L,d), y (b,H,S,d), v (b,H,S,dv), keep (b,S). tokens: of a chunk whose
    order does not matter; None: CHUNK."""

    call: Call
    bound: Bound
    keep: Tensor | None
    tokens: int | None = None

    @property
    def modulus(self) -> bool:
        return self.call.result.modulus

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
        """What the queries of a chunk gather from the state and from each other's keys,
        and the state after the chunk."""
        keys, v = self.keys(y, v, tokens)
        fq = self.bound.phi_q(x.to(v.dtype))
        own = within(fq, keys, v, self.modulus)
        rows = own if state is None else merge(read(fq, state), own)
        return rows, merge(state, summarise(keys, v, self.modulus))

    def checked(self, rows: Partial) -> Partial:
        """The rows, once it is known that the inputs were finite; counts denominators."""
        check_result(rows.log_scale)
        if self.call.counter is not None:
            self.call.counter.add(rows)
        return rows

    def write(self, rows: Partial, results: list[Tensor], tokens: slice) -> None:
        _write(self.call.result.of(self.checked(rows)), results, tokens)

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

    def forward(self, x, y, v, results) -> Kept:
        state = self.state(y, v, y.shape[2])
        for t in chunks(x.shape[2], self.tokens):
            self.write(self.read(x[:, :, t], state), results, t)
        return Kept([state], [])

    def state(self, y: Tensor, v: Tensor, length: int) -> Partial | None:
        """What the first keys leave in the features."""
        state = None
        for t in chunks(length, self.tokens):
            state = merge(state, self.summary(y[:, :, t], v[:, :, t], t))
        return state

    def backward(self, x, y, v, given, kept, grads) -> None:
        state, = kept.states
        dsums = self.read_backward(x, state, given, grads[0])
        self.state_backward(y, v, state.log_scale, dsums, y.shape[2], grads[1:])

    def read_backward(self, x: Tensor, state: Partial, given: list[Tensor], dx: Tensor) -> list[Tensor]:
        """Writes the gradient to x, and returns that to the numerator and denominator of the state."""
        gathered = None
        for t in chunks(x.shape[2], self.tokens):
            respond = lambda x, *sums: self.call.result.differentiable(self.read(x, _with(state, sums)))
            dx[:, :, t], *dsums = vjp(respond, (x[:, :, t], *state[:2]), [grad[:, :, t] for grad in given])
            gathered = dsums if gathered is None else [a + b for a, b in zip(gathered, dsums)]
        return gathered

    def state_backward(self, y, v, top: Tensor, dsums: list[Tensor], length: int, grads) -> None:
        for t in chunks(length, self.tokens):
            summary = lambda y, v, t=t: self.summary(y, v, t, top)[:2]
            grads[0][:, :, t], grads[1][:, :, t] = vjp(summary, (y[:, :, t], v[:, :, t]), dsums)

    # Causal. `lengths` holds the tokens of the pieces that each chunk took.

    def causal_forward(self, x, y, v, results) -> Kept:
        offset = y.shape[2] - x.shape[2]
        state, kept, lengths, seen = self.state(y, v, offset), [], [], self.seen(offset)
        for i, chunk in enumerate(chunks(x.shape[2])):
            if i % KEPT == 0:
                kept.append(state)
            for length in PIECES:
                after = self.pieces(x, y, v, offset, chunk, length, state, seen, results)
                if after is not None:
                    break
            state = after
            lengths.append(length)
        return Kept(kept, lengths)

    def pieces(self, x, y, v, offset, chunk, length, state, seen, results) -> Partial | None:
        """Writes a chunk in pieces and returns the state after it, or None where a row underflowed."""
        for t in chunks(chunk.stop, length, chunk.start):
            keys = shifted(t, offset)
            rows, state = self.step(x[:, :, t], y[:, :, keys], v[:, :, keys], keys, state)
            if length > 1 and underflowed([rows], None if seen is None else seen[:, :, t]):
                return None
            self.write(rows, results, t)
        return state

    def causal_backward(self, x, y, v, given, kept, grads) -> None:
        offset = y.shape[2] - x.shape[2]
        whole, dsums = list(chunks(x.shape[2])), None
        for i in range(len(kept.states) - 1, -1, -1):
            ours = slice(i * KEPT, (i + 1) * KEPT)
            for t, state in reversed(self.entering(y, v, offset, whole[ours], kept.lengths[ours], kept.states[i])):
                dsums = self.step_backward(x, y, v, given, offset, t, state, dsums, grads)
        if offset:
            self.state_backward(y, v, kept.states[0].log_scale, dsums, offset, grads[1:])

    def entering(self, y, v, offset, whole, lengths, state) -> list[tuple[slice, Partial | None]]:
        """Every piece of these chunks with the state before it."""
        found = []
        for chunk, length in zip(whole, lengths):
            for t in chunks(chunk.stop, length, chunk.start):
                found.append((t, state))
                keys = shifted(t, offset)
                state = merge(state, self.summary(y[:, :, keys], v[:, :, keys], keys))
        return found

    def step_backward(self, x, y, v, given, offset, t, state, dsums, grads) -> list[Tensor]:
        keys = shifted(t, offset)

        def step(x, y, v, *sums):
            rows, after = self.step(x, y, v, keys, _with(state, sums) if sums else None)
            return *self.call.result.differentiable(rows), *(after[:2] if dsums else ())

        inputs = (x[:, :, t], y[:, :, keys], v[:, :, keys], *(state[:2] if state else ()))
        dx, dy, dv, *before = vjp(step, inputs, [*(grad[:, :, t] for grad in given), *(dsums or ())])
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
