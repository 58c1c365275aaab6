"""Distances between the softmax over the words of a language model and its random-feature estimates (HRF 4.2).

A model is a run of task=ptb. Queries x are its outputs at the words of the test split, keys y the embeddings of all
words; both are divided by the square root of the temperature, so that the kernel is exp(x.y).

Distances compare the distributions over class numbers: W1 = sum_c |F_c - F^_c| and KS = max_c |F_c - F^_c|; the paper
does not state its one-dimensional distributions. Negative estimates are set to 0 and rows normalised before that.
Notation: n queries x, V classes with keys y, d dimension, B queries of a block.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crt_exp.data.text import IGNORED
from crt_exp.features import FeatureMap, Features, Statistics
from crt_exp.features.base import Params
from crt_exp.features.blocks import Blocks
from crt_exp.options import Count, Several, checked
from crt_exp.measure.base import Measurement
from crt_exp.mechanism import Mechanism
from crt_exp.models import lstm
from crt_exp.samplers.noise import Nested
from crt_exp.runner.configuration import kept_task
from crt_exp.runner.run import read_records
from crt_exp.tasks.base import Reader

SPLIT, FITTED = "test", 16  # parameters are fitted to every sixteenth query
BLOCK = 64                  # queries of a block, which fits the cache of a core


@checked("task")
class ClassDistributions(Measurement):
    """task=class_distributions: distances between the softmax of a run of task=ptb and its estimate, for each m (HRF
    Figures 3 and 8, Tables 4 and 5).

    With attention=exact: loss of the model, and distances of the uniform distribution and of word frequencies.

    start: the run directory. every: use every n-th word of the test split. ms: projections; hybrids with n coefficient
    features take m / n per base.
    """

    metric = "ks"

    def __init__(self, start: str | None, every: Count, ms: Several[Count]):
        self.start, self.every, self.ms = start, every, list(ms)

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        task, x, y = vectors_of(self.start)
        queries, stats = x[::self.every].contiguous(), Statistics.of(x[::FITTED].contiguous(), y)
        if mechanism.estimates:
            phi = mechanism.map("softmax")
            for m in self.ms:
                made = mechanism.projecting(m // mechanism.features.content.get("n", 1))
                noise = made.noise(y.shape[1], torch.Generator().manual_seed(seed))
                yield {"m": m, **distances(queries, y, estimator(phi, noise, phi.fit(stats), y))}
            return
        last = read_records(Path(self.start) / "metrics.jsonl")[-1]
        yield {metric: last[metric] for metric in ("loss", "unigram_loss")}
        for name, shares in [("uniform", torch.ones(len(y))), ("unigram", torch.from_numpy(task.unigram).float())]:
            found = distances(queries, y, lambda part, shares=shares: shares.expand(len(part), -1))
            yield from ({"method": name, "m": m, **found} for m in self.ms)


@lru_cache(maxsize=1)
def vectors_of(start: str) -> tuple[Any, Tensor, Tensor]:
    """The task of a run, x (n, d) at the words of the test split, and y (V, d)."""
    task, kept = kept_task(start), lstm.load(start, "the model")
    return (task, outputs(kept.body, task) / kept.temperature**0.5,
            kept.body.embedding.weight.detach() / kept.temperature**0.5)


@torch.no_grad()
def outputs(body: lstm.WordLSTM, task: Any) -> Tensor:
    """(n, d) float32, in the order of the text."""
    state, parts, kept = None, [], []
    for batch in Reader(task).batches(SPLIT):
        part, state = body(batch["tokens"], None if batch["first"] else state)
        parts.append(part)
        kept.append(batch["labels"] != IGNORED)
    return torch.cat(parts, 1)[torch.cat(kept, 1)]


# ---- distances


def estimator(phi: FeatureMap, noise: Nested, params: Params, keys: Tensor) -> Callable[[Tensor], Tensor]:
    """The function queries (B, d) -> (B, V), proportional to phi_q(x).phi_k(y_c) of each query x. keys (V, d).

    Against overflow, key features are divided by the largest of each column, and a common factor of a row is left out.
    """
    bound = phi.bind(noise, params)
    values, logs = dense(bound.phi_k(keys))
    largest = logs.amax(-2, keepdim=True).clamp(min=torch.finfo(logs.dtype).min)  # also of a cluster without a class
    table = (values * (logs - largest).exp()).mT

    def estimate(queries: Tensor) -> Tensor:
        values, logs = dense(bound.phi_q(queries))
        logs = logs + largest
        return (values * (logs - logs.amax(-1, keepdim=True)).exp()) @ table
    return estimate


def dense(features: Features | Blocks) -> Features:
    return features if isinstance(features, Features) else features.dense()


def distances(queries: Tensor, keys: Tensor, estimate: Callable[[Tensor], Tensor], block: int = BLOCK) -> dict:
    """Between softmax(x . y_c) and estimate(queries (B, d)) (B, V): means of W1 and KS, share of negative estimates.

    Raises ValueError if an estimate is not finite, or if a query has no positive estimate.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for part in queries.split(block):
        exact, found = torch.softmax(part @ keys.T, -1), estimate(part)
        positive = found.clamp(min=0)
        total = positive.sum(-1, keepdim=True)
        if not bool(found.isfinite().all() and (total > 0).all()):
            raise ValueError("estimates of the softmax: expected finite values and a positive one for each query")
        apart = (exact - positive / total).cumsum(-1)[:, :-1].abs()
        sums += torch.stack([apart.sum(dtype=torch.float64), apart.amax(-1).sum(dtype=torch.float64),
                             (found < 0).sum() / len(keys)])
    return dict(zip(("w1", "ks", "negative"), (sums / len(queries)).tolist()))
