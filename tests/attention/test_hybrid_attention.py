"""Hybrid random features in attention: clusters, layers, swapped models, bad input."""

import math
import os
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hybrid_cases import draw, vectors
from sklearn.datasets import load_iris

from crt_exp import KernelRegressionClassifier, calibrate_attention, samplers, swap_attention
from crt_exp.attention import DecodingState, RandomFeatureAttention, attention, attention_reference, partial_attention
from crt_exp.features import (
    CERF,
    SMREG,
    AngularCoefficient,
    AngularHybrid,
    AutoRF,
    ClusteredHybrid,
    GaussianCoefficient,
    GaussianHybrid,
    GaussianMixtureHybrid,
    Hybrid,
    Mixture,
    Moments,
    PosRF,
    Statistics,
    TrigRF,
)
from crt_exp.mechanism import Mechanism
from crt_exp.samplers.noise import leaves, map_leaves

pytestmark = pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")


def test_clusters_are_found_and_their_bases_exact_there():
    """Points at two centres each: where M may be complex, no pair has variance."""
    r, t = vectors(2, 3), vectors(2, 3, seed=1)
    x, y = r.repeat(5, 1), t.repeat(7, 1)
    phi = ClusteredHybrid(field="complex", by="centres")
    params = phi.fit(Statistics.of(x, y))
    assert (phi.log_relative_variance(x[:, None], y[None], params) < -50).all()
    noise = draw(phi, 1, 3)
    found = phi.phi_q(x, noise, params).exp() @ phi.phi_k(y, noise, params).exp().mT
    torch.testing.assert_close(found, (x @ y.mT).exp())
    torch.testing.assert_close(params.queries.sort(0).values, r.sort(0).values)


def test_clusters_gain_on_clustered_vectors_and_one_pair_is_a_single_base():
    x = torch.cat([vectors(40, 8, seed=s, scale=0.1) + 1.2 * vectors(1, 8, seed=10 + s) for s in range(2)])
    y = torch.cat([vectors(40, 8, seed=s, scale=0.1) + 1.2 * vectors(1, 8, seed=10 + s) for s in range(2, 4)])
    mean = lambda phi: phi.log_variance(x[:, None], y[None], phi.fit(Statistics.of(x, y))).exp().mean()
    assert mean(ClusteredHybrid(field="complex")) < 0.2 * min(mean(PosRF()), mean(TrigRF()))
    one, plain = ClusteredHybrid(queries=1, keys=1), CERF(field="real")
    params, alone = one.fit(Statistics.of(x, y)), plain.fit(Statistics.of(x, y))
    noise = draw(one, 5, 8)
    torch.testing.assert_close(one.phi_q(x, noise, params).exp(), plain.phi_q(x, noise, alone).exp(), rtol=1e-6, atol=0)
    torch.testing.assert_close(mean(one), mean(plain))


def test_clusters_of_one_set_on_both_sides():
    """As in kernel regression: within a cluster a real M can only be 1, which is PosRF; an imaginary one is TrigRF."""
    x = torch.cat([vectors(40, 4, seed=s, scale=0.1) + vectors(1, 4, seed=10 + s) for s in range(2)])
    within = lambda phi: phi.log_variance(x, x.roll(1, 0), phi.fit(Statistics.of(x, x)))[1:40]
    torch.testing.assert_close(within(ClusteredHybrid()), within(PosRF()), rtol=0, atol=0.01)
    torch.testing.assert_close(within(ClusteredHybrid(field="complex")), within(TrigRF()), rtol=0, atol=0.01)
    data = load_iris(return_X_y=True)
    score = lambda field: KernelRegressionClassifier(ClusteredHybrid("gaussian", field=field), gamma=2.0,
                                                     random_state=0).fit(*data).score(*data)
    assert score("real") < 0.5 and score("complex") > 0.9


@pytest.mark.parametrize("phi, parts", [(ClusteredHybrid(), 1), (ClusteredHybrid(queries=3, keys=2), 1),
                                        (ClusteredHybrid(field="complex"), 2)], ids=repr)
def test_a_token_fills_the_blocks_of_its_own_cluster(phi, parts):
    x, y = vectors(12, 3), vectors(9, 3, seed=1)
    params, noise = phi.fit(Statistics.of(x, y)), draw(phi, 4, 3)
    for features, blocks in ((phi.phi_q(x, noise, params), phi.keys), (phi.phi_k(y, noise, params), phi.queries)):
        assert (features.log_scale.isfinite().sum(-1) == blocks * 4 * parts).all()
        assert (features.exp()[features.log_scale == -torch.inf] == 0).all()


# ---- attention -------------------------------------------------------------------------------------------------------


def layer(phi=None, heads=2, d=4, m=6, **options):
    return RandomFeatureAttention(phi or ClusteredHybrid(), samplers.orthogonal, m, heads, d, **options)


def qkv(length=20, heads=2, batch=2, d=4, seed=0):
    return torch.randn(3, batch, heads, length, d, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("phi", [AngularHybrid(n=3), ClusteredHybrid(field="complex")], ids=repr)
def test_partials_with_moduli_and_decoding(phi):
    x, y, v = vectors(3, 1, 2, 9, 4)
    params, noise = phi.fit(Statistics.of(x, y)), draw(phi, 3, 4, (2,))
    for policy in ("none", "clamp", "abs"):
        expected = attention_reference(x, y, v, phi, noise, params, causal=True, denominator=policy)
        state = DecodingState(phi, noise, params, denominator=policy)
        steps = [state.step(*(t[:, :, i:j] for t in (x, y, v))) for i, j in ((0, 1), (1, 2), (2, 7), (7, 9))]
        torch.testing.assert_close(torch.cat(steps, 2), expected)
    partial = partial_attention(x, y, v, phi, noise, params, causal=True, modulus=True)
    torch.testing.assert_close(partial.output, attention(x, y, v, phi, noise, params, causal=True))
    torch.testing.assert_close(attention(x, y, v, phi, noise, params, normalize=False),
                               attention_reference(x, y, v, phi, noise, params, normalize=False))


@pytest.mark.parametrize("phi", [AngularHybrid(n=3), ClusteredHybrid()], ids=repr)
def test_no_tensor_of_the_length_times_the_features(phi):
    """Forward and backward, both ways; of the features of the bases neither."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            largest = max([largest, *(t.numel() for t in (out if isinstance(out, (tuple, list)) else [out])
                                      if isinstance(t, torch.Tensor))])
            return out

    x, y, v = (t.requires_grad_() for t in torch.randn(3, 1, 1, 2048, 4).unbind(0))
    params, noise = phi.fit(Statistics.of(x, y)), draw(phi, 16, 4)
    for causal in (False, True):
        with Watch():
            attention(x, y, v, phi, noise, params, causal=causal).sum().backward()
    assert largest < 2048 * phi.width(16) / 2


def test_half_precision_and_large_scores_stay_finite():
    for phi in (AngularHybrid(n=3), GaussianHybrid(n=3), ClusteredHybrid(), ClusteredHybrid(field="complex")):
        for dtype in (torch.float32, torch.bfloat16):
            x, y, v = (30 * torch.randn(1, 2, 16, 4)).to(dtype), (30 * torch.randn(1, 2, 16, 4)).to(dtype), torch.randn(
                1, 2, 16, 4).to(dtype)
            params, noise = phi.fit(Statistics.of(x, y)), map_leaves(lambda n: n.to(torch.float32),
                                                                     draw(phi, 4, 4, (2,)))
            for causal in (False, True):
                assert attention(x, y, v, phi, noise, params, causal=causal).isfinite().all()


# ---- clusters in a layer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "kv_heads": 1}], ids=str)
def test_clusters_are_fitted_on_the_first_steps_and_then_frozen(options):
    ours, (q, k, v) = layer(fit_steps=2, **options), qkv()
    k, v = (t[:, :options.get("kv_heads", 2)] for t in (k, v))
    first = ours(q, k, v)
    assert not ours.clusters.done and int(ours.clusters.passes) == 1
    ours(q, k, v)
    assert torch.equal(ours(q, k, v), ours(q, k, v)) and not torch.equal(ours(q, k, v), first)
    kept = {name: t.clone() for name, t in ours.named_buffers()}
    assert ours.clusters.done and not ours.clusters.queries.any()
    ours(2 * q, k, v)
    assert all(torch.equal(t, kept[name]) for name, t in ours.named_buffers() if name != "steps")
    ours.eval()
    params = ours._running_params()
    expected = attention(q * ours.scale, k * ours.scale, v, ours.phi, ours.noise, params, causal=ours.causal)
    torch.testing.assert_close(ours(q, k, v), expected)


@pytest.mark.parametrize("before, after, passes", [(4, 2, 1), (10, 2, 0), (2, 4, 4), (2, 10, 9)])
def test_a_layer_of_other_fit_steps_goes_on_with_the_samples(before, after, passes):
    q, k, v = qkv()
    ours, other = layer(fit_steps=before), layer(fit_steps=after)
    for _ in range(min(before, 3)):
        ours(q, k, v)
    other.load_state_dict(ours.state_dict())
    assert int(other.clusters.passes) == passes
    for _ in range(after - passes):
        other(q, k, v)
    assert not other.clusters.done and (other.clusters.queries != 0).any(-1).all()


def test_a_layer_is_saved_while_and_after_its_clusters_are_fitted():
    q, k, v = qkv()
    for passes in (0, 1, 3):
        ours, other = layer(fit_steps=2), layer(fit_steps=2, seed=4)
        for _ in range(passes):
            ours(q, k, v)
        rows = 256 * int(ours.clusters.passes) or 1   # a state with no more of them than there are samples
        other.load_state_dict({name: t[:, :rows] if name in ("clusters.queries", "clusters.keys") else t.clone()
                               for name, t in ours.state_dict().items()})
        assert other.clusters.done == ours.clusters.done == (passes == 3)
        for _ in range(3):
            assert torch.equal(ours(q, k, v), other(q, k, v))


def test_checkpointed_layers_see_the_clusters_of_their_first_run():
    from torch.utils.checkpoint import checkpoint

    ours, plain, (q, k, v) = layer(fit_steps=1), layer(fit_steps=1), qkv()
    q.requires_grad_()
    for _ in range(3):
        found = torch.autograd.grad(checkpoint(ours, q, k, v, use_reentrant=False).sum(), q)[0]
        assert torch.equal(found, torch.autograd.grad(plain(q, k, v).sum(), q)[0])
    assert int(ours.clusters.fits) == 1


def fit_on_rank(rank, meeting):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    q, k, v = torch.randn(3, 2, 2, 7, 4, generator=torch.Generator().manual_seed(rank))
    q, k, v = (t[:, :, :7 - rank] for t in (q, k, v))
    for phi in (ClusteredHybrid(), AutoRF(), Mixture()):
        layer = RandomFeatureAttention(phi, samplers.orthogonal, 6, 2, 4, fit_steps=1)
        for _ in range(2):
            layer(q, k, v, torch.full((2, 7 - rank), bool(rank)))
        assert layer.clusters.done
        for t in layer.clusters.params():
            parts = [torch.empty_like(t) for _ in range(2)]
            dist.all_gather(parts, t.contiguous())
            assert t.isfinite().all() and torch.equal(*parts)
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo that still hold a tensor of Python would abort the interpreter while it ends


@pytest.mark.slow
def test_clusters_are_those_of_all_processes(tmp_path):
    """Fitted to the vectors of all, and the same on each, also where one has none but padding."""
    mp.spawn(fit_on_rank, (tmp_path / "meeting",), nprocs=2)


def test_uncalibrated_clusters_say_so_once_and_calibration_silences_them():
    ours, (q, k, v) = layer().eval(), qkv()
    with pytest.warns(UserWarning, match="no statistics yet.*calibrate_attention"):
        before = ours(q, k, v)
    plain = attention(q * ours.scale, k * ours.scale, v, PosRF(), ours.noise)
    torch.testing.assert_close(before, plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(q, k, v)
        with ours.calibration():
            ours(q, k, v)
            ours(2 * q, k, v)
        assert ours.clusters.done and not torch.equal(ours(q, k, v), before)
    fresh = layer().eval()
    with fresh.calibration():
        fresh(q, k, v)
    fresh(q, k, v)


def test_padding_is_no_part_of_the_clusters():
    q, k, v = qkv()
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[:, 13:] = False
    far = torch.where(mask[:, None, :, None], k, torch.nan)
    ours, short = layer().eval(), layer().eval()
    with ours.calibration(), short.calibration():
        ours(q.masked_fill(~mask[:, None, :, None], 1e4), far, v, mask)
        short(q[:, :, :13], k[:, :, :13], v[:, :, :13])
    for a, b in zip(leaves(ours.clusters.params()), leaves(short.clusters.params())):
        torch.testing.assert_close(a, b)


def encoder():
    block = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False).eval()


@pytest.mark.filterwarnings("ignore:.*further from exact attention than uniform attention:UserWarning")
@pytest.mark.parametrize("name", ["hrf_angular", "hrf_gaussian", "hrf_cluster", "gaussian_mixture", "hybrid"])
def test_swapped_models(name, capsys):
    from crt_exp import describe_attention

    torch.manual_seed(0)
    model, x = encoder(), torch.randn(2, 12, 8)
    exact = model(x)
    swap_attention(model, name, m=32)
    calibrate_attention(model, [x])
    table = describe_attention(model)
    assert list(table["mechanism"]) == [name] * 2 and (table["M"] > 32).all()
    assert (model(x) - exact).norm() < 0.5 * exact.norm()
    other = swap_attention(encoder(), name, m=32, seed=3)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))


def test_a_mechanism_with_clusters_is_saved_by_names():
    ours = Mechanism.of("hrf_cluster", m=8, fit_steps=3)
    assert Mechanism.from_saved(ours.to_saved(), "run") == ours and ours.layer(2, 4).clusters.steps == 3
    assert Mechanism.of(features="angular", sampler="orthogonal", m=24).map().width(24) == 4 * 24 * 16


# ---- bad input -------------------------------------------------------------------------------------------------------


POINTS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
FITTED = ClusteredHybrid().fit(Statistics.of(POINTS, POINTS))
BAD = {
    "6 samples for 7 clusters": lambda: ClusteredHybrid(queries=7).fit(Statistics.of(POINTS, POINTS)),
    "keys: fewer than 2 distinct": lambda: ClusteredHybrid().fit(Statistics.of(POINTS, torch.ones(6, 3))),
    "r=0.0005": lambda: GaussianHybrid(sigma=1e-3, r=0.5),
    r"r=.*larger sigma": lambda: GaussianHybrid(sigma=1e-3).fit(Statistics.of(1e-3 * POINTS, 1e-3 * POINTS)),
    "noise: expected independent": lambda: AngularHybrid().phi_q(
        POINTS, ((n := samplers.iid(4, 3),), (n, n)), AngularHybrid().fit(None)),
    "independent projections": lambda: AngularHybrid().phi_q(POINTS, samplers.iid(4, 3), AngularHybrid().fit(None)),
    "1 coefficients, 2 bases": lambda: AngularHybrid().phi_q(
        POINTS, ((samplers.iid(4, 3),), (samplers.iid(4, 3),)), AngularHybrid().fit(None)),
    "params: expected a pair": lambda: AngularHybrid().phi_q(POINTS, draw(AngularHybrid(), 4, 3), ()),
    "centres: 3 dimensions, expected 5": lambda: ClusteredHybrid().phi_q(
        torch.ones(2, 5), samplers.iid(4, 5), FITTED),
    "centres: 3 dimensions, expected 4": lambda: ClusteredHybrid().log_variance(
        torch.ones(2, 4), torch.ones(2, 4), FITTED),
    "statistics without vectors": lambda: ClusteredHybrid().fit(
        Statistics(*(Moments.known(mean=POINTS.mean(0), mean_sq=POINTS.square().mean(0)),) * 2)),
    "saved .* 3, 4": lambda: layer(ClusteredHybrid(keys=2)).load_state_dict(
        layer(ClusteredHybrid(keys=3)).state_dict()),
    "centre of the queries: not finite": lambda: ClusteredHybrid().fit(Statistics.of(POINTS * torch.inf, POINTS)),
    "queries=0": lambda: ClusteredHybrid(queries=0),
    "field=imaginary: expected real or complex": lambda: ClusteredHybrid(field="imaginary"),
    "by=means": lambda: ClusteredHybrid(by="means"),
    "tau=0": lambda: GaussianMixtureHybrid(tau=0),
    "default=oprf": lambda: GaussianMixtureHybrid(default="oprf"),
    "default=None": lambda: GaussianMixtureHybrid(queries=1, keys=1, default=None),
    "base=trig": lambda: AngularHybrid(base="trig"),
    "n=0": lambda: AngularHybrid(n=0),
    "sigma=-1": lambda: GaussianHybrid(sigma=-1),
    "c=0": lambda: GaussianCoefficient(c=0),
    "expected a real number": lambda: GaussianCoefficient(M=[[1.0]]),
    "kernel=softmax: expected null": lambda: AngularCoefficient(kernel="softmax"),
    "coefficients: 1; .* bases .1": lambda: Hybrid(coefficients=["angular"], bases=["pos"]),
    "each a Coefficient": lambda: Hybrid(coefficients=[PosRF()], bases=[PosRF(), PosRF()]),
    "kernel=softmax: expected bases": lambda: Hybrid(coefficients=["angular"], bases=["pos", PosRF("gaussian")]),
    "kernel=softmax: ": lambda: Hybrid(coefficients=["angular"], bases=[SMREG(), PosRF()]),
    "unknown bases 'poss'; did you mean pos": lambda: Hybrid(coefficients=["angular"], bases=["pos", "poss"]),
    "unknown key 'coefficients gaussian.m'": lambda: Hybrid(coefficients=["gaussian m=2"], bases=["pos", "trig"]),
    "M: singular": lambda: CERF(M=[[1, 2], [2, 4]]),
    "M: singular:": lambda: CERF(M=[1, 0]),
    "M: expected finite": lambda: CERF(M=math.inf),
    "expected a number, d numbers": lambda: CERF(M=torch.ones(2, 3)),
    "M='one'": lambda: CERF(M="one"),
    "complex entries": lambda: CERF(M=1j, field="real"),
    "M: 2 dimensions, expected 3": lambda: CERF(M=[1, 2]).phi_q(
        POINTS, samplers.iid(4, 3), CERF(M=[1, 2]).fit(None)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises(ValueError, match=message.strip(":")):
        BAD[message]()
