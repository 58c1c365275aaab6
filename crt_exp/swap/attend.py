"""One call of a swapped attention layer: masks, causality, dropout, matrix.

`attend` makes the call. Linear attention supports two masks: key padding (B, S) and causal. A mask of query-key pairs
is converted to these two, or refused. The mask of a call decides whether the call is causal.

Notation: B batch, H query heads, Hkv key heads, L queries, S keys, d head dimension, dv value dimension.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.attention.base import AttentionLayer, LinearAttention

REMOVED = -1e4  # additive masks: 0 keeps a pair, values up to this one remove it


class Call(NamedTuple):
    """One call of a swapped layer.

    Args:
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
    """

    q: Tensor
    k: Tensor
    v: Tensor
    keep: Tensor | None = None
    mask: Tensor | None = None
    causal: bool = False
    cross: bool | None = None
    scaling: float | None = None
    dropout: float = 0.0
    matrix: bool = False


def attend(state: AttentionLayer, call: Call) -> tuple[Tensor, Tensor | None]:
    """Attention by the swapped layer `state`: returns the output (B,H,L,dv) and the matrix, or None.

    Raises ValueError, naming the layer, if the mask is neither padding nor causal nor both, or sizes differ from those
    of the swap.
    """
    q, k, v, keep, mask, causal, cross, scaling, dropout, matrix = call
    S = k.shape[2]
    if mask is not None:
        check_mask(mask, q, S, state.path)
        expected = causal
        keep, causal, used = read_mask(mask, keep, causal, q.shape[2], state.path)
        if state.position_dependent:
            used = _to_last_query(keep, causal, expected, q.shape[2], state.path)
        if used < S:
            k = k[:, :, :used]
            v = v[:, :, :used]
            keep = keep[:, :used]
    if keep is not None:
        keep = None if known_true(keep) else keep.expand(k.shape[0], -1)
    q = prepare(state, q, k, causal, cross, scaling)
    dv = v.shape[3]
    used = v.shape[2]
    if matrix:
        unit = torch.eye(used, dtype=v.dtype, device=v.device)
        v = torch.cat([v, unit.expand(*v.shape[:2], used, used)], -1)
    if dropout > 0:
        v = v * F.dropout(torch.ones_like(v[..., :1]), dropout)
    if not matrix:
        return state(q, k, v, keep), None
    state.columns = dv  # the other columns are unit vectors
    try:
        out = state(q, k, v, keep)
    finally:
        state.columns = None
    weights = F.pad(out[..., dv:], (0, S - used))  # 0 for keys after the last query
    return out[..., :dv], weights


def prepare(
    state: AttentionLayer,
    q: Tensor,
    k: Tensor,
    causal: bool,
    cross: bool | None = None,
    scaling: float | None = None,
) -> Tensor:
    """Check the sizes of a call and set the causal and cross flags of the layer.

    Returns the queries, scaled if the call and the layer have different factors of the logits. Raises ValueError for a
    call that the layer was not built for.
    """
    sizes = (q.shape[1], k.shape[1], q.shape[3])
    expected = (state.heads, state.kv_heads, state.d)
    if sizes != expected:
        raise ValueError(
            f"{state.path}: (query heads, key heads, d)={sizes}, expected {expected} as in the swap"
        )
    if not torch.compiler.is_compiling():
        state.__dict__["reached"] = True
    if isinstance(state, LinearAttention):
        if causal and not state.serves_causal:
            raise ValueError(
                f"{state.path}: causal call of a layer swapped as bidirectional; use causal=True"
            )
        if cross is not None and cross != state.cross:
            state.cross = cross
    # writing a module attribute takes as long as a small tensor operation
    if causal != state.causal:
        state.causal = causal
    if scaling is None or scaling == state.scaling:
        return q
    return q * (scaling / state.scaling)


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
) -> tuple[Tensor, bool, int]:
    """Convert a mask of pairs to (keep (B or 1, S), causal, number of keys)."""
    # equal for all heads and queries, by its shape or strides
    if mask.ndim == 4 and all(mask.shape[dim] == 1 or mask.stride(dim) == 0 for dim in (1, 2)):
        seen = _allowed(mask[:, 0, 0], path)
        if keep is not None:
            seen = seen & keep
        return seen, causal and queries == 1, mask.shape[-1]
    allowed = _allowed(mask, path)
    while allowed.ndim < 4:
        allowed = allowed.unsqueeze(-3)
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


def _to_last_query(keep: Tensor, causal: bool, expected: bool, queries: int, path: str) -> int:
    """The number of keys of keep (B, S) up to the last query.

    A static cache has unused slots after the last query. `expected` states whether calls of this module are causal
    without a mask. Raises ValueError if all queries see the same keys and the mask can be
    padding or a prefix.
    """
    S = keep.shape[1]
    if queries == 1:
        return last_used(keep) if causal else S
    if causal or not expected:
        return S
    used = last_used(keep)
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
    used = last_used(last)
    # position of the last query, if the mask is causal
    end = used + L - 1 - int(pairs[..., used - 1].any(0).int().argmax())
    past = torch.ones(L, S, dtype=torch.bool, device=pairs.device).tril(end - L)
    if end > S or not bool((pairs == (last[:, None] & past)).all()):
        return None
    return last[:, :end], True, end


def last_used(keep: Tensor) -> int:
    """The number of keys up to the last one kept in any row of keep (B, S).

    Returns S if no key is kept. A static cache has unused slots after that key.
    """
    used = keep.any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else keep.shape[1]


def known_true(keep: Tensor) -> bool:
    return not torch.compiler.is_compiling() and bool(keep.all())
