"""Errors of the output of attention by random features: of random heads against m, and from layer to layer of a model;
and the bias of an approximate sampler."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from crt_exp.attention import DenominatorCount, attention
from crt_exp.attention.reference import softmax_attention
from crt_exp.data.text import official_file
from crt_exp.features import Statistics
from crt_exp.options import Count, Positive, Several, checked
from crt_exp.measure.approximation import Approximation, Synthetic
from crt_exp.measure.base import Measurement, Series, check_estimates
from crt_exp.measure.kernel import generator
from crt_exp.measure.subject import Subject
from crt_exp.data.corpora import FOLDER
from crt_exp.mechanism import Mechanism
from crt_exp.samplers.bias import measured_bias


@checked("task")
class ProjectionErrors(Series):
    """task=projections: MSE of the output against exact softmax attention.

    q, k ~ N(0, scale^2) and v ~ N(0, 1), L tokens of dimension d, the same for every mechanism and m.
    """

    metric, lower_is_better, over = "mse", True, "m"

    def __init__(self, length: Count, d: Count, ms: Several[Count], samples: Count, scale: Positive = 1.0):
        self.values, self.samples, self.source = list(ms), samples, Synthetic(length, 1, d, scale, 0)

    def of(self, m: int, mechanism: Mechanism, seed: int) -> dict[str, Any]:
        """errors, uniform: the MSE of each sample, and the MSE of uniform attention."""
        errors, uniform = zip(*(self.errors(mechanism, m, seed, i) for i in range(self.samples)))
        return {"mse": sum(errors) / len(errors), "errors": list(errors), "uniform": list(uniform)}

    def errors(self, mechanism: Mechanism, m: int, seed: int, sample: int) -> tuple[float, float]:
        layer, phi, g = self.source.layers(sample, seed)[0], mechanism.map("softmax"), generator(seed, sample)
        x, y, v = layer.x, layer.y, layer.v
        noise = phi.noise(m, lambda p: mechanism.sampler(p.m, layer.d, g))
        estimate = attention(x, y, v, phi, noise, phi.fit(Statistics.of(x[0, 0], y[0, 0])), counter=DenominatorCount())
        exact = softmax_attention(x, y, v)
        return tuple((exact - each).square().mean().item() for each in (estimate, v.mean(-2, keepdim=True)))

    def summary(self, records: list[dict]) -> str:
        return "MSE " + ", ".join(f"{r['mse']:.2e} (m = {r['m']})" for r in records)


@checked("task")
class HeadErrors(Series):
    """task=head_errors: MSE of the output of one random head, divided by the MSE of uniform attention (Performers
    Figure 4).

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
        return f"MSE relative to uniform attention (geometric mean): {shown}"


def scale_of(mean_sq_sum: float, d: int) -> float:
    """The standard deviation of queries and keys that have this mean |x + y|^2."""
    return (mean_sq_sum / (2 * d**0.5)) ** 0.5


@checked("task")
class ErrorByLayer(Measurement):
    """task=error_by_layer: relative error of the hidden states after each layer, with all attention approximated
    (Performers Figure 14); growth: the error after the last layer over the error after the first.

    init: a run of task=mlm, which reads one of `texts` passages of `length` tokens of WikiText-2's validation split
    for each seed. Without it, a Transformer of random weights, tokens and projections for each seed, whose first layer
    has the mean |x + y|^2 `sum`.
    """

    metric = "growth"
    measures_whole = staticmethod(lambda mechanism: True)

    def __init__(self, sum: Positive, length: Count, heads: Count, d: Count, depth: Count, texts: Count,
                 init: str | None = None):
        self.source = (Synthetic(length, heads, d, scale_of(sum, d), depth) if init is None else
                       Subject(init, str(official_file("wikitext2", "valid")), None, None, length, texts, 1, 0,
                               cache_dir=FOLDER / "tokens"))

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        check_estimates(mechanism)
        if isinstance(self.source, Synthetic):
            errors = self.source.errors_of(replace(mechanism, seed=0), seed, seed, seed)
        else:
            with torch.no_grad(), self.source.swapped(replace(mechanism, seed=seed)) as states:
                errors = self.source.of_text(seed, states)["hidden"]
        yield {"layer": [*range(1, len(errors) + 1)], "error": errors,
               "growth": errors[-1] / errors[0] if errors[0] else None}


@checked("task")
class KernelBias(Measurement):
    """task=kernel_bias: mean estimate over the exact kernel under a sampler, and its standard error, at x = y = e_1
    (`at_unit`) and at x = y = (1, ..., 1) / sqrt(d) (`at_spread`)."""

    metric = "at_unit_error"

    def __init__(self, d: Count, draws: Count):
        self.d, self.draws = d, draws

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, float]]:
        x = torch.zeros(2, self.d, dtype=torch.float64)
        x[0, 0], x[1] = 1, self.d**-0.5
        found = measured_bias(mechanism.map(), mechanism.sampler, x, x, draws=self.draws,
                              generator=torch.Generator().manual_seed(seed))
        (unit, spread), (unit_error, spread_error) = found.ratio.tolist(), found.error.tolist()
        yield {"at_unit": unit, "at_unit_error": unit_error, "at_spread": spread, "at_spread_error": spread_error}
