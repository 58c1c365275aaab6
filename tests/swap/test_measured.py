"""The error that calibration measures is that of the layer's output,
and the control beside it is the mean of the values."""

import math
import warnings

import pytest
import torch
from torch import nn

from crt_exp import calibrate_attention, describe_attention, samplers, swap_attention
from crt_exp.attention import RandomFeatureAttention, softmax_attention, uniform_attention
from crt_exp.features import GERF, OPRF, GeomRFPlus, PosRF
from crt_exp.mechanism import Mechanism
from crt_exp.models.language import Transformer
from crt_exp.swap import calibration

B, H, L, D = 3, 4, 200, 16


class Alone(nn.Module):
    """A model of one layer, called with its queries, keys and values."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, q, k, v, key_mask=None):
        return self.layer(q, k, v, key_mask)


def qkv(std, seed, kv_heads=H, length=L, batch=B):
    """Logits of standard deviation `std`; values with a mean."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda heads: torch.randn(batch, heads, length, D, generator=g)
    return std**0.5 * draw(H), std**0.5 * draw(kv_heads), draw(kv_heads) + 0.3


def calibrated(layer, *batches):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*uniform attention.*")
        calibrate_attention(Alone(layer), batches)
    return layer.measured


def relative(found, exact, real=None):
    real = torch.ones_like(exact[..., :1]) if real is None else real
    return float(((found - exact) * real).norm() / (exact * real).norm())


def within(factor, found, true):
    return 1 / factor < found / true < factor


@pytest.mark.parametrize("std", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("phi", [PosRF(), OPRF(), GeomRFPlus()], ids=repr)
@pytest.mark.parametrize("mode", ["own", "causal", "cross"])
def test_measured_error_is_that_of_other_batches(mode, phi, std):
    options = {} if mode == "own" else {mode: True}
    layer = RandomFeatureAttention(phi, samplers.orthogonal, 64, H, D, kv_heads=2, **options).eval()
    found = calibrated(layer, qkv(std, 1, 2), qkv(std, 2, 2))
    q, k, v = qkv(std, 3, 2)
    exact = softmax_attention(q * layer.scale, k * layer.scale, v, causal=layer.causal)
    assert within(1.2, found.relative_error, relative(layer(q, k, v), exact))
    assert within(1.2, found.relative_uniform, relative(uniform_attention(q, k, v, causal=layer.causal), exact))


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_measured_error_of_each_layer_of_a_transformer(scale):
    """Against exact attention on what the layer itself is given, for other tokens."""
    torch.manual_seed(0)
    model = Transformer(4, 3, 256, 64, Mechanism.of("favorpp", m=64).layer).eval()
    for block in model.blocks:
        block.qkv.weight.data[:128] *= 3**0.5 * scale**0.5  # which gives logits of that standard deviation
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*uniform attention.*")
        calibrate_attention(model, [torch.randn(2, L, 64)])
    errors = []
    def note(layer, given, out):
        q, k, v = given[:3]
        exact = softmax_attention(q * layer.scale, k * layer.scale, v)
        errors.append((relative(out, exact), relative(uniform_attention(q, k, v), exact)))
    layers = [part for part in model.modules() if isinstance(part, RandomFeatureAttention)]
    for layer in layers:
        layer.register_forward_hook(note)
    with torch.no_grad():
        model(torch.randn(2, L, 64))
    assert len(errors) == len(layers) == 3
    for layer, (error, uniform) in zip(layers, errors):
        assert within(1.5, layer.measured.relative_error, error)
        assert within(1.5, layer.measured.relative_uniform, uniform)


@pytest.mark.parametrize("mode", ["own", "causal", "cross"])
def test_padding_changes_nothing(mode):
    options = {} if mode == "own" else {mode: True}
    make = lambda: RandomFeatureAttention(OPRF(), samplers.orthogonal, 32, H, D, **options).eval()
    q, k, v = qkv(1.0, 0, length=60)
    cut = calibrated(make(), (q, k, v))
    keep = torch.ones(B, 80, dtype=torch.bool)
    keep[:, 60:] = False
    junk = lambda t: torch.cat([t, torch.full_like(t[:, :, :20], 50.0)], 2)
    padded = calibrated(make(), (q if mode == "cross" else junk(q), junk(k), junk(v), keep))
    assert padded.exact == pytest.approx(cut.exact, rel=1e-4)
    assert padded.error == pytest.approx(cut.error, rel=1e-3) and padded.uniform == pytest.approx(cut.uniform, rel=1e-3)


def test_a_part_of_a_large_batch_is_measured(monkeypatch):
    layer = RandomFeatureAttention(OPRF(), samplers.orthogonal, 32, H, D, causal=True).eval()
    batch = qkv(1.0, 0, batch=8)
    whole = calibrated(layer, batch)
    assert whole.exact < float(batch[2][:4].square().sum())
    monkeypatch.setattr(calibration, "QUERIES", 20)
    assert within(1.5, calibrated(layer, batch).relative_error, whole.relative_error)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_exact_rows_and_uniform_attention_are_those_of_softmax(causal, masked):
    q, k, v = (t.double() for t in qkv(1.0, 0, 2, length=9))
    q, rows = q[:, :, 3:], torch.tensor([4, 0, 5])
    keep = torch.rand(B, 9) < 0.6 if masked else None
    if masked:
        k, v = (torch.where(keep[:, None, :, None], t, math.nan) for t in (k, v))
    expected = softmax_attention(0.5 * q, k, v, causal=causal, key_mask=keep)
    found = calibration.exact_rows(q, k, v, rows, 0.5, causal=causal, key_mask=keep)
    torch.testing.assert_close(found, expected[:, :, rows])
    flat = softmax_attention(0 * q, torch.nan_to_num(k), v, causal=causal, key_mask=keep)
    torch.testing.assert_close(uniform_attention(q, k, v, causal=causal, key_mask=keep), flat)


def test_layers_worse_than_the_mean_of_the_values_are_warned_of():
    layer = lambda m: RandomFeatureAttention(OPRF(), samplers.orthogonal, m, H, D).eval()
    told = r"1 of 1 layers .* uniform attention: layer \([\d.]+, uniform 0\.[\d]+\); use more features \(m\)"
    with pytest.warns(UserWarning, match=told) as said:
        calibrate_attention(Alone(layer(4)), [qkv(1.0, 0)])
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrate_attention(Alone(layer(2048)), [qkv(1.0, 0)])


def test_measuring_leaves_the_layer_as_it_is():
    for phi, options in ((GERF(), {"causal": True}), (OPRF(), {})):
        options = options | {"redraw_every": 1}
        one, other = (RandomFeatureAttention(phi, samplers.orthogonal, 16, H, D, **options).eval() for _ in range(2))
        calibrated(one, qkv(1.0, 0))
        with other.calibration():
            other(*qkv(1.0, 0))
        assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values()))
        assert one.denominators.fraction == other.denominators.fraction and not one._forward_hooks


def test_matrices_that_are_asked_for_are_not_measured():
    """need_weights, the default, puts unit vectors behind the values."""
    x, found = torch.randn(2, 30, 16), []
    for need in (False, True):
        torch.manual_seed(0)
        module = swap_attention(nn.MultiheadAttention(16, 4, batch_first=True), "favorpp", m=64)
        calibrate_attention(module, [{"query": x, "key": x, "value": x, "need_weights": need}])
        found.append(describe_attention(module)[["error on calibration", "uniform's error"]].iloc[0].tolist())
    assert found[0] == pytest.approx(found[1], rel=1e-4)
