"""How well a mechanism approximates softmax attention, on a model's own tensors or on synthetic ones, and what that
does to the hidden states behind 1, 2, ... layers; and which mechanism the closed forms predict best for each head.

Legend: H heads, m projections, M features. An error is relative, in the Frobenius norm of a head:
|estimate - exact| / |exact|.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from crt_exp.advice.bench import LayerCall
from crt_exp.attention import DenominatorCount, attention
from crt_exp.attention.reference import attention_matrix
from crt_exp.bounds import ensemble_log_variance
from crt_exp.bounds.coupling import couples
from crt_exp.config import choices
from crt_exp.features import FeatureMap, Statistics
from crt_exp.hints import Count, Positive, Several, Whole
from crt_exp.mechanism import Mechanism
from crt_exp.measure.base import check_estimates, planned
from crt_exp.measure.captured import LayerInputs, Synthetic, relative_error
from crt_exp.measure.kernel import drawn, drawn_ratios, generator, log_relative_mse
from crt_exp.measure.subject import Subject
from crt_exp.samplers.bias import bias_record, bias_sentence
from crt_exp.schema import checked

DRAWS = 200      # of the noise, for sample variances
PREDICTED = 256  # pairs of a head over which the closed forms of all mechanisms are averaged
MEANS = ("output_error", "uniform_error", "matrix_error", "negative_denominators", "log_variance",
         "log_variance_coupled", "log_variance_sampled")  # of the final record, over layers
SMALL = -60.0    # nats: a smaller relative MSE counts as this


@checked("task")
class Approximation:
    """task=approximation; see conf/task/approximation.yaml for the options.

    Records of four kinds: `heads`, one a layer: mean |x + y|^2, and each mechanism's log relative MSE by the closed
    forms; `layer`, one a layer and m: errors and variances; `depth`, one an m: the error behind each layer; and a final
    one at the largest m. Attention without projections has no `heads`, no matrix and no m.
    """

    metric, lower_is_better = "output_error", True
    measures_whole = staticmethod(lambda mechanism: True)

    def __init__(self, ms: Several[Count], samples: Count, rows: Count, pairs: Whole, heads: Count, d: Count,
                 scale: Positive, depth: Whole, model: str | None = None, text: str | None = None,
                 tokenizer: str | None = None, layers: Sequence[int] | None = None, length: Count | None = None,
                 turn: Positive | None = None):
        if (model is None) != (text is None):
            raise ValueError("task.model and task.text go together: a model, and the text that it reads")
        if model is None and (layers is not None or tokenizer is not None):
            raise ValueError("task.layers and task.tokenizer need task.model")
        self.ms, self.samples, self.of_rows, self.pairs = list(ms), samples, rows, pairs
        self.source = (Synthetic(length or 1024, heads, d, scale, depth, turn) if model is None
                       else Pretrained(model, text, tokenizer, length, layers))
        self.depth = model is not None or depth > 0

    def records(self, mechanism: Mechanism, seed: int, done: list[dict] = ()) -> Iterator[dict[str, Any]]:
        rows, layers = list(done), self.source.layers(0, seed)
        numbers, ms, plan = range(len(layers)), self.ms if mechanism.estimates else [None], []
        check_estimates(mechanism)
        if mechanism.estimates:
            phi = mechanism.map("softmax")  # raises, before the first record, where map and sampler do not go together
            phi.phi_q(layers[0].x[:, :, :1], mechanism.sampler(1, layers[0].d, generator(seed)), layers[0].fit(phi))
            plan = [("heads", self.of_heads, (i, seed)) for i in numbers]
        plan += [("layer", self.of_layer, (mechanism, m, i, seed)) for m in ms for i in numbers]
        plan += [("depth", self.of_depth, (mechanism, m, seed)) for m in ms if self.depth]
        plan += [("test", self.of_all, (mechanism, rows, seed))]
        yield from planned(plan, rows)

    # ---- what the closed forms say

    def of_heads(self, i: int, seed: int) -> dict[str, Any]:
        """Of one layer: mean |x + y|^2 of each head, and the mean over pairs of each mechanism's
        log relative MSE (nats).

        All mechanisms have M = the largest m features, independent projections and parameters fitted to the head;
        `best` has the least, `best_unbiased` the least of those that estimate softmax itself (not SMREG, whose bias
        counts as error).
        """
        layer = self.source.layers(0, seed)[i]
        means = Statistics.of(layer.x, layer.y_of_heads).mean_sq_sum[0]
        maps = {name: by.map() for name in choices("features") if not (by := Mechanism.of(features=name)).own_kernel}
        of_maps = {name: predicted_log_mse(phi, layer, max(self.ms), seed)
                   for name, phi in maps.items() if phi.estimates}
        unbiased = [name for name in of_maps if estimates_softmax(maps[name])]

        def best(names: Iterable[str]) -> list[str]:
            return [min(names, key=lambda name: of_maps[name][h]) for h in range(layer.heads)]

        return {"layer": i, "path": layer.path, "heads": layer.heads, "mean_sq_sum": means.tolist(),
                "best": best(of_maps), "best_unbiased": best(unbiased),
                "log_relative_mse": {name: [_number(v) for v in values] for name, values in of_maps.items()}}

    # ---- what is measured

    def of_layer(self, mechanism: Mechanism, m: int | None, i: int, seed: int) -> dict[str, Any]:
        """Mean errors of output and matrix over samples, and `_heads`, those of each head."""
        errors, negative = self.measure(mechanism, m, i, seed)
        layer = self.source.layers(0, seed)[i]
        record = {"layer": i, "path": layer.path} | ({"m": m, "negative_denominators": negative} if m else {})
        for name, values in errors.items():
            record |= _spread(name, values.mean(-1)) | {f"{name}_heads": _numbers(values.mean(0))}
        return record | (self.variances(mechanism.map("softmax"), mechanism, m, layer, i, seed) if m and self.pairs
                         else {})

    @torch.no_grad()
    def measure(self, mechanism: Mechanism, m: int | None, i: int, seed: int) -> tuple[dict[str, Tensor], float]:
        """Of one layer: errors by name, (samples, H) each, `uniform_error` that of uniform attention; and the share of
        denominators that are not positive. m: None for attention without projections."""
        count, found = DenominatorCount(), []
        for sample in range(self.samples):
            layer = self.source.layers(sample, seed)[i]
            pairs = {"uniform": (layer.uniform, layer.output)}
            if m is None:
                pairs["output"] = (whole_output(mechanism, layer), layer.output)
            else:
                phi, rows = mechanism.map("softmax"), torch.randperm(layer.x.shape[2], generator=generator(seed))
                rows = rows[:self.of_rows].sort().values
                noise = drawn(phi, mechanism, m, layer.d, generator(seed, i, sample), (layer.heads,))
                given = layer.x, layer.y, phi, noise, layer.fit(phi)
                pairs["output"] = (attention(*given[:2], layer.v, *given[2:], causal=layer.causal, counter=count),
                                   layer.output)
                pairs["matrix"] = attention_matrix(*given, causal=layer.causal, rows=rows), layer.matrix(rows)
            found.append({f"{name}_error": relative_error(*pair, (-2, -1))[0] for name, pair in pairs.items()})
        return {name: torch.stack([each[name] for each in found]) for name in found[0]}, count.fraction

    def variances(self, phi: FeatureMap, mechanism: Mechanism, m: int, layer: LayerInputs, i: int,
                  seed: int) -> dict[str, Any]:
        """log Var(estimate) / SM^2 with m projections, the median over the same random pairs for each: by the closed
        form for independent projections, by the exact one for coupled ones where there is one, and of DRAWS draws of
        the noise."""
        x, y = random_pairs(layer, self.pairs, generator(seed, i))
        params, squared = layer.fit(phi), 2 * (x * y).sum(-1)
        of_kinds = {"": phi.log_mse(x, y, params, m) - squared}
        if coupled(phi, mechanism):
            of_kinds["_coupled"] = ensemble_log_variance(phi, x, y, params, m, mechanism.sampler_part.name) - squared
        ratios = drawn_ratios(phi, mechanism, m, x, y, params, DRAWS, generator(seed, i, m))
        of_kinds["_sampled"] = ratios.var(0, keepdim=True).log()
        medians = {f"log_variance{kind}": v[0].median(-1).values for kind, v in of_kinds.items()}
        middle = {k: _number(v.median()) for k, v in medians.items()}
        return middle | {f"{k}_heads": _numbers(v) for k, v in medians.items()}

    def of_depth(self, mechanism: Mechanism, m: int | None, seed: int) -> dict[str, Any]:
        """Mean error over samples of the hidden states behind layers 1, 2, ..."""
        errors = self.source.hidden_errors(replace(mechanism, m=m) if m else mechanism, self.samples, seed)
        return ({"m": m} if m else {}) | _spread("hidden_error", errors[:, -1]) | {
            "hidden_error_by_layer": _numbers(errors.mean(0))}

    def of_all(self, mechanism: Mechanism, rows: list[dict], seed: int) -> dict[str, Any]:
        """Means over layers at the largest m, and for how many heads each mechanism is predicted to be best."""
        last = [r for r in rows if r.get("m") in (None, max(self.ms))]
        top = [r for r in last if r["split"] == "layer"]
        columns = {name: [r[name] for r in top] for name in top[0] if name in MEANS}
        record = {name: None if None in each else sum(each) / len(each) for name, each in columns.items()}
        for depth in (r for r in last if r["split"] == "depth"):
            record["hidden_error"] = depth["hidden_error"]
        if mechanism.estimates:
            heads = [r for r in rows if r["split"] == "heads"]
            for key in ("best", "best_unbiased"):
                record[key] = dict(Counter(name for r in heads for name in r[key]).most_common())
            layer, phi = self.source.layers(0, seed)[0], mechanism.map("softmax")
            x, y = layer.x[0, 0], layer.y[0, 0]
            record |= {"m": max(self.ms), **bias_record(phi, mechanism.sampler, x, y, phi.fit(Statistics.of(x, y)))}
        return record | {"final": True}

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        errors = {"the output": "output_error", "uniform attention": "uniform_error", "the matrix": "matrix_error",
                  "the last hidden states": "hidden_error"}
        shown = ", ".join(f"of {what} {_shown(last[key])}" for what, key in errors.items() if key in last)
        best = [", ".join(f"{name} {n}" for name, n in last[key].items()) for key in ("best", "best_unbiased")
                if key in last]
        predicted = ("heads by the mechanism that the closed forms predict best at equal M: {} (of the unbiased ones: "
                     "{})".format(*best) + f"{bias_sentence(last)}\n" if best else "")
        m = f"m = {last['m']}: " if "m" in last else ""
        return f"{self.table(records)}{self.warning(records)}\n{predicted}{m}relative error {shown}"

    def warning(self, records: list[dict]) -> str:
        """Names the layers and m whose output is no nearer to exact attention than uniform attention is."""
        layer_rows = [r for r in records if r["split"] == "layer"]
        counts = Counter(r.get("m") for r in layer_rows
                         if r["output_error"] is None or r["output_error"] > r["uniform_error"])
        layers = len({r["layer"] for r in layer_rows})
        shown = ", ".join(f"in {n} of {layers} layers" + f" with m = {m}" * bool(m) for m, n in counts.items())
        return shown and ("\nWARNING: the output is further from exact attention than uniform attention is, the mean "
                          f"of the values, {shown}")

    def table(self, records: list[dict]) -> str:
        """A line for each layer, at the largest m."""
        import pandas as pd

        heads = {r["layer"]: r for r in records if r["split"] == "heads"}
        lines = [{"layer": r["layer"], "path": r["path"]} | {
            name.removesuffix("_error").replace("_", " "): r[name] for name in MEANS if name in r}
            for r in records if r["split"] == "layer" and r.get("m") in (None, max(self.ms))]
        for line in lines:
            if head := heads.get(line["layer"]):
                line["|x + y|^2"] = sum(head["mean_sq_sum"]) / head["heads"]
                line["predicted best"] = Counter(head["best"]).most_common(1)[0][0]
        return pd.DataFrame(lines).dropna(axis=1, how="all").to_string(index=False, na_rep="-", float_format=_shown)


class Pretrained(Subject):
    """A model that reads the first tokens of a text, to which causal layers are fitted too. layers: of its attention
    modules, as for `swap_attention`."""

    def __init__(self, model: str, text: str, tokenizer: str | None = None, length: int | None = None,
                 layers: Sequence[int] | None = None):
        super().__init__(model, text, None, tokenizer, length, 1, 1, 0)
        self.training, self.chosen = [self.rows], layers
        self.inputs = [layer_of(call) for call in self.watched(self.rows, LayerCall.of, layers)[0]]

    def layers(self, sample: int, seed: int) -> list[LayerInputs]:
        return self.inputs

    @torch.no_grad()
    def hidden_errors(self, mechanism: Mechanism, samples: int, seed: int) -> Tensor:
        """Relative error of the hidden states behind each layer, the chosen layers approximated: (samples, layers)."""
        errors = []
        for sample in range(samples):
            with self.swapped(replace(mechanism, seed=1000 * seed + sample), self.chosen):
                pairs = zip(self.run(self.rows).hidden_states[1:], self.exact[0].states)
                errors.append([relative_error(*pair) for pair in pairs])
        return torch.tensor(errors)


def layer_of(call: LayerCall) -> LayerInputs:
    root = call.scaling**0.5
    return LayerInputs(call.path, root * call.q, root * call.k, call.v, call.causal and call.q.shape[2] > 1)


def whole_output(mechanism: Mechanism, layer: LayerInputs) -> Tensor:
    """Of attention without projections; what a causal layer fits is fitted to the same tensors."""
    state = mechanism.layer(layer.heads, layer.d, kv_heads=layer.y.shape[1], causal=layer.causal, scaling=1.0).eval()
    with state.calibration() if hasattr(state, "calibration") else nullcontext():
        state(layer.x, layer.y, layer.v)
    return state(layer.x, layer.y, layer.v)


def predicted_log_mse(phi: FeatureMap, layer: LayerInputs, features: int, seed: int) -> list[float]:
    """Of each head: mean over random pairs of log E (estimate - SM)^2 / SM^2 with so many features,
    independent projections."""
    x, y = random_pairs(layer, PREDICTED, generator(seed))
    m = max(1, features // phi.width(1))
    return log_relative_mse(phi, x, y, layer.fit(phi), m).clamp(min=SMALL)[0].mean(-1).tolist()


def estimates_softmax(phi: FeatureMap) -> bool:
    """Whether the mean of its estimates is the softmax kernel, judged at one pair: SMREG estimates another one."""
    x, y = torch.tensor([[0.7, -0.4]], dtype=torch.float64), torch.tensor([[0.3, 0.9]], dtype=torch.float64)
    return torch.allclose(phi.log_kernel(x, y), (x * y).sum(-1))


def random_pairs(layer: LayerInputs, pairs: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Queries and keys (1, H, pairs, d), float64; with causal attention a key is not later than its query."""
    i = torch.randint(layer.x.shape[2], (pairs,), generator=g)
    offset = layer.y.shape[2] - layer.x.shape[2]
    j = (torch.rand(pairs, generator=g) * (i + offset + 1 if layer.causal else layer.y.shape[2])).long()
    return layer.x[:, :, i].double(), layer.y_of_heads[:, :, j].double()


def coupled(phi: FeatureMap, mechanism: Mechanism) -> bool:
    """Whether the exact variance of these coupled rows is known."""
    exact = getattr(mechanism.sampler, "keywords", {}).get("lengths", "chi") == "chi"
    return mechanism.sampler_part.name in ("orthogonal", "simplex") and exact and couples(phi)


def _spread(name: str, values: Tensor) -> dict[str, float | None]:
    """Mean and standard deviation over samples, None where it is not a number."""
    return {name: _number(values.mean()), f"{name}_std": _number(values.std()) if len(values) > 1 else None}


def _number(value: Tensor | float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _numbers(values: Tensor) -> list[float | None]:
    return [_number(v) for v in values]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
