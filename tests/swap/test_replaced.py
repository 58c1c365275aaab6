"""Whatever takes the place of swapped attention is noticed by name, and unswap_attention undoes it."""

import copy
import warnings
from types import MethodType

import pytest
import torch
import transformers
from swap_models import IMAGE, Encoder, bert, inputs, llama, made, run
from torch import nn

from crt_exp import describe_attention, swap_attention, unswap_attention
from crt_exp.swap.timm_attention import SwappedTimmAttention

MAKERS = {"bert": bert, "llama": llama, "timm": IMAGE["timm"], "encoder": Encoder}


def swapped_modules(model):
    return [module for module in model.modules() if "swapped" in module._modules]


def each_module(change):
    return lambda model: [change(module) for module in swapped_modules(model)]


def implementation(name):
    return lambda model: setattr(model.config, "_attn_implementation", name)


def another_configuration(module):
    module.config = copy.deepcopy(module.config)
    module.config._attn_implementation = "sdpa"


def own_class(module):
    module.__class__ = module.unswapped_class


def identity(query=None, *_, hidden_states=None, **__):
    return query if hidden_states is None else hidden_states, None


def own_forward(module):
    """Another one on the object itself."""
    if isinstance(module, SwappedTimmAttention):
        module.forward = MethodType(module.unswapped_class.forward, module)
    else:
        module.forward = identity


IMPLEMENTATIONS = {
    "eager": implementation("eager"), "sdpa": implementation("sdpa"), "a name of ours": implementation("nearfar"),
    "method": lambda model: model.set_attn_implementation("sdpa"),
    "part": lambda model: model.base_model.set_attn_implementation("eager"),
    "configuration": each_module(another_configuration),
    "forward": each_module(own_forward),
}
CLASSES = {"class": each_module(own_class), "forward": each_module(own_forward)}
WAYS = [(name, way, change) for names, ways in ((("bert", "llama"), IMPLEMENTATIONS), (("timm", "encoder"), CLASSES))
        for name in names for way, change in ways.items()]


def output(name, model):
    with torch.no_grad():
        return run(model, **inputs(MAKERS[name]))


def swapped_once(name):
    """The model, its own output, that of the swapped one, and the paths of its swapped layers."""
    model = made(MAKERS[name])
    own = output(name, model)
    swap_attention(model, "uniform")
    return model, own, output(name, model), [module.swapped.path for module in swapped_modules(model)]


def what_is_said(name, model, change):
    """Error or warnings of the change and of the next forward pass, and its output where it has one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out, error = None, ""
        try:
            change(model)
            out = output(name, model)
        except ValueError as raised:
            error = str(raised)
    return error + " ".join(str(one.message) for one in caught), out


@pytest.mark.parametrize("name, way, change", WAYS, ids=[f"{name}-{way}" for name, way, _ in WAYS])
def test_what_replaces_the_attention_is_noticed_and_undone(name, way, change):
    """At the next pass at the latest; where the output is still that of the swap, nothing was replaced."""
    model, own, swapped, paths = swapped_once(name)
    said, out = what_is_said(name, model, change)
    if out is None:
        assert paths[0] in said, said
    else:
        assert torch.equal(out, swapped) or all(path in said for path in paths), said
    for module in swapped_modules(model):
        module.__dict__.pop("forward", None)  # what was put on the object itself is the caller's to take away
    assert torch.equal(output(name, unswap_attention(model)), own)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


NOW = {"bert-eager": "its config._attn_implementation is now 'eager'", "timm-class": "its class is now Attention"}


@pytest.mark.parametrize("case", NOW)
def test_the_error_says_what_stands_there_and_swapping_again_puts_it_right(case):
    name, way = case.split("-")
    model, own, swapped, _ = swapped_once(name)
    (IMPLEMENTATIONS | CLASSES)[way](model)
    with pytest.raises(ValueError, match=f"{NOW[case]}.* in the place of uniform: call unswap_attention"):
        output(name, model)
    assert torch.equal(output(name, swap_attention(model, "uniform")), swapped)
    assert torch.equal(output(name, unswap_attention(model)), own)


def test_a_call_of_a_part_a_copy_and_a_compiled_model_notice_it():
    model = swap_attention(made(bert), "uniform")
    other = copy.deepcopy(model)
    for one in (model, other):
        one.config._attn_implementation = "sdpa"
        with pytest.raises(ValueError, match="_attn_implementation is now 'sdpa'"):
            one.encoder.layer[1](torch.randn(1, 3, 16))
    compiled = torch.compile(swap_attention(made(bert), "uniform"), backend="eager")
    run(compiled, **inputs(bert))
    compiled.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match="_attn_implementation is now 'eager'"):
        run(compiled, **inputs(bert))


def test_a_layer_that_is_passed_by_is_warned_of_once():
    model = swap_attention(made(bert), "uniform")
    run(model, **inputs(bert))
    own_forward(swapped_modules(model)[1])
    with pytest.warns(UserWarning, match=r"layer\.1.* did not come to the swapped attention uniform"):
        run(model, **inputs(bert))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, **inputs(bert))
    assert describe_attention(model)["reached"].tolist() == ["yes", "no"]


def test_one_attention_of_torch_alone():
    module, x = swap_attention(nn.MultiheadAttention(16, 4, batch_first=True), "uniform"), torch.randn(2, 5, 16)
    module.__class__ = nn.MultiheadAttention
    with pytest.raises(ValueError, match="its class is now MultiheadAttention"):
        module(x, x, x)
    assert type(unswap_attention(module)) is nn.MultiheadAttention


# ---- word timestamps, for which Whisper's generate sets eager attention

SOUND = torch.randn(2, 4, 40, generator=torch.Generator().manual_seed(1))


def whisper():
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(
        d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=40, max_source_positions=20, max_target_positions=80,
        num_mel_bins=4, init_std=0.3, pad_token_id=1, bos_token_id=0, eos_token_id=39, decoder_start_token_id=2)).eval()
    vars(model.generation_config).update(
        alignment_heads=[[0, 1], [1, 2]], no_timestamps_token_id=24, is_multilingual=False, prev_sot_token_id=3,
        max_initial_timestamp_index=5, return_timestamps=False, suppress_tokens=None, begin_suppress_tokens=None)
    return model


def words(model):
    return model.generate(SOUND, max_new_tokens=6, return_timestamps=True, return_token_timestamps=True)


@pytest.mark.parametrize("path", ["", "model"])
def test_word_timestamps_are_refused_and_later_calls_are_as_before(path):
    model = whisper()
    own = model.generate(SOUND, max_new_tokens=6)
    swap_attention(model.get_submodule(path), "favorp", m=8)
    before = model.generate(SOUND, max_new_tokens=6)
    for one in (model, copy.deepcopy(model)):
        for _ in range(2):
            with pytest.raises(ValueError, match="word timestamps .* swap model.model.encoder alone"):
                words(one)
            assert torch.equal(one.generate(SOUND, max_new_tokens=6), before)
    model.model.config._attn_implementation = "eager"   # by the user: it stays refused
    for _ in range(2):
        with pytest.raises(ValueError, match="is now 'eager'.* call unswap_attention"):
            model.generate(SOUND, max_new_tokens=6)
    unswap_attention(model.get_submodule(path))
    assert torch.equal(model.generate(SOUND, max_new_tokens=6), own)


def test_word_timestamps_of_a_swapped_encoder():
    """Also after a refusal of the whole model."""
    model, expected = whisper(), words(whisper())
    assert expected["token_timestamps"].count_nonzero()
    with pytest.raises(ValueError, match="word timestamps"):
        words(swap_attention(model, "exact"))
    swap_attention(unswap_attention(model).model.encoder, "exact")
    found = words(model)
    assert all(torch.equal(found[key], expected[key]) for key in ("sequences", "token_timestamps"))
    swap_attention(model.model.encoder, "favorp", m=8)
    assert words(model)["token_timestamps"].count_nonzero()
