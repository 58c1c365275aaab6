"""A static cache has free room after its last token: a place is that of the last key that is used, never that of the
tensor. For every attention that can be causal: as with a cache that grows, and as without one."""

import pytest
import torch

pytest.importorskip("transformers")
from covering import in_turn  # noqa: E402
from decoders import called, mechanisms, swapped, tokens  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402

from crt_exp import swap_attention, unswap_attention  # noqa: E402
from crt_exp.mechanism import Mechanism  # noqa: E402
from crt_exp.swap.interface import AS_BEFORE, INTERFACE  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"),
              pytest.mark.filterwarnings("ignore:.*further from exact attention than uniform attention:UserWarning",
                                         "ignore:.*denominators are not positive:RuntimeWarning")]
CAUSAL = {name: each for name, each in mechanisms().items() if Mechanism.of(each[0]).kind.can_be_causal}
DECODE = {name: each for name, each in CAUSAL.items() if name != "reformer"}
CLOSE = {"rtol": 1e-6, "atol": 1e-8}
LENGTH, ROOM = 15, 24
PIECES = {"whole": [15], "pieces": [9, 12, 15], "tokens": [1, 2, 9, 10, 11, 12, 13, 14, 15]}


def masks(padded):
    """Rows with padding on either side and without; or such that all end in it; or none."""
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    if padded == "sides":
        mask[0, :3], mask[2, 12:] = 0, 0
    if padded == "ends":
        mask[:, 14:], mask[1, 12:] = 0, 0
    return mask


def in_pieces(model, ids, mask, cache, stops):
    starts = [0, *stops][:-1]
    parts = [called(model, ids[:, :stop], mask[:, :stop], cache, start) for start, stop in zip(starts, stops)]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("name, padded", in_turn(DECODE, ["sides", "ends", "not"]))
@torch.no_grad()
def test_room_changes_nothing(name, padded):
    model, ids, mask = swapped(*DECODE[name], layers=1), tokens(length=LENGTH), masks(padded)
    whole, real = called(model, ids, mask), mask.bool()
    for stops in PIECES.values():
        for cache in (DynamicCache(), StaticCache(model.config, max_cache_len=ROOM)):
            out = in_pieces(model, ids, mask, cache, stops)
            torch.testing.assert_close(out[real], whole[real], **CLOSE)


@pytest.mark.parametrize("padded", ["not", "sides", "ends"])
@pytest.mark.parametrize("name", ["window", "nearfar beyond", "favorp"])
@torch.no_grad()
def test_room_changes_nothing_in_masks_of_pairs(name, padded):
    """Those of transformers itself, which a model keeps that holds attention of other kinds."""
    model, ids, mask = swapped(*DECODE[name], layers=1), tokens(length=LENGTH), masks(padded)
    whole, real = called(model, ids, mask), mask.bool()
    for implementation in AS_BEFORE.values():
        model.config._attn_implementation_internal = implementation
        for stops in PIECES.values():
            out = in_pieces(model, ids, mask, StaticCache(model.config, max_cache_len=ROOM), stops)
            torch.testing.assert_close(out[real], whole[real], **CLOSE)


@pytest.mark.parametrize("name", ["window", "nearfar beyond"])
@torch.no_grad()
def test_a_mask_of_pairs_that_says_no_place_is_refused(name):
    """One token and its padding see the same keys, as the tokens of a prefix do."""
    model, ids, mask = swapped(*DECODE[name], layers=1), tokens(length=LENGTH), masks("ends")
    for implementation in AS_BEFORE.values():
        model.config._attn_implementation_internal = implementation
        cache = StaticCache(model.config, max_cache_len=ROOM)
        called(model, ids[:, :13], mask[:, :13], cache)
        with pytest.raises(ValueError, match="self_attn: right padding"):
            called(model, ids, mask, cache, 13)


@torch.no_grad()
def test_a_prefix_in_a_static_cache_is_one_sequence():
    """Its tokens see each other, as those of an image before a text: the room after them is left out."""
    model, ids = swapped(*DECODE["window"], layers=1), tokens(length=LENGTH)
    prefix = torch.zeros(3, 1, LENGTH, ROOM, dtype=torch.bool)
    prefix[..., :LENGTH] = True
    found = model(ids, attention_mask=prefix, past_key_values=StaticCache(model.config, max_cache_len=ROOM)).logits
    torch.testing.assert_close(found, model(ids, attention_mask=prefix[..., :LENGTH], use_cache=False).logits)


@torch.no_grad()
def test_layers_that_are_not_swapped_see_what_they_saw():
    model, ids, mask = swapped("exact", {}), tokens(length=LENGTH), masks("sides")
    before = called(unswap_attention(model), ids, mask)
    swap_attention(model, "exact", layers=[1])
    for implementation in (INTERFACE, *AS_BEFORE.values()):
        model.config._attn_implementation_internal = implementation
        for stops in PIECES.values():
            out = in_pieces(model, ids, mask, StaticCache(model.config, max_cache_len=ROOM), stops)
            torch.testing.assert_close(out[mask.bool()], before[mask.bool()], **CLOSE)


@torch.no_grad()
def test_reformer_takes_a_prompt_alone():
    model, ids, mask = swapped(*CAUSAL["reformer"]), tokens(length=LENGTH), masks("not")
    for cache in (DynamicCache(), StaticCache(model.config, max_cache_len=ROOM)):
        out = called(model, ids[:, :14], mask[:, :14], cache)
        torch.testing.assert_close(out, called(model, ids[:, :14], mask[:, :14]))
        with pytest.raises(ValueError, match="reformer.*use_cache=False"):
            called(model, ids, mask, cache, 14)
