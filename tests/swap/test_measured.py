"""Calibration fits causal layers and measures every layer: the error is that of the layer's output, the control beside
it is the mean of the values, and the table states both."""

import math
import warnings

import pytest
import torch
import transformers
from helpers.seeds import seeded
from helpers.swap_models import bert, build_model, gpt2, inputs, llama, run, swapped
from torch import nn
from torch.testing import assert_close

from crt_exp import (
    calibrate_attention,
    describe_attention,
    samplers,
    swap_attention,
    unswap_attention,
)
from crt_exp.attention import RandomFeatureAttention, softmax_attention, uniform_attention
from crt_exp.features import GERF, OPRF, GeomRFPlus, PosRF

pytestmark = pytest.mark.usefixtures("one_thread")
B = 3
H = 4
L = 200
D = 16


def layer_of(phi=None, m=32, mode="own", **options):
    if mode != "own":
        options[mode] = True
    layer = RandomFeatureAttention(phi or OPRF(), samplers.orthogonal, m, H, D, **options)
    return layer.eval()


def qkv(std, seed, kv_heads=H, length=L, batch=B):
    """Logits of standard deviation `std`; values with a mean."""
    g = seeded(seed)

    def draw(heads):
        return torch.randn(batch, heads, length, D, generator=g)

    q = std**0.5 * draw(H)
    k = std**0.5 * draw(kv_heads)
    return q, k, draw(kv_heads) + 0.3


def calibrated(layer, *batches):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*uniform attention.*")
        calibrate_attention(layer, batches)
    return layer.measured


def relative(found, exact):
    return float((found - exact).norm() / exact.norm())


def within(factor, found, true):
    return 1 / factor < found / true < factor


@pytest.mark.parametrize(
    "mode, phi, std",
    [
        ("own", PosRF(), 0.3),
        ("own", OPRF(), 2.0),
        ("causal", OPRF(), 1.0),
        ("causal", GeomRFPlus(), 0.3),
        ("cross", GeomRFPlus(), 2.0),
        ("cross", PosRF(), 1.0),
    ],
    ids=repr,
)
def test_measured_error_is_that_of_other_batches(mode, phi, std):
    layer = layer_of(phi, 64, mode, kv_heads=2)
    actual = calibrated(layer, qkv(std, 1, 2), qkv(std, 2, 2))
    q, k, v = qkv(std, 3, 2)
    exact = softmax_attention(q * layer.scale, k * layer.scale, v, causal=layer.causal)
    error = relative(layer(q, k, v), exact)
    assert within(1.2, actual.relative_error, error)
    uniform = relative(uniform_attention(q, k, v, causal=layer.causal), exact)
    assert within(1.2, actual.relative_uniform, uniform)


@pytest.mark.parametrize("mode", ["own", "causal", "cross"])
def test_padding_changes_nothing(mode):
    q, k, v = qkv(1.0, 0, length=60)
    cut = calibrated(layer_of(mode=mode), (q, k, v))
    keep = torch.ones(B, 80, dtype=torch.bool)
    keep[:, 60:] = False

    def junk(t):
        padding = torch.full_like(t[:, :, :20], 50.0)
        return torch.cat([t, padding], 2)

    queries = q if mode == "cross" else junk(q)
    padded = calibrated(layer_of(mode=mode), (queries, junk(k), junk(v), keep))
    assert padded.exact == pytest.approx(cut.exact, rel=1e-4)
    assert padded.error == pytest.approx(cut.error, rel=1e-3)
    assert padded.uniform == pytest.approx(cut.uniform, rel=1e-3)


@pytest.mark.parametrize(
    "causal, masked",
    [
        (False, False),
        (False, True),
        (True, True),
    ],
)
def test_uniform_attention_is_that_of_equal_logits(causal, masked):
    q, k, v = (t.double() for t in qkv(1.0, 0, 2, length=9))
    q = q[:, :, 3:]
    keep = None
    if masked:
        keep = torch.rand(B, 9) < 0.6
    if masked:
        real = keep[:, None, :, None]
        k = torch.where(real, k, math.nan)
        v = torch.where(real, v, math.nan)
    flat = softmax_attention(0 * q, torch.nan_to_num(k), v, causal=causal, key_mask=keep)
    actual = uniform_attention(q, k, v, causal=causal, key_mask=keep)
    assert_close(actual, flat)


def test_layers_worse_than_the_mean_of_the_values_are_warned_of():
    told = r"1 of 1 layers .* uniform attention:  \([\d.]+, uniform 0\.[\d]+\); use more features \(m\)"
    with pytest.warns(UserWarning, match=told) as said:
        calibrate_attention(layer_of(m=4), [qkv(1.0, 0)])
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrate_attention(layer_of(m=2048), [qkv(1.0, 0)])


def test_measuring_leaves_the_layer_as_it_is():
    cases = [(GERF(), "causal"), (OPRF(), "own")]
    for phi, mode in cases:
        one = layer_of(phi, 16, mode, redraw_every=1)
        other = layer_of(phi, 16, mode, redraw_every=1)
        calibrated(one, qkv(1.0, 0))
        with other.calibration():
            other(*qkv(1.0, 0))
        expected = other.state_dict()
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, expected[name])
        assert one.denominators.fraction == other.denominators.fraction
        assert not one._forward_hooks


def test_requested_matrices_are_not_measured():
    """need_weights, the default, puts unit vectors behind the values."""
    x = torch.randn(2, 30, 16)
    actual = []
    for need in (False, True):
        torch.manual_seed(0)
        module = nn.MultiheadAttention(16, 4, batch_first=True)
        swap_attention(module, "favorpp", m=64)
        batch = {"query": x, "key": x, "value": x, "need_weights": need}
        table = describe_attention(calibrate_attention(module, [batch]))
        actual.append(table[["error on calibration", "uniform's error"]].iloc[0].tolist())
    assert actual[0] == pytest.approx(actual[1], rel=1e-4)


# ---- of whole models


def layers_of(model):
    return [part for part in model.modules() if isinstance(part, RandomFeatureAttention)]


@pytest.mark.filterwarnings(
    "ignore:.*further from exact attention than uniform attention:UserWarning"
)
def test_calibration_replaces_the_statistics_of_causal_layers_alone():
    """Also those of training passes that no pass has folded in yet; the mode of the model stays."""
    model = swap_attention(build_model(gpt2).train(), "favorpp", m=8)
    states = layers_of(model)
    assert not any(float(s.running_weight) for s in states)
    run(model, **inputs(gpt2, seed=5))
    tensor = inputs(gpt2)["input_ids"]
    arguments = (inputs(gpt2, seed=1)["input_ids"],)
    calibrate_attention(model, [tensor, arguments, inputs(gpt2, seed=2)])
    for s in states:
        assert float(s.running_weight) == 1
        assert int(s.folds) == 3
    assert model.training
    fresh = swap_attention(build_model(gpt2), "favorpp", m=8)
    calibrate_attention(fresh, [inputs(gpt2, seed=seed) for seed in range(3)])
    for s, other in zip(states, layers_of(fresh)):
        assert_close(s.running_x_mean_sq, other.running_x_mean_sq)
    with pytest.raises(ValueError, match="batches: empty"):
        calibrate_attention(model, [])
    window = swap_attention(build_model(gpt2), "window")
    cases = [(build_model(gpt2), "none"), (window, "window")]
    for bare, name in cases:
        with pytest.raises(ValueError, match=f"swapped: {name}"):
            calibrate_attention(bare, [inputs(gpt2)])


def test_the_table_states_errors_and_parameters():
    model = swapped(bert)
    batches = []
    for s in range(2):
        batches.append(inputs(bert, seed=s))
    assert (
        describe_attention(model)[["A mean", "error on calibration", "uniform's error"]]
        .isna()
        .all(axis=None)
    )
    rows = describe_attention(calibrate_attention(model, batches))
    assert (rows["A min"] <= rows["A mean"]).all()
    assert (rows["A max"] <= 0).all()
    assert (rows["M"] == 32).all()
    more = describe_attention(calibrate_attention(swapped(bert, m=1024), batches))
    assert (more["error on calibration"] < 0.5 * rows["error on calibration"]).all()
    assert more["uniform's error"][0] == rows["uniform's error"][0]  # the first layer sees the same
    swap_attention(model, "relu", layers=[0], m=8)
    actual = describe_attention(model)["error on calibration"].isna().tolist()
    assert actual == [True, False]
    actual = describe_attention(unswap_attention(model))["mechanism"].tolist()
    assert actual == ["unchanged"] * 2
    causal = describe_attention(swapped(llama, "gerf"))
    assert causal[["error on calibration", "A mean"]].notna().all(axis=None)
    assert (causal["M"] == 64).all()


ROW = inputs(gpt2)["input_ids"]
BATCHES = {
    "one tensor": (ROW, "batches: Tensor, expected a list, such as"),
    "one dictionary": (inputs(gpt2), "batches: dict, expected a list"),
    "one tokenizer's output": (transformers.BatchEncoding(inputs(gpt2)), "batches: Batch"),
    "one string": ("text", "batches: str, expected a list"),
    "nothing": (None, "batches: NoneType, expected a list"),
    "strings": (["text"], r"batches\[0\]: str, expected a dictionary"),
    "numbers": (ROW.tolist(), r"batches\[0\]: list, expected"),
    "an array": (ROW.numpy(), r"batches\[0\]: ndarray, expected"),
    "a row": ([ROW, ROW[0]], r"batches\[1\]: token ids .*, expected integers \(batch, tokens\)"),
    "an id beyond the vocabulary": ([ROW, ROW + 99], r"batches\[1\]: token ids .*the vocabulary"),
    "a negative id": ([{"input_ids": ROW - 99}], r"batches\[0\]: token ids .*the vocabulary"),
    "ids of another type": ([(ROW.float(),)], r"batches\[0\]: token ids .* of torch.float32"),
    "places beyond the last": ([{"input_ids": ROW, "position_ids": ROW + 999}], "out of range"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_of_another_form_are_refused(name):
    batches, message = BATCHES[name]
    with pytest.raises((ValueError, TypeError), match=message):
        calibrate_attention(swap_attention(build_model(gpt2), "favorpp", m=8), batches)
