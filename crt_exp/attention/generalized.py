"""Attention with other kernels than softmax, and the baselines that linear attention is measured against.

`Generalized` is phi(u) = f(W u) / sqrt(M) + epsilon with any Gaussian rows W, or W = I (Performers 2.2, A.4, D.3; elu+1 without
projection is the Linear Transformer). It estimates no known kernel: it defines one.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.attention.checks import check_inputs, repeat_heads
from crt_exp.features.base import ONE, FeatureMap, Features, Projections
from crt_exp.samplers import at_least_float32

Function = Literal["relu", "elu+1", "exp", "sigmoid", "abs", "gelu", "cos", "tanh", "identity"]
FUNCTIONS = {"relu": torch.relu, "elu+1": lambda t: F.elu(t) + 1, "sigmoid": torch.sigmoid, "abs": torch.abs, "gelu": F.gelu,
             "cos": torch.cos, "tanh": torch.tanh, "identity": lambda t: t}


@dataclass(frozen=True)
class Generalized(FeatureMap):
    """Features f(W u) / sqrt(M) + kernel_epsilon. Without `projection` W = I, M = d, and the noise may be None.

    Denominators are positive for relu, elu+1, sigmoid, exp and abs; for the others choose what `attention` does with those that
    are not. The epsilon belongs to the definition of these kernels; it makes every key count a little.
    """

    f: Function = "relu"
    kernel_epsilon: float = 1e-3
    projection: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.f not in get_args(Function):
            raise ValueError(f"f = {self.f!r}: choose one of {', '.join(get_args(Function))}")
        if not self.kernel_epsilon >= 0:
            raise ValueError(f"kernel_epsilon = {self.kernel_epsilon}: it must not be negative")

    @property
    def positive(self) -> bool:
        return self.f in ("relu", "elu+1", "sigmoid", "exp", "abs")

    def projections(self, m) -> Projections | None:
        return super().projections(m) if self.projection else None

    def phi_q(self, x, noise=None, params=()) -> Features:
        if self.projection and noise is None:
            raise ValueError("generalised features with projection=True need a noise")
        u = noise.project(x) if self.projection else at_least_float32(x)
        scale = math.log(u.shape[-1]) / 2
        if self.f == "exp":  # in logs, so that it cannot overflow
            floor = math.log(self.kernel_epsilon) if self.kernel_epsilon else -math.inf
            return Features(ONE, torch.logaddexp(u - scale, u.new_tensor(floor)))
        value = FUNCTIONS[self.f](u) * math.exp(-scale) + self.kernel_epsilon
        return Features(value, u.new_zeros(1, 1))

    def log_relative_second_moment(self, x, y, params=()):
        raise NotImplementedError(f"generalised features ({self.f}) estimate no known kernel: there is no variance to give")

    def log_kernel(self, x, y):
        raise NotImplementedError(f"generalised features ({self.f}) estimate no known kernel")


def exact_attention(x: Tensor, y: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
    """Softmax attention by the fused kernels of torch, quadratic in time: arguments and result as `attention`."""
    check_inputs(x, y, v, None, (), causal, key_mask)
    y, v = repeat_heads(y, x.shape[1]), repeat_heads(v, x.shape[1])
    L, S = x.shape[2], y.shape[2]
    allowed = None
    if key_mask is not None:
        allowed = key_mask[:, None, None].expand(-1, 1, L, -1)
        y, v = (torch.where(key_mask[:, None, :, None], t, 0.0) for t in (y, v))
    if causal and (key_mask is not None or L != S):  # torch's own causal flag counts from the first key
        past = torch.ones(L, S, dtype=torch.bool, device=x.device).tril(S - L)
        allowed = past if allowed is None else allowed & past
    if allowed is None:
        return F.scaled_dot_product_attention(x, y, v, is_causal=causal, scale=1.0)
    seen = allowed.any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(x, y, v, attn_mask=allowed | ~seen, scale=1.0)  # a row without keys would be NaN
    return torch.where(seen, out, 0.0)


def identity_attention(x: Tensor, y: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
    """The values themselves: what no attention can be faster than. Needs as many keys as queries."""
    check_inputs(x, y, v, None, (), causal, key_mask)
    if x.shape[2] != y.shape[2]:
        raise ValueError(f"identity attention of {x.shape[2]} queries to {y.shape[2]} keys: it needs as many of both")
    return repeat_heads(v, x.shape[1])


def uniform_attention(x: Tensor, y: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
    """The mean of the values over the keys that a query may see, whatever it is: what an approximation must be nearer than."""
    check_inputs(x, y, v, None, (), causal, key_mask)
    v, (L, S) = repeat_heads(v, x.shape[1]), (x.shape[2], y.shape[2])
    keep = torch.ones(1, 1, S, 1, dtype=torch.bool, device=v.device) if key_mask is None else key_mask[:, None, :, None]
    values = torch.where(keep, at_least_float32(v), 0.0)
    if causal:
        sums, counts = (t.cumsum(2)[:, :, S - L:] for t in (values, keep))
    else:
        sums, counts = (t.sum(2, keepdim=True) for t in (values, keep))
    return (sums / counts.clamp(min=1)).to(v.dtype).expand(-1, -1, L, -1)


class Linformer(nn.Module):
    """Softmax attention to `rank` learned mixtures of the keys, for sequences of up to `length` tokens, not causal.

    One projection for keys and one for values, shared by heads and batch; masked keys enter no mixture.
    """

    def __init__(self, length: int, rank: int):
        super().__init__()
        if not 1 <= rank <= length:
            raise ValueError(f"rank = {rank}: it must lie between 1 and the length {length}")
        self.key_projection = nn.Parameter(torch.randn(rank, length) / length**0.5)
        self.value_projection = nn.Parameter(torch.randn(rank, length) / length**0.5)

    def forward(self, x: Tensor, y: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
        check_inputs(x, y, v, None, (), causal, key_mask)
        most, S = self.key_projection.shape[1], y.shape[2]
        if causal:
            raise ValueError("linformer mixes all keys: it cannot be causal")
        if most < S:
            raise ValueError(f"linformer was made for up to {most} keys but {S} came")
        y, v = repeat_heads(y, x.shape[1]), repeat_heads(v, x.shape[1])
        if key_mask is not None:
            y, v = (torch.where(key_mask[:, None, :, None], t, 0.0) for t in (y, v))
        mix = lambda projection, t: projection[:, :S].to(t.dtype) @ t
        return F.scaled_dot_product_attention(x, mix(self.key_projection, y), mix(self.value_projection, v), scale=1.0)
