"""Dense-exponential features: their parameters are the best ones, and what leaves softmax unchanged leaves them so.
And the choice of a map for each head by the closed forms."""

import math

import pytest
import torch

from crt_exp import Mechanism, calibrate_attention, describe_attention, samplers, swap_attention
from crt_exp.attention import RandomFeatureAttention, attention, attention_reference, exact_attention
from crt_exp.features import OPRF, SDERF, AutoRF, Moments, PosRF, Statistics
from crt_exp.features.dense import SDERFParams, balance
from crt_exp.features.statistics import Mirrored
from crt_exp.samplers.noise import map_leaves
from crt_exp.features.base import NotFinite
from crt_exp.samplers import DenseNoise

DENSE = [SDERF(), SDERF(diagonal=True), SDERF(antithetic=True), SDERF("gaussian"), SDERF(balance=False),
         SDERF(diagonal=True, centred=False), SDERF(centred=False)]


def vectors(d=6, n=60, seed=0, apart=0.5):
    """Queries and keys (n, d) of other spreads and means, float64."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    x, y = (draw(n, d) @ (draw(d, d) * draw(d).exp() / (2 * d**0.5)) for _ in range(2))
    return x + apart * draw(d), y + apart * draw(d)


def moment(phi, x, y, params=None):
    """The mean over all pairs of the log second moment, relative to the squared kernel."""
    params = phi.fit(Statistics.of(x, y)) if params is None else params
    return phi.log_relative_second_moment(x[:, None], y[None], params).mean().item()


# ---- the fit

@pytest.mark.parametrize("seed", range(3))
def test_every_freedom_that_is_fitted_lowers_the_mean_log_second_moment(seed):
    x, y = vectors(seed=seed)
    plain = {"centred": False, "balance": False}
    order = [SDERF(), SDERF(balance=False), SDERF(**plain), SDERF(diagonal=True, **plain), OPRF(), PosRF()]
    found = [moment(phi, x, y) for phi in order]
    assert found == sorted(found) and found[-1] > found[0] + 1
    diagonal = [moment(SDERF(diagonal=True, balance=balanced), x, y) for balanced in (None, False)]
    assert found[0] < diagonal[0] < diagonal[1]


@pytest.mark.parametrize("phi", [SDERF(balance=False), SDERF(balance=False, centred=False), SDERF(diagonal=True),
                                 SDERF("gaussian")], ids=repr)
def test_no_other_root_or_shift_is_better(phi):
    """Whatever G is: R and h are the best ones for it."""
    x, y = vectors()
    params, g = phi.fit(Statistics.of(x, y)), torch.Generator().manual_seed(1)
    best = moment(phi, x, y, params)
    for size in (1e-3, 0.1):
        for _ in range(5):
            change = size * torch.randn(params.root.shape, generator=g, dtype=torch.float64)
            root = params.root + (change if phi.diagonal else change + change.mT) * params.root.mean()
            assert moment(phi, x, y, params._replace(root=root.clamp(min=0.8) if phi.diagonal else root)) >= best
            if params.shift is not None:
                shift = params.shift + size * torch.randn(params.shift.shape, generator=g, dtype=torch.float64)
                assert moment(phi, x, y, params._replace(shift=shift)) >= best


@pytest.mark.parametrize("diagonal", [False, True])
def test_balance_gives_both_sides_the_same_second_moments(diagonal):
    x, y = vectors()
    G = SDERF(diagonal=diagonal).fit(Statistics.of(x, y)).balance
    of_x, of_y = (x * G, y / G) if diagonal else (x @ G.mT, y @ torch.linalg.inv(G))
    a, b = torch.cov(of_x.mT), torch.cov(of_y.mT)
    a, b = (a.diagonal(), b.diagonal()) if diagonal else (a, b)
    torch.testing.assert_close(a, b, rtol=0.05, atol=0.01 * float(a.abs().max()))  # up to the ridge
    torch.testing.assert_close(G, G.mT if not diagonal else G)


def test_balance_of_one_side_that_lies_in_a_plane_is_finite_and_moderate():
    x, y = vectors(n=200)
    x[:, 2:] = 0
    G = balance(torch.cov(x.mT), torch.cov(y.mT))
    sizes = torch.linalg.eigvalsh(G)
    assert (sizes > 1e-3).all() and (sizes < 1e3).all()
    none = torch.zeros(2, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(balance(none, none), torch.eye(4, dtype=torch.float64).expand(2, 4, 4))


def test_one_size_in_all_directions_is_oprf():
    moments = Moments.known(mean=torch.zeros(4), mean_sq=torch.full((4,), 0.3), second=0.3 * torch.eye(4))
    stats, x = Statistics(moments, moments), torch.randn(5, 4, dtype=torch.float64)
    noise = samplers.iid(7, 4, torch.Generator().manual_seed(0), dtype=torch.float64)
    for kernel in ("softmax", "gaussian"):
        ours, oprf = SDERF(kernel), OPRF(kernel)
        torch.testing.assert_close(ours.phi_q(x, noise, ours.fit(stats)).log_scale,
                                   oprf.phi_q(x, noise, oprf.fit(stats)).log_scale, rtol=1e-6, atol=1e-6)


def test_parameters_of_nothing_are_those_of_favor_plus():
    zeros = torch.zeros(2, 1, 4)
    for phi in (SDERF(), SDERF(diagonal=True)):
        params = phi.fit(Statistics.of(zeros, zeros))
        assert (params.A.abs() < 1e-12).all() and (params.shift == 0).all()
        x, noise = torch.randn(2, 3, 4), samplers.iid(5, 4, torch.Generator().manual_seed(0))
        torch.testing.assert_close(phi.phi_k(x, noise, params).exp(), PosRF().phi_k(x, noise).exp())


@pytest.mark.parametrize("phi", DENSE, ids=repr)
def test_any_parameters_are_unbiased(phi):
    """R, h and G of other vectors, or of none: a stale fit costs variance alone."""
    (x, y), other = (t[:4] / 2 for t in vectors(d=3)), vectors(d=3, seed=5)
    params = phi.fit(Statistics.of(*other))
    noise = samplers.orthogonal(4, 3, torch.Generator().manual_seed(2), batch=(20_000,), dtype=torch.float64)
    estimate = phi.phi_q(x, noise, params).exp() @ phi.phi_k(y, noise, params).exp().mT
    exact, sem = phi.log_kernel(x[:, None], y[None]).exp(), estimate.std(0) / len(estimate) ** 0.5
    assert ((estimate.mean(0) - exact).abs() < 5 * sem).all() and (sem < 0.2 * exact).float().mean() > 0.5


# ---- what leaves softmax unchanged

@pytest.mark.parametrize("phi", [SDERF(), SDERF(diagonal=True), SDERF(antithetic=True)], ids=repr)
def test_shifts_change_no_error_and_no_attention(phi):
    x, y = vectors(d=4)
    shift = torch.tensor([3.0, -2.0, 1.0, 5.0], dtype=torch.float64)
    assert moment(phi, x + shift, y - 2 * shift) == pytest.approx(moment(phi, x, y), rel=1e-9)
    noise, v = samplers.orthogonal(8, 4, torch.Generator().manual_seed(0), dtype=torch.float64), torch.randn(60, 3)

    def run(y):
        return attention(x[None, None], y[None, None], v[None, None], phi, noise, phi.fit(Statistics.of(x, y)))
    torch.testing.assert_close(run(y + shift), run(y), rtol=1e-8, atol=1e-10)


def test_linear_maps_that_leave_products_change_no_error():
    x, y = vectors(d=5, n=300)
    g = torch.Generator().manual_seed(3)
    M = torch.randn(5, 5, generator=g, dtype=torch.float64) + 2 * torch.eye(5, dtype=torch.float64)
    before, after = moment(SDERF(), x, y), moment(SDERF(), x @ M.mT, y @ torch.linalg.inv(M))
    assert after == pytest.approx(before, rel=0.02)  # the ridge alone knows the axes
    assert abs(moment(OPRF(), x @ M.mT, y @ torch.linalg.inv(M)) - moment(OPRF(), x, y)) > 0.1


# ---- statistics

def test_covariances_of_all_kinds_of_moments():
    x, mask = torch.randn(3, 9, 4) + 2, torch.rand(3, 9, generator=torch.Generator().manual_seed(0)) > 0.3
    own = Moments.of(x.masked_fill(~mask[..., None], torch.nan), mask, scale=0.5)
    for i in range(3):
        expected = torch.cov(0.5 * x[i][mask[i]].double().mT, correction=0)
        torch.testing.assert_close(own.covariance[i], expected, rtol=1e-6, atol=1e-9)
    known = Moments.known(mean=own.mean, second=own.second)
    torch.testing.assert_close(known.covariance, own.covariance, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(Mirrored(own).covariance, own.second)
    torch.testing.assert_close(own.second.diagonal(dim1=-2, dim2=-1), own.mean_sq.double(), rtol=1e-5, atol=1e-6)


# ---- attention layers

B, H, L, D = 2, 4, 40, 8


def qkv(seed=0, kv_heads=H):
    g = torch.Generator().manual_seed(seed)
    shift = 2 * torch.randn(1, 1, 1, D, generator=g)
    draw = lambda heads: torch.randn(B, heads, L, D, generator=g)
    return draw(H), draw(kv_heads) + shift, draw(kv_heads)


def layer(phi=None, **options):
    return RandomFeatureAttention(phi or SDERF(antithetic=True), samplers.orthogonal, 16, H, D, **options)


def test_a_causal_layer_is_fitted_to_earlier_batches_alone():
    module = layer(causal=True)
    first = module(*qkv(0))
    torch.testing.assert_close(first, layer(PosRF(antithetic=True), causal=True)(*qkv(0)), rtol=1e-4, atol=1e-5)
    module(*qkv(1))
    q, k, _ = (t.transpose(0, 1).flatten(1, 2) * D**-0.25 for t in qkv(0))
    ours, expected = module._running_params(), SDERF().fit(Statistics.of(q, k))
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_a_restored_causal_layer_goes_on_as_the_original():
    module, other = layer(causal=True, kv_heads=2), layer(causal=True, kv_heads=2)
    for seed in range(2):
        module(*qkv(seed, 2))
    other.load_state_dict(module.state_dict())
    assert module.state_dict()["running_x_second"].shape == (2, D, D)
    for m in (module, other):
        m(*qkv(2, 2))
    torch.testing.assert_close(module.eval()(*qkv(3, 2)), other.eval()(*qkv(3, 2)), rtol=0, atol=0)
    past, (q, k, v) = module.past(), qkv(4, 2)
    steps = [past.step(q[:, :, i:i + 1], k[:, :, i:i + 1], v[:, :, i:i + 1]) for i in range(L)]
    torch.testing.assert_close(torch.cat(steps, 2), module(q, k, v), rtol=1e-4, atol=1e-5)


def test_other_maps_keep_no_second_moments():
    assert not any("second" in name for name in layer(OPRF(), causal=True).state_dict())
    assert not any("second" in name for name in layer(SDERF(diagonal=True), causal=True).state_dict())


@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_no_part_of_what_a_layer_sees(causal):
    long, short = layer(causal=causal), layer(causal=causal)
    mask = torch.arange(L)[None].expand(B, L) < 30
    for seed in range(2):
        q, k, v = qkv(seed)
        out = long(q, k.masked_fill(~mask[:, None, :, None], torch.nan), v, mask)
        expected = short(*(t[:, :, :30] for t in (q, k, v)))
        torch.testing.assert_close(out[:, :, :30], expected, rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1.0, 4.0])
def test_engines_of_single_precision_equal_the_reference(causal, size):
    """The library in C where there is one: outputs and gradients."""
    q, k, v = (size**0.5 * t * D**-0.25 for t in qkv())
    phi = SDERF(antithetic=True)
    params = phi.fit(Statistics.of(q, k))
    noise = samplers.orthogonal(16, D, torch.Generator().manual_seed(0), batch=(H,))
    found = []
    for run, dtype in ((attention, torch.float32), (attention_reference, torch.float64)):
        inputs = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        out = run(*inputs, phi, noise, params, causal=causal)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for a, b in zip(*found):
        assert (a - b).abs().max() < 1e-3 * b.abs().max()


@pytest.mark.parametrize("causal", [False, True])
def test_autocast_leaves_the_precision_of_features(causal):
    module, (q, k, v) = layer(causal=causal, kv_heads=2), qkv(kv_heads=2)
    for _ in range(2):
        module(q, k, v)
    expected = module.eval()(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(module(q, k, v), expected)


def test_favorsharp_is_dense_centred_balanced_and_antithetic():
    mechanism = Mechanism.of("favorsharp", m=8)
    assert mechanism.map() == SDERF(antithetic=True) and mechanism.map().balanced and mechanism.map().centred
    assert mechanism.sampler_part.name == "orthogonal" and mechanism.map().width(8) == 16
    out = mechanism.layer(H, D).eval()(*qkv())
    assert out.shape == (B, H, L, D) and out.isfinite().all()


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


def test_auto_takes_for_each_head_what_is_best_on_vectors_that_it_was_not_fitted_to():
    x, y = (t.transpose(0, 1).flatten(1, 2).double() for t in three_kinds()[:2])
    phi = AutoRF()
    params = phi.fit(Statistics.of(x, y))
    assert phi.names(params) == KINDS
    for h in range(3):
        moments = {name: moment(part, x[h, L:], y[h, L:], part.fit(Statistics.of(x[h, :L], y[h, :L])))
                   for name, part in phi.candidates(D).items()}
        assert min(moments, key=moments.get) == KINDS[h]


@pytest.mark.parametrize("causal", [False, True])
def test_each_head_of_auto_is_its_own_map(causal):
    q, k, v = three_kinds()
    phi, noise = AutoRF(), samplers.orthogonal(8, D, torch.Generator().manual_seed(0), (3,))
    stats = Statistics.of(*(t.transpose(0, 1).flatten(1, 2) for t in (q, k)))
    out = attention(q, k, v, phi, noise, phi.fit(stats), causal=causal)
    for h, (name, own) in enumerate(phi.candidates(D).items()):
        assert name == KINDS[h]
        alone = map_leaves(lambda t, h=h: t[h:h + 1], own.fit(stats))
        of_head = (t[:, h:h + 1] for t in (q, k, v))
        expected = attention(*of_head, own, DenseNoise(noise.rows()[h:h + 1], True), alone, causal=causal)
        torch.testing.assert_close(out[:, h:h + 1], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_chooses_once_and_keeps_its_choice(causal):
    options = {"causal": causal, "fit_steps": 2, "scaling": 1.0}
    make = lambda phi: RandomFeatureAttention(phi, samplers.orthogonal, 16, 3, D, **options)
    module, inputs = make(AutoRF()), three_kinds()
    with pytest.warns(UserWarning, match="no statistics yet.*calibrate_attention"):
        first = module.eval()(*inputs)
    torch.testing.assert_close(first, make(PosRF(antithetic=True)).eval()(*inputs))
    module.train()
    for seed in range(3):
        module(*three_kinds(seed))
    assert module.phi.names(module.clusters.params()) == KINDS
    for seed in range(3, 6):
        module(*three_kinds(seed))
    assert int(module.clusters.fits) == 1
    other = make(AutoRF())
    other.load_state_dict(module.state_dict())
    torch.testing.assert_close(other.eval()(*inputs), module.eval()(*inputs), rtol=0, atol=0)


def test_auto_beyond_full_matrices_and_for_the_gaussian_kernel():
    wide = torch.randn(9, 300)
    assert AutoRF().fit(Statistics.of(wide, wide)).root.shape == (1, 300)
    params = AutoRF("gaussian").fit(Statistics.of(wide[:, :4], wide[:, 4:8]))
    torch.testing.assert_close(params.balance, torch.eye(4, dtype=torch.float64))


def test_describe_attention_says_what_each_layer_chose():
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2,
                                          enable_nested_tensor=False).eval()
    swap_attention(encoder, "favorpp", features="auto", m=8)
    assert describe_attention(encoder)["chosen"].isna().all()
    calibrate_attention(encoder, [torch.randn(2, 30, 32, generator=torch.Generator().manual_seed(0))])
    for chosen in describe_attention(encoder)["chosen"]:
        assert sum(int(part.rsplit(" ", 1)[1]) for part in chosen.split(", ")) == 4


# ---- the order of errors

def matched_heads(power, mean, least, most, d=16, length=256, heads=12, turn=0.3):
    """Keys with variances l^-2 power around a mean, and queries that are the same vectors, turned a little: (1, heads,
    length, d), with a mean |x + y|^2 that goes from `least` to `most` over the heads."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    spectrum = torch.arange(1, d + 1, dtype=torch.float64) ** -power
    y = (draw(heads, length, d) * spectrum + mean * draw(heads, 1, d)) @ torch.linalg.qr(draw(heads, d, d))[0]
    A = draw(heads, d, d) / d**0.5
    x = y @ torch.linalg.matrix_exp(turn * (A - A.mT))
    size = Statistics.of(x, y).mean_sq_sum
    root = (torch.linspace(least, most, heads, dtype=torch.float64) / size).sqrt()[:, None, None]
    return (x * root)[None], (y * root)[None], draw(1, heads, length, d)


def relative_errors(phi, m, x, y, v, draws=5):
    """|estimate - exact| / |exact| of the output of each head, Frobenius, the mean over draws: (heads,)."""
    exact, params, found = exact_attention(x, y, v), phi.fit(Statistics.of(x, y)), []
    for seed in range(draws):
        g = torch.Generator().manual_seed(seed)
        noise = samplers.orthogonal(m, x.shape[-1], g, batch=(x.shape[1],), dtype=torch.float64)
        gone = attention(x, y, v, phi, noise, params) - exact
        found.append((gone.square().sum((0, 2, 3)) / exact.square().sum((0, 2, 3))).sqrt())
    return torch.stack(found).mean(0)


def gain(better, worse):
    """Mean over heads of the log ratio of errors, and half its 95% Student interval."""
    from scipy.stats import t

    logs = (better / worse).log()
    return logs.mean().item(), float(t.ppf(0.975, len(logs) - 1)) * logs.std().item() / math.sqrt(len(logs))


ARMS = {"pos": (PosRF(), 256), "oprf": (OPRF(), 256), "sderf": (SDERF(), 256), "pairs": (SDERF(antithetic=True), 128)}
DENSE_FIRST = [("sderf", "oprf"), ("pairs", "oprf")]
ORDER = [*DENSE_FIRST, ("oprf", "pos")]


@pytest.mark.slow
@pytest.mark.parametrize("power, mean, least, most, verdicts", [
    (0.0, 0.0, 8, 20, ORDER),        # alike in all directions: what is left to dense features is little
    (0.7, 0.3, 2, 8, ORDER),
    (0.7, 0.3, 8, 20, DENSE_FIRST),  # the errors of pos and oprf are near 1, and tell nothing
])
def test_on_matched_heads_dense_features_beat_oprf_which_beats_pos(power, mean, least, most, verdicts):
    """Equal columns, 256, from the same seeds; 95% intervals over heads of other vectors."""
    tensors = matched_heads(power, mean, least, most)
    errors = {name: relative_errors(phi, m, *tensors) for name, (phi, m) in ARMS.items()}
    print({name: round(e.mean().item(), 3) for name, e in errors.items()})
    for better, worse in ORDER:
        log_ratio, half = gain(errors[better], errors[worse])
        low, high = math.exp(log_ratio - half), math.exp(log_ratio + half)
        print(f"{better} / {worse}: {math.exp(log_ratio):.3f} ({low:.3f} to {high:.3f})")
        assert high < 1 or (better, worse) not in verdicts


# ---- what is refused

WITHOUT_SECOND = Moments.known(mean=torch.zeros(3), mean_sq=torch.ones(3))
BAD = {
    "d=257: expected at most 256": lambda: SDERF().fit(
        Statistics.of(torch.zeros(2, 257), torch.zeros(2, 257))),
    "balance=True: expected kernel='softmax'": lambda: SDERF("gaussian", balance=True),
    "kernel=laplace": lambda: SDERF("laplace"),
    "no 'covariance'": lambda: SDERF().fit(Statistics(WITHOUT_SECOND, WITHOUT_SECOND)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises((ValueError, AttributeError), match=message):
        BAD[message]()


def test_vectors_that_are_not_finite_are_refused_and_the_diagonal_has_no_limit():
    for phi in (SDERF(), SDERF(diagonal=True)):
        with pytest.raises(NotFinite, match="fitted A: not finite"):
            phi.fit(Statistics.of(torch.full((3, 2), torch.inf), torch.zeros(3, 2)))
    wide = torch.randn(2, 300)
    assert SDERF(diagonal=True).fit(Statistics.of(wide, wide)).root.shape == (1, 300)
    assert isinstance(SDERF().fit(Statistics.of(wide[:, :256], wide[:, :256])), SDERFParams)
