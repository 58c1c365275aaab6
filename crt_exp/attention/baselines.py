"""Baselines: exact, identity, uniform and window attention.

Each layer has the interface of `RandomFeatureAttention`.

Notation: B batch, H query heads, Hkv key heads, L queries, S keys, d, dv; x = sqrt(scaling) q.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.attention.base import AttentionLayer
from crt_exp.attention.checks import Shift, check_inputs, first_unmasked, from_first, repeat_heads
from crt_exp.features.base import all_true, values_readable
from crt_exp.samplers import at_least_float32
from crt_exp.validation import Count, Whole, checked

VECTOR = 16  # with fewer keys, torch's CPU kernel returns 0 for queries that are NaN


class Baseline(AttentionLayer):
    """Base class of baselines.

    Subclasses define `attend(x, y, v, *, causal, key_mask)`, which returns (B,H,L,dv).
    Most subclasses ignore `cross`, `seed` and `layer`.
    """

    def __init__(
        self,
        heads: int,
        d: int,
        *,
        kv_heads: int | None = None,
        causal: bool = False,
        cross: bool = False,
        scaling: float | None = None,
        seed: int = 0,
        layer: int = 0,
    ):
        super().__init__(heads, d, kv_heads, causal, scaling)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        self.check_call(q, k)
        root = self.scaling**0.5
        return self.attend(
            q * root, self.keys(q, k) * root, v, causal=self.causal, key_mask=key_mask
        )

    def keys(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the keys to attend to."""
        return k

    def past(self) -> "KeysPast":
        """Return a decoding state with the interface of `RecurrentPast`.

        Raises ValueError if the layer is not causal.
        """
        if not self.causal:
            raise ValueError("causal=False: decoding needs causal=True")
        return KeysPast(self)


class Buffer:
    """Rows (., ., used, .) of a tensor with spare capacity.

    The first allocation fits the prompt. A full buffer grows to twice its length, so that appending a row costs
    amortized O(1). A state that did not write the last rows gets a buffer of its own.
    """

    def __init__(self, tensor: Tensor, used: int = 0):
        self.tensor, self.used = tensor, used

    def append(self, length: int, new: Tensor) -> "Buffer":
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
    """Decoding state that stores the keys and values of all tokens.

    Memory and the time of the next token are O(S).
    """

    def __init__(self, layer: Baseline):
        self.layer = layer
        self.length = 0
        self.buffers = ()

    @torch.no_grad()
    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append T tokens and return their outputs (B,H,T,dv), without gradient.

        q (B,H,T,d), k (B,Hkv,T,d) and v (B,Hkv,T,dv) are unscaled.
        """
        self.layer.check_call(q, k)
        root = self.layer.scaling**0.5
        new = self.layer.keys(q, k) * root, v
        buffers = self.buffers or [Buffer(t[:, :, :0]) for t in new]
        self.buffers = tuple(buffer.append(self.length, t) for buffer, t in zip(buffers, new))
        self.length += q.shape[2]
        keys, values = (buffer.tensor[:, :, : self.length] for buffer in self.buffers)
        return self.layer.attend(q * root, keys, values, causal=True, key_mask=None)


class NoPast:
    """Decoding state of a layer whose outputs depend on no other token."""

    length = 0

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.length += q.shape[2]
        return repeat_heads(v, q.shape[1])


def exact_attention(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Compute softmax attention with torch's fused kernels, in quadratic time.

    The logits are scale x.y. Other arguments and the result are those of `attention`.
    """
    check_inputs(x, y, v, None, (), causal, key_mask)
    if key_mask is not None:
        y, v = (torch.where(key_mask[:, None, :, None], t, 0.0) for t in (y, v))
    return fused_attention(x, y, v, causal, key_mask, scale)


def fused_attention(
    x: Tensor, y: Tensor, v: Tensor, causal: bool, key_mask: Tensor | None, scale: float
) -> Tensor:
    """Compute `exact_attention` of checked arguments with finite padding."""
    H, L = x.shape[1:3]
    if (
        L == 1 and y.shape[1] < H
    ):  # the last query sees every key: the heads of a group become queries of one head
        out = _fused(x.squeeze(2).unflatten(1, (y.shape[1], -1)), y, v, False, key_mask, scale)
        return out.flatten(1, 2).unsqueeze(2)
    return _fused(x, repeat_heads(y, H), repeat_heads(v, H), causal and L > 1, key_mask, scale)


def _fused(
    x: Tensor, y: Tensor, v: Tensor, causal: bool, key_mask: Tensor | None, scale: float
) -> Tensor:
    L, S = x.shape[2], y.shape[2]
    allowed = None if key_mask is None else key_mask[:, None, None].expand(-1, 1, L, -1)
    if causal and (
        key_mask is not None or L != S
    ):  # torch's causal flag aligns the first query with the first key
        past = torch.ones(L, S, dtype=torch.bool, device=x.device).tril(S - L)
        allowed = past if allowed is None else allowed & past
    if allowed is None:
        out = F.scaled_dot_product_attention(x, y, v, is_causal=causal, scale=scale)
    else:
        out = _masked_softmax(x, y, v, allowed, scale)
    return out + 0.0 * x.sum(-1, keepdim=True) if S < VECTOR else out


def _masked_softmax(x: Tensor, y: Tensor, v: Tensor, allowed: Tensor, scale: float = 1.0) -> Tensor:
    """Compute softmax attention over allowed pairs; 0 for queries without keys."""
    seen = allowed.any(-1, keepdim=True)
    if values_readable(seen) and all_true(seen):
        return F.scaled_dot_product_attention(x, y, v, attn_mask=allowed, scale=scale)
    out = F.scaled_dot_product_attention(x, y, v, attn_mask=allowed | ~seen, scale=scale)
    return torch.where(seen, out, 0.0)


def identity_attention(
    x: Tensor, y: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """Return the values: an upper bound on the speed of attention.

    Query i sees key i alone, and the output is 0 if this key is masked. A causal call returns the last L values.

    Raises:
        ValueError: L and S differ in a call that is not causal.
    """
    check_inputs(x, y, v, None, (), causal, key_mask)
    L, S = x.shape[2], y.shape[2]
    if L != S and not causal:
        raise ValueError(f"L={L}, S={S}: identity attention needs L == S")
    values = v[:, :, S - L :]
    if key_mask is not None:
        values = torch.where(key_mask[:, None, S - L :, None], values, 0.0)
    return repeat_heads(values, x.shape[1])


def uniform_attention(
    x: Tensor, y: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """Return the mean of the values that each query may see.

    This is the control: a useful approximation must be closer to exact attention.
    """
    check_inputs(x, y, v, None, (), causal, key_mask)
    v, (L, S) = repeat_heads(v, x.shape[1]), (x.shape[2], y.shape[2])
    keep = (
        torch.ones(1, 1, S, 1, dtype=torch.bool, device=v.device)
        if key_mask is None
        else key_mask[:, None, :, None]
    )
    values = torch.where(keep, at_least_float32(v), 0.0)
    if causal:
        sums, counts = (t.cumsum(2)[:, :, S - L :] for t in (values, keep))
    else:
        sums, counts = (t.sum(2, keepdim=True) for t in (values, keep))
    return (sums / counts.clamp(min=1)).to(v.dtype).expand(-1, -1, L, -1)


def window_attention(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    *,
    block: int = 64,
    first: int = 4,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Compute exact softmax attention to the first tokens and neighbouring blocks.

    Each query sees the `first` tokens of the sequence, its own block, the block before and, unless `causal`, the block
    after. Time and memory are O(L (first + 3 block)).
    Query i has position i + S - L. Positions are counted from the first real token of each row; masked tokens after it
    keep their positions.
    """
    check_inputs(x, y, v, None, (), causal, key_mask)
    shift = Shift.of(key_mask, block)
    if shift is None:
        return _window(x, y, v, key_mask, block, first, causal)
    vectors = [shift.there(t) for t in (x, y, v)]
    return shift.back(_window(*vectors, shift.mask(key_mask), block, first, causal))


def _window(
    x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None, block: int, first: int, causal: bool
) -> Tensor:
    """Compute `window_attention` of rows whose first real token begins a block."""
    H, L = x.shape[1:3]
    S = y.shape[2]
    y = repeat_heads(y, H)
    v = repeat_heads(v, H)
    first = min(first, S)
    if key_mask is None:
        keep = torch.ones(1, S, dtype=torch.bool, device=x.device)
    else:
        keep = key_mask
        y = torch.where(keep[:, None, :, None], y, 0.0)
        v = torch.where(keep[:, None, :, None], v, 0.0)
    start = (S - L) // block  # the block of the first query
    count = (S - 1) // block - start + 1  # blocks with queries
    lead = (S - L) - start * block  # positions of the first block before the first query
    queries = F.pad(x, (0, 0, lead, count * block - lead - L)).unflatten(
        2, (count, block)
    )  # (B, H, n, block, d)
    around = range(-1, 1 if causal else 2)
    near = [
        _blocks(t, block, start, count, around) for t in (y, v, keep[:, None, :, None])
    ]  # (B, H, n, w, .)
    head = [
        t[:, :, :first] if key_mask is None else from_first(t, keep, first)
        for t in (y, v, keep[:, None, :, None])
    ]
    head = [t.unsqueeze(2).expand(-1, -1, count, -1, -1) for t in head]
    keys, values, kept = (torch.cat([h, n], 3) for h, n in zip(head, near))
    places = _allowed_places(first_unmasked(keep), S, block, first, start, count, around, causal)
    allowed = kept[..., 0][..., None, :] & places
    out = _masked_softmax(queries, keys, values, allowed)
    return out.flatten(2, 3)[:, :, lead : lead + L]


def _blocks(t: Tensor, block: int, start: int, count: int, around: range) -> Tensor:
    """Concatenate the blocks around each block of t (B,H,S,k).

    Returns (B, H, count, len(around) block, k).
    """
    size = (start + count + 1) * block
    t = F.pad(t, (0, 0, block, size - t.shape[2]))  # one block before the first, one after the last
    parts = t.unflatten(2, (-1, block))
    return torch.cat([parts[:, :, start + 1 + i : start + 1 + i + count] for i in around], 3)


def _allowed_places(
    begin: Tensor,
    S: int,
    block: int,
    first: int,
    start: int,
    count: int,
    around: range,
    causal: bool,
) -> Tensor:
    """Return which pairs of tokens are allowed by their positions.

    begin (B,): position of the first real token of each row. Returns (B, 1, count, block, first + len(around) block).
    """
    begin, device = begin[:, None, None], begin.device
    at = torch.arange(count, device=device)[:, None] + start
    queries = at * block + torch.arange(block, device=device)  # (n, block)
    offsets = torch.arange(around.start * block, around.stop * block, device=device)
    near = (at * block + offsets).expand(len(begin), -1, -1)  # (B, n, w)
    near = torch.where(near < begin + first, -1, near)  # the first tokens are already in front
    keys = torch.cat([(begin + torch.arange(first, device=device)).expand(-1, count, -1), near], 2)
    allowed = ((keys >= 0) & (keys < S)).unsqueeze(2)
    pairs = (
        allowed & (keys.unsqueeze(2) <= queries[..., None])
        if causal
        else allowed.expand(-1, -1, block, -1)
    )
    return pairs.unsqueeze(1)


class Exact(Baseline):
    """Softmax attention by torch's fused kernels."""

    position_dependent = False
    attend = staticmethod(exact_attention)


class Identity(Baseline):
    """Attention that returns its values: an upper bound on speed ("X" in Performers).

    The output is 0 at masked keys.
    """

    can_cross = False
    attend = staticmethod(identity_attention)

    def past(self):
        return NoPast()


class Uniform(Baseline):
    """Mean of the visible values: the control without queries and keys."""

    position_dependent = False
    attend = staticmethod(uniform_attention)


@checked("attention")
class Window(Baseline):
    """Exact attention to the first tokens and neighbouring blocks; no far field.

    Args:
        block: tokens of a block.
        first: tokens at the start of the sequence that all queries see.
    """

    can_cross = False  # positions of two sequences are not comparable

    def __init__(self, heads: int, d: int, *, block: Count = 64, first: Whole = 4, **sizes):
        super().__init__(heads, d, **sizes)
        self.block, self.first = block, first

    @property
    def exact_to(self) -> int:
        """Sequence length up to which each query sees all permitted keys."""
        if self.causal:
            return (self.first // self.block + 2) * self.block
        return max(2 * self.block, self.first)

    def attend(self, x, y, v, *, causal, key_mask):
        if not causal and x.shape[2] != y.shape[2]:
            raise ValueError(f"L={x.shape[2]}, S={y.shape[2]}: window attention needs L == S")
        return window_attention(
            x, y, v, block=self.block, first=self.first, causal=causal, key_mask=key_mask
        )
