"""Attention of whole models swapped: exact attention is the original, and the laws of linear attention hold."""

import copy

import pytest
import torch
import transformers
from swap_models import (
    ALL,
    CAUSAL,
    HF,
    LOOSE,
    SIZES,
    TEXT,
    B,
    Conformer,
    Encoder,
    L,
    Timm,
    bert,
    each,
    gpt2,
    inputs,
    llama,
    made,
    run,
    swapped,
    vit,
)
from torch import nn

from crt_exp import calibrate_attention, describe_attention, samplers, swap_attention, unswap_attention
from crt_exp.attention import RandomFeatureAttention
from crt_exp.features import OPRF, PosRF, Product, Sum, TrigRF
from crt_exp.swap.swap import swap_layers

pytestmark = [pytest.mark.usefixtures("one_thread"),
              pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning"),
              pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning"),
              pytest.mark.filterwarnings("ignore:.*further from exact attention than uniform attention:UserWarning")]


@each(ALL)
@torch.no_grad()
def test_exact_is_the_original_and_unswap_restores_it(make):
    model, batch = made(make), inputs(make)
    before, keys = run(model, **batch), list(model.state_dict())
    assert swap_attention(model, "exact") is model
    torch.testing.assert_close(run(model, **batch), before, **LOOSE)
    assert list(model.state_dict()) == keys
    swap_attention(model, "favorpp", m=8)
    assert not torch.allclose(run(model, **batch), before, rtol=1e-4, atol=1e-5)
    unswap_attention(model)
    assert torch.equal(run(model, **batch), before) and list(model.state_dict()) == keys


@each(ALL)
@torch.no_grad()
def test_many_features_come_near_and_few_less(make):
    batch = inputs(make)
    exact = run(made(make), **batch)
    errors = [(run(swapped(make, m=m), **batch) - exact).norm() / exact.norm() for m in (4, 1024)]
    assert errors[1] < 0.5 * errors[0]


@each(ALL)
def test_checkpoint_keys_stay_and_buffers_join_them(make):
    original, model = made(make).state_dict(), swapped(make)
    state = model.state_dict()
    added = state.keys() - original.keys()
    assert original.keys() <= state.keys() and all(".swapped." in key for key in added)
    assert sum(key.endswith("omega") for key in added) == 2
    missing, unexpected = model.load_state_dict(original, strict=False)
    assert set(missing) == added and not unexpected
    other = swap_attention(made(make), "favorpp", m=32, seed=5)
    other.load_state_dict(state)
    torch.testing.assert_close(run(other, **inputs(make)), run(model, **inputs(make)), rtol=0, atol=0)


@each(TEXT)
@pytest.mark.parametrize("name", ["exact", "favorpp", "relu"])
@torch.no_grad()
def test_padding_equals_truncation(make, name):
    model, short = swapped(make, name), inputs(make, 6)["input_ids"]
    padded = torch.cat([short, torch.full((B, 3), 7)], 1)
    mask = torch.ones(B, L, dtype=torch.long)
    mask[:, 6:] = 0
    if make is Conformer:  # which needs one sequence of full length
        padded = torch.cat([padded, inputs(make, L, 1)["input_ids"]])
        mask = torch.cat([mask, torch.ones(1, L, dtype=torch.long)])
    cut, whole = run(model, input_ids=short), run(model, input_ids=padded, attention_mask=mask)
    torch.testing.assert_close(whole[:B, :6], cut, rtol=1e-4, atol=1e-5)


@each(CAUSAL)
@pytest.mark.parametrize("name", ["exact", "favorpp", "favorp"])
def test_generate_with_and_without_cache(make, name):
    model, ids = swapped(make, name), inputs(make, 5)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :2] = 0  # padding on the left
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    with_cache, without = (model.generate(ids, use_cache=use, **options) for use in (True, False))
    assert torch.equal(with_cache, without) and with_cache.shape == (B, 13)


@each(CAUSAL)
@torch.no_grad()
def test_the_cache_gives_the_logits_of_the_whole_sequence(make):
    model, ids = swapped(make), inputs(make)["input_ids"]
    whole = run(model, input_ids=ids)
    first = model(input_ids=ids[:, :4], use_cache=True)
    rest = model(input_ids=ids[:, 4:8], past_key_values=first.past_key_values, use_cache=True)  # several at once
    last = model(input_ids=ids[:, 8:], past_key_values=rest.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits, last.logits], 1), whole, rtol=1e-4, atol=1e-4)


@each(CAUSAL)
@torch.no_grad()
def test_no_future(make):
    model, ids = swapped(make), inputs(make)["input_ids"]
    other = ids.clone()
    other[:, 5:] = 3
    torch.testing.assert_close(run(model, input_ids=ids)[:, :5], run(model, input_ids=other)[:, :5], **LOOSE)


def test_static_cache():
    model, ids = swapped(llama), inputs(llama, 5)["input_ids"]
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids), "disable_compile": True}
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), model.generate(ids, **options))


@each(HF)
@torch.no_grad()
def test_output_attentions(make):
    for name in ("favorpp", "exact"):
        model, batch = swapped(make, name), inputs(make)
        seen = []
        note = lambda _, given, out, seen=seen: seen.append((given[2], out))
        hooks = [module.register_forward_hook(note) for path, module in model.named_modules()
                 if path.endswith(".swapped")]
        out = model(**batch, output_attentions=True)
        matrices = out.attentions
        assert len(matrices) == len(seen) == len(hooks) == 2
        for hook in hooks:
            hook.remove()
        torch.testing.assert_close(out[0], run(model, **batch), **LOOSE)
        for matrix, (v, given) in zip(matrices, seen):
            torch.testing.assert_close(matrix.sum(-1), torch.ones_like(matrix[..., 0]), **LOOSE)
            v = v.repeat_interleave(given.shape[1] // v.shape[1], 1)
            torch.testing.assert_close(matrix @ v[..., :4], given[..., :4], **LOOSE)


@torch.no_grad()
def test_exact_matrices_are_those_of_the_library():
    for make in (bert, gpt2, llama):
        model, batch = made(make), inputs(make)
        model.set_attn_implementation("eager")
        before = model(**batch, output_attentions=True).attentions
        for layers in (None, [0]):  # untouched layers as well
            swap_attention(model, "exact", layers=layers)
            torch.testing.assert_close(model(**batch, output_attentions=True).attentions, before, **LOOSE)
            unswap_attention(model)


@torch.no_grad()
def test_untouched_layers_stay_exact():
    for make in (bert, gpt2, llama, Encoder):
        model, ids = made(make), inputs(make)["input_ids"]
        mask = torch.ones_like(ids)
        mask[1, 6:] = 0
        before = run(model, input_ids=ids, attention_mask=mask)
        swap_attention(model, "exact", layers=[-1])
        after = run(model, input_ids=ids, attention_mask=mask)
        torch.testing.assert_close(after[mask.bool()], before[mask.bool()], **LOOSE)


@each({name: HF[name] for name in ("bert", "gpt2", "llama", "vit")})
@torch.no_grad()
def test_saved_and_loaded(make, tmp_path):
    model = swapped(make, seed=3, redraw_every=1)
    for part in model.modules():
        if isinstance(part, RandomFeatureAttention):
            part.redraw()
    model.save_pretrained(tmp_path)
    kind = {vit: {"add_pooling_layer": False}, bert: {"add_pooling_layer": False}}.get(make, {})
    loaded = swap_attention(type(model).from_pretrained(tmp_path, **kind), "favorpp", m=32).eval()
    torch.testing.assert_close(run(loaded, **inputs(make)), run(model, **inputs(make)), rtol=0, atol=0)
    with pytest.raises(ValueError, match="use m=32.*saved=False"):
        swap_attention(unswap_attention(loaded), "favorpp", m=16)
    swap_attention(loaded, "favorpp", m=16, saved=False)


def test_saved_noise_that_may_belong_to_two_layers_is_refused(tmp_path):
    """Names that match no layer, and numbers that two of them share: either might be the layer's own."""
    from safetensors.torch import load_file, save_file

    swapped(bert).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    noise = {name: tensors.pop(name) for name in list(tensors) if ".swapped." in name}
    for place in ("old", "older"):
        tensors |= {f"{place}.{name.replace('encoder', 'stack')}": part.clone() for name, part in noise.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="ambiguous, candidates .*saved=False"):
        swap_attention(type(made(bert)).from_pretrained(tmp_path), "favorpp", m=32)


@torch.no_grad()
def test_swapping_twice_replaces_and_layers_mix():
    model, batch = made(bert), inputs(bert)
    once = run(swap_attention(copy.deepcopy(model), "relu", m=8), **batch)
    model = swap_attention(swap_attention(model, "favorpp", m=32), "relu", m=8)
    assert torch.equal(run(model, **batch), once)
    swap_attention(model, "favorp", m=8, layers=[1])
    found = [part.mechanism for part in model.modules() if isinstance(part, RandomFeatureAttention)]
    assert found == ["relu", "favorp"]


@torch.no_grad()
def test_models_of_one_configuration_are_apart():
    config = transformers.BertConfig(**SIZES)
    first, second = (transformers.BertModel(config).eval() for _ in range(2))
    before = run(second, **inputs(bert))
    swap_attention(first, "favorpp", m=8)
    assert config._attn_implementation != "crt_exp" and torch.equal(run(second, **inputs(bert)), before)
    twin = copy.deepcopy(first)
    assert torch.equal(run(twin, **inputs(bert)), run(first, **inputs(bert)))
    unswap_attention(twin)
    assert twin.config._attn_implementation == config._attn_implementation
    assert first.config._attn_implementation == "crt_exp"


@each(ALL)
def test_gradients_reach_every_parameter(make):
    model = swapped(make, redraw_every=2).train()
    run(model, **inputs(make)).square().mean().backward()
    original = made(make).train()
    run(original, **inputs(make)).square().mean().backward()
    expected = {name for name, p in original.named_parameters() if p.grad is not None}
    assert {name for name, p in model.named_parameters() if p.grad is not None} == expected


@each({name: HF[name] for name in ("bert", "gpt2", "llama")})
def test_activation_checkpointing_gives_the_same_gradients(make):
    found = []
    for checkpointed in (False, True):
        model = swapped(make, redraw_every=1).train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        grads = []
        for step in range(2):
            model.zero_grad()
            run(model, **inputs(make, seed=step)).square().mean().backward()
            grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        found.append(grads)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize("make, name", [(bert, "dropout"), (gpt2, "attn_dropout"), (Encoder, "dropout"),
                                        (Timm, "attn_drop")])
@torch.no_grad()
def test_dropout_of_training_is_that_of_the_attention(make, name):
    model, values = swapped(make), []
    attention = next(part for part in model.modules() if "swapped" in part._modules)
    setattr(attention, name, 0.5 if make is Encoder else nn.Dropout(0.5))
    attention.swapped.register_forward_hook(lambda _, given, out: values.append(given[2]))
    run(model, **inputs(make))
    attention.train()
    run(model, **inputs(make))
    whole, dropped = values
    lost = (dropped == 0).all(-1)
    assert 0 < lost.float().mean() < 1
    torch.testing.assert_close(dropped, torch.where(lost[..., None], 0, 2 * whole))


@torch.no_grad()
def test_encoder_and_decoder():
    torch.manual_seed(0)
    config = transformers.BartConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, vocab_size=40,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, init_std=0.3, max_position_embeddings=40,
        pad_token_id=1, bos_token_id=0, eos_token_id=None, decoder_start_token_id=2, forced_eos_token_id=None)
    model, ids = transformers.BartForConditionalGeneration(config).eval(), inputs(bert)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :4]}
    before = run(model, **batch)
    torch.testing.assert_close(run(swap_attention(model, "exact"), **batch), before, **LOOSE)
    calibrate_attention(swap_attention(model, "favorpp", m=32), [batch])
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(*(model.generate(ids, use_cache=use, **options) for use in (True, False)))
    out = model(**batch, output_attentions=True)
    assert [len(found) for found in (out.encoder_attentions, out.decoder_attentions, out.cross_attentions)] == [1, 1, 1]
    assert out.cross_attentions[0].shape == (B, 4, 4, L) and (out.cross_attentions[0][1, ..., 6:] == 0).all()


@torch.no_grad()
def test_a_class_that_is_causal_only_when_called():
    torch.manual_seed(0)
    part = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    config = transformers.CLIPTextConfig(**part, vocab_size=40, max_position_embeddings=20, bos_token_id=0,
                                         eos_token_id=39)
    model, ids = transformers.CLIPTextModel(config).eval(), inputs(bert)["input_ids"]
    before = run(model, input_ids=ids)
    torch.testing.assert_close(run(swap_attention(model, "exact"), input_ids=ids), before, **LOOSE)
    with pytest.raises(ValueError, match="layers.0.self_attn: causal call .*causal=True"):
        run(swap_attention(model, "favorpp", m=8, causal=False), input_ids=ids)
    calibrate_attention(swap_attention(model, "favorpp", m=4000), [ids])
    assert (run(model, input_ids=ids) - before).norm() < 0.1 * before.norm()


@torch.no_grad()
def test_half_precision():
    model, batch = swapped(bert), inputs(bert)
    expected = run(model, **batch)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(run(model, **batch).float(), expected, rtol=0.1, atol=0.1)
    for half in (copy.deepcopy(model).bfloat16(), swap_attention(made(bert).bfloat16(), "favorpp", m=32)):
        assert run(half, **batch).dtype == torch.bfloat16
        torch.testing.assert_close(run(half, **batch).float(), expected, rtol=0.1, atol=0.1)


@torch.no_grad()
def test_torch_compile():
    for make in (bert, Timm):
        torch._dynamo.reset()
        model, batch = swapped(make), inputs(make)
        if make is bert:
            batch["attention_mask"] = torch.ones(B, L, dtype=torch.long)
            batch["attention_mask"][0, 7:] = 0
        expected = run(model, **batch)
        torch.testing.assert_close(run(torch.compile(model, backend="eager"), **batch), expected, rtol=1e-4, atol=1e-4)


# ---- maps with several noises ----------------------------------------------------------------------------------------


COMPOSED = {"sum": (Sum(OPRF(), PosRF(), weights=(0.3, 0.7)), 24), "shared": (Sum(OPRF(), PosRF(), shared=True), 24),
            "product": (Product(OPRF(), PosRF()), (6, 4)),
            "signed": (Sum(TrigRF(), Product(PosRF(), PosRF())), (9, (4, 3)))}


def composed(make, phi, m, **options):
    maker = lambda heads, d, **sizes: RandomFeatureAttention(phi, samplers.orthogonal, m, heads, d, **sizes, **options)
    model = swap_layers(made(make), maker, "composed")
    return calibrate_attention(model, [inputs(make, seed=s) for s in (1, 2)]) if make is llama else model


@each({"bert": bert, "llama": llama})
@pytest.mark.parametrize("phi, m", COMPOSED.values(), ids=COMPOSED.keys())
@torch.no_grad()
def test_several_noises_in_a_model_are_saved_described_and_decoded(make, phi, m, tmp_path):
    model, batch = composed(make, phi, m), inputs(make)
    out = run(model, **batch)
    model.save_pretrained(tmp_path)
    other = type(model).from_pretrained(tmp_path).eval()
    maker = lambda heads, d, **sizes: RandomFeatureAttention(phi, samplers.iid, m, heads, d, seed=9, **sizes)
    assert torch.equal(run(swap_layers(other, maker, "composed"), **batch), out)
    rows = describe_attention(model)
    assert rows["m"].tolist() == [m] * 2 and (rows["M"] == phi.width(m)).all()
    if make is llama:
        cached = model(**batch, use_cache=True)
        assert type(cached.past_key_values.layers[0]).__name__ == "RecurrentLayer"
        new = torch.tensor([[5], [6]])
        whole = run(model, input_ids=torch.cat([batch["input_ids"], new], 1))[:, -1:]
        stepped = model(input_ids=new, past_key_values=cached.past_key_values, use_cache=True).logits
        torch.testing.assert_close(stepped, whole, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_a_cache_outlives_no_change_of_one_of_several_noises():
    model, batch = composed(llama, Product(PosRF(), PosRF()), (6, 4)), inputs(llama)
    cache = model(**batch, use_cache=True).past_key_values
    model.model.layers[1].self_attn.swapped.omega_1.mul_(1.1)
    with pytest.raises(ValueError, match="noise or statistics have changed"):
        model(input_ids=torch.tensor([[5], [6]]), past_key_values=cache, use_cache=True)
