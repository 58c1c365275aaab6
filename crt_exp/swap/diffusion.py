"""Self-attention of diffusers' UNets and transformers, over the positions of an image.

diffusers' Attention hands itself to a processor, which computes. A swap puts `LinearProcessor` there: module, class
and weights stay, and adapters on the projections with them. Attention to a text, which is short, and attention whose
processor does more (images and texts in one softmax) is of another kind.
"""

from torch import Tensor, nn

from crt_exp.swap.call import attend

PLAIN = ("AttnProcessor", "AttnProcessor2_0")
MODULE = "diffusers.models.attention_processor"


class LinearProcessor:
    """AttnProcessor2_0 with the layer's `swapped` in the place of fused softmax attention."""

    def __call__(self, attn: nn.Module, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
                 attention_mask: Tensor | None = None, temb: Tensor | None = None, **extras) -> Tensor:
        """hidden_states (B,L,C) or an image (B,C,height,width) -> the same."""
        if encoder_hidden_states is not None:
            raise ValueError(f"{attn.swapped.path}: this call attends to another sequence, and the layer was swapped "
                             "as self-attention: leave it out with layers=[...]")
        x, shape = hidden_states, hidden_states.shape
        if attn.spatial_norm is not None:
            x = attn.spatial_norm(x, temb)
        if x.ndim == 4:
            x = x.flatten(2).mT
        mask = _mask(attn, attention_mask, x)
        if attn.group_norm is not None:
            x = attn.group_norm(x.mT).mT
        out, _ = attend(attn.swapped, *_projected(attn, x), mask=mask)
        out = attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2).to(x.dtype)))
        out = out.mT.reshape(shape) if len(shape) == 4 else out
        return (out + hidden_states if attn.residual_connection else out) / attn.rescale_output_factor


def _projected(attn: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B,H,L,d)."""
    q, k, v = (project(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
               for project in (attn.to_q, attn.to_k, attn.to_v))
    return (q if attn.norm_q is None else attn.norm_q(q)), (k if attn.norm_k is None else attn.norm_k(k)), v


def _mask(attn: nn.Module, mask: Tensor | None, x: Tensor) -> Tensor | None:
    """(B,H,1 or L,L), additive."""
    if mask is None:
        return None
    mask = attn.prepare_attention_mask(mask, x.shape[1], len(x))
    return mask.view(len(x), attn.heads, -1, mask.shape[-1])


def is_self_attention(module: nn.Module) -> bool:
    """Also of one that was swapped and has been given another processor since."""
    kind = type(module)
    if (kind.__module__, kind.__name__) != (MODULE, "Attention"):
        return False
    processor = module.processor
    plain = "swapped" in module._modules or (
        type(processor).__module__ == MODULE and type(processor).__name__ in PLAIN)
    alone = not module.is_cross_attention and module.added_kv_proj_dim is None
    return plain and alone and module.inner_kv_dim == module.inner_dim


def sizes_of(module: nn.Module) -> tuple[int, int, float]:
    """Heads, their dimension, and what q.k is multiplied by: fused attention there knows d^(-1/2) alone."""
    d = module.inner_dim // module.heads
    processor = module.__dict__.get("unswapped_processor", module.processor)
    return module.heads, d, module.scale if type(processor).__name__ == PLAIN[0] else d**-0.5


def put(module: nn.Module) -> None:
    if "unswapped_processor" not in module.__dict__:
        module.__dict__["unswapped_processor"] = module.processor
    if not isinstance(module.processor, LinearProcessor):
        module.set_processor(LinearProcessor())


def take(module: nn.Module) -> None:
    module.set_processor(module.__dict__.pop("unswapped_processor"))
