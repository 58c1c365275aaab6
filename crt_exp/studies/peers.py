"""Attention with FAVOR+'s features as others write it: what the times of ours are read against.

Legend: L tokens, d, values v (..., L, dv), m projections in `weight` (..., m, d); x and y as `attention` takes them.
"""

import io
from collections.abc import Callable
from contextlib import redirect_stdout

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 128  # tokens of a chunk of `chunked`: of 64, 128 and 256 the fastest at 1024 tokens
Method = Callable[[Tensor, Tensor, Tensor], Tensor]


def floor(weight: Tensor) -> Method:
    """exp(x W^T) (exp(y W^T)^T v): the two products alone, without norms, stabiliser and denominator."""
    def run(x, y, v):
        return torch.exp(x @ weight.mT) @ (torch.exp(y @ weight.mT).mT @ v)
    return run


def chunked(weight: Tensor, chunk: int = CHUNK) -> Method:
    """Causal attention with FAVOR+'s features in whole-tensor operations and autograd: within a chunk by its matrix,
    to the chunks before by their sums. O(L (m + chunk)) memory. Without a stabiliser, which would cost it time, so for
    vectors of moderate size alone."""
    def run(x, y, v):
        length = x.shape[-2]
        x, y, v = (_chunks(t, chunk) for t in (_features(x, weight), _features(y, weight), F.pad(v, (0, 1), value=1.0)))
        sums = F.pad(y.mT @ v, (0, 0, 0, 0, 1, -1)).cumsum(-3)  # of the chunks before each
        out = (x @ sums + (x @ y.mT).tril() @ v).flatten(-3, -2)[..., :length, :]
        return out[..., :-1] / out[..., -1:]
    return run


def _features(x: Tensor, weight: Tensor) -> Tensor:
    return torch.exp(x @ weight.mT - x.square().sum(-1, keepdim=True) / 2)


def _chunks(t: Tensor, chunk: int) -> Tensor:
    """(..., L, n) -> (..., L / chunk, chunk, n), zeros behind the last token."""
    return F.pad(t, (0, 0, 0, -t.shape[-2] % chunk)).unflatten(-2, (-1, chunk))


def performer_pytorch(d: int, m: int, causal: bool = False) -> Method:
    """That package's attention. Raises ImportError where it is not installed (a dev dependency)."""
    from performer_pytorch.performer_pytorch import FastAttention

    with redirect_stdout(io.StringIO()):  # it prints that its extension is not there
        return FastAttention(d, m, causal=causal)
