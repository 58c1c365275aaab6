"""Near-far attention with recall: each key counts once, what a query sees depends on its place and past alone, and a
single key that matters is found."""

import pytest
import torch
from helpers.covering import slow
from helpers.native_cases import needs_library
from helpers.nearfar_cases import (
    as_integers,
    at_tokens,
    by_reference,
    one_by_one,
    random_integers,
    retrieved_in_both,
    same,
)
from helpers.seeds import seeded
from scipy.special import log_ndtr
from torch.testing import assert_close

from crt_exp.attention import exact_attention, uniform_attention
from crt_exp.nearfar import causal as recall
from crt_exp.nearfar import decoding, native, near_far_attention, retrieval
from crt_exp.nearfar.choice import CENTRE_SAMPLES, RIDGE, Sizes, rows_at
from crt_exp.nearfar.decoding import RecallState

SIZES = Sizes(block=4, heavy=3, cells=6, open=12, exact_until=10)
LENGTH = 330
SEEDS = [*range(6), *map(slow, range(6, 40))]


def draw_inputs(
    B=2,
    H=2,
    kv_heads=1,
    S=LENGTH,
    L=None,
    d=5,
    dv=3,
    seed=0,
    dtype=torch.float64,
):
    g = seeded(seed)

    def draw(heads, n, k):
        return torch.randn(B, heads, n, k, generator=g, dtype=dtype)

    x = draw(H, L or S, d)
    y = draw(kv_heads, S, d) + 0.5
    v = draw(kv_heads, S, dv)
    return x, y, v


def attend(x, y, v, sizes=SIZES, keep=None):
    return near_far_attention(x, y, v, sizes, causal=True, key_mask=keep)


# ---- the sums ----


@pytest.mark.parametrize(
    "dtype, tolerance",
    [
        pytest.param(torch.float32, 2e-4, marks=needs_library, id="C"),
        pytest.param(torch.float64, 1e-9, id="PyTorch"),
    ],
)
@pytest.mark.parametrize(
    "masked, sizes", [(False, SIZES), (True, SIZES._replace(heavy=0, open=5, block=8))]
)
def test_outputs_and_gradients_are_those_of_the_reference(masked, sizes, dtype, tolerance):
    x, y, v = draw_inputs(B=1, S=90)
    for t in (x, y, v):
        t.requires_grad_()
    keep = torch.rand(1, 90, generator=seeded(1)) < 0.7
    keep[:, 0] = True
    mask = None
    if masked:
        mask = keep
    expected = by_reference(x, y, v, sizes, causal=True, key_mask=mask)
    out = attend(x.to(dtype), y.to(dtype), v.to(dtype), sizes, mask).double()
    same(out, expected, (x, y, v), rtol=tolerance, atol=tolerance)


def test_retrieved_keys_are_those_of_the_definition():
    """Those with the largest scores of whole numbers; each counts once."""
    x, y, _ = draw_inputs(B=1, H=1, S=90)
    far = torch.rand(1, 90, generator=seeded(1)) < 0.7
    numbers, step = as_integers(y[0, 0])
    for query in x[0, 0, ::10]:
        found = retrieval.retrieved_positions(y[0], far[None], query[None, None], 12).flatten()
        scores = (numbers @ as_integers(query)[0]).float() * step.float()
        expected = scores.masked_fill(~far[0], -torch.inf).topk(12).indices
        actual = set(found.tolist())
        expected = set(expected.tolist())
        assert actual == expected
        assert len(found.unique()) == 12


@pytest.mark.parametrize("sd", [0.0, 0.3, 4.0])
def test_mean_below_a_threshold_is_that_of_a_truncated_normal_law(sd):
    """log of the mean of e^l over l < threshold, l normal with mean 1."""
    for threshold in (-3.0, 0.9, 1.1, 5.0):
        mu = torch.tensor(1.0, dtype=torch.float64)
        actual = retrieval.log_mean_below(mu, torch.tensor(sd).double(), torch.tensor(threshold))
        expected = min(1.0, threshold)
        if sd > 0:
            t = (threshold - 1.0) / sd
            expected = 1.0 + sd**2 / 2 + log_ndtr(t - sd) - log_ndtr(t)
        assert float(actual) == pytest.approx(expected, abs=2e-6)


def test_a_part_that_is_computed_again_in_the_backward_pass(monkeypatch):
    x, y, v = (t.requires_grad_() for t in draw_inputs(B=1, S=90))
    expected = attend(x, y, v)
    monkeypatch.setattr(recall, "CHUNK_NUMBERS", 1)
    actual = attend(x, y, v)
    same(actual, expected, (x, y, v))


# ---- properties ----


@torch.no_grad()
def test_outputs_depend_on_places_and_past_alone():
    """The whole, its first tokens, its last ones; in steps of any size; and behind padding."""
    x, y, v = draw_inputs()
    for sizes in (SIZES._replace(open=1), SIZES):
        whole = attend(x, y, v, sizes)
        for n in (1, 9, 100):
            first = attend(*at_tokens((x, y, v), slice(n)), sizes)
            expected = whole[:, :, :n]
            assert_close(first, expected, rtol=0, atol=1e-10)
            actual = attend(x[:, :, -n:], y, v, sizes)
            expected = whole[:, :, -n:]
            assert_close(actual, expected, rtol=0, atol=1e-10)
    padded = []
    for t in (x, y, v):
        left = torch.cat([torch.full_like(t[:1, :, :7], torch.nan), t[:1]], 2)
        right = torch.cat([t[1:], t[1:, :, :7]], 2)
        padded.append(torch.cat([left, right]))
    keep = torch.ones(2, LENGTH + 7, dtype=torch.bool)
    keep[0, :7] = False
    keep[1, LENGTH:] = False
    found = attend(*padded, keep=keep)
    actual = found[0, :, 7:]
    assert_close(actual, whole[0], rtol=0, atol=1e-10)
    actual = found[1, :, :LENGTH]
    assert_close(actual, whole[1], rtol=0, atol=1e-10)
    assert (found[0, :, :7] == 0).all()


@torch.no_grad()
@pytest.mark.parametrize("more", [100, 10**6])
def test_token_by_token_is_the_parallel_pass(more, monkeypatch):
    """Also where more keys are read than `open`, from `more` tokens on."""
    monkeypatch.setattr("crt_exp.nearfar.choice.GROWTH_START", more)
    x, y, v = draw_inputs(H=4, kv_heads=2)
    keep = torch.rand(2, LENGTH, generator=seeded(2)) < 0.8
    keep[0, :23] = False
    keep[1, :2] = False
    keep[:, 30] = True
    for mask in (None, keep):
        whole = attend(x, y, v, keep=mask)
        state = RecallState(SIZES)
        start = 0
        parts = []
        cases = [3, 40, 1, 1, 90, 1, 7, 120, 1, 66]
        for n in cases:
            at = slice(start, start + n)
            part = None if mask is None else mask[:, at]
            parts.append(state.step(*at_tokens((x, y, v), at), part))
            start += n
        real = mask
        if mask is None:
            real = torch.ones(2, LENGTH, dtype=torch.bool)
        for row in range(2):
            actual = torch.cat(parts, 2)[row][:, real[row]]
            expected = whole[row][:, real[row]]
            assert_close(actual, expected, rtol=0, atol=1e-10)


@needs_library
@pytest.mark.parametrize("seed", SEEDS)
def test_c_is_the_twin_at_any_shape(seed, monkeypatch):
    """Outputs and gradients; masks, groups, fewer queries than keys, more read than there are. Where two keys promise
    alike, the twins may read another."""
    g = seeded(seed)
    pick = random_integers(g)
    group = pick(1, 3)
    kv_heads = pick(1, 2)
    longest = 1200 if seed > 5 else 700
    S = pick(40, longest)
    d = pick(1, 70)
    dv = pick(1, 70)
    open = 1000
    if seed % 5:
        open = pick(1, 90)
    sizes = Sizes(
        block=8 * 2 ** pick(0, 3),
        heavy=pick(0, 20),
        cells=pick(1, 80),
        open=open,
        exact_until=pick(0, 200),
    )
    L = (S, pick(1, S), 1)[seed % 3]
    inputs = draw_inputs(2, group * kv_heads, kv_heads, S, L, d, dv, seed, torch.float32)
    for t in inputs:
        t.requires_grad_()
    x, y, v = inputs
    keep = None
    if seed % 2 == 0:
        keep = torch.rand(2, S, generator=g) < 0.7

    def outputs_and_gradients():
        out = attend(0.7 * x, y, v, sizes, keep)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]

    in_c = outputs_and_gradients()
    monkeypatch.setattr(native, "applies", lambda *tensors: False)
    tolerances = [2e-4, 5e-4, 5e-4, 5e-4]
    for ours, theirs, tolerance in zip(in_c, outputs_and_gradients(), tolerances):
        difference = (ours - theirs).norm()
        assert difference <= tolerance * theirs.norm()


@torch.no_grad()
@pytest.mark.parametrize("in_c", [False, pytest.param(True, marks=needs_library)])
def test_states_go_on_in_two_ways_and_change_their_rows(in_c, monkeypatch):
    x, y, v = draw_inputs(B=3)
    sizes = SIZES
    close = {"rtol": 0, "atol": 1e-10}
    if in_c:
        x, y, v = draw_inputs(B=3, d=16, dv=16, dtype=torch.float32)
        sizes = SIZES._replace(block=8)
        close = {}
    monkeypatch.setattr(decoding, "MIN_CAPACITY", 64)
    keep = torch.ones(3, LENGTH, dtype=torch.bool)
    keep[1, :5] = False
    whole = attend(x, y, v, sizes, keep)
    first = RecallState(sizes)

    def token(i, rows=slice(None)):
        return [t[rows] for t in at_tokens((x, y, v), slice(i, i + 1))]

    out = first.step(*at_tokens((x, y, v), slice(150)), keep[:, :150])  # a prompt
    expected = whole[:, :, :150]
    assert_close(out, expected, **close)
    if in_c:  # what is known after it serves the next tokens
        for group in first.groups:
            block = int(group.memory.numbers[0, :2].view(torch.int64))
            assert block == 149 // 8
    first.step(*at_tokens((x, y, v), slice(150, 200)), keep[:, 150:200])
    first.step(*token(200))
    other = first.copy()
    other.step(*token(5))  # another token, in the same buffer
    out = first.step(*token(201))
    expected = whole[:, :, 201:202]
    assert_close(out, expected, **close)
    for group in first.groups:
        assert (group.memory is not None) == in_c
        assert (group.epoch is None) == in_c
    rows = torch.tensor([2, 1, 1])
    first.select(rows)
    for i in range(202, 230):
        out = first.step(*token(i, rows))
        expected = whole[rows, :, i : i + 1]
        assert_close(out, expected, **close)
        if i == 215:  # a copy that goes on does not change what is here
            ahead = first.copy()
            for j in range(216, 226):
                ahead.step(*token(j - 200, rows))


@torch.no_grad()
@pytest.mark.parametrize(
    "d, dv, before, after", [(16, 16, 1, 16), (24, 7, 16, 1), (16, 16, 16, 16)]
)
def test_threads_decide_nothing_of_a_state(d, dv, before, after, one_thread):
    """One row with few heads for 16 threads, then four."""
    x, y, v = draw_inputs(1, 3, 3, d=d, dv=dv, dtype=torch.float32)
    whole = attend(x, y, v)
    state = RecallState(SIZES)
    torch.set_num_threads(before)
    cases = [slice(0, 250), slice(250, 251)]
    for at in cases:
        actual = state.step(*at_tokens((x, y, v), at))
        expected = whole[:, :, at]
        assert_close(actual, expected)
    state.select(torch.zeros(4, dtype=torch.long))
    torch.set_num_threads(after)
    for i in range(251, 270):
        token = at_tokens((x, y, v), slice(i, i + 1))
        out = state.step(*[t.expand(4, -1, -1, -1) for t in token])
        expected = whole[:, :, i : i + 1].expand_as(out)
        assert_close(out, expected)


# ---- what is found ----


@torch.no_grad()
def test_one_key_of_many_is_found():
    """Every query asks for a key of its own, with 0.9 of its weight: cells alone lose it."""
    g = seeded()
    S = 1024
    d = 32
    y = torch.randn(1, 2, S, d, generator=g)
    v = torch.randn(1, 2, S, d, generator=g)
    far_keys = (torch.arange(S) - 96).clamp(min=1)
    target = (torch.rand(2, S, generator=g) * far_keys).long()
    x = 0.45 * rows_at(y[0], target)[None]

    def late(out):
        return out[:, :, 512:]

    exact = late(exact_attention(x, y, v, causal=True))

    def error(out):
        return float((late(out) - exact).norm() / exact.norm())

    sizes = Sizes(open=8, exact_until=128)
    assert error(attend(x, y, v, sizes)) < 0.25
    actual = error(attend(x, y, v, sizes._replace(open=128)))
    assert actual < 0.15
    actual = error(uniform_attention(x, y, v, causal=True))
    assert actual > 0.9


def test_centres_are_of_keys_from_everywhere():
    """However many there are, and whatever small period they have."""
    cases = [5, 63, 64, 200, 1024, 4096, 5000]
    for keys in cases:
        places = recall.sample_positions(keys, CENTRE_SAMPLES * 4, torch.device("cpu"))
        assert len(places.unique()) == len(places) >= min(keys, CENTRE_SAMPLES * 4)
        assert places.min() >= 0
        assert places.max() < keys
        assert len(places) < 2 * CENTRE_SAMPLES * 4
        if len(places) > 3:
            for period in (2, 3, 4):
                assert len((places % period).unique()) > 1


@pytest.mark.parametrize("masked", [False, True])
def test_keys_are_measured_about_the_means_of_their_blocks(masked):
    y = draw_inputs()[1].flatten(0, 1)
    keep = torch.ones(y.shape[:2], dtype=torch.bool)
    keep[:, 1:7] = not masked  # a block without a key beside one with one
    sizes = SIZES._replace(exact_until=200)
    mask = keep if masked else None
    metric = recall.fit_metric(y, mask, sizes)
    far = sizes.first_renewal - sizes.block
    for z in range(len(y)):
        residuals = []
        for start in range(0, far, sizes.block):
            at = slice(start, start + sizes.block)
            rows = y[z, at][keep[z, at]]
            if len(rows):
                residuals.append(rows - rows.mean(0))
        apart = torch.cat(residuals)
        moments = apart.T @ apart
        moments += RIDGE * moments.diagonal().mean() * torch.eye(y.shape[-1])
        actual = metric.root[z] @ metric.root[z].T
        expected = moments / torch.linalg.matrix_norm(moments)
        assert_close(actual, expected)


def test_tokens_that_do_not_fit_a_state_are_refused():
    _, y, v = draw_inputs(S=20)
    with pytest.raises(ValueError, match="2 sequences, got 1"):
        state = RecallState(SIZES)
        state.step(y, y, v)
        state.step(y[:1], y[:1], v[:1])
    with pytest.raises(ValueError, match=r"d, dv = \(5, 3\), got \(4, 3\)"):
        state.step(y[..., :4], y[..., :4], v)


# ---- which keys are read is decided by whole numbers, the same in C and in PyTorch


@pytest.mark.parametrize("d", [1, 5, 64, 96])
def test_numbers_are_those_of_the_definition(d):
    lengths = 10.0 ** torch.linspace(-12, 12, 200)[:, None]
    t = lengths * torch.randn(200, d, generator=seeded(d))
    numbers, step = retrieval.quantize(t)
    expected, width = as_integers(t)
    assert (numbers - expected).abs().max() <= 1
    assert (numbers != expected).double().mean() < 1e-3  # at halves alone
    assert_close(step.double(), width, rtol=1e-6, atol=0)
    assert numbers.abs().amax(-1).eq(127).all()


def test_scores_are_near_to_logits():
    """Of outliers too: without turning, a column that is 30 times the others would leave these 4 bits."""
    g = seeded()
    q = torch.randn(1, 400, 64, generator=g)
    y = torch.randn(1, 500, 64, generator=g)
    q[..., 7] = 30 * q[..., 7]
    y[..., 7] = 30 * y[..., 7]
    step = retrieval.quantize(q).step.unsqueeze(-1) / 64  # turning makes vectors 8 times as long
    logits = retrieval.eight_bit_scores(q, y) * step
    query_norms = torch.linalg.vector_norm(q, dim=-1).unsqueeze(-1)
    key_norms = torch.linalg.vector_norm(y, dim=-1).unsqueeze(1)
    difference = ((logits - q @ y.mT) / (query_norms * key_norms)).square().mean().sqrt()
    assert difference < 2e-3


def vectors(kind, Z, G, S, d, seed):
    g = seeded(seed)

    def draw(*size):
        return torch.randn(*size, generator=g)

    x = draw(Z, G, S, d)
    y = draw(Z, S, d)
    v = draw(Z, S, 5)
    if kind == "equal keys":
        y = y[:, :1].expand(-1, S, -1).contiguous()
    elif kind == "few different":
        y = y[:, torch.randint(0, 7, (S,), generator=g)]
    elif kind == "huge and tiny":
        x = x * 10.0 ** (20 * draw(Z, G, S, 1)).clamp(-12, 12)
        y = y * 10.0 ** (20 * draw(Z, S, 1)).clamp(-12, 12)
    elif kind == "zeros":
        x[:, :, ::3] = 0
        y[:, ::2] = 0
    elif kind == "one far":
        y[:, 3] = 50 * x[:, 0, -1]
    return x, y, v


@needs_library
def test_more_keys_are_read_of_a_longer_past():
    """The root of it more than `open`, from 2304 tokens on: in C, in PyTorch, and as a state goes on."""
    sizes = Sizes(16, 2, 3, open=50, exact_until=2900)
    actual = []
    for place in (0, 2304, 2912, 9216, 2**40):
        actual.append(sizes.retrieval_count(place))
    assert actual == [50, 50, 56, 100, 50 * 2**20 // 48]
    x, y, v = vectors("normal", 1, 1, 2960, 8, seed=0)
    ours, theirs = retrieved_in_both(x, y, v, sizes)
    assert torch.equal(ours, theirs)
    assert ours.shape[-1] == 56
    assert (ours >= 0).all()
    call = recall.Causal(sizes, native=True)
    state = RecallState(sizes)
    whole = call.attend(x, y, v, call.choose(x, y, None))
    parts = []
    for at in one_by_one(2940, 2960):
        parts.append(state.step(x[:, :, at], y[:, None, at], v[:, None, at]))
    actual = torch.cat(parts, 2)
    assert_close(actual, whole, rtol=0, atol=2e-4)


@needs_library
@pytest.mark.parametrize("seed", SEEDS)
def test_c_and_pytorch_choose_the_same_keys(seed):
    g = seeded(seed)
    pick = random_integers(g)
    sizes = Sizes(
        block=8 * 2 ** pick(0, 3),
        heavy=0,
        cells=pick(1, 30),
        open=pick(1, 120),
        exact_until=pick(0, 200),
    )
    kind = ("normal", "few different", "huge and tiny", "zeros", "equal keys", "one far")[seed % 6]
    S = pick(300, 2500) if seed > 5 else 210 + 10 * seed
    x, y, v = vectors(kind, pick(1, 2), pick(1, 3), S, pick(1, 130), seed)
    keep = None
    if seed % 4 >= 2:
        keep = torch.rand(len(y), S, generator=g) < 0.7
    ours, theirs = retrieved_in_both(x, y, v, sizes, keep)
    assert torch.equal(ours, theirs)
