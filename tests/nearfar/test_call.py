"""Near-far attention equals its reference of all pairs, and obeys the laws of its definition."""

import near_far_reference as reference
import pytest
import torch
from nearfar_cases import same, tensors
from torch.autograd import forward_ad

from crt_exp.attention import softmax_attention, uniform_attention
from crt_exp.nearfar import NearFar, call as nearfar, native, near_far_attention
from crt_exp.nearfar.both_directions import far_sums, levels, weights
from crt_exp.nearfar.choice import Choice, KeyMetric, Sizes, moments, one_hot, sum_clusters

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("sizes, options, masked", [
    (Sizes(3, 4, 5), {}, False),
    (Sizes(3, 4, 9, True), {"H": 4}, True),
    (Sizes(4, 0, 5), {"kv_heads": 1}, True),
    (Sizes(64, 4, 9), {}, True),
    (Sizes(3, 20, 90), {"L": 12}, False),
])
def test_in_both_directions(sizes, options, masked):
    x, y, v, keep = tensors(**options)
    expected = reference.both(x, y, v, keep if masked else None, **dict(zip(Sizes._fields[:4], sizes)))
    out = near_far_attention(x, y, v, sizes, key_mask=keep if masked else None)
    if masked:  # what padded queries see depends on no law
        out, expected = (torch.where(keep[:, None, :, None], t, 0.0) for t in (out, expected))
    same(out, expected, (x, y, v))


@pytest.mark.parametrize("sizes, options, masked", [(Sizes(3, 4, 5), {}, True),
                                                    (Sizes(3, 4, 9, True), {"H": 4}, False)])
def test_across(sizes, options, masked):
    x, y, v, keep = tensors(L=9, S=23, **options)
    keep = keep if masked else None
    out = near_far_attention(x, y, v, sizes, key_mask=keep, cross=True)
    same(out, reference.both(x, y, v, keep, cross=True, **dict(zip(Sizes._fields[:4], sizes))), (x, y, v))


def test_derivatives_under_transforms():
    x, y, v, _ = tensors(B=1, L=13)
    call = lambda x, y, v: near_far_attention(x, y, v, Sizes(3, 2, 3)).square().sum()
    expected = torch.autograd.grad(call(x, y, v), (x, y, v))
    for ours, theirs in zip(torch.func.grad(call, (0, 1, 2))(x, y, v), expected):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("sizes, causal", [(Sizes(4, 2, 3, open=4, exact_until=8), True), (Sizes(4, 2, 3), False)])
def test_a_tangent_of_one_alone(sizes, causal, which):
    """The engine is chosen once, by queries, keys and values: a tangent of any rules the C engine out."""
    inputs = [t.detach().float() for t in tensors(L=40)[:3]]
    expected = near_far_attention(*inputs, sizes, causal=causal)
    with forward_ad.dual_level():
        inputs[which] = forward_ad.make_dual(inputs[which], torch.ones_like(inputs[which]))
        out, tangent = forward_ad.unpack_dual(near_far_attention(*inputs, sizes, causal=causal))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert tangent.shape == out.shape
    if which == 2:      # weights are a mean's
        torch.testing.assert_close(tangent, torch.ones_like(out), rtol=1e-4, atol=1e-4)


# ---- sets and cells --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", [Sizes(23, 0, 1), Sizes(2, 23, 1), Sizes(1, 0, 23), Sizes(40, 3, 2, True)])
def test_exact_where_every_key_has_its_own(sizes, masked):
    x, y, v, keep = tensors()
    keep = keep if masked else None
    out = near_far_attention(x, y, v, sizes, key_mask=keep)
    same(out, softmax_attention(x, y, v, key_mask=keep), (x, y, v), rtol=1e-6, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_each_key_is_in_one_set(causal):
    """For queries that are 0 all keys weigh the same: the output is the mean of all values, each once."""
    g = torch.Generator().manual_seed(0)
    for L, block, heavy, cells in torch.randint(1, 40, (25, 4), generator=g).tolist():
        x, y, v, keep = tensors(B=2, L=L, seed=L)
        keep, x, sizes = keep if L % 2 else None, torch.zeros_like(x), Sizes(1 + block // 4, heavy // 3, cells, open=3)
        out = near_far_attention(x, y, v, sizes, causal=causal, key_mask=keep)
        close = {"rtol": 0, "atol": 1e-6} if causal else {}             # logits of cells deviate by MIN_SD at least
        torch.testing.assert_close(out, uniform_attention(x, y, v, causal=causal, key_mask=keep), **close)


@torch.no_grad()
def test_sums_of_cells_are_those_of_the_far_keys():
    u, v, cell = torch.rand(2, 6, 4), torch.randn(2, 6, 4, 3), torch.randint(5, (2, 6, 4))
    rows = torch.cat([v * u.unsqueeze(-1), u.unsqueeze(-1)], -1)
    found = far_sums(one_hot(cell, 5, rows.dtype).mT @ rows)
    for t in range(6):
        far = torch.tensor([abs(s - t) > 1 for s in range(6)])
        torch.testing.assert_close(found[:, t, :, -1].sum(-1), u[:, far].sum((1, 2)))
        for k in range(5):
            weight = u[:, far] * (cell[:, far] == k)
            torch.testing.assert_close(found[:, t, k, :3], (weight.unsqueeze(-1) * v[:, far]).sum((1, 2)))


def cells_of(y, keep=None, K=4):
    metric = KeyMetric.of(torch.randn(1, 30, 4).double() + 0.2, y, None, keep)
    y = y - metric.shift
    choice = Choice.of(y, metric, 0, K, keep)
    level = levels(y, metric, choice)
    u = weights(y, metric, choice.pool, choice.cluster, level)
    members = one_hot(choice.cluster, choice.centres.shape[1], y.dtype)
    sums = (members.mT @ moments(y, u, metric, choice.cluster, choice.centres)).unsqueeze(1)
    return y, metric, choice, sums, level


@torch.no_grad()
def test_a_mean_key_weighs_less_than_its_keys():
    """Jensen's inequality, without the mass factor."""
    y, metric, choice, sums, level = cells_of(torch.randn(1, 40, 4).double())
    cells = sum_clusters(sums, metric, choice.centres, level, mass=False)
    x = torch.randn(200, 4).double()
    ours = x @ cells.mu[0, 0].T + cells.bias[0, 0] + sums[0, 0, :, -1].log()          # (200, K)
    for k in range(4):
        exact = (x @ y[0, choice.cluster[0] == k].T).logsumexp(-1)
        assert (ours[:, k] <= exact + 1e-9).all() and (exact - ours[:, k]).max() > 0.01


def test_a_cell_of_equal_keys_is_exact():
    x, y, v, _ = tensors(B=1, L=24)
    y = y.detach()[:, :, :4].repeat(1, 1, 6, 1).requires_grad_()
    out = near_far_attention(x, y, v, Sizes(2, 0, 24))      # eight centres at a time may be of equal keys
    same(out, softmax_attention(x, y, v), (x, v), rtol=1e-6, atol=1e-8)      # a mean key moves with all its keys alike
    *_, metric, choice, sums, level = cells_of(y.detach()[:, 0], K=24)
    assert sum_clusters(sums, metric, choice.centres, level).spread.max() < 1e-12


@torch.no_grad()
def test_a_shift_of_all_keys_changes_nothing():
    x, y, v, _ = tensors(L=40)
    out = near_far_attention(x, y, v, Sizes(3, 4, 5, True))
    torch.testing.assert_close(near_far_attention(x, y + 7 * torch.randn(4).double(), v, Sizes(3, 4, 5, True)), out)


@torch.no_grad()
def test_a_shift_of_all_queries_is_a_weight_of_the_keys():
    """Queries x + s see keys y as queries x do whose keys have the log weights s.y: here as one more coordinate, which
    is 1 in all queries and adds nothing to their moments."""
    x, y, v, _ = tensors(L=40, d=4)
    s = torch.randn(4).double()
    shifted = near_far_attention(x + s, y, v, Sizes(3, 4, 5))
    more = torch.cat([x, torch.ones_like(x[..., :1])], -1), torch.cat([y, (y * s).sum(-1, keepdim=True)], -1)
    torch.testing.assert_close(near_far_attention(*more, v, Sizes(3, 4, 5)), shifted, rtol=1e-4, atol=1e-5)


# ---- padding, the future, numbers ------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("L", [8, 13])
def test_padding_is_truncation(causal, L):
    x, y, v, _ = tensors(L=20)
    keep = (torch.arange(20) < L).expand(2, -1)
    bad = [t.detach().masked_fill(~keep[:, None, :, None], torch.nan) for t in (y, v)]
    queries = x.detach().masked_fill(~keep[:, None, :, None], 0.0)
    call = lambda *t, **mask: near_far_attention(*t, Sizes(3, 2, 3, True, open=2), causal=causal, **mask)
    out = call(queries, *bad, key_mask=keep)
    torch.testing.assert_close(out[:, :, :L], call(*(t[:, :, :L] for t in (x, y, v))))
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])     # float32: in C, where it is for that
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lead", [3, 5, 12])
def test_rows_that_begin_with_padding_are_as_alone(causal, lead, dtype):
    """On both sides: `lead` places of padding before the first token of row 0, one behind that of row 1."""
    x, y, v, keep = tensors(L=24, H=4, dtype=dtype)
    keep[:] = True
    keep[0, :lead], keep[1, -1] = False, False
    bad = [t.masked_fill(~keep[:, None, :, None], torch.nan) for t in (x, y, v)]
    call = lambda *t, **mask: near_far_attention(*t, Sizes(5, 4, 3, True, open=2), causal=causal, **mask)
    out = call(*bad, key_mask=keep)
    close = {} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    rows = slice(lead, 24), slice(0, 23)
    alone = [call(*(t[[i], :, at] for t in (x, y, v))) for i, at in enumerate(rows)]
    same(torch.cat([out[[i], :, at] for i, at in enumerate(rows)], 2), torch.cat(alone, 2), (x, y, v), **close)
    assert out.isfinite().all()


def test_queries_behind_the_padding_of_their_rows():
    """The last queries of longer sequences, each row's padding its own."""
    x, y, v, keep = tensors(L=24)
    keep[:] = True
    keep[0, :7], keep[1, :2] = False, False
    call = lambda x: near_far_attention(x, y, v, Sizes(5, 4, 3, open=2), causal=True, key_mask=keep)
    same(call(x[:, :, 15:]), call(x)[:, :, 15:], (x, y, v))


def test_no_key_gives_no_output_and_no_gradient():
    x, y, v, _ = tensors(L=12)
    keep = torch.zeros(2, 12, dtype=torch.bool)
    keep[1, 4:8] = True                                       # the blocks around it are padding alone
    for causal in (False, True):
        out = near_far_attention(x, y, v, Sizes(4, 2, 3, True, open=2), causal=causal, key_mask=keep)
        grads = torch.autograd.grad(out.square().sum(), (x, y, v))
        assert (out[0] == 0).all() and all((g[0] == 0).all() and g.isfinite().all() for g in grads)
        assert (out[1, :, :4] == 0).all() == causal


def test_nothing_of_the_future():
    x, y, v, _ = tensors(L=26)
    sizes = Sizes(3, 2, 3, open=2)
    call = lambda n: near_far_attention(x[:, :, :n], y[:, :, :n], v[:, :, :n], sizes, causal=True)
    whole = call(26)
    for n in (1, 3, 4, 11, 25):
        torch.testing.assert_close(call(n), whole[:, :, :n])
    for grad in torch.autograd.grad(whole[:, :, :11].sum(), (y, v)):
        assert (grad[:, :, 11:] == 0).all() and (grad[:, :, :11] != 0).any()


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_more_of_anything_is_nearer(causal):
    """On average over heads of queries and keys that are alike in places, as those of models are."""
    g = torch.Generator().manual_seed(0)
    base = torch.randn(1, 16, 6, 8, generator=g)[:, :, torch.arange(192) // 8 % 6]
    x, y = (1.2 * (base + 0.7 * torch.randn(1, 16, 192, 8, generator=g)) for _ in range(2))
    v = torch.randn(1, 16, 192, 8, generator=g) + base
    exact = softmax_attention(x, y, v, causal=causal)

    def error(**changes):
        sizes = {"block": 8, "heavy": 4, "cells": 8, "first_order": False, "open": 4} | changes
        layer = NearFar(16, 8, causal=causal, scaling=1.0, exact_until=0, **sizes).eval()
        return float((layer(x, y, v) - exact).norm() / exact.norm())

    least = error()
    for more in ({"block": 32}, {"heavy": 64}, {"cells": 48}):
        assert error(**more) < 0.9 * least, more
    assert least < float((uniform_attention(x, y, v, causal=causal) - exact).norm() / exact.norm())


@torch.no_grad()
def test_values_to_first_order():
    """Where keys of a cell differ little and values are linear in them, what is left is of second order."""
    x, y, _, _ = tensors(B=1, L=120, d=4)
    y = 0.1 * y.detach()
    v = y @ torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = softmax_attention(x, y, v)
    error = lambda first: float((near_far_attention(x, y, v, Sizes(2, 0, 1, first)) - exact).norm())
    assert error(True) < 0.3 * error(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_large_scores(causal, dtype):
    x, y, v, _ = tensors(L=40, d=8, dtype=torch.float32)
    x, y, v = ((t.detach() * s).to(dtype).requires_grad_() for t, s in ((x, 20.0), (y, 20.0), (v, 1.0)))
    assert 1e3 < (x @ y.mT).abs().max() < 1e4
    for sizes in (Sizes(4, 4, 5, open=3), Sizes(4, 4, 5, True, open=3), Sizes(40, 0, 1, open=1)):
        out = near_far_attention(x, y, v, sizes, causal=causal)
        out.float().square().sum().backward()
        assert out.dtype == dtype and out.isfinite().all() and all(t.grad.isfinite().all() for t in (x, y, v))
    expected = softmax_attention(*(t.detach().double() for t in (x, y, v)), causal=causal)
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_half_precision_and_parts_of_the_heads(causal, monkeypatch):
    x, y, v, keep = tensors(L=40, d=8, H=4, dtype=torch.float32)
    call = lambda *t: near_far_attention(*t, Sizes(4, 4, 5, open=3), causal=causal, key_mask=keep)
    whole = call(x, y, v)
    low = call(*(t.bfloat16() for t in (x, y, v)))
    assert low.dtype == torch.bfloat16
    assert (low.float() - whole).norm() < 0.02 * whole.norm()
    monkeypatch.setattr(native, "applies", lambda *tensors: False)   # which takes all heads in one call
    monkeypatch.setattr(nearfar, "PART", 80)
    for kept in (2**17, 100):
        monkeypatch.setattr(nearfar, "MAX_SAVED_KEYS", kept)
        weight = torch.randn_like(whole)
        for ours, theirs in zip(*(torch.autograd.grad((t * weight).sum(), (x, y, v), retain_graph=True)
                                  for t in (call(x, y, v), whole))):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_no_matrix_of_pairs():
    """2^15 tokens: the matrix would take 4 GB, and its gradient as much."""
    x = torch.randn(1, 1, 2**15, 4).requires_grad_()
    near_far_attention(x, x, x, Sizes(64, 4, 4)).square().mean().backward()
    assert x.grad.isfinite().all()
