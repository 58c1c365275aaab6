"""Which keys are read is decided by whole numbers: as they are defined, the same in C and in PyTorch, bit for bit."""

import pytest
import torch
from covering import in_turn
from native_cases import needs_library
from nearfar_cases import as_integers, choices

from crt_exp.nearfar import retrieval
from crt_exp.nearfar.choice import Sizes
from crt_exp.nearfar.decoding import RecallState
from crt_exp.nearfar.causal import Causal


@pytest.mark.parametrize("d", [1, 5, 16, 33, 64, 80, 96, 128])
def test_numbers_are_those_of_the_definition(d):
    t = torch.randn(200, d, generator=torch.Generator().manual_seed(d)) * 10.0 ** torch.linspace(-12, 12, 200)[:, None]
    numbers, step = retrieval.Integers.of(t)
    expected, width = as_integers(t)
    assert (numbers - expected).abs().max() <= 1 and (numbers != expected).double().mean() < 1e-3   # at halves alone
    torch.testing.assert_close(step.double(), width, rtol=1e-6, atol=0)
    assert numbers.abs().amax(-1).eq(127).all()


def test_a_vector_of_zeros_is_seen_as_zero():
    numbers, step = retrieval.Integers.of(torch.zeros(2, 7))
    assert not numbers.any() and not step.any()
    assert not retrieval.eight_bit_scores(torch.zeros(1, 3, 7), torch.ones(1, 4, 7)).any()


def test_scores_are_near_to_logits():
    """Of outliers too: without turning, a column that is 30 times the others would leave these 4 bits."""
    g = torch.Generator().manual_seed(0)
    q, y = torch.randn(1, 400, 64, generator=g), torch.randn(1, 500, 64, generator=g)
    q[..., 7], y[..., 7] = 30 * q[..., 7], 30 * y[..., 7]
    step = retrieval.Integers.of(q).step.unsqueeze(-1) / 64        # turning makes vectors 8 times as long
    logits = retrieval.eight_bit_scores(q, y) * step
    size = torch.linalg.vector_norm(q, dim=-1).unsqueeze(-1) * torch.linalg.vector_norm(y, dim=-1).unsqueeze(1)
    assert ((logits - q @ y.mT) / size).square().mean().sqrt() < 2e-3


def vectors(kind, Z, G, S, d, seed):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=g)
    x, y, v = draw(Z, G, S, d), draw(Z, S, d), draw(Z, S, 5)
    if kind == "equal keys":
        y = y[:, :1].expand(-1, S, -1).contiguous()
    elif kind == "few different":
        y = y[:, torch.randint(0, 7, (S,), generator=g)]
    elif kind == "huge and tiny":
        x, y = x * 10.0 ** (20 * draw(Z, G, S, 1)).clamp(-12, 12), y * 10.0 ** (20 * draw(Z, S, 1)).clamp(-12, 12)
    elif kind == "zeros":
        x[:, :, ::3], y[:, ::2] = 0, 0
    elif kind == "one far":
        y[:, 3] = 50 * x[:, 0, -1]
    return x, y, v


@needs_library
@pytest.mark.parametrize("kind, shape", in_turn(
    ["normal", "equal keys", "few different", "huge and tiny", "zeros", "one far"],
    [(2, 1, 700, 64, 9), (1, 3, 450, 33, 30), (1, 1, 900, 16, 2)]), ids=str)
def test_c_and_pytorch_choose_the_same_keys(kind, shape):
    Z, G, S, d, open = shape
    x, y, v = vectors(kind, Z, G, S, d, seed=S)
    keep = torch.rand(Z, S, generator=torch.Generator().manual_seed(1)) < 0.8
    for mask in (None, keep):
        ours, theirs = choices(x, y, v, Sizes(16, 0, 7, open=open, exact_until=64), mask)
        assert torch.equal(ours, theirs)


@needs_library
def test_more_keys_are_read_of_a_longer_past():
    """The root of it more than `open`, from 2304 tokens on: in C, in PyTorch, and as a state goes on."""
    sizes = Sizes(16, 2, 3, open=50, exact_until=2900)
    assert [sizes.opens(place) for place in (0, 2304, 2912, 9216, 2**40)] == [50, 50, 56, 100, 50 * 2**20 // 48]
    x, y, v = vectors("normal", 1, 1, 2960, 8, seed=0)
    ours, theirs = choices(x, y, v, sizes)
    assert torch.equal(ours, theirs) and ours.shape[-1] == 56 and (ours >= 0).all()
    call, state = Causal(sizes, native=True), RecallState(sizes, 1)
    whole = call.attend(x, y, v, None, call.choose(x, y, None, slice(None)))
    parts = [state.step(x[:, :, at], y[:, None, at], v[:, None, at])
             for at in (slice(0, 2940), *(slice(i, i + 1) for i in range(2940, 2960)))]
    torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=0, atol=2e-4)


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("seed", range(60))
def test_they_do_at_any_shape(seed):
    g = torch.Generator().manual_seed(seed)
    pick = lambda low, high: int(torch.randint(low, high + 1, (1,), generator=g))
    sizes = Sizes(8 * 2**pick(0, 3), 0, pick(1, 30), open=pick(1, 120), exact_until=pick(0, 200))
    kind = ("normal", "few different", "huge and tiny", "zeros")[seed % 4]
    S = pick(300, 2500)
    x, y, v = vectors(kind, pick(1, 2), pick(1, 3), S, pick(1, 130), seed)
    keep = None if seed % 2 else torch.rand(len(y), S, generator=g) < 0.7
    ours, theirs = choices(x, y, v, sizes, keep)
    assert torch.equal(ours, theirs)


@needs_library
@torch.no_grad()
def test_keys_of_equal_looks_are_read_from_the_first_on():
    x, y, v = vectors("equal keys", 1, 1, 300, 16, seed=0)
    ours, _ = choices(x, y, v, Sizes(16, 0, 3, open=4, exact_until=64))
    assert torch.equal(ours, torch.arange(4).expand_as(ours))


def test_what_is_chosen_carries_no_gradient():
    x, y, v = (t.requires_grad_() for t in vectors("normal", 1, 1, 200, 8, seed=0))
    call = Causal(Sizes(8, 0, 3, open=4, exact_until=32))
    out = call.attend(x, y, v, None, call.choose(x, y, None, slice(None)))
    assert all(torch.autograd.grad(out.sum(), t, retain_graph=True)[0].isfinite().all() for t in (x, y, v))
