"""Causal near-far attention token by token.

The state holds all keys and values, and the state of the past. Each row of a batch counts its tokens from its first
real one.

Notation: B batch, Hkv key heads, G query heads of a group, Z = B Hkv, T new tokens, S tokens so far, b tokens of a
block, d, dv.
"""

import copy
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from crt_exp.attention.baselines import Buffer, append_rows
from crt_exp.attention.checks import (
    batch_indices,
    check_entries,
    check_inputs,
    check_result,
    compute_dtype,
    first_unmasked,
)
from crt_exp.attention.decoding import TokenState
from crt_exp.nearfar import native
from crt_exp.nearfar.causal import (
    Epoch,
    attend_epochs,
    attend_in_c,
    engine_sizes,
    first_renewal,
    fit_metric,
    join_parts,
    list_epochs,
)
from crt_exp.nearfar.choice import Sizes, exact_outputs

Past = TypeVar("Past", Epoch, native.PastMemory)

PADDED_COLUMNS = 16  # the C engine reads columns padded with zeros to a multiple of this
MIN_CAPACITY = 1024  # tokens


class StoredTokens(NamedTuple):
    """All tokens so far, as views of buffers.

    Positions that another state can see are never changed.
    """

    keys: Tensor  # (B, Hkv, S, d)
    values: Tensor  # (B, Hkv, S, dv)
    keep: Tensor | None = None  # (B, 1, S, 1); None: all


class RecallState(TokenState):
    """Decoding state of causal near-far attention: all keys and values so far.

    A copy can be continued independently.

    >>> state = RecallState(Sizes(open=16), heads=2)
    >>> q, k, v = torch.randn(3, 1, 2, 100, 8)
    >>> prompt = state.step(q, k, v)
    >>> token = state.step(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:])
    >>> state.length, tuple(token.shape)
    (101, (1, 2, 1, 8))
    """

    def __init__(self, sizes: Sizes, heads: int):
        self.sizes = sizes
        self.heads = heads
        self.buffers: tuple[Buffer, ...] = ()  # of the parts of `StoredTokens`
        self.columns: tuple[int, ...] = ()  # number of columns of each part
        self.firsts: list[int | None] = []  # position of the first real token of each row
        # states of the past by position of the first real token: in PyTorch, and in C
        self.epochs: dict[int, Epoch] = {}
        self.memories: dict[int, native.PastMemory] = {}
        self.until = first_renewal(sizes)  # number of first tokens that see all keys

    @property
    def tokens(self) -> StoredTokens:
        """All tokens so far; there must be some."""
        parts = []
        for buffer, columns in zip(self.buffers, self.columns):
            parts.append(buffer.tensor[:, :, : self.length, :columns])
        return StoredTokens(*parts)

    def tensors(self) -> list[Tensor]:
        if not self.buffers:
            return []
        return [t for t in self.tokens if t is not None]

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Append tokens as `TokenState.step` does.

        Raises ValueError as `near_far_attention` does.
        """
        check_inputs(x, y, v, None, (), True, key_mask)
        if x.shape[2] != y.shape[2]:
            raise ValueError(
                f"T={x.shape[2]} queries, {y.shape[2]} keys: a step needs equal numbers"
            )
        start = self.length
        self._append(y, v, key_mask)
        if key_mask is not None:
            x = torch.where(key_mask[:, None, :, None] | x.isfinite(), x, 0.0)
        check_entries(x)
        groups = set(self.firsts)
        first = self.firsts[0] if len(groups) == 1 else None
        if first is not None and first <= start:  # the usual case
            return self._attend(first, list(range(len(x))), x).to(v.dtype)
        out = v.new_zeros(*x.shape[:3], v.shape[3])
        for first in groups:
            if first is None:
                continue
            rows = self._rows(first)
            lead = max(0, first - start)
            index = _row_index(rows)
            out[index, :, lead:] = self._attend(first, rows, x[index, :, lead:]).to(v.dtype)
        return out

    def _append(self, y: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
        B, _, T, d = y.shape
        dv = v.shape[3]
        dtype = compute_dtype(y, v)
        if not self.buffers:
            self.firsts = [None] * B
        elif len(self.firsts) != B:
            raise ValueError(f"decoding state: {len(self.firsts)} sequences, got {B}")
        elif self.columns[:2] != (d, dv):
            raise ValueError(f"decoding state: d, dv = {self.columns[:2]}, got {(d, dv)}")
        self.columns = (d, dv, 1)
        y = y.to(dtype)
        v = v.to(dtype)
        keep = None
        masked = key_mask is not None and not bool(key_mask.all())
        if masked or len(self.buffers) == len(StoredTokens._fields):
            if key_mask is None:
                keep = torch.ones(B, 1, T, 1, dtype=torch.bool, device=y.device)
            else:
                keep = key_mask[:, None, :, None]
            y = torch.where(keep, y, 0.0)  # padding may hold NaN
            v = torch.where(keep, v, 0.0)
            if len(self.buffers) == 2:
                self.buffers += (Buffer(keep.new_ones(B, 1, self.length, 1), self.length),)
        check_result(torch.linalg.vector_norm(y, dim=(1, 2, 3)))
        if None in self.firsts:
            self._note_first_tokens(keep)
        parts = [F.pad(y, (0, -d % PADDED_COLUMNS)), F.pad(v, (0, -dv % PADDED_COLUMNS))]
        if keep is not None:
            parts.append(keep)
        self.buffers = append_rows(self.buffers, self.length, parts)
        self.length += T

    def _note_first_tokens(self, keep: Tensor | None) -> None:
        """Set the positions of first real tokens that are among new tokens (B, 1, T, 1)."""
        if keep is None:
            for row, first in enumerate(self.firsts):
                if first is None:
                    self.firsts[row] = self.length
            return
        positions = first_unmasked(keep[:, 0, :, 0]).tolist()
        unmasked = keep.any(2).flatten().tolist()
        for row, first in enumerate(self.firsts):
            if first is None and unmasked[row]:
                self.firsts[row] = self.length + positions[row]

    def copy(self) -> "RecallState":
        other = copy.copy(self)
        other.firsts = list(self.firsts)
        other.epochs = dict(self.epochs)
        other.memories = {}
        for first, memory in self.memories.items():
            other.memories[first] = memory._replace(numbers=memory.numbers.clone())
        return other

    def select(self, rows: Tensor) -> None:
        if not self.buffers:
            return
        index = batch_indices(rows, len(self.firsts))
        chosen = index.tolist()
        self.buffers = tuple(
            Buffer(buffer.tensor[index, :, : self.length], self.length) for buffer in self.buffers
        )
        self.epochs = self._select_rows(self.epochs, chosen, index.device)
        self.memories = self._select_rows(self.memories, chosen, index.device)
        self.firsts = [self.firsts[row] for row in chosen]

    def _select_rows(
        self,
        pasts: dict[int, Past],
        rows: list[int],
        device: torch.device,
    ) -> dict[int, Past]:
        """Return the states of the past of these rows."""
        heads = torch.arange(self.heads, device=device)
        selected = {}
        for first, past in pasts.items():
            group = self._rows(first)
            places = [group.index(row) for row in rows if row in group]
            if places:
                first_heads = torch.tensor(places, device=device).unsqueeze(1) * self.heads
                selected[first] = _select_heads(past, (first_heads + heads).flatten())
        return selected

    def _rows(self, first: int) -> list[int]:
        """Return the rows whose first real token is at position `first`."""
        return [row for row, position in enumerate(self.firsts) if position == first]

    def _tokens_of(
        self, tokens: StoredTokens, rows: list[int], first: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys (Z, S, d), values and mask of these rows from position `first` on.

        Neighbouring rows are not copied.
        """
        index = _row_index(rows)
        y = tokens.keys[index, :, first:].flatten(0, 1)
        v = tokens.values[index, :, first:].flatten(0, 1)
        if tokens.keep is None:
            return y, v, None
        mask = tokens.keep[index, 0, first:, 0]
        if bool(mask.all()):
            return y, v, None
        return y, v, mask.repeat_interleave(self.heads, 0)

    def _attend(self, first: int, rows: list[int], x: Tensor) -> Tensor:
        """Return outputs of the last tokens of rows whose first real token is at `first`.

        x (B', H, t, d).
        """
        B, H, T, d = x.shape
        S = self.length - first
        tokens = self.tokens
        groups = (B * self.heads, H // self.heads, T, d)
        x = x.to(tokens.keys.dtype).reshape(groups)
        if self.until >= S:
            parts = []
            for neighbours, heads in self._contiguous_rows(rows):
                inputs = self._tokens_of(tokens, neighbours, first)
                parts.append(exact_outputs(x[heads], *inputs))
            out = join_parts(parts, 0)
        elif native.applies(x, tokens.keys):
            # for any number of threads: a state keeps its engine
            out = self._attend_in_c(tokens, first, rows, x)
        else:
            y, v, keep = self._tokens_of(tokens, rows, first)
            past = self.epochs.get(first)
            metric = fit_metric(y, keep, self.sizes) if past is None else past.metric
            epochs = list_epochs(y, keep, self.sizes, S - T, metric, past)
            out, self.epochs[first] = attend_epochs(epochs, x, y, v, keep, self.sizes)
        out = out.reshape(B, H, T, out.shape[-1])
        if tokens.keep is None:
            return out
        keep = tokens.keep[_row_index(rows), 0, first:, 0]
        seen = keep.cumsum(1)[:, None, S - T :, None] > 0
        return torch.where(seen, out, 0.0)

    def _contiguous_rows(self, rows: list[int]) -> Iterator[tuple[list[int], slice]]:
        """Yield runs of neighbouring rows and the range of their heads among all."""
        start = 0
        for stop in range(1, len(rows) + 1):
            if stop == len(rows) or rows[stop] != rows[stop - 1] + 1:
                heads = slice(start * self.heads, stop * self.heads)
                yield rows[start:stop], heads
                start = stop

    def _attend_in_c(self, tokens: StoredTokens, first: int, rows: list[int], x: Tensor) -> Tensor:
        """Compute `_attend` with the C engine.

        The engine takes a prompt at once and continues from its memory, which has room for twice as many tokens.
        """
        S = self.length - first
        memory = self.memories.get(first)
        if memory is None or memory.capacity < S:
            y, v, keep = self._tokens_of(tokens, rows, first)
            metric = fit_metric(y, keep, self.sizes) if memory is None else memory.metric
            capacity = max(MIN_CAPACITY, 2 * S)
            sizes = engine_sizes(self.sizes, capacity)
            memory = native.empty_memory(y, v.shape[-1], metric, sizes, capacity)
            self.memories[first] = memory
        sizes = engine_sizes(self.sizes, memory.capacity)
        parts = []
        for neighbours, heads in self._contiguous_rows(rows):
            y, v, keep = self._tokens_of(tokens, neighbours, first)
            part = _select_heads(memory, heads)
            inputs = native.CausalInputs(keep, part.metric, sizes)
            parts.append(attend_in_c(x[heads], y, v, inputs, part))
        return join_parts(parts, 0)


def _select_heads(past: Past, heads: Tensor | slice) -> Past:
    """Return the state of some heads (of batch x key heads)."""
    return tree_map(lambda t: t[heads] if isinstance(t, Tensor) else t, past)


def _row_index(rows: list[int]) -> slice | list[int]:
    """Return a slice if the rows are neighbours, else the list."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return rows
