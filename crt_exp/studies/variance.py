"""Log variance of one projection on synthetic pairs, each with its own best parameters (CRT 5.1, Figure 2).

Regimes, d = 64: `normal` x, y ~ N(0, sigma^2 I); `sphere` uniform on sigma S^(d-1); `heterogen` x ~ N(0, sigma^2 I),
y ~ N(sigma 1, sigma^2 I); `mnist` 8 x 8 images with pixels in [0, sigma]; `digits` the same with scikit-learn's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from crt_exp.features import FeatureMap, Statistics
from crt_exp.kernels import Kernel
from crt_exp.mechanism import Mechanism
from crt_exp.schema import Positive, Several, at_least, checked
from crt_exp.studies.base import Series


def normal(n: int, d: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, n, d, generator=g, dtype=torch.float64)
    return x, y


def sphere(n: int, d: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = normal(n, d, g)
    return x / x.norm(dim=-1, keepdim=True), y / y.norm(dim=-1, keepdim=True)


def heterogen(n: int, d: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = normal(n, d, g)
    return x, y + 1


def pairs_of(images: Tensor, n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    i, j = torch.randint(len(images), (2, n), generator=g)
    return images[i], images[j]


def digits(n: int, d: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    return pairs_of(torch.from_numpy(load_digits().data) / 16, n, g)


def mnist(n: int, d: int, g: torch.Generator, data_dir: str | Path | None = None, **resize) -> tuple[Tensor, Tensor]:
    """`resize`: options of torch's interpolate, by default the antialiased bilinear one."""
    from crt_exp.data.mnist import images

    chosen = torch.from_numpy(images("test", data_dir).astype(np.float64)) / 255
    options = resize or {"mode": "bilinear", "antialias": True}
    return pairs_of(torch.nn.functional.interpolate(chosen[:, None], size=(8, 8), **options).flatten(1), n, g)


REGIMES: dict[str, Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]]] = {
    "normal": normal, "sphere": sphere, "heterogen": heterogen, "mnist": mnist, "digits": digits}


def log_variances(phi: FeatureMap, x: Tensor, y: Tensor) -> Tensor:
    """log variance of one projection for pairs x, y (n, d), each with its own fitted parameters: (n,) float64, nats."""
    x, y = x.unsqueeze(-2), y.unsqueeze(-2)  # n sets of one vector
    return phi.log_variance(x, y, phi.fit(Statistics.of(x, y))).squeeze(-1)


def log_variances_of_set(phi: FeatureMap, x: Tensor, y: Tensor) -> Tensor:
    """The same with parameters fitted to all pairs together, as one has them in use (CRT 3.2.3)."""
    return phi.log_variance(x, y, phi.fit(Statistics.of(x, y)))


@checked("task")
class Variance(Series):
    """task=variance: mean and standard deviation of the log variance over pairs, for each sigma."""

    metric, lower_is_better, over = "log_variance", True, "sigma"

    def __init__(self, regime: Literal[*REGIMES], pairs: Annotated[int, at_least(2)], sigmas: Several[Positive],
                 kernel: Kernel):
        self.regime, self.pairs, self.values, self.kernel = regime, pairs, list(sigmas), kernel

    def of(self, sigma: float, mechanism: Mechanism, seed: int) -> dict[str, Any]:
        x, y = REGIMES[self.regime](self.pairs, 64, torch.Generator().manual_seed(seed))
        values = log_variances(mechanism.map(self.kernel), sigma * x, sigma * y)
        return {"log_variance": values.mean().item(), "log_variance_std": values.std().item()}

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        return (f"{self.regime}: log variance {last['log_variance']:.2f} +- {last['log_variance_std']:.2f} nats at "
                f"sigma = {last['sigma']} (mean and standard deviation of {self.pairs} pairs)")
