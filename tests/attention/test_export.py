"""Attention by torch.export and torch.jit.trace: equal to eager."""

import io

import pytest
import torch

from crt_exp import samplers
from crt_exp.attention import RandomFeatureAttention, attention
from crt_exp.features import OPRF, SDERF, AngularHybrid, ClusteredHybrid, GeomRF, PosRF, TrigRF

pytestmark = [pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning"),
              pytest.mark.filterwarnings("ignore::DeprecationWarning")]
both_ways = pytest.mark.parametrize("causal", [False, True])
LENGTHS = (300, 2, 7, 127, 128, 129, 600)


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
    program = None if causal else exported(module, *qkv(300), *(f(300) for f in more), strict=strict)
    for length in (300, 2) if causal else LENGTHS:
        inputs = *qkv(length), *(f(length) for f in more)
        run = exported(module, *inputs, open_length=False, strict=strict) if causal else program
        torch.testing.assert_close(run(*inputs), module(*inputs), rtol=1e-3, atol=1e-5)


@both_ways
@pytest.mark.slow                     # of the fast ones that of the layer, below, takes the same way
@pytest.mark.parametrize("phi", [OPRF(A=-0.1), TrigRF()], ids=repr)
def test_attention_exports(phi, causal):
    module = Attend(phi, causal)
    exported(module, *qkv(300), mask(300), open_length=not causal)
    assert "sq_norm" not in vars(module.noise)  # nothing of the export stays
    check_lengths(module, mask, causal=causal)


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("phi", [OPRF(), *(pytest.param(phi, marks=pytest.mark.slow) for phi in (
    TrigRF(), SDERF(), AngularHybrid(n=2), ClusteredHybrid()))], ids=repr)
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layer_exports(phi, causal, strict):
    layer = RandomFeatureAttention(phi, samplers.orthogonal, 8, 2, 4, causal=causal, fit_steps=1)
    if layer.running or phi.on_vectors:
        layer(*qkv(40)), layer(*qkv(50))
    layer.eval()
    check_lengths(layer, causal=causal, strict=strict)
    assert isinstance(layer.denominators.nonpositive, int)


@pytest.mark.parametrize("phi", [OPRF(A=-0.1), TrigRF()], ids=repr)
def test_causal_attention_with_an_open_length_is_refused(phi):
    with pytest.raises((ValueError, RuntimeError, torch._dynamo.exc.UserError)):
        exported(Attend(phi, True), *qkv(300), mask(300))


@pytest.mark.slow
def test_growing_keys():
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
    traced = torch.jit.trace(module, (*qkv(300), mask(300)), check_trace=False)
    for length in LENGTHS:
        torch.testing.assert_close(traced(*qkv(length), mask(length)), module(*qkv(length), mask(length)))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@both_ways
@pytest.mark.parametrize("phi", [TrigRF(), GeomRF(p=0.6)], ids=repr)
def test_other_maps_cannot_be_traced(phi, causal):
    with pytest.raises(ValueError, match="use torch.export.export"):
        torch.jit.trace(Attend(phi, causal).eval(), (*qkv(30), mask(30)), check_trace=False)
