"""The keys that a softmax of near-far attention runs over, a window around each block of queries and sets of weighted
keys, and that softmax in torch's own operators.

Legend: Z = batch x key heads, n blocks of r queries q (the query heads of a group one after the other), N blocks of b
keys, W = 2 b or 3 b keys of a window, m keys of a set, d, dv. With logits q.k + bias the weight of a key of a set is
N e^logit and what it adds V e^logit: a plain key has N = 1 and V = v, one that stands for many their sums. So

    out = (sum_near e^(q.k) v + sum_sets e^(q.k + bias) V) / (sum_near e^(q.k) + sum_sets e^(q.k + bias) N).

windows.py computes it chunk by chunk. Derived here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.checks import check_gradient
from crt_exp.nearfar.engine.constants import HIDDEN, LEAST


class Window(NamedTuple):
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


def plain_gather(q: Tensor, window: Window | None, sets: tuple[Weighted, ...]) -> Gathered:
    """What queries q (Z, n, r, d) gather, at once, with all weights in memory."""
    n, logits, values = q.shape[1], [], []
    if window is not None:
        near = q @ _around(window.keys, window, n).mT + near_bias(window, n)
        logits.append(near if window.hidden is None else near + window.hidden)
        values.append(_around(window.values, window, n))
    weights = [log_weight(part.sums) for part in sets]
    logits += [q @ part.keys.mT + (part.bias + weight)[..., None, :] for part, weight in zip(sets, weights)]
    values += [part.sums[..., :-1] * over(part.sums[..., -1:]) for part in sets]
    logits = torch.cat(logits, -1)
    shares = logits.softmax(-1).split([v.shape[-2] for v in values], -1)
    out = sum(share @ v for share, v in zip(shares, values))
    return Gathered(out, shares[-1].sum(-1, keepdim=True), logits.logsumexp(-1, keepdim=True))


def _around(t: Tensor, window: Window, n: int) -> Tensor:
    """The windows of the last n of the blocks (Z, N, b, .), copied: (Z, n, W, .); zeros beyond the ends."""
    padded = torch.nn.functional.pad(t, (0, 0, 0, 0, 1, 1))
    start = t.shape[1] - n
    return torch.cat([padded[:, start + i:start + i + n] for i in range(window.blocks)], 2)


def near_bias(window: Window, n: int) -> Tensor:
    """(Z, n, 1, W)."""
    padded = torch.nn.functional.pad(window.bias, (0, 0, 1, 1), value=HIDDEN)
    start = window.bias.shape[1] - n
    return torch.cat([padded[:, start + i:start + i + n] for i in range(window.blocks)], -1).unsqueeze(-2)


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
