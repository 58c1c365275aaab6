"""What the keys of a sequence leave in their cells, in few passes over them.

Legend: Z = batch x key heads, S keys y less their shift, values v, d, dv, K cells; z = y root, w = y.tilt. With the
matrix W (S, K) that holds the weight u_j of a key at its cell, the sums over cells are W^T [y, |z - centre|^2, 1], and
with G the gradient to them, R = [A, a] that to the rows [u v, u]:

    T = W G;  s = u a + u (A.v) + T_y.y + T_q |z - centre|^2 + T_1       (u times the gradient to u)
    dv = u A;  dy = T_y + 2 T_q (z - centre) root^T + s tilt.

Derived here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.checks import check_gradient
from crt_exp.samplers.precision import as_given


class Constants(NamedTuple):
    tilt: Tensor       # (Z or 1, 1, d)
    root: Tensor       # (Z or 1, d, d)
    centres: Tensor    # (Z, K, d), as z
    cell: Tensor       # (Z, S)
    level: Tensor      # (Z, K): w of which a key of the cell has the weight 1
    pool: Tensor       # (Z, S): which keys are in cells


class CellSums(NamedTuple):
    rows: Tensor       # (Z, S, dv + 1): [u v, u]
    sums: Tensor       # (Z, K, d + 2): of [u y, u |z - centre|^2, u]


def cell_sums(y: Tensor, v: Tensor, constants: Constants) -> CellSums:
    """Differentiable in y and v."""
    return CellSums(*_CellSums.apply(y, v, constants))


class _CellSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, v, constants):
        tilt, root, centres, cell, level, pool = constants
        w = torch.matmul(y, tilt.mT).squeeze(-1).sub_(level.gather(1, cell))
        u = torch.where(pool, w.exp_(), 0.0)
        apart = torch.matmul(y, root).sub_(_at_cells(centres, cell))
        q = torch.linalg.vector_norm(apart, dim=-1).square_()
        W = weighted(u, cell, centres.shape[1])
        sums = torch.cat([W.mT @ y, W.mT @ torch.stack([q, torch.ones_like(q)], -1)], -1)
        rows = v.new_empty(*v.shape[:2], v.shape[2] + 1)
        torch.mul(v, u.unsqueeze(-1), out=rows[..., :-1])
        rows[..., -1] = u
        ctx.save_for_backward(y, v, u, q, apart)
        ctx.constants = constants
        return rows, sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, R, G):
        check_gradient(R)
        y, v, u, q, apart = ctx.saved_tensors
        tilt, root, centres, cell, *_ = ctx.constants
        with as_given(y):
            T = weighted(u, cell, centres.shape[1]) @ G                                  # (Z, S, d + 2)
            A, near = R[..., :-1], T[..., :-2]
            slope = u * (R[..., -1] + (A * v).sum(-1)) + (near * y).sum(-1) + T[..., -2] * q + T[..., -1]
            dy = torch.matmul(apart * (2 * T[..., -2:-1]), root.mT).add_(near).addcmul_(slope.unsqueeze(-1), tilt)
            return dy, A * u.unsqueeze(-1), None


def _at_cells(t: Tensor, cell: Tensor) -> Tensor:
    """Rows (Z, S, d) of t (Z, K, d)."""
    first = torch.arange(len(t), device=t.device).unsqueeze(-1) * t.shape[1]
    return t.flatten(0, 1).index_select(0, (cell + first).flatten()).view(*cell.shape, t.shape[-1])


def weighted(u: Tensor, cell: Tensor, cells: int) -> Tensor:
    """(Z, S, K): the weights u (Z, S) of keys at their cells."""
    return u.new_zeros(*u.shape, cells).scatter(2, cell.unsqueeze(-1), u.unsqueeze(-1))
