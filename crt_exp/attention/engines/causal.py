"""Causal attention with positive exponential features, forward and backward in closed form.

Query i sees keys j <= i + S - L. Keys before the first query are summarised as in positive.py (legend there); the rest goes in
segments of k chunks of C tokens. With K, Q the features of a chunk (M, C) and `state` (dv + 1, M) what earlier keys have left,
    [numerator; denominator] = state Q + V^T (K^T Q, triangle),
and the chunks' states are running sums of their own contributions, so that each product of a segment is one batch.

All features of a segment have one reference, `ref`: the log-sums of the keys before it, or, where there are none or a sum
outgrows them, the maxima with its own keys. That is exact, but a late key may be so large that the terms of an early row
underflow: a denominator below TINY sends the segment through shorter and shorter pieces, down to one token, whose denominators
are at least 1. Nothing else depends on the future.

Kept for the backward pass: one log-sum a row, one state and reference a segment. It sweeps the segments in reverse with the
gradient to the state, `dstate`, and recomputes the features.

Tokens come last in the chunks of this file: of the layouts tried, its products of 64 tokens run fastest so.

For every device and precision; native.c is its faster twin for float32 on CPUs.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.engines import bidirectional as positive
from crt_exp.attention.engines.bidirectional import TINY, summarise, summarise_backward
from crt_exp.attention.engines.tiles import DEVICE_ELEMENTS, Form, Index, Scratch, finite, flat, row_dots, tiles

CHUNK = 128              # tokens of a chunk: more cost more in the triangle, fewer in the states
SEGMENT = 1024           # tokens of a segment, whose features stay in the caches
PIECES = (64, 16, 4, 1)  # tokens of the pieces into which a segment that underflows is cut, in turn
LARGE, HUGE = 1e6, 1e20  # sums of features: the reference moves on from the first, and the second is too near to overflow
PAD = 16                 # rows a power of two apart fall on the same cache lines, which slows transposed copies
GROUP = 8                # chunks whose running sums are taken by one product: several times as fast as cumsum


class State(NamedTuple):
    """sums = exp(-ref) sum_j exp(b_j) [v_j, 1] (n, dv + 1, M), ref (n, M); ref = -inf where no key was seen."""

    sums: Tensor
    ref: Tensor

    def at(self, ref: Tensor) -> "State":
        """The same in another reference."""
        return self if ref is self.ref else State(self.sums * torch.exp(self.ref - finite(ref)).unsqueeze(1), ref)

    def settled(self) -> "State":
        """With sums of 1, so that the reference is the log of what the keys have left, where they have grown large."""
        z = self.sums[:, -1]
        if bool((z < LARGE).all()):
            return State(self.sums.clone(), self.ref)
        return State(self.sums / torch.where(z == 0, 1, z).unsqueeze(1), self.ref + z.log())


def segments(length: int) -> list[slice]:
    """Ranges of whole chunks, then one of what is left."""
    whole = length // CHUNK * CHUNK
    cuts = sorted({*range(0, whole, SEGMENT), whole, length})
    return [slice(a, b) for a, b in zip(cuts, cuts[1:])]


def pieces(segment: slice, level: int) -> list[slice]:
    """The whole segment at level 0."""
    length = PIECES[level - 1] if level else segment.stop - segment.start
    return [slice(a, min(a + length, segment.stop)) for a in range(segment.start, segment.stop, length)]


def _tiles(x: Tensor, form: Form):
    elements = positive.ELEMENTS if x.device.type == "cpu" else DEVICE_ELEMENTS
    return tiles(x.shape[0], x.shape[1], elements // (form.width * min(SEGMENT, x.shape[2])))


def saved(x: Tensor, v: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    """Empty tensors like the results of `forward`."""
    (B, H, L, _), dv, M = x.shape, v.shape[-1], rows.shape[-2]
    parts = len(segments(L)) + 1
    return (v.new_empty(B, H, L, dv), rows.new_empty(B, H, L), rows.new_empty(B, H, parts, dv + 1, M),
            rows.new_empty(B, H, parts, M), torch.zeros(B, H, parts, dtype=torch.uint8, device="cpu"))


def forward(x: Tensor, y: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out (B,H,L,dv) and what `backward` needs: log-sums (B,H,L), states (B,H,N,dv+1,M), references (B,H,N,M) and levels of
    pieces (B,H,N), of the keys before the first query and of each segment."""
    out, _, states, refs, levels = saved(x, v, form.rows)
    logsums, y_offsets, parts = form.norms(x), form.key_offsets(y), segments(x.shape[2])
    with Scratch(form.rows) as scratch:
        for index in _tiles(x, form):
            run = Run(form, index, scratch, *(flat(t, index) for t in (x, y, v, y_offsets)))
            kept, kept_refs, level = flat(states, index), flat(refs, index), flat(levels, index)
            state = run.prefix()
            kept[:, 0], kept_refs[:, 0] = state
            for i, segment in enumerate(parts, 1):
                inside, state, level[:, i] = run.segment(segment, state, flat(out, index), flat(logsums, index))
                kept[:, i], kept_refs[:, i] = inside
    return out, logsums, states, refs, levels


def backward(x: Tensor, y: Tensor, v: Tensor, form: Form, results: tuple[Tensor, ...],
             grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to x, y and v of `forward`, whose results these are."""
    out, logsums, states, refs, levels = results
    parts = segments(x.shape[2])
    grads = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, y, v))
    y_offsets, minus, last = form.key_offsets(y), -logsums, -row_dots(grad, out, form.rows.dtype)
    with Scratch(form.rows) as scratch:
        for index in _tiles(x, form):
            run = Run(form, index, scratch, *(flat(t, index) for t in (x, y, v, y_offsets)))
            kept, kept_refs, level = flat(states, index), flat(refs, index), flat(levels, index)
            given, wanted = [flat(t, index) for t in (minus, grad, last)], [flat(t, index) for t in grads]
            dstate = State(torch.zeros_like(kept[:, 0]), torch.full_like(kept_refs[:, 0], torch.inf))  # nothing comes later
            for i in range(len(parts), 0, -1):
                state = State(kept[:, i], kept_refs[:, i])
                for piece, before in reversed(run.entering(parts[i - 1], int(level[:, i].max()), state)):
                    dstate = run.piece_backward(piece, before, dstate, given, wanted)
            run.prefix_backward(State(kept[:, 0], kept_refs[:, 0]), dstate, wanted)
    return grads


class Chunks:
    """Buffers for k chunks of C tokens of n heads, and views of their parts: made once for all segments of that size."""

    def __init__(self, run: "Run", k: int, size: int):
        n, M, d, dv = run.n, run.M, run.d, run.dv
        self.k, self.n, self.size, N = k, n, size, k * n
        new = lambda name, *shape, pad=0: run.scratch(f"{name} {n} {k} {size}", *shape, pad=pad)
        self.x, self.y = new("x", N, d + 2, size, pad=PAD), new("y", N, d + 2, size, pad=PAD)
        self.V, self.G = new("values", N, dv + 1, size, pad=PAD), new("grads", N, dv + 1, size, pad=PAD)
        self.x[:, 0], self.y[:, 0], self.V[:, dv] = 1, 1, 1
        self.K, self.Q, self.D = (new(name, N, M, size) for name in ("keys", "queries", "grad features"))
        self.parts, self.states, self.dstates = (new(name, k + 1, n, dv + 1, M) for name in ("parts", "states", "grad states"))
        self.pairs, self.dpairs = new("pairs", N, size, size), new("grad pairs", N, size, size)
        self.sums, self.dvalues = new("sums", N, dv + 1, size), new("grad values", N, dv, size)
        self.dx, self.dy = new("dx", N, size, d), new("dy", N, size, d + 1)
        self.first, self.rest = self.parts[:-1].flatten(0, 1), self.parts[1:].flatten(0, 1)
        self.before, self.after = self.states[:-1].flatten(0, 1), self.dstates[1:].flatten(0, 1)
        self.of_keys, self.of_queries = (w[0].expand(N, -1, -1) if n == 1 else w[:k].flatten(0, 1) for w in run.weights)
        self.triangle = run.rows.new_ones(size, size).triu_()  # j <= i, j first
        self.sum_up = list(_steps(self.parts, self.states))
        self.sum_down = list(_steps(self.parts, self.dstates, backwards=True))

    def of(self, t: Tensor) -> Tensor:
        """(n, k C, ...) seen as (k, n, C, ...)."""
        return t.view(self.n, self.k, self.size, *t.shape[2:]).transpose(0, 1)

    def load(self, dst: Tensor, src: Tensor, last: Tensor | None = None, start: int = 0) -> None:
        """src (n, k C, rows) from row `start` of dst (k n, ..., C) on, and `last` (n, k C) into its last row."""
        parts = dst.view(self.k, self.n, *dst.shape[1:])
        parts[:, :, start:start + src.shape[2]].copy_(self.of(src).mT)
        if last is not None:
            parts[:, :, -1].copy_(self.of(last))

    def store(self, dst: Tensor, src: Tensor) -> None:
        """src (k n, rows, C) into dst (n, k C, rows)."""
        self.of(dst).copy_(src.view(self.k, self.n, *src.shape[1:]).mT)

    def pair(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        """a_j . b_i for j <= i, else 0, (k n, C, C) with j first."""
        return torch.bmm(a.mT, b, out=out).mul_(self.triangle)


class Run:
    """The segments of one tile of n heads. x (n, L, d), y (n, S, d), v (n, S, dv), offsets of the keys (n, S)."""

    def __init__(self, form: Form, index: Index, scratch: Scratch, x: Tensor, y: Tensor, v: Tensor, y_offsets: Tensor):
        self.form, self.index, self.scratch = form, index, scratch
        self.x, self.y, self.v, self.y_offsets = x, y, v, y_offsets
        self.offset, self.ref = y.shape[1] - x.shape[1], None
        self.rows, self.bias, self.masked = form.tile_rows(index), form.tile_bias(index), form.masked(index)
        (self.n, self.M, self.d), self.dv = self.rows.shape, v.shape[-1]
        self.longest = torch.linalg.vector_norm(self.rows, dim=-1).amax(-1, keepdim=True)
        self.seen = None if self.masked is None else (~self.masked).cumsum(-1) > 0
        copies = 1 if self.n == 1 else max(1, min(SEGMENT, x.shape[1]) // CHUNK)  # one head serves its chunks with stride 0
        self.weights = scratch(f"weights {self.n}", 2, copies, self.n, self.M, self.d + 2)
        self.weights[..., 1:-1], self.weights[..., -1] = self.rows, 1  # with [1; x; offset of the token]

    def chunks(self, piece: slice) -> Chunks:
        tokens = piece.stop - piece.start
        if (self.n, tokens) not in self.scratch.made:
            size = min(CHUNK, tokens)
            self.scratch.made[self.n, tokens] = Chunks(self, tokens // size, size)
        return self.scratch.made[self.n, tokens]

    def of_keys(self, piece: slice) -> slice:
        return slice(piece.start + self.offset, piece.stop + self.offset)

    # The keys before the first query.

    def prefix(self) -> State:
        if self.offset:
            return State(*summarise(self._tile(), self.y, self.v, self.y_offsets, self.offset))
        return State(*(self.rows.new_full((self.n, *rest), value) for rest, value in
                       (((self.dv + 1, self.M), 0.0), ((self.M,), -torch.inf))))

    def prefix_backward(self, state: State, dstate: State, wanted: list[Tensor]) -> None:
        if self.offset:
            inside = dstate_at(dstate, state.ref)
            summarise_backward(self._tile(), self.y, self.v, self.y_offsets, *wanted[1:], finite(state.ref), inside, self.offset)

    def _tile(self) -> positive.Tile:
        _, size = positive.plan(self.x[None], self.M)
        return positive.Tile(self.form, self.index, self.dv, size, self.scratch)

    # A segment, whole or in pieces.

    def segment(self, segment: slice, state: State, out: Tensor, logsums: Tensor) -> tuple[State, State, int]:
        """What the backward pass needs, the state after the segment, and the level of pieces that it took."""
        for exact in (False, True):
            inside, after = self.piece(segment, state, exact, out, logsums)
            if after is not None:
                return inside, after, 0
        for level in range(1, len(PIECES) + 1):
            after = state
            for piece in pieces(segment, level):
                _, after = self.piece(piece, after, True, out, logsums)
                if after is None:
                    break
            else:
                return state, after, level
        raise AssertionError("a piece of one token cannot underflow")

    def entering(self, segment: slice, level: int, state: State) -> list[tuple[slice, State]]:
        """Each piece with its entering state, in the reference of the piece."""
        if level == 0:
            return [(segment, state)]
        found = []
        for piece in pieces(segment, level):
            c = self.chunks(piece)
            inside = state.at(self.keys(c, piece, state, exact=True))
            found.append((piece, inside))
            state = self.states(c, inside).settled()
        return found

    def piece(self, piece: slice, state: State, exact: bool, out: Tensor, logsums: Tensor) -> tuple[State, State | None]:
        """The entering state in the reference of the piece, and the state after it: None where a sum was too small or large."""
        c, rows = self.chunks(piece), logsums[:, piece]
        inside = state.at(self.keys(c, piece, state, exact))
        after = self.states(c, inside)
        if exact:
            top = self.query_logs(c, piece, torch.zeros_like(rows)).amax(-2)
            c.Q.sub_(top.unsqueeze(1)).exp_()
        else:  # the rows hold |x| until they get their log-sums
            top = torch.addcmul(self.query_offset.amax(-1, keepdim=True), rows, self.longest)
            self.query_logs(c, piece, -top).exp_()
            top = c.of(top).flatten(0, 1)
        torch.bmm(c.before, c.Q, out=c.sums).baddbmm_(c.V, c.pair(c.K, c.Q, c.pairs))
        if self.too_small(c, piece) or not bool((after.sums[:, -1] < HUGE).all()):
            return inside, None
        self.finish(c, top, out[:, piece], rows)
        return inside, after.settled()

    def too_small(self, c: Chunks, piece: slice) -> bool:
        if piece.stop - piece.start == 1:
            return False
        small = c.sums[:, -1] < TINY
        return bool((small if self.seen is None else small & c.of(self.seen[:, self.of_keys(piece)]).flatten(0, 1)).any())

    def finish(self, c: Chunks, top: Tensor, out: Tensor, logsums: Tensor) -> None:
        """Sums in the scale `top` (k n, C) to outputs and log-sums; 0 for a row without keys."""
        den = c.sums[:, -1]
        if self.seen is not None:
            den.masked_fill_(den == 0, 1)
        c.of(logsums).copy_((top + den.log()).view(c.k, c.n, c.size))
        c.store(out, c.sums[:, :-1].div_(den.unsqueeze(1)))

    def piece_backward(self, piece: slice, state: State, dstate: State, given: list[Tensor], wanted: list[Tensor]) -> State:
        """Writes the gradients of one piece and returns that to the state before it, given that after it."""
        (minus, grad, last), (dx, dy, dv), of_keys = given, wanted, self.of_keys(piece)
        c = self.chunks(piece)
        self.keys(c, piece, state)
        self.query_logs(c, piece, minus[:, piece]).exp_()
        c.load(c.G, grad[:, piece], last[:, piece])
        self.states(c, state)
        self.later_states(c, dstate_at(dstate, state.ref))
        c.pair(c.V, c.G, c.dpairs)
        torch.bmm(c.before.mT, c.G, out=c.D).baddbmm_(c.K, c.dpairs).mul_(c.Q)
        c.of(dx[:, piece]).copy_(torch.bmm(c.D.mT, c.of_keys[..., 1:-1], out=c.dx).view(c.k, c.n, c.size, self.d))
        torch.bmm(c.after[:, :-1], c.K, out=c.dvalues).baddbmm_(c.G[:, :-1], c.pair(c.K, c.Q, c.pairs).mT)
        c.store(dv[:, of_keys], c.dvalues)
        torch.bmm(c.after.mT, c.V, out=c.D).baddbmm_(c.Q, c.dpairs.mT).mul_(c.K)
        back = torch.bmm(c.D.mT, c.of_keys[..., 1:], out=c.dy)  # the last column is the gradient to -norm_weight |y|^2
        back[..., :-1].addcmul_(c.y[:, 1:-1].mT, back[..., -1:], value=-2 * self.form.norm_weight)
        c.of(dy[:, of_keys]).copy_(back[..., :-1].view(c.k, c.n, c.size, self.d))
        return State(c.dstates[0].clone(), state.ref)

    # The chunks of a piece.

    def keys(self, c: Chunks, piece: slice, state: State, exact: bool = False) -> Tensor:
        """Loads y, v and K, and returns the reference of the piece (n, M)."""
        tokens, ref = self.of_keys(piece), state.ref
        c.load(c.y, self.y[:, tokens], self.y_offsets[:, tokens], 1)
        c.load(c.V, self.v[:, tokens])
        if self.masked is not None:
            masked = c.of(self.masked[:, tokens]).flatten(0, 1).unsqueeze(1)
            c.y[:, 1:-1].masked_fill_(masked, 0)  # padding may hold NaN
            c.V[:, :-1].masked_fill_(masked, 0)
        if not exact and (ref is self.ref or bool((ref > -torch.inf).all())):
            self.refer_to(ref)
            torch.bmm(c.of_keys, c.y, out=c.K).exp_()
            return ref
        self.weights[0, ..., 0] = 0
        log = torch.bmm(c.of_keys, c.y, out=c.K)
        ref = torch.maximum(ref, log.amax(-1).view(c.k, c.n, self.M).amax(0))
        self.refer_to(ref)
        log.view(c.k, c.n, self.M, c.size).sub_(finite(ref).unsqueeze(-1)).exp_()
        return ref

    def refer_to(self, ref: Tensor) -> None:
        """Sets the offsets of the features, unless they are those already."""
        if ref is not self.ref:
            known = finite(ref)
            self.ref, self.query_offset = ref, known + 2 * self.bias
            self.weights[0, ..., 0], self.weights[1, ..., 0] = -known, self.query_offset

    def query_logs(self, c: Chunks, piece: slice, offsets: Tensor) -> Tensor:
        c.load(c.x, self.x[:, piece], offsets, 1)
        return torch.bmm(c.of_queries, c.x, out=c.Q)

    def states(self, c: Chunks, state: State) -> State:
        """Sums up the state before each chunk (in c.states), and returns that after the last."""
        c.parts[0] = state.sums
        torch.bmm(c.V, c.K.mT, out=c.rest)
        running_sums(c.sum_up)
        return State(c.states[-1], state.ref)

    def later_states(self, c: Chunks, dstate: Tensor) -> None:
        """Sums up the gradient to the state before each chunk, and after the last (in c.dstates)."""
        c.parts[-1] = dstate
        torch.bmm(c.G, c.Q.mT, out=c.first)
        running_sums(c.sum_down)


def dstate_at(dstate: State, ref: Tensor) -> Tensor:
    """Gradients to sums of the reference dstate.ref as gradients to those of `ref`, in which they are exp(ref - dstate.ref) times
    as large: at most 1 times, for references grow."""
    return dstate.sums * torch.exp(ref - finite(dstate.ref)).unsqueeze(1)


def _steps(parts: Tensor, out: Tensor, backwards: bool = False) -> Iterator[tuple[Tensor, ...]]:
    """Triangle, parts and sums of each group, then the edge of parts to overwrite with that of sums, for the next group."""
    parts, out, last = parts.flatten(1), out.flatten(1), len(parts) - 1
    starts = range(0, last, GROUP)
    for a in reversed(starts) if backwards else starts:
        b = min(a + GROUP, last)
        ones, edge = parts.new_ones(b - a + 1, b - a + 1), a if backwards else b
        yield ones.triu_() if backwards else ones.tril_(), parts[a:b + 1], out[a:b + 1], parts[edge], out[edge]


def running_sums(steps: list[tuple[Tensor, ...]]) -> None:
    """Sums over the first dimension up to each position, or from it on."""
    for triangle, parts, out, part_edge, out_edge in steps:
        torch.mm(triangle, parts, out=out)
        part_edge.copy_(out_edge)
