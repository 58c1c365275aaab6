"""Log variances: of each pair and their mean, and where an estimate has none."""

import math

import numpy as np
import pytest
import torch

from crt_exp.measure.variance import FITS, Variance, VarianceByAngle, VarianceByLength
from crt_exp.mechanism import Mechanism


def curve(name, regime="normal", fit="set", pairs=20, sigmas=(0.5, 1.0)):
    return list(Variance(regime, pairs, sigmas, "gaussian", fit).records(Mechanism.of(features=name), 0))


@pytest.mark.parametrize("fit", FITS)
def test_curves_end_in_the_mean_of_their_pairs(fit):
    first, last = curve("oprf", fit=fit)
    assert "of_pairs" not in first and len(last["of_pairs"]) == 20
    assert last["log_variance"] == pytest.approx(np.mean(last["of_pairs"]))


@pytest.mark.parametrize("name", ["oprf", "gerf", "pois", "geom"])
def test_parameters_of_the_set_cost_variance_on_average(name):
    """The fit to each pair is an oracle: no fit to the set is below it."""
    of_set, of_pair = (curve(name, "heterogen", fit, 200)[-1] for fit in ("set", "pair"))
    assert of_set["log_variance"] >= of_pair["log_variance"]


def test_resizing_is_of_mnist():
    with pytest.raises(ValueError, match="task.resize: only for task.regime=mnist"):
        Variance("normal", 5, [1.0], "gaussian", resize={"mode": "area"})


@pytest.mark.parametrize("name", ["pos", "hyp", "oprf"])
def test_poles_are_no_numbers(name):
    """Trigonometric features have no variance at x = y, positive features none at x = -y."""
    rows = VarianceByAngle(1.0, 5).rows(Mechanism.of(features=name), 0)
    ratios = {row["angle"]: row["log_ratio"] for row in rows}
    assert [angle for angle, ratio in ratios.items() if ratio is None] == [-180, 0, 180]
    assert all(math.isfinite(ratio) for ratio in ratios.values() if ratio is not None)


def test_the_ratio_is_that_of_the_closed_forms():
    """One projection at length 1 and 90 degrees: |z|^2 = 2, exp(x.y) = 1 (Performers, Lemma 2)."""
    row = next(row for row in VarianceByAngle(1.0, 90).rows(Mechanism.of(features="pos"), 0) if row["angle"] == 90)
    trig, pos = math.exp(2) * (1 - math.exp(-2)) ** 2 / 2, math.exp(2) - 1
    assert row["log_ratio"] == pytest.approx(math.log(trig / pos))


def test_oprf_has_less_variance_than_favor_plus_at_every_length():
    rows = [*VarianceByLength(8, 100).rows(Mechanism.of(features="oprf"), 0)]
    assert [row["sum"] for row in rows] == [*range(1, 101)]
    assert torch.tensor([row["gain"] for row in rows]).diff().max() < 0 and rows[0]["gain"] < 0
