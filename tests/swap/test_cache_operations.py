"""Every operation on a cache of a swapped decoder, for every state: what follows is what a fresh pass gives over the
tokens that are left."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
from decoders import BELOW, BEYOND, CONTROLS, SMALL, called, mechanisms, swapped, tokens  # noqa: E402
from native_cases import needs_library  # noqa: E402

from crt_exp.nearfar.decoding import KnownInC  # noqa: E402
from crt_exp.swap.cache import RecurrentLayer  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"),
              pytest.mark.filterwarnings("ignore:.*further from exact attention than uniform attention:UserWarning",
                                         "ignore:.*denominators are not positive:RuntimeWarning")]
NEARFAR = {f"nearfar {preset} {where}": ("nearfar", SMALL | {"preset": preset, "open": 5} | until)
           for preset in ("cheap", "default", "quality") for where, until in (("below", BELOW), ("beyond", BEYOND))}
STATES = NEARFAR | {name: each for name, each in mechanisms().items()
                    if name not in ("linformer", "reformer", "nearfar below", "nearfar beyond")}
PROMPT, LENGTH = 20, 30


def masks(padded):
    """With padding on the left of two rows, and a token within that does not count."""
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    if padded:
        mask[0, :5], mask[2, :9], mask[1, 12] = 0, 0, 0
    return mask


def prompted(model, ids, mask):
    """A cache of PROMPT tokens, the last one by itself."""
    stop = PROMPT - 1
    given = {} if mask.all() else {"attention_mask": mask[:, :stop]}
    places = (mask.cumsum(1) - 1).clamp(min=0)
    cache = model(ids[:, :stop], use_cache=True, position_ids=places[:, :stop], **given).past_key_values
    called(model, ids[:, :PROMPT], mask[:, :PROMPT], cache, stop)
    return cache


def check_kind(cache, state, dtype):
    """What is tested is what is meant: keys, a state, and near-far's by the engine in C or by PyTorch."""
    assert all((state in CONTROLS) != (isinstance(layer, RecurrentLayer) and layer.state is not None)
               for layer in cache.layers)
    known = [known for layer in cache.layers if state not in CONTROLS
             for known in getattr(layer.state, "known", {}).values()]
    assert bool(known) == ("beyond" in state)
    assert all(isinstance(each, KnownInC) == (dtype == torch.float32) for each in known)


def check_goes_on(model, cache, ids, mask, whole, done=PROMPT):
    """Token by token and in a piece, as the whole sequence."""
    for stop in (done + 1, done + 6, done + 7):
        out = called(model, ids[:, :stop], mask[:, :stop], cache, done)
        real = mask[:, done:stop].bool()
        torch.testing.assert_close(out[real], whole[:, done:stop][real], rtol=1e-3, atol=1e-4)
        done = stop


ROWS = [2, 1, 1]
ALL = [pytest.param(state, torch.float64) for state in STATES] + [
    pytest.param(state, torch.float32, marks=needs_library) for state in NEARFAR]
# Of near-far's states with padding each takes one engine among the fast tests, in turn. Of each kind of state one is
# without a mask: keys, sums, near-far's before and after its far keys.
ENGINES = {state: (torch.float32, torch.float64)[number % 2] for number, state in enumerate(
    ("nearfar cheap below", "nearfar cheap beyond", "nearfar default beyond", "nearfar default below",
     "nearfar quality below", "nearfar quality beyond"))}
UNMASKED = ("window", "favorpp", "nearfar default below", "nearfar default beyond")


def is_fast(state, dtype, padded):
    return state in UNMASKED if not padded else dtype == ENGINES.get(state, dtype)


CASES = [pytest.param(*each.values, padded, id="-".join(map(str, (*each.values, "padded" if padded else "whole"))),
                      marks=[*each.marks, *([] if is_fast(*each.values, padded) else [pytest.mark.slow])])
         for each in ALL for padded in (False, True)]


@pytest.mark.parametrize("state, dtype, padded", CASES)
@torch.no_grad()
def test_operations_give_what_is_left(state, dtype, padded):
    """Each on a copy of one cache, which no use of a copy changes."""
    model, ids, mask = swapped(*STATES[state], dtype), tokens(), masks(padded)
    whole, kept = called(model, ids, mask), prompted(model, ids, mask)
    check_kind(kept, state, dtype)
    cache = copy.deepcopy(kept)
    cache.reorder_cache(torch.tensor(ROWS))
    check_goes_on(model, cache, ids[ROWS], mask[ROWS], whole[ROWS])
    other = copy.deepcopy(kept)
    called(model, ids[:, [*range(PROMPT), 3, 1, 2]], mask[:, :PROMPT + 3], other, PROMPT)
    check_goes_on(model, kept, ids, mask, whole)


def generated(model, ids, **options):
    given = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True} | options
    return model.generate(ids, **given)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
@pytest.mark.parametrize("preset", ["cheap", "default", "quality"])
def test_near_far_generates_without_a_mask_as_without_a_cache(preset, options):
    """As its presets are, exact up to a place, and with sizes that a prompt goes beyond."""
    ids = tokens(batch=1 if "prompt_lookup_num_tokens" in options else 2, length=6).repeat(1, 3)
    for sizes in ({}, SMALL | BEYOND | {"open": 5}):
        model = swapped("nearfar", sizes | {"preset": preset})
        found = generated(model, ids, **options)
        expected = generated(model, ids, use_cache=False, **{k: v for k, v in options.items() if k == "num_beams"})
        assert torch.equal(found.sequences, expected.sequences)
        recurrent = [isinstance(layer, RecurrentLayer) for layer in found.past_key_values.layers]
        assert recurrent == [("num_beams" in options)] * len(recurrent)


@pytest.mark.parametrize("state", STATES)
@torch.no_grad()
def test_a_row_with_padding_in_front_goes_on_as_it_does_alone(state):
    """Before, in pieces and token by token: places are counted from its first real token."""
    model, ids, mask = swapped(*STATES[state]), tokens(), masks(True)
    row, first = slice(0, 1), 5
    alone = called(model, ids[row, first:], mask[row, first:])
    cache = prompted(model, ids, mask)
    parts = [called(model, ids[:, :stop], mask[:, :stop], cache, done)
             for done, stop in ((PROMPT, PROMPT + 1), (PROMPT + 1, PROMPT + 6))]
    torch.testing.assert_close(torch.cat(parts, 1)[row], alone[:, PROMPT - first:PROMPT + 6 - first])
    torch.testing.assert_close(called(model, ids, mask)[row, first:], alone)
