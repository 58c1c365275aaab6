"""Tensors and codebooks for tests of near-far attention, and how results are compared."""

import torch

from crt_exp.nearfar.causal import Codebook
from crt_exp.nearfar.choice import KeyMetric


def tensors(B=2, H=2, kv_heads=2, L=23, S=None, d=4, dv=3, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    draw = lambda heads, n, k: torch.randn(B, heads, n, k, generator=g, dtype=dtype)
    x, y, v = draw(H, L, d), draw(kv_heads, S or L, d) + 1, draw(kv_heads, S or L, dv)
    keep = torch.rand(B, S or L, generator=g) < 0.7
    keep[:, -1] = True
    return x.requires_grad_(), y.requires_grad_(), v.requires_grad_(), keep


def book(kv_heads=2, cells=3, d=4, seed=1, dtype=torch.float64):
    """c, tilt, root and centres of (kv_heads, ...)."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(kv_heads, *size, generator=g, dtype=dtype)
    return 0.3 * draw(1, d) + 1, 0.4 * draw(1, d), 0.5 * draw(d, d).tril(), draw(cells, d) + 1


def codebook(parts, batch):
    shift, tilt, root, centres = (t.repeat(batch, 1, 1) for t in parts)
    return Codebook(KeyMetric(shift, tilt, root), centres)


def same(out, expected, inputs, seed=3, **close):
    """Outputs, and gradients of one random sum of them."""
    torch.testing.assert_close(out, expected, **close)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=out.dtype)
    for ours, theirs in zip(*(torch.autograd.grad((t * weight).sum(), inputs) for t in (out, expected))):
        torch.testing.assert_close(ours, theirs, **close)
