"""Attention under torch.export and torch.jit.trace."""

import io

import pytest
import torch
from helpers.covering import in_turn, slow
from helpers.seeds import seeded
from torch.testing import assert_close

from crt_exp import samplers
from crt_exp.attention import (
    RandomFeatureAttention,
    attention,
)
from crt_exp.features import (
    OPRF,
    SDERF,
    AngularHybrid,
    ClusteredHybrid,
    GeomRF,
    PosRF,
    TrigRF,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
both_ways = pytest.mark.parametrize("causal", [False, True])


LENGTHS = (150, 2, 7, 127, 128, 129, 300)


def qkv(length, heads=2):
    g = seeded(length)
    return tuple(torch.randn(2, heads, length, 4, generator=g) / 3 for _ in range(3))


def mask(length):
    return torch.rand(2, length, generator=seeded(length)) > 0.3


class Attend(torch.nn.Module):
    def __init__(self, phi, causal):
        super().__init__()
        self.phi = phi
        self.causal = causal
        self.params = phi.fit(None)
        self.noise = samplers.orthogonal(8, 4, seeded(), batch=(2,))

    def forward(self, x, y, v, key_mask):
        return attention(
            x, y, v, self.phi, self.noise, self.params, causal=self.causal, key_mask=key_mask
        )


def exported(module, *inputs, open_length=True, strict=False):
    """The program, saved and read again."""
    length = torch.export.Dim("length", min=2, max=8192)
    shapes = None
    if open_length:
        shapes = []
        for t in inputs:
            tokens = 2 if t.ndim == 4 else 1
            shapes.append({tokens: length})
        shapes = tuple(shapes)
    program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=strict)
    operators = []
    for node in program.graph.nodes:
        if node.op == "call_function":
            operators.append(str(node.target))
    assert not any("crt_exp" in name for name in operators)  # it runs where this package is not
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


def check_lengths(module, causal, strict=False):
    """In both directions one program serves every length; a causal one serves its own."""
    program = exported(module, *qkv(150), open_length=not causal, strict=strict)
    for length in (150,) if causal else LENGTHS:
        inputs = qkv(length)
        assert_close(program(*inputs), module(*inputs), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "phi, causal",
    in_turn([OPRF()], [True, False])
    + [
        slow(phi, causal)
        for causal in (False, True)
        for phi in (TrigRF(), SDERF(), AngularHybrid(n=2), ClusteredHybrid())
    ],
    ids=repr,
)
def test_layer_exports(phi, causal):
    layer = RandomFeatureAttention(phi, samplers.orthogonal, 8, 2, 4, causal=causal, fit_steps=1)
    if layer.running or phi.on_vectors:
        layer(*qkv(40)), layer(*qkv(50))
    layer.eval()
    check_lengths(layer, causal=causal, strict=phi == SDERF())
    assert isinstance(layer.denominators.nonpositive, int)


@pytest.mark.slow
def test_causal_attention_with_an_open_length_is_refused():
    with pytest.raises((ValueError, RuntimeError, torch._dynamo.exc.UserError)):
        exported(Attend(OPRF(A=-0.1), True), *qkv(150), mask(150))


@both_ways
@pytest.mark.slow
def test_an_exported_program_is_exact_or_stops(causal):
    """Of keys that grow by e^300; underflow within a chunk stops it."""
    x, y, v = qkv(300)
    keep = torch.ones(2, 300, dtype=torch.bool)
    module = Attend(PosRF(), causal)
    program = exported(module, x, y, v, keep, open_length=False)
    inputs = x, y + torch.linspace(0, 1, 300).square()[:, None] * 8, v, keep
    assert_close(program(*inputs), module(*inputs), rtol=1e-2, atol=1e-4)
    if causal:
        y[:, :, :60] += 30.0
        with pytest.raises(RuntimeError, match="outweighs|underflow"):
            program(x, y, v, keep)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@both_ways
def test_positive_maps_can_be_traced(causal):
    """torch.jit.trace calls the operators, whatever the length."""
    module = Attend(OPRF(A=-0.1), causal).eval()
    traced = torch.jit.trace(module, (*qkv(150), mask(150)), check_trace=False)
    for length in LENGTHS:
        actual = traced(*qkv(length), mask(length))
        expected = module(*qkv(length), mask(length))
        assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("phi, causal", in_turn([TrigRF(), GeomRF(p=0.6)], [False, True]), ids=repr)
def test_other_maps_cannot_be_traced(phi, causal):
    with pytest.raises(ValueError, match="use torch.export.export"):
        torch.jit.trace(Attend(phi, causal).eval(), (*qkv(30), mask(30)), check_trace=False)
