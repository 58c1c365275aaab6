"""How much of its weight a causal query may have on keys that it did not read: an upper bound, made of looks alone.

With r the columns of a Hadamard matrix, a query turned as in looks.py is s a + e and a key s' b + e', a and b of whole
numbers, and their product t(q).t(y) is r q.y. So

    |r q.y - s s' a.b| <= |s a| |e'| + |e| |t(y)|,

where |e| and |t| are known of each vector. Summed over the keys that were not read, e^logit is at most what this gives,
and over the others it is known, as they were read: that bounds the weight of the first, by U. The weights that are used
instead give the cells a share F. Both are distributions over the keys, alike up to a factor on those that were read, so
that what one has more than the other sums up to at most max(U, F), the `bound`; and outputs differ by no more than the
bound times the largest distance of two values. Rounding is in it. The twin of unread.c. Derived here.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.nearfar.engine.constants import LEAST, ROUNDED, SUMMED
from crt_exp.nearfar.looks import Whole, turned


class Apart(NamedTuple):
    """Turned vectors (..., d): whole numbers times steps, as they are looked at, and what these have lost."""

    near: Tensor      # (..., d'), float64
    size: Tensor      # (...): |t|
    lost: Tensor      # (...): |t - near| at most

    @classmethod
    def of(cls, t: Tensor) -> "Apart":
        numbers, step = Whole.of(t)
        near, exact = numbers.double() * step.double().unsqueeze(-1), turned(t.double())
        size = torch.linalg.vector_norm(exact, dim=-1)
        return cls(near, size, torch.linalg.vector_norm(exact - near, dim=-1) + ROUNDED * size)


def log_unread(q: Tensor, y: Tensor, unread: Tensor) -> Tensor:
    """What the log of the sum of e^logit over the keys y (Z, S, d) that are `unread` (Z, m, r, S) by queries
    (Z, m, r, d) is at most: (Z, m, r, 1), -inf where none is."""
    asks, keys = Apart.of(q.flatten(1, 2)), Apart.of(y)
    columns = keys.near.shape[-1] & -keys.near.shape[-1]
    apart = torch.linalg.vector_norm(asks.near, dim=-1).unsqueeze(-1) * keys.lost.unsqueeze(1)
    apart = apart + asks.lost.unsqueeze(-1) * keys.size.unsqueeze(1)
    most = (asks.near @ keys.near.mT + apart) / columns
    return _chord(most).view(unread.shape).masked_fill(~unread, -torch.inf).logsumexp(-1, keepdim=True)


def _chord(t: Tensor) -> Tensor:
    """The log of what takes the place of e^t: 2^(t log2 e) on a chord from one whole number to the next, 6% more at
    most, which costs C no exponential."""
    logs = t / math.log(2)
    return logs.floor() * math.log(2) + (logs - logs.floor()).log1p()


def bound_of(unread: Tensor, logsum: Tensor, share: Tensor, reach: Tensor, d: int) -> Tensor:
    """max(U, F), at most 1: `log_unread`, the log of all that queries sum up, how much of that lies in cells, and what
    no logit that they read exceeds in magnitude, of one shape."""
    rounding = (d + 16) * 2.0**-24 * reach                          # of logits of float32
    read = logsum.double() + (1 - SUMMED - share.double()).clamp(min=0).log() - rounding
    bound = torch.maximum(torch.sigmoid(unread - read), share.double()).clamp(max=1)
    return torch.where(unread > -torch.inf, bound.clamp(min=LEAST), bound)      # float32 holds it


def reaches(q: Tensor, y: Tensor, place: Tensor) -> Tensor:
    """|q| times the largest |y| up to its place: queries (Z, m, r, d), keys (Z, S, d) and places (m, r); (Z, m, r, 1).
    """
    longest = torch.linalg.vector_norm(y.double(), dim=-1).cummax(1).values
    size = torch.linalg.vector_norm(q.double(), dim=-1)
    return (size * longest[:, place.clamp(max=y.shape[1] - 1)]).unsqueeze(-1)
