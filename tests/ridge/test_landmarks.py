"""Nystroem by leverage: scikit-learn's contract, exact at landmarks, and rows that others say little about."""

import numpy as np
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.utils.estimator_checks import check_estimator

from crt_exp.ridge.landmarks import LeverageNystroem


def test_scikit_learn_compatible():
    check_estimator(LeverageNystroem(n_components=5))


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
