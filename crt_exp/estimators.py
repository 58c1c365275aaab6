"""scikit-learn estimators on random features: a transformer in the place of RBFSampler, and kernel regression.

Legend: n samples, d columns, m projections, M features, C classes or targets. The kernel is exp(-gamma |u - v|^2), or
exp(2 gamma u.v) for kernel="softmax": x = sqrt(2 gamma) u, sigma = sqrt(2 gamma).
"""

import warnings
from collections.abc import Callable
from functools import cache
from numbers import Real

import numpy as np
import torch
from scipy.sparse import issparse
from sklearn.base import (BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, RegressorMixin,
                          TransformerMixin)
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import check_is_fitted, validate_data

from crt_exp.features import GERF, FeatureMap, Features, GeomRFPlus, Moments, PoisRFPlus, Statistics, TrigRF
from crt_exp.features.dense import Dense
from crt_exp.features.exponential import PositiveExponential
from crt_exp.kernels import check_kernel
from crt_exp.mechanism import Mechanism
from crt_exp.schema import whole_number

ROWS = 4096  # rows handled at a time: keeps the columns of a block in cache
SPARSE_ENTRIES = 2**22  # of a block of sparse rows that is made dense


@cache
def map_of(features: str, kernel: str) -> FeatureMap:
    """By its name, kept: reading conf/ takes longer than fitting to a few thousand rows."""
    return Mechanism.of(features=features).map(kernel)


@cache
def sampler_of(name: str) -> Callable[..., torch.Tensor]:
    return Mechanism.of("favorp", sampler=name).sampler


class _RandomFeatureEstimator(BaseEstimator):
    """What the estimators share: mechanism and sampler by name or as objects, gamma, and the draw of the noise."""

    def _check_options(self) -> None:
        check_kernel(self.kernel)
        if isinstance(self.gamma, str) and self.gamma == "scale":
            return
        if not (isinstance(self.gamma, Real) and np.isfinite(self.gamma) and self.gamma > 0):
            raise ValueError(f"gamma = {self.gamma}: it must be a positive number (sigma^2 / 2) or 'scale'")

    def _map(self) -> FeatureMap:
        if isinstance(self.mechanism, FeatureMap):
            return self.mechanism
        return map_of(self.mechanism, self.kernel)

    def _sampler(self):
        return self.sampler if callable(self.sampler) else sampler_of(self.sampler)

    def _draw(self, m: int) -> torch.Generator:
        """The noise, the same for every dtype of the data; returns what further numbers may be drawn from."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        generator = torch.Generator().manual_seed(seed)
        draw = lambda p: self._sampler()(p.m, self.n_features_in_, generator, dtype=torch.float64)
        self.noise_ = self.map_.noise(m, draw)
        return generator

    def _set_scale(self, X) -> None:
        """gamma_: as given, or 1 / (d variance of X) for 'scale', as in RBFSampler; center_: the mean of X.

        The Gaussian kernel does not see a common shift, but positive features do: their variance grows with |x + y|^2.
        """
        self.gamma_ = 1.0 if self.gamma == "scale" else float(self.gamma)
        if self.gamma == "scale" and (spread := _variance(X)):
            self.gamma_ = 1 / (X.shape[1] * spread)
        mean = np.asarray(X.mean(0, dtype=np.float64)).ravel()
        self.center_ = mean if self.kernel == "gaussian" else np.zeros_like(mean)

    def _scaled(self, X) -> torch.Tensor:
        """sqrt(2 gamma) (X - center), dense."""
        X = X.toarray() if issparse(X) else X
        return torch.from_numpy(X - self.center_.astype(X.dtype)).mul_((2 * self.gamma_) ** 0.5)

    def _fit_map(self, X, m: int) -> torch.Generator:
        self.map_ = self._map()
        generator = self._draw(m)
        self.params_ = self.map_.fit(self._statistics(X) if self.map_.fitted else None)
        return generator

    def _statistics(self, X) -> Statistics:
        """Of the scaled rows, block by block in float64; for a map that looks at rows, some that are evenly spread."""
        if self.map_.on_vectors:
            chosen = np.unique(np.linspace(0, X.shape[0] - 1, min(ROWS, X.shape[0])).astype(int))
            x = self._scaled(X[chosen].astype(np.float64, copy=False))
            return Statistics.of(x, x)
        sums, low = torch.zeros(3, X.shape[1], dtype=torch.float64), torch.tensor(torch.inf)
        products = torch.zeros(X.shape[1] if self.map_.second_moments else 0, X.shape[1], dtype=torch.float64)
        for rows in _rows_of(X):
            x = self._scaled(X[rows].astype(np.float64, copy=False))
            sums += torch.stack([x.sum(0), x.square().sum(0), x.abs().sum(0)])
            products += x[:, :len(products)].mT @ x
            low = torch.minimum(x.amin(0), low)
        mean, mean_sq, mean_abs = sums / X.shape[0]
        second = {"second": products / X.shape[0]} if self.map_.second_moments else {}
        moments = Moments.known(mean=mean, mean_sq=mean_sq, mean_abs=mean_abs, minimum=low, **second)
        return Statistics(moments, moments)

    def _check_range(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.map_, (PoisRFPlus, GeomRFPlus)) and bool((x < self.params_.shift.to(x)).any()):
            name = type(self.map_).__name__
            raise ValueError(f"some entries lie below the shift that {name} was fitted to, where its features are no "
                             f"longer positive: give it more room by mechanism={name}({self.kernel!r}, margin=1.0), in "
                             f"standard deviations below the least entry (now {self.map_.margin}), or use pois, geom "
                             "or oprf")
        return x

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = False
        return tags


class RandomFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, _RandomFeatureEstimator):
    """Random features Z with Z(u) . Z(v) close to the kernel, in the place of sklearn's RBFSampler.

    mechanism: a name of `conf/features` (trig pos hyp smreg oprf sderf auto pois geom pois_plus geom_plus pois_coord)
    or a FeatureMap. sampler: a name of `conf/sampler` or a sampler. n_components: output columns; trig, hyp, sderf and
    auto make two of a projection, and one of the last where the number is odd, which leaves the estimate unbiased.
    gamma: as in RBFSampler, sigma^2 / 2 or 'scale'. gerf and the hybrids, with kernel="softmax" sderf and auto too,
    have different maps for the two sides and raise in `transform`: use KernelRegressionClassifier or
    KernelRegressionRegressor, or phi_q and phi_k. pois_plus and geom_plus raise for rows below the least entry that
    they were fitted to; a map with a larger `margin` leaves them room. X may be sparse; Z is dense.

    Attributes: map_, params_, noise_, gamma_, center_, n_features_in_; random_weights_ (n_features, n_components) and
    random_offset_ (n_components,) of trig, where Z = sqrt(2 / n_components) cos(X random_weights_ + random_offset_) as
    in RBFSampler (times e^(gamma_ |X|^2) for kernel="softmax"), and of pos, hyp, smreg and oprf, where
    Z = exp(X random_weights_ + random_offset_ - c |X - center_|^2) with c = 2 gamma_ (gamma_ for kernel="softmax").
    The other maps have none.
    """

    def __init__(self, mechanism="oprf", sampler="orthogonal", n_components=100, kernel="gaussian", gamma=1.0,
                 random_state=None):
        self.mechanism = mechanism
        self.sampler = sampler
        self.n_components = n_components
        self.kernel = kernel
        self.gamma = gamma
        self.random_state = random_state

    def fit(self, X, y=None):
        """X (n, d), dense or sparse: fits the parameters to its statistics and draws the projections."""
        X = validate_data(self, X, accept_sparse="csr", dtype=(np.float64, np.float32))
        self._check_options()
        self._set_scale(X)
        generator = self._fit_map(X, self._projections())
        self._dtype, self._n_features_out = X.dtype, int(self.n_components)
        self._turn = 0.0  # of the pair that gives one column: its first feature, unbiased by itself
        if self._odd and isinstance(self.map_, TrigRF):  # cos is not, but cos(w.x + b) with a random b is
            self._turn = 2 * np.pi * float(torch.rand((), generator=generator, dtype=torch.float64))
        return self

    def transform(self, X):
        """X (n, d) -> Z (n, n_components), of X's dtype."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=(np.float64, np.float32), reset=False)
        if not self.map_.one_map:
            raise ValueError(f"{type(self.map_).__name__} has different features for the two sides of the kernel, "
                             "which one transform cannot give: use KernelRegressionClassifier or "
                             "KernelRegressionRegressor, or map_.phi_q and map_.phi_k")
        out = np.empty((X.shape[0], self._n_features_out), dtype=X.dtype)
        write = self._write_odd if self._odd else self.map_.writer(self.noise_, self.params_)
        for rows in _rows_of(X):
            write(self._check_range(self._scaled(X[rows])), torch.from_numpy(out[rows]))
        return out

    def _projections(self) -> int:
        phi, n = self._map(), whole_number(self.n_components, "n_components")
        each = phi.width(1)
        if n % each and not (each == 2 and isinstance(phi, (TrigRF, PositiveExponential, GERF))):
            raise ValueError(f"n_components = {n}: {self.mechanism} makes {each} columns of a projection, so it must "
                             f"be a multiple of {each}")
        return -(-n // each)

    @property
    def _odd(self) -> bool:
        """Whether one column is made of the last pair."""
        return not isinstance(self.noise_, tuple) and self._n_features_out < self.map_.width(self.noise_.m)

    def _write_odd(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """The first features of all pairs, the last one turned, then the second ones of all but the last."""
        m, n = self.noise_.m, self._n_features_out
        pairs = x.new_empty(len(x), 2 * m)
        self.map_.writer(self.noise_, self.params_)(x, pairs)
        pairs *= (2 * m / n) ** 0.5
        out.copy_(pairs[:, :n])
        out[:, m - 1] = np.cos(self._turn) * pairs[:, m - 1] - np.sin(self._turn) * pairs[:, -1]

    @property
    def random_weights_(self) -> np.ndarray:
        return self._affine()[0]

    @property
    def random_offset_(self) -> np.ndarray:
        return self._affine()[1]

    def _affine(self) -> tuple[np.ndarray, np.ndarray]:
        """Weights and offsets of the columns, in the dtype of the data."""
        phi = getattr(self, "map_", None)
        if not isinstance(phi, (TrigRF, PositiveExponential)) or isinstance(phi, Dense):
            raise AttributeError("random_weights_ and random_offset_ exist after a fit, for trig, pos, hyp, smreg and "
                                 "oprf")
        n, m = self._n_features_out, self.noise_.m
        if isinstance(self.map_, TrigRF):
            rows = self.noise_.rows().repeat(2, 1)[:n].numpy()
            offset = np.where(np.arange(n) < m, 0.0, -np.pi / 2)
            offset[m - 1] += self._turn
        else:
            rows, scale, bias = self.map_.exponent(self.noise_, self.params_)
            rows = (rows if scale is None else rows * scale)[:n].numpy()
            offset = bias[0, :n].numpy() + np.log(len(bias[0]) / n) / 2
        weights = (2 * self.gamma_) ** 0.5 * rows.T
        return weights.astype(self._dtype), (offset - self.center_ @ weights).astype(self._dtype)

    @property
    def _gamma(self) -> float:
        """The name that RBFSampler has for gamma_."""
        return self.gamma_

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


class _KernelRegression(_RandomFeatureEstimator):
    """Nadaraya-Watson averages of targets R (n, C) under the kernel, exact or by features (CRT 5.2)."""

    def __init__(self, mechanism="oprf", sampler="orthogonal", n_projections=128, kernel="gaussian", gamma="scale",
                 random_state=None):
        self.mechanism = mechanism
        self.sampler = sampler
        self.n_projections = n_projections
        self.kernel = kernel
        self.gamma = gamma
        self.random_state = random_state

    @property
    def _exact(self) -> bool:
        return isinstance(self.mechanism, str) and self.mechanism == "exact"

    def _begin(self, X: np.ndarray) -> None:
        self._check_options()
        self._set_scale(X)
        if self._exact:
            self.x_, self.targets_ = X[:0], None
            return
        self._fit_map(X, whole_number(self.n_projections, "n_projections"))
        self.state_, self.log_scale_ = None, None

    def _add(self, X: np.ndarray, R: np.ndarray) -> None:
        """Adds rows to the sums G = Phi^T [R, 1], kept as state_ exp(log_scale_) with a scale per feature."""
        if self._exact:
            self.x_ = np.concatenate([self.x_, X])
            self.targets_ = R if self.targets_ is None else np.concatenate([self.targets_, R])
            return
        for rows in _blocks(len(X)):
            x = self._scaled(X[rows])
            r = torch.from_numpy(np.column_stack([R[rows], np.ones(len(x))])).to(x.dtype)
            f = self.map_.phi_k(x, self.noise_, self.params_)
            self._merge(*_sums(f, r))

    def _merge(self, state: torch.Tensor, log_scale: torch.Tensor) -> None:
        if self.state_ is None:
            self.state_, self.log_scale_ = state, log_scale
            return
        top = torch.maximum(self.log_scale_, log_scale)
        self.state_ = self.state_ * (self.log_scale_ - top).exp().mT + state * (log_scale - top).exp().mT
        self.log_scale_ = top

    def _numerators(self, X: np.ndarray) -> np.ndarray:
        """(n, C + 1) sums, the last column the kernel mass, up to a positive factor for each row."""
        sums = self._exact_sums if self._exact else self._feature_sums
        at_once = self._exact_rows() if self._exact else ROWS
        return np.concatenate([sums(X[rows]) for rows in _blocks(len(X), at_once)])

    def _exact_rows(self) -> int:
        return max(1, 4_000_000 // max(len(self.x_), 1))

    def _feature_sums(self, X: np.ndarray) -> np.ndarray:
        f = self.map_.phi_q(self._scaled(X), self.noise_, self.params_)
        logs = f.log_scale + self.log_scale_
        weights = f.value * (logs - logs.amax(-1, keepdim=True)).exp()
        return (weights @ self.state_).numpy()

    def _exact_sums(self, X: np.ndarray) -> np.ndarray:
        """Exponents of centred rows in float64 by one matrix product; the row's largest one cancels."""
        x, y = (self._scaled(v.astype(np.float64)) for v in (X, self.x_))
        logits = x @ y.mT
        if self.kernel == "gaussian":
            logits -= y.square().sum(-1) / 2
        weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
        targets = torch.from_numpy(self.targets_.astype(np.float64))
        return torch.column_stack([weights @ targets, weights.sum(-1)]).numpy()


class KernelRegressionClassifier(ClassifierMixin, _KernelRegression):
    """Kernel-regression classification: the class with the largest kernel sum over its training points (CRT 5.2).

    O(n M) to fit, O(M C) to predict, whatever n is. mechanism: "exact", a name of `conf/features`, or a FeatureMap with
    the same kernel; n_projections: m. Ties go to the lowest class.
    """

    def fit(self, X, y):
        """X (n, d), y (n,) labels."""
        X, y = validate_data(self, X, y, dtype=(np.float64, np.float32))
        check_classification_targets(y)
        self.classes_ = unique_labels(y)
        self._begin(X)
        self._add(X, self._one_hot(y))
        return self

    def partial_fit(self, X, y, classes=None):
        """Adds rows. The first call needs `classes`, fits the parameters and draws the noise; later ones keep both."""
        first = not hasattr(self, "classes_")
        X, y = validate_data(self, X, y, dtype=(np.float64, np.float32), reset=first)
        check_classification_targets(y)
        if first:
            if classes is None:
                raise ValueError("the first call of partial_fit needs classes, all labels that will ever come")
            self.classes_ = unique_labels(classes)
            self._begin(X)
        self._add(X, self._one_hot(y))
        return self

    def predict(self, X):
        """(n,) labels."""
        scores = self._scores(X)
        return self.classes_[scores.argmax(1)]

    def predict_proba(self, X):
        """(n, C): the kernel sums of each class, negative estimates set to 0;
        all on the best class where none is positive."""
        scores = self._scores(X)
        positive = np.maximum(scores, 0)
        total = positive.sum(1, keepdims=True)
        best = np.eye(len(self.classes_))[scores.argmax(1)]
        return np.where(total > 0, positive / np.where(total > 0, total, 1), best)

    def _scores(self, X) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, X, dtype=(np.float64, np.float32), reset=False)
        return self._numerators(X)[:, :-1]

    def _one_hot(self, y: np.ndarray) -> np.ndarray:
        places = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        if not np.array_equal(self.classes_[places], y):
            unseen = sorted(set(y.tolist()) - set(self.classes_.tolist()))
            raise ValueError(f"unseen label {unseen[0]!r}: it is not among the classes {self.classes_.tolist()}")
        return np.eye(len(self.classes_))[places]


class KernelRegressionRegressor(RegressorMixin, _KernelRegression):
    """Nadaraya-Watson regression: the kernel-weighted mean of the training targets, exact or by features.

    Where an indefinite estimator (trig, gerf, pois, geom) gives no positive kernel mass, the row gets the mean of the
    training targets, and a warning says for how many rows.
    """

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.regressor_tags.poor_score = True  # a local average: it needs its gamma tuned, above all in many dimensions
        return tags

    def fit(self, X, y):
        """X (n, d), y (n,) or (n, C) real targets."""
        X, y = validate_data(self, X, y, dtype=(np.float64, np.float32), y_numeric=True, multi_output=True)
        self._start(X, y)
        return self._take(X, y)

    def partial_fit(self, X, y):
        """Adds rows; the first call fits the parameters and draws the noise."""
        first = not hasattr(self, "total_")
        X, y = validate_data(self, X, y, dtype=(np.float64, np.float32), reset=first, y_numeric=True, multi_output=True)
        if first:
            self._start(X, y)
        return self._take(X, y)

    def _start(self, X, y):
        self._begin(X)
        self._shape, self.total_, self.count_ = y.shape[1:], 0.0, 0

    def _take(self, X, y):
        targets = y.reshape(len(y), -1).astype(np.float64)
        self.total_, self.count_ = self.total_ + targets.sum(0), self.count_ + len(y)
        self._add(X, targets)
        return self

    def predict(self, X):
        """(n,) or (n, C) kernel averages."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=(np.float64, np.float32), reset=False)
        sums = self._numerators(X).astype(np.float64)
        mass = sums[:, -1:]
        bad = ~(mass[:, 0] > 0)
        if bad.any():
            warnings.warn(f"{bad.sum()} of {len(X)} rows have no positive kernel mass under {self.mechanism}: they get "
                          "the mean of the training targets; more projections, a smaller gamma or a positive mechanism "
                          "(oprf) help",
                          stacklevel=2)
        mean = np.where(bad[:, None], self.total_ / self.count_, sums[:, :-1] / np.where(bad[:, None], 1, mass))
        return mean.reshape(len(X), *self._shape)


def _sums(f: Features, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Phi^T r (M, C) over exp(log_scale), and log_scale (1, M): the largest log feature of each column."""
    log_scale = f.log_scale.amax(-2, keepdim=True)
    return (f.value * (f.log_scale - log_scale).exp()).mT @ r, log_scale


def _variance(X) -> float:
    """Of all entries."""
    if not issparse(X):
        return float(X.var(dtype=np.float64))
    mean = X.mean(dtype=np.float64)
    return max(0.0, float((X.data.astype(np.float64) ** 2).sum() / np.prod(X.shape, dtype=np.float64) - mean**2))


def _rows_of(X) -> list[slice]:
    """Blocks of rows; shorter where X is sparse, whose columns may be many: a block is made dense."""
    return _blocks(X.shape[0], max(1, min(ROWS, SPARSE_ENTRIES // X.shape[1])) if issparse(X) else ROWS)


def _blocks(n: int, size: int = ROWS) -> list[slice]:
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]
