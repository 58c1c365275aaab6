"""Near-far attention token by token: the keys of two blocks, the heavy ones and sums over cells, whatever the length.

Each row of a batch counts its tokens from its first real one, as the parallel pass does: what a row gives does not
depend on the padding in front of it. Legend: B batch, Hkv key heads, G query heads of a group, Z = B Hkv, T new tokens,
b tokens of a block, n heavy keys, K cells, d, dv.
"""

import copy
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.checks import check_entries, check_inputs, compute_dtype, entries
from crt_exp.attention.padding import first_kept
from crt_exp.nearfar.causal import Codebook, codebook_cells, displaced, outer, slope
from crt_exp.nearfar.choice import KeyMetric, Sizes, moments, nearest, scores, weights
from crt_exp.nearfar.engine.block_sums import one_hot
from crt_exp.nearfar.engine.constants import HIDDEN
from crt_exp.nearfar.engine.sets import Weighted, plain_gather


class KeptCells(NamedTuple):
    """What is remembered, (B, Hkv, ...) each: never changed in place."""

    sums: Tensor      # (., K, dv + d + 2): of the keys of the cells
    keys: Tensor      # (., n + 2 b, d): heavy ones, then those of the last blocks
    values: Tensor    # (., n + 2 b, dv)
    score: Tensor     # (., n + 2 b): -inf for keys that are not there
    outers: Tensor    # (., dv, d): of the keys of the cells, where values are to first order

    def flat(self) -> "KeptCells":
        return KeptCells(*(t.flatten(0, 1) for t in self))

    def of(self, batch: int) -> "KeptCells":
        return KeptCells(*(t.unflatten(0, (batch, -1)) for t in self))


class NearFarState:
    """What causal near-far attention remembers of the tokens so far, for a fixed codebook of (Hkv, ...).

    `version` tags the codebook for a caller that counts refits: a `step` with another version is refused. A copy, which
    costs nothing, is a point to come back to.
    """

    def __init__(self, sizes: Sizes, codebook: Codebook, heads: int, version: Hashable = None):
        self.sizes, self.codebook, self.heads, self.version = sizes, codebook, heads, version
        self.length, self.kept = 0, None
        self.counts: list[int] = []    # of each row: tokens since its first real one

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None = None, version: Hashable = None) -> Tensor:
        """Takes T >= 1 new tokens x (B,H,T,d), y (B,Hkv,T,d), v (B,Hkv,T,dv) and returns their outputs (B,H,T,dv), no
        gradient.

        key_mask (B, T), True = keep. Raises ValueError as `near_far_attention` does, and where the codebook is not the
        one that the state was made with.
        """
        check_inputs(x, y, v, None, (), True, key_mask)
        if x.shape[2] != y.shape[2]:
            raise ValueError(f"{x.shape[2]} queries and {y.shape[2]} keys: a step takes both of each new token")
        self._check(y, version)
        x = x if key_mask is None else torch.where(key_mask[:, None, :, None] | x.isfinite(), x, 0.0)
        check_entries(x)
        out = v.new_empty(*x.shape[:3], v.shape[3])
        for i in range(x.shape[2]):
            at = slice(i, i + 1)
            self._take(y[:, :, at], v[:, :, at], None if key_mask is None else key_mask[:, at])
            out[:, :, i] = self._read(x[:, :, i], self.kept)
        return out

    @torch.no_grad()
    def take(self, y: Tensor, v: Tensor, key_mask: Tensor | None = None) -> None:
        """Takes T >= 1 tokens whose outputs are known or not wanted: y (B,Hkv,T,d), v (B,Hkv,T,dv)."""
        check_inputs(y, y, v, None, (), True, key_mask)
        self._check(y)
        self._take(y, v, key_mask)

    @torch.no_grad()
    def token(self, kept: KeptCells, counts: Tensor, x: Tensor, y: Tensor,
              v: Tensor) -> tuple[Tensor, KeptCells, Tensor]:
        """`step` of one token as a function of what is kept and of the tokens so far of each row, counts (B,) int64:
        its outputs, what is kept after it, and the counts.

        Of the same shapes for each token, with nothing asked of the device and nothing of this object changed: for
        torch.compile(fullgraph=True) and CUDA graphs. To that end each token computes what leaves the window, which
        `step` does once a block. Arguments are not checked.
        """
        b, B = self.sizes.block, len(y)
        full = (counts >= 2 * b) & (counts % b == 0)
        moved = self._without_a_block(kept.flat(), B).of(B)
        kept = KeptCells(*(torch.where(full.view(-1, *[1] * (old.ndim - 1)), new, old)
                           for new, old in zip(moved, kept)))
        slots = self.sizes.heavy + torch.where(counts < 2 * b, counts, b + counts % b)
        dtype, seen = compute_dtype(y, v), torch.ones_like(counts, dtype=torch.bool).unsqueeze(1)
        kept = self._with(kept, y.to(dtype), v.to(dtype), slots.unsqueeze(1), seen)
        return self._read(x[:, :, 0], kept).unsqueeze(2).to(v.dtype), kept, counts + 1

    def _take(self, y: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
        """In pieces, of which each ends where a block of its row does."""
        (B, T), b = (len(y), y.shape[2]), self.sizes.block
        if self.kept is None:
            self.counts, self.kept = [0] * B, self._empty(y, v)
        done = self._leading(key_mask, B, T)
        while min(done) < T:
            sizes = [min(b - count % b, T - at) for count, at in zip(self.counts, done)]
            self._add(y, v, key_mask, done, sizes)
            done = [at + size for at, size in zip(done, sizes)]
            self.counts = [count + size for count, size in zip(self.counts, sizes)]
        self.length += T

    def _leading(self, key_mask: Tensor | None, B: int, T: int) -> list[int]:
        """How many of the new tokens of each row are padding before its first real one."""
        if key_mask is None or all(self.counts):
            return [0] * B
        first = torch.where(key_mask.any(1), first_kept(key_mask), T).tolist()
        return [0 if count else at for count, at in zip(self.counts, first)]

    def copy(self) -> "NearFarState":
        """The same state, to go on from here in two ways."""
        return copy.copy(self)

    def select(self, rows: Tensor) -> None:
        """Keeps these batch entries, in this order: what a beam search needs. rows: as tensors are indexed."""
        if self.kept is not None:
            rows = entries(rows, len(self.counts))
            self.kept = KeptCells(*(t[rows] for t in self.kept))
            self.counts = [self.counts[row] for row in rows.tolist()]

    def _check(self, y: Tensor, version: Hashable = None) -> None:
        if version is not None and version != self.version:
            raise ValueError(f"the decoding state belongs to version {self.version} of the codebook, which has changed "
                             f"since (now {version}): start a new state, and keep it fixed while decoding")
        if self.kept is not None and len(self.kept.sums) != len(y):
            raise ValueError(f"the decoding state holds {len(self.kept.sums)} sequences, got {len(y)}")

    def _book(self, batch: int, dtype: torch.dtype) -> Codebook:
        """Of all key heads of a batch."""
        (shift, tilt, root), centres = self.codebook.to(dtype)
        shift, tilt, root, centres = (t.repeat(batch, 1, 1) for t in (shift, tilt, root, centres))
        return Codebook(KeyMetric(shift, tilt, root), centres)

    def _add(self, y: Tensor, v: Tensor, key_mask: Tensor | None, done: list[int], sizes: list[int]) -> None:
        """Tokens done, ..., done + size - 1 of each row, within one block of it."""
        B, Hkv = y.shape[:2]
        dtype, n, b = compute_dtype(y, v), self.sizes.heavy, self.sizes.block
        full = [row for row in range(B) if sizes[row] and self.counts[row] >= 2 * b and self.counts[row] % b == 0]
        kept = self._moved(self.kept, full) if full else self.kept
        span = torch.arange(max(sizes))
        there = span < torch.tensor(sizes).unsqueeze(1)                                   # (B, t)
        places = (torch.tensor(done).unsqueeze(1) + span).clamp(max=y.shape[2] - 1).to(y.device)
        slots = torch.tensor([n + (c if c < 2 * b else b + c % b) for c in self.counts]).unsqueeze(1) + span
        slots, there = torch.where(there, slots, n + 2 * b).to(y.device), there.to(y.device)
        seen = there if key_mask is None else there & key_mask.gather(1, places)
        at = places[:, None, :, None].expand(-1, Hkv, -1, -1)                             # (B, Hkv, t, 1)
        y, v = (t.take_along_dim(at, 2).to(dtype) for t in (y, v))
        y, v = (torch.where(seen[:, None, :, None], t, 0.0) for t in (y, v))              # padding may hold NaN
        check_entries(y)
        self.kept = self._with(kept, y, v, slots, seen)

    def _with(self, kept: KeptCells, y: Tensor, v: Tensor, slots: Tensor, seen: Tensor) -> KeptCells:
        """With keys y (B,Hkv,t,d) and values at slots (B, t) of the window; those that are not seen (B, t) count
        nowhere."""
        B, Hkv = y.shape[:2]
        book = self._book(B, y.dtype)
        y = (y.flatten(0, 1) - book.metric.shift).unflatten(0, (B, Hkv))
        score = scores((y.flatten(0, 1) @ book.metric.root), book.metric.log_weights(y.flatten(0, 1)), None)
        score = score.unflatten(0, (B, Hkv)).masked_fill(~seen[:, None], -torch.inf)
        new = zip((kept.keys, kept.values, kept.score.unsqueeze(-1)), (y, v, score.unsqueeze(-1)))
        keys, values, score = (_written(old, slots, t) for old, t in new)
        return KeptCells(kept.sums, keys, values, score.squeeze(-1), kept.outers)

    def _empty(self, y: Tensor, v: Tensor) -> KeptCells:
        (B, Hkv, _, d), dv, K, first = y.shape, v.shape[-1], self.codebook.centres.shape[1], self.sizes.first_order
        w, new = self.sizes.heavy + 2 * self.sizes.block, y.to(compute_dtype(y, v)).new_zeros
        return KeptCells(new(B, Hkv, K, dv + d + 2), new(B, Hkv, w, d), new(B, Hkv, w, dv),
                         new(B, Hkv, w).fill_(-torch.inf), new(B, Hkv, dv, d if first else 0))

    def _moved(self, kept: KeptCells, full: list[int]) -> KeptCells:
        """In these rows the first block leaves the window: its keys and the heavy ones of the lowest scores go to their
        cells."""
        if len(full) == len(kept.sums):
            return self._without_a_block(kept.flat(), len(full)).of(len(full))
        rows = torch.tensor(full, device=kept.keys.device)
        moved = self._without_a_block(KeptCells(*(t[rows] for t in kept)).flat(), len(full)).of(len(full))
        return KeptCells(*(t.index_copy(0, rows, part) for t, part in zip(kept, moved)))

    def _without_a_block(self, kept: KeptCells, batch: int) -> KeptCells:
        n, b, Z = self.sizes.heavy, self.sizes.block, len(kept.keys)
        book = self._book(batch, kept.keys.dtype)
        places = torch.arange(n + b, device=kept.keys.device).expand(Z, -1)
        order, score = displaced(places[:, :n], kept.score[:, :n], places[:, n:], kept.score[:, n:n + b])
        keys, values = (t.gather(1, order.unsqueeze(-1).expand(-1, -1, t.shape[-1])) for t in (kept.keys, kept.values))
        free = kept.score.new_full((Z, b), -torch.inf)
        rest = (torch.cat([new[:, :n], old[:, n + b:], empty], 1) for new, old, empty in
                ((keys, kept.keys, torch.zeros_like(kept.keys[:, :b])),
                 (values, kept.values, torch.zeros_like(kept.values[:, :b])), (score, kept.score, free)))
        rows, cell = _rows(keys[:, n:], values[:, n:], score[:, n:] > -torch.inf, book)
        outers = kept.outers
        if self.sizes.first_order:
            outers = outers + outer(rows[:, None, :, :values.shape[-1]], keys[:, None, n:], cell[:, None], book)[:, 0]
        return KeptCells(kept.sums + one_hot(cell, book.centres.shape[1], rows.dtype).mT @ rows, *rest, outers)

    def _read(self, x: Tensor, kept: KeptCells) -> Tensor:
        """Outputs (B, H, dv) of the queries x (B, H, d) of the last token."""
        B, Hkv = kept.sums.shape[:2]
        kept, dv = kept.flat(), kept.values.shape[-1]
        book = self._book(B, kept.keys.dtype)
        q = x.to(kept.keys.dtype).unflatten(1, (Hkv, -1)).flatten(0, 1).unsqueeze(1)                  # (Z, 1, G, d)
        there = (kept.score > -torch.inf).unsqueeze(-1).to(kept.keys.dtype)
        own = Weighted(kept.keys.unsqueeze(1), torch.cat([kept.values, there], -1).unsqueeze(1),
                       kept.score.new_zeros(kept.score.shape).unsqueeze(1))
        far, cells = codebook_cells(kept.sums.unsqueeze(1), dv, book)
        gathered = plain_gather(q, None, (own, Weighted(cells.mu, far, cells.bias)))
        out = gathered.out
        if self.sizes.first_order:
            C = slope(kept.outers.unsqueeze(1), far, cells.mu, book)
            out = out + gathered.share * ((q - book.metric.tilt.unsqueeze(1)) @ C.mT)
        out = torch.where(gathered.logsum > HIDDEN / 2, out, 0.0)  # no key yet
        return out.view(B, x.shape[1], dv)


def _written(old: Tensor, slots: Tensor, new: Tensor) -> Tensor:
    """old (B, Hkv, w, k) with new (B, Hkv, t, k) at the slots (B, t) of each row; w is nowhere."""
    out = torch.cat([old, old[:, :, :1]], 2)
    out.scatter_(2, slots[:, None, :, None].expand_as(new), new)
    return out[:, :, :-1]


def _rows(y: Tensor, v: Tensor, joins: Tensor, book: Codebook) -> tuple[Tensor, Tensor]:
    """[u v] and the moments of keys y (Z, b, d) less the shift, 0 for those that do not join; and their cells."""
    cell = nearest(y @ book.metric.root, book.measured)
    u = weights(y, book.metric, joins, cell, book.level)
    return torch.cat([v * u.unsqueeze(-1), moments(y, u, book.metric, cell, book.measured)], -1), cell
