"""Distances between the softmax over classes and its estimate, against scipy and against whole matrices."""

import time

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp, wasserstein_distance

from crt_exp.features import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.measure.language_laws import Distances, Estimate, distances, over_values

ARMS = ["favor", "favorp", "favorpp", "gerf", "hrf_angular", "hrf_gaussian", "hrf_cluster"]


def vectors(n=7, V=60, d=8):
    return torch.randn(n, d) / 2, torch.randn(V, d) / 2


def made(name, x, y, m=16):
    mechanism = Mechanism.of(name, m=m)
    phi = mechanism.map("softmax")
    noise, params = mechanism.noise(x.shape[1], torch.Generator().manual_seed(0)), phi.fit(Statistics.of(x, y))
    dense = phi.phi_q(x, noise, params).exp() @ phi.phi_k(y, noise, params).exp().mT
    return Estimate(phi, noise, params, y), dense


@pytest.mark.parametrize("name", ARMS)
def test_estimates_are_in_proportion_to_the_features_products(name):
    x, y = vectors()
    estimate, dense = made(name, x, y)
    share = lambda t: t / t.abs().sum(-1, keepdim=True)
    torch.testing.assert_close(share(estimate(x)), share(dense), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["favor", "favorp"])
def test_distances_are_those_of_scipy(name):
    """A query at a time, whatever the block; estimates below 0 are counted, and set to 0."""
    x, y = vectors()
    estimate, dense = made(name, x, y)
    p, q = torch.softmax(x @ y.T, -1).numpy(), dense.clamp(min=0)
    q, classes = (q / q.sum(-1, keepdim=True)).numpy(), np.arange(len(y))
    apart = np.abs(np.cumsum(p - q, 1))
    expected = Distances(np.mean([wasserstein_distance(classes, classes, a, b) for a, b in zip(p, q)]),
                         apart.max(1).mean(), np.mean([wasserstein_distance(a, b) for a, b in zip(p, q)]),
                         np.mean([ks_2samp(a, b).statistic for a, b in zip(p, q)]),
                         float((dense < 0).double().mean()), 0.0)
    assert (expected.negative > 0.05) == (name == "favor")
    for block in (3, 64):
        assert distances(x, y, estimate, block) == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_values_that_are_equal_in_both_samples_are_one_step():
    p, q = np.float32([[0.0, 0.5, 0.5, 0.0]]), np.float32([[0.0, 0.25, 0.5, 0.25]])
    assert over_values(p, q) == pytest.approx((wasserstein_distance(p[0], q[0]), ks_2samp(p[0], q[0]).statistic))
    assert over_values(p, p) == (0.0, 0.0)


def test_the_exact_law_has_no_distance_and_many_features_come_near():
    x, y = vectors()
    exact = distances(x, y, lambda part: (part @ y.T).exp())
    assert max(exact._replace(ks_values=0)) < 1e-5 and exact.ks_values < 1.5 / len(y)  # rounding moves a value by one
    few, many = (distances(x, y, made("favorp", x, y, m)[0]) for m in (8, 4096))
    assert all(b < a / 2 for a, b in zip(few[:3], many[:3])) and many.ks_values < few.ks_values


def test_queries_without_a_law_are_counted_and_left_out():
    x, y = vectors(4)
    of = lambda signs: lambda part: signs[:len(part), None] * (part @ y.T).exp()
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0])
    found = distances(x, y, of(signs))
    assert found.undefined == found.negative == 0.25 and found.ks_index < 1e-5
    with pytest.raises(ValueError, match="none of the 4 queries has an estimate above 0"):
        distances(x, y, of(-torch.ones(4)))
    with pytest.raises(ValueError, match="not finite"):
        distances(x, y, of(torch.full((4,), torch.nan)))


def test_long_vectors_do_not_overflow():
    x, y = (20 * part for part in vectors())
    assert all(np.isfinite(distances(x, y, made(name, x, y)[0])).all() for name in ARMS[:5])


@pytest.mark.slow
@pytest.mark.parametrize("name, m", [("favorp", 64), ("hrf_gaussian", 8)])
def test_time_and_memory_of_ten_thousand_classes(name, m, one_thread):
    """A hundredth of 82,430 queries: at most a hundredth of 60 s on each of 2 cores."""
    from crt_exp.times import peak, reset_peak

    x, y = vectors(824, 10_000, 200)
    x, y = x / 2, y / 2
    estimate = made(name, x[:8], y, m)[0]
    distances(x[:64], y, estimate)
    before, start = reset_peak(), time.process_time()
    distances(x, y, estimate)
    assert time.process_time() - start < 2 * 60 * 824 / 82_430 and (peak() - before) / 2**20 < 256
