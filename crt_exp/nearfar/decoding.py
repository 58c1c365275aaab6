"""Causal near-far attention token by token.

The state holds all keys and values, and the state of the past. Each row of a batch counts its tokens from its first
real one.

Notation: B batch, Hkv key heads, G query heads of a group, Z = B Hkv, T new tokens, S tokens so far, b tokens of a
block, d, dv.
"""

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from crt_exp.attention.baselines import Buffer
from crt_exp.attention.checks import (
    batch_indices,
    check_entries,
    check_inputs,
    check_result,
    compute_dtype,
    first_unmasked,
    without_padding,
)
from crt_exp.attention.decoding import TokenState
from crt_exp.nearfar import native
from crt_exp.nearfar.causal import (
    Epoch,
    attend_epochs,
    attend_past,
    fit_metric,
    list_epochs,
)
from crt_exp.nearfar.choice import Sizes, unmasked_keys
from crt_exp.nearfar.dispatch import join_key_heads, split_key_heads

PADDED_COLUMNS = 16  # the C engine reads columns padded with zeros to a multiple of this
MIN_CAPACITY = 1024  # tokens


class RowGroup:
    """Rows of a batch whose first real tokens are at position `first`, and all their tokens from there on."""

    def __init__(self, rows: list[int], first: int, sizes: Sizes):
        self.rows = rows
        self.first = first
        self.sizes = sizes
        self.keys = Buffer()  # (Z, 1, S, d), columns padded
        self.values = Buffer()
        self.keep: Tensor | None = None  # (Z, S); None: all
        # state of the past, beyond the first renewal: in PyTorch, or in C
        self.epoch: Epoch | None = None
        self.memory: native.PastMemory | None = None

    def step(
        self,
        x: Tensor,
        y: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
    ) -> Tensor:
        """Append tokens of these rows and return their outputs (., H, T, dv); masked keys are 0."""
        q, new_keys, new_values, new_keep = split_key_heads(x, y, v, key_mask)
        keys = self.keys.append(_padded_columns(new_keys))
        keys = keys[:, 0, :, : y.shape[3]]
        values = self.values.append(_padded_columns(new_values))
        values = values[:, 0, :, : v.shape[3]]
        if new_keep is not None and bool(new_keep.all()):
            new_keep = None
        if new_keep is not None or self.keep is not None:
            past = unmasked_keys(keys[:, : -y.shape[2]], self.keep)
            self.keep = torch.cat([past, unmasked_keys(new_keys, new_keep)], 1)
        # for any number of threads: a state keeps its engine
        attend_far = self._attend_in_c if native.applies(x, y) else self._attend_in_pytorch
        attend_far = partial(attend_far, y=keys, v=values)
        out = attend_past(attend_far, q, keys, values, self.keep, self.sizes)
        return join_key_heads(out, y)

    def _attend_in_pytorch(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        if self.epoch is None:
            metric = fit_metric(y, self.keep, self.sizes)
        else:
            metric = self.epoch.sets.metric
        first = y.shape[1] - x.shape[2]
        epochs = list_epochs(y, self.keep, self.sizes, first, metric, self.epoch)
        out, self.epoch = attend_epochs(epochs, x, y, v, self.keep, self.sizes)
        return out

    def _attend_in_c(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Attend with the C engine.

        It takes a prompt at once and continues from its memory, which has room for twice as many tokens.
        """
        S = y.shape[1]
        memory = self.memory
        if memory is None or memory.capacity < S:
            metric = fit_metric(y, self.keep, self.sizes) if memory is None else memory.metric
            capacity = max(MIN_CAPACITY, 2 * S)
            memory = native.empty_memory(y, v.shape[-1], metric, self.sizes, capacity)
            self.memory = memory
        fields = native.causal_fields(x, y, v, self.keep, self.sizes, memory)
        return native.causal(x, y, v, fields)

    def select(self, places: list[int], rows: list[int]) -> "RowGroup":
        """Return a copy with the rows at these places, as these rows of a new batch."""

        def select_rows(t: Tensor) -> Tensor:
            return t.unflatten(0, (len(self.rows), -1))[places].flatten(0, 1)

        other = copy.copy(self)
        other.rows = rows
        other.keys = Buffer(select_rows(self.keys.rows))
        other.values = Buffer(select_rows(self.values.rows))
        parts = (self.keep, self.epoch, self.memory)
        other.keep, other.epoch, other.memory = tree_map_only(Tensor, select_rows, parts)
        return other


def _padded_columns(t: Tensor) -> Tensor:
    return F.pad(t, (0, -t.shape[-1] % PADDED_COLUMNS)).unsqueeze(1)


class RecallState(TokenState):
    """Decoding state of causal near-far attention: all keys and values so far.

    A copy can be continued independently.

    >>> state = RecallState(Sizes(open=16))
    >>> q, k, v = torch.randn(3, 1, 2, 100, 8)
    >>> prompt = state.step(q, k, v)
    >>> token = state.step(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:])
    >>> state.length, tuple(token.shape)
    (101, (1, 2, 1, 8))
    """

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        self.groups: list[RowGroup] = []
        self.batch = 0  # number of sequences
        self.waiting: list[int] = []  # rows without a real token so far
        self.columns = (0, 0)  # d, dv

    def tensors(self) -> list[Tensor]:
        tensors = []
        for group in self.groups:
            tensors += [group.keys.rows, group.values.rows]
        return tensors

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
        columns = (y.shape[3], v.shape[3])
        if self.length == 0:
            self.batch = len(y)
            self.waiting = list(range(len(y)))
            self.columns = columns
        if self.batch != len(y):
            raise ValueError(f"decoding state: {self.batch} sequences, got {len(y)}")
        if self.columns != columns:
            raise ValueError(f"decoding state: d, dv = {self.columns}, got {columns}")
        dtype = compute_dtype(y, v)
        if key_mask is not None:
            x = torch.where(key_mask[:, None, :, None] | x.isfinite(), x, 0.0)
        y, v = without_padding(key_mask, y, v)
        check_result(torch.linalg.vector_norm(y, dim=(1, 2, 3)))
        check_entries(x)
        start = self.length
        self.length += y.shape[2]
        self._group_rows(start, unmasked_keys(y[:, 0], key_mask))
        out = v.new_zeros(*x.shape[:3], v.shape[3])
        for group in self.groups:
            lead = max(0, group.first - start)
            rows: Any = slice(None) if len(group.rows) == len(x) else group.rows
            q, k, values = (t[rows, :, lead:].to(dtype) for t in (x, y, v))
            keep = None if key_mask is None else key_mask[rows, lead:]
            out[rows, :, lead:] = group.step(q, k, values, keep)
        return out

    def _group_rows(self, start: int, unmasked: Tensor) -> None:
        """Group waiting rows whose first real tokens are among new tokens (B, T) from position `start` on."""
        if not self.waiting:
            return
        firsts = first_unmasked(unmasked).tolist()
        started = [row for row in self.waiting if unmasked[row].any()]
        self.waiting = [row for row in self.waiting if row not in started]
        for lead in sorted({firsts[row] for row in started}):
            rows = [row for row in started if firsts[row] == lead]
            self.groups.append(RowGroup(rows, start + lead, self.sizes))

    def copy(self) -> "RecallState":
        other = copy.copy(self)
        other.select(torch.arange(self.batch))
        return other

    def select(self, rows: Tensor) -> None:
        if not self.length:
            return
        chosen = batch_indices(rows, self.batch).tolist()
        groups = []
        for group in self.groups:
            own = [i for i, row in enumerate(chosen) if row in group.rows]
            if own:
                groups.append(group.select([group.rows.index(chosen[i]) for i in own], own))
        self.groups = groups
        self.waiting = [i for i, row in enumerate(chosen) if row in self.waiting]
        self.batch = len(chosen)
