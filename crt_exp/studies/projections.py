"""Mean squared error of attention by random features against m, for one mechanism and sampler
(the Hadamard report's setting)."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from crt_exp.attention import DenominatorCount, attention
from crt_exp.attention.reference import softmax_attention
from crt_exp.features import FeatureMap, Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.schema import Count, Positive, Several, checked
from crt_exp.studies.base import Series
from crt_exp.studies.pairs import generator


@checked("task")
class Projections(Series):
    """task=projections: q, k ~ N(0, scale^2), v ~ N(0, 1), L tokens of dimension d;
    MSE of the output against exact softmax attention."""

    metric, lower_is_better, over = "mse", True, "m"

    def __init__(self, length: Count, d: Count, ms: Several[Count], samples: Count, scale: Positive = 1.0):
        self.length, self.d, self.values, self.samples, self.scale = length, d, list(ms), samples, scale

    def of(self, m: int, mechanism: Mechanism, seed: int) -> dict[str, Any]:
        errors = torch.tensor(self.errors(mechanism.map("softmax"), mechanism.sampler, m, seed), dtype=torch.float64)
        return {"mse": errors.mean().item(), "log_mse_mean": errors.log().mean().item(),
                "log_mse_std": errors.log().std().item() if self.samples > 1 else None}

    def errors(self, phi: FeatureMap, sampler, m: int, seed: int) -> list[float]:
        """The MSE of each sample: a draw of q, k, v, the same for every mechanism and m, and of the noise."""
        return [self.error(phi, sampler, m, seed, sample) for sample in range(self.samples)]

    def error(self, phi: FeatureMap, sampler, m: int, seed: int, sample: int) -> float:
        x, y, v = self.tensors(seed, sample)
        g = generator(seed, sample)
        noise = phi.noise(m, lambda p: sampler(p.m, self.d, g))
        estimate = attention(x, y, v, phi, noise, phi.fit(Statistics.of(x[0, 0], y[0, 0])),
                             counter=DenominatorCount())
        return (estimate - self.exact(seed, sample)).square().mean().item()

    def tensors(self, seed: int, sample: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, y and v (1, 1, L, d)."""
        return _normal(self.length, self.d, self.scale, 1000 * seed + sample)

    def exact(self, seed: int, sample: int) -> Tensor:
        return _exact(self.length, self.d, self.scale, 1000 * seed + sample)

    def controls(self, seed: int) -> dict[str, list[float]]:
        """The MSE of zeros and of uniform attention, of each sample."""
        zero, uniform = [], []
        for sample in range(self.samples):
            exact, v = self.exact(seed, sample), self.tensors(seed, sample)[2]
            zero.append(exact.square().mean().item())
            uniform.append((exact - v.mean(-2, keepdim=True)).square().mean().item())
        return {"zero": zero, "uniform": uniform}

    def summary(self, records: list[dict]) -> str:
        return "MSE " + ", ".join(f"{r['mse']:.2e} (m = {r['m']})" for r in records)


@lru_cache(maxsize=64)
def _normal(length: int, d: int, scale: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 1, 1, length, d, generator=torch.Generator().manual_seed(seed))
    return scale * q / d**0.25, scale * k / d**0.25, v


@lru_cache(maxsize=64)
def _exact(length: int, d: int, scale: float, seed: int) -> Tensor:
    return softmax_attention(*_normal(length, d, scale, seed))
