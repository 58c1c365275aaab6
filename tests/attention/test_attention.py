"""Every engine equals the materialised reference, has the properties of attention, and avoids known defects."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers.attention_cases import BLOCKED, FEW, OTHER, OUTLIER, SHAPES, Case, assert_same
from helpers.covering import in_turn
from helpers.maps import HYBRID, MAPS, independent
from torch.utils._python_dispatch import TorchDispatchMode

from crt_exp import samplers
from crt_exp.attention import (
    DecodingState,
    DenominatorCount,
    Generalized,
    Partial,
    Reformer,
    Window,
    attention,
    attention_reference,
    exact_attention,
    finish,
    identity_attention,
    merge,
    partial_attention,
    partials,
    reference,
    softmax_attention,
    softmax_partial,
)
from crt_exp.attention.engines import chunks
from crt_exp.attention.engines.chunks import chunked_partial
from crt_exp.features import OPRF, SMREG, GeomRF, HypRF, Mixture, PoisRF, PosRF, Statistics, TrigRF
from crt_exp.mechanism import Mechanism
from crt_exp.samplers.noise import match_float64

pytestmark = pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")
both_ways = pytest.mark.parametrize("is_causal", [False, True])

EVERY = [
    *((m, "masked") for m in MAPS + OTHER + [m for m in HYBRID if m.kernel == "softmax"]),
    *in_turn(FEW + OTHER, [shape for shape in SHAPES if shape != "masked"]),
]


@pytest.mark.parametrize("phi, shape", EVERY, ids=repr)
def test_equals_reference(phi, shape, small_chunks):
    """Outputs and gradients, bidirectional and causal, float64."""
    case = Case(phi, **SHAPES[shape])
    for is_causal in (False, True):
        assert_same(
            case.with_grads(causal=is_causal),
            case.with_grads(attention_reference, causal=is_causal),
        )


@pytest.mark.parametrize(
    "options", [{"denominator": "clamp"}, {"denominator": "abs"}, {"normalize": False}], ids=str
)
@pytest.mark.parametrize("phi", [OPRF(), TrigRF(), GeomRF(), Generalized(f="identity")], ids=repr)
def test_treatments_of_denominators_equal_reference(phi, options, small_chunks, monkeypatch):
    for module in (partials, reference):
        monkeypatch.setattr(module, "CLAMP", 0.3)  # so that it acts
    case = Case(phi, masked=True, scale=1.5)
    for is_causal in (False, True):
        options = options | {"causal": is_causal}
        assert_same(
            case.with_grads(**options), case.with_grads(attention_reference, **options), 1e-8
        )


def test_reference_is_the_dense_formula():
    """The reference itself, against diag(A 1)^-1 A V written out."""
    for phi in FEW:
        case = Case(phi, masked=True)
        A = (
            phi.phi_q(case.x, case.noise, case.params).exp()
            @ phi.phi_k(case.y, case.noise, case.params).exp().mT
        )
        for is_causal in (False, True):
            weights = A * case.mask[:, None, None]
            weights = weights.tril() if is_causal else weights
            total = weights.sum(-1, keepdim=True)
            expected = torch.where(
                total == 0, 0.0, weights @ case.v / torch.where(total == 0, 1.0, total)
            )
            assert_same(
                [
                    case(attention_reference, causal=is_causal),
                    case(attention_reference, causal=is_causal, normalize=False),
                ],
                [expected, weights @ case.v],
            )


@pytest.mark.parametrize(
    "phi, is_causal", in_turn([*FEW, PosRF("gaussian"), *BLOCKED], [False, True]), ids=repr
)
def test_gradcheck(phi, is_causal, small_chunks):
    case = Case(phi, B=1, H=1, L=5, S=6, d=2, dv=1, m=3)
    assert torch.autograd.gradcheck(
        lambda *t: case(x=t[0], y=t[1], v=t[2], causal=is_causal),
        (case.x, case.y, case.v),
        fast_mode=True,
    )


@both_ways
def test_exact_is_softmax(is_causal):
    for options in ({}, {"masked": True}, {"Hkv": 2, "L": 5}):
        case = Case(OPRF(), **options)

        def run(f, case=case):
            return f(case.x, case.y, case.v, causal=is_causal, key_mask=case.mask)

        expected = run(softmax_attention)
        assert_same([run(exact_attention), run(softmax_partial).output], [expected, expected])


@pytest.mark.parametrize(
    "f", ["relu", "elu+1", "exp", "sigmoid", "abs", "gelu", "cos", "tanh", "identity"]
)
def test_generalized_is_its_formula(f):
    functions = {
        "relu": F.relu,
        "elu+1": lambda t: F.elu(t) + 1,
        "gelu": F.gelu,
        "identity": lambda t: t,
    }
    for projection in (True, False):
        case = Case(Generalized(f=f, projection=projection), S=9, L=9)
        case.noise = case.noise if projection else None
        u, w = (t @ case.noise.rows().mT if projection else t for t in (case.x, case.y))

        def phi(t):
            return functions.get(f, getattr(torch, f, None))(t) / t.shape[-1] ** 0.5 + 1e-3

        A = phi(u) @ phi(w).mT
        assert_same(
            [case(), case(normalize=False)],
            [A @ case.v / A.sum(-1, keepdim=True), A @ case.v],
            1e-7,
        )
        assert not case.phi.positive or (A > 0).all()


# ---- properties ------------------------------------------------------------------------------------------------------


EARLY_LATE = [
    (1.0, OUTLIER),
    (12.0, 0.05),
]  # large logs are of long keys (trigonometric) or short ones (positive)


@pytest.mark.parametrize(
    "phi, dtype, keys", in_turn(FEW + BLOCKED, [torch.float64, torch.float32], EARLY_LATE), ids=repr
)
def test_future_never_leaks(phi, dtype, keys, small_chunks):
    """Nor does a stabiliser that sees a later outlier: outputs and gradients of the first rows stay as they were."""
    early, late = keys
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
    for t in after[1:]:
        assert (t[:, :, 6:] == 0).all()


@pytest.mark.parametrize("phi, is_causal", in_turn(FEW + BLOCKED + OTHER, [False, True]), ids=repr)
def test_padding_is_truncation(phi, is_causal, small_chunks):
    """Masked keys, NaN and all, are as if they were not there: in outputs, and in gradients (theirs are 0)."""
    case = Case(phi, L=7, S=11)
    short = Case(phi, L=7, S=11)
    keep = slice(0, 7)
    short.y, short.v = (
        short.y[:, :, keep].detach().requires_grad_(),
        short.v[:, :, keep].detach().requires_grad_(),
    )
    if is_causal:  # padding on the left, so that queries and keys stay aligned
        case.x, keep = short.x.detach().requires_grad_(), slice(4, 11)

        def roll(t):
            return torch.cat([t[:, :, 7:], t[:, :, :7]], 2).detach()

        case.y, case.v = roll(case.y), roll(case.v)
    case.mask = torch.zeros(2, 11, dtype=torch.bool)
    case.mask[:, keep] = True
    with torch.no_grad():
        case.y, case.v = (
            t.masked_fill(~case.mask[:, None, :, None], torch.nan).requires_grad_()
            for t in (case.y, case.v)
        )
    out, dx, dy, dv = case.with_grads(causal=is_causal)
    assert_same([out, dx, dy[:, :, keep], dv[:, :, keep]], short.with_grads(causal=is_causal))
    for t in (dy, dv):
        assert (t.masked_fill(case.mask[:, None, :, None], 0) == 0).all()


@both_ways
@pytest.mark.parametrize("phi", [OPRF(), TrigRF()], ids=repr)
def test_rows_without_keys_are_zero_and_have_no_log_sum(phi, is_causal):
    case = Case(phi)
    case.mask = torch.ones(2, 11, dtype=torch.bool)
    case.mask[1], case.mask[0, :3] = False, False
    exact = softmax_partial(case.x, case.y, case.v, causal=is_causal, key_mask=case.mask)
    for rows in (case(partial_attention, causal=is_causal), exact):
        out = rows.output
        logs = rows.logsum
        assert (out[1] == 0).all()
        assert out[0, :, 3:].abs().min() > 0
        actual = (out[0, :, :3] == 0).all()
        assert actual == is_causal
        assert (logs[1] == -torch.inf).all()
        assert logs[0, :, 3:].isfinite().all()
        actual = (logs[0, :, :3] == -torch.inf).all()
        assert actual == is_causal
        grads = torch.autograd.grad(logs.exp().sum() + out.sum(), (case.x, case.y, case.v))
        for g in grads:
            assert g.isfinite().all()
            assert (g[1] == 0).all()
    assert_same([case(causal=is_causal)], [case(partial_attention, causal=is_causal).output])


@pytest.mark.parametrize(
    "phi, is_causal", in_turn([OPRF(), TrigRF(), HypRF(), PoisRF()], [False, True]), ids=repr
)
def test_converges_to_softmax(phi, is_causal):
    """Error against exact softmax attention falls as m^(-1/2)."""
    errors = []
    for m in (64, 4096):
        case = Case(phi, m=m, scale=0.4, B=4, L=12, S=12)
        exact = softmax_attention(case.x, case.y, case.v, causal=is_causal)
        errors.append((case(causal=is_causal) - exact).square().mean().sqrt())
    assert 4 < errors[0] / errors[1] < 16  # 8 in expectation
    assert errors[1] < 0.05


@both_ways
@pytest.mark.parametrize("phi", [OPRF(), TrigRF()], ids=repr)
def test_no_feature_matrix_is_kept(phi, is_causal, engine, monkeypatch):
    """What is saved for the backward pass is the size of the inputs, plus one number a row and states."""
    monkeypatch.setattr(chunks, "MAX_SAVED", 0)  # as for long sequences
    case = Case(phi, B=1, H=2, L=2048, S=2048, m=128, dtype=torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        case(causal=is_causal)
    assert max(kept) < 2 * 2048 * 128 / 4
    assert sum(kept) < 2 * 2048 * 128


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor with 128 columns that is computed."""

    found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.shape[-1:] == (128,):
                self.found = max(self.found, t.numel())
        return out


@both_ways
def test_defect_number_of_chunks_taken_for_their_size(is_causal):
    """No tensor of features grows with the length of the sequence, and no chunk is as small as a part of it."""
    sizes = []
    for length in (2048, 8192):
        case = Case(PosRF(), B=1, H=2, L=length, S=length, m=128, dtype=torch.float32)
        largest = Largest()
        inputs = (case.x, case.y, case.v, case.phi, case.noise, case.params)
        with largest, torch.no_grad():
            chunked_partial(*inputs, is_causal, None, False)
        sizes.append(largest.found)
    assert sizes[0] == sizes[1] < 2**21


# ---- numbers ---------------------------------------------------------------------------------------------------------


HALVES = [(torch.float32, 1e-4), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)]


def in_float64(case):
    """The case with the same rounded vectors."""
    exact = copy.copy(case)
    exact.x, exact.y, exact.v, exact.grad = (
        t.detach().double().requires_grad_() for t in (case.x, case.y, case.v, case.grad)
    )
    return exact


@pytest.mark.parametrize(
    "phi, rounding, is_causal",
    in_turn([OPRF(), HypRF(), PoisRF(), TrigRF()], HALVES, [False, True], each=2),
    ids=repr,
)
def test_half_precision_rounds_inputs_and_outputs_alone(phi, rounding, is_causal, small_chunks):
    """The output has the dtype of the values."""
    dtype, tolerance = rounding
    case = Case(phi, dtype=dtype, scale=0.3)
    ours = case.with_grads(causal=is_causal)
    for t in ours:
        assert t.dtype == dtype
    assert_same(ours, in_float64(case).with_grads(attention_reference, causal=is_causal), tolerance)


@pytest.mark.parametrize("phi", [OPRF(), TrigRF()], ids=repr)
def test_autocast_changes_nothing(phi, engine):
    case = Case(phi, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = case()
    ours = [out, *torch.autograd.grad(out, (case.x, case.y, case.v), case.grad)]
    assert_same(ours, case.with_grads(), 1e-6)


@pytest.mark.parametrize(
    "phi, rounding, is_causal",
    in_turn(
        [OPRF(), PosRF(), SMREG(), OPRF(antithetic=True), TrigRF()],
        [(torch.float32, 3e-3), (torch.bfloat16, 2e-2)],
        [False, True],
    ),
    ids=repr,
)
def test_scores_of_a_thousand_are_exact(phi, rounding, is_causal, small_chunks, engine):
    dtype, tolerance = rounding
    case = Case(phi, L=16, S=16, scale=13.0, dtype=dtype)
    assert (case.x @ case.y.mT).abs().max() > 1e3
    ours = case.with_grads(causal=is_causal)
    expected = in_float64(case).with_grads(attention_reference, causal=is_causal)
    for t in ours:
        assert t.isfinite().all()
    if (
        phi != TrigRF()
    ):  # float32 holds phases of thousands to 1e-4 only, and cancellation takes the rest
        assert_same(ours[:1], expected[:1], tolerance)
        # half precision rounds the output, from which these gradients, nearly 0, are subtracted
        if dtype == torch.float32:
            assert_same(ours[1:], expected[1:], 10 * tolerance)


@pytest.mark.parametrize(
    "phi, sampler",
    [
        *in_turn([PoisRF(), GeomRF()], [samplers.orthogonal]),
        *in_turn(
            [m for m in FEW + OTHER if not isinstance(m, (GeomRF, Mixture))],
            [samplers.orthogonal, samplers.hadamard],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_float64_throughout(phi, sampler, monkeypatch):
    """Vectors in float64 with noise in float32: the numbers are those of the same rows in float64."""
    monkeypatch.setattr(samplers.noise, "MATRIX_FREE_FROM", 1)
    case = Case(phi, scale=0.4)
    coarse = independent(phi, lambda: sampler(16, 4, torch.Generator().manual_seed(1), batch=(4,)))
    case.noise = match_float64(coarse, torch.float64)
    exact = [case(attention_reference, causal=c).detach() for c in (False, True)]
    case.noise = coarse
    for function in (attention, attention_reference):
        assert_same([case(function, causal=c) for c in (False, True)], exact, 1e-12)
    state = DecodingState(phi, coarse, case.params)
    state.take(case.y[:, :, :6], case.v[:, :, :6])
    steps = []
    for a, b in ((6, 10), (10, 11)):
        steps.append(state.step(*(t[:, :, a:b] for t in (case.x, case.y, case.v))))
    assert_same([torch.cat(steps, 2)], [exact[1][:, :, 6:]], 1e-12)


# ---- partials --------------------------------------------------------------------------------------------------------


def logsum_reference(x, y, v, phi, noise, params, causal=False, key_mask=None):
    """log of the row sums of the kernel matrix written out, a row without keys left at 0."""
    kernel = (
        phi.phi_q(x.double(), noise, params).exp() @ phi.phi_k(y.double(), noise, params).exp().mT
    )
    kernel = kernel if key_mask is None else kernel * key_mask[:, None, None]
    total = (kernel.tril(y.shape[2] - x.shape[2]) if causal else kernel).sum(-1, keepdim=True)
    return torch.where(total == 0, 1.0, total).abs().log()


def with_logsum(case, function, is_causal, weight):
    """Outputs, log-sums (0 where there are none), and the gradients of a loss of both."""
    if function is logsum_reference:
        groups = case.heads // case.y.shape[1]
        out = case(attention_reference, causal=is_causal)
        logs = case(logsum_reference, y=case.y.repeat_interleave(groups, 1), causal=is_causal)
    else:
        rows = case(function, causal=is_causal)
        out = rows.output
        logs = rows.logsum
    logs = torch.where(logs == -torch.inf, 0.0, logs)
    loss = (out.double() * case.grad.double()).sum() + (logs.double() * weight).sum()
    return [out, logs, *torch.autograd.grad(loss, (case.x, case.y, case.v))]


@pytest.mark.parametrize(
    "phi, is_causal, shape",
    in_turn([*FEW, OTHER[0]], [False, True], ["self", "masked", "grouped", "shared"]),
    ids=repr,
)
def test_log_sums_and_their_gradients(phi, shape, is_causal, small_chunks):
    case = Case(phi, **SHAPES[shape])
    weight = torch.randn(case.x.shape[:3], dtype=torch.float64).unsqueeze(-1)
    assert_same(
        *(with_logsum(case, f, is_causal, weight) for f in (partial_attention, logsum_reference))
    )


@both_ways
@pytest.mark.parametrize("phi", [OPRF(), Mixture()], ids=repr)
def test_log_sums_in_single_precision(phi, is_causal, engine):
    case = Case(phi, B=1, L=150, S=150, d=8, m=16, masked=True, dtype=torch.float32)
    weight = torch.randn(1, 4, 150, 1, dtype=torch.float64)
    assert_same(
        with_logsum(case, partial_attention, is_causal, weight),
        with_logsum(in_float64(case), logsum_reference, is_causal, weight),
        2e-5,
    )


def in_parts(case, at, is_causal, policy="none", near=False):
    """Attention to keys [0, at) and to the rest, merged. near: the first part exactly, by softmax.

    Causal: queries of the first part see their own keys alone, the others all of them and, causally, those of their
    own part.
    """
    clamp = policy == "clamp"

    def keep(span):
        return None if case.mask is None else case.mask[:, span]

    def gather(queries, keys, exact, causal):
        x = case.x[:, :, queries]
        y = case.y[:, :, keys]
        v = case.v[:, :, keys]
        if exact:
            return softmax_partial(x, y, v, causal=causal, key_mask=keep(keys))
        return partial_attention(
            x,
            y,
            v,
            case.phi,
            case.noise,
            case.params,
            causal=causal,
            key_mask=keep(keys),
            modulus=clamp,
        )

    L = case.x.shape[2]
    S = case.y.shape[2]
    first = slice(0, at)
    rest = slice(at, S)
    if not is_causal:
        return finish(
            merge(gather(slice(0, L), first, near, False), gather(slice(0, L), rest, False, False)),
            policy,
        )
    cut = max(0, at - (S - L))  # queries of the first part
    late = slice(cut, L)
    out = finish(merge(gather(late, first, near, False), gather(late, rest, False, True)), policy)
    return (
        out
        if not cut
        else torch.cat([finish(gather(slice(0, cut), first, near, True), policy), out], 2)
    )


@pytest.mark.parametrize(
    "phi, is_causal, shape",
    in_turn(
        [Mixture(), OPRF(antithetic=True), TrigRF(), GeomRF(), FEW[-1], OTHER[0]],
        [False, True],
        ["self", "masked", "grouped"],
    ),
    ids=repr,
)
def test_parts_of_keys_merge_to_the_whole(phi, shape, is_causal, small_chunks):
    """Cut at any place: outputs and gradients."""
    case = Case(phi, **SHAPES[shape])
    for policy in ("none", "clamp") if phi in (TrigRF(), GeomRF()) else ("none",):
        whole = case.with_grads(causal=is_causal, denominator=policy)
        for at in range(1, case.y.shape[2], 3):
            out = in_parts(case, at, is_causal, policy)
            assert_same(
                [out, *torch.autograd.grad(out, (case.x, case.y, case.v), case.grad)], whole, 1e-8
            )


@both_ways
@pytest.mark.parametrize("phi", [OPRF(), TrigRF()], ids=repr)
def test_features_join_an_exact_block(phi, is_causal, small_chunks):
    """The near keys exactly, the far ones by features: the dense formula, and its gradients."""
    case = Case(phi, masked=True)
    at = 4
    out = in_parts(case, at, is_causal, near=True)
    kernel = (
        phi.phi_q(case.x, case.noise, case.params).exp()
        @ phi.phi_k(case.y, case.noise, case.params).exp().mT
    )
    weights = (
        torch.cat([(case.x @ case.y.mT).exp()[..., :at], kernel[..., at:]], -1)
        * case.mask[:, None, None]
    )
    weights = weights.tril() if is_causal else weights
    total = weights.sum(-1, keepdim=True)
    expected = weights @ case.v / torch.where(total == 0, 1.0, total)

    def of(t):
        return [
            t,
            *torch.autograd.grad(t, (case.x, case.y, case.v), case.grad, retain_graph=True),
        ]

    assert_same(of(out), of(expected))


def test_merge_is_the_sum():
    g = torch.Generator().manual_seed(0)
    lowest = torch.full((5, 1), -torch.inf)
    a, b, c = (
        Partial(torch.randn(5, 3, generator=g), torch.rand(5, 1, generator=g), s)
        for s in (
            lowest,
            500 * torch.randn(5, 1, generator=g),
            500 * torch.randn(5, 1, generator=g),
        )
    )
    a = Partial(torch.zeros(5, 3), torch.zeros(5, 1), a.log_scale)  # nothing gathered
    for left, right in (
        (merge(a, b), b),
        (merge(b, a), b),
        (merge(a, a), a),
        (merge(b, c), merge(c, b)),
        (merge(merge(a, b), c), merge(a, merge(b, c))),
        (merge(None, b), b),
    ):
        for p, q in zip(left[:3], right[:3]):
            torch.testing.assert_close(p, q)


# ---- defects of known code, and denominators that are not positive ---------------------------------------------------


def test_defect_mask_zeroes_only_values():
    case = Case(OPRF(), masked=True)
    wrong = attention(
        case.x, case.y, case.v * case.mask[:, None, :, None], case.phi, case.noise, case.params
    )
    right = case(attention_reference)
    assert_same([case()], [right])
    assert (wrong - right).norm() > 0.2 * right.norm()  # the test has power


@pytest.mark.parametrize(
    "phi, early, late",
    [(OPRF(A=-0.1), 20.0, 0.1), (TrigRF(), 1.0, OUTLIER), (GeomRF(p=0.5), 1e-9, 1.0)],
)
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


@both_ways
def test_defect_epsilon_in_features(is_causal):
    """Kernel values of e^-300 weigh as they should: long keys in the direction away from the query."""
    case = Case(PosRF(), B=1, H=1, L=3, S=3, scale=0.2)
    shift = torch.tensor([20.0, 0, 0, 0], dtype=torch.float64)
    far = case(y=case.y + shift, x=case.x - shift, causal=is_causal)
    assert_same(
        [far], [case(attention_reference, y=case.y + shift, x=case.x - shift, causal=is_causal)]
    )
    assert (far - case.v.mean(2, keepdim=True)).abs().max() > 1e-2


def test_defect_keys_reweighted_by_their_own_maxima():
    """A constant added to every key's logs, or to those of one query, changes nothing; one added to one key's does."""

    class Shifted(PosRF):
        by_key = 0.0
        by_query = 0.0

        def bind(self, noise, params=()):
            plain = super().bind(noise, params)

            def add(f, c):
                return f._replace(log_scale=f.log_scale + c)

            return plain._replace(
                phi_q=lambda x: add(plain.phi_q(x), self.by_query),
                phi_k=lambda y: add(plain.phi_k(y), self.by_key),
            )

    case = Case(Shifted())

    def run():
        return [
            chunked_partial(
                case.x, case.y, case.v, case.phi, case.noise, case.params, is_causal, None, False
            ).output
            for is_causal in (False, True)
        ]

    before = run()
    Shifted.by_key, Shifted.by_query = 300.0, torch.linspace(-500, 500, 11)[:, None]
    assert_same(run(), before)
    Shifted.by_key = torch.linspace(0, 1, 11)[:, None]
    assert (run()[0] - before[0]).abs().max() > 1e-2


def test_defect_scaled_twice():
    """x = d^(-1/4) q gives softmax(q k^T / sqrt d): the usual scale of torch."""
    case = Case(OPRF(), d=16, dv=8)
    x = case.x * 16**-0.25
    y = case.y * 16**-0.25
    usual = F.scaled_dot_product_attention(case.x, case.y, case.v)
    assert_same([exact_attention(x, y, case.v), softmax_attention(x, y, case.v)], [usual, usual])


def test_defect_statistics_over_padding():
    case = Case(OPRF(), masked=True)
    padded = case.y.detach().masked_fill(~case.mask[:, None, :, None], 1e4)
    mask = case.mask[:, None].expand(-1, 4, -1)
    A = [OPRF().fit(Statistics.of(case.x, y, y_mask=mask)).A for y in (case.y, padded)]
    assert torch.equal(*A)


def test_denominators_are_counted_and_guarded():
    case = Case(TrigRF(), B=8, L=32, S=32, scale=2.5, m=4)
    kernel = TrigRF().phi_q(case.x, case.noise).exp() @ TrigRF().phi_k(case.y, case.noise).exp().mT
    for is_causal in (False, True):
        sums = (kernel.tril() if is_causal else kernel).sum(-1, keepdim=True)
        numerator = (kernel.tril() if is_causal else kernel) @ case.v
        count = DenominatorCount()
        out = case(causal=is_causal, counter=count)
        assert count.nonpositive == (sums <= 0).sum() > 0
        assert count.total == sums.numel()
        assert_same(
            [out, case(causal=is_causal, denominator="abs")],
            [numerator / sums, numerator / sums.abs()],
            1e-5,
        )
    count.reset()
    assert count.fraction == 0


def test_clamp_bounds_the_output():
    """A denominator that cancels to nothing is kept at CLAMP of its terms' absolute values."""
    p = Partial(
        torch.ones(3, 1),
        torch.tensor([[1.0], [0.0], [-1e-9]]),
        torch.zeros(3, 1),
        modulus=torch.ones(3, 1),
    )
    actual = finish(p, "clamp").tolist()
    expected = [
        [1.0],
        *([pytest.approx(s / partials.CLAMP)] for s in (1, -1)),
    ]
    assert actual == expected


@pytest.mark.filterwarnings("default:.*denominators are not positive:RuntimeWarning")
def test_nonpositive_denominators_are_not_silent():
    case = Case(TrigRF(), B=8, L=32, S=32, scale=2.5, m=4)
    with pytest.warns(RuntimeWarning, match="of 1024 denominators <= 0"):
        case()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case(counter=DenominatorCount()), Case(OPRF())()


# ---- bad input -------------------------------------------------------------------------------------------------------


def call(x=(2, 4, 6, 4), y=None, v=None, noise=None, params=None, phi=None, **options):
    y = x if y is None else y
    v = y if v is None else v
    phi = phi or OPRF(A=-0.1)
    noise = noise if noise is not None else samplers.iid(5, 4)
    return attention(
        *(torch.zeros(*s) if isinstance(s, tuple) else s for s in (x, y, v)),
        phi,
        noise,
        phi.fit(None) if params is None else params,
        **options,
    )


BAD = {
    "pairwise masks": lambda: call(key_mask=torch.ones(2, 1, 6, 6) > 0),
    r"x \(4, 6, 4\)": lambda: call(x=(4, 6, 4)),
    "torch.int64: expected floating-point": lambda: call(
        x=torch.zeros(2, 4, 6, 4, dtype=torch.long), y=(2, 4, 6, 4)
    ),
    "x is on cpu, v is on meta": lambda: call(v=torch.zeros(2, 4, 6, 4, device="meta")),
    "kv_heads=3: expected a divisor of heads=4": lambda: call(y=(2, 3, 6, 4)),
    "expected L <= S": lambda: call(y=(2, 4, 5, 4), causal=True),
    "d=7, .* with d=4": lambda: call(noise=samplers.iid(5, 7)),
    r"parameter \(3, 1, 1\)": lambda: call(
        params=OPRF().fit(Statistics.of(*torch.zeros(2, 3, 2, 4)))
    ),
    "bfloat16 or float32": lambda: call(x=torch.full((2, 4, 6, 4), 7e4).half()),
    "window attention needs L == S": lambda: Window(2, 4)(
        torch.zeros(2, 2, 8, 4), *torch.zeros(2, 2, 2, 5, 4)
    ),
    "attention=window: does not use m=8": lambda: Mechanism.of("window", m=8),
    "buckets=5: expected 1 or an even": lambda: Reformer(2, 4, buckets=5),
    "use_cache=False": lambda: Reformer(2, 4)(torch.zeros(2, 2, 5, 4), *torch.zeros(2, 2, 2, 8, 4)),
    "needs L == S": lambda: identity_attention(
        torch.zeros(1, 1, 2, 3), *torch.zeros(2, 1, 1, 4, 3)
    ),
    "needs equal numbers": lambda: DecodingState(PosRF(), samplers.iid(5, 4)).step(
        torch.zeros(1, 1, 1, 4), *torch.zeros(2, 1, 1, 2, 4)
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises(ValueError, match=message.strip(" ?")):
        BAD[message]()
