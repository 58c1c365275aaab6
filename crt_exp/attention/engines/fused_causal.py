"""Causal attention with positive exponential features on a GPU, in Triton: no feature reaches the memory of the device
and nothing depends on a value, so that the host never waits. The twin of closed_form.causal.

Legend: L queries x, S keys y, P = S - L, M features; a, b are the log features of queries and keys, V = [v, 1].
Segments of SEGMENT positions run in parallel, pieces of PIECE tokens one after the other. What the keys before a piece
leave in a feature is a state over the largest of their logs: a row of the piece sees all these keys, so none is too
large for it. Within a piece s_ij = logsumexp_m(a_im + b_jm) is summed in logs, pair by pair, so that no later key makes
an early row underflow, and a piece is never taken again:

    [numerator; denominator]_i = sum_m exp(a_im) state_m + sum_{j <= i of the piece} exp(s_ij) V_j
    da_im = exp(a_im - l_i) G_i.state_m + sum_{j <= i of the piece} exp(a_im + b_jm - l_i) G_i.V_j,    dx = da W

with l the log-sums and G of protocol.py. db and dv are the same with the sides exchanged and time reversed, of the
state sum_i exp(a_im - l_i) G_i that later queries leave. All weights are at most 1. States are computed again: a
forward pass keeps log-sums alone. Where there is no GPU the kernels run in Triton's interpreter, as in tests. Derived
here.
"""

from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.engines.flash import HALF
from crt_exp.attention.engines.protocol import Causal, Form, denominator_gradients, tile_width

SEGMENT, PIECE, FEATURES, TOKENS = 256, 16, 16, 32   # positions, tokens and features of a step; tokens of a summary's
LARGEST_D = 128                                      # columns that a program holds in its registers
unit = 1.0


def applies(x: Tensor, y: Tensor, v: Tensor) -> bool:
    """Whether these tensors are for this engine: on a GPU, not in float64, not too wide, and Triton is there."""
    ours = all(t.is_cuda and t.dtype in (torch.float32, *HALF) and t.shape[-1] <= LARGEST_D for t in (x, y, v))
    return ours and find_spec("triton") is not None


def empty(x: Tensor, v: Tensor, rows: Tensor) -> Causal:
    """No state is kept."""
    (B, H, L, _), dv = x.shape, v.shape[-1]
    none = [rows.new_empty(0) for _ in range(3)]
    return Causal(v.new_empty(B, H, L, dv), rows.new_empty(B, H, L), *none)


def forward(x: Tensor, y: Tensor, v: Tensor, form: Form) -> Causal:
    from crt_exp.attention.engines import causal_kernels      # which imports triton

    kept, sweep, keys = empty(x, v, form.rows), _Sweep(x, y, v, form), _keys(y, v, form)
    state = sweep.entering(keys)
    queries = x.contiguous(), form.rows.new_zeros(x.shape[:3])
    with torch.cuda.device_of(x):    # that of the caller may be another one
        causal_kernels.forward[sweep.programs(sweep.ahead)](
            *queries, *keys[:4], *sweep.map, *state, kept.out, kept.logsum, x.shape[2], *sweep.numbers, PIECE=PIECE,
            **sweep.sizes)
    return kept


def backward(x: Tensor, y: Tensor, v: Tensor, form: Form, kept: Causal, grad: Tensor,
             grad_logsum: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    sweep, keys = _Sweep(x, y, v, form), _keys(y, v, form)
    last = denominator_gradients(grad, kept.out, grad_logsum, form.rows.dtype)
    seen = kept.logsum > -torch.inf
    queries = _Side(x.contiguous(), torch.where(seen, -kept.logsum, -torch.inf), grad.contiguous(), last.contiguous(),
                    sweep.before)
    dx, dy, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, y, v))
    sweep.backward(queries, keys, dx, dx, 0.0, reverse=False)
    sweep.backward(keys, queries, dy, dv, form.norm_weight, reverse=True)
    return dx, dy, dv


class _Side(NamedTuple):
    """Queries or keys, and what they leave to the others."""

    vectors: Tensor  # (B,H,T,d)
    offsets: Tensor  # (B,H,T): what each adds to its log features; -inf: it is not there
    values: Tensor   # (B,H,T,dv)
    last: Tensor     # (B,H,T): the last column of the values
    first: int       # the position of its first token


def _keys(y: Tensor, v: Tensor, form: Form) -> _Side:
    if form.keep is not None:  # padding may hold NaN
        y, v = (t.masked_fill(~form.keep[:, None, :, None], 0) for t in (y, v))
    offsets = form.key_offsets(y).contiguous()
    return _Side(y.contiguous(), offsets, v.contiguous(), torch.ones_like(offsets), 0)


class _Sweep:
    """What the kernels of one call share."""

    def __init__(self, x: Tensor, y: Tensor, v: Tensor, form: Form):
        (self.B, self.H, L, d), S, dv, M = x.shape, y.shape[2], v.shape[-1], form.width
        self.before = S - L
        self.ahead = -(-self.before // SEGMENT)                 # segments of keys before the first query
        self.parts = self.ahead + -(-L // SEGMENT)
        self.numbers = self.parts, self.ahead, self.before, S, M, d, dv
        self.map = [t.expand(*x.shape[:2], *t.shape[2:]).contiguous() for t in (form.rows * form.scale, form.bias)]
        exact = torch.get_float32_matmul_precision() == "highest" and v.dtype not in HALF
        self.sizes = {"SEGMENT": SEGMENT, "FEATURES": FEATURES, "D": tile_width(d), "DV": tile_width(dv),
                      "PRECISION": "ieee" if exact else "tf32",
                      "num_warps": 8,   # registers for all that a piece holds
                      "num_stages": 1}  # nothing is read ahead of what the last piece writes

    def programs(self, without: int = 0) -> tuple[int]:
        return (self.B * self.H * (self.parts - without),)

    def entering(self, side: _Side, reverse: bool = False) -> list[Tensor]:
        """What all tokens of a side before each segment leave in the features (in reverse: after it): sums
        (B,H,parts,M,dv) and sums of the last column (B,H,parts,M) over exp(logs), and these."""
        from crt_exp.attention.engines import causal_kernels

        M, dv = self.map[0].shape[2], side.values.shape[-1]
        state = [self.map[0].new_empty(self.B, self.H, self.parts, M, *size) for size in ((dv,), (), ())]
        slices = -(-M // FEATURES)
        with torch.cuda.device_of(side.vectors):
            causal_kernels.summary[self.programs()[0], slices](
                *side[:4], *self.map, *state, side.vectors.shape[2], side.first, *self.numbers, TOKENS=TOKENS,
                **self.sizes)
            causal_kernels.entering[self.B * self.H, slices](*state, self.parts, M, dv, FEATURES, self.sizes["DV"],
                                                             reverse)
        return state

    def backward(self, side: _Side, other: _Side, grad: Tensor, grad_values: Tensor, norm_weight: float,
                 reverse: bool) -> None:
        """Writes the gradients to the vectors of a side and, in reverse, to its values."""
        from crt_exp.attention.engines import causal_kernels

        state = self.entering(other, reverse)
        with torch.cuda.device_of(side.vectors):
            causal_kernels.backward[self.programs(0 if reverse else self.ahead)](
                *side[:4], *other[:4], *self.map, *state, grad, grad_values, side.vectors.shape[2],
                other.vectors.shape[2], side.first, other.first, norm_weight, *self.numbers, PIECE=PIECE,
                **self.sizes, REVERSE=reverse)
