"""The keys that a softmax of near-far attention in both directions or across runs over, a window around each block of
queries and sets of weighted keys, and that softmax in torch's own operators, chunk by chunk. native.py is the faster
twin in float32 on CPUs.

Legend: Z = batch x key heads, n blocks of r queries q (the query heads of a group one after the other) and of b keys,
W = 3 b keys of a window, m keys of a set, d, dv. With logits q.k + bias the weight of a key of a set is
N e^logit and what it adds V e^logit: a plain key has N = 1 and V = v, one that stands for many their sums. So

    out = (sum_near e^(q.k) v + sum_sets e^(q.k + bias) V) / (sum_near e^(q.k) + sum_sets e^(q.k + bias) N).

Derived here.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.checks import transformed
from crt_exp.nearfar.engine.constants import HIDDEN, LEAST


ROWS = 4096      # queries of a chunk, whose weights are to stay in a cache


class KeyWindow(NamedTuple):
    """Keys that lie around the queries: those of a block see its own, the one before and the next."""

    keys: Tensor      # (Z, n, b, d)
    values: Tensor    # (Z, n, b, dv)
    bias: Tensor      # (Z, n, b): 0 or HIDDEN, added to the logits of each key


class Weighted(NamedTuple):
    """A set of weighted keys, of all blocks of a head where a dimension n is 1."""

    keys: Tensor    # (Z, n or 1, m, d)
    sums: Tensor    # (Z, n or 1, m, dv + 1): [V, N]
    bias: Tensor    # (Z, n or 1, m)


class Gathered(NamedTuple):
    out: Tensor       # (Z, n, r, dv)
    share: Tensor     # (Z, n, r, 1): how much of the weight of each query lies in the last set


class PlainKeys(NamedTuple):
    """Keys that queries see as plain ones: a window or a set, of all blocks of a head where a dimension n is 1."""

    keys: Tensor      # (Z, n or 1, m, d)
    values: Tensor    # (Z, n or 1, m, dv), of one block or of all whatever the keys are; so is
    bias: Tensor      # (Z, n or 1, 1, m)


def gather(q: Tensor, window: KeyWindow | None, sets: tuple[Weighted, ...]) -> Gathered:
    """What queries q (Z, n, r, d) gather from their window and the sets, the last of which is that of the cells. What
    a query gathers that sees no key means nothing.

    Differentiable in q, keys, values, sums and biases of sets; where that is asked for, the weights are kept. At once
    under transforms of torch.func, forward-mode differentiation and torch.compile; else all blocks of several heads at
    a time, or several blocks of one."""
    parts = _seen(window, sets, q)
    tensors = [q, *(t for part in parts for t in part)]
    if torch.compiler.is_compiling() or transformed(*tensors):
        return _weighed(q, parts)
    n, r = q.shape[1:3]
    some = max(1, ROWS // (n * r)), min(n, max(1, ROWS // r))
    return _cat([_cat([_weighed(rows, [PlainKeys(*given[i:i + 3]) for i in range(0, len(given), 3)])
                       for rows, *given in zip(*(_split(t, n, some[1]) for t in of_heads))], 1)
                 for of_heads in zip(*(t.split(some[0]) for t in tensors))], 0)


def _split(t: Tensor, n: int, blocks: int) -> Sequence[Tensor]:
    """By so many of the n blocks; what is of all of them goes with each."""
    return t.split(blocks, 1) if t.shape[1] == n else [t] * -(-n // blocks)


def _cat(results: list[Gathered], dim: int) -> Gathered:
    return results[0] if len(results) == 1 else Gathered(*(torch.cat(t, dim) for t in zip(*results)))


def _seen(window: KeyWindow | None, sets: tuple[Weighted, ...], q: Tensor) -> list[PlainKeys]:
    """A window around each block of queries q (Z, n, r, d), and the sets."""
    near = []
    if window is not None:
        bias = _around(window.bias.unsqueeze(-1), HIDDEN).mT.to(q.dtype)
        near = [PlainKeys(_around(window.keys), _around(window.values), bias)]
    return near + [PlainKeys(keys, sums[..., :-1] * _over(sums[..., -1:]), (bias + _log_weight(sums)).unsqueeze(-2))
                   for keys, sums, bias in sets]


def _weighed(q: Tensor, parts: list[PlainKeys]) -> Gathered:
    """What queries q (Z, n, r, d) gather of all that they see."""
    logits = torch.cat([_products(q, keys.mT, bias) for keys, _, bias in parts], -1)
    shares = logits.softmax(-1).split([part.keys.shape[2] for part in parts], -1)
    out = None
    for share, part in zip(shares, parts):
        out = _products(share, part.values, out)
    return Gathered(out, shares[-1].sum(-1, keepdim=True))


def _products(a: Tensor, b: Tensor, add: Tensor | None = None) -> Tensor:
    """a (Z, n, r, k) times b (Z, n or 1, k, l), and `add` (Z, n or 1, 1 or r, l): one product for all blocks where b is
    of all."""
    dim, shape = int(b.shape[1] == 1), a.shape[:3]
    rows, b = a.flatten(dim, dim + 1), b.flatten(0, 1)
    if add is None:
        return torch.bmm(rows, b).view(*shape, b.shape[-1])
    add = add.expand(*shape, -1) if dim and add.shape[1] > 1 else add
    return torch.baddbmm(add.flatten(dim, dim + 1), rows, b).view(*shape, b.shape[-1])


def _around(t: Tensor, beyond: float = 0.0) -> Tensor:
    """The windows of blocks (Z, n, b, .), copied: (Z, n, W, .); `beyond` the ends."""
    padded = torch.nn.functional.pad(t, (0, 0, 0, 0, 1, 1), value=beyond)
    return torch.cat([padded[:, i:i + t.shape[1]] for i in range(3)], 2)


def _log_weight(sums: Tensor) -> Tensor:
    N = sums[..., -1]
    return torch.where(N > LEAST, N.clamp(min=LEAST).log(), HIDDEN)


def _over(N: Tensor) -> Tensor:
    """1 / N, 0 where it counts as none."""
    return torch.where(N > LEAST, 1 / N.clamp(min=LEAST), 0.0)
