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

from crt_exp.attention.checks import check_result, compute_dtype, requires_gradient, transformed
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
PIECES = (
    CHUNK,
    32,
    8,
    1,
)  # tokens of the pieces of a causal chunk, tried in turn while a row underflows
ELEMENTS = 2**21  # maximum for one feature tensor: limits the batch entries of one step
MAX_SAVED = 2**18  # elements of all features that autograd may store


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
    (B, H, L, d), S = x.shape, y.shape[2]
    if torch.compiler.is_compiling() or transformed(x, y, v):
        return Chunked(phi.bind(noise, params), keep, causal, modulus).rows(x, y, v)
    width = H * phi.width(map_leaves(lambda n: n.m, noise, empty=d))
    tokens = CHUNK if causal else max(CHUNK, min(WIDE, ELEMENTS // width))
    same = all(
        len(n.batch) < 2 or n.batch[0] == 1 for n in leaves(noise)
    )  # shared by all batch entries
    at_once = max(1, ELEMENTS // (min(tokens, L) * width)) if same else max(1, B)
    differentiable = requires_gradient(noise, params) or (
        torch.is_grad_enabled() and any(t.requires_grad for t in (x, y, v))
    )
    again = differentiable and B * max(L, S) * width > MAX_SAVED
    for n in leaves(noise) if again else ():
        n.sq_norm  # noqa: B018 (a cached property: recomputed chunks find it)
    parts = []
    for rows in chunks(max(1, B), at_once):
        own = map_leaves(
            lambda t, rows=rows: t[rows] if t.ndim == 4 and t.shape[0] == B else t, params
        )
        part = Chunked(
            phi.bind(noise, own),
            None if keep is None else keep[rows],
            causal,
            modulus,
            tokens,
            again,
        )
        parts.append(part.rows(x[rows], y[rows], v[rows]))
    return concatenate(parts, 0)


@dataclass(frozen=True)
class Chunked:
    """Attention of some batch entries, chunk by chunk.

    x (b,H,L,d), y (b,H,S,d), v (b,H,S,dv), keep (b,S).

    Args:
        tokens: tokens of a bidirectional chunk, by default CHUNK.
        again: recompute features in the backward pass.
    """

    bound: BoundMap
    keep: Tensor | None = None
    causal: bool = False
    modulus: bool = False
    tokens: int | None = None
    again: bool = False

    def rows(self, x: Tensor, y: Tensor, v: Tensor) -> Partial:
        """Return the partial of all queries.

        Compiled code cannot depend on values: it omits the check of inputs and the shorter pieces for rows that
        underflow. An exported program stops with an error at such rows.
        """
        exporting = torch.compiler.is_exporting()
        with no_autocast(x):
            if self.causal:
                rows = concatenate(self.causal_rows(x, y, v), 2)
            elif exporting:
                rows = self.read(
                    x, self.summary(y, v, slice(None))
                )  # no loop, so that the length can be dynamic
            else:
                state = self.state(y, v, y.shape[2])
                rows = concatenate(
                    [
                        self.work(self.read, part, state)
                        for part in x.split(self.tokens or CHUNK, 2)
                    ],
                    2,
                )
        if self.causal and exporting:
            torch._assert_async(
                ~small_denominators(rows, self.seen(y.shape[2] - x.shape[2])).any(),
                f"denominator underflow within a chunk of {CHUNK} tokens: scale queries and keys down, or do not "
                "export",
            )
        check_result(rows.log_scale)
        return rows

    def causal_rows(self, x: Tensor, y: Tensor, v: Tensor) -> list[Partial]:
        offset, gathered = y.shape[2] - x.shape[2], []
        state, seen = self.state(y, v, offset), self.seen(offset)
        parts = (t.split(STRETCH, 2) for t in (x, y[:, :, offset:], v[:, :, offset:]))
        for t, *vectors in zip(chunks(x.shape[2], STRETCH), *parts):
            rows, state = self.work(
                self.stretch,
                *vectors,
                state,
                shift_slice(t, offset),
                None if seen is None else seen[:, :, t],
            )
            gathered.append(rows)
        return gathered

    def state(self, y: Tensor, v: Tensor, length: int) -> Partial | None:
        """Sum up the first `length` keys; None if there are none."""
        state, size = None, self.tokens or CHUNK
        if length:  # torch.export cannot split an empty tensor
            for t, *vectors in zip(
                chunks(length, size), *(t[:, :, :length].split(size, 2) for t in (y, v))
            ):
                state = self.work(self.add_keys, state, *vectors, t)
        return state

    def work(self, function: Callable, *given: Any) -> Any:
        """Apply a function to a chunk, with a checkpoint if `again` is set."""
        if not self.again:
            return function(*given)
        return checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)

    def seen(self, offset: int) -> Tensor | None:
        """Return which causal queries see a key (b,1,L); None means all."""
        return None if self.keep is None else self.keep.cumsum(-1)[:, None, offset:] > 0

    # Chunks; `tokens` is the range of their keys.

    def keys(self, y: Tensor, v: Tensor, tokens: slice) -> tuple[ScaledKeys, Tensor]:
        dtype = compute_dtype(y, v)
        y, v = y.to(dtype), v.to(dtype)
        if self.keep is None:
            return scale_keys(self.bound.phi_k(y)), v
        keep = self.keep[:, None, tokens]
        y, v = (torch.where(keep[..., None], t, 0.0) for t in (y, v))  # padding may hold NaN
        return scale_keys(self.bound.phi_k(y), keep), v

    def summary(self, y: Tensor, v: Tensor, tokens: slice) -> Partial:
        return summarise(*self.keys(y, v, tokens), self.modulus)

    def add_keys(self, state: Partial | None, y: Tensor, v: Tensor, tokens: slice) -> Partial:
        return merge(state, self.summary(y, v, tokens))

    def read(self, x: Tensor, state: Partial) -> Partial:
        return read(self.bound.phi_q(x.to(state.numerator.dtype)), state)

    def stretch(
        self,
        x: Tensor,
        y: Tensor,
        v: Tensor,
        state: Partial | None,
        tokens: slice,
        seen: Tensor | None,
    ) -> tuple[Partial, Partial]:
        """Return the partial of some causal queries and the state after them.

        It works chunk by chunk, in shorter pieces where a row underflows, down to one token, which cannot underflow.
        """
        gathered = []
        for chunk, *vectors in zip(chunks(x.shape[2]), *(t.split(CHUNK, 2) for t in (x, y, v))):
            keys = shift_slice(chunk, tokens.start)
            for size in PIECES:
                rows, after = [], state
                for t, *piece in zip(
                    chunks(keys.stop, size, keys.start), *(t.split(size, 2) for t in vectors)
                ):
                    row, after = self.step(*piece, t, after)
                    rows.append(row)
                rows = concatenate(rows, 2)
                small = (
                    None
                    if size == 1 or torch.compiler.is_compiling()
                    else small_denominators(rows, None if seen is None else seen[:, :, chunk])
                )
                if small is None or all_true(~small):
                    break
            gathered.append(rows)
            state = after
        return concatenate(gathered, 2), state

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
    if len(parts) == 1:
        return parts[0].rows()
    fields = zip(*(part.rows() for part in parts))
    return Partial(*(None if field[0] is None else torch.cat(field, dim) for field in fields))


def chunks(stop: int, size: int | None = None, start: int = 0) -> Iterator[slice]:
    size = size or CHUNK
    for a in range(start, stop, size):
        yield slice(a, min(a + size, stop))


def shift_slice(tokens: slice, by: int) -> slice:
    return slice(tokens.start + by, tokens.stop + by)
