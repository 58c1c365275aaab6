"""Errors of the output of attention by random features: of random heads against m, and from layer to layer of a model;
and the bias of an approximate sampler."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from crt_exp.attention import DenominatorCount, attention
from crt_exp.attention.reference import softmax_attention
from crt_exp.data.text import official_file
from crt_exp.features import Statistics
from crt_exp.hints import Count, Positive, Several
from crt_exp.mechanism import Mechanism
from crt_exp.measure.approximation import Approximation
from crt_exp.measure.base import Measurement, Series, check_estimates
from crt_exp.measure.captured import Branches, Synthetic, branch_errors
from crt_exp.measure.kernel import generator
from crt_exp.measure.subject import Subject
from crt_exp.measure.texts import FOLDER
from crt_exp.samplers.bias import measured_bias
from crt_exp.schema import checked

@checked("task")
class ProjectionErrors(Series):
    """task=projections: q, k ~ N(0, scale^2), v ~ N(0, 1), L tokens of dimension d;
    MSE of the output against exact softmax attention."""

    metric, lower_is_better, over = "mse", True, "m"

    def __init__(self, length: Count, d: Count, ms: Several[Count], samples: Count, scale: Positive = 1.0):
        self.length, self.d, self.values, self.samples, self.scale = length, d, list(ms), samples, scale

    def of(self, m: int, mechanism: Mechanism, seed: int) -> dict[str, Any]:
        """errors, zero, uniform: the MSE of each sample, and that of zeros and of uniform attention."""
        errors, zero, uniform = map(list, zip(*(self.errors(mechanism, m, seed, i) for i in range(self.samples))))
        return {"mse": sum(errors) / len(errors), "errors": errors, "zero": zero, "uniform": uniform}

    def errors(self, mechanism: Mechanism, m: int, seed: int, sample: int) -> tuple[float, float, float]:
        """Queries, keys and values are the same for every mechanism and m."""
        x, y, v = tensors(self.length, self.d, self.scale, 1000 * seed + sample)
        exact = softmax_attention(x, y, v)
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


@checked("task")
class HeadErrors(Series):
    """task=head_errors: MSE of the output of one random head over that of uniform attention, the mean of V, of each
    sample (Performers Figure 4).

    sum: mean |x + y|^2 of queries and keys. turn: radians between a query and the key at its position. Attention
    without projections has the same errors at every m.
    """

    metric, lower_is_better, over = "log_mse", True, "m"
    measures_whole = staticmethod(lambda mechanism: True)

    def __init__(self, length: Count, d: Count, sum: Positive, ms: Several[Count], samples: Count,
                 turn: Positive | None = None):
        self.values = list(ms)
        self.errors = Approximation(ms, samples, 1, 0, 1, d, scale_of(sum, d), 0, length=length, turn=turn).measure

    def of(self, m: int, mechanism: Mechanism, seed: int) -> dict[str, Any]:
        errors = self.errors(mechanism, m if mechanism.estimates else None, 0, seed)[0]
        mse = (errors["output_error"] / errors["uniform_error"])[:, 0].square()
        return {"mse": mse.tolist(), "log_mse": mse.log().mean().item()}

    def summary(self, records: list[dict]) -> str:
        shown = ", ".join(f"{math.exp(r['log_mse']):.3g} (m = {r['m']})" for r in records)
        return f"MSE over that of uniform attention (geometric mean): {shown}"


def scale_of(mean_sq_sum: float, d: int) -> float:
    """The standard deviation of queries and keys that have this mean |x + y|^2."""
    return (mean_sq_sum / (2 * d**0.5)) ** 0.5


@checked("task")
class ErrorByLayer(Measurement):
    """task=error_by_layer: relative errors in each layer, with all attention approximated or that of the first layer
    alone, as of `branch_errors` (Performers Figure 14); growth: the last layer's over that of the first with an error.

    init: a run of task=mlm, which reads one of `texts` passages of `length` tokens of WikiText-2's validation split
    for each seed; with attention=exact, the mean |x + y|^2 of its layers. Without it a Transformer of random weights,
    each seed its own, whose first layer has the mean |x + y|^2 `sum`.
    """

    metric = "growth"
    measures_whole = staticmethod(lambda mechanism: True)

    def __init__(self, sum: Positive, length: Count, heads: Count, d: Count, depth: Count, texts: Count,
                 init: str | None = None):
        self.source = (Synthetic(length, heads, d, scale_of(sum, d), depth) if init is None else
                       Subject(init, str(official_file("wikitext2", "valid")), None, None, length, texts, 1, 0,
                               cache_dir=FOLDER / "tokens"))

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        if mechanism.is_exact and isinstance(self.source, Subject):
            sums = [torch.stack([call.sums() for call in calls]).mean().item() for calls in zip(*self.source.calls)]
            yield {"layer": [*range(1, len(sums) + 1)], "mean_sq_sum": sums, "growth": None}
            return
        check_estimates(mechanism)
        yield from by_layer(self.source.branch_errors(mechanism, seed) if isinstance(self.source, Synthetic) else
                            trained_errors(self.source, mechanism, seed))


def by_layer(errors: dict[str, Sequence[float]]) -> Iterator[dict[str, Any]]:
    """The error of each kind in layers 1, 2, ..., None where there is none; then their growth, the output's last."""
    for kind, layers in errors.items():
        yield {"kind": kind, "layer": [*range(1, len(layers) + 1)], "error": [error or None for error in layers]}
    for kind in reversed(errors):
        first = errors[kind][kind == "propagated"]  # which begins in the second layer
        yield {"kind": kind, "growth": errors[kind][-1] / first if first else None}


def trained_errors(read: Subject, mechanism: Mechanism, seed: int) -> dict[str, list[float]]:
    ids = read.rows[seed:seed + 1]
    states = [layers_of(read, ids)]
    for layers in (None, 0):
        with read.swapped(replace(mechanism, seed=seed), layers):
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


@checked("task")
class KernelBias(Measurement):
    """task=kernel_bias: mean estimate over the exact kernel under a sampler, and its standard error, at x = y = e_1
    (`at_unit`) and at a spread x = y of the same length (`at_spread`)."""

    metric = "at_unit_error"

    def __init__(self, d: Count, draws: Count):
        self.d, self.draws = d, draws

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, float]]:
        x, row = torch.zeros(2, self.d, dtype=torch.float64), {}
        x[0, 0], x[1] = 1, self.d**-0.5
        found = measured_bias(mechanism.map(), mechanism.sampler, x, x, draws=self.draws,
                              generator=torch.Generator().manual_seed(seed))
        for name, ratio, error in zip(("at_unit", "at_spread"), found.ratio.tolist(), found.error.tolist()):
            row |= {name: ratio, f"{name}_error": error}
        yield row
