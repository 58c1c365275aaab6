"""Sums of the rows of each cell over the blocks before and after a block: what cells weigh for its queries.

Legend: Z = batch x key heads, n blocks of b rows (Z, n, b, k), each of which belongs to a cell. Derived here.
"""

import torch
from torch import Tensor

from crt_exp.attention.checks import transformed
from crt_exp.precision import as_given


def block_sums(rows: Tensor, cell: Tensor, cells: int, lag: int, both: bool) -> Tensor:
    """For each block t the sums over cells of rows (Z, n, b, k) of the blocks up to t - lag, and, where `both`, of
    those from t + lag on too: (Z, n, cells, k). cell (Z, n, b) says where each row belongs.

    Sums of what is there, never a total less what is not: positive columns stay exactly 0 where no row is left."""
    if torch.compiler.is_compiling() or transformed(rows):
        return _at_lag(one_hot(cell, cells, rows.dtype).mT @ rows, lag, True, both)
    return _BlockSums.apply(rows, cell, cells, lag, both)


class _BlockSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, cell, cells, lag, both):
        ctx.save_for_backward(cell)
        ctx.cells, ctx.lag, ctx.both = cells, lag, both
        own = torch.bmm(one_hot(cell, cells, rows.dtype).flatten(0, 1).mT, rows.flatten(0, 1))
        return _summed(own.device)(own.view(*rows.shape[:2], cells, rows.shape[-1]), lag, True, both)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        cell, = ctx.saved_tensors
        with as_given(grad):
            later = _summed(grad.device)(grad, ctx.lag, ctx.both, True)
            rows = torch.bmm(one_hot(cell, ctx.cells, grad.dtype).flatten(0, 1), later.flatten(0, 1))
        return rows.view(*cell.shape, rows.shape[-1]), None, None, None, None


def _summed(device: torch.device):
    return _step_by_step if device.type == "cpu" else _at_lag


def one_hot(cell: Tensor, cells: int, dtype: torch.dtype) -> Tensor:
    """(..., cells): 1 at the cell of each row."""
    out = torch.zeros(*cell.shape, cells, dtype=dtype, device=cell.device)
    return out.scatter(-1, cell.unsqueeze(-1), 1.0) if transformed() else out.scatter_(-1, cell.unsqueeze(-1), 1.0)


def _at_lag(own: Tensor, lag: int, before: bool, after: bool) -> Tensor:
    """Of sums (Z, n, ...) of each block those of the blocks up to t - lag and from t + lag on."""
    n = own.shape[1]
    if n <= lag:
        return torch.zeros_like(own)
    none, total = torch.zeros_like(own[:, :lag]), 0
    if before:
        total = torch.cat([none, own[:, :n - lag].cumsum(1)], 1)
    if after:
        total = total + torch.cat([own[:, lag:].flip(1).cumsum(1).flip(1), none], 1)
    return total


def _step_by_step(own: Tensor, lag: int, before: bool, after: bool) -> Tensor:
    """The same on a CPU, where torch's cumsum walks through memory in large steps."""
    n, total = own.shape[1], torch.empty_like(own)
    if before:
        running = torch.zeros_like(own[:, 0])
        for t in range(n):
            if t >= lag:
                running.add_(own[:, t - lag])
            total[:, t] = running
    else:
        total.zero_()
    if after:
        running = torch.zeros_like(own[:, 0])
        for t in range(n - lag - 1, -1, -1):
            total[:, t].add_(running.add_(own[:, t + lag]))
    return total
