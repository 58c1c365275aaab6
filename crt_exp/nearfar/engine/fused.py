"""The softmax of sets.py on a GPU, in one kernel for each block of queries: no weight of a pair reaches the memory.

What a set holds for a key, [V, N] and a bias, is here a value V / N and the bias + log N: with these a set is keys as
others are, and the rest of its gradient is PyTorch's. With delta = g . out (and what the gradients to the share of the
cells and to the log-sums give) the gradient to a logit is weight (g . value - delta). Gradients to keys that all blocks
share are written for each block and summed by PyTorch, so that a pass repeats exactly.

Where there is no GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1), as in tests. Legend: sets.py.
Derived here.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.engines.protocol import tile_width
from crt_exp.nearfar.engine.sets import Gathered, Weighted, KeyWindow, check_backward, log_weight, over

ROWS = COLUMNS = 32     # queries and keys of a step
WIDEST = 256            # columns of keys and values that a program holds


def applies(*tensors: Tensor) -> bool:
    """Whether these tensors are for this engine: in float32 on a GPU, where Triton is, and not too wide."""
    ours = all(t.is_cuda and t.dtype == torch.float32 and t.shape[-1] <= WIDEST for t in tensors)
    return ours and find_spec("triton") is not None


def gather(q: Tensor, window: KeyWindow | None, sets: tuple[Weighted, ...], precise: bool = True) -> Gathered:
    """What queries q (Z, n, r, d) gather from a window and one or two sets, the last of which is that of the cells,
    with the log-sums. Differentiable in q, keys, values, sums and biases of sets. Products are of TF32 where they need
    not be `precise`, or torch.set_float32_matmul_precision allows it."""
    near = (None,) * 4 if window is None else (window.keys, window.values, window.bias, window.hidden)
    flat = []
    for keys, sums, bias in sets:
        flat += [keys, sums[..., :-1] * over(sums[..., -1:]), bias + log_weight(sums)]
    precision = "ieee" if precise and torch.get_float32_matmul_precision() == "highest" else "tf32"
    return Gathered(*_Fused.apply(window is not None and window.after, precision, q, *near, *flat))


class _Group(NamedTuple):
    """Keys that blocks of queries see: of N blocks of their sequence, `around` of which a block sees, or a set."""

    keys: Tensor              # (Z, N, b, d); or (Z, n or 1, m, d)
    values: Tensor            # (Z, ., ., dv)
    bias: Tensor              # (Z, ., .)
    hidden: Tensor | None     # (r, W)
    around: int               # 0: a set

    @property
    def width(self) -> int:
        """W: keys that a query meets."""
        return max(self.around, 1) * self.keys.shape[2]

    def strides(self) -> list[int]:
        """Numbers from one head to the next, of keys, values and bias, then from one block to the next."""
        tensors = self[:3]
        return [t[0].numel() for t in tensors] + [0 if t.shape[1] == 1 else t[0, 0].numel() for t in tensors]


def _groups(after: bool, near: Sequence[Tensor | None], flat: Sequence[Tensor]) -> list[_Group]:
    near, flat = ([None if t is None else t.detach().contiguous() for t in tensors] for tensors in (near, flat))
    window = [] if near[0] is None else [_Group(*near, 3 if after else 2)]
    return window + [_Group(*flat[i:i + 3], None, 0) for i in range(0, len(flat), 3)]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, after, precision, q, keys, values, bias, hidden, *flat):
        near = (keys, values, bias, hidden)
        rows, groups = q.detach().contiguous(), _groups(after, near, flat)
        out, share, logsum = (q.new_empty(*q.shape[:3], k) for k in (groups[-1].values.shape[-1], 1, 1))
        with torch.cuda.device_of(rows):            # that of the caller may be another one
            _forward(rows, groups, out, share, logsum, precision)
        ctx.after, ctx.precision = after, precision
        ctx.save_for_backward(q, out, share, logsum, *near, *flat)
        return out, share, logsum

    @staticmethod
    def backward(ctx, grad, grad_share, grad_logsum):
        q, out, share, logsum, *inputs = ctx.saved_tensors
        check_backward(grad, grad_share, grad_logsum)
        grad, gain = grad.contiguous(), grad_share.contiguous()
        delta = (grad * out).sum(-1, keepdim=True) + gain * share - grad_logsum
        kept = logsum, grad, delta, gain
        rows, dq = q.detach().contiguous(), torch.zeros_like(q, memory_format=torch.contiguous_format)
        groups, gradients = _groups(ctx.after, inputs[:4], inputs[4:]), []
        with torch.cuda.device_of(rows):
            for i, group in enumerate(groups):
                last = i == len(groups) - 1
                _queries_backward(rows, group, kept, dq, last, ctx.precision)
                gradients.append(_keys_backward(rows, group, kept, last, ctx.precision))
        near = [*gradients.pop(0)[:2], None, None] if groups[0].around else [None] * 4
        return None, None, dq, *near, *(g for part in gradients for g in part)


def _sizes(group: _Group, precision: str) -> dict[str, int | str]:
    D, DV = (tile_width(t.shape[-1]) for t in (group.keys, group.values))
    return {"ROWS": ROWS, "COLUMNS": COLUMNS, "D": D, "DV": DV, "PRECISION": precision}


def _forward(rows: Tensor, groups: list[_Group], out: Tensor, share: Tensor, logsum: Tensor,
             precision: str) -> None:
    from crt_exp.nearfar.engine import kernels      # which imports triton

    Z, n, r, d = rows.shape
    cells, near = groups[-1], groups[0] if groups[0].around else None
    heavy = groups[-2] if len(groups) > 1 and not groups[-2].around else None
    window, others = near or cells, heavy or cells
    kernels.forward[Z * n, -(-r // ROWS)](
        rows, *window[:3], rows if window.hidden is None else window.hidden, *others[:3], *cells[:3], out, share,
        logsum, n, window.keys.shape[1], r, window.keys.shape[2], window.width, others.width, cells.width, d,
        out.shape[-1], *others.strides(), *cells.strides(), NEAR=near is not None, HEAVY=heavy is not None,
        HIDE=window.hidden is not None, **_sizes(cells, precision))


def _queries_backward(rows: Tensor, group: _Group, kept: tuple[Tensor, ...], dq: Tensor, last: bool,
                      precision: str) -> None:
    """Adds what the keys of a group give to dq."""
    from crt_exp.nearfar.engine import kernels

    Z, n, r, d = rows.shape
    of_head, of_block = group.strides()[:3], [0] * 3 if group.around else group.strides()[3:]
    kernels.queries_backward[Z * n, -(-r // ROWS)](
        rows, *group[:3], rows if group.hidden is None else group.hidden, *kept, dq, n, group.keys.shape[1], r,
        group.keys.shape[2], group.width, d, group.values.shape[-1], *of_head, *of_block, NEAR=group.around > 0,
        HIDE=group.hidden is not None, LAST=last, **_sizes(group, precision))


def _keys_backward(rows: Tensor, group: _Group, kept: tuple[Tensor, ...], last: bool, precision: str) -> list[Tensor]:
    """The gradients to keys, values and biases of a group."""
    from crt_exp.nearfar.engine import kernels

    (Z, n, r, d), m, dv = rows.shape, group.keys.shape[2], group.values.shape[-1]
    blocks = group.keys.shape[1] if group.around else n
    gradients = [rows.new_empty(Z, blocks, m, *size) for size in ((d,), (dv,), ())]
    kernels.keys_backward[Z * blocks, -(-m // COLUMNS)](
        rows, *group[:3], rows if group.hidden is None else group.hidden, *kept, *gradients, n, blocks, r, m,
        group.width, d, dv, *group.strides(), NEAR=group.around > 0, AROUND=max(group.around, 1),
        HIDE=group.hidden is not None, LAST=last, num_warps=8, **_sizes(group, precision))   # 4 spill in float32
    return [g.sum(1, keepdim=True) if t.shape[1] < blocks else g for t, g in zip(group[:3], gradients)]
