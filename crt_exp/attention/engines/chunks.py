"""Attention with any feature map, in chunks of plain torch operations.

Autograd and the transforms of torch.func can follow. Every map with phi_q and phi_k is served: signed, trigonometric,
discrete, sums and products. The code uses only `Features` and `Partial`.
Where autograd would store the features of too many tokens, the backward pass recomputes them. What is stored is a state
of M (dv + 1) numbers, in causal attention one for every STRETCH tokens.
Vectors are split once, because the gradient of each slice would be as long as the whole.

Notation: B, H, L queries, S keys, M features, C tokens of a chunk.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from crt_exp.attention.checks import (
    check_result,
    compute_dtype,
    requires_gradient,
    transformed,
    without_padding,
)
from crt_exp.attention.partials import (
    Partial,
    ScaledKeys,
    merge,
    read,
    scale_keys,
    small_denominators,
    summarise,
    within,
)
from crt_exp.features.base import BoundMap, FeatureMap, all_true
from crt_exp.samplers.noise import Nested, leaves, map_leaves, no_autocast

CHUNK = 128  # tokens of a causal chunk
WIDE = 512  # maximal tokens of a bidirectional chunk: fewer, larger operations
STRETCH = 512  # tokens of causal attention that are recomputed at once
# tokens of the pieces of causal attention, tried in turn while a row underflows
PIECES = (CHUNK, 32, 8, 1)
ELEMENTS = 2**21  # maximum for one feature tensor: limits the batch entries of one step
MAX_SAVED = (
    2**23
)  # elements of all features that autograd may store; recomputing more takes 1.6 times as long


def chunked_partial(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    phi: FeatureMap,
    noise: Nested,
    params: Nested,
    causal: bool,
    keep: Tensor | None,
    modulus: bool,
) -> Partial:
    """Return the partial of attention, for checked arguments.

    There are as many key heads as query heads.
    """
    if torch.jit.is_tracing():
        raise ValueError("torch.jit.trace is not supported: use torch.export.export")
    B, H, L, d = x.shape
    S = y.shape[2]
    if torch.compiler.is_compiling() or transformed(x, y, v):
        return Chunked(phi.bind(noise, params), keep, causal, modulus).rows(x, y, v)
    noises = leaves(noise)
    m = noises[-1].m if noises else d
    width = H * phi.width(m)
    tokens = CHUNK if causal else max(CHUNK, min(WIDE, ELEMENTS // width))
    shared = all(len(part.batch) < 2 or part.batch[0] == 1 for part in noises)
    entries = max(1, B)
    if shared:
        entries = max(1, ELEMENTS // (min(tokens, L) * width))
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in (x, y, v))
    differentiable = differentiable or requires_gradient(noise, params)
    recompute = differentiable and B * max(L, S) * width > MAX_SAVED
    if recompute:
        for part in noises:
            part.sq_norm  # noqa: B018 (a cached property: recomputed chunks find it)
    parts = []
    for rows in chunks(max(1, B), entries):

        def select(t: Tensor, rows: slice = rows) -> Tensor:
            return t[rows] if t.ndim == 4 and t.shape[0] == B else t

        bound = phi.bind(noise, map_leaves(select, params))
        keep_of_rows = None if keep is None else keep[rows]
        chunked = Chunked(bound, keep_of_rows, causal, modulus, tokens, recompute)
        parts.append(chunked.rows(x[rows], y[rows], v[rows]))
    return concatenate(parts, 0)


@dataclass(frozen=True)
class Chunked:
    """Attention of some batch entries, chunk by chunk.

    x (b,H,L,d), y (b,H,S,d), v (b,H,S,dv), keep (b,S).

    Args:
        tokens: tokens of a bidirectional chunk, by default CHUNK.
        recompute: recompute features in the backward pass.
    """

    bound: BoundMap
    keep: Tensor | None = None
    causal: bool = False
    modulus: bool = False
    tokens: int | None = None
    recompute: bool = False

    def rows(self, x: Tensor, y: Tensor, v: Tensor) -> Partial:
        """Return the partial of all queries.

        Compiled code cannot depend on values: it omits the check of inputs and the shorter pieces for rows that
        underflow, and stops with an error at such rows.
        """
        exporting = torch.compiler.is_exporting()
        with no_autocast(x):
            if self.causal:
                rows = concatenate(self.causal_rows(x, y, v), 2)
            elif exporting:
                # no loop, so that the length can be dynamic
                rows = self.read(x, self.summary(y, v, slice(None)))
            else:
                state = self.state(y, v, y.shape[2])
                parts = []
                for queries in x.split(self.tokens or CHUNK, 2):
                    parts.append(self.apply(self.read, queries, state))
                rows = concatenate(parts, 2)
        if self.causal and torch.compiler.is_compiling():
            small = small_denominators(rows, self.seen(y.shape[2] - x.shape[2]))
            torch._assert_async(
                ~small.any(),
                f"denominator underflow within a chunk of {CHUNK} tokens: scale queries and keys down, or do not "
                "compile or export",
            )
        check_result(rows.log_scale)
        return rows

    def causal_rows(self, x: Tensor, y: Tensor, v: Tensor) -> list[Partial]:
        offset = y.shape[2] - x.shape[2]
        state = self.state(y, v, offset)
        seen = self.seen(offset)
        queries = x.split(STRETCH, 2)
        keys = y[:, :, offset:].split(STRETCH, 2)
        values = v[:, :, offset:].split(STRETCH, 2)
        parts = []
        for i, tokens in enumerate(chunks(x.shape[2], STRETCH)):
            seen_part = None if seen is None else seen[:, :, tokens]
            key_tokens = shift_slice(tokens, offset)
            vectors = (queries[i], keys[i], values[i])
            rows, state = self.apply(self.stretch, *vectors, state, key_tokens, seen_part)
            parts.append(rows)
        return parts

    def state(self, y: Tensor, v: Tensor, length: int) -> Partial | None:
        """Sum up the first `length` keys; None if there are none."""
        if not length:  # torch.export cannot split an empty tensor
            return None
        state = None
        size = self.tokens or CHUNK
        keys = y[:, :, :length].split(size, 2)
        values = v[:, :, :length].split(size, 2)
        for i, tokens in enumerate(chunks(length, size)):
            state = self.apply(self.add_keys, state, keys[i], values[i], tokens)
        return state

    def apply(self, function: Callable, *inputs: Any) -> Any:
        """Apply a function to a chunk, with a checkpoint if `recompute` is set."""
        if not self.recompute:
            return function(*inputs)
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)

    def seen(self, offset: int) -> Tensor | None:
        """Return which causal queries see a key (b,1,L); None means all."""
        return None if self.keep is None else self.keep.cumsum(-1)[:, None, offset:] > 0

    # Chunks; `tokens` is the range of their keys.

    def keys(self, y: Tensor, v: Tensor, tokens: slice) -> tuple[ScaledKeys, Tensor]:
        dtype = compute_dtype(y, v)
        y = y.to(dtype)
        v = v.to(dtype)
        if self.keep is None:
            return scale_keys(self.bound.phi_k(y)), v
        keep = self.keep[:, tokens]
        y, v = without_padding(keep, y, v)
        return scale_keys(self.bound.phi_k(y), keep[:, None]), v

    def summary(self, y: Tensor, v: Tensor, tokens: slice) -> Partial:
        return summarise(*self.keys(y, v, tokens), self.modulus)

    def add_keys(self, state: Partial | None, y: Tensor, v: Tensor, tokens: slice) -> Partial:
        return merge(state, self.summary(y, v, tokens))

    def read(self, x: Tensor, state: Partial) -> Partial:
        return read(self.bound.phi_q(x.to(state.sums.dtype)), state)

    def stretch(
        self,
        x: Tensor,
        y: Tensor,
        v: Tensor,
        state: Partial | None,
        tokens: slice,
        seen: Tensor | None,
        sizes: tuple[int, ...] | None = None,
    ) -> tuple[Partial, Partial]:
        """Return the partial of some causal queries and the state after them.

        It works in pieces of sizes[0] tokens, by default those of PIECES. A piece in which a row underflows is computed
        again in shorter pieces, down to one token, which cannot underflow.
        """
        sizes = sizes or PIECES
        size = sizes[0]
        queries = x.split(size, 2)
        keys = y.split(size, 2)
        values = v.split(size, 2)
        parts = []
        for i, piece in enumerate(chunks(x.shape[2], size)):
            vectors = (queries[i], keys[i], values[i])
            key_tokens = shift_slice(piece, tokens.start)
            rows, after = self.step(*vectors, key_tokens, state)
            if size > 1 and not torch.compiler.is_compiling():
                seen_piece = None if seen is None else seen[:, :, piece]
                if not all_true(~small_denominators(rows, seen_piece)):
                    options = (state, key_tokens, seen_piece, sizes[1:])
                    rows, after = self.stretch(*vectors, *options)
            parts.append(rows)
            state = after
        return concatenate(parts, 2), state

    def step(
        self, x: Tensor, y: Tensor, v: Tensor, tokens: slice, state: Partial | None
    ) -> tuple[Partial, Partial]:
        keys, v = self.keys(y, v, tokens)
        fq = self.bound.phi_q(x.to(v.dtype))
        own = within(fq, keys, v, self.modulus)
        rows = own if state is None else merge(read(fq, state), own)
        return rows, merge(state, summarise(keys, v, self.modulus))


def concatenate(parts: list[Partial], dim: int) -> Partial:
    """Concatenate partials over ranges of rows or batch entries."""
    rows = []
    for part in parts:
        rows.append(part._replace(log_scale=part.log_scale.expand(*part.sums.shape[:-1], 1)))
    if len(rows) == 1:
        return rows[0]
    joined = []
    for field in zip(*rows):
        joined.append(None if field[0] is None else torch.cat(field, dim))
    return Partial(*joined)


def chunks(stop: int, size: int) -> Iterator[slice]:
    for a in range(0, stop, size):
        yield slice(a, min(a + size, stop))


def shift_slice(tokens: slice, by: int) -> slice:
    return slice(tokens.start + by, tokens.stop + by)
