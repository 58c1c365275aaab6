"""Log variances: of each pair and their mean, what a clamp hides, where an estimate has none, and the estimate 0."""

import math

import numpy as np
import pytest
import torch

from crt_exp import drawing
from crt_exp.features import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.oldreport import page
from crt_exp.measure import grid, variance
from crt_exp.measure.variance import FITS, Gain, Ratio, Variance


def curve(name, regime="normal", fit="set", pairs=20, sigmas=(0.5, 1.0)):
    return list(Variance(regime, pairs, sigmas, "gaussian", fit).records(Mechanism.of(features=name), 0))


def part(fit):
    """Of the page fig2, of a few pairs of one regime and some of its maps."""
    given = page.load("fig2")["sizes"]["small"]["parts"][0]
    listed = grid.expanded(given["arms"])
    assert len(listed) == 16 and "smreg" not in listed
    arms = {name: listed[name] for name in ("trig", "oprf", "pois_plus margin=0.1")}
    return given | {"arms": arms} | {"workers": 1, "probe": given["probe"] | {"pairs": 6},
                    "settings": {name: each for name, each in given["settings"].items()
                                 if each["regime"] == "normal" and each["fit"] == fit}}


def test_curves_end_in_the_mean_of_their_pairs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draws = [*grid.measure("fig2", ["measure/variance.py"], {"parts": [part("set")]})]
    assert {draw.arm for draw in draws} == {"trig", "oprf", "pois_plus margin=0.1", "zero"}
    for arm in ("oprf", "zero"):
        chosen = [draw for draw in draws if (draw.setting, draw.arm) == ("normal, fitted to the set", arm)]
        means = {draw.x: draw.value for draw in chosen if not draw.table}
        assert [*means] == [round(0.1 * i, 1) for i in range(1, 11)]
        assert means[1.0] == pytest.approx(np.mean([draw.value for draw in chosen if draw.table == "pairs"]), abs=1e-5)


def test_an_estimate_of_zero_errs_by_the_kernel():
    trig = curve("trig")[-1]
    x, y = variance.normal(20, 64, torch.Generator().manual_seed(0))
    assert np.mean(trig["zero_of_pairs"]) == pytest.approx(trig["zero"]) and trig["zero"] < trig["log_variance"]
    assert trig["zero_of_pairs"] == pytest.approx((-(x - y).square().sum(-1)).tolist())


def test_a_clamped_map_shows_no_variance(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(variance, "clamped", lambda phi, x, y: 1.0)
    draws = [*grid.measure("fig2", ["measure/variance.py"], {"parts": [part("pair")]})]
    assert {draw.metric for draw in draws if draw.arm != "zero"} == {"clamped"}


def test_rates_at_the_end_of_their_range_are_seen():
    """Poisson features of orthogonal vectors have no rate: it is set to the least one."""
    x, y = torch.eye(4).double()[:2], torch.eye(4).double()[2:]
    assert variance.clamped(drawing.feature_map("pois"), x, y) == 1.0
    assert variance.clamped(drawing.feature_map("oprf"), x, y) == 0.0


@pytest.mark.parametrize("name", ["oprf", "gerf", "pois", "geom"])
def test_parameters_of_the_set_cost_variance_on_average(name):
    """The fit to each pair is an oracle: no fit to the set is below it."""
    of_set, of_pair = (curve(name, "heterogen", fit, 200)[-1] for fit in ("set", "pair"))
    assert [*FITS] == ["pair", "set"] and of_set["log_variance"] >= of_pair["log_variance"]


def test_resizing_is_of_mnist():
    with pytest.raises(ValueError, match="task.resize is of the regime mnist, not of normal"):
        Variance("normal", 5, [1.0], "gaussian", resize={"mode": "area"})


# ---- by angle and length


def ratios(name, length, degrees=5):
    return next(Ratio(length, degrees, 64).records(Mechanism.of(features=name), 0))


def test_poles_are_no_numbers():
    """trig has no variance at x = y, positive features none at x = -y: neither is the rounding of a closed form."""
    for arm in grid.Part.read(page.load("performers-fig2")["sizes"]["small"]["parts"][0]).arms:
        row = ratios(arm, 1.0)
        same, opposite = row["angle"].index(0), row["angle"].index(180)
        assert row["log_ratio"][same] is None and row["log_ratio"][opposite] is None
        assert all(map(math.isfinite, row["log_ratio"][same + 1:opposite]))
        assert row["zero"][same] is None and math.isfinite(row["zero"][opposite])


def test_it_is_the_ratio_of_the_mean_squared_errors():
    """Of two long nearly opposite vectors the kernel is e^-4: 64 projections of trig are further from it than 0 is."""
    angle = torch.tensor(175.0).double().deg2rad()
    x, y = torch.tensor([[2.0, 0.0]]).double(), 2 * torch.stack([angle.cos(), angle.sin()])[None]
    features = drawing.feature_map("trig")
    mse = features.log_mse(x[None], y[None], features.fit(Statistics.of(x[None], y[None])), 64).squeeze()
    row = ratios("pos", 2.0)
    ratio = row["zero"][row["angle"].index(175)]
    assert ratio == pytest.approx((mse - 2 * (x * y).sum()).item()) and ratio > 0


def test_fig1_says_where_the_estimate_zero_errs_by_less():
    """Its square is the kernel's, of which one projection of PosRF has e^s - 1 times as much variance."""
    row, lengths = next(Gain(8, 100).records(Mechanism.of(features="oprf"), 0)), torch.arange(1, 101).double()
    assert torch.allclose(torch.tensor(row["zero"]).double(), -torch.expm1(lengths).log(), rtol=1e-5)
    assert row["sum"] == lengths.tolist() and max(row["gain"]) < 0
