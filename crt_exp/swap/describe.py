"""What a model's layers are: a table of its attention, and the matrices of one forward pass.

Notation: B batch, H heads, L tokens.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from crt_exp.attention import Baseline, LinearAttention
from crt_exp.attention.layer import RandomFeatureAttention
from crt_exp.features import AutoRF
from crt_exp.nearfar.layer import NearFar
from crt_exp.swap.families import others
from crt_exp.swap.swap import swappable

# reached: whether the first forward pass after the swap came to the layer; empty before
# open: keys that each query of causal near-far attention reads
# chosen: how many heads have which map, where each takes its own
# errors: |output - exact| / |exact| of the layer and of uniform attention on the batches of the last calibration
COLUMNS = ("layer", "path", "type", "mechanism", "reached", "open", "m", "M", "A mean", "A min", "A max", "chosen",
           "parameters", "error on calibration", "uniform's error")


def describe_attention(model: nn.Module):
    """A DataFrame with COLUMNS, a row for each attention module; last those that cannot be swapped."""
    try:
        import pandas as pd
    except ImportError:
        raise ImportError("describe_attention returns a DataFrame: pip install pandas, or crt_exp[run]") from None
    rows = [_row(i, path, module) for i, (path, module) in enumerate(swappable(model))]
    rows += [_row(None, path, module) for path, module in others(model)]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"layer": "Int64", "open": "Int64"})


def _row(i: int | None, path: str, module: nn.Module) -> dict[str, Any]:
    state = module._modules.get("swapped")
    row = {"layer": i, "path": path, "type": module.__dict__.get("unswapped_class", type(module)).__name__,
           "reached": {None: "", True: "yes", False: "no"}[getattr(state, "reached", None)],
           "parameters": sum(p.numel() for p in module.parameters())}
    if state is None:
        return row | {"mechanism": "cannot be swapped" if i is None else "unchanged"}
    row["mechanism"] = state.mechanism
    if (measured := getattr(state, "measured", None)) is not None:
        row |= {"error on calibration": measured.relative_error, "uniform's error": measured.relative_uniform}
    if isinstance(state, NearFar) and state.causal:
        row["open"] = state.sizes.open
    return row | _fitted(state) if isinstance(state, RandomFeatureAttention) else row


def _fitted(state: RandomFeatureAttention) -> dict[str, Any]:
    """What random features are fitted to; a map without projections has no m."""
    row, params = {"m": state.m if state.gaussian else None, "M": state.width}, _params(state)
    if params is not None and isinstance(state.phi, AutoRF):
        names = Counter(state.phi.names(params)).most_common()
        row["chosen"] = ", ".join(f"{name} {heads}" for name, heads in names)
    if (A := getattr(params, "A", None)) is not None:
        A = (A.real if A.is_complex() else A).double()
        row |= {"A mean": float(A.mean()), "A min": float(A.min()), "A max": float(A.max())}
    return row


def _params(state: RandomFeatureAttention):
    """Fitted to the running averages or the last calibration; None where neither is known."""
    if state.clusters is not None:
        return state.clusters.params() if state.clusters.done else None
    running = state.keeps_statistics and float(state.running_weight) > 0
    stats = state.running_statistics() if running else getattr(state, "seen", None)
    return None if stats is None and state.phi.fitted else state.phi.fit(stats)


@torch.no_grad()
def attention_matrices(model: nn.Module, *inputs: Tensor,
                       keep: Callable[[Tensor], Tensor] = lambda A: A) -> list[Tensor]:
    """keep(A) of each layer's matrix A (B, H, L, L) in one forward pass, in the order of the calls; rows sum to 1.

    A linear attention never forms its matrix, but that is its output for the unit vectors as values. Layers are those
    that were swapped, and of models that were made with a `Mechanism` their own. Raises ValueError where there are
    none: `swap_attention(model, "exact")` makes exact attention visible too.
    """
    matrices, states = [], [part.swapped for part in model.modules() if "swapped" in part._modules]
    states = states or [part for part in model.modules() if isinstance(part, (LinearAttention, Baseline))]
    if not states:
        raise ValueError(f"no attention of this {type(model).__name__} is swapped: call swap_attention(model, 'exact')")

    def note(state: nn.Module, args: tuple, out: Tensor) -> None:
        q, k, _, *mask = args
        unit = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:3], -1)
        matrices.append(keep(state.forward(q, k, unit, *mask)))  # not called as a module, which would come here again

    with ExitStack() as stack:
        for state in states:
            stack.callback(state.register_forward_hook(note).remove)
        model(*inputs)
    return matrices
