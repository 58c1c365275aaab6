"""Retrieval of keys by 8-bit scores, and the weight of the rest of their clusters.

Random signs and Hadamard matrices rotate queries and keys (..., d), which flattens outlying entries. Each vector then
becomes integers of magnitude at most 127 times a step of its own.
Sums of integer products are exact in any order, and all earlier steps are elementwise. C, PyTorch, processors and GPUs
therefore choose the same keys, bit for bit.
The C versions are scores.c and causal_forward.c. The method was derived for this project.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.nearfar.choice import (
    MASKED,
    MIN_SD,
    MIN_WEIGHT,
    QUANTIZED_PAD,
    SIGN_FACTOR,
    find_largest,
)

MAX_INTEGER = 127
EXACT = 2**24  # float32 represents all integers up to this


class Integers(NamedTuple):
    """Vectors as integers times a step."""

    numbers: Tensor  # (..., d'), integers; d' = d rounded up to a multiple of QUANTIZED_PAD
    step: Tensor  # (...), of the rotated vectors; 0 for zero vectors


def quantize(t: Tensor) -> Integers:
    """Quantize float32 vectors (..., d).

    Halves are rounded away from 0, by truncating a doubled number. Nothing is added to a product, because some
    processors fuse the two without rounding between.
    """
    rotated = rotate(t.float())
    largest = rotated.abs().amax(-1, keepdim=True)
    nonzero = largest > MIN_WEIGHT
    # a tensor: division by a Python number rounds twice, through a reciprocal
    end = torch.full_like(largest, MAX_INTEGER)
    doubled_scale = torch.where(nonzero, 2 * end / torch.where(nonzero, largest, 1.0), 0.0)
    doubled = (rotated * doubled_scale).trunc()
    numbers = ((doubled + doubled.sign()) / 2).trunc()
    step = torch.where(nonzero, largest / end, 0.0)
    return Integers(numbers, step.squeeze(-1))


def rotate(t: Tensor) -> Tensor:
    """Rotate vectors (..., d) by random signs and Hadamard matrices.

    Vectors are padded with zeros to d'. The matrices act on runs of 2^i columns, the largest power that divides d'.
    They are not normalized: lengths grow by sqrt(2^i).
    """
    t = F.pad(t, (0, -t.shape[-1] % QUANTIZED_PAD))
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
    """Return (d,) signs -1 and 1.

    They are the highest bits of multiples of SIGN_FACTOR modulo 2^32.
    """
    high = torch.arange(1, d + 1, device=device) * SIGN_FACTOR >> 31
    return 1.0 - 2.0 * (high & 1)


def eight_bit_scores(q: Tensor, y: Tensor) -> Tensor:
    """Return the 8-bit scores (Z, ..., S): logits over the step of the query.

    q (Z, ..., d), y (Z, S, d).
    """
    queries = quantize(q).numbers
    keys = quantize(y)
    largest_sum = queries.shape[-1] * MAX_INTEGER**2
    exact_dtype = torch.float32 if largest_sum < EXACT else torch.float64
    rows = queries.flatten(1, -2).to(exact_dtype)
    products = rows @ keys.numbers.mT.to(exact_dtype)
    scores = products.float() * keys.step.unsqueeze(1)
    return scores.view(*q.shape[:-1], y.shape[1])


@torch.no_grad()
def retrieved_positions(y: Tensor, member: Tensor, q: Tensor, count: int) -> Tensor:
    """Return the positions (Z, ..., o) of retrieved keys, -1 where there are fewer.

    Each query (Z, ..., d) retrieves the `count` keys of y (Z, S, d) with the largest 8-bit scores among `member` (Z,
    ..., S); of equal scores the first.
    """
    scores = eight_bit_scores(q, y).masked_fill(~member, MASKED)
    highest, positions = find_largest(scores, min(count, y.shape[1]))
    return torch.where(highest > MASKED, positions, -1)


# ---- rest of the clusters


@torch.no_grad()
def log_mean_below(mu: Tensor, sd: Tensor, threshold: Tensor) -> Tensor:
    """Return the log of the mean of e^l over l < threshold for normal l. No gradient.

    l has mean mu and standard deviation sd. The result is at most the threshold; it is mu if sd is 0 and the threshold
    is larger. With t = (threshold - mu) / sd it is mu + sd^2 / 2 + log Phi(t - sd) - log Phi(t). For negative arguments
    of Phi the squares, which would cancel, are removed: log Phi(-u) = -u^2 / 2 + log(erfcx(u / sqrt 2) / 2).
    """
    sd = sd.clamp(min=MIN_SD)
    t = (threshold - mu) / sd
    between = torch.where(t > 0, threshold - t.square() / 2, threshold)
    peak = torch.where(t >= sd, mu + sd.square() / 2, between)
    return peak + _log_phi(t - sd) - _log_phi(t)


def _log_phi(u: Tensor) -> Tensor:
    """Return log Phi(u), without the term -u^2 / 2 for negative u."""
    below = torch.special.erfcx(u.clamp(max=0) / -(2**0.5)).div(2)
    above = torch.special.ndtr(u.clamp(min=0))
    return torch.where(u < 0, below, above).log()


def cluster_remainder(
    mu: Tensor,
    sd: Tensor,
    number: Tensor,
    retrieved: Tensor,
    cluster: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return how many keys of each cluster remain, and the log weight of each.

    Both are (..., K); the log weight is -inf in empty clusters. The logits of the remaining keys lie below the least
    retrieved logit. Each counts as the mean of e^l over a normal distribution below that logit.
    The correction to mu carries no gradient, because the remaining keys are fixed and move with the mean.

    Args:
        mu: logits of the cluster means.
        sd: standard deviations of the logits in each cluster.
        number: keys of each cluster before retrieval.
        retrieved: logits (..., o) of the retrieved keys, inf for none.
        cluster: clusters of the retrieved keys.
    """
    with torch.no_grad():
        counted = retrieved.isfinite().to(mu.dtype)
        remaining = number - torch.zeros_like(mu).scatter_add(-1, cluster, counted)
        correction = log_mean_below(mu, sd, retrieved.amin(-1, keepdim=True)) - mu
    return remaining, torch.where(remaining > 0, mu + correction, -torch.inf)
