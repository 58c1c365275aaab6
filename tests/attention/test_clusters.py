"""Layers with clustered maps: the fit of their clusters, its state and its gain."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.hybrid_cases import draw, vectors
from helpers.kernel_estimates import estimate_kernel
from helpers.module_cases import state
from helpers.nearfar_cases import at_tokens
from helpers.seeds import seeded
from torch.testing import assert_close

from crt_exp import samplers
from crt_exp.attention import RandomFeatureAttention, attention
from crt_exp.features import (
    CERF,
    AutoRF,
    ClusteredHybrid,
    Mixture,
    PosRF,
    Statistics,
    TrigRF,
)


def test_clusters_are_found_and_their_bases_exact_there():
    """Points at two centres each: where M may be complex, no pair has variance."""
    r = vectors(2, 3)
    t = vectors(2, 3, seed=1)
    x = r.repeat(5, 1)
    y = t.repeat(7, 1)
    phi = ClusteredHybrid(field="complex", by="centres")
    params = phi.fit(Statistics.of(x, y))
    assert (phi.log_relative_variance(x[:, None], y[None], params) < -50).all()
    noise = draw(phi, 1, 3)
    found = estimate_kernel(phi, x, y, noise, params)
    expected = (x @ y.mT).exp()
    assert_close(found, expected)
    actual = params.queries.sort(0).values
    expected = r.sort(0).values
    assert_close(actual, expected)


def test_clusters_gain_on_clustered_vectors_and_one_pair_is_a_single_base():

    def cluster(seed):
        return vectors(40, 8, seed=seed, scale=0.1) + 1.2 * vectors(1, 8, seed=10 + seed)

    x = torch.cat([cluster(0), cluster(1)])
    y = torch.cat([cluster(2), cluster(3)])

    def mean(phi):
        params = phi.fit(Statistics.of(x, y))
        return phi.log_variance(x[:, None], y[None], params).exp().mean()

    actual = mean(ClusteredHybrid(field="complex"))
    assert actual < 0.2 * min(mean(PosRF()), mean(TrigRF()))
    one = ClusteredHybrid(queries=1, keys=1)
    plain = CERF(field="real")
    params = one.fit(Statistics.of(x, y))
    alone = plain.fit(Statistics.of(x, y))
    noise = draw(one, 5, 8)
    actual = one.phi_q(x, noise, params).exp()
    expected = plain.phi_q(x, noise, alone).exp()
    assert_close(actual, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "phi, parts",
    [(ClusteredHybrid(queries=3, keys=2), 1), (ClusteredHybrid(field="complex"), 2)],
    ids=repr,
)
def test_a_token_fills_the_blocks_of_its_own_cluster(phi, parts):
    x = vectors(12, 3)
    y = vectors(9, 3, seed=1)
    params = phi.fit(Statistics.of(x, y))
    noise = draw(phi, 4, 3)
    cases = [
        (phi.phi_q(x, noise, params), phi.keys),
        (phi.phi_k(y, noise, params), phi.queries),
    ]
    for features, blocks in cases:
        assert (features.log_scale.isfinite().sum(-1) == blocks * 4 * parts).all()


def clustered(**options):
    return RandomFeatureAttention(ClusteredHybrid(), samplers.orthogonal, 6, 2, 4, **options)


def few(length=20):
    return torch.randn(3, 2, 2, length, 4, generator=seeded())


@pytest.mark.parametrize("options", [{}, {"causal": True, "kv_heads": 1}], ids=str)
def test_clusters_are_fitted_on_the_first_steps_and_then_frozen(options):
    ours = clustered(fit_steps=2, **options)
    q, k, v = few()
    kv_heads = options.get("kv_heads", 2)
    k = k[:, :kv_heads]
    v = v[:, :kv_heads]
    first = ours(q, k, v)
    ours(q, k, v)
    actual = ours(q, k, v)
    expected = ours(q, k, v)
    assert torch.equal(actual, expected)
    assert not torch.equal(ours(q, k, v), first)
    kept = state(ours)
    ours(2 * q, k, v)
    assert ours.clusters.done
    for name, t in state(ours).items():
        if name != "steps":
            assert torch.equal(t, kept[name])
    expected = attention(
        q * ours.scale,
        k * ours.scale,
        v,
        ours.phi,
        ours.noise,
        ours.fitted_params(),
        causal=ours.causal,
    )
    actual = ours.eval()(q, k, v)
    assert_close(actual, expected)


@pytest.mark.parametrize("before, after, passes", [(10, 2, 0), (2, 10, 9)])
def test_a_layer_of_other_fit_steps_goes_on_with_the_samples(before, after, passes):
    ours = clustered(fit_steps=before)
    other = clustered(fit_steps=after)
    for _ in range(min(before, 3)):
        ours(*few())
    other.load_state_dict(ours.state_dict())
    assert int(other.clusters.passes) == passes
    for _ in range(after - passes):
        other(*few())
    assert not other.clusters.done
    assert (other.clusters.queries != 0).any(-1).all()


def test_a_layer_is_saved_while_and_after_its_clusters_are_fitted():
    q, k, v = few()
    for passes in (0, 1, 3):
        ours = clustered(fit_steps=2)
        other = clustered(fit_steps=2, seed=4)
        for _ in range(passes):
            ours(q, k, v)
        rows = max(1, 256 * int(ours.clusters.passes))  # no more than there are samples
        saved = state(ours)
        for name in ("clusters.queries", "clusters.keys"):
            saved[name] = saved[name][:, :rows]
        other.load_state_dict(saved)
        assert other.clusters.done == ours.clusters.done
        assert (passes == 3) == ours.clusters.done
        for _ in range(3):
            actual = ours(q, k, v)
            expected = other(q, k, v)
            assert torch.equal(actual, expected)


def fit_on_rank(rank, meeting):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    q, k, v = torch.randn(3, 2, 2, 7, 4, generator=seeded(rank))
    q, k, v = at_tokens((q, k, v), slice(7 - rank))
    for phi in (ClusteredHybrid(), AutoRF(), Mixture()):
        layer = RandomFeatureAttention(phi, samplers.orthogonal, 6, 2, 4, fit_steps=1)
        for _ in range(2):
            layer(q, k, v, torch.full((2, 7 - rank), bool(rank)))
        assert layer.clusters.done
        for t in layer.clusters.params():
            parts = [torch.empty_like(t) for _ in range(2)]
            dist.all_gather(parts, t.contiguous())
            assert t.isfinite().all()
            assert torch.equal(*parts)
    dist.destroy_process_group()
    os._exit(
        0
    )  # threads of gloo that still hold a tensor of Python would abort the interpreter while it ends


@pytest.mark.slow
def test_clusters_are_those_of_all_processes(tmp_path):
    """Fitted to the vectors of all, and the same on each, also where one has none but padding."""
    mp.spawn(fit_on_rank, (tmp_path / "meeting",), nprocs=2)


def test_uncalibrated_clusters_say_so_once_and_calibration_silences_them():
    ours = clustered().eval()
    q, k, v = few()
    with pytest.warns(UserWarning, match="no statistics yet.*calibrate_attention"):
        before = ours(q, k, v)
    expected = attention(q * ours.scale, k * ours.scale, v, PosRF(), ours.noise)
    assert_close(before, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(q, k, v)
        with ours.calibration():
            ours(q, k, v)
            ours(2 * q, k, v)
        assert ours.clusters.done
        assert not torch.equal(ours(q, k, v), before)
