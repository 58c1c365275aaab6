"""Baselines: exact, identity, uniform and window attention.

Each layer has the interface of `RandomFeatureAttention`.

Notation: B batch, H query heads, Hkv key heads, L queries, S keys, d, dv; x = sqrt(scaling) q.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.attention.base import AttentionLayer
from crt_exp.attention.checks import (
    LeftShift,
    check_inputs,
    first_unmasked,
    from_first,
    repeat_heads,
    without_padding,
)
from crt_exp.attention.decoding import RecurrentPast, TokenState
from crt_exp.features.base import all_true, values_readable
from crt_exp.samplers import at_least_float32
from crt_exp.validation import Count, Whole, checked

VECTOR = 16  # with fewer keys, torch's CPU kernel returns 0 for queries that are NaN


class Baseline(AttentionLayer):
    """Base class of baselines.

    Subclasses define `attend`. Most subclasses ignore `cross`, `seed` and `layer`.

    >>> class FirstValue(Baseline):
    ...     def attend(self, x, y, v, *, causal, key_mask):
    ...         return v[:, :, :1].expand_as(v)
    >>> FirstValue(heads=2, d=4)(*torch.randn(3, 1, 2, 6, 4)).shape
    torch.Size([1, 2, 6, 4])
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
        x = self.scaled(q)
        y = self.scaled(self.keys(q, k))
        return self.attend(x, y, v, causal=self.causal, key_mask=key_mask)

    def scaled(self, q: Tensor) -> Tensor:
        """Return queries or keys x such that x.y is the logit."""
        return q * self.scaling**0.5

    def attend(
        self,
        x: Tensor,
        y: Tensor,
        v: Tensor,
        *,
        causal: bool,
        key_mask: Tensor | None,
    ) -> Tensor:
        """Return the outputs (B,H,L,dv) for scaled queries and keys."""
        raise NotImplementedError

    def keys(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the keys to attend to."""
        return k

    def past(self) -> "KeysPast | RecurrentPast":
        """Return a decoding state with the interface of `RecurrentPast`.

        Raises ValueError if the layer is not causal.
        """
        if not self.causal:
            raise ValueError("causal=False: decoding needs causal=True")
        return KeysPast(self)


class Buffer:
    """Rows (., ., length, .) of a tensor with spare capacity.

    The first allocation fits the prompt. A full buffer grows to twice its length, so that appending a row costs
    amortized O(1).
    """

    def __init__(self, rows: Tensor | None = None):
        self.tensor = torch.empty(0, 0, 0, 0) if rows is None else rows
        self.length = self.tensor.shape[2]

    @property
    def rows(self) -> Tensor:
        return self.tensor[:, :, : self.length]

    def append(self, new: Tensor) -> Tensor:
        """Append rows and return all rows."""
        start = self.length
        end = start + new.shape[2]
        if end > self.tensor.shape[2]:
            capacity = max(64, 2 * end if start else end)
            larger = new.new_empty(*new.shape[:2], capacity, new.shape[3])
            if start:
                larger[:, :, :start] = self.rows
            self.tensor = larger
        self.tensor[:, :, start:end] = new
        self.length = end
        return self.rows


class KeysPast:
    """Decoding state that stores the keys and values of all tokens.

    Memory and the time of the next token are O(S).
    """

    def __init__(self, layer: Baseline):
        self.layer = layer
        self.keys = Buffer()
        self.values = Buffer()

    @property
    def length(self) -> int:
        """Number of tokens so far."""
        return self.keys.length

    @torch.no_grad()
    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append T tokens and return their outputs (B,H,T,dv), without gradient.

        q (B,H,T,d), k (B,Hkv,T,d) and v (B,Hkv,T,dv) are unscaled.
        """
        layer = self.layer
        layer.check_call(q, k)
        keys = self.keys.append(layer.scaled(layer.keys(q, k)))
        values = self.values.append(v)
        return layer.attend(layer.scaled(q), keys, values, causal=True, key_mask=None)


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

    >>> x, y, v = torch.randn(3, 1, 2, 5, 4)
    >>> tuple(exact_attention(x, y, v, causal=True, scale=0.5).shape)
    (1, 2, 5, 4)
    """
    check_inputs(x, y, v, None, (), causal, key_mask)
    y, v = without_padding(key_mask, y, v)
    return fused_attention(x, y, v, causal, key_mask, scale)


def fused_attention(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    causal: bool,
    key_mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Compute `exact_attention` of checked arguments with finite padding."""
    H = x.shape[1]
    grouped = x.shape[2] == 1 and y.shape[1] < H
    if grouped:
        # the last query sees every key: the heads of a group become queries of one head
        x = x.squeeze(2).unflatten(1, (y.shape[1], -1))
        causal = False
    y = repeat_heads(y, x.shape[1])
    v = repeat_heads(v, x.shape[1])
    L = x.shape[2]
    S = y.shape[2]
    causal = causal and L > 1
    allowed = None
    if key_mask is not None:
        allowed = key_mask[:, None, None].expand(-1, 1, L, -1)
    # torch's causal flag aligns the first query with the first key
    if causal and (key_mask is not None or L != S):
        past = torch.ones(L, S, dtype=torch.bool, device=x.device).tril(S - L)
        allowed = past if allowed is None else allowed & past
    if allowed is None:
        out = F.scaled_dot_product_attention(x, y, v, is_causal=causal, scale=scale)
    else:
        out = _masked_softmax(x, y, v, allowed, scale)
    if S < VECTOR:
        out = out + 0.0 * x.sum(-1, keepdim=True)
    return out.flatten(1, 2).unsqueeze(2) if grouped else out


def _masked_softmax(x: Tensor, y: Tensor, v: Tensor, allowed: Tensor, scale: float = 1.0) -> Tensor:
    """Compute softmax attention over allowed pairs; 0 for queries without keys."""
    seen = allowed.any(-1, keepdim=True)
    if values_readable(seen) and all_true(seen):
        return F.scaled_dot_product_attention(x, y, v, attn_mask=allowed, scale=scale)
    out = F.scaled_dot_product_attention(x, y, v, attn_mask=allowed | ~seen, scale=scale)
    return torch.where(seen, out, 0.0)


def identity_attention(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Return the values: an upper bound on the speed of attention.

    Query i sees key i alone, and the output is 0 if this key is masked. A causal call returns the last L values.

    Raises:
        ValueError: L and S differ in a call that is not causal.

    >>> x, y, v = torch.randn(3, 1, 2, 6, 4)
    >>> torch.equal(identity_attention(x, y, v), v)
    True
    """
    check_inputs(x, y, v, None, (), causal, key_mask)
    L = x.shape[2]
    S = y.shape[2]
    if L != S and not causal:
        raise ValueError(f"L={L}, S={S}: identity attention needs L == S")
    values = v[:, :, S - L :]
    if key_mask is not None:
        values = torch.where(key_mask[:, None, S - L :, None], values, 0.0)
    return repeat_heads(values, x.shape[1])


def uniform_attention(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Return the mean of the values that each query may see.

    This is the control: a useful approximation must be closer to exact attention.

    >>> x, y, v = torch.randn(3, 1, 2, 6, 4)
    >>> torch.allclose(uniform_attention(x, y, v)[:, :, 0], v.mean(2), atol=1e-6)
    True
    """
    check_inputs(x, y, v, None, (), causal, key_mask)
    L = x.shape[2]
    S = y.shape[2]
    v = repeat_heads(v, x.shape[1])
    keep = torch.ones(1, 1, S, 1, dtype=torch.bool, device=v.device)
    if key_mask is not None:
        keep = key_mask[:, None, :, None]
    values = torch.where(keep, at_least_float32(v), 0.0)
    if causal:
        sums = values.cumsum(2)[:, :, S - L :]
        counts = keep.cumsum(2)[:, :, S - L :]
    else:
        sums = values.sum(2, keepdim=True)
        counts = keep.sum(2, keepdim=True)
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

    >>> x, y, v = torch.randn(3, 1, 2, 6, 4)
    >>> exact = exact_attention(x, y, v)
    >>> torch.allclose(window_attention(x, y, v, block=6), exact, atol=1e-6)
    True
    """
    check_inputs(x, y, v, None, (), causal, key_mask)
    shift = None
    if key_mask is not None:
        shift = LeftShift.plan(key_mask, block)
    if shift is not None and key_mask is not None:
        x, y, v = (shift.apply(t) for t in (x, y, v))
        key_mask = shift.apply_to_mask(key_mask)
    H, L = x.shape[1:3]
    S = y.shape[2]
    y = repeat_heads(y, H)
    v = repeat_heads(v, H)
    first = min(first, S)
    keep = torch.ones(1, S, dtype=torch.bool, device=x.device)
    if key_mask is not None:
        keep = key_mask
        y, v = without_padding(keep, y, v)
    start = (S - L) // block  # block of the first query
    count = (S - 1) // block - start + 1
    lead = (S - L) - start * block  # positions of the first block before the first query
    padded = F.pad(x, (0, 0, lead, count * block - lead - L))
    queries = padded.unflatten(2, (count, block))  # (B, H, count, block, d)
    width = 2 * block if causal else 3 * block
    begin = first_unmasked(keep)[:, None, None, None, None]
    position = torch.arange(S, device=x.device)[:, None].expand(len(keep), 1, -1, -1)
    seen = []
    for t, missing in ((y, 0), (v, 0), (keep[:, None, :, None], False), (position, -1)):
        head = t[:, :, :first] if key_mask is None else from_first(t, keep, first)
        # one block before the first, one after the last
        around = F.pad(t, (0, 0, block, (start + count + 1) * block - S), value=missing)
        near = around.unfold(2, width, block)[:, :, start : start + count].mT
        if t is position:  # the first tokens are already in front
            near = near.masked_fill(near < begin + first, -1)
        head = head.unsqueeze(2).expand(-1, -1, count, -1, -1)
        seen.append(torch.cat([head, near], 3))
    keys, values, unmasked, position = seen
    allowed = (unmasked & (position >= 0)).mT.expand(-1, -1, -1, block, -1)
    if causal:
        of_queries = torch.arange(start * block, (start + count) * block, device=x.device)
        allowed = allowed & (position.mT <= of_queries.view(count, block, 1))
    out = _masked_softmax(queries, keys, values, allowed)
    out = out.flatten(2, 3)[:, :, lead : lead + L]
    return out if shift is None else shift.undo(out)


class Exact(Baseline):
    """Softmax attention by torch's fused kernels.

    >>> Exact(heads=2, d=4)(*torch.randn(3, 1, 2, 6, 4)).shape
    torch.Size([1, 2, 6, 4])
    """

    position_dependent = False
    attend = staticmethod(exact_attention)


class Identity(Baseline):
    """Attention that returns its values: an upper bound on speed ("X" in Performers).

    The output is 0 at masked keys.

    >>> Identity(heads=2, d=4)(*torch.randn(3, 1, 2, 6, 4)).shape
    torch.Size([1, 2, 6, 4])
    """

    can_cross = False
    attend = staticmethod(identity_attention)


class Uniform(Baseline):
    """Mean of the visible values: the control without queries and keys.

    >>> Uniform(heads=2, d=4)(*torch.randn(3, 1, 2, 6, 4)).shape
    torch.Size([1, 2, 6, 4])
    """

    position_dependent = False
    attend = staticmethod(uniform_attention)


class WindowState(TokenState):
    """Decoding state of causal window attention: the keys of the first tokens and of the last two blocks.

    The first tokens are stored in whole blocks, so that at most first + 3 block tokens are stored.

    >>> state = WindowState(block=4, first=2)
    >>> x, y, v = torch.randn(3, 1, 2, 30, 8)
    >>> out = state.step(x, y, v)
    >>> torch.allclose(out, window_attention(x, y, v, block=4, first=2, causal=True), atol=1e-6)
    True
    >>> state.length, tuple(state.keys.shape)
    (30, (1, 2, 10, 8))
    """

    def __init__(self, block: int, first: int):
        self.block = block
        self.first = first
        self.keys = torch.empty(0)
        self.values = torch.empty(0)

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Append tokens as `TokenState.step` does. Raises ValueError for padding."""
        if key_mask is not None:
            raise ValueError("key_mask: the bounded cache of window attention has no padding")
        if self.length:
            y = torch.cat([self.keys, y], 2)
            v = torch.cat([self.values, v], 2)
        out = window_attention(x, y, v, block=self.block, first=self.first, causal=True)
        self.length += x.shape[2]
        self.keys = self._visible(y)
        self.values = self._visible(v)
        return out

    def _visible(self, t: Tensor) -> Tensor:
        """Drop the blocks that no later token sees."""
        first = -(-self.first // self.block) * self.block
        number = self.length % self.block + self.block  # tokens of the last two blocks
        if first + number >= t.shape[2]:
            return t
        return torch.cat([t[:, :, :first], t[:, :, -number:]], 2)

    def select(self, rows: Tensor) -> None:
        self.keys = self.keys[rows]
        self.values = self.values[rows]

    def tensors(self) -> list[Tensor]:
        return [self.keys, self.values]


@checked("attention")
class Window(Baseline):
    """Exact attention to the first tokens and neighbouring blocks; no far field.

    Args:
        block: tokens of a block.
        first: tokens at the start of the sequence that all queries see.

    >>> Window(heads=2, d=4, block=2)(*torch.randn(3, 1, 2, 6, 4)).shape
    torch.Size([1, 2, 6, 4])
    """

    can_cross = False  # positions of two sequences are not comparable
    # of a layer with a decoding state
    calibrated = None
    version = None

    def __init__(self, heads: int, d: int, *, block: Count = 64, first: Whole = 4, **sizes):
        super().__init__(heads, d, **sizes)
        self.block = block
        self.first = first

    def decoding(self) -> WindowState:
        """Return a new state for token-by-token attention."""
        if not self.causal:
            raise ValueError("causal=False: decoding needs causal=True")
        return WindowState(self.block, self.first)

    def past(self) -> RecurrentPast:
        """Return a decoding state that takes q, k and v as `forward` does."""
        return RecurrentPast(self)

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
