"""Exact kernels, and statistics of queries and keys for fitting feature maps.

Notation: N = |x|^2 + |y|^2; K Gaussian kernel, SM softmax kernel. Batch dimensions (...) come first.

Kernels are evaluated pair by pair and broadcast. The kernel matrix is `log_kernel("softmax", x[..., :, None, :],
y[..., None, :, :])`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from crt_exp.samplers.noise import at_least_float32, cached_property, transforming
from crt_exp.validation import check

Kernel = Literal["softmax", "gaussian"]
POWERS = {"mean": 1, "mean_sq": 2, "mean_abs": 1, "second": 2}  # of the vectors, by average


def log_kernel(kernel: Kernel, x: Tensor, y: Tensor) -> Tensor:
    """Return log SM(x, y) = x.y or log K(x, y) = -|x - y|^2 / 2, in nats."""
    check("kernel", kernel, Kernel)
    if kernel == "softmax":
        return (x * y).sum(-1)
    return -(x - y).square().sum(-1) / 2


def angle(x: Tensor, y: Tensor) -> Tensor:
    """Return the angle in [0, pi] between x and y; pi/2 if either vector is zero.

    The result is accurate near 0 and pi.
    """
    nx = x.norm(dim=-1, keepdim=True)
    ny = y.norm(dim=-1, keepdim=True)
    u = x / nx.where(nx > 0, torch.ones_like(nx))
    v = y / ny.where(ny > 0, torch.ones_like(ny))
    theta = 2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1))
    zero = ((nx == 0) | (ny == 0)).squeeze(-1)
    return theta.masked_fill(zero, math.pi / 2)


def log_0f1(b: float, z: Tensor) -> Tensor:
    """Return log 0F1(; b; z) for z >= 0, b > 0, in float64, without gradient.

    0F1 is the mean of exp over a sphere. The function uses the scaled Bessel function I, or the power series where I
    underflows.

    Raises:
        ValueError: inside torch.func.
    """
    from scipy.special import gammaln, ive

    if transforming():
        raise ValueError("features=smreg: torch.func cannot trace its kernel; compute it outside")
    values = z.detach().double().cpu().numpy()
    t = 2 * np.sqrt(np.maximum(values, 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        bessel = ive(b - 1, t)
        closed = gammaln(b) + (1 - b) * np.log(t / 2) + np.log(bessel) + t
    series = (t < 1e-3) | (bessel < 1e-290)
    result = np.where(series, _log_0f1_series(b, np.where(series, values, 0.0)), closed)
    return torch.from_numpy(np.asarray(result)).to(z.device)


def _log_0f1_series(b: float, z: np.ndarray) -> np.ndarray:
    # the largest term sits near k = sqrt(z)
    terms = max(60, int(4 * np.sqrt(z.max(initial=0.0))) + 60)
    k = np.arange(1, terms)
    with np.errstate(divide="ignore"):
        steps = np.log(z)[..., None] - np.log(k * (b + k - 1))
    logs = np.concatenate([np.zeros_like(z)[..., None], np.cumsum(steps, axis=-1)], axis=-1)
    top = logs.max(axis=-1)
    return top + np.log(np.exp(logs - top[..., None]).sum(axis=-1))


class Moments:
    """Moments of one set of vectors, computed lazily and without gradient.

    `Moments.from_vectors(x, mask)` takes a set x (..., L, d) and a mask (..., L), True = keep. Masked positions may
    hold any number, including NaN. `Moments.from_values(mean=..., ...)` takes moments from elsewhere, such as running
    averages.

    First moments take O(L d). Second moments between coordinates take O(L d^2) and are float64.

    >>> Moments.from_vectors(torch.tensor([[1.0, 2.0], [3.0, 2.0]])).mean.tolist()
    [2.0, 2.0]
    """

    d: int
    _vectors: Tensor  # 0 where masked
    _mask: Tensor | None
    scale: float  # of the vectors

    @classmethod
    def from_vectors(cls, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> "Moments":
        """Return the moments of scale * x, without computing this product.

        Raises:
            ValueError: x is empty or has fewer than two dimensions, or the mask has another length.
        """
        if x.ndim < 2:
            raise ValueError(f"vectors: shape {tuple(x.shape)}, expected (..., L, d)")
        if 0 in x.shape[-2:]:
            raise ValueError(f"vectors: shape {tuple(x.shape)}; expected at least one vector")
        x = x.detach()
        if mask is not None:
            if mask.shape[-1] != x.shape[-2]:
                raise ValueError(f"mask: {mask.shape[-1]} positions, expected {x.shape[-2]}")
            x = torch.where(mask[..., None], x, x.new_zeros(()))
        moments = cls()
        moments._vectors = x
        moments._mask = mask
        moments.scale = scale
        moments.d = x.shape[-1]
        return moments

    @classmethod
    def from_values(cls, **values: Tensor) -> "Moments":
        """Return moments with the given values, by name; all others are missing."""
        moments = cls()
        for name, value in values.items():
            setattr(moments, name, value)
        moments.d = next(iter(values.values())).shape[-1]
        return moments

    def __getattr__(self, name):  # reached only for missing moments
        raise AttributeError(f"statistics: no {name!r}; expected one of {sorted(self.__dict__)}")

    @cached_property
    def count(self) -> Tensor | int:
        """Number of vectors, (..., 1) for a masked set.

        It is at least 1, so that an empty set has zero moments.
        """
        if self._mask is None:
            return self._vectors.shape[-2]
        return self._mask.sum(-1, keepdim=True).clamp(min=1)

    @cached_property
    def mean(self) -> Tensor:
        return self.sum("mean") / self.count * self.scale

    @cached_property
    def mean_sq(self) -> Tensor:
        """Mean of x_l^2 per coordinate, (..., d)."""
        return self.sum("mean_sq") / self.count * self.scale**2

    @cached_property
    def mean_abs(self) -> Tensor:
        return self.sum("mean_abs") / self.count * self.scale

    @property
    def variance(self) -> Tensor:
        """Variance of each coordinate, (..., d) float64."""
        return (self.mean_sq.double() - self.mean.double().square()).clamp(min=0)

    @cached_property
    def second(self) -> Tensor:
        """Mean of x x^T, (..., d, d)."""
        return self._average_product(self._vectors.double())

    @cached_property
    def covariance(self) -> Tensor:
        """Mean of (x - mean)(x - mean)^T, (..., d, d).

        Without vectors it is computed from `second` and `mean`.
        """
        if "_vectors" not in self.__dict__:
            return centred(self.second, self.mean)
        x = self._vectors.double()
        if self._mask is None:
            return self._average_product(x - x.mean(-2, keepdim=True))
        x = x - x.sum(-2, keepdim=True) / self.count.unsqueeze(-1)
        return self._average_product(x.masked_fill(~self._mask[..., None], 0))

    @cached_property
    def minimum(self) -> Tensor:
        x = at_least_float32(self._vectors)
        if self._mask is None:
            return x.amin(-2) * self.scale
        low = x.masked_fill(~self._mask[..., None], torch.inf).amin(-2)
        return torch.where(low.isinf(), 0.0, low) * self.scale  # all positions masked

    def mirrored(self, names: Sequence[str]) -> "Moments":
        """Return some moments of the union of the set and its negatives.

        They are the expected moments of vectors with known size and unknown sign. The minimum is -1.5 times the
        largest |x_l|: discrete maps with a shift lose positivity below it.
        """
        values = {name: getattr(self, name) for name in names}
        values["mean"] = torch.zeros_like(self.mean)
        if "minimum" in names:
            largest = at_least_float32(self._vectors).abs().amax(-2) * self.scale
            values["minimum"] = -1.5 * largest
        return Moments.from_values(**values)

    def sets(self) -> tuple[torch.Size, list[Tensor]]:
        """Return the batch shape and, for each batch entry, the unmasked vectors (n, d).

        Raises:
            ValueError: the moments have no vectors, or the batch is empty; or inside torch.func.
        """
        if "_vectors" not in self.__dict__:
            raise ValueError(
                "statistics without vectors: this map is fitted to vectors; use Statistics.of(x, y)"
            )
        if transforming():
            raise ValueError(
                "a map that is fitted to vectors: torch.func cannot trace the fit; fit before"
            )
        x = at_least_float32(self._vectors) * self.scale
        batch = x.shape[:-2]
        if 0 in batch:
            raise ValueError(
                f"vectors: shape {tuple(x.shape)}; a map that is fitted to vectors expected at least one set"
            )
        vectors = x.reshape(-1, *x.shape[-2:])
        if self._mask is None:
            return batch, list(vectors)
        masks = self._mask.expand(x.shape[:-1]).reshape(vectors.shape[:-1])
        return batch, [v[mask] for v, mask in zip(vectors, masks)]

    def sum(self, name: str) -> Tensor:
        """Return the sum over the vectors behind an average, (..., d) or (..., d, d), without the scale."""
        if name == "second":
            x = self._vectors.double()
            return x.mT @ x
        x = self._vectors
        if name == "mean":
            return x.sum(-2, dtype=torch.promote_types(x.dtype, torch.float32))
        x = at_least_float32(x)
        return (x.abs() if name == "mean_abs" else x.square()).sum(-2)

    def batch_mean(self, name: str) -> Tensor:
        """Return an average over the vectors of all sets (B, H, L, d), by head; 0 without vectors."""
        count = self.batch_count
        least_one = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
        return self.sum(name).sum(0) / least_one * self.scale ** POWERS[name]

    @property
    def batch_count(self) -> Tensor | int:
        """Number of vectors of each head in all sets of a batch."""
        if self._mask is None:
            return len(self._vectors) * self._vectors.shape[-2]
        return self._mask.sum()

    def _average_product(self, x: Tensor) -> Tensor:
        """Return the mean of scale^2 x x^T for x (..., L, d)."""
        product = x.mT @ x
        if self._mask is None:
            return product * (self.scale**2 / x.shape[-2])
        return product * self.scale**2 / self.count.double().unsqueeze(-1)


def centred(second: Tensor, mean: Tensor) -> Tensor:
    """Return the covariance (..., d, d), float64, from E x x^T and E x (..., d)."""
    mean = mean.double().unsqueeze(-2)
    return second.double() - mean.mT @ mean


@dataclass(frozen=True)
class Statistics:
    """Statistics of queries x and keys y, the input of `FeatureMap.fit` (CRT eq. (8)).

    Scalar statistics have the batch shape (...) and are float64.
    """

    x: Moments
    y: Moments

    @classmethod
    def of(
        cls,
        x: Tensor,
        y: Tensor,
        x_mask: Tensor | None = None,
        y_mask: Tensor | None = None,
        scale: float = 1.0,
    ) -> "Statistics":
        """Return the statistics of scale * x (..., L, d) and scale * y (..., S, d).

        Masks have shapes (..., L) and (..., S), True = keep.

        Raises:
            ValueError: x and y differ in dimension or device, or either is empty.

        >>> stats = Statistics.of(torch.ones(3, 2), torch.tensor([[1.0, 0.0]]))
        >>> round(float(stats.mean_norms), 4), round(float(stats.mean_s(1)), 4)
        (3.0, 5.0)
        """
        if x.shape[-1] != y.shape[-1]:
            raise ValueError(
                f"x has {x.shape[-1]} dimensions, y has {y.shape[-1]}: expected equal numbers"
            )
        if x.device != y.device:
            raise ValueError(f"x is on {x.device}, y is on {y.device}: expected one device")
        return cls(Moments.from_vectors(x, x_mask, scale), Moments.from_vectors(y, y_mask, scale))

    @property
    def d(self) -> int:
        return self.x.d

    @property
    def mean_norms(self) -> Tensor:
        """Mean of N = |x|^2 + |y|^2."""
        return (self.x.mean_sq + self.y.mean_sq).sum(-1, dtype=torch.float64)

    def mean_s(self, s: int) -> Tensor:
        """Return the mean of S_s = |x + s y|^2 over all pairs, for s = +-1."""
        x, y = self.x, self.y
        terms = torch.addcmul(x.mean_sq + y.mean_sq, x.mean, y.mean, value=2 * s)
        return terms.sum(-1, dtype=torch.float64).clamp(min=0)
