"""Launches of a training step outside the engines: their number, and no wait for a device.

Each operator is a launch on a GPU, except those that a compiled function joins. Reading a value waits for all launches
before it.
"""

import functools
import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from crt_exp.attention import compiled
from crt_exp.mechanism import Mechanism

# operators that start nothing on a device
VIEWS = {
    *("_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "expand"),
    *("permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose"),
    *("unbind", "unflatten", "unsqueeze", "view"),
    *("empty", "empty_like", "empty_strided", "new_empty"),
}
METHODS = ("favorp", "favorpp", "favorsharp")
# operators outside compiled functions at most, one of them attention: forward, bidirectional and causal, and backward
OPERATORS = {"favorp": (1, 1), "favorpp": (1, 2), "favorsharp": (12, 13)}
BACKWARD_LIMIT = 8
# launches of the compiled functions at most, with 1,024 tokens of 64 columns
LAUNCHES = {"favorp": (2, 2), "favorpp": (5, 7), "favorsharp": (36, 40)}


class CountedOperators(TorchDispatchMode):
    """Counts the dispatched operators that are not views, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in VIEWS:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def as_on_device(monkeypatch):
    """Tensors whose values are not readable without a wait, as on a GPU."""
    for name, module in list(sys.modules.items()):
        if name.startswith("crt_exp.") and hasattr(module, "values_readable"):
            monkeypatch.setattr(module, "values_readable", lambda t: False)


@pytest.fixture
def uncounted(as_on_device, monkeypatch):
    """Compiled functions as on a GPU, with none of their operators counted."""

    def stand_in(function):
        def call(*args):
            with _disable_current_modes():
                return function(*args)

        return call

    compile_here(monkeypatch, stand_in)


def compile_here(monkeypatch, compiler):
    """Compile functions on CPUs too, by a compiler of their own for this test."""
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "COMPILED_DEVICES", ("cpu",))
    monkeypatch.setattr(compiled, "NOT_COMPILED", set())
    monkeypatch.setattr(compiled, "compile_once", functools.cache(compiler))


def step_counts(layer, tokens, key_mask=None):
    """Return the operators of the forward and the backward pass of the third training step."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, layer.heads, tokens, layer.d, generator=generator)
    for t in (q, k, v):
        t.requires_grad_()
    for _ in range(2):
        layer(q, k, v, key_mask).sum().backward()
    with CountedOperators() as forward:
        out = layer(q, k, v, key_mask)
    loss = out.sum()
    with CountedOperators() as backward:
        loss.backward()
    return forward.counts, backward.counts


def make_layer(method, causal, **options):
    return Mechanism.of(method, m=16, **options).layer(2, 8, causal=causal).train()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_takes_few_operators_whatever_the_length(method, causal, uncounted):
    layer = make_layer(method, causal)
    short = step_counts(layer, 256)
    long = step_counts(layer, 4096)
    assert short == long
    forward, backward = (sum(counts.values()) for counts in short)
    assert forward <= OPERATORS[method][causal], short[0]
    assert backward <= BACKWARD_LIMIT, short[1]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "method, options", [*((method, {}) for method in METHODS), ("favorpp", {"redraw_every": 100})]
)
def test_no_step_waits_for_the_device(method, options, causal, masked, as_on_device):
    key_mask = torch.ones(1, 64, dtype=torch.bool) if masked else None
    layer = make_layer(method, causal, **options)
    for counts in step_counts(layer, 64, key_mask):
        assert not counts["_local_scalar_dense"] + counts["nonzero"]


@pytest.mark.parametrize("causal", [False, True])
def test_near_far_attention_waits_for_its_mask_alone(causal, as_on_device):
    sizes = {"block": 16, "heavy": 8, "cells": 16, "exact_until": 32}
    layer = Mechanism.of("nearfar", **sizes).layer(2, 8, causal=causal).eval()
    q, k, v = torch.randn(3, 2, 2, 160, 8, dtype=torch.float64)  # float64: not in C
    key_mask = torch.ones(2, 160, dtype=torch.bool)
    key_mask[0, :100] = False
    for mask, waits in ((None, 0), (key_mask, 1)):
        with torch.no_grad(), CountedOperators() as forward:
            layer(q, k, v, mask)
        assert forward.counts["_local_scalar_dense"] + forward.counts["nonzero"] <= waits


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_compiled_functions_compute_the_same(method, causal, monkeypatch):
    plain = make_layer(method, causal)
    layer = make_layer(method, causal)
    q, k, v = torch.randn(3, 2, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    key_mask = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) < 0.8
    inputs = [(q, k, v), (q[:, :, :30], k[:, :, :30], v[:, :, :30]), (q, k, v, key_mask)]
    expected = [plain(*tensors) for tensors in inputs]

    def without_breaks(function):
        return torch.compile(function, backend="aot_eager", fullgraph=True)

    compile_here(monkeypatch, without_breaks)
    for tensors, out in zip(inputs, expected):
        torch.testing.assert_close(layer(*tensors), out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


def test_a_function_that_does_not_compile_runs_as_it_is(monkeypatch, caplog):
    def failing(function):
        def call(*args):
            raise RuntimeError("no compiler")

        return call

    layer = make_layer("favorpp", False)
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    expected = layer(q, k, v)
    compile_here(monkeypatch, failing)
    assert torch.equal(layer(q, k, v), expected)
    assert torch.equal(layer(q, k, v), expected)
    for name in ("fit_to_call", "exponent"):
        assert caplog.text.count(f"{name} cannot be compiled for cpu (no compiler)") == 1


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_compiled_functions_take_few_launches(method, causal, as_on_device, monkeypatch):
    """Of the code for a GPU, which is written here and compiled where it runs."""
    triton = pytest.importorskip("triton", reason="needs triton")
    from torch._inductor import config, graph
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", 80, 32)
    device = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    launches = []

    def write(lowering):
        source = lowering.codegen()[0].value
        calls = r"^ +(?:buf\d+ = )?(triton_\w+\.run|extern_kernels\.\w+|torch\.ops\.aten\.\w+)"
        launches.extend(re.findall(calls, source.partition("def call(")[2], re.MULTILINE))
        raise NotImplementedError("written")

    def writer(function):
        def call(*args):
            torch._dynamo.reset()
            with pytest.raises(RuntimeError, match="written"):
                torch.compile(function)(*args)
            return function(*args)

        return call

    compile_here(monkeypatch, writer)
    monkeypatch.setattr(graph.GraphLowering, "_compile_to_module", write)
    monkeypatch.setattr(graph.GraphLowering, "compile_to_module", write)
    monkeypatch.setattr(triton.runtime.driver, "_active", device)
    layer = Mechanism.of(method, m=256).layer(8, 64, causal=causal).train()
    q, k, v = torch.randn(3, 1, 8, 1024, 64)
    with config.patch(cpu_backend="triton", compile_threads=1):
        layer(q, k, v)
    assert 0 < len(launches) <= LAUNCHES[method][causal], (len(launches), "\n".join(launches))
