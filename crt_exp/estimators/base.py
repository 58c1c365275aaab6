"""What ridge regressor and classifier share: options, features of the first rows, sums over all of them, a solution.

Legend: n rows, d columns, M = n_components features, T targets.
"""

from abc import abstractmethod
from numbers import Integral, Real
from typing import Any, get_args

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from crt_exp.estimators.random_features import FLOATS, RandomFeatures, blocks, validated
from crt_exp.options import whole_number
from crt_exp.estimators.batches import Batch, Blocks, block_rows
from crt_exp.estimators.solve import Choice, Solution, solved
from crt_exp.estimators.sums import Centred, Sums, check_memory

ROUNDING = {"float64": 1e-13, "float32": 1e-7}  # of eigenvalues, by their sum


class RidgeOfFeatures(BaseEstimator):
    """Sums over the features of rows, which are never stored, and what follows from them.

    What features need to know of rows (gamma='scale', the centre and the parameters of mechanisms other than trig)
    they take in `fit` from all rows, in `partial_fit` from the first 4096, or fewer where columns are many, whatever
    batches they come in. Rows of weight 0 change nothing.
    """

    def __init__(self, mechanism=None, sampler="orthogonal", n_components=512, kernel="gaussian", gamma="scale",
                 *, length_scale=None, alpha="evidence", random_state=None):
        self.mechanism = mechanism
        self.sampler = sampler
        self.n_components = n_components
        self.kernel = kernel
        self.gamma = gamma
        self.length_scale = length_scale
        self.alpha = alpha
        self.random_state = random_state

    def fit(self, X, y, sample_weight=None):
        """X (n, d); y (n,) or (n, T) numbers, or (n,) labels."""
        for name in ("sums_", "classes_"):
            vars(self).pop(name, None)
        self._take(X, y, sample_weight, whole=True)
        self._solve()
        return self

    # ---- taking rows

    def _take(self, X, y, sample_weight, whole: bool = False) -> None:
        """Adds rows, all of them or, where one is wrong, none."""
        first = not hasattr(self, "sums_")
        if first:
            self._check_options()
        batch = self._checked(X, y, sample_weight, first)
        if first:
            self._begin(batch, whole)
        self.rows_ += len(batch)
        self._note(batch)
        self._solved = features = None
        for block in self._blocks.of(batch):
            self._fit_features(block)
            features = features or self._features()
            self._add(block, self.sums_, features)

    def _checked(self, X, y, sample_weight, first: bool) -> Batch:
        X, y = validated(self, X, y, accept_sparse="csr", reset=first, **self._target_checks)
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64)
        if (weight < 0).any():
            raise ValueError(f"sample_weight holds {weight.min():g}: weights must not be negative")
        if first and not weight.any():
            raise ValueError("Sample weights must contain at least one non-zero number: there is nothing to fit to")
        if not weight.all():
            X, y, weight = (part[weight > 0] for part in (X, y, weight))
        return Batch(X, self._targets_of(y, first), weight)

    def _check_options(self) -> None:
        whole_number(self.n_components, "n_components")
        if isinstance(self.alpha, str) and self.alpha in get_args(Choice):
            return
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, Real) or not 0 <= self.alpha < np.inf:
            raise ValueError(f"alpha = {self.alpha!r}: it must be a number of at least 0, or one of "
                             f"{', '.join(map(repr, get_args(Choice)))}")

    def _begin(self, batch: Batch, whole: bool) -> None:
        columns = int(self.n_components)
        size = block_rows(columns)
        check_memory(columns, size)
        mechanism = "trig" if self.mechanism is None and self.kernel == "gaussian" else self.mechanism
        seed = self.random_state  # an integer: features are fitted again as rows come
        if not isinstance(seed, Integral):
            seed = check_random_state(seed).randint(2**31 - 1)
        features = RandomFeatures(mechanism, self.sampler, columns, self.kernel, self.gamma, seed,
                                  length_scale=self.length_scale)
        self._dtype = batch.X.dtype
        first = batch if whole else batch.cut(slice(size))
        self._map, self._fitted_to = features._begin(first.X, first.weight), len(first)
        self._blocks, self.sums_ = Blocks(size), Sums.empty(columns, self._origin(batch))
        self.rows_, self._solved = 0, None

    @property
    def features_(self) -> RandomFeatures:
        """Fitted to all rows so far, until they fill a block."""
        check_is_fitted(self, "sums_")
        return self._map if self._blocks.rest is None else self._fit_features(self._blocks.rest)

    def _fit_features(self, first: Batch) -> RandomFeatures:
        if not self.sums_.rows and self._fitted_to < len(first):
            self._map._begin(first.X, first.weight)
            self._fitted_to = len(first)
        return self._map

    def _add(self, batch: Batch, sums: Sums, features: "Written") -> None:
        y, weight = (torch.from_numpy(np.require(part, requirements=["C", "W"]))  # torch warns of what is read-only
                     for part in (self._columns_of(batch.y), batch.weight))
        sums.add(features(batch.X), y, weight)

    def _features(self) -> "Written":
        return Written(self.features_, self._dtype, self._blocks.size)

    # ---- what the two differ in

    @property
    @abstractmethod
    def _target_checks(self) -> dict[str, Any]:
        """Options of validate_data."""

    @abstractmethod
    def _targets_of(self, y: np.ndarray, first: bool) -> np.ndarray:
        """Checked targets as they are kept, (n, T), or labels (n,)."""

    def _columns_of(self, y: np.ndarray) -> np.ndarray:
        """(n, T) float64 of what `_targets_of` gave."""
        return y

    @abstractmethod
    def _origin(self, batch: Batch) -> torch.Tensor:
        """(T,) that targets are counted from."""

    _together = False  # whether all targets share their ridge
    _least_ridge = 0.0  # to choose from, by the sum of eigenvalues

    # ---- what follows

    def _note(self, batch: Batch) -> None:
        """What else is kept of rows."""

    def _made_of(self, ridge: Solution) -> Any:
        """What predictions follow from."""
        return ridge

    def _solve(self) -> Any:
        """`_made_of` all rows so far, with `alpha` as it is now."""
        check_is_fitted(self, "sums_")
        if self._solved is None or self._solved[0] != self.alpha:
            self._check_options()
            sums = self._all_sums()
            floor = max(ROUNDING[self._dtype.name], self._least_ridge)
            ridge = solved(Centred.of(sums), self.alpha, floor, self._together)
            self._solved = self.alpha, self._made_of(ridge)
        return self._solved[1]

    def _all_sums(self) -> Sums:
        """A copy, with the rows that do not fill a block yet."""
        sums = self.sums_.copy()
        if self._blocks.rest is not None:
            self._add(self._blocks.rest, sums, self._features())
        return sums

    def _features_of(self, X) -> torch.Tensor:
        """(n, M) float64 of rows that fit memory."""
        features = self._features()
        return torch.cat([features(X[rows]).to(torch.float64, copy=True)
                          for rows in blocks(X.shape[0], self._blocks.size)])

    def _per_block(self, X, what) -> np.ndarray:
        """what(features (rows, M) float64) of checked X, block by block."""
        check_is_fitted(self, "sums_")
        X = validate_data(self, X, accept_sparse="csr", dtype=FLOATS, reset=False)
        features = self._features()
        return np.concatenate([what(features(X[rows]).double()).numpy()
                               for rows in blocks(X.shape[0], self._blocks.size)])

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


class Written:
    """Features of some rows at a time, in a buffer that the next call writes over."""

    def __init__(self, features: RandomFeatures, dtype: np.dtype, rows: int):
        self.write = features._writer()
        self.buffer = torch.from_numpy(np.empty((rows, features._n_features_out), dtype))
        self.dtype = dtype

    def __call__(self, X) -> torch.Tensor:
        """(n, M) of rows as they are."""
        out = self.buffer[:X.shape[0]]
        self.write(X.astype(self.dtype, copy=False), out)
        return out
