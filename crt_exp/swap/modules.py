"""Replacements for the attention modules of torch and timm.

torch's MultiheadAttention is also that of TransformerEncoder and of torchaudio's Conformer. Hugging Face modules keep
their class: see `interface`.

Notation: B batch, H query heads, L queries, S keys.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.attention.base import AttentionLayer
from crt_exp.swap.attend import Call, as_keep, attend


class SwappedMultiheadAttention(nn.Module):
    """Replacement for nn.MultiheadAttention, with its parameters and arguments.

    The class is no subclass of nn.MultiheadAttention. `need_weights=True`, torch's default, forms the (L, S) matrix:
    pass False if the matrix is not needed.
    """

    swapped: AttentionLayer
    # attributes of nn.MultiheadAttention
    num_heads: int
    batch_first: bool
    dropout: float
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    out_proj: nn.Module

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
        q, k, v = (self._split(t) for t in self._project(query, key, value))
        keep = as_keep(key_padding_mask, self.swapped.path)
        if keep is not None and not batched:
            keep = keep[None]
        mask, causal = self._mask(attn_mask, q, k, is_causal)
        dropout = self.dropout if self.training else 0.0
        # activation checkpointing passes two tensors that share memory
        same = query is key or (not torch.compiler.is_compiling() and query.is_set_to(key))
        call = Call(q, k, v, keep, mask, causal, not same, dropout=dropout, matrix=need_weights)
        out, matrix = attend(self.swapped, call)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if matrix is not None and average_attn_weights:
            matrix = matrix.mean(1)
        if batched and not self.batch_first:
            out = out.transpose(0, 1)
        if batched:
            return out, matrix
        if matrix is not None:
            matrix = matrix[0]
        return out[0], matrix

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if self.in_proj_weight is not None and query is key and key is value:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        weights: tuple[Any, ...] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        biases: tuple[Any, ...] = (None, None, None)
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.chunk(3)
        vectors = (query, key, value)
        return tuple(F.linear(t, w, b) for t, w, b in zip(vectors, weights, biases))

    def _split(self, t: Tensor) -> Tensor:
        t = t.unflatten(-1, (self.num_heads, -1))
        if t.ndim == 3:
            t = t[None]
        elif not self.batch_first:
            t = t.transpose(0, 1)
        return t.transpose(1, 2)

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


class TimmAttention(nn.Module):
    """Base class of the replacements, for one or three projections and grouped heads."""

    swapped: AttentionLayer
    # attributes of timm's classes
    num_heads: int
    head_dim: int
    num_prefix_tokens: int
    rotate_half: bool
    q_norm: nn.Module
    k_norm: nn.Module
    attn_drop: nn.Dropout
    proj: nn.Module
    proj_drop: nn.Module
    qkv: Any

    def _attend(
        self,
        x: Tensor,
        mask: Tensor | None,
        causal: bool,
        rope: Tensor | None = None,
    ) -> Tensor:
        q, k, v = self._projected(x)
        q = self.q_norm(q)
        k = self.k_norm(k)
        dropout = self.attn_drop.p if self.training else 0.0
        if rope is not None:
            q = self._rotated(q, rope).type_as(v)
            k = self._rotated(k, rope).type_as(v)
        if causal:
            mask = None
        out, _ = attend(self.swapped, Call(q, k, v, mask=mask, causal=causal, dropout=dropout))
        out = out.transpose(1, 2).flatten(2)
        norm = self._modules.get("norm")
        if norm is not None:
            out = norm(out)
        gate = self._modules.get("gate")
        if gate is not None:
            out = out * gate(x).sigmoid()
        return self.proj_drop(self.proj(out))

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        biases: list[Any] = [getattr(self, name, None) for name in ("q_bias", "k_bias", "v_bias")]
        if self.qkv is None:
            names = ("q_proj", "k_proj", "v_proj")
            projected = tuple(self.get_submodule(name)(x) for name in names)
        elif biases[0] is None:
            projected = self.qkv(x).chunk(3, -1)  # calling the module includes an adapter on it
        else:
            projected = F.linear(x, self.qkv.weight, torch.cat(biases)).chunk(3, -1)
        return tuple(t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in projected)

    def _rotated(self, t: Tensor, rope: Tensor) -> Tensor:
        from timm.layers.pos_embed_sincos import apply_rot_embed_cat

        before = self.num_prefix_tokens
        rotated = apply_rot_embed_cat(t[:, :, before:], rope, half=self.rotate_half)
        return torch.cat([t[:, :, :before], rotated], 2)


class SwappedTimmAttention(TimmAttention):
    """Replacement for timm.layers.Attention, with its submodules and arguments."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        return self._attend(x, attn_mask, is_causal)


class SwappedTimmRotary(TimmAttention):
    """Replacement for timm's AttentionRope and EvaAttention, which rotate queries and keys."""

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        return self._attend(x, attn_mask, is_causal, rope)
