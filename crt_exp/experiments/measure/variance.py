"""Log variance of one projection, by closed forms.

On synthetic pairs (CRT 5.1, Figure 2), by |x + y|^2 (CRT Figure 1), and relative to trigonometric features by angle
(Performers Figure 2). Parameters are fitted to all pairs together (CRT 3.2.3), or to each pair, an oracle.

Regimes, d = 64: `normal` x, y ~ N(0, sigma^2 I); `sphere` uniform on sigma S^(d-1); `heterogen` x ~ N(0, sigma^2 I), y
~ N(sigma 1, sigma^2 I); `mnist` 8 x 8 images with pixels in [0, sigma].
"""

import gzip
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from crt_exp.experiments.data import DataError
from crt_exp.experiments.measure import (
    Measurement,
    Record,
    Records,
    Series,
    TensorPair,
    data_file,
    seeded,
)
from crt_exp.experiments.tasks.base import task_class
from crt_exp.features import FeatureMap, PosRF, Statistics, TrigRF
from crt_exp.features.statistics import Kernel
from crt_exp.mechanism import Mechanism
from crt_exp.validation import Count, Positive, Several

D = 64  # dimension of the vectors of a regime


def normal(n: int, g: torch.Generator) -> TensorPair:
    x, y = torch.randn(2, n, D, generator=g, dtype=torch.float64)
    return x, y


def sphere(n: int, g: torch.Generator) -> TensorPair:
    x, y = normal(n, g)
    return F.normalize(x, dim=-1), F.normalize(y, dim=-1)


def heterogen(n: int, g: torch.Generator) -> TensorPair:
    x, y = normal(n, g)
    return x, y + 1


def mnist_images() -> np.ndarray:
    """Read the test images of $CRT_DATA/mnist, (n, 28, 28) uint8. Raises DataError."""
    path = data_file("mnist", "t10k-images-idx3-ubyte.gz")
    try:
        raw = gzip.decompress(path.read_bytes())
        return np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 28, 28)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(
            f"{path}: damaged ({error}); run `python -m crt_exp data fetch mnist`"
        ) from None


def mnist(n: int, g: torch.Generator) -> TensorPair:
    """Sample pairs of MNIST images, resized to 8 x 8 (bilinear, antialiased)."""
    images = torch.from_numpy(mnist_images().astype(np.float64)) / 255
    small = F.interpolate(images.unsqueeze(1), size=(8, 8), mode="bilinear", antialias=True)
    vectors = small.flatten(1)
    i, j = torch.randint(len(vectors), (2, n), generator=g)
    return vectors[i], vectors[j]


REGIMES: dict[str, Callable[[int, torch.Generator], TensorPair]] = {
    "normal": normal,
    "sphere": sphere,
    "heterogen": heterogen,
    "mnist": mnist,
}


@lru_cache(maxsize=1)
def sample_pairs(regime: str, n: int, seed: int) -> TensorPair:
    """Sample the pairs of a regime with sigma = 1, once for all sigmas."""
    return REGIMES[regime](n, seeded(seed))


def log_variances(phi: FeatureMap, x: Tensor, y: Tensor, fit: str = "pair") -> Tensor:
    """Return the log variance (n,) of one projection, in nats, float64.

    Parameters are fitted to each pair x, y (n, d), or with fit="set" to all pairs (CRT 3.2.3).
    """
    if fit == "pair":
        x = x.unsqueeze(-2)
        y = y.unsqueeze(-2)
    params = phi.fit(Statistics.of(x, y))
    return phi.log_variance(x, y, params).flatten()


@task_class
class Variance(Series):
    """task=variance: mean and standard deviation of the log variance, for each sigma.

    The last record has `of_pairs`, the log variance of each pair.

    Args:
        fit: "pair": fit parameters to each pair. "set": fit parameters to all pairs.
    """

    metric = "log_variance"
    over = "sigma"

    regime: Literal[*REGIMES]
    pairs: Annotated[int, Field(ge=2)]
    sigmas: Several[Positive]
    kernel: Kernel
    fit: Literal["pair", "set"] = "pair"

    def measure(self, sigma: float, mechanism: Mechanism, seed: int) -> Record:
        x, y = sample_pairs(self.regime, self.pairs, seed)
        phi = mechanism.map(self.kernel)
        values = log_variances(phi, sigma * x, sigma * y, self.fit)
        record: Record = {
            "log_variance": values.mean().item(),
            "log_variance_std": values.std().item(),
        }
        if sigma == self.sigmas[-1]:
            record["of_pairs"] = values.tolist()
        return record

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        return (
            f"{self.regime}: log variance {last['log_variance']:.2f} +- {last['log_variance_std']:.2f} nats at "
            f"sigma = {last['sigma']} (mean and standard deviation of {self.pairs} pairs)"
        )


@task_class
class VarianceByLength(Measurement):
    """task=variance_by_length: log variance relative to FAVOR+ (CRT Figure 1).

    `gain` is the log variance of the map minus that of FAVOR+, for x = y with |x + y|^2 = 1, ..., `most`.
    """

    metric = "gain"

    d: Count
    most: Count

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        x = torch.zeros(self.most, self.d, dtype=torch.float64)
        mean_sq_sum = torch.arange(1, self.most + 1).double()
        x[:, 0] = mean_sq_sum.sqrt() / 2
        favorp = log_variances(PosRF(), x, x)
        gain = log_variances(mechanism.map(), x, x) - favorp
        for i, value in enumerate(gain.tolist(), 1):
            yield {"sum": i, "gain": value}


@task_class
class VarianceByAngle(Measurement):
    """task=variance_by_angle: log MSE of trigonometric features minus that of the map.

    Performers Figure 2: x and y (2,) have norm `length`, at angles in steps of `degrees`. The value is None at x = y
    and x = -y, where trigonometric or positive features have no variance.
    """

    metric = "log_ratio"
    lower_is_better = False

    length: Positive
    degrees: Count

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        degrees = torch.arange(-180, 181, self.degrees)
        angle = degrees.double().deg2rad()
        y = self.length * torch.stack([angle.cos(), angle.sin()], -1)
        x = torch.tensor([self.length, 0.0]).double().expand_as(y)
        trig = log_variances(TrigRF(), x, y)
        log_ratios = trig - log_variances(mechanism.map(), x, y)
        for degree, log_ratio in zip(degrees.tolist(), log_ratios.tolist()):
            has_variance = degree % 180 != 0
            yield {"angle": degree, "log_ratio": log_ratio if has_variance else None}
