"""What `make performers-fig14` measures: the error of attention on its way through the layers of a model.

Transformers of random weights, whose queries and keys have a given mean |x + y|^2 in the first layer, and an encoder
that was trained with exact attention. Kinds of error: as in `Synthetic.branch_errors`, a table each.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crt_exp import mechanism_text
from crt_exp.data.text import official_file
from crt_exp.mechanism import Mechanism
from crt_exp.studies import training
from crt_exp.studies.captured import Branches, Synthetic, branch_errors
from crt_exp.studies.cells import Cells, Draw, Key
from crt_exp.studies.fidelity import of_heads
from crt_exp.studies.subject import Subject

L, HEADS, D, DEPTH, SEED = 512, 8, 64, 12, 0
FIRST = {"output": 0, "accumulated": 0, "propagated": 1}  # place of the layer from which an error is said to grow


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """Metrics: error (tables: the kinds of error; x: the layer from 1 on) and growth, the last layer's error over that
    of the first that it reaches; units are samples of weights, tokens and noise. S: mean |x + y|^2 of the encoder, by
    layer (x), without units."""
    cells, samples = Cells(name, sources, keep), range(size["samples"])
    of_random = {(setting, arm, i): {"S": S, "arm": arm, "sample": i} for setting, S in size["random"].items()
                 for i in samples for arm in size["arms"][setting]}
    cells.fill([*of_random.values()], random_errors, f"{name}: random weights")
    about = encoder(size["trained"], cells, sources, name) | {"texts": len(samples)}
    of_trained = {(size["encoder"], arm, i): about | {"arm": arm, "sample": i}
                  for i in samples for arm in size["arms"][size["encoder"]]}
    cells.fill([*of_trained.values()], trained_errors, f"{name}: {size['encoder']}").fill([about], sums, name)
    for place, key in (of_random | of_trained).items():
        yield from of_cell(cells, key, *place)
    for layer, S in enumerate(cells[about], 1):
        yield cells.draw(about, size["encoder"], "exact", "S", S, x=layer)


def of_cell(cells: Cells, key: Key, setting: str, arm: str, sample: int) -> Iterator[Draw]:
    for kind, errors in cells[key].items():
        for layer, error in enumerate(errors, 1):
            if error > 0:  # a layer that an error does not reach has none
                yield cells.draw(key, setting, arm, "error", error, sample, layer, kind)
        yield cells.draw(key, setting, arm, "growth", errors[-1] / errors[FIRST[kind]], sample, table=kind)


def mechanism(arm: str, seed: int) -> Mechanism:
    """Orthogonal where the arm names no sampler."""
    made = Mechanism.parse(arm, seed=seed)
    if not made.draws or "sampler" in mechanism_text.read(arm)[1]:
        return made
    return Mechanism.parse(arm, seed=seed, sampler="orthogonal")


def random_errors(S: int, arm: str, sample: int) -> dict[str, list[float]]:
    model = Synthetic(L, HEADS, D, (S / (2 * D**0.5)) ** 0.5, DEPTH)
    return model.branch_errors(mechanism(arm, SEED).layer, sample, SEED)


# ---- the trained encoder


def encoder(made: Mapping[str, Any], cells: Cells, sources: Sequence[str], name: str) -> Key:
    """Where its run is, trained if it is not there, and the tokens of its blocks."""
    start = {key: made[key] for key in ("common", "stages")}
    key, = training.begun({"encoder": start}, cells, sources, name)["encoder"]
    block = next(option for option in key["overrides"] if option.startswith("task.block="))
    return {"start": training.folder(key), "length": int(block.removeprefix("task.block="))}


@lru_cache(maxsize=1)
def subject(start: str, length: int, texts: int) -> Subject:
    """That encoder on texts of the validation split."""
    return Subject(start, str(official_file("wikitext2", "valid")), None, None, length, texts, 1, SEED,
                   cache_dir=Path("outputs/performers-fig14/tokens"))


def trained_errors(start: str, length: int, texts: int, arm: str, sample: int) -> dict[str, list[float]]:
    """As `random_errors`, of one of the texts, with noise of its own."""
    read = subject(start, length, texts)
    ids, states = read.rows[sample:sample + 1], [layers_of(read, read.rows[sample:sample + 1])]
    for layers in (None, 0):
        with read.swapped(mechanism(arm, 1000 * SEED + sample), layers):
            states.append(layers_of(read, ids))
    return branch_errors(*states)


@torch.no_grad()
def layers_of(read: Subject, ids: Tensor) -> Branches:
    added: list[Tensor] = []
    with ExitStack() as stack:
        for layer in read.model.bert.encoder.layer:
            hook = layer.attention.output.dense.register_forward_hook(lambda module, given, out: added.append(out))
            stack.callback(hook.remove)
        return Branches(added, list(read.run(ids).hidden_states[1:]))


def sums(start: str, length: int, texts: int) -> list[float]:
    """Mean |x + y|^2 of each layer."""
    read = subject(start, length, texts)
    return [float(np.mean(of_heads(read, i)["mean_sq_sum"])) for i in range(len(read.calls[0]))]
