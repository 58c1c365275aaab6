"""The exact variance of coupled rows, against simulation and high-precision sums."""

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch
from helpers.coupled_variance import (
    ensemble_log_variance,
    positive_covariance,
    trig_covariance,
)
from helpers.covering import in_turn
from helpers.sampled_means import check_mean
from helpers.seeds import seeded
from scipy.special import hyp0f1
from torch.testing import assert_close

from crt_exp import samplers
from crt_exp.features import GERF, OPRF, SMREG, HypRF, PoisRF, PosRF, Statistics, TrigRF

SAMPLERS = {"iid": samplers.iid, "orthogonal": samplers.orthogonal, "simplex": samplers.simplex}
COUPLED = [
    PosRF(),
    HypRF(),
    OPRF("gaussian"),
    OPRF(antithetic=True),
    TrigRF("gaussian"),
    GERF("gaussian", s=-1, A=0.02 + 0.03j),
    GERF(s=1, A=-0.1 + 0.05j),
    SMREG(),
    SMREG(antithetic=True),
]


def pair(d, scale=0.4, seed=0):
    """One pair of vectors (d,), float64."""
    return torch.randn(2, d, generator=seeded(seed), dtype=torch.float64) * scale


def estimates(phi, x, y, params, m, draws, ensemble, seed=0):
    """hat K of one pair, (draws,), float64."""
    noise = SAMPLERS[ensemble](m, len(x), seeded(seed), batch=(draws,), dtype=torch.float64)
    fx = phi.phi_q(x[None], noise, params).exp()
    fy = phi.phi_k(y[None], noise, params).exp()
    return (fx * fy).sum((-1, -2))


def fit(phi, x, y):
    return phi.fit(Statistics.of(x[None], y[None]))


# --- coupled rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "phi, ensemble, size",
    in_turn(COUPLED, ["orthogonal", "simplex"], [(5, 3), (2, 2)], times=2),
    ids=str,
)
def test_exact_variance_of_coupled_rows(phi, ensemble, size):
    """Sharp enough to tell the exact variance from the independent one, where those differ by much."""
    m, d = size
    x, y = pair(d, seed=4)
    params = fit(phi, x, y)
    estimate = estimates(phi, x, y, params, m, 20_000, ensemble)
    square = (estimate - phi.log_kernel(x, y).exp()).square()
    exact = ensemble_log_variance(phi, x, y, params, m, ensemble).exp()
    error = check_mean(square, exact)
    assert error < 0.09 * exact  # the test has power


@pytest.mark.parametrize("s, d", [(1e-3, 64), (0.7, 1), (30.0, 2), (500.0, 5)])
def test_positive_covariance_is_1f1(s, d):
    """1F1(d; d/2; s/2) e^-s - 1, to 300 digits; a difference of 1 and near 1 where s is small."""
    getcontext().prec = 300
    z = Decimal(s) / 2
    term = Decimal(1)
    total = Decimal(1)
    for k in range(2000):
        term = term * (d + k) * z / ((Decimal(d) / 2 + k) * (k + 1))
        total += term
    exact = float(total * (-Decimal(s)).exp() - 1)
    actual = positive_covariance(torch.tensor(s, dtype=torch.float64), d).item()
    assert actual == pytest.approx(exact, rel=1e-11)


@pytest.mark.parametrize("d", [2, 33])
def test_covariance_by_two_dimensional_quadrature(d):
    """Over both chi lengths: the one-dimensional average is right for both signs and any cosine."""
    node, weight = np.polynomial.legendre.leggauss(120)
    r = (node + 1) / 2 * (d**0.5 + 9)
    weight = weight * np.exp((d - 1) * np.log(r / d**0.5) - r**2 / 2 + d / 2)
    weights = np.outer(weight, weight) / weight.sum() ** 2
    for s in (0.3, 4.0):
        for cosine in (0.0, -1 / (d - 1), 0.3):
            square = {}
            for c in (cosine, -cosine):
                square[c] = r[:, None] ** 2 + r**2 + 2 * c * np.outer(r, r)

            def moment(sign, c, s=s, square=square):
                return (weights * hyp0f1(d / 2, sign * s / 4 * square[c])).sum()

            s_s = torch.tensor(s, dtype=torch.float64)
            positive = (1 + positive_covariance(s_s, d, cosine)).item() * math.exp(s)
            expected = moment(1, cosine)
            assert positive == pytest.approx(expected, rel=1e-9)
            trig = (moment(-1, cosine) + moment(-1, -cosine)) / 2
            actual = trig_covariance(s_s, d, cosine).item() + math.exp(-s)
            assert actual == pytest.approx(trig, abs=1e-9)


def test_ensembles_are_ordered_and_stable():
    """simplex <= orthogonal <= iid for positive features; finite logs where variances overflow;
    empty and blocks cut."""
    x, y = torch.randn(2, 30, 8, generator=seeded(), dtype=torch.float64)
    for phi in (PosRF(), OPRF()):
        params = phi.fit(Statistics.of(x, y))
        iid = ensemble_log_variance(phi, x, y, params, 20, "iid")
        orthogonal = ensemble_log_variance(phi, x, y, params, 20, "orthogonal")
        simplex = ensemble_log_variance(phi, x, y, params, 20, "simplex")
        expected = phi.log_variance(x, y, params) - math.log(20)
        assert_close(iid, expected)
        assert (simplex <= orthogonal + 1e-12).all()
        assert (orthogonal <= iid + 1e-12).all()
        assert ensemble_log_variance(phi, 20 * x, 20 * y, params, 8, "orthogonal").isfinite().all()
    assert ensemble_log_variance(TrigRF(), 10 * x, 10 * y, (), 8, "orthogonal").isfinite().all()
    assert ensemble_log_variance(PosRF(), x, -x, (), 8, "simplex").eq(-torch.inf).all()
    orthogonal = ensemble_log_variance(HypRF(), x, y, (), 20, "orthogonal")
    simplex = ensemble_log_variance(HypRF(), x, y, (), 20, "simplex")
    # pairs +-omega: simplex rows also meet at the opposite cosine
    assert (orthogonal <= simplex).all()
    matrix = ensemble_log_variance(PosRF(), x[:, None], y[None], (), 8, "orthogonal")
    actual = matrix.diagonal()
    expected = ensemble_log_variance(PosRF(), x, y, (), 8, "orthogonal")
    assert_close(actual, expected)


def test_refused_ensembles_and_maps():
    x, y = pair(4, 20.0)
    with pytest.raises(ValueError, match="ensemble="):
        ensemble_log_variance(PosRF(), x, y, m=4, ensemble="sobol")
    with pytest.raises(ValueError, match="PoisRF"):
        ensemble_log_variance(PoisRF(rate=1), x, y, PoisRF(rate=1).fit(None), 4, "orthogonal")
