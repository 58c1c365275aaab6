"""Log variances of the page fig2: of each pair and their mean, and what a clamp hides."""

import joblib
import numpy as np
import pytest

from crt_exp.studies import variance_curves


def test_curves_end_in_the_mean_of_their_pairs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(joblib, "cpu_count", lambda: 1)
    draws = [*variance_curves.measure("fig2", ["studies/variance_curves.py"], {"pairs": 6, "regimes": ["normal"]})]
    arms = {draw.arm for draw in draws}
    assert {"trig", "gerf", "oprf", "geom_plus", "zero", "pois_plus margin=0.1"} <= arms and "smreg" not in arms
    chosen = [draw for draw in draws if (draw.setting, draw.arm) == ("normal, fitted to the set", "oprf")]
    curve = {draw.x: draw.value for draw in chosen if not draw.table}
    assert [*curve] == [*variance_curves.SIGMAS]
    assert curve[1.0] == pytest.approx(np.mean([draw.value for draw in chosen if draw.table == "pairs"]), abs=1e-5)


def test_an_estimate_of_zero_errs_by_the_kernel():
    zero, trig = (variance_curves.curve("normal", "fitted to the set", 20, name) for name in ("zero", "trig"))
    assert np.mean(zero["pairs"]) == pytest.approx(zero["mean"][-1]) and zero["mean"][-1] < trig["mean"][-1]


def test_a_clamped_map_shows_no_variance(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(variance_curves, "clamped", lambda phi, x, y: 1.0)
    monkeypatch.setattr(joblib, "cpu_count", lambda: 1)
    draws = [*variance_curves.measure("fig2", ["studies/variance_curves.py"], {"pairs": 3, "regimes": ["normal"]})]
    assert {draw.metric for draw in draws if draw.setting.endswith("each pair")} == {"clamped"}


@pytest.mark.parametrize("name", ["oprf", "gerf", "pois", "geom"])
def test_parameters_of_the_set_cost_variance_on_average(name):
    """The fit to each pair is an oracle: no fit to the set is below it."""
    of_set, of_pair = (variance_curves.curve("heterogen", fit, 200, name) for fit in variance_curves.FITS)
    assert of_set["mean"][-1] >= of_pair["mean"][-1]
