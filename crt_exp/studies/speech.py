"""What `make fig3` and `make hrf-speech` measure: recognisers whose attention is swapped, and what is lost.

A grid of runs of task=librispeech gives rates and losses; with them go how far each layer's output is from exact
attention's, and what its closed form predicts.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from torch import nn

from crt_exp.features import SDERF
from crt_exp.mechanism import Mechanism
from crt_exp.presets import OF_MAP
from crt_exp.models import recogniser
from crt_exp.runner.configuration import kept_task
from crt_exp.studies import encoder_steps, runs, training
from crt_exp.studies.bench import looked_at
from crt_exp.studies.cells import Cells, Draw, Key
from crt_exp.studies.predicted import predicted_errors
from crt_exp.studies.training import HOME, Grid
from crt_exp.tasks.base import Plan, Reader, Task

ENCODER = "encoder"
BATCHES = 4  # to which clusters are fitted, and on which attention is compared layer by layer


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """The draws of the grids, of the arms that `fitted` names, and of `looked` the errors by layer; in setting ENCODER
    seconds (units: rounds) and mib of an encoder on `encoder` seconds of audio (x)."""
    yield from training.measure(name, sources, size, keep)
    cells, home = Cells(name, sources, keep), runs.Home(HOME, tuple(sources))
    each_grid = [Grid(**each) for each in size["grids"]]
    grids = {setting: grid for grid in each_grid for setting in grid.settings}
    begun = {setting: {"start": grid.beginning(home)["overrides"], "sources": list(sources)}
             for setting, grid in grids.items() if grid.begin}
    yield from encoder(cells, name, size.get("encoder", []))
    for setting, arms in size.get("fitted", {}).items():
        yield from fitted(cells, name, setting, arms, begun[setting], grids[setting].seeds)
    for setting, arms in size.get("looked", {}).items():
        own = {arm: [*grids[setting].moved.get(arm, ()), *size.get("fitted", {}).get(setting, {}).get(arm, ())]
               for arm in arms}
        yield from looked(cells, name, setting, own, begun[setting])


def fitted(cells: Cells, name: str, setting: str, arms: Mapping[str, Sequence[str]], begun: Key,
           seeds: int) -> Iterator[Draw]:
    """Arms whose clusters are fitted to batches of training, and nothing is trained: table "test"."""
    keys = {(arm, seed): {"attention": list(options), **begun, "seed": seed}
            for arm, options in arms.items() for seed in range(seeds)}
    cells.fill([*keys.values()], after_fit, f"{name}: fitted to clusters")
    for (arm, seed), key in keys.items():
        for metric, value in cells[key].items():
            yield cells.draw(key, setting, arm, metric, value, seed, table="test")


def looked(cells: Cells, name: str, setting: str, arms: Mapping[str, Sequence[str]], begun: Key) -> Iterator[Draw]:
    """Table "layers", x: the layer: output, that of the arm "uniform"; entry and squared_norm, whose units are
    heads."""
    keys = {arm: {"attention": list(options), **begun} for arm, options in arms.items()}
    cells.fill([*keys.values()], errors, f"{name}: errors by layer")
    for arm, key in keys.items():
        for layer, each in enumerate(cells[key], 1):
            for metric in ("squared_norm", "entry"):
                for head, value in enumerate(each[metric] or []):
                    yield cells.draw(key, setting, arm, metric, value, head, layer, "layers")
            yield cells.draw(key, setting, arm, "output", each["output"], x=layer, table="layers")
            if arm == next(iter(arms)):
                yield cells.draw(key, setting, "uniform", "output", each["uniform"], x=layer, table="layers")


def encoder(cells: Cells, name: str, lengths: Sequence[int]) -> Iterator[Draw]:
    times = {n: {"seconds": n, "rounds": max(3, 150 // n)} for n in lengths}  # more for short audio, which varies more
    peaks = {(n, method): {"seconds": n, "method": method} for n in lengths for method in encoder_steps.METHODS}
    cells.fill([*times.values()], encoder_steps.times, f"{name}: encoder", apart=True)
    cells.fill([*peaks.values()], encoder_steps.memory, f"{name}: memory of the encoder", apart=True)
    for n, key in times.items():
        for method, rounds in cells[key].items():
            for turn, ms in enumerate(rounds):
                yield cells.draw(key, ENCODER, method, "seconds", ms / 1e3, turn, n)
    for (n, method), key in peaks.items():
        yield cells.draw(key, ENCODER, method, "mib", cells[key], 0, n)


@torch.no_grad()
def after_fit(attention: list[str], start: list[str], sources: list[str], seed: int) -> dict[str, float]:
    """Loss and rates of the test split."""
    task, model = swapped(attention, start, sources, seed)
    looked_at(model, [task.arguments(batch) for batch in islice(task.batches("train", Plan(1)), BATCHES)])
    tested = task.evaluate(model, "test", Reader(task))
    return {metric: tested[metric] for metric in ("loss", "wer", "cer")}


def errors(attention: list[str], start: list[str], sources: list[str]) -> list[dict[str, Any]]:
    """Of each layer, on validation utterances: mean |x + y|^2 of each head, the error of an entry of its kernel matrix
    as predicted (None: there is no closed form), and the relative error of the output compared with uniform's."""
    task, model = swapped(attention, start, sources, 0)
    every = list(task.batches("validation", Plan(1)))  # from short utterances to long ones
    layers = looked_at(model, [task.arguments(batch) for batch in every[::max(1, len(every) // BATCHES)]])
    return [{"squared_norm": state.seen.mean_sq_sum.flatten().tolist(), "entry": entry(state),
             "output": state.measured.relative_error, "uniform": state.measured.relative_uniform}
            for state in layers if state.seen is not None]


def swapped(attention: list[str], start: list[str], sources: list[str], seed: int) -> tuple[Task, nn.Module]:
    """The weights of a kept run with another attention, as task.init does it."""
    place = str(runs.Home(HOME, tuple(sources)).place(start))
    kept, tensors = recogniser.load(place, "task.init")
    model = kept._replace(mechanism=mechanism(attention, seed)).build().eval()
    recogniser.take_weights(model, tensors, "task.init")
    return task_of(place), model


@lru_cache(maxsize=1)
def task_of(place: str) -> Task:
    """The task of a kept run, as it was configured."""
    return kept_task(place)


def mechanism(options: Sequence[str], seed: int) -> Mechanism:
    """Of words of the command line: attention=..., its options and those of its map; others are not looked at."""
    own = [option for option in options if option.startswith(("attention.", OF_MAP))]
    words = [option.removeprefix("attention.").replace(f"{OF_MAP}m=", "m=") for option in own]
    name = next(option.removeprefix("attention=") for option in options if option.startswith("attention="))
    return Mechanism.parse(" ".join([name, *words]), seed=seed)


def entry(state: Any) -> list[float] | None:
    if state.phi.on_vectors or isinstance(state.phi, SDERF):  # they depend on more than a typical pair
        return None
    try:
        return predicted_errors(state.phi, state.seen, state.m).tolist()
    except NotImplementedError:                               # parts that share their projections
        return None
