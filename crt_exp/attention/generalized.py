"""Attention with other kernels than softmax.

`Generalized` is phi(u) = f(W u) / sqrt(M) + epsilon with any Gaussian rows W, or W = I (Performers 2.2, A.4, D.3; elu+1
without projection is the Linear Transformer). It estimates no known kernel: it defines one.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from crt_exp.features.base import ONE, FeatureMap, Features, Projections
from crt_exp.options import NotNegative
from crt_exp.samplers import at_least_float32

Function = Literal["relu", "elu+1", "exp", "sigmoid", "abs", "gelu", "cos", "tanh", "identity"]
FUNCTIONS = {"relu": torch.relu, "elu+1": lambda t: F.elu(t) + 1, "sigmoid": torch.sigmoid, "abs": torch.abs,
             "gelu": F.gelu, "cos": torch.cos, "tanh": torch.tanh, "identity": lambda t: t}


@dataclass(frozen=True)
class Generalized(FeatureMap):
    """Features f(W u) / sqrt(M) + kernel_epsilon. Without `projection` W = I, M = d, and the noise may be None.

    Denominators are positive for relu, elu+1, sigmoid, exp and abs; for the others choose what `attention` does with
    those that are not. The epsilon belongs to the definition of these kernels; it makes every key count a little.
    """

    f: Function = "relu"
    kernel_epsilon: NotNegative = 1e-3
    projection: bool = True

    estimates = False

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

    def log_kernel(self, x, y):
        raise NotImplementedError(f"generalised features ({self.f}) estimate no known kernel")
