"""Gradients to rows and parameters: those of features that autograd keeps, without keeping them."""

import pytest
import torch
from torch.testing import assert_close

from crt_exp.attention import attention, partial_attention
from crt_exp.attention.engines import chunks
from crt_exp.features import OPRF, SDERF, Statistics
from crt_exp.nested import leaves, mapped
from crt_exp.samplers import iid
from crt_exp.samplers.noise import DenseNoise

B, H, L, d, m = 2, 2, 300, 4, 8


def given(length=L):
    g = torch.Generator().manual_seed(0)
    x, y, v = (torch.randn(B, H, length, d, generator=g, dtype=torch.float64).mul_(0.5) for _ in range(3))
    return g, [t.requires_grad_() for t in (x, y, v)]


def learned(phi, length=L):
    """Queries, keys, values, noise and parameters, and all that is to get a gradient."""
    g, (x, y, v) = given(length)
    noise = DenseNoise(iid(m, d, g).rows().double().requires_grad_(), True)
    params = mapped(lambda t: t.detach().clone().requires_grad_(), phi.fit(Statistics.of(x.detach(), y.detach())))
    return x, y, v, noise, params, [x, y, v, noise.rows(), *leaves(params)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("phi", [OPRF(), SDERF()], ids=repr)
def test_features_computed_again_give_the_gradients_of_features_kept(phi, causal, monkeypatch):
    results = []
    for most in (2**30, 0):
        monkeypatch.setattr(chunks, "ELEMENTS", most)
        x, y, v, noise, params, wanted = learned(phi)
        out = attention(x, y, v, phi, noise, params, causal=causal)
        rows = partial_attention(x, y, v, phi, noise, params, causal=causal)
        gradients = torch.autograd.grad(out.square().sum() + rows.logsum.sum(), wanted, create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in gradients), wanted)
        results.append([out, *gradients, *second])
    assert_close(results[0], results[1], rtol=1e-9, atol=1e-12)
    assert all(t.abs().max() > 0 for t in results[0])


@pytest.mark.parametrize("causal", [False, True])
def test_no_features_are_kept(causal, monkeypatch):
    """Twice the tokens cost no more than their own inputs and outputs, and a state for each chunk."""
    def kept(length):
        x, y, v, noise, params, _ = learned(OPRF(), length)
        held = {}
        hold = lambda t: held.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) and t
        with torch.autograd.graph.saved_tensors_hooks(hold, lambda t: t):
            attention(x, y, v, OPRF(), noise, params, causal=causal)
        return sum(held.values())

    features = 8 * B * H * L * m
    assert kept(2 * L) - kept(L) > features          # few features: autograd keeps them
    monkeypatch.setattr(chunks, "ELEMENTS", 0)
    token = 8 * B * H * L
    assert kept(2 * L) - kept(L) < 6 * d * token
