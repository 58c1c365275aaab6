"""Baselines without random features: exact attention, its values alone, uniform and window attention.

Each is a layer with the interface of `RandomFeatureAttention` and states whether it can be causal. Notation: B batch, H
query heads, Hkv key heads, L queries, S keys, d, dv; x = sqrt(scaling) q.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.attention.base import AttentionLayer
from crt_exp.attention.checks import Shift, check_inputs, first_kept, from_first, repeat_heads
from crt_exp.features.base import can_ask, holds
from crt_exp.options import Count, Whole, checked
from crt_exp.samplers import at_least_float32

VECTOR = 16     # fewer keys than a vector of floats holds: torch's kernel for CPUs gives 0 for queries that are NaN


class Baseline(AttentionLayer):
    """Subclasses define `attend(x, y, v, *, causal, key_mask)` -> (B,H,L,dv).

    Seed and number of the layer, and whether it is cross-attention, make no difference to most.
    """

    def __init__(self, heads: int, d: int, *, kv_heads: int | None = None, causal: bool = False, cross: bool = False,
                 scaling: float | None = None, seed: int = 0, layer: int = 0):
        super().__init__(heads, d, kv_heads, causal, scaling)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        self.check_call(q, k)
        root = self.scaling**0.5
        return self.attend(q * root, self.keys(q, k) * root, v, causal=self.causal, key_mask=key_mask)

    def keys(self, q: Tensor, k: Tensor) -> Tensor:
        """What stands for the keys."""
        return k

    def past(self) -> "KeysPast":
        """What it remembers of the tokens so far: see `RecurrentPast`."""
        if not self.causal:
            raise ValueError("decoding needs causal attention")
        return KeysPast(self)


class Buffer:
    """Rows (., ., used, .) of a tensor that may be longer. A prompt gets as many as it has; where it is full it grows
    to twice the length, so that keeping a row costs O(1). A state that is not the last one to have written there gets
    a buffer of its own."""

    def __init__(self, tensor: Tensor, used: int = 0):
        self.tensor, self.used = tensor, used

    def added(self, length: int, new: Tensor) -> "Buffer":
        end, buffer = length + new.shape[2], self
        if self.used != length or end > self.tensor.shape[2]:
            room = max(64, 2 * end if length else end)
            larger = self.tensor.new_empty(*self.tensor.shape[:2], room, self.tensor.shape[3])
            larger[:, :, :length] = self.tensor[:, :, :length]
            buffer = Buffer(larger)
        buffer.tensor[:, :, length:end] = new
        buffer.used = end
        return buffer


class KeysPast:
    """The keys and values of all tokens so far: O(S) numbers, and time O(S) for the next token.

    window: None, or how many tokens the last one of a step sees, itself among them; those before are forgotten when the
    next step begins.
    """

    def __init__(self, layer: Baseline, window: int | None = None):
        self.layer, self.window = layer, window
        self.length, self.held, self.buffers = 0, 0, ()            # tokens taken, and kept

    @torch.no_grad()
    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """New tokens q (B,H,T,d), k (B,Hkv,T,d), v (B,Hkv,T,dv), unscaled -> their outputs (B,H,T,dv), no gradient.

        Raises ValueError for more tokens than the window has.
        """
        self.layer.check_call(q, k)
        self._forget(q.shape[2])
        root = self.layer.scaling**0.5
        new = self.layer.keys(q, k) * root, v
        buffers = self.buffers or [Buffer(t[:, :, :0]) for t in new]
        self.buffers = tuple(buffer.added(self.held, t) for buffer, t in zip(buffers, new))
        self.length, self.held = self.length + q.shape[2], self.held + q.shape[2]
        keys, values = (buffer.tensor[:, :, :self.held] for buffer in self.buffers)
        return self.layer.attend(q * root, keys, values, causal=True, key_mask=None)

    def _forget(self, new: int) -> None:
        """Forgets tokens until `new` more fit into the window."""
        if self.window is None or self.held + new <= self.window:
            return
        if new > self.window:
            raise ValueError(f"{new} tokens at once and a window of {self.window}: give at most as many")
        first, self.held = self.held + new - self.window, self.window - new
        self.buffers = tuple(Buffer(buffer.tensor[:, :, first:first + self.held].clone(), self.held)
                             for buffer in self.buffers)


class WholePast(KeysPast):
    """That of attention which chooses among the places of the whole sequence: nothing is forgotten."""

    def _forget(self, new: int) -> None:
        pass


class NoPast:
    """That of a layer whose outputs depend on no other token."""

    length = 0

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.length += q.shape[2]
        return repeat_heads(v, q.shape[1])


def exact_attention(x: Tensor, y: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None,
                    scale: float = 1.0) -> Tensor:
    """Softmax attention by the fused kernels of torch, quadratic in time: arguments and result as `attention`; logits
    are scale x.y."""
    check_inputs(x, y, v, None, (), causal, key_mask)
    if key_mask is not None:
        y, v = (torch.where(key_mask[:, None, :, None], t, 0.0) for t in (y, v))
    return fused_attention(x, y, v, causal, key_mask, scale)


def fused_attention(x: Tensor, y: Tensor, v: Tensor, causal: bool, key_mask: Tensor | None, scale: float) -> Tensor:
    """`exact_attention` of arguments that were checked, whose padding is finite."""
    H, L = x.shape[1:3]
    if L == 1 and y.shape[1] < H:  # the last query sees every key: those of the heads of a group are as of one head
        out = _fused(x.squeeze(2).unflatten(1, (y.shape[1], -1)), y, v, False, key_mask, scale)
        return out.flatten(1, 2).unsqueeze(2)
    return _fused(x, repeat_heads(y, H), repeat_heads(v, H), causal and L > 1, key_mask, scale)


def _fused(x: Tensor, y: Tensor, v: Tensor, causal: bool, key_mask: Tensor | None, scale: float) -> Tensor:
    L, S = x.shape[2], y.shape[2]
    allowed = None if key_mask is None else key_mask[:, None, None].expand(-1, 1, L, -1)
    if causal and (key_mask is not None or L != S):  # torch's own causal flag counts from the first key
        past = torch.ones(L, S, dtype=torch.bool, device=x.device).tril(S - L)
        allowed = past if allowed is None else allowed & past
    if allowed is None:
        out = F.scaled_dot_product_attention(x, y, v, is_causal=causal, scale=scale)
    else:
        out = _masked_softmax(x, y, v, allowed, scale)
    return out + 0.0 * x.sum(-1, keepdim=True) if S < VECTOR else out


def _masked_softmax(x: Tensor, y: Tensor, v: Tensor, allowed: Tensor, scale: float = 1.0) -> Tensor:
    """Softmax attention over the allowed pairs; 0 for a query that sees no key, which would be NaN."""
    seen = allowed.any(-1, keepdim=True)
    if can_ask(seen) and holds(seen):
        return F.scaled_dot_product_attention(x, y, v, attn_mask=allowed, scale=scale)
    out = F.scaled_dot_product_attention(x, y, v, attn_mask=allowed | ~seen, scale=scale)
    return torch.where(seen, out, 0.0)


def identity_attention(x: Tensor, y: Tensor, v: Tensor, *, causal: bool = False,
                       key_mask: Tensor | None = None) -> Tensor:
    """The values themselves: what no attention can be faster than. Needs as many keys as queries, or causal queries,
    which are the last of the sequence."""
    check_inputs(x, y, v, None, (), causal, key_mask)
    L, S = x.shape[2], y.shape[2]
    if L != S and not causal:
        raise ValueError(f"identity attention of {L} queries to {S} keys: it needs as many of both")
    return repeat_heads(v[:, :, S - L:], x.shape[1])


def uniform_attention(x: Tensor, y: Tensor, v: Tensor, *, causal: bool = False,
                      key_mask: Tensor | None = None) -> Tensor:
    """The mean of the values over the keys that a query may see: an approximation must be closer to exact."""
    check_inputs(x, y, v, None, (), causal, key_mask)
    v, (L, S) = repeat_heads(v, x.shape[1]), (x.shape[2], y.shape[2])
    keep = torch.ones(1, 1, S, 1, dtype=torch.bool, device=v.device) if key_mask is None else key_mask[:, None, :, None]
    values = torch.where(keep, at_least_float32(v), 0.0)
    if causal:
        sums, counts = (t.cumsum(2)[:, :, S - L:] for t in (values, keep))
    else:
        sums, counts = (t.sum(2, keepdim=True) for t in (values, keep))
    return (sums / counts.clamp(min=1)).to(v.dtype).expand(-1, -1, L, -1)


def window_attention(x: Tensor, y: Tensor, v: Tensor, *, block: int = 64, first: int = 4, causal: bool = False,
                     key_mask: Tensor | None = None) -> Tensor:
    """Exact softmax over the first keys and the blocks around a query's own:
    the one before, and if not causal the one after.

    Time and memory O(L (first + 3 block)). Query i stands at place i + S - L of the keys, and places are counted from
    the first real token of each row: a token after it that does not count keeps its place.
    """
    check_inputs(x, y, v, None, (), causal, key_mask)
    shift = Shift.of(key_mask, block)
    if shift is None:
        return _window(x, y, v, key_mask, block, first, causal)
    return shift.back(_window(*map(shift.there, (x, y, v)), shift.mask(key_mask), block, first, causal))


def _window(x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None, block: int, first: int, causal: bool) -> Tensor:
    """`window_attention` where the first real token of each row begins a block."""
    H, L, S = *x.shape[1:3], y.shape[2]
    y, v, first = repeat_heads(y, H), repeat_heads(v, H), min(first, S)
    keep = torch.ones(1, S, dtype=torch.bool, device=x.device) if key_mask is None else key_mask
    y, v = (torch.where(keep[:, None, :, None], t, 0.0) for t in (y, v)) if key_mask is not None else (y, v)
    start = (S - L) // block                                 # the block of the first query
    count = (S - 1) // block - start + 1                     # blocks with queries
    lead = (S - L) - start * block                           # places of the first block before the first query
    queries = F.pad(x, (0, 0, lead, count * block - lead - L)).unflatten(2, (count, block))        # (B, H, n, block, d)
    around = range(-1, 1 if causal else 2)
    near = [_blocks(t, block, start, count, around) for t in (y, v, keep[:, None, :, None])]       # (B, H, n, w, .)
    head = [t[:, :, :first] if key_mask is None else from_first(t, keep, first)
            for t in (y, v, keep[:, None, :, None])]
    head = [t.unsqueeze(2).expand(-1, -1, count, -1, -1) for t in head]
    keys, values, kept = (torch.cat([h, n], 3) for h, n in zip(head, near))
    places = _allowed_places(first_kept(keep), S, block, first, start, count, around, causal)
    allowed = kept[..., 0][..., None, :] & places
    out = _masked_softmax(queries, keys, values, allowed)
    return out.flatten(2, 3)[:, :, lead:lead + L]


def _blocks(t: Tensor, block: int, start: int, count: int, around: range) -> Tensor:
    """The blocks around each of `count` blocks of (B, H, S, k), side by side: (B, H, count, len(around) block, k)."""
    size = (start + count + 1) * block
    t = F.pad(t, (0, 0, block, size - t.shape[2]))           # one block before the first, one after the last
    parts = t.unflatten(2, (-1, block))
    return torch.cat([parts[:, :, start + 1 + i:start + 1 + i + count] for i in around], 3)


def _allowed_places(begin: Tensor, S: int, block: int, first: int, start: int, count: int, around: range,
                    causal: bool) -> Tensor:
    """(B, 1, count, block, first + len(around) block): which pairs count, by the places of their tokens alone and of
    the first one of each row, begin (B,)."""
    begin, device = begin[:, None, None], begin.device
    at = torch.arange(count, device=device)[:, None] + start
    queries = at * block + torch.arange(block, device=device)                                       # (n, block)
    offsets = torch.arange(around.start * block, around.stop * block, device=device)
    near = (at * block + offsets).expand(len(begin), -1, -1)                                        # (B, n, w)
    near = torch.where(near < begin + first, -1, near)       # the first tokens stand in front already
    keys = torch.cat([(begin + torch.arange(first, device=device)).expand(-1, count, -1), near], 2)
    allowed = ((keys >= 0) & (keys < S)).unsqueeze(2)
    pairs = allowed & (keys.unsqueeze(2) <= queries[..., None]) if causal else allowed.expand(-1, -1, block, -1)
    return pairs.unsqueeze(1)


class Exact(Baseline):
    """Softmax attention by torch's fused kernels."""

    counts_places = False

    def attend(self, x, y, v, *, causal, key_mask):
        return exact_attention(x, y, v, causal=causal, key_mask=key_mask)


class Identity(Baseline):
    """Attention that returns its values: the upper bound of speed ("X" in Performers)."""

    can_cross = False

    def past(self):
        return NoPast()

    def attend(self, x, y, v, *, causal, key_mask):
        return identity_attention(x, y, v, causal=causal, key_mask=key_mask)


class Uniform(Baseline):
    """The mean of the values that a query may see: the control without queries and keys."""

    counts_places = False

    def attend(self, x, y, v, *, causal, key_mask):
        return uniform_attention(x, y, v, causal=causal, key_mask=key_mask)


@checked("attention")
class Window(Baseline):
    """Own and neighbouring blocks of `block` tokens and the `first` tokens, exactly: the control without a far view."""

    can_cross = False    # a place of one sequence is none of another

    def __init__(self, heads: int, d: int, *, block: Count = 64, first: Whole = 4, **sizes):
        super().__init__(heads, d, **sizes)
        self.block, self.first = block, first

    @property
    def exact_to(self) -> int:
        """Tokens of which every query sees all that it may."""
        if self.causal:
            return (self.first // self.block + 2) * self.block
        return max(2 * self.block, self.first)

    def past(self):
        if not self.causal:
            raise ValueError("decoding needs causal attention")
        return WholePast(self)

    def attend(self, x, y, v, *, causal, key_mask):
        if not causal and x.shape[2] != y.shape[2]:
            raise ValueError(f"window attention of {x.shape[2]} queries to {y.shape[2]} keys: "
                             "they must be one sequence")
        return window_attention(x, y, v, block=self.block, first=self.first, causal=causal, key_mask=key_mask)
