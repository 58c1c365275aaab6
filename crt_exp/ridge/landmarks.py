"""Nystroem features of rows drawn by their ridge leverage, in the place of sklearn's Nystroem: the data-dependent peer.

Legend: n rows, d columns, m landmarks. Z Z^T is the best that m rows can do for the kernel matrix, exact at these rows.
"""

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from crt_exp.estimators import blocks
from crt_exp.hints import whole_number

LOOKED_AT = 8  # rows that leverages are computed of, for each landmark
RIDGE = 1e-2   # of leverages: what the pilot leaves of k(x, x) = 1 counts above it


class LeverageNystroem(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Features k(x, landmarks) K^-1/2 of the Gaussian kernel exp(-gamma |u - v|^2), with landmarks drawn without
    replacement by approximate ridge leverage scores: rows that the others say little about come more often.

    Scores are those of up to 8 n_components rows at random against a pilot of uniform landmarks (Musco and Musco 2017,
    in one step). Attributes: landmarks_ (m, d), normalization_ (m, m).
    """

    def __init__(self, gamma=1.0, n_components=100, random_state=None):
        self.gamma, self.n_components, self.random_state = gamma, n_components, random_state

    def fit(self, X, y=None):
        X = validate_data(self, X, dtype=(np.float64, np.float32))
        m, random = min(whole_number(self.n_components, "n_components"), len(X)), check_random_state(self.random_state)
        rows = X[random.permutation(len(X))[:LOOKED_AT * m]].astype(np.float64)
        pilot = cho_factor(self._kernel(rows[:m], rows[:m]) + RIDGE * np.eye(m))
        to_pilot = self._kernel(rows, rows[:m])
        leverage = (1 - np.einsum("nm,mn->n", to_pilot, cho_solve(pilot, to_pilot.T))).clip(min=1e-12)  # times RIDGE
        self.landmarks_ = rows[random.choice(len(rows), m, replace=False, p=leverage / leverage.sum())]
        self.normalization_ = inverse_root(self._kernel(self.landmarks_, self.landmarks_))
        self._n_features_out = m
        return self

    def transform(self, X):
        """(n, m), of X's dtype."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=(np.float64, np.float32), reset=False)
        out = np.empty((len(X), self._n_features_out), X.dtype)
        for rows in blocks(len(X)):
            out[rows] = self._kernel(X[rows], self.landmarks_) @ self.normalization_
        return out

    def _kernel(self, X, Y) -> np.ndarray:
        return rbf_kernel(X, Y, gamma=self.gamma)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def inverse_root(K: np.ndarray) -> np.ndarray:
    """K^-1/2 on what rounding leaves of its range."""
    values, basis = np.linalg.eigh(K)
    kept = values > 1e-12 * values[-1]
    return (basis[:, kept] / np.sqrt(values[kept])) @ basis[:, kept].T
