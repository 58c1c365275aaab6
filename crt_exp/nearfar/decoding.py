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
    metric_of,
    options_of,
    renewals,
)
from crt_exp.nearfar.choice import KeyMetric, Sizes, exact_outputs

WHOLE = 16  # the C engine reads columns of buffers padded with zeros to a multiple of this
LEAST_ROOM = 1024  # tokens


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


class KnownInC(NamedTuple):
    """`Epoch` of the C engine."""

    metric: KeyMetric
    state: native.State

    def select(self, heads: Tensor) -> "KnownInC":
        return tree_map(lambda t: t[heads] if isinstance(t, Tensor) else t, self)


class RecallState:
    """Decoding state of causal near-far attention: all keys and values so far.

    A copy can be continued independently.
    """

    def __init__(self, sizes: Sizes, heads: int):
        self.sizes, self.heads = sizes, heads
        self.length, self.buffers = 0, ()  # of the parts of `KeptKeys`
        self.columns = ()  # number of columns of each part
        self.firsts: list[int | None] = []  # position of the first real token of each row
        self.known: dict[int, Epoch | KnownInC] = {}  # by position of the first real token
        self.until = renewals(sizes, 0)[0]  # number of first tokens that see all keys

    @property
    def kept(self) -> KeptKeys | None:
        parts = (
            buffer.tensor[:, :, : self.length, :n] for buffer, n in zip(self.buffers, self.columns)
        )
        return KeptKeys(*parts) if self.buffers else None

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
        self._take(y, v, key_mask)
        x = (
            x
            if key_mask is None
            else torch.where(key_mask[:, None, :, None] | x.isfinite(), x, 0.0)
        )
        check_entries(x)
        groups = {position for position in self.firsts if position is not None}
        if len(groups) == 1 and None not in self.firsts and max(groups) <= start:  # the usual case
            (first,) = groups
            alone = x.shape[2] == 1 and len(self.buffers) == 2 and self.length - first <= self.until
            return (
                self._all_keys(first, x) if alone else self._read(first, self._rows(first), x)
            ).to(v.dtype)
        out = v.new_zeros(*x.shape[:3], v.shape[3])
        for first in groups:
            rows, lead = self._rows(first), max(0, first - start)
            at = _places(rows)
            out[at, :, lead:] = self._read(first, rows, x[at, :, lead:]).to(v.dtype)
        return out

    @torch.no_grad()
    def take(self, y: Tensor, v: Tensor, key_mask: Tensor | None = None) -> None:
        """Append T >= 1 tokens without computing outputs.

        y (B,Hkv,T,d), v (B,Hkv,T,dv).
        """
        check_inputs(y, y, v, None, (), True, key_mask)
        self._take(y, v, key_mask)

    def _take(self, y: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
        (B, T), dtype = (len(y), y.shape[2]), compute_dtype(y, v)
        if self.buffers and len(self.firsts) != B:
            raise ValueError(f"decoding state: {len(self.firsts)} sequences, got {B}")
        if self.buffers and self.columns[:2] != (y.shape[3], v.shape[3]):
            raise ValueError(
                f"decoding state: d, dv = {self.columns[:2]}, got {(y.shape[3], v.shape[3])}"
            )
        self.firsts, self.columns = (
            self.firsts if self.buffers else [None] * B,
            (y.shape[3], v.shape[3], 1),
        )
        parts = [y.to(dtype), v.to(dtype)]
        if len(self.buffers) == len(KeptKeys._fields) or not (
            key_mask is None or bool(key_mask.all())
        ):
            keep = (
                torch.ones(B, 1, T, 1, dtype=torch.bool, device=y.device)
                if key_mask is None
                else (key_mask[:, None, :, None])
            )
            parts = [*(torch.where(keep, t, 0.0) for t in parts), keep]  # padding may hold NaN
            if len(self.buffers) == len(parts) - 1:
                self.buffers += (Buffer(keep.new_ones(B, 1, self.length, 1), self.length),)
        check_result(torch.linalg.vector_norm(parts[0], dim=(1, 2, 3)))
        if None in self.firsts:
            new = (
                [0] * B
                if len(parts) == 2
                else torch.where(keep.any(2), first_unmasked(keep[:, 0, :, 0])[:, None, None], -1)
                .flatten()
                .tolist()
            )
            self.firsts = [
                position if position is not None else self.length + at if at >= 0 else None
                for position, at in zip(self.firsts, new)
            ]
        parts[:2] = (F.pad(t, (0, -t.shape[3] % WHOLE)) for t in parts[:2])
        buffers = self.buffers or [Buffer(t[:, :, :0]) for t in parts]
        self.buffers = tuple(buffer.append(self.length, t) for buffer, t in zip(buffers, parts))
        self.length += T

    def copy(self) -> "RecallState":
        """Return a copy that can be continued independently."""
        other = copy.copy(self)
        own = lambda known: known._replace(
            state=known.state._replace(kept=known.state.kept.clone())
        )
        other.known = {
            first: own(known) if isinstance(known, KnownInC) else known
            for first, known in self.known.items()
        }
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
        positions = {first: self._rows(first) for first in self.known}
        chosen = [self.firsts[row] for row in rows.tolist()]
        heads = torch.arange(self.heads, device=rows.device)
        for first, own in positions.items():
            kept = [
                own.index(row) for row, position in zip(rows.tolist(), chosen) if position == first
            ]
            if kept:
                at = torch.tensor(kept, device=rows.device).unsqueeze(1) * self.heads + heads
                self.known[first] = self.known[first].select(at.flatten())
            else:
                del self.known[first]
        self.firsts = chosen

    def _rows(self, first: int) -> list[int]:
        """Return the rows whose first real token is at position `first`."""
        return [row for row, position in enumerate(self.firsts) if position == first]

    def _tokens(self, rows: list[int], first: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys (Z, S, d), values and mask of these rows from position `first` on.

        Neighbouring rows are not copied.
        """
        y, v, *masks = (t[_places(rows), :, first:] for t in self.kept if t is not None)
        keep = None
        if masks and not bool(masks[0].all()):
            keep = masks[0][:, 0, :, 0].repeat_interleave(self.heads, 0)
        return y.flatten(0, 1), v.flatten(0, 1), keep

    def _all_keys(self, first: int, x: Tensor) -> Tensor:
        """Compute `_read` for one token of each row if all keys are exact.

        x (B, H, 1, d). This path has the least overhead and takes no mask.
        """
        y, v = (t[:, :, first:].flatten(0, 1) for t in self.kept[:2])
        out = exact_outputs(x.to(y.dtype).reshape(len(y), -1, 1, x.shape[3]), y, v, None)
        return out.reshape(*x.shape[:3], v.shape[2])

    def _read(self, first: int, rows: list[int], x: Tensor) -> Tensor:
        """Return outputs of the last tokens of rows whose first real token is at `first`.

        x (B', H, t, d).
        """
        T, S, until = x.shape[2], self.length - first, self.until
        x = x.to(self.buffers[0].tensor.dtype).unflatten(1, (self.heads, -1)).flatten(0, 1)
        if until >= S:
            out = concatenate(
                [
                    exact_outputs(x[at], *self._tokens(run, first))
                    for run, at in self._contiguous_rows(rows)
                ],
                0,
            )
        elif native.applies(
            x, self.kept.keys
        ):  # for any number of threads: a state keeps its engine
            out = self._read_native(first, rows, x)
        else:
            (y, v, keep), known = self._tokens(rows, first), self.known.get(first)
            metric = metric_of(y, keep, self.sizes) if known is None else known.metric
            epochs = epochs_of(y, keep, self.sizes, S - T, metric, known)
            out, self.known[first] = attend_epochs(epochs, x, y, v, keep, self.sizes)
        out, keep = out.unflatten(0, (-1, self.heads)).flatten(1, 2), self.kept.keep
        if keep is None:
            return out
        keep = keep[_places(rows), 0, first:, 0]
        return torch.where((keep.cumsum(1)[:, S - T :] > 0)[:, None, :, None], out, 0.0)

    def _contiguous_rows(self, rows: list[int]) -> Iterator[tuple[list[int], slice]]:
        """Yield runs of neighbouring rows and the range of their heads among all."""
        starts = [0, *(i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1), len(rows)]
        for start, stop in zip(starts, starts[1:]):
            yield rows[start:stop], slice(start * self.heads, stop * self.heads)

    def _read_native(self, first: int, rows: list[int], x: Tensor) -> Tensor:
        """Compute `_read` with the C engine.

        The engine takes a prompt at once and continues from its state.
        """
        S, known = self.length - first, self.known.get(first)
        if known is None or known.state.room < S:
            y, _, keep = self._tokens(rows, first)
            metric = metric_of(y, keep, self.sizes) if known is None else known.metric
            room = max(LEAST_ROOM, 2 * S)
            state = native.new_state(
                y, self.kept.values.shape[-1], options_of(self.sizes, room), room
            )
            known = self.known[first] = KnownInC(metric, state)
        parts, options = [], options_of(self.sizes, known.state.room)
        for run, at in self._contiguous_rows(rows):
            y, v, keep = self._tokens(run, first)
            given = native.Given(keep, known.metric.shift[at], known.metric.root[at], options)
            parts.append(
                attend_in_c(x[at], y, v, given, known.state._replace(kept=known.state.kept[at]))
            )
        return concatenate(parts, 0)


def _places(rows: list[int]) -> slice | list[int]:
    """Return a slice if the rows are neighbours, else the list."""
    return slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] == len(rows) - 1 else rows
