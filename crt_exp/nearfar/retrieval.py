"""Which keys of the past each query retrieves: those of the largest 8-bit scores.

Queries and keys (..., d) are turned alike by random signs and Hadamard matrices, which flattens what sticks out, and
become integers of at most 127 in magnitude, each vector by a step of its own. Sums of products of integers are exact in
whatever order they are made, and all that comes before is done element by element, so that C, PyTorch, processors and
GPUs choose the same keys, bit for bit. The C version is scores.c and retrieved.c. Derived here.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.nearfar.choice import largest
from crt_exp.nearfar.choice import HIDDEN, LEAST, SIGNS, TURNED

WHOLE = 127            # the largest integer
EXACT = 2**24          # float32 holds the integers up to it


class Integers(NamedTuple):
    """Vectors as integers times a step."""

    numbers: Tensor   # (..., d'), whole, d' = d rounded up to a multiple of TURNED
    step: Tensor      # (...), for the vectors as they are turned; 0 for those of 0

    @classmethod
    def of(cls, t: Tensor) -> "Integers":
        """Of float32 vectors (..., d). Halves are rounded away from 0: a doubled number is cut, and nothing is added to
        a product, which some processors do without rounding between."""
        t = turned(t.float())
        most = t.abs().amax(-1, keepdim=True)
        there = most > LEAST
        end = torch.full_like(most, WHOLE)  # a tensor: numbers are divided by way of a reciprocal, rounded twice
        double = torch.where(there, 2 * end / torch.where(there, most, 1.0), 0.0)
        cut = (t * double).trunc()
        step = torch.where(there, most / end, 0.0)
        return cls(((cut + cut.sign()) / 2).trunc(), step.squeeze(-1))


def turned(t: Tensor) -> Tensor:
    """Vectors (..., d), filled up with zeros to d', times random signs and, in runs of 2^i columns, as many as divide
    d', the Hadamard matrix: sqrt(2^i) times as long."""
    t = F.pad(t, (0, -t.shape[-1] % TURNED))
    d = t.shape[-1]
    run = d & -d
    t = (t * signs(d, t.device)).unflatten(-1, (-1, run))
    half = 1
    while half < run:
        even, odd = t.unflatten(-1, (-1, 2, half)).unbind(-2)
        t = torch.stack([even + odd, even - odd], -2).flatten(-3)
        half *= 2
    return t.flatten(-2)


def signs(d: int, device: torch.device) -> Tensor:
    """(d,) of -1 and 1: the highest bits of multiples of SIGNS modulo 2^32."""
    high = torch.arange(1, d + 1, device=device) * SIGNS >> 31
    return 1.0 - 2.0 * (high & 1)


def eight_bit_scores(q: Tensor, y: Tensor) -> Tensor:
    """Scores of queries (Z, ..., d) and keys (Z, S, d), (Z, ..., S): logits over the query's step."""
    (whole, _), (keys, step) = Integers.of(q), Integers.of(y)
    wide = torch.float32 if whole.shape[-1] * WHOLE**2 < EXACT else torch.float64
    products = whole.flatten(1, -2).to(wide) @ keys.mT.to(wide)
    return (products.float() * step.unsqueeze(1)).view(*q.shape[:-1], y.shape[1])


@torch.no_grad()
def retrieved(y: Tensor, member: Tensor, q: Tensor, open: int) -> Tensor:
    """Places (Z, ..., o) of the keys y (Z, S, d) that each query (Z, ..., d) retrieves, -1 where there are fewer: the
    `open` of the largest 8-bit scores of those that are `member` (Z, ..., S), of equal ones the first."""
    highest, places = largest(eight_bit_scores(q, y).masked_fill(~member, HIDDEN), min(open, y.shape[1]))
    return torch.where(highest > HIDDEN, places, -1)
