"""Learned maps, and layers that train what other maps are made of: laws, gradients, state, and what they refuse."""

import pytest
import torch
from module_cases import B, D, H, L, make, qkv, same, state
from torch.testing import assert_close

from crt_exp import samplers
from crt_exp.attention import attention, attention_reference
from crt_exp.features import GERF, OPRF, SDERF, SMREG, AutoRF, Hedgehog, HypRF, PosRF, Statistics
from crt_exp.features.statistics import log_kernel
from crt_exp.mechanism import Mechanism

TRAINED = [(Hedgehog(), "none"), (PosRF(), "projections"), (OPRF(), "parameters"), (OPRF(), "projections"),
           (SDERF(antithetic=True), "parameters"), (SDERF(diagonal=True, centred=False), "projections")]
each = pytest.mark.parametrize("phi, learn", TRAINED, ids=lambda value: str(value))


def hedgehog(m=6, d=4, scale=1.0):
    phi, g = Hedgehog(), torch.Generator().manual_seed(0)
    noise = phi.noise(m, lambda p: samplers.orthogonal(p.m, d, g, dtype=torch.float64))
    return phi, tuple(type(n)(scale * n.weight.clone(), n.gaussian) for n in noise)


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_hedgehog_is_two_softmaxes(scale):
    """Positive, bounded by 1, 2m features of a sum of 2, whatever the length of a vector is."""
    phi, noise = hedgehog()
    x = scale * torch.randn(5, 4, dtype=torch.float64)
    for side, rows in ((phi.phi_q, noise[0]), (phi.phi_k, noise[1])):
        f = side(x, noise)
        assert f.exp().shape == (5, phi.width(6)) and f.log_scale.isfinite().all() and (f.log_scale <= 0).all()
        u = x @ rows.rows().mT
        assert_close(f.exp(), torch.cat([u.softmax(-1), (-u).softmax(-1)], -1))
        assert_close(f.exp().sum(-1), torch.full((5,), 2.0, dtype=torch.float64))


def test_hedgehog_begins_near_softmax():
    """Gaussian rows, the same of both sides: with many of them m phi.phi / 2 is near cosh-like averages of exp(x.y)."""
    phi, noise = hedgehog(m=20_000)
    x, y = torch.randn(2, 3, 4, dtype=torch.float64).mul(0.5).unbind(0)
    assert torch.equal(noise[0].rows(), noise[1].rows())
    found = phi.phi_q(x, noise).exp() @ phi.phi_k(y, noise).exp().mT * 20_000 / 2
    assert_close(found, log_kernel("softmax", x[:, None], y[None]).exp(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_hedgehog_is_its_materialised_twin(causal, masked):
    phi, noise = hedgehog()
    g = torch.Generator().manual_seed(1)
    x, y, v = (torch.randn(B, 2, 150, 4, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.rand(B, 150, generator=g) > 0.3 if masked else None
    ours, theirs = (f(x, y, v, phi, noise, (), causal=causal, key_mask=mask)
                    for f in (attention, attention_reference))
    assert_close(ours, theirs)
    for a, b in zip(torch.autograd.grad(ours.square().sum(), (x, y, v)),
                    torch.autograd.grad(theirs.square().sum(), (x, y, v))):
        assert_close(a, b)


def test_hedgehog_says_what_it_is_not():
    with pytest.raises(ValueError, match="expected softmax"):
        Mechanism.of(features="hedgehog").map("gaussian")
    for law in (Hedgehog().log_kernel, Hedgehog().log_relative_second_moment):
        with pytest.raises(NotImplementedError, match="estimate no kernel"):
            law(torch.ones(2), torch.ones(2))
    assert not Mechanism.of("hedgehog").estimates and Mechanism.of("favorpp").estimates


# ---- layers that train


def trained(phi, learn, seed=0, **options):
    layer = make(phi, learn=learn, **options)
    q, k, v = qkv(seed)
    with layer.calibration():
        layer.eval()(q, k, v)
    return layer


@each
def test_gradients_are_those_of_the_materialised_twin(phi, learn):
    """To rows and parameters, with the vectors' own."""
    layer = trained(phi, learn).double()
    q, k, v = (t.double().requires_grad_() for t in qkv(1))
    wanted = [q, k, v, *layer.parameters()]
    assert len(wanted) > 3
    twin = attention_reference(layer.scaled(q), layer.scaled(k), v, phi, layer.noise, layer.fitted_params(q, k, None))
    assert_close(layer(q, k, v), twin)
    for ours, theirs in zip(torch.autograd.grad(layer(q, k, v).sin().sum(), wanted),
                            torch.autograd.grad(twin.sin().sum(), wanted)):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert ours.abs().max() > 0


@each
def test_no_future_padding_or_gradient_changes_outputs(phi, learn):
    """Causal = its own prefixes = token by token; with gradient = without."""
    layer = trained(phi, learn, causal=True)
    q, k, v = qkv(2)
    with torch.no_grad():
        whole = layer(q, k, v)
        assert_close(layer(q[:, :, :7], k[:, :, :7], v[:, :, :7]), whole[:, :, :7], rtol=1e-4, atol=1e-5)
    assert_close(layer(q, k, v), whole, rtol=1e-4, atol=1e-5)
    past = layer.past()
    steps = [past.step(*(t[:, :, i:i + 1] for t in (q, k, v))) for i in range(L)]
    assert_close(torch.cat(steps, 2), whole, rtol=1e-4, atol=1e-5)
    keep = torch.arange(L) < 9
    with torch.no_grad():
        assert_close(layer(q, k, v, keep.expand(B, L))[:, :, :9], whole[:, :, :9], rtol=1e-4, atol=1e-5)


@each
def test_training_fits_better_and_a_calibration_leaves_it(phi, learn):
    layer = trained(phi, learn)
    q, k, v = qkv(3)
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
    before, other = state(layer), make(phi, learn=learn)
    with layer.calibration():
        layer(*qkv(4))
    assert same(state(layer), before)
    other.load_state_dict(before)
    with torch.no_grad():
        assert torch.equal(other.eval()(q, k, v), layer(q, k, v))


def test_trained_parameters_of_favor_sharp_stay_unbiased():
    """Any R, shift and balance that do not depend on the rows: here moved far from the fitted ones."""
    phi, g = SDERF(), torch.Generator().manual_seed(0)
    x, y = (0.4 * torch.randn(n, 2, generator=g, dtype=torch.float64) for n in (3, 4))
    params = phi.fit(Statistics.of(x, y))
    moved = phi.admitted(type(params)(*(t + 0.2 * torch.randn(t.shape, generator=g, dtype=torch.float64)
                                        for t in params)))
    noise = samplers.iid(8, 2, g, batch=(20_000,), dtype=torch.float64)
    found = phi.phi_q(x, noise, moved).exp() @ phi.phi_k(y, noise, moved).exp().mT
    sem = found.std(0) / len(found) ** 0.5
    exact = log_kernel("softmax", x[:, None], y[None]).exp()
    assert (sem < 0.03 * exact).all() and ((found.mean(0) - exact).abs() < 5 * sem).all()
    assert float(OPRF().admitted(OPRF().unfitted(2)._replace(A=torch.tensor([[0.3]]))).A) < 1 / 8


def test_rows_begin_as_those_of_the_map_that_is_not_trained():
    plain, rows = make(OPRF(), seed=3), make(OPRF(), seed=3, learn="projections")
    assert torch.equal(plain.omega, rows.omega) and rows.omega.requires_grad and not plain.omega.requires_grad
    layer = make(Hedgehog(), seed=3)
    assert torch.equal(layer.omega_queries, layer.omega_keys) and layer.omega_keys.shape == (H, 16, D)
    assert layer.omega_queries.data_ptr() != layer.omega_keys.data_ptr()


@pytest.mark.parametrize("phi, options, words", [
    (GERF(), {"learn": "parameters"}, "GERF has no trainable"),
    (AutoRF(), {"learn": "projections"}, "AutoRF has no trainable"),
    (SMREG(), {"learn": "projections"}, "SMREG has no trainable"),
    (HypRF(), {"learn": "parameters"}, "has none; use learn=projections"),
    (OPRF(), {"learn": "projections", "redraw_every": 3}, "redraw_every=3: expected 0"),
    (Hedgehog(), {"redraw_every": 1}, "redraw_every=1: expected 0"),
    (OPRF(), {"learn": "all"}, "attention.learn=all: expected none, parameters or projections")], ids=str)
def test_what_cannot_be_trained_is_refused(phi, options, words):
    with pytest.raises(ValueError, match=words):
        make(phi, **options)
