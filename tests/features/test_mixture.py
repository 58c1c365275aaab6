"""Mixtures: any fit is unbiased, and fitted weights lower the divergence of attention."""

import copy
import math

import pytest
import torch
from helpers.kernel_estimates import estimate_pairs
from helpers.sampled_means import check_mean
from helpers.seeds import normal, seeded
from torch.testing import assert_close

from crt_exp import Mechanism, samplers
from crt_exp.attention import (
    exact_attention,
)
from crt_exp.features import (
    AutoRF,
    ClusteredHybrid,
    Mixture,
    Statistics,
    mixture,
)
from crt_exp.features.mixture import MixtureParams

UNBIASED = Mixture(weights="unbiased", size=6)


def fit_of(phi, centre=0.7, seed=1):
    """To queries and keys around opposite or equal means."""
    x = 0.5 * normal(40, 3, seed=seed) + centre
    y = 0.5 * normal(50, 3, seed=seed + 1)
    return phi.fit(Statistics.of(x, y))


def estimates(x, y, params, draws, sampler=samplers.iid, phi=UNBIASED):
    """The estimates (draws,) of the kernel of one pair x (1, d), y (1, d)."""
    noise = sampler(phi.size, x.shape[-1], seeded(), batch=(draws,), dtype=torch.float64)
    return estimate_pairs(phi, x[None], y[None], noise, params).squeeze(-1)


# ---- the unbiased map


@pytest.mark.parametrize(
    "params, sampler",
    [
        (fit_of(UNBIASED, centre=0.3, seed=5), samplers.iid),
        (fit_of(UNBIASED)._replace(centres=normal(6, 3, seed=9)), samplers.orthogonal),
    ],
    ids=["fitted to other vectors", "any centres"],
)
def test_a_mixture_is_unbiased_whatever_it_was_fitted_to(params, sampler):
    x = 0.5 * normal(1, 3, seed=3) + 0.5
    y = 0.5 * normal(1, 3, seed=4)
    exact = (x * y).sum().exp()
    actual = estimates(x, y, params, 100_000, sampler)
    error = check_mean(actual, exact, errors=4.5)
    assert error < 0.02 * exact


def test_one_centre_has_the_closed_form():
    """exp |s - c|^2: that of FAVOR+ around another point."""
    phi = UNBIASED.of_size(1)
    x = 0.4 * normal(1, 3, seed=3)
    y = 0.4 * normal(1, 3, seed=4)
    params = MixtureParams(torch.eye(3, dtype=torch.float64), x + y + 0.3, torch.zeros(1, 1))
    actual = estimates(x, y, params, 100_000, phi=phi)
    square = (actual / (x * y).sum().exp()).square()
    expected = torch.tensor(math.exp(3 * 0.09), dtype=torch.float64)
    check_mean(square, expected, errors=4.5)


def test_error_of_several_centres_by_quadrature():
    """With a row for each centre the variance is the integral of N(w; s, 1)^2 / sum_i N(w; c_i, 1), less the squares of
    what each row gives in the mean."""
    centres = torch.tensor([[-2.0], [0.0], [1.5]]).double()
    x = torch.tensor([[0.4]]).double()
    y = torch.tensor([[0.8]]).double()
    params = MixtureParams(torch.eye(1).double(), centres, torch.zeros(1, 3))
    points = torch.linspace(-12, 12, 4801)

    def log_normal(mean):
        return -(points.double() - mean).square() / 2 - math.log(2 * math.pi) / 2

    own = log_normal(centres)
    aim = 2 * log_normal(x + y)
    means = (aim / 2 - own.logsumexp(0) + own).exp().sum(-1) * 0.005
    expected = (aim - own.logsumexp(0)).exp().sum() * 0.005 - means.square().sum()
    exact = (x * y).sum().exp()
    actual = estimates(x, y, params, 200_000, phi=UNBIASED.of_size(3)) / exact
    square = (actual - actual.mean()).square()
    error = check_mean(square, expected, errors=4.5)
    assert error < 0.012 * expected


# ---- fitted weights


def divergence(log_weights, x, y, rows, exact, seen, least=0.0):
    log_weights = log_weights - rows.square().sum(-1) / 2
    of_keys = y @ rows.mT - y.square().sum(-1, keepdim=True) / 2
    log_k = (x @ rows.mT + log_weights).unsqueeze(-2) + of_keys.unsqueeze(1)
    log_k = log_k.logsumexp(-1).masked_fill(~seen, -torch.inf).log_softmax(-1)
    if least:
        log_k = (log_k.exp() + least).log()
    log_ratio = exact.clamp(min=1e-300).log() - log_k.masked_fill(~seen, 0)
    return (exact * log_ratio).sum(-1).mean()


def neighbours(log_weights):
    """The log weights (1, size) with one entry 0.05 larger or smaller."""
    for step in (0.05, -0.05):
        for change in step * torch.eye(log_weights.shape[-1]).double():
            yield log_weights + change


def test_a_mixture_is_fitted_to_the_keys_that_a_query_sees(monkeypatch):
    """A key behind all queries leaves no centre, and weights are the best ones for the keys that each query sees."""
    monkeypatch.setattr(mixture, "UPDATES", 2000)
    phi = Mixture("gaussian", size=4)
    x = normal(1, 1, 30, 3)
    y = 0.1 * normal(1, 1, 30, 3, seed=1)
    y[..., -1, :] = 8
    x[..., -1, :] = -8
    actual = phi.fit_sequences(x, y, causal=False).centres.amax()
    assert actual > 4
    actual = phi.fit_sequences(x, y, causal=True).centres.amax()
    assert actual < 4
    x = normal(1, 1, 30, 3)
    y = normal(1, 1, 30, 3, seed=1)
    params = phi.fit_sequences(x, y, causal=True)
    seen = torch.ones(30, 30, dtype=torch.bool).tril()
    exact = (x[0] @ y[0].mT).masked_fill(~seen, -torch.inf).softmax(-1)

    def divergence_of(log_weights):
        return divergence(log_weights, x[0], y[0], params.centres[0], exact, seen)

    least = divergence_of(params.log_weights[0])
    for moved in neighbours(params.log_weights[0]):
        assert divergence_of(moved) > least - 1e-5


def weight_inputs(causal, length=1.0):
    """Queries, keys and centres, exact attention and the pairs that it sees."""
    x = length * normal(2, 20, 3)
    y = length * normal(2, 20, 3, seed=1)
    rows = length * normal(5, 3, seed=2)
    seen = torch.ones(20, 20, dtype=torch.bool)
    if causal:
        seen = seen.tril()
    exact = (x @ y.mT).masked_fill(~seen, -torch.inf).softmax(-1)
    return x, y, rows, exact, seen


@pytest.mark.parametrize("causal", [False, True])
def test_each_update_of_a_mixture_lowers_the_divergence_to_the_least(monkeypatch, causal):
    x, y, rows, exact, seen = weight_inputs(causal)
    actual = []
    for updates in (0, 1, 2, 5, 20, 4000):
        monkeypatch.setattr(mixture, "UPDATES", updates)
        log_weights = mixture.fit_weights(x, y, rows, torch.zeros(1, 5).double(), exact, seen)
        actual.append(float(divergence(log_weights, x, y, rows, exact, seen)))
    assert actual == sorted(actual, reverse=True)
    assert actual[-1] < 0.98 * actual[0]
    for moved in neighbours(log_weights):
        assert divergence(moved, x, y, rows, exact, seen) > actual[-1] - 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [6.0, 40.0, 1e4])
def test_weights_are_fitted_to_vectors_of_any_length(monkeypatch, causal, length):
    x, y, rows, exact, seen = weight_inputs(causal, length)
    actual = []
    for updates in (0, 1, 5, 30):
        monkeypatch.setattr(mixture, "UPDATES", updates)
        log_weights = mixture.fit_weights(x, y, rows, torch.zeros(1, 5).double(), exact, seen)
        assert log_weights.isfinite().all()
        actual.append(float(divergence(log_weights, x, y, rows, exact, seen, least=mixture.TINY)))
    assert actual == sorted(actual, reverse=True)


@pytest.mark.parametrize(
    "counts",
    [
        [1, 2, 3, 4, 5, 6, 7],
        [2, 2, 5, 9],
        [4, 4, 4],
        [1],
    ],
)
def test_blocks_cover_each_visible_pair_once(counts):
    covered = torch.zeros(len(counts), max(counts), dtype=torch.long)
    for queries, keys in mixture.visible_blocks(counts):
        covered[queries, keys] += 1
    expected = (torch.arange(max(counts)) < torch.tensor(counts)[:, None]).long()
    assert torch.equal(covered, expected)


@pytest.mark.parametrize("phi", [AutoRF(), ClusteredHybrid(), Mixture(size=4)], ids=repr)
def test_a_map_is_fitted_to_at_least_one_set_of_vectors(phi):
    none = torch.empty(0, 5, 3)
    with pytest.raises(ValueError, match=r"vectors: shape \(0, 5, 3\); .* at least one set"):
        phi.fit(Statistics.of(none, none))


# ---- a layer


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["favormix", "favormix features.weights=unbiased"])
@pytest.mark.parametrize("length", [4.0, 12.0, 1e3, 1e10])
def test_a_mixture_is_calibrated_to_long_vectors(causal, name, length):
    layer = Mechanism.parse(name, m=8).layer(2, 16, causal=causal).eval()
    q = length * normal(2, 2, 30, 16)
    k = length * normal(2, 2, 30, 16, seed=1)
    v = normal(2, 2, 30, 4)
    with layer.calibration():
        layer(q.float(), k.float(), v.float())
    assert layer.clusters.fits == 1
    for t in layer.state_dict().values():
        assert t.isfinite().all()
    assert layer(q.float(), k.float(), v.float()).isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "name, length",
    [
        ("favormix", 1e19),
        ("favormix", float("nan")),
        ("favorsharp", 1e19),
        ("favorpp", 1e19),
        ("gerf", 1e19),
        ("geom", float("inf")),
        ("geom_plus", 1e19),
        ("pois", 1e4),
        ("hrf_cluster", float("nan")),
    ],
)
def test_a_refused_calibration_leaves_the_state(causal, name, length):
    layer = Mechanism.parse(name, m=8).layer(2, 8, causal=causal).eval()
    q, k, v = clustered()
    with layer.calibration():
        layer(q, k, v)
    before = copy.deepcopy(layer.state_dict())
    expected = layer(q, k, v)
    with pytest.raises(ValueError, match="finite|NaN|Poisson rate"), layer.calibration():
        layer(q, k, v)
        layer(length * q, length * k, v)
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())
    assert torch.equal(layer(q, k, v), expected)


def clustered(heads=2, length=64, d=8, seed=0):
    """Queries and keys in clusters of their own for each head, (2, heads, length, d)."""
    g = seeded(seed)
    centres = 2.5 * torch.randn(heads, 6, d, generator=seeded(7))
    at = torch.randint(6, (2, heads, length), generator=g)
    own_centres = torch.stack([centres[h][at[:, h]] for h in range(heads)], 1)

    def draw():
        return torch.randn(2, heads, length, d, generator=g)

    q = own_centres + 0.5 * draw()
    k = own_centres + 0.5 * draw()
    return q, k, draw()


def error(layer, q, k, v):
    exact = exact_attention(layer.scale * q, layer.scale * k, v, causal=layer.causal)
    return float((layer.estimate(q, k, v) - exact).norm() / exact.norm())


def calibrated(name, causal=False, kv_heads=2, **options):
    mechanism = Mechanism.of(name, m=16, **options)
    layer = mechanism.layer(2, 8, causal=causal, kv_heads=kv_heads).eval()
    with layer.calibration(), torch.no_grad():
        for seed in range(1, 4):
            layer(*clustered(seed=seed))
    return layer


@pytest.mark.parametrize("causal", [False, True])
def test_a_mixture_is_nearer_than_one_gaussian_on_clusters(causal):
    others = error(calibrated("favorsharp", causal), *clustered())
    for weights in ("fitted", "unbiased"):
        layer = calibrated("favormix", causal, **{"features.weights": weights})
        assert error(layer, *clustered()) < 0.8 * others


def test_calibration_passes_are_exact_and_the_map_is_that_of_all_of_them():
    layer = Mechanism.of("favormix", m=16).layer(2, 8).eval()
    q, k, v = clustered(seed=1)
    with layer.calibration(), torch.no_grad():
        actual = layer(q, k, v)
        expected = exact_attention(layer.scale * q, layer.scale * k, v)
        assert_close(actual, expected)
        layer(*clustered(seed=2))
        assert int(layer.clusters.fits) == 0
    assert int(layer.clusters.fits) == 1
    x, y = (
        layer.scale * torch.cat([clustered(seed=1)[side], clustered(seed=2)[side]])
        for side in (0, 1)
    )
    expected = Mixture(size=16).fit_sequences(x.transpose(0, 1), y.transpose(0, 1))
    assert_close(layer.clusters.params().centres, expected.centres, rtol=1e-4, atol=1e-4)


def test_padding_is_no_part_of_the_fit_of_a_mixture():
    """Nor a sequence that is nothing else."""
    q, k, v = clustered()
    mask = torch.arange(64) < torch.tensor([[40], [0]])
    padding = ~mask[:, None, :, None]
    masked = Mechanism.of("favormix", m=8).layer(2, 8).eval()
    alone = Mechanism.of("favormix", m=8).layer(2, 8).eval()
    with masked.calibration(), alone.calibration(), torch.no_grad():
        masked(q.masked_fill(padding, torch.nan), k.masked_fill(padding, torch.nan), v, mask)
        alone(*(t[:1, :, :40] for t in (q, k, v)))
    actual = masked.clusters.params()
    expected = alone.clusters.params()
    assert_close(actual, expected)


def test_a_large_batch_of_short_padded_sequences():
    """As many as SAMPLE tokens hold."""
    layer = Mechanism.of("favormix", m=8).layer(2, 8)
    q, k, v = (torch.cat([t] * 20) for t in clustered(length=41))
    layer(q, k, v, torch.arange(41) < torch.arange(2, 42).view(-1, 1))
    assert int(layer.clusters.passes) == 64
    assert layer.clusters.keys.isfinite().all()
    assert layer(q, k, v).isfinite().all()
    assert int(layer.clusters.fits) == 1


def test_sequences_of_the_first_training_pass_and_a_mixture_for_each_query_head():
    layer = Mechanism.of("favormix", m=16).layer(4, 8, kv_heads=2, causal=True)
    q, k, v = clustered(heads=4)
    layer(q, k[:, :2], v[:, :2])
    assert int(layer.clusters.fits) == 0
    assert layer.clusters.keys.shape == (4, 512, 8)
    other = Mechanism.of("favormix", m=16).layer(4, 8, kv_heads=2, causal=True)
    other.load_state_dict(layer.state_dict())
    for part in (layer, other):
        part(q, k[:, :2], v[:, :2])
        assert int(part.clusters.fits) == 1
    centres = layer.clusters.params().centres
    assert centres.shape == (4, 16, 8)
    assert not torch.allclose(centres[0], centres[1])
    expected = other.clusters.params().centres
    assert_close(centres, expected)


@pytest.mark.parametrize("weights", ["fitted", "unbiased"])
def test_parameters_of_a_mixture_are_trained_as_those_of_other_maps(weights):
    layer = Mechanism.of(
        "favormix", m=16, learn="parameters", **{"features.weights": weights}
    ).layer(2, 8)
    for seed in range(2):
        out = layer(*clustered(seed=seed))
    out.square().sum().backward()
    for name in ("clusters.fitted_0", "clusters.fitted_1"):
        assert layer.get_parameter(name).grad.abs().sum() > 0


def test_a_mixture_of_the_gaussian_kernel():
    """Without a balance, which |x - y| would see."""
    phi = Mixture("gaussian", weights="unbiased", size=16)
    x = 0.4 * normal(40, 3)
    params = phi.fit(Statistics.of(x, x))
    assert torch.equal(params.balance, torch.eye(3).double())
    actual = estimates(x[:1], x[1:2], params, 5_000, phi=phi)
    exact = (-(x[0] - x[1]).square().sum() / 2).exp()
    assert torch.equal(params.balance, torch.eye(3).double())
    difference = abs(actual.mean() - exact)
    assert difference < 4.5 * actual.std() / actual.numel() ** 0.5


BAD = {
    "antithetic=true": lambda: Mixture(antithetic=True),
    "size=None": lambda: Mixture().fit(Statistics.of(torch.ones(9, 3), torch.ones(9, 3))),
    "no closed-form variance": lambda: UNBIASED.log_relative_second_moment(
        torch.ones(3), torch.ones(3), fit_of(UNBIASED)
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_mixtures_are_refused(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()
