"""Caches of swapped decoders: after every operation on one, what follows is what a fresh pass gives over the tokens
that are left. A static cache has free room after its last token: a place is that of the last key that is used, never
that of the tensor."""

import copy

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("transformers")
from helpers.covering import in_turn  # noqa: E402
from helpers.decoders import BELOW, BEYOND, CONTROLS, SMALL, called, mechanisms, swapped, tokens  # noqa: E402
from helpers.native_cases import needs_library  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402

from crt_exp import swap_attention, unswap_attention  # noqa: E402
from crt_exp.mechanism import Mechanism  # noqa: E402
from crt_exp.nearfar.decoding import RecallState  # noqa: E402
from crt_exp.registry import import_object  # noqa: E402
from crt_exp.swap.cache import RecurrentLayer  # noqa: E402
from crt_exp.swap.interface import AS_BEFORE  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:.*further from exact attention than uniform attention:UserWarning",
        "ignore:.*denominators are not positive:RuntimeWarning",
    ),
]
CAUSAL = {
    name: options
    for name, options in mechanisms().items()
    if import_object(Mechanism.of(options[0]).options["_target_"]).can_be_causal
}
DECODE = {name: options for name, options in CAUSAL.items() if name != "reformer"}
STATES = {name: DECODE[name] for name in ("window", "favorpp", "hrf_cluster", "hedgehog")}
for preset in ("default", "quality"):
    sizes = SMALL | {"preset": preset, "open": 5}
    STATES[f"nearfar {preset} below"] = ("nearfar", sizes | BELOW)
    STATES[f"nearfar {preset} beyond"] = ("nearfar", sizes | BEYOND)
CLOSE = {"rtol": 1e-6, "atol": 1e-8}


# ---- operations

PROMPT = 20
LENGTH = 30
ROWS = [2, 1, 1]


def masks(padded):
    """With padding on the left of two rows, and tokens of the prompt and after it that do not count."""
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    if padded:
        mask[0, :5] = 0
        mask[2, :9] = 0
        mask[1, [12, 22]] = 0
    return mask


def prompted(model, ids, mask):
    """A cache of PROMPT tokens, the last one by itself."""
    stop = PROMPT - 1
    given = {} if mask.all() else {"attention_mask": mask[:, :stop]}
    places = (mask.cumsum(1) - 1).clamp(min=0)
    cache = model(
        ids[:, :stop], use_cache=True, position_ids=places[:, :stop], **given
    ).past_key_values
    called(model, ids[:, :PROMPT], mask[:, :PROMPT], cache, stop)
    return cache


def check_kind(cache, state, dtype, padded):
    """What is tested is what is meant: keys, a state, and near-far's by the engine in C or by PyTorch."""
    has_state = state == "window" and not padded or state not in CONTROLS
    for layer in cache.layers:
        assert has_state == (isinstance(layer, RecurrentLayer) and layer.state is not None)
    for layer in cache.layers:
        if state not in CONTROLS and isinstance(layer.state, RecallState):
            in_c = dtype == torch.float32
            for group in layer.state.groups:
                assert (group.memory is not None) == ("beyond" in state and in_c)
                assert (group.epoch is not None) == ("beyond" in state and not in_c)


def check_goes_on(model, cache, ids, mask, whole, done=PROMPT):
    """Token by token and in a piece, as the whole sequence."""
    for stop in (done + 1, done + 6, done + 7):
        out = called(model, ids[:, :stop], mask[:, :stop], cache, done)
        real = mask[:, done:stop].bool()
        expected = whole[:, done:stop][real]
        assert_close(out[real], expected, rtol=1e-3, atol=1e-4)
        done = stop


CASES = (
    [(state, torch.float64, True) for state in STATES]
    + [
        pytest.param(state, torch.float32, True, marks=needs_library)
        for state in STATES
        if "nearfar" in state
    ]
    + [(state, torch.float64, False) for state in ("window", "favorpp", "nearfar default beyond")]
)


@pytest.mark.parametrize("state, dtype, padded", CASES)
@torch.no_grad()
def test_cache_operations_keep_the_logits(state, dtype, padded):
    """Each on a copy of one cache, which no use of a copy changes."""
    model = swapped(*STATES[state], dtype)
    ids = tokens()
    mask = masks(padded)
    whole = called(model, ids, mask)
    kept = prompted(model, ids, mask)
    check_kind(kept, state, dtype, padded)
    cache = copy.deepcopy(kept)
    cache.reorder_cache(torch.tensor(ROWS))
    check_goes_on(model, cache, ids[ROWS], mask[ROWS], whole[ROWS])
    other = copy.deepcopy(kept)
    draft = ids[:, [*range(PROMPT), 3, 1, 2]]
    called(model, draft, mask[:, : PROMPT + 3], other, PROMPT)
    check_goes_on(model, kept, ids, mask, whole)


@pytest.mark.parametrize(
    "preset, options", [("cheap", {"num_beams": 3}), ("default", {"prompt_lookup_num_tokens": 3})]
)
def test_near_far_generates_without_a_mask_as_without_a_cache(preset, options):
    """As its presets are, exact up to a place, and with sizes that a prompt goes beyond."""
    beams = "num_beams" in options
    ids = tokens(batch=1 + beams, length=6).repeat(1, 3)
    given = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    for sizes in ({}, SMALL | BEYOND | {"open": 5}):
        model = swapped("nearfar", sizes | {"preset": preset})
        actual = model.generate(ids, **given, **options)
        own = options if beams else {}
        expected = model.generate(ids, use_cache=False, **given, **own)
        assert torch.equal(actual.sequences, expected.sequences)
        for layer in actual.past_key_values.layers:
            assert isinstance(layer, RecurrentLayer) == beams


# ---- a static cache

SHORT = 15
ROOM = 24
PIECES = {"pieces": [9, 12, 15], "tokens": [1, 2, 9, 10, 11, 12, 13, 14, 15]}


def short_masks(padded):
    """Rows with padding on either side and without; or such that all end in it; or none."""
    mask = torch.ones(3, SHORT, dtype=torch.long)
    if padded == "sides":
        mask[0, :3] = 0
        mask[2, 12:] = 0
    if padded == "ends":
        mask[:, 14:] = 0
        mask[1, 12:] = 0
    return mask


def check_pieces(model, ids, mask, whole, *makers):
    real = mask.bool()
    for stops in PIECES.values():
        for make in makers or (lambda: StaticCache(model.config, max_cache_len=ROOM),):
            cache = make()
            parts = []
            for start, stop in zip([0, *stops], stops):
                parts.append(called(model, ids[:, :stop], mask[:, :stop], cache, start))
            actual = torch.cat(parts, 1)[real]
            assert_close(actual, whole[real], **CLOSE)


@pytest.mark.parametrize("name, padded", in_turn(DECODE, ["sides", "ends", "not"]))
@torch.no_grad()
def test_a_static_cache_equals_the_whole_sequence(name, padded):
    model = swapped(*DECODE[name], layers=1)
    ids = tokens(length=SHORT)
    mask = short_masks(padded)
    check_pieces(
        model,
        ids,
        mask,
        called(model, ids, mask),
        DynamicCache,
        lambda: StaticCache(model.config, max_cache_len=ROOM),
    )


@pytest.mark.parametrize(
    "name, padded",
    [
        ("window", "sides"),
        ("nearfar beyond", "ends"),
        ("favorp", "not"),
        ("window", "ends"),
    ],
)
@torch.no_grad()
def test_a_static_cache_with_masks_of_pairs_equals_the_whole_sequence(name, padded):
    """Those of transformers itself, which a model keeps that holds attention of other kinds."""
    model = swapped(*DECODE[name], layers=1)
    ids = tokens(length=SHORT)
    mask = short_masks(padded)
    whole = called(model, ids, mask)
    for implementation in AS_BEFORE.values():
        model.config._attn_implementation_internal = implementation
        check_pieces(model, ids, mask, whole)


@pytest.mark.parametrize("name", ["window", "nearfar beyond"])
@torch.no_grad()
def test_a_mask_of_pairs_without_positions_is_refused(name):
    """One token and its padding see the same keys, as the tokens of a prefix do."""
    model = swapped(*DECODE[name], layers=1)
    ids = tokens(length=SHORT)
    mask = short_masks("ends")
    for implementation in AS_BEFORE.values():
        model.config._attn_implementation_internal = implementation
        cache = StaticCache(model.config, max_cache_len=ROOM)
        called(model, ids[:, :13], mask[:, :13], cache)
        with pytest.raises(ValueError, match="self_attn: right padding"):
            called(model, ids, mask, cache, 13)


@torch.no_grad()
def test_a_prefix_in_a_static_cache_is_one_sequence():
    """Its tokens see each other, as those of an image before a text: the room after them is left out."""
    model = swapped(*DECODE["window"], layers=1)
    ids = tokens(length=SHORT)
    prefix = torch.zeros(3, 1, SHORT, ROOM, dtype=torch.bool)
    prefix[..., :SHORT] = True
    actual = model(
        ids, attention_mask=prefix, past_key_values=StaticCache(model.config, max_cache_len=ROOM)
    ).logits
    attention_mask = prefix[..., :SHORT]
    expected = model(ids, attention_mask=attention_mask, use_cache=False).logits
    assert_close(actual, expected)


@torch.no_grad()
def test_unswapped_layers_see_the_same_masks():
    model = swapped("exact", {})
    ids = tokens(length=SHORT)
    mask = short_masks("sides")
    before = called(unswap_attention(model), ids, mask)
    check_pieces(swap_attention(model, "exact", layers=[1]), ids, mask, before)


@torch.no_grad()
def test_reformer_takes_a_prompt_alone():
    model = swapped(*CAUSAL["reformer"])
    ids = tokens(length=SHORT)
    mask = short_masks("not")
    cases = [DynamicCache(), StaticCache(model.config, max_cache_len=ROOM)]
    for cache in cases:
        out = called(model, ids[:, :14], mask[:, :14], cache)
        expected = called(model, ids[:, :14], mask[:, :14])
        assert_close(out, expected)
        with pytest.raises(ValueError, match="reformer.*use_cache=False"):
            called(model, ids, mask, cache, 14)
