"""Vectors and noise for tests of hybrid random features."""

import torch

from crt_exp import samplers
from helpers.seeds import normal, seeded


def vectors(*shape, seed=0, scale=0.5):
    return scale * normal(*shape, seed=seed)


def draw(phi, m, d, batch=(), seed=0, sampler=samplers.iid):
    g = seeded(seed)
    return phi.noise(m, lambda p: sampler(p.m, d, g, batch, dtype=torch.float64))
