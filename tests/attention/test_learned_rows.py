"""Gradients to rows and parameters: those of the reference, and without features that are kept."""

import pytest
import torch
from covering import in_turn
from torch.testing import assert_close

from crt_exp.attention import attention, attention_reference, partial_attention
from crt_exp.attention.engines import chunks
from crt_exp.features import OPRF, SDERF, HypRF, PosRF, Statistics, TrigRF
from crt_exp.nested import leaves, mapped
from crt_exp.samplers import iid
from crt_exp.samplers.noise import DenseNoise

B, H, L, d, m = 2, 2, 300, 4, 8


class Learned:
    """Queries, keys, values, rows and parameters that are all to get a gradient. heads: of rows; 0 is one for all."""

    def __init__(self, phi, length=L, heads=0, dtype=torch.float64):
        g = torch.Generator().manual_seed(0)
        x, y, v = (torch.randn(B, H, length, d, generator=g, dtype=torch.float64).mul_(0.5) for _ in range(3))
        params = phi.fit(Statistics.of(x, y))
        self.x, self.y, self.v = (t.to(dtype).requires_grad_() for t in (x, y, v))
        self.phi, self.rows = phi, iid(m, d, g, (heads,) if heads else ()).rows().to(dtype).requires_grad_()
        self.params = mapped(lambda t: t.detach().clone().requires_grad_(), params)
        self.mask = torch.rand(B, length, generator=g) < 0.7

    def of(self, function=attention, **options):
        return function(self.x, self.y, self.v, self.phi, DenseNoise(self.rows, True), self.params, **options)

    @property
    def wanted(self):
        return [self.x, self.y, self.v, self.rows, *leaves(self.params)]


@pytest.mark.parametrize("phi, causal, masked, heads", in_turn(
    [PosRF(), HypRF(), OPRF(), OPRF(antithetic=True), SDERF()], [False, True], [False, True], [0, H], each=2), ids=repr)
def test_gradients_are_those_of_the_reference(phi, causal, masked, heads):
    """Of float64 and, in C where there is a compiler, of float32; and the second derivatives."""
    found = []
    for function, dtype in ((attention_reference, torch.float64), (attention, torch.float64),
                            (attention, torch.float32)):
        case = Learned(phi, heads=heads, dtype=dtype)
        out = case.of(function, causal=causal, key_mask=case.mask if masked else None)
        gradients = torch.autograd.grad(out.square().sum(), case.wanted, create_graph=dtype == torch.float64)
        found.append([out, *gradients])
        if dtype == torch.float64:
            found[-1] += torch.autograd.grad(sum(t.square().sum() for t in gradients), case.wanted)
    assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)
    for ours, exact in zip(found[2], found[0]):
        assert (ours - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("phi", [OPRF(), TrigRF()], ids=repr)
@pytest.mark.parametrize("causal", [False, True])
def test_of_log_sums(phi, causal, monkeypatch):
    """Those of partials, by features that are computed again and by features that are kept."""
    found = []
    for most in (2**30, 0):
        monkeypatch.setattr(chunks, "ELEMENTS", most)
        case = Learned(phi)
        rows = case.of(partial_attention, causal=causal)
        found.append(torch.autograd.grad(rows.output.square().sum() + rows.logsum.sum(), case.wanted))
    case = Learned(phi)
    keys = case.phi.phi_k(case.y, DenseNoise(case.rows, True), case.params).exp()
    pairs = case.phi.phi_q(case.x, DenseNoise(case.rows, True), case.params).exp() @ keys.mT
    pairs = pairs.tril() if causal else pairs
    sums = pairs.sum(-1, keepdim=True)
    found.append(torch.autograd.grad((pairs @ case.v / sums).square().sum() + sums.log().sum(), case.wanted))
    assert_close(found[0], found[2], rtol=1e-9, atol=1e-11)
    assert_close(found[1], found[2], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
def test_compiled_and_by_transforms(causal):
    case = Learned(OPRF())

    def loss(rows, A):
        noise = DenseNoise(rows, True)
        return attention(case.x, case.y, case.v, case.phi, noise, type(case.params)(A), causal=causal).square().sum()

    expected = torch.autograd.grad(loss(case.rows, *case.params), [case.rows, *case.params])
    assert_close(torch.func.grad(loss, (0, 1))(case.rows.detach(), case.params.A.detach()), expected)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert_close(torch.autograd.grad(compiled(case.rows, *case.params), [case.rows, *case.params]), expected)


def test_of_a_parameter_alone():
    """As learn=parameters has it: the rows stay."""
    case = Learned(OPRF())
    expected = torch.autograd.grad(case.of(attention_reference).square().sum(), case.params.A)
    case.rows.requires_grad_(False)
    assert_close(torch.autograd.grad(case.of().square().sum(), case.params.A), expected)


@pytest.mark.parametrize("phi", [OPRF(), TrigRF()], ids=repr)
@pytest.mark.parametrize("causal", [False, True])
def test_no_features_are_kept(phi, causal, monkeypatch):
    """Twice the tokens cost no more than their own inputs and outputs, and a state for each chunk."""
    def kept(length):
        case, held = Learned(phi, length), {}
        hold = lambda t: held.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) and t
        with torch.autograd.graph.saved_tensors_hooks(hold, lambda t: t):
            case.of(causal=causal)
        return sum(held.values())

    features = 8 * B * H * L * m
    assert phi == OPRF() or kept(2 * L) - kept(L) > features     # few features: autograd keeps them
    monkeypatch.setattr(chunks, "ELEMENTS", 0)
    token = 8 * B * H * L
    assert kept(2 * L) - kept(L) < 6 * d * token
