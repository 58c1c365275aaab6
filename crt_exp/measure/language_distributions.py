"""The distribution over all words of a language model, estimated by random features: how far it is from the softmax.

A model is a run of task=ptb. Its queries x are the outputs at every word of the test split, its keys y the embeddings
of all words; both are divided by the square root of the temperature, so that the kernel is exp(x.y).

Distances are those of the two distributions over the class numbers 0 .. V - 1, W1 = sum_c |F_c - F^_c| and
KS = max_c |F_c - F^_c|; the text of HRF (4.2) does not say of which one-dimensional distributions its own are.
Estimates below 0 count as a fraction, are set to 0, and rows are divided by their sum before the distances are taken.

Queries go through in blocks: n x V numbers are never held. Legend: n queries x, V classes with keys y, d dimension, M
features, B queries of a block.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crt_exp.data.text import IGNORED
from crt_exp.features import FeatureMap, Features, Statistics
from crt_exp.features.base import Params
from crt_exp.features.blocks import Blocks, Selected
from crt_exp.hints import Count, Several
from crt_exp.measure.base import Measurement
from crt_exp.mechanism import Mechanism
from crt_exp.models import lstm
from crt_exp.nested import Nested
from crt_exp.runner.configuration import kept_task
from crt_exp.runner.run import read_records
from crt_exp.schema import checked
from crt_exp.tasks.base import Reader

SPLIT, FITTED = "test", 16  # parameters are fitted to every sixteenth query
BLOCK = 64                  # queries of a block, which then stays in the cache of a core


@checked("task")
class ClassDistributions(Measurement):
    """task=class_distributions: distances between the softmax over words of a run of task=ptb and its estimate, for
    each m (HRF Figures 3 and 8, Tables 4 and 5). With attention=exact those of the uniform distribution and of the
    words' shares in the training text, which know no query, and what the model has learned.

    start: the run directory. every: of the words of the test split, each one so far from the last. ms: projections;
    hybrids, which multiply features, take as many fewer for each base.
    """

    metric = "ks"

    def __init__(self, start: str, every: Count, ms: Several[Count]):
        self.start, self.every, self.ms = start, every, list(ms)

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        task, x, y = vectors_of(self.start)
        queries, stats = x[::self.every].contiguous(), Statistics.of(x[::FITTED].contiguous(), y)
        if mechanism.estimates:
            phi = mechanism.map("softmax")
            for m in self.ms:
                made = mechanism.projecting(m // mechanism.features.content.get("n", 1))
                noise = made.noise(y.shape[1], torch.Generator().manual_seed(seed))
                found = distances(queries, y, Estimate(phi, noise, phi.fit(stats), y))
                yield {"m": m, **found._asdict()}
            return
        yield learned(self.start) | {"query_length": float(stats.x.mean_norm)**0.5,
                                     "key_length": float(stats.y.mean_norm)**0.5,
                                     "squared_norm": float(stats.mean_sq_sum)}
        for name, shares in [("uniform", torch.ones(len(y))), ("unigram", torch.from_numpy(task.unigram).float())]:
            found = distances(queries, y, lambda part, shares=shares: shares.expand(len(part), -1))
            yield from ({"method": name, "m": m, **found._asdict()} for m in self.ms)


def learned(start: str) -> dict[str, float]:
    records = read_records(Path(start) / "metrics.jsonl")
    return {"validation_perplexity": min(each["perplexity"] for each in records if each["split"] == "validation"),
            "loss": records[-1]["loss"], "unigram_loss": records[-1]["unigram_loss"]}


@lru_cache(maxsize=1)
def vectors_of(start: str) -> tuple[Any, Tensor, Tensor]:
    """The task of a run, x (n, d) at all words of the test split in their order, and y (V, d)."""
    task, kept = kept_task(start), lstm.load(start, "the model")
    return (task, outputs(kept.body, task) / kept.temperature**0.5,
            kept.body.embedding.weight.detach() / kept.temperature**0.5)


@torch.no_grad()
def outputs(body: lstm.WordLSTM, task: Any) -> Tensor:
    """(n, d) float32: column after column, as the text goes."""
    state, parts, kept = None, [], []
    for batch in Reader(task).batches(SPLIT):
        part, state = body(batch["tokens"], None if batch["first"] else state)
        parts.append(part)
        kept.append(batch["labels"] != IGNORED)
    return torch.cat(parts, 1)[torch.cat(kept, 1)]


# ---- distances


class Distances(NamedTuple):
    """Means over queries of W1 and KS over the class numbers; negative: share of the estimates below 0."""

    w1: float
    ks: float
    negative: float


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

    Raises ValueError where an estimate is not finite, and where a query has none above 0.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for part in queries.split(block):
        exact, found = torch.softmax(part @ keys.T, -1), estimate(part)
        positive = found.clamp(min=0)
        total = positive.sum(-1, keepdim=True)
        if not bool(found.isfinite().all() and (total > 0).all()):
            raise ValueError("an estimate of the softmax is not finite, or a query has none above 0")
        apart = (exact - positive / total).cumsum(-1)[:, :-1].abs()
        sums += torch.stack([apart.sum(dtype=torch.float64), apart.amax(-1).sum(dtype=torch.float64),
                             (found < 0).sum() / len(keys)])
    return Distances(*(sums / len(queries)).tolist())
