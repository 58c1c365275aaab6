"""Closed-form attention with positive exponential features, forward and backward.

It serves every device and precision; native.c is faster for float32 on CPUs. The formulas were derived for this
project.

Bidirectional. With z_m = sum_j exp(b_jm), U_m = sum_j exp(b_jm) v_j / z_m and l_i = log sum_m exp(a_im + log z_m),
    output_i = sum_m exp(a_im + log z_m - l_i) U_m:
queries attend to M virtual keys with logits a + log z and values U, and each virtual key attends to the true keys.
With Q_im = exp(a_im + log z_m - l_i) and K_jm = exp(b_jm - log z_m), whose sums are 1, and G = [g, grad_logsum -
g.output],
    dQ = G [U, 1]^T,  d[U, 1] = Q^T G,  dv = K dU,  dK = V d[U, 1]^T.
The forward pass takes four products and the backward pass eight. Only one log-sum for each row and one for each feature
are stored, nothing of size L x M.
Terms of a that all features of a row share cancel and are omitted. The bias of a feature counts once for queries and
once for keys.

Causal. Query i sees keys j <= i + S - L. Keys before the first query are summed up; the other tokens form segments of k
chunks.
With `before` (dv + 1, M), the sums over the keys before a chunk relative to exp(ref),
    [numerator; denominator] = Q before^T + (Q K^T, lower triangle) V.
The states of chunks are cumulative sums of their contributions, so that each product of a segment is one batched
product.

A segment has one reference `ref`: the largest logs of its keys and of all earlier keys. A very large late key makes the
terms of an early row underflow.
A denominator below TINY therefore repeats the segment in shorter and shorter pieces, down to one token, whose
denominator is at least 1. Outputs depend on future tokens in no other way.
The backward pass uses one log-sum for each row and one state and reference for each segment. It visits the segments in
reverse with the gradient of the state, and recomputes the features.

Notation: B, H, L queries, S keys, d, dv, C tokens of a chunk, k chunks of a segment, M features, V = [v, 1]; b, h batch
entries and heads of a tile; a, b log features of queries and keys.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.checks import check_result, finite
from crt_exp.attention.engines import TINY, Form, Gradients, Saved, denominator_gradients
from crt_exp.attention.engines.chunks import chunks, shift_slice
from crt_exp.attention.partials import Packed, Partial

CPU_ELEMENTS = 2**19  # of one feature tensor, which fits the caches of two cores
DEVICE_ELEMENTS = 2**25  # on an accelerator, which needs large launches
TOKENS = 64  # minimum for a chunk
HEADS = 8  # for a tile, if there are enough tokens
CHUNK = 128  # tokens of a causal chunk: more cost more for the triangle, fewer for the states
SEGMENT = 1024  # tokens of a segment, whose features fit the caches
PIECES = (64, 16, 4, 1)  # tokens of the pieces of a segment that underflows, tried in turn


def tiles(batch: int, heads: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of (batch entries, heads), at most `most` heads each."""
    heads_of_tile = max(1, min(heads, most))
    batch_of_tile = 1
    if heads_of_tile == heads:
        batch_of_tile = max(1, min(batch, most // heads))
    for entry in range(0, batch, batch_of_tile):
        for head in range(0, heads, heads_of_tile):
            entries = slice(entry, min(entry + batch_of_tile, batch))
            yield entries, slice(head, min(head + heads_of_tile, heads))


class Memory:
    """Buffers for matrix products that overwrite each other.

    Fresh memory pages for each product would cost more than the arithmetic.
    """

    def __init__(self):
        self.named = {}

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """Return the batched product a b, valid until the next product of this name.

        a (.., .., T, p), b (.., .., p, M).
        """
        shape = (*a.shape[:-1], b.shape[-1])
        size = math.prod(shape)
        if name not in self.named or self.named[name].numel() < size:
            self.named[name] = a.new_empty(size)
        out = self.named[name][:size].view(shape)
        torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out=out.flatten(0, -3))
        return out


def tile_of_map(t: Tensor, index: tuple[slice, slice]) -> Tensor:
    """Return the part of a map's tensor (B or 1, H or 1, ...) for a tile."""
    entries, heads = index
    if t.shape[0] > 1:
        t = t[entries]
    if t.shape[1] > 1:
        t = t[:, heads]
    return t


class Tile:
    """Vectors of some batch entries and heads, and their features chunk by chunk.

    size: tokens of a chunk.
    """

    def __init__(
        self,
        form: Form,
        index: tuple[slice, slice],
        x: Tensor,
        y: Tensor,
        v: Tensor,
        offsets: Tensor,
        size: int,
        memory: Memory,
    ):
        self.x = x[index]
        self.y = y[index]
        self.v = v[index]
        self.offsets = offsets[index]
        self.size = size
        self.dtype = form.rows.dtype
        self.memory = memory
        rows = tile_of_map(form.rows, index) * tile_of_map(form.scale, index)
        self.rows = rows.expand(*self.x.shape[:2], -1, -1)  # (b, h, M, d)
        self.bias = tile_of_map(form.bias, index).unsqueeze(-2)  # (., ., 1, M)
        self.norm_weight = form.norm_weight
        self.keys_before = y.shape[2] - x.shape[2]  # keys before the first query, if causal
        self.hidden = None  # (b, 1, S, 1): masked keys
        self.seen = None  # (b, 1, L, 1): causal queries that see a key
        if form.keep is not None:
            keep = form.keep[index[0], None, :, None]
            self.hidden = ~keep
            self.seen = (keep.cumsum(-2) > 0)[:, :, self.keys_before :]
        self.map_gradient = None  # (b, h, M, d + 1): of directions and bias
        if form.learned:
            batch = self.rows.shape[:-1]
            self.map_gradient = self.rows.new_zeros(*batch, self.rows.shape[-1] + 1)

    def weights(self, offset: Tensor | float = 0.0) -> Tensor:
        """Return [W; offset of the feature; 1], (b, h, d + 2, M)."""
        ones = self.rows.new_ones(*self.rows.shape[:-1], 2)
        weights = torch.cat([self.rows, ones], -1).mT.contiguous()
        weights[..., -2:-1, :] = offset
        return weights

    def logs(self, name: str, t: Tensor, column: Tensor | None, weights: Tensor) -> Tensor:
        """Return W t + offset of the feature + `column`, (b, h, T, M).

        column: an offset for each token, by default 0.
        """
        one = self.rows.new_ones(*t.shape[:-1], 1)
        last = torch.zeros_like(one) if column is None else column.unsqueeze(-1)
        return self.memory.product(name, torch.cat([t.to(self.dtype), one, last], -1), weights)

    def without_padding(self, t: Tensor, tokens: slice) -> Tensor:
        """Return keys or values in the working precision, with zeros at padding."""
        t = t[:, :, tokens].to(self.dtype)
        if self.hidden is None:
            return t
        return t.masked_fill(self.hidden[:, :, tokens], 0)

    def keys(self, tokens: slice, weights: Tensor) -> Tensor:
        y = self.without_padding(self.y, tokens)
        return self.logs("keys", y, self.offsets[:, :, tokens], weights)

    def values(self, tokens: slice) -> Tensor:
        """Return [v, 1], (b, h, T, dv + 1)."""
        v = self.without_padding(self.v, tokens)
        return torch.cat([v, torch.ones_like(v[..., :1])], -1)

    def query_weights(self, ref: Tensor) -> Tensor:
        return self.weights(ref + 2 * self.bias)

    def queries(self, tokens: slice, weights: Tensor, column: Tensor | None = None) -> Tensor:
        return self.logs("queries", self.x[:, :, tokens], column, weights)

    # Sums over keys that all queries see.

    def summary(self, length: int) -> Packed:
        """Sum up the first `length` keys."""
        b, h, M, _ = self.rows.shape
        weights = self.weights()
        sums = self.rows.new_zeros(b, h, self.v.shape[-1] + 1, M)
        ref = self.rows.new_full((b, h, 1, M), -torch.inf)
        for tokens in chunks(length, self.size):
            features, top = scaled(self.keys(tokens, weights), ref)
            sums = sums * torch.exp(ref - finite(top))
            ref = top
            add_product(sums, self.values(tokens).mT, features)
        return Packed(sums, ref)

    def summary_backward(
        self, length: int, ref: Tensor, dsums: Tensor, dy: Tensor, dv: Tensor
    ) -> None:
        """Write the gradients of the first `length` keys and values.

        dsums is the gradient of their sums relative to exp(ref).
        """
        weights = self.weights(-finite(ref))
        for tokens in chunks(length, self.size):
            features = self.keys(tokens, weights).exp_()
            dv[:, :, tokens] = features @ dsums[..., :-1, :].mT
            dlogs = self.memory.product("dlogs", self.values(tokens), dsums).mul_(features)
            self.write_dy(dy, tokens, dlogs)

    def write_dx(self, dx: Tensor, tokens: slice, dlogs: Tensor) -> None:
        dx[:, :, tokens] = dlogs @ self.rows
        self.learn(self.x[:, :, tokens].to(self.dtype), dlogs)

    def write_dy(self, dy: Tensor, tokens: slice, dlogs: Tensor) -> None:
        dnorms = dlogs.sum(-1, keepdim=True).mul_(-2 * self.norm_weight)
        y = self.without_padding(self.y, tokens)
        dy[:, :, tokens] = torch.addcmul(dlogs @ self.rows, y, dnorms)
        self.learn(y, dlogs)

    def learn(self, t: Tensor, dlogs: Tensor) -> None:
        """Add the gradients of directions and bias through these tokens."""
        if self.map_gradient is not None:
            with_one = torch.cat([t, torch.ones_like(t[..., :1])], -1)
            add_product(self.map_gradient, dlogs.mT, with_one)

    def write_map_gradient(self, grads: Gradients, index: tuple[slice, slice]) -> None:
        if self.map_gradient is not None:
            grads.weights[index] = self.map_gradient[..., :-1]
            grads.bias[index] = self.map_gradient[..., -1]


def scaled(logs: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    """Return features relative to the new reference, and this reference.

    The reference is the maximum of `ref` and of the logs, which are overwritten.
    """
    ref = torch.maximum(ref, logs.amax(-2, keepdim=True))
    return logs.sub_(finite(ref)).exp_(), ref


def add_product(to: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute to += a b for batches of matrices, without a tensor for the product."""
    to.flatten(0, -3).baddbmm_(a.flatten(0, -3), b.flatten(0, -3))
    return to


class Bidirectional:
    unit = 1.0

    def empty(self, x: Tensor, v: Tensor, rows: Tensor) -> Saved:
        B, H, L, _ = x.shape
        dv = v.shape[-1]
        M = rows.shape[-2]
        return Saved(
            out=v.new_empty(B, H, L, dv),
            logsum=rows.new_empty(B, H, L),
            states=rows.new_empty(B, H, dv + 1, M),
            logs=rows.new_empty(B, H, M),
            levels=torch.empty(0, dtype=torch.uint8, device="cpu"),
        )

    def forward(self, x: Tensor, y: Tensor, v: Tensor, form: Form) -> Saved:
        saved = self.empty(x, v, form.rows)
        check_result(torch.linalg.vector_norm(x, dim=-1, dtype=form.rows.dtype))
        most_heads, _ = plan(x, form.width)
        for index, tile in all_tiles(Tile, form, x, y, v, most_heads):
            out = saved.out[index]
            logsum = saved.logsum[index]
            state = tile.summary(y.shape[2]).partial()
            U = state.output
            log_z = finite(state.logsum.mT)
            values = torch.cat([U, torch.ones_like(U[..., :1])], -1)
            weights = tile.query_weights(log_z)
            for tokens in chunks(x.shape[2], tile.size):
                features = tile.queries(tokens, weights)
                top = features.amax(-1, keepdim=True)
                sums = features.sub_(top).exp_() @ values
                out[:, :, tokens] = sums[..., :-1] / sums[..., -1:]
                logsum[:, :, tokens] = (top + sums[..., -1:].log()).squeeze(-1)
            saved.states[index] = values.mT
            saved.logs[index] = log_z.squeeze(-2)
        return saved

    def backward(self, x, y, v, form: Form, saved: Saved, grad, grad_logsum=None) -> Gradients:
        grads = Gradients.empty(x, y, v, form.rows, form.learned)
        last = denominator_gradients(grad, saved.out, grad_logsum, form.rows.dtype)
        most_heads, _ = plan(x, form.width)
        for index, tile in all_tiles(Tile, form, x, y, v, most_heads):
            state = saved.states[index]
            logsum = saved.logsum[index]
            dx = grads.x[index]
            log_z = saved.logs[index].unsqueeze(-2)
            weights = tile.query_weights(log_z)
            dstate = torch.zeros_like(state)
            for tokens in chunks(x.shape[2], tile.size):
                features = tile.queries(tokens, weights, -logsum[:, :, tokens]).exp_()
                G = with_last(grad[index][:, :, tokens], last[index][:, :, tokens])
                add_product(dstate, G.mT, features)
                dlogs = tile.memory.product("dlogs", G, state).mul_(features)
                tile.write_dx(dx, tokens, dlogs)
            tile.summary_backward(y.shape[2], log_z, dstate, grads.y[index], grads.v[index])
            tile.write_map_gradient(grads, index)
        return grads


def all_tiles(
    kind: type["Tile"], form: Form, x: Tensor, y: Tensor, v: Tensor, most: int
) -> Iterator[tuple[tuple[slice, slice], "Tile"]]:
    """Yield the tiles of all batch entries and heads, at most `most` heads each."""
    offsets = form.key_offsets(y)
    memory = Memory()
    _, size = plan(x, form.width)
    for index in tiles(*x.shape[:2], most):
        yield index, kind(form, index, x, y, v, offsets, size, memory)


def elements(t: Tensor) -> int:
    return CPU_ELEMENTS if t.device.type == "cpu" else DEVICE_ELEMENTS


def plan(x: Tensor, width: int) -> tuple[int, int]:
    """Return the heads of a tile and the tokens of a chunk."""
    most = elements(x)
    heads = max(1, min(HEADS, x.shape[0] * x.shape[1]))
    tokens = min(x.shape[2], max(TOKENS, most // (width * heads)))
    return max(1, most // (width * tokens)), tokens


def with_last(grad: Tensor, last: Tensor) -> Tensor:
    """Return G (b, h, T, dv + 1)."""
    return torch.cat([grad.to(last.dtype), last.unsqueeze(-1)], -1)


class Causal:
    unit = 1.0

    def empty(self, x: Tensor, v: Tensor, rows: Tensor) -> Saved:
        """Return an empty record; its first state is that before the first query."""
        B, H, L, _ = x.shape
        dv = v.shape[-1]
        M = rows.shape[-2]
        states = len(segments(L)) + 1
        return Saved(
            out=v.new_empty(B, H, L, dv),
            logsum=rows.new_empty(B, H, L),
            states=rows.new_empty(B, H, states, dv + 1, M),
            logs=rows.new_empty(B, H, states, M),
            levels=torch.zeros(B, H, states, dtype=torch.uint8, device="cpu"),
        )

    def forward(self, x: Tensor, y: Tensor, v: Tensor, form: Form) -> Saved:
        saved = self.empty(x, v, form.rows)
        check_result(torch.linalg.vector_norm(x, dim=-1, dtype=form.rows.dtype))
        for index, tile in self.tiles(form, x, y, v):
            part = saved.of_tile(index)
            after = tile.summary(tile.keys_before).partial()
            store_state(part, 0, after)
            for i, segment in enumerate(segments(x.shape[2]), 1):
                entering, after, level = tile.segment(segment, after, part.out, part.logsum)
                part.levels[:, :, i] = level
                store_state(part, i, entering)
        return saved

    def backward(self, x, y, v, form: Form, saved: Saved, grad, grad_logsum=None) -> Gradients:
        grads = Gradients.empty(x, y, v, form.rows, form.learned)
        last = denominator_gradients(grad, saved.out, grad_logsum, form.rows.dtype)
        for index, tile in self.tiles(form, x, y, v):
            part = saved.of_tile(index)
            output = OutputGradient(part.logsum, grad[index], last[index])
            inputs = InputGradients(grads.x[index], grads.y[index], grads.v[index])
            dsums = torch.zeros_like(part.states[:, :, 0])
            ref = torch.inf  # no token follows
            for i, segment in reversed(list(enumerate(segments(x.shape[2]), 1))):
                level = int(part.levels[:, :, i].max())
                state = Packed(part.states[:, :, i], part.logs[:, :, i : i + 1])
                pieces = tile.entering(segment, level, state)
                for piece, before in reversed(pieces):
                    # gradient of sums relative to exp(before.top); references grow, so that the factor is at most 1
                    dsums = dsums * torch.exp(before.top - ref)
                    dsums = tile.piece_backward(piece, before, dsums, output, inputs)
                    ref = finite(before.top)
            first = part.logs[:, :, :1]
            dsums = dsums * torch.exp(first - ref)
            tile.summary_backward(tile.keys_before, first, dsums, inputs.y, inputs.v)
            tile.write_map_gradient(grads, index)
        return grads

    def tiles(
        self, form: Form, x: Tensor, y: Tensor, v: Tensor
    ) -> Iterator[tuple[tuple[slice, slice], "Segments"]]:
        tokens = min(SEGMENT, x.shape[2])
        return all_tiles(Segments, form, x, y, v, elements(x) // (form.width * tokens))


def store_state(saved: Saved, i: int, state: Partial) -> None:
    """Store the state that enters segment i, counted from 1; 0 is before the first query."""
    packed = Packed.of(state)
    saved.states[:, :, i] = packed.sums
    saved.logs[:, :, i : i + 1] = packed.top


class OutputGradient(NamedTuple):
    """What the backward pass knows of the outputs of a tile."""

    logsum: Tensor  # (b, h, L), stored by the forward pass
    grad: Tensor  # (b, h, L, dv)
    last: Tensor  # (b, h, L): last column of G


class InputGradients(NamedTuple):
    """Gradients of a tile's queries, keys and values, written piece by piece."""

    x: Tensor
    y: Tensor
    v: Tensor


def segments(length: int) -> list[slice]:
    """Return ranges of whole chunks, then one range with the remaining tokens."""
    whole = length // CHUNK * CHUNK
    cuts = sorted({*range(0, whole, SEGMENT), whole, length})
    return [slice(a, b) for a, b in zip(cuts, cuts[1:])]


class Segments(Tile):
    """Segments of a tile.

    A piece is a segment or a part of one: T tokens in k chunks, (b, h, k, C, .).
    """

    def segment(
        self, segment: slice, state: Partial, out: Tensor, logsum: Tensor
    ) -> tuple[Partial, Partial, int]:
        """Process a segment; return the entering state, the state after it and the level.

        Level 0 is the whole segment; its entering state is relative to the reference of the segment. Level i uses
        pieces of PIECES[i - 1] tokens.
        """
        for level, size in enumerate((segment.stop - segment.start, *PIECES)):
            after = state
            for piece in chunks(segment.stop, size, segment.start):
                after = self.piece(piece, after, out, logsum)
                if after is None:
                    break
            else:
                if level == 0:
                    state = state.over(after.log_scale)
                return state, after, level
        raise AssertionError("a piece of one token cannot underflow")

    def entering(self, segment: slice, level: int, state: Packed) -> list[tuple[slice, Packed]]:
        """Return each piece with its entering state, relative to the piece's reference."""
        if level == 0:
            return [(segment, state)]
        entered = []
        for piece in chunks(segment.stop, PIECES[level - 1], segment.start):
            K, V, ref = self.chunked_keys(piece, state.top)
            entering = Packed.of(state.partial().over(ref.mT))
            entered.append((piece, entering))
            _, after = running(entering.sums, V.mT @ K)
            state = Packed(after, ref)
        return entered

    def piece(self, piece: slice, state: Partial, out: Tensor, logsum: Tensor) -> Partial | None:
        """Write the outputs of a piece and return the state after it.

        Returns None if a denominator is too small.
        """
        K, V, ref = self.chunked_keys(piece, state.log_scale.mT)
        Q = self.queries(piece, self.query_weights(finite(ref)))
        top = Q.amax(-1, keepdim=True)
        Q = split(Q.sub_(top).exp_())
        before, after = running(Packed.of(state.over(ref.mT)).sums, V.mT @ K)
        sums = Q @ before.mT
        sums = add_product(sums, (Q @ K.mT).tril_(), V).flatten(2, 3)  # (b, h, T, dv + 1)
        den = sums[..., -1:]
        if piece.stop - piece.start > 1 and self.underflows(den, piece):
            return None
        if self.seen is not None:
            den.masked_fill_(den == 0, 1)
        out[:, :, piece] = sums[..., :-1] / den
        logsum[:, :, piece] = (top + den.log()).squeeze(-1)
        return Packed(after, ref).partial()

    def underflows(self, den: Tensor, piece: slice) -> bool:
        """Return whether a denominator (b, h, T, 1) is too small in a row with keys."""
        small = den < TINY
        if self.seen is not None:
            small = small & self.seen[:, :, piece]
        return bool(small.any())

    def piece_backward(
        self,
        piece: slice,
        state: Packed,
        dsums: Tensor,
        output: OutputGradient,
        inputs: InputGradients,
    ) -> Tensor:
        """Write the gradients of a piece; return that of the sums before it.

        dsums is the gradient of the sums after the piece.
        """
        tokens = shift_slice(piece, self.keys_before)
        ref = finite(state.top)
        logsum = output.logsum[:, :, piece]
        K = split(self.keys(tokens, self.weights(-ref)).exp_())
        Q = split(self.queries(piece, self.query_weights(ref), -logsum).exp_())
        V = split(self.values(tokens))
        G = split(with_last(output.grad[:, :, piece], output.last[:, :, piece]))
        before, _ = running(state.sums, V.mT @ K)
        dafter, dbefore = running_back(dsums, G.mT @ Q)
        pairs = (Q @ K.mT).tril_()
        dpairs = (G @ V.mT).tril_()
        dlogs = add_product(self.memory.product("dlogs", G, before), dpairs, K).mul_(Q)
        self.write_dx(inputs.x, piece, dlogs.flatten(2, 3))
        dvalues = add_product(K @ dafter[..., :-1, :].mT, pairs.mT, G[..., :-1])
        inputs.v[:, :, tokens] = dvalues.flatten(2, 3)
        dlogs = add_product(self.memory.product("dlogs", V, dafter), dpairs.mT, Q).mul_(K)
        self.write_dy(inputs.y, tokens, dlogs.flatten(2, 3))
        return dbefore

    def chunked_keys(self, piece: slice, ref: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return K and V of a piece in chunks, and its reference."""
        tokens = shift_slice(piece, self.keys_before)
        features, ref = scaled(self.keys(tokens, self.weights()), ref)
        return split(features), split(self.values(tokens)), ref


def split(t: Tensor) -> Tensor:
    """Split (b, h, T, .) into chunks (b, h, k, C, .)."""
    return t.unflatten(2, (-1, min(CHUNK, t.shape[2])))


def running(sums: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums before each chunk (b, h, k, dv + 1, M) and after the last.

    sums: those before the first chunk; parts: the contribution of each chunk.
    """
    parts = torch.cat([sums.unsqueeze(2), parts], 2)
    triangle = parts.new_ones(parts.shape[2], parts.shape[2]).tril_()
    sums = (triangle @ parts.flatten(3)).view_as(parts)
    return sums[:, :, :-1], sums[:, :, -1]


def running_back(dsums: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sums after each chunk and before the first."""
    parts = torch.cat([parts, dsums.unsqueeze(2)], 2)
    triangle = parts.new_ones(parts.shape[2], parts.shape[2]).triu_()
    sums = (triangle @ parts.flatten(3)).view_as(parts)
    return sums[:, :, 1:], sums[:, :, 0]


bidirectional = Bidirectional()
causal = Causal()
