"""Operators of a training step outside the engines: their number, and no wait for a device.

Each operator is a launch on a GPU, and reading a value waits for all launches before it.
"""

import sys
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from crt_exp.mechanism import Mechanism

# operators that start nothing on a device
VIEWS = {
    *("_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "expand"),
    *("permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose"),
    *("unbind", "unflatten", "unsqueeze", "view"),
    *("empty", "empty_like", "empty_strided", "new_empty"),
}
# forward operators at most, bidirectional and causal: of the fit, the running statistics and the features
LIMITS = {
    "favorp": (3, 3),
    "favorpp": (25, 39),
    "favorsharp": (92, 104),
}
BACKWARD_LIMIT = 8


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
@pytest.mark.parametrize("method", LIMITS)
def test_a_step_takes_few_operators_whatever_the_length(method, causal, as_on_device):
    layer = make_layer(method, causal)
    short = step_counts(layer, 256)
    long = step_counts(layer, 4096)
    assert short == long
    forward, backward = (sum(counts.values()) for counts in short)
    assert forward <= LIMITS[method][causal], short[0]
    assert backward <= BACKWARD_LIMIT, short[1]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "method, options", [*((method, {}) for method in LIMITS), ("favorpp", {"redraw_every": 100})]
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
