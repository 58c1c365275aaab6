"""Errors of the output of attention by random features: against m, of whole random heads (the Hadamard report's setting
and that of Performers, Figure 4), and on its way through the layers of a model.

Models are Transformers of random weights, whose queries and keys have a given mean |x + y|^2 in the first layer, and an
encoder that was trained with exact attention. Kinds of error are those of `Synthetic.branch_errors`, a row each.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crt_exp.attention import DenominatorCount, attention
from crt_exp.attention.reference import softmax_attention
from crt_exp.data.text import official_file
from crt_exp.features import Statistics
from crt_exp.hints import Count, Positive, Several
from crt_exp.mechanism import Mechanism
from crt_exp.measure.approximation import Approximation
from crt_exp.measure.base import Series
from crt_exp.measure.captured import Branches, Synthetic, branch_errors, relative_error
from crt_exp.measure.fidelity import of_heads
from crt_exp.measure.kernel import generator
from crt_exp.measure.subject import Subject
from crt_exp.measure.texts import FOLDER
from crt_exp.schema import checked


@checked("task")
class ProjectionErrors(Series):
    """task=projections: q, k ~ N(0, scale^2), v ~ N(0, 1), L tokens of dimension d;
    MSE of the output against exact softmax attention."""

    metric, lower_is_better, over = "mse", True, "m"

    def __init__(self, length: Count, d: Count, ms: Several[Count], samples: Count, scale: Positive = 1.0):
        self.length, self.d, self.values, self.samples, self.scale = length, d, list(ms), samples, scale

    def of(self, m: int, mechanism: Mechanism, seed: int) -> dict[str, Any]:
        """errors, zero, uniform: the MSE of each sample, and of zeros and of uniform attention in its place."""
        every = [self.errors(mechanism, m, seed, sample) for sample in range(self.samples)]
        errors, zero, uniform = map(list, zip(*every))
        given = torch.tensor(errors, dtype=torch.float64)
        return {"mse": given.mean().item(), "log_mse_mean": given.log().mean().item(),
                "log_mse_std": given.log().std().item() if self.samples > 1 else None,
                "errors": errors, "zero": zero, "uniform": uniform}

    def errors(self, mechanism: Mechanism, m: int, seed: int, sample: int) -> tuple[float, float, float]:
        """Of a draw of q, k, v, the same for every mechanism and m, and of the noise: the MSE of the estimate, of zeros
        and of uniform attention."""
        x, y, v = tensors(self.length, self.d, self.scale, 1000 * seed + sample)
        exact = _exact(self.length, self.d, self.scale, 1000 * seed + sample)
        phi, g = mechanism.map("softmax"), generator(seed, sample)
        noise = phi.noise(m, lambda p: mechanism.sampler(p.m, self.d, g))
        estimate = attention(x, y, v, phi, noise, phi.fit(Statistics.of(x[0, 0], y[0, 0])), counter=DenominatorCount())
        return tuple((exact - each).square().mean().item() for each in (estimate, 0, v.mean(-2, keepdim=True)))

    def summary(self, records: list[dict]) -> str:
        return "MSE " + ", ".join(f"{r['mse']:.2e} (m = {r['m']})" for r in records)


@lru_cache(maxsize=64)
def tensors(length: int, d: int, scale: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and v, (1, 1, L, d)."""
    q, k, v = torch.randn(3, 1, 1, length, d, generator=torch.Generator().manual_seed(seed))
    return scale * q / d**0.25, scale * k / d**0.25, v


@lru_cache(maxsize=64)
def _exact(length: int, d: int, scale: float, seed: int) -> Tensor:
    return softmax_attention(*tensors(length, d, scale, seed))


class HeadErrors:
    """Squared errors of the output of one head over those of uniform attention, the mean of V, of each sample.

    mean_sq_sum: mean |x + y|^2 of queries and keys, of which the Performers' paper says "appropriately normalized" and
    no more. turn: as in `Synthetic`. Attention without projections has the same errors at every m.
    """

    def __init__(self, length: int, d: int, mean_sq_sum: float, ms: Sequence[int], samples: int,
                 turn: float | None = None):
        self.head = {"length": length, "heads": 1, "d": d, "scale": (mean_sq_sum / (2 * d**0.5)) ** 0.5, "depth": 0,
                     "turn": turn}
        self.ms, self.samples = ms, samples

    def records(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        """mse, that of `zero` and `uniform`, and `relative`, the error of uniform attention over the exact norm."""
        whole = None if mechanism.estimates else self.of_layer(mechanism, seed)
        for m in self.ms:
            mse, relative = whole or self.of_map(mechanism, m, seed)
            yield {"m": m, "mse": mse, "zero": [error**-2 for error in relative], "uniform": [1.0] * self.samples,
                   "relative": relative}

    def of_map(self, mechanism: Mechanism, m: int, seed: int) -> tuple[list[float], list[float]]:
        task = Approximation([m], self.samples, rows=1, pairs=0, **self.head)
        errors = task.measure(mechanism.map(), mechanism, m, 0, seed)[0]
        ratio = errors["output_error"] / errors["uniform_error"]
        return ratio[:, 0].square().tolist(), errors["uniform_error"][:, 0].tolist()

    @torch.no_grad()
    def of_layer(self, mechanism: Mechanism, seed: int) -> tuple[list[float], list[float]]:
        source, mse, relative = Synthetic(**self.head), [], []
        layer = mechanism.layer(1, self.head["d"], scaling=1.0).eval()
        for sample in range(self.samples):
            given = source.layers(sample, seed)[0]
            relative.append(relative_error(given.uniform, given.output).item())
            error = relative_error(layer(given.x, given.y, given.v), given.output).item()
            mse.append((error / relative[-1]) ** 2)
        return mse, relative


# ---- on its way through the layers of a model


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
