"""Sums of the rows of each cell over the blocks that are far from a block: what cells weigh for its queries.

Legend: Z = batch x key heads, n blocks of b rows (Z, n, b, k), each of which belongs to a cell. Derived here.
"""

import torch
from torch import Tensor

from crt_exp.attention.checks import transformed
from crt_exp.samplers.precision import as_given

LAG = 2    # blocks from one on that are far


def block_sums(rows: Tensor, cell: Tensor, cells: int) -> Tensor:
    """For each block t the sums over cells of rows (Z, n, b, k) of the blocks up to t - LAG and from t + LAG on:
    (Z, n, cells, k). cell (Z, n, b) says where each row belongs.

    Sums of what is there, never a total less what is not: positive columns stay exactly 0 where no row is left."""
    if torch.compiler.is_compiling() or transformed(rows):
        return _at_once(one_hot(cell, cells, rows.dtype).mT @ rows)
    return _BlockSums.apply(rows, cell, cells)


class _BlockSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, cell, cells):
        ctx.save_for_backward(cell)
        ctx.cells = cells
        own = torch.bmm(one_hot(cell, cells, rows.dtype).flatten(0, 1).mT, rows.flatten(0, 1))
        return _summed(own.view(*rows.shape[:2], cells, rows.shape[-1]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        cell, = ctx.saved_tensors
        with as_given(grad):
            rows = torch.bmm(one_hot(cell, ctx.cells, grad.dtype).flatten(0, 1), _summed(grad).flatten(0, 1))
        return rows.view(*cell.shape, rows.shape[-1]), None, None


def one_hot(cell: Tensor, cells: int, dtype: torch.dtype) -> Tensor:
    """(..., cells): 1 at the cell of each row."""
    out = torch.zeros(*cell.shape, cells, dtype=dtype, device=cell.device)
    return out.scatter(-1, cell.unsqueeze(-1), 1.0) if transformed() else out.scatter_(-1, cell.unsqueeze(-1), 1.0)


def _summed(own: Tensor) -> Tensor:
    """Of sums (Z, n, ...) of each block those of the blocks that are far from it."""
    return _step_by_step(own) if own.device.type == "cpu" else _at_once(own)


def _at_once(own: Tensor) -> Tensor:
    n = own.shape[1]
    if n <= LAG:
        return torch.zeros_like(own)
    none = torch.zeros_like(own[:, :LAG])
    before = torch.cat([none, own[:, :n - LAG].cumsum(1)], 1)
    return before + torch.cat([own[:, LAG:].flip(1).cumsum(1).flip(1), none], 1)


def _step_by_step(own: Tensor) -> Tensor:
    """The same on a CPU, where torch's cumsum walks through memory in large steps."""
    n, total = own.shape[1], torch.empty_like(own)
    running = torch.zeros_like(own[:, 0])
    for t in range(n):
        if t >= LAG:
            running.add_(own[:, t - LAG])
        total[:, t] = running
    running = torch.zeros_like(own[:, 0])
    for t in range(n - LAG - 1, -1, -1):
        total[:, t].add_(running.add_(own[:, t + LAG]))
    return total
