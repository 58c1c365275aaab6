"""Mixture: unbiased for all centres, its error in closed form and by quadrature, weights of least divergence, and what
a layer fits."""

import math

import pytest
import torch

from crt_exp import Mechanism, samplers
from crt_exp.attention import RandomFeatureAttention
from crt_exp.attention.baselines import exact_attention
from crt_exp.features import Mixture, Statistics
from crt_exp.features import mixture as module
from crt_exp.features.mixture import MixtureParams, fitted_weights

SIZE, D = 6, 3
UNBIASED = Mixture(weights="unbiased", size=SIZE)
POINTS = torch.linspace(-12, 12, 4801, dtype=torch.float64)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fit_of(phi, centre=0.7, seed=1):
    """To queries and keys around opposite or equal means."""
    return phi.fit(Statistics.of(0.5 * normal(40, D, seed=seed) + centre, 0.5 * normal(50, D, seed=seed + 1)))


def estimates(x, y, params, draws, sampler=samplers.iid, phi=UNBIASED):
    noise = sampler(phi.size, x.shape[-1], torch.Generator().manual_seed(0), batch=(draws,), dtype=torch.float64)
    return (phi.phi_q(x[None], noise, params).exp() * phi.phi_k(y[None], noise, params).exp()).sum(-1).squeeze(-1)


def log_normal(w, mean, variance=1.0):
    return -(w - mean).square() / (2 * variance) - math.log(2 * math.pi * variance) / 2


# ---- the unbiased map

@pytest.mark.parametrize("sampler", [samplers.iid, samplers.orthogonal])
@pytest.mark.parametrize("params", [fit_of(UNBIASED), fit_of(UNBIASED, centre=-0.7, seed=5),
                                    fit_of(UNBIASED)._replace(centres=normal(SIZE, D, seed=9))],
                         ids=["fitted", "fitted to other vectors", "any centres"])
def test_unbiased_whatever_it_was_fitted_to(params, sampler):
    x, y = 0.5 * normal(1, D, seed=3) + 0.5, 0.5 * normal(1, D, seed=4)
    found = estimates(x, y, params, 200_000, sampler)
    assert abs(found.mean() - (x * y).sum().exp()) < 4.5 * found.std() / found.numel()**0.5


def test_a_wrong_fit_costs_variance():
    x, y = 0.5 * normal(1, D, seed=3) + 0.7, 0.5 * normal(1, D, seed=4)
    right, wrong = (estimates(x, y, fit_of(UNBIASED, centre), 50_000).var() for centre in (0.7, -1.5))
    assert wrong > 3 * right


def test_one_centre_has_the_closed_form():
    """exp |s - c|^2: that of FAVOR+ around another point."""
    phi, x, y = UNBIASED.of_size(1), 0.4 * normal(1, D, seed=3), 0.4 * normal(1, D, seed=4)
    params = MixtureParams(torch.eye(D, dtype=torch.float64), x + y + 0.3, torch.zeros(1, 1))
    found = estimates(x, y, params, 100_000, phi=phi)
    of_square = (found / (x * y).sum().exp()).square()
    expected = phi.log_relative_second_moment(x[0], y[0], params).exp()
    assert abs(of_square.mean() - expected) < 4.5 * of_square.std() / found.numel()**0.5
    torch.testing.assert_close(expected, torch.tensor(math.exp(D * 0.09), dtype=torch.float64))
    with pytest.raises(ValueError, match="no closed-form variance"):
        UNBIASED.log_relative_second_moment(x[0], y[0], fit_of(UNBIASED))


def test_error_of_several_centres_by_quadrature():
    """With a row for each centre the variance is the integral of N(w; s, 1)^2 / sum_i N(w; c_i, 1), less the squares of
    what each row gives in the mean. The integral lies between Jensen's bound and that of the nearest centre."""
    centres, x, y = (torch.tensor(t, dtype=torch.float64) for t in ([[-2.0], [0.0], [1.5]], [[0.4]], [[0.8]]))
    s, phi = float(x + y), UNBIASED.of_size(3)
    params = MixtureParams(torch.eye(1, dtype=torch.float64), centres, torch.zeros(1, 3))
    step, own = POINTS[1] - POINTS[0], log_normal(POINTS, centres)
    log_q = own.logsumexp(0)
    second = (2 * log_normal(POINTS, s) - log_q).exp().sum() * step
    means = (log_normal(POINTS, s) - log_q + own).exp().sum(-1) * step
    torch.testing.assert_close(means.sum(), torch.ones((), dtype=torch.float64))
    expected = second - means.square().sum()
    found = estimates(x, y, params, 400_000, phi=phi) / (x * y).sum().exp()
    spread = (found - found.mean()).square()
    assert abs(spread.mean() - expected) < 4.5 * spread.std() / found.numel()**0.5
    jensen = 1 / ((4 * math.pi)**0.5 * log_normal(torch.tensor(s), centres[:, 0], 1.5).exp().sum())
    assert jensen <= second <= (s - centres).square().min().exp()


# ---- fitted weights

def divergence(log_weights, x, y, rows, exact, seen):
    log_weights = log_weights - rows.square().sum(-1) / 2
    of_keys = y @ rows.mT - y.square().sum(-1, keepdim=True) / 2
    log_k = (x @ rows.mT + log_weights).unsqueeze(-2) + of_keys.unsqueeze(1)
    log_k = log_k.logsumexp(-1).masked_fill(~seen, -torch.inf).log_softmax(-1)
    return (exact * (exact.clamp(min=1e-300).log() - log_k.masked_fill(~seen, 0))).sum(-1).mean()


@pytest.mark.parametrize("causal", [False, True])
def test_each_update_lowers_the_divergence_to_the_least(monkeypatch, causal):
    x, y, rows = normal(2, 20, D), normal(2, 20, D, seed=1), normal(5, D, seed=2)
    seen = torch.ones(20, 20, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    exact = (x @ y.mT).masked_fill(~seen, -torch.inf).softmax(-1)
    given, found = (x, y, rows, torch.zeros(1, 5).double(), exact, seen), []
    for updates in (0, 1, 2, 5, 20, 4000):
        monkeypatch.setattr(module, "UPDATES", updates)
        log_weights = fitted_weights(*given)
        found.append(divergence(log_weights, x, y, rows, exact, seen))
    assert found == sorted(found, reverse=True) and found[-1] < 0.98 * found[0]
    for moved in log_weights + 0.05 * torch.cat([torch.eye(5), -torch.eye(5)]).double():
        assert divergence(moved[None], x, y, rows, exact, seen) > found[-1] - 1e-5


def test_fitted_to_the_keys_that_a_query_sees():
    """A key that stands behind all queries leaves no centre."""
    phi, x, y = Mixture("gaussian", size=4), normal(1, 1, 30, D), 0.1 * normal(1, 1, 30, D, seed=1)
    y[..., -1, :] = 8
    x[..., -1, :] = -8
    assert phi.fit_sequences(x, y, causal=False).centres.amax() > 4
    assert phi.fit_sequences(x, y, causal=True).centres.amax() < 4


# ---- a layer

def clustered(heads=2, length=64, d=8, seed=0):
    """Queries and keys in clusters of their own for each head, (2, heads, length, d)."""
    g = torch.Generator().manual_seed(seed)
    centres = 2.5 * torch.randn(heads, 6, d, generator=torch.Generator().manual_seed(7))
    at = torch.randint(6, (2, heads, length), generator=g)
    q, k = (torch.stack([centres[h][at[:, h]] for h in range(heads)], 1)
            + 0.5 * torch.randn(2, heads, length, d, generator=g) for _ in range(2))
    return q, k, torch.randn(2, heads, length, d, generator=g)


def error(layer, q, k, v):
    exact = exact_attention(layer.scale * q, layer.scale * k, v, causal=layer.causal)
    return float((layer.estimate(q, k, v) - exact).norm() / exact.norm())


def calibrated(name, causal=False, kv_heads=2, **options):
    layer = Mechanism.of(name, m=16, **options).layer(2, 8, causal=causal, kv_heads=kv_heads).eval()
    with layer.calibration(), torch.no_grad():
        for seed in range(1, 4):
            layer(*clustered(seed=seed))
    return layer


@pytest.mark.parametrize("causal", [False, True])
def test_nearer_than_one_gaussian_on_clusters(causal):
    others = error(calibrated("favorsharp", causal), *clustered())
    for weights in ("fitted", "unbiased"):
        assert error(calibrated("favormix", causal, **{"features.weights": weights}), *clustered()) < 0.8 * others


def test_half_precision_keeps_it():
    layer = calibrated("favormix")
    before = error(layer, *clustered())
    assert error(layer.bfloat16(), *clustered()) < 1.1 * before


def test_calibration_passes_are_exact_and_the_map_is_that_of_all_of_them():
    layer = Mechanism.of("favormix", m=16).layer(2, 8).eval()
    q, k, v = clustered(seed=1)
    with layer.calibration(), torch.no_grad():
        torch.testing.assert_close(layer(q, k, v), exact_attention(layer.scale * q, layer.scale * k, v))
        layer(*clustered(seed=2))
        assert int(layer.clusters.fits) == 0
    assert int(layer.clusters.fits) == 1
    x, y = (torch.cat([clustered(seed=seed)[side] * layer.scale for seed in (1, 2)]).transpose(0, 1) for side in (0, 1))
    expected = Mixture(size=16).fit_sequences(x, y)
    torch.testing.assert_close(layer.clusters.params().centres, expected.centres, rtol=1e-4, atol=1e-4)


def test_padding_is_no_part_of_the_fit():
    """Nor a sequence that is nothing else."""
    q, k, v = clustered()
    mask = torch.arange(64) < torch.tensor([[40], [0]])
    masked, alone = (Mechanism.of("favormix", m=8).layer(2, 8).eval() for _ in range(2))
    with masked.calibration(), alone.calibration(), torch.no_grad():
        masked(*(t.masked_fill(~mask[:, None, :, None], torch.nan) for t in (q, k)), v, mask)
        alone(*(t[:1, :, :40] for t in (q, k, v)))
    torch.testing.assert_close(masked.clusters.params(), alone.clusters.params())


def test_a_large_batch_of_short_padded_sequences():
    """As many as SAMPLE tokens hold."""
    layer = Mechanism.of("favormix", m=8).layer(2, 8)
    q, k, v = (torch.cat([t] * 20) for t in clustered(length=41))
    layer(q, k, v, torch.arange(41) < torch.arange(2, 42).view(-1, 1))
    assert int(layer.clusters.passes) == 64 and layer.clusters.keys.isfinite().all()
    assert layer(q, k, v).isfinite().all() and int(layer.clusters.fits) == 1


def test_sequences_of_the_first_training_pass_and_a_mixture_for_each_query_head():
    layer = Mechanism.of("favormix", m=16).layer(4, 8, kv_heads=2, causal=True)
    q, k, v = clustered(heads=4)
    layer(q, k[:, :2], v[:, :2])
    assert int(layer.clusters.fits) == 0 and layer.clusters.keys.shape == (4, 512, 8)
    other = Mechanism.of("favormix", m=16).layer(4, 8, kv_heads=2, causal=True)
    other.load_state_dict(layer.state_dict())
    for each in (layer, other):
        each(q, k[:, :2], v[:, :2])
        assert int(each.clusters.fits) == 1
    centres = layer.clusters.params().centres
    assert centres.shape == (4, 16, 8) and not torch.allclose(centres[0], centres[1])
    torch.testing.assert_close(centres, other.clusters.params().centres)


@pytest.mark.parametrize("weights", ["fitted", "unbiased"])
def test_parameters_are_trained_as_those_of_other_maps(weights):
    layer = Mechanism.of("favormix", m=16, learn="parameters", **{"features.weights": weights}).layer(2, 8)
    for seed in range(2):
        out = layer(*clustered(seed=seed))
    out.square().sum().backward()
    names = {name for name, p in layer.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert {"clusters.fitted_0", "clusters.fitted_1"} <= names


@pytest.mark.parametrize("said, made", [
    ("antithetic=true", lambda: Mixture(antithetic=True)),
    ("size=None", lambda: Mixture().fit(Statistics.of(normal(9, D), normal(9, D))))])
def test_refused(said, made):
    with pytest.raises(ValueError, match=said):
        made()


def test_gaussian_kernel_of_rows():
    """Without a balance, which |x - y| would see."""
    phi, x = Mixture("gaussian", weights="unbiased", size=16), 0.4 * normal(40, D)
    params = phi.fit(Statistics.of(x, x))
    found = estimates(x[:1], x[1:2], params, 5_000, phi=phi)
    exact = (-(x[0] - x[1]).square().sum() / 2).exp()
    assert params.balance is None and abs(found.mean() - exact) < 4.5 * found.std() / found.numel()**0.5


def test_layer_takes_the_size_from_m():
    layer = RandomFeatureAttention(Mixture(), samplers.orthogonal, 12, 2, 8)
    assert layer.phi.size == 12 == layer.width
