"""What `hrf_lm` runs: the language models, their queries and keys, and distances of estimates of their softmax.

A model is a kept run of task=ptb. Its queries are the outputs at every word of the test split, its keys the embeddings
of all words; both are divided by the square root of the temperature, so that the kernel is exp(x.y).
"""

import math
import os
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import torch
from torch import Tensor

from crt_exp.config import choices, instantiate, read_yaml
from crt_exp.data.text import IGNORED
from crt_exp.features import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.models import lstm
from crt_exp.report import runs
from crt_exp.studies.distributions import Distances, Estimate, distances
from crt_exp.studies.memory import peak, reset_peak
from crt_exp.studies.predicted import typical_pair
from crt_exp.tasks.base import Reader

MODEL_SOURCES = ("tasks/ptb.py", "models/lstm.py", "data/words.py")
HOME = runs.Home(Path("outputs/hrf-lm"), MODEL_SOURCES)
SOURCES = (*MODEL_SOURCES, "studies/distributions.py", "features", "samplers")
HYBRIDS = ("hrf_angular", "hrf_gaussian")
ARMS = tuple(name for name in ("favor", "favorp", "favorpp", *HYBRIDS) if name in choices("attention"))
COEFFICIENTS = 8  # features of a hybrid's coefficient; each base has m / COEFFICIENTS projections
CONTROLS = ("uniform", "unigram")
SPLIT = "test"


@dataclass(frozen=True)
class Model:
    """A language model and how it is looked at. every: of the words of the test split, each one so far from the last.

    most: perplexity on the validation split that it is to reach; inf: any.
    """

    title: str
    options: tuple[str, ...]
    every: int = 1
    most: float = math.inf

    @property
    def overrides(self) -> list[str]:
        return ["task=ptb", *self.options]


@dataclass(frozen=True)
class Setting:
    """What one SIZE stands for. draws: of the noise of each arm. whole: (arm, m) that is timed on all words."""

    models: tuple[Model, ...]
    arms: tuple[str, ...] = ARMS
    ms: tuple[int, ...] = (64, 128, 256, 512)
    draws: int = 10
    whole: tuple[tuple[str, int], ...] = (("favorp", 64), ("favor", 512))
    workers: int | None = None         # cells at a time; None: one a core


@dataclass
class Found:
    """All that was computed; keys: title of the model, arm or control, m and seed."""

    setting: Setting
    models: dict[str, dict[str, Any]]
    looks: dict[str, dict[str, Any]]
    controls: dict[tuple[str, str], Distances]
    arms: dict[tuple[str, str, int, int], Distances]
    whole: dict[tuple[str, int], dict[str, float]]


# ---- cells


def train(overrides: list[str]) -> dict[str, Any]:
    """The model stays; {"curve": [epoch, perplexity on the validation split], "test", "unigram", "seconds"}."""
    records = HOME.kept(overrides)
    curve = [[r["epoch"], r["perplexity"]] for r in records if r["split"] == "validation"]
    last = records[-1]
    queries_of(tuple(overrides))
    return {"curve": curve, "test": last["perplexity"], "unigram": last["unigram_perplexity"], "words": last["words"],
            "query_length": last["query_length"], "key_length": last["key_length"], "seconds": last["time_s"]}


def look(overrides: list[str]) -> dict[str, Any]:
    """Where the closed forms stand: mean |x|^2, |y|^2, |x + y|^2, and the log relative second moment of one projection
    of each arm at a typical pair, where there is a closed form."""
    x, y = vectors_of(tuple(overrides))
    stats = Statistics.of(torch.from_numpy(np.ascontiguousarray(x[::16])), y)
    moments = {}
    for name in ARMS:
        if name not in HYBRIDS:
            phi = Mechanism.of(name).map("softmax")
            moments[name] = float(phi.log_relative_second_moment(*pair(stats), phi.fit(stats)))
    return {"x": float(stats.x.mean_norm), "y": float(stats.y.mean_norm), "S": float(stats.mean_sq_sum),
            "moments": moments}


def pair(stats: Statistics) -> tuple[Tensor, Tensor]:
    """A typical query and key (1, d): `typical_pair` of one head."""
    one_head = Statistics(*(type(part).known(mean=part.mean[None], mean_sq=part.mean_sq[None])
                            for part in (stats.x, stats.y)))
    x, y = typical_pair(one_head)
    return x[0], y[0]


def arm(overrides: list[str], every: int, name: str, m: int, seed: int) -> dict[str, float]:
    """Distances of one draw of the noise; a seed's Gaussian rows are the same in all arms of one m without parts."""
    x, y = vectors_of(tuple(overrides))
    return distances(torch.from_numpy(np.ascontiguousarray(x[::every])), y, estimate(x, y, name, m, seed))._asdict()


def estimate(x: np.ndarray, y: Tensor, name: str, m: int, seed: int) -> Estimate:
    """Parameters are fitted to every sixteenth query and all keys."""
    mechanism = mechanism_of(name, m, seed)
    phi, generator = mechanism.map("softmax"), torch.Generator().manual_seed(seed)
    stats = Statistics.of(torch.from_numpy(np.ascontiguousarray(x[::16])), y)
    return Estimate(phi, mechanism.noise(y.shape[1], generator), phi.fit(stats), y)


def mechanism_of(name: str, m: int, seed: int) -> Mechanism:
    """With m projections, or as a hybrid of about as many operations: m / 8 of each base, 8 features of the
    coefficient, which is the default of its file."""
    return Mechanism.of(name, m=m // COEFFICIENTS if name in HYBRIDS else m, seed=seed)


def control(overrides: list[str], every: int, law: str) -> dict[str, float]:
    """Distances of a law that knows no query: uniform, or the words' shares in the training text."""
    x, y = vectors_of(tuple(overrides))
    weights = torch.ones(len(y)) if law == "uniform" else torch.from_numpy(task_of(tuple(overrides)).unigram).float()
    given = torch.from_numpy(np.ascontiguousarray(x[::every]))
    return distances(given, y, lambda part: weights.expand(len(part), -1))._asdict()


def whole(overrides: list[str], name: str, m: int) -> dict[str, float]:
    """Seconds of one draw on all words, its share on each core, and MiB at the peak beyond the inputs."""
    x, _ = vectors_of(tuple(overrides))
    cores = os.cpu_count()
    bounds = [len(x) * i // cores for i in range(cores + 1)]
    workers = joblib.Parallel(n_jobs=cores)
    workers(joblib.delayed(measured)(overrides, name, m, 0, 64) for _ in range(cores))        # processes are up
    start = time.perf_counter()
    found = workers(joblib.delayed(measured)(overrides, name, m, a, b) for a, b in zip(bounds, bounds[1:]))
    return {"seconds": time.perf_counter() - start, "mib": sum(found), "words": len(x), "cores": cores}


def measured(overrides: list[str], name: str, m: int, first: int, last: int) -> float:
    """MiB by which the peak of this process grew over what it held with the inputs."""
    x, y = vectors_of(tuple(overrides))
    part = torch.from_numpy(np.array(x[first:last]))
    before = reset_peak()
    distances(part, y, estimate(x, y, name, m, 0))
    return (peak() - before) / 2**20


# ---- what a kept run holds


def place(overrides: tuple[str, ...]) -> Path:
    return HOME.place(overrides)


@lru_cache(maxsize=1)
def task_of(overrides: tuple[str, ...]) -> Any:
    """The task of a kept run, as it was configured."""
    return instantiate(read_yaml(place(overrides) / "config.yaml").task)


def vectors_of(overrides: tuple[str, ...]) -> tuple[np.ndarray, Tensor]:
    """x (n, d), read from the disk as it is used, and y (V, d)."""
    kept = lstm.load(place(overrides), "the model")
    return queries_of(overrides), kept.body.embedding.weight.detach() / kept.temperature**0.5


def queries_of(overrides: tuple[str, ...]) -> np.ndarray:
    """x at all words of the test split in their order, kept beside the model."""
    path = place(overrides) / f"queries-{SPLIT}.npy"
    if not path.exists():
        kept = lstm.load(place(overrides), "the model")
        found = outputs(kept.body, task_of(overrides)) / kept.temperature**0.5
        temporary = path.with_name(f".{path.name}.{os.getpid()}.npy")
        np.save(temporary, found)
        temporary.rename(path)
    return np.load(path, mmap_mode="r")


@torch.no_grad()
def outputs(body: lstm.WordLSTM, task: Any) -> np.ndarray:
    """(n, d) float32: column after column, as the text goes."""
    state, parts, kept = None, [], []
    for batch in Reader(task).batches(SPLIT):
        found, state = body(batch["tokens"], None if batch["first"] else state)
        parts.append(found)
        kept.append(batch["labels"] != IGNORED)
    return torch.cat(parts, 1)[torch.cat(kept, 1)].numpy()

