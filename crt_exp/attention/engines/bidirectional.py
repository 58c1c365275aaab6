"""Bidirectional attention with positive exponential features, forward and backward in closed form.

Legend: n heads of a tile, C tokens of a chunk, M features, V = [v, 1]. With a, b the log features of queries and keys,
    z_m = sum_j exp(b_jm), U_m = sum_j exp(b_jm) V_j / z_m,  l_i = log sum_m exp(a_im + log z_m),
    output_i = sum_m exp(a_im + log z_m - l_i) U_m:
queries attend to M virtual keys with logits a + log z and values U, each of which attends to the true keys. With
Q_im = exp(a_im + log z_m - l_i) and K_jm = exp(b_jm - log z_m), whose sums are 1, and g the gradient of the output,
    G = [g, -g.output] (L, dv + 1),  dQ = G U^T,  dU = Q^T G,  dv = K dU,  dK = V dU^T.
Four products forward and eight backward; one log-sum is kept for a row and one for a feature, nothing of size L x M. Terms of a
that the features of a row share cancel and are left out; the bias of a feature counts once for each side. Derived here.

Logs are exponentiated after one product, [x, 1, offset of the token] @ [W; offset of the feature; 1], with offsets that bound
them: |omega||y| for keys, |omega||x| for queries. Where the bounds are so loose that a sum comes out below TINY, exact maxima
are taken instead, for one more product.

For every device and precision; native.c is its faster twin for float32 on CPUs.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from crt_exp.attention.engines.tiles import DEVICE_ELEMENTS, Form, Index, Scratch, finite, flat, row_dots, tiles

ELEMENTS = 2**19  # of one feature buffer on the CPU: what stays in the caches of two cores
TOKENS = 64       # of a chunk, at least
HEADS = 8         # of a tile, where there are enough tokens
TINY = 1e-25      # a smaller sum could miss terms that float32 rounds to 0


def plan(x: Tensor, width: int) -> tuple[int, int]:
    """Heads of a tile and tokens of a chunk."""
    elements = ELEMENTS if x.device.type == "cpu" else DEVICE_ELEMENTS
    tokens = min(x.shape[2], max(TOKENS, elements // (width * max(1, min(HEADS, x.shape[0] * x.shape[1])))))
    return max(1, elements // (width * tokens)), tokens


def chunks(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def saved(x: Tensor, v: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    """Empty tensors like the results of `forward`."""
    (B, H, L, _), dv, M = x.shape, v.shape[-1], rows.shape[-2]
    return v.new_empty(B, H, L, dv), rows.new_empty(B, H, L), rows.new_empty(B, H, dv + 1, M), rows.new_empty(B, H, M)


def forward(x: Tensor, y: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out (B,H,L,dv), log-sums l (B,H,L), [U, 1] (B,H,dv+1,M) and log z (B,H,M) of x (B,H,L,d), y (B,H,S,d), v (B,H,S,dv)."""
    out, _, states, logs = saved(x, v, form.rows)
    logsums, y_offsets = form.norms(x), form.key_offsets(y)
    heads, size = plan(x, form.width)
    with Scratch(form.rows) as scratch:
        for index in tiles(*x.shape[:2], heads):
            tile = Tile(form, index, v.shape[-1], size, scratch)
            state, log_z = summarise(tile, flat(y, index), flat(v, index), flat(y_offsets, index), y.shape[2])
            log_z = finite(log_z)
            read(tile, flat(x, index), flat(logsums, index), state, log_z, flat(out, index))
            states[index], logs[index] = state.view_as(states[index]), log_z.view_as(logs[index])
    return out, logsums, states, logs


def backward(x: Tensor, y: Tensor, v: Tensor, form: Form, results: tuple[Tensor, ...],
             grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to x, y and v of `forward`, whose results these are."""
    out, logsums, states, logs, *_ = results
    dx, dy, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, y, v))
    y_offsets, minus, last = form.key_offsets(y), -logsums, -row_dots(grad, out, form.rows.dtype)
    heads, size = plan(x, form.width)
    with Scratch(form.rows) as scratch:
        for index in tiles(*x.shape[:2], heads):
            tile = Tile(form, index, v.shape[-1], size, scratch)
            of_queries = (flat(t, index) for t in (x, minus, grad, last, dx))
            dstate = read_backward(tile, *of_queries, flat(states, index), flat(logs, index))
            of_keys = (flat(t, index) for t in (y, v, y_offsets, dy, dv))
            summarise_backward(tile, *of_keys, flat(logs, index), dstate, y.shape[2])
    return dx, dy, dv


class Chunk:
    """Buffers for the chunks of one size, and views of their parts."""

    def __init__(self, scratch: Scratch, n: int, size: int, d: int, dv: int, M: int):
        new = lambda name, *shape: scratch(f"{name} {size}", n, size, *shape)
        self.vectors, self.values = new("vectors", d + 2), new("values", dv + 1)
        self.x, self.offset = self.vectors[..., :d], self.vectors[..., d + 1]
        self.v, self.last = self.values[..., :dv], self.values[..., dv]
        self.features, self.dfeatures = new("features", M), new("grad features", M)
        self.sums, self.dx, self.dxo, self.dv = new("sums", dv + 1), new("dx", d), new("dx and offset", d + 1), new("dv", dv)
        self.vectors[..., d] = 1


class Tile:
    """The heads of one tile: their directions, and their features chunk by chunk."""

    def __init__(self, form: Form, index: Index, dv: int, size: int, scratch: Scratch):
        self.form, self.dv, self.size, self.scratch = form, dv, size, scratch
        self.rows, self.bias, self.masked = form.tile_rows(index), form.tile_bias(index), form.masked(index)
        self.n, self.M, self.d = self.rows.shape
        self.norms = torch.linalg.vector_norm(self.rows, dim=-1)  # (n, M)
        self.weight = scratch("weight", self.n, self.d + 2, self.M)
        self.weight[:, :self.d], self.weight[:, self.d + 1] = self.rows.mT, 1
        self._chunks = {}

    def chunk(self, tokens: slice) -> Chunk:
        size = tokens.stop - tokens.start
        if size not in self._chunks:
            self._chunks[size] = Chunk(self.scratch, self.n, size, self.d, self.dv, self.M)
        return self._chunks[size]

    def set_offset(self, offset: Tensor | float) -> None:
        self.weight[:, self.d] = offset

    def logs(self, c: Chunk, x: Tensor, tokens: slice, offsets: Tensor, masked: Tensor | None = None) -> Tensor:
        """W x + offset of the feature + offset of the token, (n, C, M)."""
        c.x.copy_(x[:, tokens])
        if masked is not None:  # padding may hold NaN
            c.x.masked_fill_(masked[:, tokens, None], 0)
        c.offset.copy_(offsets[:, tokens])
        return torch.bmm(c.vectors, self.weight, out=c.features)

    def key_logs(self, c: Chunk, y: Tensor, tokens: slice, offsets: Tensor) -> Tensor:
        return self.logs(c, y, tokens, offsets, self.masked)

    def load_values(self, c: Chunk, v: Tensor, tokens: slice) -> None:
        c.v.copy_(v[:, tokens])
        c.last.fill_(1)
        if self.masked is not None:
            c.v.masked_fill_(self.masked[:, tokens, None], 0)


def summarise(tile: Tile, y: Tensor, v: Tensor, offsets: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """[U, 1] (n, dv + 1, M) and log z (n, M) of the first keys; U = 0 and log z = -inf where there are none."""
    for limits in _limits(y, lambda: key_bounds(tile, offsets[:, :length]), lambda: _key_maxima(tile, y, offsets, length)):
        top = limits()
        state = _sum_keys(tile, y, v, offsets, length, top)
        if not _too_small(state[:, -1]):
            break
    z = state[:, -1].clone()
    state.div_(torch.where(z == 0, 1, z).unsqueeze(1))[:, -1] = 1
    return state, top + z.log_()


def key_bounds(tile: Tile, offsets: Tensor) -> Tensor:
    """Upper bounds of the keys' log features, (n, M): |omega||y| - w |y|^2 at the |y| up to the largest that maximises it."""
    w = tile.form.norm_weight
    longest = (finite(offsets).amin(-1, keepdim=True) / -w).sqrt()
    length = (tile.norms / (2 * w)).clamp(max=longest)
    return length * (tile.norms - w * length)


def _limits(x: Tensor, bounds: Callable, maxima: Callable) -> tuple[Callable, ...]:
    """What to subtract from logs, in turn. On an accelerator exact maxima at once: to look at sums would be to wait for them."""
    return (bounds, maxima) if x.device.type == "cpu" else (maxima,)


def _too_small(sums: Tensor) -> bool:
    return sums.device.type == "cpu" and bool(sums.amin() < TINY)


def _sum_keys(tile: Tile, y: Tensor, v: Tensor, offsets: Tensor, length: int, top: Tensor) -> Tensor:
    """sum_j exp(b_j - top) [v_j, 1], (n, dv + 1, M)."""
    tile.set_offset(-top)
    state = tile.rows.new_zeros(tile.n, tile.dv + 1, tile.M)
    for tokens in chunks(length, tile.size):
        c = tile.chunk(tokens)
        features = tile.key_logs(c, y, tokens, offsets).exp_()
        tile.load_values(c, v, tokens)
        state.baddbmm_(c.values.mT, features)
    return state


def _key_maxima(tile: Tile, y: Tensor, offsets: Tensor, length: int) -> Tensor:
    """Maxima over the keys of their log features, (n, M); 0 where there are none."""
    tile.set_offset(0)
    top = tile.rows.new_full((tile.n, tile.M), -torch.inf)
    for tokens in chunks(length, tile.size):
        top = torch.maximum(top, tile.key_logs(tile.chunk(tokens), y, tokens, offsets).amax(-2))
    return top.masked_fill_(top == -torch.inf, 0)


def read(tile: Tile, x: Tensor, norms: Tensor, state: Tensor, log_z: Tensor, out: Tensor) -> None:
    """Writes outputs (n, L, dv), and log-sums over the norms of the queries (n, L)."""
    offset = log_z + 2 * tile.bias
    tile.set_offset(offset)
    state = state.mT.contiguous()
    longest = tile.norms.amax(-1, keepdim=True)
    for limits in _limits(x, lambda: torch.addcmul(offset.amax(-1, keepdim=True), norms, longest), lambda: _row_maxima(tile, x)):
        top = limits()
        sums = _read(tile, x, -top, state, out)
        if not _too_small(sums):
            break
    torch.add(top, sums.log_(), out=norms)


def _row_maxima(tile: Tile, x: Tensor) -> Tensor:
    """Maxima over the features of the queries' logs, (n, L)."""
    top = tile.rows.new_zeros(x.shape[:2])
    zero = torch.zeros_like(top)
    for tokens in chunks(x.shape[1], tile.size):
        top[:, tokens] = tile.logs(tile.chunk(tokens), x, tokens, zero).amax(-1)
    return top


def _read(tile: Tile, x: Tensor, offsets: Tensor, state: Tensor, out: Tensor) -> Tensor:
    sums = torch.empty_like(offsets)
    for tokens in chunks(x.shape[1], tile.size):
        c = tile.chunk(tokens)
        torch.bmm(tile.logs(c, x, tokens, offsets).exp_(), state, out=c.sums)
        sums[:, tokens] = c.sums[..., -1]
        torch.div(c.sums[..., :-1], c.sums[..., -1:], out=out[:, tokens])
    return sums


def read_backward(tile: Tile, x: Tensor, minus: Tensor, grad: Tensor, last: Tensor, dx: Tensor, state: Tensor,
                  log_z: Tensor) -> Tensor:
    """Writes dx and returns the gradient to [U, 1], (n, dv + 1, M). `minus` are the negative log-sums, `last` = -g.output."""
    tile.set_offset(log_z + 2 * tile.bias)
    dstate = torch.zeros_like(state)
    for tokens in chunks(x.shape[1], tile.size):
        c = tile.chunk(tokens)
        features = tile.logs(c, x, tokens, minus).exp_()
        c.v.copy_(grad[:, tokens])
        c.last.copy_(last[:, tokens])
        torch.bmm(c.values, state, out=c.dfeatures)
        dstate.baddbmm_(c.values.mT, features)
        dx[:, tokens] = torch.bmm(c.dfeatures.mul_(features), tile.rows, out=c.dx)
    return dstate


def summarise_backward(tile: Tile, y: Tensor, v: Tensor, offsets: Tensor, dy: Tensor, dv: Tensor, log_z: Tensor,
                       dstate: Tensor, length: int) -> None:
    """Writes the gradients of the first keys and values, given that to their state in the scale log z."""
    tile.set_offset(-log_z)
    dsums, rows = dstate[:, :-1].mT.contiguous(), torch.cat([tile.rows, torch.ones_like(tile.rows[..., :1])], -1)
    for tokens in chunks(length, tile.size):
        c = tile.chunk(tokens)
        features = tile.key_logs(c, y, tokens, offsets).exp_()
        tile.load_values(c, v, tokens)
        dv[:, tokens] = torch.bmm(features, dsums, out=c.dv)
        dfeatures = torch.bmm(c.values, dstate, out=c.dfeatures).mul_(features)
        back = torch.bmm(dfeatures, rows, out=c.dxo)  # the last column is the gradient to -norm_weight |y|^2
        torch.addcmul(back[..., :-1], c.x, back[..., -1:], value=-2 * tile.form.norm_weight, out=dy[:, tokens])
