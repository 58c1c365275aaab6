"""Attention of whole models swapped: exact attention equals the original; linear attention keeps its properties."""

import copy
import warnings

import pytest
import torch
import transformers
from helpers.swap_models import (
    ALL,
    LOOSE,
    SIZES,
    TEXT,
    B,
    Encoder,
    L,
    Timm,
    bert,
    build_model,
    for_each_model,
    inputs,
    llama,
    run,
    swapped,
)
from torch import nn
from torch.testing import assert_close

from crt_exp import (
    calibrate_attention,
    describe_attention,
    samplers,
    swap_attention,
    unswap_attention,
)
from crt_exp.attention import RandomFeatureAttention
from crt_exp.features import OPRF, PosRF, Product, Sum, TrigRF
from crt_exp.swap.swap import swap_layers

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*further from exact attention than uniform attention:UserWarning"
    ),
]


@for_each_model(ALL)
@torch.no_grad()
def test_exact_is_the_original_and_unswap_restores_it(make):
    model = build_model(make)
    batch = inputs(make)
    before = run(model, **batch)
    keys = list(model.state_dict())
    assert swap_attention(model, "exact") is model
    actual = run(model, **batch)
    assert_close(actual, before, **LOOSE)
    assert list(model.state_dict()) == keys
    swap_attention(model, "favorpp", m=8)
    assert not torch.allclose(run(model, **batch), before, rtol=1e-4, atol=1e-5)
    unswap_attention(model)
    assert torch.equal(run(model, **batch), before)
    assert list(model.state_dict()) == keys


@for_each_model(ALL)
@torch.no_grad()
def test_many_features_come_near_and_few_less(make):
    batch = inputs(make)
    exact = run(build_model(make), **batch)
    few = run(swapped(make, m=4), **batch)
    many = run(swapped(make, m=1024), **batch)
    difference = (many - exact).norm()
    assert difference < 0.5 * (few - exact).norm()


@for_each_model(TEXT)
@torch.no_grad()
def test_padding_is_truncation(make):
    short = inputs(make, 6)["input_ids"]
    padded = torch.cat([short, torch.full((B, 3), 7)], 1)
    mask = torch.ones(B, L, dtype=torch.long)
    mask[:, 6:] = 0
    for name in ("exact", "favorpp"):
        model = swapped(make, name)
        cut = run(model, input_ids=short)
        whole = run(model, input_ids=padded, attention_mask=mask)
        assert_close(whole[:, :6], cut, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [bert, llama])
@torch.no_grad()
def test_returned_matrices_are_those_of_the_attention(make):
    model = swapped(make)
    seen = []

    def record(_, given, out):
        seen.append((given[2], out))

    for path, module in model.named_modules():
        if path.endswith(".swapped"):
            module.register_forward_hook(record)
    matrices = model(**inputs(make), output_attentions=True).attentions
    assert len(matrices) == len(seen) == 2
    for matrix, (v, out) in zip(matrices, seen):
        actual = matrix.sum(-1)
        expected = torch.ones_like(matrix[..., 0])
        assert_close(actual, expected, **LOOSE)
        v = v.repeat_interleave(out.shape[1] // v.shape[1], 1)
        actual = matrix @ v[..., :4]
        assert_close(actual, out[..., :4], **LOOSE)


@pytest.mark.parametrize("make", [bert, llama])
@torch.no_grad()
def test_outputs_and_matrices_beside_padding_are_those_of_the_library(make):
    """Of swapped and of untouched layers."""
    model = build_model(make)
    real = torch.arange(L) < torch.tensor([[L], [6]])
    batch = inputs(make) | {"attention_mask": real.long()}
    model.set_attn_implementation("eager")
    before = model(**batch, output_attentions=True)
    for layers in (None, [0]):
        found = swap_attention(model, "exact", layers=layers)(**batch, output_attentions=True)
        assert_close(found[0][real], before[0][real], **LOOSE)
        for one, two in zip(found.attentions, before.attentions):
            actual = one.transpose(1, 2)[real]
            expected = two.transpose(1, 2)[real]
            assert_close(actual, expected, **LOOSE)
        unswap_attention(model)


@torch.no_grad()
def test_swapping_twice_replaces_and_layers_mix():
    model = build_model(bert)
    batch = inputs(bert)
    once = run(swap_attention(copy.deepcopy(model), "relu", m=8), **batch)
    swap_attention(model, "favorpp", m=32)
    actual = run(swap_attention(model, "relu", m=8), **batch)
    assert torch.equal(actual, once)
    swap_attention(model, "favorp", m=8, layers=[1])
    found = []
    for part in model.modules():
        if isinstance(part, RandomFeatureAttention):
            found.append(part.mechanism)
    assert found == ["relu", "favorp"]


@torch.no_grad()
def test_models_of_one_configuration_are_independent():
    config = transformers.BertConfig(**SIZES)
    first = transformers.BertModel(config).eval()
    second = transformers.BertModel(config).eval()
    before = run(second, **inputs(bert))
    swap_attention(first, "favorpp", m=8)
    assert config._attn_implementation != "crt_exp"
    actual = run(second, **inputs(bert))
    assert torch.equal(actual, before)
    assert not hasattr(second.config, "crt_exp")
    actual = unswap_attention(copy.deepcopy(first)).config._attn_implementation
    assert actual == config._attn_implementation
    assert first.config._attn_implementation == "crt_exp"


@for_each_model(ALL)
def test_gradients_reach_every_parameter(make):
    model = swapped(make, redraw_every=2).train()
    run(model, **inputs(make)).square().mean().backward()
    original = build_model(make).train()
    run(original, **inputs(make)).square().mean().backward()
    expected = {name for name, p in original.named_parameters() if p.grad is not None}
    actual = {name for name, p in model.named_parameters() if p.grad is not None}
    assert actual == expected


@pytest.mark.parametrize("make", [bert, llama])
def test_activation_checkpointing_gives_the_same_gradients(make):
    actual = []
    for checkpointed in (False, True):
        model = swapped(make, redraw_every=1).train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        grads = []
        for step in range(2):
            model.zero_grad()
            out = run(model, **inputs(make, seed=step))
            out.square().mean().backward()
            grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        actual.append(grads)
    assert_close(actual[0], actual[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "make, name",
    [
        (bert, "dropout"),
        (Encoder, "dropout"),
        (Timm, "attn_drop"),
    ],
)
@torch.no_grad()
def test_dropout_of_training_is_that_of_the_attention(make, name):
    model = swapped(make)
    values = []
    attention = next(part for part in model.modules() if "swapped" in part._modules)
    dropout = 0.5 if make is Encoder else nn.Dropout(0.5)
    setattr(attention, name, dropout)
    attention.swapped.register_forward_hook(lambda _, given, out: values.append(given[2]))
    run(model, **inputs(make))
    attention.train()
    run(model, **inputs(make))
    whole, dropped = values
    lost = (dropped == 0).all(-1)
    assert 0 < lost.float().mean() < 1
    expected = torch.where(lost[..., None], 0, 2 * whole)
    assert_close(dropped, expected)


@torch.no_grad()
def test_half_precision():
    batch = inputs(bert)
    expected = run(swapped(bert), **batch)
    half = run(swap_attention(build_model(bert).bfloat16(), "favorpp", m=32), **batch)
    assert half.dtype == torch.bfloat16
    assert_close(half.float(), expected, rtol=0.1, atol=0.1)


@torch.no_grad()
def test_a_compiled_model_computes_the_same_and_is_not_called_unreached():
    """Compiled modules do not note their calls."""
    torch._dynamo.reset()
    model = swapped(bert)
    batch = inputs(bert)
    lengths = torch.tensor([[7], [L]])
    batch["attention_mask"] = (torch.arange(L) < lengths).long()
    expected = run(model, **batch)
    compiled = swap_attention(torch.compile(build_model(bert), backend="eager"), "favorpp", m=32)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not called.*")
        assert_close(run(compiled, **batch), expected, rtol=1e-4, atol=1e-4)
    assert "no" not in describe_attention(compiled)["reached"].tolist()


COMPOSED = {
    "sum": (bert, Sum(OPRF(), PosRF()), 24),
    "nested": (llama, Sum(TrigRF(), Product(PosRF(), PosRF())), 4),
}


@pytest.mark.parametrize("make, phi, m", COMPOSED.values(), ids=COMPOSED.keys())
@torch.no_grad()
def test_several_noises_in_a_model_are_saved_and_decoded(make, phi, m, tmp_path):
    def maker(heads, d, sampler=samplers.orthogonal, seed=0, **sizes):
        return RandomFeatureAttention(phi, sampler, m, heads, d, seed=seed, **sizes)

    model = swap_layers(build_model(make), maker, "composed")
    batch = inputs(make)
    if make is llama:
        calibrate_attention(model, [inputs(make, seed=s) for s in (1, 2)])
    out = run(model, **batch)
    model.save_pretrained(tmp_path)
    other = type(model).from_pretrained(tmp_path).eval()

    def anew(heads, d, **sizes):
        return maker(heads, d, samplers.iid, 9, **sizes)

    actual = run(swap_layers(other, anew, "composed"), **batch)
    assert torch.equal(actual, out)
    if make is llama:
        cached = model(**batch, use_cache=True)
        new = torch.tensor([[5], [6]])
        assert type(cached.past_key_values.layers[0]).__name__ == "RecurrentLayer"
        ids = torch.cat([batch["input_ids"], new], 1)
        whole = run(model, input_ids=ids)[:, -1:]
        stepped = model(
            input_ids=new, past_key_values=cached.past_key_values, use_cache=True
        ).logits
        assert_close(stepped, whole, rtol=1e-3, atol=1e-3)
        buffers = dict(model.model.layers[1].self_attn.swapped.named_buffers())
        omega = [name for name in buffers if name.startswith("omega_1")]
        buffers[omega[0]].mul_(1.1)
        with pytest.raises(ValueError, match="noise or statistics have changed"):
            model(input_ids=new, past_key_values=cached.past_key_values, use_cache=True)
