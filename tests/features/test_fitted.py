"""Maps with fitted or trained parameters: dense-exponential features, the choice of a map for each head, Hedgehog,
layers that train their map, and mixtures. Their parameters are the best ones; any parameters are unbiased."""

import copy
import math

import pytest
import torch
from helpers import module_cases
from torch.testing import assert_close

from crt_exp import Mechanism, calibrate_attention, describe_attention, samplers, swap_attention
from crt_exp.attention import (
    RandomFeatureAttention,
    attention,
    attention_reference,
    exact_attention,
)
from crt_exp.features import (
    GERF,
    OPRF,
    SDERF,
    AutoRF,
    ClusteredHybrid,
    Hedgehog,
    HypRF,
    Mixture,
    Moments,
    PosRF,
    Statistics,
    mixture,
)
from crt_exp.features.base import NotFinite
from crt_exp.features.dense import SDERFParams, balance
from crt_exp.features.mixture import MixtureParams
from crt_exp.features.statistics import Mirrored
from crt_exp.samplers import DenseNoise
from crt_exp.samplers.noise import map_leaves

DENSE = [
    SDERF("gaussian"),
    SDERF(balance=False),
    SDERF(antithetic=True),
    SDERF(diagonal=True, centred=False),
]


def vectors(d=6, n=60, seed=0, apart=0.5):
    """Queries and keys (n, d) of other spreads and means, float64."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    x, y = (draw(n, d) @ (draw(d, d) * draw(d).exp() / (2 * d**0.5)) for _ in range(2))
    return x + apart * draw(d), y + apart * draw(d)


def moment(phi, x, y, params=None):
    """The mean over all pairs of the log second moment, relative to the squared kernel."""
    params = phi.fit(Statistics.of(x, y)) if params is None else params
    return phi.log_relative_second_moment(x[:, None], y[None], params).mean().item()


# ---- the fit


@pytest.mark.parametrize("seed", range(2))
def test_every_freedom_that_is_fitted_lowers_the_mean_log_second_moment(seed):
    x, y = vectors(seed=seed)
    plain = {"centred": False, "balance": False}
    order = [
        SDERF(),
        SDERF(balance=False),
        SDERF(**plain),
        SDERF(diagonal=True, **plain),
        OPRF(),
        PosRF(),
    ]
    found = [moment(phi, x, y) for phi in order]
    assert found == sorted(found)
    assert found[-1] > found[0] + 1
    diagonal = [moment(SDERF(diagonal=True, balance=balanced), x, y) for balanced in (None, False)]
    assert found[0] < diagonal[0] < diagonal[1]


@pytest.mark.parametrize(
    "phi",
    [
        SDERF(balance=False),
        SDERF(balance=False, centred=False),
        SDERF(diagonal=True),
        SDERF("gaussian"),
    ],
    ids=repr,
)
def test_no_other_root_or_shift_is_better(phi):
    """Whatever G is: R and h are the best ones for it."""
    x, y = vectors()
    params = phi.fit(Statistics.of(x, y))
    g = torch.Generator().manual_seed(1)
    best = moment(phi, x, y, params)
    for size in (1e-3, 0.1):
        for _ in range(5):
            change = size * torch.randn(params.root.shape, generator=g, dtype=torch.float64)
            root = (
                params.root + (change if phi.diagonal else change + change.mT) * params.root.mean()
            )
            assert (
                moment(
                    phi, x, y, params._replace(root=root.clamp(min=0.8) if phi.diagonal else root)
                )
                >= best
            )
            if params.shift is not None:
                shift = params.shift + size * torch.randn(
                    params.shift.shape, generator=g, dtype=torch.float64
                )
                assert moment(phi, x, y, params._replace(shift=shift)) >= best


@pytest.mark.parametrize("diagonal", [False, True])
def test_balance_gives_both_sides_the_same_second_moments(diagonal):
    x, y = vectors()
    G = SDERF(diagonal=diagonal).fit(Statistics.of(x, y)).balance
    of_x, of_y = (x * G, y / G) if diagonal else (x @ G.mT, y @ torch.linalg.inv(G))
    a = torch.cov(of_x.mT)
    b = torch.cov(of_y.mT)
    a, b = (a.diagonal(), b.diagonal()) if diagonal else (a, b)
    torch.testing.assert_close(a, b, rtol=0.05, atol=0.01 * float(a.abs().max()))  # up to the ridge
    torch.testing.assert_close(G, G.mT if not diagonal else G)


def test_balance_of_one_side_that_lies_in_a_plane_is_finite_and_moderate():
    x, y = vectors(n=200)
    x[:, 2:] = 0
    G = balance(torch.cov(x.mT), torch.cov(y.mT))
    sizes = torch.linalg.eigvalsh(G)
    assert (sizes > 1e-3).all()
    assert (sizes < 1e3).all()
    none = torch.zeros(2, 4, 4, dtype=torch.float64)
    actual = balance(none, none)
    expected = torch.eye(4, dtype=torch.float64).expand(2, 4, 4)
    torch.testing.assert_close(actual, expected)


def test_parameters_of_nothing_are_those_of_favor_plus():
    zeros = torch.zeros(2, 1, 4)
    for phi in (SDERF(), SDERF(diagonal=True)):
        params = phi.fit(Statistics.of(zeros, zeros))
        assert (params.A.abs() < 1e-12).all()
        assert (params.shift == 0).all()
        x = torch.randn(2, 3, 4)
        noise = samplers.iid(5, 4, torch.Generator().manual_seed(0))
        actual = phi.phi_k(x, noise, params).exp()
        expected = PosRF().phi_k(x, noise).exp()
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("phi", DENSE, ids=repr)
def test_any_parameters_are_unbiased(phi):
    """R, h and G of other vectors, and trained ones far from every fit: a stale fit costs variance alone."""
    (x, y), other = (t[:4] / 2 for t in vectors(d=3)), vectors(d=3, seed=5)
    params = phi.fit(Statistics.of(*other))
    g = torch.Generator().manual_seed(2)
    noise = samplers.orthogonal(4, 3, g, batch=(20_000,), dtype=torch.float64)

    def move(t):
        return t + 0.1 * torch.randn(t.shape, generator=g, dtype=torch.float64)

    for own in (params, phi.admitted(map_leaves(move, params))):
        estimate = phi.phi_q(x, noise, own).exp() @ phi.phi_k(y, noise, own).exp().mT
        exact = phi.log_kernel(x[:, None], y[None]).exp()
        sem = estimate.std(0) / len(estimate) ** 0.5
        assert ((estimate.mean(0) - exact).abs() < 5 * sem).all()
        assert (sem < 0.2 * exact).float().mean() > 0.5


# ---- what leaves softmax unchanged


@pytest.mark.parametrize("phi", [SDERF(diagonal=True), SDERF(antithetic=True)], ids=repr)
def test_shifts_change_no_error_and_no_attention(phi):
    x, y = vectors(d=4)
    shift = torch.tensor([3.0, -2.0, 1.0, 5.0], dtype=torch.float64)
    actual = moment(phi, x + shift, y - 2 * shift)
    expected = moment(phi, x, y)
    assert actual == pytest.approx(expected, rel=1e-9)
    noise = samplers.orthogonal(8, 4, torch.Generator().manual_seed(0), dtype=torch.float64)
    v = torch.randn(60, 3)

    def run(y):
        return attention(
            x[None, None], y[None, None], v[None, None], phi, noise, phi.fit(Statistics.of(x, y))
        )

    actual = run(y + shift)
    torch.testing.assert_close(actual, run(y), rtol=1e-8, atol=1e-10)


# ---- statistics


def test_covariances_of_all_kinds_of_moments():
    x = torch.randn(3, 9, 4) + 2
    mask = torch.rand(3, 9, generator=torch.Generator().manual_seed(0)) > 0.3
    own = Moments.from_vectors(x.masked_fill(~mask[..., None], torch.nan), mask, scale=0.5)
    for i in range(3):
        expected = torch.cov(0.5 * x[i][mask[i]].double().mT, correction=0)
        torch.testing.assert_close(own.covariance[i], expected, rtol=1e-6, atol=1e-9)
    known = Moments.from_values(mean=own.mean, second=own.second)
    torch.testing.assert_close(known.covariance, own.covariance, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(Mirrored(own).covariance, own.second)
    torch.testing.assert_close(
        own.second.diagonal(dim1=-2, dim2=-1), own.mean_sq.double(), rtol=1e-5, atol=1e-6
    )


# ---- attention layers

B = 2
H = 4
L = 40
D = 8


def qkv(seed=0, kv_heads=H):
    g = torch.Generator().manual_seed(seed)
    shift = 2 * torch.randn(1, 1, 1, D, generator=g)

    def draw(heads):
        return torch.randn(B, heads, L, D, generator=g)

    return draw(H), draw(kv_heads) + shift, draw(kv_heads)


def layer(phi=None, **options):
    return RandomFeatureAttention(
        phi or SDERF(antithetic=True), samplers.orthogonal, 16, H, D, **options
    )


def test_a_causal_layer_is_fitted_to_earlier_batches_alone():
    module = layer(causal=True)
    first = module(*qkv(0))
    torch.testing.assert_close(
        first, layer(PosRF(antithetic=True), causal=True)(*qkv(0)), rtol=1e-4, atol=1e-5
    )
    module(*qkv(1))
    q, k, _ = (t.transpose(0, 1).flatten(1, 2) * D**-0.25 for t in qkv(0))
    ours = module._running_params()
    expected = SDERF().fit(Statistics.of(q, k))
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_no_part_of_what_a_layer_sees(causal):
    long = layer(causal=causal)
    short = layer(causal=causal)
    mask = torch.arange(L)[None].expand(B, L) < 30
    for seed in range(2):
        q, k, v = qkv(seed)
        out = long(q, k.masked_fill(~mask[:, None, :, None], torch.nan), v, mask)
        expected = short(*(t[:, :, :30] for t in (q, k, v)))
        torch.testing.assert_close(out[:, :, :30], expected, rtol=2e-4, atol=1e-4)


def test_favorsharp_is_dense_centred_balanced_and_antithetic():
    actual = Mechanism.of("favorsharp").map()
    expected = SDERF(antithetic=True)
    assert actual == expected
    assert SDERF().centred
    assert SDERF().balanced


# ---- the choice of a map for each head


def three_kinds(seed=0):
    """Heads (B, 3, L, D) that vary alike in all directions, by coordinates, and in other directions."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, 3, L, D, generator=g) for _ in range(3))
    by_coordinates = torch.linspace(0.02, 2, D).diag()
    turn = torch.linalg.qr(torch.randn(D, D, generator=torch.Generator().manual_seed(9)))[0]
    maps = torch.stack([0.7 * torch.eye(D), by_coordinates, by_coordinates @ turn])
    return q @ maps, k @ maps, v


KINDS = ["oprf", "diagonal sderf", "sderf"]


@pytest.mark.parametrize("causal", [False, True])
def test_each_head_of_auto_is_its_own_map(causal):
    q, k, v = three_kinds()
    phi = AutoRF()
    noise = samplers.orthogonal(8, D, torch.Generator().manual_seed(0), (3,))
    stats = Statistics.of(*(t.transpose(0, 1).flatten(1, 2) for t in (q, k)))
    out = attention(q, k, v, phi, noise, phi.fit(stats), causal=causal)
    for h, (name, own) in enumerate(phi.candidates(D).items()):
        assert name == KINDS[h]
        alone = map_leaves(lambda t, h=h: t[h : h + 1], own.fit(stats))
        of_head = (t[:, h : h + 1] for t in (q, k, v))
        expected = attention(
            *of_head, own, DenseNoise(noise.rows()[h : h + 1], True), alone, causal=causal
        )
        torch.testing.assert_close(out[:, h : h + 1], expected, rtol=1e-3, atol=1e-4)


def test_a_layer_chooses_once_and_keeps_its_choice():
    options = {"causal": True, "fit_steps": 2, "scaling": 1.0}

    def make(phi):
        return RandomFeatureAttention(phi, samplers.orthogonal, 16, 3, D, **options)

    module = make(AutoRF())
    inputs = three_kinds()
    with pytest.warns(UserWarning, match="no statistics yet.*calibrate_attention"):
        first = module.eval()(*inputs)
    expected = make(PosRF(antithetic=True)).eval()(*inputs)
    torch.testing.assert_close(first, expected)
    module.train()
    for seed in range(3):
        module(*three_kinds(seed))
    assert module.phi.names(module.clusters.params()) == KINDS
    for seed in range(3, 6):
        module(*three_kinds(seed))
    assert int(module.clusters.fits) == 1
    other = make(AutoRF())
    other.load_state_dict(module.state_dict())
    actual = other.eval()(*inputs)
    expected = module.eval()(*inputs)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_auto_beyond_full_matrices_and_for_the_gaussian_kernel():
    wide = torch.randn(9, 300)
    actual = AutoRF().fit(Statistics.of(wide, wide)).root.shape
    assert actual == (1, 300)
    params = AutoRF("gaussian").fit(Statistics.of(wide[:, :4], wide[:, 4:8]))
    expected = torch.eye(4, dtype=torch.float64)
    assert_close(params.balance, expected)


def test_describe_attention_says_what_each_layer_chose():
    encoder = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    swap_attention(encoder, "favorpp", features="auto", m=8)
    assert describe_attention(encoder)["chosen"].isna().all()
    calibrate_attention(
        encoder, [torch.randn(2, 30, 32, generator=torch.Generator().manual_seed(0))]
    )
    for chosen in describe_attention(encoder)["chosen"]:
        actual = sum(int(part.rsplit(" ", 1)[1]) for part in chosen.split(", "))
        assert actual == 4


# ---- Hedgehog, and layers that train

TRAINED = [
    (Hedgehog(), "none"),
    (PosRF(), "projections"),
    (OPRF(), "parameters"),
    (SDERF(antithetic=True), "parameters"),
    (SDERF(diagonal=True, centred=False), "projections"),
]
each = pytest.mark.parametrize("phi, learn", TRAINED, ids=lambda value: str(value))


def hedgehog(m=6, d=4, scale=1.0):
    phi = Hedgehog()
    g = torch.Generator().manual_seed(0)
    noise = phi.noise(m, lambda p: samplers.orthogonal(p.m, d, g, dtype=torch.float64))
    return phi, tuple(type(n)(scale * n.weight.clone(), n.gaussian) for n in noise)


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_hedgehog_is_two_softmaxes(scale):
    """Positive, bounded by 1, 2m features of a sum of 2, whatever the length of a vector is."""
    phi, noise = hedgehog()
    x = scale * torch.randn(5, 4, dtype=torch.float64)
    for side, rows in ((phi.phi_q, noise[0]), (phi.phi_k, noise[1])):
        f = side(x, noise)
        actual = f.exp().shape
        expected = (5, phi.width(6))
        assert actual == expected
        assert f.log_scale.isfinite().all()
        assert (f.log_scale <= 0).all()
        u = x @ rows.rows().mT
        actual = f.exp()
        expected = torch.cat([u.softmax(-1), (-u).softmax(-1)], -1)
        assert_close(actual, expected)
        actual = f.exp().sum(-1)
        expected = torch.full((5,), 2.0, dtype=torch.float64)
        assert_close(actual, expected)


# ---- layers that train


def trained(phi, learn, seed=0, **options):
    layer = module_cases.make(phi, learn=learn, **options)
    q, k, v = module_cases.qkv(seed)
    with layer.calibration():
        layer.eval()(q, k, v)
    return layer


@each
def test_gradients_are_those_of_the_materialised_twin(phi, learn):
    """To rows and parameters, with the vectors' own."""
    layer = trained(phi, learn).double()
    q, k, v = (t.double().requires_grad_() for t in module_cases.qkv(1))
    wanted = [q, k, v, *layer.parameters()]
    assert len(wanted) > 3
    twin = attention_reference(
        layer.scaled(q), layer.scaled(k), v, phi, layer.noise, layer.fitted_params(q, k, None)
    )
    assert_close(layer(q, k, v), twin)
    for ours, theirs in zip(
        torch.autograd.grad(layer(q, k, v).sin().sum(), wanted),
        torch.autograd.grad(twin.sin().sum(), wanted),
    ):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert ours.abs().max() > 0


@each
def test_no_future_padding_or_gradient_changes_outputs(phi, learn):
    """Causal = its own prefixes = token by token; with gradient = without."""
    layer = trained(phi, learn, causal=True)
    q, k, v = module_cases.qkv(2)
    length = q.shape[2]
    with torch.no_grad():
        whole = layer(q, k, v)
        actual = layer(q[:, :, :7], k[:, :, :7], v[:, :, :7])
        assert_close(actual, whole[:, :, :7], rtol=1e-4, atol=1e-5)
    actual = layer(q, k, v)
    assert_close(actual, whole, rtol=1e-4, atol=1e-5)
    past = layer.past()
    steps = []
    for i in range(length):
        steps.append(past.step(*(t[:, :, i : i + 1] for t in (q, k, v))))
    actual = torch.cat(steps, 2)
    assert_close(actual, whole, rtol=1e-4, atol=1e-5)
    keep = torch.arange(length) < 9
    with torch.no_grad():
        actual = layer(q, k, v, keep.expand(2, length))[:, :, :9]
        assert_close(actual, whole[:, :, :9], rtol=1e-4, atol=1e-5)


@each
def test_training_fits_better_and_a_calibration_leaves_it(phi, learn):
    layer = trained(phi, learn)
    q, k, v = module_cases.qkv(3)
    target = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    optimizer = torch.optim.Adam(layer.parameters(), 2e-2)
    losses = []
    for _ in range(16):
        loss = (layer(q, k, v) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[8:]) < 0.98 * losses[0]
    before = module_cases.state(layer)
    other = module_cases.make(phi, learn=learn)
    with layer.calibration():
        layer(*module_cases.qkv(4))
    assert module_cases.same(module_cases.state(layer), before)
    other.load_state_dict(before)
    with torch.no_grad():
        actual = other.eval()(q, k, v)
        expected = layer(q, k, v)
        assert torch.equal(actual, expected)


# ---- mixtures

UNBIASED = Mixture(weights="unbiased", size=6)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fit_of(phi, centre=0.7, seed=1):
    """To queries and keys around opposite or equal means."""
    return phi.fit(
        Statistics.of(0.5 * normal(40, 3, seed=seed) + centre, 0.5 * normal(50, 3, seed=seed + 1))
    )


def estimates(x, y, params, draws, sampler=samplers.iid, phi=UNBIASED):
    noise = sampler(
        phi.size, x.shape[-1], torch.Generator().manual_seed(0), batch=(draws,), dtype=torch.float64
    )
    return (
        (phi.phi_q(x[None], noise, params).exp() * phi.phi_k(y[None], noise, params).exp())
        .sum(-1)
        .squeeze(-1)
    )


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
    found = estimates(x, y, params, 100_000, sampler)
    assert found.std() / found.numel() ** 0.5 < 0.02 * found.mean()
    assert abs(found.mean() - (x * y).sum().exp()) < 4.5 * found.std() / found.numel() ** 0.5


def test_one_centre_has_the_closed_form():
    """exp |s - c|^2: that of FAVOR+ around another point."""
    phi = UNBIASED.of_size(1)
    x = 0.4 * normal(1, 3, seed=3)
    y = 0.4 * normal(1, 3, seed=4)
    params = MixtureParams(torch.eye(3, dtype=torch.float64), x + y + 0.3, torch.zeros(1, 1))
    found = estimates(x, y, params, 100_000, phi=phi)
    of_square = (found / (x * y).sum().exp()).square()
    expected = phi.log_relative_second_moment(x[0], y[0], params).exp()
    assert abs(of_square.mean() - expected) < 4.5 * of_square.std() / found.numel() ** 0.5
    torch.testing.assert_close(expected, torch.tensor(math.exp(3 * 0.09), dtype=torch.float64))


def test_error_of_several_centres_by_quadrature():
    """With a row for each centre the variance is the integral of N(w; s, 1)^2 / sum_i N(w; c_i, 1), less the squares of
    what each row gives in the mean."""
    centres, x, y = (
        torch.tensor(t, dtype=torch.float64) for t in ([[-2.0], [0.0], [1.5]], [[0.4]], [[0.8]])
    )
    params = MixtureParams(torch.eye(1).double(), centres, torch.zeros(1, 3))
    points = torch.linspace(-12, 12, 4801)

    def log_normal(mean):
        return -(points.double() - mean).square() / 2 - math.log(2 * math.pi) / 2

    own = log_normal(centres)
    aim = 2 * log_normal(x + y)
    means = (aim / 2 - own.logsumexp(0) + own).exp().sum(-1) * 0.005
    expected = (aim - own.logsumexp(0)).exp().sum() * 0.005 - means.square().sum()
    found = estimates(x, y, params, 200_000, phi=UNBIASED.of_size(3)) / (x * y).sum().exp()
    spread = (found - found.mean()).square()
    assert abs(spread.mean() - expected) < 4.5 * spread.std() / len(found) ** 0.5 < 0.05 * expected


# ---- fitted weights


def divergence(log_weights, x, y, rows, exact, seen, least=0.0):
    log_weights = log_weights - rows.square().sum(-1) / 2
    of_keys = y @ rows.mT - y.square().sum(-1, keepdim=True) / 2
    log_k = (x @ rows.mT + log_weights).unsqueeze(-2) + of_keys.unsqueeze(1)
    log_k = log_k.logsumexp(-1).masked_fill(~seen, -torch.inf).log_softmax(-1)
    log_k = (log_k.exp() + least).log() if least else log_k
    return (exact * (exact.clamp(min=1e-300).log() - log_k.masked_fill(~seen, 0))).sum(-1).mean()


def test_a_mixture_is_fitted_to_the_keys_that_a_query_sees(monkeypatch):
    """A key behind all queries leaves no centre, and weights are the best ones for the keys that each query sees."""
    monkeypatch.setattr(mixture, "UPDATES", 2000)
    phi = Mixture("gaussian", size=4)
    x = normal(1, 1, 30, 3)
    y = 0.1 * normal(1, 1, 30, 3, seed=1)
    y[..., -1, :] = 8
    x[..., -1, :] = -8
    assert phi.fit_sequences(x, y, causal=False).centres.amax() > 4
    assert phi.fit_sequences(x, y, causal=True).centres.amax() < 4
    x = normal(1, 1, 30, 3)
    y = normal(1, 1, 30, 3, seed=1)
    params = phi.fit_sequences(x, y, causal=True)
    seen = torch.ones(30, 30, dtype=torch.bool).tril()
    exact = (x[0] @ y[0].mT).masked_fill(~seen, -torch.inf).softmax(-1)

    def of(log_weights):
        return divergence(log_weights, x[0], y[0], params.centres[0], exact, seen)

    for moved in params.log_weights + 0.05 * torch.cat(
        [torch.eye(4), -torch.eye(4)]
    ).double().unsqueeze(1):
        assert of(moved) > of(params.log_weights[0]) - 1e-5


@pytest.mark.parametrize("causal", [False, True])
def test_each_update_of_a_mixture_lowers_the_divergence_to_the_least(monkeypatch, causal):
    x = normal(2, 20, 3)
    y = normal(2, 20, 3, seed=1)
    rows = normal(5, 3, seed=2)
    seen = torch.ones(20, 20, dtype=torch.bool).tril(0 if causal else 20)
    exact = (x @ y.mT).masked_fill(~seen, -torch.inf).softmax(-1)
    found = []
    for updates in (0, 1, 2, 5, 20, 4000):
        monkeypatch.setattr(mixture, "UPDATES", updates)
        log_weights = mixture.fit_weights(x, y, rows, torch.zeros(1, 5).double(), exact, seen)
        found.append(float(divergence(log_weights, x, y, rows, exact, seen)))
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.98 * found[0]
    for moved in log_weights + 0.05 * torch.cat([torch.eye(5), -torch.eye(5)]).double():
        assert divergence(moved[None], x, y, rows, exact, seen) > found[-1] - 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [6.0, 40.0, 1e4])
def test_weights_are_fitted_to_vectors_of_any_length(monkeypatch, causal, length):
    x = length * normal(2, 20, 3)
    y = length * normal(2, 20, 3, seed=1)
    rows = normal(5, 3, seed=2)
    rows = length * rows
    seen = torch.ones(20, 20, dtype=torch.bool).tril(0 if causal else 20)
    exact = (x @ y.mT).masked_fill(~seen, -torch.inf).softmax(-1)
    found = []
    for updates in (0, 1, 5, 30):
        monkeypatch.setattr(mixture, "UPDATES", updates)
        log_weights = mixture.fit_weights(x, y, rows, torch.zeros(1, 5).double(), exact, seen)
        assert log_weights.isfinite().all()
        args = log_weights, x, y, rows, exact, seen
        found.append(float(divergence(*args, least=mixture.TINY)))
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("counts", [[1, 2, 3, 4, 5, 6, 7], [2, 2, 5, 9], [4, 4, 4], [1]])
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
    g = torch.Generator().manual_seed(seed)
    centres = 2.5 * torch.randn(heads, 6, d, generator=torch.Generator().manual_seed(7))
    at = torch.randint(6, (2, heads, length), generator=g)
    both = []
    for _ in range(2):
        both.append(
            torch.stack([centres[h][at[:, h]] for h in range(heads)], 1)
            + 0.5 * torch.randn(2, heads, length, d, generator=g)
        )
    q, k = both
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
def test_a_mixture_is_nearer_than_one_gaussian_on_clusters(causal):
    others = error(calibrated("favorsharp", causal), *clustered())
    for weights in ("fitted", "unbiased"):
        assert (
            error(calibrated("favormix", causal, **{"features.weights": weights}), *clustered())
            < 0.8 * others
        )


def test_calibration_passes_are_exact_and_the_map_is_that_of_all_of_them():
    layer = Mechanism.of("favormix", m=16).layer(2, 8).eval()
    q, k, v = clustered(seed=1)
    with layer.calibration(), torch.no_grad():
        torch.testing.assert_close(
            layer(q, k, v), exact_attention(layer.scale * q, layer.scale * k, v)
        )
        layer(*clustered(seed=2))
        assert int(layer.clusters.fits) == 0
    assert int(layer.clusters.fits) == 1
    both = []
    for side in (0, 1):
        both.append(
            torch.cat([clustered(seed=seed)[side] * layer.scale for seed in (1, 2)]).transpose(0, 1)
        )
    x, y = both
    expected = Mixture(size=16).fit_sequences(x, y)
    torch.testing.assert_close(
        layer.clusters.params().centres, expected.centres, rtol=1e-4, atol=1e-4
    )


def test_padding_is_no_part_of_the_fit_of_a_mixture():
    """Nor a sequence that is nothing else."""
    q, k, v = clustered()
    mask = torch.arange(64) < torch.tensor([[40], [0]])
    masked, alone = (Mechanism.of("favormix", m=8).layer(2, 8).eval() for _ in range(2))
    with masked.calibration(), alone.calibration(), torch.no_grad():
        masked(*(t.masked_fill(~mask[:, None, :, None], torch.nan) for t in (q, k)), v, mask)
        alone(*(t[:1, :, :40] for t in (q, k, v)))
    actual = masked.clusters.params()
    expected = alone.clusters.params()
    torch.testing.assert_close(actual, expected)


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
    for each in (layer, other):
        each(q, k[:, :2], v[:, :2])
        assert int(each.clusters.fits) == 1
    centres = layer.clusters.params().centres
    assert centres.shape == (4, 16, 8)
    assert not torch.allclose(centres[0], centres[1])
    expected = other.clusters.params().centres
    torch.testing.assert_close(centres, expected)


@pytest.mark.parametrize("weights", ["fitted", "unbiased"])
def test_parameters_of_a_mixture_are_trained_as_those_of_other_maps(weights):
    layer = Mechanism.of(
        "favormix", m=16, learn="parameters", **{"features.weights": weights}
    ).layer(2, 8)
    for seed in range(2):
        out = layer(*clustered(seed=seed))
    out.square().sum().backward()
    names = {
        name
        for name, p in layer.named_parameters()
        if p.grad is not None and p.grad.abs().sum() > 0
    }
    assert {"clusters.fitted_0", "clusters.fitted_1"} <= names


def test_a_mixture_of_the_gaussian_kernel():
    """Without a balance, which |x - y| would see."""
    phi = Mixture("gaussian", weights="unbiased", size=16)
    x = 0.4 * normal(40, 3)
    params = phi.fit(Statistics.of(x, x))
    found = estimates(x[:1], x[1:2], params, 5_000, phi=phi)
    exact = (-(x[0] - x[1]).square().sum() / 2).exp()
    assert params.balance is None
    assert abs(found.mean() - exact) < 4.5 * found.std() / found.numel() ** 0.5


# ---- what is refused

WITHOUT_SECOND = Moments.from_values(mean=torch.zeros(3), mean_sq=torch.ones(3))
BAD = {
    "d=257: expected at most 256": lambda: SDERF().fit(
        Statistics.of(torch.zeros(2, 257), torch.zeros(2, 257))
    ),
    "balance=True: expected kernel='softmax'": lambda: SDERF("gaussian", balance=True),
    "no 'covariance'": lambda: SDERF().fit(Statistics(WITHOUT_SECOND, WITHOUT_SECOND)),
    "estimate no kernel": lambda: Hedgehog().log_kernel(torch.ones(2), torch.ones(2)),
    "expected softmax": lambda: Hedgehog("gaussian"),
    "antithetic=true": lambda: Mixture(antithetic=True),
    "size=None": lambda: Mixture().fit(Statistics.of(torch.ones(9, 3), torch.ones(9, 3))),
    "no closed-form variance": lambda: UNBIASED.log_relative_second_moment(
        torch.ones(3), torch.ones(3), fit_of(UNBIASED)
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises((ValueError, AttributeError, NotImplementedError), match=message):
        BAD[message]()


def test_vectors_that_are_not_finite_are_refused_and_the_diagonal_has_no_limit():
    for phi in (SDERF(), SDERF(diagonal=True)):
        with pytest.raises(NotFinite, match="fitted A: not finite"):
            phi.fit(Statistics.of(torch.full((3, 2), torch.inf), torch.zeros(3, 2)))
    wide = torch.randn(2, 300)
    actual = SDERF(diagonal=True).fit(Statistics.of(wide, wide)).root.shape
    assert actual == (1, 300)
    assert isinstance(SDERF().fit(Statistics.of(wide[:, :256], wide[:, :256])), SDERFParams)


@pytest.mark.parametrize(
    "phi, options, words",
    [
        (GERF(), {"learn": "parameters"}, "GERF has no trainable"),
        (HypRF(), {"learn": "parameters"}, "has none; use learn=projections"),
        (OPRF(), {"learn": "projections", "redraw_every": 3}, "redraw_every=3: expected 0"),
        (Hedgehog(), {"redraw_every": 1}, "redraw_every=1: expected 0"),
        (OPRF(), {"learn": "all"}, "attention.learn=all: expected none, parameters or projections"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_refused(phi, options, words):
    with pytest.raises(ValueError, match=words):
        module_cases.make(phi, **options)
