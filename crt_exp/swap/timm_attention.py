"""timm's attention with a linear one in its place."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.swap.call import attend


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


def swapped_timm(kind: type) -> type | None:
    """For timm's attention, or a subclass with the same forward pass."""
    for base in kind.__mro__:
        if (base.__module__, base.__name__) in TIMM:
            return TIMM[base.__module__, base.__name__] if kind.forward is base.forward else None
    return None
