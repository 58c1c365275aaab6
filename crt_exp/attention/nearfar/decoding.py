"""Near-far attention token by token: the keys of two blocks, the heavy ones and sums over cells, whatever the length.

Legend: B batch, Hkv key heads, G query heads of a group, Z = B Hkv, b tokens of a block, n heavy keys, K cells, d, dv.
"""

import copy
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.nearfar.choice import Metric, Sizes, moments, nearest, scores, weights
from crt_exp.attention.checks import check_inputs, compute_dtype
from crt_exp.attention.nearfar.engine.block_sums import one_hot
from crt_exp.attention.nearfar.engine.constants import HIDDEN
from crt_exp.attention.nearfar.engine.sets import Weighted, plain_gather
from crt_exp.attention.nearfar.causal import Codebook, cells_of, displaced, outer, slope


class Kept(NamedTuple):
    """What is remembered, (B, Hkv, ...) each: never changed in place."""

    sums: Tensor      # (., K, dv + d + 2): of the keys of the cells
    keys: Tensor      # (., n + w, d): heavy ones, then those of the last blocks
    values: Tensor    # (., n + w, dv)
    score: Tensor     # (., n + w): -inf for keys that are not there
    outers: Tensor    # (., dv, d): of the keys of the cells, where values are to first order

    def flat(self) -> "Kept":
        return Kept(*(t.flatten(0, 1) for t in self))

    def of(self, batch: int) -> "Kept":
        return Kept(*(t.unflatten(0, (batch, -1)) for t in self))


class NearFarState:
    """What causal near-far attention remembers of the tokens so far, for a fixed codebook of (Hkv, ...).

    `version` tags the codebook for a caller that counts refits: a `step` with another version is refused. A copy, which
    costs nothing, is a point to come back to.
    """

    def __init__(self, sizes: Sizes, codebook: Codebook, heads: int, version: Hashable = None):
        self.sizes, self.codebook, self.heads, self.version = sizes, codebook, heads, version
        self.length, self.kept = 0, None

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None = None, version: Hashable = None) -> Tensor:
        """Takes T >= 1 new tokens x (B,H,T,d), y (B,Hkv,T,d), v (B,Hkv,T,dv) and returns their outputs (B,H,T,dv), no
        gradient.

        key_mask (B, T), True = keep. Raises ValueError as `near_far_attention` does, and where the codebook is not the
        one that the state was made with. """
        check_inputs(x, y, v, None, (), True, key_mask)
        if x.shape[2] != y.shape[2]:
            raise ValueError(f"{x.shape[2]} queries and {y.shape[2]} keys: a step takes both of each new token")
        self._check(y, version)
        out = v.new_empty(*x.shape[:3], v.shape[3])
        for i in range(x.shape[2]):
            at = slice(i, i + 1)
            self._add(y[:, :, at], v[:, :, at], None if key_mask is None else key_mask[:, at])
            out[:, :, i] = self._read(x[:, :, i])
        return out

    @torch.no_grad()
    def take(self, y: Tensor, v: Tensor, key_mask: Tensor | None = None, version: Hashable = None) -> None:
        """Takes T >= 1 tokens whose outputs are known or not wanted: y (B,Hkv,T,d), v (B,Hkv,T,dv)."""
        check_inputs(y, y, v, None, (), True, key_mask)
        self._check(y, version)
        done, b = 0, self.sizes.block
        while done < y.shape[2]:
            at = slice(done, min(done + b - self.length % b, y.shape[2]))
            self._add(y[:, :, at], v[:, :, at], None if key_mask is None else key_mask[:, at])
            done = at.stop

    def copy(self) -> "NearFarState":
        """The same state, to go on from here in two ways."""
        return copy.copy(self)

    def select(self, rows: Tensor) -> None:
        """Keeps these batch entries, in this order: what a beam search needs."""
        if self.kept is not None:
            self.kept = Kept(*(t[rows] for t in self.kept))

    def _check(self, y: Tensor, version: Hashable) -> None:
        if version is not None and version != self.version:
            raise ValueError(f"the decoding state belongs to version {self.version} of the codebook, which has changed "
                             f"since (now {version}): start a new state, and keep it fixed while decoding")
        if self.kept is not None and len(self.kept.sums) != len(y):
            raise ValueError(f"the decoding state holds {len(self.kept.sums)} sequences but {len(y)} came")

    def _book(self, batch: int, dtype: torch.dtype) -> Codebook:
        """Of all key heads of a batch."""
        (shift, tilt, root), centres = self.codebook.to(dtype)
        shift, tilt, root, centres = (t.repeat(batch, 1, 1) for t in (shift, tilt, root, centres))
        return Codebook(Metric(shift, tilt, root), centres)

    def _add(self, y: Tensor, v: Tensor, keep: Tensor | None) -> None:
        """New tokens within one block."""
        B, Hkv = y.shape[:2]
        dtype, keep = compute_dtype(y, v), None if keep is None else keep.repeat_interleave(Hkv, 0)
        y, v = y.flatten(0, 1).to(dtype), v.flatten(0, 1).to(dtype)
        if keep is not None:  # padding may hold NaN
            y, v = (torch.where(keep.unsqueeze(-1), t, 0.0) for t in (y, v))
        book = self._book(B, dtype)
        kept = (self._empty(y, v, book) if self.kept is None else self.kept).flat()
        n, b = self.sizes.heavy, self.sizes.block
        if self.length % b == 0 and kept.keys.shape[1] == n + 2 * b:
            kept = self._moved(kept, book)
        y = y - book.metric.shift
        score = scores(y @ book.metric.root, book.metric.log_weights(y), keep)
        kept = Kept(kept.sums, torch.cat([kept.keys, y], 1), torch.cat([kept.values, v], 1),
                    torch.cat([kept.score, score], 1), kept.outers)
        self.kept, self.length = kept.of(B), self.length + y.shape[1]

    def _empty(self, y: Tensor, v: Tensor, book: Codebook) -> Kept:
        (Z, _, d), n, K, dv = y.shape, self.sizes.heavy, book.centres.shape[1], v.shape[-1]
        empty = Kept(y.new_zeros(Z, K, dv + d + 2), y.new_zeros(Z, n, d), y.new_zeros(Z, n, dv),
                     y.new_full((Z, n), -torch.inf), y.new_zeros(Z, dv, d if self.sizes.first_order else 0))
        return empty.of(Z // self.heads)

    def _moved(self, kept: Kept, book: Codebook) -> Kept:
        """The first block leaves the window: its keys and the heavy ones of the lowest scores go to their cells."""
        n, b, Z = self.sizes.heavy, self.sizes.block, len(kept.keys)
        places = torch.arange(n + b, device=kept.keys.device).expand(Z, -1)
        order, score = displaced(places[:, :n], kept.score[:, :n], places[:, n:], kept.score[:, n:n + b])
        keys, values = (t.gather(1, order.unsqueeze(-1).expand(-1, -1, t.shape[-1])) for t in (kept.keys, kept.values))
        rest = (torch.cat([new[:, :n], old[:, n + b:]], 1) for new, old in
                ((keys, kept.keys), (values, kept.values), (score, kept.score)))
        rows, cell = _rows(keys[:, n:], values[:, n:], score[:, n:] > -torch.inf, book)
        outers = kept.outers
        if self.sizes.first_order:
            outers = outers + outer(rows[:, None, :, :values.shape[-1]], keys[:, None, n:], cell[:, None], book)[:, 0]
        return Kept(kept.sums + one_hot(cell, book.centres.shape[1], rows.dtype).mT @ rows, *rest, outers)

    def _read(self, x: Tensor) -> Tensor:
        """Outputs (B, H, dv) of the queries x (B, H, d) of the last token."""
        B, Hkv = self.kept.sums.shape[:2]
        kept, dv = self.kept.flat(), self.kept.values.shape[-1]
        book = self._book(B, kept.keys.dtype)
        q = x.to(kept.keys.dtype).unflatten(1, (Hkv, -1)).flatten(0, 1).unsqueeze(1)                  # (Z, 1, G, d)
        there = (kept.score > -torch.inf).unsqueeze(-1).to(kept.keys.dtype)
        own = Weighted(kept.keys.unsqueeze(1), torch.cat([kept.values, there], -1).unsqueeze(1),
                       kept.score.new_zeros(kept.score.shape).unsqueeze(1))
        far, cells = cells_of(kept.sums.unsqueeze(1), dv, book)
        found = plain_gather(q, None, (own, Weighted(cells.mu, far, cells.bias)))
        out = found.out
        if self.sizes.first_order:
            C = slope(kept.outers.unsqueeze(1), far, cells.mu, book)
            out = out + found.share * ((q - book.metric.tilt.unsqueeze(1)) @ C.mT)
        out = torch.where(found.logsum > HIDDEN / 2, out, 0.0)  # no key yet
        return out.view(B, x.shape[1], dv)


def _rows(y: Tensor, v: Tensor, joins: Tensor, book: Codebook) -> tuple[Tensor, Tensor]:
    """[u v] and the moments of keys y (Z, b, d) less the shift, 0 for those that do not join; and their cells."""
    cell = nearest(y @ book.metric.root, book.measured)
    u = weights(y, book.metric, joins, cell, book.level)
    return torch.cat([v * u.unsqueeze(-1), moments(y, u, book.metric, cell, book.measured)], -1), cell
