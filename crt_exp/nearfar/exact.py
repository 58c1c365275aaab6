"""Queries of near-far attention that see all keys: those of short sequences, and causal ones of the first places.

Legend: Z = batch x key heads, G query heads of a group, L queries, S keys y, d, dv.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.attention.baselines import exact_attention
from crt_exp.attention.checks import transformed
from crt_exp.nearfar.engine.constants import HIDDEN


def exactly(x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, scale: float = 1.0, causal: bool = True) -> Tensor:
    """Queries (Z, G, l, d) see all keys (Z, S, d), of which causal ones are the last: those that are not later; logits
    are scale x.y."""
    mask = None if keep is None else keep[:, :y.shape[1]]
    if not transformed(x, y, v):      # the fused kernel knows the backward pass alone
        if x.shape[2] == 1 and mask is None:    # the last query sees all keys: those of a group are as of one head
            x, y, v = x.transpose(1, 2), y.unsqueeze(1), v.unsqueeze(1)
            return F.scaled_dot_product_attention(x, y, v, scale=scale).transpose(1, 2)
        return exact_attention(x, y.unsqueeze(1), v.unsqueeze(1), causal=causal, key_mask=mask, scale=scale)
    seen = torch.ones(x.shape[2], y.shape[1], dtype=torch.bool, device=x.device)
    seen = seen.tril(y.shape[1] - x.shape[2]) if causal else seen
    seen = seen if mask is None else seen & mask[:, None, None]
    logits = (scale * x @ y.unsqueeze(1).mT).masked_fill(~seen, HIDDEN)
    return torch.where(seen.any(-1, keepdim=True), logits.softmax(-1) @ v.unsqueeze(1), 0.0)
