"""The error of attention on its way through the layers of a model.

Transformers of random weights, whose queries and keys have a given mean |x + y|^2 in the first layer, and an encoder
that was trained with exact attention. Kinds of error: as in `Synthetic.branch_errors`, a row each.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crt_exp.data.text import official_file
from crt_exp.mechanism import Mechanism
from crt_exp.probes.captured import Branches, Synthetic, branch_errors
from crt_exp.probes.fidelity import of_heads
from crt_exp.probes.subject import Subject
from crt_exp.probes.texts import FOLDER

FIRST = {"output": 0, "accumulated": 0, "propagated": 1}  # place of the layer from which an error is said to grow


def by_layer(errors: Mapping[str, Sequence[float]]) -> Iterator[dict[str, Any]]:
    """Of each kind: the error of each layer from 1 on, None of one that it does not reach; growth: the last one over
    that of the first that it reaches."""
    for kind, layers in errors.items():
        yield {"kind": kind, "layer": [*range(1, len(layers) + 1)], "error": [error or None for error in layers],
               "growth": layers[-1] / layers[FIRST[kind]] if layers[FIRST[kind]] else None}


@dataclass(frozen=True)
class Random:
    """S: mean |x + y|^2 of the first layer. length, heads, d, depth: as of `Synthetic`; seeds are of weights, tokens
    and noise."""

    S: float
    length: int
    heads: int
    d: int
    depth: int

    def records(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        model = Synthetic(self.length, self.heads, self.d, (self.S / (2 * self.d**0.5)) ** 0.5, self.depth)
        return by_layer(model.branch_errors(mechanism.layer, seed, 0))


@dataclass(frozen=True)
class Trained:
    """start: a run of task=mlm. length, texts: of the validation split of WikiText-2; each seed reads one of them, with
    noise of its own."""

    start: str
    length: int
    texts: int

    def records(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        read = subject(self.start, self.length, self.texts)
        ids, states = read.rows[seed:seed + 1], [layers_of(read, read.rows[seed:seed + 1])]
        for layers in (None, 0):
            with read.swapped(replace(mechanism, seed=seed), layers):
                states.append(layers_of(read, ids))
        return by_layer(branch_errors(*states))


class Sums(Trained):
    """Mean |x + y|^2 of each layer of such a run."""

    def records(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        read = subject(self.start, self.length, self.texts)
        sums = [float(np.mean(of_heads(read, i)["mean_sq_sum"])) for i in range(len(read.calls[0]))]
        yield {"layer": [*range(1, len(sums) + 1)], "S": sums}


@lru_cache(maxsize=1)
def subject(start: str, length: int, texts: int) -> Subject:
    return Subject(start, str(official_file("wikitext2", "valid")), None, None, length, texts, 1, 0,
                   cache_dir=FOLDER / "tokens")


@torch.no_grad()
def layers_of(read: Subject, ids: Tensor) -> Branches:
    added: list[Tensor] = []
    with ExitStack() as stack:
        for layer in read.model.bert.encoder.layer:
            hook = layer.attention.output.dense.register_forward_hook(lambda module, given, out: added.append(out))
            stack.callback(hook.remove)
        return Branches(added, list(read.run(ids).hidden_states[1:]))
