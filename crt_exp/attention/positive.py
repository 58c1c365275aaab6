"""Bidirectional attention with positive exponential features, forward and backward in closed form.

Legend: n heads of a tile, C tokens of a chunk, M features, V = [v; 1]. With a, b the log features of queries and keys,
    top_m = max_j b_jm, K_mj = exp(b_jm - top_m), state = sum_j V_j K_j^T (dv + 1, M),
    r_i = max_m (a_im + top_m), Q_mi = exp(a_im + top_m - r_i), [numerator; denominator] = state Q,
so that every denominator is at least 1 and nothing underflows. Terms of a that a row's features share cancel and are left
out; a bias of the features counts once for each side. One log-sum a row, l_i = r_i + log denominator_i, is kept: the backward
pass recomputes normalised features exp(a + top - l), whose denominators are 1, and with g = gradient of the output
    G = [g; -g.out] (dv + 1, L),  dQ = state^T G,  dstate = G Q^T,  dK = dstate^T V,  dV = dstate K.
Four products forward and eight backward, nothing of size L x M kept. Derived for this engine.
"""

import torch
from torch import Tensor

from crt_exp.attention.tiles import Form, Scratch, Tile, store, store_row, tiles

CHUNK = 256           # tokens of a chunk: at fewer the overhead of a call shows, at more the caches overflow
TILE = 2**19          # elements of one feature buffer on the CPU
DEVICE_TILE = 2**25   # and on an accelerator, which wants large launches


def tile_elements(x: Tensor) -> int:
    return TILE if x.device.type == "cpu" else DEVICE_TILE


def forward(x: Tensor, y: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out (B,H,L,dv), log-sums (B,H,L), state (B,H,dv+1,M) and top (B,H,M) of queries x (B,H,L,d) and keys y (B,H,S,d)."""
    B, H, L, d = x.shape
    dv, M = v.shape[-1], form.width
    like = form.rows
    out, logsum = v.new_empty(B, H, L, dv), like.new_empty(B, H, L)
    states, tops = like.new_empty(B, H, dv + 1, M), like.new_empty(B, H, M)
    scratch = Scratch(like)
    for index in _tiles(x, form):
        tile = Tile(form, index, (d, dv), scratch)
        state, top = summarise(tile, y, v, y.shape[2])
        top = finite_(top)
        for tokens, size in _chunks(L):
            _read(tile, tile.queries(x, tokens, size), state, top, out[index][:, :, tokens], logsum[index][:, :, tokens])
        states[index], tops[index] = state.view_as(states[index]), top.view_as(tops[index])
    return out, logsum, states, tops


def _tiles(x: Tensor, form: Form):
    return tiles(x.shape[0], x.shape[1], tile_elements(x) // (form.width * min(CHUNK, x.shape[2])))


def _chunks(length: int):
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        yield slice(start, stop), stop - start


def summarise(tile: Tile, y: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The state of the first keys (n, dv + 1, M) and its scale (n, M), by running maxima; -inf where there was no key."""
    zero = tile.bias.new_zeros(())
    state = tile.bias.new_zeros(tile.n, tile.dv + 1, tile.form.width)
    top = tile.bias.new_full((tile.n, tile.form.width), -torch.inf)
    for tokens, size in _chunks(length):
        log = tile.log_features(tile.keys(y, tokens, size), zero, "features")
        new = torch.maximum(top, log.amax(-1))
        shift = finite_(new)
        state.mul_((top - shift).exp_().unsqueeze(1))
        top = new
        log.sub_(shift.unsqueeze(-1)).exp_()
        state.baddbmm_(tile.values(v, tokens, size), log.mT)
    return state, top


def finite_(top: Tensor) -> Tensor:
    """-inf, the maximum over no key, as 0: the state is 0 then, and no NaN may arise."""
    return torch.where(top == -torch.inf, 0.0, top)


def _read(tile: Tile, x: Tensor, state: Tensor, top: Tensor, out: Tensor, logsum: Tensor) -> None:
    log = tile.log_features(x, top + 2 * tile.bias, "features")
    r = log.amax(-2)
    log.sub_(r.unsqueeze(1)).exp_()
    sums = torch.bmm(state, log, out=tile.scratch("sums", *x.shape[:1], tile.dv + 1, x.shape[-1]))
    finish_rows(sums, r, out, logsum)


def finish_rows(sums: Tensor, r: Tensor, out: Tensor, logsum: Tensor) -> None:
    """[numerator; denominator] (k n, dv + 1, C) in the scale r (k n, C) to outputs and log-sums; 0 for a row without keys."""
    den = sums[:, -1]
    den.masked_fill_(den == 0, 1)
    store_row(logsum, r + den.log())
    store(out, sums[:, :-1].div_(den.unsqueeze(1)))


def backward(x: Tensor, y: Tensor, v: Tensor, form: Form, saved: tuple[Tensor, Tensor, Tensor, Tensor],
             grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to x, y and v of `forward`, whose four results are `saved`."""
    out, logsum, states, tops = saved
    dx, dy, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, y, v))
    scratch = Scratch(form.rows)
    minus = logsum.neg()
    for index in _tiles(x, form):
        tile = Tile(form, index, (x.shape[-1], v.shape[-1]), scratch)
        state, top = states[index].flatten(0, 1), tops[index].flatten(0, 1)
        dstate = torch.zeros_like(state)
        for tokens, size in _chunks(x.shape[2]):
            g = tile.output_grads(grad, out, tokens, size)
            features = tile.log_features(tile.queries(x, tokens, size, minus), top + 2 * tile.bias, "features").exp_()
            dstate.baddbmm_(g, features.mT)
            dfeatures = torch.bmm(state.mT, g, out=scratch("grad features", *features.shape))
            query_grads(tile, features, dfeatures, dx[index][:, :, tokens])
        summarise_backward(tile, y, v, y.shape[2], top, dstate, dy, dv)
    return dx, dy, dv


def summarise_backward(tile: Tile, y: Tensor, v: Tensor, length: int, top: Tensor, dstate: Tensor, dy: Tensor,
                       dv: Tensor) -> None:
    """Gradients of the first keys and values, given that to their state in the scale `top`."""
    for tokens, size in _chunks(length):
        keys, values = tile.keys(y, tokens, size), tile.values(v, tokens, size)
        features = tile.log_features(keys, -top, "features").exp_()
        dvalues = torch.bmm(dstate[:, :-1], features, out=tile.scratch("back", tile.n, tile.dv, size))
        store(dv[tile.index][:, :, tokens], dvalues)
        dfeatures = torch.bmm(dstate.mT, values, out=tile.scratch("grad features", *features.shape))
        key_grads(tile, keys, features, dfeatures, dy[tile.index][:, :, tokens])


def query_grads(tile: Tile, features: Tensor, dfeatures: Tensor, dx: Tensor) -> None:
    store(dx, tile.back(dfeatures.mul_(features), tile.d))


def key_grads(tile: Tile, keys: Tensor, features: Tensor, dfeatures: Tensor, dy: Tensor) -> None:
    """Log features are W y - norm_weight |y|^2; the last row of `back` is the gradient to their token offsets."""
    back = tile.back(dfeatures.mul_(features), tile.d + 1)
    store(dy, back[:, :-1].addcmul_(keys[:, : tile.d], back[:, -1:], value=-2 * tile.form.norm_weight))
