"""The keys that a softmax of near-far attention runs over, a window around each block of queries and sets of weighted
keys, and that softmax in torch's own operators.

Legend: Z = batch x key heads, n blocks of r queries q (the query heads of a group one after the other), N blocks of b
keys, W = 2 b or 3 b keys of a window, m keys of a set, d, dv. With logits q.k + bias the weight of a key of a set is
N e^logit and what it adds V e^logit: a plain key has N = 1 and V = v, one that stands for many their sums. So

    out = (sum_near e^(q.k) v + sum_sets e^(q.k + bias) V) / (sum_near e^(q.k) + sum_sets e^(q.k + bias) N).

windows.py does so chunk by chunk. Derived here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.checks import check_gradient
from crt_exp.nearfar.engine.constants import HIDDEN, LEAST


class KeyWindow(NamedTuple):
    """Keys that lie around the queries: those of a block see its own and the one before, and, where `after`, the next.

    The queries are those of the last n of the N blocks. hidden (r, W) is added to the logits, and bias (Z, N, b), which
    is 0 or HIDDEN, to those of each key."""

    keys: Tensor                    # (Z, N, b, d)
    values: Tensor                  # (Z, N, b, dv)
    bias: Tensor                    # (Z, N, b)
    after: bool
    hidden: Tensor | None = None    # (r, W)

    @property
    def blocks(self) -> int:
        return 3 if self.after else 2


class Weighted(NamedTuple):
    """A set of weighted keys, of all blocks of a head where a dimension n is 1."""

    keys: Tensor    # (Z, n or 1, m, d)
    sums: Tensor    # (Z, n or 1, m, dv + 1): [V, N]
    bias: Tensor    # (Z, n or 1, m)


class Gathered(NamedTuple):
    out: Tensor       # (Z, n, r, dv)
    share: Tensor     # (Z, n, r, 1): how much of the weight of each query lies in the last set
    logsum: Tensor | None    # (Z, n, r, 1): the log of the denominator


class PlainKeys(NamedTuple):
    """Keys that queries see as plain ones: a window or a set, of all blocks of a head where a dimension n is 1."""

    keys: Tensor      # (Z, n or 1, m, d)
    values: Tensor    # (Z, n or 1, m, dv), of one block or of all whatever the keys are; so is
    bias: Tensor      # (Z, n or 1, 1 or r, m)


def plain_gather(q: Tensor, window: KeyWindow | None, sets: tuple[Weighted, ...]) -> Gathered:
    """What queries q (Z, n, r, d) gather, at once, with all weights in memory."""
    return weighed(q, seen(window, sets, q), True)


def seen(window: KeyWindow | None, sets: tuple[Weighted, ...], q: Tensor) -> list[PlainKeys]:
    """A window around each block of queries q (Z, n, r, d), and the sets."""
    near = []
    if window is not None:
        bias = _around(window.bias.unsqueeze(-1), window, q.shape[1], HIDDEN).mT.to(q.dtype)
        bias = bias if window.hidden is None else bias + window.hidden
        near = [PlainKeys(*(_around(t, window, q.shape[1]) for t in (window.keys, window.values)), bias)]
    return near + [PlainKeys(keys, sums[..., :-1] * over(sums[..., -1:]), (bias + log_weight(sums)).unsqueeze(-2))
                   for keys, sums, bias in sets]


def weighed(q: Tensor, parts: list[PlainKeys], logsum: bool) -> Gathered:
    """What queries q (Z, n, r, d) gather of all that they see. logsum: with the logs of the denominators."""
    logits = torch.cat([_products(q, keys.mT, bias) for keys, _, bias in parts], -1)
    shares = logits.softmax(-1).split([part.keys.shape[2] for part in parts], -1)
    out = None
    for share, part in zip(shares, parts):
        out = _products(share, part.values, out)
    return Gathered(out, shares[-1].sum(-1, keepdim=True), logits.logsumexp(-1, keepdim=True) if logsum else None)


def _products(a: Tensor, b: Tensor, add: Tensor | None = None) -> Tensor:
    """a (Z, n, r, k) times b (Z, n or 1, k, l), and `add` (Z, n or 1, 1 or r, l): one product for all blocks where b is
    of all."""
    dim, shape = int(b.shape[1] == 1), a.shape[:3]
    rows, b = a.flatten(dim, dim + 1), b.flatten(0, 1)
    if add is None:
        return torch.bmm(rows, b).view(*shape, b.shape[-1])
    add = add.expand(*shape, -1) if dim and add.shape[1] > 1 else add
    return torch.baddbmm(add.flatten(dim, dim + 1), rows, b).view(*shape, b.shape[-1])


def _around(t: Tensor, window: KeyWindow, n: int, beyond: float = 0.0) -> Tensor:
    """The windows of the last n of the blocks (Z, N, b, .), copied: (Z, n, W, .); `beyond` the ends."""
    padded = torch.nn.functional.pad(t, (0, 0, 0, 0, 1, 1), value=beyond)
    start = t.shape[1] - n
    return torch.cat([padded[:, start + i:start + i + n] for i in range(window.blocks)], 2)


def log_weight(sums: Tensor) -> Tensor:
    N = sums[..., -1]
    return torch.where(N > LEAST, N.clamp(min=LEAST).log(), HIDDEN)


def check_backward(*grads: Tensor | None) -> None:
    """Of a backward pass in closed form. Raises ValueError for a batch of gradients (see `check_gradient`) and
    NotImplementedError where the pass itself is to be differentiated."""
    for grad in grads:
        if grad is not None:
            check_gradient(grad)
    if torch.is_grad_enabled():
        raise NotImplementedError("near-far attention has no second derivatives by torch.autograd: use torch.func, "
                                  "such as torch.func.hessian, which goes through plain operations")


def over(N: Tensor) -> Tensor:
    """1 / N, 0 where it counts as none."""
    return torch.where(N > LEAST, 1 / N.clamp(min=LEAST), 0.0)
