"""Mean squared error of attention by random features against m, for one mechanism and sampler
(the Hadamard report's setting)."""

from collections.abc import Iterator
from typing import Any

import torch

from crt_exp.attention import DenominatorCount, attention
from crt_exp.attention.reference import softmax_attention
from crt_exp.features import FeatureMap, Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.schema import Count, Several, checked


@checked("task")
class Projections:
    """task=projections: q, k, v ~ N(0, 1), L tokens of dimension d;
    MSE of the output against exact softmax attention."""

    metric, lower_is_better = "mse", True

    def __init__(self, length: Count, d: Count, ms: Several[Count], samples: Count):
        self.length, self.d, self.ms, self.samples = length, d, list(ms), samples

    def records(self, mechanism: Mechanism, seed: int, done: list[dict] = ()) -> Iterator[dict[str, Any]]:
        if not mechanism.estimates:
            raise ValueError("attention=exact has no error: choose features=...")
        phi = mechanism.map("softmax")
        for step, m in list(enumerate(self.ms))[len(done):]:
            errors = [self.error(phi, mechanism.sampler, m, seed, sample) for sample in range(self.samples)]
            found = torch.tensor(errors, dtype=torch.float64)
            last = {"split": "test", "final": True} if step == len(self.ms) - 1 else {"split": "m"}
            yield {"step": step, "epoch": 0, "m": m, "mse": found.mean().item(),
                   "log_mse_mean": found.log().mean().item(),
                   "log_mse_std": found.log().std().item() if self.samples > 1 else None, **last}

    def error(self, phi: FeatureMap, sampler, m: int, seed: int, sample: int) -> float:
        """The MSE of one draw; sample number `sample` has the same q, k, v for every mechanism and m."""
        g = torch.Generator().manual_seed(1000 * seed + sample)
        x, y, v = torch.randn(3, 1, 1, self.length, self.d, generator=g)
        x, y = x / self.d**0.25, y / self.d**0.25
        noise = phi.noise(m, lambda p: sampler(p.m, self.d, g))
        estimate = attention(x, y, v, phi, noise, phi.fit(Statistics.of(x[0, 0], y[0, 0])),
                             counter=DenominatorCount())
        return (estimate - softmax_attention(x, y, v)).square().mean().item()

    def summary(self, records: list[dict]) -> str:
        return "MSE " + ", ".join(f"{r['mse']:.2e} (m = {r['m']})" for r in records)
