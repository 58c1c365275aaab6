"""What ridge regressor and classifier share: options, features of the first rows, sums over all of them, a solution.

Legend: n rows, d columns, M = n_components features, T targets.
"""

import copy
from abc import abstractmethod
from numbers import Real
from pathlib import Path
from typing import Any, Self, get_args

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, validate_data

from crt_exp.estimators import RandomFeatures, blocks
from crt_exp.hints import whole_number
from crt_exp.ridge import saved
from crt_exp.ridge.batches import (FLOATS, Batch, Blocks, block_rows, check_finite_rows, checked_weights, is_stream,
                                   opened)
from crt_exp.ridge.lengths import fitted
from crt_exp.ridge.solve import Choice, Solution, solved
from crt_exp.ridge.sums import Centred, Sums, check_memory

UNNAMED = {"sums_", "_blocks", "_solved", "_spread"}  # attributes that `_state` holds, or that follow
ROUNDING = {"float64": 1e-13, "float32": 1e-7}  # of eigenvalues, by their sum


class RidgeOfFeatures(BaseEstimator):
    """Sums over the features of rows, which are never stored, and what follows from them.

    What features need to know of rows (gamma='scale', the centre and the parameters of mechanisms other than trig)
    they take from the first call of `fit` or `partial_fit`, or the first batch of an iterator.
    """

    def __init__(self, mechanism=None, sampler="orthogonal", n_components=512, kernel="gaussian", gamma="scale",
                 *, length_scale=None, alpha="gcv", random_state=None):
        self.mechanism = mechanism
        self.sampler = sampler
        self.n_components = n_components
        self.kernel = kernel
        self.gamma = gamma
        self.length_scale = length_scale
        self.alpha = alpha
        self.random_state = random_state

    # ---- taking rows

    def _fit(self, X, y, sample_weight):
        for name in ("sums_", "features_", "classes_"):
            vars(self).pop(name, None)
        for batch in (map(opened, X) if is_stream(X, y) else [(X, y, sample_weight)]):
            self._take(*batch)
        if not hasattr(self, "sums_"):
            raise ValueError("the iterator gave no batch: there is nothing to fit to")
        self._solve()
        return self

    def begin(self, X, y, sample_weight=None):
        """Draws the features and takes from rows what these need to know of them; none is added yet. Models that begin
        with the same rows and options, random_state a number, may be merged."""
        self._check_options()
        self._begin(self._checked(X, y, sample_weight, True, 0))
        return self

    def merge(self, other):
        """Adds the rows of another model with the same features, such as that of another process: coefficients are then
        those of all rows."""
        check_is_fitted(self, "sums_")
        check_is_fitted(other, "sums_")
        self._check_features(other)
        self._merge(other, other._all_sums())
        self.rows_, self._solved = self.rows_ + other.rows_, None
        return self

    def save(self, path: str | Path) -> None:
        """Writes the fitted model to a safetensors file, from which `load` reads it without pickle; `partial_fit` goes
        on from there. Raises ValueError for a mechanism or a sampler that is none of the package's."""
        check_is_fitted(self, "sums_")
        whole = copy.copy(self)
        whole.sums_ = self._all_sums()
        saved.write(Path(path), type(self).__name__, {
            "attributes": {name: value for name, value in vars(self).items() if name not in UNNAMED},
            "size": self._blocks.size, "state": whole._state()})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """What `save` wrote. Raises ValueError for a file of something else, OSError where there is none."""
        def made(content: dict[str, Any]) -> Self:
            model = cls()
            vars(model).update(content["attributes"])
            model._blocks = Blocks(content["size"])
            model._restore(content["state"])
            return model
        return saved.read(Path(path), cls.__name__, made)

    def _merge(self, other: Self, sums: Sums) -> None:
        self.sums_.merge(sums)

    def _check_features(self, other: Self) -> None:
        """Raises ValueError where the features of one row differ."""
        row = (np.random.default_rng(0).normal(size=(1, self.n_features_in_)) / self.features_.scale_).astype(
            self._dtype)
        if type(self) is type(other) and self.n_features_in_ == other.n_features_in_ and torch.equal(
                self._features()(row), other._features()(row)):
            return
        theirs = other.get_params()
        what = next((f"{name} = {value!r}, and that of the other model = {theirs.get(name)!r}"
                     for name, value in self.get_params().items()
                     if name != "alpha" and not np.array_equal(value, theirs.get(name))),
                    "random_state is None" if self.random_state is None else
                    "parameters that the rows decide differ (see `begin`)")
        raise ValueError(f"{what}: features differ, so that their sums cannot be added")

    def _take(self, X, y, sample_weight, places: np.ndarray | None = None) -> None:
        """Adds rows, all of them or, where one is wrong, none. places: of the rows among those of all models that are
        to be merged."""
        first = not hasattr(self, "sums_")
        before = 0 if first else self.rows_
        if first:
            self._check_options()
        batch = self._checked(X, y, sample_weight, first, before)
        if first:
            self._begin(batch)
        self.rows_ = before + len(batch)
        self._note(batch, places)
        self._solved, features = None, self._features()
        for block in self._blocks.of(batch):
            self._add(block, self.sums_, features)

    def _checked(self, X, y, sample_weight, first: bool, before: int) -> Batch:
        """A memory map stays one; whole numbers become floats block by block."""
        numbers = isinstance(X, np.ndarray) and X.dtype.kind in "biuf"
        if isinstance(y, np.ndarray) and y.dtype.kind == "f":
            check_finite_rows(y, "y", before)
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=None if numbers else FLOATS, reset=first,
                             ensure_all_finite=False, **self._target_checks)
        check_finite_rows(X, "X", before)
        weight = checked_weights(sample_weight, X.shape[0], before)
        return Batch(X, self._targets_of(y, first), weight)

    def _check_options(self) -> None:
        whole_number(self.n_components, "n_components")
        if isinstance(self.alpha, str) and self.alpha in get_args(Choice):
            return
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, Real) or not 0 <= self.alpha < np.inf:
            raise ValueError(f"alpha = {self.alpha!r}: it must be a number of at least 0, or one of "
                             f"{', '.join(map(repr, get_args(Choice)))}")

    def _begin(self, batch: Batch) -> None:
        columns = int(self.n_components)
        size = block_rows(columns)
        check_memory(columns, size, "n_components")
        mechanism = "trig" if self.mechanism is None and self.kernel == "gaussian" else self.mechanism
        features = RandomFeatures(mechanism, self.sampler, columns, self.kernel, self.gamma, self.random_state,
                                  length_scale=self.length_scale)
        if isinstance(self.length_scale, str) and self.length_scale == "fit":
            features.length_scale = fitted(batch.X, self._columns_of(batch.y), batch.weight, features)
        self._dtype = np.dtype(np.float32 if batch.X.dtype == np.float32 else np.float64)
        self.features_ = features._begin(batch.X, batch.weight)
        self._blocks, self.sums_ = Blocks(size), Sums.empty(columns, self._origin(batch))
        self.rows_, self._solved = 0, None

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

    @abstractmethod
    def _columns_of(self, y: np.ndarray) -> np.ndarray:
        """(n, T) float64 of what `_targets_of` gave."""

    @abstractmethod
    def _origin(self, batch: Batch) -> torch.Tensor:
        """(T,) that targets are counted from."""

    _together = False  # whether all targets share their ridge
    _least_ridge = 0.0  # to choose from, by the sum of eigenvalues

    # ---- what follows

    def _note(self, batch: Batch, places: np.ndarray | None) -> None:
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
            if not sums.weight:
                raise ValueError("there are no rows yet: there is nothing to fit to")
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

    def _close(self) -> None:
        """Sums the rows that do not fill a block yet: the next one begins a new block."""
        if self._blocks.rest is not None:
            self._add(self._blocks.rest, self.sums_, self._features())
            self._blocks.rest = None

    def _state(self) -> dict[str, np.ndarray]:
        """All that rows left, in arrays, where no block is open (`_close`)."""
        return {"rows_": np.array(self.rows_)} | {name: np.asarray(part) for name, part in vars(self.sums_).items()}

    def _restore(self, state: dict[str, np.ndarray]) -> None:
        """The reverse, of a model that began with the same rows."""
        state = dict(state)
        self.rows_, self._solved = int(state.pop("rows_")), None
        self.sums_ = Sums(**{name: torch.from_numpy(part) if part.ndim else part.item()
                             for name, part in state.items()})

    def _features_of(self, X) -> torch.Tensor:
        """(n, M) float64 of rows that fit memory."""
        features = self._features()
        return torch.cat([features(X[rows]).double() for rows in blocks(X.shape[0], self._blocks.size)])

    def _per_block(self, X, what) -> np.ndarray:
        """what(features (rows, M) float64) of checked X, block by block."""
        check_is_fitted(self, "sums_")
        numbers = isinstance(X, np.ndarray) and X.dtype.kind in "biuf"
        X = validate_data(self, X, accept_sparse="csr", dtype=None if numbers else FLOATS, reset=False,
                          ensure_all_finite=False)
        check_finite_rows(X, "X", 0)
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
