"""Masks of every form mean in a swapped layer what they meant before, also in torch.nn.MultiheadAttention by itself;
what linear attention cannot represent is refused."""

import copy

import pytest
import torch
import transformers
from helpers import swap_models
from helpers.decoders import tokens as tokens_of
from helpers.seeds import seeded
from helpers.swap_models import LOOSE, SIZES, B, Encoder, L, attention, run, spread
from torch import nn
from torch.testing import assert_close
from transformers import masking_utils

from crt_exp import describe_attention, swap_attention, unswap_attention
from crt_exp.swap.interface import interface_mask

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning"),
]
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
GROUPED = {
    key: SIZES[key]
    for key in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    )
} | {"num_key_value_heads": 2}


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def tokens(length=L):
    return tokens_of(B, length)


def build(name, config):
    torch.manual_seed(0)
    return spread(getattr(transformers, name)(config)).double().eval()


def bert():
    return build("BertModel", transformers.BertConfig(**SIZES))


def llama():
    return build("LlamaModel", transformers.LlamaConfig(**GROUPED))


def gemma(**changes):
    """Whose layers have windows, in turn by default."""
    return transformers.Gemma3TextConfig(**GROUPED | {"head_dim": 4, "sliding_window": 5} | changes)


# ---- models of transformers and timm


@torch.no_grad()
def test_a_mask_of_one_sequence_serves_the_batch():
    past = torch.ones(L, L, dtype=torch.bool).tril()[None, None]
    pads = (torch.arange(L) < 6).expand(1, 1, 1, L)
    cases = [
        (llama, past),
        (bert, pads.expand(1, 1, L, L)),
        (bert, pads),
    ]
    for make, mask in cases:
        model = make()
        ids = tokens()
        before = model(input_ids=ids, attention_mask=mask).last_hidden_state
        exact = swap_attention(model, "exact")(input_ids=ids, attention_mask=mask).last_hidden_state
        assert_close(exact, before, **CLOSE)
        linear = swap_attention(model, "favorp", m=8)(
            input_ids=ids, attention_mask=mask
        ).last_hidden_state
        alone = model(input_ids=ids[1:], attention_mask=mask).last_hidden_state
        assert_close(linear[1:], alone, **CLOSE)


@torch.no_grad()
def test_causal_masks_are_kept_as_keys_alone():
    """No L x L mask is made for plain causal or bidirectional attention, with or without padding."""
    keep = torch.ones(B, 10**6, dtype=torch.bool)
    causal = interface_mask(
        B, 10**6, 10**6, mask_function=masking_utils.causal_mask_function, attention_mask=keep
    )
    both = interface_mask(
        B,
        10**6,
        10**6,
        mask_function=masking_utils.bidirectional_mask_function,
        attention_mask=None,
    )
    assert causal.shape == (B, 10**6)
    expected = (B, 1, 10**6, 10**6)
    assert both.shape == expected
    assert both.untyped_storage().nbytes() == 1


@torch.no_grad()
def test_other_patterns_are_refused_when_they_come():
    model = swap_attention(llama(), "favorp", m=8)
    i = torch.arange(L)[:, None]
    j = torch.arange(L)
    packed = (i < 4) == (j < 4)
    past = j <= i
    cases = [past & packed, past | (j < 3), past & (j > i - 3)]
    for pattern in cases:
        with pytest.raises(
            ValueError, match=r"layers.0.self_attn: .* expected key padding .*layers=\[...\]"
        ):
            model(input_ids=tokens(), attention_mask=pattern.expand(B, 1, L, L))
    with pytest.raises(ValueError, match="layers.0.self_attn: attention_mask"):  # packed sequences
        model(
            input_ids=tokens(),
            position_ids=torch.arange(L).remainder(4).expand(B, -1),
            use_cache=False,
        )


# ---- windows


def test_the_refusal_names_the_layers_that_can_be_swapped():
    model = build("Gemma3TextModel", gemma(layer_types=["sliding_attention", "full_attention"]))
    with pytest.raises(ValueError, match=r"layers.0.self_attn .*layers='supported' swaps \[1\]"):
        swap_attention(model, "exact", layers=[0, 1])
    with pytest.raises(ValueError, match="layers='all': expected indices of 2 layers"):
        swap_attention(model, "exact", layers="all")
    with pytest.warns(UserWarning, match=r"Gemma3TextModel: 1 layers with window .*: layers.0"):
        swap_attention(model, "exact")
    assert (
        swap_attention(unswap_attention(model), "exact", layers="supported")
        .layers[1]
        .self_attn.swapped
        is not None
    )


@torch.no_grad()
def test_layers_with_a_window_stay_and_decode_beside_the_others():
    """The default of Gemma 3, whose cache holds a window for some layers: in parallel, in pieces, token by token."""
    kinds = ["sliding_attention", "full_attention"] * 2
    ids = tokens(length=20)
    model = build("Gemma3ForCausalLM", gemma(num_hidden_layers=4, layer_types=kinds))
    cases = [("exact", {}), ("favorp", {"m": 8})]
    for name, options in cases:
        swap_attention(model, name, layers="supported", **options)
        actual = describe_attention(model)["mechanism"].tolist()
        expected = ["unchanged", name] * 2
        assert actual == expected
        whole = model(input_ids=ids, use_cache=False).logits
        past = None
        cases = [(0, 7), (7, 8), (8, 19), (19, 20)]
        for start, end in cases:
            input_ids = ids[:, start:end]
            out = model(input_ids=input_ids, past_key_values=past, use_cache=True)
            past = out.past_key_values
            expected = whole[:, start:end]
            assert_close(out.logits, expected, rtol=1e-6, atol=1e-6)
        if name == "exact":
            expected = unswap_attention(model)(input_ids=ids, use_cache=False).logits
            assert_close(whole, expected, **CLOSE)


def test_changes_of_the_logits_are_refused_and_leave_the_model_unchanged():
    model = build(
        "BeitModel",
        transformers.BeitConfig(
            **{key: SIZES[key] for key in SIZES if "max_" not in key},
            image_size=8,
            patch_size=4,
            use_relative_position_bias=True,
        ),
    )
    keys = list(model.state_dict())
    with pytest.raises(
        ValueError, match="this attention .*position bias.*which linear attention does not support"
    ):
        swap_attention(model, "favorp", m=8)
    assert list(model.state_dict()) == keys
    assert model.config._attn_implementation != "crt_exp"


# ---- torch.nn.MultiheadAttention


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": True},
        {"kdim": 6, "vdim": 5},
        {"bias": False},
    ],
    ids=str,
)
@torch.no_grad()
def test_multihead_attention_equals_torch(options):
    module = attention(**options)
    swap = swap_attention(copy.deepcopy(module), "exact")
    time_first = not options.get("batch_first")
    kdim = options.get("kdim", 16)
    vdim = options.get("vdim", 16)
    q = torch.randn(B, 5, 16)
    k = torch.randn(B, 7, kdim)
    v = torch.randn(B, 7, vdim)
    padding = torch.zeros(B, 7, dtype=torch.bool)
    padding[0, 5:] = True

    def turn(t):
        return t.transpose(0, 1) if time_first else t

    cases = [
        {},
        {"key_padding_mask": padding},
        {"key_padding_mask": torch.zeros(B, 7).masked_fill(padding, -torch.inf)},
        {"need_weights": False},
        {"average_attn_weights": False},
    ]
    for given in cases:
        turned = [turn(q), turn(k), turn(v)]
        expected = module(*turned, **given)
        got = swap(*turned, **given)
        assert_close(got, expected, **LOOSE)
    expected, got = (
        m(q[0], k[0], v[0], key_padding_mask=padding[0]) for m in (module, swap)
    )  # not batched
    assert_close(got, expected, **LOOSE)


@torch.no_grad()
def test_causal_masks_of_torch():
    module = attention(batch_first=True)
    swap = swap_attention(copy.deepcopy(module), "exact")
    x = torch.randn(B, 6, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    padding = torch.arange(6) >= torch.tensor([[6], [3]])
    cases = [
        {"attn_mask": mask},
        {"attn_mask": mask, "is_causal": True},
        {"attn_mask": mask == -torch.inf},
        {"attn_mask": mask.expand(B * 4, 6, 6)},
        {"attn_mask": torch.zeros(6, 6)},
        {"attn_mask": mask == -torch.inf, "key_padding_mask": padding},
    ]
    for given in cases:
        actual = swap(x, x, x, **given)[0]
        expected = module(x, x, x, **given)[0]
        assert_close(actual, expected, **LOOSE)
    short = mask[:2]  # two queries, the first of six tokens
    for averaged in (True, False):
        assert_close(
            *(
                m(x[:, :2], x, x, attn_mask=short, average_attn_weights=averaged)
                for m in (swap, module)
            ),
            **LOOSE,
        )
    cases = [
        mask == 0,
        torch.rand(6, 6),
        (mask < 0) | torch.eye(6, dtype=torch.bool).roll(2, 0),
    ]
    for bad in cases:
        with pytest.raises(ValueError, match="MultiheadAttention: attention_mask"):
            swap(x, x, x, attn_mask=bad)


@torch.no_grad()
def test_masks_of_torch_without_a_batch():
    past = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    keys = torch.zeros(L, 7, dtype=torch.bool)
    keys[:, 5:] = True  # the memory's padding, the same for all
    layer = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True).double().eval()
    decoder = nn.TransformerDecoder(layer, 2)
    given = (numbers(B, L, 16), numbers(B, 7, 16, seed=1))
    before = decoder(*given, tgt_mask=past, memory_mask=keys)
    after = swap_attention(decoder, "exact")(*given, tgt_mask=past, memory_mask=keys)
    assert_close(after, before, **CLOSE)


@torch.no_grad()
def test_encoder_in_eval_mode_is_swapped_and_restored():
    """Its fused path, which knows no swapped attention, is off until attention is its own again."""
    model = swap_models.build_model(Encoder)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    before = run(model, input_ids=ids, attention_mask=mask)
    nested = model.inner.use_nested_tensor
    swap_attention(model, "identity")
    actual = run(model, input_ids=ids, attention_mask=mask)
    assert not torch.allclose(actual, before)
    model.inner.layers[
        0
    ].self_attn.swapped.forward = None  # without hooks, which would end the fast path by themselves
    with pytest.raises(TypeError):
        run(model, input_ids=ids)
    unswap_attention(model)
    actual = run(model, input_ids=ids, attention_mask=mask)
    assert torch.equal(actual, before)
    assert model.inner.use_nested_tensor == nested
