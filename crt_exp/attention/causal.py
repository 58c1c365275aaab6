"""Causal attention with positive exponential features, forward and backward in closed form.

Query i sees keys j <= i + S - L. Keys before the first query are summarised as in positive.py (legend there); the rest goes
in segments of k chunks of C tokens. With K, Q the features of a chunk and `state` what all earlier keys have left,
    [numerator; denominator] = state Q + V (K^T Q, lower triangle),
and every chunk's state is the sum of the segment's entering state and of the chunks before it, so that all products of a
segment run as one batch. A segment has one scale, the maximum of its keys and all earlier ones. That is exact, but a late
key may be so large that the terms of an early row underflow: a denominator below UNDERFLOW sends the segment through
shorter and shorter pieces, down to one token, whose denominators are at least 1. Nothing else depends on the future.

Kept for the backward pass: one log-sum a row and one state a segment; it sweeps the segments in reverse with the gradient to
the state, `dstate`, and recomputes the features.
"""

import torch
from torch import Tensor

from crt_exp.attention.partials import UNDERFLOW
from crt_exp.attention.positive import (finish_rows, finite_, key_grads, query_grads, summarise, summarise_backward,
                                        tile_elements)
from crt_exp.attention.tiles import Form, Scratch, Tile, store, tiles

CHUNK = 64              # tokens of a chunk: more cost more in the triangle, fewer in the states
SEGMENT = 1024          # tokens of a segment, whose features stay in the caches
PIECES = (64, 16, 4, 1)  # tokens of the pieces into which a segment that underflows is cut, in turn


def segments(length: int) -> list[slice]:
    """Ranges of whole chunks, then one of what is left."""
    whole = length // CHUNK * CHUNK
    cuts = [*range(0, whole, SEGMENT), *([whole] if whole else []), *([length] if length > whole else [])]
    return [slice(a, b) for a, b in zip([0] * (not whole) + cuts, cuts[bool(whole):])]


def shifted(tokens: slice, by: int) -> slice:
    return slice(tokens.start + by, tokens.stop + by)


def pieces(segment: slice, level: int) -> list[slice]:
    length = PIECES[level - 1] if level else segment.stop - segment.start
    return [slice(a, min(a + length, segment.stop)) for a in range(segment.start, segment.stop, length)]


def forward(x: Tensor, y: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out (B,H,L,dv) and what `backward` needs: log-sums (B,H,L), a state (B,H,N,dv+1,M), a scale (B,H,N,M) and a level (B,H,N)
    for each of the N - 1 segments, after those of the keys before the first query."""
    B, H, L, d = x.shape
    dv, M, parts = v.shape[-1], form.width, segments(L)
    out, logsum = v.new_empty(B, H, L, dv), form.rows.new_empty(B, H, L)
    states, tops = (form.rows.new_empty(B, H, len(parts) + 1, *rest) for rest in ((dv + 1, M), (M,)))
    levels = torch.zeros(B, H, len(parts) + 1, dtype=torch.uint8)
    scratch = Scratch(form.rows)
    for index in _tiles(x, form):
        run = Run(x, y, v, Tile(form, index, (d, dv), scratch, _most_chunks(L)))
        state, top = summarise(run.tile, y, v, run.offset)
        states[index][:, :, 0], tops[index][:, :, 0] = run.unfold(state), run.unfold(top)
        for i, segment in enumerate(parts, 1):
            kept, (state, top), levels[index][:, :, i] = run.segment(segment, state, top, out, logsum)
            states[index][:, :, i], tops[index][:, :, i] = (run.unfold(t) for t in kept)
    return out, logsum, states, tops, levels


def _tiles(x: Tensor, form: Form):
    return tiles(x.shape[0], x.shape[1], tile_elements(x) // (form.width * min(SEGMENT, x.shape[2]) * 2))


def _most_chunks(length: int) -> int:
    return max(1, min(SEGMENT, length) // CHUNK)


def backward(x: Tensor, y: Tensor, v: Tensor, form: Form, saved: tuple[Tensor, ...],
             grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to x, y and v of `forward`, whose five results are `saved`."""
    out, logsum, states, tops, levels = saved
    L, parts = x.shape[2], segments(x.shape[2])
    grads = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, y, v))
    minus, scratch = logsum.neg(), Scratch(form.rows)
    for index in _tiles(x, form):
        run = Run(x, y, v, Tile(form, index, (x.shape[-1], v.shape[-1]), scratch, _most_chunks(L)))
        dstate, later = torch.zeros_like(states[index][:, :, 0].flatten(0, 1)), None
        for i in range(len(parts), 0, -1):
            entering = states[index][:, :, i].flatten(0, 1), tops[index][:, :, i].flatten(0, 1)
            for piece, state, top in reversed(run.entering(parts[i - 1], int(levels[index][:, :, i].max()), *entering)):
                dstate = rescaled(dstate, top, later)
                dstate, later = run.piece_backward(piece, state, top, dstate, grad, out, minus, grads), top
        if run.offset:
            top = tops[index][:, :, 0].flatten(0, 1)
            summarise_backward(run.tile, y, v, run.offset, finite_(top), rescaled(dstate, top, later), *grads[1:])
    return grads


def rescaled(state: Tensor, old: Tensor, new: Tensor | None) -> Tensor:
    """A state (n, dv + 1, M) times exp(old - new) per feature, by which states of the scale `old` enter those of `new`."""
    return state if new is None else state * torch.exp(old - finite_(new)).unsqueeze(1)


class Run:
    """The segments of one tile."""

    def __init__(self, x: Tensor, y: Tensor, v: Tensor, tile: Tile):
        self.x, self.y, self.v, self.tile = x, y, v, tile
        self.offset = y.shape[2] - x.shape[2]
        self.seen = None if tile.form.keep is None else tile.form.keep.cumsum(-1) > 0

    def unfold(self, t: Tensor) -> Tensor:
        return t.view(*(i.stop - i.start for i in self.tile.index), *t.shape[1:])

    def segment(self, segment: slice, state: Tensor, top: Tensor, out: Tensor, logsum: Tensor):
        """What the backward pass needs, the state after the segment, and the level of pieces that it took."""
        first, after = self.piece(segment, state, top, out, logsum)
        if after is not None:
            return first, after, 0
        for level in range(1, len(PIECES) + 1):
            after = state, top
            for piece in pieces(segment, level):
                _, after = self.piece(piece, *after, out, logsum)
                if after is None:
                    break
            else:
                return (state, top), after, level
        raise AssertionError("a piece of one token cannot underflow")

    def entering(self, segment: slice, level: int, state: Tensor, top: Tensor) -> list[tuple[slice, Tensor, Tensor]]:
        """Each piece with its entering state, in the scale of the piece."""
        if level == 0:
            return [(segment, state, top)]
        found = []
        for piece in pieces(segment, level):
            K, values, new = self.keys(piece, top)
            found.append((piece, rescaled(state, top, new), new))
            state, top = self.states(found[-1][1], values, K)[-1].clone(), new
        return found

    def size(self, piece: slice) -> int:
        return min(CHUNK, piece.stop - piece.start)

    def keys(self, piece: slice, top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """K (k n, M, C), V (k n, dv + 1, C) and the scale of the piece (n, M)."""
        tile, tokens, size = self.tile, shifted(piece, self.offset), self.size(piece)
        log = tile.log_features(tile.keys(self.y, tokens, size), top.new_zeros(()), "keys")
        new = torch.maximum(top, log.amax(-1).view(-1, *top.shape).amax(0))
        log.view(-1, *top.shape, size).sub_(finite_(new).unsqueeze(-1))
        return log.exp_(), tile.values(self.v, tokens, size), new

    def states(self, state: Tensor, values: Tensor, K: Tensor) -> Tensor:
        """The state before each chunk, and after the last: (k + 1, n, dv + 1, M)."""
        chunks = K.shape[0] // self.tile.n
        sums = self.tile.scratch("states", chunks + 1, *state.shape)
        sums[0] = state
        torch.bmm(values, K.mT, out=sums[1:].flatten(0, 1))
        for i in range(chunks):
            sums[i + 1] += sums[i]
        return sums

    def pairs(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        """a_j . b_i for j <= i, else 0, (k n, C, C) with j first."""
        product = torch.bmm(a.mT, b, out=self.tile.scratch(name, a.shape[0], a.shape[-1], b.shape[-1]))
        return product.mul_(product.new_ones(product.shape[1:]).triu_())

    def piece(self, piece: slice, state: Tensor, top: Tensor, out: Tensor, logsum: Tensor):
        """(entering state, scale) of the piece, and (state, scale) after it, or None where a row underflowed."""
        tile, size, index = self.tile, self.size(piece), self.tile.index
        K, values, new = self.keys(piece, top)
        state = rescaled(state, top, new)
        states = self.states(state, values, K)
        Q = tile.log_features(tile.queries(self.x, piece, size), finite_(new) + 2 * tile.bias, "queries")
        r = Q.amax(-2)
        Q.sub_(r.unsqueeze(1)).exp_()
        sums = torch.bmm(states[:-1].flatten(0, 1), Q, out=tile.scratch("sums", *r.shape[:1], tile.dv + 1, size))
        sums.baddbmm_(values, self.pairs(K, Q, "pairs"))
        if piece.stop - piece.start > 1 and self.underflowed(sums[:, -1], shifted(piece, self.offset), size):
            return (state, new), None
        finish_rows(sums, r, out[index][:, :, piece], logsum[index][:, :, piece])
        return (state, new), (states[-1].clone(), new)

    def underflowed(self, den: Tensor, tokens: slice, size: int) -> bool:
        small = den < UNDERFLOW
        return bool((small if self.seen is None else small & self.tile.per_head(self.seen, tokens, size)).any())

    def piece_backward(self, piece: slice, state: Tensor, top: Tensor, dstate: Tensor, grad: Tensor, out: Tensor,
                       minus: Tensor, grads: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Writes the gradients of one piece and returns that to the state before it, given that after it."""
        tile, tokens, size = self.tile, shifted(piece, self.offset), self.size(piece)
        scratch, index = tile.scratch, tile.index
        shift = finite_(top)
        keys, values = tile.keys(self.y, tokens, size), tile.values(self.v, tokens, size)
        K = tile.log_features(keys, -shift, "keys").exp_()
        Q = tile.log_features(tile.queries(self.x, piece, size, minus), shift + 2 * tile.bias, "queries").exp_()
        g = tile.output_grads(grad, out, piece, size)
        states, dstates = self.states(state, values, K), self.later_states(dstate, g, Q)
        dpairs = self.pairs(values, g, "grad pairs")
        dQ = torch.bmm(states[:-1].flatten(0, 1).mT, g, out=scratch("grad features", *Q.shape)).baddbmm_(K, dpairs)
        query_grads(tile, Q, dQ, grads[0][index][:, :, piece])
        after = dstates[1:].flatten(0, 1)
        dvalues = torch.bmm(after[:, :-1], K, out=scratch("back", K.shape[0], tile.dv, size))
        store(grads[2][index][:, :, tokens], dvalues.baddbmm_(g[:, :-1], self.pairs(K, Q, "pairs").mT))
        dK = torch.bmm(after.mT, values, out=scratch("grad features", *K.shape)).baddbmm_(Q, dpairs.mT)
        key_grads(tile, keys, K, dK, grads[1][index][:, :, tokens])
        return dstates[0].clone()

    def later_states(self, dstate: Tensor, g: Tensor, Q: Tensor) -> Tensor:
        """The gradient to the state before each chunk, and after the last: (k + 1, n, dv + 1, M)."""
        chunks = Q.shape[0] // self.tile.n
        sums = self.tile.scratch("grad states", chunks + 1, *dstate.shape)
        sums[chunks] = dstate
        torch.bmm(g, Q.mT, out=sums[:-1].flatten(0, 1))
        for i in range(chunks - 1, -1, -1):
            sums[i] += sums[i + 1]
        return sums
