"""Queries of near-far attention that see all keys: those of the first places, and those whose bound is not met.

Legend: Z = batch x key heads, G query heads of a group, L queries, S keys y, d, dv.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.attention.baselines import exact_attention
from crt_exp.attention.checks import transformed
from crt_exp.nearfar.engine.constants import HIDDEN

NUMBERS = 2**22     # of a matrix of queries and keys
MOST = 0.5          # of the queries: where more are to see all keys, the kernel for all is as fast


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


def seeing_all(out: Tensor, which: Tensor, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None,
               scale: float = 1.0) -> Tensor:
    """Outputs (Z, G, L, dv) of the queries x (Z, G, L, d), the last ones of keys (Z, S, d), where those of `which`
    (Z, G, L) see all keys up to their own instead; each of them sees one. Logits are scale x.y."""
    mixed = torch.compiler.is_compiling() or transformed(x, y, v)
    if not mixed and not bool(which.any()):
        return out
    if mixed or x.shape[2] == 1 or float(which.float().mean()) > MOST:
        return torch.where(which.unsqueeze(-1), exactly(x, y, v, keep, scale).to(out.dtype), out)
    z, i, g = which.transpose(1, 2).nonzero(as_tuple=True)             # of a head, those that see as many keys together
    rows = [_some(x[head, g[at], i[at]], i[at] + y.shape[1] - x.shape[2], y[head], v[head],
                  None if keep is None else keep[head], scale)
            for head in range(len(y)) for at in _parts(z == head, y.shape[1])]
    return out.index_put((z, g, i), torch.cat(rows).to(out.dtype))


def _parts(own: Tensor, keys: int) -> tuple[Tensor, ...]:
    """The places where `own` (n,) is true, some at a time."""
    places = own.nonzero().squeeze(1)
    return places.split(max(1, NUMBERS // keys)) if len(places) else ()


def _some(x: Tensor, place: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, scale: float) -> Tensor:
    """Queries (n, d) at these places, which rise, of keys (S, d)."""
    stop = int(place[-1]) + 1
    seen = torch.arange(stop, device=x.device) <= place.unsqueeze(1)
    seen = seen if keep is None else seen & keep[:stop]
    heads = (t[None, None] for t in (x, y[:stop], v[:stop]))
    return F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale)[0, 0]
