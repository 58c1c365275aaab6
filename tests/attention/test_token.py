"""A decoded token as a function of what is kept: in one graph, which asks for no value, it is the eager step."""

import pytest
import torch

from crt_exp import Mechanism


def states(name):
    """Two decoding states of the same layer after the same prompt of two sequences, grouped heads."""
    torch.manual_seed(0)
    layer = Mechanism.of(name, m=8).layer(4, 8, kv_heads=2, causal=True)
    if layer.learns:
        with layer.calibration(), torch.no_grad():
            layer(torch.randn(2, 4, 40, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 8))
    q, kv = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 2, 5, 8)
    made = [layer.eval().past().state for _ in range(2)]
    for state in made:
        state.step(q, *kv)
    return made


def tokens(n=11):
    return [(torch.randn(2, 4, 1, 8), *torch.randn(2, 2, 2, 1, 8)) for _ in range(n)]


@pytest.mark.parametrize("name", ["favorpp", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "favorp", "favorsharp"))])
def test_compiled_equals_eager(name):
    ours, expected = states(name)
    compiled, kept = torch.compile(ours.token, fullgraph=True, backend="aot_eager"), ours.kept
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for vectors in tokens():
        out, kept = compiled(kept, *vectors)
        torch.testing.assert_close(out, expected.step(*vectors), rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
