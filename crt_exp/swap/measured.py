"""What a layer sees and how far its output is from that of exact attention, measured while
`calibrate_attention` runs the model.

Legend: B batch, H query heads, Hkv key heads, L queries, S keys, d, dv. q, k, v are unscaled. The control is uniform
attention, the mean of the values over the keys that a query may see: an approximation that is no nearer than that tells
nothing of q and k.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from crt_exp.attention.baselines import uniform_attention
from crt_exp.attention.checks import compute_dtype, repeat_heads
from crt_exp.attention.layer import RandomFeatureAttention
from crt_exp.attention.linear import LinearAttention
from crt_exp.features.statistics import Moments, Statistics

SEQUENCES = 4   # of a batch, the first ones, on which a layer runs once more
QUERIES = 128   # of each of them, at random, that are compared with exact attention
LOGITS = 2**22  # numbers of an exact attention matrix that are held at a time


@dataclass
class Measured:
    """Sums of squares over heads, queries and columns of the output, of all that was compared."""

    exact: float = 0.0    # of exact attention
    error: float = 0.0    # of the difference between the layer's output and that
    uniform: float = 0.0  # of the difference between uniform attention and that

    @property
    def relative_error(self) -> float:
        """|output - exact| / |exact|, Frobenius."""
        return _ratio(self.error, self.exact)

    @property
    def relative_uniform(self) -> float:
        return _ratio(self.uniform, self.exact)


class Watcher:
    """A forward hook that keeps `state.seen`, the mean statistics of what a layer fits to its own sequences, and
    `state.measured`."""

    def __init__(self, state: LinearAttention):
        self.count, state.seen, state.measured = 0, None, Measured()

    def __call__(self, state: LinearAttention, args: tuple, kwargs: dict, out: Tensor) -> None:
        q, k, v, key_mask = _given(*args, **kwargs)
        measure(state, q, k, v[..., :state.columns], key_mask)
        if isinstance(state, RandomFeatureAttention) and not state.running:
            self._see(state, state._statistics(state.normalized(q), state.normalized(k), key_mask))

    def _see(self, state: RandomFeatureAttention, stats: Statistics) -> None:
        new = {side: _pooled(getattr(stats, side), state.moments) for side in "xy"}
        self.count += 1
        if state.seen is not None:
            new = {side: _mix(getattr(state.seen, side), new[side], 1 / self.count) for side in "xy"}
        state.seen = Statistics(*(Moments.known(**new[side]) for side in "xy"))


@torch.no_grad()
def measure(state: LinearAttention, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    """Adds to `state.measured` what a call of the layer as it now stands gives: q (B,H,L,d), k (B,Hkv,S,d),
    v (B,Hkv,S,dv).

    The layer runs on the first SEQUENCES of the batch, with its own noise; QUERIES of each are compared. Queries at
    padded places of their own sequence do not count.
    """
    q, k, v, key_mask = (None if t is None else t[:SEQUENCES] for t in (q, k, v, key_mask))
    L, S = q.shape[2], k.shape[2]
    rows = torch.randperm(L, generator=torch.Generator().manual_seed(0))[:QUERIES].to(q.device)
    real = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device)
    if key_mask is not None and (state.causal or (L == S and not state.cross)):
        real = key_mask[:, None, S - L:, None][:, :, rows]
    exact = exact_rows(q, k, v, rows, state.scaling, causal=state.causal, key_mask=key_mask)
    estimate = state.estimate(q, k, v, key_mask)[:, :, rows]
    uniform = uniform_attention(q, k, v, causal=state.causal, key_mask=key_mask)[:, :, rows]
    exact_square, error, distance = (float(torch.where(real, t.double(), 0.0).square().sum())
                                     for t in (exact, estimate.double() - exact, uniform.double() - exact))
    state.measured.exact += exact_square
    state.measured.error += error
    state.measured.uniform += distance


def exact_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scaling: float, *, causal: bool = False,
               key_mask: Tensor | None = None) -> Tensor:
    """Exact attention of these queries, (B,H,rows,dv), at most LOGITS of its matrix at a time;
    0 for one that sees no key."""
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    dtype, (L, S) = compute_dtype(q, k, v), (q.shape[2], k.shape[2])
    if key_mask is not None:  # padding may hold anything
        k, v = (torch.where(key_mask[:, None, :, None], t, 0.0) for t in (k, v))
    places, outputs = torch.arange(S, device=q.device), []
    for some in rows.split(max(1, LOGITS // (q.shape[0] * q.shape[1] * S))):
        hidden = places > (some[:, None] + S - L if causal else S)
        if key_mask is not None:
            hidden = hidden | ~key_mask[:, None, None]
        logits = scaling * (q[:, :, some].to(dtype) @ k.to(dtype).mT)
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(weights.masked_fill(hidden, 0) @ v.to(dtype))  # a row without keys would be NaN
    return torch.cat(outputs, 2)


def _given(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """The arguments of a layer's call."""
    return q, k, v, key_mask


def _pooled(moments: Moments, names: tuple[str, ...]) -> dict[str, Tensor]:
    """(B, heads, ...) -> (heads, ...)."""
    return {name: getattr(moments, name).mean(0) for name in names} | {"minimum": moments.minimum.amin(0)}


def _mix(old: Moments, new: dict[str, Tensor], rate: float) -> dict[str, Tensor]:
    mixed = {name: torch.lerp(getattr(old, name), value, rate) for name, value in new.items() if name != "minimum"}
    return mixed | {"minimum": torch.minimum(old.minimum, new["minimum"])}


def _ratio(part: float, whole: float) -> float:
    return (part / whole) ** 0.5 if whole else math.nan
