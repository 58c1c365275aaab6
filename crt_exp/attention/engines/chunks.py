"""The work of attention on chunks of tokens, in plain operations of any feature map.

Legend: B, H, L queries, S keys, M features, C tokens of a chunk. Works on `Features` and `Partial` alone, so that every
map that gives phi_q and phi_k is served: signed, trigonometric, discrete, sums and products. `BatchPart.forward` and
`causal_forward` keep states of M (dv + 1) numbers (causal: one for every KEPT chunks), from which `backward` and
`causal_backward` compute each chunk again, autograd within it: nothing of size L x M.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from crt_exp.attention.checks import check_result, compute_dtype
from crt_exp.attention.partials import (
    DenominatorCount,
    Partial,
    ScaledKeys,
    finish,
    merge,
    read,
    scale_keys,
    small_denominators,
    summarise,
    underflowed,
    within,
)
from crt_exp.features.base import BoundMap, FeatureMap
from crt_exp.samplers.nested_tensors import Nested, leaves, mapped
from crt_exp.samplers.precision import as_given


CHUNK = 128                      # tokens of a causal chunk
WIDE = 512                       # tokens at most of one whose order does not matter: fewer, larger operations
PIECES = (CHUNK, 32, 8, 1)       # tokens of the pieces of a causal chunk, shorter where a row underflows
KEPT = 8                         # causal chunks for each state that is kept
ELEMENTS = 2**21                 # of one feature tensor, at most, by taking fewer batch entries at a time


# What becomes of a piece of the tokens and the state before it: the state after it, None where a row underflowed.
Piece = Callable[[slice, Partial | None], Partial | None]


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


class KeptStates(NamedTuple):
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

    def whole(self, again: bool = False) -> "BatchPart":
        """The whole batch at once."""
        return BatchPart(self, self.phi.bind(self.noise, self.params), self.keep, again=again)

    def large(self, x: Tensor, y: Tensor) -> bool:
        """Whether the features of all tokens are more than autograd should keep."""
        B, H, L, d = x.shape
        return B * H * max(L, y.shape[2]) * _width(self.phi, self.noise, d) > ELEMENTS

    def parts(self, x: Tensor) -> Iterator[tuple[slice, "BatchPart"]]:
        """Ranges of the batch, each with its own features."""
        B, H, L, d = x.shape
        width = H * _width(self.phi, self.noise, d)
        tokens = CHUNK if self.causal else max(CHUNK, min(WIDE, ELEMENTS // width))
        same = all(len(n.batch) < 2 or n.batch[0] == 1 for n in leaves(self.noise))   # for all batch entries
        at_once = max(1, ELEMENTS // (min(tokens, L) * width)) if same else B
        for start in range(0, B, at_once):
            rows = slice(start, min(start + at_once, B))
            bound = self.phi.bind(self.noise, _take(self.params, rows, B))
            yield rows, BatchPart(self, bound, None if self.keep is None else self.keep[rows], tokens)


def write_rows(rows: tuple[Tensor, ...], results: tuple[Tensor, ...], tokens: slice) -> None:
    for result, t in zip(results, (t for t in rows if t is not None)):
        result[:, :, tokens] = t


@dataclass(frozen=True)
class BatchPart:
    """The work on a range of the batch. x (b,H,L,d), y (b,H,S,d), v (b,H,S,dv), keep (b,S). tokens: of a chunk whose
    order does not matter; None: CHUNK. again: autograd through all chunks computes each again and keeps no features."""

    call: Call
    bound: BoundMap
    keep: Tensor | None
    tokens: int | None = None
    again: bool = False

    @property
    def modulus(self) -> bool:
        return self.call.result.modulus

    def chunk(self, work: Callable, *given: Any) -> Any:
        """What `work` makes of a chunk, for autograd."""
        if not self.again:
            return work(*given)
        return checkpoint(work, *given, use_reentrant=False, preserve_rng_state=False)

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

    def sums(self, y: Tensor, v: Tensor, tokens: slice, top: Tensor) -> tuple[Tensor, ...]:
        """What is differentiable in a summary."""
        return self.summary(y, v, tokens, top)[:2]

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
        if self.call.counter is not None and not torch.compiler.is_exporting():
            self.call.counter.add(rows)
        return rows

    def write(self, rows: Partial, results: list[Tensor], tokens: slice) -> None:
        write_rows(self.call.result.of(self.checked(rows)), results, tokens)

    def gathered(self, x: Tensor, y: Tensor, v: Tensor, size: int) -> Iterator[Partial]:
        """What the queries of each chunk of `size` tokens gather."""
        offset = y.shape[2] - x.shape[2]
        state = self.state(y, v, offset if self.call.causal else y.shape[2])
        for t in chunks(x.shape[2], size):
            if self.call.causal:
                keys = shifted(t, offset)
                rows, state = self.chunk(self.step, x[:, :, t], y[:, :, keys], v[:, :, keys], keys, state)
            else:
                rows = self.chunk(self.read, x[:, :, t], state)
            yield rows

    def seen(self, offset: int) -> Tensor | None:
        """Which queries of causal attention see a key (b,1,L); None: all do."""
        return None if self.keep is None else self.keep.cumsum(-1)[:, None, offset:] > 0

    # Bidirectional.

    def forward(self, x, y, v, results) -> KeptStates:
        state = self.state(y, v, y.shape[2])
        for t in chunks(x.shape[2], self.tokens):
            self.write(self.read(x[:, :, t], state), results, t)
        return KeptStates([state], [])

    def state(self, y: Tensor, v: Tensor, length: int) -> Partial | None:
        """What the first keys leave in the features."""
        state = None
        for t in chunks(length, self.tokens):
            state = merge(state, self.chunk(self.summary, y[:, :, t], v[:, :, t], t))
        return state

    def backward(self, x, y, v, given, kept, grads) -> None:
        state, = kept.states
        dsums = self.read_backward(x, state, given, grads[0])
        self.state_backward(y, v, state.log_scale, dsums, y.shape[2], grads[1:])

    def read_backward(self, x: Tensor, state: Partial, given: list[Tensor], dx: Tensor) -> list[Tensor]:
        """Writes the gradient to x, and returns that to the numerator and denominator of the state."""
        def respond(x: Tensor, *sums: Tensor) -> tuple[Tensor, ...]:
            return self.call.result.differentiable(self.read(x, _with(state, sums)))

        gathered = None
        for t in chunks(x.shape[2], self.tokens):
            dx[:, :, t], *dsums = vjp(respond, (x[:, :, t], *state[:2]), [grad[:, :, t] for grad in given])
            gathered = dsums if gathered is None else [a + b for a, b in zip(gathered, dsums)]
        return gathered

    def state_backward(self, y, v, top: Tensor, dsums: list[Tensor], length: int, grads) -> None:
        for t in chunks(length, self.tokens):
            given = y[:, :, t], v[:, :, t]
            grads[0][:, :, t], grads[1][:, :, t] = vjp(partial(self.sums, tokens=t, top=top), given, dsums)

    # Causal. `lengths` holds the tokens of the pieces that each chunk took.

    def causal_forward(self, x, y, v, results) -> KeptStates:
        offset = y.shape[2] - x.shape[2]
        state, kept, lengths = self.state(y, v, offset), [], []
        write = self.piece_writer(x, y, v, offset, self.seen(offset), results)
        for i, chunk in enumerate(chunks(x.shape[2])):
            if i % KEPT == 0:
                kept.append(state)
            state, length = in_pieces(chunk, PIECES, state, write)
            lengths.append(length)
        return KeptStates(kept, lengths)

    def piece_writer(self, x, y, v, offset: int, seen: Tensor | None, results) -> Piece:
        """What `in_pieces` does with a piece: its rows are written into the results."""
        def write(t: slice, state: Partial | None) -> Partial | None:
            keys = shifted(t, offset)
            rows, after = self.step(x[:, :, t], y[:, :, keys], v[:, :, keys], keys, state)
            if t.stop - t.start > 1 and underflowed([rows], None if seen is None else seen[:, :, t]):
                return None
            self.write(rows, results, t)
            return after

        return write

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
        pieces = []
        for chunk, length in zip(whole, lengths):
            for t in chunks(chunk.stop, length, chunk.start):
                pieces.append((t, state))
                keys = shifted(t, offset)
                state = merge(state, self.summary(y[:, :, keys], v[:, :, keys], keys))
        return pieces

    def step_backward(self, x, y, v, given, offset, t, state, dsums, grads) -> list[Tensor]:
        keys = shifted(t, offset)

        def step(x, y, v, *sums):
            rows, after = self.step(x, y, v, keys, _with(state, sums) if sums else None)
            return *self.call.result.differentiable(rows), *(after[:2] if dsums else ())

        inputs = (x[:, :, t], y[:, :, keys], v[:, :, keys], *(state[:2] if state else ()))
        dx, dy, dv, *before = vjp(step, inputs, [*(grad[:, :, t] for grad in given), *(dsums or ())])
        grads[0][:, :, t], grads[1][:, :, keys], grads[2][:, :, keys] = dx, dy, dv
        return before


def plain_attention(x: Tensor, y: Tensor, v: Tensor, part: BatchPart) -> Partial:
    """The rows in plain operations, which all transforms of torch follow, to any order: autograd through all chunks,
    whose features it keeps unless the part computes them `again`. torch.compile cannot look into what depends on
    numbers: there without the check of inputs and without shorter pieces where a row underflows, which stops an
    exported program. Raises ValueError for an export of causal attention with an open length."""
    seen, causal, exporting = part.seen(y.shape[2] - x.shape[2]), part.call.causal, torch.compiler.is_exporting()
    if causal and exporting and isinstance(y.shape[2], torch.SymInt):
        raise ValueError("causal attention cannot be exported with an open length, on which its chunks depend: export "
                         "it for each length")

    def gathered(size: int) -> list[Partial] | None:
        rows = list(part.gathered(x, y, v, size))
        return None if size > 1 and underflowed(rows, seen) else rows

    with as_given(x):
        if exporting and not causal:
            rows = [part.read(x, part.summary(y, v, slice(None)))]  # no loop, so the length may be open
        elif causal and not torch.compiler.is_compiling():
            rows, _ = first_that_holds(PIECES, gathered)
        else:
            rows = list(part.gathered(x, y, v, CHUNK))
        if causal and exporting:
            torch._assert_async(
                ~small_denominators(rows, seen).any(),
                f"a key outweighs those before it in its {CHUNK} tokens by more than float32 can hold: an exported "
                "program cannot take shorter pieces, as attention does otherwise")
        fields = zip(*([t for t in piece.rows() if t is not None] for piece in rows))
        return part.checked(Partial(*(torch.cat(pieces, 2) for pieces in fields)))


def vjp(function: Callable, inputs: tuple[Tensor, ...], grads) -> tuple[Tensor, ...]:
    """Gradients to the inputs, given those to what the function returns."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in inputs]
        outputs = function(*leaves)
    return torch.autograd.grad(outputs, leaves, grads, allow_unused=True, materialize_grads=True)


def in_pieces(stretch: slice, sizes: Iterable[int], state: Partial | None, take: Piece) -> tuple[Partial, int]:
    """Takes a stretch of tokens in pieces of the first of `sizes` at which no row underflows, down to one token, which
    cannot. Returns the state after it and that size."""
    def taken(size: int) -> Partial | None:
        after = state
        for piece in chunks(stretch.stop, size, stretch.start):
            after = take(piece, after)
            if after is None:
                return None
        return after

    return first_that_holds(sizes, taken)


def first_that_holds(sizes: Iterable[int], run: Callable[[int], Any]) -> tuple[Any, int]:
    """What `run` gives for the first of these numbers of tokens for which it is not None, and that number."""
    for size in sizes:
        result = run(size)
        if result is not None:
            return result, size
    raise AssertionError("a piece of one token cannot underflow")


def chunks(stop: int, size: int | None = None, start: int = 0) -> Iterator[slice]:
    size = size or CHUNK
    for a in range(start, stop, size):
        yield slice(a, min(a + size, stop))


def shifted(tokens: slice, by: int) -> slice:
    return slice(tokens.start + by, tokens.stop + by)


def _with(state: Partial, sums) -> Partial:
    return state._replace(numerator=sums[0], denominator=sums[1])


def _width(phi: FeatureMap, noise: Nested, d: int) -> int:
    return phi.width(mapped(lambda n: n.m, noise, empty=d))


def _take(params: Nested, rows: slice, batch: int) -> Nested:
    """The parameters of a range of the batch: those with a leading dimension (B, H, ...) are cut."""
    return mapped(lambda t: t[rows] if t.ndim == 4 and t.shape[0] == batch else t, params)
