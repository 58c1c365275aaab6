"""Near-far attention as a layer: names, what it learns, swapped models."""

import sys

import pytest
import torch
from helpers.covering import slow
from helpers.nearfar_cases import at_tokens, tensors
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from crt_exp.attention import exact_attention, softmax_attention
from crt_exp.features.base import NotFinite
from crt_exp.mechanism import Mechanism
from crt_exp.nearfar import NearFar, near_far_attention
from crt_exp.nearfar import layer as nearfar_layer
from crt_exp.nearfar.choice import Sizes
from crt_exp.nearfar.decoding import RecallState
from crt_exp.swap.attend import Call, attend

pytestmark = pytest.mark.usefixtures("one_thread")


def layer_of(causal=True, **options):
    sizes = {
        "block": 3,
        "heavy": 4,
        "cells": 3,
        "open": 5,
        "exact_until": 0,
    }
    mechanism = Mechanism.of("nearfar", **(sizes | options))
    return mechanism.layer(4, 4, kv_heads=2, causal=causal).double().eval()


@pytest.mark.parametrize("cross", [False, True])
def test_short_sequences_are_exact(cross):
    """And no row's outputs depend on how long the others are."""

    def make(until):
        sizes = {"block": 2, "heavy": 1, "cells": 2, "exact_until": until}
        return NearFar(4, 4, kv_heads=2, cross=cross, scaling=1.0, **sizes).double().eval()

    L = 9 if cross else 40
    x, y, v, keep = tensors(H=4, L=L, S=40)
    keep[0, 15:] = False
    keep[1] = True
    exact = softmax_attention(x, y, v, key_mask=keep)
    for until in (None, 40):
        actual = make(until)(x, y, v, keep)
        assert_close(actual, exact)
        actual = make(until)(x, y, v)
        expected = softmax_attention(x, y, v)
        assert_close(actual, expected)
    out = make(15)(x, y, v, keep)
    assert_close(out[0], exact[0])
    actual = out[1]
    expected = make(0)(x, y, v, keep)[1]
    assert_close(actual, expected)
    difference = (out[1] - exact[1]).abs().max()
    assert difference > 1e-2
    (gradient,) = torch.autograd.grad(out.square().sum(), v, retain_graph=True)
    actual = gradient[0]
    expected = torch.autograd.grad(exact.square().sum(), v)[0][0]
    assert_close(actual, expected)
    mapped = torch.func.vmap(make(15))
    at_once = mapped(x[None], y[None], v[None], keep[None])
    assert_close(at_once[0], out)


@torch.no_grad()
def test_long_rows_alone_are_to_first_order(monkeypatch):
    monkeypatch.setattr(nearfar_layer, "LONG", 20)
    layer = layer_of(causal=False)
    x, y, v, keep = tensors(H=4, L=25)
    keep[:] = True
    keep[0, 15:] = False
    out = layer(x, y, v, keep)
    short = layer(*(t[[0]] for t in at_tokens((x, y, v), slice(15))))
    assert_close(out[[0], :, :15], short)
    assert_close(out[[1]], layer(x[[1]], y[[1]], v[[1]]))


def test_across_a_query_depends_on_no_other_but_earlier_ones():
    layer = NearFar(2, 4, cross=True, heavy=2, cells=3, exact_until=0, fit_steps=1)
    q, k, v, keep = tensors(L=9, S=23)
    q = q.detach().float()
    k = k.detach().float()
    v = v.detach().float()
    before = layer.eval()(q, k, v, keep)
    actual = layer(q[:, :, 4:5], k, v, keep)
    expected = before[:, :, 4:5]
    assert_close(actual, expected)
    layer.train()(q, k, v, keep), layer(q, k, v, keep)
    after = layer.eval()(q, k, v, keep)
    assert layer.clusters.fits == 1
    assert not torch.allclose(after, before, rtol=1e-3, atol=1e-4)
    actual = layer(q[:, :, 4:5], k, v, keep)
    expected = after[:, :, 4:5]
    assert_close(actual, expected)


def test_moments_that_inference_mode_fitted_can_be_loaded_and_trained():
    layer = NearFar(2, 4, cross=True, fit_steps=1, exact_until=0)
    x, y, v, _ = tensors(L=5, S=20)
    with torch.inference_mode():
        for _ in range(3):
            layer.train()(x.float(), y.float(), v.float())
    assert int(layer.clusters.fits) == 2
    assert not any(t.is_inference() for t in layer.buffers())
    layer.load_state_dict(layer.state_dict())


class Operators(TorchDispatchMode):
    """Of PyTorch, which run within."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_a_short_call_is_one_of_the_kernel(causal):
    """Nothing else that takes time, of PyTorch or of Python: the sum is how NaN is noticed."""
    layer = Mechanism.of("nearfar").layer(4, 8, kv_heads=4, causal=causal).eval()
    layer.path = "here"
    called = []
    q, k, v = torch.randn(3, 1, 4, 40, 8).unbind()

    def call():
        return attend(layer, Call(q, k, v, causal=causal))

    with Operators() as seen:
        call()
    assert seen.names == [
        "_scaled_dot_product_flash_attention_for_cpu",
        "sum",
        "_local_scalar_dense",
    ]
    sys.setprofile(
        lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None
    )
    try:
        call()
    finally:
        sys.setprofile(None)
    assert len(called) <= 16, called


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_a_call_of_the_kernel_refuses_what_others_do(causal):
    layer = Mechanism.of("nearfar").layer(4, 8, kv_heads=4, causal=causal).eval()
    q, k, v = torch.randn(3, 1, 4, 40, 8).unbind()
    actual = layer(q, k, v)
    expected = exact_attention(q, k, v, causal=causal, scale=8**-0.5)
    assert_close(actual, expected)
    cases = [
        (q[..., :7], k, v),
        (q, k, v[:, :, :20]),
        (q.long(), k.long(), v),
    ]
    for wrong in cases:
        with pytest.raises(ValueError):
            layer(*wrong)
    with pytest.raises(NotFinite, match="NaN, infinity"):
        layer(q.clone().fill_(torch.nan), k, v)


# ---- empty batches, transforms, graphs, names


@pytest.mark.parametrize("causal", [False, True])
def test_an_empty_batch(causal):
    layer = layer_of(causal)
    q = torch.zeros(0, 4, 9, 4).double().requires_grad_()
    k = torch.zeros(0, 2, 9, 4).double().requires_grad_()
    v = torch.zeros(0, 2, 9, 4).double().requires_grad_()
    out = layer(q, k, v, torch.ones(0, 9, dtype=torch.bool))
    out.sum().backward()
    assert out.shape == q.shape
    assert v.grad.shape == v.shape
    state = RecallState(layer.sizes)
    actual = state.step(q.detach(), k.detach(), v.detach()).shape
    assert actual == q.shape


def test_vmap_and_derivatives():
    layer = layer_of(causal=False)
    samples = [tensors(H=4, seed=seed) for seed in range(3)]
    q = torch.stack([sample[0] for sample in samples])
    k = torch.stack([sample[1] for sample in samples])
    v = torch.stack([sample[2] for sample in samples])
    keep = torch.ones(3, 2, 23, dtype=torch.bool)
    keep[1, 0, :5] = False
    cases = [(q, k, v, keep), (q, k, v)]
    for given in cases:
        actual = torch.func.vmap(layer)(*given)
        expected = torch.stack([layer(*row) for row in zip(*given)])
        assert_close(actual, expected)
    causal = layer_of()
    with pytest.raises(ValueError, match="key_mask: not supported by causal near-far"):
        torch.func.vmap(causal)(q, k, v, keep)
    ones = torch.ones_like(v[0])
    out, tangent = torch.func.jvp(lambda v: causal(q[0], k[0], v), (v[0],), (ones,))
    assert_close(out, causal(q[0], k[0], v[0]))
    assert_close(tangent, torch.ones_like(out))  # weights sum to 1


@pytest.mark.parametrize("causal", [False, slow(True)])
def test_export_is_of_a_fixed_length(causal):
    layer = layer_of(causal, block=4)
    inputs = []
    for t in tensors(H=4, L=10)[:3]:
        inputs.append(t.detach())
    program = torch.export.export(layer, tuple(inputs), strict=False).module()
    assert_close(program(*inputs), layer(*inputs))
    if not causal:
        open_length = {2: torch.export.Dim("length", min=2, max=99)}
        with pytest.raises(ValueError, match="fixed length"):
            torch.export.export(
                layer, tuple(inputs), dynamic_shapes=(open_length,) * 3, strict=False
            )


def test_a_graph_for_any_length_ends_before_keys_are_opened():
    """It took minutes a length: blocks, renewals and parts were unrolled with a length that is left open."""
    torch.compiler.reset()
    layer = layer_of()
    graphs = CompileCounter()
    compiled = torch.compile(layer, dynamic=True, backend=graphs)
    for L in (15, 22):
        x, y, v, _ = tensors(H=4, L=L)
        actual = compiled(x, y, v)
        expected = layer(x, y, v)
        assert_close(actual, expected)
    assert graphs.op_count < 100
    torch.compiler.reset()


def test_names_and_sizes():
    def sizes(**options):
        return Mechanism.of("nearfar", **options).layer(2, 4).sizes

    actual = sizes(preset="quality")
    expected = Sizes(32, 64, 128, True, 256, 1536)
    assert actual == expected
    actual = sizes(preset="cheap", block=8, heavy=0, open=5)
    expected = Sizes(8, 0, 16, False, 5, 1536)
    assert actual == expected
    with pytest.raises(ValueError, match="heavy"):
        sizes(heavy=-1)
    x, y, v, _ = tensors()
    cases = [
        ({"block": 0}, "block=0"),
        ({"heavy": -1}, "heavy=-1"),
        ({"open": 0}, "open=0"),
    ]
    for given, said in cases:
        with pytest.raises(ValueError, match=said):
            near_far_attention(x, y, v, Sizes()._replace(**given), causal=True)
    with pytest.raises(ValueError, match="cross=True"):
        near_far_attention(x[:, :, :5], y, v, Sizes())
