"""scikit-learn estimators on random features: base class and RandomFeatures.

Notation: n samples u, d columns, m projections, M features. The kernel is exp(-gamma |u - v|^2), or exp(2 gamma u.v)
for kernel="softmax". Feature maps take x = sqrt(2 gamma) u, or x = u / length_scale.
"""

import warnings
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cache, wraps
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from scipy.sparse import issparse
from sklearn.base import (
    BaseEstimator,
    ClassifierMixin,
    ClassNamePrefixFeaturesOutMixin,
    MultiOutputMixin,
    RegressorMixin,
    TransformerMixin,
)
from sklearn.utils import check_random_state, gen_batches
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from crt_exp.features import FeatureMap, GeomRFPlus, Moments, PoisRFPlus, Statistics
from crt_exp.features.base import Params, Projections
from crt_exp.features.exponential import TrigRF
from crt_exp.features.statistics import Kernel
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError
from crt_exp.samplers import Noise
from crt_exp.validation import Positive, check, whole_number

FLOATS = np.float64, np.float32
ROWS = 4096  # rows per block, so that its columns fit the cache

BLOCK = 2**20  # features per block, so that they fit the cache
NO_KERNEL = "features={}: estimates no kernel; use another map, such as oprf"
SPARSE_ENTRIES = 2**22  # entries per block of sparse rows after conversion to dense


@cache
def load_map(features: str, kernel: str) -> FeatureMap:
    """Return a feature map by name, cached because reading conf/ is slow.

    Raises:
        ConfigError: the name is that of an attention, unknown, or that of a map without a kernel.
    """
    if not features:
        raise ConfigError(
            f"features={features!r}: expected a name of conf/features, or a FeatureMap"
        )
    mechanism = Mechanism.of(features=features)
    if not mechanism.estimates:
        raise ConfigError(NO_KERNEL.format(features))
    return mechanism.map(kernel, own_kernel=True)


@cache
def load_sampler(name: str) -> Any:
    return Mechanism.of("favorp", sampler=name).sampler


def all_or_none(method: Callable) -> Callable:
    """Restore the attributes of the estimator if the method raises.

    The method replaces attributes and does not change their values in place.
    """

    @wraps(method)
    def call(estimator, *args, **options):
        before = vars(estimator).copy()
        try:
            return method(estimator, *args, **options)
        except BaseException:
            vars(estimator).clear()
            vars(estimator).update(before)
            raise

    return call


@dataclass(eq=False, repr=False)
class Options(BaseEstimator, ABC):
    """Base class: the constructor options that all estimators share."""

    features: Any = "oprf"
    sampler: Any = "orthogonal"
    n_components: Any = 100
    kernel: Any = "gaussian"
    gamma: Any = None
    random_state: Any = None
    _: KW_ONLY
    length_scale: Any = None

    _accept_sparse: ClassVar[str | bool] = False  # or the name of the sparse format

    @abstractmethod
    def _check_options(self) -> None:
        """Raise ValueError for an option that does not fit the others."""

    def _validated(self, X):
        """Return the rows of a call after the fit."""
        check_is_fitted(self)
        return validate_data(self, X, accept_sparse=self._accept_sparse, dtype=FLOATS, reset=False)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = bool(self._accept_sparse)
        return tags


class RandomFeatureEstimator(Options):
    """Base class: feature map and sampler, input scale, and random projections."""

    def _check_options(self):
        check("kernel", self.kernel, Kernel)
        name = self._name
        phi = self._map()
        if not phi.estimates:
            raise ValueError(NO_KERNEL.format(name))
        if phi.own_kernel and self.kernel != "gaussian":
            raise ValueError(
                f"kernel={self.kernel}: not supported, because {name} has its own kernel; remove it"
            )
        if self.gamma is None:
            return
        if phi.own_kernel:
            raise ValueError(f"gamma={self.gamma}: not supported by {name}; use length_scale")
        if self._uses_length_scale:
            raise ValueError(f"gamma={self.gamma}: cannot be combined with length_scale")
        check("gamma", self.gamma, Positive | Literal["scale"])

    def _map(self) -> FeatureMap:
        """Return the feature map, before `of_size`."""
        if isinstance(self.features, FeatureMap):
            return self.features
        return load_map(self.features, self.kernel)

    @property
    def _name(self) -> str:
        return self.features if isinstance(self.features, str) else type(self.features).__name__

    @property
    def _uses_length_scale(self) -> bool:
        """Whether x = u / length_scale, without gamma."""
        return self._map().own_kernel or self.length_scale is not None

    @property
    def _centred(self) -> bool:
        return self._map().kernel == "gaussian"

    def _projections(self) -> int:
        """Return the least m with at least n_components features."""
        n = whole_number(self.n_components, "n_components")
        return bisect_left(range(1, n + 1), n, key=self.map_.width) + 1

    def _draw(self, m: int) -> None:
        """Sample the projections, equal for all input dtypes."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        generator = torch.Generator().manual_seed(seed)
        sampler = self.sampler if callable(self.sampler) else load_sampler(self.sampler)

        def draw(p: Projections) -> Noise:
            return sampler(p.m, self.n_features_in_, generator, dtype=torch.float64)

        self.noise_ = self.map_.noise(m, draw)

    def _set_scale(self, X, weight: np.ndarray, gamma: float | str) -> None:
        """Set gamma_, scale_ (d,) and center_ (d,); `gamma` replaces gamma=None.

        'scale' is 1 / (d variance of X), as in RBFSampler. center_ is the mean of the rows for the Gaussian kernel:
        the kernel is shift-invariant, but the variance of positive features grows with |x + y|^2. RandomFeatures does
        not centre trigonometric features, so they do not depend on the rows.
        """
        d = X.shape[1]
        if self._uses_length_scale:
            lengths = check_lengths(1.0 if self.length_scale is None else self.length_scale, d)
            self.gamma_ = 0.5
            self.scale_ = 1 / lengths
        else:
            gamma = gamma if self.gamma is None else self.gamma
            if gamma == "scale":
                spread = _variance(X, weight)
                gamma = 1 / (d * spread) if spread else 1.0
            self.gamma_ = float(gamma)
            self.scale_ = np.full(d, (2 * self.gamma_) ** 0.5)
        self.center_ = np.zeros(d)
        if self._centred:
            for rows in _rows_of(X):
                self.center_ = self.center_ + weight[rows] @ X[rows].astype(np.float64)
            self.center_ = self.center_ / weight.sum()

    def _scaled(self, X) -> torch.Tensor:
        """Return scale_ (X - center_), dense."""
        X = _dense(X)
        return torch.from_numpy((X - self.center_.astype(X.dtype)) * self.scale_.astype(X.dtype))

    def _fit_map(self, X, weight: np.ndarray) -> None:
        self.map_: FeatureMap = self._map()
        m = self._projections()
        self.map_ = self.map_.of_size(m)
        self._draw(m)
        stats = self._statistics(X, weight) if self.map_.fitted else None
        self.params_: Params = self.map_.fit(stats)

    def _statistics(self, X, weight: np.ndarray) -> Statistics:
        """Return statistics of the scaled rows, float64.

        Maps that are fitted to vectors receive at most ROWS rows, evenly spaced by weight.
        """
        if self.map_.on_vectors:
            x = self._scaled(X[evenly_spaced(weight)].astype(np.float64))
            return Statistics.of(x, x)
        known = self._means(X, weight)
        if "minimum" in self.map_.moments:
            low = X.min(0).toarray().ravel() if issparse(X) else X.min(0)
            known["minimum"] = (low.astype(np.float64) - self.center_) * self.scale_
        moments = Moments.from_values(
            **{name: torch.from_numpy(value) for name, value in known.items()}
        )
        return Statistics(moments, moments)

    def _means(self, X, weight: np.ndarray) -> dict[str, np.ndarray]:
        d = X.shape[1]
        sums = np.zeros((3, d))
        second = np.zeros((d, d))
        for rows in _rows_of(X):
            x = self._scaled(X[rows].astype(np.float64)).numpy()
            w = weight[rows] / weight.sum()
            sums = sums + np.stack([w @ x, w @ x**2, w @ abs(x)])
            if self.map_.second_moments:
                second += (x * w[:, None]).T @ x
        means = {"mean": sums[0], "mean_sq": sums[1], "mean_abs": sums[2]}
        if self.map_.second_moments:
            means["second"] = second
        return means

    def _check_range(self, x: torch.Tensor) -> torch.Tensor:
        phi = self.map_
        if isinstance(phi, PoisRFPlus | GeomRFPlus) and bool((x < self.params_.shift.to(x)).any()):
            raise ValueError(
                f"X has entries below the fitted minimum of {type(phi).__name__}: use margin=1.0 (now "
                f"{phi.margin}), or features='oprf'"
            )
        return x


class RandomFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, RandomFeatureEstimator):
    """Random features Z with Z(u).Z(v) close to a kernel, as sklearn's RBFSampler.

    X may be sparse; Z is dense.

    Args:
        features: a name in `conf/features` (trig pos hyp smreg oprf sderf auto pois geom pois_plus geom_plus
            pois_coord, or one with its own kernel), or a FeatureMap, which determines the kernel.
        sampler: a name in `conf/sampler`, or a sampler function.
        n_components: number of columns of Z, rounded up to whole projections (trig, hyp, sderf, auto and spectral maps
            have two columns for each).
        kernel: "gaussian" or "softmax".
        gamma: as in RBFSampler: a number, 'scale', or None for 1.0.
        length_scale: replaces gamma; one length, or one for each of the d columns.

    Maps with their own kernel take length_scale (default 1.0), without gamma and kernel. They are matern with nu =
    1.5, laplace, rational_quadratic with alpha = 1 and arc_cosine of order 1. For other parameters pass
    `MaternRF(nu=...)`, `RationalQuadraticRF(alpha=...)` or `ArcCosineRF(order=0)`.

    Attributes:
        map_: the feature map.
        params_: its fitted parameters.
        noise_: its random projections.
        gamma_: gamma in use; 0.5 with length_scale.
        scale_: factors of the columns of X, (n_features,).
        center_: mean of the rows; zero for trig.

    Raises:
        ValueError: the map estimates the kernel up to a factor only (mixture with fitted weights).
        ValueError: (in `transform`) queries and keys have different features (gerf, hybrids; for kernel="softmax" also
            sderf and auto): use KernelRegressionClassifier, KernelRegressionRegressor, or phi_q and phi_k. Also for
            pois_plus and geom_plus, if a row lies below the fitted minimum; a larger `margin` avoids this error.

    >>> X = np.array([[0.0, 1.0], [1.0, 0.5]])
    >>> Z = RandomFeatures("trig", n_components=512, gamma=0.5, random_state=0).fit_transform(X)
    >>> Z.shape, bool(abs(Z[0] @ Z[1] - np.exp(-0.5 * 1.25)) < 0.1)
    ((2, 512), True)
    """

    def _check_options(self) -> None:
        super()._check_options()
        phi = self._map()
        if not phi.fixes_scale:
            raise ValueError(
                f"features={self._name}: fitted weights do not fix the scale of the kernel; pass "
                f"{type(phi).__name__}(kernel={phi.kernel!r}, weights='unbiased')"
            )

    _accept_sparse = "csr"

    @all_or_none
    def fit(self, X, y=None, sample_weight=None):
        """Fit the parameters to X (n, d), dense or sparse, and sample the projections.

        `sample_weight` (n,) counts as repetitions of a row.
        """
        X = validate_data(self, X, accept_sparse=self._accept_sparse, dtype=FLOATS)
        X, weight = drop_weightless(sample_weight, X)
        return self._begin(X, weight)

    def _begin(self, X, weight: np.ndarray, gamma: float | str = 1.0):
        """Fit to validated rows with weights; `gamma` replaces gamma=None."""
        self.n_features_in_ = X.shape[1]
        self._check_options()
        self._set_scale(X, weight, gamma)
        self._fit_map(X, weight)
        self._dtype = X.dtype
        self._n_features_out = self.map_.width(self._projections())
        return self

    def transform(self, X):
        """Return Z (n, n_components) of X (n, d), in the dtype of X."""
        X = self._validated(X)
        out = np.empty((X.shape[0], self._n_features_out), dtype=X.dtype)
        if not self.map_.one_map:
            raise ValueError(
                f"features={type(self.map_).__name__}: queries and keys have different features; use "
                "map_.phi_q and map_.phi_k, or KernelRegressionClassifier or KernelRegressionRegressor"
            )
        phi = self.map_.bind(self.noise_, self.params_).phi_q
        for rows in _rows_of(X, max(ROWS // 8, BLOCK // self._n_features_out)):
            features = phi(self._check_range(self._scaled(X[rows]))).dense()
            out[rows] = features.exp().numpy()
        return out

    @property
    def _centred(self) -> bool:
        return super()._centred and not isinstance(self._map(), TrigRF)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


class Incremental(Options):
    """Base class: estimators that are fitted to all rows at once, or batch by batch.

    They hold sums over rows in `sums_`.
    """

    _target_checks: dict[str, bool] = {}

    @all_or_none
    def fit(self, X, y, sample_weight=None):
        """Fit to X (n, d) and y (n,) or (n, T), or labels (n,)."""
        for name in ("sums_", "classes_"):
            self.__dict__.pop(name, None)
        self._add(X, y, sample_weight)
        return self

    def _add(self, X, y, sample_weight) -> None:
        """Validate and add rows; callers restore the attributes if this raises.

        Raises:
            ValueError: y is not finite.
        """
        first = not hasattr(self, "sums_")
        if first:
            self._check_options()
        checks = {"accept_sparse": self._accept_sparse, "reset": first, **self._target_checks}
        X, y = validate_data(self, X, y, dtype=FLOATS, **checks)
        if y.dtype.kind == "f" and not np.isfinite(y).all():  # scikit-learn converts None to NaN
            raise ValueError("Input y contains NaN or infinity.")
        X, y, weight = drop_weightless(sample_weight, X, y)
        targets = self._targets(y)
        if first:
            self._begin(X, weight, targets)
        self._add_rows(X, y, targets, weight)

    @abstractmethod
    def _targets(self, y: np.ndarray) -> np.ndarray:
        """Return the targets of validated values or labels, (n, T) float64."""

    @abstractmethod
    def _begin(self, X, weight: np.ndarray, targets: np.ndarray) -> None:
        """Fit the feature map to the first rows, and start with empty sums."""

    @abstractmethod
    def _add_rows(self, X, y: np.ndarray, targets: np.ndarray, weight: np.ndarray) -> None:
        """Add rows to the sums."""


class Regression(MultiOutputMixin, RegressorMixin):
    """Mixin of `Incremental`: targets of regressors, of the shape of the first batch but for its rows."""

    _target_checks = {"y_numeric": True, "multi_output": True}

    @all_or_none
    def partial_fit(self, X, y, sample_weight=None):
        """Add all rows, or none if the call raises.

        The first call fits the parameters and samples the projections.
        """
        self._add(X, y, sample_weight)
        return self

    def _targets(self, y):
        if not hasattr(self, "sums_"):
            self._shape = y.shape[1:]
        if y.shape[1:] != self._shape:
            raise ValueError(
                f"y: shape {('n', *y.shape[1:])}, expected {('n', *self._shape)} as in the first batch"
            )
        return y.reshape(len(y), -1).astype(np.float64, order="C")


class Classification(ClassifierMixin):
    """Mixin of `Incremental`: targets of classifiers, 1 for the label and 0 for other classes."""

    def _targets(self, y):
        return np.eye(len(self.classes_))[np.searchsorted(self.classes_, y)]


def drop_weightless(sample_weight, *rows) -> tuple:
    """Return arrays of rows without those of weight 0, then the weights, float64.

    Raises:
        ValueError: a weight is negative, or all weights are zero.
    """
    weight = _check_sample_weight(sample_weight, rows[0], dtype=np.float64)
    if (weight < 0).any():
        raise ValueError(f"sample_weight: {weight.min():g}; expected numbers >= 0")
    if not weight.any():
        raise ValueError(
            "Sample weights must contain at least one non-zero number: there is nothing to fit to"
        )
    if weight.all():
        return *rows, weight
    return *(part[weight > 0] for part in rows), weight[weight > 0]


def evenly_spaced(weight: np.ndarray) -> np.ndarray:
    """Return the indices of at most ROWS rows, evenly spaced by positive weight (n,)."""
    ends = (weight / weight.min()).cumsum()
    count = min(ROWS, round(ends[-1]))
    places = np.linspace(0, ends[-1] - 1, count).astype(int)
    return np.searchsorted(ends, places, side="right")


def label_set(*labels) -> np.ndarray:
    """Return the sorted labels of one or more arrays.

    Raises:
        ValueError: the arrays hold no labels, or labels of different types.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "The number of unique classes"
            )  # a list of classes has unique entries
            for some in labels:
                check_classification_targets(some)
        return unique_labels(*labels)
    except TypeError as error:  # labels are bytes
        raise ValueError(str(error)) from None


def check_lengths(length_scale, d: int) -> np.ndarray:
    """Return length scales (d,), float64.

    Raises:
        ValueError: they are not positive, or not one or d numbers.
    """
    lengths = np.asarray(
        np.nan if isinstance(length_scale, str) else length_scale, dtype=np.float64
    )
    if lengths.shape not in ((), (d,)) or not (np.isfinite(lengths) & (lengths > 0)).all():
        raise ValueError(
            f"length_scale={length_scale}: expected a positive number, or one for each of the {d} columns"
        )
    return np.broadcast_to(lengths, d)


def _variance(X, weight: np.ndarray) -> float:
    """Return the variance of all entries, computed in blocks in float64.

    The sums are relative to the mean of the first block, for accuracy.
    """
    total = weight.sum() * X.shape[1]
    shift = X[:ROWS].mean(dtype=np.float64)
    first = 0.0
    second = 0.0
    for rows in _rows_of(X):
        moved = _dense(X[rows]).astype(np.float64) - shift
        first += (weight[rows] @ moved).sum()
        second += np.einsum("n,nd,nd->", weight[rows], moved, moved)
    return max(0.0, second / total - (first / total) ** 2)


def _dense(X) -> np.ndarray:
    return X.toarray() if issparse(X) else X


def _rows_of(X, size: int = ROWS) -> Iterator[slice]:
    """Return blocks of rows; sparse rows become dense and need smaller blocks."""
    if issparse(X):
        size = max(1, min(size, SPARSE_ENTRIES // X.shape[1]))
    return gen_batches(X.shape[0], size)
