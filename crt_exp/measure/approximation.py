"""How well a mechanism approximates softmax attention, on a model's own tensors or on synthetic ones, and what that
does to the hidden states behind 1, 2, ... layers; and which mechanism the closed forms predict best for each head.

Legend: H heads, m projections, M features. An error is relative, in the Frobenius norm of a head:
|estimate - exact| / |exact|.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from crt_exp.attention import DenominatorCount, attention
from crt_exp.attention.reference import attention_matrix
from crt_exp.bounds import ensemble_log_variance
from crt_exp.bounds.coupling import couples
from crt_exp.config import choices
from crt_exp.features import FeatureMap, Statistics
from crt_exp.hints import Count, Positive, Several, Whole
from crt_exp.mechanism import Mechanism
from crt_exp.nearfar import NearFar
from crt_exp.nested import Nested
from crt_exp.measure.base import check_estimates, planned
from crt_exp.measure.captured import LayerInputs, Pretrained, Synthetic, relative_error
from crt_exp.measure.kernel import drawn, drawn_ratios, generator, log_relative_mse
from crt_exp.samplers.bias import bias_record, bias_sentence
from crt_exp.schema import checked

DRAWS = 200      # of the noise, for sample variances
PREDICTED = 256  # pairs of a head over which the closed forms of all mechanisms are averaged
MEANS = ("output_error", "uniform_error", "matrix_error", "output_mse", "matrix_mse", "negative_denominators",
         "log_variance", "log_variance_coupled", "log_variance_sampled")  # of the final record, over layers
LENGTH = 1024    # of synthetic tensors
SMALL = -60.0    # nats: a smaller relative MSE counts as this


def is_measured_whole(mechanism: Mechanism) -> bool:
    """Whether what its layers give is more than a feature map of which a probe could tell."""
    return isinstance(mechanism.kind, type) and issubclass(mechanism.kind, NearFar)


@checked("task")
class Approximation:
    """task=approximation; see conf/task/approximation.yaml for the options.

    Records of four kinds: `heads`, one a layer: mean |x + y|^2, and each mechanism's log relative MSE by the closed
    forms; `layer`, one a layer and m: errors and variances; `depth`, one an m: the error behind each layer; and a final
    one at the largest m. Of near-far attention, which has no projections: see `layer_records`.
    """

    metric, lower_is_better = "output_error", True
    measures_whole = staticmethod(is_measured_whole)

    def __init__(self, ms: Several[Count], samples: Count, rows: Count, pairs: Whole, heads: Count, d: Count,
                 scale: Positive, depth: Whole, model: str | None = None, text: str | None = None,
                 tokenizer: str | None = None, layers: Sequence[int] | None = None, length: Count | None = None,
                 turn: Positive | None = None):
        if (model is None) != (text is None):
            raise ValueError("task.model and task.text go together: a model, and the text that it reads")
        if model is None and (layers is not None or tokenizer is not None):
            raise ValueError("task.layers and task.tokenizer need task.model")
        if model is not None and turn is not None:
            raise ValueError("task.turn is of synthetic queries: a model has its own")
        self.ms, self.samples, self.rows, self.pairs = list(ms), samples, rows, pairs
        self.source = (Synthetic(length or LENGTH, heads, d, scale, depth, turn) if model is None
                       else Pretrained(model, text, tokenizer, length, layers))
        self.depth = model is not None or depth > 0

    def records(self, mechanism: Mechanism, seed: int, done: list[dict] = ()) -> Iterator[dict[str, Any]]:
        if is_measured_whole(mechanism):
            yield from layer_records(self.source, mechanism, self.samples, self.depth, seed, done)
            return
        check_estimates(mechanism)
        phi, rows, numbers = mechanism.map("softmax"), list(done), range(len(self.source.layers(0, seed)))
        self.check(phi, mechanism, seed)
        plan = [("heads", self.of_heads, (i, seed)) for i in numbers]
        plan += [("layer", self.of_layer, (phi, mechanism, m, i, seed)) for m in self.ms for i in numbers]
        plan += [("depth", self.of_depth, (phi, mechanism, m, seed)) for m in self.ms if self.depth]
        plan += [("test", self.of_all, (phi, mechanism, rows, seed))]
        yield from planned(plan, rows)

    def check(self, phi: FeatureMap, mechanism: Mechanism, seed: int) -> None:
        """Raises ValueError, before the first record, where map and sampler do not go together."""
        layer = self.source.layers(0, seed)[0]
        phi.phi_q(layer.x[:, :, :1], mechanism.sampler(1, layer.d, generator(seed)), layer.fit(phi))

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
        every = {name: Mechanism.of(features=name).map() for name in choices("features")
                 if not Mechanism.of(features=name).own_kernel}
        of_maps = {name: predicted_log_mse(phi, layer, max(self.ms), seed) for name, phi in every.items()
                 if phi.estimates}
        unbiased = [name for name in of_maps if estimates_softmax(Mechanism.of(features=name).map())]

        def best(names: Iterable[str]) -> list[str]:
            return [min(names, key=lambda name: of_maps[name][h]) for h in range(layer.heads)]

        return {"layer": i, "path": layer.path, "heads": layer.heads, "mean_sq_sum": means.tolist(),
                "best": best(of_maps), "best_unbiased": best(unbiased),
                "log_relative_mse": {name: [_number(v) for v in values] for name, values in of_maps.items()}}

    # ---- what is measured

    def of_layer(self, phi: FeatureMap, mechanism: Mechanism, m: int, i: int, seed: int) -> dict[str, Any]:
        """Errors of output and matrix, over samples; `_heads`: each head's mean."""
        errors, negative = self.measure(phi, mechanism, m, i, seed)
        layer = self.source.layers(0, seed)[i]
        record = {"layer": i, "path": layer.path, "m": m, "negative_denominators": negative}
        for name, values in errors.items():
            record |= _spread(name, values.mean(-1)) | {f"{name}_heads": _numbers(values.mean(0))}
        return record | (self.variances(phi, mechanism, m, layer, i, seed) if self.pairs else {})

    def measure(self, phi: FeatureMap, mechanism: Mechanism, m: int, i: int,
                seed: int) -> tuple[dict[str, Tensor], float]:
        """Of one layer: errors by name, (samples, H) each, and the share of denominators that are not positive."""
        count, errors = DenominatorCount(), []
        for sample in range(self.samples):
            layer = self.source.layers(sample, seed)[i]
            noise = drawn(phi, mechanism, m, layer.d, generator(seed, i, sample), (layer.heads,))
            errors.append(self.errors(phi, noise, layer, count, seed))
        return {name: torch.stack([e[name] for e in errors]) for name in errors[0]}, count.fraction

    def errors(self, phi: FeatureMap, noise: Nested, layer: LayerInputs, count: DenominatorCount,
               seed: int) -> dict[str, Tensor]:
        """Relative error and mean squared error of output and matrix, and the control, the relative error of uniform
        attention: (H,) each."""
        params, tensors = layer.fit(phi), (layer.x, layer.y)
        rows = torch.randperm(layer.x.shape[2], generator=generator(seed))[:self.rows].sort().values
        output = attention(*tensors, layer.v, phi, noise, params, causal=layer.causal, counter=count)
        matrix = attention_matrix(*tensors, phi, noise, params, causal=layer.causal, rows=rows)
        errors = {"uniform_error": relative_error(layer.uniform, layer.output, (-2, -1))[0]}
        for name, estimate, exact in (("output", output, layer.output), ("matrix", matrix, layer.matrix(rows))):
            errors[f"{name}_error"] = relative_error(estimate, exact, (-2, -1))[0]
            errors[f"{name}_mse"] = (estimate.double() - exact).square().mean((-2, -1))[0]
        return errors

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
        of_kinds["_sampled"] = sampled_log_variance(phi, mechanism, m, x, y, params, generator(seed, i, m)) - squared
        medians = {f"log_variance{kind}": v[0].median(-1).values for kind, v in of_kinds.items()}
        middle = {k: _number(v.median()) for k, v in medians.items()}
        return middle | {f"{k}_heads": _numbers(v) for k, v in medians.items()}

    def of_depth(self, phi: FeatureMap, mechanism: Mechanism, m: int, seed: int) -> dict[str, Any]:
        """Error of the hidden states behind layers 1, 2, ..., over samples."""
        errors = self.source.hidden_errors(replace(mechanism, m=m, seed=seed).layer, self.samples, seed)
        spread = [_spread("hidden_error", e) for e in errors.unbind(1)]
        return {"m": m, **spread[-1], **{f"{k}_by_layer": [s[k] for s in spread] for k in spread[0]}}

    def of_all(self, phi: FeatureMap, mechanism: Mechanism, rows: list[dict], seed: int) -> dict[str, Any]:
        """Means over layers at the largest m, and for how many heads each mechanism is predicted to be best."""
        top = [r for r in rows if r["split"] == "layer" and r["m"] == max(self.ms)]
        means = {name: _mean([r[name] for r in top]) for name in top[0] if name in MEANS}
        depth = (r for r in rows if r["split"] == "depth" and r["m"] == max(self.ms))
        means |= next(({"hidden_error": r["hidden_error"]} for r in depth), {})
        for key in ("best", "best_unbiased"):
            means[key] = dict(Counter(name for r in rows if r["split"] == "heads" for name in r[key]).most_common())
        layer = self.source.layers(0, seed)[0]
        x, y = layer.x[0, 0], layer.y[0, 0]
        bias = bias_record(phi, mechanism.sampler, x, y, phi.fit(Statistics.of(x, y)))
        return {"m": max(self.ms), **means, **bias, "final": True}

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        if "m" not in last:
            return layer_summary(self.source, records)
        errors = {"the output": "output_error", "uniform attention": "uniform_error", "the matrix": "matrix_error",
                  "the last hidden states": "hidden_error"}
        shown = ", ".join(f"of {what} {_shown(last[key])}" for what, key in errors.items() if key in last)
        best, unbiased = (", ".join(f"{name} {n}" for name, n in last[key].items())
                          for key in ("best", "best_unbiased"))
        return (f"{self.table(records)}{self.warning(records)}\n"
                f"heads by the mechanism that the closed forms predict best at equal M: {best} "
                f"(of the unbiased ones: {unbiased}){bias_sentence(last)}\n"
                f"{self.source}, m = {last['m']}: relative error {shown}")

    def warning(self, records: list[dict]) -> str:
        """Names the layers and m whose output is no nearer to exact attention than the control is."""
        layer_rows = [r for r in records if r["split"] == "layer"]
        lost = [r for r in layer_rows if r["output_error"] is None or r["output_error"] > r["uniform_error"]]
        layers, counts = len(layer_rows) // len(self.ms), Counter(r["m"] for r in lost)
        shown = ", ".join(f"in {n} of {layers} layers with m = {m}" for m, n in counts.items())
        warning = ("\nWARNING: the output is further from exact attention than uniform attention is, "
                "the mean of the values, ")
        return warning + shown if lost else ""

    def table(self, records: list[dict]) -> str:
        """A line for each layer, at the largest m."""
        import pandas as pd

        heads = [r for r in records if r["split"] == "heads"]
        layer_rows = [r for r in records if r["split"] == "layer" and r["m"] == max(self.ms)]
        lines = [{"layer": h["layer"], "path": h["path"], "|x + y|^2": sum(h["mean_sq_sum"]) / h["heads"],
                  "least": min(h["mean_sq_sum"]), "most": max(h["mean_sq_sum"]), "output": r["output_error"],
                  "uniform": r["uniform_error"], "matrix": r["matrix_error"], "log variance": r.get("log_variance"),
                  "sampled": r.get("log_variance_sampled"),
                  "predicted best": Counter(h["best"]).most_common(1)[0][0],
                  "unbiased": Counter(h["best_unbiased"]).most_common(1)[0][0]} for h, r in zip(heads, layer_rows)]
        return pd.DataFrame(lines).dropna(axis=1, how="all").to_string(index=False, na_rep="-", float_format=_shown)


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


def sampled_log_variance(phi: FeatureMap, mechanism: Mechanism, m: int, x: Tensor, y: Tensor, params,
                         g: torch.Generator) -> Tensor:
    """log of the sample variance of the kernel estimates of pairs (1, H, pairs, d) over DRAWS draws: (1, H, pairs)."""
    ratios = drawn_ratios(phi, mechanism, m, x, y, params, DRAWS, g)
    return ratios.var(0, keepdim=True).log() + 2 * (x * y).sum(-1)


def coupled(phi: FeatureMap, mechanism: Mechanism) -> bool:
    """Whether the exact variance of these coupled rows is known."""
    exact = getattr(mechanism.sampler, "keywords", {}).get("lengths", "chi") == "chi"
    return mechanism.sampler_part.name in ("orthogonal", "simplex") and exact and couples(phi)


def _spread(name: str, values: Tensor) -> dict[str, float | None]:
    """Mean, standard deviation and median over samples, and the same of the logarithm;
    None where it is not a number."""
    logs, few = values.log(), len(values) < 2
    return {name: _number(values.mean()), f"{name}_std": None if few else _number(values.std()),
            f"{name}_median": _number(values.median()), f"log_{name}_mean": _number(logs.mean()),
            f"log_{name}_std": None if few else _number(logs.std())}


def _number(value: Tensor | float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _numbers(values: Tensor) -> list[float | None]:
    return [_number(v) for v in values]


def _mean(values: list[float | None]) -> float | None:
    return None if None in values else sum(values) / len(values)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


# ---- attention that is more than a feature map: near-far attention, with its sets of keys


ERRORS = ("output_error", "uniform_error", "predicted_error")


def layer_records(source: Synthetic | Pretrained, mechanism: Mechanism, samples: int, depth: bool, seed: int,
            done: list[dict]) -> Iterator[dict[str, Any]]:
    """`layer`, one a layer: the error of its output, that of uniform attention, and the one predicted from far weights
    and spreads of cells; `depth`: the error of the hidden states behind each layer; a final one with the means."""
    rows, numbers = list(done), range(len(source.layers(0, seed)))
    plan = [("layer", layer_errors, (source, mechanism, samples, i, seed)) for i in numbers]
    plan += [("depth", depth_errors, (source, mechanism, samples, seed))] if depth else []
    plan += [("test", layer_means, (rows,))]
    yield from planned(plan, rows)


def layer_errors(source: Synthetic | Pretrained, mechanism: Mechanism, samples: int, i: int, seed: int
                 ) -> dict[str, Any]:
    errors = [head_errors(source.layers(sample, seed)[i], mechanism) for sample in range(samples)]
    stacked = {name: torch.stack([e[name] for e in errors]) for name in errors[0]}
    means = {name: float(values.mean()) for name, values in stacked.items()}
    return {"layer": i, "path": source.layers(0, seed)[i].path, **means,
            **{f"{name}_heads": values.mean(0).tolist() for name, values in stacked.items()}}


@torch.no_grad()
def head_errors(layer: LayerInputs, mechanism: Mechanism) -> dict[str, Tensor]:
    """(H,) each; the statistics of a causal layer are of the same tensors."""
    state = mechanism.layer(layer.heads, layer.d, kv_heads=layer.y.shape[1], causal=layer.causal, scaling=1.0).eval()
    with state.calibration():
        state(layer.x, layer.y, layer.v)
    output = state(layer.x, layer.y, layer.v)
    errors = {"output_error": relative_error(output, layer.output, (-2, -1))[0],
             "uniform_error": relative_error(layer.uniform, layer.output, (-2, -1))[0]}
    known = state.predicted is not None  # not of random features
    return errors | ({"predicted_error": torch.full((layer.heads,), state.predicted)} if known else {})


def depth_errors(source: Synthetic | Pretrained, mechanism: Mechanism, samples: int, seed: int) -> dict[str, Any]:
    errors = source.hidden_errors(mechanism.layer, samples, seed).mean(0)
    return {"hidden_error": float(errors[-1]), "hidden_error_by_layer": errors.tolist()}


def layer_means(rows: list[dict]) -> dict[str, Any]:
    layers = [row for row in rows if row["split"] == "layer"]
    means = {name: sum(row[name] for row in layers) / len(layers) for name in ERRORS
             if all(name in row for row in layers)}
    depth = next(({"hidden_error": row["hidden_error"]} for row in rows if row["split"] == "depth"), {})
    return means | depth | {"final": True}


def layer_summary(source: Synthetic | Pretrained, rows: list[dict]) -> str:
    import pandas as pd

    layer_rows = [row for row in rows if row["split"] == "layer"]
    table = pd.DataFrame([{name: row[name] for name in ("layer", "path", *ERRORS) if name in row}
                          for row in layer_rows])
    last = rows[-1]
    hidden = f", of the last hidden states {last['hidden_error']:.3g}" if "hidden_error" in last else ""
    shown = table.to_string(index=False, float_format=lambda value: f"{value:.3g}")
    return (f"{shown}\n{source}: relative error of the output {last['output_error']:.3g}, of uniform attention "
            f"{last['uniform_error']:.3g}{hidden}")
