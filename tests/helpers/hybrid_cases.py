"""Vectors and noise for tests of hybrid random features."""

import torch

from crt_exp import samplers


def vectors(*shape, seed=0, scale=0.5):
    return scale * torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def draw(phi, m, d, batch=(), seed=0, sampler=samplers.iid):
    g = torch.Generator().manual_seed(seed)
    return phi.noise(m, lambda p: sampler(p.m, d, g, batch, dtype=torch.float64))
