"""Laws of attention: every engine equals the materialised reference, and none of the known defects."""

import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from maps import HYBRID, MAPS, independent
from torch.utils._python_dispatch import TorchDispatchMode

from crt_exp import samplers
from crt_exp.attention import (
    DecodingState,
    DenominatorCount,
    Generalized,
    Linformer,
    Partial,
    attention,
    attention_reference,
    exact_attention,
    finish,
    identity_attention,
    merge,
    partial_attention,
    softmax_attention,
    softmax_partial,
)
from crt_exp.attention.engines import closed_form, flash, native, operators
from crt_exp.attention.engines import generic as chunked
from crt_exp.features import (OPRF, SDERF, SMREG, AngularHybrid, AutoRF, ClusteredHybrid, GeomRF, HypRF, PoisRF, PosRF,
                              Statistics, Sum, TrigRF)
from crt_exp.features.exponential import PositiveExponential
from crt_exp.nested import leaves, mapped, shared
from crt_exp.samplers.noise import precise

pytestmark = pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")
CLOSED = [m for m in MAPS if isinstance(m, PositiveExponential)]
FEW = [OPRF(), PosRF(), SMREG(), SDERF(antithetic=True), OPRF(antithetic=True), TrigRF(), GeomRF(),
       Sum(TrigRF(), PosRF(), weights=(0.3, 0.7))]
BLOCKED = [AngularHybrid(n=2), pytest.param(ClusteredHybrid(), marks=pytest.mark.slow)]
OTHER = [Generalized(f="relu"), Generalized(f="elu+1", projection=False), Generalized(f="exp"), Generalized(f="cos")]
OUTLIER = 40.0


@pytest.fixture
def small_chunks(monkeypatch):
    """Several chunks, segments and kept states within a few tokens, and ragged ends."""
    set_chunks(monkeypatch, 4)


def set_chunks(monkeypatch, size):
    monkeypatch.setattr(closed_form, "plan", lambda x, width: (3, min(size, x.shape[2])))  # three heads at a time
    monkeypatch.setattr(closed_form, "CHUNK", size)
    monkeypatch.setattr(closed_form, "SEGMENT", 2 * size)
    monkeypatch.setattr(closed_form, "PIECES", (max(size // 2, 1), 1))
    monkeypatch.setattr(chunked, "CHUNK", size)
    monkeypatch.setattr(chunked, "WIDE", size)
    monkeypatch.setattr(chunked, "PIECES", (size, max(size // 2, 1), 1))
    monkeypatch.setattr(chunked, "KEPT", 2)


@pytest.fixture
def by_products(monkeypatch):
    """Closed forms by PyTorch's products, also where the library in C would do the work
    (tests/test_native.py tests that)."""
    monkeypatch.setattr(native, "applies", lambda *tensors: False)


@pytest.fixture(params=["native", "products"])
def engine(request):
    """Both ways to do float32 on a CPU."""
    if request.param == "products":
        request.getfixturevalue("by_products")


class Case:
    """x (B,H,L,d), y (B,Hkv,S,d), v (B,Hkv,S,dv), and a map with noise and fitted parameters."""

    def __init__(self, phi, B=2, H=4, Hkv=None, L=11, S=11, d=4, dv=3, m=6, scale=0.6, masked=False, shared=False,
                 seed=0, dtype=torch.float64):
        g = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
        Hkv = Hkv or H
        self.phi, self.heads = phi, H
        self.x, self.y, self.v = scale * draw(B, H, L, d), scale * draw(B, Hkv, S, d), draw(B, Hkv, S, dv)
        self.x, self.y, self.v = (t.to(dtype).requires_grad_() for t in (self.x, self.y, self.v))
        batch = () if shared else (H,)
        self.noise = independent(phi, lambda: samplers.orthogonal(m, d, g, batch=batch, dtype=torch.float64))
        stats = Statistics.of(self.x.flatten(0, 2), self.y.flatten(0, 2)) if shared else Statistics.of(
            self.x, self.y.repeat_interleave(H // Hkv, 1))
        self.params = phi.fit(stats)
        self.mask = None
        if masked:
            self.mask = torch.rand(B, S, generator=g) > 0.3
            self.mask[0, :5] = False
        self.grad = draw(B, H, L, dv).to(dtype)

    def __call__(self, function=attention, x=None, y=None, v=None, **options):
        given = {"key_mask": self.mask} if self.mask is not None else {}
        x, y, v = (a if a is not None else b for a, b in zip((x, y, v), (self.x, self.y, self.v)))
        return function(x, y, v, self.phi, self.noise, self.params, **given | options)

    def with_grads(self, function=attention, **options):
        out = self(function, **options)
        return out, *torch.autograd.grad(out, (self.x, self.y, self.v), self.grad.to(out.dtype))


def assert_same(ours, expected, rtol=1e-9):
    """Equal up to rtol of the largest entry of each tensor."""
    for a, b in zip(ours, expected, strict=True):
        assert a.shape == b.shape and a.isfinite().all() and b.isfinite().all()
        assert (a.double() - b.double()).abs().max() <= rtol * b.double().abs().max().clamp(min=1e-3), (a, b)


# The engine is its definition.

SHAPES = {"self": {}, "masked": {"masked": True}, "cross": {"L": 5, "S": 13, "masked": True},
          "grouped": {"Hkv": 2, "S": 14}, "shared": {"Hkv": 2, "shared": True, "masked": True}}


EVERY = [(m, s) for m in MAPS + HYBRID + OTHER for s in (SHAPES if m in FEW + OTHER else ["masked"])]


@pytest.mark.parametrize("phi, shape", EVERY, ids=repr)
def test_equals_reference(phi, shape, small_chunks):
    """Outputs and gradients, bidirectional and causal, float64."""
    case = Case(phi, **SHAPES[shape])
    for is_causal in (False, True):
        assert_same(case.with_grads(causal=is_causal), case.with_grads(attention_reference, causal=is_causal))


@pytest.mark.parametrize("phi", FEW, ids=repr)
def test_scale_multiplies_queries_and_keys(phi, small_chunks):
    case, root = Case(phi, masked=True), 0.3
    for is_causal in (False, True):
        scaled = lambda x, y, v, *rest, **options: attention(root * x, root * y, v, *rest, **options)
        assert_same(case.with_grads(causal=is_causal, scale=root), case.with_grads(scaled, causal=is_causal))
        assert_same(case.with_grads(causal=is_causal, scale=root),
                    case.with_grads(attention_reference, causal=is_causal, scale=root))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("shape", ["self", "masked", "cross", "grouped", "shared"])
@pytest.mark.parametrize("phi", [m for m in CLOSED if m.kernel == "softmax"], ids=repr)
def test_two_fused_softmax_attentions(phi, shape, dtype, tolerance, monkeypatch):
    """The engine of GPUs, on the CPU's kernels: outputs and gradients."""
    case = Case(phi, **SHAPES[shape] | {"d": 16, "dv": 8, "m": 12}, dtype=dtype)
    expected = case.with_grads(attention_reference)
    monkeypatch.setattr(flash, "applies", lambda x, y, v: True)
    assert_same(case.with_grads(), expected, tolerance)


def test_fused_softmax_attentions_without_keys(monkeypatch):
    monkeypatch.setattr(flash, "applies", lambda x, y, v: True)
    case = Case(OPRF(), B=2, dtype=torch.float32)
    case.mask = torch.tensor([[False], [True]]).expand(2, 11).clone()
    with torch.no_grad():
        case.y[0], case.v[0] = torch.nan, torch.nan
    out, *grads = case.with_grads()
    assert (out[0] == 0).all() and all(g.isfinite().all() and (g[0] == 0).all() for g in grads)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("phi", MAPS + HYBRID, ids=repr)
def test_gradcheck(phi, is_causal, small_chunks):
    case = Case(phi, B=1, H=1, L=5, S=6, d=2, dv=1, m=3)
    assert torch.autograd.gradcheck(lambda *t: case(x=t[0], y=t[1], v=t[2], causal=is_causal), (case.x, case.y, case.v),
                                    fast_mode=True)


def test_reference_is_the_dense_formula():
    """The reference itself, against diag(A 1)^-1 A V written out."""
    for phi in FEW:
        case = Case(phi, masked=True)
        A = (phi.phi_q(case.x, case.noise, case.params).exp() @ phi.phi_k(case.y, case.noise, case.params).exp().mT)
        for is_causal in (False, True):
            weights = A * case.mask[:, None, None]
            weights = weights.tril() if is_causal else weights
            total = weights.sum(-1, keepdim=True)
            expected = torch.where(total == 0, 0.0, weights @ case.v / torch.where(total == 0, 1.0, total))
            assert_same([case(attention_reference, causal=is_causal)], [expected])


@pytest.mark.parametrize("phi", FEW + BLOCKED + OTHER, ids=repr)
def test_causal_is_bidirectional_on_each_prefix(phi, small_chunks):
    """In particular no cumulative sum runs over the wrong axis: a token that saw only itself
    would return its own value."""
    case = Case(phi)
    whole = case(causal=True)
    for n in range(1, 12):
        prefix = case(x=case.x[:, :, n - 1:n], y=case.y[:, :, :n], v=case.v[:, :, :n])
        assert_same([whole[:, :, n - 1]], [prefix[:, :, 0]])
    assert (whole[:, :, 1:] - case.v[:, :, 1:]).abs().min() > 1e-6


@pytest.mark.parametrize("early, late", [(1.0, OUTLIER), (12.0, 0.05)])  # trigonometric and positive features have
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])          # large logs for long and for short keys
@pytest.mark.parametrize("phi", [*FEW, *(pytest.param(phi, marks=pytest.mark.slow) for phi in (HYBRID[0], HYBRID[2]))],
                         ids=repr)
def test_future_never_changes_the_past(phi, dtype, early, late, small_chunks):
    """Nor does a stabiliser that sees a later outlier: outputs and gradients of the first rows stay as they were."""
    case = Case(phi, dtype=dtype)
    past = slice(0, 6)
    case.grad[:, :, 6:] = 0
    with torch.no_grad():
        case.y[:, :, past] *= early
    before = case.with_grads(causal=True)
    with torch.no_grad():
        for t, change in ((case.x, -3.0), (case.y, late), (case.v, 100.0)):
            t[:, :, 6:] *= change
    after = case.with_grads(causal=True)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-3
    assert_same([t[:, :, past] for t in after], [t[:, :, past] for t in before], tolerance)
    assert all((t[:, :, 6:] == 0).all() for t in after[1:])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("phi", FEW + BLOCKED + OTHER, ids=repr)
def test_padding_is_truncation(phi, is_causal, small_chunks):
    """Masked keys, NaN and all, are as if they were not there: in outputs, and in gradients (theirs are 0)."""
    case = Case(phi, L=7, S=11)
    short = Case(phi, L=7, S=11)
    keep = slice(0, 7)
    short.y, short.v = short.y[:, :, keep].detach().requires_grad_(), short.v[:, :, keep].detach().requires_grad_()
    if is_causal:  # padding on the left, so that queries and keys stay aligned
        case.x, keep = short.x.detach().requires_grad_(), slice(4, 11)
        roll = lambda t: torch.cat([t[:, :, 7:], t[:, :, :7]], 2).detach()
        case.y, case.v = roll(case.y), roll(case.v)
    case.mask = torch.zeros(2, 11, dtype=torch.bool)
    case.mask[:, keep] = True
    with torch.no_grad():
        case.y, case.v = (t.masked_fill(~case.mask[:, None, :, None], torch.nan).requires_grad_()
                          for t in (case.y, case.v))
    out, dx, dy, dv = case.with_grads(causal=is_causal)
    assert_same([out, dx, dy[:, :, keep], dv[:, :, keep]], short.with_grads(causal=is_causal))
    for t in (dy, dv):
        assert (t.masked_fill(case.mask[:, None, :, None], 0) == 0).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("phi", FEW, ids=repr)
def test_rows_without_keys_are_zero(phi, is_causal):
    case = Case(phi)
    case.mask = torch.ones(2, 11, dtype=torch.bool)
    case.mask[1], case.mask[0, :3] = False, False
    out, *grads = case.with_grads(causal=is_causal)
    assert (out[1] == 0).all() and out[0, :, 3:].abs().min() > 0
    assert (out[0, :, :3] == 0).all() == is_causal
    assert all(g.isfinite().all() and (g[1] == 0).all() for g in grads)


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


# Numbers.

@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("phi", [OPRF(), HypRF(), PoisRF(), TrigRF()], ids=repr)
def test_dtypes(phi, dtype, tolerance, is_causal, small_chunks):
    """The output has the dtype of the values; half precision rounds inputs and outputs, not sums."""
    case = Case(phi, dtype=dtype, scale=0.3)
    exact = Case(phi, scale=0.3)
    exact.x, exact.y, exact.v, exact.grad = (t.detach().double().requires_grad_()
                                             for t in (case.x, case.y, case.v, case.grad))
    ours = case.with_grads(causal=is_causal)
    assert all(t.dtype == dtype for t in ours)
    assert_same(ours, exact.with_grads(attention_reference, causal=is_causal), tolerance)


def test_autocast(engine):
    case = Case(OPRF(), dtype=torch.float32)
    for phi in (OPRF(), TrigRF()):
        case.phi = phi
        plain = case.with_grads()
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(case.with_grads(), plain, 1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("phi", [OPRF(), PosRF(), SMREG(), OPRF(antithetic=True), TrigRF()], ids=repr)
def test_scores_of_a_thousand(phi, dtype, tolerance, is_causal, small_chunks, engine):
    """Finite, and equal to the float64 reference of the same rounded inputs, in outputs and gradients."""
    case = Case(phi, L=16, S=16, scale=13.0, dtype=dtype)
    assert (case.x @ case.y.mT).abs().max() > 1e3
    exact = Case(phi, L=16, S=16, scale=13.0)
    exact.x, exact.y, exact.v, exact.grad = (t.detach().double().requires_grad_()
                                             for t in (case.x, case.y, case.v, case.grad))
    ours, expected = case.with_grads(causal=is_causal), exact.with_grads(attention_reference, causal=is_causal)
    assert all(t.isfinite().all() for t in ours)
    if phi != TrigRF():  # float32 holds phases of thousands to 1e-4 only, and cancellation takes the rest
        assert_same(ours[:1], expected[:1], tolerance)
        # half precision rounds the output, from which these gradients, nearly 0, are subtracted
        if dtype == torch.float32:
            assert_same(ours[1:], expected[1:], 10 * tolerance)


def test_underflow_sends_a_segment_through_pieces(monkeypatch, by_products):
    """A late key so large that the terms of early rows underflow in its scale, in every engine."""
    taken = []
    monkeypatch.setattr(closed_form, "pieces", lambda *a, real=closed_form.pieces: taken.append(a[1]) or real(*a))
    of_a_part = lambda self, *a, real=chunked.Part.pieces: taken.append(a[5]) or real(self, *a)
    monkeypatch.setattr(chunked.Part, "pieces", of_a_part)
    for phi, early, late in ((OPRF(A=-0.05), 20.0, 0.1), (TrigRF(), 1.0, OUTLIER)):
        taken.clear()
        case = Case(phi, L=40, S=40, dtype=torch.float32)
        with torch.no_grad():
            case.y[:, :, :30] *= early
            case.y[:, :, 30:] *= late
        exact = Case(phi, L=40, S=40)
        exact.y = case.y.detach().double().requires_grad_()
        exact.x, exact.v, exact.grad = (t.detach().double().requires_grad_() for t in (case.x, case.v, case.grad))
        ours, expected = case(causal=True), exact(attention_reference, causal=True)
        assert_same([ours[:, :, :30]], [expected[:, :, :30]], 1e-3)
        assert len(set(taken)) > 1


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("phi", [OPRF(), HypRF(), TrigRF(), PoisRF()], ids=repr)
def test_converges_to_softmax(phi, is_causal):
    """Error against exact softmax attention falls as m^(-1/2)."""
    errors = []
    for m in (64, 4096):
        case = Case(phi, m=m, scale=0.4, B=4, L=12, S=12)
        exact = softmax_attention(case.x, case.y, case.v, causal=is_causal)
        errors.append((case(causal=is_causal) - exact).square().mean().sqrt())
    assert 4 < errors[0] / errors[1] < 16  # 8 in expectation
    assert errors[1] < 0.05


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("phi", [OPRF(), TrigRF()], ids=repr)
def test_no_feature_matrix_is_kept(phi, is_causal, engine):
    """What is saved for the backward pass is the size of the inputs, plus one number a row and states."""
    case = Case(phi, B=1, H=2, L=2048, S=2048, m=128, dtype=torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        case(causal=is_causal)
    assert max(kept) < 2 * 2048 * 128 / 4
    assert sum(kept) < 2 * 2048 * 128


# Defects of well-known code, each by name.

def test_defect_mask_zeroes_only_values():
    case = Case(OPRF(), masked=True)
    wrong = attention(case.x, case.y, case.v * case.mask[:, None, :, None], case.phi, case.noise, case.params)
    right = case(attention_reference)
    assert_same([case()], [right])
    assert (wrong - right).norm() > 0.2 * right.norm()  # the test has power


@pytest.mark.parametrize("phi, early, late", [(OPRF(A=-0.1), 20.0, 0.1), (TrigRF(), 1.0, OUTLIER),
                                              (GeomRF(p=0.5), 1e-9, 1.0)])
def test_defect_stabiliser_or_epsilon_sees_the_future(phi, early, late):
    """An outlier at the end would underflow every earlier row,
    and with an epsilon replace them by the mean of the values."""
    case = Case(phi, L=20, S=20)
    with torch.no_grad():
        case.y[:, :, :-1] *= early
        case.y[:, :, -1] *= late
    whole = case(causal=True)[:, :, :-1]
    cut = case(x=case.x[:, :, :-1], y=case.y[:, :, :-1], v=case.v[:, :, :-1], causal=True)
    assert_same([whole], [cut], 1e-9)


@pytest.mark.parametrize("is_causal", [False, True])
def test_defect_epsilon_in_features(is_causal):
    """Kernel values of e^-300 weigh as they should: long keys in the direction away from the query."""
    case = Case(PosRF(), B=1, H=1, L=3, S=3, scale=0.2)
    shift = torch.tensor([20.0, 0, 0, 0], dtype=torch.float64)
    far = case(y=case.y + shift, x=case.x - shift, causal=is_causal)
    assert_same([far], [case(attention_reference, y=case.y + shift, x=case.x - shift, causal=is_causal)])
    assert (far - case.v.mean(2, keepdim=True)).abs().max() > 1e-2


def test_defect_keys_reweighted_by_their_own_maxima():
    """A constant added to every key's logs, or to those of one query, changes nothing; one added to one key's does."""
    class Shifted(PosRF):
        by_key, by_query = 0.0, 0.0

        def bind(self, noise, params=()):
            plain = super().bind(noise, params)
            add = lambda f, c: f._replace(log_scale=f.log_scale + c)
            return plain._replace(phi_q=lambda x: add(plain.phi_q(x), self.by_query),
                                  phi_k=lambda y: add(plain.phi_k(y), self.by_key))

    case = Case(Shifted())
    run = lambda: attention_and_chunked(case)
    before = run()
    Shifted.by_key, Shifted.by_query = 300.0, torch.linspace(-500, 500, 11)[:, None]
    assert_same(run(), before)
    Shifted.by_key = torch.linspace(0, 1, 11)[:, None]
    assert (run()[0] - before[0]).abs().max() > 1e-2


def attention_and_chunked(case):
    """By features, whatever the class of the map."""
    call = lambda is_causal: chunked.Call(case.phi, case.noise, case.params, is_causal)
    return [chunked.chunked_attention(case.x, case.y, case.v, call(c)) for c in (False, True)]


def test_defect_scaled_twice():
    """x = d^(-1/4) q gives softmax(q k^T / sqrt d): the usual scale of torch."""
    case = Case(OPRF(), d=16, m=2**14, dv=8, scale=0.7)
    q, k, v = (t.detach() for t in (case.x, case.y, case.x[..., :8]))
    usual = F.scaled_dot_product_attention(q, k, v)
    x, y = q * 16**-0.25, k * 16**-0.25
    assert_same([exact_attention(x, y, v), softmax_attention(x, y, v)], [usual, usual])
    params = case.phi.fit(Statistics.of(x, y))
    estimate = attention(x, y, v, case.phi, case.noise, params)
    assert (estimate - usual).norm() < 0.1 * usual.norm()
    assert (estimate - exact_attention(x * 16**-0.25, y * 16**-0.25, v)).norm() > 0.2 * usual.norm()


def test_defect_statistics_over_padding():
    case = Case(OPRF(), masked=True)
    padded = case.y.detach().masked_fill(~case.mask[:, None, :, None], 1e4)
    mask = case.mask[:, None].expand(-1, 4, -1)
    A = [OPRF().fit(Statistics.of(case.x, y, y_mask=mask)).A for y in (case.y, padded)]
    assert torch.equal(*A)


@pytest.mark.parametrize("is_causal", [False, True])
def test_defect_number_of_chunks_taken_for_their_size(is_causal):
    """No tensor of features grows with the length of the sequence, and no chunk is as small as a part of it."""
    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            for t in found if isinstance(found, (tuple, list)) else (found,):
                if isinstance(t, torch.Tensor) and t.shape[-1:] == (128,):
                    largest.append(t.numel())
            return found

    sizes = []
    for length in (2048, 8192):
        largest = []
        case = Case(PosRF(), B=1, H=2, L=length, S=length, m=128, dtype=torch.float32)
        form = operators.form_of(case.x, case.y, case.v, case.phi, case.noise, case.params, None)
        with Watched(), torch.no_grad():
            (closed_form.causal if is_causal else closed_form.bidirectional).forward(case.x, case.y, case.v, form)
        sizes.append(max(largest))
    assert sizes[0] == sizes[1] < 2**21


# Signed denominators.

def test_denominators_are_counted_and_guarded():
    case = Case(TrigRF(), B=8, L=32, S=32, scale=2.5, m=4)
    kernel = TrigRF().phi_q(case.x, case.noise).exp() @ TrigRF().phi_k(case.y, case.noise).exp().mT
    for is_causal in (False, True):
        sums = (kernel.tril() if is_causal else kernel).sum(-1, keepdim=True)
        numerator = (kernel.tril() if is_causal else kernel) @ case.v
        count = DenominatorCount()
        out = case(causal=is_causal, counter=count)
        assert count.nonpositive == (sums <= 0).sum() > 0 and count.total == sums.numel()
        assert_same([out, case(causal=is_causal, denominator="abs")], [numerator / sums, numerator / sums.abs()], 1e-5)
    count.reset()
    assert count.fraction == 0


def test_clamp_bounds_the_output(monkeypatch):
    """A denominator that cancels to nothing is kept at CLAMP of its terms' absolute values."""
    v, ones = torch.ones(1, 1, 2, 1), torch.tensor([[1.0], [1e-9]])
    p = Partial(v[0, 0], ones, torch.zeros(2, 1), modulus=torch.ones(2, 1))
    from crt_exp.attention import partials
    assert partials.finish(p, "clamp").tolist() == [[1.0], [pytest.approx(1 / partials.CLAMP)]]
    negative = p._replace(denominator=-ones)
    assert partials.finish(negative, "clamp").tolist() == [[-1.0], [pytest.approx(-1 / partials.CLAMP)]]
    assert partials.finish(p._replace(denominator=0 * ones), "clamp")[0] == pytest.approx(1 / partials.CLAMP)


@pytest.mark.parametrize("policy", ["clamp", "abs"])
@pytest.mark.parametrize("phi", [TrigRF(), GeomRF(), Generalized(f="identity")], ids=repr)
def test_policies_equal_reference(phi, policy, small_chunks, monkeypatch):
    from crt_exp.attention import partials, reference
    for module in (partials, reference):
        monkeypatch.setattr(module, "CLAMP", 0.3)  # so that it acts
    case = Case(phi, masked=True, scale=1.5)
    for is_causal in (False, True):
        options = {"causal": is_causal, "denominator": policy}
        assert_same(case.with_grads(**options), case.with_grads(attention_reference, **options), 1e-8)


@pytest.mark.filterwarnings("default:.*denominators are not positive:RuntimeWarning")
def test_nonpositive_denominators_are_not_silent():
    case = Case(TrigRF(), B=8, L=32, S=32, scale=2.5, m=4)
    with pytest.warns(RuntimeWarning, match="of 1024 attention denominators are not positive"):
        case()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case(counter=DenominatorCount())
        Case(OPRF())()


@pytest.mark.parametrize("phi", FEW + OTHER, ids=repr)
def test_unnormalised(phi, small_chunks):
    case = Case(phi)
    kernel = phi.phi_q(case.x, case.noise, case.params).exp() @ phi.phi_k(case.y, case.noise, case.params).exp().mT
    for is_causal in (False, True):
        expected = (kernel.tril() if is_causal else kernel) @ case.v
        grads = torch.autograd.grad(expected, (case.x, case.y, case.v), case.grad, retain_graph=True)
        assert_same(case.with_grads(causal=is_causal, normalize=False), [expected, *grads])


# Partials: the one currency.

def test_a_row_of_nothing_has_no_log_sum():
    case = Case(OPRF())
    case.mask = torch.ones(2, 11, dtype=torch.bool)
    case.mask[1], case.mask[0, :3] = False, False
    exact = softmax_partial(case.x, case.y, case.v, causal=True, key_mask=case.mask)
    for rows in (case(partial_attention, causal=True), exact):
        assert (rows.logsum[1] == -torch.inf).all() and (rows.logsum[0, :, :3] == -torch.inf).all()
        assert rows.logsum[0, :, 3:].isfinite().all() and (rows.output[1] == 0).all()
        grads = torch.autograd.grad(rows.logsum.exp().sum() + rows.output.sum(), (case.x, case.y, case.v))
        assert all(g.isfinite().all() and (g[1] == 0).all() for g in grads)


def logsum_reference(x, y, v, phi, noise, params, causal=False, key_mask=None):
    """log of the row sums of the kernel matrix written out, a row without keys left at 0."""
    kernel = phi.phi_q(x.double(), noise, params).exp() @ phi.phi_k(y.double(), noise, params).exp().mT
    kernel = kernel if key_mask is None else kernel * key_mask[:, None, None]
    total = (kernel.tril(y.shape[2] - x.shape[2]) if causal else kernel).sum(-1, keepdim=True)
    return torch.where(total == 0, 1.0, total).abs().log()


def with_logsum(case, partial, is_causal, weight):
    """Outputs, log-sums (0 where there are none), and the gradients of a loss of both."""
    if partial is logsum_reference:
        out, logs = case(attention_reference, causal=is_causal), case(logsum_reference, causal=is_causal)
    else:
        rows = case(partial, causal=is_causal)
        out, logs = rows.output, rows.logsum
    logs = torch.where(logs == -torch.inf, 0.0, logs)
    loss = (out.double() * case.grad.double()).sum() + (logs.double() * weight).sum()
    return [out, logs, *torch.autograd.grad(loss, (case.x, case.y, case.v))]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", ["self", "masked", "grouped", "shared"])
@pytest.mark.parametrize("phi", [*FEW, OTHER[0]], ids=repr)
def test_log_sums_and_their_gradients(phi, shape, is_causal, small_chunks):
    case = Case(phi, **SHAPES[shape])
    weight = torch.randn(case.x.shape[:3], dtype=torch.float64).unsqueeze(-1)
    expand = lambda f: lambda x, y, v, *rest, **options: f(
        x, *(t.repeat_interleave(x.shape[1] // t.shape[1], 1) for t in (y, v)), *rest, **options)
    expected = with_logsum(case, logsum_reference, is_causal, weight) if shape in ("self", "masked") else None
    if expected is None:
        out, logs = case(attention_reference, causal=is_causal), case(expand(logsum_reference), causal=is_causal)
        loss = (out * case.grad).sum() + (logs * weight).sum()
        expected = [out, logs, *torch.autograd.grad(loss, (case.x, case.y, case.v))]
    assert_same(with_logsum(case, partial_attention, is_causal, weight), expected)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("phi", [m for m in CLOSED if m.kernel == "softmax"], ids=repr)
def test_log_sums_in_single_precision(phi, is_causal, engine):
    """By the engine in C, and without it."""
    case, exact = (Case(phi, L=150, S=150, d=8, m=16, masked=True, dtype=t) for t in (torch.float32, torch.float64))
    weight = torch.randn(2, 4, 150, 1, dtype=torch.float64)
    assert_same(with_logsum(case, partial_attention, is_causal, weight),
                with_logsum(exact, logsum_reference, is_causal, weight), 2e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)])
def test_log_sums_of_two_fused_softmax_attentions(dtype, tolerance, monkeypatch):
    options = SHAPES["masked"] | {"d": 16, "dv": 8, "m": 12}
    case, exact = Case(OPRF(), **options, dtype=dtype), Case(OPRF(), **options)
    exact.x, exact.y, exact.v, exact.grad = (t.detach().double().requires_grad_()
                                             for t in (case.x, case.y, case.v, case.grad))
    weight = torch.randn(2, 4, 11, 1, dtype=torch.float64)
    expected = with_logsum(exact, logsum_reference, False, weight)
    monkeypatch.setattr(flash, "applies", lambda x, y, v: True)
    assert_same(with_logsum(case, partial_attention, False, weight), expected, tolerance)


def in_parts(case, at, is_causal, policy="none", near=False):
    """Attention to keys [0, at) and to the rest, merged. near: the first part exactly, by softmax.

    Causal: queries of the first part see their own keys alone, the others all of them and, causally, those of their
    own part.
    """
    clamp = policy == "clamp"
    keep = lambda span: None if case.mask is None else case.mask[:, span]

    def gather(queries, keys, exact, causal):
        x, y, v = case.x[:, :, queries], case.y[:, :, keys], case.v[:, :, keys]
        if exact:
            return softmax_partial(x, y, v, causal=causal, key_mask=keep(keys))
        return partial_attention(x, y, v, case.phi, case.noise, case.params, causal=causal, key_mask=keep(keys),
                                 modulus=clamp)

    L, S = case.x.shape[2], case.y.shape[2]
    first, rest = slice(0, at), slice(at, S)
    if not is_causal:
        return finish(merge(gather(slice(0, L), first, near, False), gather(slice(0, L), rest, False, False)), policy)
    cut = max(0, at - (S - L))  # queries of the first part
    late = slice(cut, L)
    out = finish(merge(gather(late, first, near, False), gather(late, rest, False, True)), policy)
    return out if not cut else torch.cat([finish(gather(slice(0, cut), first, near, True), policy), out], 2)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", ["self", "masked", "grouped"])
@pytest.mark.parametrize("phi", [*FEW, OTHER[0]], ids=repr)
def test_parts_of_keys_merge_to_the_whole(phi, shape, is_causal, small_chunks):
    """Cut at any place: outputs and gradients."""
    case = Case(phi, **SHAPES[shape])
    for policy in ("none", "clamp") if phi in (TrigRF(), GeomRF()) else ("none",):
        whole = case.with_grads(causal=is_causal, denominator=policy)
        for at in range(1, case.y.shape[2], 3 if shape == "grouped" else 1):
            out = in_parts(case, at, is_causal, policy)
            assert_same([out, *torch.autograd.grad(out, (case.x, case.y, case.v), case.grad)], whole, 1e-8)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("phi", [OPRF(), TrigRF(), GeomRF()], ids=repr)
def test_features_join_an_exact_block(phi, is_causal, small_chunks):
    """The near keys exactly, the far ones by features: the dense formula, and its gradients."""
    case, at = Case(phi, masked=True), 4
    out = in_parts(case, at, is_causal, near=True)
    kernel = phi.phi_q(case.x, case.noise, case.params).exp() @ phi.phi_k(case.y, case.noise, case.params).exp().mT
    weights = torch.cat([(case.x @ case.y.mT).exp()[..., :at], kernel[..., at:]], -1) * case.mask[:, None, None]
    weights = weights.tril() if is_causal else weights
    total = weights.sum(-1, keepdim=True)
    expected = weights @ case.v / torch.where(total == 0, 1.0, total)
    of = lambda t: [t, *torch.autograd.grad(t, (case.x, case.y, case.v), case.grad, retain_graph=True)]
    assert_same(of(out), of(expected))
    if not is_causal:
        assert_same([in_parts(case, at, False, near=True)], [expected])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("phi", [OPRF(), TrigRF(), GeomRF(), Generalized(f="relu")], ids=repr)
def test_gradcheck_of_merged_parts(phi, is_causal, small_chunks):
    case = Case(phi, B=1, H=1, L=5, S=5, d=2, dv=1, m=3)

    def merged(x, y, v):
        twin = copy.copy(case)
        twin.x, twin.y, twin.v = x, y, v
        rows = twin(partial_attention, causal=is_causal)
        return in_parts(twin, 2, is_causal, near=True), rows.logsum

    assert torch.autograd.gradcheck(merged, (case.x, case.y, case.v), fast_mode=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("phi", [OPRF(), TrigRF()], ids=repr)
def test_second_derivatives_of_log_sums(phi, is_causal, small_chunks):
    case = Case(phi, B=1, H=2, L=3, S=3, d=2, dv=1, m=3)
    twice = lambda x, y, v: case(partial_attention, x=x, y=y, v=v, causal=is_causal).logsum
    assert torch.autograd.gradgradcheck(twice, (case.x, case.y, case.v), fast_mode=True)


# Partials, state, baselines, compilation.

def test_merge_is_the_sum():
    g = torch.Generator().manual_seed(0)
    lowest = torch.full((5, 1), -torch.inf)
    a, b, c = (Partial(torch.randn(5, 3, generator=g), torch.rand(5, 1, generator=g), s) for s in
               (lowest, 500 * torch.randn(5, 1, generator=g), 500 * torch.randn(5, 1, generator=g)))
    a = Partial(torch.zeros(5, 3), torch.zeros(5, 1), a.log_scale)  # nothing gathered
    for left, right in ((merge(a, b), b), (merge(b, a), b), (merge(a, a), a), (merge(b, c), merge(c, b)),
                        (merge(merge(a, b), c), merge(a, merge(b, c))), (merge(None, b), b)):
        for p, q in zip(left[:3], right[:3]):
            torch.testing.assert_close(p, q)


def test_state_refuses_other_parameters():
    case = Case(OPRF())
    token = [t[:, :, :1] for t in (case.x, case.y, case.v)]
    state = DecodingState(OPRF(), case.noise, case.params, version=3)
    state.step(*token, version=3)
    with pytest.raises(ValueError, match="belongs to version 3 .*now 4"):
        state.step(*token, version=4)
    case.noise.rows().mul_(2)  # a redraw in place
    with pytest.raises(ValueError, match="start a new state"):
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
    with pytest.raises(ValueError, match="holds 3 sequences but 2 came"):
        step(state, [0, 1], 2)


@pytest.mark.parametrize("f", ["relu", "elu+1", "exp", "sigmoid", "abs", "gelu", "cos", "tanh", "identity"])
def test_generalized_is_its_formula(f):
    functions = {"relu": F.relu, "elu+1": lambda t: F.elu(t) + 1, "gelu": F.gelu, "identity": lambda t: t}
    for projection in (True, False):
        case = Case(Generalized(f=f, projection=projection), S=9, L=9)
        case.noise = case.noise if projection else None
        u, w = (t @ case.noise.rows().mT if projection else t for t in (case.x, case.y))
        phi = lambda t: functions.get(f, getattr(torch, f, None))(t) / t.shape[-1] ** 0.5 + 1e-3
        A = phi(u) @ phi(w).mT
        assert_same([case(), case(normalize=False)], [A @ case.v / A.sum(-1, keepdim=True), A @ case.v], 1e-7)
        assert not case.phi.positive or (A > 0).all()
    with pytest.raises(NotImplementedError, match="no known kernel"):
        case.phi.log_variance(case.x, case.x)


@pytest.mark.parametrize("is_causal", [False, True])
def test_exact_is_softmax(is_causal):
    for options in ({}, {"masked": True}, {"Hkv": 2, "L": 5}):
        case = Case(OPRF(), **options)
        run = lambda f, case=case: f(case.x, case.y, case.v, causal=is_causal, key_mask=case.mask)
        assert_same([run(exact_attention)], [run(softmax_attention)])


def linformer(length, rank, **sizes):
    return Linformer(2, 4, length=length, rank=rank, scaling=1.0, **sizes)


def test_identity_and_linformer():
    case = Case(OPRF(), masked=True, dtype=torch.float32)
    assert torch.equal(identity_attention(case.x, case.y, case.v), case.v)
    layer = linformer(11, 3)
    keep = case.mask[:, None, :, None]
    y, v = layer.key_projection @ (case.y * keep), layer.value_projection @ (case.v * keep)
    assert_same([layer(case.x, case.y, case.v, case.mask)], [softmax_attention(case.x, y, v)], 1e-5)
    layer(case.x, case.y[:, :, :7], case.v[:, :, :7]).sum().backward()
    assert (layer.key_projection.grad[:, 7:] == 0).all() and layer.key_projection.grad[:, :7].abs().min() > 0


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("phi", [OPRF(), *(pytest.param(phi, marks=pytest.mark.slow) for phi in (TrigRF(), GeomRF()))],
                         ids=repr)
def test_compiles_without_graph_breaks(phi, is_causal):
    case = Case(phi, dtype=torch.float32, masked=True)
    count, expected_count = DenominatorCount(), DenominatorCount()
    doubled = lambda x, y, v: 2 * case(x=x, y=y, v=v, causal=is_causal, counter=count)
    function = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    out = function(case.x, case.y, case.v)
    grads = torch.autograd.grad(out, (case.x, case.y, case.v), case.grad)
    expected = case.with_grads(causal=is_causal, counter=expected_count)
    assert_same([out / 2, *(g / 2 for g in grads)], expected, 1e-4)
    assert count.nonpositive == expected_count.nonpositive and count.total == expected_count.total


def test_checkpointed_and_transposed_inputs():
    """Activation checkpointing, inputs that are views, and gradients that are expanded scalars."""
    from torch.utils.checkpoint import checkpoint
    case = Case(OPRF(), masked=True)
    by_token = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
                for t in (case.x, case.y, case.v)]
    for is_causal in (False, True):
        plain = torch.autograd.grad(case(causal=is_causal).sum(), (case.x, case.y, case.v))
        run = lambda x, y, v, c=is_causal: case(x=x, y=y, v=v, causal=c)
        views = torch.autograd.grad(checkpoint(run, *by_token, use_reentrant=False).sum(), by_token)
        assert_same(views, plain)


# Bad input: one clear sentence each.

def call(x=(2, 4, 6, 4), y=None, v=None, noise=None, params=None, phi=None, **options):
    y = x if y is None else y
    v = y if v is None else v
    phi = phi or OPRF(A=-0.1)
    noise = noise if noise is not None else samplers.iid(5, 4)
    return attention(*(torch.zeros(*s) if isinstance(s, tuple) else s for s in (x, y, v)), phi, noise,
                     phi.fit(None) if params is None else params, **options)


BAD = {
    "arbitrary .* mask cannot be linearised": lambda: call(key_mask=torch.ones(2, 1, 6, 6) > 0),
    r"arbitrary .* mask cannot be linearised ?": lambda: call(key_mask=torch.ones(6, 6, 1) > 0),
    "must be boolean": lambda: call(key_mask=torch.ones(2, 6)),
    "2 sequences of 6 keys": lambda: call(key_mask=torch.ones(2, 5) > 0),
    "mask is on meta and the keys are on cpu": lambda: call(key_mask=torch.ones(2, 6, dtype=torch.bool, device="meta")),
    "d = 4 and dv = 0": lambda: call(v=(2, 4, 6, 0)),
    r"x has shape \(4, 6, 4\)": lambda: call(x=(4, 6, 4)),
    "x holds torch.int64": lambda: call(x=torch.zeros(2, 4, 6, 4, dtype=torch.long), y=(2, 4, 6, 4)),
    "x is on meta, y on cpu and v on cpu: all three must be on one device": lambda: call(
        x=torch.zeros(2, 4, 6, 4, device="meta"), y=(2, 4, 6, 4)),
    "x is on cpu, y on cpu and v on meta": lambda: call(v=torch.zeros(2, 4, 6, 4, device="meta")),
    "x is on cpu and y on meta": lambda: Statistics.of(torch.zeros(3, 2), torch.zeros(3, 2, device="meta")),
    "batch sizes 2, 3 and 3": lambda: call(y=(3, 4, 6, 4)),
    "x has d = 4 and y has d = 5": lambda: call(y=(2, 4, 6, 5)),
    "v has .4, 7.": lambda: call(v=(2, 4, 7, 4)),
    "4 query heads cannot share 3 key heads": lambda: call(y=(2, 3, 6, 4)),
    "4 query heads cannot share 8 key heads": lambda: call(y=(2, 8, 6, 4)),
    "neither may be empty": lambda: call(y=(2, 4, 0, 4)),
    "cannot be more of them than keys": lambda: call(y=(2, 4, 5, 4), causal=True),
    "noise has d = 7 but the vectors have d = 4": lambda: call(noise=samplers.iid(5, 7)),
    r"noise has batch \(3,\)": lambda: call(noise=samplers.iid(5, 4, batch=(3,))),
    r"parameter has shape \(3, 1, 1\)": lambda: call(params=OPRF().fit(Statistics.of(*torch.zeros(2, 3, 2, 4)))),
    "noise is a Tensor": lambda: call(noise=torch.zeros(5, 4)),
    "parameter is a float": lambda: call(params=(-0.1,)),
    "denominator = 'eps'": lambda: call(denominator="eps"),
    "float16 ends at 65504": lambda: call(x=torch.full((2, 4, 6, 4), 7e4).half()),
    "float16 ends at 65504 ?": lambda: call(x=torch.full((2, 4, 6, 4), torch.nan), phi=TrigRF(), params=()),
    "float16 ends at 65504  ?": lambda: call(y=torch.full((2, 4, 6, 4), 1e30), x=(2, 4, 6, 4), causal=True),
    "f = 'softplus'": lambda: Generalized(f="softplus"),
    "kernel_epsilon = -1": lambda: Generalized(kernel_epsilon=-1),
    "need a noise": lambda: Generalized().phi_q(torch.zeros(2, 3)),
    "rank = 9": lambda: linformer(8, 9),
    "it cannot be causal": lambda: linformer(8, 2, causal=True)(*torch.zeros(3, 2, 4, 6, 4)),
    "up to 4 keys but 6": lambda: linformer(4, 2)(*torch.zeros(3, 2, 4, 6, 4)),
    "as many of both": lambda: identity_attention(torch.zeros(1, 1, 2, 3), *torch.zeros(2, 1, 1, 4, 3)),
    "takes both of each new token": lambda: DecodingState(PosRF(), samplers.iid(5, 4)).step(
        torch.zeros(1, 1, 1, 4), *torch.zeros(2, 1, 1, 2, 4)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises(ValueError, match=message.strip(" ?")):
        BAD[message]()


def test_every_closed_form_map_is_covered():
    assert {type(m) for m in CLOSED} == {PosRF, HypRF, SMREG, OPRF, SDERF, AutoRF}


@pytest.mark.parametrize("sampler", [samplers.orthogonal, samplers.hadamard], ids=lambda s: s.__name__)
@pytest.mark.parametrize("phi", MAPS + OTHER, ids=repr)
def test_float64_throughout(phi, sampler, monkeypatch):
    """Vectors in float64 with noise in float32: the numbers are those of the same rows in float64,
    wherever they are used."""
    if sampler is samplers.hadamard and isinstance(phi, (PoisRF, GeomRF)):
        pytest.skip("discrete maps refuse approximate samplers")
    monkeypatch.setattr(samplers.noise, "MATRIX_FREE_FROM", 1)
    case, g = Case(phi, scale=0.4), torch.Generator().manual_seed(1)
    coarse = independent(phi, lambda: sampler(16, 4, g, batch=(4,)))
    fine = precise(coarse, torch.float64)
    x, y, v = (t.detach() for t in (case.x, case.y, case.v))
    exact = [attention_reference(x, y, v, phi, fine, case.params, causal=c) for c in (False, True)]
    assert_same([attention(x, y, v, phi, coarse, case.params, causal=c) for c in (False, True)], exact, 1e-12)
    assert_same([attention_reference(x, y, v, phi, coarse, case.params, causal=c) for c in (False, True)], exact, 1e-12)
    state = DecodingState(phi, coarse, case.params)
    steps = [state.step(*(t[:, :, i:i + 1] for t in (x, y, v))) for i in range(11)]
    assert_same([torch.cat(steps, 2)], exact[1:], 1e-12)
    assert_same([phi.phi_k(y, coarse, case.params).exp()], [phi.phi_k(y, fine, case.params).exp()], 1e-12)
    assert phi.phi_q(x.float(), fine, case.params).log_scale.dtype == torch.float32


def test_nested_tuples_keep_their_form_and_what_is_shared():
    A, n, m = torch.ones(1), samplers.iid(2, 3), samplers.iid(2, 3)
    tree = (OPRF(A=-0.1).fit(None)._replace(A=A), (), (None, (n, m)), n)
    assert [id(t) for t in leaves(tree)] == [id(t) for t in (A, n, m, n)]
    doubled = mapped(lambda t: t.to(torch.float64), tree)
    assert type(doubled[0]) is type(tree[0]) and doubled[1] == () and doubled[2][0] is None
    assert doubled[2][1][0] is doubled[3] and doubled[2][1][1] is not doubled[3] and doubled[3].dtype == torch.float64
    assert mapped(lambda t: 1, tree, empty=2) == ((1,), (), (2, (1, 1)), 1)
    assert shared(tree[2], tree[3]) and not shared(tree[0], tree[2])
