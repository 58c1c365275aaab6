"""Ridge in random features: scikit-learn's checks, equality with its Ridge, independence of how rows come."""

import itertools
import pickle

import numpy as np
import pytest
import scipy.sparse
import torch
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.utils.estimator_checks import parametrize_with_checks

from crt_exp import (
    KernelRegressionClassifier,
    KernelRegressionRegressor,
    RandomFeatureClassifier,
    RandomFeatureRidge,
    RandomFeatures,
)

FIXED = {"gamma": 0.3, "random_state": 0}
LABELS = np.array(["a", "b", "c"])


def rows(n=600, d=3, seed=0, dtype=np.float64):
    """X, y of known noise 0.3, labels."""
    r = np.random.default_rng(seed)
    X = r.normal(size=(n, d))
    mean = np.sin(2 * X[:, 0]) + X[:, 1]
    targets = mean + 0.3 * r.normal(size=n)
    labels = LABELS[np.digitize(mean, [-0.7, 0.7])]
    return X.astype(dtype), targets, labels


@parametrize_with_checks(
    [RandomFeatureRidge(n_components=102), RandomFeatureClassifier(n_components=100)]
)
def test_scikit_learn_compatible(estimator, check):
    check(estimator)


@pytest.mark.parametrize(
    "mechanism, sampler",
    [
        ("trig", "orthogonal"),
        ("oprf", "hadamard"),
        ("trig", "sobol"),
    ],
)
def test_is_ridge_on_the_same_features(mechanism, sampler):
    X, y, _ = rows()
    weight = np.random.default_rng(1).uniform(0, 2, len(y))
    options = {"n_components": 41, "gamma": 0.3, "random_state": 0}
    model = RandomFeatureRidge(mechanism, sampler, alpha=0.01, **options).fit(X, y, weight)
    Z = model.features_.transform(X)
    theirs = Ridge(alpha=0.01, solver="cholesky").fit(Z, y, weight)
    np.testing.assert_allclose(model.coef_, theirs.coef_, rtol=1e-6, atol=1e-6)
    actual = model.predict(X)
    expected = theirs.predict(Z)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
    unweighted = RandomFeatureRidge(mechanism, sampler, alpha=0.01, **options).fit(X, y)
    actual = RandomFeatures(mechanism, sampler, **options).fit_transform(X)
    expected = unweighted.features_.transform(X)
    np.testing.assert_allclose(
        actual,
        expected,
        rtol=1e-9,
    )


@pytest.mark.parametrize("alpha", ["gcv", "evidence"])
def test_a_chosen_ridge_is_the_best_of_its_neighbours(alpha):
    """By the definitions of both criteria, from the hat matrix and from the marginal law of the targets."""
    X, y, _ = rows(n=80)
    model = RandomFeatureRidge(n_components=30, alpha=alpha, **FIXED).fit(X, y)
    Z = model.features_.transform(X)
    Z = Z - Z.mean(0)
    y = y - y.mean()

    def score(ridge):
        if alpha == "gcv":
            H = Z @ np.linalg.solve(Z.T @ Z + ridge * np.eye(30), Z.T)
            residuals = y - H @ y
            freedom = len(y) - 1 - np.trace(H)
            return len(y) * (residuals**2).sum() / freedom**2
        S = np.eye(len(y)) + Z @ Z.T / ridge
        quadratic = y @ np.linalg.solve(S, y)
        return (len(y) - 1) * np.log(quadratic) + np.linalg.slogdet(S)[1]

    actual = score(model.alpha_)
    expected = min(score(model.alpha_ * 10 ** (k / 8)) for k in range(-40, 41))
    assert actual == expected
    same = RandomFeatureRidge(n_components=30, alpha=model.alpha_, **FIXED).fit(*rows(n=80)[:2])
    np.testing.assert_allclose(model.coef_, same.coef_, rtol=1e-6)
    for name in ("noise_variance_", "degrees_"):
        actual = getattr(model, name)
        expected = getattr(same, name)
        assert actual == pytest.approx(expected)
    for one, two in zip(model.predict(X, return_std=True), same.predict(X, return_std=True)):
        np.testing.assert_allclose(one, two, rtol=1e-6)


@pytest.mark.parametrize(
    "alpha, n, places, order",
    [
        ("gcv", 60, range(1, 60), 1),
        (1e-3, 600, [1, 8, 257, 511], 1),
        ("gcv", 600, [100, 400], -1),
    ],
    ids=["one by one", "odd", "backwards"],
)
def test_coefficients_do_not_depend_on_how_rows_were_split(alpha, n, places, order):
    X, y, labels = rows(n)
    for make, target in ((RandomFeatureRidge, y), (RandomFeatureClassifier, labels)):
        whole = make(n_components=20, alpha=alpha, **FIXED).fit(X, target)
        parts = make(n_components=20, alpha=alpha, **FIXED)
        for part in np.split(np.arange(n), places)[::order]:
            parts.partial_fit(X[part], target[part])
        np.testing.assert_allclose(parts.coef_, whole.coef_, rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(parts.intercept_, whole.intercept_, rtol=1e-8, atol=1e-8)
        assert (
            (parts.predict(X) == whole.predict(X)).all() if target is labels else parts.rows_ == n
        )


def test_a_row_left_out_is_predicted_as_by_a_fit_without_it():
    """By leverage, for a fixed map and ridge."""
    X, y, _ = rows(40)
    model = RandomFeatureRidge(n_components=20, alpha=0.5, **FIXED).fit(X, y)
    Z = model.features_.transform(X)
    actual = model._solve().leave_one_out(*map(torch.from_numpy, (Z, y[:, None])))[:, 0]
    for i, others in enumerate(~np.eye(40, dtype=bool)):
        expected = (
            Ridge(alpha=0.5, solver="cholesky").fit(Z[others], y[others]).predict(Z[i : i + 1])
        )
        np.testing.assert_allclose(actual[i], expected[0], rtol=1e-6)


def test_a_fit_takes_the_scale_of_all_rows_in_any_order():
    X, y, _ = rows(6000)
    sorted_rows = np.argsort(X[:, 0])
    gammas = [
        RandomFeatureRidge(n_components=20).fit(X[order], y[order]).features_.gamma_
        for order in (np.arange(6000), sorted_rows)
    ]
    expected = 1 / (X.shape[1] * X.var())
    np.testing.assert_allclose(gammas, expected)


@pytest.mark.parametrize(
    "make, sentinel, place",
    [
        (RandomFeatureRidge, -999999999, 0),
        (RandomFeatureRidge, 1e15, 600),
        (RandomFeatureClassifier, 1e15, 0),
    ],
)
def test_rows_of_weight_0_change_nothing(make, sentinel, place):
    X, y, labels = rows()
    target, wrong = (y, sentinel) if make is RandomFeatureRidge else (labels, "z")
    more = (
        np.insert(X, place, sentinel, 0),
        np.insert(target.astype(object), place, wrong).astype(target.dtype),
    )
    weight = np.insert(np.ones(600), place, 0)
    plain = make(n_components=40, **FIXED).fit(X, target)
    fitted = make(n_components=40, **FIXED).fit(*more, weight)
    parts = make(n_components=40, **FIXED)
    for part in np.array_split(np.arange(601), 3):
        parts.partial_fit(more[0][part], more[1][part], sample_weight=weight[part])
    for model in (fitted, parts):
        np.testing.assert_allclose(model.coef_, plain.coef_, rtol=1e-7, atol=1e-7)
        np.testing.assert_allclose(model.intercept_, plain.intercept_, rtol=1e-7)
        assert model.rows_ == 600


@pytest.mark.parametrize("container", [scipy.sparse.csr_array, np.ndarray.tolist])
def test_rows_may_come_in_any_container(container):
    X, y, labels = rows()
    for make, target in ((RandomFeatureRidge, y), (RandomFeatureClassifier, labels)):
        model = make(n_components=40, random_state=0)  # gamma="scale" is that of all rows
        actual = clone(model).fit(container(X), target).coef_
        expected = clone(model).fit(X, target).coef_
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_intervals_cover():
    """Of new targets, whose noise is known: 95% within 1.96 standard deviations."""
    X, y, _ = rows(n=3000)
    new, target, _ = rows(n=20_000, seed=1)
    for alpha in ("gcv", "evidence"):
        model = RandomFeatureRidge(n_components=200, alpha=alpha, random_state=0).fit(X, y)
        mean, std = model.predict(new, return_std=True)
        assert model.noise_variance_ == pytest.approx(0.09, rel=0.1)
        actual = (np.abs(target - mean) < 1.96 * std).mean()
        assert actual == pytest.approx(0.95, abs=0.01)
    far = model.predict(np.full((1, 3), 30.0), return_std=True)[1]
    assert far > 1.5 * std.min()  # where no rows were, coefficients are uncertain


@pytest.mark.parametrize(
    "d, alpha, dtype",
    [
        (5, "gcv", np.float64),
        (5, "evidence", np.float32),
        (20, "evidence", np.float64),
        (20, "gcv", np.float32),
    ],
)
def test_rows_that_are_repeated_leave_intervals_as_wide(d, alpha, dtype):
    X, y, _ = rows(560, d, dtype=dtype)
    actual = []
    for times in (1, 2, 10):
        model = RandomFeatureRidge(n_components=200, alpha=alpha, random_state=0)
        model.fit(np.repeat(X[:60], times, 0), np.repeat(y[:60], times))
        mean, std = model.predict(X[60:], return_std=True)
        covered = np.abs(y[60:] - mean) < 1.96 * std
        actual.append((covered.mean(), std.mean()))
    expected = [actual[0]] * 3
    np.testing.assert_allclose(actual, expected, rtol=0.1)


@pytest.mark.parametrize("mechanism", ["trig", "oprf"])
def test_deviations_are_numbers_where_features_underflow(mechanism):
    """Far from every row, near the centre where no row was, and for targets without noise."""
    X, y, _ = rows()
    new = np.concatenate([X, 1e3 * X, 0 * X])
    for alpha, target in itertools.product(("gcv", "evidence", 0.1), (y, 0 * y)):
        model = RandomFeatureRidge(
            mechanism, n_components=20, gamma=1e4, alpha=alpha, random_state=0
        ).fit(X, target)
        mean, std = model.predict(new, return_std=True)
        assert np.isfinite(mean).all()
        assert not np.isnan(std).any()


def test_targets_of_several_columns_are_fitted_as_if_each_were_alone():
    X, y, _ = rows()
    Y = np.stack([y, 100 + X[:, 2] ** 2], 1)
    both = RandomFeatureRidge(n_components=40, **FIXED).fit(X, Y)
    assert both.predict(X).shape == Y.shape
    assert both.coef_.shape == (2, 40)
    assert both.alpha_.shape == (2,)
    for k in (0, 1):
        one = RandomFeatureRidge(n_components=40, **FIXED).fit(X, Y[:, k])
        mean, std = one.predict(X, return_std=True)
        actual = both.predict(X)[:, k]
        np.testing.assert_allclose(actual, mean, rtol=1e-7)
        actual = both.predict(X, return_std=True)[1][:, k]
        np.testing.assert_allclose(actual, std, rtol=1e-7)


def test_pickled_models_go_on():
    X, y, labels = rows()
    for make, target in ((RandomFeatureRidge, y), (RandomFeatureClassifier, labels)):
        model = make(n_components=40, **FIXED).partial_fit(X[:250], target[:250])
        again = pickle.loads(pickle.dumps(model)).partial_fit(X[250:], target[250:])
        expected = make(n_components=40, **FIXED).fit(X, target).coef_
        np.testing.assert_allclose(again.coef_, expected, rtol=1e-7)


def test_a_constant_column_and_a_large_mean_change_nothing():
    X, y, _ = rows()
    plain = RandomFeatureRidge(n_components=40, **FIXED).fit(X, y)
    model = RandomFeatureRidge(n_components=40, gamma=0.3, random_state=0).fit(X, y + 1e6)
    actual = model.predict(X) - 1e6
    expected = plain.predict(X)
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    constant = np.column_stack([X, np.full(len(X), 7.0)])
    assert (
        RandomFeatureRidge(n_components=200, gamma=0.3, random_state=0)
        .fit(constant, y)
        .score(constant, y)
        > 0.85
    )


def test_probabilities_of_two_gaussian_classes_are_calibrated():
    """On average over tenths of the predicted probability."""
    r = np.random.default_rng(0)
    y = r.random(20_000) < 0.3
    X = r.normal(size=(20_000, 2)) + 1.2 * y[:, None]
    P = (
        RandomFeatureClassifier(n_components=100, gamma=0.05, random_state=0)
        .fit(X[:4000], y[:4000])
        .predict_proba(X[4000:])[:, 1]
    )
    tenth = np.floor(10 * P)
    y = y[4000:]
    gaps = [abs((P - y)[tenth == k].sum()) for k in range(10)]
    assert sum(gaps) / len(y) < 0.04


def test_a_label_that_comes_later_is_a_new_class():
    X, _, labels = rows()
    order = np.argsort(labels, kind="stable")[::-1]  # c first, a last
    whole = RandomFeatureClassifier(n_components=40, **FIXED).fit(X[order], labels[order])
    parts = RandomFeatureClassifier(n_components=40, **FIXED)
    for part in np.array_split(order, 7):
        parts.partial_fit(X[part], labels[part])
    assert parts.classes_.tolist() == ["a", "b", "c"]
    np.testing.assert_allclose(parts.coef_, whole.coef_, rtol=1e-9, atol=1e-9)
    known = RandomFeatureClassifier(n_components=40, **FIXED).partial_fit(
        X, labels, classes=["a", "b", "c", "d"]
    )
    actual = known.predict_proba(X)[:, :3]
    expected = whole.predict_proba(X)
    np.testing.assert_allclose(actual, expected, atol=1e-9)
    assert (known.predict_proba(X)[:, 3] == 0).all()


def later(model, *batch):
    X, y, _ = rows()
    return model.partial_fit(X, y).partial_fit(*batch)


SMALL = {"n_components": 10}
X, Y, L = rows()
BAD = {
    "sample_weight: -1": lambda: RandomFeatureRidge(**SMALL).fit(
        X, Y, np.where(np.arange(600) == 3, -1, 1)
    ),
    "Sample weights must contain at least one non-zero": lambda: RandomFeatureRidge(**SMALL).fit(
        X, Y, np.zeros(600)
    ),
    "sample_weight sums to 1": lambda: RandomFeatureRidge(**SMALL).fit(X, Y, np.full(600, 1 / 600)),
    "X has 2 features, but RandomFeatureRidge is expecting 3": lambda: later(
        RandomFeatureRidge(**SMALL), X[:, :2], Y
    ),
    "y: shape .*2.* in the first batch": lambda: later(
        RandomFeatureRidge(**SMALL), X, np.stack([Y, Y], 1)
    ),
    "y: one class only": lambda: RandomFeatureClassifier(**SMALL).fit(X, ["a"] * 600),
    "alpha=aic: expected a number >= 0 or gcv or evidence": lambda: RandomFeatureRidge(
        alpha="aic", **SMALL
    ).fit(X, Y),
    "features overflow": lambda: RandomFeatureRidge(
        "trig", kernel="softmax", gamma=1.0, **SMALL
    ).fit(100 * X, Y),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


def changed_last(values, entry):
    values = values.copy()
    values[-1] = entry
    return values


MODELS = {
    "ridge": RandomFeatureRidge("pois_plus", "iid", **SMALL, **FIXED),
    "softmax ridge": RandomFeatureRidge("trig", kernel="softmax", **SMALL, **FIXED),
    "classifier": RandomFeatureClassifier("pois_plus", "iid", **SMALL, **FIXED),
    "kernel classifier": KernelRegressionClassifier("oprf", kernel="softmax", random_state=0),
    "exact classifier": KernelRegressionClassifier("exact"),
    "kernel regressor": KernelRegressionRegressor("oprf", kernel="softmax", random_state=0),
    "exact regressor": KernelRegressionRegressor("exact"),
}
REFUSED = {
    "NaN": lambda X, y: (changed_last(X, np.nan), y),
    "infinite": lambda X, y: (changed_last(X, np.inf), y),
    "narrow": lambda X, y: (X[:, :2], y),
    "no rows": lambda X, y: (X[:0], y[:0]),
    "fewer targets": lambda X, y: (X, y[1:]),
    "more columns": lambda X, y: (X, np.stack([y, y], 1)),
    "no number": lambda X, y: (X, changed_last(y.astype(object), None)),
    "text": lambda X, y: (X.astype(object) + "a", y),
}


def longer_rows():
    """More rows than one block holds."""
    X, y, labels = rows()
    return np.tile(X, (8, 1)), np.tile(y, 8), np.tile(labels, 8)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", REFUSED)
def test_a_refused_batch_leaves_the_model_as_it_was(name, kind):
    X, y, labels = rows()
    y = labels if "classifier" in name else y
    options = {"classes": np.unique(y)} if "classifier" in name else {}
    model = clone(MODELS[name])
    if kind not in ("narrow", "more columns"):  # which a first batch may be
        with pytest.raises((ValueError, TypeError)):
            model.partial_fit(*REFUSED[kind](X, y), **options)
        assert vars(model) == vars(clone(MODELS[name]))
    model.partial_fit(X, y, **options).predict(X)
    before = pickle.dumps(model)
    with pytest.raises((ValueError, TypeError)):
        model.partial_fit(*REFUSED[kind](X, y))
    assert pickle.dumps(model) == before


@pytest.mark.parametrize("make", (RandomFeatureRidge, RandomFeatureClassifier))
@pytest.mark.parametrize("mechanism", ("pois_plus", "geom_plus"))
def test_rows_below_the_minimum_add_none_of_a_batch(make, mechanism):
    X, y, labels = longer_rows()
    y = labels if make is RandomFeatureClassifier else y
    model = make(mechanism, "iid", **SMALL, **FIXED).fit(X, y)
    before = pickle.dumps(model)
    for place in (0, -1):
        wrong = X.copy()
        wrong[place] = -50
        with pytest.raises(ValueError, match="below the fitted minimum"):
            model.partial_fit(wrong, changed_last(y, y[0]))
        assert pickle.dumps(model) == before
    whole = make(mechanism, "iid", **SMALL, **FIXED).fit(X, y).partial_fit(X, y)
    actual = model.partial_fit(X, y).coef_
    assert np.array_equal(actual, whole.coef_)


@pytest.mark.parametrize(
    "name, X, y, message",
    [
        ("softmax ridge", 1e3, 1.0, "features overflow"),
        ("ridge", 1.0, 1e200, "y: squares overflow"),
        ("kernel regressor", 1e200, 1.0, "overflow"),
        ("kernel regressor", 1.0, 1e306, "overflow"),
        ("kernel classifier", 1e200, 1.0, "overflow"),
    ],
)
def test_sums_that_overflow_are_refused(name, X, y, message):
    U, targets, labels = longer_rows()
    targets = labels if "classifier" in name else targets + 1
    options = {"classes": np.unique(labels)} if "classifier" in name else {}
    model = clone(MODELS[name]).partial_fit(abs(U), targets, **options)
    before = pickle.dumps(model)
    with pytest.raises(ValueError, match=message):
        model.partial_fit(X * abs(U), targets if y == 1 else y * abs(targets))
    assert pickle.dumps(model) == before


def test_a_refused_batch_adds_no_class():
    X, _, labels = rows()
    model = RandomFeatureClassifier("pois_plus", "iid", **SMALL, **FIXED).fit(X, labels)
    before = pickle.dumps(model)
    with pytest.raises(ValueError, match="below the fitted minimum"):
        model.partial_fit(changed_last(X, -50), changed_last(labels, "z"))
    assert pickle.dumps(model) == before
    with pytest.raises(ValueError, match="sample_weight: -1"):
        model.partial_fit(X, changed_last(labels, "z"), sample_weight=-np.ones(len(X)))
    assert pickle.dumps(model) == before
    assert model.classes_.tolist() == ["a", "b", "c"]


def test_an_unseen_label_leaves_a_kernel_classifier_as_it_was():
    X, _, labels = rows()
    model = clone(MODELS["kernel classifier"])
    with pytest.raises(ValueError, match="label 'z'"):
        model.partial_fit(X, changed_last(labels, "z"), classes=["a", "b", "c"])
    assert vars(model) == vars(clone(MODELS["kernel classifier"]))
    before = pickle.dumps(model.partial_fit(X, labels, classes=["a", "b", "c"]))
    with pytest.raises(ValueError, match="label 'z'"):
        model.partial_fit(X, changed_last(labels, "z"))
    assert pickle.dumps(model) == before
