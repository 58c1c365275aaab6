"""Near-far attention equals its reference by all pairs, has the properties of that definition, and does not depend on
the scale of keys against queries, copies of a key or sizes beyond the keys."""

import pytest
import torch
from helpers.native_cases import needs_library
from helpers.nearfar_cases import (
    at_tokens,
    by_reference,
    centres_by_definition,
    metric_by_definition,
    same,
    tensors,
)
from helpers.seeds import seeded
from torch.autograd import forward_ad
from torch.testing import assert_close

from crt_exp.attention import softmax_attention, uniform_attention
from crt_exp.nearfar import dispatch, native, near_far_attention
from crt_exp.nearfar.both_directions import Bidirectional
from crt_exp.nearfar.choice import Sizes

pytestmark = pytest.mark.usefixtures("one_thread")
S = 220


CASES = [
    (Sizes(3, 4, 9, True), {"H": 4}, True),
    (Sizes(4, 0, 5), {"kv_heads": 1}, False),
    (Sizes(64, 4, 9), {}, True),
    (Sizes(3, 20, 90), {"L": 12}, False),
    (Sizes(3, 4, 5), {"L": 9, "S": 23}, True),
    (Sizes(3, 4, 9, True), {"L": 9, "S": 23, "H": 4}, False),
]


@pytest.mark.parametrize(
    "dtype, tolerance",
    [
        pytest.param(torch.float32, 2e-4, marks=needs_library, id="C"),
        pytest.param(torch.float64, 1e-9, id="PyTorch"),
    ],
)
@pytest.mark.parametrize("sizes, options, masked", CASES)
def test_outputs_and_gradients_are_those_of_the_reference(sizes, options, masked, dtype, tolerance):
    """In both directions, and to another sequence where S is given."""
    x, y, v, keep = tensors(**options)
    cross = "S" in options
    mask = None
    if masked:
        mask = keep
    expected = by_reference(x, y, v, sizes, cross=cross, key_mask=mask)
    vectors = [t.to(dtype) for t in (x, y, v)]
    out = near_far_attention(*vectors, sizes, key_mask=mask, cross=cross).double()
    if masked and not cross:  # what padded queries see depends on no law
        seen = keep[:, None, :, None]
        out = torch.where(seen, out, 0.0)
        expected = torch.where(seen, expected, 0.0)
    same(out, expected, (x, y, v), rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_sets_are_those_of_their_definition():
    x, y, *_ = tensors(B=1, H=1, kv_heads=1, L=60)
    sizes = Sizes(heavy=5, cells=20)
    sets = Bidirectional(sizes).choose(x, y[0], None)
    shift, tilt, root = metric_by_definition(x[0, 0], y[0, 0])
    centred = y[0, 0] - shift
    z = centred @ root
    w = centred @ tilt
    heavy = (z.square().sum(-1) / 2 + w).argsort(descending=True)[: sizes.heavy]
    pool = torch.ones(60, dtype=torch.bool)
    pool[heavy] = False
    centres = centres_by_definition(z, w, pool, sizes.cells)
    actual = sets.metric.root[0]
    assert_close(actual, root)
    assert torch.equal(sets.heavy[0], heavy)
    assert torch.equal(sets.pool[0], pool)
    assert_close(sets.centres[0], centres)
    expected = torch.cdist(z, centres).argmin(-1)
    assert torch.equal(sets.cluster[0], expected)


@pytest.mark.parametrize(
    "which, causal",
    [
        (0, False),
        (1, True),
        (2, True),
        (2, False),
    ],
)
def test_a_tangent_of_one_alone(which, causal):
    """The engine is chosen once, by queries, keys and values: a tangent of any rules the C engine out."""
    sizes = Sizes(4, 2, 3, open=4, exact_until=8 * causal)
    inputs = []
    for t in tensors(L=40)[:3]:
        inputs.append(t.detach().float())
    expected = near_far_attention(*inputs, sizes, causal=causal)
    with forward_ad.dual_level():
        inputs[which] = forward_ad.make_dual(inputs[which], torch.ones_like(inputs[which]))
        out, tangent = forward_ad.unpack_dual(near_far_attention(*inputs, sizes, causal=causal))
    assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert tangent.shape == out.shape
    if which == 2:  # weights are a mean's
        assert_close(tangent, torch.ones_like(out), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_derivatives_under_transforms(causal):
    """By PyTorch, of what C would otherwise compute."""
    inputs = tensors(B=1, L=26, dtype=torch.float32)[:3]

    def call(*t):
        return near_far_attention(*t, Sizes(3, 2, 3, open=2), causal=causal).square().sum()

    expected = torch.autograd.grad(call(*inputs), inputs)
    actual = torch.func.grad(call, (0, 1, 2))(*inputs)
    for ours, theirs in zip(actual, expected):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# ---- sets and cells


@pytest.mark.parametrize(
    "sizes, masked",
    [
        (Sizes(23, 0, 1), True),
        (Sizes(2, 23, 1), True),
        (Sizes(1, 0, 23), True),
        (Sizes(1, 0, 23, True), False),
    ],
)
def test_exact_where_every_key_has_its_own(sizes, masked):
    x, y, v, keep = tensors()
    if not masked:
        keep = None
    out = near_far_attention(x, y, v, sizes, key_mask=keep)
    expected = softmax_attention(x, y, v, key_mask=keep)
    same(out, expected, (x, y, v), rtol=1e-6, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_each_key_is_in_one_set(causal):
    """For queries that are 0 all keys weigh the same: the output is the mean of all values, each once."""
    g = seeded()
    for L, block, heavy, cells in torch.randint(1, 40, (12, 4), generator=g).tolist():
        x, y, v, keep = tensors(B=2, L=L, seed=L)
        mask = None
        if L % 2:
            mask = keep
        x = torch.zeros_like(x)
        sizes = Sizes(1 + block // 4, heavy // 3, cells, open=3)
        out = near_far_attention(x, y, v, sizes, causal=causal, key_mask=mask)
        expected = uniform_attention(x, y, v, causal=causal, key_mask=mask)
        # logits of clusters deviate by MIN_SD at least
        tolerance = 1e-12
        if causal:
            tolerance = 1e-6
        assert_close(out, expected, rtol=0, atol=tolerance)


@torch.no_grad()
def test_a_shift_of_all_queries_is_a_weight_of_the_keys():
    """Queries x + s see keys y as queries x do whose keys have the log weights s.y: here as one more coordinate, which
    is 1 in all queries and adds nothing to their moments."""
    x, y, v, _ = tensors(L=40, d=4)
    s = torch.randn(4).double()
    shifted = near_far_attention(x + s, y, v, Sizes(3, 4, 5))
    more_x = torch.cat([x, torch.ones_like(x[..., :1])], -1)
    more_y = torch.cat([y, (y * s).sum(-1, keepdim=True)], -1)
    actual = near_far_attention(more_x, more_y, v, Sizes(3, 4, 5))
    assert_close(actual, shifted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("cross", [False, True])
def test_a_shift_of_all_keys_changes_nothing(cross):
    x, y, v, _ = tensors(L=40)

    def call(y):
        return near_far_attention(x, y, v, Sizes(3, 4, 5, True), cross=cross)

    actual = call(y + 7 * torch.randn(4).double())
    assert_close(actual, call(y))


@torch.no_grad()
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=needs_library, id="C"), torch.float64]
)
def test_errors_are_of_second_order_where_values_are_to_first_order(dtype):
    """In the distances of keys within a cell, of values that are linear in keys: half of them leave a quarter."""
    x, y, _, _ = tensors(B=1, L=120, dtype=dtype)
    g = seeded()
    v = y @ torch.randn(4, 3, generator=g, dtype=dtype)

    def error(scale, first_order):
        sizes = Sizes(2, 0, 1, first_order)
        out = near_far_attention(x, scale * y, v, sizes, cross=True)
        return float((out - softmax_attention(x, scale * y, v)).norm())

    def gain(first_order):
        """By what factor half the distances change the error."""
        return error(0.1, first_order) / error(0.05, first_order)

    assert gain(True) == pytest.approx(4, rel=0.1)
    assert gain(False) == pytest.approx(2, rel=0.1)


@torch.no_grad()
@pytest.mark.parametrize(
    "more, causal",
    [
        ({"block": 32}, False),
        ({"heavy": 64}, False),
        ({"cells": 48}, False),
        ({"heavy": 64}, True),
        ({"cells": 48}, True),
        ({"open": 32}, True),
    ],
    ids=str,
)
def test_more_of_anything_is_nearer_to_exact(more, causal):
    """On average over heads of queries and keys that are alike in places, as those of models are."""
    g = seeded()

    def draw(n):
        return torch.randn(1, 16, n, 8, generator=g)

    base = draw(6)[:, :, torch.arange(192) // 8 % 6]
    x = 1.2 * (base + 0.7 * draw(192))
    y = 1.2 * (base + 0.7 * draw(192))
    v = base + draw(192)
    exact = softmax_attention(x, y, v, causal=causal)

    def error(out):
        return float((out - exact).norm())

    few = Sizes(8, 4, 8, open=4)
    many = few._replace(**more)
    error_of_few = error(near_far_attention(x, y, v, few, causal=causal))
    error_of_many = error(near_far_attention(x, y, v, many, causal=causal))
    assert error_of_many < 0.9 * error_of_few
    assert error_of_few < error(uniform_attention(x, y, v, causal=causal))


# ---- padding and the future


@pytest.mark.parametrize(
    "causal, lead, dtype",
    [
        (True, 3, torch.float64),
        (False, 5, torch.float64),
        (False, 12, torch.float64),
        (True, 12, torch.float32),
        (False, 3, torch.float32),
    ],
)  # float32: in C, where it is for that
def test_padding_is_truncation(causal, lead, dtype):
    """On both sides: `lead` places of padding before the first token of row 0, seven behind those of row 1."""
    x, y, v, keep = tensors(L=24, H=4, dtype=dtype)
    keep[:] = True
    keep[0, :lead] = False
    keep[1, 17:] = False
    bad = []
    for t in (x, y, v):
        bad.append(t.masked_fill(~keep[:, None, :, None], torch.nan))

    def call(*t, **mask):
        return near_far_attention(*t, Sizes(5, 4, 3, True, open=2), causal=causal, **mask)

    out = call(*bad, key_mask=keep)
    tolerance = 1e-4
    if dtype == torch.float64:
        tolerance = 1e-9
    real = []
    alone = []
    for row, tokens in enumerate((slice(lead, 24), slice(0, 17))):
        real.append(out[[row], :, tokens])
        own = [t[[row]] for t in at_tokens((x, y, v), tokens)]
        alone.append(call(*own))
    close = {"rtol": tolerance, "atol": tolerance}
    actual = torch.cat(real, 2)
    expected = torch.cat(alone, 2)
    same(actual, expected, (x, y, v), **close)
    assert out.isfinite().all()


def test_queries_behind_the_padding_of_their_rows():
    """The last queries of longer sequences, each row's padding its own."""
    x, y, v, keep = tensors(L=24)
    keep[:] = True
    keep[0, :7] = False
    keep[1, :2] = False

    def call(x):
        return near_far_attention(x, y, v, Sizes(5, 4, 3, open=2), causal=True, key_mask=keep)

    actual = call(x[:, :, 15:])
    expected = call(x)[:, :, 15:]
    same(actual, expected, (x, y, v))


def test_no_key_gives_no_output_and_no_gradient():
    x, y, v, _ = tensors(L=12)
    keep = torch.zeros(2, 12, dtype=torch.bool)
    keep[1, 4:8] = True  # the blocks around it are padding alone
    for causal in (False, True):
        out = near_far_attention(
            x, y, v, Sizes(4, 2, 3, True, open=2), causal=causal, key_mask=keep
        )
        grads = torch.autograd.grad(out.square().sum(), (x, y, v))
        assert (out[0] == 0).all()
        for g in grads:
            assert (g[0] == 0).all()
            assert g.isfinite().all()
        actual = (out[1, :, :4] == 0).all()
        assert actual == causal


# ---- numbers and memory


@pytest.mark.parametrize("causal, dtype", [(False, torch.float32), (True, torch.bfloat16)])
def test_large_scores(causal, dtype):
    x, y, v, _ = tensors(L=40, d=8, dtype=torch.float32)
    x = (20 * x.detach()).to(dtype).requires_grad_()
    y = (20 * y.detach()).to(dtype).requires_grad_()
    v = v.detach().to(dtype).requires_grad_()
    assert 1e3 < (x @ y.mT).abs().max() < 1e4
    few = Sizes(4, 4, 5, open=3)
    cases = [few, few._replace(first_order=True), Sizes(40, 0, 1, open=1)]
    for sizes in cases:
        out = near_far_attention(x, y, v, sizes, causal=causal)
        out.float().square().sum().backward()
        assert out.dtype == dtype
        assert out.isfinite().all()
        for t in (x, y, v):
            assert t.grad.isfinite().all()
    exact = [t.detach().double() for t in (x, y, v)]
    expected = softmax_attention(*exact, causal=causal)
    tolerance = 1e-3
    if dtype == torch.bfloat16:
        tolerance = 0.02
    assert_close(out.double(), expected, rtol=0.02, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
def test_half_precision_and_parts_of_the_heads(causal, monkeypatch):
    x, y, v, keep = tensors(L=40, d=8, H=4, dtype=torch.float32)

    def call(*t):
        return near_far_attention(*t, Sizes(4, 4, 5, open=3), causal=causal, key_mask=keep)

    whole = call(x, y, v)
    low = call(x.bfloat16(), y.bfloat16(), v.bfloat16())
    assert low.dtype == torch.bfloat16
    difference = (low.float() - whole).norm()
    assert difference < 0.02 * whole.norm()
    # the C engine takes all heads in one call
    monkeypatch.setattr(native, "applies", lambda *tensors: False)
    monkeypatch.setattr(dispatch, "PART", 80)
    for saved_keys in (2**17, 100):
        monkeypatch.setattr(dispatch, "MAX_SAVED_KEYS", saved_keys)
        actual = call(x, y, v)
        same(actual, whole, (x, y, v), retain_graph=True, rtol=1e-4, atol=1e-5)
