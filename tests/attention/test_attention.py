"""Every engine equals the materialised reference, has the properties of attention, and avoids known defects."""

import pytest
import torch
import torch.nn.functional as F
from helpers.attention_cases import (
    BLOCKED,
    FEW,
    OTHER,
    OUTLIER,
    SHAPES,
    Case,
    assert_same,
    in_float64,
)
from helpers.covering import in_turn
from helpers.kernel_estimates import estimate_kernel
from helpers.maps import HYBRID, MAPS, independent
from helpers.seeds import seeded
from torch.utils._python_dispatch import TorchDispatchMode

from crt_exp import samplers
from crt_exp.attention import (
    DecodingState,
    Generalized,
    Reformer,
    Window,
    attention,
    attention_reference,
    exact_attention,
    identity_attention,
    partials,
    reference,
    softmax_attention,
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
    "options",
    [
        {"denominator": "clamp"},
        {"denominator": "abs"},
        {"normalize": False},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "phi",
    [
        OPRF(),
        TrigRF(),
        GeomRF(),
        Generalized(f="identity"),
    ],
    ids=repr,
)
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
        A = estimate_kernel(phi, case.x, case.y, case.noise, case.params)
        for is_causal in (False, True):
            weights = A * case.mask[:, None, None]
            if is_causal:
                weights = weights.tril()
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
        case.inputs,
        fast_mode=True,
    )


@both_ways
def test_exact_is_softmax(is_causal):
    cases = [
        {},
        {"masked": True},
        {"Hkv": 2, "L": 5},
    ]
    for options in cases:
        case = Case(OPRF(), **options)

        def run(f, case=case):
            return f(*case.inputs, causal=is_causal, key_mask=case.mask)

        expected = run(softmax_attention)
        assert_same([run(exact_attention)], [expected])


@pytest.mark.parametrize("projection", [True, False])
@pytest.mark.parametrize(
    "f", ["relu", "elu+1", "exp", "sigmoid", "abs", "gelu", "cos", "tanh", "identity"]
)
def test_generalized_is_its_formula(f, projection):
    functions = {
        "relu": F.relu,
        "elu+1": lambda t: F.elu(t) + 1,
        "gelu": F.gelu,
        "identity": lambda t: t,
    }
    function = functions.get(f) or getattr(torch, f)
    case = Case(Generalized(f=f, projection=projection), S=9, L=9)
    u = case.x
    w = case.y
    if projection:
        u = u @ case.noise.rows().mT
        w = w @ case.noise.rows().mT
    else:
        case.noise = None
    size = u.shape[-1] ** 0.5
    A = (function(u) / size + 1e-3) @ (function(w) / size + 1e-3).mT
    actual = [case(), case(normalize=False)]
    assert_same(actual, [A @ case.v / A.sum(-1, keepdim=True), A @ case.v], 1e-7)
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
        cases = [
            (case.x, -3.0),
            (case.y, late),
            (case.v, 100.0),
        ]
        for t, change in cases:
            t[:, :, 6:] *= change
    after = case.with_grads(causal=True)
    tolerance = 1e-3
    if dtype == torch.float64:
        tolerance = 1e-10
    actual = [t[:, :, past] for t in after]
    expected = [t[:, :, past] for t in before]
    assert_same(actual, expected, tolerance)
    for t in after[1:]:
        assert (t[:, :, 6:] == 0).all()


@pytest.mark.parametrize("phi, is_causal", in_turn(FEW + BLOCKED + OTHER, [False, True]), ids=repr)
def test_padding_is_truncation(phi, is_causal, small_chunks):
    """Masked keys, NaN and all, are as if they were not there: in outputs, and in gradients (theirs are 0)."""
    case = Case(phi, L=7, S=11)
    short = Case(phi, L=7, S=11)
    keep = slice(0, 7)
    short.y = short.y[:, :, keep].detach().requires_grad_()
    short.v = short.v[:, :, keep].detach().requires_grad_()
    if is_causal:  # padding on the left, so that queries and keys stay aligned
        case.x = short.x.detach().requires_grad_()
        keep = slice(4, 11)

        def roll(t):
            return torch.cat([t[:, :, 7:], t[:, :, :7]], 2).detach()

        case.y = roll(case.y)
        case.v = roll(case.v)
    case.mask = torch.zeros(2, 11, dtype=torch.bool)
    case.mask[:, keep] = True
    padding = ~case.mask[:, None, :, None]
    case.y = case.y.detach().masked_fill(padding, torch.nan).requires_grad_()
    case.v = case.v.detach().masked_fill(padding, torch.nan).requires_grad_()
    out, dx, dy, dv = case.with_grads(causal=is_causal)
    expected = short.with_grads(causal=is_causal)
    assert_same([out, dx, dy[:, :, keep], dv[:, :, keep]], expected)
    for t in (dy, dv):
        assert (t.masked_fill(case.mask[:, None, :, None], 0) == 0).all()


@both_ways
@pytest.mark.parametrize("phi", [OPRF(), TrigRF()], ids=repr)
def test_rows_without_keys_are_zero(phi, is_causal):
    case = Case(phi)
    case.mask = torch.ones(2, 11, dtype=torch.bool)
    case.mask[1], case.mask[0, :3] = False, False
    out = case(causal=is_causal)
    assert (out[1] == 0).all()
    actual = out[0, :, 3:].abs().min()
    assert actual > 0
    actual = (out[0, :, :3] == 0).all()
    assert actual == is_causal
    grads = torch.autograd.grad(out.sum(), (case.x, case.y, case.v))
    for g in grads:
        assert g.isfinite().all()
        assert (g[1] == 0).all()


@pytest.mark.parametrize(
    "phi, is_causal", in_turn([OPRF(), TrigRF(), HypRF(), PoisRF()], [False, True]), ids=repr
)
def test_converges_to_softmax(phi, is_causal):
    """Error against exact softmax attention falls as m^(-1/2)."""
    errors = []
    for m in (64, 4096):
        case = Case(phi, m=m, scale=0.4, B=4, L=12, S=12)
        exact = softmax_attention(*case.inputs, causal=is_causal)
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
        inputs = (*case.inputs, case.phi, case.noise, case.params)
        with largest, torch.no_grad():
            chunked_partial(*inputs, is_causal, None, False)
        sizes.append(largest.found)
    assert sizes[0] == sizes[1] < 2**21


# ---- numbers ---------------------------------------------------------------------------------------------------------


HALVES = [
    (torch.float32, 1e-4),
    (torch.bfloat16, 3e-2),
    (torch.float16, 5e-3),
]


@pytest.mark.parametrize(
    "phi, rounding, is_causal",
    in_turn([OPRF(), HypRF(), PoisRF(), TrigRF()], HALVES, [False, True], times=2),
    ids=repr,
)
def test_half_precision_rounds_inputs_and_outputs_alone(phi, rounding, is_causal, small_chunks):
    """The output has the dtype of the values."""
    dtype, tolerance = rounding
    case = Case(phi, dtype=dtype, scale=0.3)
    ours = case.with_grads(causal=is_causal)
    for t in ours:
        assert t.dtype == dtype
    expected = in_float64(case).with_grads(attention_reference, causal=is_causal)
    assert_same(ours, expected, tolerance)


@pytest.mark.parametrize("phi", [OPRF(), TrigRF()], ids=repr)
def test_autocast_changes_nothing(phi, engine):
    case = Case(phi, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = case()
    ours = [out, *torch.autograd.grad(out, case.inputs, case.grad)]
    assert_same(ours, case.with_grads(), 1e-6)


@pytest.mark.parametrize(
    "phi, rounding, is_causal",
    in_turn(
        [
            OPRF(),
            PosRF(),
            SMREG(),
            OPRF(antithetic=True),
            TrigRF(),
        ],
        [(torch.float32, 3e-3), (torch.bfloat16, 2e-2)],
        [False, True],
    ),
    ids=repr,
)
def test_scores_of_a_thousand_are_exact(phi, rounding, is_causal, small_chunks, engine):
    dtype, tolerance = rounding
    case = Case(phi, L=16, S=16, scale=13.0, dtype=dtype)
    actual = (case.x @ case.y.mT).abs().max()
    assert actual > 1e3
    ours = case.with_grads(causal=is_causal)
    expected = in_float64(case).with_grads(attention_reference, causal=is_causal)
    for t in ours:
        assert t.isfinite().all()
    # float32 holds phases of thousands to 1e-4 only, and cancellation takes the rest
    if phi != TrigRF():
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
    coarse = independent(phi, lambda: sampler(16, 4, seeded(1), batch=(4,)))
    case.noise = match_float64(coarse, torch.float64)
    exact = []
    for c in (False, True):
        exact.append(case(attention_reference, causal=c).detach())
    case.noise = coarse
    for function in (attention, attention_reference):
        actual = []
        for c in (False, True):
            actual.append(case(function, causal=c))
        assert_same(actual, exact, 1e-12)
    state = DecodingState(phi, coarse, case.params)
    state.take(case.y[:, :, :6], case.v[:, :, :6])
    steps = []
    for first, last in ((6, 10), (10, 11)):
        steps.append(state.step(*case.tokens(first, last)))
    actual = [torch.cat(steps, 2)]
    assert_same(actual, [exact[1][:, :, 6:]], 1e-12)


# ---- bad input -------------------------------------------------------------------------------------------------------


def call(
    x=(2, 4, 6, 4),
    y=None,
    v=None,
    noise=None,
    params=None,
    phi=None,
    **options,
):
    if y is None:
        y = x
    if v is None:
        v = y
    phi = phi or OPRF(A=-0.1)
    if noise is None:
        noise = samplers.iid(5, 4)
    if params is None:
        params = phi.fit(None)
    vectors = []
    for given in (x, y, v):
        vectors.append(torch.zeros(given) if isinstance(given, tuple) else given)
    return attention(*vectors, phi, noise, params, **options)


BAD = {
    "pairwise masks": lambda: call(key_mask=torch.ones(2, 1, 6, 6) > 0),
    r"x \(4, 6, 4\)": lambda: call(x=(4, 6, 4)),
    "torch.int64 on cpu: expected floating-point": lambda: call(
        x=torch.zeros(2, 4, 6, 4, dtype=torch.long), y=(2, 4, 6, 4)
    ),
    "v .*on meta: .* on one device": lambda: call(v=torch.zeros(2, 4, 6, 4, device="meta")),
    "where Hkv divides H": lambda: call(y=(2, 3, 6, 4)),
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
