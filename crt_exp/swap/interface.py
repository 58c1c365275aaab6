"""Connect Hugging Face attention modules to their `swapped` submodule.

The modules keep their class. transformers calls a registered attention function, which looks for the submodule. The
import of this module registers the function and its mask function; without the mask function padding would be ignored
silently. A pickled model imports this module through the hooks of its modules.
"""

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from crt_exp.swap.call import attend, check_mask, known_true
from crt_exp.swap.families import passed_arguments

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # transformers 5.0
    _active_collector = None

INTERFACE = "crt_exp"  # name of the attention function in transformers
# variants that keep transformers' own masks
AS_BEFORE = {"eager": "crt_exp_eager_masks", "sdpa": "crt_exp_fused_masks"}
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


def interface_name(implementation: str, shared: bool) -> str:
    """The attention name for a configuration.

    If attention that is not swapped reads the same masks (`shared`), the name is a variant that keeps transformers' own
    masks of the implementation.
    """
    return AS_BEFORE[implementation] if shared else INTERFACE


def plain_implementation(implementation: str, parts: list[nn.Module]) -> str:
    """An equal implementation of `parts` whose masks swapped layers can read: eager or sdpa."""
    if implementation in AS_BEFORE:
        return implementation
    for part in parts:
        if not passed_arguments(type(part)).keywords.isdisjoint(EXTRAS):
            return "eager"
    return "sdpa"


def is_ours(config) -> bool:
    return config._attn_implementation in (INTERFACE, *AS_BEFORE.values())


def refuse_replaced(module: nn.Module, *_) -> None:
    """Forward pre-hook: raise ValueError if the attention was replaced after the swap."""
    if not is_ours(module.config):
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
    state, matrix = getattr(module, "swapped", None), _wants_matrix(extras)
    if state is None:
        raise ValueError(
            f"{type(module).__name__}: attn_implementation={INTERFACE!r}, but this layer is not swapped; load the "
            "model with crt_exp.from_pretrained, or with attn_implementation='sdpa'"
        )
    causal = is_causal  # without a mask, is_causal of the call or of the module decides, as in torch's fused attention
    if causal is None:
        causal = module.__dict__.get("unmasked_causal", bool(getattr(module, "is_causal", True)))
    # with a recurrent cache these are new keys only; the layer of the cache holds the past
    recurrent = getattr(key, "cache_layer", None)
    if attention_mask is not None and attention_mask.ndim == 2:
        check_mask(
            attention_mask[:, None, None],
            query,
            key.shape[2] if recurrent is None else recurrent.length,
            state.path,
            query.shape[2],
        )
    used = key.shape[2]  # a static cache has unused slots after the last query
    if attention_mask is not None and attention_mask.ndim == 2:
        used = attention_mask.shape[1]
    elif attention_mask is None and causal and query.shape[2] > 1:
        used = query.shape[
            2
        ]  # without a mask the queries are the first positions, as in torch's fused attention
    if used < key.shape[2]:
        key, value = key[:, :, :used], value[:, :, :used]
    if given := [name for name in EXTRAS if extras.get(name) is not None]:
        raise ValueError(
            f"{state.path}: {given[0]} is not supported; leave the layer out with layers=[...]"
        )
    keep, mask = None, attention_mask
    if (
        hasattr(attention_mask, EVERY_KEY)
        and (recurrent is not None or attention_mask.shape[-1] >= key.shape[2])
        and (attention_mask.ndim == 2 or query.shape[2] > 1)
    ):
        mask, causal = None, attention_mask.ndim == 2
    elif _is_causal(attention_mask, state.path):
        keep = None if known_true(attention_mask) else attention_mask
        mask = None
        causal = True
    elif attention_mask is not None:
        causal = (
            state.causal
        )  # decides for a single query; for several queries the mask of pairs decides
    given = {
        "keep": keep,
        "mask": mask,
        "causal": causal,
        "scaling": scaling,
        "dropout": dropout,
        "matrix": matrix,
    }
    out, matrix = (attend if recurrent is None else recurrent.attend)(
        state, query, key, value, **given
    )
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
    **options,
) -> Tensor:
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
    room = (
        causal and kv_length + kv_offset > q_offset + q_length
    )  # unused slots of a static cache after the last token
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
    keep = None if attention_mask is None else attention_mask[:, kv_offset:end].bool()
    if every := keep is None or (not keep.is_meta and known_true(keep)):
        keep = torch.ones((), dtype=torch.bool, device=device).expand(batch_size, end - kv_offset)
    mask = keep if causal else keep[:, None, None].expand(-1, 1, q_length, -1)
    if every and not torch.compiler.is_compiling():
        setattr(mask, EVERY_KEY, True)
    return mask


def _is_causal(mask: Tensor | None, path: str) -> bool:
    """Whether the mask is a causal mask of `interface_mask`."""
    if mask is None or mask.ndim != 2:
        return False
    if mask.dtype != torch.bool:
        raise ValueError(
            f"{path}: unsupported mask of {mask.dtype}; leave the layer out with layers=[...]"
        )
    return True


def _wants_matrix(extras: dict) -> bool:
    """Whether the caller collects attention matrices.

    transformers passes this to its output hooks, not to the layers.
    """
    if extras.get("output_attentions") or _active_collector is None:
        return bool(extras.get("output_attentions"))
    wanted = (
        _active_collector.global_var if torch.compiler.is_compiling() else _active_collector.get()
    )
    return wanted is not None and any("attentions" in key for key in wanted)


for _name, _mask in {
    INTERFACE: interface_mask,
    **{name: AttentionMaskInterface()[own] for own, name in AS_BEFORE.items()},
}.items():
    AttentionInterface.register(_name, interface_attention)
    AttentionMaskInterface.register(_name, _mask)
