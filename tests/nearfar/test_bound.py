"""What a causal query states that it may have missed is never less than what it missed; and above `error` it sees all
keys."""

import pytest
import torch
from native_cases import needs_library
from nearfar_cases import same

from crt_exp.attention import exact_attention
from crt_exp.nearfar import looks, near_far_attention, stated
from crt_exp.nearfar.choice import Sizes
from crt_exp.nearfar.layer import NearFar
from crt_exp.nearfar.past import RecallState
from crt_exp.nearfar.recall import RecallNearFar

SIZES = Sizes(block=16, heavy=0, cells=7, open=9, exact_until=64)
KINDS = ("normal", "sharp", "equal keys", "huge and tiny", "huge", "zeros", "one far", "few different")
BOTH = pytest.mark.parametrize("in_c", [False, pytest.param(True, marks=needs_library)])


def heads(kind, Z=2, G=2, S=400, d=33, seed=0, dtype=torch.float32):
    """x (Z, G, S, d), y (Z, 1, S, d), v (Z, 1, S, 5), whose values are of alternating sign."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=g, dtype=dtype)
    x, y, v = draw(Z, G, S, d) * d**-0.25, 2 * draw(Z, 1, S, d) * d**-0.25, 10 * draw(Z, 1, 1, 5).expand(-1, -1, S, -1)
    if kind == "sharp":
        x = 6 * x
    elif kind == "equal keys":
        y = y[:, :, :1].expand_as(y).contiguous()
    elif kind == "huge and tiny":
        x, y = x * 10.0 ** (3 * draw(Z, G, S, 1)).clamp(-9, 9), y * 10.0 ** (3 * draw(Z, 1, S, 1)).clamp(-9, 9)
    elif kind == "huge":
        x, y = 1e12 * x, 1e12 * y
    elif kind == "zeros":
        x[:, :, ::3], y[:, :, ::2] = 0, 0
    elif kind == "one far":
        y[:, 0, 3] = 5 * x[:, 0, -1]
    elif kind == "few different":
        y = y[:, :, torch.randint(0, 7, (S,), generator=g)]
    return x, y, v * (1.0 - 2.0 * (torch.arange(S) % 2)).unsqueeze(-1)


def missed(x, y, sizes, keep=None):
    """The weight (Z, G, S), in float64, of the keys that queries do not read; no key is heavy."""
    (Z, _, S, _), b, found = x.shape, sizes.block, torch.zeros(x.shape[:3], dtype=torch.float64)
    keep = torch.ones(Z, S, dtype=torch.bool) if keep is None else keep
    for t in range(sizes.exact_until // b, -(-S // b)):
        far, here = (t - 1) * b, slice(t * b, min(t * b + b, S))
        q, member = x[:, :, here], keep[:, None, None, :far]
        places = looks.opened(y[:, 0, :far], member, q, sizes.open)
        unread = member.expand(*q.shape[:3], far).clone()
        for each in places.split(1, -1):
            unread.scatter_(-1, each.clamp(min=0), unread.gather(-1, each.clamp(min=0)) & (each < 0))
        later = torch.arange(here.stop) > torch.arange(here.start, here.stop).unsqueeze(1)
        seen = ~later & keep[:, None, None, :here.stop]
        weight = (q.double() @ y[:, :, :here.stop].double().mT).masked_fill(~seen, -torch.inf).softmax(-1)
        found[:, :, here] = (weight[..., :far] * unread).sum(-1).nan_to_num()
    return found


def within(monkeypatch, in_c):
    if not in_c:
        monkeypatch.setattr(RecallNearFar, "in_c", lambda *tensors: False)


# ---- the law ----


@pytest.mark.parametrize("in_c, kind", [*((False, kind) for kind in KINDS[::2]),
                                        *(pytest.param(True, kind, marks=needs_library) for kind in KINDS)])
@torch.no_grad()
def test_no_query_misses_more_than_it_states(kind, in_c, monkeypatch):
    """Nor are outputs further off than that times the largest distance of two values."""
    within(monkeypatch, in_c)
    x, y, v = heads(kind, S=300, d=33 if kind in KINDS[:4] else 16)
    keep = torch.rand(len(x), x.shape[2], generator=torch.Generator().manual_seed(1)) < 0.8
    keep[:, 0] = True
    bound = stated(x, y, SIZES, keep).bound
    assert (bound >= missed(x, y, SIZES, keep)).all() and (bound <= 1).all()
    if not kind.startswith("huge"):                 # whose logits float32 rounds by more than a nat
        out = near_far_attention(x, y, v, SIZES, causal=True, key_mask=keep).out.double()
        exact = exact_attention(*(t.double() for t in (x, y, v)), causal=True, key_mask=keep)
        most = torch.cdist(v, v).amax((-1, -2)).unsqueeze(-1)
        assert ((out - exact).norm(dim=-1) <= (bound + 1e-5) * most)[:, :, 64:].all()


@pytest.mark.slow
@torch.no_grad()
def test_none_of_a_million_queries_does():
    """In C, where it can be had."""
    count = worst = 0
    for seed in range(128):
        kind, d, open = KINDS[seed % 8], (16, 33, 64, 80)[seed // 8 % 4], (1, 9, 40, 200)[seed // 32]
        x, y, _ = heads(kind, 4, 2, 1100, d, seed)
        sizes = SIZES._replace(open=open)
        bound, truth = stated(x, y, sizes).bound[:, :, 64:], missed(x, y, sizes)[:, :, 64:]
        count, worst = count + bound.numel(), max(worst, float((truth - bound).max()))
    assert count > 1e6 and worst <= 0


@BOTH
@torch.no_grad()
def test_bounds_are_near_what_is_missed(in_c, monkeypatch):
    """As near as 8 bits allow: of vectors like those of real heads they are less than twice as much."""
    within(monkeypatch, in_c)
    x, y, _ = heads("normal", S=600, d=64)
    sizes = SIZES._replace(open=32)
    bound, truth = stated(x, y, sizes).bound[:, :, 128:], missed(x, y, sizes)[:, :, 128:]
    assert truth.median() > 0.05 and (bound / truth).median() < 1.2


@needs_library
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "huge" not in kind])     # whose logits float32 rounds
@torch.no_grad()
def test_c_states_the_same(kind, monkeypatch):
    x, y, _ = heads(kind, S=700, d=48, seed=3)
    sizes = SIZES._replace(heavy=4 if kind == "normal" else 0, open=30)
    ours = stated(x, y, sizes).bound
    within(monkeypatch, False)
    torch.testing.assert_close(ours, stated(x, y, sizes).bound, rtol=1e-4, atol=0)


# ---- what is done about it ----


def parts(error, dtype=torch.float64, keep=None):
    """Inputs, outputs, and what these should be: exact where the bound is above the error."""
    x, y, v = heads("normal", S=300, d=8, dtype=dtype)
    x, y, v = (t.requires_grad_() for t in (x, y, v.contiguous()))
    sizes = SIZES._replace(heavy=3)
    bound = stated(x, y, sizes, keep).bound
    assert 0.05 < (bound > error).float().mean() < 0.95
    plain = near_far_attention(x, y, v, sizes, causal=True, key_mask=keep).out
    exact = exact_attention(x, y, v, causal=True, key_mask=keep)
    out = near_far_attention(x, y, v, sizes._replace(error=error), causal=True, key_mask=keep).out
    return (x, y, v), out, torch.where((bound > error).unsqueeze(-1), exact, plain)


@pytest.mark.parametrize("error", [0.15, 0.4])
@pytest.mark.parametrize("masked", [False, True])
def test_queries_above_the_error_see_all_keys(error, masked):
    keep = torch.rand(2, 300, generator=torch.Generator().manual_seed(1)) < 0.8
    keep[:, 0] = True
    inputs, out, expected = parts(error, keep=keep if masked else None)
    same(out, expected, inputs)


@needs_library
def test_they_do_in_c():
    inputs, out, expected = parts(0.3, torch.float32)
    same(out, expected, inputs, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_no_output_is_further_from_exact_than_the_error_says():
    x, y, v = heads("normal", S=500, d=16)
    exact, most = exact_attention(x, y, v, causal=True), torch.cdist(v, v).max()
    for error in (0.5, 0.1, 0.02):
        out = near_far_attention(x, y, v, SIZES._replace(error=error), causal=True).out
        assert (out - exact).norm(dim=-1).max() <= error * most + 1e-4


@BOTH
@torch.no_grad()
def test_in_steps_and_by_prefixes(in_c, monkeypatch):
    within(monkeypatch, in_c)
    x, y, v = heads("normal", S=300, d=16, dtype=torch.float32 if in_c else torch.float64)
    v = v.repeat(1, 1, 1, 4)[..., :16]
    sizes, close = SIZES._replace(heavy=3, error=0.3), {"rtol": 1e-4, "atol": 1e-4} if in_c else {}
    whole, state, start, steps = near_far_attention(x, y, v, sizes, causal=True).out, RecallState(sizes, 1), 0, []
    plain = near_far_attention(x, y, v, sizes._replace(error=None), causal=True).out
    assert ((whole - plain).norm(dim=-1) > 0.1).float().mean() > 0.1
    for n in (100, 1, 90, 1, 1, 107):
        steps.append(state.step(*(t[:, :, start:start + n] for t in (x, y, v))))
        start += n
    torch.testing.assert_close(torch.cat(steps, 2), whole, **close)
    for n in (70, 170):
        first = near_far_attention(*(t[:, :, :n] for t in (x, y, v)), sizes, causal=True).out
        torch.testing.assert_close(first, whole[:, :, :n], **close)
        last = near_far_attention(x[:, :, -n:], y, v, sizes, causal=True).out
        torch.testing.assert_close(last, whole[:, :, -n:], **close)


def test_transforms():
    layer = NearFar(2, 8, kv_heads=1, causal=True, block=16, cells=3, heavy=2, open=4, exact_until=32, error=0.3,
                    scaling=1)
    q, k, v = heads("normal", S=150, d=8, dtype=torch.float64)
    out, tangent = torch.func.jvp(lambda v: layer(q, k, v), (v,), (torch.ones_like(v),))
    torch.testing.assert_close(out, layer(q, k, v))
    torch.testing.assert_close(tangent, torch.ones_like(out))            # weights sum to 1


# ---- what is told, and refused ----


@torch.no_grad()
def test_keys_that_are_read_are_counted():
    x, y, _ = heads("normal", S=300, d=8)
    keep = torch.ones(2, 300, dtype=torch.bool)
    keep[0, :40], keep[:, 60:90] = False, False
    sizes = SIZES._replace(heavy=3, error=0.4)
    bound, read = stated(x, y, sizes, keep)
    for row, first in enumerate((40, 0)):
        for i in range(300):
            place = i - first
            if not keep[row, i] or place < 64:
                assert (read[row, :, i] == -1).all()
                continue
            pool = int(keep[row, :first + (place // 16 - 1) * 16].sum()) - 3
            above = bound[row, :, i] > 0.4
            assert (read[row, :, i] == torch.where(above, pool, min(pool, 9))).all()


def test_what_is_refused():
    x, y, v = heads("normal", S=100, d=8)
    for wrong in (0.0, 1.0, -0.1, float("nan"), 2):
        with pytest.raises(ValueError, match="error = .*: it takes a number above 0 and below 1, or null"):
            NearFar(2, 8, causal=True, error=wrong)
        with pytest.raises(ValueError, match="error = .*: it takes a part of a query's weight, above 0 and below 1"):
            near_far_attention(x, y, v, SIZES._replace(error=wrong), causal=True)
    for options in ({"preset": "bounded"}, {"open": 0}):
        with pytest.raises(ValueError, match="error = 0.1 with open = 0 .preset bounded., which holds no keys"):
            NearFar(2, 8, causal=True, error=0.1, **options)
    for open in (0, 8):
        with pytest.raises(ValueError, match="error = 0.1: .* this is attention in both directions or across: leave"):
            NearFar(2, 8, kv_heads=1, open=open or None, error=0.1)(x, y, v)
    with pytest.raises(ValueError, match="NaN or infinite"):
        near_far_attention(x, y * torch.nan, v, SIZES._replace(error=0.1), causal=True)
