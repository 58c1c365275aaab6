"""Features whose projections are learned. They estimate no kernel: what they define is what training makes of them.

Legend as in base.py: W_q and W_k (m, d) project queries and keys. An attention layer holds them as parameters; the rows
of a sampler are what they begin as.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from crt_exp.features.base import ONE, FeatureMap, Features, Projections
from crt_exp.samplers.nested_tensors import Nested
from crt_exp.samplers.noise import Noise


@dataclass(frozen=True)
class Hedgehog(FeatureMap):
    """phi(x) = [softmax(W x), softmax(-W x)], each over its m features: M = 2m (Zhang et al., 2024, Hedgehog).

    Positive, and bounded by 1. Not unbiased, for any kernel: W is made to give exact attention's outputs, by
    `task=transfer` or in training. Queries and keys have projections of their own, which begin as the same rows: with
    Gaussian ones softmax(W x) is exp(W x - |x|^2 / 2) / m up to a factor near 1, the features of FAVOR+ in pairs.
    Raises ValueError for the Gaussian kernel: attention alone can learn.
    """

    kernel: Literal["softmax"] = "softmax"

    learned = True
    estimates = False
    trainable = True

    def projections(self, m: Nested) -> tuple[Projections, Projections]:
        return Projections(m, "queries", begin=""), Projections(m, "keys", begin="")

    def width(self, m: Nested) -> int:
        return 2 * (m[0] if isinstance(m, tuple) else m)

    def phi_q(self, x, noise, params=()) -> Features:
        return _softmaxes(x, noise[0])

    def phi_k(self, y, noise, params=()) -> Features:
        return _softmaxes(y, noise[1])

    def log_relative_second_moment(self, x, y, params=()):
        raise NotImplementedError("hedgehog features estimate no kernel: there is no variance to give")

    def log_kernel(self, x, y):
        raise NotImplementedError("hedgehog features estimate no kernel")


def _softmaxes(x: Tensor, noise: Noise) -> Features:
    u = noise.project(x)
    return Features(ONE, torch.cat([u.log_softmax(-1), (-u).log_softmax(-1)], -1))
