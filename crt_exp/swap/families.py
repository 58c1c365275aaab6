"""How each library calls its attention, and how a call reaches the `swapped` submodule instead.

Hugging Face modules stay as they are: a registered attention function looks for the submodule. timm's Attention and
torch's MultiheadAttention change their class in place, so that parameters, hooks and references to them stay.
"""

import inspect
import re
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.swap.call import as_keep, attend, check_mask, known_true
from crt_exp.swap.timm_attention import TIMM, swapped_timm

INTERFACE = "crt_exp"                                                     # the name in transformers' tables
AS_BEFORE = {"eager": "crt_exp_eager_masks", "sdpa": "crt_exp_fused_masks"}  # the same, with transformers' own masks
EVERY_KEY = "crt_exp_every_key"                                           # attribute of masks that leave no key out
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
HEAD_DIMS = ("qk_head_dim", "head_dim", "attention_head_size")
# arguments of a forward pass that hold another sequence, or its keys; names of modules that attend to one
OTHER_SEQUENCE = re.compile(r"^(?!past_|hidden_states$)(.*_)?(keys?|states|context)(_|$)|^k$")
CROSS = re.compile(r"cross|encoder_?attn|encoder_?attention|enc_?dec", re.IGNORECASE)
EXTRAS = ("position_bias", "softcap", "s_aux", "head_mask", "alibi")  # arguments that change logits or softmax


class HeadSizes(NamedTuple):
    heads: int
    d: int
    kv_heads: int
    causal: bool
    scaling: float | None
    cross: bool = False


# ---- torch.nn.MultiheadAttention, and with it TransformerEncoder and torchaudio's Conformer

class SwappedMultiheadAttention(nn.Module):
    """nn.MultiheadAttention with its parameters and arguments, but no subclass of it.

    `need_weights=True`, torch's default, forms the (L, S) matrix: pass False where it is not needed.
    """

    # an encoder layer in eval mode takes its fast path where this is True
    _qkv_same_embed_dim = property(lambda self: False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
                need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
                is_causal: bool = False) -> tuple[Tensor, Tensor | None]:
        batched, time_first = query.ndim == 3, query.ndim == 3 and not self.batch_first
        q, k, v = (self._split(t, batched, time_first) for t in self._project(query, key, value))
        padding = key_padding_mask if batched or key_padding_mask is None else key_padding_mask[None]
        keep = as_keep(padding, self.swapped.path)
        mask, causal = self._mask(attn_mask, q, k, is_causal)
        out, matrix = attend(self.swapped, q, k, v, keep=keep, mask=mask, causal=causal, cross=not _same(query, key),
                             matrix=need_weights, dropout=self.dropout if self.training else 0.0)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        out = out.transpose(0, 1) if time_first else out if batched else out[0]
        if matrix is None:
            return out, None
        matrix = matrix.mean(1) if average_attn_weights else matrix
        return out, matrix if batched else matrix[0]

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if self.in_proj_weight is not None and query is key and key is value:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        apart = self.in_proj_weight is None
        weights = ((self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if apart
                   else self.in_proj_weight.chunk(3))
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(F.linear(t, w, b) for t, w, b in zip((query, key, value), weights, biases))

    def _split(self, t: Tensor, batched: bool, time_first: bool) -> Tensor:
        t = t.transpose(0, 1) if time_first else t if batched else t[None]
        return t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _mask(self, mask: Tensor | None, q: Tensor, k: Tensor, is_causal: bool) -> tuple[Tensor | None, bool]:
        """torch's mask, True or -inf = removed, as one of kept pairs;
        a hint that it is causal is believed for a square one."""
        if mask is None or (is_causal and q.shape[2] == k.shape[2]):
            return None, is_causal
        mask = ~mask if mask.dtype == torch.bool else mask
        return (mask.unflatten(0, q.shape[:2]) if mask.ndim == 3 else mask), is_causal


def _same(query: Tensor, key: Tensor) -> bool:
    """Whether both are one tensor; a checkpointed module gets two that share their memory."""
    return query is key or (not torch.compiler.is_compiling() and query.is_set_to(key))


# ---- Hugging Face

@cache
def register() -> None:
    """Puts the attention function and its mask into transformers' tables:
    without the second, padding would be lost silently."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(INTERFACE, interface_attention)
    AttentionMaskInterface.register(INTERFACE, interface_mask)
    for implementation, name in AS_BEFORE.items():
        AttentionInterface.register(name, interface_attention)
        AttentionMaskInterface.register(name, AttentionMaskInterface()[implementation])


class Registered:
    """Held by a swapped module: whoever unpickles one has our functions in transformers' tables.

    name: of our function in the module's configuration.
    """

    def __init__(self, name: str = INTERFACE):
        register()
        self.name = name

    def __reduce__(self) -> tuple[type, tuple]:
        return Registered, (self.name,)


def interface_name(config, others: list[tuple[str, nn.Module]]) -> str:
    """Under which name modules with this configuration call us: where attention of other kinds may read the same masks,
    one that leaves the masks as they were."""
    shared = any(getattr(part, "config", config) is config for _, part in others)
    return AS_BEFORE.get(config._attn_implementation, INTERFACE) if shared else INTERFACE


def is_ours(config) -> bool:
    return config._attn_implementation in (INTERFACE, *AS_BEFORE.values())


def interface_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                        dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
                        **extras) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function: query (B,H,L,d), key and value (B,Hkv,S,.) -> (B,L,H,dv),
    matrix (B,H,L,S) or None."""
    state, matrix = getattr(module, "swapped", None), _wants_matrix(extras)
    causal = _causal_without_mask(module, is_causal)
    # where there is one, these are new keys, and what came before is in this layer of the cache
    recurrent = getattr(key, "cache_layer", None)
    if attention_mask is not None and (attention_mask.ndim == 2 or state is None):
        pairs, least = (attention_mask[:, None, None], query.shape[2]) if attention_mask.ndim == 2 else (
            attention_mask, None)
        check_mask(pairs, query, key.shape[2] if recurrent is None else recurrent.length,
                   type(module).__name__ if state is None else state.path, least)
    key, value = _in_use(query, key, value, attention_mask, causal)
    if state is None:
        return _untouched(module, query, key, value, attention_mask, dropout, scaling, causal, matrix, extras)
    for name in EXTRAS:
        if extras.get(name) is not None:
            raise ValueError(f"{state.path}: linear attention has no {name}: leave this layer out with layers=[...]")
    keep, mask = None, attention_mask
    if hasattr(attention_mask, EVERY_KEY) and (recurrent is not None or attention_mask.shape[-1] >= key.shape[2]) and (
            attention_mask.ndim == 2 or query.shape[2] > 1):
        mask, causal = None, attention_mask.ndim == 2
    elif _is_causal(attention_mask, state.path):
        keep, mask, causal = (None if known_true(attention_mask) else attention_mask), None, True
    elif attention_mask is not None:
        causal = state.causal  # of a single query; a mask of pairs tells it of more
    given = {"keep": keep, "mask": mask, "causal": causal, "scaling": scaling, "dropout": dropout, "matrix": matrix}
    out, matrix = (attend if recurrent is None else recurrent.attend)(state, query, key, value, **given)
    return out.transpose(1, 2).contiguous(), matrix


def interface_mask(batch_size: int, q_length: int, kv_length: int, q_offset=0, kv_offset: int = 0, mask_function=None,
                   attention_mask: Tensor | None = None, local_size: int | None = None, device="cpu",
                   **options) -> Tensor:
    """Says which attention the model asks for, so that no module need guess it: boolean masks, True = keep.

    Causal: keys alone, (B, S), as transformers' flash attention has them; they end with the last query, where those of
    a static cache have free room after it. Bidirectional: (B,1,L,S), a view of (B, S) or of a single number where there
    is no padding. Any other pattern, and one query in a static cache, so that all its masks have one shape: its pairs,
    (B,1,L,S). Where no key is padding, as is looked up here once for all layers, the mask says so by EVERY_KEY: it is
    one number, into which nothing can be written.
    """
    from transformers import masking_utils as masks

    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(f"attention_mask: the shape {tuple(attention_mask.shape)} does not fit, give (batch, tokens)")
    known = (None, masks.causal_mask_function, masks.bidirectional_mask_function)
    plain = mask_function in known and local_size is None
    causal = mask_function is not masks.bidirectional_mask_function
    room = causal and kv_length + kv_offset > q_offset + q_length  # of a static cache, after the last token
    end = int(q_offset) + q_length if room and q_length > 1 else kv_offset + kv_length
    short = attention_mask is not None and attention_mask.shape[-1] < end
    if not plain or short or (room and q_length == 1):
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return masks.sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset,
                               mask_function or masks.causal_mask_function, attention_mask, local_size,
                               device=device, **(options | skips))
    keep = None if attention_mask is None else attention_mask[:, kv_offset:end].bool()
    if every := keep is None or (not keep.is_meta and known_true(keep)):
        keep = torch.ones((), dtype=torch.bool, device=device).expand(batch_size, end - kv_offset)
    mask = keep if causal else keep[:, None, None].expand(-1, 1, q_length, -1)
    if every and not torch.compiler.is_compiling():
        setattr(mask, EVERY_KEY, True)
    return mask


def _in_use(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Keys and values up to the last query, where those of a static cache have free room after it: what our mask
    function gives ends there, and several causal queries without a mask are the first ones, as torch's fused attention
    has it."""
    used = mask.shape[1] if mask is not None and mask.ndim == 2 else key.shape[2]
    if mask is None and causal and query.shape[2] > 1:
        used = query.shape[2]
    return (key, value) if used >= key.shape[2] else (key[:, :, :used], value[:, :, :used])


def _is_causal(mask: Tensor | None, path: str) -> bool:
    """Whether this is what `interface_mask` gives for causal attention."""
    if mask is None or mask.ndim != 2:
        return False
    if mask.dtype != torch.bool:
        raise ValueError(f"{path}: a mask of shape {tuple(mask.shape)} and {mask.dtype} came from the model itself: "
                         "it does not say whether it is causal; leave this layer out with layers=[...]")
    return True


def _causal_without_mask(module: nn.Module, is_causal: bool | None) -> bool:
    """What no mask means: what the module says, as torch's fused attention has it;
    every key, for a model without that."""
    own = module.__dict__.get("unmasked_causal", bool(getattr(module, "is_causal", True)))
    return own if is_causal is None else bool(is_causal)


def _wants_matrix(extras: dict) -> bool:
    """Whether the caller collects attention matrices: transformers tells the hooks that collect them,
    not the layers."""
    if extras.get("output_attentions"):
        return True
    if (collector := _collector()) is None:
        return False
    wanted = collector.global_var if torch.compiler.is_compiling() else collector.get()
    return wanted is not None and any("attentions" in key for key in wanted)


@cache
def _collector():
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return None
    return _active_collector


def _untouched(module, query, key, value, mask, dropout, scaling, causal, matrix,
               extras) -> tuple[Tensor, Tensor | None]:
    """Exact attention of the layers that were not swapped, in a model whose masks are those of swapped ones."""
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    L, S = query.shape[2], key.shape[2]
    if _is_causal(mask, type(module).__name__):
        mask, causal = (None if bool(mask.all()) else mask[:, None, None]), True
    elif mask is not None:
        causal = False  # the pairs say everything
    if causal and L > 1 and (mask is not None or matrix or L != S):
        past = torch.ones(L, S, dtype=torch.bool, device=query.device).tril(S - L)
        mask = past if mask is None else mask & past
    if mask is not None and mask.dtype == torch.bool:
        mask = mask | ~mask.any(-1, keepdim=True)  # a query that sees no key would be NaN
    if not matrix:
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, causal, **extras)
    key, value = (repeat_kv(t, query.shape[1] // t.shape[1]) for t in (key, value))
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    weights = F.dropout(logits.softmax(-1, dtype=torch.float32).to(value.dtype), dropout)
    return (weights @ value).transpose(1, 2).contiguous(), weights


# ---- finding them

def swapped_class(module: nn.Module) -> type | None:
    """The class that takes the place of a torch or timm attention's own; None for modules that keep theirs."""
    kind = type(module)
    if kind is SwappedMultiheadAttention or getattr(kind, "forward", None) is nn.MultiheadAttention.forward:
        return SwappedMultiheadAttention
    return kind if kind in TIMM.values() else swapped_timm(kind)


def read_by_hand(module: nn.Module, holder: nn.Module | None) -> str | None:
    """Why a torch attention would not be called: the module that holds it reads its weights and computes by itself."""
    known = (type(None), nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    if family(module) != "torch" or isinstance(holder, known):
        return None
    reads = not {"in_proj_weight", "q_proj_weight"}.isdisjoint(names_in_forward(type(holder)))
    return f"is computed by {type(holder).__name__} from its weights, in a way of its own" if reads else None


def family(module: nn.Module) -> str | None:
    """Which of the families an attention module belongs to: "torch", "timm", "hf", or None."""
    swapped = swapped_class(module)
    if swapped is not None:
        return "torch" if swapped is SwappedMultiheadAttention else "timm"
    calls_interface = "ALL_ATTENTION_FUNCTIONS" in names_in_forward(type(module))
    return "hf" if calls_interface or "swapped" in module._modules else None


@cache
def names_in_forward(kind: type) -> frozenset[str]:
    """The global names and attributes that the forward pass of a class mentions."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return frozenset(() if code is None else code.co_names)


def others(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that are attention of no known family: by the name of their class, or because they call
    torch's fused attention.

    Wrappers of attention and parts of it do not count.
    """
    known = {path for path, part in model.named_modules() if family(part)}
    alike = {path: part for path, part in model.named_modules()
             if path not in known and ("attention" in type(part).__name__.lower()
                                       or "scaled_dot_product_attention" in names_in_forward(type(part)))}
    return [(path or type(part).__name__, part) for path, part in alike.items()
            if not any(_inside(path, other) for other in known)
            and not any(_inside(other, path) for other in (*known, *alike))]


def _inside(path: str, other: str) -> bool:
    """Whether the module at a path is a part of the one at another."""
    return path.startswith(f"{other}." if other else "") and path != other


def sizes(module: nn.Module, path: str) -> HeadSizes:
    """The sizes of an attention module. Raises ValueError, naming it, for what no linear attention can stand for."""
    kind = family(module)
    if kind == "torch":
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError(f"{path}: add_bias_kv and add_zero_attn are not supported")
        return HeadSizes(module.num_heads, module.head_dim, module.num_heads, True, None)
    if kind == "timm":
        d = module.head_dim if hasattr(module, "head_dim") else module.qkv.out_features // (3 * module.num_heads)
        return HeadSizes(module.num_heads, d, getattr(module, "num_kv_heads", module.num_heads), False, module.scale)
    config = module.config
    heads = _first(module, HEADS) or config.num_attention_heads
    d = _first(module, HEAD_DIMS) or getattr(config, "head_dim", None) or config.hidden_size // heads
    d = 2 * d if hasattr(module, "q_pos_sine_proj") else d  # Conditional DETR: content and position side by side
    kv_heads = heads // (getattr(module, "num_key_value_groups", None) or 1)
    causal = bool(getattr(module, "is_causal", True))
    return HeadSizes(heads, d, kv_heads, causal, _number(getattr(module, "scaling", None)), may_be_cross(module, path))


def may_be_cross(module: nn.Module, path: str) -> bool:
    """Whether a Hugging Face module may attend to another sequence than that of its queries: by its attributes; else by
    its name and place in the model; else by the arguments of its forward pass. Some serve encoders and decoders alike:
    a decoder's may.
    """
    known = getattr(module, "is_cross_attention", None)
    if known is not None:
        return bool(known)
    if CROSS.search(".".join([*path.split(".")[-2:], type(module).__name__])) or getattr(module, "is_decoder", False):
        return True
    if hasattr(module, "is_decoder") or "SelfAttention" in type(module).__name__:
        return False
    parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters
    return any(OTHER_SEQUENCE.search(name) for name in parameters)


def is_cross(module: nn.Module, path: str, holder: nn.Module | None) -> bool:
    """Whether a module is known to attend to another sequence: by its place, its attribute or its name."""
    if isinstance(holder, nn.TransformerDecoderLayer):
        return module is holder.multihead_attn
    known = getattr(module, "is_cross_attention", None)
    named = CROSS.search(".".join([*path.split(".")[-2:], type(module).__name__]))
    return bool(named if known is None else known)


def _first(module: nn.Module, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if isinstance(value := getattr(module, name, None), int)), None)


def _number(value) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
