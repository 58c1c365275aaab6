"""Coefficients of ridge regression from sums: by one factorisation for a ridge that is given, by one eigendecomposition
for a grid of them.

Legend: S = sum w z z^T (M, M), b = sum w z y^T (M, T), W the sum of weights; S = U diag(lambda) U^T, alpha the ridge.
The model is y = c.z + noise with c ~ N(0, noise variance / alpha).
"""

from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from crt_exp.estimators.sums import Centred
from crt_exp.samplers.blocks import one_thread

Choice = Literal["gcv", "evidence"]
STEPS, ABOVE = 8, 3  # ridges for each power of ten, powers of ten above the largest eigenvalue


class Solution(ABC):
    """Coefficients (M, T), a ridge and an intercept for each target, and what is uncertain about them."""

    alpha: Tensor        # (T,)
    coefficients: Tensor  # (M, T)
    degrees: Tensor      # (T,) of freedom that the fit takes, the intercept among them
    residual: Tensor     # (T,) sum w (y - prediction)^2
    count: Tensor        # (T,) of rows, of repeated ones counted once

    def __init__(self, sums: Centred):
        self.mean, self.targets, self.weight, self.right = sums.features, sums.targets, sums.weight, sums.right
        self.count = torch.full_like(sums.squares, sums.weight)

    @property
    def intercept(self) -> Tensor:
        """(T,)."""
        return self.targets - self.mean @ self.coefficients

    @property
    def noise_variance(self) -> Tensor:
        """(T,) of a row with weight 1."""
        left = (self.count - self.degrees).maximum(1e-12 * self.count)
        return self.residual * (self.count / self.weight) / left

    def predict(self, z: Tensor) -> Tensor:
        """z (n, M) float64 -> (n, T)."""
        return z @ self.coefficients + self.intercept

    def variance(self, z: Tensor) -> Tensor:
        """Of a new target at z (n, M): its noise, and what is uncertain about coefficients and intercept; (n, T)."""
        known = 1 + 1 / self.count + self._spread(z - self.mean) * (self.weight / self.count)
        return known.clamp(max=torch.finfo(known.dtype).max) * self.noise_variance

    def left_out(self, z: Tensor, y: Tensor) -> Tensor:
        """Predictions (n, T) for rows z (n, M) that were summed, as they would be had each been left out."""
        leverage = 1 / self.weight + self._spread(z - self.mean)  # of one of the repetitions that a weight stands for
        return y - (y - self.predict(z)) / (1 - leverage).clamp(min=1e-6)

    @abstractmethod
    def _spread(self, z: Tensor) -> Tensor:
        """z^T (S + alpha)^-1 z of rows (n, M): (n, T) or (n, 1)."""


class Factored(Solution):
    """For one ridge that is given, by Cholesky."""

    def __init__(self, sums: Centred, alpha: float):
        super().__init__(sums)
        gram = sums.gram
        gram.diagonal().add_(alpha)
        factor, failed = torch.linalg.cholesky_ex(gram)
        if failed:
            raise ValueError(f"alpha = {alpha:g}: the features are linearly dependent at that ridge; take a larger "
                             "one, or alpha='gcv'")
        self.alpha = torch.full_like(sums.squares, alpha)
        self.coefficients = torch.cholesky_solve(sums.right, factor)
        self.inverse = torch.linalg.solve_triangular(factor, torch.eye(len(gram), dtype=gram.dtype), upper=False)
        taken = len(gram) - alpha * self.inverse.square().sum() + 1
        self.degrees = taken.expand_as(self.alpha)
        ridged = (sums.squares - (sums.right * self.coefficients).sum(0)).clamp(min=0)
        self.residual = (ridged - alpha * self.coefficients.square().sum(0)).clamp(min=0)

    def _spread(self, z: Tensor) -> Tensor:
        return (z @ self.inverse.mT).square().sum(1, keepdim=True)


class Chosen(Solution):
    """The ridge of a grid with the least generalised cross-validation score, or of most evidence.

    together: one ridge for all targets, of the least sum; else one for each.
    """

    def __init__(self, sums: Centred, by: Choice, floor: float, together: bool):
        super().__init__(sums)
        with one_thread():  # 1.9 s at M = 2048; two threads on busy cores waited for each other for 15 s
            values, self.basis = torch.linalg.eigh(sums.gram)
        least = max(floor * sums.trace, torch.finfo(values.dtype).tiny)
        self.values = torch.where(values > least, values, 0.0)
        self.part = self.basis.mT @ sums.right                              # (M, T)
        explained = self.part.square() / values[:, None].clamp(min=least) * (self.values > 0)[:, None]
        self.rest = (sums.squares - explained.sum(0)).clamp(min=0)          # what no ridge explains
        # Repeated rows whose targets the features interpolate would pass for rows without noise.
        exact = self.rest <= floor**0.5 * sums.squares
        self.count[exact] = self.count[exact].clamp(max=int((self.values > 0).sum()) + 1)
        grid = ridges(least, max(float(values[-1]), least))
        shrunk = grid / (self.values[:, None] + grid)                       # (M, A)
        score = (self._gcv if by == "gcv" else self._evidence)(explained, shrunk)
        if sums.weight <= 1 + 1e-9 and sums.rows > 1:
            raise ValueError(f"the weights sum to {self.weight:g}, which leaves nothing to choose alpha by: they count "
                             "as repetitions of rows, so scale them to a mean of 1, or give alpha")
        best = score.sum(1, keepdim=True).argmin(0).expand(score.shape[1]) if together else score.argmin(0)
        self.alpha = grid[best]
        self.coefficients = self.basis @ (self.part * (self.values > 0)[:, None] / (self.values[:, None] + self.alpha))
        self.degrees = (1 - shrunk[:, best]).sum(0) + 1
        self.residual = self.rest + (explained * shrunk[:, best].square()).sum(0)

    def _gcv(self, explained: Tensor, shrunk: Tensor) -> Tensor:
        """(A, T): n RSS / (n - degrees of freedom)^2; infinite where nothing is left to judge by."""
        left = self.count - 1 - (1 - shrunk).sum(0)[:, None]
        residual = self.rest + shrunk.square().mT @ explained
        return torch.where(left > 1e-9 * self.count, self.count * residual / left.square(), torch.inf)

    def _evidence(self, explained: Tensor, shrunk: Tensor) -> Tensor:
        """(A, T): minus twice the log of the evidence, with the noise variance at its best."""
        count = (self.count - 1).clamp(min=1e-9)
        fit = (self.rest + shrunk.mT @ explained).clamp(min=torch.finfo(shrunk.dtype).tiny)
        return count * fit.log() - shrunk.log().sum(0)[:, None]

    def _spread(self, z: Tensor) -> Tensor:
        return (z @ self.basis).square() @ (1 / (self.values[:, None] + self.alpha))


def ridges(least: float, top: float) -> Tensor:
    """A grid from what rounding hides to what leaves next to nothing of any coefficient."""
    low, high = np.log10(least), np.log10(top) + ABOVE
    return torch.logspace(low, high, int(STEPS * (high - low)) + 1, dtype=torch.float64)


def solved(sums: Centred, alpha: float | Choice, floor: float, together: bool = False) -> Solution:
    """`sums` are written to. floor: of eigenvalues and of ridges to choose from, by the sum of eigenvalues."""
    if isinstance(alpha, str):
        return Chosen(sums, alpha, floor, together)
    return Factored(sums, float(alpha))
