"""A trained model with other attention and without training: its losses, and how far its layers are from exact
attention; on texts, and on heads that are drawn from its moments; and what answers without a model.

Models are kept runs with exact attention; their weights are put into the other as task.init does it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.attention.linear import LinearAttention
from crt_exp.data import glue, images
from crt_exp.features import SDERF
from crt_exp.mechanism import Mechanism
from crt_exp.metrics import METRICS
from crt_exp.advice.bench import looked_at
from crt_exp.measure.texts import prepare
from crt_exp.measure.variance import predicted_errors
from crt_exp.runner.configuration import kept_task
from crt_exp.tasks.base import Batch, Plan, Reader, Task
from crt_exp.times import Watch, added

Row = dict[str, Any]


@lru_cache(maxsize=8)
def task_of(start: str, size: int | None = None) -> Task:
    """The task of a run, which starts from it; size: of its images, where it is another."""
    return kept_task(start, init=start, **({"size": size} if size else {}))


def model_of(start: str, arm: str, noise: int) -> nn.Module:
    return task_of(start).build(Mechanism.parse(arm, seed=noise)).eval()


# ---- losses


@torch.no_grad()
def losses(arm: str, start: str, splits: Sequence[str], seed: int, offset: int = 0, fit: int = 0) -> Row:
    """<split>_<metric> of the task, at `step` 0. The seed of the noise is `offset` more than that of the cell; fit:
    batches of training, one utterance or row each, to which attention is fitted that has something to fit."""
    task, model = task_of(start), model_of(start, arm, offset + seed)
    if fit:
        looked_at(model, [given(task, batch) for batch in islice(task.batches("train", Plan(1)), fit)])
    read = getattr(task, "metrics", task.evaluate)  # without what only a run's end asks for
    return {"step": 0} | {f"{split}_{metric}": value for split in splits
                          for metric, value in read(model, split, Reader(task)).items()
                          if isinstance(value, (int, float))}


def given(task: Task, batch: Batch) -> Any:
    """What the model is called with."""
    if hasattr(task, "arguments"):
        return task.arguments(batch)
    return {key: value for key, value in batch.items() if key != "labels"}


# ---- layers


def layers(arm: str | Mapping[str, str], start: str, seed: int, rows: int, batches: int = 1, spread: bool = False,
           noise: int | None = None, window: Sequence[float] = (0, math.inf)) -> Iterator[Row]:
    """Of each layer (`layer`, from 0 on, and `number`, from 1 on) on validation batches of so many rows: the relative
    error of its `output` and, as the closed forms say, of an `entry` of its kernel matrix, of each head in `entries`,
    None where they say nothing. S: mean |x + y|^2 of its heads, `inside`: whether it lies in the window; `uniform`:
    the relative error of uniform attention's output.

    spread: batches from all over the split, else its first ones. noise: the seed of the noise, else that of the cell.
    Of several arms in one cell the entries are those at the S of the first, which is that of exact attention too where
    layers keep running statistics; what is not the arm's own stands in its rows alone, and last, of all layers, the
    `share` of heads inside.
    """
    arms, first = arm if isinstance(arm, Mapping) else {arm: arm}, []
    read = pieces(task_of(start), rows, batches, spread)
    for name, text in arms.items():
        states = looked_at(model_of(start, text, seed if noise is None else noise), read)
        first = first or [state.seen for state in states]
        for i, (state, seen) in enumerate(zip(states, first)):
            shared = {} if name != next(iter(arms)) else of_inputs(state, seen, window)
            yield {"arm": name, "layer": i, "number": i + 1, "output": state.measured.relative_error,
                   **of_entries(state, seen), **shared}
    S = torch.cat([seen.mean_sq_sum.double().flatten() for seen in first])
    yield {"share": float(((window[0] <= S) & (window[1] >= S)).double().mean())}


def of_inputs(state: LinearAttention, seen: Any, window: Sequence[float]) -> Row:
    S = seen.mean_sq_sum.double().flatten().tolist()
    inside = [int(window[0] <= each <= window[1]) for each in S]
    return {"S": S, "S_mean": float(np.mean(S)), "S_least": min(S), "S_largest": max(S), "inside": inside,
            "uniform": state.measured.relative_uniform}


def of_entries(state: LinearAttention, seen: Any) -> Row:
    if state.phi.on_vectors or isinstance(state.phi, SDERF):  # they depend on more than a typical pair
        return {}
    try:
        entries = predicted_errors(state.phi, seen, state.m)
    except NotImplementedError:                               # parts that share their projections
        return {}
    return {"entry": float(entries.square().mean().sqrt()), "entries": entries.tolist()}


def pieces(task: Task, rows: int, batches: int, spread: bool) -> list[Any]:
    """Batches of the validation split; of images one of all."""
    if hasattr(task, "images"):
        return [pictures(task, rows * batches)[0]]
    every = task.batches("validation", Plan(rows))
    chosen = (read := list(every))[::max(1, len(read) // batches)] if spread else islice(every, batches)
    return [given(task, batch) for batch in chosen]


# ---- images


def pictures(task: Task, count: int) -> tuple[Tensor, Tensor]:
    """(n, 3, H, W) and labels (n,): at most that many of the held-out images, of all classes alike, for files are
    listed class by class."""
    held_out, transform = images.load(task.dataset, task.data_dir)["val"], task.description.transform()
    rows = np.unique(np.linspace(0, len(held_out) - 1, min(count, len(held_out))).astype(int))
    return (torch.stack([transform(held_out.read(held_out.sources[row])) for row in rows]),
            torch.from_numpy(held_out.labels[rows]))


@torch.no_grad()
def classified(arm: str, start: str, pixels: int, count: int, batch: int, seed: int) -> Row:
    """Accuracy, loss, milliseconds an image and peak memory on images of `pixels` a side, positions interpolated. For a
    process of its own."""
    task = task_of(start, pixels)
    model = task.build(Mechanism.parse(arm, seed=seed)).eval()
    shown, labels = pictures(task, count)
    logits, times = [], []

    def read() -> None:
        for part in shown.tensor_split(max(1, len(shown) // batch)):
            with Watch() as watch:
                logits.append(model(part).float())
            times.append(watch.ms / len(part))

    mib, scores = added(read), torch.cat(logits)
    return {"accuracy": (scores.argmax(-1) == labels).double().mean().item(), "images": len(labels),
            "loss": F.cross_entropy(scores, labels).item(), "ms_image": float(np.median(times[1:] or times)),
            "mib": mib, "tokens": model.patch_embed.num_patches}


# ---- answers to the tasks of GLUE without a model


CUTS = 101         # quantiles of the overlap among which a class task chooses its cut


def scores(arm: str, data: str, seed: int, data_dir: str | None = None) -> Iterator[dict[str, Any]]:
    """Of each way to answer (`arm`), the task's metric, as a fraction, under its name. data_dir: as in task=glue."""
    prepare([f"task.data_dir={data_dir}"])
    metric = glue.TASKS[data].metrics[0]
    for name, (answers, labels) in answers_of(data, data_dir).items():
        yield {"arm": name, metric: float(METRICS[metric](answers, labels))}


def answers_of(data: str, data_dir: str | None = None) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
    """Control -> its answers on the dev split, and the right ones."""
    train, dev = (glue.load(data, split, data_dir) for split in ("train", "dev"))
    classes = bool(glue.TASKS[data].names)
    usual = int(np.bincount(train.labels).argmax()) if classes else float(np.mean(train.labels))
    made = {"majority class": ([usual] * len(dev), list(dev.labels))}
    if dev.sentence2 is not None:
        shared = overlaps(dev)
        answers = cut(data, overlaps(train), train.labels, shared) if classes else shared.tolist()
        made["word overlap"] = (answers, list(dev.labels))
    return made


def overlaps(examples: glue.Examples) -> np.ndarray:
    """Words of both sentences over words of either, (n,)."""
    words = [[set(text.lower().split()) for text in texts] for texts in (examples.sentence1, examples.sentence2)]
    return np.array([len(a & b) / max(1, len(a | b)) for a, b in zip(*words)])


def cut(data: str, shared: np.ndarray, labels: Sequence[int], dev: np.ndarray) -> list[int]:
    """Classes of the dev split by whether the overlap lies above the cut, and in the sense, that are best in training;
    of three classes the first two alone."""
    metric, cuts = METRICS[glue.TASKS[data].metrics[0]], np.quantile(shared, np.linspace(0, 1, CUTS))
    tried = [(metric((shared > at) == high, labels), at, high) for at in cuts for high in (True, False)]
    _, at, high = max(tried)
    return ((dev > at) == high).astype(int).tolist()
