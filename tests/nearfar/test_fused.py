"""Near-far attention by its Triton kernels, in the interpreter: outputs and gradients equal plain operations."""

import os

import pytest
import torch
from torch.testing import assert_close
from nearfar_cases import book, codebook

from crt_exp.attention.engines import native
from crt_exp.nearfar import near_far_attention
from crt_exp.nearfar.choice import Sizes
from crt_exp.nearfar.engine import fused, fused_reads, reads
from crt_exp.nearfar.engine.constants import HIDDEN
from crt_exp.nearfar.engine.sets import Weighted, KeyWindow, plain_gather

pytest.importorskip("triton", reason="Triton comes with PyTorch on Linux alone")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1",
                                reason="tests/attention/test_gpu.py runs them on the GPU that is here")


CASES = {
    "both directions": dict(),
    "causal": dict(Z=1, after=False, hidden=True),
    "causal, the last blocks, nothing heavy": dict(Z=1, n=2, after=False, hidden=True, heavy=0),
    "cells alone": dict(Z=1, near=False, heavy=0),
    "heavy keys of each block": dict(Z=1, own=True),
    "more than a step of each": dict(Z=1, N=2, b=35, r=70, K=40, d=20, dv=33, heavy=33),
}


def inputs(Z=2, N=3, n=None, b=5, r=10, d=8, dv=9, heavy=3, K=7, after=True, hidden=False, near=True, own=False):
    """Queries, a window or None, sets; one cell is empty, some keys are masked."""
    g = torch.Generator().manual_seed(0)
    draw, n = lambda *size: torch.randn(*size, generator=g), n or N
    W = b * (3 if after else 2)
    mask = torch.where(torch.rand(Z, N, b, generator=g) < 0.8, 0.0, HIDDEN)
    later = torch.where(torch.rand(r, W, generator=g) < 0.7, 0.0, HIDDEN) if hidden else None
    window = KeyWindow(draw(Z, N, b, d), draw(Z, N, b, dv), mask, after, later) if near else None
    mass = 5 * torch.rand(Z, n, K, 1, generator=g)
    mass[:, :, 0] = 0
    cells = Weighted(draw(Z, 1, K, d), torch.cat([draw(Z, n, K, dv) * mass, mass], -1), draw(Z, 1, K))
    each = n if own else 1
    few = Weighted(draw(Z, each, heavy, d), torch.cat([draw(Z, each, heavy, dv), torch.ones(Z, each, heavy, 1)], -1),
                   torch.zeros(Z, each, heavy))
    return draw(Z, n, r, d), window, ((few,) if heavy else ()) + (cells,)


def gathered(gather, dtype, q, window, sets):
    """What is gathered, and the gradients of a sum that reads all of it."""
    leaf = lambda t: t.to(dtype).requires_grad_()
    q, sets = leaf(q), tuple(Weighted(*map(leaf, part)) for part in sets)
    near = () if window is None else (leaf(window.keys), leaf(window.values))
    if window is not None:
        later = None if window.hidden is None else window.hidden.to(dtype)
        window = KeyWindow(*near, window.bias.to(dtype), window.after, later)
    found = gather(q, window, sets)
    g = torch.Generator().manual_seed(1)
    total = sum((t * torch.randn(t.shape, generator=g).to(dtype)).sum() for t in found)
    return [*found, *torch.autograd.grad(total, (q, *near, *(t for part in sets for t in part)))]


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_plain_operations(name):
    given = inputs(**CASES[name])
    ours, expected = gathered(fused.gather, torch.float32, *given), gathered(plain_gather, torch.float64, *given)
    for a, b in zip(ours, expected, strict=True):
        assert (a.double() - b).abs().max() <= 5e-6 * b.abs().max().clamp(min=1e-2)


LAYERS = {"both directions": (Sizes(8, 3, 9, True), {}), "across": (Sizes(8, 3, 9), {"cross": True}),
          "bounded": (Sizes(8, 3, 9), {"causal": True}), "both, with keys read": (Sizes(8, 3, 5, open=4), {}),
          "causal, with keys read": (Sizes(8, 2, 4, open=5), {"causal": True})}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name.startswith("both, with") else [])
                                  for name in LAYERS])
def test_attention_by_the_kernels(name, monkeypatch):
    """As on a GPU: without the C engine; grouped heads, padding."""
    (sizes, kind), g = LAYERS[name], torch.Generator().manual_seed(0)
    draw = lambda heads, n: torch.randn(1, heads, n, 8, generator=g) / 8**0.25
    keep = torch.rand(1, 40, generator=g) < 0.8
    keep[:, -1] = True
    tensors = draw(4, 30 if "cross" in kind else 40), draw(2, 40), draw(2, 40)
    found = []
    for dtype in (torch.float32, torch.float64):
        if dtype == torch.float32:
            monkeypatch.setattr(native, "library", lambda: None)
            monkeypatch.setattr(fused, "applies", lambda q, *others: q.dtype == torch.float32)
        given = {"codebook": codebook(book(2, 9, 8), 1).to(dtype)} if name == "bounded" else {}
        t = [a.to(dtype).requires_grad_() for a in tensors]
        out = near_far_attention(*t, sizes, key_mask=keep, **kind, **given).out
        if "cross" not in kind:
            out = out * keep[:, None, :, None]
        found.append([out, *torch.autograd.grad(out.square().sum(), t)])
    for ours, expected in zip(*found):
        assert (ours.double() - expected).abs().max() <= 5e-5 * expected.abs().max()


@pytest.mark.parametrize("o", [1, 3, 40])
def test_reads(o):
    """Logits and sums of the keys that each query reads, with gradients; -1 is none, and two may read one key."""
    g = torch.Generator().manual_seed(o)
    draw = lambda *size: torch.randn(*size, generator=g)
    given = draw(2, 3, 4, 20), draw(2, 50, 20), draw(2, 50, 7), torch.randint(-1, 50, (2, 3, 4, o), generator=g)
    gradient, results = draw(2, 3, 4, 7), []
    for engine, dtype in ((fused_reads, torch.float32), (reads, torch.float64)):
        q, keys, values = (t.to(dtype).requires_grad_() for t in given[:3])
        logits = engine.logits(q, keys, given[3])
        weight = torch.where(given[3] < 0, 0.0, torch.tanh(logits))
        out = engine.sums(weight, values, given[3])
        gradients = torch.autograd.grad(out, (q, keys, values), gradient.to(dtype))
        results.append([logits * (given[3] >= 0), out, *gradients])
        assert (logits[given[3] < 0] == torch.tensor(HIDDEN, dtype=dtype)).all()
    for ours, expected in zip(*results, strict=True):
        assert_close(ours.double(), expected, rtol=5e-6, atol=5e-6)


def test_no_second_derivatives():
    q, window, sets = inputs()
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        out = fused.gather(q.requires_grad_(), window, sets).out
        torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        places = torch.zeros(1, 2, 1, dtype=torch.long)
        out = fused_reads.sums(torch.ones(1, 2, 1), q[:1, 0], places)
        torch.autograd.grad(out.sum(), q, create_graph=True)
