"""Attention beyond one backward pass to its vectors: other derivatives, also to rows and parameters, and export."""

import io

import pytest
import torch
from attention_cases import set_chunks
from covering import in_turn
from maps import independent
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.testing import assert_close

from crt_exp import samplers
from crt_exp.attention import RandomFeatureAttention, attention, attention_reference, partial_attention
from crt_exp.attention.engines import chunks, native
from crt_exp.features import (GERF, OPRF, SDERF, AngularHybrid, ClusteredHybrid, GeomRF, Hedgehog, HypRF, PoisRF,
                              PoisRFPlus, PosRF, Statistics, Sum, TrigRF)
from crt_exp.samplers.noise import DenseNoise, leaves, map_leaves

MAPS = [OPRF(), SDERF(), HypRF(), TrigRF(), GeomRF(), PoisRFPlus(), Sum(TrigRF(), OPRF(), weights=(0.3, 0.7))]
every_map = pytest.mark.parametrize("phi, causal", in_turn(MAPS, [False, True]), ids=repr)
both_ways = pytest.mark.parametrize("causal", [False, True])
pytestmark = [pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning"),
              pytest.mark.filterwarnings("ignore::DeprecationWarning")]


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


@pytest.fixture
def four(monkeypatch):
    """Chunks of four tokens."""
    set_chunks(monkeypatch, 4)


@every_map
def test_forward_mode(phi, causal, four):
    """The tangent of the output, once by torch.func and once by a level of dual numbers."""
    case = Case(phi, causal, four)
    expected = jvp(case.reference, (case.w,), (case.t,))[1]
    assert_same((jvp(case.ours, (case.w,), (case.t,))[1], expected))
    with forward_ad.dual_level():
        assert_same((forward_ad.unpack_dual(case.ours(forward_ad.make_dual(case.w, case.t))).tangent, expected))


@every_map
def test_transforms(phi, causal, four):
    case = Case(phi, causal, four)
    loss = lambda f: lambda w: f(w).square().sum()
    many = torch.stack([case.w, -case.w, case.w / 2])
    loop = lambda f, of: torch.stack([of(f)(w) for w in many])
    assert_same(case.both(lambda f: grad(loss(f))(case.w)))
    assert_same((vmap(case.ours)(many), loop(case.reference, lambda f: f)))
    assert_same((vmap(grad(loss(case.ours)))(many), loop(case.reference, lambda f: grad(loss(f)))))
    assert_same(case.both(lambda f: jacrev(f)(case.w)))
    assert_same(case.both(lambda f: jacfwd(f)(case.w)))


@pytest.mark.parametrize("phi, causal", in_turn([OPRF(), TrigRF(), GeomRF()], [True, False]), ids=repr)
def test_second_derivatives(phi, causal, four):
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


@pytest.mark.parametrize("phi, causal", in_turn([OPRF(), TrigRF()], [True, False]), ids=repr)
def test_transforms_in_single_precision(phi, causal, four):
    """Where the engine in C does the usual work."""
    case, exact = Case(phi, causal, torch.float32), Case(phi, causal, four)
    of = lambda c, f: jvp(f, (c.w,), (c.t,))[1], lambda c, f: grad(lambda w: f(w).square().sum())(c.w)
    for run in of:
        case.w, case.t = exact.w.float(), exact.t.float()
        assert_same((run(case, case.ours).double(), run(exact, exact.reference)), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("phi", [OPRF(), TrigRF()], ids=repr)
def test_compiled_transforms(phi):
    case = Case(phi, True, torch.float32)
    run = torch.compile(lambda w, t: jvp(case.ours, (w,), (t,))[1], backend="aot_eager")
    assert_same((run(case.w, case.t), jvp(case.reference, (case.w,), (case.t,))[1]), 1e-4)


def test_long_keys_underflow_nowhere(four):
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


@pytest.mark.parametrize("phi", [OPRF(), PoisRF()], ids=repr)
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


# ---- gradients to rows and parameters --------------------------------------------------------------------------------


B, H, L, d, m = 2, 2, 150, 4, 8


class Learned:
    """Queries, keys, values, rows and parameters that are all to get a gradient. heads: of rows; 0 is one for all.
    masked: with NaN in the padding."""

    def __init__(self, phi, length=L, heads=0, dtype=torch.float64, masked=False):
        g = torch.Generator().manual_seed(0)
        x, y, v = (torch.randn(B, H, length, d, generator=g, dtype=torch.float64).mul_(0.5) for _ in range(3))
        params, self.mask = phi.fit(Statistics.of(x, y)), None
        noise = phi.noise(m, lambda p: samplers.iid(p.m, d, g, (heads,) if heads else ()))
        if masked:
            self.mask = torch.rand(B, length, generator=g) < 0.7
            y, v = (t.masked_fill(~self.mask[:, None, :, None], torch.nan) for t in (y, v))
        self.x, self.y, self.v = (t.to(dtype).requires_grad_() for t in (x, y, v))
        learned = lambda n: DenseNoise(n.rows().to(dtype, copy=True).requires_grad_(), True)
        self.phi, self.noise = phi, map_leaves(learned, noise)
        self.params = map_leaves(lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), params)

    def of(self, function=attention, **options):
        return function(self.x, self.y, self.v, self.phi, self.noise, self.params, key_mask=self.mask, **options)

    @property
    def wanted(self):
        given = [self.x, self.y, self.v, *(n.rows() for n in leaves(self.noise)), *leaves(self.params)]
        return [t for t in given if t.requires_grad]


@pytest.fixture
def keep_at_most(monkeypatch):
    """Sets how many numbers autograd keeps of a call at most."""
    def at_most(numbers):
        monkeypatch.setattr(chunks, "MAX_SAVED", numbers)
    return at_most


@pytest.mark.parametrize("phi, causal, masked, heads", in_turn(
    [PosRF(), HypRF(), OPRF(), OPRF(antithetic=True), SDERF(), Hedgehog()], [False, True], [False, True], [0, H],
    each=2), ids=repr)
def test_gradients_to_rows_and_parameters_are_those_of_the_reference(phi, causal, masked, heads):
    """Of float64 and, in C where there is a compiler, of float32."""
    found = []
    for function, dtype in ((attention_reference, torch.float64), (attention, torch.float64),
                            (attention, torch.float32)):
        case = Learned(phi, heads=heads, dtype=dtype, masked=masked)
        out = case.of(function, causal=causal)
        found.append([out, *torch.autograd.grad(out.square().sum(), case.wanted)])
    assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)
    for ours, exact in zip(found[2], found[0]):
        assert (ours - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("phi, causal", in_turn([OPRF(), Hedgehog(), GERF(s=1, A=-0.05)], [True, False]), ids=repr)
def test_gradients_of_log_sums_to_rows_and_parameters(phi, causal, keep_at_most):
    """Those of partials, by features that are computed again and by features that are kept."""
    found = []
    for most in (2**30, 0):
        keep_at_most(most)
        case = Learned(phi)
        rows = case.of(partial_attention, causal=causal)
        found.append(torch.autograd.grad(rows.output.square().sum() + rows.logsum.sum(), case.wanted))
    case = Learned(phi)
    pairs = phi.phi_q(case.x, case.noise, case.params).exp() @ phi.phi_k(case.y, case.noise, case.params).exp().mT
    pairs = pairs.tril() if causal else pairs
    sums = pairs.sum(-1, keepdim=True)
    found.append(torch.autograd.grad((pairs @ case.v / sums).square().sum() + sums.log().sum(), case.wanted))
    assert_close(found[0], found[2], rtol=1e-9, atol=1e-11)
    assert_close(found[1], found[2], rtol=1e-9, atol=1e-11)


def test_gradients_to_rows_compiled_and_by_transforms():
    causal = True
    case = Learned(OPRF())
    rows = case.noise.rows()

    def loss(rows, A):
        noise = DenseNoise(rows, True)
        return attention(case.x, case.y, case.v, case.phi, noise, type(case.params)(A), causal=causal).square().sum()

    expected = torch.autograd.grad(loss(rows, *case.params), [rows, *case.params])
    assert_close(torch.func.grad(loss, (0, 1))(rows.detach(), case.params.A.detach()), expected)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert_close(torch.autograd.grad(compiled(rows, *case.params), [rows, *case.params]), expected)


def test_gradients_to_a_parameter_alone():
    """The rows stay, as learn=parameters has it."""
    case = Learned(OPRF())
    expected = torch.autograd.grad(case.of(attention_reference).square().sum(), case.params.A)
    case.noise.rows().requires_grad_(False)
    assert_close(torch.autograd.grad(case.of().square().sum(), case.params.A), expected)


@pytest.mark.parametrize("phi, causal", in_turn([OPRF(), Hedgehog()], [True, False], each=2), ids=repr)
def test_no_features_are_kept_for_learned_rows(phi, causal, keep_at_most):
    """Twice the tokens cost no more than their own inputs and outputs, and a state for each chunk."""
    def kept(length):
        case, held = Learned(phi, length), {}
        hold = lambda t: held.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) and t
        with torch.autograd.graph.saved_tensors_hooks(hold, lambda t: t):
            case.of(causal=causal)
        return sum(held.values())

    features = 8 * B * H * L * m
    assert phi == OPRF() or kept(2 * L) - kept(L) > features     # few features: autograd keeps them
    keep_at_most(0)
    token = 8 * B * H * L
    assert kept(2 * L) - kept(L) < 6 * d * token


# ---- torch.export and torch.jit.trace --------------------------------------------------------------------------------


LENGTHS = (150, 2, 7, 127, 128, 129, 300)


def qkv(length, heads=2):
    g = torch.Generator().manual_seed(length)
    return tuple(torch.randn(2, heads, length, 4, generator=g) / 3 for _ in range(3))


def mask(length):
    return torch.rand(2, length, generator=torch.Generator().manual_seed(length)) > 0.3


class Attend(torch.nn.Module):
    def __init__(self, phi, causal):
        super().__init__()
        self.phi, self.causal, self.params = phi, causal, phi.fit(None)
        self.noise = samplers.orthogonal(8, 4, torch.Generator().manual_seed(0), batch=(2,))

    def forward(self, x, y, v, key_mask):
        return attention(x, y, v, self.phi, self.noise, self.params, causal=self.causal, key_mask=key_mask)


def exported(module, *inputs, open_length=True, strict=False):
    """The program, saved and read again."""
    length = torch.export.Dim("length", min=2, max=8192)
    shapes = tuple({t.ndim - 2 if t.ndim == 4 else 1: length} for t in inputs) if open_length else None
    program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=strict)
    operators = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert not any("crt_exp" in name for name in operators)  # it runs where this package is not
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


def check_lengths(module, *more, causal, strict=False):
    """In both directions one program serves every length; a causal one serves its own."""
    program = None if causal else exported(module, *qkv(150), *(f(150) for f in more), strict=strict)
    for length in (150,) if causal else LENGTHS:
        inputs = *qkv(length), *(f(length) for f in more)
        run = exported(module, *inputs, open_length=False, strict=strict) if causal else program
        torch.testing.assert_close(run(*inputs), module(*inputs), rtol=1e-3, atol=1e-5)


@pytest.mark.slow                     # of the fast ones that of the layer, below, takes the same way
@both_ways
@pytest.mark.parametrize("phi", [OPRF(A=-0.1), TrigRF()], ids=repr)
def test_attention_exports(phi, causal):
    module = Attend(phi, causal)
    check_lengths(module, mask, causal=causal)
    assert "sq_norm" not in vars(module.noise)  # nothing of the export stays


@pytest.mark.parametrize("phi, causal", in_turn([OPRF()], [True, False]) + [
    pytest.param(phi, causal, marks=pytest.mark.slow) for causal in (False, True)
    for phi in (TrigRF(), SDERF(), AngularHybrid(n=2), ClusteredHybrid())], ids=repr)
def test_layer_exports(phi, causal):
    layer = RandomFeatureAttention(phi, samplers.orthogonal, 8, 2, 4, causal=causal, fit_steps=1)
    if layer.running or phi.on_vectors:
        layer(*qkv(40)), layer(*qkv(50))
    layer.eval()
    check_lengths(layer, causal=causal, strict=phi == SDERF())
    assert isinstance(layer.denominators.nonpositive, int)


def test_causal_attention_with_an_open_length_is_refused():
    with pytest.raises((ValueError, RuntimeError, torch._dynamo.exc.UserError)):
        exported(Attend(OPRF(A=-0.1), True), *qkv(150), mask(150))


@pytest.mark.slow
def test_exported_attention_of_growing_keys_is_exact():
    """Chunks whose largest key features differ by e^300: the past is exact whatever comes later."""
    module = Attend(PosRF(), True)
    x, y, v = qkv(600)
    y = y + torch.linspace(0, 1, 600).square()[:, None] * 8
    program = exported(module, *qkv(600), mask(600), open_length=False)
    keep = torch.ones(2, 600, dtype=torch.bool)
    torch.testing.assert_close(program(x, y, v, keep), module(x, y, v, keep), rtol=1e-2, atol=1e-4)


@pytest.mark.slow
def test_underflow_within_a_chunk_stops_the_program():
    module = Attend(OPRF(A=-0.05), True)
    x, y, v = qkv(200)
    y[:, :, :60] += 20.0
    program, keep = exported(module, *qkv(200), mask(200), open_length=False), torch.ones(2, 200, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="outweighs"):
        program(x, y, v, keep)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@both_ways
def test_positive_maps_can_be_traced(causal):
    """torch.jit.trace calls the operators, whatever the length."""
    module = Attend(OPRF(A=-0.1), causal).eval()
    traced = torch.jit.trace(module, (*qkv(150), mask(150)), check_trace=False)
    for length in LENGTHS:
        torch.testing.assert_close(traced(*qkv(length), mask(length)), module(*qkv(length), mask(length)))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("phi, causal", in_turn([TrigRF(), GeomRF(p=0.6)], [False, True]), ids=repr)
def test_other_maps_cannot_be_traced(phi, causal):
    with pytest.raises(ValueError, match="use torch.export.export"):
        torch.jit.trace(Attend(phi, causal).eval(), (*qkv(30), mask(30)), check_trace=False)
