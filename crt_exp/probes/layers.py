"""How well attention that is more than a feature map approximates softmax attention: near-far attention, with its sets
of keys.

Legend: H heads. An error is relative, in the Frobenius norm of a head: |estimate - exact| / |exact|.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from crt_exp.mechanism import Mechanism
from crt_exp.nearfar import NearFar
from crt_exp.probes.base import planned
from crt_exp.probes.captured import LayerInputs, Pretrained, Synthetic, relative_error

ERRORS = ("output_error", "uniform_error", "predicted_error")


def is_measured_whole(mechanism: Mechanism) -> bool:
    """Whether what its layers give is more than a feature map of which a probe could tell."""
    return isinstance(mechanism.kind, type) and issubclass(mechanism.kind, NearFar)


def records(source: Synthetic | Pretrained, mechanism: Mechanism, samples: int, depth: bool, seed: int,
            done: list[dict]) -> Iterator[dict[str, Any]]:
    """`layer`, one a layer: the error of its output, that of uniform attention, and the one predicted from far weights
    and spreads of cells; `depth`: the error of the hidden states behind each layer; a final one with the means."""
    rows, numbers = list(done), range(len(source.layers(0, seed)))
    plan = [("layer", of_layer, (source, mechanism, samples, i, seed)) for i in numbers]
    plan += [("depth", of_depth, (source, mechanism, samples, seed))] if depth else []
    plan += [("test", of_all, (rows,))]
    yield from planned(plan, rows)


def of_layer(source: Synthetic | Pretrained, mechanism: Mechanism, samples: int, i: int, seed: int) -> dict[str, Any]:
    errors = [of_head(source.layers(sample, seed)[i], mechanism) for sample in range(samples)]
    stacked = {name: torch.stack([e[name] for e in errors]) for name in errors[0]}
    means = {name: float(values.mean()) for name, values in stacked.items()}
    return {"layer": i, "path": source.layers(0, seed)[i].path, **means,
            **{f"{name}_heads": values.mean(0).tolist() for name, values in stacked.items()}}


@torch.no_grad()
def of_head(layer: LayerInputs, mechanism: Mechanism) -> dict[str, Tensor]:
    """(H,) each; a causal layer's codebook is of the same tensors."""
    state = mechanism.layer(layer.heads, layer.d, kv_heads=layer.y.shape[1], causal=layer.causal, scaling=1.0).eval()
    with state.calibration():
        state(layer.x, layer.y, layer.v)
    output = state(layer.x, layer.y, layer.v)
    errors = {"output_error": relative_error(output, layer.output, (-2, -1))[0],
             "uniform_error": relative_error(layer.uniform, layer.output, (-2, -1))[0]}
    known = state.predicted is not None  # not of random features
    return errors | ({"predicted_error": torch.full((layer.heads,), state.predicted)} if known else {})


def of_depth(source: Synthetic | Pretrained, mechanism: Mechanism, samples: int, seed: int) -> dict[str, Any]:
    errors = source.hidden_errors(mechanism.layer, samples, seed).mean(0)
    return {"hidden_error": float(errors[-1]), "hidden_error_by_layer": errors.tolist()}


def of_all(rows: list[dict]) -> dict[str, Any]:
    layers = [row for row in rows if row["split"] == "layer"]
    means = {name: sum(row[name] for row in layers) / len(layers) for name in ERRORS if name in layers[0]}
    depth = next(({"hidden_error": row["hidden_error"]} for row in rows if row["split"] == "depth"), {})
    return means | depth | {"final": True}


def summary(source: Synthetic | Pretrained, rows: list[dict]) -> str:
    import pandas as pd

    layer_rows = [row for row in rows if row["split"] == "layer"]
    table = pd.DataFrame([{name: row[name] for name in ("layer", "path", *ERRORS) if name in row}
                          for row in layer_rows])
    last = rows[-1]
    hidden = f", of the last hidden states {last['hidden_error']:.3g}" if "hidden_error" in last else ""
    shown = table.to_string(index=False, float_format=lambda value: f"{value:.3g}")
    return (f"{shown}\n{source}: relative error of the output {last['output_error']:.3g}, of uniform attention "
            f"{last['uniform_error']:.3g}{hidden}")
