"""Every engine equals the materialised reference, and obeys the laws of attention."""

import pytest
import torch
from attention_cases import BLOCKED, CLOSED, FEW, OTHER, OUTLIER, SHAPES, Case, assert_same
from covering import in_turn
from maps import HYBRID, MAPS, independent

from crt_exp import samplers
from crt_exp.attention import DecodingState, DenominatorCount, attention, attention_reference, softmax_attention
from crt_exp.attention.engines import chunks, closed_form
from crt_exp.features import OPRF, SDERF, SMREG, AutoRF, GeomRF, HypRF, Mixture, PoisRF, PosRF, TrigRF
from crt_exp.samplers.noise import leaves, map_leaves, match_float64, share_leaf

pytestmark = pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")


EVERY = [*((m, "masked") for m in MAPS + HYBRID + OTHER),
         *in_turn(FEW + OTHER, [shape for shape in SHAPES if shape != "masked"], each=2)]


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


@pytest.mark.parametrize("phi, is_causal", in_turn(MAPS + HYBRID, [False, True]), ids=repr)
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


# ---- laws ------------------------------------------------------------------------------------------------------------


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


EARLY_LATE = [(1.0, OUTLIER), (12.0, 0.05)]  # large logs are of long keys (trigonometric) or short ones (positive)


@pytest.mark.parametrize("phi, dtype, keys", in_turn(
    [*FEW, *(pytest.param(phi, marks=pytest.mark.slow) for phi in (HYBRID[0], HYBRID[2]))],
    [torch.float64, torch.float32], EARLY_LATE, each=2), ids=repr)
def test_future_never_changes_the_past(phi, dtype, keys, small_chunks):
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
    assert all((t[:, :, 6:] == 0).all() for t in after[1:])


@pytest.mark.parametrize("phi, is_causal", in_turn(FEW + BLOCKED + OTHER, [False, True]), ids=repr)
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


# ---- numbers ---------------------------------------------------------------------------------------------------------


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
            out = case()
        ours = [out, *torch.autograd.grad((out * case.grad).sum(), (case.x, case.y, case.v))]
        assert_same(ours, plain, 1e-6)


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

    def spy(kind, name, size):
        real = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *args, **options: taken.append(size(*args)) or real(*args, **options))

    spy(chunks.Chunked, "step", lambda work, x, *_: x.shape[2])
    spy(closed_form.Segments, "piece", lambda tile, piece, *_: piece.stop - piece.start)
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
        assert 1 <= min(taken) < 40


DISCRETE = [m for m in MAPS if isinstance(m, (PoisRF, GeomRF))]  # they refuse approximate samplers


@pytest.mark.parametrize("phi, sampler", [*in_turn(DISCRETE, [samplers.orthogonal]), *in_turn(
    [m for m in MAPS + OTHER if m not in DISCRETE], [samplers.orthogonal, samplers.hadamard])],
    ids=lambda value: getattr(value, "__name__", str(value)))
def test_float64_throughout(phi, sampler, monkeypatch):
    """Vectors in float64 with noise in float32: the numbers are those of the same rows in float64,
    wherever they are used."""
    monkeypatch.setattr(samplers.noise, "MATRIX_FREE_FROM", 1)
    case, g = Case(phi, scale=0.4), torch.Generator().manual_seed(1)
    coarse = independent(phi, lambda: sampler(16, 4, g, batch=(4,)))
    fine = match_float64(coarse, torch.float64)
    x, y, v = (t.detach() for t in (case.x, case.y, case.v))
    exact = [attention_reference(x, y, v, phi, fine, case.params, causal=c) for c in (False, True)]
    assert_same([attention(x, y, v, phi, coarse, case.params, causal=c) for c in (False, True)], exact, 1e-12)
    assert_same([attention_reference(x, y, v, phi, coarse, case.params, causal=c) for c in (False, True)], exact, 1e-12)
    state = DecodingState(phi, coarse, case.params)
    steps = [state.step(*(t[:, :, i:i + 1] for t in (x, y, v))) for i in range(11)]
    assert_same([torch.cat(steps, 2)], exact[1:], 1e-12)
    assert_same([phi.phi_k(y, coarse, case.params).exp()], [phi.phi_k(y, fine, case.params).exp()], 1e-12)
    assert phi.phi_q(x.float(), fine, case.params).log_scale.dtype == torch.float32


# ---- graphs ----------------------------------------------------------------------------------------------------------


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


def test_every_closed_form_map_is_covered():
    assert {type(m) for m in CLOSED} == {PosRF, HypRF, SMREG, OPRF, SDERF, AutoRF, Mixture}


def test_nested_tuples_keep_their_form_and_what_is_shared():
    A, n, m = torch.ones(1), samplers.iid(2, 3), samplers.iid(2, 3)
    tree = (OPRF(A=-0.1).fit(None)._replace(A=A), (), (None, (n, m)), n)
    assert [id(t) for t in leaves(tree)] == [id(t) for t in (A, n, m, n)]
    doubled = map_leaves(lambda t: t.to(torch.float64), tree)
    assert type(doubled[0]) is type(tree[0]) and doubled[1] == () and doubled[2][0] is None
    assert doubled[2][1][0] is doubled[3] and doubled[2][1][1] is not doubled[3] and doubled[3].dtype == torch.float64
    assert map_leaves(lambda t: 1, tree, empty=2) == ((1,), (), (2, (1, 1)), 1)
    assert share_leaf(tree[2], tree[3]) and not share_leaf(tree[0], tree[2])
