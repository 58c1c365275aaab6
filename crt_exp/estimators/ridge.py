"""Bayesian ridge regression and classification on random features.

Notation: n rows, M = n_components features z, T targets y, weights w with sum W; S = sum w z z^T over centred
features, S = U diag(lambda) U^T, alpha the ridge. The model is y = c.z + noise with c ~ N(0, noise variance / alpha).
All results follow from sums over rows.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
import torch
from scipy.sparse import issparse, vstack
from sklearn.utils import check_random_state, gen_batches
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from crt_exp.estimators import (
    ROWS,
    Classification,
    Incremental,
    RandomFeatures,
    Regression,
    all_or_none,
    label_set,
)
from crt_exp.samplers.threads import threads
from crt_exp.validation import NotNegative, check, whole_number

Criterion = Literal["gcv", "evidence"]
# rounding error of eigenvalues, relative to their sum
ROUNDING = {"float64": 1e-13, "float32": 1e-7}
STEPS = 8  # grid points per decade
ABOVE = 3  # decades of the grid above the largest eigenvalue
CALIBRATION_ROWS = 4000  # rows stored for the calibration of a classifier
SOFTNESS = 100.0  # inverse L2 penalty of the calibration
LEAST_RIDGE = 1e-6  # of classifiers, relative to the sum of eigenvalues; leave-one-out scores are inaccurate below it


class Sums:
    """Weighted sums over rows of z z^T, z y^T, z, y, y^2 and 1, float64.

    Targets are relative to `origin`, which reduces cancellation. Methods replace the tensors, so that a copy of the
    object keeps its values.
    """

    def __init__(self, columns: int, origin: Tensor):
        targets = len(origin)
        self.gram = torch.zeros(columns, columns, dtype=torch.float64)
        self.right = torch.zeros(columns, targets, dtype=torch.float64)
        self.features = torch.zeros(columns, dtype=torch.float64)
        self.targets = torch.zeros(targets, dtype=torch.float64)
        self.squares = torch.zeros(targets, dtype=torch.float64)
        self.weight = 0.0
        self.rows = 0
        self.origin = origin

    def add(
        self,
        z: Tensor,
        y: Tensor,
        w: Tensor,
    ) -> None:
        """Add rows z (n, M), y (n, T), w (n,), float64.

        Raises:
            ValueError: a sum overflows.
        """
        y = y - self.origin
        root = w.sqrt()
        z = z * root[:, None]
        with np.errstate(invalid="ignore", over="ignore"):
            # NumPy computes one triangle: half the time
            self.gram = self.gram + torch.from_numpy(z.numpy().T @ z.numpy())
        self.right = self.right + z.mT @ (root[:, None] * y)
        self.features = self.features + root @ z
        self.targets = self.targets + w @ y
        self.squares = self.squares + w @ y.square()
        self.weight += float(w.sum())
        self.rows += len(w)
        if not bool(self.gram.diagonal().isfinite().all()):
            raise ValueError(
                "features overflow: scale X down, use a larger length_scale, or features='trig'"
            )
        if not bool(self.squares.isfinite().all()):
            raise ValueError("y: squares overflow; scale y down")

    def move_targets(self, places: list[int], count: int) -> None:
        """Move the targets to columns `places` of `count`; other columns are zero."""
        for name in ("right", "targets", "squares", "origin"):
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:-1], count)
            new[..., places] = old
            setattr(self, name, new)


class Solution:
    """Ridge coefficients (M, T), intercept (T,) and their uncertainty.

    Args:
        alpha: a number, or a criterion: "gcv" (generalised cross-validation) or "evidence". A criterion selects alpha
            on a grid.
        floor: least eigenvalue and least ridge of the grid, relative to the sum of eigenvalues.
        together: select one ridge for all targets.

    Raises:
        ValueError: the weights are too small for selecting alpha.
    """

    def __init__(
        self,
        sums: Sums,
        alpha: float | Criterion,
        floor: float,
        together: bool,
    ):
        self.option = alpha
        self.weight = sums.weight
        self.mean = sums.features / sums.weight
        shift = sums.targets / sums.weight
        self.targets = shift + sums.origin
        squares = (sums.squares - sums.targets * shift).clamp(min=0)
        with threads(1):  # more threads wait for each other on busy cores
            centred = sums.gram - torch.outer(sums.features, self.mean)
            values, self.basis = torch.linalg.eigh(centred)
        least = max(floor * float(sums.gram.trace()), torch.finfo(values.dtype).tiny)
        smallest = 0 if isinstance(alpha, Real) and alpha else least
        self.values = torch.where(values > smallest, values, 0.0)
        part = self.basis.mT @ (sums.right - sums.features[:, None] * shift)  # (M, T)
        explained = part.square() / values[:, None].clamp(min=least) * (self.values > 0)[:, None]
        rest = (squares - explained.sum(0)).clamp(min=0)  # unexplained by every ridge
        rest[rest <= floor * squares] = (
            0.0  # rounding, which would choose among the ridges of interpolated rows
        )
        self.count = torch.full_like(squares, sums.weight)
        # interpolated repeated rows are no evidence of zero noise
        exact = rest <= floor**0.5 * squares
        self.count[exact] = self.count[exact].clamp(max=int((self.values > 0).sum()) + 1)
        if isinstance(alpha, str):
            if sums.weight <= 1 + 1e-9 and sums.rows > 1:
                raise ValueError(
                    f"sample_weight sums to {sums.weight:g}: too small for alpha={alpha}; use mean 1"
                )
            grid = ridges(least, max(float(values[-1]), least))
            shares = grid / (self.values[:, None] + grid)
            criterion = self._gcv if alpha == "gcv" else self._evidence
            score = criterion(shares, explained, rest)  # (A, T)
            if together:
                score = score.sum(1, keepdim=True).expand(-1, len(squares))
            self.alpha = grid[score.argmin(0)]
        else:
            self.alpha = torch.full_like(squares, alpha)
        ridged = self.values[:, None] + self.alpha
        inverse = torch.where(self.values[:, None] > 0, 1 / ridged, 0.0)
        shrunk = 1 - self.values[:, None] * inverse
        self.coefficients = self.basis @ (part * inverse)
        self.intercept = self.targets - self.mean @ self.coefficients
        self.degrees = (1 - shrunk).sum(0) + 1
        left = (self.count - self.degrees).maximum(1e-12 * self.count)
        residual = rest + (explained * shrunk.square()).sum(0)
        self.noise_variance = residual * (self.count / self.weight) / left

    def _gcv(self, shrunk: Tensor, explained: Tensor, rest: Tensor) -> Tensor:
        """Return n RSS / (n - degrees of freedom)^2; infinite without residual degrees."""
        kept = self.values > 0
        left = self.count - 1 - kept.sum() + shrunk[kept].sum(0)[:, None]
        residual = rest + shrunk.square().mT @ explained
        score = self.count * residual / left.square()
        return torch.where(left > 1e-9 * self.count, score, torch.inf)

    def _evidence(self, shrunk: Tensor, explained: Tensor, rest: Tensor) -> Tensor:
        """Return -2 log evidence, maximised over the noise variance."""
        fit = (rest + shrunk.mT @ explained).clamp(min=torch.finfo(shrunk.dtype).tiny)
        return (self.count - 1).clamp(min=1e-9) * fit.log() - shrunk.log().sum(0)[:, None]

    def predict(self, z: Tensor) -> Tensor:
        """Return predictions (n, T) for features (n, M)."""
        return z @ self.coefficients + self.intercept

    def variance(self, z: Tensor) -> Tensor:
        """Return the predictive variance (n, T): noise plus coefficient uncertainty."""
        known = 1 + 1 / self.count + self._spread(z) * (self.weight / self.count)
        return known.clamp(max=torch.finfo(known.dtype).max) * self.noise_variance

    def leave_one_out(self, z: Tensor, y: Tensor) -> Tensor:
        """Return leave-one-out predictions for training rows.

        For a weighted row one repetition is left out.
        """
        leverage = 1 / self.weight + self._spread(z)
        return y - (y - self.predict(z)) / (1 - leverage).clamp(min=1e-6)

    def _spread(self, z: Tensor) -> Tensor:
        """Return (z - mean)^T (S + alpha)^-1 (z - mean), (n, T)."""
        scale = (self.values[:, None] + self.alpha).clamp(min=torch.finfo(self.values.dtype).tiny)
        return ((z - self.mean) @ self.basis).square() @ (1 / scale)


def ridges(least: float, top: float) -> Tensor:
    """Return a grid of ridges, from rounding level to almost zero coefficients."""
    low = np.log10(least)
    high = np.log10(top) + ABOVE
    return torch.logspace(low, high, int(STEPS * (high - low)) + 1, dtype=torch.float64)


@dataclass(eq=False, repr=False)
class BaseRandomFeatureRidge(Incremental):
    """Base class: accumulates sums over rows, which are not stored.

    The feature map is fitted to the first batch of rows.
    """

    features: Any = "trig"
    n_components: Any = 512
    alpha: Any = field(default="evidence", kw_only=True)

    together = False
    _accept_sparse = "csr"
    least_ridge = 0.0

    @all_or_none
    def fit(self, X, y, sample_weight=None):
        """Fit to X (n, d), dense or sparse, and y (n,) or (n, T), or labels (n,)."""
        super().fit(X, y, sample_weight)
        self._solve()
        return self

    def _check_options(self):
        whole_number(self.n_components, "n_components")
        check("alpha", self.alpha, NotNegative | Criterion)

    def _begin(self, X, weight, targets):
        seed = self.random_state
        if not isinstance(seed, Integral):
            seed = check_random_state(seed).randint(2**31 - 1)
        options = self.get_params(deep=False) | {"random_state": seed}
        del options["alpha"]
        self.features_ = RandomFeatures(**options)._begin(X, weight, "scale")
        self.sums_ = Sums(self.features_._n_features_out, torch.from_numpy(targets[0].copy()))

    def _add_rows(self, X, y: np.ndarray, targets: np.ndarray, weight: np.ndarray) -> None:
        self.sums_ = copy(self.sums_)
        columns = torch.from_numpy(targets)
        weights = torch.from_numpy(np.require(weight, requirements="W"))  # else torch warns
        for rows in gen_batches(X.shape[0], ROWS):
            self.sums_.add(self._features(X[rows]), columns[rows], weights[rows])
        self._solution: Solution | None = None

    def _features(self, X) -> Tensor:
        return torch.from_numpy(self.features_.transform(X)).double()

    def _solve(self) -> Solution:
        """Return the solution for all rows so far and the current `alpha`, cached."""
        check_is_fitted(self)
        if self._solution is None or self._solution.option != self.alpha:
            self._check_options()
            floor = max(ROUNDING[self.features_._dtype.name], self.least_ridge)
            solution = Solution(self.sums_, self.alpha, floor, self.together)
            self._solution = self._finish(solution)
        return self._solution

    def _finish(self, solution: Solution) -> Solution:
        return solution

    def _per_block(self, X, function: Callable[[Tensor], Tensor]) -> np.ndarray:
        """Apply a function to the features (n, M) of X, block by block."""
        X = self._validated(X)
        parts = [
            function(self._features(X[rows])).numpy() for rows in gen_batches(X.shape[0], ROWS)
        ]
        return np.concatenate(parts)

    @property
    def rows_(self) -> int:
        return self.sums_.rows


class RandomFeatureRidge(Regression, BaseRandomFeatureRidge):
    """Ridge regression on random features, in time O(n M^2) and memory O(M^2).

    It approximates kernel ridge regression, or the mean of a Gaussian process.

    Args:
        features: as in RandomFeatures. The default trig is bounded for the Gaussian kernel, so no row dominates.
        sampler: as in RandomFeatures.
        n_components: as in RandomFeatures.
        kernel: as in RandomFeatures.
        gamma: as in RandomFeatures, but None is 'scale'.
        length_scale: as in RandomFeatures.
        alpha: the ridge, a number; or selected for each target by "evidence" (of the Bayesian model) or "gcv"
            (generalised cross-validation, which overfits few rows).

    `sample_weight` counts as repetitions of a row.

    Attributes:
        features_: a RandomFeatures, fitted to the first batch.
        coef_: (M,) or (T, M).
        intercept_: a number, or (T,).
        alpha_: the selected ridge.
        noise_variance_: noise variance of a row with weight 1.
        degrees_: effective degrees of freedom.
        rows_: number of rows.

    All attributes but features_ follow `partial_fit` and changes of `alpha`.

    >>> X = np.linspace(-2, 2, 100)[:, None]
    >>> model = RandomFeatureRidge(n_components=64, gamma=1.0, random_state=0).fit(X, np.sin(2 * X[:, 0]))
    >>> bool(model.score(X, np.sin(2 * X[:, 0])) > 0.999), model.coef_.shape
    (True, (64,))
    """

    def predict(self, X, return_std=False):
        """Return means (n,) or (n, T).

        Args:
            return_std: also return standard deviations of new targets, including noise.
        """
        solution = self._solve()
        if not return_std:
            return self._per_block(X, solution.predict).reshape(-1, *self._shape)

        def moments(z: Tensor) -> Tensor:
            return torch.stack([solution.predict(z), solution.variance(z).sqrt()], -1)

        mean, deviation = np.moveaxis(self._per_block(X, moments), -1, 0)
        return mean.reshape(-1, *self._shape), deviation.reshape(-1, *self._shape)

    @property
    def coef_(self) -> np.ndarray:
        return self._solve().coefficients.T.numpy().reshape(*self._shape, -1)

    @property
    def intercept_(self):
        return self._of_targets(self._solve().intercept)

    @property
    def alpha_(self):
        return self._of_targets(self._solve().alpha)

    @property
    def noise_variance_(self):
        return self._of_targets(self._solve().noise_variance)

    @property
    def degrees_(self):
        return self._of_targets(self._solve().degrees)

    def _of_targets(self, values: Tensor):
        return values.numpy() if self._shape else float(values)


@dataclass(eq=False, repr=False)
class RandomFeatureClassifier(Classification, BaseRandomFeatureRidge):
    """Ridge regression on one-hot labels, calibrated by logistic regression.

    The logistic regression uses the leave-one-out scores of up to 4000 evenly spaced rows, which are stored. One ridge
    serves all classes. A new label in a later batch adds a class. Arguments are those of RandomFeatureRidge; alpha is
    "gcv" by default.

    Attributes:
        features_: a RandomFeatures, fitted to the first batch.
        classes_: sorted labels.
        coef_: (C, M) of the log probabilities, up to a constant per row; one row for two classes.
        intercept_: (C,), or (1,) for two classes.
        alpha_: the selected ridge.
        rows_: number of rows.

    >>> X = np.linspace(-2, 2, 100)[:, None]
    >>> model = RandomFeatureClassifier(n_components=64, random_state=0).fit(X, X[:, 0] ** 2 > 1)
    >>> model.predict([[0.0], [1.9]]), model.predict_proba(X).shape
    (array([False,  True]), (100, 2))
    """

    alpha: Any = field(default="gcv", kw_only=True)

    together = True
    least_ridge = LEAST_RIDGE

    @all_or_none
    def partial_fit(self, X, y, classes=None, sample_weight=None):
        """Add all rows, or none if the call raises.

        Args:
            classes: labels of later batches; optional, since unseen labels add classes.
        """
        if classes is not None and not hasattr(self, "sums_"):
            self.classes_ = label_set(classes)
        self._add(X, y, sample_weight)
        return self

    def decision_function(self, X):
        """Return log probabilities (n, C) up to a constant; log odds (n,) if C = 2.

        The constant is one number per row.
        """
        self._solve()
        scores = self._per_block(X, self._scores)
        return scores.ravel() if len(self.classes_) == 2 else scores

    def _scores(self, z: Tensor) -> Tensor:
        return z @ torch.from_numpy(self.coef_).T + torch.from_numpy(self.intercept_)

    def predict_proba(self, X):
        """Return class probabilities (n, C)."""
        scores = torch.from_numpy(self.decision_function(X))
        if scores.ndim == 1:
            return torch.stack([(-scores).sigmoid(), scores.sigmoid()], 1).numpy()
        return scores.softmax(1).numpy()

    def predict(self, X):
        """Return labels (n,)."""
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)]

    @property
    def coef_(self) -> np.ndarray:
        self._solve()
        return self._linear[0]

    @property
    def intercept_(self) -> np.ndarray:
        self._solve()
        return self._linear[1]

    @property
    def alpha_(self) -> float:
        return float(self._solve().alpha[0])

    def _targets(self, y):
        old = getattr(self, "classes_", y[:0])
        self.classes_ = label_set(old, y) if len(old) else label_set(y)
        if hasattr(self, "sums_") and len(self.classes_) > len(old):
            self.sums_ = copy(self.sums_)
            places = np.searchsorted(self.classes_, old).tolist()
            self.sums_.move_targets(places, len(self.classes_))
        return super()._targets(y)

    def _begin(self, X, weight, targets):
        super()._begin(X, weight, np.zeros_like(targets))

    def _add_rows(self, X, y, targets, weight):
        """Store evenly spaced rows too, at most CALIBRATION_ROWS: every row, every second, ..."""
        super()._add_rows(X, y, targets, weight)
        before = self.rows_ - len(y)
        if before == 0:
            self._stride = 1
            self._kept = (X[:0], y[:0], weight[:0])
        old = self._stride
        while self.rows_ > CALIBRATION_ROWS * self._stride:
            self._stride *= 2
        new = slice(-before % self._stride, None, self._stride)
        kept_X, kept_y, kept_weight = (part[:: self._stride // old] for part in self._kept)
        y = np.concatenate([kept_y, y[new]])
        weight = np.concatenate([kept_weight, weight[new]])
        rows = [kept_X, X[new]]
        X = vstack(rows, "csr") if any(map(issparse, rows)) else np.concatenate(rows)
        self._kept = (X, y, weight)

    def _finish(self, solution: Solution) -> Solution:
        """Fit the calibration.

        Raises:
            ValueError: all rows belong to one class.
        """
        from sklearn.linear_model import LogisticRegression

        X, y, weight = self._kept
        if len(np.unique(y)) < 2:
            raise ValueError(f"y: one class only ({y[0]}) so far; expected at least two")
        targets = torch.from_numpy(super()._targets(y))
        scores = solution.leave_one_out(self._features(X), targets)
        # scores sum to 1, which serves as the intercept
        fitted = LogisticRegression(
            C=SOFTNESS, solver="newton-cholesky", tol=1e-10, fit_intercept=False
        )
        slopes = fitted.fit(
            scores.numpy(), y, weight
        ).coef_  # (K, C), or (1, C) of the second class
        offsets = np.zeros(len(slopes))
        if len(self.classes_) > 2:
            seen = np.searchsorted(self.classes_, fitted.classes_)
            slopes_seen = slopes
            slopes = np.zeros((len(self.classes_), slopes.shape[1]))
            slopes[seen[-len(slopes_seen) :]] = slopes_seen
            offsets = np.full(len(slopes), -np.inf)  # classes without rows get probability 0
            offsets[seen] = 0
        weights = slopes @ solution.coefficients.T.numpy()
        self._linear = (weights, slopes @ solution.intercept.numpy() + offsets)
        return solution
