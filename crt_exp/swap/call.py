"""One call of a swapped attention layer: masks, causality, dropout, matrix.

`attend` makes the call. The swapped modules of torch and timm are here, those of transformers in `interface`. Linear
attention supports two masks: key padding (B, S) and causal. A mask of query-key pairs is converted to these two, or
refused. The mask of a call decides whether the call is causal.

Notation: B batch, H query heads, Hkv key heads, L queries, S keys, d head dimension, dv value dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.attention.base import AttentionLayer, LinearAttention

REMOVED = -1e4  # additive masks: 0 keeps a pair, values up to this one remove it


def attend(
    state: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    keep: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    cross: bool | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    matrix: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention by `state`: returns the output (B,H,L,dv) and the matrix, or None.

    Args:
        state: the swapped layer.
        q: queries (B,H,L,d).
        k: keys (B,Hkv,S,d).
        v: values (B,Hkv,S,dv).
        keep: key padding mask (B or 1, S), True = keep.
        mask: mask of pairs, (L,S), (B,L,S) or (B or 1, 1 or H, L or 1, S); boolean with True = keep, or additive. For
            more than one query the mask overrides `causal`.
        cross: whether queries and keys come from different sequences. Default: as the layer was swapped.
        scaling: factor of the logits. Default: that of the layer.
        dropout: probability of dropping a key. Each entry of the attention matrix is dropped with this
            probability. All queries of a head drop the same keys, because the matrix is not formed.
        matrix: also return the attention matrix (B,H,L,S).

    Raises:
        ValueError: the mask is neither padding nor causal nor both, or sizes differ from those of the swap. The error
            names the layer.
    """
    S = k.shape[2]
    if mask is not None:
        check_mask(mask, q, S, state.path)
        expected = causal
        keep, causal, used = read_mask(mask, keep, causal, q.shape[2], state.path)
        if getattr(state, "position_dependent", True):
            used = _to_last_query(keep, causal, expected, q.shape[2], state.path)
        if used < k.shape[2]:
            k = k[:, :, :used]
            v = v[:, :, :used]
            keep = keep[:, :used]
    if keep is not None:
        keep = None if known_true(keep) else keep.expand(k.shape[0], -1)
    prepare(state, q, k, causal, cross)
    if scaling is not None and scaling != state.scaling:
        q = q * (scaling / state.scaling)
    used, dv = v.shape[2:]
    if matrix:
        unit = torch.eye(used, dtype=v.dtype, device=v.device).expand(*v.shape[:2], used, used)
        v = torch.cat([v, unit], -1)
    if dropout > 0:
        v = v * nn.functional.dropout(torch.ones_like(v[..., :1]), dropout)
    if not matrix:
        return state(q, k, v, keep), None
    state.columns = dv  # the other columns are unit vectors
    try:
        out = state(q, k, v, keep)
    finally:
        state.columns = None
    weights = nn.functional.pad(out[..., dv:], (0, S - used))  # 0 for keys after the last query
    return out[..., :dv], weights


def prepare(
    state: nn.Module, q: Tensor, k: Tensor, causal: bool, cross: bool | None = None
) -> None:
    """Check the sizes of a call and set the causal and cross flags of the layer.

    Raises ValueError for a call that the layer was not built for.
    """
    if isinstance(state, AttentionLayer):
        sizes = (q.shape[1], k.shape[1], q.shape[3])
        expected = (state.heads, state.kv_heads, state.d)
        if sizes != expected:
            raise ValueError(
                f"{state.path}: (query heads, key heads, d)={sizes}, expected {expected} as in the swap"
            )
    if not torch.compiler.is_compiling():
        state.__dict__["reached"] = True
    if causal and isinstance(state, LinearAttention) and not state.serves_causal:
        raise ValueError(
            f"{state.path}: causal call of a layer swapped as bidirectional; use causal=True"
        )
    if cross is not None and isinstance(state, LinearAttention) and cross != state.cross:
        state.cross = cross
    # writing a module attribute takes as long as a small tensor operation
    if causal != state.causal:
        state.causal = causal


def check_mask(mask: Tensor, q: Tensor, S: int, path: str, least: int | None = None) -> None:
    """Raise ValueError if the shape of a mask does not fit q (B,H,L,d) and S keys.

    The mask is (L,S), (B,L,S) or (B,H,L,S), with sizes of 1 allowed. With `least` the mask may cover from `least` to S
    keys.
    """
    B, H, L, _ = q.shape
    sizes = {2: (L,), 3: (B, L), 4: (B, H, L)}.get(mask.ndim, ())
    if least is None:
        least = S
    fits = bool(sizes) and least <= mask.shape[-1] <= S
    if not fits or any(size not in (1, expected) for size, expected in zip(mask.shape, sizes)):
        raise ValueError(
            f"{path}: attention_mask {tuple(mask.shape)}: expected (batch, tokens)={B, S}"
        )


def read_mask(
    mask: Tensor, keep: Tensor | None, causal: bool, queries: int, path: str
) -> tuple[Tensor | None, bool, int]:
    """Convert a mask of pairs to (keep (B or 1, S) or None, causal, number of keys)."""
    if _equal_for_all_queries(mask):
        seen = _allowed(mask[:, 0, 0], path)
        if keep is not None:
            seen = seen & keep
        return seen, causal and queries == 1, mask.shape[-1]
    allowed = _allowed(mask, path)
    while allowed.ndim < 4:
        allowed = allowed.unsqueeze(0) if allowed.ndim == 2 else allowed.unsqueeze(1)
    pattern = _pattern(allowed)
    if pattern is None:
        raise ValueError(
            f"{path}: attention_mask {tuple(mask.shape)}: expected key padding or a causal mask "
            "(NaFlexVit: use_key_only_attn_mask=True); leave the layer out with layers=[...]"
        )
    seen, is_causal, used = pattern
    if keep is not None:
        seen = seen & keep[:, :used]
    if queries == 1:
        is_causal = causal
    return seen, is_causal, used


def _equal_for_all_queries(mask: Tensor) -> bool:
    """Return whether a mask is equal for all heads and queries, by its shape or strides."""
    if mask.ndim != 4:
        return False
    return all(mask.shape[dim] == 1 or mask.stride(dim) == 0 for dim in (1, 2))


def _to_last_query(keep: Tensor, causal: bool, expected: bool, queries: int, path: str) -> int:
    """The number of keys of keep (B, S) up to the last query.

    A static cache has unused slots after the last query. `expected` states whether calls of this module are causal
    without a mask. Raises ValueError if all queries see the same keys and the mask can be
    padding or a prefix.
    """
    S = keep.shape[1]
    if queries == 1:
        return _last_used(keep) if causal else S
    if causal or not expected:
        return S
    used = _last_used(keep)
    if used != queries and S - used >= queries - 1:
        raise ValueError(
            f"{path}: right padding is ambiguous in a static cache; use padding_side='left'"
        )
    return used if used == queries else S


def as_keep(mask: Tensor | None, path: str) -> Tensor | None:
    """Convert torch's key padding mask (True or -inf = padding) to True = keep."""
    if mask is None:
        return None
    return ~mask if mask.dtype == torch.bool else _allowed(mask, path)


def _allowed(mask: Tensor, path: str) -> Tensor:
    """Convert an additive mask to boolean, True = keep. Raises ValueError."""
    if mask.dtype == torch.bool:
        return mask
    allowed = mask == 0
    if not bool((allowed | (mask <= REMOVED)).all()):
        raise ValueError(
            f"{path}: attention_mask: finite biases are not supported; expected 0 or -inf per key"
        )
    return allowed


def _pattern(allowed: Tensor) -> tuple[Tensor, bool, int] | None:
    """(keep, causal, number of keys) of a mask (B,h,L,S); None for other patterns."""
    if not bool((allowed == allowed[:, :1]).all()):
        return None
    pairs = allowed[:, 0]
    L, S = pairs.shape[1:]
    last = pairs[:, -1]
    if bool((pairs == last[:, None]).all()):
        return last, False, S
    used = _last_used(last)
    # position of the last query, if the mask is causal
    end = used + L - 1 - int(pairs[..., used - 1].any(0).int().argmax())
    past = torch.ones(L, S, dtype=torch.bool, device=pairs.device).tril(end - L)
    if end > S or not bool((pairs == (last[:, None] & past)).all()):
        return None
    return last[:, :end], True, end


def _last_used(keep: Tensor) -> int:
    """The number of keys up to the last one kept in any row of keep (B, S).

    Returns S if no key is kept. A static cache has unused slots after that key.
    """
    used = keep.any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else keep.shape[1]


def known_true(keep: Tensor) -> bool:
    return not torch.compiler.is_compiling() and bool(keep.all())


# ---- torch.nn.MultiheadAttention, and with it TransformerEncoder and torchaudio's Conformer


class SwappedMultiheadAttention(nn.Module):
    """Replacement for nn.MultiheadAttention, with its parameters and arguments.

    The class is no subclass of nn.MultiheadAttention. `need_weights=True`, torch's default, forms the (L, S) matrix:
    pass False if the matrix is not needed.
    """

    # False keeps an encoder layer in eval mode off its fused fast path
    _qkv_same_embed_dim = property(lambda self: False)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        batched = query.ndim == 3
        time_first = batched and not self.batch_first
        q, k, v = (self._split(t, batched, time_first) for t in self._project(query, key, value))
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask[None]
        keep = as_keep(key_padding_mask, self.swapped.path)
        mask, causal = self._mask(attn_mask, q, k, is_causal)
        # activation checkpointing passes two tensors that share memory
        same = query is key or (not torch.compiler.is_compiling() and query.is_set_to(key))
        out, matrix = attend(
            self.swapped,
            q,
            k,
            v,
            keep=keep,
            mask=mask,
            causal=causal,
            cross=not same,
            matrix=need_weights,
            dropout=self.dropout if self.training else 0.0,
        )
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if time_first:
            out = out.transpose(0, 1)
        elif not batched:
            out = out[0]
        if matrix is None:
            return out, None
        if average_attn_weights:
            matrix = matrix.mean(1)
        return out, matrix if batched else matrix[0]

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if self.in_proj_weight is not None and query is key and key is value:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None)
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.chunk(3)
        vectors = (query, key, value)
        return tuple(F.linear(t, w, b) for t, w, b in zip(vectors, weights, biases))

    def _split(self, t: Tensor, batched: bool, time_first: bool) -> Tensor:
        if time_first:
            t = t.transpose(0, 1)
        elif not batched:
            t = t[None]
        return t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _mask(
        self, mask: Tensor | None, q: Tensor, k: Tensor, is_causal: bool
    ) -> tuple[Tensor | None, bool]:
        """Convert torch's mask (True or -inf = removed) to pairs to keep.

        `is_causal` is trusted for square masks.
        """
        if mask is None or (is_causal and q.shape[2] == k.shape[2]):
            return None, is_causal
        if mask.dtype == torch.bool:
            mask = ~mask
        if mask.ndim == 3:
            mask = mask.unflatten(0, q.shape[:2])
        return mask, is_causal


# ---- timm


class SwappedTimmAttention(nn.Module):
    """Replacement for timm.layers.Attention, with its submodules and arguments."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        projected = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return self._attend(x, *projected.unbind(), attn_mask, is_causal)

    def _attend(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        rope: Tensor | None = None,
    ) -> Tensor:
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = (self._rotated(t, rope).type_as(v) for t in (q, k))
        out, _ = attend(
            self.swapped,
            q,
            k,
            v,
            mask=None if causal else mask,
            causal=causal,
            dropout=self.attn_drop.p if self.training else 0.0,
        )
        out = out.transpose(1, 2).flatten(2)
        if hasattr(self, "norm"):
            out = self.norm(out)
        if getattr(self, "gate", None) is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


class SwappedTimmRotary(SwappedTimmAttention):
    """Replacement for timm's AttentionRope and EvaAttention.

    Rotates queries and keys. Supports one or three projections, and grouped heads.
    """

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        return self._attend(x, *self._projected(x), attn_mask, is_causal, rope)

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.qkv is None:
            projected = tuple(project(x) for project in (self.q_proj, self.k_proj, self.v_proj))
        elif getattr(self, "q_bias", None) is None:
            projected = self.qkv(x).chunk(3, -1)  # calling the module includes an adapter on it
        else:
            bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
            projected = F.linear(x, self.qkv.weight, bias).chunk(3, -1)
        return tuple(t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in projected)

    def _rotated(self, t: Tensor, rope: Tensor) -> Tensor:
        from timm.layers.pos_embed_sincos import apply_rot_embed_cat

        before = self.num_prefix_tokens
        rotated = apply_rot_embed_cat(t[:, :, before:], rope, half=self.rotate_half)
        return torch.cat([t[:, :, :before], rotated], 2)
