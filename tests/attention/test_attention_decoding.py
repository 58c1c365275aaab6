"""Attention token by token: the state is that of the whole sequence."""

import itertools

import pytest
import torch
from attention_cases import CLOSED, FEW, OTHER, Case, assert_same, set_chunks
from maps import MAPS

from crt_exp.attention import DecodingState, attention_reference
from crt_exp.features import OPRF, Sum, TrigRF

pytestmark = pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")


@pytest.mark.parametrize("size", [1, 4, 5, 64])
@pytest.mark.parametrize("phi", FEW, ids=repr)
def test_recurrent_equals_chunked(phi, size, monkeypatch):
    """Token by token, in pieces, or whole, whatever the chunk size, with masked tokens on the way."""
    set_chunks(monkeypatch, size)
    case = Case(phi, masked=True)
    whole = case(causal=True)
    assert_same([whole], [case(attention_reference, causal=True)])
    for cuts in (range(12), (0, 3, 4, 11)):
        state = DecodingState(phi, case.noise, case.params)
        parts = [state.step(*(t[:, :, a:b] for t in (case.x, case.y, case.v)), case.mask[:, a:b]) for a, b in
                 itertools.pairwise(cuts)]
        assert_same([torch.cat(parts, 2)], [whole.detach()])
    width = phi.width((6,) * 2 if isinstance(phi, Sum) else 6)
    assert state.length == 11 and state.sums.numerator.numel() == 2 * 4 * width * 3


# float32: in C, where it is
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("phi", FEW + OTHER[:1], ids=repr)
def test_a_prompt_taken_at_once_leaves_the_same_state(phi, dtype, tolerance):
    """Whole, and in two parts of which the first is padding for one sequence."""
    case = Case(phi, masked=True, dtype=dtype)
    whole = case(causal=True).detach()
    for cuts in ((0, 9), (0, 4, 8)):
        state = DecodingState(phi, case.noise, case.params)
        for a, b in itertools.pairwise(cuts):
            state.take(case.y[:, :, a:b], case.v[:, :, a:b], case.mask[:, a:b])
        parts = [state.step(*(t[:, :, a:b] for t in (case.x, case.y, case.v)), case.mask[:, a:b]) for a, b in
                 ((cuts[-1], 10), (10, 11))]
        assert_same([torch.cat(parts, 2)], [whole[:, :, cuts[-1]:]], tolerance)
        assert state.length == 11


@pytest.mark.parametrize("phi", CLOSED, ids=repr)
def test_decoding_is_as_exact_as_its_vectors_whatever_the_noise(phi):
    case = Case(phi)
    case.noise = case.noise.to(torch.float32)
    state = DecodingState(phi, case.noise, case.params)
    state.take(case.y[:, :, :6], case.v[:, :, :6])
    parts = [state.step(*(t[:, :, a:b] for t in (case.x, case.y, case.v))) for a, b in ((6, 10), (10, 11))]
    assert_same([torch.cat(parts, 2)], [case(causal=True).detach()[:, :, 6:]])


@pytest.mark.parametrize("policy", ["clamp", "abs"])
def test_single_tokens_treat_denominators_as_the_whole_sequence_does(policy):
    case = Case(TrigRF(), scale=2.0, m=3)
    state = DecodingState(TrigRF(), case.noise, denominator=policy)
    steps = [state.step(*(t[:, :, i:i + 1] for t in (case.x, case.y, case.v))) for i in range(11)]
    assert_same([torch.cat(steps, 2)], [case(causal=True, denominator=policy).detach()], 1e-7)


def test_a_copy_of_a_state_is_a_point_to_come_back_to():
    case = Case(OPRF())
    step = lambda state, t: state.step(*(u[:, :, t:t + 1] for u in (case.x, case.y, case.v)))
    state = DecodingState(OPRF(), case.noise, case.params)
    step(state, 0)
    before = state.copy()
    expected = step(state, 1)
    assert torch.equal(step(before, 1), expected) and before.length == state.length == 2


def test_decoding_under_autocast_keeps_its_precision():
    case = Case(OPRF(), dtype=torch.float32)
    outs = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            state = DecodingState(OPRF(), case.noise, case.params)
            steps = [state.step(*(t[:, :, a:b] for t in (case.x, case.y, case.v))) for a, b in ((0, 6), (6, 7))]
            outs += [torch.cat(steps, 2)]
    assert torch.equal(*outs)


def test_state_refuses_other_parameters():
    case = Case(OPRF())
    token = [t[:, :, :1] for t in (case.x, case.y, case.v)]
    state = DecodingState(OPRF(), case.noise, case.params, version=3)
    state.step(*token, version=3)
    with pytest.raises(ValueError, match="have changed"):
        state.step(*token, version=4)
    case.noise.rows().mul_(2)  # a redraw in place
    with pytest.raises(ValueError, match="start a new one"):
        state.step(*token)


@pytest.mark.parametrize("phi", MAPS, ids=repr)
def test_a_state_takes_no_intermediate_of_the_noise_for_a_change(phi):
    """Some maps have the noise compute and keep its squared norms at the first token."""
    case = Case(phi)
    state = DecodingState(phi, case.noise, case.params)
    steps = [state.step(*(t[:, :, i:i + 1] for t in (case.x, case.y, case.v))) for i in range(3)]
    assert_same([torch.cat(steps, 2)], [case(causal=True)[:, :, :3].detach()], 1e-7)


def test_state_follows_a_beam():
    case = Case(TrigRF())
    step = lambda state, rows, t: state.step(*(u[rows, :, t:t + 1] for u in (case.x, case.y, case.v)))
    state = DecodingState(TrigRF(), case.noise)
    step(state, [0, 1], 0)
    state.select(torch.tensor([1, 1, 0]))
    out = step(state, [1, 1, 0], 1)
    assert_same([out[:, :, 0]], [case(causal=True)[[1, 1, 0], :, 1].detach()])
    with pytest.raises(ValueError, match="3 sequences, got 2"):
        step(state, [0, 1], 2)
