"""A trained model with other attention and without training: its losses, and how far its layers are from exact
attention; on texts, and on heads that are drawn from its moments.

Models are kept runs with exact attention; their weights are put into the other as task.init does it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from crt_exp.attention.linear import LinearAttention
from crt_exp.data import images
from crt_exp.features import SDERF
from crt_exp.hints import Count, NotNegative, Several, Whole
from crt_exp.mechanism import Mechanism
from crt_exp.advice.bench import looked_at
from crt_exp.measure.base import Measurement, SwapMeasurement, check_estimates
from crt_exp.measure.variance import predicted_errors
from crt_exp.runner.configuration import kept_task
from crt_exp.schema import checked
from crt_exp.tasks.base import Batch, Plan, Reader, Task
from crt_exp.times import Watch, added

Row = dict[str, Any]


@lru_cache(maxsize=8)
def task_of(start: str, size: int | None = None) -> Task:
    """The task of a run, which starts from it; size: of its images, where it is another."""
    return kept_task(start, init=start, **({"size": size} if size else {}))


@checked("task")
class SwapLoss(SwapMeasurement):
    """task=swap_loss: metrics of a kept run with other attention and without training, one row a split."""

    metric = "loss"

    def __init__(self, start: str, splits: Several[str], offset: Whole = 0, fit: Whole = 0):
        self.start, self.splits, self.offset, self.fit = start, splits, offset, fit

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[Row]:
        task = task_of(self.start)
        model = task.build(replace(mechanism, seed=self.offset + seed)).eval()
        if self.fit:
            looked_at(model, [given(task, batch) for batch in islice(task.batches("train", Plan(1)), self.fit)])
        read = getattr(task, "metrics", task.evaluate)  # without what only a run's end asks for
        for split in self.splits:
            found = read(model, split, Reader(task))
            yield {"split": split, "step": 0} | {metric: value for metric, value in found.items()
                                                 if isinstance(value, (int, float))}


def given(task: Task, batch: Batch) -> Any:
    """What the model is called with."""
    if hasattr(task, "arguments"):
        return task.arguments(batch)
    return {key: value for key, value in batch.items() if key != "labels"}


@checked("task")
class SwapLayers(Measurement):
    """task=swap_layers: of each layer of a kept run with other attention, on validation batches: the relative error of
    its `output`, that of `uniform` attention, and of its heads S, the mean |x + y|^2, whether S is `inside` the window,
    and the predicted error of an entry of the kernel matrix (`entries`; `entry`: the root of their mean square), where
    the closed forms know it. Last, the mean `error` of the outputs and the `share` of heads inside."""

    metric = "error"

    def __init__(self, start: str, rows: Count, batches: Count = 1, spread: bool = False, noise: Whole | None = None,
                 window: Sequence[NotNegative] = (4, 24)):
        self.start, self.count, self.batches, self.spread = start, rows, batches, spread
        self.noise, self.window = noise, window

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[Row]:
        check_estimates(mechanism)
        task, errors, inside = task_of(self.start), [], []
        model = task.build(replace(mechanism, seed=seed if self.noise is None else self.noise)).eval()
        for layer, state in enumerate(looked_at(model, self.pieces(task))):
            S = state.seen.mean_sq_sum.double().flatten().tolist()
            errors.append(state.measured.relative_error)
            inside.append([int(self.window[0] <= each <= self.window[1]) for each in S])
            yield {"layer": layer, "output": errors[-1], "uniform": state.measured.relative_uniform, "S": S,
                   "S_mean": float(np.mean(S)), "inside": inside[-1], **of_entries(state)}
        yield {"error": float(np.mean(errors)), "share": float(np.mean(inside))}

    def pieces(self, task: Task) -> list[Any]:
        """Batches of the validation split; of images one of all."""
        if hasattr(task, "images"):
            return [pictures(task, self.count * self.batches)[0]]
        every = task.batches("validation", Plan(self.count))
        if not self.spread:
            return [given(task, batch) for batch in islice(every, self.batches)]
        every = list(every)
        return [given(task, batch) for batch in every[::max(1, len(every) // self.batches)]]


def of_entries(state: LinearAttention) -> Row:
    if state.phi.on_vectors or isinstance(state.phi, SDERF):  # they depend on more than a typical pair
        return {}
    try:
        entries = predicted_errors(state.phi, state.seen, state.m)
    except NotImplementedError:                               # parts that share their projections
        return {}
    return {"entry": float(entries.square().mean().sqrt()), "entries": entries.tolist()}


def pictures(task: Task, count: int) -> tuple[Tensor, Tensor]:
    """(n, 3, H, W) and labels (n,): at most that many of the held-out images, of all classes alike, for files are
    listed class by class."""
    held_out, transform = images.load(task.dataset, task.data_dir)["val"], task.description.transform()
    rows = np.unique(np.linspace(0, len(held_out) - 1, min(count, len(held_out))).astype(int))
    return (torch.stack([transform(held_out.read(held_out.sources[row])) for row in rows]),
            torch.from_numpy(held_out.labels[rows]))


@checked("task")
class SwapImages(Measurement):
    """task=swap_images: accuracy, loss, milliseconds an image and peak memory of a kept run of task=imagenet with other
    attention, on images of another size; positions are interpolated. For a process of its own."""

    metric, lower_is_better = "accuracy", False

    def __init__(self, start: str, pixels: Count, count: Count, batch: Count):
        self.start, self.pixels, self.count, self.batch = start, pixels, count, batch

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[Row]:
        task = task_of(self.start, self.pixels)
        model = task.build(replace(mechanism, seed=seed)).eval()
        shown, labels = pictures(task, self.count)
        logits, times = [], []

        def read() -> None:
            for part in shown.tensor_split(max(1, len(shown) // self.batch)):
                with Watch() as watch:
                    logits.append(model(part).float())
                times.append(watch.ms / len(part))

        mib, scores = added(read), torch.cat(logits)
        yield {"accuracy": (scores.argmax(-1) == labels).double().mean().item(),
               "loss": F.cross_entropy(scores, labels).item(), "ms_image": float(np.median(times[1:] or times)),
               "mib": mib}
