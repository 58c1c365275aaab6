"""Approximation error of softmax attention, on pretrained or synthetic tensors.

Notation: H query heads, Hkv key heads, L queries, S keys, m projections, M features. x and y are scaled queries and
keys, so that x.y is the logit. Errors are relative, in the Frobenius norm of a head: |estimate - exact| / |exact|.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from crt_exp.attention import DenominatorCount, attention, uniform_attention
from crt_exp.attention.reference import attention_matrix
from crt_exp.experiments.measure import (
    Record,
    Records,
    SwapMeasurement,
    check_estimates,
    seeded,
)
from crt_exp.experiments.measure.bench import fit_attention
from crt_exp.experiments.measure.fidelity import DocumentBench, LayerCall, relative_error
from crt_exp.experiments.measure.kernel import fit_map, generator
from crt_exp.mechanism import Mechanism
from crt_exp.samplers.bias import bias_record, bias_sentence
from crt_exp.validation import Count, FileName, Positive, Several, checked

# averaged over layers in the final record
MEANS = ("output_error", "uniform_error", "matrix_error", "negative_denominators")
ERRORS = {
    "the output": "output_error",
    "uniform attention": "uniform_error",
    "the matrix": "matrix_error",
}  # of the summary, by what they are errors of


@checked("task")
class Approximation(SwapMeasurement):
    """task=approximation: errors of attention by layer and number of projections.

    conf/task/approximation.yaml explains the options. Splits of the rows:

    - `layer`, one row per layer and m: errors.
    - `test`, the final row: means at the largest m.

    Attention without projections has no matrix error and no m. task=error_by_layer and task=fidelity measure the error
    of hidden states.
    """

    metric = "output_error"

    def __init__(
        self,
        ms: Several[Count],
        samples: Count,
        rows: Count,
        heads: Count,
        d: Count,
        scale: Positive,
        model: FileName | None = None,
        text: FileName | None = None,
        length: Count | None = None,
    ):
        if (model is None) != (text is None):
            raise ValueError("task.model and task.text: expected both or neither")
        self.ms = ms
        self.samples = samples
        self.queries = rows
        if model is None:
            self.layers = Synthetic(length or 1024, heads, d, scale).layers
        else:
            calls = DocumentBench(model, text, length=length).calls[0]
            self.layers = lambda sample, seed: calls

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        check_estimates(mechanism)
        mechanisms = [mechanism]
        largest = None
        if mechanism.estimates:
            mechanisms = [mechanism.with_projections(m) for m in self.ms]
            largest = max(self.ms)
        layers = []
        for projected in mechanisms:
            for i in range(len(self.layers(0, seed))):
                record = self.layer_record(projected, i, seed)
                yield {"split": "layer", **record}
                if record.get("m") == largest:
                    layers.append(record)
        yield {"split": "test", **self.mean_record(mechanism, layers, seed)}

    def layer_record(self, mechanism: Mechanism, i: int, seed: int) -> Record:
        """Return mean errors of output and matrix over samples, and by head (`_heads`)."""
        options = {"samples": self.samples, "queries": self.queries}
        errors, negative = layer_errors(self.layers, mechanism, i, seed, **options)
        record = {"layer": i, "path": self.layers(0, seed)[i].path}
        if mechanism.estimates:
            record |= {"m": mechanism.m, "negative_denominators": negative}
        for name, values in errors.items():
            record[name] = _number(values.mean())
            record[f"{name}_heads"] = _numbers(values.mean(0))
        return record

    def mean_record(self, mechanism: Mechanism, layers: list[Record], seed: int) -> Record:
        """Return means over layers, and the bias of an approximate sampler."""
        record: Record = {}
        for name in layers[0]:
            if name in MEANS:
                values = [layer[name] for layer in layers]
                record[name] = None if None in values else sum(values) / len(values)
        if mechanism.estimates:
            record["m"] = layers[0]["m"]
            layer = self.layers(0, seed)[0]
            x = layer.x[0, 0]
            y = layer.y[0, 0]
            params = fit_map(mechanism, x, y)
            record |= bias_record(mechanism.map(), mechanism.sampler, x, y, params)
        return record

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        errors = []
        for name, key in ERRORS.items():
            if key in last:
                errors.append(f"of {name} {_format_number(last[key])}")
        lines = [f"relative error {', '.join(errors)}", *self.warnings(records)]
        if "m" in last:
            lines[0] = f"m = {last['m']}: {lines[0]}"
        return "\n".join(lines) + bias_sentence(last)

    def warnings(self, records: list[dict]) -> Iterator[str]:
        """Yield a warning for each m with layers whose error exceeds that of uniform attention."""
        counts: Counter[int | None] = Counter()
        for row in records:
            if row["split"] == "layer":
                error = row["output_error"]
                counts[row.get("m")] += error is None or error > row["uniform_error"]
        for m, layers in counts.items():
            if layers:
                suffix = f" with m = {m}" if m else ""
                yield f"WARNING: {layers} layers are further from exact than uniform attention{suffix}"


# ---- errors of one layer


@torch.no_grad()
def layer_errors(
    layers: Callable[[int, int], list[LayerCall]],
    mechanism: Mechanism,
    i: int,
    seed: int,
    *,
    samples: int,
    queries: int,
) -> tuple[dict[str, Tensor], float]:
    """Return errors of layer i by name, (samples, H) each, and the share of denominators <= 0.

    layers: returns the tensors of all layers for the number of a sample and a seed.
    `uniform_error` is the error of uniform attention. For a feature map, some rows of the attention matrix, those of
    a number of `queries`, are compared too.
    """
    count = DenominatorCount()
    errors: dict[str, list[Tensor]] = {}
    for sample in range(samples):
        layer = layers(sample, seed)[i]
        tensors = (layer.x, layer.y, layer.v)
        causal = {"causal": layer.causal}
        pairs = {"uniform": (uniform_attention(*tensors, **causal), layer.output)}
        if mechanism.estimates:
            order = torch.randperm(layer.x.shape[2], generator=generator(seed))
            rows = order[:queries].sort().values
            phi = mechanism.map()
            noise = mechanism.noise(layer.d, generator(seed, i, sample), (layer.heads,))
            params = layer.fit(phi)
            output = attention(*tensors, phi, noise, params, counter=count, **causal)
            pairs["output"] = (output, layer.output)
            matrix = attention_matrix(layer.x, layer.y, phi, noise, params, rows=rows, **causal)
            exact = attention_matrix(layer.x, layer.y, rows=rows, **causal)
            pairs["matrix"] = (matrix, exact)
        else:  # causal layers are fitted to the inputs
            options = {"kv_heads": layer.y.shape[1], "scaling": 1.0, **causal}
            state = mechanism.layer(layer.heads, layer.d, **options).eval()
            pairs["output"] = (fit_attention(state, [tensors])(*tensors), layer.output)
        for name, pair in pairs.items():
            error = relative_error(*pair, (-2, -1))[0]
            errors.setdefault(f"{name}_error", []).append(error)
    stacked = {name: torch.stack(values) for name, values in errors.items()}
    return stacked, count.fraction


# ---- where the tensors come from


@dataclass(frozen=True)
class Synthetic:
    """Random queries, keys and values: q, k ~ N(0, scale^2) and v ~ N(0, 1) for each sample.

    Args:
        scale: Standard deviation of the entries of queries and keys.
        turn: Angle in radians between a query and the key at its position, in a random plane: q = cos(turn) k +
            sin(turn) g, g ~ N(0, scale^2). None: independent.
    """

    length: int
    heads: int
    d: int
    scale: float
    turn: float | None = None

    def layers(self, sample: int, seed: int) -> list[LayerCall]:
        return [random_inputs(self, 1000 * seed + sample)]


@lru_cache(maxsize=64)
def random_inputs(source: Synthetic, seed: int) -> LayerCall:
    shape = (3, 1, source.heads, source.length, source.d)
    q, k, v = torch.randn(shape, generator=seeded(seed))
    if source.turn is not None:
        q = math.cos(source.turn) * k + math.sin(source.turn) * q
    root = source.d**0.25
    return LayerCall("synthetic", source.scale * q / root, source.scale * k / root, v)


def _number(value: Tensor | float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _numbers(values: Tensor | Sequence[float]) -> list[float | None]:
    return [_number(value) for value in values]


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
