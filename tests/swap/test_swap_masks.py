"""Masks of every form mean in a swapped layer what they meant before;
what linear attention cannot represent is refused."""

import warnings

import pytest
import torch
from torch import nn

from crt_exp import describe_attention, swap_attention, unswap_attention

transformers = pytest.importorskip("transformers")
B, L = 2, 9
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
TEXT = SIZES | {"vocab_size": 40, "max_position_embeddings": 40}
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(batch=B, length=L, seed=0):
    return torch.randint(2, 40, (batch, length), generator=torch.Generator().manual_seed(seed))


def made(name, config):
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3) if p.ndim > 1 else None
    return model


def bert():
    return made("BertModel", transformers.BertConfig(**TEXT))


def llama():
    return made("LlamaModel", transformers.LlamaConfig(**TEXT, num_key_value_heads=2))


# ---- masks

@torch.no_grad()
def test_a_mask_of_one_sequence_serves_the_batch():
    past = torch.ones(L, L, dtype=torch.bool).tril()[None, None]
    pads = (torch.arange(L) < 6).expand(1, 1, 1, L)
    for make, mask in ((llama, past), (bert, pads.expand(1, 1, L, L)), (bert, pads)):
        model, ids = make(), tokens()
        before = model(input_ids=ids, attention_mask=mask).last_hidden_state
        exact = swap_attention(model, "exact")(input_ids=ids, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(exact, before, **CLOSE)
        linear = swap_attention(model, "favorp", m=8)(input_ids=ids, attention_mask=mask).last_hidden_state
        alone = model(input_ids=ids[1:], attention_mask=mask).last_hidden_state
        torch.testing.assert_close(linear[1:], alone, **CLOSE)


@torch.no_grad()
def test_masks_of_torch_without_a_batch():
    past = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    keys = torch.zeros(L, 7, dtype=torch.bool)
    keys[:, 5:] = True  # the memory's padding, the same for all
    layer = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True).double().eval()
    decoder, given = nn.TransformerDecoder(layer, 2), (numbers(B, L, 16), numbers(B, 7, 16, seed=1))
    before = decoder(*given, tgt_mask=past, memory_mask=keys)
    after = swap_attention(decoder, "exact")(*given, tgt_mask=past, memory_mask=keys)
    torch.testing.assert_close(after, before, **CLOSE)


@torch.no_grad()
def test_padded_images_of_siglip2():
    model = made("Siglip2VisionModel", transformers.Siglip2VisionConfig(**SIZES, num_patches=16, patch_size=4))
    mask = torch.ones(B, 16, dtype=torch.long)
    mask[1, 8:] = 0
    batch = {"pixel_values": numbers(B, 16, 48), "pixel_attention_mask": mask,
             "spatial_shapes": torch.tensor([[4, 4], [2, 4]])}
    before = model(**batch)
    after = swap_attention(model, "exact")(**batch)
    torch.testing.assert_close(after.last_hidden_state[mask.bool()], before.last_hidden_state[mask.bool()], **CLOSE)
    torch.testing.assert_close(after.pooler_output, before.pooler_output, **CLOSE)


@torch.no_grad()
def test_causal_masks_are_kept_as_keys_alone():
    """No L x L mask is made for plain causal or bidirectional attention, with or without padding."""
    from transformers import masking_utils

    from crt_exp.swap.interface import interface_mask

    keep = torch.ones(B, 10**6, dtype=torch.bool)
    causal = interface_mask(B, 10**6, 10**6, mask_function=masking_utils.causal_mask_function, attention_mask=keep)
    both = interface_mask(B, 10**6, 10**6, mask_function=masking_utils.bidirectional_mask_function, attention_mask=None)
    assert causal.shape == (B, 10**6) and both.shape == (B, 1, 10**6, 10**6) and both.untyped_storage().nbytes() == 1


@torch.no_grad()
@pytest.mark.parametrize("make", [bert, llama])
def test_whether_a_key_is_padding_is_looked_up_once_for_all_layers(make, monkeypatch):
    from crt_exp.swap import call, interface

    asked = []
    for module in (call, interface):
        monkeypatch.setattr(module, "known_true", lambda keep: asked.append(keep) or bool(keep.all()))
    keep = torch.ones(B, L, dtype=torch.long)
    model, ids = make(), tokens()
    before = model(input_ids=ids).last_hidden_state
    swapped = swap_attention(model, "exact")
    torch.testing.assert_close(swapped(input_ids=ids, attention_mask=keep).last_hidden_state, before, **CLOSE)
    assert len(asked) == 1
    keep[1, 6:] = 0
    padded = swapped(input_ids=ids, attention_mask=keep).last_hidden_state
    torch.testing.assert_close(padded[1, :6], model(input_ids=ids[1:, :6]).last_hidden_state[0], **CLOSE)
    assert len(asked) > 2


@torch.no_grad()
@pytest.mark.parametrize("what", ["packed", "prefix", "window"])
def test_other_patterns_are_refused_when_they_come(what):
    i, j = torch.arange(L)[:, None], torch.arange(L)
    pattern = {"packed": (i < 4) == (j < 4), "prefix": (j < 3) | (j <= i), "window": (j <= i) & (j > i - 3)}[what]
    mask = ((j <= i) & pattern if what == "packed" else pattern).expand(B, 1, L, L)
    with pytest.raises(ValueError, match=r"layers.0.self_attn: .* expected key padding .*layers=\[...\]"):
        swap_attention(llama(), "favorp", m=8)(input_ids=tokens(), attention_mask=mask)


@torch.no_grad()
def test_padded_images_of_naflexvit_are_refused_or_exact():
    """Its masks of pairs leave out padding in the rows too; the option that the refusal names gives masks of keys."""
    naflexvit = pytest.importorskip("timm.models.naflexvit")
    places = torch.cartesian_prod(torch.arange(3), torch.arange(3)).expand(B, 9, 2)
    batch = {"patches": numbers(B, 9, 48), "patch_coord": places,
             "patch_valid": torch.arange(9) < torch.tensor([[9], [6]])}
    for keys_alone in (False, True):
        model = naflexvit.NaFlexVit(naflexvit.NaFlexVitCfg(
            embed_dim=16, depth=2, num_heads=4, patch_size=4, pos_embed_grid_size=(4, 4), global_pool="avg",
            use_key_only_attn_mask=keys_alone), num_classes=3).double().eval()
        before = model(batch)
        swap_attention(model, "exact")
        if keys_alone:
            torch.testing.assert_close(model(batch), before, **CLOSE)
        else:
            with pytest.raises(ValueError, match=r"blocks.0.attn: .* use_key_only_attn_mask=True"):
                model(batch)


def test_a_head_mask_is_refused():
    with pytest.raises(ValueError, match=r"layer.0.attention.self: head_mask is not supported"):
        swap_attention(bert(), "favorp", m=8)(input_ids=tokens(), head_mask=torch.ones(2, 4))


# ---- refused at the swap

REFUSED = {
    "beit": ("BeitModel", lambda: transformers.BeitConfig(
        **SIZES, image_size=8, patch_size=4, use_relative_position_bias=True), "position bias"),
    "swin": ("SwinModel", lambda: transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4), "position bias"),
    "gemma2": ("Gemma2Model", lambda: transformers.Gemma2Config(
        **TEXT, num_key_value_heads=2, head_dim=4), "caps its logits"),
    "gemma3": ("Gemma3TextModel", lambda: transformers.Gemma3TextConfig(
        **TEXT, num_key_value_heads=2, head_dim=4, sliding_window=8),
        "a window of 8 tokens for sequences of up to 40"),
    "gpt_oss": ("GptOssModel", lambda: transformers.GptOssConfig(
        **TEXT, num_key_value_heads=2, head_dim=4, num_local_experts=2), "sinks in its softmax"),
    "llama4": ("Llama4TextModel", lambda: transformers.Llama4TextConfig(
        **TEXT, num_key_value_heads=2, head_dim=4, intermediate_size_mlp=32, num_local_experts=2,
        attention_chunk_size=8), "a window of 8 tokens"),
    "mistral": ("MistralModel", lambda: transformers.MistralConfig(
        **TEXT, num_key_value_heads=2, sliding_window=6), "a window of 6"),
    "conformer": ("Wav2Vec2ConformerModel", lambda: transformers.Wav2Vec2ConformerConfig(
        **SIZES, conv_dim=[8, 8], conv_stride=[5, 2], conv_kernel=[10, 3], num_feat_extract_layers=2,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2), "position bias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_the_logits_is_refused_at_the_swap(name):
    kind, config, reason = REFUSED[name]
    model = made(kind, config())
    keys = list(model.state_dict())
    with pytest.raises(ValueError, match=f"this attention .*{reason}.*which linear attention does not support"):
        swap_attention(model, "favorp", m=8)
    assert list(model.state_dict()) == keys and model.config._attn_implementation != "crt_exp"


@torch.no_grad()
def test_the_refusal_names_the_layers_that_can_be_swapped():
    config = transformers.Gemma3TextConfig(**TEXT, num_key_value_heads=2, head_dim=4, sliding_window=8,
                                           layer_types=["sliding_attention", "full_attention"])
    model, ids = made("Gemma3TextModel", config), tokens(length=20)
    before = model(input_ids=ids).last_hidden_state
    with pytest.raises(ValueError, match=r"layers.0.self_attn .*layers='supported' swaps \[1\]"):
        swap_attention(model, "exact", layers=[0, 1])
    with pytest.raises(ValueError, match="layers='all': expected indices of 2 layers"):
        swap_attention(model, "exact", layers="all")
    with pytest.warns(UserWarning, match=r"Gemma3TextModel: 1 layers with window .*: layers.0"):
        after = swap_attention(model, "exact")(input_ids=ids).last_hidden_state
    torch.testing.assert_close(after, before, **CLOSE)
    assert swap_attention(unswap_attention(model), "exact", layers="supported").layers[1].self_attn.swapped is not None


@torch.no_grad()
def test_layers_with_a_window_stay_and_decode_beside_the_others():
    """The default of Gemma 3, whose cache holds a window for some layers: in parallel, in pieces, token by token."""
    config = transformers.Gemma3TextConfig(**TEXT | {"num_hidden_layers": 4}, num_key_value_heads=2, head_dim=4,
                                           sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2)
    model = transformers.Gemma3ForCausalLM(config).eval()
    ids = tokens(length=20)
    for name, options in (("exact", {}), ("favorp", {"m": 8})):
        swap_attention(model, name, layers="supported", **options)
        kinds = describe_attention(model)["mechanism"].tolist()
        assert kinds == ["unchanged", name] * 2
        whole, past = model(input_ids=ids, use_cache=False).logits, None
        for start, end in ((0, 7), (7, 8), (8, 19), (19, 20)):
            out = model(input_ids=ids[:, start:end], past_key_values=past, use_cache=True)
            past = out.past_key_values
            torch.testing.assert_close(out.logits, whole[:, start:end], rtol=1e-3, atol=1e-4)
        if name == "exact":
            torch.testing.assert_close(whole, unswap_attention(model)(input_ids=ids, use_cache=False).logits, **CLOSE)


# ---- what would pass a swap by

class ByHand(nn.Module):
    """Holds two attentions of torch and calls one."""

    def __init__(self):
        super().__init__()
        self.called, self.left = (nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(2))

    def forward(self, x):
        return self.called(x, x, x, need_weights=False)[0]


def test_modules_that_a_pass_does_not_reach_are_named_once():
    model, x = swap_attention(ByHand(), "favorp", m=8), torch.randn(B, L, 16)
    with pytest.warns(UserWarning, match=r"1 swapped modules were not called: left \(SwappedMultiheadAttention\)"):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
    assert describe_attention(model)["reached"].tolist() == ["yes", "no"]
    assert not model._forward_hooks and not unswap_attention(model)._forward_hooks


@pytest.mark.parametrize("way", ["whole", pytest.param("in place", marks=pytest.mark.slow),
                                 pytest.param("a layer", marks=pytest.mark.slow)])
def test_compiled_models_are_not_said_to_be_passed_by(way):
    """Compiled modules do not note their calls."""
    model, ids = bert(), tokens()
    compiled = torch.compile(model, backend="eager") if way == "whole" else model
    if way == "in place":
        model.compile(backend="eager")
    elif way == "a layer":
        model.encoder.layer[1] = torch.compile(model.encoder.layer[1], backend="eager")
    before = compiled(ids).last_hidden_state
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after = swap_attention(compiled, "uniform")(ids).last_hidden_state
        assert "no" not in describe_attention(compiled)["reached"].tolist() and not torch.equal(after, before)
        assert torch.equal(unswap_attention(compiled)(ids).last_hidden_state, before)
    assert not [str(each.message) for each in caught if "reach" in str(each.message)]


def test_another_implementation_cannot_undo_a_swap_unseen():
    model = swap_attention(bert(), "favorp", m=8)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="_attn_implementation is now 'eager'.*call unswap_attention"):
        model(torch.tensor([[1, 2]]))
    unswap_attention(model).set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
