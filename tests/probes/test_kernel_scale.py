"""kernel-scale: every arm on few rows, errors beside the constant's, and arms left out where they do not fit."""

import numpy as np
import pytest

from sklearn.metrics.pairwise import rbf_kernel

from crt_exp import RandomFeatureRidge
from crt_exp.probes import kernel_scale
from crt_exp.probes.kernel_scale import ARMS, Parts, Residual, error, errors
from crt_exp.report.page import load

@pytest.fixture(autouse=True)
def nothing_kept():
    kernel_scale.parts_of.cache_clear()
    kernel_scale.lengths_of.cache_clear()


FEW = {name: {"of": name} for name in ARMS if name not in ("exact", "GPyTorch")}


@pytest.mark.filterwarnings("ignore")  # of iterations that end early
def test_every_arm_beats_the_constant_on_generated_rows(monkeypatch):
    monkeypatch.setattr(kernel_scale, "TESTED", 400)
    monkeypatch.setattr(kernel_scale, "fit_length_scales", lambda X, y, **_: np.full(X.shape[1], 2.0))  # in seconds
    fitted = {"with": {"lengths": "fit"}}
    arms = {**FEW, "exact": {"of": "exact", "most": 300} | fitted, "missing": {"of": "exact", "most": 299} | fitted,
            "Nystroem, fitted": {"of": "Nystroem"} | fitted}
    found = {row["arm"]: row for row in errors(arms, "generated", 300, 30, 0)}
    assert {*found} == {*arms} - {"missing"}
    assert found["trivial"]["error"] == pytest.approx(1, abs=0.02)
    assert all(row["error"] < 1 for name, row in found.items() if name != "trivial")
    assert found["Nystroem, fitted"]["seconds"] > kernel_scale.lengths_of("generated", 300, 0, False).seconds > 0
    assert 0.8 < found["ours"]["coverage"] <= 1
    assert found["ours"]["miss"] == pytest.approx(abs(found["ours"]["coverage"] - 0.95))


@pytest.mark.filterwarnings("ignore")
def test_classes_and_numbers_of_tables():
    exact = {"of": "exact", "with": {"lengths": "fit"}}
    found = {row["arm"]: row["error"] for row in errors({**FEW, "exact": exact}, "iris", 0, 16, 0)}
    assert {*found} == {*FEW} and found["ours"] < 0.3 < found["trivial"]
    parts = Parts(np.zeros((2, 1)), np.array([0.0, 2.0]), np.zeros((2, 1)), np.array([1.0, 3.0]))
    assert error(parts, np.array([1.0, 3.0])) == 0 and error(parts, np.array([2.0, 2.0])) == 1


@pytest.mark.slow
def test_arms_with_fitted_lengths_have_those_of_the_estimator():
    parts = kernel_scale.generated(300, 1)
    model = RandomFeatureRidge(n_components=32, length_scale="fit", random_state=1).fit(parts.X, parts.y)
    lengths = kernel_scale.lengths_of("generated", 300, 1, False).values
    np.testing.assert_allclose(lengths, model.features_.length_scale, rtol=1e-6)
    np.testing.assert_allclose(parts.stretched(lengths).X * lengths, parts.X, rtol=1e-5)


def test_features_of_the_residual_add_up_to_the_kernel():
    """On average, and exactly at the landmarks."""
    X = np.random.default_rng(0).normal(size=(50, 2))
    K = rbf_kernel(X, gamma=0.5)
    made = [Residual(0.5, 40, seed).fit(X) for seed in range(60)]
    products = np.array([Z @ Z.T for Z in (each.transform(X) for each in made)])
    assert abs(products.mean(0) - K).max() < 5 * products.std(0).max() / 60**0.5
    points = made[0].landmarks.components_
    found = made[0].transform(points) @ made[0].transform(X).T
    np.testing.assert_allclose(found, rbf_kernel(points, X, gamma=0.5), atol=1e-5)


def test_a_peer_that_is_not_installed_is_left_out_and_named(monkeypatch):
    monkeypatch.setattr(kernel_scale, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="GPyTorch is not installed .*: its arm is left out"):
        assert not list(errors({"GPyTorch": {"of": "GPyTorch"}}, "generated", 50, 16, 0))


@pytest.mark.slow
def test_the_variational_process(monkeypatch):
    inducing = pytest.importorskip("crt_exp.probes.inducing", reason="needs GPyTorch, a dev dependency",
                                   exc_type=ImportError)
    monkeypatch.setattr(inducing, "STEPS", 60)
    row = next(errors({"GPyTorch": {"of": "GPyTorch"}}, "generated", 500, 30, 0))
    assert row["error"] < 0.9 and row["coverage"] > 0.85


def test_the_page_names_arms_that_there_are():
    for size in load("kernel-scale")["sizes"].values():
        for part in size["parts"]:
            assert {arm["of"] for arm in part["arms"].values()} <= {*ARMS}
