"""The attention modules that can be swapped: how they are found, and how torch and timm call theirs.

torch's MultiheadAttention and timm's Attention change their class in place, so that parameters, hooks and references to
them stay. Hugging Face modules keep theirs: see `interface`.
"""

import inspect
import re
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.swap.call import as_keep, attend

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
HEAD_DIMS = ("qk_head_dim", "head_dim", "attention_head_size")
# arguments of a forward pass that hold another sequence, or its keys; names of modules that attend to one
OTHER_SEQUENCE = re.compile(r"^(?!past_|hidden_states$)(.*_)?(keys?|states|context)(_|$)|^k$")
CROSS = re.compile(r"cross|encoder_?attn|encoder_?attention|enc_?dec", re.IGNORECASE)


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
        # a checkpointed module gets two tensors that share their memory
        same = query is key or (not torch.compiler.is_compiling() and query.is_set_to(key))
        out, matrix = attend(self.swapped, q, k, v, keep=keep, mask=mask, causal=causal, cross=not same,
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
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
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


# ---- timm

class SwappedTimmAttention(nn.Module):
    """timm.layers.Attention with its submodules and arguments."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        projected = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return self._attend(x, *projected.unbind(), attn_mask, is_causal)

    def _attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool,
                rope: Tensor | None = None) -> Tensor:
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = (self._rotated(t, rope).type_as(v) for t in (q, k))
        out, _ = attend(self.swapped, q, k, v, mask=None if causal else mask, causal=causal,
                        dropout=self.attn_drop.p if self.training else 0.0)
        out = out.transpose(1, 2).flatten(2)
        if hasattr(self, "norm"):
            out = self.norm(out)
        if getattr(self, "gate", None) is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


class SwappedTimmRotary(SwappedTimmAttention):
    """timm's AttentionRope and EvaAttention: rotated queries and keys, one projection or three, grouped heads."""

    def forward(self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None,
                is_causal: bool = False) -> Tensor:
        return self._attend(x, *self._projected(x), attn_mask, is_causal, rope)

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.qkv is None:
            projected = tuple(project(x) for project in (self.q_proj, self.k_proj, self.v_proj))
        elif getattr(self, "q_bias", None) is None:
            projected = self.qkv(x).chunk(3, -1)  # called, so that an adapter on it counts
        else:
            bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
            projected = F.linear(x, self.qkv.weight, bias).chunk(3, -1)
        return tuple(t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in projected)

    def _rotated(self, t: Tensor, rope: Tensor) -> Tensor:
        from timm.layers.pos_embed_sincos import apply_rot_embed_cat

        before = self.num_prefix_tokens
        return torch.cat([t[:, :, :before], apply_rot_embed_cat(t[:, :, before:], rope, half=self.rotate_half)], 2)


TIMM = {("timm.layers.attention", "Attention"): SwappedTimmAttention,
        ("timm.layers.attention", "AttentionRope"): SwappedTimmRotary,
        ("timm.models.eva", "EvaAttention"): SwappedTimmRotary}


# ---- finding them

def attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All attention modules that can be swapped, with their paths, in the order of the model's modules."""
    return [(path or type(module).__name__, module) for path, module in model.named_modules() if family(module)]


def swapped_class(module: nn.Module) -> type | None:
    """The class that takes the place of a torch or timm attention's own; None for modules that keep theirs."""
    kind = type(module)
    if kind is SwappedMultiheadAttention or getattr(kind, "forward", None) is nn.MultiheadAttention.forward:
        return SwappedMultiheadAttention
    if kind in TIMM.values():
        return kind
    base = next((base for base in kind.__mro__ if (base.__module__, base.__name__) in TIMM), None)
    return TIMM[base.__module__, base.__name__] if base and kind.forward is base.forward else None


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
    causal, scaling = bool(getattr(module, "is_causal", True)), getattr(module, "scaling", None)
    scaling = float(scaling) if isinstance(scaling, (int, float)) else None
    return HeadSizes(heads, d, kv_heads, causal, scaling, may_be_cross(module, path))


def is_cross(module: nn.Module, path: str, holder: nn.Module | None = None) -> bool:
    """Whether a module is known to attend to another sequence: by its place, its attribute or its name."""
    if isinstance(holder, nn.TransformerDecoderLayer):
        return module is holder.multihead_attn
    known = getattr(module, "is_cross_attention", None)
    return bool(CROSS.search(".".join([*path.split(".")[-2:], type(module).__name__])) if known is None else known)


def may_be_cross(module: nn.Module, path: str) -> bool:
    """Whether a Hugging Face module may attend to another sequence than that of its queries.

    By what is known of it, else by the arguments of its forward pass. Some serve encoders and decoders alike: a
    decoder's may.
    """
    if getattr(module, "is_cross_attention", None) is not None or is_cross(module, path):
        return is_cross(module, path)
    if getattr(module, "is_decoder", False):
        return True
    if hasattr(module, "is_decoder") or "SelfAttention" in type(module).__name__:
        return False
    parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters
    return any(OTHER_SEQUENCE.search(name) for name in parameters)


def _first(module: nn.Module, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if isinstance(value := getattr(module, name, None), int)), None)
