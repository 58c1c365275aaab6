"""Positive features with rows at or around the k-means centres of x' + y'.

Notation: x' = G x, y' = G^-T y with the balance G of dense.py; s = x' + y'; psi_w(x) = exp(w.x - |x|^2 / 2); centres
c_r, rows w_r, weights a_r, features phi_r = a_r^(1/2) psi_(w_r). Since

    psi_w(x') psi_w(y') = exp(x.y) exp(|w|^2 / 2) exp(-|s - w|^2 / 2),

estimates are accurate where unit Gaussians around the rows cover the s of queries and their attended keys.

weights="unbiased": w_r = c_r + omega_r is a sample of N(c_r, I). Importance sampling from the mixture of these
distributions gives a_r = 1 / sum_i exp(w_r.c_i - |c_i|^2 / 2). The estimate is unbiased for all G and c that do not
depend on the projections.

weights="fitted": w_r = c_r (bidirectional: plus fixed Gaussian noise of deviation 0.6). The a_r minimise the KL
divergence of estimated from exact attention on the fitted sequences. The estimate is biased, but closer to exact with
few features or many layers.

The method was derived for this project.
"""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from crt_exp.features.base import FeatureMap, check_finite, fit_sets, stack_params
from crt_exp.features.dense import Dense, balance
from crt_exp.features.exponential import sq_norm
from crt_exp.features.statistics import Moments, Statistics
from crt_exp.samplers import orthogonal
from crt_exp.validation import Count

KEYS = 2  # least number of sampled keys per query
PAIRS = 8  # least number of sampled pairs per centre
UNIFORM = 1 / 16  # share of keys sampled uniformly from all visible keys; the others by attention
ROUNDS = 4  # iterations of k-means
QUERIES = 128  # queries per sequence of the weight fit
UPDATES = 30  # iterations of the weight fit
DEVIATION = 0.6  # of fitted rows from their centres; causal attention: 0
TINY = 1e-8
LEAST = 1e-30  # of a fitted weight relative to its start
LARGEST = 1e30  # of a float32 factor
MOST_EXCESS = 10.0  # nats; beyond them the factors of visible keys are computed in blocks


class MixtureParams(NamedTuple):
    balance: Tensor  # G (..., d, d), symmetric
    centres: Tensor  # (..., m, d)
    log_weights: Tensor  # fitted log a_r + |w_r|^2 / 2, (..., 1, m)

    @property
    def shift(self) -> None:
        """None: the centres include the shift."""


@dataclass(frozen=True)
class Mixture(Dense):
    """Positive features with one row per k-means centre of x' + y'.

    Args:
        weights: "fitted" (biased) or "unbiased"; see the module docstring.
        size: number of projections; `of_size` sets it.

    Raises:
        ValueError: antithetic=True, or (in `fit`) no size.

    >>> phi = Mixture(size=2)
    >>> x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    >>> phi.fit(Statistics.of(x, x)).centres.shape
    torch.Size([2, 4])
    """

    weights: Literal["fitted", "unbiased"] = "fitted"
    size: Count | None = None

    on_vectors = on_sequences = True

    def __post_init__(self):
        super().__post_init__()
        if self.antithetic:
            raise ValueError("antithetic=true: not supported by Mixture; use antithetic=false")

    @property
    def fixes_scale(self) -> bool:
        return self.weights == "unbiased"

    @property
    def until_fitted(self) -> str:
        name = "FAVOR+" if self.weights == "unbiased" else "uniform attention"
        return f"using zero centres: {name}"

    def of_size(self, m: int) -> "Mixture":
        return replace(self, size=m)

    def unfitted(self, d: int) -> MixtureParams:
        size = self._centres()
        log_weights = torch.full((1, size), -math.log(size))
        return MixtureParams(torch.eye(d), torch.zeros(size, d), log_weights)

    def _centres(self) -> int:
        """Return the number of centres; raise ValueError if it is not set."""
        if self.size is None:
            raise ValueError("size=None: expected an integer >= 1; use mixture.of_size(m)")
        return self.size

    # ---- features

    def exponent(self, noise, params):
        centres = params.centres.to(noise.sq_norm)
        if noise.m != centres.shape[-2]:
            raise ValueError(
                f"noise: m={noise.m}, expected {centres.shape[-2]} as the fitted centres; use "
                f"mixture.of_size({noise.m})"
            )
        if self.weights == "fitted":
            return centres, None, (params.log_weights.to(centres) - sq_norm(centres).mT / 2) / 2
        rows = centres + noise.rows()
        log_density = (centres @ rows.mT - sq_norm(centres) / 2).logsumexp(-2, keepdim=True)
        return rows, None, -log_density / 2

    log_relative_second_moment = FeatureMap.log_relative_second_moment  # no closed form

    # ---- fit

    def fit(self, stats: Statistics) -> MixtureParams:
        """Fit to sets of vectors in which each query attends to all keys."""
        return fit_sets(stats, lambda x, y: self._fit_head(x[None], y[None], causal=False))

    def fit_sequences(
        self, x: Iterable[Tensor], y: Iterable[Tensor], causal: bool = False
    ) -> MixtureParams:
        """Fit to sequences, x (B, L, d) and y (B, S, d) for each head.

        Args:
            causal: queries attend to keys up to their own position, else to all keys of the sequence.
        """
        heads = []
        for queries, keys in zip(x, y, strict=True):
            heads.append(self._fit_head(queries.double(), keys.double(), causal))
        return stack_params(heads)

    def _fit_head(self, x: Tensor, y: Tensor, causal: bool) -> MixtureParams:
        check_finite(sq_norm(x.float()), "mixture")
        check_finite(sq_norm(y.float()), "mixture")
        size = self._centres()
        generator = torch.Generator().manual_seed(0)
        G = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        if self.kernel == "softmax":
            x_spread = Moments.from_vectors(x.flatten(0, 1)).covariance
            G = balance(x_spread, Moments.from_vectors(y.flatten(0, 1)).covariance)
            x = x @ G
            y = y @ torch.linalg.inv(G)
        seen = torch.ones(x.shape[1], y.shape[1], dtype=torch.bool, device=x.device)
        if causal:
            seen = seen.tril()
        exact = (x @ y.mT).masked_fill(~seen, -torch.inf).softmax(-1)
        n = max(KEYS, -(-PAIRS * size // exact[..., 0].numel()))
        s = x.unsqueeze(2) + sample_keys(y, exact, seen, n, generator)
        centres, count = lloyd_centres(s.flatten(0, 2), size)
        if self.weights == "unbiased":
            return MixtureParams(G, centres, torch.zeros_like(count))
        if not causal:
            rows = orthogonal(size, x.shape[-1], generator, dtype=torch.float64).rows()
            centres = centres + DEVIATION * rows.to(centres)
        some = torch.randperm(x.shape[1], generator=generator)[:QUERIES].sort().values.to(x.device)
        log_count = count.clamp(min=1).log()
        log_weights = fit_weights(x[:, some], y, centres, log_count, exact[:, some], seen[some])
        return MixtureParams(G, centres, log_weights)


def sample_keys(
    y: Tensor,
    exact: Tensor,
    seen: Tensor,
    n: int,
    generator: torch.Generator,
) -> Tensor:
    """Sample n keys per query, mostly by attention, (B, L, n, d)."""
    shares = torch.lerp(exact, (seen / seen.sum(-1, keepdim=True)).to(exact), UNIFORM)
    shares = shares.flatten(0, 1).cpu()
    places = torch.multinomial(shares, n, replacement=True, generator=generator).to(y.device)
    sequences = torch.arange(len(y), device=y.device).view(-1, 1, 1)
    return y[sequences, places.view(*exact.shape[:2], n)]


def lloyd_centres(points: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return centres (count, d) of points (n, d) and cluster sizes (1, count)."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    k_means = KMeans(count, init="random", n_init=1, max_iter=ROUNDS, random_state=0)
    with warnings.catch_warnings():
        # with few distinct points some centres are equal
        warnings.simplefilter("ignore", ConvergenceWarning)
        k_means.fit(points.float().cpu().numpy())
    labels = torch.from_numpy(k_means.labels_).long()
    sizes = torch.bincount(labels, minlength=count)[None]
    return torch.from_numpy(k_means.cluster_centers_).to(points), sizes.to(points)


class Block(NamedTuple):
    """Factors of pairs: K_ij = sum_r a_r q_ir k_jr, up to a factor for each query i."""

    queries: slice
    exact: Tensor  # (B, l, s), float32
    q: Tensor  # (B, l, m), float64
    k: Tensor  # (B, s, m), float32


def fit_weights(
    x: Tensor,
    y: Tensor,
    rows: Tensor,
    start: Tensor,
    exact: Tensor,
    seen: Tensor,
) -> Tensor:
    """Return log a_r + |w_r|^2 / 2 (1, m) of least KL divergence from exact attention.

    `exact` (B, L, S) is the attention of x (B, L, d) to y (B, S, d). `start` initialises the result. `seen` (L, S) is
    True for the first keys of each query; their number does not decrease.

    The divergence is mean_i (log sum_j K_ij - sum_j exact_ij log K_ij) + const, K = sum_r a_r psi_r(x) psi_r(y). Each
    update minimises an upper bound: the tangent of the first term plus the EM bound of the second. The divergence
    therefore never increases.
    """
    log_q = x @ rows.mT + start - sq_norm(rows).mT / 2
    log_k = y @ rows.mT - sq_norm(y) / 2
    blocks, sums = relative_factors(log_q, log_k, exact, seen)
    weights = torch.ones_like(log_q[0, 0])
    for _ in range(UPDATES):
        total = (sums * weights).sum(-1, keepdim=True)
        raised = torch.zeros_like(weights)
        for block in blocks:
            shares = (block.q * weights / total[:, block.queries]).clamp(max=LARGEST).float()
            ratio = block.exact / (shares @ block.k.mT + TINY)
            raised += (shares * (ratio @ block.k)).sum((0, 1))
        lowered = (sums / total).sum((0, 1)).clamp(min=TINY)
        weights = (raised / lowered).clamp(min=LEAST)
    return start + weights.log()


def relative_factors(
    log_q: Tensor,
    log_k: Tensor,
    exact: Tensor,
    seen: Tensor,
) -> tuple[list[Block], Tensor]:
    """Return the blocks of pairs, and sum_j q_ir k_jr over the visible keys, (B, L, m).

    Factors are at most 1. One block serves all pairs unless a later key of a row exceeds the visible keys so far that
    the visible terms of a query would underflow. Then the keys of a block are visible to all its queries.
    """
    counts = seen.sum(-1)
    visible = log_k.cummax(1).values[:, counts - 1]
    excess = (log_q + log_k.amax(1, keepdim=True)).amax(-1) - (log_q + visible).amax(-1)
    slices = [(slice(None), slice(None))]
    if float(excess.max()) > MOST_EXCESS:
        slices = visible_blocks(counts.tolist())
    most = torch.full_like(log_q[..., :1], -torch.inf)
    tops = []
    for queries, keys in slices:
        top = log_k[:, keys].amax(1, keepdim=True)
        largest = (log_q[:, queries] + top).amax(-1, keepdim=True)
        most[:, queries] = most[:, queries].maximum(largest)
        tops.append(top)
    blocks = []
    sums = torch.zeros_like(log_q)
    for (queries, keys), top in zip(slices, tops):
        q = (log_q[:, queries] + top - most[:, queries]).exp()
        k = (log_k[:, keys] - top).exp().float()
        sums[:, queries] += q * (seen[queries, keys].float() @ k)
        blocks.append(Block(queries, exact[:, queries, keys].float(), q, k))
    return blocks, sums


def visible_blocks(counts: list[int], low: int = 0, start: int = 0) -> list[tuple[slice, slice]]:
    """Return slices of queries and keys that cover each visible pair once.

    Args:
        counts: numbers of visible keys of consecutive queries, not decreasing.
        low: position of the first query.
        start: number of keys that other blocks cover.

    >>> visible_blocks([2, 2])
    [(slice(0, 2, None), slice(0, 2, None))]
    >>> visible_blocks([1, 2])[1:]  # the second query sees keys 0 and 1
    [(slice(1, 2, None), slice(0, 1, None)), (slice(1, 2, None), slice(1, 2, None))]
    """
    high = low + len(counts)
    if counts[0] == counts[-1]:
        return [(slice(low, high), slice(start, counts[0]))] if counts[0] > start else []
    middle = len(counts) // 2
    shared = counts[middle - 1]
    blocks = visible_blocks(counts[:middle], low, start)
    if shared > start:
        blocks.append((slice(low + middle, high), slice(start, shared)))
    return blocks + visible_blocks(counts[middle:], low + middle, shared)
