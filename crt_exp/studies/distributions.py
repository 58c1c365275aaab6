"""How far a softmax over classes by random features is from the exact one: Wasserstein and Kolmogorov-Smirnov.

The text of HRF does not say of which one-dimensional laws its distances are, so there are both (math of HRF 4.2):
index: of the two laws over the class numbers 0 .. V - 1, W1 = sum_c |F_c - F^_c|, KS = max_c |F_c - F^_c|;
values: of the V probabilities of either softmax as two samples, as two-sample routines take two vectors.
Estimates below 0 count as a fraction, are set to 0, and rows are divided by their sum before the distances are taken.

Queries go through in blocks: n x V numbers are never held. Legend: n queries x, V classes with keys y, d dimension, M
features, B queries of a block.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from crt_exp.features import FeatureMap, Features
from crt_exp.features.base import Params
from crt_exp.features.blocks import Blocks, Selected
from crt_exp.nested import Nested

BLOCK = 64  # queries of a block: what is sorted then stays in the cache of a core


class Distances(NamedTuple):
    """Means over queries. negative: share of the estimates below 0. undefined: share of the queries all of whose
    estimates are 0 or below, which have no law and are in no distance."""

    w1_index: float
    ks_index: float
    w1_values: float
    ks_values: float
    negative: float
    undefined: float


class Estimate:
    """In proportion to phi_q(x).phi_k(y_c) for all classes c, of queries as they come; without overflow.

    Features are divided by the largest of all keys and queries multiplied by it; what then scales a row is left out.
    Of a hybrid, whose features are products, the two factors are multiplied over and not put together: R + D
    operations a pair in place of R D.
    """

    def __init__(self, phi: FeatureMap, noise: Nested, params: Params, keys: Tensor):
        """keys (V, d)."""
        self.bound = phi.bind(noise, params)
        blocks = blocks_of(self.bound.phi_k(keys))
        self.largest = [largest(base.log_scale) for _, base in blocks]     # (1, D), or (1, 1)
        self.keys = [(weight, scaled(base, base.log_scale - top)) for (weight, base), top in zip(blocks, self.largest)]

    def __call__(self, queries: Tensor) -> Tensor:
        """(B, d) -> (B, V)."""
        blocks = blocks_of(self.bound.phi_q(queries))
        logs = [base.log_scale + top for (_, base), top in zip(blocks, self.largest)]
        row = torch.stack([log.amax(-1, keepdim=True) for log in logs]).amax(0)
        parts = [product(weight, scaled(base, log - row), *keys)
                 for (weight, base), log, keys in zip(blocks, logs, self.keys)]
        return sum(parts[1:], start=parts[0])


def largest(log: Tensor) -> Tensor:
    """(..., V, D) -> (..., 1, D): over classes; finite, also of a cluster that no class belongs to."""
    return log.amax(-2, keepdim=True).clamp(min=torch.finfo(log.dtype).min)


def blocks_of(features: Features | Blocks) -> list[tuple[Tensor | None, Features]]:
    """Weights (L, R) and bases (L, D) whose products are the features; None: there is no weight. Features of clusters,
    most of which are 0, are written out."""
    if isinstance(features, Blocks) and not any(isinstance(block, Selected) for block in features.parts):
        return [(block.weight, block.base) for block in features.parts]
    return [(None, features if isinstance(features, Features) else features.dense())]


def scaled(features: Features, log_scale: Tensor) -> Tensor:
    """value * exp(log_scale), (L, D)."""
    return (features.value * log_scale.exp()).contiguous()


def product(weight: Tensor | None, base: Tensor, key_weight: Tensor | None, key_base: Tensor) -> Tensor:
    """(B, V): inner products of rows of weight (B, R) times base (B, D) with those of the keys."""
    dots = base @ key_base.mT
    return dots if weight is None else dots * (weight @ key_weight.mT)


def distances(queries: Tensor, keys: Tensor, estimate: Callable[[Tensor], Tensor], block: int = BLOCK) -> Distances:
    """Between softmax(x . y_c) and the estimate, which gives (B, V) for queries (B, d). queries (n, d), keys (V, d).

    Raises ValueError where an estimate is not finite, and where no query has one above 0.
    """
    sums, kept = np.zeros(6), 0
    for part in queries.split(block):
        of_part, defined = of_block(torch.softmax(part @ keys.T, -1), estimate(part))
        sums, kept = sums + of_part, kept + defined
    n, V = len(queries), len(keys)
    if not kept:
        raise ValueError(f"none of the {n} queries has an estimate above 0, so there is no law to compare")
    return Distances(*(sums[:4] / kept).tolist(), float(sums[4]) / (n * V), (n - kept) / n)


def of_block(exact: Tensor, estimates: Tensor) -> tuple[np.ndarray, int]:
    """Sums over rows of the four distances and of the negative estimates, and how many rows have a law."""
    if not bool(estimates.isfinite().all()):
        raise ValueError("an estimate of the softmax is not finite")
    negative = float((estimates < 0).sum())
    estimates = estimates.clamp(min=0)
    total = estimates.sum(-1, keepdim=True)
    defined = total[:, 0] > 0
    if not bool(defined.all()):
        exact, estimates, total = exact[defined], estimates[defined], total[defined]
    estimates = estimates / total
    by_index, by_values = over_index(exact, estimates), over_values(exact.numpy(), estimates.numpy())
    return np.array([*by_index, *by_values, negative, 0.0]), len(exact)


def over_index(p: Tensor, q: Tensor) -> tuple[float, float]:
    """W1 and KS of laws (B, V) over the class numbers, summed over rows."""
    apart = (p - q).cumsum(-1)[:, :-1].abs()
    return float(apart.sum(dtype=torch.float64)), float(apart.amax(-1).sum(dtype=torch.float64))


def over_values(p: np.ndarray, q: np.ndarray) -> tuple[float, float]:
    """W1 and KS of the samples p_1 .. p_V and q_1 .. q_V of each row (B, V) float32, not negative; summed over rows.

    Bits of such numbers, as whole numbers, have their order. With the sample a value is from as the lowest bit, one
    sort merges both; the running sum of +1 and -1 is V times the difference of their distribution functions.
    """
    V = p.shape[1]
    if V == 0 or not len(p):
        return 0.0, 0.0
    bits = np.concatenate([np.ascontiguousarray(part, np.float32).view(np.uint32) << 1 for part in (p, q)], 1)
    bits[:, V:] |= 1
    bits.sort(-1)
    apart = np.abs(np.cumsum(1 - 2 * (bits & 1).astype(np.int32), 1, dtype=np.int32))
    bits >>= 1
    values = bits.view(np.float32)
    gaps = np.diff(values)                                                           # 0 within equal values
    w1 = np.einsum("ij,ij->", apart[:, :-1], gaps, dtype=np.float64, casting="unsafe")
    largest = np.where(gaps > 0, apart[:, :-1], 0).max(-1)                           # behind the last value both are 1
    return float(w1) / V, float(largest.sum()) / V
