"""The scikit-learn estimators: the library's own checks, and equality with the exact kernel in the limit."""

import pickle

import numpy as np
import pytest
from sklearn.datasets import load_iris, make_regression
from sklearn.utils.estimator_checks import parametrize_with_checks

from crt_exp.estimators import KernelRegressionClassifier, KernelRegressionRegressor, RandomFeatures
from crt_exp.features import OPRF

MECHANISMS = ["trig", "pos", "hyp", "smreg", "gerf", "oprf", "pois", "geom", "pois_plus", "geom_plus", "pois_coord"]


@parametrize_with_checks([RandomFeatures(n_components=20), RandomFeatures("geom", n_components=20),
                          KernelRegressionClassifier(n_projections=400), KernelRegressionClassifier("exact"),
                          KernelRegressionRegressor(n_projections=2000), KernelRegressionRegressor("exact")])
def test_scikit_learn_compatible(estimator, check):
    check(estimator)


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if m not in ("gerf", "smreg")])
def test_features_approach_the_kernel(mechanism):
    X = np.random.default_rng(0).normal(size=(20, 3)) / 4
    Z = RandomFeatures(mechanism, n_components=20_000, gamma=0.7, random_state=0).fit_transform(X)
    K = np.exp(-0.7 * ((X[:, None] - X[None]) ** 2).sum(-1))
    assert np.abs(Z @ Z.T - K).max() < 0.05


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if m != "smreg"])
def test_classifier_approaches_exact(mechanism):
    X, y = load_iris(return_X_y=True)
    X = (X - X.mean(0)) / X.std(0)
    exact = KernelRegressionClassifier("exact", gamma=0.1).fit(X, y).predict_proba(X)
    ours = KernelRegressionClassifier(mechanism, n_projections=5000, gamma=0.1, random_state=0).fit(X, y).predict_proba(X)
    assert np.abs(ours - exact).mean() < 0.03


@pytest.mark.parametrize("mechanism", ["exact", "trig", OPRF("softmax", A=-0.05)], ids=str)
def test_partial_fit_equals_fit(mechanism):
    """Parameters, noise and centre stay as the first batch made them; where they do not depend on it, the sums are equal."""
    kernel = "gaussian" if isinstance(mechanism, str) else "softmax"
    X, y = load_iris(return_X_y=True)
    whole = KernelRegressionClassifier(mechanism, gamma=0.1, kernel=kernel, random_state=1).fit(X, y)
    parts = KernelRegressionClassifier(mechanism, gamma=0.1, kernel=kernel, random_state=1)
    for rows in np.array_split(np.random.default_rng(0).permutation(len(X)), 4):
        parts.partial_fit(X[rows], y[rows], classes=[0, 1, 2])
    np.testing.assert_allclose(parts.predict_proba(X), whole.predict_proba(X), atol=1e-9)
    X, y = make_regression(200, 4, noise=0.1, random_state=0)
    whole = KernelRegressionRegressor(mechanism, gamma=0.01, kernel=kernel, random_state=1).fit(X, y)
    parts = KernelRegressionRegressor(mechanism, gamma=0.01, kernel=kernel, random_state=1)
    parts.partial_fit(X[:70], y[:70]).partial_fit(X[70:], y[70:])
    np.testing.assert_allclose(parts.predict(X), whole.predict(X), rtol=1e-6)


def test_common_shift_changes_nothing():
    """Positive features of uncentred data would have e^|x+y|^2 more variance; the Gaussian kernel does not see the shift."""
    X, y = load_iris(return_X_y=True)
    model = KernelRegressionClassifier("oprf", gamma=0.1, random_state=0)
    near, far = (model.fit(X + c, y).predict_proba(X + c) for c in (0, 50))
    np.testing.assert_allclose(near, far, atol=1e-6)


def test_pickles_and_repeats():
    X, y = load_iris(return_X_y=True)
    one = KernelRegressionClassifier("geom", random_state=3).fit(X, y)
    same = pickle.loads(pickle.dumps(one))
    assert (same.predict_proba(X) == one.predict_proba(X)).all()
    assert (KernelRegressionClassifier("geom", random_state=3).fit(X, y).predict_proba(X) == one.predict_proba(X)).all()


def test_large_gamma_does_not_underflow():
    X, y = load_iris(return_X_y=True)
    assert (KernelRegressionClassifier("exact", gamma=1e6).fit(X, y).predict(X) == y).mean() > 0.99
    assert np.isfinite(KernelRegressionClassifier("oprf", gamma=1e3, random_state=0).fit(X, y).predict_proba(X)).all()


X, Y = load_iris(return_X_y=True)
BAD = {
    "gamma = 0": lambda: RandomFeatures(gamma=0).fit(X),
    "gamma = -1": lambda: KernelRegressionClassifier(gamma=-1).fit(X, Y),
    "n_components = 0": lambda: RandomFeatures(n_components=0).fit(X),
    "multiple of 2": lambda: RandomFeatures("trig", n_components=7).fit(X),
    "n_projections = 0": lambda: KernelRegressionClassifier(n_projections=0).fit(X, Y),
    "unknown features 'oprff'; did you mean oprf": lambda: RandomFeatures("oprff").fit(X),
    "unknown sampler 'orthogonl'; did you mean orthogonal": lambda: RandomFeatures(sampler="orthogonl").fit(X),
    "two sides": lambda: RandomFeatures("gerf").fit_transform(X),
    "below its shift": lambda: RandomFeatures("pois_plus").fit(X).transform(X - 100),
    "unseen label 2": lambda: KernelRegressionClassifier().partial_fit(X, Y, classes=[0, 1]),
    "needs classes": lambda: KernelRegressionClassifier().partial_fit(X, Y),
    "NaN": lambda: RandomFeatures().fit(np.full((3, 2), np.nan)),
    "unknown kernel": lambda: RandomFeatures(kernel="rbf").fit(X),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


def test_no_mass_is_reported():
    with pytest.warns(UserWarning, match="no positive kernel mass"):
        KernelRegressionRegressor("trig", n_projections=4, gamma=50, random_state=0).fit(X, Y).predict(X)
