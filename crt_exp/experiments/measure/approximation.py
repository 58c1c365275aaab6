"""Approximation error of softmax attention, on pretrained or synthetic tensors.

Also measures error propagation through the hidden states, and predicts the best feature map of each head by closed
forms.

Notation: H query heads, Hkv key heads, L queries, S keys, m projections, M features. x and y are scaled queries and
keys, so that x.y is the logit. Errors are relative, in the Frobenius norm of a head: |estimate - exact| / |exact|.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from crt_exp.attention import DenominatorCount, attention, exact_attention, uniform_attention
from crt_exp.attention.checks import repeat_heads
from crt_exp.attention.reference import attention_matrix
from crt_exp.attention.state import for_query_heads, grouped_statistics
from crt_exp.experiments.measure import SwapMeasurement, check_estimates
from crt_exp.experiments.measure.fidelity import LayerCall, Subject, relative_error
from crt_exp.experiments.measure.kernel import (
    generator,
    log_relative_mse,
    sample_projections,
    sampled_ratios,
)
from crt_exp.experiments.models.language import Transformer
from crt_exp.features import FeatureMap, Statistics
from crt_exp.features.base import Params
from crt_exp.features.bounds import couples, ensemble_log_variance
from crt_exp.mechanism import Mechanism
from crt_exp.registry import choices
from crt_exp.samplers.bias import bias_record, bias_sentence
from crt_exp.samplers.noise import cached_property
from crt_exp.validation import Count, FileName, Positive, Several, Whole, checked

DRAWS = 200  # samples of the projections, for sample variances
PREDICTED = 256  # query-key pairs of a head over which closed forms are averaged
MEANS = (
    "output_error",
    "uniform_error",
    "matrix_error",
    "negative_denominators",
    "log_variance",
    "log_variance_coupled",
    "log_variance_sampled",
)  # averaged over layers in the final record
SMALL = -60.0  # minimum log relative MSE, nats


@checked("task")
class Approximation(SwapMeasurement):
    """task=approximation: errors of attention by layer and number of projections.

    conf/task/approximation.yaml explains the options. Splits of the rows:

    - `heads`, one row per layer: mean |x + y|^2, and the log relative MSE of each map by closed forms.
    - `layer`, one row per layer and m: errors and variances.
    - `depth`, one row per m: error of the hidden states after each layer.
    - `test`, the final row: means at the largest m.

    Attention without projections has no `heads` rows, no matrix error and no m.
    """

    metric = "output_error"

    def __init__(
        self,
        ms: Several[Count],
        samples: Count,
        rows: Count,
        pairs: Whole,
        heads: Count,
        d: Count,
        scale: Positive,
        depth: Whole,
        model: FileName | None = None,
        text: FileName | None = None,
        tokenizer: FileName | None = None,
        layers: Sequence[int] | None = None,
        length: Count | None = None,
        turn: Positive | None = None,
    ):
        if (model is None) != (text is None):
            raise ValueError("task.model and task.text: expected both or neither")
        for option, value in {"layers": layers, "tokenizer": tokenizer}.items():
            if model is None and value is not None:
                raise ValueError(
                    f"task.{option}={value}: expected task.model; set it, or remove task.{option}"
                )
        self.ms, self.samples, self.row_count, self.pairs = list(ms), samples, rows, pairs
        self.source = (
            Synthetic(length or 1024, heads, d, scale, depth, turn)
            if model is None
            else Pretrained(model, text, tokenizer, length, layers)
        )
        self.depth = model is not None or depth > 0

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        rows, layers = [], self.source.layers(0, seed)
        numbers, ms, plan = range(len(layers)), self.ms if mechanism.estimates else [None], []
        check_estimates(mechanism)
        if mechanism.estimates:
            phi = mechanism.map(
                "softmax"
            )  # raises before the first row if map and sampler are incompatible
            noise = sample_projections(phi, mechanism, 1, layers[0].d, generator(seed), ())
            phi.phi_q(layers[0].x[:, :, :1], noise, layers[0].fit(phi))
            plan = [("heads", self.of_heads, (i, seed)) for i in numbers]
        plan += [("layer", self.of_layer, (mechanism, m, i, seed)) for m in ms for i in numbers]
        plan += [("depth", self.of_depth, (mechanism, m, seed)) for m in ms if self.depth]
        plan += [("test", self.of_all, (mechanism, rows, seed))]
        for split, compute, arguments in plan:
            rows.append({"split": split, **compute(*arguments)})
            yield rows[-1]

    def of_heads(self, i: int, seed: int) -> dict[str, Any]:
        """Return mean |x + y|^2 and log relative MSE (nats) of each head of a layer.

        All maps have M = the largest m features, independent projections and parameters fitted to the head; `best` has
        the smallest MSE. The MSE of SMREG includes its bias. Mixtures are left out, because they have no closed form.
        """
        layer = self.source.layers(0, seed)[i]
        means = Statistics.of(layer.x, layer.y_of_heads).mean_sq_sum[0]
        maps = {
            name: by.map()
            for name in choices("features")
            if not (by := Mechanism.of(features=name)).own_kernel
        }
        of_maps = {
            name: predicted_log_mse(phi, layer, max(self.ms), seed)
            for name, phi in maps.items()
            if phi.estimates and not phi.on_sequences
        }
        return {
            "layer": i,
            "path": layer.path,
            "heads": layer.heads,
            "mean_sq_sum": means.tolist(),
            "best": [min(of_maps, key=lambda name: of_maps[name][h]) for h in range(layer.heads)],
            "log_relative_mse": {
                name: [_number(v) for v in values] for name, values in of_maps.items()
            },
        }

    def of_layer(self, mechanism: Mechanism, m: int | None, i: int, seed: int) -> dict[str, Any]:
        """Return mean errors of output and matrix over samples, and by head (`_heads`)."""
        errors, negative = self.measure(mechanism, m, i, seed)
        layer = self.source.layers(0, seed)[i]
        record = {"layer": i, "path": layer.path} | (
            {"m": m, "negative_denominators": negative} if m else {}
        )
        for name, values in errors.items():
            record |= {name: _number(values.mean()), f"{name}_heads": _numbers(values.mean(0))}
        return record | (self.variances(mechanism, m, layer, i, seed) if m and self.pairs else {})

    @torch.no_grad()
    def measure(
        self, mechanism: Mechanism, m: int | None, i: int, seed: int
    ) -> tuple[dict[str, Tensor], float]:
        """Return errors of one layer by name, and the share of denominators <= 0.

        m: None for attention without projections. Errors have the shape (samples, H); `uniform_error` is that of
        uniform attention.
        """
        count, found = DenominatorCount(), []
        for sample in range(self.samples):
            layer = self.source.layers(sample, seed)[i]
            x, y, v, causal = layer.x, layer.y, layer.v, layer.causal
            pairs = {"uniform": (uniform_attention(x, y, v, causal=causal), layer.output)}
            if m is None:
                pairs["output"] = (whole_output(mechanism, layer), layer.output)
            else:
                phi, rows = (
                    mechanism.with_projections(m).map(),
                    torch.randperm(x.shape[2], generator=generator(seed)),
                )
                rows = rows[: self.row_count].sort().values
                noise = sample_projections(
                    phi, mechanism, m, layer.d, generator(seed, i, sample), (layer.heads,)
                )
                params = layer.fit(phi)
                pairs["output"] = (
                    attention(x, y, v, phi, noise, params, causal=causal, counter=count),
                    layer.output,
                )
                pairs["matrix"] = [
                    attention_matrix(x, y, *given, causal=causal, rows=rows)
                    for given in ((phi, noise, params), ())
                ]
            found.append(
                {
                    f"{name}_error": relative_error(*pair, (-2, -1))[0]
                    for name, pair in pairs.items()
                }
            )
        return {
            name: torch.stack([each[name] for each in found]) for name in found[0]
        }, count.fraction

    def variances(
        self, mechanism: Mechanism, m: int, layer: "LayerInputs", i: int, seed: int
    ) -> dict[str, Any]:
        """Return log Var(estimate) / SM^2 with m projections: median over random pairs.

        Three variants share the pairs: the closed form for independent projections; the exact variance of coupled
        projections, if known (`_coupled`); and the variance of DRAWS samples (`_sampled`).
        """
        phi, (x, y) = mechanism.map("softmax"), random_pairs(layer, self.pairs, generator(seed, i))
        params, squared = layer.fit(phi), 2 * (x * y).sum(-1)
        of_kinds = {"": phi.log_mse(x, y, params, m) - squared}
        if coupled(phi, mechanism):
            of_kinds["_coupled"] = (
                ensemble_log_variance(phi, x, y, params, m, mechanism.sampler_part.name) - squared
            )
        ratios = sampled_ratios(phi, mechanism, m, x, y, params, DRAWS, generator(seed, i, m))
        of_kinds["_sampled"] = ratios.var(0, keepdim=True).log()
        medians = {f"log_variance{kind}": v[0].median(-1).values for kind, v in of_kinds.items()}
        middle = {k: _number(v.median()) for k, v in medians.items()}
        return middle | {f"{k}_heads": _numbers(v) for k, v in medians.items()}

    def of_depth(self, mechanism: Mechanism, m: int | None, seed: int) -> dict[str, Any]:
        """Return the mean error over samples of the hidden states after each layer."""
        mean = self.source.hidden_errors(
            replace(mechanism, m=m) if m else mechanism, self.samples, seed
        ).mean(0)
        return ({"m": m} if m else {}) | {
            "hidden_error": _number(mean[-1]),
            "hidden_error_by_layer": _numbers(mean),
        }

    def of_all(self, mechanism: Mechanism, rows: list[dict], seed: int) -> dict[str, Any]:
        """Return means over layers at the largest m, and counts of the best map by head."""
        last = [r for r in rows if r.get("m") in (None, max(self.ms))]
        top = [r for r in last if r["split"] == "layer"]
        columns = {name: [r[name] for r in top] for name in top[0] if name in MEANS}
        record = {
            name: None if None in each else sum(each) / len(each) for name, each in columns.items()
        }
        for depth in (r for r in last if r["split"] == "depth"):
            record["hidden_error"] = depth["hidden_error"]
        if mechanism.estimates:
            best = Counter(name for r in rows if r["split"] == "heads" for name in r["best"])
            layer, phi = self.source.layers(0, seed)[0], mechanism.map("softmax")
            x, y = layer.x[0, 0], layer.y[0, 0]
            record |= {
                "best": dict(best.most_common()),
                "m": max(self.ms),
                **bias_record(phi, mechanism.sampler, x, y, phi.fit(Statistics.of(x, y))),
            }
        return record

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        errors = {
            "the output": "output_error",
            "uniform attention": "uniform_error",
            "the matrix": "matrix_error",
            "the last hidden states": "hidden_error",
        }
        shown = ", ".join(
            f"of {what} {_shown(last[key])}" for what, key in errors.items() if key in last
        )
        best = ", ".join(f"{name} {n}" for name, n in last.get("best", {}).items())
        predicted = (
            f"heads by the map that the closed forms predict best at equal M: {best}{bias_sentence(last)}\n"
            if best
            else ""
        )
        m = f"m = {last['m']}: " if "m" in last else ""
        return f"{self.table(records)}{self.warning(records)}\n{predicted}{m}relative error {shown}"

    def warning(self, records: list[dict]) -> str:
        """Return a warning for layers whose error exceeds that of uniform attention."""
        layer_rows = [r for r in records if r["split"] == "layer"]
        counts = Counter(
            r.get("m")
            for r in layer_rows
            if r["output_error"] is None or r["output_error"] > r["uniform_error"]
        )
        layers = len({r["layer"] for r in layer_rows})
        shown = ", ".join(
            f"in {n} of {layers} layers" + f" with m = {m}" * bool(m) for m, n in counts.items()
        )
        return (
            shown and f"\nWARNING: further from exact attention than uniform attention is, {shown}"
        )

    def table(self, records: list[dict]) -> str:
        """Format one line per layer, at the largest m."""
        import pandas as pd

        heads = {r["layer"]: r for r in records if r["split"] == "heads"}
        lines = [
            {"layer": r["layer"], "path": r["path"]}
            | {
                name.removesuffix("_error").replace("_", " "): r[name]
                for name in MEANS
                if name in r
            }
            for r in records
            if r["split"] == "layer" and r.get("m") in (None, max(self.ms))
        ]
        for line in lines:
            if head := heads.get(line["layer"]):
                line["|x + y|^2"] = sum(head["mean_sq_sum"]) / head["heads"]
                line["predicted best"] = Counter(head["best"]).most_common(1)[0][0]
        return (
            pd.DataFrame(lines)
            .dropna(axis=1, how="all")
            .to_string(index=False, na_rep="-", float_format=_shown)
        )


# ---- where the tensors come from


@dataclass
class LayerInputs:
    """Inputs of one call of an attention layer."""

    path: str
    x: Tensor  # (1, H, L, d)
    y: Tensor  # (1, Hkv, S, d)
    v: Tensor  # (1, Hkv, S, dv)
    causal: bool = False

    def __post_init__(self):
        self.heads, self.d = self.x.shape[1], self.x.shape[3]

    @cached_property
    def y_of_heads(self) -> Tensor:
        """Keys of each query head, (1, H, S, d)."""
        return repeat_heads(self.y, self.heads)

    @cached_property
    def output(self) -> Tensor:
        """Output of exact attention, (1, H, L, dv)."""
        return exact_attention(self.x, self.y, self.v, causal=self.causal)

    def fit(self, phi: FeatureMap) -> Params:
        """Fit parameters (1, H, 1, ...) to these tensors, jointly for grouped query heads."""
        return for_query_heads(
            phi.fit(grouped_statistics(self.x, self.y)), self.heads // self.y.shape[1]
        )


class Synthetic:
    """Random queries, keys and values, and a Transformer with random weights.

    q, k ~ N(0, scale^2) and v ~ N(0, 1) for each sample. The Transformer has `depth` bidirectional pre-norm layers of
    width heads * d with torch's initial weights; those of queries and keys are scaled to give a standard deviation of
    `scale`. Its input tokens are N(0, 1).

    Args:
        scale: Standard deviation of the entries of queries and keys.
        turn: Angle in radians between a query and the key at its position, in a random plane: q = cos(turn) k +
            sin(turn) g, g ~ N(0, scale^2). None: independent.
    """

    def __init__(
        self, length: int, heads: int, d: int, scale: float, depth: int, turn: float | None = None
    ):
        self.length, self.heads, self.d, self.scale, self.depth, self.turn = (
            length,
            heads,
            d,
            scale,
            depth,
            turn,
        )

    def layers(self, sample: int, seed: int) -> list[LayerInputs]:
        return [
            _normal(self.length, self.heads, self.d, self.scale, self.turn, 1000 * seed + sample)
        ]

    def hidden_errors(self, mechanism: Mechanism, samples: int, seed: int) -> Tensor:
        """Return relative errors of the hidden states after each layer, (samples, depth).

        All samples share the weights.
        """
        return torch.tensor(
            [
                self.errors_of(replace(mechanism, seed=seed), seed, 1000 * seed + sample, sample)
                for sample in range(samples)
            ]
        )

    @torch.no_grad()
    def errors_of(
        self, mechanism: Mechanism, weights: int, tokens: int, sample: int
    ) -> list[float]:
        """Return the errors of one sample.

        weights, tokens: seeds. sample: number of the sample of the projections.
        """
        size = (self.heads, self.d, self.scale, self.depth, weights)
        h, exact = _exact_states(*size, self.length, tokens)
        layers = [
            mechanism.layer(self.heads, self.d, layer=self.depth * sample + i)
            for i in range(self.depth)
        ]
        return [
            relative_error(*pair).item()
            for pair in zip(states(_random_transformer(*size), h, layers), exact)
        ]


def states(model: Transformer, h: Tensor, layers: Sequence[nn.Module] = ()) -> list[Tensor]:
    """Return the hidden states (1, L, width) after each block.

    layers: attention layers that replace those of the first blocks.
    """
    result = []
    for block, layer in zip_longest(model.blocks, layers):
        own, block.attention = block.attention, layer or block.attention
        h = block(h)
        block.attention = own
        result.append(h)
    return result


@lru_cache(maxsize=64)
def _normal(
    length: int, heads: int, d: int, scale: float, turn: float | None, seed: int
) -> LayerInputs:
    q, k, v = torch.randn(3, 1, heads, length, d, generator=torch.Generator().manual_seed(seed))
    if turn is not None:
        q = math.cos(turn) * k + math.sin(turn) * q
    return LayerInputs("synthetic", scale * q / d**0.25, scale * k / d**0.25, v)


@lru_cache(maxsize=1)
def _random_transformer(heads: int, d: int, scale: float, depth: int, seed: int) -> Transformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(heads, depth, 4 * heads * d, heads * d, Mechanism.of("exact").layer)
    for block in (
        model.blocks
    ):  # with torch's uniform weights, outputs for normalised tokens have variance 1/3
        block.qkv.weight.data[: 2 * heads * d] *= 3**0.5 * scale
    return model.eval()


@lru_cache(maxsize=16)
def _exact_states(
    heads: int, d: int, scale: float, depth: int, weights: int, length: int, tokens: int
) -> tuple[Tensor, list[Tensor]]:
    """Return tokens (1, L, heads * d) and hidden states after each layer."""
    h = torch.randn(1, length, heads * d, generator=torch.Generator().manual_seed(tokens))
    return h, states(_random_transformer(heads, d, scale, depth, weights), h)


class Pretrained(Subject):
    """A pretrained model that reads, and is fitted to, the first tokens of a document.

    layers: indices of attention layers, as for `swap_attention`.
    """

    def __init__(
        self,
        model: str,
        text: str,
        tokenizer: str | None = None,
        length: int | None = None,
        layers: Sequence[int] | None = None,
    ):
        super().__init__(model, text, None, tokenizer, length, 1, 1, 0)
        self.training, self.chosen = [self.rows], layers
        calls = self.record_calls(self.rows, LayerCall.of, layers)[0]
        self.inputs = [
            LayerInputs(
                call.path,
                call.scaling**0.5 * call.q,
                call.scaling**0.5 * call.k,
                call.v,
                call.causal and call.q.shape[2] > 1,
            )
            for call in calls
        ]

    def layers(self, sample: int, seed: int) -> list[LayerInputs]:
        return self.inputs

    @torch.no_grad()
    def hidden_errors(self, mechanism: Mechanism, samples: int, seed: int) -> Tensor:
        """Return relative errors of the hidden states after each layer, (samples, layers).

        Only the chosen layers are approximated.
        """
        errors = []
        for sample in range(samples):
            with self.swapped(replace(mechanism, seed=1000 * seed + sample), self.chosen):
                pairs = zip(self.run(self.rows).hidden_states[1:], self.exact[0].states)
                errors.append([relative_error(*pair) for pair in pairs])
        return torch.tensor(errors)


# ---- what is computed of them


def whole_output(mechanism: Mechanism, layer: LayerInputs) -> Tensor:
    """Output of attention without projections; causal layers are fitted to its inputs."""
    state = mechanism.layer(
        layer.heads, layer.d, kv_heads=layer.y.shape[1], causal=layer.causal, scaling=1.0
    ).eval()
    with state.calibration() if hasattr(state, "calibration") else nullcontext():
        state(layer.x, layer.y, layer.v)
    return state(layer.x, layer.y, layer.v)


def predicted_log_mse(phi: FeatureMap, layer: LayerInputs, features: int, seed: int) -> list[float]:
    """Mean log E (estimate - SM)^2 / SM^2 over random pairs, for each head.

    Projections are independent, and M = `features`.
    """
    x, y = random_pairs(layer, PREDICTED, generator(seed))
    m = max(1, features // phi.width(1))
    return log_relative_mse(phi, x, y, layer.fit(phi), m).clamp(min=SMALL)[0].mean(-1).tolist()


def random_pairs(layer: LayerInputs, pairs: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random queries and keys (1, H, pairs, d), float64; causal: key not after query."""
    i = torch.randint(layer.x.shape[2], (pairs,), generator=g)
    offset = layer.y.shape[2] - layer.x.shape[2]
    j = (
        torch.rand(pairs, generator=g) * (i + offset + 1 if layer.causal else layer.y.shape[2])
    ).long()
    return layer.x[:, :, i].double(), layer.y_of_heads[:, :, j].double()


def coupled(phi: FeatureMap, mechanism: Mechanism) -> bool:
    """Whether the exact variance of the mechanism's coupled projections is known."""
    exact = getattr(mechanism.sampler, "keywords", {}).get("lengths", "chi") == "chi"
    return mechanism.sampler_part.name in ("orthogonal", "simplex") and exact and couples(phi)


def _number(value: Tensor | float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _numbers(values: Tensor) -> list[float | None]:
    return [_number(v) for v in values]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
