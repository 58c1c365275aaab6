"""Features, kernel estimates and closed-form variances of every map x sampler, and what the estimators give."""

import warnings

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_wine
from sklearn.preprocessing import StandardScaler
from values import attempt, numbers

from crt_exp import KernelRegressionClassifier, RandomFeatures
from crt_exp.estimators.ridge import RandomFeatureClassifier, RandomFeatureRidge
from crt_exp.features import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.registry import choices

D = 8
M = 16
ESTIMATORS = "estimators"


def groups() -> list[str]:
    return [*choices("features"), ESTIMATORS]


def cases(name: str) -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == ESTIMATORS:
            return {label: attempt(make) for label, make in _estimators().items()}
        return {
            f"{sampler} {kernel}": attempt(_features, name, sampler, kernel)
            for sampler in choices("sampler")
            for kernel in ("softmax", "gaussian")
        }


def _features(name: str, sampler: str, kernel: str) -> dict:
    mechanism = Mechanism.of(features=name, sampler=sampler, m=M)
    phi = mechanism.map(kernel, own_kernel=True)
    g = torch.Generator().manual_seed(0)
    x, y = (0.4 * torch.randn(2, n, D, generator=g, dtype=torch.float64) + 0.1 for n in (5, 7))
    noise = mechanism.noise(D, torch.Generator().manual_seed(1))
    params = phi.fit(Statistics.of(x, y))
    fx = phi.phi_q(x, noise, params)
    fy = phi.phi_k(y, noise, params)
    actual = {"width": phi.width(M), "estimate": numbers(fx.exp() @ fy.exp().mT)}
    for side, features in (("q", fx), ("k", fy)):
        actual[f"{side} value"] = numbers(torch.as_tensor(features.value))
        actual[f"{side} log_scale"] = numbers(features.log_scale)
    variance = attempt(phi.log_variance, x[:, :5], y[:, :5], params)
    return actual | {"log_variance": variance if isinstance(variance, str) else numbers(variance)}


def _estimators() -> dict:
    X, labels = load_wine(return_X_y=True)
    X = StandardScaler().fit_transform(X)
    A, y = load_diabetes(return_X_y=True)
    A = StandardScaler().fit_transform(A)
    values = lambda *arrays: [numbers(torch.as_tensor(np.asarray(a))) for a in arrays]
    made = {}
    features = {}
    for name in ("trig", "oprf", "pos", "geom", "angular"):
        features[name] = {"features": name, "n_components": 64, "gamma": 0.05}
    features |= {
        f"kernel={kernel}": {"features": name, "n_components": 32, "length_scale": 0.1**-0.5}
        for kernel, name in (
            ("matern32", "matern"),
            ("arccos1", "arc_cosine"),
            ("laplace", "laplace"),
            ("rational_quadratic", "rational_quadratic"),
        )
    }
    features["kernel=softmax"] = {"kernel": "softmax", "n_components": 32, "gamma": 0.05}
    for label, options in features.items():
        made[f"RandomFeatures {label}"] = lambda options=options: values(
            RandomFeatures(**options, random_state=0).fit_transform(X)
        )
    for name in ("trig", "oprf", "pos", "geom", "gerf", "angular", "exact"):
        columns = 128 if name == "exact" else Mechanism.of(features=name).map("gaussian").width(128)
        made[f"KernelRegressionClassifier {name}"] = lambda name=name, columns=columns: _classified(
            KernelRegressionClassifier(name, n_components=columns, random_state=0),
            X,
            labels,
            values,
        )
    matern = {"features": "matern", "length_scale": 0.2**-0.5}
    kinds = {
        "trig": {"gamma": 0.1},
        "oprf": {"features": "oprf", "gamma": 0.1},
        "matern32": matern,
    }
    for label, kind in kinds.items():
        options = kind | {"n_components": 48, "random_state": 0}
        for alpha in ("gcv", "evidence", 0.5):
            made[f"RandomFeatureRidge {label} {alpha}"] = lambda options=options, alpha=alpha: (
                values(
                    *RandomFeatureRidge(alpha=alpha, **options)
                    .fit(A, y)
                    .predict(A[:50], return_std=True)
                )
            )
        made[f"RandomFeatureRidge {label} partial_fit"] = lambda options=options: values(
            _in_parts(RandomFeatureRidge(**options), A, y).predict(A[:50])
        )
        made[f"RandomFeatureClassifier {label}"] = lambda options=options: _classified(
            RandomFeatureClassifier(**options), X, labels, values
        )
    return made


def _in_parts(model, X, y):
    for part in (slice(0, 200), slice(200, None)):
        model.partial_fit(X[part], y[part])
    return model


def _classified(model, X, y, values) -> list:
    model.fit(X[::2], y[::2])
    return values(model.predict(X[1::2]), model.predict_proba(X[1::2]))
