"""What queries of causal near-far attention miss, and what they state of it (crt_exp/nearfar/bound.py).

Legend: H query heads, Hkv key heads, L tokens, d; blocks of b tokens.
"""

import torch
from torch import Tensor

from crt_exp.nearfar import NearFar
from crt_exp.nearfar.choice import Sizes
from crt_exp.nearfar.looks import opened
from crt_exp.nearfar.recall import Epoch, RecallNearFar, unread


STATEMENTS = ("missed_weight", "bound", "largest_bound", "sent_to_exact", "keys_read")


@torch.no_grad()
def statements(state: NearFar, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Of the queries of each head behind `exact_until`, (H,) each: the medians of the weight that they miss and of its
    bound, the largest bound, how many see all keys because of it, and the keys of cells that they read on average.
    Nothing where there is none. Queries x (1, H, L, d), scaled, keys y (1, Hkv, L, d)."""
    (bound, read), sizes = state.stated(x, y), state.sizes
    bound, read = (t[0, :, read[0, 0] >= 0].double() for t in (bound, read))
    if not bound.numel():
        return {}
    above = torch.zeros_like(bound) if sizes.error is None else (bound > sizes.error).double()
    missed = missed_weight(x, y, sizes)[0, :, -bound.shape[1]:]
    each = (missed.median(-1).values, bound.median(-1).values, bound.amax(-1), above.mean(-1), read.mean(-1))
    return dict(zip(STATEMENTS, each))


def missed_weight(x: Tensor, y: Tensor, sizes: Sizes) -> Tensor:
    """The weight (1, H, L), in float64, of the keys that queries behind the first renewal would not read without
    `error`; 0 of the others."""
    x, y = x.unflatten(1, (y.shape[1], -1))[0], y[0]                                             # (Hkv, G, L, d)
    epochs = RecallNearFar(sizes).choose(x, y, None, slice(None)).epochs
    parts = [x.new_zeros(*x.shape[:2], epochs[0].start, dtype=torch.float64)]
    for epoch in epochs:
        for start in range(epoch.start, min(epoch.stop, x.shape[2]), sizes.block):
            parts.append(_of_block(x[:, :, start:start + sizes.block], y, epoch, start, sizes))
    return torch.cat(parts, 2).flatten(0, 1).unsqueeze(0)


def _of_block(q: Tensor, y: Tensor, epoch: Epoch, start: int, sizes: Sizes) -> Tensor:
    """Queries (Hkv, G, b', d) from the place `start` on."""
    far, stop = start - sizes.block, start + q.shape[2]
    asks = q.flatten(1, 2).unsqueeze(1)
    member = torch.ones(len(y), 1, 1, far, dtype=torch.bool, device=y.device)
    member[:, 0, 0, :epoch.pool.shape[1]] = epoch.pool
    rest = unread(member, opened(y[:, :far], member, asks, sizes.opens(epoch.start))).view(*q.shape[:3], far)
    later = torch.arange(stop, device=y.device) > torch.arange(start, stop, device=y.device).unsqueeze(1)
    weight = (q.double() @ y[:, None, :stop].double().mT).masked_fill(later, -torch.inf).softmax(-1)
    return (weight[..., :far] * rest).sum(-1)
