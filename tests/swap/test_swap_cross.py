"""Encoder-decoders: nothing that a decoder's token gets depends on a later one, with any map, calibrated or not."""

import copy

import pytest
import torch
import transformers
from helpers import swap_models
from helpers.decoders import tokens
from helpers.seeds import seeded
from helpers.swap_models import (
    HF_SEQ2SEQ,
    B,
    L,
    Seq2Seq,
    bart,
    bert2gpt2,
    for_each_model,
    marian,
    whisper,
)
from torch import nn
from torch.testing import assert_close

from crt_exp import calibrate_attention, samplers, swap_attention
from crt_exp.attention import RandomFeatureAttention, attention
from crt_exp.features import OPRF, Statistics
from crt_exp.swap.cache import RecurrentLayer

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:.*further from exact attention than uniform attention:UserWarning"
    ),
]
T = 7  # decoder tokens


def numbers(*shape, seed=0):
    return torch.randn(B, *shape, generator=seeded(seed), dtype=torch.float64)


def build(make):
    return swap_models.build_model(make, scale=1.0).double()


def source(make, seed=0):
    """What the encoder reads; the second text is padded at the end."""
    if make is whisper:
        return {"input_features": numbers(4, 2 * L, seed=seed)}
    mask = torch.ones(B, L, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": tokens(B, L, seed), "attention_mask": mask}


def inputs(make, seed=0, length=T):
    return source(make, seed) | {"decoder_input_ids": tokens(B, length, seed + 10)}


@torch.no_grad()
def run(model, batch):
    return swap_models.run(model, **batch)


def swapped(make, name="favorpp", calibrated=True):
    model = swap_attention(build(make), name, m=64)
    if calibrated:
        return calibrate_attention(model, [inputs(make, seed) for seed in (1, 2)])
    return model


# ---- the future, the cache and padding


@pytest.mark.parametrize(
    "make, name, calibrated",
    [
        (bart, "gerf", True),
        (whisper, "favorpp", False),
        (bert2gpt2, "geom", False),
        (Seq2Seq, "geom_plus", True),
        (Seq2Seq, "pois", False),
    ],
)
def test_a_prefix_of_the_decoder_gives_a_prefix_of_the_output(make, name, calibrated):
    """Also where the decoder's prefix is as long as the encoder's sequence, or one token. Leaks are above 1e-2."""
    model = swapped(make, name, calibrated)
    batch = inputs(make, length=L + 3)
    whole = run(model, batch)
    for length in (1, 4, L, L + 1):
        part = run(model, batch | {"decoder_input_ids": batch["decoder_input_ids"][:, :length]})
        assert_close(whole[:, :length], part, rtol=1e-7, atol=1e-7)


@for_each_model({"bart": bart, "bert2gpt2": bert2gpt2, "transformer": Seq2Seq})
def test_future_never_leaks_in_training(make):
    """The statistics of a training pass come from earlier ones."""
    model = swapped(make, "geom_plus", calibrated=False).train()
    batch = inputs(make)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("dropout", "activation_dropout"):
            setattr(part, name, 0.0) if isinstance(getattr(part, name, None), float) else None
    run(model, inputs(make, 1))
    other = copy.deepcopy(model)
    tokens = batch["decoder_input_ids"].clone()
    tokens[:, 4:] = 42 - tokens[:, 4:]
    before = run(model, batch)
    after = run(other, batch | {"decoder_input_ids": tokens})
    assert_close(before[:, :4], after[:, :4], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(before[:, 4:], after[:, 4:])


@for_each_model(HF_SEQ2SEQ)
def test_the_cache_gives_the_logits_of_the_whole_sequence(make):
    model = swapped(make)
    batch = inputs(make)
    whole = run(model, batch)
    tokens = batch.pop("decoder_input_ids")
    cache = None
    found = []
    cases = [
        slice(0, 3),
        slice(3, 4),
        slice(4, T),
    ]
    for part in cases:
        with torch.no_grad():
            out = model(
                **batch, decoder_input_ids=tokens[:, part], past_key_values=cache, use_cache=True
            )
        cache = out.past_key_values
        found.append(out.logits)
    for layer in cache.self_attention_cache.layers:
        assert isinstance(layer, RecurrentLayer)
        assert layer.state
    actual = torch.cat(found, 1)
    assert_close(actual, whole, rtol=1e-10, atol=1e-10)


@for_each_model({"bart": bart, "bert2gpt2": bert2gpt2, "transformer": Seq2Seq})
def test_padding_of_the_encoder_counts_nowhere(make):
    cut = inputs(make, 5)
    padded = inputs(make, 5)
    cut["input_ids"] = cut["input_ids"][:, :6]
    cut["attention_mask"] = None
    padded["attention_mask"][:, 6:] = 0
    for length in (
        3,
        L,
    ):  # as many queries as keys: the padding of keys must not be taken for one of queries
        actual = []
        for batch in (cut, padded):
            batch["decoder_input_ids"] = tokens(B, length, 3)
            model = calibrate_attention(swap_attention(build(make), "geom_plus", m=16), [batch])
            actual.append(run(model, batch))
        assert_close(*actual, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "make, name, options", [(bart, "favorp", {"num_beams": 3}), (whisper, "favorpp", {})]
)
def test_generate_with_and_without_cache(make, name, options):
    model = swapped(make, name)
    given = {"max_new_tokens": 6, "do_sample": False} | options
    with_cache, without = (
        model.generate(**source(make), use_cache=use, **given) for use in (True, False)
    )
    assert torch.equal(with_cache, without)
    assert with_cache.shape[1] >= 6


@torch.no_grad()
def test_padded_keys_have_no_part_in_the_matrices_of_cross_attention():
    out = swapped(bart)(**inputs(bart), output_attentions=True)
    actual = [
        len(attentions)
        for attentions in (out.encoder_attentions, out.decoder_attentions, out.cross_attentions)
    ]
    assert actual == [1, 2, 2]
    assert out.cross_attentions[0].shape == (B, 4, T, L)
    assert (out.cross_attentions[0][1, ..., 6:] == 0).all()


@torch.no_grad()
def test_marian_comes_back_under_other_names(tmp_path):
    model = swapped(marian)
    model.save_pretrained(tmp_path)
    loaded = swap_attention(
        transformers.MarianMTModel.from_pretrained(tmp_path, dtype=torch.float64), "favorpp", m=64
    )
    actual = run(model, inputs(marian))
    expected = run(loaded.eval(), inputs(marian))
    assert_close(actual, expected, rtol=1e-12, atol=1e-12)


# ---- which attention is one to another sequence


@pytest.mark.parametrize(
    "make, name",
    [
        (bart, "window"),
        (bert2gpt2, "identity"),
        (Seq2Seq, "window"),
    ],
)
def test_attention_within_one_sequence_is_refused_in_the_place_of_one_to_another(make, name):
    """At the swap, and before anything changes."""
    model = build(make)
    with pytest.raises(
        ValueError, match=f"attends to another sequence: not supported by attention={name}; leave"
    ):
        swap_attention(model, name)
    assert not any("swapped" in part._modules for part in model.modules())


@torch.no_grad()
def test_multihead_attention_tells_cross_attention_by_its_tensors():
    module = (
        swap_attention(nn.MultiheadAttention(16, 4, batch_first=True), "favorpp", m=16)
        .double()
        .eval()
    )
    x = numbers(6, 16)
    own = module(x, x, x)[0]
    other = module(x, x.clone(), x)[0]
    assert not torch.allclose(own, other)
    assert_close(module(x, x.detach(), x)[0], own)  # the same memory is the same sequence
    actual = module(x[:, :2], x, x)[0]
    assert_close(actual, other[:, :2])


# ---- statistics


@for_each_model({"bart": bart, "bert2gpt2": bert2gpt2, "transformer": Seq2Seq})
def test_calibration_fills_the_queries_of_cross_attention(make):
    model = swap_attention(build(make), "favorpp", m=16)
    seen = {}
    for part in model.modules():
        if isinstance(part, RandomFeatureAttention):
            part.register_forward_pre_hook(
                lambda part, given: seen.setdefault(part, []).append(given[0])
            )
    calibrate_attention(model, [inputs(make, seed) for seed in (1, 2)])
    cross = [part for part in seen if part.cross and not part.causal]
    assert len(cross) == 2
    for part in cross:
        expected = torch.cat(seen[part]).square().mean((0, 2)) * part.scale**2
        assert float(part.running_weight) == 1
        assert int(part.folds) == 2
        assert_close(part.running_x_mean_sq, expected, check_dtype=False)


def cross_layer(**options):
    return RandomFeatureAttention(OPRF(), samplers.orthogonal, 16, 4, 8, **options)


def test_cross_attention_is_fitted_to_its_keys_and_earlier_queries():
    layer = cross_layer(cross=True).double().eval()
    q = numbers(4, 5, 8)
    earlier = numbers(4, 5, 8, seed=1)
    k = 2 * numbers(4, 5, 8, seed=2)
    v = numbers(4, 5, 8, seed=3)
    root = 8**-0.25
    fit = layer.phi.fit
    alone = fit(Statistics.of(torch.cat([k, -k], 2), k, scale=root))
    actual = layer(q, k, v)
    expected = attention(q, k, v, layer.phi, layer.noise, alone, scale=root)
    assert_close(actual, expected)
    with layer.calibration():
        layer(earlier, numbers(4, 5, 8, seed=9), v)
    x = earlier.transpose(0, 1).flatten(1, 2).expand(B, -1, -1, -1)
    fitted = fit(Statistics.of(x, k, scale=root))
    actual = layer(q, k, v)
    expected = attention(q, k, v, layer.phi, layer.noise, fitted, scale=root)
    assert_close(actual, expected)


def test_other_numbers_of_queries_and_keys_are_cross_attention():
    layer = cross_layer().double().eval()
    q = numbers(4, 5, 8)
    k = numbers(4, 9, 8, seed=1)
    v = numbers(4, 9, 8, seed=2)
    actual = layer(q, k, v)[:, :, :3]
    expected = layer(q[:, :, :3], k, v)
    assert_close(actual, expected)
    assert not layer.keeps_statistics
