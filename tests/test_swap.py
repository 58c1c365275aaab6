"""Swapping attention in models of every family: the same law for all, on tiny random ones."""

import copy
import warnings

import pytest
import torch
from torch import nn

from crt_exp import calibrate_attention, describe_attention, samplers, swap_attention, unswap_attention
from crt_exp.attention import RandomFeatureAttention
from crt_exp.features import OPRF, PosRF, Product, Sum, TrigRF
from crt_exp.swap.call import drop_keys
from crt_exp.swap.swap import swap_layers

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_thread"),
              pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning"),
              pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")]
B, L = 2, 9
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32, "vocab_size": 40,
         "max_position_embeddings": 40, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
IMAGES = SIZES | {"image_size": 8, "patch_size": 4}
LOOSE = {"rtol": 1e-4, "atol": 1e-5}


def bert():
    return transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False)


def roberta():
    return transformers.RobertaModel(transformers.RobertaConfig(**SIZES, pad_token_id=1), add_pooling_layer=False)


def distilbert():
    return transformers.DistilBertModel(transformers.DistilBertConfig(
        dim=16, n_layers=2, n_heads=4, hidden_dim=32, vocab_size=40, max_position_embeddings=40, dropout=0.0,
        attention_dropout=0.0))


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=4, vocab_size=40, n_positions=40, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=None, pad_token_id=0))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        vocab_size=40, max_position_embeddings=40, bos_token_id=0, eos_token_id=None, pad_token_id=0))


def vit():
    return transformers.ViTModel(transformers.ViTConfig(**IMAGES), add_pooling_layer=False)


def vit_mae():
    return transformers.ViTMAEModel(transformers.ViTMAEConfig(**IMAGES, mask_ratio=0.0))


class Timm(nn.Module):
    def __init__(self):
        super().__init__()
        import timm

        self.inner = timm.models.VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=4,
                                                   num_classes=0, qk_norm=True)

    def forward(self, pixel_values):
        return self.inner.forward_features(pixel_values)


class Encoder(nn.Module):
    """nn.TransformerEncoder with the arguments of the others."""

    def __init__(self, batch_first=True, bias=True):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=batch_first, bias=bias)
        self.embedding = nn.Embedding(40, 16)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)
        self.batch_first = batch_first
        for p in self.parameters():  # a clone of one layer has equal parameters
            nn.init.normal_(p, std=0.2) if p.ndim > 1 else None

    def forward(self, input_ids, attention_mask=None, mask=None):
        x = self.embedding(input_ids)
        x = x if self.batch_first else x.transpose(0, 1)
        padding = None if attention_mask is None else attention_mask == 0
        out = self.inner(x, mask=mask, src_key_padding_mask=padding)
        return out if self.batch_first else out.transpose(0, 1)


class Conformer(nn.Module):
    def __init__(self):
        super().__init__()
        from torchaudio.models import Conformer as Inner

        self.embedding = nn.Embedding(40, 16)
        # a kernel of 1 mixes no tokens
        self.inner = Inner(16, 4, 32, 2, depthwise_conv_kernel_size=1, use_group_norm=False)

    def forward(self, input_ids, attention_mask=None):
        lengths = torch.full((len(input_ids),), input_ids.shape[1]) if attention_mask is None else attention_mask.sum(1)
        return self.inner(self.embedding(input_ids), lengths)[0]


TEXT = {"bert": bert, "roberta": roberta, "distilbert": distilbert, "gpt2": gpt2, "llama": llama, "encoder": Encoder,
        "encoder_time_first": lambda: Encoder(False), "conformer": Conformer}
IMAGE = {"vit": vit, "vit_mae": vit_mae, "timm": Timm}
ALL = TEXT | IMAGE
CAUSAL = {"gpt2": gpt2, "llama": llama}
HF = {name: ALL[name] for name in ("bert", "roberta", "distilbert", "gpt2", "llama", "vit", "vit_mae")}
each = lambda models: pytest.mark.parametrize("make", models.values(), ids=models.keys())


def made(make, scale=4.0):
    """A model in eval mode whose attention is not flat."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2 and any(part in name for part in ("attn", "attention", "q_proj", "k_proj")):
                p.mul_(scale if isinstance(model, transformers.PreTrainedModel) else 1.5)
    return model


def inputs(make, length=L, batch=B, seed=0):
    g = torch.Generator().manual_seed(seed)
    if make in IMAGE.values():
        found = {"pixel_values": torch.randn(batch, 3, 8, 8, generator=g)}
        return found | ({"noise": torch.rand(batch, 4, generator=g)} if make is vit_mae else {})
    return {"input_ids": torch.randint(2, 40, (batch, length), generator=g)}


def run(model, **batch):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no statistics yet.*")
        out = model(**batch)
    return out if isinstance(out, torch.Tensor) else out[0]


def swapped(make, name="favorpp", **options):
    options = {"m": 32} | options if name not in ("exact", "identity") else options
    model = swap_attention(made(make), name, **options)
    if make in CAUSAL.values() and name not in ("exact", "identity"):
        calibrate_attention(model, [inputs(make, seed=s) for s in (1, 2)])
    return model


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
    with pytest.raises(ValueError, match="build it with m=32.*saved=False"):
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
    with pytest.raises(ValueError, match="may each be its own; saved=False makes new noise"):
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


def test_dropout_loses_values_with_the_mean_unchanged():
    dropped = torch.stack([drop_keys(torch.ones(B, 4, L, 3), 0.3) for _ in range(2000)])
    assert torch.equal(dropped, dropped[..., :1].expand_as(dropped))
    sem = dropped.std(0) / len(dropped) ** 0.5
    assert (sem < 0.03).all() and ((dropped.mean(0) - 1).abs() < 5 * sem).all()


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
    with pytest.raises(ValueError, match="layers.0.self_attn: a causal call .*causal=True"):
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


# ---- torch.nn.MultiheadAttention by itself

def attention(**options):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, **options)
    if module.in_proj_bias is not None:
        nn.init.normal_(module.in_proj_bias)
    return module


@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"kdim": 6, "vdim": 5}, {"bias": False}], ids=str)
@torch.no_grad()
def test_multihead_attention_equals_torch(options):
    module = attention(**options)
    swap = swap_attention(copy.deepcopy(module), "exact")
    time_first, kdim, vdim = not options.get("batch_first"), options.get("kdim", 16), options.get("vdim", 16)
    q, k, v = torch.randn(B, 5, 16), torch.randn(B, 7, kdim), torch.randn(B, 7, vdim)
    padding = torch.zeros(B, 7, dtype=torch.bool)
    padding[0, 5:] = True
    turn = lambda t: t.transpose(0, 1) if time_first else t
    for given in ({}, {"key_padding_mask": padding},
                  {"key_padding_mask": torch.zeros(B, 7).masked_fill(padding, -torch.inf)},
                  {"need_weights": False}, {"average_attn_weights": False}):
        expected, got = (m(turn(q), turn(k), turn(v), **given) for m in (module, swap))
        torch.testing.assert_close(got, expected, **LOOSE)
    expected, got = (m(q[0], k[0], v[0], key_padding_mask=padding[0]) for m in (module, swap))  # not batched
    torch.testing.assert_close(got, expected, **LOOSE)


@torch.no_grad()
def test_causal_masks_of_torch():
    module = attention(batch_first=True)
    swap, x = swap_attention(copy.deepcopy(module), "exact"), torch.randn(B, 6, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    expected = module(x, x, x, attn_mask=mask)[0]
    for given in ({"attn_mask": mask}, {"attn_mask": mask, "is_causal": True}, {"attn_mask": mask == -torch.inf},
                  {"attn_mask": mask.expand(B * 4, 6, 6)}):
        torch.testing.assert_close(swap(x, x, x, **given)[0], expected, **LOOSE)
    torch.testing.assert_close(swap(x, x, x, attn_mask=torch.zeros(6, 6))[0], module(x, x, x)[0], **LOOSE)
    for bad in (mask == 0, torch.rand(6, 6), (mask < 0) | torch.eye(6, dtype=torch.bool).roll(2, 0)):
        with pytest.raises(ValueError, match="MultiheadAttention: the attention mask"):
            swap(x, x, x, attn_mask=bad)


def test_one_module_causal_and_not():
    module, x = swap_attention(attention(batch_first=True), "favorpp", m=16).eval(), torch.randn(B, 6, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    full = module(x, x, x)[0]
    with pytest.warns(UserWarning, match="calibrate_attention"):
        causal = module(x, x, x, attn_mask=mask)[0]
    calibrate_attention(module, [{"query": x, "key": x, "value": x, "attn_mask": mask}])
    torch.testing.assert_close(module(x, x, x)[0], full)
    fitted = module(x, x, x, attn_mask=mask)[0]
    assert not torch.equal(fitted, causal) and not torch.allclose(fitted, full)


@torch.no_grad()
def test_encoder_in_eval_mode_is_swapped_and_restored():
    model, ids = made(Encoder), inputs(Encoder)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    before = run(model, input_ids=ids, attention_mask=mask)
    swap_attention(model, "identity")
    calls = []
    hooks = [part.register_forward_hook(lambda *_: calls.append(1)) for part in model.modules()
             if hasattr(part, "scaling")]
    run(model, input_ids=ids, attention_mask=mask)
    for hook in hooks:
        hook.remove()
    assert len(calls) == 2
    layer = model.inner.layers[0].self_attn
    layer.swapped.forward = None  # without hooks, which would end the fast path by themselves
    with pytest.raises(TypeError):
        run(model, input_ids=ids)
    unswap_attention(model)
    assert torch.equal(run(model, input_ids=ids, attention_mask=mask), before)


# ---- table, calibration, errors

def test_table(capsys):
    model = swapped(bert)
    rows = describe_attention(model)
    assert "favorpp" in capsys.readouterr().out
    assert rows["type"].tolist() == ["BertSelfAttention"] * 2 and rows["A mean"].isna().all()
    assert rows["error on calibration"].isna().all() and rows["uniform's error"].isna().all()
    calibrate_attention(model, [inputs(bert, seed=s) for s in range(2)])
    rows = describe_attention(model)
    assert (rows["A min"] <= rows["A mean"]).all() and (rows["A max"] <= 0).all() and (rows["M"] == 32).all()
    more = describe_attention(calibrate_attention(swapped(bert, m=1024), [inputs(bert, seed=s) for s in range(2)]))
    assert (more["error on calibration"] < 0.5 * rows["error on calibration"]).all()
    assert more["uniform's error"][0] == rows["uniform's error"][0]  # the first layer sees the same
    swap_attention(model, "relu", layers=[0], m=8)
    assert describe_attention(model)["error on calibration"].isna().tolist() == [True, False]
    assert describe_attention(unswap_attention(model))["mechanism"].tolist() == ["unchanged"] * 2
    causal = describe_attention(swapped(llama, "gerf"))
    assert causal["error on calibration"].notna().all() and causal["A mean"].notna().all() and (causal["M"] == 64).all()


def test_calibration_fills_causal_statistics_only_and_restores_the_mode():
    model = made(gpt2).train()
    swap_attention(model, "favorpp", m=8)
    states = [part for part in model.modules() if isinstance(part, RandomFeatureAttention)]
    assert not any(float(s.running_weight) for s in states)
    calibrate_attention(model, [inputs(gpt2)["input_ids"], (inputs(gpt2, seed=1)["input_ids"],), inputs(gpt2, seed=2)])
    assert all(float(s.running_weight) == 1 and int(s.folds) == 3 for s in states) and model.training
    with pytest.raises(ValueError, match="no batches"):
        calibrate_attention(model, [])
    with pytest.raises(ValueError, match="swap_attention first"):
        calibrate_attention(made(gpt2), [inputs(gpt2)])


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="no attention found in this Linear"):
        swap_attention(nn.Linear(2, 2), "favorpp")
    with pytest.raises(ValueError, match="did you mean favorp"):
        swap_attention(made(bert), "favorpq")
    for layers in ([2], [-3], ["0"]):
        with pytest.raises(ValueError, match="2 attention layers, 0 to 1"):
            swap_attention(made(bert), "favorpp", layers=layers)
    with pytest.raises(ValueError, match="empty"):
        swap_attention(made(bert), "favorpp", layers=[])
    with pytest.raises(ValueError, match="no attention of this BertModel is swapped"):
        unswap_attention(made(bert))
    with pytest.raises(ValueError, match="add_zero_attn"):
        swap_attention(attention(add_zero_attn=True), "favorpp")
    state = swap_attention(made(bert), "favorpp", m=16).state_dict()
    with pytest.raises(ValueError, match="build it with m=16"):
        swap_attention(made(bert), "favorpp", m=32).load_state_dict(state)


class Mixed(nn.Module):
    """One attention that can be swapped beside two of other kinds, one of them within a wrapper."""

    class OwnAttention(nn.Module):
        def forward(self, x):
            return (x @ x.mT).softmax(-1) @ x

    class Fused(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    def __init__(self):
        super().__init__()
        self.known, self.own = nn.MultiheadAttention(16, 4), self.OwnAttention()
        self.wrapper = nn.Sequential(self.Fused())


def test_attention_of_other_kinds_is_named(capsys):
    with pytest.warns(UserWarning, match=r"stays as it is in this Mixed: own \(OwnAttention\), wrapper.0 \(Fused\)"):
        model = swap_attention(Mixed(), "favorpp", m=8)
    rows = describe_attention(model)
    assert rows["mechanism"].tolist() == ["favorpp", "cannot be swapped", "cannot be swapped"]
    assert rows["path"].tolist() == ["known", "own", "wrapper.0"]
    assert rows["layer"].isna().tolist() == [False, True, True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swap_attention(Mixed(), "favorpp", m=8, layers=[0])  # who chooses layers knows
        for make in ALL.values():
            swap_attention(make(), "exact")


def test_position_biases_are_refused():
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4, "vocab_size": 20}
    with pytest.raises(ValueError, match=r"SelfAttention \(T5Attention\).*position bias"):
        swap_attention(transformers.T5EncoderModel(transformers.T5Config(**sizes)), "favorpp")
    alibi = transformers.BloomModel(transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=4, vocab_size=20))
    with pytest.raises(ValueError, match=r"other kinds: h.0.self_attention \(BloomAttention\)"):
        swap_attention(alibi, "favorpp")


@torch.no_grad()
def test_masks_that_are_not_linear_are_refused():
    model, ids = swapped(gpt2), inputs(gpt2)["input_ids"]
    causal = torch.ones(B, 1, L, L, dtype=torch.bool).tril()
    torch.testing.assert_close(run(model, input_ids=ids, attention_mask=causal), run(model, input_ids=ids), **LOOSE)
    with pytest.raises(ValueError, match=r"transformer.h.0.attn: the attention mask .* neither"):
        run(model, input_ids=ids, attention_mask=causal.triu(-2))
    packed = torch.arange(L).remainder(4).expand(B, -1)
    with pytest.raises(ValueError, match=r"transformer.h.0.attn.*packed"):
        run(model, input_ids=ids, position_ids=packed, use_cache=False)


@torch.no_grad()
def test_windows_that_do_not_cut_are_exact():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 32, "vocab_size": 40, "max_position_embeddings": 20}
    model = transformers.MistralModel(transformers.MistralConfig(**sizes, sliding_window=20)).eval()
    before = run(model, **inputs(llama))
    torch.testing.assert_close(run(swap_attention(model, "exact"), **inputs(llama)), before, **LOOSE)


# ---- maps with several noises

COMPOSED = {"sum": (Sum(OPRF(), PosRF(), weights=(0.3, 0.7)), 24), "shared": (Sum(OPRF(), PosRF(), shared=True), 24),
            "product": (Product(OPRF(), PosRF()), (6, 4)),
            "signed": (Sum(TrigRF(), Product(PosRF(), PosRF())), (9, (4, 3)))}


def composed(make, phi, m, **options):
    maker = lambda heads, d, **sizes: RandomFeatureAttention(phi, samplers.orthogonal, m, heads, d, **sizes, **options)
    model = swap_layers(made(make), maker, "composed")
    return calibrate_attention(model, [inputs(make, seed=s) for s in (1, 2)]) if make is llama else model


@each({"bert": bert, "llama": llama})
@pytest.mark.parametrize("phi, m", COMPOSED.values(), ids=COMPOSED.keys())
@pytest.mark.filterwarnings("ignore:.*further from exact.*:UserWarning")
@torch.no_grad()
def test_several_noises_in_a_model_are_saved_described_and_decoded(make, phi, m, tmp_path, capsys):
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
    with pytest.raises(ValueError, match="noise or statistics changed"):
        model(input_ids=torch.tensor([[5], [6]]), past_key_values=cache, use_cache=True)
