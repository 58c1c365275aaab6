"""Ratios of errors by angle: where an estimate has no variance, and where the estimate 0 is nearer."""

import math

import pytest
import torch

from crt_exp import drawing
from crt_exp.features import Statistics
from crt_exp.studies import angles, variance_curves


def test_poles_are_no_numbers():
    """trig has no variance at x = y, positive features none at x = -y: neither is the rounding of a closed form."""
    same, opposite = angles.DEGREES.index(0), angles.DEGREES.index(180)
    for arm in drawing.maps(angles.WITHOUT):
        values = angles.ratios(arm, 1.0)
        assert values[same] == -math.inf and values[opposite] == math.inf
        assert all(map(math.isfinite, values[same + 1:opposite]))
    zero = angles.ratios(angles.ZERO, 1.0)
    assert zero[same] == -math.inf and math.isfinite(zero[opposite])


def test_it_is_the_ratio_of_the_mean_squared_errors():
    """Of two long nearly opposite vectors the kernel is e^-4: 64 projections of trig are further from it than 0 is."""
    angle = torch.tensor(175.0).double().deg2rad()
    x, y = torch.tensor([[2.0, 0.0]]).double(), 2 * torch.stack([angle.cos(), angle.sin()])[None]
    features = drawing.feature_map("trig")
    mse = features.log_mse(x[None], y[None], features.fit(Statistics.of(x[None], y[None])), angles.M).squeeze()
    ratio = angles.ratios(angles.ZERO, 2.0)[angles.DEGREES.index(175)]
    assert ratio == pytest.approx((mse - 2 * (x * y).sum()).item()) and ratio > 0


def test_fig1_says_where_the_estimate_zero_errs_by_less():
    """Its square is the kernel's, of which one projection of PosRF has e^s - 1 times as much variance."""
    zero, lengths = torch.tensor(variance_curves.gains(8)["zero"]), torch.arange(1, 101).double()
    assert torch.allclose(zero.double(), -torch.expm1(lengths).log(), rtol=1e-5)
