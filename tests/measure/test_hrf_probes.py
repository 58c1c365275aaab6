"""Measuring tasks of hybrids: measured errors are those of the closed forms, FLOPs are counted."""

import numpy as np
import pytest
import torch

from crt_exp.features import AngularHybrid, ClusteredHybrid, Statistics, TrigRF
from crt_exp.features.complex_exponential import diagonal_by_centres
from crt_exp.mechanism import Mechanism
from crt_exp.measure import kernel
from crt_exp.measure.kernel import (QMC, Clusters, Flops, Pointwise, angles_of, at_angles, generator, log_relative_mse,
                                    sample_projections, squared_errors)

EXACT = Mechanism.of("exact")


def mechanism(features, m=4, sampler="iid", **options):
    return Mechanism.of(features=features, m=m, sampler=sampler, **{f"features.{k}": v for k, v in options.items()})


def probes():
    """At tiny size, by the name of their task."""
    return {"pointwise": Pointwise(4, [0.5, 1.0], 3, 2, 3), "qmc": QMC("wine", "standard", 1.0, 5, 2, 3),
            "clusters": Clusters(6, 0.5, 0.2, 0.7, 10, [2, 3], 5, 2),
            "flops": Flops("features", [400, 2000], 4, 1.0, 3, 2, 3)}


# ---- measured errors


@pytest.mark.parametrize("made", [mechanism("trig", 8), mechanism("smreg", 8), mechanism("angular", 4),
                                  mechanism("clustered", 8, field="complex")], ids=str)
def test_measured_errors_are_those_of_the_closed_form(made):
    phi = made.map()
    x, y = at_angles(angles_of(7), 0.6, 4, generator(3))
    params = phi.fit(Statistics.of(x, y))
    found = squared_errors(phi, made, x, y, params, groups=40, draws=100, seed=1)
    closed, error = log_relative_mse(phi, x, y, params, made.m).exp(), found.std(0) / 40**0.5
    assert ((found.mean(0) - closed).abs() < 5 * error + 1e-12).all()
    assert (error < 0.2 * closed + 1e-12).all()                            # the test has power


def test_pairs_have_their_angle_and_length():
    theta = angles_of(9)
    x, y = at_angles(theta, 1.5, 6, generator(0))
    torch.testing.assert_close((x * y).sum(-1), 2.25 * theta.cos())
    torch.testing.assert_close(y.norm(dim=-1), torch.full_like(theta, 1.5))


def test_pointwise_errors_vanish_where_the_maps_are_exact():
    of = {name: next(Pointwise(8, [1.0], 5, 2, 20).records(mechanism(name), 0)) for name in ("trig", "hyp", "angular")}
    zero = {name: [error < 1e-12 for error in r["error"]] for name, r in of.items()}
    assert zero == {"trig": [True] + [False] * 4, "hyp": [False] * 4 + [True], "angular": [True, *[False] * 3, True]}
    assert of["trig"]["largest_error"] == max(of["trig"]["error"])


def test_qmc_errors():
    task = QMC("wine", "standard", 1.0, 200, 10, 20)
    assert torch.allclose(task.data.square().sum(-1).mean().sqrt(), torch.tensor(1.0).double())
    x, y = task.random_pairs(generator(0))
    assert ((x - y).norm(dim=-1) > 0).all()
    iid, orthogonal = (next(task.records(mechanism("trig", 13, s), 0)) for s in ("iid", "orthogonal"))
    error = np.std(iid["mse_of_groups"], ddof=1) / 10**0.5
    assert abs(iid["mse"] - iid["closed_form"]) < 5 * error < 0.5 * iid["closed_form"]
    assert orthogonal["mse"] < iid["mse"] and "sampler_bias" not in iid
    assert "sampler_bias" in next(QMC("iris", "none", 1.0, 5, 1, 2).records(mechanism("trig", 4, "hadamard"), 0))


def test_clusters_have_the_losses_that_are_told():
    for agreeing in (0.0, 0.5):
        task = Clusters(6, agreeing, 0.0, 0.7, 3, [2], 5, 2)
        queries, keys = (side.unique(dim=0) for side in task.points_of(0))
        least = [float((M.size * q + k / M.size).square().sum()) for q in queries for k in keys
                 for M in [diagonal_by_centres(q, k, "real")]]
        centres, keys = (task.length * side for side in task.centres(0))
        losses = (4 * (centres[:, None] * keys).clamp(min=0)).sum(-1).flatten().tolist()       # HRF (21)
        np.testing.assert_allclose(sorted(least), sorted(losses), atol=1e-12)
        assert (max(least) > 0.1) == (agreeing > 0)
    x, _ = Clusters(6, 0.0, 0.3, 0.7, 5, [2], 5, 2).points_of(0)
    torch.testing.assert_close(x.norm(dim=-1), torch.full((10,), 0.7).double())
    assert len(x.unique(dim=0)) == 10


def test_clusters_gain_where_the_centres_are_far_and_points_near():
    task = Clusters(20, 0.0, 0.05, 1.0, 50, [10], 200, 10)
    of = {name: next(task.records(mechanism(name), 0)) for name in ("clustered", "pos", "trig")}
    assert of["clustered"]["mse"] < 0.1 * min(of["pos"]["mse"], of["trig"]["mse"])


@pytest.mark.parametrize("name", probes())
def test_studies_resume(name):
    probe = probes()[name]
    whole = list(probe.records(mechanism("angular"), 0))
    assert list(probe.records(mechanism("angular"), 0, whole[:-1])) == whole[-1:] and whole[-1]["final"]
    assert probe.metric in whole[-1] and probe.summary(whole)
    with pytest.raises(ValueError, match="attention=exact: expected an approximation"):
        next(probe.records(EXACT, 0))


# ---- FLOPs


def test_flops_are_those_of_the_formula():
    """Products count two for a multiply-add, other operations one for a number; what is done once counts nothing."""
    x, W = torch.ones(3, 4), torch.ones(5, 4)
    assert kernel.count(lambda: (x @ W.mT).exp()) == 2 * 3 * 4 * 5 + 3 * 5
    cost = lambda made, counted="features": kernel.flops(made.map(), made, made.map().fit(None), 16, counted)
    one, two = (cost(mechanism("trig", m)) for m in (8, 16))
    assert two - one == 8 * (2 * 16 + 4)                 # a projection, its cos and sin, each times h(x)
    plain, attended = (cost(mechanism("trig", 8), counted) for counted in ("features", "attention"))
    assert attended == 2 * plain + 2 * (2 * 16 * 17)
    hybrid = cost(mechanism("angular", 8, n=8))
    assert 2 * 16 * 16 + 512 < hybrid < 2 * 16 * 16 + 512 + 300            # projections, and the outer products
    assert hybrid / AngularHybrid(n=8).width(8) < cost(mechanism("trig", 144)) / TrigRF().width(144) / 3


@pytest.mark.parametrize("budget", [0.5, 1, 7, 1000])
def test_the_most_that_a_budget_allows(budget):
    assert kernel.most_within(lambda m: 3 * m - 2, budget) == (0 if budget < 1 else int((budget + 2) // 3))


def test_columns_are_the_features():
    for phi in (AngularHybrid(n=3), ClusteredHybrid()):
        x = torch.randn(6, 4, generator=generator(0))
        bound = phi.bind(sample_projections(phi, mechanism("pos"), 5, 4, generator(1), ()),
                         phi.fit(Statistics.of(x, x)))
        torch.testing.assert_close(kernel.columns(bound.phi_q(x)), bound.phi_q(x).dense().exp())


def test_equal_columns_of_the_page():
    from crt_exp.papers.hrf_kernels import SIZES

    columns = {name: Mechanism.of(features=name).map().rank(m) for name, m in SIZES["columns"].items()}
    assert columns == {**dict.fromkeys(columns, 288), "gaussian": 272}
