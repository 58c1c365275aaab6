"""What `redraw` measures on exact models without training: their weights in other attention, their layers, errors."""

import warnings
from functools import lru_cache
from typing import Any

import torch

from crt_exp.config import instantiate, read_yaml
from crt_exp.mechanism import Mechanism
from crt_exp.studies.predicted import predicted_error
from crt_exp.swap.swap import calibrate_attention
from crt_exp.tasks.base import Plan, Reader, Task


@torch.no_grad()
def after_swap(start: str, name: str, m: int | None, seed: int, options: dict[str, int]) -> dict[str, dict[str, float]]:
    """split -> loss and accuracy of the exact model's weights in this attention, as task.init puts them there."""
    found = task_of(start)
    model = found.build(Mechanism.of(name, m=m, seed=seed, **options)).eval()
    return {split: {key: value for key, value in found.metrics(model, split, Reader(found)).items()
                    if key in ("loss", "accuracy")} for split in ("validation", "test")}


def look(start: str, m: int, batches: int) -> list[dict[str, Any]]:
    """Of each layer, on validation rows: mean |x + y|^2 of its heads; the error of an entry of the kernel matrix that
    is predicted for FAVOR+ and FAVOR++, and the relative error of their outputs, beside uniform attention's."""
    found, measured, seen = task_of(start), {}, None
    rows = [{key: batch[key] for key in batch if key != "labels"}
            for _, batch in zip(range(batches), found.batches("validation", Plan(8)))]
    for name in ("favorp", "favorpp"):
        model = found.build(Mechanism.of(name, m=m))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # layers beyond uniform attention: the report says it
            calibrate_attention(model, rows)
        measured[name] = [block.attention for block in model.body.blocks]
        seen = seen or [layer.seen for layer in measured[name]]  # FAVOR+'s: it keeps no running statistics
    return [{"S": stats.mean_sq_sum.double().flatten().tolist(),
             "predicted": {name: predicted_error(layers[i].phi, stats, m) for name, layers in measured.items()},
             "measured": {name: layers[i].measured.relative_error for name, layers in measured.items()},
             "uniform": measured["favorp"][i].measured.relative_uniform} for i, stats in enumerate(seen)]


@lru_cache(maxsize=8)
def task_of(start: str) -> Task:
    """The task of an exact model, which starts from it."""
    return instantiate(read_yaml(f"{start}/config.yaml").task, init=start)
