"""What `describe_attention` tells of each layer, from the statistics that it is fitted to or last saw."""

from collections import Counter
from typing import Any

from torch import nn

from crt_exp.attention.layer import RandomFeatureAttention
from crt_exp.features import AutoRF
from crt_exp.features.statistics import Statistics
from crt_exp.nearfar.layer import NearFar

# |output - exact| / |exact| of the layer's output, and the same of uniform attention, the mean of the
# values that a query may see; over heads and queries, measured on the batches of the last calibration; empty before.
ERRORS = ("error on calibration", "uniform's error")
# chosen: how many heads have which map, where each takes its own
# open: keys that each query of causal near-far attention reads
# reached: whether the first forward pass of the model after the swap, and each call since, came to this module; empty
# before
COLUMNS = ("layer", "path", "type", "mechanism", "reached", "open", "m", "M", "A mean", "A min", "A max", "chosen",
           "parameters", *ERRORS)


def table(modules: list[tuple[str, nn.Module]], others: list[tuple[str, nn.Module]] = ()):
    """A DataFrame with COLUMNS, a row for each attention module; last those of other kinds, without a number."""
    try:
        import pandas as pd
    except ImportError:
        raise ImportError("describe_attention returns a DataFrame: pip install pandas, or crt_exp[run]") from None
    rows = [_row(i, path, module) for i, (path, module) in enumerate(modules)]
    rows += [_row(None, path, module) for path, module in others]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"layer": "Int64", "open": "Int64"})


def _row(i: int | None, path: str, module: nn.Module) -> tuple[Any, ...]:
    kind = module.__dict__.get("unswapped_class", type(module)).__name__
    parameters = sum(p.numel() for p in module.parameters())
    state = module._modules.get("swapped")
    head, empty = (i, path, kind), (None,) * 6
    if not isinstance(state, RandomFeatureAttention):
        own = ("unchanged" if i is not None else "cannot be swapped") if state is None else state.mechanism
        return *head, own, _reached(state), _open(state), *empty, parameters, *_errors(state)
    params = _params(state)
    m = state.m if state.gaussian else None  # a map without projections has none
    fitted = *_a_range(params), _chosen(state, params)
    return (*head, state.mechanism, _reached(state), None, m, state.width, *fitted, parameters, *_errors(state))


def _reached(state: nn.Module | None) -> str:
    return {None: "", True: "yes", False: "no"}[getattr(state, "reached", None)]


def _open(state: nn.Module | None) -> int | None:
    return state.sizes.open if isinstance(state, NearFar) and state.causal else None


def _params(state: RandomFeatureAttention):
    """None where they are not known yet."""
    if state.clusters is not None:
        return state.clusters.params() if state.clusters.done else None
    stats = _statistics(state)
    return None if stats is None and state.phi.fitted else state.phi.fit(stats)


def _statistics(state: RandomFeatureAttention) -> Statistics | None:
    """Those of the running averages, or of the last calibration."""
    if state.keeps_statistics and float(state.running_weight) > 0:
        return state.running_statistics()
    return getattr(state, "seen", None)


def _a_range(params) -> tuple[float | None, ...]:
    """Mean, minimum and maximum over heads of the parameter A, where the features have one."""
    A = getattr(params, "A", None)
    if A is None:
        return None, None, None
    A = (A.real if A.is_complex() else A).double()
    return float(A.mean()), float(A.min()), float(A.max())


def _chosen(state: RandomFeatureAttention, params) -> str | None:
    if params is None or not isinstance(state.phi, AutoRF):
        return None
    return ", ".join(f"{name} {heads}" for name, heads in Counter(state.phi.names(params)).most_common())


def _errors(state: nn.Module | None) -> tuple[float | None, ...]:
    measured = getattr(state, "measured", None)
    return (None, None) if measured is None else (measured.relative_error, measured.relative_uniform)
