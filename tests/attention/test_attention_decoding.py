"""Attention token by token: the state is that of the whole sequence."""

import itertools

import pytest
import torch
from helpers.attention_cases import FEW, OTHER, Case, assert_same, set_chunks
from helpers.covering import in_turn, slow

from crt_exp import Mechanism
from crt_exp.attention import DecodingState, attention, attention_reference
from crt_exp.features import OPRF, AngularHybrid, ClusteredHybrid, PoisRF, TrigRF

pytestmark = pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")


def steps(state, case, cuts, masked=False):
    """Outputs of the tokens between the cuts, one step from each to the next."""
    parts = []
    for first, last in itertools.pairwise(cuts):
        mask = [case.mask[:, first:last]] if masked else []
        parts.append(state.step(*case.tokens(first, last), *mask))
    return torch.cat(parts, 2)


@pytest.mark.parametrize("phi, size", in_turn(FEW, [1, 4, 5, 64]), ids=repr)
def test_recurrent_equals_chunked(phi, size, monkeypatch):
    """Token by token, in pieces, or whole, whatever the chunk size, with masked tokens on the way."""
    set_chunks(monkeypatch, size)
    case = Case(phi, masked=True)
    whole = case(causal=True)
    expected = [case(attention_reference, causal=True)]
    assert_same([whole], expected)
    cases = [range(12), (0, 3, 4, 11)]
    for cuts in cases:
        state = DecodingState(phi, case.noise, case.params)
        actual = [steps(state, case, cuts, masked=True)]
        assert_same(actual, [whole.detach()])
    width = phi.width(6)
    assert state.length == 11
    actual = state.sums.sums.numel()
    expected = 2 * 4 * width * (3 + 1)
    assert actual == expected


# float32: in C, where it is
@pytest.mark.parametrize(
    "phi, rounding",
    in_turn(FEW + OTHER[:1], [(torch.float64, 1e-9), (torch.float32, 1e-4)], times=2),
    ids=repr,
)
def test_a_prompt_taken_at_once_leaves_the_same_state(phi, rounding):
    """Whole, and in two parts of which the first is padding for one sequence."""
    dtype, tolerance = rounding
    case = Case(phi, masked=True, dtype=dtype)
    whole = case(causal=True).detach()
    cases = [(0, 9), (0, 4, 8)]
    for cuts in cases:
        state = DecodingState(phi, case.noise, case.params)
        for first, last in itertools.pairwise(cuts):
            _, y, v = case.tokens(first, last)
            state.take(y, v, case.mask[:, first:last])
        assert_same(
            [steps(state, case, (cuts[-1], 10, 11), masked=True)],
            [whole[:, :, cuts[-1] :]],
            tolerance,
        )
        assert state.length == 11


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"denominator": "clamp"},
        {"denominator": "abs"},
        {"normalize": False},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "phi",
    [
        TrigRF(),
        AngularHybrid(n=3),
        ClusteredHybrid(field="complex"),
    ],
    ids=repr,
)
def test_steps_treat_denominators_as_the_whole_sequence_does(phi, options):
    scale = 2.0 if phi == TrigRF() else 0.6
    case = Case(phi, scale=scale, m=3)
    state = DecodingState(phi, case.noise, case.params, **options)
    expected = []
    for function in (attention, attention_reference):
        expected.append(case(function, causal=True, **options).detach())
    actual = [steps(state, case, (0, 1, 2, 3, 8, 10, 11))] * 2
    assert_same(actual, expected, 1e-7)


def test_a_copy_of_a_decoding_state_is_independent():
    case = Case(OPRF())
    state = DecodingState(OPRF(), case.noise, case.params)
    steps(state, case, (0, 1))
    before = state.copy()
    expected = steps(state, case, (1, 2))
    actual = steps(before, case, (1, 2))
    assert torch.equal(actual, expected)
    assert before.length == state.length
    assert state.length == 2


def test_decoding_under_autocast_keeps_its_precision():
    case = Case(OPRF(), dtype=torch.float32)
    outs = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            outs.append(steps(DecodingState(OPRF(), case.noise, case.params), case, (0, 6, 7)))
    assert torch.equal(*outs)


def test_state_refuses_other_parameters():
    case = Case(OPRF())
    token = []
    for t in (case.x, case.y, case.v):
        token.append(t[:, :, :1])
    state = DecodingState(OPRF(), case.noise, case.params)
    state.step(*token)
    case.noise.rows().mul_(2)  # a redraw in place
    with pytest.raises(ValueError, match="start a new one"):
        state.step(*token)


@pytest.mark.parametrize("phi", [OPRF(), TrigRF(), PoisRF()], ids=repr)
def test_a_state_takes_no_intermediate_of_the_noise_for_a_change(phi):
    """Some maps have the noise compute and keep its squared norms at the first token."""
    case = Case(phi)
    actual = steps(DecodingState(phi, case.noise, case.params), case, range(4))
    expected = [case(causal=True)[:, :, :3].detach()]
    assert_same([actual], expected, 1e-7)


def test_state_follows_a_beam():
    case = Case(TrigRF())

    def step(state, rows, t):
        return state.step(*(part[rows] for part in case.tokens(t, t + 1)))

    state = DecodingState(TrigRF(), case.noise)
    step(state, [0, 1], 0)
    state.select(torch.tensor([1, 1, 0]))
    out = step(state, [1, 1, 0], 1)
    expected = [case(causal=True)[[1, 1, 0], :, 1].detach()]
    assert_same([out[:, :, 0]], expected)
    with pytest.raises(ValueError, match="3 sequences, got 2"):
        step(state, [0, 1], 2)


# ---- a decoded token as a function of what is kept -------------------------------------------------------------------


def states(name):
    """Two decoding states of the same layer after the same prompt of two sequences, grouped heads."""
    layer = Mechanism.of(name, m=8).layer(4, 8, kv_heads=2, causal=True)
    prompt = torch.randn(2, 4, 5, 8), *torch.randn(2, 2, 2, 5, 8)
    if layer.learns:
        with layer.calibration(), torch.no_grad():
            layer(*prompt)
    made = []
    for _ in range(2):
        made.append(layer.eval().past().state)
    for state in made:
        state.step(*prompt)
    return made


@pytest.mark.parametrize(
    "name",
    ["favorpp", slow("favorp"), slow("favorsharp")],
)
def test_a_compiled_token_is_the_eager_step(name):
    """In one graph, which asks for no value."""
    ours, expected = states(name)
    compiled = torch.compile(ours.token, fullgraph=True, backend="aot_eager")
    packed = ours.sums
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for _ in range(11):
        vectors = torch.randn(2, 4, 1, 8), *torch.randn(2, 2, 2, 1, 8)
        out, packed = compiled(packed, *vectors)
        torch.testing.assert_close(out, expected.step(*vectors), rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
