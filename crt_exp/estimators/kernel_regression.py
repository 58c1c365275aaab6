"""Nadaraya-Watson kernel regression and classification for scikit-learn.

Notation: n samples, d columns, m projections, M features, C classes or targets.
"""

import math
import warnings

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from crt_exp.attention.partials import Partial, merge, read, scale_keys
from crt_exp.estimators import (
    FLOATS,
    ROWS,
    RandomFeatureEstimator,
    all_or_none,
    blocks,
    check_targets,
    drop_weightless,
    label_set,
    validate_rows,
)
from crt_exp.features import FeatureMap, PosRF


class _KernelRegression(RandomFeatureEstimator):
    """Base class: kernel averages of targets R (n, C), exact or estimated (CRT 5.2)."""

    def __init__(
        self,
        features="oprf",
        sampler="orthogonal",
        n_components=128,
        kernel="gaussian",
        gamma=None,
        random_state=None,
        *,
        length_scale=None,
    ):
        super().__init__(
            features,
            sampler,
            n_components,
            kernel,
            gamma,
            random_state,
            length_scale=length_scale,
        )

    @property
    def _exact(self) -> bool:
        return self.features == "exact"

    def _map(self) -> FeatureMap:
        """Return the feature map; for the exact kernel, a map that estimates it without bias."""
        return PosRF(self.kernel) if self._exact else super()._map()

    def _begin(self, X: np.ndarray, weight: np.ndarray, columns: int) -> None:
        """Fit the map to X and start with empty sums over `columns` targets."""
        self._check_options()
        self._set_scale(X, weight, "scale")
        self.sums_: Partial | None = None
        if self._exact:
            self.x_ = X[:0]
            self.targets_ = np.empty((0, columns + 1))
        else:
            self._fit_map(X, weight)

    def _add(self, X: np.ndarray, R: np.ndarray, weight: np.ndarray) -> None:
        """Add rows to Phi^T w [R, 1], the partial sums of each feature.

        Raises:
            ValueError: a sum overflows.
        """
        targets = np.column_stack([R, np.ones(len(R))]) * weight[:, None]
        if self._exact:
            self.x_ = np.concatenate([self.x_, X])
            self.targets_ = np.concatenate([self.targets_, targets])
            return
        for rows in blocks(len(X)):
            x = self._scaled(X[rows])
            r = torch.from_numpy(targets[rows]).to(x.dtype)
            keys = scale_keys(self.map_.phi_k(x, self.noise_, self.params_))
            merged = merge(self.sums_, Partial(keys.phi.mT @ r, keys.top))
            if not bool(keys.top.isfinite().all() & merged.sums.isfinite().all()):
                raise ValueError("features or targets overflow: scale X or y down")
            self.sums_ = merged

    def _numerators(self, X: np.ndarray) -> np.ndarray:
        """Return kernel sums (n, C + 1), up to a positive factor per row.

        The last column is the kernel mass.
        """
        sums = self._exact_sums if self._exact else self._feature_sums
        at_once = max(1, 4_000_000 // max(len(self.x_), 1)) if self._exact else ROWS
        return np.concatenate([sums(X[rows]) for rows in blocks(len(X), at_once)])

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


class KernelRegressionClassifier(ClassifierMixin, _KernelRegression):
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
    def fit(self, X, y, sample_weight=None):
        """Fit to X (n, d) and labels y (n,)."""
        X, y = validate_rows(self, X, y)
        X, y, weight = drop_weightless(sample_weight, X, y)
        self.classes_ = label_set(y)
        self._begin(X, weight, len(self.classes_))
        self._add(X, self._one_hot(y), weight)
        return self

    @all_or_none
    def partial_fit(self, X, y, classes=None, sample_weight=None):
        """Add all rows, or none if the call raises.

        The first call fits the parameters and samples the projections.

        Raises:
            ValueError: the first call has no `classes`, or a label is not among them.
        """
        first = not hasattr(self, "classes_")
        X, y = validate_rows(self, X, y, reset=first)
        X, y, weight = drop_weightless(sample_weight, X, y)
        if first:
            if classes is None:
                raise ValueError("classes=None: the first partial_fit needs all labels")
            self.classes_ = label_set(classes)
            self._begin(X, weight, len(self.classes_))
        self._add(X, self._one_hot(y), weight)
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
        check_is_fitted(self)
        X = validate_data(self, X, dtype=FLOATS, reset=False)
        return self._numerators(X)[:, :-1]

    def _one_hot(self, y: np.ndarray) -> np.ndarray:
        label_set(self.classes_, y)
        places = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        if not np.array_equal(self.classes_[places], y):
            unseen = sorted(set(y.tolist()) - set(self.classes_.tolist()))
            raise ValueError(
                f"label {unseen[0]!r}: expected one of classes={self.classes_.tolist()}"
            )
        return np.eye(len(self.classes_))[places]


class KernelRegressionRegressor(RegressorMixin, _KernelRegression):
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
        tags.target_tags.multi_output = True
        tags.regressor_tags.poor_score = (
            True  # a local average needs a tuned gamma, above all in many dimensions
        )
        return tags

    @all_or_none
    def fit(self, X, y, sample_weight=None):
        """Fit to X (n, d) and targets y (n,) or (n, C)."""
        X, y = validate_rows(self, X, y, y_numeric=True, multi_output=True)
        X, y, weight = drop_weightless(sample_weight, X, y)
        self._start(X, y, weight)
        return self._take(X, y, weight)

    @all_or_none
    def partial_fit(self, X, y, sample_weight=None):
        """Add all rows, or none if the call raises.

        The first call fits the parameters and samples the projections.
        """
        first = not hasattr(self, "total_")
        X, y = validate_rows(self, X, y, reset=first, y_numeric=True, multi_output=True)
        X, y, weight = drop_weightless(sample_weight, X, y)
        if first:
            self._start(X, y, weight)
        check_targets(y, self._shape)
        return self._take(X, y, weight)

    def _start(self, X, y, weight):
        self._shape = y.shape[1:]
        self._begin(X, weight, math.prod(self._shape))
        self.total_ = 0.0
        self.count_ = 0
        self.range_ = (np.inf, -np.inf)

    def _take(self, X, y, weight):
        targets = y.reshape(len(y), -1).astype(np.float64)
        self.total_ = self.total_ + weight @ targets
        self.count_ = self.count_ + weight.sum()
        low, high = self.range_
        self.range_ = np.minimum(low, targets.min(0)), np.maximum(high, targets.max(0))
        self._add(X, targets, weight)
        return self

    def predict(self, X):
        """Return predictions (n,) or (n, C), within the range of the training targets."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=FLOATS, reset=False)
        sums = self._numerators(X).astype(np.float64)
        mass = sums[:, -1:]
        bad = ~(mass[:, 0] > 0)
        if bad.any():
            warnings.warn(
                f"{bad.sum()} of {len(X)} rows have no positive kernel mass: predicting the mean training "
                "target. Use more features, a smaller gamma or features='oprf'",
                stacklevel=2,
            )
        mean = np.where(
            bad[:, None], self.total_ / self.count_, sums[:, :-1] / np.where(bad[:, None], 1, mass)
        )
        return mean.clip(*self.range_).reshape(len(X), *self._shape)
