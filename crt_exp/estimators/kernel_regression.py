"""Nadaraya-Watson kernel regression and classification for scikit-learn.

Notation: n samples, d columns, m projections, M features, C classes or targets.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.utils import gen_batches

from crt_exp.attention.partials import Partial, merge, read, scale_keys
from crt_exp.estimators import (
    ROWS,
    Classification,
    Incremental,
    RandomFeatureEstimator,
    Regression,
    all_or_none,
    label_set,
)
from crt_exp.features import FeatureMap, PosRF


@dataclass(eq=False, repr=False)
class KernelRegression(Incremental, RandomFeatureEstimator):
    """Base class: kernel averages of targets (n, C), exact or estimated (CRT 5.2)."""

    n_components: Any = 128

    @property
    def _exact(self) -> bool:
        return self.features == "exact"

    def _map(self) -> FeatureMap:
        """Return the feature map; for the exact kernel, a map that estimates it without bias."""
        return PosRF(self.kernel) if self._exact else super()._map()

    def _begin(self, X, weight, targets):
        self._set_scale(X, weight, "scale")
        self.sums_: Partial | None = None
        if self._exact:
            self.x_ = X[:0]
            self.targets_ = np.empty((0, targets.shape[1] + 1))
        else:
            self._fit_map(X, weight)

    def _add_rows(self, X, y, targets, weight):
        """Add rows to Phi^T w [targets, 1], the partial sums of each feature.

        Raises:
            ValueError: a sum overflows.
        """
        targets = np.column_stack([targets, np.ones(len(targets))]) * weight[:, None]
        if self._exact:
            self.x_ = np.concatenate([self.x_, X])
            self.targets_ = np.concatenate([self.targets_, targets])
            return
        for rows in gen_batches(len(X), ROWS):
            x = self._scaled(X[rows])
            r = torch.from_numpy(targets[rows]).to(x.dtype)
            keys = scale_keys(self.map_.phi_k(x, self.noise_, self.params_))
            merged = merge(self.sums_, Partial(keys.phi.mT @ r, keys.top))
            if not bool(keys.top.isfinite().all() & merged.sums.isfinite().all()):
                raise ValueError("features or targets overflow: scale X or y down")
            self.sums_ = merged

    def _numerators(self, X) -> np.ndarray:
        """Return kernel sums (n, C + 1), up to a positive factor per row.

        The last column is the kernel mass.
        """
        X = self._validated(X)
        sums = self._exact_sums if self._exact else self._feature_sums
        at_once = max(1, 4_000_000 // max(len(self.x_), 1)) if self._exact else ROWS
        return np.concatenate([sums(X[rows]) for rows in gen_batches(len(X), at_once)])

    def _feature_sums(self, X: np.ndarray) -> np.ndarray:
        assert self.sums_ is not None  # `fit` has added rows
        f = self.map_.phi_q(self._scaled(X), self.noise_, self.params_)
        return read(f, self.sums_).sums.numpy()

    def _exact_sums(self, X: np.ndarray) -> np.ndarray:
        """Return exact kernel sums, float64; the largest exponent per row cancels."""
        x, y = (self._scaled(v.astype(np.float64)) for v in (X, self.x_))
        logits = x @ y.mT
        if self.kernel == "gaussian":
            logits -= y.square().sum(-1) / 2
        weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
        return (weights @ torch.from_numpy(self.targets_)).numpy()


class KernelRegressionClassifier(Classification, KernelRegression):
    """Predicts the class with the largest kernel sum over its samples (CRT 5.2).

    Fitting takes O(n M). Prediction takes O(M C) per row, independent of n. Ties go to the lowest class.

    Args:
        features: "exact", a name in `conf/features`, or a FeatureMap.
        n_components: number of features, rounded up to whole projections.
        kernel: as in RandomFeatures.
        gamma: as in RandomFeatures, but None is 'scale'.
        length_scale: as in RandomFeatures.

    `sample_weight` counts as repetitions of a row.

    >>> X = np.array([[0.0], [1.0], [2.0], [3.0]])
    >>> model = KernelRegressionClassifier("exact", gamma=1.0).fit(X, ["low", "low", "high", "high"])
    >>> model.predict([[0.2], [2.9]])
    array(['low', 'high'], dtype='<U4')
    """

    @all_or_none
    def partial_fit(self, X, y, classes=None, sample_weight=None):
        """Add all rows, or none if the call raises.

        The first call fits the parameters and samples the projections.

        Raises:
            ValueError: the first call has no `classes`, or a label is not among them.
        """
        if not hasattr(self, "sums_"):
            if classes is None:
                raise ValueError("classes=None: the first partial_fit needs all labels")
            self.classes_ = label_set(classes)
        self._add(X, y, sample_weight)
        return self

    def predict(self, X):
        """Return labels (n,)."""
        scores = self._scores(X)
        return self.classes_[scores.argmax(1)]

    def predict_proba(self, X):
        """Return normalised kernel sums (n, C), with negative estimates set to 0.

        Rows without positive estimates give probability 1 to the largest one.
        """
        scores = self._scores(X)
        positive = np.maximum(scores, 0)
        total = positive.sum(1, keepdims=True)
        best = np.eye(len(self.classes_))[scores.argmax(1)]
        return np.where(total > 0, positive / np.where(total > 0, total, 1), best)

    def _scores(self, X) -> np.ndarray:
        return self._numerators(X)[:, :-1]

    def _targets(self, y):
        if not hasattr(self, "classes_"):
            self.classes_ = label_set(y)
        unseen = np.setdiff1d(label_set(self.classes_, y), self.classes_).tolist()
        if unseen:
            raise ValueError(
                f"label {unseen[0]!r}: expected one of classes={self.classes_.tolist()}"
            )
        return super()._targets(y)


class KernelRegressionRegressor(Regression, KernelRegression):
    """Nadaraya-Watson regression: kernel-weighted mean of the training targets.

    Estimates are clipped to the range of the training targets, because trig, gerf, pois and geom may divide by a
    kernel mass near 0. Rows without positive kernel mass get the mean of the training targets, with a warning.
    Arguments are those of KernelRegressionClassifier.

    >>> X = np.array([[0.0], [1.0], [2.0]])
    >>> model = KernelRegressionRegressor("exact", gamma=1.0).fit(X, [0.0, 1.0, 2.0])
    >>> model.predict([[1.0]])
    array([1.])
    """

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = (
            True  # a local average needs a tuned gamma, above all in many dimensions
        )
        return tags

    def _begin(self, X, weight, targets):
        super()._begin(X, weight, targets)
        self.total_ = 0.0
        self.count_ = 0
        self.range_ = (np.inf, -np.inf)

    def _add_rows(self, X, y, targets, weight):
        self.total_ = self.total_ + weight @ targets
        self.count_ = self.count_ + weight.sum()
        low, high = self.range_
        self.range_ = np.minimum(low, targets.min(0)), np.maximum(high, targets.max(0))
        super()._add_rows(X, y, targets, weight)

    def predict(self, X):
        """Return predictions (n,) or (n, C), within the range of the training targets."""
        sums = self._numerators(X).astype(np.float64)
        mass = sums[:, -1:]
        bad = ~(mass[:, 0] > 0)
        if bad.any():
            warnings.warn(
                f"{bad.sum()} of {len(bad)} rows have no positive kernel mass: predicting the mean training "
                "target. Use more features, a smaller gamma or features='oprf'",
                stacklevel=2,
            )
        mean = np.where(
            bad[:, None], self.total_ / self.count_, sums[:, :-1] / np.where(bad[:, None], 1, mass)
        )
        return mean.clip(*self.range_).reshape(-1, *self._shape)
