"""Classification in random features, with probabilities.

Legend: M features z, C classes, W the sum of weights, pi_c the share of a class in it.
"""

from typing import NamedTuple

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from torch import Tensor

from crt_exp.estimators.random_features import label_set
from crt_exp.estimators.base import RidgeOfFeatures
from crt_exp.estimators.batches import Batch, Spread
from crt_exp.estimators.calibration import calibrated
from crt_exp.estimators.solve import Solution

LEAST = 1e-4  # variance of a score, which is 1 for its class and 0 for others


class RandomFeatureClassifier(ClassifierMixin, RidgeOfFeatures):
    """Flexible discriminant analysis in random features: one ridge regression for each class, and linear discriminant
    analysis of their scores, whose means and covariance within classes follow from the same sums.

    Arguments are those of RandomFeatureRidge; one ridge serves all classes, by default that of 'gcv'. `predict_proba`
    is a softmax of the discriminants, for two classes a sigmoid, at a temperature and with an offset for each class
    that are most likely for the left-out scores of up to 4000 rows, evenly spread over all that came, which are kept. A
    label that comes with a later batch is a new class.

    Attributes: features_, classes_, coef_ (C, n_components) and intercept_ (C,) of the log probabilities up to a
    constant (one row for two classes), alpha_, rows_.
    """

    def __init__(self, mechanism=None, sampler="orthogonal", n_components=512, kernel="gaussian", gamma="scale",
                 *, length_scale=None, alpha="gcv", random_state=None):
        super().__init__(mechanism, sampler, n_components, kernel, gamma, length_scale=length_scale, alpha=alpha,
                         random_state=random_state)

    def partial_fit(self, X, y, classes=None, sample_weight=None):
        """Adds rows. classes: labels that may come later; others are added as they come."""
        if classes is not None and not hasattr(self, "sums_"):
            self.classes_ = label_set(classes)
        self._take(X, y, sample_weight)
        return self

    def decision_function(self, X):
        """(n, C) log probabilities up to a constant of the row; (n,) log odds for two classes."""
        linear = self._solve().linear
        return self._per_block(X, linear.of).reshape((-1,) if len(self.classes_) == 2 else (-1, len(self.classes_)))

    def predict_proba(self, X):
        """(n, C)."""
        scores = torch.from_numpy(self.decision_function(X))
        if scores.ndim == 1:
            return torch.stack([(-scores).sigmoid(), scores.sigmoid()], 1).numpy()
        return scores.softmax(1).numpy()

    def predict(self, X):
        """(n,) labels."""
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)]

    @property
    def coef_(self) -> np.ndarray:
        return self._solve().linear.weights.T.numpy()

    @property
    def intercept_(self) -> np.ndarray:
        return self._solve().linear.bias.numpy()

    @property
    def alpha_(self) -> float:
        return float(self._solve().ridge.alpha[0])

    def _begin(self, batch: Batch, whole: bool) -> None:
        super()._begin(batch, whole)
        self._spread = Spread()

    def _note(self, batch: Batch) -> None:
        self._spread.add(batch)

    def _know(self, labels: np.ndarray) -> None:
        """That there are these classes too."""
        known = label_set(self.classes_, labels)
        if len(known) > len(self.classes_):
            self.sums_.place(np.searchsorted(known, self.classes_).tolist(), len(known))
        self.classes_ = known

    def _made_of(self, ridge: Solution) -> "Solved":
        """Raises ValueError where only one class has rows."""
        scores = discriminant(ridge, self.classes_)
        kept = self._spread.kept
        z = self._features_of(kept.X)
        seen = ridge.targets > 0
        y, w = (torch.from_numpy(v) for v in (self._columns_of(kept.y), kept.weight))
        logits = scores.of(ridge.left_out(z, y)[:, seen])
        slope, offset = calibrated(logits, y[:, seen], w)
        final = Linear(scores.weights * slope, scores.bias * slope + offset)
        used = Linear(ridge.coefficients[:, seen] @ final.weights, ridge.intercept[seen] @ final.weights + final.bias)
        return Solved(ridge, used.among(seen))

    # ---- labels

    _together = True
    _least_ridge = 1e-6  # below it scores are the labels themselves, and those of rows left out are rounding
    _target_checks = {}

    def _targets_of(self, y: np.ndarray, first: bool) -> np.ndarray:
        if first:
            self.classes_ = label_set(y) if not hasattr(self, "classes_") else label_set(self.classes_, y)
        else:
            self._know(y)
        return y

    def _columns_of(self, y: np.ndarray) -> np.ndarray:
        return np.eye(len(self.classes_))[np.searchsorted(self.classes_, y)]

    def _origin(self, batch: Batch) -> Tensor:
        return torch.zeros(len(self.classes_), dtype=torch.float64)


class Linear(NamedTuple):
    """Log probabilities up to a constant, or log odds: x @ weights + bias."""

    weights: Tensor  # (K, C), or (K, 1) for log odds
    bias: Tensor     # (C,) or (1,)

    def of(self, x: Tensor) -> Tensor:
        return x @ self.weights + self.bias

    def among(self, seen: Tensor) -> "Linear":
        """Of all classes, when it is one of those that were seen; log odds where there are two of them in all."""
        if len(seen) == 2:
            return Linear(self.weights[:, 1:] - self.weights[:, :1], self.bias[1:] - self.bias[:1])
        weights = self.weights.new_zeros(len(self.weights), len(seen))
        bias = self.bias.new_full((len(seen),), -torch.inf)
        weights[:, seen], bias[seen] = self.weights, self.bias
        return Linear(weights, bias)


class Solved(NamedTuple):
    """One ridge regression for each class, and what is linear in features and gives log probabilities."""

    ridge: Solution
    linear: Linear


def discriminant(ridge: Solution, classes: np.ndarray) -> Linear:
    """Linear discriminant analysis of the scores of the classes that were seen, in which it is linear. That of the
    first one, which is what the others leave of 1, does not enter."""
    share = ridge.targets                                                      # (C,)
    seen = share > 0
    if int(seen.sum()) < 2:
        raise ValueError(f"the rows so far hold one class only, {classes[int(share.argmax())]}: "
                         "a classifier needs at least two classes")
    means, covariance = class_scores(ridge, seen)                              # (C, K), (K, K)
    slopes = torch.linalg.solve(covariance + LEAST * torch.eye(len(covariance), dtype=covariance.dtype), means.mT)
    bias = share[seen].log() - (means.mT * slopes).sum(0) / 2
    return Linear(torch.cat([torch.zeros_like(slopes[:1]), slopes]), bias)


def class_scores(ridge: Solution, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Means (C, K) and covariance (K, K) within the classes that were seen of the K = C - 1 scores of rows left out.

    From S c = b - alpha c for the coefficients c: no further look at the Gram matrix.
    """
    share, c = ridge.targets[seen], ridge.coefficients[:, seen]
    explained = ridge.right[:, seen].mT @ c                                  # (C, C)
    apart = (explained / (share * ridge.weight)[:, None])[:, 1:]             # mean scores of classes, less the mean
    total = ((explained - ridge.alpha[0] * c.mT @ c) / ridge.weight)[1:, 1:]
    left = (1 - ridge.degrees[0] / ridge.weight).clamp(min=1e-3)
    targets = torch.eye(len(share), dtype=share.dtype)[:, 1:]
    within = (total - (apart * share[:, None]).mT @ apart) / left.square()
    return targets - (targets - share[1:] - apart) / left, within
