"""The softmax of sets.py, whose legend is that of this file: on a GPU in one kernel (fused.py), elsewhere chunk by
chunk in torch's own operators. native.py is the faster twin in float32 on CPUs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from crt_exp.attention.checks import transformed
from crt_exp.nearfar.engine import fused
from crt_exp.nearfar.engine.sets import Gathered, PlainKeys, Weighted, KeyWindow, plain_gather, seen, weighed

ROWS = 4096      # queries of a chunk, whose weights are to stay in a cache


def gather(q: Tensor, window: KeyWindow | None, sets: tuple[Weighted, ...], logsum: bool = False,
           precise: bool = True) -> Gathered:
    """What queries q (Z, n, r, d) gather from their window and the sets, the last of which is that of the cells. What
    a query gathers that sees no key means nothing. `logsum`: with the logs of the denominators. precise: no products of
    TF32 on a GPU.

    Differentiable in q, keys, values, sums and biases of sets; where that is asked for, the weights are kept. At once
    under transforms of torch.func, forward-mode differentiation and torch.compile."""
    flat = [t for part in sets for t in part]
    near = () if window is None else (window.keys, window.values)
    if torch.compiler.is_compiling() or transformed(q, *near, *flat):
        return plain_gather(q, window, sets)
    if fused.applies(q, *near, *flat):
        return fused.gather(q, window, sets, precise)
    return in_chunks(q, seen(window, sets, q), logsum)


def in_chunks(q: Tensor, parts: list[PlainKeys], logsum: bool) -> Gathered:
    """`weighed`, all blocks of several heads at a time, or several blocks of one."""
    n, r = q.shape[1:3]
    some = max(1, ROWS // (n * r)), min(n, max(1, ROWS // r))
    tensors = [q, *(t for part in parts for t in part)]
    return _cat([_cat([weighed(rows, [PlainKeys(*given[i:i + 3]) for i in range(0, len(given), 3)], logsum)
                       for rows, *given in zip(*(_split(t, n, some[1]) for t in of_heads))], 1)
                 for of_heads in zip(*(t.split(some[0]) for t in tensors))], 0)


def _split(t: Tensor, n: int, blocks: int) -> Sequence[Tensor]:
    """By so many of the n blocks; what is of all of them goes with each."""
    return t.split(blocks, 1) if t.shape[1] == n else [t] * -(-n // blocks)


def _cat(results: list[Gathered], dim: int) -> Gathered:
    if len(results) == 1:
        return results[0]
    return Gathered(*(None if t[0] is None else torch.cat(t, dim) for t in zip(*results)))
