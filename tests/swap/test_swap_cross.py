"""Encoder-decoders: nothing that a decoder's token gets depends on a later one, with any map, calibrated or not."""

import copy
import warnings

import pytest
import torch
from torch import nn

from crt_exp import calibrate_attention, samplers, swap_attention
from crt_exp.attention import RandomFeatureAttention, attention
from crt_exp.features import OPRF, Statistics
from crt_exp.swap import families as swap_families

transformers = pytest.importorskip("transformers")
B, S, L = 2, 9, 7
pytestmark = [pytest.mark.usefixtures("one_thread"),
              pytest.mark.filterwarnings("ignore:.*further from exact attention than uniform attention:UserWarning")]
FITTED = ("favorpp", "gerf", "geom", "geom_plus", "pois", "pois_plus")
LATER = 4  # the first decoder token that changes
SIZES = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 40, "init_std": 0.3}
SPECIAL = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 2,
           "forced_eos_token_id": None}
TEXT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32, "vocab_size": 40}


def ids(length, seed=0):
    return torch.randint(3, 40, (B, length), generator=torch.Generator().manual_seed(seed))


def numbers(*shape, seed=0):
    return torch.randn(B, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bart():
    config = transformers.BartConfig(**SIZES, **SPECIAL, max_position_embeddings=40)
    return transformers.BartForConditionalGeneration(config)


def marian():
    return transformers.MarianMTModel(transformers.MarianConfig(**SIZES, **SPECIAL, max_position_embeddings=40))


def whisper():
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(
        **SIZES, **SPECIAL, num_mel_bins=4, max_source_positions=S, max_target_positions=40, suppress_tokens=None,
        begin_suppress_tokens=None))


def bert2bert():
    encoder = transformers.BertConfig(**TEXT, max_position_embeddings=40)
    decoder = transformers.BertConfig(**TEXT, max_position_embeddings=40, is_decoder=True, add_cross_attention=True)
    return transformers.EncoderDecoderModel(
        transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder))


def vit_gpt2():
    sizes = {k: v for k, v in TEXT.items() if k != "vocab_size"}
    encoder = transformers.ViTConfig(**sizes, image_size=12, patch_size=4)
    decoder = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=40, n_positions=40,
                                      add_cross_attention=True, is_decoder=True)
    return transformers.VisionEncoderDecoderModel(
        transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder))


class Torch(nn.Module):
    """nn.Transformer, or its decoder alone, with the arguments of the others."""

    def __init__(self, encoder=True):
        super().__init__()
        sizes = {"nhead": 4, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
        self.embedding = nn.Embedding(40, 16)
        self.inner = (nn.Transformer(16, num_encoder_layers=1, num_decoder_layers=2, **sizes) if encoder
                      else nn.TransformerDecoder(nn.TransformerDecoderLayer(16, **sizes), 2))
        for p in self.parameters():
            nn.init.normal_(p, std=0.3) if p.ndim > 1 else None

    def forward(self, input_ids, decoder_input_ids, attention_mask=None):
        source, target = self.embedding(input_ids), self.embedding(decoder_input_ids)
        padding = None if attention_mask is None else attention_mask == 0
        given = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype),
                 "tgt_is_causal": True, "memory_key_padding_mask": padding}
        if isinstance(self.inner, nn.Transformer):
            return self.inner(source, target, src_key_padding_mask=padding, **given)
        return self.inner(target, source, **given)


HF = {"bart": bart, "marian": marian, "whisper": whisper, "bert2bert": bert2bert, "vit_gpt2": vit_gpt2}
ALL = HF | {"transformer": Torch, "transformer_decoder": lambda: Torch(encoder=False)}
each = lambda models: pytest.mark.parametrize("make", models.values(), ids=models.keys())


def made(make):
    """In float64 and eval mode; the attention is not flat."""
    torch.manual_seed(0)
    model = make().eval().double()
    if make in (bert2bert, vit_gpt2):
        for p in model.parameters():
            nn.init.normal_(p, std=0.3) if p.ndim > 1 else None
    if isinstance(model, transformers.PreTrainedModel):
        for config in (model.config, model.generation_config):
            config.decoder_start_token_id, config.pad_token_id, config.bos_token_id, config.eos_token_id = 2, 1, 0, None
    return model


def source(make, seed=0):
    """What the encoder reads; the second text is padded at the end."""
    if make is whisper:
        return {"input_features": numbers(4, 2 * S, seed=seed)}
    if make is vit_gpt2:
        return {"pixel_values": numbers(3, 12, 12, seed=seed)}
    mask = torch.ones(B, S, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": ids(S, seed), "attention_mask": mask}


def inputs(make, seed=0, length=L):
    return source(make, seed) | {"decoder_input_ids": ids(length, seed + 10)}


@torch.no_grad()
def run(model, batch):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no statistics yet.*")
        out = model(**batch)
    return out if isinstance(out, torch.Tensor) else out.logits


@each(ALL)
@pytest.mark.parametrize("name", ["window", "identity"])
def test_attention_within_one_sequence_is_refused_in_the_place_of_one_to_another(make, name):
    """At the swap, and before anything changes; the other layers can have it."""
    model = made(make)
    with pytest.raises(ValueError, match=f"attends to another sequence: not supported by attention={name}; leave"):
        swap_attention(model, name)
    assert not any("swapped" in part._modules for part in model.modules())
    held = {id(child): part for part in model.modules() for child in part.children()}
    layers = [i for i, (path, part) in enumerate(swap_families.attention_modules(model))
              if not swap_families.is_cross(part, path, held.get(id(part)))]
    run(swap_attention(model, name, layers=layers), inputs(make))


def swapped(make, name="favorpp", calibrated=True):
    model = swap_attention(made(make), name, m=64)
    return calibrate_attention(model, [inputs(make, seed) for seed in (1, 2)]) if calibrated else model


def change(batch, start=LATER):
    """The same with other decoder tokens from `start` on."""
    tokens = batch["decoder_input_ids"].clone()
    tokens[:, start:] = 39 - tokens[:, start:] + 3
    return batch | {"decoder_input_ids": tokens}


def noting(factors):
    """`attention` that appends what rounding is magnified by: the largest ratio, over queries, of the sum of the
    absolute values that a denominator is summed of to that denominator."""
    def call(x, y, v, phi, noise, params, *, causal, scale, **more):
        maps = phi.phi_q(scale * x, noise, params), phi.phi_k(scale * y, noise, params)
        fx, fy = (f.value * f.log_scale.exp() for f in maps)
        terms, sums = fx.abs() @ fy.abs().mT, fx @ fy.mT
        terms, sums = (terms.tril(), sums.tril()) if causal else (terms, sums)
        factors.append(float((terms.sum(-1) / sums.sum(-1).abs()).max()))
        return attention(x, y, v, phi, noise, params, causal=causal, scale=scale, **more)
    return call


@pytest.mark.slow
@each(ALL)
@pytest.mark.parametrize("calibrated", [True, False], ids=["calibrated", "uncalibrated"])
@pytest.mark.parametrize("name", FITTED)
def test_no_future_in_a_decoder(make, name, calibrated, monkeypatch):
    """Up to rounding: 32 units in the last place of the output, magnified by the cancellation in each layer."""
    model, batch, factors = swapped(make, name, calibrated), inputs(make), []
    monkeypatch.setattr("crt_exp.attention.layer.attention", noting(factors))
    before, after = run(model, batch), run(model, change(batch))
    assert not torch.allclose(before[:, LATER:], after[:, LATER:])
    bound = 32 * torch.finfo(before.dtype).eps * sum(factors) / 2 * before.abs().max()
    assert (before - after)[:, :LATER].abs().max() < bound < 1e-8  # leaks are above 1e-2


@each(ALL)
@pytest.mark.parametrize("calibrated", [True, False], ids=["calibrated", "uncalibrated"])
def test_a_prefix_of_the_decoder_gives_a_prefix_of_the_output(make, calibrated):
    """Also where the decoder's prefix is as long as the encoder's sequence, or one token."""
    model, batch = swapped(make, "gerf", calibrated), inputs(make, length=S + 3)
    whole = run(model, batch)
    for length in (1, 4, S, S + 1):
        part = run(model, batch | {"decoder_input_ids": batch["decoder_input_ids"][:, :length]})
        torch.testing.assert_close(whole[:, :length], part, rtol=1e-10, atol=1e-10)


@each(HF)
def test_the_cache_gives_the_logits_of_the_whole_sequence(make):
    model, batch = swapped(make), inputs(make)
    whole, tokens, cache, found = run(model, batch), batch.pop("decoder_input_ids"), None, []
    for part in (slice(0, 3), slice(3, 4), slice(4, L)):
        with torch.no_grad():
            out = model(**batch, decoder_input_ids=tokens[:, part], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.logits)
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-10, atol=1e-10)


@each(ALL)
def test_no_future_in_training(make):
    """The statistics of a training pass come from earlier ones."""
    model, batch = swapped(make, "geom_plus", calibrated=False).train(), inputs(make)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    for dropout in ("dropout", "activation_dropout"):
        for part in model.modules():
            setattr(part, dropout, 0.0) if isinstance(getattr(part, dropout, None), float) else None
    run(model, inputs(make, 1))
    other = copy.deepcopy(model)
    before, after = run(model, batch), run(other, change(batch))
    torch.testing.assert_close(before[:, :LATER], after[:, :LATER], rtol=1e-12, atol=1e-12)


@each({name: make for name, make in ALL.items() if make not in (whisper, vit_gpt2)})
def test_padding_of_the_encoder_counts_nowhere(make):
    cut, padded = inputs(make, 5, 3), inputs(make, 5, 3)
    cut["input_ids"], cut["attention_mask"] = cut["input_ids"][:, :6], None
    padded["attention_mask"][:, 6:] = 0
    for length in (3, S):  # as many queries as keys: the padding of keys must not be taken for one of queries
        for batch in (cut, padded):
            batch["decoder_input_ids"] = ids(length, 3)
        found = []
        for batch in (cut, padded):
            model = calibrate_attention(swap_attention(made(make), "geom_plus", m=16), [batch])
            found.append(run(model, batch))
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@each(HF)
@pytest.mark.parametrize("name", ["favorpp", "geom"])
def test_generate_with_and_without_cache(make, name):
    options = {"max_new_tokens": 6, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    for calibrated in (True, False):
        model = swapped(make, name, calibrated)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with_cache, without = (model.generate(**source(make), use_cache=use, **options) for use in (True, False))
        assert torch.equal(with_cache.sequences, without.sequences) and with_cache.sequences.shape[1] >= 7
        for a, b in zip(with_cache.scores, without.scores):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # scores are float32


@torch.no_grad()
def test_marian_saved_loaded_and_generating(tmp_path):
    model = swapped(marian)
    model.save_pretrained(tmp_path)
    loaded = transformers.MarianMTModel.from_pretrained(tmp_path, dtype=torch.float64).eval()
    swap_attention(loaded, "favorpp", m=64)
    torch.testing.assert_close(run(model, inputs(marian)), run(loaded, inputs(marian)), rtol=1e-12, atol=1e-12)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(*(each.generate(**source(marian), **options) for each in (model, loaded)))


# ---- statistics

@each(ALL)
def test_calibration_fills_the_queries_of_cross_attention(make):
    model = swap_attention(made(make), "favorpp", m=16)
    seen = {}
    for path, part in model.named_modules():
        if isinstance(part, RandomFeatureAttention):
            note = lambda part, given, path=path: seen.setdefault(path, []).append(
                (part.cross and not part.causal, given[0]))
            part.register_forward_pre_hook(note)
    calibrate_attention(model, [inputs(make, seed) for seed in (1, 2)])
    cross = {path: [q for _, q in calls] for path, calls in seen.items() if calls[0][0]}
    assert len(cross) == 2
    for path, queries in cross.items():
        state = model.get_submodule(path)
        expected = torch.cat(queries).square().mean((0, 2)) * state.scale**2
        assert float(state.running_weight) == 1 and int(state.folds) == 2
        torch.testing.assert_close(state.running_x_mean_sq, expected, check_dtype=False)


def test_cross_attention_is_fitted_to_its_keys_and_earlier_queries():
    layer = RandomFeatureAttention(OPRF(), samplers.orthogonal, 16, 4, 8, cross=True).double().eval()
    q, earlier = numbers(4, 5, 8), numbers(4, 5, 8, seed=1)
    k, v = 2 * numbers(4, 5, 8, seed=2), numbers(4, 5, 8, seed=3)
    root, fit = 8**-0.25, layer.phi.fit
    alone = fit(Statistics.of(torch.cat([k, -k], 2), k, scale=root))
    torch.testing.assert_close(layer(q, k, v), attention(q, k, v, layer.phi, layer.noise, alone, scale=root))
    with layer.calibration():
        layer(earlier, numbers(4, 5, 8, seed=9), v)
    x = earlier.transpose(0, 1).flatten(1, 2).expand(B, -1, -1, -1)
    fitted = fit(Statistics.of(x, k, scale=root))
    torch.testing.assert_close(layer(q, k, v), attention(q, k, v, layer.phi, layer.noise, fitted, scale=root))


def test_other_numbers_of_queries_and_keys_are_cross_attention():
    layer = RandomFeatureAttention(OPRF(), samplers.orthogonal, 16, 4, 8).double().eval()
    q, k, v = numbers(4, 5, 8), numbers(4, 9, 8, seed=1), numbers(4, 9, 8, seed=2)
    torch.testing.assert_close(layer(q, k, v)[:, :, :3], layer(q[:, :, :3], k, v))
    assert not layer.keeps_statistics


@pytest.mark.parametrize("name", FITTED)
def test_uncalibrated_cross_attention_estimates_softmax(name):
    """Fitted to the keys alone, it has less than twice the error of a fit to queries and keys."""
    q, k, v = (numbers(4, 64, 8, seed=seed) * 0.7 for seed in range(3))
    exact = nn.functional.scaled_dot_product_attention(q, k, v)
    errors = []
    for cross in (True, False):
        layers = [swap_attention(nn.MultiheadAttention(32, 4), name, m=256, seed=seed).swapped for seed in range(10)]
        for layer in layers:
            layer.causal, layer.cross = False, cross
        errors.append(torch.stack([(layer.double()(q, k, v) - exact).norm() / exact.norm() for layer in layers]).mean())
    assert errors[0] < 2 * errors[1]


@pytest.mark.slow
def test_compiled_cross_attention():
    torch._dynamo.reset()
    layer = RandomFeatureAttention(OPRF(), samplers.orthogonal, 16, 4, 8, cross=True)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    for seed in range(3):
        q, k, v = (numbers(4, n, 8, seed=seed + n).float() for n in (5, 6, 6))
        torch.testing.assert_close(compiled(q, k, v), layer(q, k, v), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_multihead_attention_tells_cross_attention_by_its_tensors():
    module = swap_attention(nn.MultiheadAttention(16, 4, batch_first=True), "favorpp", m=16).double().eval()
    x = numbers(6, 16)
    own, other = module(x, x, x)[0], module(x, x.clone(), x)[0]
    assert not torch.allclose(own, other)
    torch.testing.assert_close(module(x, x.detach(), x)[0], own)  # the same memory is the same sequence
    torch.testing.assert_close(module(x[:, :2], x, x)[0], other[:, :2])


def test_which_modules_may_be_cross():
    expected = {"encoder_attn": True, "crossattention.self": True, "crossattention": True, "attention.self": False}
    for make in HF.values():
        model = make()
        for path, part in model.named_modules():
            if swap_families.family(part) and not getattr(part, "is_causal", False):
                told = [value for name, value in expected.items() if path.endswith(name)]
                assert swap_families.may_be_cross(part, path) == (told[0] if told else False), path
    llama = transformers.LlamaModel(transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, vocab_size=40))
    assert not swap_families.sizes(llama.layers[0].self_attn, "layers.0.self_attn").cross
