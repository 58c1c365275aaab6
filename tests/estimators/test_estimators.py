"""The scikit-learn estimators: the library's own checks, and equality with the exact kernel in the limit."""

import pickle

import numpy as np
import pytest
import scipy.sparse
import torch
from helpers.maps import HYBRIDS, map_names
from sklearn import config_context
from sklearn.base import clone
from sklearn.datasets import load_iris, make_regression
from sklearn.gaussian_process.kernels import Matern, RationalQuadratic
from sklearn.kernel_approximation import RBFSampler
from sklearn.linear_model import RidgeClassifier
from sklearn.metrics.pairwise import laplacian_kernel
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_fit2d_1sample, parametrize_with_checks

from crt_exp import RandomFeatureClassifier, RandomFeatureRidge
from crt_exp.estimators import RandomFeatures, evenly_spaced
from crt_exp.estimators.kernel_regression import (
    KernelRegressionClassifier,
    KernelRegressionRegressor,
)
from crt_exp.features import OPRF, ArcCosineRF, Hedgehog, Mixture, Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.samplers import orthogonal

ESTIMATORS = (
    RandomFeatures,
    RandomFeatureRidge,
    RandomFeatureClassifier,
    KernelRegressionClassifier,
    KernelRegressionRegressor,
)
# The maps are all of conf/features; one that a test cannot take stands here with its reason.
TWO_SIDES = (
    dict.fromkeys(("gerf", "complex"), "its maps for the two sides of the kernel differ") | HYBRIDS
)
OTHER_KERNEL = {"smreg": "estimates another kernel"} | HYBRIDS
ONE_MAP = map_names(TWO_SIDES)
GAUSSIAN = {name: Mechanism.of(features=name).map("gaussian") for name in ONE_MAP}
NOT_FITTED = [name for name, phi in GAUSSIAN.items() if not phi.fitted]


@parametrize_with_checks(
    [
        RandomFeatures("trig", n_components=8),
        KernelRegressionClassifier(n_components=400),
        KernelRegressionRegressor("exact"),
    ]
)
def test_scikit_learn_compatible(estimator, check):
    check(estimator)


BELOW_MINIMUM = dict.fromkeys(
    [
        "check_sample_weight_equivalence_on_dense_data",
        "check_sample_weight_equivalence_on_sparse_data",
    ],
    "the check transforms rows of weight 0, which lie below the fitted minimum",
)
EXPECTED_FAILURES = {"pois_plus": BELOW_MINIMUM, "geom_plus": BELOW_MINIMUM}


@pytest.mark.slow
@parametrize_with_checks(
    [
        *(
            RandomFeatures(m, n_components=20)
            for m in (*ONE_MAP, "laplace", "rational_quadratic", "arc_cosine")
        ),
        KernelRegressionClassifier("exact"),
        KernelRegressionClassifier("clustered", n_components=256),
        KernelRegressionRegressor(n_components=2000),
    ],
    expected_failed_checks=lambda estimator: EXPECTED_FAILURES.get(estimator.features, {}),
)
def test_every_estimator_is_compatible_with_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.parametrize("make", [KernelRegressionClassifier, RandomFeatureClassifier])
def test_labels_of_another_type_later(make):
    X = np.arange(6.0)[:, None]
    for later, message in ([1, 2] * 3, "Mix of label input types"), ([b"a", b"b"] * 3, "bytes"):
        with pytest.raises(ValueError, match=message):
            make().partial_fit(X, ["a", "b"] * 3, classes=["a", "b"]).partial_fit(X, later)
        with pytest.raises(ValueError, match=message):
            make().partial_fit(X, ["a", "b"] * 3, classes=later)


def test_clusters_of_one_sample_are_refused_as_by_scikit_learn():
    check_fit2d_1sample(
        "KernelRegressionRegressor", KernelRegressionRegressor("clustered", n_components=256)
    )


@pytest.mark.parametrize("mechanism", map_names(TWO_SIDES | OTHER_KERNEL))
def test_features_approach_the_kernel(mechanism):
    X = np.random.default_rng(0).normal(size=(20, 3)) / 4
    Z = RandomFeatures(mechanism, n_components=20_000, gamma=0.7, random_state=0).fit_transform(X)
    K = np.exp(-0.7 * ((X[:, None] - X[None]) ** 2).sum(-1))
    assert np.abs(Z @ Z.T - K).max() < 0.05


@pytest.mark.parametrize("mechanism", ["trig", "gerf", "complex", "sderf", "pois_plus", "geom"])
def test_classifier_approaches_exact(mechanism):
    X, y = load_iris(return_X_y=True)
    X = (X - X.mean(0)) / X.std(0)
    exact = KernelRegressionClassifier("exact", gamma=0.1).fit(X, y).predict_proba(X)
    model = KernelRegressionClassifier(
        mechanism, n_components=10_000, gamma=0.1, random_state=0
    ).fit(X, y)
    assert np.abs(model.predict_proba(X) - exact).mean() < 0.03


@pytest.mark.parametrize(
    "mechanism, kernel",
    [
        ("exact", "gaussian"),
        ("trig", "gaussian"),
        *((name, "softmax") for name in NOT_FITTED),
        (OPRF("softmax", A=-0.05), "softmax"),
    ],
    ids=str,
)
def test_partial_fit_equals_fit(mechanism, kernel):
    """Parameters, noise and centre stay as the first batch made them;
    where they do not depend on it, the sums are equal."""
    X, y = load_iris(return_X_y=True)
    whole = KernelRegressionClassifier(mechanism, gamma=0.1, kernel=kernel, random_state=1).fit(
        X, y
    )
    parts = KernelRegressionClassifier(mechanism, gamma=0.1, kernel=kernel, random_state=1)
    for rows in np.array_split(np.random.default_rng(0).permutation(len(X)), 4):
        parts.partial_fit(X[rows], y[rows], classes=[0, 1, 2])
    actual = parts.predict_proba(X)
    expected = whole.predict_proba(X)
    np.testing.assert_allclose(actual, expected, atol=1e-9)
    X, y = make_regression(200, 4, noise=0.1, random_state=0)
    whole = KernelRegressionRegressor(mechanism, gamma=0.01, kernel=kernel, random_state=1).fit(
        X, y
    )
    parts = KernelRegressionRegressor(mechanism, gamma=0.01, kernel=kernel, random_state=1)
    parts.partial_fit(X[:70], y[:70]).partial_fit(X[70:], y[70:])
    actual = parts.predict(X)
    expected = whole.predict(X)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("mechanism", ["trig", "sderf", "pois_plus"])
def test_common_shift_changes_nothing(mechanism):
    """Positive features of uncentred data would have e^|x+y|^2 more variance;
    the Gaussian kernel does not see the shift."""
    X, y = load_iris(return_X_y=True)
    model = KernelRegressionClassifier(mechanism, gamma=0.1, random_state=0)
    near = model.fit(X, y).predict_proba(X)
    far = model.fit(X + 50, y).predict_proba(X + 50)
    np.testing.assert_allclose(near, far, atol=1e-6)


@pytest.mark.parametrize("mechanism", ["trig", "sderf", "pois_plus"])
def test_pickles_and_repeats(mechanism):
    X, y = load_iris(return_X_y=True)
    one = KernelRegressionClassifier(mechanism, random_state=3).fit(X, y)
    again = KernelRegressionClassifier(mechanism, random_state=3).fit(X, y)
    same = pickle.loads(pickle.dumps(one))
    assert (same.predict_proba(X) == one.predict_proba(X)).all()
    assert (again.predict_proba(X) == one.predict_proba(X)).all()


def test_large_gamma_does_not_underflow():
    X, y = load_iris(return_X_y=True)
    assert (KernelRegressionClassifier("exact", gamma=1e6).fit(X, y).predict(X) == y).mean() > 0.99
    assert np.isfinite(
        KernelRegressionClassifier("oprf", gamma=1e3, random_state=0).fit(X, y).predict_proba(X)
    ).all()


X, Y = load_iris(return_X_y=True)
BAD = {
    "gamma=0: expected a number > 0": lambda: RandomFeatures(gamma=0).fit(X),
    "n_components=8.0": lambda: RandomFeatures(n_components=8.0).fit(X),
    "unknown features 'oprff'; did you mean oprf": lambda: RandomFeatures("oprff").fit(X),
    "queries and keys": lambda: RandomFeatures("gerf").fit_transform(X),
    r"margin=1.0": lambda: RandomFeatures("pois_plus").fit(X).transform(X - 1),
    "label 2": lambda: KernelRegressionClassifier().partial_fit(X, Y, classes=[0, 1]),
    "classes=None": lambda: KernelRegressionClassifier().partial_fit(X, Y),
    "gamma=0.5: not supported by matern": lambda: RandomFeatures("matern", gamma=0.5).fit(X),
    "gamma=1.0: cannot be combined": lambda: KernelRegressionClassifier(
        "exact", gamma=1.0, length_scale=2.0
    ).fit(X, Y),
    "kernel=softmax: not supported": lambda: RandomFeatures("matern", kernel="softmax").fit(X),
    r"length_scale=\[1, 2, 3\]: expected a positive number, or one for each of the 4": lambda: (
        RandomFeatures(length_scale=[1, 2, 3]).fit(X)
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


def test_no_mass_is_reported():
    with pytest.warns(UserWarning, match="no positive kernel mass"):
        KernelRegressionRegressor("trig", n_components=8, gamma=50, random_state=0).fit(
            X, Y
        ).predict(X)


@pytest.mark.filterwarnings("ignore:.*no positive kernel mass:UserWarning")
@pytest.mark.parametrize("mechanism", ["trig", "gerf", "geom", "angular"])
def test_an_average_lies_between_the_targets(mechanism):
    """Whatever the estimated mass is: 5 projections of far rows give one near 0, of either sign."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 6))
    y = rng.normal(size=(300, 2))
    far = 2 * rng.normal(size=(300, 6))
    columns = Mechanism.of(features=mechanism).map("gaussian").width(5)
    actual = (
        KernelRegressionRegressor(mechanism, n_components=columns, gamma=1.0, random_state=0)
        .fit(x, y)
        .predict(far)
    )
    assert (actual >= y.min(0)).all()
    assert (actual <= y.max(0)).all()


# In the place of RBFSampler.


def points(n=30, d=5, seed=0):
    """Rows on the simplex, as RBFSampler's own tests take them."""
    P = np.random.RandomState(seed).random_sample(size=(n, d))
    return P / P.sum(1, keepdims=True)


@pytest.mark.parametrize(
    "mechanism, container, gamma",
    [
        ("trig", scipy.sparse.csr_array, 0.7),
        ("oprf", scipy.sparse.csr_matrix, "scale"),
        ("pois_plus", scipy.sparse.csc_array, 0.7),
        ("sderf", scipy.sparse.csr_array, "scale"),
    ],
)
def test_sparse_rows_are_dense_ones(mechanism, gamma, container, monkeypatch):
    monkeypatch.setattr("crt_exp.estimators.SPARSE_ENTRIES", 40)  # blocks of eight rows
    dense = points() * (np.random.default_rng(0).random((30, 5)) < 0.4)

    def make():
        return RandomFeatures(mechanism, n_components=12, gamma=gamma, random_state=0)

    expected = make().fit_transform(dense)
    ours = make().fit_transform(container(dense))
    assert type(ours) is np.ndarray
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-12)
    single = make().fit_transform(container(dense.astype(np.float32)))
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, expected, rtol=2e-3, atol=1e-4)


def test_columns_are_rounded_up_to_whole_projections():
    for name, columns in (("trig", 8), ("pos", 7)):
        assert RandomFeatures(name, n_components=7).fit_transform(X).shape == (len(X), columns)


def test_scale_is_that_of_rbf_sampler():
    for P in (
        [[0.0], [1.0]],
        [[2.0], [2.0]],
        np.eye(3),
    ):
        actual = RandomFeatures(gamma="scale").fit(P).gamma_
        expected = RBFSampler(gamma="scale").fit(P)._gamma
        assert actual == pytest.approx(expected)
        sparse = scipy.sparse.csr_array(P)
        theirs = RBFSampler(gamma="scale").fit(sparse)._gamma
        actual = RandomFeatures(gamma="scale").fit(sparse).gamma_
        assert actual == pytest.approx(theirs)


@pytest.mark.parametrize("mechanism", ["trig", "pois_coord"])
def test_lengths_stand_in_the_place_of_gamma(mechanism):
    P = points()
    lengths = np.array([0.5, 1.0, 2.0, 3.0, 0.1])

    def make(**options):
        return RandomFeatures(mechanism, n_components=8, random_state=0, **options)

    Z = make(length_scale=lengths).fit_transform(P)
    expected = make(gamma=0.5).fit_transform(P / lengths)
    np.testing.assert_allclose(Z, expected, rtol=1e-9, atol=1e-12)
    actual = make(length_scale=2.0).fit_transform(P)
    expected = make(gamma=1 / 8).fit_transform(P)
    np.testing.assert_allclose(actual, expected, rtol=1e-9)


def arc_cosine(X, order=1):
    size = np.linalg.norm(X, axis=1)
    theta = np.arccos((X @ X.T / np.outer(size, size)).clip(-1, 1))
    if order == 0:
        return 1 - theta / np.pi
    angular = np.sin(theta) + (np.pi - theta) * np.cos(theta)
    return np.outer(size, size) * angular / np.pi


OWN_KERNELS = {
    "matern": Matern(nu=1.5),
    "laplace": lambda X: laplacian_kernel(X, gamma=1.0),
    "rational_quadratic": RationalQuadratic(),
    "arc_cosine": arc_cosine,
    ArcCosineRF(order=0): lambda X: arc_cosine(X, order=0),
}


@pytest.mark.parametrize(
    "mechanism, sampler, n",
    [
        ("matern", "orthogonal", 10),
        ("laplace", "iid", 10),
        ("rational_quadratic", "orthogonal", 10),
        ("arc_cosine", "orthogonal", 11),
        (ArcCosineRF(order=0), "iid", 11),
    ],
    ids=str,
)
def test_kernels_of_their_own_are_unbiased(mechanism, sampler, n):
    """Over draws of the features, for rows over their lengths."""
    P = np.random.default_rng(0).normal(size=(4, 3))
    lengths = np.array([1.0, 2.0, 3.0])

    def make(seed, **options):
        return RandomFeatures(mechanism, sampler, n, random_state=seed, **options)

    drawn = np.array([make(seed, length_scale=lengths).fit_transform(P) for seed in range(200)])
    gram = drawn @ drawn.transpose(0, 2, 1)
    exact = OWN_KERNELS[mechanism](P / lengths)
    error = gram.std(0) / 200**0.5
    assert (abs(gram.mean(0) - exact) < 4.5 * error + 1e-9).all()
    assert (error < 0.06 * exact.max()).all()
    model = make(0).fit(P.astype(np.float32))
    Z = model.transform(P.astype(np.float32))
    assert Z.dtype == np.float32
    assert (model.scale_ == 1).all()


@pytest.mark.parametrize("mechanism", ["trig", "sderf", "geom_plus"])
def test_a_map_is_fitted_to_every_row_whatever_their_order(mechanism):
    P = np.random.default_rng(0).normal(size=(5000, 3))
    P[7::2] *= 3
    one, two = (
        RandomFeatures(mechanism, n_components=4, gamma=0.01, random_state=0).fit(rows)
        for rows in (P, np.random.default_rng(1).permutation(P))
    )
    actual = one.transform(P)
    expected = two.transform(P)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)
    if mechanism != "trig":
        expected = P.mean(0)
        np.testing.assert_allclose(one.center_, expected)


@pytest.mark.parametrize("n", (1, 100, 256, 300))
def test_mixture_has_as_many_centres_as_components(n):
    X = 0.5 * np.random.default_rng(0).normal(size=(150, 4))
    exact = np.exp(-0.5 * ((X[:, None] - X[None]) ** 2).sum(-1))
    phi = Mixture("gaussian", weights="unbiased", size=64)
    Z = [
        RandomFeatures(phi, n_components=n, gamma=0.5, random_state=s).fit_transform(X)
        for s in range(4)
    ]
    assert Z[0].shape == (150, n)
    estimate = np.mean([z @ z.T for z in Z], 0)
    assert abs(np.median(estimate / exact) - 1) < 0.4 / n**0.5 + 0.05
    for kernel in ("gaussian", "softmax"):
        model = KernelRegressionRegressor("mixture", n_components=n, kernel=kernel, random_state=0)
        assert np.isfinite(model.fit(X, X[:, 0]).predict(X)).all()
        assert model.params_.centres.shape == (n, 4)


@pytest.mark.parametrize("make", (RandomFeatures, RandomFeatureRidge, RandomFeatureClassifier))
@pytest.mark.parametrize("mechanism", ("mixture", Mixture("gaussian"), Mixture("gaussian", size=8)))
def test_maps_that_fix_no_scale_are_refused(make, mechanism):
    with pytest.raises(ValueError, match="ixture: fitted weights do not fix the scale"):
        make(mechanism, n_components=8).fit(np.eye(4), np.array([0, 1, 0, 1]))


@pytest.mark.parametrize("make", (RandomFeatures, KernelRegressionRegressor))
def test_maps_that_estimate_no_kernel_are_refused(make):
    with pytest.raises(ValueError, match="features=Hedgehog: estimates no kernel"):
        make(Hedgehog(), n_components=8).fit(np.eye(4), np.arange(4.0))


@pytest.mark.parametrize(
    "name, words",
    [
        ("favorpp", 'features=favorpp: favorpp is an attention; use "oprf"'),
        ("FavorPP", 'use "oprf"'),
        ("OPRF", "did you mean oprf"),
        ("FAVOR++", r'features=FAVOR\+\+: favorpp is an attention; use "oprf"'),
        ("favor++", r'features=favor\+\+: favorpp is an attention; use "oprf"'),
        ("favorsharp", 'use "sderf"'),
        ("favorp", 'use "pos"'),
        ("performer", 'use "pos"'),
        ("hrf_cluster", 'use "clustered"'),
        ("nearfar", 'nearfar is an attention; use a feature map, such as "oprf"'),
        ("linformer", 'use a feature map, such as "oprf"'),
        ("hedgehog", "features=hedgehog: estimates no kernel"),
        ("", "features='': expected a name"),
        (None, "features=None: expected a name"),
    ],
)
@pytest.mark.parametrize("make", ESTIMATORS)
def test_an_attention_names_its_feature_map(make, name, words):
    with pytest.raises(ValueError, match=words):
        make(name).fit(np.eye(4), np.array([0, 1, 0, 1]))


def test_features_of_another_width_are_refused():
    phi = Mixture("gaussian", weights="unbiased", size=8)
    x = torch.randn(5, 3)
    params = phi.fit(Statistics.of(x, x))
    with pytest.raises(ValueError, match="noise: m=9, expected 8"):
        phi.phi_q(x, orthogonal(9, 3, torch.Generator()), params)


def test_in_a_pipeline():
    """Cloned, searched over numbers of NumPy, with named columns."""
    X, y = load_iris(return_X_y=True, as_frame=True)
    model = make_pipeline(
        StandardScaler(), RandomFeatures("pos", gamma=0.1, random_state=0), RidgeClassifier()
    )
    sizes = {"randomfeatures__n_components": np.array([16, 32])}
    search = GridSearchCV(clone(model), sizes, cv=3, error_score="raise").fit(X, y)
    assert search.best_score_ > 0.8
    Z = (
        RandomFeatures("pos", n_components=np.int64(3))
        .set_output(transform="pandas")
        .fit(X)
        .transform(X)
    )
    assert list(Z.columns) == ["randomfeatures0", "randomfeatures1", "randomfeatures2"]
    assert len(Z) == len(X)


def test_a_pipeline_routes_weights_to_the_steps_that_request_them():
    X, y = load_iris(return_X_y=True)
    weight = np.arange(150) % 3
    repeated = np.repeat(np.arange(150), weight)
    features = RandomFeatures("oprf", n_components=16, random_state=0)
    model = make_pipeline(features, RandomFeatureRidge(n_components=16, random_state=0))
    expected = clone(model).fit(X[repeated], y[repeated]).predict(X)
    with config_context(enable_metadata_routing=True):
        for step in model:
            step.set_fit_request(sample_weight=True)
        actual = model.fit(X, y, sample_weight=weight).predict(X)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_maps_are_fitted_to_rows_by_weight():
    np.testing.assert_array_equal(evenly_spaced(np.array([1.0, 3.0, 2.0])), [0, 1, 1, 1, 2, 2])
    np.testing.assert_array_equal(evenly_spaced(np.full(5, 0.2)), np.arange(5))
    many = evenly_spaced(np.ones(10_000))
    np.testing.assert_array_equal(many, np.linspace(0, 9_999, 4096).astype(int))
