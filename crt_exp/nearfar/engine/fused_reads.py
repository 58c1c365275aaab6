"""The keys that each query reads for itself, on a GPU: no row that is read is copied. The twin of reads.py, whose
legend is that of this file.

Gradients to keys and values are added up where they belong, in whatever order: they repeat up to rounding. Derived
here.
"""

import torch
from torch import Tensor

from crt_exp.attention.engines.protocol import tile_width
from crt_exp.nearfar.engine.constants import HIDDEN
from crt_exp.nearfar.engine.sets import check_backward

COLUMNS = 32     # rows that are read in a step


def logits(q: Tensor, keys: Tensor, places: Tensor) -> Tensor:
    """q.key (Z, ..., o), HIDDEN for none. Differentiable in q and keys."""
    return _Logits.apply(q.flatten(1, -2), keys, places.flatten(1, -2)).view(places.shape)


def sums(weight: Tensor, values: Tensor, places: Tensor) -> Tensor:
    """Sums (Z, ..., dv) of values (Z, S, dv) with weights (Z, ..., o), which are 0 for none. Differentiable in weights
    and values."""
    out = _Sums.apply(weight.flatten(1, -2), values, places.flatten(1, -2))
    return out.view(*places.shape[:-1], values.shape[-1])


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, keys, places):
        ctx.save_for_backward(q, keys, places)
        return _products(q, keys, places, HIDDEN)

    @staticmethod
    def backward(ctx, grad):
        q, keys, places = ctx.saved_tensors
        check_backward(grad)
        return _weighted(grad, keys, places), _added(grad, q, keys, places), None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, values, places):
        ctx.save_for_backward(weight, values, places)
        return _weighted(weight, values, places)

    @staticmethod
    def backward(ctx, grad):
        weight, values, places = ctx.saved_tensors
        check_backward(grad)
        return _products(grad, values, places, 0.0), _added(weight, grad, values, places), None


def _products(given: Tensor, table: Tensor, places: Tensor, none: float) -> Tensor:
    """(Z, R, o)."""
    from crt_exp.nearfar.engine import kernels      # which imports triton

    out = given.new_empty(places.shape)
    with torch.cuda.device_of(table):
        kernels.read_logits[_programs(places)](given.contiguous(), table.contiguous(), places.contiguous(), out,
                                               *_sizes(places, table), none, COLUMNS, tile_width(table.shape[-1]))
    return out


def _weighted(weight: Tensor, table: Tensor, places: Tensor) -> Tensor:
    """(Z, R, width)."""
    from crt_exp.nearfar.engine import kernels

    out = weight.new_empty(*places.shape[:2], table.shape[-1])
    with torch.cuda.device_of(table):
        kernels.read_sums[_programs(places)[:1]](weight.contiguous(), table.contiguous(), places.contiguous(), out,
                                                 *_sizes(places, table), COLUMNS, tile_width(table.shape[-1]))
    return out


def _added(weight: Tensor, given: Tensor, table: Tensor, places: Tensor) -> Tensor:
    """(Z, S, width)."""
    from crt_exp.nearfar.engine import kernels

    grad = torch.zeros_like(table, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(table):
        kernels.read_backward[_programs(places)](weight.contiguous(), given.contiguous(), table.contiguous(),
                                                 places.contiguous(), grad, *_sizes(places, table), COLUMNS,
                                                 tile_width(table.shape[-1]))
    return grad


def _programs(places: Tensor) -> tuple[int, int]:
    return places.shape[0] * places.shape[1], -(-places.shape[2] // COLUMNS)


def _sizes(places: Tensor, table: Tensor) -> tuple[int, ...]:
    return *places.shape[1:], *table.shape[1:]
