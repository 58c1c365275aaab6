"""Derivatives of attention of other kinds than one backward pass: right, or refused."""

import pytest
import torch
from maps import independent
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from crt_exp import samplers
from crt_exp.attention import RandomFeatureAttention, attention, attention_reference
from crt_exp.attention.engines import chunks, native
from crt_exp.features import OPRF, SDERF, GeomRF, HypRF, PoisRF, PoisRFPlus, Statistics, Sum, TrigRF

MAPS = [OPRF(), SDERF(), HypRF(), TrigRF(), GeomRF(), PoisRFPlus(), Sum(TrigRF(), OPRF(), weights=(0.3, 0.7))]
every_map = pytest.mark.parametrize("phi", MAPS, ids=repr)
both_ways = pytest.mark.parametrize("causal", [False, True])
pytestmark = pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")


class Case:
    """Attention of one argument w, whose parts are x (B,H,L,d), y (B,H,L,d) and v (B,H,L,dv),
    and its materialised twin."""

    def __init__(self, phi, causal, dtype=torch.float64, L=7, masked=True):
        g = torch.Generator().manual_seed(0)
        self.w, self.t = ((0.4 * torch.randn(3, 2, 2, L, 3, generator=g, dtype=torch.float64)).to(dtype)
                          for _ in range(2))
        noise = independent(phi, lambda: samplers.orthogonal(16, 3, g, batch=(2,), dtype=torch.float64))
        mask = torch.ones(2, L, dtype=torch.bool)
        mask[1, L - 2:] = not masked
        params = phi.fit(Statistics.of(self.w[0], self.w[1]))
        self.ours, self.reference = (
            lambda w, f=f, **options: f(*w, phi, noise, params, causal=causal, key_mask=mask, **options)
            for f in (attention, attention_reference))

    def both(self, run):
        return run(self.ours), run(self.reference)


def assert_same(both, tolerance=1e-9):
    ours, expected = both
    assert ours.shape == expected.shape and expected.abs().max() > 1e-3
    assert (ours - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 4)
    monkeypatch.setattr(chunks, "WIDE", 4)
    monkeypatch.setattr(chunks, "PIECES", (4, 1))


@both_ways
@every_map
def test_forward_mode(phi, causal):
    """The tangent of the output, once by torch.func and once by a level of dual numbers."""
    case = Case(phi, causal)
    expected = jvp(case.reference, (case.w,), (case.t,))[1]
    assert_same((jvp(case.ours, (case.w,), (case.t,))[1], expected))
    with forward_ad.dual_level():
        assert_same((forward_ad.unpack_dual(case.ours(forward_ad.make_dual(case.w, case.t))).tangent, expected))


@both_ways
@every_map
def test_transforms(phi, causal):
    case = Case(phi, causal)
    loss = lambda f: lambda w: f(w).square().sum()
    many = torch.stack([case.w, -case.w, case.w / 2])
    loop = lambda f, of: torch.stack([of(f)(w) for w in many])
    assert_same(case.both(lambda f: grad(loss(f))(case.w)))
    assert_same((vmap(case.ours)(many), loop(case.reference, lambda f: f)))
    assert_same((vmap(grad(loss(case.ours)))(many), loop(case.reference, lambda f: grad(loss(f)))))
    assert_same(case.both(lambda f: jacrev(f)(case.w)))
    assert_same(case.both(lambda f: jacfwd(f)(case.w)))


@both_ways
@pytest.mark.parametrize("phi", [OPRF(), TrigRF(), GeomRF()], ids=repr)
def test_second_derivatives(phi, causal):
    case = Case(phi, causal, L=3, masked=False)
    loss = lambda f: lambda w: f(w).square().sum()

    for run in (lambda f: hessian(loss(f))(case.w), lambda f: jacrev(jacrev(loss(f)))(case.w)):
        assert_same(case.both(run), 1e-8)


@both_ways
def test_what_closed_forms_cannot_differentiate_is_refused(causal):
    """Second derivatives by autograd, batches of gradients, and gradients with a tangent."""
    case = Case(OPRF(), causal)
    w = case.w.clone().requires_grad_()
    first, = torch.autograd.grad(case.ours(w).square().sum(), w, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        first.sum().backward()
    with pytest.raises(ValueError, match="use torch.func.jacrev"):
        torch.autograd.functional.jacobian(case.ours, case.w, vectorize=True)
    with forward_ad.dual_level(), pytest.raises(ValueError, match="use torch.func.jacrev"):
        out = case.ours(w)
        torch.autograd.grad(out, w, forward_ad.make_dual(out.detach().clone(), out.detach()))


@both_ways
@pytest.mark.parametrize("phi", [OPRF(), TrigRF()], ids=repr)
def test_transforms_in_single_precision(phi, causal):
    """Where the engine in C does the usual work."""
    case, exact = Case(phi, causal, torch.float32), Case(phi, causal)
    of = lambda c, f: jvp(f, (c.w,), (c.t,))[1], lambda c, f: grad(lambda w: f(w).square().sum())(c.w)
    for run in of:
        case.w, case.t = exact.w.float(), exact.t.float()
        assert_same((run(case, case.ours).double(), run(exact, exact.reference)), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("phi", [OPRF(), pytest.param(TrigRF(), marks=pytest.mark.slow)], ids=repr)
def test_compiled_transforms(phi):
    case = Case(phi, True, torch.float32)
    run = torch.compile(lambda w, t: jvp(case.ours, (w,), (t,))[1], backend="aot_eager")
    assert_same((run(case.w, case.t), jvp(case.reference, (case.w,), (case.t,))[1]), 1e-4)


def test_long_keys_underflow_nowhere():
    """A later key that is so large that the earlier rows of its chunk underflow in its scale:
    shorter pieces, here too."""
    case = Case(OPRF(A=-0.05), True, torch.float32, masked=False)
    case.w[1, :, :, 5:] += 9.0
    twin = Case(OPRF(A=-0.05), True, masked=False)
    assert_same((jvp(case.ours, (case.w,), (case.t,))[1].double(),
                 jvp(twin.reference, (case.w.double(),), (case.t.double(),))[1]), 1e-3)
    many = torch.stack([case.w, twin.w.float()])
    assert_same((vmap(case.ours)(many).double(), torch.stack([twin.reference(w.double()) for w in many])), 1e-3)


@pytest.mark.parametrize("phi", [OPRF(), TrigRF()], ids=repr)
def test_inputs_are_checked(phi):
    case = Case(phi, False)
    case.w[0, 0, 0, 3] = torch.nan
    for run in (lambda: jvp(case.ours, (case.w,), (case.t,)), lambda: vmap(case.ours)(case.w[None])):
        with pytest.raises(ValueError, match="NaN, infinity"):
            run()


@pytest.mark.skipif(native.library() is None, reason="no C compiler here, or CRT_EXP_NATIVE=0")
@both_ways
def test_one_backward_pass_stays_with_the_engine(causal, monkeypatch):
    """Also where it is compiled: the plain operations keep features, which this one must not."""
    case = Case(OPRF(), causal, torch.float32)
    monkeypatch.setattr("crt_exp.attention.call.plain", lambda *a: pytest.fail("plain operations"))
    for f in (case.ours, torch.compile(case.ours, backend="aot_eager", fullgraph=True)):
        w = case.w.clone().requires_grad_()
        f(w).sum().backward()
        assert w.grad.isfinite().all()


def test_noise_keeps_nothing_of_a_transform():
    """What a noise computes once would be a tensor of the transform, useless after it."""
    noise = samplers.hadamard(8, 4, torch.Generator().manual_seed(0), batch=(2,))
    x = torch.randn(1, 2, 5, 4)
    f = lambda x: attention(x, x, x, OPRF(A=-0.1), noise, OPRF(A=-0.1).fit(None))
    tangent = jvp(f, (x,), (x,))[1]
    assert not any(torch.func.debug_unwrap(t) is not t for t in vars(noise).values() if isinstance(t, torch.Tensor))
    assert {"_rows", "sq_norm"}.isdisjoint(vars(noise))
    f(x)
    assert {"_rows", "sq_norm"} <= vars(noise).keys()
    torch.testing.assert_close(jvp(f, (x,), (x,))[1], tangent)


@pytest.mark.parametrize("phi", [OPRF(), TrigRF(), PoisRF()], ids=repr)
def test_gradients_of_each_sample(phi):
    """Of a layer that fits its map to each sequence."""
    layer, x = RandomFeatureAttention(phi, samplers.orthogonal, 8, 2, 4).double(), torch.randn(5, 6, 8).double()
    weight = torch.randn(8, 24).double() / 3

    def loss(weight, x):
        q, k, v = (x @ weight).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return layer(q, k, v).square().sum()

    ours = vmap(grad(loss), in_dims=(None, 0))(weight, x[:, None])
    leaf = weight.clone().requires_grad_()
    assert_same((ours, torch.stack([torch.autograd.grad(loss(leaf, row[None]), leaf)[0] for row in x])))


@pytest.mark.filterwarnings("ignore:.*no statistics yet.*:UserWarning")
@pytest.mark.parametrize("options", [{"causal": True}, {"redraw_every": 2}], ids=str)
def test_a_layer_that_would_change_under_a_transform_says_so(options):
    layer = RandomFeatureAttention(OPRF(), samplers.orthogonal, 8, 2, 4, **options).double()
    q = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"eval\(\)"):
        torch.func.grad(lambda q: layer(q, q, q).sum())(q)
    assert torch.func.grad(lambda q: layer.eval()(q, q, q).sum())(q).isfinite().all()
