"""Near-far attention as a layer: names, what it learns, swapped models."""

import sys

import pytest
import torch
from nearfar_cases import tensors
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from crt_exp import calibrate_attention, describe_attention, swap_attention
from crt_exp.attention import exact_attention, softmax_attention
from crt_exp.mechanism import Mechanism
from crt_exp.nearfar import NearFar, layer as nearfar_layer, near_far_attention
from crt_exp.nearfar.choice import Sizes
from crt_exp.features.base import NotFinite
from crt_exp.swap.call import attend

pytestmark = pytest.mark.usefixtures("one_thread")


def layer_of(causal=True, dtype=torch.float64, **options):
    options = {"block": 3, "heavy": 4, "cells": 3, "open": 5, "exact_until": 0} | options
    return Mechanism.of("nearfar", **options).layer(4, 4, kv_heads=2, causal=causal).to(dtype).eval()


@pytest.mark.parametrize("cross", [False, True])
def test_short_sequences_are_exact(cross):
    """And no row's outputs depend on how long the others are."""
    make = lambda until: NearFar(4, 4, kv_heads=2, cross=cross, block=2, heavy=1, cells=2, scaling=1.0,
                                 exact_until=until).double().eval()
    x, y, v, keep = tensors(H=4, L=9 if cross else 40, S=40)
    keep[0, 15:], keep[1] = False, True
    exact = softmax_attention(x, y, v, key_mask=keep)
    for until in (None, 40):
        torch.testing.assert_close(make(until)(x, y, v, keep), exact)
        torch.testing.assert_close(make(until)(x, y, v), softmax_attention(x, y, v))
    out = make(15)(x, y, v, keep)
    torch.testing.assert_close(out[0], exact[0])
    torch.testing.assert_close(out[1], make(0)(x, y, v, keep)[1])
    assert (out[1] - exact[1]).abs().max() > 1e-2
    gradient, = torch.autograd.grad(out.square().sum(), v, retain_graph=True)
    torch.testing.assert_close(gradient[0], torch.autograd.grad(exact.square().sum(), v)[0][0])
    at_once = torch.func.vmap(make(15))(*(t.unsqueeze(0) for t in (x, y, v, keep)))
    torch.testing.assert_close(at_once[0], out)


@torch.no_grad()
def test_long_rows_alone_are_to_first_order(monkeypatch):
    monkeypatch.setattr(nearfar_layer, "LONG", 20)
    layer = layer_of(causal=False)
    x, y, v, keep = tensors(H=4, L=25)
    keep[:] = True
    keep[0, 15:] = False
    out = layer(x, y, v, keep)
    torch.testing.assert_close(out[[0], :, :15], layer(*(t[[0], :, :15] for t in (x, y, v))))
    torch.testing.assert_close(out[[1]], layer(*(t[[1]] for t in (x, y, v))))


@pytest.mark.parametrize("causal", [False, True])
def test_an_empty_batch(causal):
    layer = layer_of(causal)
    q, k, v = (torch.zeros(0, heads, 9, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    out = layer(q, k, v, torch.ones(0, 9, dtype=torch.bool))
    out.sum().backward()
    assert out.shape == q.shape and v.grad.shape == v.shape


def test_vmap_and_export():
    layer = layer_of(causal=False)
    q, k, v = (torch.stack(parts) for parts in zip(*(tensors(H=4, seed=seed)[:3] for seed in range(3))))
    keep = torch.ones(3, 2, 23, dtype=torch.bool)
    keep[1, 0, :5] = False
    expected = torch.stack([layer(*row) for row in zip(q, k, v, keep)])
    torch.testing.assert_close(torch.func.vmap(layer)(q, k, v, keep), expected)
    plain = torch.stack([layer(*row) for row in zip(q, k, v)])
    torch.testing.assert_close(torch.func.vmap(layer)(q, k, v), plain)
    inputs = q[0].detach(), k[0].detach(), v[0].detach()
    program = torch.export.export(layer, inputs, strict=False).module()
    torch.testing.assert_close(program(*inputs), layer(*inputs))
    with pytest.raises(ValueError, match="fixed length"):
        open_length = {2: torch.export.Dim("length", min=2, max=99)}
        torch.export.export(layer, inputs, dynamic_shapes=(open_length,) * 3, strict=False)


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_where_all_keys_are_seen_a_call_is_one_of_the_kernel(causal):
    """Nothing else that takes time, of PyTorch or of Python, forward: the sum is how NaN is noticed."""
    layer = Mechanism.of("nearfar").layer(4, 8, kv_heads=4, causal=causal).eval()
    layer.path = "here"
    q, k, v = torch.randn(3, 1, 4, 40, 8).unbind()
    with Operators() as seen:
        out, _ = attend(layer, q, k, v, causal=causal)
    assert [name.split(".")[1] for name in seen.names] == [
        "_scaled_dot_product_flash_attention_for_cpu", "sum", "_local_scalar_dense"]
    torch.testing.assert_close(out, exact_attention(q, k, v, causal=causal, scale=8**-0.5))
    assert functions_called(lambda: attend(layer, q, k, v, causal=causal)) <= 16
    for wrong in ((q[..., :7], k, v), (q, k[:, :2], v), (q, k, v[:, :, :20]), (q.long(), k.long(), v)):
        with pytest.raises(ValueError):
            layer(*wrong)
    with pytest.raises(NotFinite, match="NaN, infinity"):
        layer(q.clone().fill_(torch.nan), k, v)


class Operators(TorchDispatchMode):
    """Which run within."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def functions_called(call):
    """How many of Python."""
    names = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(names)


def test_names_and_sizes():
    sizes = lambda **options: Mechanism.of("nearfar", **options).layer(2, 4).sizes
    assert sizes() == Sizes(32, 16, 64, False, 96, 1536)
    assert sizes(preset="quality") == Sizes(32, 64, 128, True, 256, 1536)
    assert sizes(preset="cheap", block=8, heavy=0, open=5) == Sizes(8, 0, 16, False, 5, 1536)
    for wrong in ({"block": 0}, {"heavy": -1}, {"cells": 0}, {"preset": "best"}, {"open": 0}, {"open": 1.5},
                  {"exact_until": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            sizes(**wrong)
    with pytest.raises(ValueError, match="does not use m"):
        Mechanism.of("nearfar", m=8)


def test_what_is_refused():
    x, y, v, _ = tensors()
    with pytest.raises(ValueError, match="cross=True"):
        near_far_attention(x[:, :, :5], y, v, Sizes())
    with pytest.raises(ValueError, match="NaN, infinity"):
        near_far_attention(x * torch.nan, y, v, Sizes())


def test_across_a_query_depends_on_no_other_but_earlier_ones():
    layer = NearFar(2, 4, cross=True, heavy=2, cells=3, exact_until=0, fit_steps=1)
    q, k, v, keep = tensors(L=9, S=23)
    q, k, v = (t.detach().float() for t in (q, k, v))
    before = layer.eval()(q, k, v, keep)
    torch.testing.assert_close(layer(q[:, :, 4:5], k, v, keep), before[:, :, 4:5])
    layer.train()(q, k, v, keep), layer(q, k, v, keep)
    after = layer.eval()(q, k, v, keep)
    assert layer.clusters.fits == 1 and not torch.allclose(after, before, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(layer(q[:, :, 4:5], k, v, keep), after[:, :, 4:5])


def bert(**options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=40,
        **options)).eval()


def test_moments_that_inference_mode_fitted_can_be_loaded_and_trained():
    layer, (x, y, v, _) = NearFar(2, 4, cross=True, fit_steps=1, exact_until=0), tensors(L=5, S=20)
    with torch.inference_mode():
        for _ in range(3):
            layer.train()(*(t.float() for t in (x, y, v)))
    assert int(layer.clusters.fits) == 2 and not any(t.is_inference() for t in layer.buffers())
    layer.load_state_dict(layer.state_dict())


@torch.no_grad()
def test_swapped_encoders_are_described():
    model, ids = bert(), torch.randint(40, (2, 50))
    exact = model(ids).last_hidden_state
    swap_attention(model, "nearfar", block=4, heavy=4, cells=8)
    calibrate_attention(model, [ids])
    rows = describe_attention(model)
    assert rows["mechanism"].tolist() == ["nearfar"] * 2
    assert (rows["error on calibration"] < rows["uniform's error"]).all()
    assert (model(ids).last_hidden_state - exact).norm() < 0.1 * exact.norm()


@torch.no_grad()
def test_swapped_decoders_generate_what_they_do_without_a_cache():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        vocab_size=40, max_position_embeddings=80, bos_token_id=0, eos_token_id=None, pad_token_id=None)).eval()
    swap_attention(model, "nearfar", block=4, heavy=2, cells=4)
    calibrate_attention(model, [torch.randint(40, (2, 60))])
    ids, calls = torch.randint(40, (2, 13)), {"do_sample": False, "max_new_tokens": 14}
    with_cache = model.generate(ids, **calls)
    assert torch.equal(with_cache, model.generate(ids, use_cache=False, **calls))
    padded = torch.cat([torch.zeros(1, 6, dtype=torch.long), ids[:1, :7]], 1)             # beside a row without padding
    mask = torch.tensor([[0] * 6 + [1] * 7, [1] * 13])
    both = model.generate(torch.cat([padded, ids[1:]]), attention_mask=mask, **calls)[:, 13:]
    for row, alone in enumerate((ids[:1, :7], ids[1:])):
        assert torch.equal(both[[row]], model.generate(alone, **calls)[:, alone.shape[1]:])


def test_the_study_of_approximation_takes_it(typed):
    code, out, err = typed("task=approximation", "attention=nearfar", "attention.block=4", "attention.heavy=4",
                           "attention.cells=8", "task.length=64", "task.samples=2", "task.depth=2", "task.heads=2",
                           "task.d=8", "logger=none")
    assert code == 0, err
    assert "relative error of the output" in out and "of the last hidden states" in out


@pytest.mark.parametrize("options", [{"open": 5}, pytest.param({"open": 9, "exact_until": 24}, marks=pytest.mark.slow)],
                         ids=str)
def test_a_graph_for_any_length_ends_before_keys_are_opened(options, fresh_graphs):
    """It took minutes a length: blocks, renewals and parts were unrolled with a length that is left open."""
    layer = layer_of(**options)
    graphs = CompileCounter()
    compiled = torch.compile(layer, dynamic=True, backend=graphs)
    for L in (30, 41, 57):
        x, y, v, _ = tensors(H=4, L=L)
        torch.testing.assert_close(compiled(x, y, v), layer(x, y, v))
    assert graphs.op_count < 100


def test_one_graph_for_any_length_is_refused_where_keys_are_opened(fresh_graphs):
    layer = layer_of()
    x, y, v, _ = tensors(H=4, L=30)
    compiled = torch.compile(layer, dynamic=True, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="attention=nearfar: causal calls need compile.dynamic=False"):
        compiled(x, y, v)


@pytest.fixture
def fresh_graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()
