"""Near-far attention with recall token by token: all keys are kept, and what is known of those before a renewal.

Each row of a batch counts its tokens from its first real one. Legend: B batch, Hkv key heads, G query heads of a group,
Z = B Hkv, T new tokens, S tokens so far, b tokens of a block, d, dv.
"""

import copy
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from crt_exp.attention.baselines import Buffer
from crt_exp.attention.checks import check_entries, check_inputs, check_result, compute_dtype, entries
from crt_exp.attention.padding import first_kept
from crt_exp.nearfar.choice import KeyMetric, Sizes, exactly, one_hot
from crt_exp.nearfar import native
from crt_exp.nearfar.causal import (
    Epoch,
    RecallNearFar,
    Seen,
    epoch_cells,
    in_chunks,
    kept_of,
    metric_of,
    options_of,
    renewals,
    rows_of,
)


WHOLE = 16             # columns of buffers are filled up with zeros to a multiple of it, as the C engine reads them
LEAST_ROOM = 1024      # tokens


class KeptKeys(NamedTuple):
    """All tokens so far, of buffers that may be longer: never changed where another state looks at them."""

    keys: Tensor      # (B, Hkv, S, d)
    values: Tensor    # (B, Hkv, S, dv)
    keep: Tensor | None = None     # (B, 1, S, 1); None: all

    @property
    def sums(self) -> Tensor:
        """What tells how many sequences there are."""
        return self.keys


class Known(NamedTuple):
    """Of rows whose first real token is at the same place: the epoch of their last token, and what joined since."""

    blocks: int       # that are far
    epoch: Epoch
    member: Tensor    # (Z, far): whether a key lies in a cell,
    cell: Tensor      # (Z, far): and in which
    sums: Tensor      # (Z, K, dv + d + 2): of the keys that are far

    def of(self, heads: Tensor) -> "Known":
        """Those of some heads (of the batch and of keys)."""
        def own(t: Any) -> Any:
            return t[heads] if isinstance(t, Tensor) and t.ndim > 1 else t

        return tree_map(own, self)


class KeptInC(NamedTuple):
    """The same in the C engine, for at most `room` tokens."""

    blocks: int       # that are far
    room: int
    metric: KeyMetric
    kept: Tensor      # (Z, numbers), of one state alone

    def of(self, heads: Tensor) -> "KeptInC":
        return self._replace(metric=KeyMetric(*(t[heads] for t in self.metric)), kept=self.kept[heads])


class RecallState:
    """What causal near-far attention with recall remembers of the tokens so far: their keys and values.

    A copy is a point to come back to.
    """

    def __init__(self, sizes: Sizes, heads: int):
        self.sizes, self.heads = sizes, heads
        self.length, self.buffers = 0, ()         # of the parts of `KeptKeys`,
        self.columns = ()                         # and how many of them
        self.firsts: list[int | None] = []        # of each row: the place of its first real token
        self.known: dict[int, Known | KeptInC] = {}         # by that place
        self.until = renewals(sizes, 0)[0]        # tokens that see all keys

    @property
    def kept(self) -> KeptKeys | None:
        parts = (buffer.tensor[:, :, :self.length, :n] for buffer, n in zip(self.buffers, self.columns))
        return KeptKeys(*parts) if self.buffers else None

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None = None, version: Hashable = None) -> Tensor:
        """Takes T >= 1 new tokens x (B,H,T,d), y (B,Hkv,T,d), v (B,Hkv,T,dv) and returns their outputs (B,H,T,dv), no
        gradient. key_mask (B, T), True = keep; version: nothing of the layer changes. Raises ValueError as
        `near_far_attention` does."""
        check_inputs(x, y, v, None, (), True, key_mask)
        if x.shape[2] != y.shape[2]:
            raise ValueError(f"{x.shape[2]} queries and {y.shape[2]} keys: a step takes both of each new token")
        start = self.length
        self._take(y, v, key_mask)
        x = x if key_mask is None else torch.where(key_mask[:, None, :, None] | x.isfinite(), x, 0.0)
        check_entries(x)
        groups = {place for place in self.firsts if place is not None}
        if len(groups) == 1 and None not in self.firsts and max(groups) <= start:         # most often
            first, = groups
            alone = x.shape[2] == 1 and len(self.buffers) == 2 and self.length - first <= self.until
            return (self._all_keys(first, x) if alone else self._read(first, self._rows(first), x)).to(v.dtype)
        out = v.new_zeros(*x.shape[:3], v.shape[3])
        for first in groups:
            rows, lead = self._rows(first), max(0, first - start)
            at = _places(rows)
            out[at, :, lead:] = self._read(first, rows, x[at, :, lead:]).to(v.dtype)
        return out

    @torch.no_grad()
    def take(self, y: Tensor, v: Tensor, key_mask: Tensor | None = None) -> None:
        """Takes T >= 1 tokens whose outputs are known or not wanted: y (B,Hkv,T,d), v (B,Hkv,T,dv)."""
        check_inputs(y, y, v, None, (), True, key_mask)
        self._take(y, v, key_mask)

    def _take(self, y: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
        (B, T), dtype = (len(y), y.shape[2]), compute_dtype(y, v)
        if self.buffers and len(self.firsts) != B:
            raise ValueError(f"the decoding state holds {len(self.firsts)} sequences, got {B}")
        if self.buffers and self.columns[:2] != (y.shape[3], v.shape[3]):
            raise ValueError(f"the decoding state holds keys and values with d, dv = {self.columns[:2]}, got "
                             f"{(y.shape[3], v.shape[3])}")
        self.firsts, self.columns = self.firsts if self.buffers else [None] * B, (y.shape[3], v.shape[3], 1)
        parts = [y.to(dtype), v.to(dtype)]
        if len(self.buffers) == len(KeptKeys._fields) or not (key_mask is None or bool(key_mask.all())):
            keep = torch.ones(B, 1, T, 1, dtype=torch.bool, device=y.device) if key_mask is None else (
                key_mask[:, None, :, None])
            parts = [*(torch.where(keep, t, 0.0) for t in parts), keep]                      # padding may hold NaN
            if len(self.buffers) == len(parts) - 1:
                self.buffers += Buffer(keep.new_ones(B, 1, self.length, 1), self.length),
        check_result(torch.linalg.vector_norm(parts[0], dim=(1, 2, 3)))
        if None in self.firsts:
            new = [0] * B if len(parts) == 2 else torch.where(keep.any(2), first_kept(keep[:, 0, :, 0])[:, None, None],
                                                              -1).flatten().tolist()
            self.firsts = [place if place is not None else self.length + at if at >= 0 else None
                           for place, at in zip(self.firsts, new)]
        parts[:2] = (F.pad(t, (0, -t.shape[3] % WHOLE)) for t in parts[:2])
        buffers = self.buffers or [Buffer(t[:, :, :0]) for t in parts]
        self.buffers = tuple(buffer.added(self.length, t) for buffer, t in zip(buffers, parts))
        self.length += T

    def copy(self) -> "RecallState":
        """The same state, to go on from here in two ways."""
        other = copy.copy(self)
        other.known = {first: known._replace(kept=known.kept.clone()) if isinstance(known, KeptInC) else known
                       for first, known in self.known.items()}
        return other

    def select(self, rows: Tensor) -> None:
        """Keeps these batch entries, in this order: what a beam search needs. rows: as tensors are indexed."""
        if not self.buffers:
            return
        rows = entries(rows, len(self.firsts))
        self.buffers = tuple(Buffer(buffer.tensor[rows, :, :self.length], self.length) for buffer in self.buffers)
        places = {first: self._rows(first) for first in self.known}
        chosen = [self.firsts[row] for row in rows.tolist()]
        heads = torch.arange(self.heads, device=rows.device)
        for first, own in places.items():
            kept = [own.index(row) for row, place in zip(rows.tolist(), chosen) if place == first]
            if kept:
                at = torch.tensor(kept, device=rows.device).unsqueeze(1) * self.heads + heads
                self.known[first] = self.known[first].of(at.flatten())
            else:
                del self.known[first]
        self.firsts = chosen

    def _rows(self, first: int) -> list[int]:
        """Those whose first real token is there."""
        return [row for row, place in enumerate(self.firsts) if place == first]

    def _tokens(self, rows: list[int], first: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys (Z, S, d), values and mask of these rows from there on, where they lie if the rows are neighbours."""
        y, v, *masks = (t[_places(rows), :, first:] for t in self.kept if t is not None)
        keep = None
        if masks and not bool(masks[0].all()):
            keep = masks[0][:, 0, :, 0].repeat_interleave(self.heads, 0)
        return y.flatten(0, 1), v.flatten(0, 1), keep

    def _all_keys(self, first: int, x: Tensor) -> Tensor:
        """`_read` of one token of each row, x (B, H, 1, d), where all keys are exact and none is left out: as short as
        the work is."""
        y, v = (t[:, :, first:].flatten(0, 1) for t in self.kept[:2])
        out = exactly(x.to(y.dtype).reshape(len(y), -1, 1, x.shape[3]), y, v, None)
        return out.reshape(*x.shape[:3], v.shape[2])

    def _read(self, first: int, rows: list[int], x: Tensor) -> Tensor:
        """Outputs of the last tokens of the rows whose first real token is at `first`: x (B', H, t, d)."""
        T, S, until = x.shape[2], self.length - first, self.until
        x = x.to(self.buffers[0].tensor.dtype).unflatten(1, (self.heads, -1)).flatten(0, 1)
        if until >= S:
            out = _joined([exactly(x[at], *self._tokens(run, first)) for run, at in self._runs(rows)], 0)
        elif native.applies(x, self.kept.keys):     # whatever the threads: a state goes on as it began
            out = self._by_c(first, rows, x)
        else:
            y, v, keep = self._tokens(rows, first)
            b = self.sizes.block
            if (S - T) // b < (S - 1) // b or until > S - T:                # in parallel
                call = RecallNearFar(self.sizes)
                out = call.attend(x, y, v, keep, call.choose(x, y, keep, slice(None)))
            else:
                out = self._within(first, x, y, v, keep)
        out, keep = out.unflatten(0, (-1, self.heads)).flatten(1, 2), self.kept.keep
        if keep is None:
            return out
        keep = keep[_places(rows), 0, first:, 0]
        return torch.where((keep.cumsum(1)[:, S - T:] > 0)[:, None, :, None], out, 0.0)

    def _runs(self, rows: list[int]) -> Iterator[tuple[list[int], slice]]:
        """Neighbours among these rows, and the places of their heads among those of all."""
        starts = [0, *(i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1), len(rows)]
        for start, stop in zip(starts, starts[1:]):
            yield rows[start:stop], slice(start * self.heads, stop * self.heads)

    def _within(self, first: int, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        """Of queries (Z, G, t, d) of one block, the last ones of keys (Z, S, d)."""
        b, keep, places = self.sizes.block, kept_of(y, keep), renewals(self.sizes, y.shape[1])
        block = (y.shape[1] - 1) // b
        known = self._known(first, *places[-2:], block - 1, y, v, keep)
        self.known[first] = known
        far, cells = epoch_cells(known.sums.unsqueeze(1), v.shape[-1], known.epoch)
        seen = Seen(y, v, keep, known.member, known.cell, far, cells, block)
        lead = y.shape[1] - x.shape[2] - block * b
        own = torch.arange(lead, lead + x.shape[2], device=x.device).repeat(x.shape[1])
        out = in_chunks(known.epoch, seen, x.flatten(1, 2).unsqueeze(1), self.sizes, own)
        return out.squeeze(1).unflatten(1, (x.shape[1], -1))

    def _by_c(self, first: int, rows: list[int], x: Tensor) -> Tensor:
        """The C engine takes a prompt at once, and goes on from what it knows after it."""
        S, known = self.length - first, self.known.get(first)
        blocks = (S - 1) // self.sizes.block - 1
        if known is None or known.room < S or known.blocks > blocks:
            y, _, keep = self._tokens(rows, first)
            metric = metric_of(y, keep, self.sizes) if known is None else known.metric
            room = max(LEAST_ROOM, 2 * S)
            none = native.room_for_steps(y, self.kept.values.shape[-1], options_of(self.sizes, room), room)
            known = KeptInC(blocks, room, metric, none)
        self.known[first] = known = known._replace(blocks=blocks)
        short, parts = max(0, min(x.shape[2], self.until - S + x.shape[2])), []
        for run, at in self._runs(rows):
            y, v, keep = self._tokens(run, first)
            stop = S - x.shape[2] + short
            near = [exactly(x[at, :, :short], y[:, :stop], v[:, :stop], keep)] if short else []
            options = options_of(self.sizes, known.room)
            given = native.Given(keep, *(t[at] for t in (known.metric.shift, known.metric.root)), options)
            out = native.recall_step(x[at, :, short:], y, v, given, known.room, known.kept[at])
            parts.append(_joined([*near, out], 2))
        return _joined(parts, 0)

    def _known(self, first: int, start: int, stop: int, blocks: int, y: Tensor, v: Tensor, keep: Tensor) -> Known:
        """Of the epoch from `start` to `stop`, where so many blocks of the keys are far."""
        known, b = self.known.get(first), self.sizes.block
        if known is not None and known.blocks == blocks:
            return known
        if known is None or known.epoch.start != start or known.blocks > blocks:
            metric = metric_of(y, keep, self.sizes) if known is None else known.epoch.metric
            epoch = Epoch.of(y, keep, self.sizes, start, stop, metric)
            none = y.new_zeros(len(y), epoch.centres.shape[1], v.shape[-1] + y.shape[-1] + 2)
            known = Known(0, epoch, epoch.pool, epoch.cell, none)
        epoch, at, far = known.epoch, known.member.shape[1], blocks * b
        member, cell = known.member, known.cell
        if far > at:
            member = torch.cat([member, keep[:, at:far]], 1)
            cell = torch.cat([cell, epoch.cells(y[:, at:far], keep[:, at:far])], 1)
        done = known.blocks * b
        rows = rows_of(y[:, done:far], v[:, done:far], member[:, done:far], cell[:, done:far], epoch)
        sums = known.sums + one_hot(cell[:, done:far], epoch.centres.shape[1], rows.dtype).mT @ rows
        return Known(blocks, epoch, member, cell, sums)


def _places(rows: list[int]) -> slice | list[int]:
    """A slice where they are neighbours."""
    return slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] == len(rows) - 1 else rows


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
