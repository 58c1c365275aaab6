"""Causal near-far attention token by token.

The state holds all keys and values, and the state of the past. Each row of a batch counts its tokens from its first
real one.

Notation: B batch, Hkv key heads, G query heads of a group, Z = B Hkv, T new tokens, S tokens so far, b tokens of a
block, d, dv.
"""

import copy
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from crt_exp.attention.baselines import Buffer
from crt_exp.attention.checks import (
    batch_indices,
    check_entries,
    check_inputs,
    check_result,
    compute_dtype,
    first_unmasked,
)
from crt_exp.nearfar import native
from crt_exp.nearfar.causal import (
    Epoch,
    attend_epochs,
    attend_in_c,
    concatenate,
    epochs_of,
    first_renewal,
    metric_of,
    options_of,
)
from crt_exp.nearfar.choice import KeyMetric, Sizes, exact_outputs

WHOLE = 16  # the C engine reads columns of buffers padded with zeros to a multiple of this
LEAST_CAPACITY = 1024  # tokens


class KeptKeys(NamedTuple):
    """All tokens so far, as views of buffers.

    Positions that another state can see are never changed.
    """

    keys: Tensor  # (B, Hkv, S, d)
    values: Tensor  # (B, Hkv, S, dv)
    keep: Tensor | None = None  # (B, 1, S, 1); None: all

    @property
    def sums(self) -> Tensor:
        """Tensor whose first dimension is the number of sequences."""
        return self.keys


class PastInC(NamedTuple):
    """`Epoch` of the C engine."""

    metric: KeyMetric
    memory: native.PastMemory

    def select(self, heads: Tensor) -> "PastInC":
        return tree_map(lambda t: t[heads] if isinstance(t, Tensor) else t, self)

    def copy(self) -> "PastInC":
        memory = self.memory._replace(numbers=self.memory.numbers.clone())
        return self._replace(memory=memory)


class RecallState:
    """Decoding state of causal near-far attention: all keys and values so far.

    A copy can be continued independently.
    """

    def __init__(self, sizes: Sizes, heads: int):
        self.sizes = sizes
        self.heads = heads
        self.length = 0  # tokens so far
        self.buffers = ()  # of the parts of `KeptKeys`
        self.columns = ()  # number of columns of each part
        self.firsts: list[int | None] = []  # position of the first real token of each row
        self.known: dict[int, Epoch | PastInC] = {}  # by position of the first real token
        self.until = first_renewal(sizes)  # number of first tokens that see all keys

    @property
    def kept(self) -> KeptKeys | None:
        if not self.buffers:
            return None
        parts = []
        for buffer, columns in zip(self.buffers, self.columns):
            parts.append(buffer.tensor[:, :, : self.length, :columns])
        return KeptKeys(*parts)

    @torch.no_grad()
    def step(
        self,
        x: Tensor,
        y: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        version: Hashable = None,
    ) -> Tensor:
        """Append T >= 1 tokens and return their outputs (B,H,T,dv), without gradient.

        x (B,H,T,d), y (B,Hkv,T,d), v (B,Hkv,T,dv); key_mask (B, T), True for tokens to keep. `version` is ignored,
        because the layer has no changing state. Raises ValueError as `near_far_attention` does.
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
        groups = {position for position in self.firsts if position is not None}
        if len(groups) == 1 and None not in self.firsts and max(groups) <= start:  # the usual case
            (first,) = groups
            unmasked = len(self.buffers) == 2
            if x.shape[2] == 1 and unmasked and self.length - first <= self.until:
                return self._attend_all_keys(first, x).to(v.dtype)
            return self._attend(first, self._rows(first), x).to(v.dtype)
        out = v.new_zeros(*x.shape[:3], v.shape[3])
        for first in groups:
            rows = self._rows(first)
            lead = max(0, first - start)
            index = _row_index(rows)
            out[index, :, lead:] = self._attend(first, rows, x[index, :, lead:]).to(v.dtype)
        return out

    @torch.no_grad()
    def take(self, y: Tensor, v: Tensor, key_mask: Tensor | None = None) -> None:
        """Append T >= 1 tokens without computing outputs.

        y (B,Hkv,T,d), v (B,Hkv,T,dv).
        """
        check_inputs(y, y, v, None, (), True, key_mask)
        self._append(y, v, key_mask)

    def _append(self, y: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
        B, _, T, d = y.shape
        dv = v.shape[3]
        dtype = compute_dtype(y, v)
        if self.buffers:
            self._check_continues(B, (d, dv))
        else:
            self.firsts = [None] * B
        self.columns = (d, dv, 1)
        y = y.to(dtype)
        v = v.to(dtype)
        keep = None
        masked = key_mask is not None and not bool(key_mask.all())
        if masked or len(self.buffers) == len(KeptKeys._fields):
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
        parts = [F.pad(y, (0, -d % WHOLE)), F.pad(v, (0, -dv % WHOLE))]
        if keep is not None:
            parts.append(keep)
        buffers = self.buffers or [Buffer(t[:, :, :0]) for t in parts]
        self.buffers = tuple(buffer.append(self.length, t) for buffer, t in zip(buffers, parts))
        self.length += T

    def _check_continues(self, batch: int, columns: tuple[int, int]) -> None:
        if len(self.firsts) != batch:
            raise ValueError(f"decoding state: {len(self.firsts)} sequences, got {batch}")
        if self.columns[:2] != columns:
            raise ValueError(f"decoding state: d, dv = {self.columns[:2]}, got {columns}")

    def _note_first_tokens(self, keep: Tensor | None) -> None:
        """Set the positions of first real tokens that are among new tokens (B, 1, T, 1)."""
        if keep is None:
            self.firsts = [self.length if first is None else first for first in self.firsts]
            return
        positions = first_unmasked(keep[:, 0, :, 0]).tolist()
        unmasked = keep.any(2).flatten().tolist()
        for row, first in enumerate(self.firsts):
            if first is None and unmasked[row]:
                self.firsts[row] = self.length + positions[row]

    def copy(self) -> "RecallState":
        """Return a copy that can be continued independently."""
        other = copy.copy(self)
        other.firsts = list(self.firsts)
        other.known = dict(self.known)
        for first, known in self.known.items():
            if isinstance(known, PastInC):
                other.known[first] = known.copy()
        return other

    def select(self, rows: Tensor) -> None:
        """Keep these batch entries in this order, for beam search.

        rows: any index of the batch dimension.
        """
        if not self.buffers:
            return
        rows = batch_indices(rows, len(self.firsts))
        self.buffers = tuple(
            Buffer(buffer.tensor[rows, :, : self.length], self.length) for buffer in self.buffers
        )
        heads = torch.arange(self.heads, device=rows.device)
        for first in list(self.known):
            group = self._rows(first)
            places = [group.index(row) for row in rows.tolist() if row in group]
            if places:
                index = torch.tensor(places, device=rows.device).unsqueeze(1) * self.heads + heads
                self.known[first] = self.known[first].select(index.flatten())
            else:
                del self.known[first]
        self.firsts = [self.firsts[row] for row in rows.tolist()]

    def _rows(self, first: int) -> list[int]:
        """Return the rows whose first real token is at position `first`."""
        return [row for row, position in enumerate(self.firsts) if position == first]

    def _tokens(self, rows: list[int], first: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys (Z, S, d), values and mask of these rows from position `first` on.

        Neighbouring rows are not copied.
        """
        tokens = self.kept
        index = _row_index(rows)
        y = tokens.keys[index, :, first:]
        v = tokens.values[index, :, first:]
        keep = None
        if tokens.keep is not None:
            mask = tokens.keep[index, :, first:]
            if not bool(mask.all()):
                keep = mask[:, 0, :, 0].repeat_interleave(self.heads, 0)
        return y.flatten(0, 1), v.flatten(0, 1), keep

    def _attend_all_keys(self, first: int, x: Tensor) -> Tensor:
        """Compute `_attend` for one token of each row if all keys are exact.

        x (B, H, 1, d). This path has the least overhead and takes no mask.
        """
        tokens = self.kept
        y = tokens.keys[:, :, first:].flatten(0, 1)
        v = tokens.values[:, :, first:].flatten(0, 1)
        out = exact_outputs(x.to(y.dtype).reshape(len(y), -1, 1, x.shape[3]), y, v, None)
        return out.reshape(*x.shape[:3], v.shape[2])

    def _attend(self, first: int, rows: list[int], x: Tensor) -> Tensor:
        """Return outputs of the last tokens of rows whose first real token is at `first`.

        x (B', H, t, d).
        """
        T = x.shape[2]
        S = self.length - first
        x = x.to(self.buffers[0].tensor.dtype).unflatten(1, (self.heads, -1)).flatten(0, 1)
        if self.until >= S:
            parts = []
            for run, heads in self._contiguous_rows(rows):
                y, v, keep = self._tokens(run, first)
                parts.append(exact_outputs(x[heads], y, v, keep))
            out = concatenate(parts, 0)
        elif native.applies(x, self.kept.keys):
            # for any number of threads: a state keeps its engine
            out = self._attend_in_c(first, rows, x)
        else:
            y, v, keep = self._tokens(rows, first)
            known = self.known.get(first)
            metric = metric_of(y, keep, self.sizes) if known is None else known.metric
            epochs = epochs_of(y, keep, self.sizes, S - T, metric, known)
            out, self.known[first] = attend_epochs(epochs, x, y, v, keep, self.sizes)
        out = out.unflatten(0, (-1, self.heads)).flatten(1, 2)
        keep = self.kept.keep
        if keep is None:
            return out
        keep = keep[_row_index(rows), 0, first:, 0]
        seen = keep.cumsum(1)[:, S - T :] > 0
        return torch.where(seen[:, None, :, None], out, 0.0)

    def _contiguous_rows(self, rows: list[int]) -> Iterator[tuple[list[int], slice]]:
        """Yield runs of neighbouring rows and the range of their heads among all."""
        start = 0
        for stop in range(1, len(rows) + 1):
            if stop == len(rows) or rows[stop] != rows[stop - 1] + 1:
                yield rows[start:stop], slice(start * self.heads, stop * self.heads)
                start = stop

    def _attend_in_c(self, first: int, rows: list[int], x: Tensor) -> Tensor:
        """Compute `_attend` with the C engine.

        The engine takes a prompt at once and continues from its memory.
        """
        S = self.length - first
        known = self.known.get(first)
        if known is None or known.memory.capacity < S:
            y, _, keep = self._tokens(rows, first)
            metric = metric_of(y, keep, self.sizes) if known is None else known.metric
            capacity = max(LEAST_CAPACITY, 2 * S)
            dv = self.kept.values.shape[-1]
            sizes = options_of(self.sizes, capacity)
            known = PastInC(metric, native.empty_memory(y, dv, sizes, capacity))
            self.known[first] = known
        memory = known.memory
        sizes = options_of(self.sizes, memory.capacity)
        parts = []
        for run, heads in self._contiguous_rows(rows):
            y, v, keep = self._tokens(run, first)
            metric = known.metric
            inputs = native.CausalInputs(keep, metric.shift[heads], metric.root[heads], sizes)
            of_run = memory._replace(numbers=memory.numbers[heads])
            parts.append(attend_in_c(x[heads], y, v, inputs, of_run))
        return concatenate(parts, 0)


def _row_index(rows: list[int]) -> slice | list[int]:
    """Return a slice if the rows are neighbours, else the list."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return rows
