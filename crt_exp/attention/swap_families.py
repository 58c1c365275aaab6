"""How each library calls its attention, and how a call reaches the `swapped` submodule instead.

Hugging Face modules stay as they are: a registered attention function looks for the submodule. timm's Attention and torch's
MultiheadAttention change their class in place, so that parameters, hooks and references to them stay.
"""

import inspect
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.attention.swap_call import as_keep, attend

INTERFACE = "crt_exp"                                                     # the name in transformers' tables
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
HEAD_DIMS = ("qk_head_dim", "head_dim", "attention_head_size")
BIASES = ("relative_attention_bias", "has_relative_attention_bias", "relative_position_bias_table", "alibi")
EXTRAS = ("position_bias", "softcap", "s_aux", "head_mask", "alibi")      # arguments that change the logits or the softmax


class Sizes(NamedTuple):
    heads: int
    d: int
    kv_heads: int
    causal: bool
    scaling: float | None


# ---- torch.nn.MultiheadAttention, and with it TransformerEncoder and torchaudio's Conformer

class SwappedMultiheadAttention(nn.Module):
    """nn.MultiheadAttention with its parameters and arguments, but no subclass of it.

    `need_weights=True`, torch's default, forms the (L, S) matrix: pass False where it is not needed.
    """

    _qkv_same_embed_dim = property(lambda self: False)  # an encoder layer in eval mode takes its fast path where this is True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
                need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
                is_causal: bool = False) -> tuple[Tensor, Tensor | None]:
        batched, time_first = query.ndim == 3, query.ndim == 3 and not self.batch_first
        q, k, v = (self._split(t, batched, time_first) for t in self._project(query, key, value))
        keep = as_keep(key_padding_mask if batched or key_padding_mask is None else key_padding_mask[None], self.swapped.path)
        mask, causal = self._mask(attn_mask, q, k, is_causal)
        out, matrix = attend(self.swapped, q, k, v, keep=keep, mask=mask, causal=causal, matrix=need_weights,
                             dropout=self.dropout if self.training else 0.0)
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
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if apart else self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(F.linear(t, w, b) for t, w, b in zip((query, key, value), weights, biases))

    def _split(self, t: Tensor, batched: bool, time_first: bool) -> Tensor:
        t = t.transpose(0, 1) if time_first else t if batched else t[None]
        return t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _mask(self, mask: Tensor | None, q: Tensor, k: Tensor, is_causal: bool) -> tuple[Tensor | None, bool]:
        """torch's mask, True or -inf = removed, as one of kept pairs; a hint that it is causal is believed for a square one."""
        if mask is None or (is_causal and q.shape[2] == k.shape[2]):
            return None, is_causal
        mask = ~mask if mask.dtype == torch.bool else mask
        return (mask.unflatten(0, q.shape[:2]) if mask.ndim == 3 else mask), is_causal


# ---- timm

class SwappedTimmAttention(nn.Module):
    """timm.layers.Attention with its submodules and arguments."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out, _ = attend(self.swapped, self.q_norm(q), self.k_norm(k), v, mask=attn_mask, causal=is_causal,
                        dropout=self.attn_drop.p if self.training else 0.0)
        out = out.transpose(1, 2).flatten(2)
        out = getattr(self, "norm", nn.Identity())(out)
        if getattr(self, "gate", None) is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


# ---- Hugging Face

@cache
def register() -> None:
    """Puts the attention function and its mask into transformers' tables: without the second, padding would be lost silently."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(INTERFACE, interface_attention)
    AttentionMaskInterface.register(INTERFACE, interface_mask)


def interface_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                        dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
                        **extras) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function: query (B,H,L,d), key and value (B,Hkv,S,.) -> (B,L,H,dv), matrix (B,H,L,S) or None."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    state, matrix = getattr(module, "swapped", None), _wants_matrix(extras)
    if state is None:
        return _untouched(module, query, key, value, attention_mask, dropout, scaling, causal, matrix, extras)
    for name in EXTRAS:
        if extras.get(name) is not None:
            raise ValueError(f"{state.path}: linear attention has no {name}: leave this layer out with layers=[...]")
    keep, mask = (attention_mask, None) if attention_mask is None or attention_mask.ndim == 2 else (None, attention_mask)
    recurrent = getattr(key, "cache_layer", None)  # these are new keys, and what came before is in this layer of the cache
    given = {"keep": keep, "mask": mask, "causal": causal, "scaling": scaling, "dropout": dropout, "matrix": matrix}
    out, matrix = (attend if recurrent is None else recurrent.attend)(state, query, key, value, **given)
    return out.transpose(1, 2).contiguous(), matrix


def interface_mask(batch_size: int, q_length: int, kv_length: int, q_offset=0, kv_offset: int = 0, mask_function=None,
                   attention_mask: Tensor | None = None, local_size: int | None = None, **options) -> Tensor | None:
    """Key padding (B, S), True = keep, or None; a mask of pairs (B,1,L,S) where the pattern is not plainly causal or full."""
    from transformers import masking_utils as masks

    plain = mask_function in (None, masks.causal_mask_function, masks.bidirectional_mask_function) and local_size is None
    causal = mask_function is not masks.bidirectional_mask_function
    room = causal and kv_length + kv_offset > q_offset + q_length  # of a static cache, after the last token
    short = attention_mask is not None and attention_mask.shape[-1] < kv_length
    if not plain or room or short:
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return masks.sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function or masks.causal_mask_function,
                               attention_mask, local_size, **(options | skips))
    if attention_mask is None:
        return None
    keep = attention_mask[:, -kv_length:].bool()
    return None if not torch.compiler.is_compiling() and bool(keep.all()) else keep


def _wants_matrix(extras: dict) -> bool:
    """Whether the caller collects attention matrices: transformers tells the hooks that collect them, not the layers."""
    if extras.get("output_attentions"):
        return True
    try:
        from transformers.utils.output_capturing import _active_collector as collector
    except ImportError:
        return False
    wanted = collector.global_var if torch.compiler.is_compiling() else collector.get()
    return wanted is not None and any("attentions" in key for key in wanted)


def _untouched(module, query, key, value, mask, dropout, scaling, causal, matrix, extras) -> tuple[Tensor, Tensor | None]:
    """Exact attention of the layers that were not swapped, in a model whose masks are those of swapped ones."""
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    L, S = query.shape[2], key.shape[2]
    padding = mask is None or mask.ndim == 2  # else it says everything
    if mask is not None and padding:
        mask = mask[:, None, None].expand(-1, 1, L, -1)
    if padding and causal and L > 1 and (mask is not None or matrix or L != S):
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

def family(module: nn.Module) -> str | None:
    """Which of the families an attention module belongs to: "torch", "timm", "hf", or None."""
    kind = type(module)
    if kind is SwappedMultiheadAttention or getattr(kind, "forward", None) is nn.MultiheadAttention.forward:
        return "torch"
    if kind is SwappedTimmAttention or _is_timm(kind):
        return "timm"
    return "hf" if uses_interface(kind) else None


def _is_timm(kind: type) -> bool:
    """timm's Attention, or a subclass with the same forward pass."""
    for base in kind.__mro__:
        if base.__name__ == "Attention" and base.__module__ == "timm.layers.attention":
            return kind.forward is base.forward
    return False


@cache
def uses_interface(kind: type) -> bool:
    """Whether the forward pass of this class calls transformers' attention interface."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def others(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that are attention of no known family: by the name of their class, or because they call torch's fused attention.

    Wrappers of attention and parts of it do not count.
    """
    known = {path for path, part in model.named_modules() if family(part)}
    alike = {path: part for path, part in model.named_modules() if path not in known and _looks_like_attention(type(part))}
    inside = lambda a, b: a.startswith(f"{b}." if b else "") and a != b
    part_of_known = lambda path: any(inside(path, other) for other in known)
    wraps = lambda path: any(inside(other, path) for other in (*known, *alike))
    return [(path or type(part).__name__, part) for path, part in alike.items() if not part_of_known(path) and not wraps(path)]


@cache
def _looks_like_attention(kind: type) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return "attention" in kind.__name__.lower() or (code is not None and "scaled_dot_product_attention" in code.co_names)


def sizes(module: nn.Module, path: str) -> Sizes:
    """The sizes of an attention module. Raises ValueError, naming it, for what no linear attention can stand for."""
    kind = family(module)
    if kind == "torch":
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError(f"{path}: add_bias_kv and add_zero_attn are not supported")
        return Sizes(module.num_heads, module.head_dim, module.num_heads, True, None)
    if kind == "timm":
        return Sizes(module.num_heads, module.qkv.out_features // (3 * module.num_heads), module.num_heads, False, module.scale)
    _check_bias(module, path)
    config = module.config
    heads = _first(module, HEADS) or config.num_attention_heads
    d = _first(module, HEAD_DIMS) or getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = heads // (getattr(module, "num_key_value_groups", None) or 1)
    return Sizes(heads, d, kv_heads, bool(getattr(module, "is_causal", True)), _number(getattr(module, "scaling", None)))


def _check_bias(module: nn.Module, path: str) -> None:
    biased = any(getattr(module, name, None) not in (None, False) for name in BIASES)
    if biased or "position_bias" in inspect.signature(type(module).forward).parameters:
        raise ValueError(f"{path} ({type(module).__name__}): this attention adds a position bias to its logits, which linear "
                         "attention cannot represent; leave it out with layers=[...]")


def _first(module: nn.Module, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if isinstance(value := getattr(module, name, None), int)), None)


def _number(value) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
