"""Nystroem features of rows drawn by their ridge leverage, in the place of sklearn's Nystroem: the data-dependent peer.

Legend: n rows, d columns, m landmarks. Z Z^T is the best that m rows can do for the kernel matrix, exact at these rows.
"""

from typing import Self

import numpy as np
import torch
from scipy.linalg import block_diag, cho_factor, cho_solve, cholesky, solve_triangular
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, RegressorMixin, TransformerMixin
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from crt_exp.estimators import blocks
from crt_exp.hints import whole_number
from crt_exp.ridge.solve import solved
from crt_exp.ridge.sums import Centred, Sums
from crt_exp.samplers.draws import free_memory

LOOKED_AT = 8  # rows that leverages are computed of, for each landmark
RIDGE = 1e-2   # of leverages: what the pilot leaves of k(x, x) = 1 counts above it
JITTER = 1e-8  # of k(x, x) = 1: landmarks may be close to each other


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
        self.landmarks_ = by_leverage(X, self.gamma, self.n_components, self.random_state)
        self.normalization_ = inverse_root(self._kernel(self.landmarks_, self.landmarks_))
        self._n_features_out = len(self.landmarks_)
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


class NystroemRidge(RegressorMixin, BaseEstimator):
    """Ridge regression on Nystroem features of the Gaussian kernel, whose landmarks may grow in number after a fit.

    Features are Z = k(X, landmarks) C^-T with C C^T = k(landmarks, landmarks) (Cholesky), so that those of further
    landmarks are further columns, and the others stay: C, Z^T Z and Z^T y are bordered. Products of old features with
    new ones need every row again: rows and their features, (n, m) in float64, are kept, and there is no partial_fit.
    RandomFeatureRidge is for rows that do not fit memory so: it keeps sums alone.

    n_components landmarks are drawn by leverage, as in LeverageNystroem, or `landmarks` (m, d) are given. alpha: as of
    RandomFeatureRidge. Attributes: landmarks_ (m, d), factor_ (m, m), which is C; coef_ (m,) of k(x, landmarks),
    intercept_, alpha_; they follow `add_landmarks`.
    """

    def __init__(self, gamma=1.0, n_components=100, landmarks=None, alpha="gcv", random_state=None):
        self.gamma, self.n_components, self.landmarks = gamma, n_components, landmarks
        self.alpha, self.random_state = alpha, random_state

    def fit(self, X, y):
        """X (n, d), y (n,)."""
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, copy=True)  # kept as they are now
        first = self.landmarks
        if first is None:
            first = by_leverage(X, self.gamma, self.n_components, self.random_state)
        self._rows, self._y = X, torch.from_numpy(y.astype(np.float64))[:, None]
        self._features, self.landmarks_, self.factor_ = [], np.empty((0, X.shape[1])), np.empty((0, 0))
        self._sums = Sums.empty(0, self._y.mean(0))
        ones = torch.ones(len(y), dtype=torch.float64)
        self._sums.add(torch.empty(len(y), 0, dtype=torch.float64), self._y, ones)
        return self.add_landmarks(first)

    def add_landmarks(self, landmarks) -> Self:
        """The model that a fit with these (a, d) among its landmarks would have given, by n a kernels of the rows and
        n m a products; coefficients are solved for anew, in (m + a)^3. Raises ValueError where the further features do
        not fit memory."""
        check_is_fitted(self)
        new = validate_data(self, landmarks, dtype=np.float64, reset=False)
        check_kept(len(self._rows), len(self.landmarks_) + len(new), len(new))
        side = solve_triangular(self.factor_, self._kernel(self.landmarks_, new), lower=True)          # (m, a)
        corner = self._kernel(new, new) + JITTER * np.eye(len(new)) - side.T @ side
        factor = block_diag(self.factor_, cholesky(corner, lower=True))
        factor[len(side):, :len(side)] = side.T
        self._border(self._further(new, side, factor[len(side):, len(side):]))
        self.landmarks_, self.factor_ = np.concatenate([self.landmarks_, new]), factor
        self._solution = solved(Centred.of(self._sums.copy()), self.alpha, 1e-13)
        return self

    def predict(self, X):
        """(n,)."""
        check_is_fitted(self)
        X, coefficients = validate_data(self, X, dtype=np.float64, reset=False), self.coef_
        return self.intercept_ + np.concatenate([self._kernel(X[rows], self.landmarks_) @ coefficients
                                                 for rows in blocks(len(X))])

    @property
    def coef_(self) -> np.ndarray:
        return solve_triangular(self.factor_, self._solution.coefficients[:, 0].numpy(), lower=True, trans="T")

    @property
    def intercept_(self) -> float:
        return float(self._solution.intercept)

    @property
    def alpha_(self) -> float:
        return float(self._solution.alpha)

    def _further(self, new: np.ndarray, side: np.ndarray, corner: np.ndarray) -> torch.Tensor:
        """(n, a) features of the rows by new landmarks: what the others leave of their kernel."""
        rest = self._kernel(self._rows, new)
        start = 0
        for old in self._features:
            rest -= old.numpy() @ side[start:start + old.shape[1]]
            start += old.shape[1]
        return torch.from_numpy(solve_triangular(corner, rest.T, lower=True).T)

    def _border(self, new: torch.Tensor) -> None:
        """The sums with features (n, a) behind the others."""
        sums, across = self._sums, [old.mT @ new for old in self._features]
        across = torch.cat([new.new_empty(0, new.shape[1]), *across])                                   # (m, a)
        sums.gram = torch.cat([torch.cat([sums.gram, across], 1), torch.cat([across.mT, new.mT @ new], 1)])
        sums.right = torch.cat([sums.right, new.mT @ (self._y - sums.origin)])
        sums.features = torch.cat([sums.features, new.sum(0)])
        self._features.append(new)

    def _kernel(self, X, Y) -> np.ndarray:
        return rbf_kernel(X, Y, gamma=self.gamma) if len(X) else np.empty((0, len(Y)))


def check_kept(n: int, columns: int, new: int) -> None:
    """Raises ValueError where (n, new) more features, and a copy of them, do not fit the free memory."""
    need = 16 * n * new
    if need > 2**28 and need > (free := free_memory(torch.device("cpu"))):
        raise ValueError(f"{columns} landmarks: so that more can be added, features of all {n} rows are kept, and "
                         f"{new} more columns take {need / 2**30:.1f} GiB, where {free / 2**30:.1f} GiB of memory are "
                         "free; choose fewer, or RandomFeatureRidge, which keeps sums alone")


def by_leverage(X: np.ndarray, gamma: float, n_components: int, random_state) -> np.ndarray:
    """At most n_components of the rows X (n, d), (m, d) float64."""
    m, random = min(whole_number(n_components, "n_components"), len(X)), check_random_state(random_state)
    rows = X[random.permutation(len(X))[:LOOKED_AT * m]].astype(np.float64)
    pilot = cho_factor(rbf_kernel(rows[:m], gamma=gamma) + RIDGE * np.eye(m))
    to_pilot = rbf_kernel(rows, rows[:m], gamma=gamma)
    leverage = (1 - np.einsum("nm,mn->n", to_pilot, cho_solve(pilot, to_pilot.T))).clip(min=1e-12)  # times RIDGE
    return rows[random.choice(len(rows), m, replace=False, p=leverage / leverage.sum())]


def inverse_root(K: np.ndarray) -> np.ndarray:
    """K^-1/2 on what rounding leaves of its range."""
    values, basis = np.linalg.eigh(K)
    kept = values > 1e-12 * values[-1]
    return (basis[:, kept] / np.sqrt(values[kept])) @ basis[:, kept].T
