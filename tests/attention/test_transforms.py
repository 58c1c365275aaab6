"""Attention beyond one backward pass to its vectors: other derivatives, also to rows and parameters, and export."""

import pytest
import torch
from helpers import native_cases
from helpers.attention_cases import Case, assert_same, set_chunks
from helpers.covering import in_turn
from helpers.native_cases import needs_library
from helpers.seeds import seeded
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.testing import assert_close

from crt_exp import samplers
from crt_exp.attention import (
    RandomFeatureAttention,
    attention,
    attention_reference,
)
from crt_exp.attention.engines import chunks
from crt_exp.features import (
    GERF,
    OPRF,
    SDERF,
    SMREG,
    AutoRF,
    ClusteredHybrid,
    GeomRF,
    Hedgehog,
    HypRF,
    MaternRF,
    Mixture,
    PoisRF,
    PoisRFPlus,
    PosRF,
    RationalQuadraticRF,
    Statistics,
    Sum,
    TrigRF,
)
from crt_exp.samplers.noise import DenseNoise

MAPS = [
    OPRF(),
    SDERF(),
    HypRF(),
    TrigRF(),
    GeomRF(),
    PoisRFPlus(),
    Sum(TrigRF(), OPRF(), weights=(0.3, 0.7)),
]
every_map = pytest.mark.parametrize("phi, causal", in_turn(MAPS, [False, True]), ids=repr)
both_ways = pytest.mark.parametrize("causal", [False, True])
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Pair:
    """Attention of one argument w, whose parts are x, y and v (B,H,L,d), and its materialised twin."""

    def __init__(self, phi, causal, dtype=torch.float64, L=7, masked=True):
        case = Case(phi, B=2, H=2, L=L, S=L, d=3, dv=3, m=16, scale=0.4)
        self.w = torch.stack([case.x, case.y, 0.4 * case.v]).detach().to(dtype)
        self.t = 0.4 * torch.randn(self.w.shape, dtype=torch.float64).to(dtype)
        if masked:
            case.mask = torch.ones(2, L, dtype=torch.bool)
            case.mask[1, L - 2 :] = False
        self.ours = lambda w: case(attention, *w, causal=causal)
        self.reference = lambda w: case(attention_reference, *w, causal=causal)

    def both(self, run):
        return run(self.ours), run(self.reference)


def assert_pair(both, tolerance=1e-9):
    assert both[1].abs().max() > 1e-3
    assert_same(both[:1], both[1:], tolerance)


def loss(function):
    return lambda w: function(w).square().sum()


@pytest.fixture
def four(monkeypatch):
    """Chunks of four tokens."""
    set_chunks(monkeypatch, 4)


@every_map
def test_forward_mode(phi, causal, four):
    """The tangent of the output, once by torch.func and once by a level of dual numbers."""
    case = Pair(phi, causal)
    expected = jvp(case.reference, (case.w,), (case.t,))[1]
    assert_pair((jvp(case.ours, (case.w,), (case.t,))[1], expected))
    with forward_ad.dual_level():
        out = case.ours(forward_ad.make_dual(case.w, case.t))
        assert_pair((forward_ad.unpack_dual(out).tangent, expected))


@every_map
def test_transforms(phi, causal, four):
    case = Pair(phi, causal)
    many = torch.stack([case.w, -case.w, case.w / 2])

    def looped(function):
        return torch.stack([function(w) for w in many])

    our_gradient = grad(loss(case.ours))
    gradient = grad(loss(case.reference))
    assert_pair((our_gradient(case.w), gradient(case.w)))
    assert_pair((vmap(case.ours)(many), looped(case.reference)))
    assert_pair((vmap(our_gradient)(many), looped(gradient)))
    assert_pair(case.both(lambda f: jacrev(f)(case.w)))
    assert_pair(case.both(lambda f: jacfwd(f)(case.w)))


@pytest.mark.parametrize(
    "phi, causal", in_turn([OPRF(), TrigRF(), GeomRF()], [True, False]), ids=repr
)
def test_second_derivatives(phi, causal, four):
    case = Pair(phi, causal, L=3, masked=False)
    assert_pair(case.both(lambda f: hessian(loss(f))(case.w)), 1e-8)
    assert_pair(case.both(lambda f: jacrev(jacrev(loss(f)))(case.w)), 1e-8)


@needs_library
@both_ways
def test_second_derivatives_of_engines_are_refused(causal):
    """Second derivatives by autograd, batches of gradients, and gradients with a tangent."""
    case = Pair(OPRF(), causal, torch.float32)
    w = case.w.clone().requires_grad_()
    (first,) = torch.autograd.grad(case.ours(w).square().sum(), w, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        first.sum().backward()
    with pytest.raises(ValueError, match="use torch.func.jacrev"):
        torch.autograd.functional.jacobian(case.ours, case.w, vectorize=True)
    with forward_ad.dual_level(), pytest.raises(ValueError, match="use torch.func.jacrev"):
        out = case.ours(w)
        torch.autograd.grad(out, w, forward_ad.make_dual(out.detach().clone(), out.detach()))


def test_long_keys_underflow_nowhere(four):
    """A later key that is so large that the earlier rows of its chunk underflow in its scale:
    shorter pieces, here too."""
    case = Pair(OPRF(A=-0.05), True, torch.float32, masked=False)
    case.w[1, :, :, 5:] += 9.0
    twin = Pair(OPRF(A=-0.05), True, masked=False)
    tangent = jvp(case.ours, (case.w,), (case.t,))[1]
    expected = jvp(twin.reference, (case.w.double(),), (case.t.double(),))[1]
    assert_pair((tangent.double(), expected), 1e-3)
    many = torch.stack([case.w, twin.w.float()])
    actual = vmap(case.ours)(many)
    expected = torch.stack([twin.reference(w.double()) for w in many])
    assert_pair((actual.double(), expected), 1e-3)


@pytest.mark.parametrize("phi", [OPRF(), TrigRF()], ids=repr)
def test_inputs_are_checked(phi):
    case = Pair(phi, False)
    case.w[0, 0, 0, 3] = torch.nan
    cases = [
        lambda: jvp(case.ours, (case.w,), (case.t,)),
        lambda: vmap(case.ours)(case.w[None]),
    ]
    for run in cases:
        with pytest.raises(ValueError, match="NaN, infinity"):
            run()


@needs_library
@both_ways
def test_one_backward_pass_uses_the_engine(causal, monkeypatch):
    """Also where it is compiled: the plain operations keep features, which this one must not."""
    case = Pair(OPRF(), causal, torch.float32)
    monkeypatch.setattr(
        "crt_exp.attention.feature_attention.chunked_partial",
        lambda *a: pytest.fail("plain operations"),
    )
    functions = [case.ours]
    if causal:
        functions.append(torch.compile(case.ours, backend="aot_eager", fullgraph=True))
    for f in functions:
        w = case.w.clone().requires_grad_()
        f(w).sum().backward()
        assert w.grad.isfinite().all()


def test_noise_keeps_nothing_of_a_transform():
    """What a noise computes once would be a tensor of the transform, useless after it."""
    noise = samplers.hadamard(8, 4, seeded(), batch=(2,))
    x = torch.randn(1, 2, 5, 4)

    def f(x):
        return attention(x, x, x, OPRF(A=-0.1), noise, OPRF(A=-0.1).fit(None))

    tangent = jvp(f, (x,), (x,))[1]
    assert not any(
        torch.func.debug_unwrap(t) is not t
        for t in vars(noise).values()
        if isinstance(t, torch.Tensor)
    )
    f(x)
    actual = jvp(f, (x,), (x,))[1]
    assert_close(actual, tangent)


@pytest.mark.parametrize(
    "phi",
    [
        OPRF(),
        PoisRF(),
        GERF(),
        GERF(s=-1),
    ],
    ids=repr,
)
def test_gradients_of_each_sample(phi):
    """Of a layer that fits its map to each sequence."""
    layer = RandomFeatureAttention(phi, samplers.orthogonal, 8, 2, 4).double()
    x = torch.randn(5, 6, 8).double()
    weight = torch.randn(8, 24).double() / 3

    def loss(weight, x):
        q, k, v = (x @ weight).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return layer(q, k, v).square().sum()

    ours = vmap(grad(loss), in_dims=(None, 0))(weight, x[:, None])
    leaf = weight.clone().requires_grad_()
    alone = []
    for row in x:
        alone += torch.autograd.grad(loss(leaf, row[None]), leaf)
    assert_pair((ours, torch.stack(alone)))


@pytest.mark.parametrize(
    "phi",
    [
        OPRF(),
        GERF(),
        SDERF(),
        PoisRF(),
        GeomRF(),
        MaternRF(),
        RationalQuadraticRF(),
    ],
    ids=repr,
)
def test_fits_and_features_of_each_sample(phi):
    x, y = torch.randn(2, 3, 6, 4, generator=seeded()).double()
    noise = phi.noise(8, lambda p: samplers.orthogonal(p.m, 4, dtype=torch.float64))

    def features(x, y):
        return phi.phi_k(y, noise, phi.fit(Statistics.of(x, y))).exp()

    def variances(x, y):
        return phi.log_variance(x, y, phi.fit(Statistics.of(x, y)))

    cases = [features, variances, grad(lambda x, y: features(y, x).sum())]
    for function in cases:
        alone = torch.stack([function(*pair) for pair in zip(x, y)])
        actual = vmap(function)(x, y)
        assert_close(actual, alone)


@pytest.mark.parametrize(
    "phi, words",
    [
        (AutoRF(), "fitted to vectors: torch.func cannot trace"),
        (ClusteredHybrid(), "fitted to vectors: torch.func cannot trace"),
        (Mixture(size=4), "fitted to vectors: torch.func cannot trace"),
        (SMREG(), "features=smreg: torch.func cannot trace"),
    ],
    ids=repr,
)
def test_maps_that_transforms_cannot_trace_are_refused(phi, words):
    x = torch.randn(3, 6, 4, dtype=torch.float64)

    def variance(x):
        return phi.log_variance(x, x, phi.fit(Statistics.of(x, x)))

    with pytest.raises(ValueError, match=words) as caught:
        vmap(variance)(x)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.filterwarnings("ignore:.*no statistics yet.*:UserWarning")
@pytest.mark.parametrize("options", [{"causal": True}, {"redraw_every": 2}], ids=str)
def test_training_mode_is_refused_under_a_transform(options):
    layer = RandomFeatureAttention(OPRF(), samplers.orthogonal, 8, 2, 4, **options).double()
    q = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"eval\(\)"):
        torch.func.grad(lambda q: layer(q, q, q).sum())(q)
    layer.eval()
    gradient = torch.func.grad(lambda q: layer(q, q, q).sum())(q)
    assert gradient.isfinite().all()


# ---- gradients to rows and parameters --------------------------------------------------------------------------------


B = 2
H = 2
L = 150
d = 4
m = 8


@pytest.mark.parametrize(
    "phi, causal, masked",
    in_turn(
        [
            PosRF(),
            HypRF(),
            OPRF(),
            OPRF(antithetic=True),
            SDERF(),
            Hedgehog(),
        ],
        [False, True],
        [False, True],
        times=2,
    ),
    ids=repr,
)
def test_gradients_to_rows_and_parameters_are_those_of_the_reference(phi, causal, masked):
    case = native_cases.Case(phi, L=150, S=150, masked=masked, learned=True)
    actual = case.run(torch.float64, causal)
    expected = case.run(torch.float64, causal, function=attention_reference)
    assert_same(actual, expected)


@pytest.mark.parametrize("most", [2**30, 0])
@pytest.mark.parametrize(
    "phi, causal",
    in_turn(
        [
            OPRF(),
            Hedgehog(),
            GERF(s=1, A=-0.05),
        ],
        [True, False],
    ),
    ids=repr,
)
def test_gradients_of_stored_and_of_recomputed_features(phi, causal, most, monkeypatch):
    monkeypatch.setattr(chunks, "MAX_SAVED", most)
    case = native_cases.Case(phi, L=150, S=150, learned=True)
    actual = case.run(torch.float64, causal)
    assert_same(actual, case.run(torch.float64, causal, function=attention_reference))


def test_gradients_to_rows_compiled_and_by_transforms():
    case = Case(OPRF())
    rows = case.noise.rows().requires_grad_()
    (A,) = case.params

    def loss(rows, A):
        noise = DenseNoise(rows, True)
        params = type(case.params)(A)
        return attention(*case.inputs, case.phi, noise, params, causal=True).square().sum()

    A = A.detach().requires_grad_()
    expected = torch.autograd.grad(loss(rows, A), [rows, A])
    actual = torch.func.grad(loss, (0, 1))(rows.detach(), A.detach())
    assert_same(actual, expected)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    actual = torch.autograd.grad(compiled(rows, A), [rows, A])
    assert_same(actual, expected)
