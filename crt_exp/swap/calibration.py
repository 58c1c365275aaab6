"""Calibrate swapped layers, measure their errors, and describe them in a table.

Calibration passes fill the running statistics and measure each layer's error. The control is uniform attention, the
mean of the values that a query may see. A method that is no closer to exact attention than uniform attention uses
nothing of q and k.

Notation: B batch, H query heads, Hkv key heads, L queries, S keys, d head dimension, dv value dimension. q, k, v are
unscaled.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from crt_exp.attention.base import AttentionLayer, LinearAttention
from crt_exp.attention.baselines import exact_attention, uniform_attention
from crt_exp.attention.checks import compute_dtype
from crt_exp.attention.layer import RandomFeatureAttention
from crt_exp.features import AutoRF
from crt_exp.features.base import Params
from crt_exp.nearfar.layer import NearFar
from crt_exp.swap.families import unknown_modules
from crt_exp.swap.swap import swappable
from crt_exp.validation import warn

if TYPE_CHECKING:
    import pandas as pd

SEQUENCES = 4  # sequences of a batch, the first ones, on which errors are measured
QUERIES = 128  # random queries of each sequence that are compared with exact attention
# reached: whether the first forward pass after the swap reached the layer; empty before that pass.
# open: retrieved keys of each query in causal near-far attention.
# chosen: number of heads with each feature map, if each head selects its own.
# errors: |output - exact| / |exact| of the layer and of uniform attention, on the batches of the last calibration.
COLUMNS = (
    "layer",
    "path",
    "type",
    "mechanism",
    "reached",
    "open",
    "m",
    "M",
    "A mean",
    "A min",
    "A max",
    "chosen",
    "error on calibration",
    "uniform's error",
)


# ---- calibration


def calibrate_attention(model: nn.Module, batches: Iterable) -> nn.Module:
    """Fill the running statistics of swapped layers and measure their errors.

    Runs the model over the batches in eval mode without gradients. The statistics fit causal layers, and the queries of
    cross-attention. They replace earlier ones, and all passes have equal weight. Layers with bidirectional
    self-attention fit each sequence by itself, so calibration does not change them.

    `describe_attention` shows the error of each layer: |output - exact| / |exact| over heads and queries, with the
    layer's own q, k, v and projections. The error covers the first 4 sequences of each batch and at
    most 128 queries of each.

    Args:
        batches: inputs of the model. Each is a dictionary of keyword arguments, a tuple or list of arguments, or one
            tensor. Tensors are moved to the model's device.

    Returns:
        The model.

    Raises:
        ValueError: no layer has random features, or there are no batches, or a batch does not fit the model.

    Warns:
        UserWarning: a layer is further from exact attention than uniform attention is.

    >>> import crt_exp
    >>> module = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    >>> x = torch.randn(4, 32, 16, generator=torch.Generator().manual_seed(0))
    >>> module = crt_exp.swap_attention(module, "favorpp", m=64)
    >>> table = crt_exp.describe_attention(crt_exp.calibrate_attention(module, [(x, x, x)]))
    >>> bool((table["error on calibration"] < table["uniform's error"]).all())
    True
    """
    states = _calibrated_states(model)
    with ExitStack() as stack:
        for state in states.values():
            state.fitted_to_calls = None
            state.measured = SquaredErrors()
            stack.callback(state.register_forward_hook(measure_call, with_kwargs=True).remove)
        fill_statistics(model, batches)
    worse = []
    for path, state in states.items():
        errors = state.measured
        if errors.error > errors.uniform:
            worse.append(
                f"{path} ({errors.relative_error:.3g}, uniform {errors.relative_uniform:.3g})"
            )
    if worse:
        warn(
            f"{len(worse)} of {len(states)} layers are further from exact attention than uniform attention: "
            f"{', '.join(worse[:3])}; use more features (m), or exclude layers"
        )
    return model


@torch.inference_mode(False)  # tensors created in inference mode cannot be trained or loaded into
@torch.no_grad()
def fill_statistics(model: nn.Module, batches: Iterable) -> None:
    """Do `calibrate_attention` without measuring errors."""
    if isinstance(batches, Tensor | str | Mapping) or not isinstance(batches, Iterable):
        raise TypeError(f"batches: {type(batches).__name__}, expected a list, such as [batch]")
    number = -1
    with eval_mode(model), ExitStack() as stack:
        for state in _calibrated_states(model).values():
            stack.enter_context(state.calibration())
        for number, batch in enumerate(batches):
            check_batch(model, batch, f"batches[{number}]")
            call_model(model, batch)
    if number < 0:
        raise ValueError("batches: empty; expected at least one")


def swapped_states(model: nn.Module) -> list[AttentionLayer]:
    """The swapped attention layers of a model."""
    states = []
    for part in model.modules():
        state = part._modules.get("swapped")
        if isinstance(state, AttentionLayer):
            states.append(state)
    return states


def learns(model: nn.Module) -> bool:
    """Whether the model has layers that are fitted to earlier calls."""
    return any(part.learns for part in model.modules() if isinstance(part, LinearAttention))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Context manager: put all modules in eval mode, then restore the mode of each."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _calibrated_states(model: nn.Module) -> dict[str, LinearAttention]:
    """The layers that calibration applies to, by path."""
    states = {}
    for path, part in model.named_modules():
        if isinstance(part, LinearAttention):
            states[path.removesuffix(".swapped")] = part
    if not states:
        names = ", ".join({str(part.mechanism) for part in swapped_states(model)})
        raise ValueError(
            f"{type(model).__name__}: no random features (swapped: {names or 'none'}); call "
            "swap_attention"
        )
    return states


def model_arguments(batch: Any) -> tuple[tuple, dict[str, Any]]:
    """Positional and keyword arguments of a model in a batch of `calibrate_attention`."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    return (batch,), {}


def check_batch(model: nn.Module, batch: Any, name: str) -> None:
    """Raise ValueError or TypeError, naming the batch, for inputs that the model cannot read."""
    positional, keywords = model_arguments(batch)
    if positional[:1] and not isinstance(positional[0], Tensor):
        raise TypeError(
            f"{name}: {type(batch).__name__}, expected a dictionary of arguments, a tuple of tensors or a tensor"
        )
    for value in (*positional, *keywords.values()):
        if isinstance(value, Tensor) and value.dtype == torch.uint8 and value.ndim >= 3:
            raise ValueError(
                f"{name}: images of uint8, expected floating point, as of the processor"
            )
    ids = keywords.get("input_ids")
    if positional and getattr(model, "main_input_name", "") == "input_ids":
        ids = positional[0]
    if isinstance(ids, Tensor):
        check_ids(model, ids, name)


def check_ids(model: Any, ids: Tensor, name: str) -> None:
    """Raise ValueError for token ids that are no integers (batch, tokens) of the vocabulary."""
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    count = getattr(embeddings, "num_embeddings", math.inf)
    fits = ids.ndim >= 2 and not ids.is_floating_point() and ids.dtype != torch.bool
    if not fits or (ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= count)):
        raise ValueError(
            f"{name}: token ids {tuple(ids.shape)} of {ids.dtype}, expected integers (batch, tokens) below "
            f"{count}, the size of the vocabulary"
        )


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model with a batch of `calibrate_attention`. Raises ValueError for ids out of range."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    moved = tree_map_only(Tensor, lambda t: t.to(device), model_arguments(batch))
    positional, keywords = moved
    try:
        return model(*positional, **keywords)
    except IndexError as error:
        raise ValueError(
            f"{type(model).__name__}: {error}; expected ids and labels that the model knows"
        ) from error


def call_arguments(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The arguments of a layer's call as a tuple, for hooks."""
    return q, k, v, key_mask


# ---- errors of a layer


@dataclass
class SquaredErrors:
    """Sums of squares over heads, queries and output dimensions."""

    exact: float = 0.0  # norm of exact attention, squared
    error: float = 0.0  # distance of the layer's output from exact attention, squared
    uniform: float = 0.0  # distance of uniform attention from exact attention, squared

    @property
    def relative_error(self) -> float:
        """|output - exact| / |exact|, in the Frobenius norm."""
        return math.sqrt(self.error / self.exact) if self.exact else math.nan

    @property
    def relative_uniform(self) -> float:
        """|uniform - exact| / |exact|, in the Frobenius norm."""
        return math.sqrt(self.uniform / self.exact) if self.exact else math.nan


def measure_call(state: LinearAttention, args: tuple, kwargs: dict, out: Tensor) -> None:
    """Forward hook: add errors to `state.measured`, and store the parameters fitted to these sequences."""
    q, k, v, key_mask = call_arguments(*args, **kwargs)
    measure(state, q, k, v[..., : state.columns], key_mask)
    if isinstance(state, RandomFeatureAttention) and not state.learns:
        params = state.fitted_params(state.normalized(q), state.normalized(k), key_mask)
        state.fitted_to_calls = params


@torch.no_grad()
def measure(
    state: LinearAttention, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
) -> None:
    """Add the errors of one call to `state.measured`.

    The layer runs with its current projections on the first SEQUENCES sequences of q (B,H,L,d), k (B,Hkv,S,d) and v
    (B,Hkv,S,dv). QUERIES queries of each sequence are compared with exact attention. Padded queries do not count.
    """
    inputs = (q, k, v, key_mask)
    q, k, v, key_mask = tree_map_only(Tensor, lambda t: t[:SEQUENCES], inputs)
    L = q.shape[2]
    rows = torch.randperm(L, generator=torch.Generator().manual_seed(0))[:QUERIES].to(q.device)
    real = real_queries(state, q, k, key_mask)[:, None, :, None].expand(-1, -1, L, -1)[:, :, rows]
    visible: Any = {"causal": state.causal, "key_mask": key_mask}
    dtype = compute_dtype(q, k, v)
    exact = exact_attention(q.to(dtype), k.to(dtype), v.to(dtype), **visible, scale=state.scaling)
    exact = exact[:, :, rows]
    estimate = state.estimate(q, k, v, key_mask)[:, :, rows]
    uniform = uniform_attention(q, k, v, **visible)[:, :, rows]

    def square(t: Tensor) -> float:
        return float(torch.where(real, t.double(), 0.0).square().sum())

    state.measured.exact += square(exact)
    state.measured.error += square(estimate.double() - exact)
    state.measured.uniform += square(uniform.double() - exact)


def real_queries(state: LinearAttention, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
    """Mask of queries that are not padding, (B, L) or (1, 1).

    In self-attention the key mask marks the queries that are padding.
    """
    crosses = isinstance(state, LinearAttention) and state.cross
    own = state.causal or (q.shape[2] == k.shape[2] and not crosses)
    if key_mask is None or not own:
        return torch.ones(1, 1, dtype=torch.bool, device=q.device)
    return key_mask[:, k.shape[2] - q.shape[2] :]


# ---- description


def describe_attention(model: nn.Module) -> "pd.DataFrame":
    """A DataFrame with COLUMNS, one row for each attention module.

    Modules that cannot be swapped come last.

    >>> import crt_exp
    >>> module = crt_exp.swap_attention(torch.nn.MultiheadAttention(16, 2), "favorpp", m=8)
    >>> crt_exp.describe_attention(module)[["type", "mechanism", "m"]].values.tolist()
    [['MultiheadAttention', 'favorpp', 8]]
    """
    import pandas as pd

    rows = []
    for i, place in enumerate(swappable(model)):
        state = place.module._modules.get("swapped")
        row = _module_row(place.path, place.module) | {"layer": i, "mechanism": "unchanged"}
        if isinstance(state, AttentionLayer):
            row |= _layer_row(state)
        rows.append(row)
    for path, module in unknown_modules(model):
        rows.append(_module_row(path, module) | {"mechanism": "cannot be swapped"})
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"layer": "Int64", "open": "Int64"})


def _module_row(path: str, module: nn.Module) -> dict[str, Any]:
    kind = module.__dict__.get("unswapped_class", type(module))
    return {"path": path, "type": kind.__name__, "reached": ""}


def _layer_row(state: AttentionLayer) -> dict[str, Any]:
    row: dict[str, Any] = {"mechanism": state.mechanism}
    if state.reached is not None:
        row["reached"] = "yes" if state.reached else "no"
    if isinstance(state, LinearAttention) and state.measured is not None:
        row["error on calibration"] = state.measured.relative_error
        row["uniform's error"] = state.measured.relative_uniform
    if isinstance(state, NearFar) and state.causal:
        row["open"] = state.sizes.open
    if isinstance(state, RandomFeatureAttention):
        row |= _features_row(state)
    return row


def _features_row(state: RandomFeatureAttention) -> dict[str, Any]:
    """The table's entries of random features; a map without projections has no m."""
    row: dict[str, Any] = {"m": state.m if state.gaussian else None, "M": state.width}
    params = _params(state)
    if params is not None and isinstance(state.phi, AutoRF):
        names = Counter(state.phi.names(params)).most_common()
        row["chosen"] = ", ".join(f"{name} {heads}" for name, heads in names)
    A = getattr(params, "A", None)
    if A is not None:
        if A.is_complex():
            A = A.real
        A = A.double()
        row |= {"A mean": float(A.mean()), "A min": float(A.min()), "A max": float(A.max())}
    return row


def _params(state: RandomFeatureAttention) -> Params:
    """Parameters fitted to the running averages or to the last batch of a calibration, or None."""
    if state.clusters is not None:
        return state.clusters.params() if state.clusters.done else None
    if state.keeps_statistics and float(state.running_weight) > 0:
        return state.fit_to_running()
    return state.fitted_to_calls if state.phi.fitted else state.phi.fit(None)
