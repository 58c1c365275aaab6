"""A trained model with another attention and without training: its losses, and the error of its layers.

Models are saved runs with exact attention; their weights are loaded as task.init does.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch

from crt_exp.swap.bench import looked_at
from crt_exp.attention.linear import LinearAttention
from crt_exp.features import SDERF
from crt_exp.options import Count, Several, Whole, checked
from crt_exp.measure.base import Measurement, SwapMeasurement, check_estimates
from crt_exp.measure.variance import predicted_errors
from crt_exp.mechanism import Mechanism
from crt_exp.runner.configuration import kept_task
from crt_exp.tasks.base import Batch, Plan, Reader, Task

Row = dict[str, Any]


@lru_cache(maxsize=8)
def task_of(start: str) -> Task:
    """The task of a saved run, which starts from its weights."""
    return kept_task(start, init=start)


@checked("task")
class SwapLoss(SwapMeasurement):
    """task=swap_loss: metrics of a saved run with another attention and without training, one row a split."""

    metric = "loss"

    def __init__(self, start: str | None, splits: Several[str], offset: Whole = 0, fit: Whole = 0):
        self.start, self.splits, self.offset, self.fit = start, splits, offset, fit

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[Row]:
        task = task_of(self.start)
        model = task.build(replace(mechanism, seed=self.offset + seed)).eval()
        if self.fit:
            looked_at(model, inputs(task, "train", 1, self.fit))
        read = getattr(task, "metrics", task.evaluate)  # without what only a run's end asks for
        for split in self.splits:
            found = read(model, split, Reader(task))
            yield {"split": split, "step": 0} | {metric: value for metric, value in found.items()
                                                 if isinstance(value, (int, float))}


def inputs(task: Task, split: str, rows: int, batches: int) -> list[Any]:
    """What the model is called with, of the first batches of a split."""
    def given(batch: Batch) -> Any:
        if hasattr(task, "arguments"):
            return task.arguments(batch)
        return batch["images"] if "images" in batch else {key: batch[key] for key in batch if key != "labels"}

    return [given(batch) for batch in islice(task.batches(split, Plan(rows)), batches)]


@checked("task")
class SwapLayers(Measurement):
    """task=swap_layers: relative errors of a saved run with another attention, on validation batches.

    For each layer: of its `output`; of the output of `uniform` attention; and the predicted error of an `entry` of the
    kernel matrix (the root mean square over heads), where the closed forms know it; `S_mean` is the mean of |x + y|^2.
    Last, the mean `error` of the outputs."""

    metric = "error"

    def __init__(self, start: str | None, rows: Count, batches: Count = 1, noise: Whole | None = None):
        self.start, self.count, self.batches, self.noise = start, rows, batches, noise

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[Row]:
        check_estimates(mechanism)
        task, errors = task_of(self.start), []
        model = task.build(replace(mechanism, seed=seed if self.noise is None else self.noise)).eval()
        for layer, state in enumerate(looked_at(model, inputs(task, task.validation, self.count, self.batches))):
            errors.append(state.measured.relative_error)
            yield {"layer": layer, "output": errors[-1], "uniform": state.measured.relative_uniform,
                   "S_mean": state.seen.mean_sq_sum.double().mean().item(), **predicted_entry(state)}
        yield {"error": float(np.mean(errors))}


def predicted_entry(state: LinearAttention) -> Row:
    if state.phi.on_vectors or isinstance(state.phi, SDERF):  # they depend on more than a typical pair
        return {}
    try:
        return {"entry": float(predicted_errors(state.phi, state.seen, state.m).square().mean().sqrt())}
    except NotImplementedError:                               # parts that share their projections
        return {}
