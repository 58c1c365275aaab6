"""What `describe_attention` tells of each layer, from the statistics that the layer last saw."""

from typing import Any

import torch
from torch import Tensor, nn

from crt_exp.attention.module import MOMENTS, RandomFeatureAttention
from crt_exp.features.base import Moments, Statistics

# predicted relative error: sqrt of the mean over heads of Var / K^2 of one entry of the kernel matrix with m iid projections, at
# a pair with the mean |x|^2, |y|^2 and |x + y|^2 that the layer saw (calibration, or training of causal layers); empty before
COLUMNS = ("layer", "path", "type", "mechanism", "m", "M", "A mean", "A min", "A max", "parameters", "predicted relative error")


def table(found: list[tuple[str, nn.Module]], others: list[tuple[str, nn.Module]] = ()):
    """A DataFrame with COLUMNS, a row for each attention module; last those of other kinds, without a number."""
    import pandas as pd

    rows = [_row(i, path, module) for i, (path, module) in enumerate(found)]
    rows += [_row(None, path, module) for path, module in others]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"layer": "Int64"})


class Watcher:
    """A forward pre-hook that keeps the mean statistics of what a bidirectional layer sees."""

    def __init__(self, state: RandomFeatureAttention):
        self.count, state.seen = 0, None

    def __call__(self, state: RandomFeatureAttention, inputs: tuple) -> None:
        q, k, *_, mask = inputs
        stats = state._statistics(state._normalized(q), state._normalized(k), mask)
        new = {side: _pooled(getattr(stats, side)) for side in "xy"}
        self.count += 1
        if state.seen is not None:
            new = {side: _mix(getattr(state.seen, side), new[side], 1 / self.count) for side in "xy"}
        state.seen = Statistics(*(Moments.known(**new[side]) for side in "xy"))


def _pooled(moments: Moments) -> dict[str, Tensor]:
    """(B, heads, d) -> (heads, d)."""
    return {name: getattr(moments, name).mean(0) for name in MOMENTS} | {"minimum": moments.minimum.amin(0)}


def _mix(old: Moments, new: dict[str, Tensor], rate: float) -> dict[str, Tensor]:
    return {name: torch.lerp(getattr(old, name), new[name], rate) for name in MOMENTS} | {
        "minimum": torch.minimum(old.minimum, new["minimum"])}


def _row(i: int | None, path: str, module: nn.Module) -> tuple[Any, ...]:
    kind = module.__dict__.get("unswapped_class", type(module)).__name__
    parameters = sum(p.numel() for p in module.parameters())
    state = module._modules.get("swapped")
    head, empty = (i, path, kind), (None,) * 5
    if not isinstance(state, RandomFeatureAttention):
        own = "unchanged" if i is not None else "cannot be swapped"
        return *head, own if state is None else state.mechanism, *empty, parameters, None
    stats = _statistics(state)
    params = None if stats is None and state.phi.fitted else state.phi.fit(stats)
    return (*head, state.mechanism, state.m, _width(state), *_a_range(params), parameters, _relative_error(state, stats, params))


def _width(state: RandomFeatureAttention) -> int:
    return state.d if state.omega is None else state.phi.width(state.m)


def _statistics(state: RandomFeatureAttention) -> Statistics | None:
    """Those of the running averages, or of the last calibration."""
    if not state.keeps_statistics:
        return getattr(state, "seen", None)
    return state.running_statistics() if float(state.running_weight) > 0 else None


def _a_range(params) -> tuple[float | None, ...]:
    """Mean, minimum and maximum over heads of the parameter A, where the features have one."""
    A = getattr(params, "A", None)
    if A is None:
        return None, None, None
    A = (A.real if A.is_complex() else A).double()
    return float(A.mean()), float(A.min()), float(A.max())


def _relative_error(state: RandomFeatureAttention, stats: Statistics | None, params) -> float | None:
    if stats is None:
        return None
    try:
        moment = state.phi.log_relative_second_moment(*_typical_pair(stats), params)
    except (NotImplementedError, AttributeError):
        return None
    return float((torch.expm1(moment.double()) / state.m).mean().sqrt())


def _typical_pair(stats: Statistics) -> tuple[Tensor, Tensor]:
    """x and y (heads, 1, d) with the mean |x|^2, |y|^2 and |x + y|^2 of the statistics; spread over the coordinates."""
    a, b = stats.x.mean_norm, stats.y.mean_norm
    inner = ((stats.mean_sq_sum - a - b) / 2).clamp(-(a * b).sqrt(), (a * b).sqrt())
    d = stats.d
    ones = torch.ones(d, dtype=torch.float64, device=a.device) / d**0.5
    signs = torch.ones_like(ones)
    signs[1::2] = -1
    across = signs - (signs @ ones) * ones  # orthogonal to ones
    across = across / across.norm().clamp(min=1e-12)
    along = inner / a.clamp(min=1e-30).sqrt()
    rest = (b - along.square()).clamp(min=0).sqrt()
    x, y = a.sqrt()[:, None] * ones, along[:, None] * ones + rest[:, None] * across
    return x[:, None], y[:, None]
