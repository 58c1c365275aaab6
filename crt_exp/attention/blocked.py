"""Hybrid features in attention: stabilised on their bases, put together for the tokens of one chunk.

Legend: L tokens of a chunk, R weights, D features of a base, M = sum R D columns. Logs and maxima have D columns, and
only what goes into the product with the values has M: one product a column for each token, as many as there are.
"""

import torch
from torch import Tensor

from crt_exp.attention.checks import finite, transformed
from crt_exp.features.base import ONE
from crt_exp.features.blocks import Block, Blocks


def scale_keys(f: Blocks, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Key features (..., S, M) over their maxima, and these (..., M, 1).

    The maxima are those of the bases, whose features lie within the weights of them. keep (..., S), True = keep.
    """
    logs = [part.base.log_scale for part in f.parts]
    if keep is not None:
        logs = [torch.where(keep[..., None], log, -torch.inf) for log in logs]
    tops = [part.top(log.detach()) for part, log in zip(f.parts, logs)]
    scaled = [_times(part.base.value, torch.exp(log - finite(part.own(top))))
              for part, log, top in zip(f.parts, logs, tops)]
    return together(f.parts, scaled), tops[0] if len(tops) == 1 else torch.cat(tops, -2)


def scale_queries(f: Blocks, key_top: Tensor) -> tuple[Tensor, Tensor]:
    """exp(a + c - r) (..., L, M) with c the scale of the keys and r the maximum of a + c, and r (..., L, 1)."""
    tops = key_top.split([part.width for part in f.parts], -2)
    logs = [part.base.log_scale + part.own(top) for part, top in zip(f.parts, tops)]
    rows = [torch.broadcast_shapes(part.weight.shape[:-1], part.base.log_scale.shape[:-1]) + (1,) for part in f.parts]
    top = torch.stack([log.detach().amax(-1, keepdim=True).expand(size) for log, size in zip(logs, rows)]).amax(0)
    scaled = [_times(part.base.value, torch.exp(log - finite(top))) for part, log in zip(f.parts, logs)]
    return together(f.parts, scaled), top


def together(parts: tuple[Block, ...], scaled: list[Tensor]) -> Tensor:
    """Column (a, r, d) of each part is weight_r times feature (a, d) of its base, with the groups a of the part."""
    weights = [part.weight for part in parts]
    if torch.compiler.is_compiling() or transformed(*weights, *scaled):
        return torch.cat([_outer(part.weight, t, part.groups).flatten(-3) for part, t in zip(parts, scaled)], -1)
    return _Together.apply([part.groups for part in parts], [part.cluster for part in parts], *weights, *scaled)


class _Together(torch.autograd.Function):
    """`together` without a copy, and with one pass for each gradient."""

    @staticmethod
    def forward(ctx, groups, clusters, *tensors):
        weights, scaled = tensors[:len(groups)], tensors[len(groups):]
        ctx.groups, ctx.clusters = groups, clusters
        ctx.save_for_backward(*tensors)
        widths = [w.shape[-1] * t.shape[-1] for w, t in zip(weights, scaled)]
        batch = torch.broadcast_shapes(*(t.shape[:-1] for t in tensors))
        out = scaled[0].new_empty(*batch, sum(widths))
        for part, w, t, a in zip(out.split(widths, -1), weights, scaled, groups):
            _outer(w, t, a, part.unflatten(-1, (a, w.shape[-1], -1)))
        return out

    @staticmethod
    def backward(ctx, grad):
        tensors = ctx.saved_tensors
        weights, scaled = tensors[:len(ctx.groups)], tensors[len(ctx.groups):]
        widths = [w.shape[-1] * t.shape[-1] for w, t in zip(weights, scaled)]
        dws, dts = [], []
        for i, (g, w, t, a) in enumerate(zip(grad.split(widths, -1), weights, scaled, ctx.groups)):
            g, cluster = g.unflatten(-1, (a, w.shape[-1], -1)), ctx.clusters[i]
            dt = (g * w[..., None, :, None]).sum(-2) if cluster is None else _of_cluster(g, cluster)
            dts.append(dt.flatten(-2).sum_to_size(t.shape))
            wanted = ctx.needs_input_grad[2 + i]
            dws.append((g * t.unflatten(-1, (a, 1, -1))).sum((-3, -1)).sum_to_size(w.shape) if wanted else None)
        return None, None, *dws, *dts


def _of_cluster(g: Tensor, cluster: Tensor) -> Tensor:
    """Of the blocks of all clusters (..., L, A, C, D / A), those of the token's own (..., L, 1): (..., L, A, D / A)."""
    chosen = g[..., 0, :]
    for c in range(1, g.shape[-2]):
        chosen = torch.where(cluster.unsqueeze(-1) == c, g[..., c, :], chosen)
    return chosen


def _outer(weight: Tensor, t: Tensor, groups: int, out: Tensor | None = None) -> Tensor:
    """(..., L, A, R, D / A)."""
    return torch.mul(weight[..., None, :, None], t.unflatten(-1, (groups, 1, -1)), out=out)


def _times(value: Tensor, phi: Tensor) -> Tensor:
    return phi if value is ONE else value * phi
