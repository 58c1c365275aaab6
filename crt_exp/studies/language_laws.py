"""What `make hrf-lm` measures: the law over all words of a language model, estimated by random features.

A model is a kept run of task=ptb. Its queries x are the outputs at every word of the test split, its keys y the
embeddings of all words; both are divided by the square root of the temperature, so that the kernel is exp(x.y).
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import torch
from torch import Tensor

from crt_exp.data.text import IGNORED
from crt_exp.features import Statistics
from crt_exp.features.base import log_expm1
from crt_exp.mechanism import Mechanism
from crt_exp.models import lstm
from crt_exp.runner.configuration import kept_task
from crt_exp.studies import runs, training
from crt_exp.studies.cells import Cells, Draw
from crt_exp.studies.distributions import Estimate, distances
from crt_exp.studies.predicted import typical_pair
from crt_exp.times import Watch, added
from crt_exp.tasks.base import Reader

MODEL = ("conf/task/ptb.yaml", *runs.EXACT)
HYBRIDS = ("hrf_angular", "hrf_gaussian")
COEFFICIENTS = 8            # features of a hybrid's coefficient; each base has m / COEFFICIENTS projections
CONTROLS = ("uniform", "unigram")
SPLIT, FITTED = "test", 16  # parameters are fitted to every sixteenth query
PAIR = ("favorp", "favorpp")


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """size: models: name -> {run: a command line, every: of the words of the test split, each one so far from the
    last}; arms, ms, draws: of the noise; whole: (arm, m) timed on all words. Distances (x: m, units: draws), controls
    at each m; tables "model" (what the model reaches, and where the closed forms stand) and "all words"."""
    cells, models = Cells(name, sources, keep), size["models"]
    starts = {title: {"overrides": [*model["run"]], "sources": [*MODEL]} for title, model in models.items()}
    cells.fill([start | {"kept": True} for start in starts.values()], training.train, f"{name}: language models",
               size.get("workers"))
    cells.fill([start | {"look": True} for start in starts.values()], look, f"{name}: lengths")
    for title, start in starts.items():
        yield from of_model(cells, title, start)
    keys = {(title, law, "", ""): start | {"every": models[title]["every"], "law": law}
            for (title, start), law in product(starts.items(), CONTROLS)}
    cells.fill([*keys.values()], control, f"{name}: controls")
    arms = {(title, arm, m, seed): start | {"every": models[title]["every"], "arm": arm, "m": m, "seed": seed}
            for seed, (title, start), arm, m in product(range(size["draws"]), starts.items(), size["arms"], size["ms"])}
    cells.fill([*arms.values()], distances_of, f"{name}: draws", size.get("workers"))
    for (title, arm, m, seed), key in (keys | arms).items():
        for (metric, value), place in product(cells[key].items(), size["ms"] if m == "" else [m]):
            yield cells.draw(key, title, arm, metric, value, seed, place)
    title, start = next(iter(starts.items()))
    timed = {(arm, m): start | {"whole": arm, "m": m} for arm, m in size["whole"]}
    cells.fill([*timed.values()], on_all_words, f"{name}: all words", 1)
    for (arm, m), key in timed.items():
        for metric, value in cells[key].items():
            yield cells.draw(key, title, arm, metric, value, 0, m, "all words")


def of_model(cells: Cells, title: str, start: Mapping[str, Any]) -> Iterator[Draw]:
    key, last = start | {"kept": True}, cells[start | {"kept": True}]["last"]
    best = min(record["perplexity"] for record in cells[key]["curve"])
    reached = {"validation_perplexity": best, "loss": last["loss"], "minutes": last["time_s"] / 60}
    for metric, value in reached.items():
        yield cells.draw(key, title, "model", metric, value, 0, table="model")
    yield cells.draw(key, title, "unigram", "loss", last["unigram_loss"], table="model")
    for metric, value in cells[start | {"look": True}].items():
        yield cells.draw(start | {"look": True}, title, "model", metric, value, table="model")


def look(overrides: list[str], sources: list[str], look: bool) -> dict[str, float]:
    """Where the closed forms stand: roots of mean |x|^2 and |y|^2, mean |x + y|^2, and how many times the error of
    FAVOR+ is that of FAVOR++, of one projection at a typical query and key."""
    x, y = vectors_of(overrides, sources)
    stats = Statistics.of(torch.from_numpy(np.ascontiguousarray(x[::FITTED])), y)
    one_head = Statistics(*(type(part).known(mean=part.mean[None], mean_sq=part.mean_sq[None])
                            for part in (stats.x, stats.y)))
    query, key = (each[0] for each in typical_pair(one_head))
    maps = [Mechanism.of(arm).map("softmax") for arm in PAIR]
    plain, better = (log_expm1(phi.log_relative_second_moment(query, key, phi.fit(stats)).double()) for phi in maps)
    ratio = math.exp(min(float(plain - better) / 2, 700.0))  # in logarithms, for either may overflow
    return {"query_length": float(stats.x.mean_norm)**0.5, "key_length": float(stats.y.mean_norm)**0.5,
            "squared_norm": float(stats.mean_sq_sum), "error_ratio": ratio}


def distances_of(overrides: list[str], sources: list[str], every: int, arm: str, m: int, seed: int) -> dict[str, float]:
    """Of one draw of the noise; a seed's Gaussian rows are the same in all arms of one m without parts."""
    x, y = vectors_of(overrides, sources)
    given = torch.from_numpy(np.ascontiguousarray(x[::every]))
    return distances(given, y, estimate(x, y, arm, m, seed))._asdict()


def estimate(x: np.ndarray, y: Tensor, arm: str, m: int, seed: int) -> Estimate:
    mechanism = mechanism_of(arm, m, seed)
    phi, generator = mechanism.map("softmax"), torch.Generator().manual_seed(seed)
    stats = Statistics.of(torch.from_numpy(np.ascontiguousarray(x[::FITTED])), y)
    return Estimate(phi, mechanism.noise(y.shape[1], generator), phi.fit(stats), y)


def mechanism_of(arm: str, m: int, seed: int) -> Mechanism:
    """With m projections, or as a hybrid of about as many operations: m / 8 of each base, 8 features of the
    coefficient, which is the default of its file."""
    return Mechanism.parse(arm, m=m // COEFFICIENTS if arm in HYBRIDS else m, seed=seed)


def control(overrides: list[str], sources: list[str], every: int, law: str) -> dict[str, float]:
    """Distances of a law that knows no query: uniform, or the words' shares in the training text."""
    x, y = vectors_of(overrides, sources)
    weights = torch.ones(len(y)) if law == "uniform" else torch.from_numpy(task_of(place(overrides, sources)).unigram)
    given = torch.from_numpy(np.ascontiguousarray(x[::every]))
    return distances(given, y, lambda part: weights.float().expand(len(part), -1))._asdict()


def on_all_words(overrides: list[str], sources: list[str], whole: str, m: int) -> dict[str, float]:
    """Seconds of one draw on all words, its share on each core, and MiB at the peak beyond the inputs."""
    x, _ = vectors_of(overrides, sources)
    cores = os.cpu_count()
    bounds = [len(x) * i // cores for i in range(cores + 1)]
    workers = joblib.Parallel(n_jobs=cores)
    workers(joblib.delayed(of_part)(overrides, sources, whole, m, 0, 64) for _ in range(cores))    # processes are up
    with Watch() as watch:
        mib = workers(joblib.delayed(of_part)(overrides, sources, whole, m, a, b) for a, b in zip(bounds, bounds[1:]))
    return {"seconds": watch.seconds, "mib": sum(mib), "words": len(x), "cores": cores}


def of_part(overrides: list[str], sources: list[str], arm: str, m: int, first: int, last: int) -> float:
    """MiB by which the peak of this process grew over what it held with the inputs."""
    x, y = vectors_of(overrides, sources)
    part = torch.from_numpy(np.array(x[first:last]))
    return added(lambda: distances(part, y, estimate(x, y, arm, m, 0)))


# ---- what a kept run holds


def place(overrides: Sequence[str], sources: Sequence[str]) -> Path:
    return runs.Home(training.HOME, tuple(sources)).place(overrides)


@lru_cache(maxsize=1)
def task_of(run: Path) -> Any:
    """The task of a kept run, as it was configured."""
    return kept_task(run)


def vectors_of(overrides: Sequence[str], sources: Sequence[str]) -> tuple[np.ndarray, Tensor]:
    """x (n, d), read from the disk as it is used, and y (V, d)."""
    run = place(overrides, sources)
    kept = lstm.load(run, "the model")
    return queries_of(run, kept), kept.body.embedding.weight.detach() / kept.temperature**0.5


def queries_of(run: Path, kept: Any) -> np.ndarray:
    """x at all words of the test split in their order, kept with the model."""
    path = run / f"queries-{SPLIT}.npy"
    if not path.exists():
        temporary = path.with_name(f".{path.name}.{os.getpid()}.npy")
        np.save(temporary, outputs(kept.body, task_of(run)) / kept.temperature**0.5)
        temporary.rename(path)
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
