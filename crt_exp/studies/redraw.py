"""Exact models of sequences moved into other attention: directly after the swap, and trained on.

Models, and the runs that go on from them, are those of a `Grid`; on top of it stands what needs no training: their
weights in other attention as they are, and what the closed forms predict at their queries and keys.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from crt_exp.mechanism import Mechanism
from crt_exp.runner.configuration import kept_task
from crt_exp.studies import runs, training
from crt_exp.studies.bench import looked_at
from crt_exp.studies.cells import Cells, Draw, Key
from crt_exp.studies.predicted import predicted_error
from crt_exp.studies.training import Grid
from crt_exp.tasks.base import Plan, Reader, Task

ROWS, WIDE = 8, (4.0, 24.0)  # rows of a batch; the range of |x + y|^2 in which closed forms differ
OWN = ("swapped", "noises", "batches", "projections")


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """The draws of a grid whose moved arms train on, of each exact model as the unit of independence. swapped: arms
    directly after the swap, as they are typed ("favorp m=256"): tables "swap" and, at step 0, "validation"; those with
    an m have `noises` draws of each model. Table "layers" (x: layer): of FAVOR+ and FAVOR++ with m = `projections`, on
    `batches` of 8 rows. Only settings in which uniform attention costs `least` after the swap are trained on."""
    grid, own = Grid(**{key: value for key, value in size.items() if key not in OWN}), {key: size[key] for key in OWN}
    home, cells = runs.Home(training.HOME, tuple(sources)), Cells(name, sources, keep)
    training.train_all(grid, home, cells, list(grid.settings), [grid.start], f"{name}: exact models")
    starts = {(setting, model): start(grid, home, setting, model)
              for setting in grid.settings for model in range(grid.seeds)}
    swaps = {(*place, arm): keys_of(path, typed, grid, own["noises"], place[1])
             for place, path in starts.items() for arm, typed in own["swapped"].items()}
    looks = {place: {"start": path, "m": own["projections"], "batches": own["batches"]}
             for place, path in starts.items()}
    cells.fill([key for keys in swaps.values() for key in keys], after_swap, f"{name}: after the swap", grid.workers)
    cells.fill([*looks.values()], look, f"{name}: layers", grid.workers)
    passed = [setting for setting in grid.settings if cost(grid, cells, swaps, setting) >= grid.least]
    training.train_all(grid, home, cells, passed, [*grid.moved], f"{name}: trained on")
    for (setting, model, arm), keys in swaps.items():
        yield from of_swap(cells, keys, setting, arm, model)
    for (setting, model), key in looks.items():
        yield from of_layers(cells, key, setting, model)
    for setting in passed:
        for arm in grid.moved:
            for model in range(grid.seeds if arm in grid.names(setting) else 0):
                key = grid.key(setting, arm, model, home)
                yield from training.of_run(grid, cells, key, setting, arm, model)
                yield from step_0(grid, cells, swaps, setting, arm, model)


def start(grid: Grid, home: runs.Home, setting: str, model: int) -> str:
    """The directory of an exact model, which is trained again where its cell is kept and the directory is gone."""
    options = grid.options(setting, grid.start, model, home)
    home.kept(options)
    return str(home.place(options))


def keys_of(path: str, typed: str, grid: Grid, noises: int, model: int) -> list[Key]:
    """One for each draw of the noise; the first is that of the runs which train on."""
    count = noises if " m=" in typed else 1
    return [{"start": path, "attention": typed, "seed": grid.offset + model + grid.seeds * i} for i in range(count)]


def cost(grid: Grid, cells: Cells, swaps: Mapping[tuple, list[Key]], setting: str) -> float:
    """Nats that uniform attention costs directly after the swap, the mean over models."""
    loss = {arm: [cells[swaps[setting, model, arm][0]]["test"]["loss"] for model in range(grid.seeds)]
            for arm in ("uniform", grid.start)}
    return (sum(loss["uniform"]) - sum(loss[grid.start])) / grid.seeds


# ---- draws


def of_swap(cells: Cells, keys: Sequence[Key], setting: str, arm: str, model: int) -> Iterator[Draw]:
    for key in keys:
        for metric, value in cells[key]["test"].items():
            yield cells.draw(key, setting, arm, metric, value, model, table="swap")


def step_0(grid: Grid, cells: Cells, swaps: Mapping[tuple, list[Key]], setting: str, arm: str, model: int
           ) -> Iterator[Draw]:
    """Of the same attention: "favorp" is the start of "favorp, redrawn"."""
    key = swaps[setting, model, arm.partition(",")[0]][0]
    for metric in grid.metrics:
        yield cells.draw(key, setting, arm, metric, cells[key]["validation"][metric], model, 0, "validation")


def of_layers(cells: Cells, key: Key, setting: str, model: int) -> Iterator[Draw]:
    for i, layer in enumerate(cells[key]):
        values = [(arm, f"{which}_error", layer[which][arm]) for which in ("predicted", "measured")
                  for arm in ("favorp", "favorpp")]
        values += [("favorp", f"{which}_log_ratio", math.log(layer[which]["favorp"] / layer[which]["favorpp"]))
                   for which in ("predicted", "measured")]
        values += [("uniform", "measured_error", layer["uniform"])]
        values += [("exact", "square_sum", S) for S in layer["S"]]
        values += [("exact", "in_range", int(WIDE[0] <= S <= WIDE[1])) for S in layer["S"]]
        for arm, metric, value in values:
            yield cells.draw(key, setting, arm, metric, value, model, i, "layers")


# ---- cells


@torch.no_grad()
def after_swap(start: str, attention: str, seed: int) -> dict[str, dict[str, float]]:
    """split -> loss and accuracy of the exact model's weights in this attention, as task.init puts them there."""
    task = task_of(start)
    model = task.build(Mechanism.parse(attention, seed=seed)).eval()
    return {split: {key: value for key, value in task.metrics(model, split, Reader(task)).items()
                    if key in ("loss", "accuracy")} for split in ("validation", "test")}


def look(start: str, m: int, batches: int) -> list[dict[str, Any]]:
    """Of each layer, on validation rows: mean |x + y|^2 of its heads; the error of an entry of the kernel matrix that
    is predicted for FAVOR+ and FAVOR++, and the relative error of their outputs, compared with uniform attention's."""
    task, measured, seen = task_of(start), {}, None
    rows = [{key: batch[key] for key in batch if key != "labels"}
            for _, batch in zip(range(batches), task.batches("validation", Plan(ROWS)))]
    for name in ("favorp", "favorpp"):
        measured[name] = looked_at(task.build(Mechanism.of(name, m=m)), rows)
        seen = seen or [layer.seen for layer in measured[name]]  # FAVOR+'s: it keeps no running statistics
    return [{"S": stats.mean_sq_sum.double().flatten().tolist(),
             "predicted": {name: predicted_error(layers[i].phi, stats, m) for name, layers in measured.items()},
             "measured": {name: layers[i].measured.relative_error for name, layers in measured.items()},
             "uniform": measured["favorp"][i].measured.relative_uniform} for i, stats in enumerate(seen)]


@lru_cache(maxsize=8)
def task_of(start: str) -> Task:
    """The task of an exact model, which starts from it."""
    return kept_task(start, init=start)
