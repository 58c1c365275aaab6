"""The law over all words of a language model, estimated by random features: how far it is from the softmax.

A model is a run of task=ptb. Its queries x are the outputs at every word of the test split, its keys y the embeddings
of all words; both are divided by the square root of the temperature, so that the kernel is exp(x.y).

The text of HRF does not say of which one-dimensional laws its distances are, so there are both (math of HRF 4.2):
index: of the two laws over the class numbers 0 .. V - 1, W1 = sum_c |F_c - F^_c|, KS = max_c |F_c - F^_c|;
values: of the V probabilities of either softmax as two samples, as two-sample routines take two vectors.
Estimates below 0 count as a fraction, are set to 0, and rows are divided by their sum before the distances are taken.

Queries go through in blocks: n x V numbers are never held. Legend: n queries x, V classes with keys y, d dimension, M
features, B queries of a block.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import joblib
import numpy as np
import torch
from torch import Tensor

from crt_exp.config import carried
from crt_exp.data.text import IGNORED
from crt_exp.features import FeatureMap, Features, Statistics
from crt_exp.features.base import Params, log_expm1
from crt_exp.features.blocks import Blocks, Selected
from crt_exp.mechanism import Mechanism
from crt_exp.models import lstm
from crt_exp.nested import Nested
from crt_exp.runner.configuration import kept_task
from crt_exp.runner.run import read_records
from crt_exp.measure.variance import typical_pair
from crt_exp.tasks.base import Reader
from crt_exp.times import Watch, added
from crt_exp.whole_files import whole

SPLIT, FITTED = "test", 16  # parameters are fitted to every sixteenth query
PAIR = ("favorp", "favorpp")
BLOCK = 64  # queries of a block: what is sorted then stays in the cache of a core

# ---- probes; start: the directory of a run, every: of the words of the test split, each one so far from the last


def reached(arm: str, start: str, seed: int) -> dict[str, float]:
    """What a model has learned, beside the words' shares, and where the closed forms stand: roots of mean |x|^2 and
    |y|^2, mean |x + y|^2, and how many times the error of FAVOR+ is that of FAVOR++, of one projection at a typical
    query and key."""
    records = read_records(Path(start) / "metrics.jsonl")
    last, curve = records[-1], [record for record in records if record["split"] == "validation"]
    return {"seed": seed, "validation_perplexity": min(record["perplexity"] for record in curve), "loss": last["loss"],
            "minutes": last["time_s"] / 60, "unigram_loss": last["unigram_loss"], **look(*vectors_of(start))}


def look(x: np.ndarray, y: Tensor) -> dict[str, float]:
    stats = statistics_of(x, y)
    one_head = Statistics(*(type(part).known(mean=part.mean[None], mean_sq=part.mean_sq[None])
                            for part in (stats.x, stats.y)))
    query, key = (each[0] for each in typical_pair(one_head))
    maps = [Mechanism.of(arm).map("softmax") for arm in PAIR]
    plain, better = (log_expm1(phi.log_relative_second_moment(query, key, phi.fit(stats)).double()) for phi in maps)
    ratio = math.exp(min(float(plain - better) / 2, 700.0))  # in logarithms, for either may overflow
    return {"query_length": float(stats.x.mean_norm)**0.5, "key_length": float(stats.y.mean_norm)**0.5,
            "squared_norm": float(stats.mean_sq_sum), "error_ratio": ratio}


def distances_of(arm: str, start: str, every: int, m: int, seed: int) -> dict[str, float]:
    """Of one draw of the noise; a seed's Gaussian rows are the same in all arms of one m without parts."""
    x, y = vectors_of(start)
    return distances(taken(x, every), y, estimate(x, y, mechanism_of(arm, m, seed)))._asdict()


def control(arm: str, start: str, every: int, ms: Sequence[int], seed: int) -> Iterator[dict[str, float]]:
    """Distances of a law that knows no query, the same at each m: uniform, or the words' shares in training."""
    x, y = vectors_of(start)
    weights = torch.ones(len(y)) if arm == "uniform" else torch.from_numpy(task_of(start).unigram)
    found = distances(taken(x, every), y, lambda part: weights.float().expand(len(part), -1))._asdict()
    return ({"m": m, **found} for m in ms)


def on_all_words(arm: str, start: str, seed: int) -> dict[str, float]:
    """Seconds of one draw on all words, its share on each core, and MiB at the peak beyond the inputs."""
    x, _ = vectors_of(start)
    cores = os.cpu_count()
    bounds = [len(x) * i // cores for i in range(cores + 1)]
    workers, part = joblib.Parallel(n_jobs=cores), carried(of_part)
    workers(joblib.delayed(part)(arm, start, seed, 0, 64) for _ in range(cores))    # processes are up
    with Watch() as watch:
        mib = workers(joblib.delayed(part)(arm, start, seed, a, b) for a, b in zip(bounds, bounds[1:]))
    return {"seed": seed, "m": Mechanism.parse(arm).m, "seconds": watch.seconds, "mib": sum(mib), "words": len(x),
            "cores": cores}


def of_part(arm: str, start: str, seed: int, first: int, last: int) -> float:
    """MiB by which the peak of this process grew over what it held with the inputs."""
    x, y = vectors_of(start)
    part = torch.from_numpy(np.array(x[first:last]))
    return added(lambda: distances(part, y, estimate(x, y, Mechanism.parse(arm, seed=seed))))


def mechanism_of(arm: str, m: int, seed: int) -> Mechanism:
    """With m projections, or as a hybrid of about as many operations: of each base m over the features of the
    coefficient."""
    mechanism = Mechanism.parse(arm, seed=seed)
    return mechanism.projecting(m // mechanism.features.content.get("n", 1))


def estimate(x: np.ndarray, y: Tensor, mechanism: Mechanism) -> "Estimate":
    phi, generator = mechanism.map("softmax"), torch.Generator().manual_seed(mechanism.seed)
    return Estimate(phi, mechanism.noise(y.shape[1], generator), phi.fit(statistics_of(x, y)), y)


def statistics_of(x: np.ndarray, y: Tensor) -> Statistics:
    return Statistics.of(taken(x, FITTED), y)


def taken(x: np.ndarray, every: int) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x[::every]))


# ---- what a run holds


@lru_cache(maxsize=1)
def task_of(start: str) -> Any:
    """The task of a run, as it was configured."""
    return kept_task(start)


def vectors_of(start: str) -> tuple[np.ndarray, Tensor]:
    """x (n, d), read from the disk as it is used, and y (V, d)."""
    kept = lstm.load(start, "the model")
    return queries_of(start, kept), kept.body.embedding.weight.detach() / kept.temperature**0.5


def queries_of(start: str, kept: Any) -> np.ndarray:
    """x at all words of the test split in their order, kept with the model."""
    path = Path(start) / f"queries-{SPLIT}.npy"
    if not path.exists():
        with whole(path, ".npy") as part:
            np.save(part, outputs(kept.body, task_of(start)) / kept.temperature**0.5)
    return np.load(path, mmap_mode="r")


@torch.no_grad()
def outputs(body: lstm.WordLSTM, task: Any) -> np.ndarray:
    """(n, d) float32: column after column, as the text goes."""
    state, parts, kept = None, [], []
    for batch in Reader(task).batches(SPLIT):
        part, state = body(batch["tokens"], None if batch["first"] else state)
        parts.append(part)
        kept.append(batch["labels"] != IGNORED)
    return torch.cat(parts, 1)[torch.cat(kept, 1)].numpy()


# ---- distances


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
