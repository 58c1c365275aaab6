"""Statistics and errors of swapped layers, and a table of the layers.

Calibration passes fill the statistics of swapped layers and measure their errors. The control is uniform attention, the
mean of the values that a query may see: an approximation that is no closer to exact attention tells nothing of q and k.
Notation: B batch, H query heads, Hkv key heads, L queries, S keys, d, dv. q, k, v are unscaled.
"""

import math
import warnings
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.attention.baselines import uniform_attention
from crt_exp.attention.checks import compute_dtype, repeat_heads
from crt_exp.attention.layer import RandomFeatureAttention
from crt_exp.attention.base import LinearAttention
from crt_exp.features import AutoRF
from crt_exp.features.statistics import Moments, Statistics
from crt_exp.nearfar.layer import NearFar
from crt_exp.swap.families import others
from crt_exp.swap.swap import swappable

SEQUENCES = 4   # of a batch, the first ones, on which a layer runs once more
QUERIES = 128   # of each of them, at random, that are compared with exact attention
# reached: whether the first forward pass after the swap came to the layer; empty before
# open: keys that each query of causal near-far attention reads
# chosen: how many heads have which map, where each takes its own
# errors: |output - exact| / |exact| of the layer and of uniform attention on the batches of the last calibration
COLUMNS = ("layer", "path", "type", "mechanism", "reached", "open", "m", "M", "A mean", "A min", "A max", "chosen",
           "error on calibration", "uniform's error")


# ---- calibration

def calibrate_attention(model: nn.Module, batches: Iterable) -> nn.Module:
    """Runs the model over batches, in eval mode and without gradient, to fill the running statistics: those that causal
    layers are fitted to, and of the queries of cross-attention. Measures each layer's error on the way, for
    `describe_attention`.

    A batch is what the model is called with: a dictionary of keyword arguments, a tuple or list of arguments, or one
    tensor; tensors are moved to the model's device. All passes count alike; earlier statistics are replaced. Layers
    that attend to their own sequence in both directions fit each by itself and change nothing.

    The error is |output - exact| / |exact| with the layer's own q, k, v and noise, over heads and queries: of the first
    4 sequences of each batch and at most 128 queries of each. Warns of layers that are further from exact attention
    than uniform attention is, the mean of the values that a query may see.

    Returns the model. Raises ValueError where no layer has random features, and for no batches.
    """
    states = _states(model)
    with ExitStack() as stack:
        for state in states.values():
            stack.callback(state.register_forward_hook(Watcher(state), with_kwargs=True).remove)
        fill_statistics(model, batches)
    worse = [f"{path} ({state.measured.relative_error:.3g}, uniform {state.measured.relative_uniform:.3g})"
             for path, state in states.items() if state.measured.error > state.measured.uniform]
    if worse:
        warnings.warn(f"in {len(worse)} of {len(states)} layers the output is further from exact attention than the "
                      f"mean of the values is: {', '.join(worse[:3])}: take more features (m), or leave layers out",
                      stacklevel=2)
    return model


@torch.inference_mode(False)   # buffers of inference mode could not be trained or loaded later
@torch.no_grad()
def fill_statistics(model: nn.Module, batches: Iterable) -> None:
    """What `calibrate_attention` does, without measuring."""
    count = 0
    with eval_mode(model), ExitStack() as stack:
        for state in _states(model).values():
            stack.enter_context(state.calibration())
        for batch in batches:
            call(model, batch)
            count += 1
    if not count:
        raise ValueError("no batches to calibrate with")


def swapped_states(model: nn.Module) -> list[nn.Module]:
    """The attention that was swapped in, layer by layer."""
    return [part.swapped for part in model.modules() if "swapped" in part._modules]


def learns(model: nn.Module) -> bool:
    """Whether attention of the model is fitted to what earlier calls saw."""
    return any(part.learns for part in model.modules() if isinstance(part, LinearAttention))


@contextmanager
def eval_mode(model: nn.Module):
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _states(model: nn.Module) -> dict[str, LinearAttention]:
    """The layers that a calibration concerns, by path."""
    states = {path.removesuffix(".swapped"): part for path, part in model.named_modules()
              if isinstance(part, LinearAttention)}
    if not states:
        names = ", ".join({part.mechanism for part in swapped_states(model)})
        raise ValueError(f"no attention of this {type(model).__name__} keeps statistics (swapped: {names or 'none'}): "
                         "call swap_attention with random features first")
    return states


def call(model: nn.Module, batch):
    """The model's output for a batch, as `calibrate_attention` takes it."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def moved(value):
        return value.to(device) if isinstance(value, Tensor) else value

    if hasattr(batch, "keys"):
        return model(**{key: moved(batch[key]) for key in batch.keys()})  # noqa: SIM118 (tokenizers' own mappings)
    return model(*(moved(each) for each in (batch if isinstance(batch, (tuple, list)) else (batch,))))


def call_arguments(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """The arguments of a layer's call, for hooks."""
    return q, k, v, key_mask


# ---- errors of a layer

@dataclass
class Measured:
    """Sums of squares over heads, queries and columns of the output, of all that was compared."""

    exact: float = 0.0    # of exact attention
    error: float = 0.0    # of the difference between the layer's output and that
    uniform: float = 0.0  # of the difference between uniform attention and that

    # |output - exact| / |exact|, Frobenius
    relative_error = property(lambda self: math.sqrt(self.error / self.exact) if self.exact else math.nan)
    relative_uniform = property(lambda self: math.sqrt(self.uniform / self.exact) if self.exact else math.nan)


class Watcher:
    """A forward hook that keeps `state.seen`, the mean statistics of what a layer fits to its own sequences, and
    `state.measured`."""

    def __init__(self, state: LinearAttention):
        self.count, state.seen, state.measured = 0, None, Measured()

    def __call__(self, state: LinearAttention, args: tuple, kwargs: dict, out: Tensor) -> None:
        q, k, v, key_mask = call_arguments(*args, **kwargs)
        measure(state, q, k, v[..., :state.columns], key_mask)
        if isinstance(state, RandomFeatureAttention) and not state.running:
            self.count += 1
            stats = state._statistics(state.normalized(q), state.normalized(k), key_mask)
            state.seen = Statistics(*(self._pooled(state.moments, getattr(stats, side), getattr(state.seen, side, None))
                                      for side in "xy"))

    def _pooled(self, names: tuple[str, ...], new: Moments, old: Moments | None) -> Moments:
        """The mean over the batch and over calls, and the least of the minima."""
        pooled = {name: getattr(new, name).mean(0) for name in names} | {"minimum": new.minimum.amin(0)}
        if old is not None:
            pooled = {name: torch.lerp(getattr(old, name), value, 1 / self.count) for name, value in pooled.items()}
            pooled["minimum"] = torch.minimum(old.minimum, new.minimum.amin(0))
        return Moments.known(**pooled)


@torch.no_grad()
def measure(state: LinearAttention, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    """Adds to `state.measured` what a call of the layer as it now stands gives: q (B,H,L,d), k (B,Hkv,S,d),
    v (B,Hkv,S,dv).

    The layer runs on the first SEQUENCES of the batch, with its own noise; QUERIES of each are compared. Queries at
    padded places of their own sequence do not count.
    """
    q, k, v, key_mask = (None if t is None else t[:SEQUENCES] for t in (q, k, v, key_mask))
    L = q.shape[2]
    rows = torch.randperm(L, generator=torch.Generator().manual_seed(0))[:QUERIES].to(q.device)
    real = real_queries(state, q, k, key_mask)[:, None, :, None].expand(-1, -1, L, -1)[:, :, rows]
    exact = exact_rows(q, k, v, rows, state.scaling, causal=state.causal, key_mask=key_mask)
    estimate = state.estimate(q, k, v, key_mask)[:, :, rows]
    uniform = uniform_attention(q, k, v, causal=state.causal, key_mask=key_mask)[:, :, rows]
    exact_square, error, distance = (float(torch.where(real, t.double(), 0.0).square().sum())
                                     for t in (exact, estimate.double() - exact, uniform.double() - exact))
    state.measured.exact += exact_square
    state.measured.error += error
    state.measured.uniform += distance


def real_queries(state: LinearAttention, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
    """(B, L) or (1, 1): queries that are not padding; of their own sequence the mask of the keys tells."""
    own = state.causal or (q.shape[2] == k.shape[2] and not getattr(state, "cross", False))
    if key_mask is None or not own:
        return torch.ones(1, 1, dtype=torch.bool, device=q.device)
    return key_mask[:, k.shape[2] - q.shape[2]:]


def exact_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scaling: float, *, causal: bool = False,
               key_mask: Tensor | None = None) -> Tensor:
    """Exact attention of these queries, (B,H,rows,dv); 0 for one that sees no key."""
    k, v, dtype = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1]), compute_dtype(q, k, v)
    L, S = q.shape[2], k.shape[2]
    last = rows[:, None] + S - L if causal else torch.full_like(rows, S)[:, None]
    seen = torch.arange(S, device=q.device) <= last
    if key_mask is not None:  # padding may hold anything
        seen = seen & key_mask[:, None, None]
        k, v = (torch.where(key_mask[:, None, :, None], t, 0.0) for t in (k, v))
    sees = seen.any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(q[:, :, rows].to(dtype), k.to(dtype), v.to(dtype), seen | ~sees, scale=scaling)
    return out * sees


# ---- description

def describe_attention(model: nn.Module):
    """A DataFrame with COLUMNS, a row for each attention module; last those that cannot be swapped."""
    import pandas as pd

    rows = [_row(i, path, module) for i, (path, module) in enumerate(swappable(model))]
    rows += [_row(None, path, module) for path, module in others(model)]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"layer": "Int64", "open": "Int64"})


def _row(i: int | None, path: str, module: nn.Module) -> dict[str, Any]:
    state = module._modules.get("swapped")
    row = {"layer": i, "path": path, "type": module.__dict__.get("unswapped_class", type(module)).__name__,
           "reached": {None: "", True: "yes", False: "no"}[getattr(state, "reached", None)]}
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
