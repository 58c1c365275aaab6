"""What only a GPU can show: attention on that device."""

import pytest
import torch

from crt_exp import samplers
from crt_exp.attention import RandomFeatureAttention, attention, attention_reference
from crt_exp.features import OPRF, GeomRF, PosRF, Statistics, TrigRF
from crt_exp.mechanism import Mechanism

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
B = 2
H = 4
L = 300
D = 64
M = 128


def inputs(dtype, scale=0.28):
    g = torch.Generator().manual_seed(0)
    x, y, v, grad = torch.randn(4, B, H, L, D, generator=g)
    x = scale * x
    y = scale * y
    return [t.to("cuda", dtype).requires_grad_() for t in (x, y, v)], grad.to("cuda", dtype)


def compared(phi, tensors, grad, tolerance, **options):
    """Outputs and gradients are those of the definition."""
    noise = samplers.orthogonal(M, D, torch.Generator().manual_seed(1), batch=(H,)).to("cuda")
    params = phi.fit(Statistics.of(*tensors[:2]))
    results = []
    for function in (attention, attention_reference):
        out = function(*tensors, phi, noise, params, **options)
        results.append((out, *torch.autograd.grad(out, tensors, grad)))
    for ours, expected in zip(*results):
        assert (
            ours.float() - expected.float()
        ).abs().max() <= tolerance * expected.float().abs().max()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "dtype, tolerance",
    [
        (torch.float32, 1e-3),
        (torch.bfloat16, 3e-2),
        (torch.float16, 5e-3),
    ],
)
@pytest.mark.parametrize("phi", [PosRF(), OPRF(), TrigRF(), GeomRF()], ids=repr)
def test_equals_reference(phi, dtype, tolerance, causal):
    mask = torch.rand(B, L, device="cuda") > 0.2
    mask[:, 0] = True
    signed = isinstance(phi, (TrigRF, GeomRF))  # short vectors, so that no denominator is near 0
    tensors, grad = inputs(dtype, 0.1 if signed else 0.28)
    if dtype == torch.float32 and causal and phi == PosRF():
        tensors[1].data[:, :, 150] *= 40  # a late key that dwarfs all before
    compared(phi, tensors, grad, tolerance, causal=causal, key_mask=mask)


@pytest.mark.parametrize("causal", [False, True])
def test_near_far_attention_is_that_of_the_cpu(causal):
    """In float64, in which no two scores of keys are so close that the sets depend on rounding."""
    layer = (
        Mechanism.of("nearfar", block=16, heavy=8, cells=16, first_order=True)
        .layer(H, D, causal=causal)
        .eval()
    )
    tensors, grad = inputs(torch.float64)
    cpu = [t.detach().cpu().requires_grad_() for t in tensors]
    with layer.calibration(), torch.no_grad():
        layer(*cpu)
    expected = layer(*cpu)
    expected.backward(grad.cpu())
    out = layer.cuda()(*tensors)
    out.backward(grad)
    actual = [out, *(t.grad for t in tensors)]
    on_cpu = [expected, *(t.grad for t in cpu)]
    for ours, theirs in zip(actual, on_cpu):
        torch.testing.assert_close(ours.cpu(), theirs)
    low = layer(*(t.detach().bfloat16() for t in tensors))
    assert low.dtype == torch.bfloat16
    assert (low.double() - out).norm() < 0.1 * out.norm()


@pytest.mark.parametrize("causal", [False, True])
def test_compiles(causal):
    tensors, grad = inputs(torch.bfloat16)
    module = RandomFeatureAttention(PosRF(), samplers.orthogonal, M, H, D, causal=causal).cuda()
    expected = module(*tensors)
    torch.testing.assert_close(
        torch.compile(module, fullgraph=True)(*tensors), expected, rtol=2e-2, atol=2e-2
    )


def test_a_token_in_a_cuda_graph():
    """One graph, replayed, is the eager step for 40 tokens."""
    layer = Mechanism.of("favorpp", m=M).layer(H, D, causal=True).cuda().eval()
    with layer.calibration(), torch.no_grad():
        layer(*torch.randn(3, B, H, 512, D, device="cuda"))
    ours = layer.past().state
    expected = layer.past().state
    prompt = torch.randn(2, B, H, 20, D, device="cuda")
    for state in (ours, expected):
        state.take(*prompt)
    fed = torch.randn(3, B, H, 1, D, device="cuda")

    def step():
        return ours.token(ours.sums, *fed)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, after = step()
        for old, new in zip(ours.sums, after):
            if old is not None:
                old.copy_(new)
    for _ in range(40):
        fed.copy_(torch.randn_like(fed))
        graph.replay()
        torch.testing.assert_close(out, expected.step(*fed), rtol=1e-4, atol=1e-4)
