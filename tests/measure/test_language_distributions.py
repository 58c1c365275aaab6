"""Distances between the softmax over words and its estimate, against scipy and against whole matrices; their task."""

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance

from crt_exp.features import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.measure import sampling
from crt_exp.measure.sampling import ClassDistributions, distances, estimator

METHODS = ["favor", "favorp", "favorpp", "gerf", "hrf_angular", "hrf_gaussian", "hrf_cluster"]


def vectors(n=7, V=60, d=8):
    return torch.randn(n, d) / 2, torch.randn(V, d) / 2


def made(name, x, y, m=16):
    mechanism = Mechanism.of(name, m=m)
    phi = mechanism.map("softmax")
    noise, params = mechanism.noise(x.shape[1], torch.Generator().manual_seed(0)), phi.fit(Statistics.of(x, y))
    dense = phi.phi_q(x, noise, params).exp() @ phi.phi_k(y, noise, params).exp().mT
    return estimator(phi, noise, params, y), dense


@pytest.mark.parametrize("name", METHODS)
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
    expected = {"w1": np.mean([wasserstein_distance(classes, classes, a, b) for a, b in zip(p, q)]),
                "ks": apart.max(1).mean(), "negative": float((dense < 0).double().mean())}
    assert (expected["negative"] > 0.05) == (name == "favor")
    for block in (3, 64):
        assert distances(x, y, estimate, block) == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_the_exact_softmax_has_no_distance_and_many_features_come_near():
    x, y = vectors()
    assert max(distances(x, y, lambda part: (part @ y.T).exp()).values()) < 1e-5
    few, many = (distances(x, y, made("favorp", x, y, m)[0]) for m in (8, 4096))
    assert all(many[name] < few[name] / 2 for name in ("w1", "ks"))


@pytest.mark.parametrize("value", [-1.0, torch.nan])
def test_queries_without_a_distribution_are_an_error(value):
    x, y = vectors(4)
    with pytest.raises(ValueError, match="expected finite values"):
        distances(x, y, lambda part: torch.full((len(part), len(y)), value))


def test_long_vectors_do_not_overflow():
    x, y = (20 * part for part in vectors())
    assert all(made(name, x, y)[0](x).isfinite().all() for name in METHODS[:5])


def test_the_task(monkeypatch):
    """Hybrids take fewer projections; attention=exact has the distributions that know no query."""
    class Task:
        unigram = np.array([0.5, *[0.5 / 59] * 59])
    monkeypatch.setattr(sampling, "vectors_of", lambda start: (Task(), *vectors(40)))
    monkeypatch.setattr(sampling, "read_records", lambda path: [{"loss": 4.0, "unigram_loss": 6.0}])
    task = ClassDistributions("run", 5, [16, 64])
    asked, with_projections = [], Mechanism.with_projections
    monkeypatch.setattr(Mechanism, "with_projections", lambda self, m: [asked.append(m), with_projections(self, m)][1])
    rows = {name: [*task.rows(Mechanism.of(name), 0)] for name in ("favorp", "hrf_angular", "exact")}
    assert [row["m"] for row in rows["favorp"]] == [row["m"] for row in rows["hrf_angular"]] == [16, 64]
    assert asked == [16, 64, 2, 8]
    assert rows["exact"][0]["loss"] == 4.0
    assert [row["method"] for row in rows["exact"][1:]] == ["uniform", "uniform", "unigram", "unigram"]
