"""Measuring tasks of kernels: measured errors are those of the closed forms, FLOPs are counted; distances between the
softmax over words and its estimate, against scipy and against whole matrices; log variances."""

import math

import numpy as np
import pytest
import torch
from helpers.sampled_means import check_mean
from scipy.optimize import minimize_scalar
from scipy.stats import wasserstein_distance

from crt_exp.experiments.measure import kernel, sampling
from crt_exp.experiments.measure.kernel import (
    QMC,
    Clusters,
    Flops,
    Pointwise,
    estimate_at_angles,
    generator,
)
from crt_exp.experiments.measure.sampling import ClassDistributions, distances, estimator
from crt_exp.experiments.measure.variance import (
    Variance,
    VarianceByAngle,
    VarianceByLength,
    sample_pairs,
)
from crt_exp.features import AngularHybrid, Statistics, TrigRF
from crt_exp.mechanism import Mechanism

METHODS = ["favor", "favorp", "favorpp", "gerf", "hrf_angular", "hrf_gaussian", "hrf_cluster"]


def mechanism(features, m=4, sampler="iid", **options):
    named = {f"features.{key}": value for key, value in options.items()}
    return Mechanism.of(features=features, m=m, sampler=sampler, **named)


def probes():
    """At tiny size, by the name of their task."""
    return {
        "pointwise": Pointwise(4, [0.5, 1.0], 3, 2, 3),
        "qmc": QMC("wine", "standard", 1.0, 5, 2, 3),
        "clusters": Clusters(6, 0.5, 0.2, 0.7, 10, [2, 3], 5, 2),
        "flops": Flops("features", [400, 2000], 4, 1.0, 3, 2, 3),
    }


# ---- measured errors


@pytest.mark.parametrize(
    "made",
    [
        mechanism("trig", 8),
        mechanism("smreg", 8),
        mechanism("angular", 4),
        mechanism("clustered", 8, field="complex"),
    ],
    ids=str,
)
def test_measured_errors_are_those_of_the_closed_form(made):
    _, estimate = estimate_at_angles(made, 7, 0.6, 4, generator(3))
    squared = estimate.squared_errors(groups=40, draws=100, seed=1)
    closed = estimate.log_relative_mse.exp()
    error = check_mean(squared, closed)
    assert (error < 0.2 * closed + 1e-12).all()  # the test has power


def test_pointwise_errors_vanish_where_the_maps_are_exact():
    zero = {}
    for name in ("trig", "hyp", "angular"):
        record = next(Pointwise(8, [1.0], 5, 2, 20).records(mechanism(name), 0))
        zero[name] = [error < 1e-12 for error in record["error"]]
        assert record["largest_error"] == max(record["error"])
    expected = {
        "trig": [True] + [False] * 4,
        "hyp": [False] * 4 + [True],
        "angular": [True, *[False] * 3, True],
    }
    assert zero == expected


@pytest.mark.parametrize(
    "name, variance",
    [
        ("pos", lambda z, apart: z.exp() - 1),
        ("trig", lambda z, apart: apart.exp() * (1 - (-apart).exp()) ** 2 / 2),
    ],
)
def test_pointwise_closed_forms(name, variance):
    """Relative variances of one projection, by |x + y|^2 and |x - y|^2 (Performers, Lemmas 1 and 2)."""
    task = Pointwise(8, [0.7], 5, 2, 3)
    record = next(task.records(mechanism(name, 6), 0))
    cosine = torch.tensor(record["theta"]).double().cos()
    z = 2 * 0.7**2 * (1 + cosine)
    apart = 2 * 0.7**2 * (1 - cosine)
    expected = (variance(z, apart) / 6).clamp(min=0).sqrt()
    np.testing.assert_allclose(record["closed_form"], expected, rtol=1e-6, atol=1e-7)


def test_qmc_errors():
    task = QMC("wine", "standard", 1.0, 200, 10, 20)
    actual = task.data.square().sum(-1).mean().sqrt()
    expected = torch.tensor(1.0).double()
    assert torch.allclose(actual, expected)
    x, y = task.random_pairs(generator(0))
    assert ((x - y).norm(dim=-1) > 0).all()
    iid = next(task.records(mechanism("trig", 13, "iid"), 0))
    orthogonal = next(task.records(mechanism("trig", 13, "orthogonal"), 0))
    error = np.std(iid["mse_of_groups"], ddof=1) / 10**0.5
    difference = abs(iid["mse"] - iid["closed_form"])
    assert difference < 5 * error < 0.5 * iid["closed_form"]
    assert orthogonal["mse"] < iid["mse"]
    assert "sampler_bias" not in iid
    iris = QMC("iris", "none", 1.0, 5, 1, 2)
    hadamard = next(iris.records(mechanism("trig", 4, "hadamard"), 0))
    assert "sampler_bias" in hadamard


@pytest.mark.parametrize("name", probes())
def test_studies_resume(name):
    probe = probes()[name]
    whole = list(probe.records(mechanism("angular"), 0))
    actual = list(probe.records(mechanism("angular"), 0, whole[:-1]))
    assert actual == whole[-1:]
    assert whole[-1]["final"]
    assert probe.metric in whole[-1]
    assert probe.summary(whole)
    with pytest.raises(ValueError, match="attention=exact: expected an approximation"):
        next(probe.records(Mechanism.of("exact"), 0))


# ---- FLOPs


def test_flops_are_those_of_the_formula():
    """Products count two for a multiply-add, other operations one for a number; what is done once counts nothing."""
    x = torch.ones(3, 4)
    W = torch.ones(5, 4)
    actual = kernel.count(lambda: (x @ W.mT).exp())
    expected = 2 * 3 * 4 * 5 + 3 * 5
    assert actual == expected

    def cost(made, counted="features"):
        return kernel.flops(made, made.map().fit(None), 16, counted)

    one = cost(mechanism("trig", 8))
    two = cost(mechanism("trig", 16))
    assert two - one == 8 * (2 * 16 + 4)  # a projection, its cos and sin, each times h(x)
    attended = cost(mechanism("trig", 8), "attention")
    assert attended == 2 * one + 2 * (2 * 16 * 17)
    hybrid = cost(mechanism("angular", 8, n=8))
    assert (
        2 * 16 * 16 + 512 < hybrid < 2 * 16 * 16 + 512 + 300
    )  # projections, and the outer products
    assert (
        hybrid / AngularHybrid(n=8).width(8)
        < cost(mechanism("trig", 144)) / TrigRF().width(144) / 3
    )


def test_the_most_that_a_budget_allows():
    for budget, most in ((0.5, 0), (1, 1), (7, 3), (1000, 334)):
        actual = kernel.most_within(lambda m: 3 * m - 2, budget)
        assert actual == most


# ---- the softmax over words


def vectors(n=7, V=60, d=8):
    return torch.randn(n, d) / 2, torch.randn(V, d) / 2


def estimated(name, x, y, m=16):
    mechanism = Mechanism.of(name, m=m)
    phi = mechanism.map("softmax")
    noise = mechanism.noise(x.shape[1], torch.Generator().manual_seed(0))
    params = phi.fit(Statistics.of(x, y))
    queries = phi.phi_q(x, noise, params).exp()
    keys = phi.phi_k(y, noise, params).exp()
    return estimator(phi, noise, params, y), queries @ keys.mT


@pytest.mark.parametrize("name", METHODS)
def test_estimates_are_in_proportion_to_the_features_products(name):
    x, y = vectors()
    estimate, dense = estimated(name, x, y)

    def share(t):
        return t / t.abs().sum(-1, keepdim=True)

    actual = share(estimate(x))
    torch.testing.assert_close(actual, share(dense), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["favor", "favorp"])
def test_distances_are_those_of_scipy(name):
    """A query at a time, whatever the block; estimates below 0 are counted, and set to 0."""
    x, y = vectors()
    estimate, dense = estimated(name, x, y)
    p = torch.softmax(x @ y.T, -1).numpy()
    q = dense.clamp(min=0)
    q = (q / q.sum(-1, keepdim=True)).numpy()
    classes = np.arange(len(y))
    apart = np.abs(np.cumsum(p - q, 1))
    expected = {
        "w1": np.mean([wasserstein_distance(classes, classes, a, b) for a, b in zip(p, q)]),
        "ks": apart.max(1).mean(),
        "negative": float((dense < 0).double().mean()),
    }
    assert (expected["negative"] > 0.05) == (name == "favor")
    for block in (3, 64):
        assert distances(x, y, estimate, block) == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_the_exact_softmax_has_no_distance_and_many_features_come_near():
    x, y = vectors()
    exact = distances(x, y, lambda part: (part @ y.T).exp())
    assert max(exact.values()) < 1e-5
    with pytest.raises(ValueError, match="expected finite values"):
        distances(x, y, lambda part: (part @ y.T) * torch.nan)
    few = distances(x, y, estimated("favorp", x, y, 8)[0])
    many = distances(x, y, estimated("favorp", x, y, 4096)[0])
    for name in ("w1", "ks"):
        assert many[name] < few[name] / 2


def test_the_task(monkeypatch):
    """Hybrids take fewer projections; attention=exact has the distributions that know no query."""

    class Task:
        unigram = np.array([0.5, *[0.5 / 59] * 59])

    x, y = vectors(40)
    records = [{"loss": 4.0, "unigram_loss": 6.0}]
    monkeypatch.setattr(sampling, "vectors_of", lambda start: (Task(), x, y))
    monkeypatch.setattr(sampling, "read_records", lambda path: records)
    task = ClassDistributions("run", 5, [16, 64])
    asked = []
    with_projections = Mechanism.with_projections

    def recorded(self, m):
        asked.append(m)
        return with_projections(self, m)

    monkeypatch.setattr(Mechanism, "with_projections", recorded)
    rows = {}
    for name in ("favorp", "hrf_angular", "exact"):
        rows[name] = [*task.rows(Mechanism.of(name), 0)]
    for name in ("favorp", "hrf_angular"):
        assert [row["m"] for row in rows[name]] == [16, 64]
    assert asked == [16, 64, 2, 8]
    assert rows["exact"][0]["loss"] == 4.0
    assert [row["method"] for row in rows["exact"][1:]] == [
        "uniform",
        "uniform",
        "unigram",
        "unigram",
    ]


# ---- variances


@pytest.mark.parametrize("name", ["pos", "oprf"])
def test_poles_are_no_numbers(name):
    """Trigonometric features have no variance at x = y, positive features none at x = -y."""
    rows = VarianceByAngle(1.0, 5).rows(Mechanism.of(features=name), 0)
    ratios = {row["angle"]: row["log_ratio"] for row in rows}
    actual = [angle for angle, ratio in ratios.items() if ratio is None]
    assert actual == [-180, 0, 180]
    for ratio in ratios.values():
        if ratio is not None:
            assert math.isfinite(ratio)


def test_the_ratio_is_that_of_the_closed_forms():
    """One projection at length 1 and 90 degrees: |z|^2 = 2, exp(x.y) = 1 (Performers, Lemma 2)."""
    ratios = {}
    for row in VarianceByAngle(1.0, 90).rows(Mechanism.of(features="pos"), 0):
        ratios[row["angle"]] = row["log_ratio"]
    trig = math.exp(2) * (1 - math.exp(-2)) ** 2 / 2
    pos = math.exp(2) - 1
    assert ratios[90] == pytest.approx(math.log(trig / pos))


def test_variances_of_pairs_are_those_of_the_closed_forms():
    """Of the Gaussian kernel; the last record has each pair, and each has their mean and standard deviation."""
    x, y = sample_pairs("normal", 6, 3)
    for name, variance in (
        ("pos", lambda z, apart: (-apart).exp() * (z.exp() - 1)),
        ("trig", lambda z, apart: (1 - (-apart).exp()) ** 2 / 2),
    ):
        task = Variance("normal", 6, [0.1, 0.2], "gaussian")
        records = [*task.records(Mechanism.of(features=name), 3)]
        for record in records:
            z = (record["sigma"] * (x + y)).square().sum(-1)
            apart = (record["sigma"] * (x - y)).square().sum(-1)
            pairs = variance(z, apart).log()
            actual = [
                record["log_variance"],
                record["log_variance_std"],
                *record.get("of_pairs", pairs),
            ]
            expected = [pairs.mean(), pairs.std(), *pairs]
            np.testing.assert_allclose(actual, expected, rtol=1e-6)
        assert ["of_pairs" in record for record in records] == [False, True]


@pytest.mark.parametrize("name", ["oprf", "gerf", "pois", "geom"])
def test_parameters_of_the_set_cost_variance_on_average(name):
    """The fit to each pair is an oracle: no fit to the set is below it."""
    log_variance = {}
    for fit in ("set", "pair"):
        task = Variance("heterogen", 50, [1.0], "gaussian", fit)
        record = next(task.records(Mechanism.of(features=name), 0))
        log_variance[fit] = record["log_variance"]
    assert log_variance["set"] > log_variance["pair"]


def test_the_gain_of_the_best_parameter_at_every_length():
    """For x = y, s = |x + y|^2: the least variance over A of features exp(A w^2 + B w x - x^2 / 2), B^2 = 1 - 4 A."""

    def variance(A, s, d=8):
        B = 1 - 4 * A
        C = 1 - 8 * A
        moment = B**d * C ** (-d / 2) * math.exp(2 * s * B / C - s / 2)
        return moment - math.exp(s / 2)

    gains = {}
    for name in ("pos", "oprf"):
        rows = VarianceByLength(8, 9).rows(Mechanism.of(features=name), 0)
        gains[name] = {row["sum"]: row["gain"] for row in rows}
    assert gains["pos"] == dict.fromkeys(range(1, 10), 0)
    expected = {}
    for s in range(1, 10):
        least = minimize_scalar(variance, bounds=(-5, 0), args=(s,), method="bounded")
        expected[s] = math.log(least.fun / variance(0, s))
    assert gains["oprf"] == pytest.approx(expected, rel=1e-5)
