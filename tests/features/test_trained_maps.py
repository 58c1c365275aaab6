"""Hedgehog, and layers that train their map."""

import pytest
import torch
from helpers import module_cases
from helpers.nearfar_cases import at_tokens
from helpers.seeds import seeded
from torch.testing import assert_close

from crt_exp import samplers
from crt_exp.attention import (
    attention_reference,
)
from crt_exp.features import (
    GERF,
    OPRF,
    SDERF,
    Hedgehog,
    HypRF,
    PosRF,
)

TRAINED = [
    (Hedgehog(), "none"),
    (PosRF(), "projections"),
    (OPRF(), "parameters"),
    (SDERF(antithetic=True), "parameters"),
    (SDERF(diagonal=True, centred=False), "projections"),
]


trained_maps = pytest.mark.parametrize("phi, learn", TRAINED, ids=lambda value: str(value))


def hedgehog(m=6, d=4, scale=1.0):
    phi = Hedgehog()
    g = seeded()
    noise = phi.noise(m, lambda p: samplers.orthogonal(p.m, d, g, dtype=torch.float64))
    return phi, tuple(type(n)(scale * n.weight.clone(), n.gaussian) for n in noise)


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_hedgehog_is_two_softmaxes(scale):
    """Positive, bounded by 1, 2m features of a sum of 2, whatever the length of a vector is."""
    phi, noise = hedgehog()
    x = scale * torch.randn(5, 4, dtype=torch.float64)
    cases = [(phi.phi_q, noise[0]), (phi.phi_k, noise[1])]
    for side, rows in cases:
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


@trained_maps
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


@trained_maps
def test_no_future_padding_or_gradient_changes_outputs(phi, learn):
    """Causal = its own prefixes = token by token; with gradient = without."""
    layer = trained(phi, learn, causal=True)
    q, k, v = module_cases.qkv(2)
    length = q.shape[2]
    with torch.no_grad():
        whole = layer(q, k, v)
        actual = layer(*at_tokens((q, k, v), slice(7)))
        expected = whole[:, :, :7]
        assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    actual = layer(q, k, v)
    assert_close(actual, whole, rtol=1e-4, atol=1e-5)
    past = layer.past()
    steps = []
    for i in range(length):
        steps.append(past.step(*at_tokens((q, k, v), slice(i, i + 1))))
    actual = torch.cat(steps, 2)
    assert_close(actual, whole, rtol=1e-4, atol=1e-5)
    keep = torch.arange(length) < 9
    with torch.no_grad():
        actual = layer(q, k, v, keep.expand(2, length))[:, :, :9]
        expected = whole[:, :, :9]
        assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@trained_maps
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
def test_maps_without_trainable_parameters_are_refused(phi, options, words):
    with pytest.raises(ValueError, match=words):
        module_cases.make(phi, **options)
