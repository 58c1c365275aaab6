"""Errors of kernel machines and their peers against rows and columns: the page kernel-scale.

Legend: n rows, d columns of data, M columns of features. Errors are RMSE over the standard deviation of the test
targets, which is 1 for the mean, or shares of wrong classes.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, WhiteKernel
from sklearn.kernel_approximation import Nystroem, RBFSampler
from sklearn.linear_model import SGDClassifier, SGDRegressor

from crt_exp.data.tabular import load
from crt_exp.estimators import RandomFeatures, blocks
from crt_exp.probes.uci import scaler
from crt_exp.ridge import RandomFeatureClassifier, RandomFeatureRidge, fit_length_scales
from crt_exp.ridge.batches import block_rows
from crt_exp.ridge.landmarks import LeverageNystroem
from crt_exp.ridge.solve import solved
from crt_exp.ridge.sums import Centred, Sums
from crt_exp.times import Watch

NOISE, D, TESTED = 0.3, 8, 10_000   # of generated rows


class Parts(NamedTuple):
    """Training and test rows (n, d) float32, and their targets: numbers, or classes."""

    X: np.ndarray
    y: np.ndarray
    test: np.ndarray
    target: np.ndarray

    @property
    def classes(self) -> bool:
        return self.y.dtype.kind == "i"

    @property
    def columns(self) -> np.ndarray:
        """Training targets (n, T) float64, of classes ones and zeros."""
        return (self.y[:, None] == np.unique(self.y)).astype(np.float64) if self.classes else self.y[:, None]

    @property
    def gamma(self) -> float:
        """Of RBFSampler's 'scale', the same for all."""
        return 1 / (self.X.shape[1] * float(self.X.var()))

    def stretched(self, lengths: np.ndarray) -> "Parts":
        """In units of lengths (d,): the kernel is that of gamma = 1/2."""
        lengths = lengths.astype(np.float32)
        return self._replace(X=self.X / lengths, test=self.test / lengths)


class Lengths(NamedTuple):
    """(d,) as the estimators fit them, and the seconds that it took."""

    values: np.ndarray
    seconds: float


def generated(rows: int, seed: int) -> Parts:
    """A smooth function of 8 standard normal numbers of deviation 1, and noise of deviation 0.3."""
    r = np.random.default_rng([seed, rows])
    X = r.normal(size=(rows + TESTED, D)).astype(np.float32)
    mean = np.sin(2 * X[:, 0]) + X[:, 1] / 2 + X[:, 2] * X[:, 3] / 2 + np.abs(X[:, 4])
    y = (mean - mean.mean()) / mean.std() + NOISE * r.normal(size=len(X))
    return Parts(X[:rows], y[:rows], X[rows:], y[rows:])


def tabular(name: str, seed: int, numbers: bool) -> Parts:
    """A random fifth is the test. numbers: whether names of classes are numbers, to be regressed on."""
    table = load(name)
    order = np.random.default_rng(seed).permutation(len(table))
    train, test = np.split(order, [len(order) * 4 // 5])
    features, y = table.encode("ordinal"), np.asarray(table.target)
    scale = scaler(features[train], "standard")
    if numbers and table.classes is not None:
        y = np.array(table.classes).astype(np.float64)[y]
    elif table.classes is not None:
        y = y.astype(np.int64)
    return Parts(scale(features[train]), y[train], scale(features[test]), y[test])


@lru_cache(1)
def parts_of(data: str, rows: int, seed: int, numbers: bool) -> Parts:
    return generated(rows, seed) if data == "generated" else tabular(data, seed, numbers)


@lru_cache(8)
def lengths_of(data: str, rows: int, seed: int, numbers: bool) -> Lengths:
    """Fitted once for all arms and numbers of columns: of the rows and the seed alone."""
    parts = parts_of(data, rows, seed, numbers)
    with Watch() as watch:
        values = fit_length_scales(parts.X, parts.columns, random_state=seed)
    return Lengths(values, watch.seconds)


def errors(arms: Mapping[str, Any], data: str, rows: int, columns: int, seed: int,
           numbers: bool = False) -> Iterator[dict[str, Any]]:
    """arm, error, seconds of fit and prediction, and of intervals how many cover, and how far that is from 95%."""
    parts = parts_of(data, rows, seed, numbers)
    for arm, given in arms.items():
        if given["of"] in ARMS and columns in given.get("columns", [columns]) and fits(parts, given):
            options, before = dict(given.get("with", {})), 0.0
            if options.get("lengths") == "fit":
                options["lengths"], before = lengths_of(data, rows, seed, numbers)
            with Watch() as watch:
                found = ARMS[given["of"]](parts, columns, seed, **options)
            prediction, std = found if isinstance(found, tuple) else (found, None)
            yield {"arm": arm, "error": error(parts, prediction), "seconds": before + watch.seconds,
                   **(covered(parts, prediction, std) if std is not None else {})}


def fits(parts: Parts, given: Mapping[str, Any]) -> bool:
    """Whether an arm takes so many rows, and classes, and is installed."""
    if given["of"] == "GPyTorch" and find_spec("gpytorch") is None:
        warnings.warn("GPyTorch is not installed (pip install gpytorch): its arm is left out", stacklevel=2)
        return False
    return len(parts.X) <= given.get("most", np.inf) and not (parts.classes and given["of"] in OF_NUMBERS)


def covered(parts: Parts, mean: np.ndarray, std: np.ndarray) -> dict[str, float]:
    share = float((np.abs(parts.target - mean) < 1.96 * std).mean())
    return {"coverage": share, "miss": abs(share - 0.95)}


def error(parts: Parts, prediction: np.ndarray) -> float:
    if parts.classes:
        return float((prediction != parts.target).mean())
    return float(np.mean((prediction - parts.target) ** 2) ** 0.5 / parts.target.std())


# ---- arms


def trivial(parts: Parts, columns: int, seed: int) -> np.ndarray:
    """The mean, or the most frequent class."""
    constant = np.bincount(parts.y).argmax() if parts.classes else parts.y.mean()
    return np.full(len(parts.target), constant)


def ours(parts: Parts, columns: int, seed: int, kernel: str = "gaussian", lengths: np.ndarray | None = None):
    kind = RandomFeatureClassifier if parts.classes else RandomFeatureRidge
    model = kind(n_components=columns, kernel=kernel, gamma=parts.gamma, length_scale=lengths, random_state=seed)
    model.fit(parts.X, parts.y)
    if parts.classes:
        return model.predict(parts.test)
    return model.predict(parts.test, return_std=True)


def ridge_on(make: Callable) -> Callable:
    """The same ridge, by generalised cross-validation, on the features of a transformer."""
    def fitted(parts: Parts, columns: int, seed: int, lengths: np.ndarray | None = None) -> np.ndarray:
        gamma, parts = (parts.gamma, parts) if lengths is None else (0.5, parts.stretched(lengths))
        features = make(gamma=gamma, n_components=min(columns, len(parts.X)), random_state=seed).fit(parts.X)
        y = parts.columns
        sums = Sums.empty(min(columns, len(parts.X)), torch.zeros(y.shape[1], dtype=torch.float64))
        for chosen in blocks(len(parts.X), block_rows(columns)):
            z = torch.from_numpy(np.ascontiguousarray(features.transform(parts.X[chosen])))
            sums.add(z, torch.from_numpy(y[chosen]), torch.ones(len(z), dtype=torch.float64))
        solution = solved(Centred.of(sums), "gcv", 1e-7, together=parts.classes)
        found = solution.predict(torch.from_numpy(features.transform(parts.test)).double()).numpy()
        return np.unique(parts.y)[found.argmax(1)] if parts.classes else found[:, 0]
    return fitted


class Residual:
    """Half the columns are Nystroem's, the other half random features of what these leave of the kernel: z(x) less what
    landmarks explain of it. Products have the kernel as their mean, and noise where the landmarks are no help."""

    def __init__(self, gamma: float, n_components: int, random_state: int):
        half = n_components // 2
        self.landmarks = Nystroem(gamma=gamma, n_components=half, random_state=random_state)
        self.random = RandomFeatures("trig", n_components=n_components - half, gamma=gamma, random_state=random_state)

    def fit(self, X: np.ndarray) -> Self:
        points = self.landmarks.fit(X).components_
        self.explained = self.landmarks.normalization_ @ self.random.fit(X).transform(points)
        return self

    def transform(self, X: np.ndarray) -> np.ndarray:
        known = self.landmarks.transform(X)
        return np.concatenate([known, self.random.transform(X) - known @ self.explained], 1)


def nystroem_sgd(parts: Parts, columns: int, seed: int) -> np.ndarray:
    features = Nystroem(gamma=parts.gamma, n_components=min(columns, len(parts.X)), random_state=seed).fit(parts.X)
    model = (SGDClassifier if parts.classes else SGDRegressor)(random_state=seed)
    return model.fit(features.transform(parts.X), parts.y).predict(features.transform(parts.test))


def trees(parts: Parts, columns: int, seed: int, **options: Any) -> np.ndarray:
    kind = HistGradientBoostingClassifier if parts.classes else HistGradientBoostingRegressor
    return kind(random_state=seed, **options).fit(parts.X, parts.y).predict(parts.test)


def exact(parts: Parts, columns: int, seed: int, lengths: np.ndarray) -> np.ndarray:
    """A Gaussian process with lengths fitted as ours, and the noise that random features find."""
    deviation = parts.y.std()
    like = RandomFeatureRidge(n_components=columns, length_scale=lengths, random_state=seed).fit(parts.X, parts.y)
    kernel = RBF(lengths) + WhiteKernel(like.noise_variance_ / deviation**2)
    model = GaussianProcessRegressor(kernel, optimizer=None, normalize_y=True).fit(parts.X, parts.y)
    return np.concatenate([model.predict(parts.test[rows]) for rows in blocks(len(parts.test))])


def sparse(parts: Parts, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """GPyTorch's variational process with as many inducing points as others have columns."""
    from crt_exp.probes.inducing import fitted_process

    return fitted_process(parts.X, parts.y, min(columns, len(parts.X)), seed)(parts.test)


ARMS: dict[str, Callable] = {
    "trivial": trivial, "ours": ours, "RBFSampler": ridge_on(RBFSampler), "Nystroem": ridge_on(Nystroem),
    "LeverageNystroem": ridge_on(LeverageNystroem), "Residual": ridge_on(Residual), "Nystroem + SGD": nystroem_sgd,
    "trees": trees, "exact": exact, "GPyTorch": sparse}
OF_NUMBERS = {"exact", "GPyTorch"}
