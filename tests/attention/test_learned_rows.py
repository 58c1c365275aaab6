"""Gradients to rows and parameters: those of the reference, and without features that are kept."""

import pytest
import torch
from covering import in_turn
from torch.testing import assert_close

from crt_exp.attention import attention, attention_reference, partial_attention
from crt_exp.attention.engines import chunks
from crt_exp.features import GERF, OPRF, SDERF, Hedgehog, HypRF, PosRF, Statistics
from crt_exp.samplers import iid
from crt_exp.samplers.noise import DenseNoise, leaves, map_leaves

B, H, L, d, m = 2, 2, 300, 4, 8


class Learned:
    """Queries, keys, values, rows and parameters that are all to get a gradient. heads: of rows; 0 is one for all.
    masked: with NaN in the padding."""

    def __init__(self, phi, length=L, heads=0, dtype=torch.float64, masked=False):
        g = torch.Generator().manual_seed(0)
        x, y, v = (torch.randn(B, H, length, d, generator=g, dtype=torch.float64).mul_(0.5) for _ in range(3))
        params, self.mask = phi.fit(Statistics.of(x, y)), None
        noise = phi.noise(m, lambda p: iid(p.m, d, g, (heads,) if heads else ()))
        if masked:
            self.mask = torch.rand(B, length, generator=g) < 0.7
            y, v = (t.masked_fill(~self.mask[:, None, :, None], torch.nan) for t in (y, v))
        self.x, self.y, self.v = (t.to(dtype).requires_grad_() for t in (x, y, v))
        self.phi, self.noise = phi, map_leaves(lambda n: DenseNoise(n.rows().to(dtype, copy=True).requires_grad_(),
                                                                    True),
                                               noise)
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
def test_gradients_are_those_of_the_reference(phi, causal, masked, heads):
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


@pytest.mark.parametrize("phi", [OPRF(), Hedgehog(), GERF(s=1, A=-0.05)], ids=repr)
@pytest.mark.parametrize("causal", [False, True])
def test_of_log_sums(phi, causal, keep_at_most):
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


@pytest.mark.parametrize("causal", [False, True])
def test_compiled_and_by_transforms(causal):
    case = Learned(OPRF())
    rows = case.noise.rows()

    def loss(rows, A):
        noise = DenseNoise(rows, True)
        return attention(case.x, case.y, case.v, case.phi, noise, type(case.params)(A), causal=causal).square().sum()

    expected = torch.autograd.grad(loss(rows, *case.params), [rows, *case.params])
    assert_close(torch.func.grad(loss, (0, 1))(rows.detach(), case.params.A.detach()), expected)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert_close(torch.autograd.grad(compiled(rows, *case.params), [rows, *case.params]), expected)


def test_of_a_parameter_alone():
    """As learn=parameters has it: the rows stay."""
    case = Learned(OPRF())
    expected = torch.autograd.grad(case.of(attention_reference).square().sum(), case.params.A)
    case.noise.rows().requires_grad_(False)
    assert_close(torch.autograd.grad(case.of().square().sum(), case.params.A), expected)


@pytest.mark.parametrize("phi", [OPRF(), Hedgehog()], ids=repr)
@pytest.mark.parametrize("causal", [False, True])
def test_no_features_are_kept(phi, causal, keep_at_most):
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
