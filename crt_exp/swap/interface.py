"""Connect Hugging Face attention modules to their `swapped` submodule.

The modules keep their class. transformers calls a registered attention function, which looks for the submodule. The
import of this module registers the function and its mask function; without the mask function padding would be ignored
silently. A pickled model imports this module through the hooks of its modules.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.utils.output_capturing import _active_collector

from crt_exp.swap.attend import Call, attend, check_mask, known_true
from crt_exp.swap.families import passed_arguments

INTERFACE = "crt_exp"  # name of the attention function in transformers
# variants that keep transformers' own masks, for configurations whose masks attention that is not swapped reads too
AS_BEFORE = {"eager": "crt_exp_eager_masks", "sdpa": "crt_exp_fused_masks"}
OURS = (INTERFACE, *AS_BEFORE.values())
EVERY_KEY = "crt_exp_every_key"  # attribute of masks that keep every key
EXTRAS = (
    "position_bias",
    "softcap",
    "s_aux",
    "sinks",
    "indices",
    "block_indices",
    "head_mask",
    "alibi",
)  # arguments that change the logits or the softmax


def plain_implementation(implementation: str, parts: list[Any]) -> str:
    """An equal implementation of `parts` whose masks swapped layers can read: eager or sdpa."""
    if implementation in AS_BEFORE:
        return implementation
    for part in parts:
        kind: Any = type(part)
        if not passed_arguments(kind).keywords.isdisjoint(EXTRAS):
            return "eager"
    return "sdpa"


def refuse_replaced(module: Any, *_: Any) -> None:
    """Forward pre-hook: raise ValueError if the attention was replaced after the swap."""
    if module.config._attn_implementation not in OURS:
        raise ValueError(
            f"{module.swapped.path}: config._attn_implementation is now "
            f"{module.config._attn_implementation!r}; call unswap_attention or swap_attention again"
        )


def interface_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **extras,
) -> tuple[Tensor, Tensor | None]:
    """Attention function of transformers: returns output (B,L,H,dv) and matrix.

    query (B,H,L,d), key (B,Hkv,S,d), value (B,Hkv,S,dv), matrix (B,H,L,S) or None.
    """
    state = getattr(module, "swapped", None)
    if state is None:
        raise ValueError(
            f"{type(module).__name__}: attn_implementation={INTERFACE!r}, but this layer is not swapped; load the "
            "model with crt_exp.from_pretrained, or with attn_implementation='sdpa'"
        )
    for name in EXTRAS:
        if extras.get(name) is not None:
            raise ValueError(
                f"{state.path}: {name} is not supported; leave the layer out with layers=[...]"
            )
    # without a mask, is_causal of the call or of the module decides, as in torch's fused attention
    causal = is_causal
    if causal is None:
        causal = module.__dict__.get("unmasked_causal", bool(getattr(module, "is_causal", True)))
    # with a recurrent cache these are new keys only; the layer of the cache holds the past
    recurrent = getattr(key, "cache_layer", None)
    queries = query.shape[2]
    used = key.shape[2]  # a static cache has unused slots after the last query
    keep = None
    mask = attention_mask
    if mask is None:
        if causal and queries > 1:
            used = queries  # the queries are the first positions, as in torch's fused attention
    else:
        of_keys = mask.ndim == 2
        if of_keys:
            length = used if recurrent is None else recurrent.length
            check_mask(mask[:, None, None], query, length, state.path, queries)
            used = mask.shape[1]
        sees_all = recurrent is not None or mask.shape[-1] >= min(used, key.shape[2])
        if hasattr(mask, EVERY_KEY) and sees_all and (of_keys or queries > 1):
            mask = None
        elif of_keys:
            if mask.dtype != torch.bool:
                raise ValueError(
                    f"{state.path}: unsupported mask of {mask.dtype}; leave the layer out with layers=[...]"
                )
            keep = mask
            mask = None
        # of a mask of pairs for a single query
        causal = of_keys or (mask is not None and state.causal)
    if used < key.shape[2]:
        key = key[:, :, :used]
        value = value[:, :, :used]
    call = Call(
        q=query,
        k=key,
        v=value,
        keep=keep,
        mask=mask,
        causal=causal,
        scaling=scaling,
        dropout=dropout,
        matrix=_wants_matrix(extras),
    )
    out = None if recurrent is None else recurrent.attend(state, call)
    matrix = None
    if out is None:
        out, matrix = attend(state, call)
    return out.transpose(1, 2).contiguous(), matrix


def interface_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset=0,
    kv_offset: int = 0,
    mask_function=None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device="cpu",
    **options: Any,
) -> Tensor | None:
    """Mask function of transformers: encode padding and causality, True = keep.

    Causal masks are key masks (B, S), as for flash attention in transformers. They end at the last query, before the
    unused slots of a static cache. Bidirectional masks are (B,1,L,S), views of (B, S) or of a single element. Other
    patterns are masks of pairs (B,1,L,S). One query in a static cache also gets a mask of pairs, so that all its masks
    have one shape. A mask without padding carries the attribute EVERY_KEY and is read-only. The check for padding runs
    once for all layers.
    """
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(f"attention_mask {tuple(attention_mask.shape)}: expected (batch, tokens)")
    known = (None, masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    plain = mask_function in known and local_size is None
    causal = mask_function is not masking_utils.bidirectional_mask_function
    # unused slots of a static cache after the last token
    room = causal and kv_length + kv_offset > q_offset + q_length
    end = int(q_offset) + q_length if room and q_length > 1 else kv_offset + kv_length
    short = attention_mask is not None and attention_mask.shape[-1] < end
    if not plain or short or (room and q_length == 1):
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask_function = mask_function or masking_utils.causal_mask_function
        return masking_utils.sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            local_size,
            device=device,
            **(options | skips),
        )
    every = attention_mask is None
    if attention_mask is not None:
        keep = attention_mask[:, kv_offset:end].bool()
        every = not keep.is_meta and known_true(keep)
    if every:
        keep = torch.ones((), dtype=torch.bool, device=device)
        keep = keep.expand(batch_size, end - kv_offset)
    mask = keep if causal else keep[:, None, None].expand(-1, 1, q_length, -1)
    if every and not torch.compiler.is_compiling():
        setattr(mask, EVERY_KEY, True)
    return mask


def _wants_matrix(extras: dict) -> bool:
    """Whether the caller collects attention matrices.

    transformers passes this to its output hooks, not to the layers.
    """
    if extras.get("output_attentions"):
        return True
    if torch.compiler.is_compiling():
        wanted = _active_collector.global_var
    else:
        wanted = _active_collector.get()
    return any("attentions" in key for key in wanted or ())


AttentionInterface.register(INTERFACE, interface_attention)
AttentionMaskInterface.register(INTERFACE, interface_mask)
for own, variant in AS_BEFORE.items():
    AttentionInterface.register(variant, interface_attention)
    AttentionMaskInterface.register(variant, AttentionMaskInterface()[own])
