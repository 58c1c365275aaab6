"""Swaps that are refused, and modules that are named: other attention, unreached modules, adapters."""

import inspect
import linecache
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers.swap_models import (
    ALL,
    LOOSE,
    B,
    L,
    attention,
    bert,
    build_model,
    gpt2,
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
    swap_attention,
    unswap_attention,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*further from exact attention than uniform attention:UserWarning"
    ),
]


def test_errors_name_what_is_wrong():
    with pytest.raises(
        ValueError, match=r"no supported attention; unsupported: OwnAttention \(OwnAttention\)"
    ):
        swap_attention(Mixed.OwnAttention(), "favorpp")
    for layers in ([2], ["0"], []):
        with pytest.raises(ValueError, match="2 layers, 0 to 1"):
            swap_attention(build_model(bert), "favorpp", layers=layers)
    with pytest.raises(ValueError, match="add_zero_attn"):
        swap_attention(attention(add_zero_attn=True), "favorpp")
    with pytest.raises(ValueError, match=r"layer.0.attention.self: head_mask is not supported"):
        head_mask = torch.ones(2, 4)
        swapped(bert)(**inputs(bert), head_mask=head_mask)
    with pytest.raises(ValueError, match="h.0.attn: causal call .*causal=True"):
        swap_attention(build_model(gpt2), "favorpp", m=8, causal=False)(**inputs(gpt2))


class Mixed(nn.Module):
    """One attention that can be swapped beside two of other kinds, one of them within a wrapper."""

    class OwnAttention(nn.Module):
        pass

    class Fused(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    def __init__(self):
        super().__init__()
        self.known = nn.MultiheadAttention(16, 4)
        self.own = self.OwnAttention()
        self.wrapper = nn.Sequential(self.Fused())


def test_attention_of_other_kinds_is_named():
    with pytest.warns(UserWarning, match=r"Mixed: .*: own \(OwnAttention\), wrapper.0 \(Fused\)"):
        model = swap_attention(Mixed(), "favorpp", m=8)
    rows = describe_attention(model)
    assert rows["mechanism"].tolist() == ["favorpp", "cannot be swapped", "cannot be swapped"]
    assert rows["path"].tolist() == ["known", "own", "wrapper.0"]
    actual = rows["layer"].isna().tolist()
    assert actual == [False, True, True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swap_attention(Mixed(), "favorpp", m=8, layers=[0])  # who chooses layers knows


class ByHand(nn.Module):
    """Holds two attentions of torch and calls one."""

    def __init__(self):
        super().__init__()
        self.called = nn.MultiheadAttention(16, 4, batch_first=True)
        self.left = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x):
        return self.called(x, x, x, need_weights=False)[0]


def test_modules_that_a_pass_does_not_reach_are_named_once():
    model = swap_attention(ByHand(), "favorp", m=8)
    x = torch.randn(B, L, 16)
    with pytest.warns(
        UserWarning, match=r"1 swapped modules were not called: left \(SwappedMultiheadAttention\)"
    ):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
    actual = describe_attention(model)["reached"].tolist()
    assert actual == ["yes", "no"]
    assert not model._forward_hooks
    assert not unswap_attention(model)._forward_hooks


def test_another_implementation_cannot_undo_a_swap_unseen():
    model = swapped(bert)
    model.set_attn_implementation("eager")
    with pytest.raises(
        ValueError, match="_attn_implementation is now 'eager'.*call unswap_attention"
    ):
        model(torch.tensor([[1, 2]]))


@pytest.mark.parametrize(
    "make, targets, first",
    [(ALL["timm"], ["qkv"], "adapter"), (llama, ["q_proj", "k_proj", "v_proj"], "swap")],
)
def test_adapters_of_peft_stay_and_train(make, targets, first):
    peft = pytest.importorskip("peft")
    model = build_model(make)
    batch = inputs(make)
    if first == "swap":
        swap_attention(model, "exact")
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=targets, init_lora_weights=False)
    ).eval()
    with torch.no_grad():
        before = run(adapted, **batch)
        expected = run(build_model(make), **batch)
        assert not torch.allclose(before, expected)
        actual = run(swap_attention(adapted, "exact"), **batch)
        assert_close(actual, before, **LOOSE)
    swap_attention(adapted, "nearfar")
    run(adapted.train(), **batch).square().mean().backward()
    trained = {}
    for name, p in adapted.named_parameters():
        if p.requires_grad:
            trained[name] = p
    assert trained
    for name, p in trained.items():
        assert ".lora_" in name
        assert p.grad.isfinite().all()
    with torch.no_grad():
        actual = run(unswap_attention(adapted).eval(), **batch)
        assert_close(actual, before, **LOOSE)


@torch.no_grad()
def test_unswapped_layers_keep_their_implementation_and_configuration():
    model = build_model(bert)
    own = [part.self.config for part in attentions(model)]
    name = model.config._attn_implementation
    for config in own:
        assert config is model.config
    swap_attention(model, "exact", layers=[0])
    first, second = (part.self.config for part in attentions(model))
    assert first is model.config
    assert second._attn_implementation == name
    swap_attention(model, "exact", layers=[1])
    for part in attentions(model):
        assert part.self.config is model.config
    unswap_attention(model)
    for part in attentions(model):
        assert part.self.config is model.config
    assert model.config._attn_implementation == name


def attentions(model):
    return [layer.attention for layer in model.encoder.layer]


@torch.no_grad()
def test_a_model_of_a_swapped_configuration_that_is_not_swapped_is_refused():
    """It would compute exact attention under the name of another."""
    config = swapped(bert).config
    with pytest.raises(ValueError, match="BertSelfAttention: .*crt_exp.*is not swapped"):
        transformers.BertModel(config).eval()(**inputs(bert))
    run(swap_attention(transformers.BertModel(config).eval(), "exact"), **inputs(bert))


def warnings_of(call):
    """(file, line of code, message) of each warning."""
    with warnings.catch_warnings(record=True) as actual:
        warnings.simplefilter("always")
        call()
    lines = []
    for warning in actual:
        line = linecache.getline(warning.filename, warning.lineno).strip()
        lines.append((warning.filename, line, str(warning.message)))
    return lines


class Chunked(nn.Module):
    """Attention of an unknown kind beside one that is known."""

    def __init__(self):
        super().__init__()
        self.known = nn.MultiheadAttention(8, 2, batch_first=True)
        self.other = OtherAttention()

    def forward(self, x):
        return x


class OtherAttention(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


@torch.no_grad()
def test_warnings_have_the_words_and_the_line_of_the_user():
    def cached():
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False)

    def called():
        model(torch.tensor([[5, 6]]))

    def calibrated():
        calibrate_attention(model, [torch.tensor([[5, 6, 7]])])

    def swaps():
        swap_attention(chunked, "favorpp", m=4)

    def unreached():
        chunked(torch.ones(1, 2, 8))

    chunked = Chunked()
    for name in ("favorpp", "favorsharp", "favormix"):
        for call in (cached, called):
            model = swap_attention(build_model(llama), f"{name} m=4")
            actual = []
            for warning in warnings_of(call):
                if "no statistics" in warning[-1]:
                    actual.append(warning)
            assert actual, actual
            for file, line, message in actual:
                assert message.startswith(f"{name}: no stat"), actual
                assert file == __file__, actual
                assert line.startswith("model"), actual
    cases = (
        (calibrated, "further"),
        (swaps, "unsupported"),
        (unreached, "not called"),
    )
    for call, message in cases:
        actual = []
        for warning in warnings_of(call):
            if message in warning[-1]:
                actual.append(warning)
        assert actual, (message, actual)
        for file, line, _ in actual:
            assert file == __file__, (message, actual)
            assert line in inspect.getsource(call)
