"""Laws of the hybrids that the laws of all maps (test_features, test_attention) do not hold."""

import copy
import math
import warnings

import pytest
import torch
from maps import HYBRID
from sklearn.datasets import load_iris

from crt_exp import KernelRegressionClassifier, calibrate_attention, samplers, swap_attention
from crt_exp.attention import DecodingState, RandomFeatureAttention, attention, attention_reference, partial_attention
from crt_exp.bounds import angles
from crt_exp.features import (
    CERF,
    OPRF,
    SMREG,
    AngularCoefficient,
    AngularHybrid,
    BipolarGaussianCoefficient,
    ClusteredHybrid,
    GaussianCoefficient,
    GaussianHybrid,
    GaussianMixtureHybrid,
    Hybrid,
    HypRF,
    Moments,
    PosRF,
    Product,
    Statistics,
    Sum,
    TrigRF,
)
from crt_exp.features.complex_exponential import diagonal_by_centres, diagonal_by_moments
from crt_exp.kernels import angle
from crt_exp.mechanism import Mechanism
from crt_exp.nested import leaves, mapped

pytestmark = pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")
EXACT = (samplers.iid, samplers.orthogonal, samplers.simplex, samplers.halton, samplers.sobol, samplers.stratified)


def vectors(*shape, seed=0, scale=0.5):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw(phi, m, d, batch=(), seed=0, sampler=samplers.iid):
    g = torch.Generator().manual_seed(seed)
    return phi.noise(m, lambda p: sampler(p.m, d, g, batch, dtype=torch.float64))


def at_angle(theta, r=1.0, d=3):
    """x and y (..., d) of length r at angles theta (...), in a plane that no axis lies in."""
    u, v = torch.linalg.qr(vectors(d, 2, seed=5))[0].mT
    x = r * u.expand(*theta.shape, d)
    return x, r * (theta.cos()[..., None] * u + theta.sin()[..., None] * v)


# ---- estimates and their errors

@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("phi", HYBRID, ids=repr)
def test_unbiased_and_of_the_variance_in_closed_form(phi, d):
    cut = lambda t: 0.3 * t / t.norm(dim=-1, keepdim=True).clamp(min=0.5)  # of long vectors the tails are too heavy
    x, y, draws = cut(vectors(5, d)), cut(vectors(6, d, seed=1)), 15_000
    params = phi.fit(Statistics.of(x, y))
    noise = draw(phi, 1, d, (draws,), seed=2)
    x, y = x[:2], y[:3]
    estimate = phi.phi_q(x, noise, params).exp() @ phi.phi_k(y, noise, params).exp().mT
    exact = phi.log_kernel(x[:, None], y[None]).exp()
    sem = estimate.std(0) / draws**0.5
    assert (sem < 0.05 * exact).float().mean() > 0.6
    assert ((estimate.mean(0) - exact).abs() < 5 * sem + 1e-9).all()
    square = (estimate - exact).square()
    closed = phi.log_variance(x[:, None], y[None], params).exp()
    sem = square.std(0) / draws**0.5
    assert ((square.mean(0) - closed).abs() < 5 * sem + 1e-12).all()
    assert (sem < 0.25 * closed + 1e-12).float().mean() > 0.5  # power; the rest have heavy tails


@pytest.mark.parametrize("sampler", EXACT, ids=lambda s: s.__name__)
@pytest.mark.parametrize("phi", [AngularHybrid(n=2), GaussianHybrid(n=2), ClusteredHybrid(keys=1)], ids=repr)
def test_unbiased_with_every_exact_sampler(phi, sampler):
    x, y = vectors(8, 2, scale=0.4), vectors(9, 2, seed=1, scale=0.4)
    draws = 300 if sampler in (samplers.halton, samplers.sobol) else 1200  # a draw of quasi-random points takes long
    params = phi.fit(Statistics.of(x, y))
    noise = draw(phi, 16, 2, (draws,), sampler=sampler)
    estimate = phi.phi_q(x, noise, params).exp() @ phi.phi_k(y, noise, params).exp().mT
    sem = estimate.std(0) / draws**0.5
    exact = (x @ y.mT).exp()
    assert (sem < 0.05 * exact.clamp(min=0.6)).float().mean() > 0.93  # the test has power
    assert ((estimate.mean(0) - exact).abs() < 5 * sem + 1e-9).all()


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("phi", [AngularHybrid, GaussianHybrid], ids=lambda c: c.__name__)
def test_mse_theorems(phi, shared):
    """n and m projections, vectors of unequal length, where shared projections and independent ones differ."""
    phi, n, m, draws = phi(n=3, shared=shared), 3, 2, 120_000
    x, y = vectors(2, 3, scale=0.3), vectors(2, 3, seed=1, scale=0.8)
    params = phi.fit(Statistics.of(x, y))
    noise = draw(phi, m, 3, (draws,), seed=3)
    estimate = phi.phi_q(x, noise, params).exp() @ phi.phi_k(y, noise, params).exp().mT
    log_exact = x @ y.mT
    square = (estimate - log_exact.exp()).square()
    closed = (phi.log_relative_variance(x[:, None], y[None], params, n, m) + 2 * log_exact).exp()
    sem = square.std(0) / draws**0.5
    assert (sem < 0.05 * closed).all() and ((square.mean(0) - closed).abs() < 5 * sem).all()


def test_shared_projections_have_less_variance_by_the_printed_term():
    """2/m SM^2 (1 - cos(|x|^2 - |y|^2)) E[lambda (1 - lambda)] (HRF Theorem 3.1), for hyp and pos alike."""
    x, y = vectors(6, 3), vectors(6, 3, seed=1)
    n, m, share = 5, 4, angle(x, y) / math.pi
    both = share * (1 - share) * (1 - 1 / n)
    printed = 2 / m * (1 - torch.cos(x.square().sum(-1) - y.square().sum(-1))) * both
    for base in ("hyp", "pos"):
        shared, apart = (AngularHybrid(base=base, shared=s) for s in (True, False))
        params = shared.fit(None)
        gain = apart.log_relative_variance(x, y, params, n, m).exp() - shared.log_relative_variance(
            x, y, params, n, m).exp()
        torch.testing.assert_close(gain, printed)


def test_angular_hybrid_is_exact_at_both_ends_and_nowhere_between():
    """theta/pi weights the positive features: with the weights the other way round both ends would be the worst."""
    theta = torch.tensor([0.0, 1.0, math.pi], dtype=torch.float64)
    x = vectors(1, 4).expand(3, 4)
    y = torch.stack([x[0], x[0].flip(0), -x[0]])
    for phi in (AngularHybrid(n=3), AngularHybrid(n=3, base="pos", shared=False)):
        assert (phi.log_variance(x, y, phi.fit(None)) == -torch.inf).tolist() == [True, False, True]
        for seed in range(5):
            noise = draw(phi, 2, 4, seed=seed)
            found = (phi.phi_q(x, noise, phi.fit(None)).exp() * phi.phi_k(y, noise, phi.fit(None)).exp()).sum(-1)
            torch.testing.assert_close(found[[0, 2]], (x * y).sum(-1).exp()[[0, 2]])
    assert theta[-1] == angle(x[2], y[2])


def test_gaussian_hybrid_is_exact_at_equal_vectors_alone():
    x = vectors(2, 4)
    phi = GaussianHybrid()
    params = phi.fit(Statistics.of(x, x))
    assert (phi.log_variance(x, x, params) == -torch.inf).all() and (phi.log_variance(x, -x, params) > -10).all()


@pytest.mark.parametrize("r", [1.0, 1.7])
def test_relative_errors_over_the_angle(r):
    m, n, theta = 6, 4, torch.linspace(1e-3, math.pi - 1e-3, 400, dtype=torch.float64)
    x, y = at_angle(theta, r)
    closed = {TrigRF(): angles.trig_relative_error(theta, r, m), HypRF(): angles.positive_relative_error(theta, r, m)}
    for phi, error in closed.items():
        variance = phi.log_variance(x, y) - 2 * (x * y).sum(-1) - math.log(m)
        torch.testing.assert_close((variance / 2).exp(), error, rtol=1e-6, atol=1e-9)
        assert error.max() <= angles.largest_relative_error(r, m) * (1 + 1e-9)
        assert error.max() > 0.99 * angles.largest_relative_error(r, m)
    ours = (AngularHybrid().log_relative_variance(x, y, AngularHybrid().fit(None), n, m) / 2).exp()
    torch.testing.assert_close(ours, angles.angular_relative_error(theta, r, m, n), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("n", [1, 8, 1000])
@pytest.mark.parametrize("r", [1.0, 2.0, 3.0])
def test_largest_error_of_the_angular_hybrid_and_its_limits(r, n):
    m, theta = 5, torch.linspace(0, math.pi, 20_001, dtype=torch.float64)
    largest = angles.angular_relative_error(theta, r, m, n).max()
    assert largest <= angles.largest_angular_error(r, m, n)
    if n == 1000:
        assert largest > angles.largest_angular_error(r, m, n) / 3
    small = torch.tensor(1e-9, dtype=torch.float64)
    for theta in (small, math.pi - small):
        slope = angles.angular_relative_error(theta, r, m, n) / small.sqrt()
        assert float(slope) == pytest.approx(angles.angular_error_at_the_ends(r, m, n), rel=1e-3)
    with pytest.raises(ValueError, match="at least 1"):
        angles.largest_angular_error(0.9, m, n)


def test_gaussian_coefficients_are_never_clipped():
    """Estimates below 0 and above 1 occur, and their mean is lambda: clipped they would be biased."""
    phi = BipolarGaussianCoefficient(sigma=1.0, r=1.0)
    x, y = at_angle(torch.tensor(2.5, dtype=torch.float64))
    params, noise = phi.fit(None), draw(phi, 1, 3, (40_000,))
    found = (phi.phi_q(x[None], noise, params).exp() * phi.phi_k(y[None], noise, params).exp()).sum(-1)
    assert found.max() > 1.5 and found.min() < 0.1 and found.max() <= 2 / float(params.norm)
    exact, spread = float(phi.mean(x, y, params)), float(phi.variance(x, y, params))
    assert abs(found.mean() - exact) < 5 * (spread / len(found)) ** 0.5
    assert abs(found.clamp(0, 1).mean() - exact) > 20 * (spread / len(found)) ** 0.5
    assert float(found.var()) == pytest.approx(spread, rel=0.05)


def test_zero_vectors_and_ties():
    zero, x = torch.zeros(1, 3, dtype=torch.float64), vectors(4, 3)
    for phi in (AngularHybrid(), GaussianHybrid(), ClusteredHybrid()):
        params = phi.fit(Statistics.of(x, x))
        noise = draw(phi, 3, 3)
        for a, b in ((zero, x), (x, zero), (zero, zero)):
            assert (phi.phi_q(a, noise, params).exp() @ phi.phi_k(b, noise, params).exp().mT).isfinite().all()
        assert not phi.log_variance(zero, x, params).isnan().any()
    nothing = GaussianHybrid().fit(Statistics.of(zero, zero))[0][0]
    assert nothing.norm == 1 and nothing.sigma == 1


# ---- the algebra

@pytest.mark.parametrize("phi", [AngularHybrid(n=3), GaussianHybrid(n=3, base="pos"), AngularHybrid(n=3, shared=False)],
                         ids=repr)
def test_a_hybrid_is_the_sum_of_its_products(phi):
    (coefficient,), bases = phi.made_of()
    algebra = Sum(Product(coefficient, bases[0]), Product(coefficient.complement(), bases[1]))
    x, y = vectors(5, 3), vectors(6, 3, seed=1)
    params, noise = phi.fit(Statistics.of(x, y)), draw(phi, 2, 3)
    theirs = tuple((params[0][0], p) for p in params[1]), tuple((noise[0][0], n) for n in noise[1])
    product = lambda f, n, p: f.phi_q(x, n, p).exp() @ f.phi_k(y, n, p).exp().mT
    torch.testing.assert_close(product(phi, noise, params), product(algebra, theirs[1], theirs[0]))
    torch.testing.assert_close(torch.cat([phi.phi_q(x, noise, params).exp(), phi.phi_k(x, noise, params).exp()], -1),
                               torch.cat([algebra.phi_q(x, theirs[1], theirs[0]).exp(),
                                          algebra.phi_k(x, theirs[1], theirs[0]).exp()], -1))


def test_widths():
    assert AngularHybrid(n=8).width(8) == 4 * 8 * 9 and AngularHybrid(n=8, base="pos").width(8) == 3 * 8 * 9
    assert AngularHybrid().width((5, 3)) == AngularHybrid(n=5).width(3) == 4 * 3 * 6
    assert GaussianHybrid(n=4).width(3) == 4 * 3 * 9 and ClusteredHybrid().width(64) == 256
    assert ClusteredHybrid(queries=3, keys=2, field="complex").width(5) == 60


def test_one_projection_serves_all_or_each_has_its_own():
    for phi, names in [(AngularHybrid(), ["coefficient", "base"]),
                       (AngularHybrid(shared=False), ["coefficient", "base_0", "base_1"]),
                       (ClusteredHybrid(), [""]), (GaussianMixtureHybrid(), ["coefficient", "base"])]:
        found = []
        phi.noise(4, lambda p, found=found: found.append(p.name) or samplers.iid(p.m, 2))
        assert found == names


# ---- complex exponential features

def test_complex_exponential_features_contain_the_others():
    x, y = vectors(3, 4), vectors(5, 4, seed=1)
    noise = samplers.iid(6, 4, torch.Generator().manual_seed(0), dtype=torch.float64)
    product = lambda f: f.phi_q(x, noise, f.fit(None)).exp() @ f.phi_k(y, noise, f.fit(None)).exp().mT
    for kernel in ("softmax", "gaussian"):
        for twin, options in ((PosRF, {"M": 1}), (HypRF, {"M": 1, "antithetic": True}), (TrigRF, {"M": 1j}),
                              (TrigRF, {"M": [1j] * 4}), (PosRF, {"M": torch.eye(4)})):
            phi, twin = CERF(kernel, **options), twin(kernel)
            torch.testing.assert_close(product(phi), product(twin))
            torch.testing.assert_close(phi.log_variance(x, y[:3], phi.fit(None)), twin.log_variance(x, y[:3]))


@pytest.mark.parametrize("antithetic", [False, True])
def test_variance_for_dense_complex_matrices(antithetic):
    g = torch.Generator().manual_seed(2)
    M = torch.eye(3) + 0.3 * torch.randn(3, 3, generator=g) + 0.4j * torch.randn(3, 3, generator=g)
    phi, draws = CERF(M=M, antithetic=antithetic), 50_000
    x, y = vectors(2, 3, scale=0.3), vectors(3, 3, scale=0.3, seed=1)
    noise = draw(phi, 1, 3, (draws,))
    params = phi.fit(None)
    estimate = phi.phi_q(x, noise, params).exp() @ phi.phi_k(y, noise, params).exp().mT
    square = (estimate - (x @ y.mT).exp()).square()
    closed = phi.log_variance(x[:, None], y[None], params).exp()
    sem = square.std(0) / draws**0.5
    assert (sem < 0.1 * closed).all() and ((square.mean(0) - closed).abs() < 5 * sem).all()


def test_real_parts_that_cancel_are_not_enough_for_no_variance():
    """M = iI: Re(M) x + Re(M^-T) y = 0 for all pairs, but only w = 0 makes the estimate exact."""
    x, y = vectors(1, 3), vectors(1, 3, seed=1)
    phi = CERF(M=1j)
    assert phi.log_variance(x, y, phi.fit(None)) > -20 and phi.log_variance(x, x, phi.fit(None)) == -torch.inf


def test_matrices_in_closed_form():
    """Of least |M r + M^-T t|^2 at the centres, and least on average over the pairs of two sets."""
    r, t = torch.tensor([1.0, 2.0, 0.0, 0.0, 3.0]), torch.tensor([-4.0, 2.0, 0.0, 1.0, 0.0])
    found = diagonal_by_centres(r, t)
    assert found.size.tolist() == [2, 1, 1, 100, 0.01]
    assert found.imaginary.tolist() == [False, True, False, False, False]
    assert not diagonal_by_centres(r, t, "real").imaginary.any()
    x, y = vectors(50, 4) + 0.3, vectors(60, 4, seed=1) * torch.tensor([0.2, 1, 2, 3.0]) - torch.tensor([1, -1, 0, 0.5])
    mean = lambda t: (t.mean(0), t.square().mean(0))
    for field in ("real", "complex"):
        moments, centres = diagonal_by_moments(*mean(x), *mean(y), field), diagonal_by_centres(
            x.mean(0), y.mean(0), field)
        loss = lambda M: (M.matrix * x[:, None] + y / M.matrix).abs().square().mean((0, 1))
        assert (loss(moments) <= loss(centres) + 1e-9).all()
        for factor in (0.99, 1.01):
            assert (loss(moments) <= loss(moments._replace(size=moments.size * factor)) + 1e-6).all()


# ---- clusters

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


# ---- attention

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
            params, noise = phi.fit(Statistics.of(x, y)), mapped(lambda n: n.to(torch.float32), draw(phi, 4, 4, (2,)))
            for causal in (False, True):
                assert attention(x, y, v, phi, noise, params, causal=causal).isfinite().all()


# ---- clusters in a layer

@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "kv_heads": 1}], ids=str)
def test_clusters_are_fitted_on_the_first_steps_and_then_frozen(options):
    ours, (q, k, v) = layer(fit_steps=2, **options), qkv()
    k, v = (t[:, :options.get("kv_heads", 2)] for t in (k, v))
    first = ours(q, k, v)
    assert not ours.clusters.done and int(ours.clusters.passes) == 1
    ours(q, k, v)
    assert torch.equal(ours(q, k, v), ours(q, k, v)) and not torch.equal(ours(q, k, v), first)
    kept = {name: t.clone() for name, t in ours.named_buffers()}
    assert ours.clusters.done and ours.clusters.queries.shape[1] == 1
    ours(2 * q, k, v)
    assert all(torch.equal(t, kept[name]) for name, t in ours.named_buffers() if name != "steps")
    ours.eval()
    params = ours._running_params()
    expected = attention(q * ours.scale, k * ours.scale, v, ours.phi, ours.noise, params, causal=ours.causal)
    torch.testing.assert_close(ours(q, k, v), expected)


def test_a_layer_is_saved_while_and_after_its_clusters_are_fitted():
    q, k, v = qkv()
    for passes in (0, 1, 3):
        ours, other = layer(fit_steps=2), layer(fit_steps=2, seed=4)
        for _ in range(passes):
            ours(q, k, v)
        other.load_state_dict(copy.deepcopy(ours.state_dict()))
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


def test_uncalibrated_clusters_say_so_once_and_calibration_silences_them():
    ours, (q, k, v) = layer().eval(), qkv()
    with pytest.warns(UserWarning, match="no clusters yet.*calibrate_attention"):
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


@pytest.mark.parametrize("name", ["hrf_angular", "hrf_gaussian", "hrf_cluster"])
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
    assert Mechanism.of_saved(ours.saved(), "run") == ours and ours.layer(2, 4).clusters.steps == 3
    assert Mechanism.of(features="angular", sampler="orthogonal", m=24).map().width(24) == 4 * 24 * 9


# ---- bad input

POINTS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
FITTED = ClusteredHybrid().fit(Statistics.of(POINTS, POINTS))
BAD = {
    "7 clusters of queries but 6 vectors": lambda: ClusteredHybrid(queries=7).fit(Statistics.of(POINTS, POINTS)),
    "a cluster of keys stays empty": lambda: ClusteredHybrid().fit(Statistics.of(POINTS, torch.ones(6, 3))),
    "sigma r = 0.0005": lambda: GaussianHybrid(sigma=1e-3, r=0.5),
    r"sigma r = .*varrho -> 0": lambda: GaussianHybrid(sigma=1e-3).fit(Statistics.of(1e-3 * POINTS, 1e-3 * POINTS)),
    "independent: with shared ones it is biased": lambda: AngularHybrid().phi_q(
        POINTS, ((n := samplers.iid(4, 3),), (n, n)), AngularHybrid().fit(None)),
    "needs a pair of noises": lambda: AngularHybrid().phi_q(POINTS, samplers.iid(4, 3), AngularHybrid().fit(None)),
    "a pair of tuples, 1 of the coefficients and 2 of the bases": lambda: AngularHybrid().phi_q(
        POINTS, ((samplers.iid(4, 3),), (samplers.iid(4, 3),)), AngularHybrid().fit(None)),
    "parameters of this hybrid": lambda: AngularHybrid().phi_q(POINTS, draw(AngularHybrid(), 4, 3), ()),
    "centres have 3 dimensions but the vectors have 5": lambda: ClusteredHybrid().phi_q(
        torch.ones(2, 5), samplers.iid(4, 5), FITTED),
    "centres have 3 dimensions but the vectors have 4": lambda: ClusteredHybrid().log_variance(
        torch.ones(2, 4), torch.ones(2, 4), FITTED),
    "moments without the vectors": lambda: ClusteredHybrid().fit(
        Statistics(*(Moments.known(mean=POINTS.mean(0), mean_sq=POINTS.square().mean(0)),) * 2)),
    "was saved with .* 3, 4": lambda: layer(ClusteredHybrid(keys=2)).load_state_dict(
        layer(ClusteredHybrid(keys=3)).state_dict()),
    "centre of the queries is not finite": lambda: ClusteredHybrid().fit(Statistics.of(POINTS * torch.inf, POINTS)),
    "queries = 0": lambda: ClusteredHybrid(queries=0),
    "field = 'imaginary'": lambda: ClusteredHybrid(field="imaginary"),
    "by = 'means'": lambda: ClusteredHybrid(by="means"),
    "tau = 0": lambda: GaussianMixtureHybrid(tau=0),
    "default = 'oprf'": lambda: GaussianMixtureHybrid(default="oprf"),
    "nothing to weight": lambda: GaussianMixtureHybrid(queries=1, keys=1, default=None),
    "base = 'trig'": lambda: AngularHybrid(base="trig"),
    "n = 0": lambda: AngularHybrid(n=0),
    "sigma = -1": lambda: GaussianHybrid(sigma=-1),
    "c = 0": lambda: GaussianCoefficient(c=0),
    "give a real number": lambda: GaussianCoefficient(M=[[1.0]]),
    "estimates no kernel": lambda: AngularCoefficient(kernel="softmax"),
    "1 coefficients and 1 bases": lambda: Hybrid(AngularCoefficient(), [PosRF()]),
    "maps such as AngularCoefficient": lambda: Hybrid([PosRF()], [PosRF(), PosRF()]),
    "same kernel, softmax or gaussian": lambda: Hybrid(AngularCoefficient(), [PosRF(), PosRF("gaussian")]),
    "same kernel": lambda: Hybrid(AngularCoefficient(), [SMREG(), PosRF()]),
    "M is singular": lambda: CERF(M=[[1, 2], [2, 4]]),
    "M is singular:": lambda: CERF(M=[1, 0]),
    "NaN or infinite": lambda: CERF(M=math.inf),
    "give a number, the d numbers|give a number, d numbers": lambda: CERF(M=torch.ones(2, 3)),
    "M = 'one'": lambda: CERF(M="one"),
    "complex entries": lambda: CERF(M=1j, field="real"),
    "made for 2 dimensions but the vectors have 3": lambda: CERF(M=[1, 2]).phi_q(
        POINTS, samplers.iid(4, 3), CERF(M=[1, 2]).fit(None)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises(ValueError, match=message.strip(":")):
        BAD[message]()


def test_a_covariance_that_is_not_known_is_said_to_be():
    phi = Hybrid(AngularCoefficient(), [OPRF(A=-0.1), TrigRF()])
    with pytest.raises(NotImplementedError, match="shared=False"):
        phi.log_variance(POINTS, POINTS, phi.fit(None))
