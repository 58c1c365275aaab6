"""Decoding of swapped Hugging Face models: the recurrent state gives what the whole sequence gives, in every mode."""

import copy
import pickle

import pytest
import torch
import transformers
from helpers.decoders import tokens as tokens_of
from helpers.swap_models import SIZES, build_model, gpt2, llama, neox
from torch.testing import assert_close

from crt_exp import calibrate_attention, swap_attention, unswap_attention
from crt_exp.swap.attend import Call, attend
from crt_exp.swap.cache import NewKeys, RecurrentLayer

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:.*further from exact attention than uniform attention:UserWarning"
    ),
]
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


def tokens(length=6, batch=2, seed=0):
    return tokens_of(batch, length, seed)


def swapped(make, name="favorpp", **options):
    model = swap_attention(build_model(make), name, **({"m": 32} | options))
    return calibrate_attention(model, [tokens(seed=s) for s in (1, 2)])


def recurrent(cache):
    """How many layers of a cache hold a recurrent state."""
    return sum(
        isinstance(layer, RecurrentLayer) and layer.state is not None for layer in cache.layers
    )


def generated(model, ids, **options):
    """Sequences with the cache, checked to be recurrent, and without."""
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True} | options
    out = []
    for use in (True, False):
        torch.manual_seed(0)
        out.append(model.generate(ids, use_cache=use, **options))
    assert recurrent(out[0].past_key_values) == 2
    return out[0].sequences, out[1].sequences


def left_padded(ids):
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return mask


# ---- generate


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
def test_a_window_generates_with_a_bounded_cache(options):
    """The first block, and the last one or two."""
    model = swap_attention(build_model(llama), "window", block=4, first=2)
    actual, expected = generated(model, tokens(21), **options)
    assert torch.equal(actual, expected)


@torch.no_grad()
def test_the_cache_of_a_window_does_not_grow():
    model = swap_attention(build_model(llama), "window", block=4, first=2)
    ids = tokens(40)
    cache = model(ids[:, :9], use_cache=True).past_key_values
    sizes = []
    for stop, next_stop in ((9, 16), (16, 17), (17, 29), (29, 40)):
        out = model(ids[:, stop:next_stop], past_key_values=cache)
        expected = model(ids[:, :next_stop], use_cache=False).logits[:, stop:]
        assert_close(out.logits, expected, **CLOSE)
        sizes.append(cache.layers[0].state.keys.shape[2])
    assert cache.get_seq_length() == 40
    assert max(sizes) <= 12


@torch.no_grad()
def test_a_window_with_padded_rows_stores_all_keys():
    model = swap_attention(build_model(llama), "window", block=4, first=2)
    ids = tokens(21)
    mask = left_padded(ids)
    options = {"max_new_tokens": 8, "do_sample": False}
    actual = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **options)
    assert not recurrent(actual.past_key_values)
    expected = model.generate(ids, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(actual.sequences, expected)


@torch.no_grad()
def test_a_window_refuses_padding_after_the_prompt():
    model = swap_attention(build_model(llama), "window", block=4, first=2)
    ids = tokens(21)
    cache = model(ids[:, :12], use_cache=True).past_key_values
    mask = torch.ones_like(ids)
    mask[0, 15] = 0
    with pytest.raises(ValueError, match="window attention has no padding"):
        model(ids[:, 12:], attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize(
    "make, name, options",
    [
        (gpt2, "favorpp", {}),
        (llama, "favorp", {}),
        (neox, "gerf", {}),
        (gpt2, "favor", {}),
        (llama, "geom", {}),
        (llama, "favorpp", {"num_beams": 3}),
        (gpt2, "relu", {"do_sample": True, "num_return_sequences": 3}),
    ],
)
def test_generate_gives_the_tokens_of_the_whole_sequence(make, name, options):
    ids = tokens()
    with_state, without = generated(
        swapped(make, name), ids, attention_mask=left_padded(ids), **options
    )
    assert torch.equal(with_state, without)
    assert with_state.shape[1] == 18


def test_a_prompt_in_chunks():
    model = swapped(llama)
    ids = tokens(11)
    options = {"attention_mask": left_padded(ids), "max_new_tokens": 12, "do_sample": False}
    actual = model.generate(ids, prefill_chunk_size=4, **options)
    expected = generated(model, ids, **options)[1]
    assert torch.equal(actual, expected)


@torch.no_grad()
def test_generation_goes_on_from_a_returned_cache():
    model = swapped(llama)
    ids = tokens(6)
    options = {"do_sample": False, "return_dict_in_generate": True}
    first = model.generate(ids, max_new_tokens=5, **options)
    more = torch.cat([first.sequences, tokens(3, seed=3)], 1)
    cache = copy.deepcopy(first.past_key_values)
    expected = model.generate(more, max_new_tokens=5, use_cache=False, **options).sequences
    for given in (first.past_key_values, cache):
        assert torch.equal(
            model.generate(more, max_new_tokens=5, past_key_values=given, **options).sequences,
            expected,
        )


# ---- calls of the model


@torch.no_grad()
def test_the_cache_does_not_grow():
    model = swapped(llama)
    ids = tokens(40)
    past = None
    sizes = []
    cases = [(0, 8), (8, 9), (9, 38), (38, 39), (39, 40)]
    for a, b in cases:
        past = model(ids[:, a:b], past_key_values=past, use_cache=True).past_key_values
        sizes.append([layer.nbytes() for layer in past.layers])
    for size in sizes:
        assert size == sizes[0]
    assert [layer.state.sums.sums.numel() for layer in past.layers] == [
        2 * 4 * 32 * (4 + 1)
    ] * 2  # B H M (dv + 1)


@torch.no_grad()
def test_changes_of_a_state_are_refused_and_a_reset_one_begins_anew():
    model = swapped(llama)
    ids = tokens(9, batch=3)
    past = model(ids[:, :7], use_cache=True).past_key_values
    cases = [
        lambda: past.crop(-1),
        lambda: past.batch_repeat_interleave(2),
        lambda: past.batch_select_indices(torch.tensor([1])),
    ]
    for change in cases:
        with pytest.raises(ValueError, match=r"the recurrent cache .*DynamicCache"):
            change()
    past.reset()
    actual = model(ids, past_key_values=past, use_cache=True).logits
    expected = model(ids).logits
    assert_close(actual, expected, **CLOSE)


# ---- where all keys are kept, as before


@torch.no_grad()
def test_a_cache_of_ones_own_keeps_all_keys():
    model = swapped(gpt2)
    ids = tokens(9)
    whole = model(ids).logits
    # None: not asked for
    cases = [
        transformers.DynamicCache(),
        transformers.DynamicCache(config=model.config),
        None,
    ]
    for given in cases:
        past = model(ids[:, :6], past_key_values=given).past_key_values
        assert recurrent(past) == 0
        assert past.layers[0].keys.shape[2] == 6
        actual = model(ids[:, 6:], past_key_values=past).logits
        assert_close(actual, whole[:, 6:], **CLOSE)


def test_training_and_gradients_keep_all_keys():
    model = swapped(llama)
    ids = tokens(9)
    first = model(ids[:, :6], use_cache=True)
    assert recurrent(first.past_key_values) == 0
    second = model(ids[:, 6:], past_key_values=first.past_key_values, use_cache=True)
    second.logits.sum().backward()
    cached = {}
    for name, p in model.named_parameters():
        cached[name] = p.grad.clone()
    model.zero_grad()
    model(ids).logits[:, 6:].sum().backward()
    for name, p in model.named_parameters():
        assert_close(cached[name], p.grad, **CLOSE)
    with torch.no_grad():
        past = model(ids[:, :6], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="self_attn: .*gradients"):
        model(ids[:, 6:], past_key_values=past, use_cache=True)
    with torch.no_grad(), pytest.raises(ValueError, match="training mode"):
        model.train()(ids[:, 6:], past_key_values=past, use_cache=True)


@torch.no_grad()
def test_attention_matrices_need_all_keys():
    model = swapped(gpt2)
    ids = tokens()
    out = model.generate(
        ids, max_new_tokens=4, do_sample=False, output_attentions=True, return_dict_in_generate=True
    )
    assert recurrent(out.past_key_values) == 0
    assert out.attentions[-1][0].shape == (2, 4, 1, 9)
    past = model(ids, use_cache=True).past_key_values
    with pytest.raises(
        ValueError, match="output_attentions=True; pass past_key_values=DynamicCache"
    ):
        model(ids[:, :1], past_key_values=past, use_cache=True, output_attentions=True)


def deepseek():
    """Keys of few dimensions, which the module expands after the cache gave them."""
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **SIZES,
            num_key_value_heads=4,
            pad_token_id=0,
            eos_token_id=None,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=4,
            first_k_dense_replace=2,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
        )
    )


def diffllama():
    """Two attentions with the same keys and parts of the values."""
    return transformers.DiffLlamaForCausalLM(
        transformers.DiffLlamaConfig(**SIZES, pad_token_id=0, eos_token_id=None)
    )


@pytest.mark.parametrize("make", [deepseek, diffllama])
@torch.no_grad()
def test_modules_that_work_on_cached_keys_keep_them(make):
    model = swapped(make, "favorp")
    ids = tokens()
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    out = model.generate(ids, **options)
    without = model.generate(ids, use_cache=False, **options)
    assert recurrent(out.past_key_values) == 0
    assert torch.equal(out.sequences, without.sequences)


@torch.no_grad()
def test_keys_that_serve_two_attentions_are_kept():
    swap = swapped(llama).model.layers[0].self_attn.swapped
    layer = RecurrentLayer()
    q, k, v = torch.randn(3, 2, 4, 5, 4)
    keys, values = layer.update(k[:, :2], v[:, :2])
    call = Call(q, keys, values, causal=True)
    outputs = []
    for _ in range(2):
        assert layer.attend(swap, call) is None
        outputs.append(attend(swap, call)[0])
    first, second = outputs
    assert layer.whole
    assert torch.equal(first, second)
    assert torch.equal(layer.keys, k[:, :2])


# ---- what a state cannot give is refused


@torch.no_grad()
def test_a_mask_that_changes_the_past_is_refused():
    model = swapped(llama)
    ids = tokens(9)
    mask = left_padded(ids)

    def call(mask, past):
        return model(ids[:, 6:8], attention_mask=mask, past_key_values=past, use_cache=True)

    def start(mask):
        return model(ids[:, :6], attention_mask=mask, use_cache=True).past_key_values

    before = mask[:, :6]
    now = mask[:, :8]
    all_kept = torch.ones_like(mask[:, :8])
    message = "layers.0.self_attn: .* changed masks"
    changes = [
        (before, None),
        (None, now),
        (before, now.flip(0)),
        (before, all_kept),
    ]
    for first, then in changes:
        with pytest.raises(ValueError, match=message):
            call(then, start(first))
    later = mask[:, :8].clone()
    later[1, 6] = 0  # a new token that does not count
    past = start(mask[:, :6])
    call(later, past)
    with pytest.raises(ValueError, match="changed masks"):
        model(ids[:, 8:], attention_mask=mask, past_key_values=past, use_cache=True)


@torch.no_grad()
def test_a_cache_outlives_no_change_of_the_layer():
    ids = tokens(9)
    cases = [
        lambda model: calibrate_attention(model, [tokens(9, seed=4)]),
        lambda model: model.model.layers[0].self_attn.swapped.redraw(),
        lambda model: model.load_state_dict(model.state_dict()),
        lambda model: swap_attention(model, "favorpp", m=32),
        unswap_attention,
    ]
    for change in cases:
        model = swapped(llama)
        past = model(ids[:, :6], use_cache=True).past_key_values
        change(model)
        with pytest.raises(ValueError, match="use a new cache|the recurrent cache"):
            model(ids[:, 6:7], past_key_values=past, use_cache=True)


@torch.no_grad()
def test_new_keys_are_refused_outside_the_swapped_attention():
    model = swapped(llama)
    layer_cache = model(tokens(), use_cache=True).past_key_values
    keys, values = layer_cache.update(torch.ones(2, 2, 1, 4), torch.ones(2, 2, 1, 4), 0)
    assert isinstance(keys, NewKeys)
    assert keys.shape == (2, 2, 1, 4)
    with pytest.raises(ValueError, match="the recurrent cache .*DynamicCache"):
        torch.cat([values, values])
    layer = layer_cache.layers[0]
    swap = model.model.layers[0].self_attn.swapped
    with pytest.raises(ValueError, match="self_attn: .* reused keys"):
        layer.attend(swap, Call(torch.ones(2, 4, 1, 4), keys, keys, causal=True))
    with pytest.raises(ValueError, match="no swapped attention used the new keys"):
        layer_cache.update(torch.ones(2, 2, 1, 4), torch.ones(2, 2, 1, 4), 0)


# ---- the model around it


@torch.no_grad()
def test_copies_of_a_model_decode_identically_and_swapping_again_installs_once():
    model = swap_attention(swapped(gpt2), "favorp", m=16)
    ids = tokens()
    expected = generated(model, ids)[1]
    cases = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in cases:
        assert torch.equal(generated(other, ids)[0], expected)
        assert other._prepare_cache_for_generation.args[0] is other
        assert [len(part._forward_pre_hooks) for part in (other, other.transformer)] == [
            0,
            1,
        ]  # which makes the caches
        assert not unswap_attention(other).transformer._forward_pre_hooks
    actual = recurrent(swap_attention(model, "exact")(ids, use_cache=True).past_key_values)
    assert actual == 0
