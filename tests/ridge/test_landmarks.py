"""Nystroem by leverage: scikit-learn's contract, exact at landmarks, rows that others say little about, and landmarks
that are added to a fit."""

import pickle

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.utils.estimator_checks import check_estimator

from crt_exp.ridge import NystroemRidge, landmarks
from crt_exp.ridge.landmarks import LeverageNystroem


@pytest.mark.parametrize("model", [LeverageNystroem(n_components=5), NystroemRidge(gamma=0.1)], ids=repr)
def test_scikit_learn_compatible(model):
    check_estimator(model)


def test_the_kernel_is_exact_at_landmarks_and_with_all_rows():
    X = np.random.default_rng(0).normal(size=(60, 3))
    Z = LeverageNystroem(gamma=0.5, n_components=60, random_state=0).fit_transform(X)
    np.testing.assert_allclose(Z @ Z.T, rbf_kernel(X, gamma=0.5), atol=1e-6)
    few = LeverageNystroem(gamma=0.5, n_components=10, random_state=0).fit(X)
    Z = few.transform(few.landmarks_)
    np.testing.assert_allclose(Z @ Z.T, rbf_kernel(few.landmarks_, gamma=0.5), atol=1e-6)


def test_a_small_cluster_gets_landmarks():
    """5 rows of 1000, which 10 uniform landmarks miss in most draws."""
    r = np.random.default_rng(0)
    X = np.concatenate([r.normal(0, 0.05, size=(995, 2)), r.normal(9, 0.5, size=(5, 2))])
    X = X[r.permutation(len(X))]
    hits = [(LeverageNystroem(gamma=0.5, n_components=60, random_state=seed).fit(X).landmarks_[:, 0] > 5).sum()
            for seed in range(10)]
    assert np.mean(hits) > 2 * 60 * 5 / 1000


def rows(n=500, seed=0):
    """X (n, 2), y with noise 0.1, and 60 landmarks of X."""
    r = np.random.default_rng(seed)
    X = r.uniform(-3, 3, size=(n, 2))
    return X, 5 + np.sin(2 * X[:, 0]) + X[:, 1] + 0.1 * r.normal(size=n), X[r.permutation(n)[:60]]


def test_is_ridge_on_the_kernel_of_the_landmarks():
    """From the definition: least sum of squares and alpha c.K c, with an intercept that costs nothing."""
    X, y, points = rows()
    K, across = rbf_kernel(points, gamma=2.0) + landmarks.JITTER * np.eye(60), rbf_kernel(X, points, gamma=2.0)
    model = NystroemRidge(gamma=2.0, landmarks=points, alpha=0.1).fit(X, y)
    apart = across - across.mean(0)
    theirs = np.linalg.solve(apart.T @ apart + 0.1 * K, apart.T @ (y - y.mean()))
    np.testing.assert_allclose(model.coef_, theirs, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(model.predict(X), apart @ theirs + y.mean(), atol=1e-8)


@pytest.mark.parametrize("parts", [[30], [20, 21], [1, 2, 59]])
@pytest.mark.parametrize("alpha", ["gcv", "evidence", 0.1])
def test_landmarks_that_are_added_give_the_model_of_all_at_once(alpha, parts):
    X, y, points = rows()
    first, *others = np.split(points, parts)
    whole = NystroemRidge(gamma=2.0, landmarks=points, alpha=alpha).fit(X, y)
    model = NystroemRidge(gamma=2.0, landmarks=first, alpha=alpha).fit(X, y)
    for more in others:
        model = pickle.loads(pickle.dumps(model)).add_landmarks(more)
    scale = abs(whole.coef_).max()
    np.testing.assert_allclose(model.coef_, whole.coef_, rtol=1e-8, atol=1e-8 * scale)
    assert model.intercept_ == pytest.approx(whole.intercept_, rel=1e-8)
    assert model.alpha_ == pytest.approx(whole.alpha_, rel=1e-8)
    np.testing.assert_allclose(model.predict(X), whole.predict(X), rtol=1e-8)


def test_added_landmarks_cost_their_own_kernels(monkeypatch):
    X, y, points = rows()
    model, kernel, counted = NystroemRidge(gamma=2.0, landmarks=points[:50]).fit(X, y), landmarks.rbf_kernel, []
    monkeypatch.setattr(landmarks, "rbf_kernel", lambda X, Y, gamma: counted.append(len(X) * len(Y)) or kernel(
        X, Y, gamma=gamma))
    model.add_landmarks(points[50:])
    assert sum(counted) == 500 * 10 + 50 * 10 + 10 * 10


def test_the_same_landmark_twice_changes_nothing():
    X, y, points = rows()
    once = NystroemRidge(gamma=2.0, landmarks=points).fit(X, y)
    twice = NystroemRidge(gamma=2.0, landmarks=points).fit(X, y).add_landmarks(points[:3])
    np.testing.assert_allclose(twice.predict(X), once.predict(X), atol=1e-3)


BAD = {
    "X has 3 features, but NystroemRidge is expecting 2": lambda model: model.add_landmarks(np.zeros((1, 3))),
    "contains NaN": lambda model: model.add_landmarks([[np.nan, 0.0]]),
    "features of all 500 rows are kept, and 10000000 more columns take": lambda model: landmarks.check_kept(
        500, 10**7 + 60, 10**7),
}


@pytest.mark.parametrize("message", BAD)
def test_landmarks_that_cannot_be_added(message):
    X, y, points = rows()
    model = NystroemRidge(gamma=2.0, landmarks=points).fit(X, y)
    before = model.coef_
    with pytest.raises(ValueError, match=message):
        BAD[message](model)
    assert (model.coef_ == before).all()


def test_a_model_without_rows_takes_no_landmarks():
    with pytest.raises(NotFittedError):
        NystroemRidge().add_landmarks(np.zeros((1, 2)))
