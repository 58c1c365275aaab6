"""Retrieval of single distant keys: synthetic heads and trained models.

task=far_key: heads in which each query gives most of its weight to one key. task=swap_copying: a model that copies
passages. Dense baselines reproduce the output of other methods, not their cost.

Notation: L tokens, H heads, R queries, d and dv dimensions of keys and values.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.attention import Baseline, exact_attention
from crt_exp.attention.checks import repeat_heads
from crt_exp.experiments.data.text import generator_of
from crt_exp.experiments.measure import Measurement, Records, SwapMeasurement, seeded
from crt_exp.experiments.measure.bench import (
    MIN_CONTEXT,
    TextBench,
    next_token_labels,
)
from crt_exp.experiments.measure.pretrained import load_pretrained, wikitext_rows
from crt_exp.experiments.tasks.base import task_class
from crt_exp.experiments.tasks.mlm import repeat_first_half
from crt_exp.mechanism import Mechanism
from crt_exp.nearfar.choice import rows_at
from crt_exp.registry import unknown
from crt_exp.validation import Count, FileName, Positive, Several, Whole, checked, split_words

ROWS = 4  # test rows of a seed of task=swap_copying, and calibration rows
# last keys that a query always attends to; keys of a page
NEAR = 64
PAGE = 16
# CELLS clusters at length AT; the number grows as the square root of the length
CELLS = 64
AT = 512


# ---- heads


@task_class
class FarKey(Measurement):
    """task=far_key: relative error of methods on heads with one important distant key.

    Heads are causal. Each of the last `queries` gives `weight` to one key at least `far` tokens back. Keys are iid
    normal, or in normal `clusters` with 64% of the variance between clusters. near-far has a number of clusters
    proportional to sqrt(length).

    methods: attention methods or dense baselines (keys of RANKS), with options in text.
    """

    metric = "error"
    uses = frozenset()

    length: Count
    heads: Count
    d: Count
    far: Count
    weight: Positive
    queries: Count
    clusters: Whole
    methods: Several[str]

    @torch.no_grad()
    def rows(self, mechanism: Mechanism | None, seed: int) -> Records:
        heads = self.sample_heads(seed)
        exact = exact_attention(*heads, causal=True)
        for method in self.methods:
            layer = self.mechanism(method).layer(self.heads, self.d, causal=True, scaling=1.0)
            output = layer.eval()(*heads)
            error = (output - exact).norm() / exact.norm()
            yield {"method": method, "error": float(error)}

    def mechanism(self, method: str) -> Mechanism:
        name, options = split_words(method)
        if name in RANKS:
            return dense_baseline(method)
        if name == "nearfar":
            options = {"cells": clusters_at(self.length), "exact_until": 0} | options
        return Mechanism.of(name, **options)

    def sample_heads(self, seed: int) -> tuple[Tensor, ...]:
        """Sample queries (1, H, R, d), keys (1, H, L, d) and values (1, H, L, d).

        The attention scale is 1.
        """
        g = seeded(seed)
        H = self.heads
        L = self.length
        k = torch.randn(H, L, self.d, generator=g)
        positions = torch.arange(L - self.queries, L)
        if self.clusters:
            cluster = torch.randint(self.clusters, (H, L), generator=g)
            centres = torch.randn(H, self.clusters, self.d, generator=g)
            k = 0.6 * k + 0.8 * rows_at(centres, cluster)
        share = torch.rand(H, self.queries, generator=g)
        target = (share * (positions - self.far)).long()
        hidden = torch.arange(L) > positions.unsqueeze(1)
        q = self.queries_for(k, target, hidden)
        v = torch.randn(H, L, self.d, generator=g)
        return q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)

    def queries_for(self, k: Tensor, target: Tensor, hidden: Tensor) -> Tensor:
        """Return queries (H, R, d) with attention weight `weight` on target keys.

        Queries have the direction of the keys k (H, L, d) at `target` (H, R), and are scaled by bisection; keys in
        `hidden` (R, L) are excluded. The weight is less if a longer key has a similar direction.
        """
        unit = F.normalize(rows_at(k, target), dim=-1)
        logits = (unit @ k.mT).masked_fill(hidden, -torch.inf)
        low = torch.zeros(*target.shape, 1)
        high = torch.full((*target.shape, 1), 50.0)
        for _ in range(40):
            middle = (low + high) / 2
            weights = (middle * logits).softmax(-1)
            is_low = weights.gather(-1, target.unsqueeze(-1)) < self.weight
            low = torch.where(is_low, middle, low)
            high = torch.where(is_low, high, middle)
        return low * unit


def clusters_at(length: int) -> int:
    return 8 * round(CELLS * (length / AT) ** 0.5 / 8)


# ---- a model that copies: passages that are repeated


def passages(start: str, split: str, length: int, seed: int) -> Tensor:
    """Return (ROWS, length) tokens; the second half of a row repeats the first half.

    The repetition starts at a random position of the first half.
    """
    text = wikitext_rows(start, split, length)
    g = generator_of(seed, length)
    order = torch.randperm(len(text), generator=g)
    rows = text[order[:ROWS]]
    uniform = torch.rand(2, len(rows), generator=g)
    return repeat_first_half(rows, 1.0, uniform)


@task_class
class SwapCopying(SwapMeasurement):
    """task=swap_copying: loss of a run of task=mlm after a swap, without training.

    `new`: nats per token of the first half of test rows. `copied`: nats per token of the second half, which repeats the
    first half, without its beginning. `gain`: new - copied. A dense `baseline` can replace the attention.
    """

    metric = "copied"

    start: FileName
    length: Count
    baseline: str | None

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        test = passages(self.start, "test", self.length, seed)
        train = passages(self.start, "train", self.length, 0)
        bench = TextBench(load_pretrained(self.start)[0], test, train)
        half = self.length // 2
        new = []
        copied = []
        swapped = replace(mechanism, seed=0)
        if self.baseline is not None:
            swapped = dense_baseline(self.baseline)
        with bench.approximated(swapped):
            for row in test.split(1):
                nats = bench.nats(*next_token_labels(row))
                new.append(float(nats[: half - 1].mean()))
                copied.append(float(nats[half + MIN_CONTEXT :].mean()))
        means = {"new": sum(new) / ROWS, "copied": sum(copied) / ROWS}
        yield {**means, "gain": means["new"] - means["copied"]}


# ---- dense baselines


def page_bounds(q: Tensor, k: Tensor) -> Tensor:
    """Bound the logits of pages of keys, after Quest (Tang et al., 2024)."""
    page = k.unflatten(2, (-1, PAGE))
    positive = q.clamp(min=0) @ page.amax(3).mT
    negative = q.clamp(max=0) @ page.amin(3).mT
    return (positive + negative).repeat_interleave(PAGE, -1)


def key_logits(q: Tensor, k: Tensor) -> Tensor:
    """Return exact logits: an oracle."""
    return q @ k.mT


RANKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "largest": key_logits,
    "pages": page_bounds,
}  # (queries, keys) -> rank of each key, (1, H, R, L)


def dense_baseline(text: str) -> Mechanism:
    """Return a baseline such as "largest keys=64"."""
    name, options = split_words(text)
    if name not in RANKS:
        raise unknown("task.baseline", name, RANKS)
    return Mechanism.of(DenseBaseline, rank=name, **options)


@checked("attention")
class DenseBaseline(Baseline):
    """Causal attention that retrieves keys by dense computations.

    rank: a key of RANKS. keys: number of keys of largest rank that a query retrieves in addition to the last NEAR and
    the first `first` keys. Queries are those of the last positions. Raises ValueError for padding masks.
    """

    def __init__(
        self,
        heads: int,
        d: int,
        *,
        rank: str,
        keys: Whole,
        first: Whole = 0,
        **sizes,
    ):
        super().__init__(heads, d, **sizes)
        self.rank = RANKS[rank]
        self.retrieved = keys
        self.first = first

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        if key_mask is not None and not bool(key_mask.all()):
            raise ValueError(
                "key_mask: not supported by dense baselines; expected rows of one length"
            )
        q = q * self.scaling
        k = repeat_heads(k, q.shape[1])
        v = repeat_heads(v, q.shape[1])
        positions = torch.arange(k.shape[2])
        queries = positions[len(positions) - q.shape[2] :]
        distance = queries.unsqueeze(1) - positions
        past = distance >= 0
        close = past & ((distance < NEAR) | (positions < self.first))
        rank = self.rank(q, k).masked_fill(~past | close, -torch.inf)
        count = min(self.retrieved, rank.shape[-1])
        best = rank.topk(count, -1).indices
        retrieved = torch.zeros_like(rank, dtype=torch.bool).scatter(-1, best, True)
        seen = past & (close | retrieved)
        logits = key_logits(q, k).masked_fill(~seen, -torch.inf)
        return logits.softmax(-1) @ v
