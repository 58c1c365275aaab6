"""Which keys each query retrieves, by 8-bit scores, and what its clusters keep.

Queries and keys (..., d) are turned alike by random signs and Hadamard matrices, which flattens what sticks out, and
become integers of at most 127 in magnitude, each vector by a step of its own. Sums of products of integers are exact in
whatever order they are made, and all that comes before is done element by element, so that C, PyTorch, processors and
GPUs choose the same keys, bit for bit. The C versions are scores.c and causal_forward.c. Derived here.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.nearfar.choice import HIDDEN, LEAST, SHARPEST, SIGNS, TURNED, largest

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
    highest, positions = largest(eight_bit_scores(q, y).masked_fill(~member, HIDDEN), min(open, y.shape[1]))
    return torch.where(highest > HIDDEN, positions, -1)


# ---- what is left in clusters


@torch.no_grad()
def log_mean_below(mu: Tensor, sd: Tensor, bar: Tensor) -> Tensor:
    """Log of the mean of e^l over l < bar, where l is normal with that mean and deviation: at most `bar`, and mu where
    sd is 0 and bar above it. No gradient.

    With t = (bar - mu) / sd it is mu + sd^2 / 2 + log Phi(t - sd) - log Phi(t). Where Phi's arguments are negative the
    squares, which would cancel, are taken out: log Phi(-u) = -u^2 / 2 + log(erfcx(u / sqrt 2) / 2).
    """
    sd = sd.clamp(min=SHARPEST)
    t = (bar - mu) / sd
    whole = torch.where(t >= sd, mu + sd.square() / 2, torch.where(t > 0, bar - t.square() / 2, bar))
    return whole + _log_phi(t - sd) - _log_phi(t)


def _log_phi(u: Tensor) -> Tensor:
    """log Phi(u), without -u^2 / 2 where u is negative."""
    below = torch.special.erfcx(u.clamp(max=0) / -(2**0.5)).div(2)
    return torch.where(u < 0, below, torch.special.ndtr(u.clamp(min=0))).log()


def left_in_clusters(mu: Tensor, sd: Tensor, number: Tensor, exact: Tensor, cluster: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the `number` keys of each cluster are left where queries have retrieved those of logits `exact` (...,
    o), inf for none, in these clusters; and the log of what each of them weighs, -inf where none is left, both (...,
    K). mu: the logits of the means of clusters; sd: what those of their keys deviate by.

    What is left lies below the least logit that is retrieved: each counts as the mean of e^l over those of a normal
    distribution that do. What that adds to mu carries no gradient: the keys that are left are fixed, and move with the
    mean."""
    with torch.no_grad():
        left = number - torch.zeros_like(mu).scatter_add(-1, cluster, exact.isfinite().to(mu.dtype))
        more = log_mean_below(mu, sd, exact.amin(-1, keepdim=True)) - mu
    return left, torch.where(left > 0, mu + more, -torch.inf)
