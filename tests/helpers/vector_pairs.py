"""Vectors whose kernel values are estimated."""

import torch

from helpers.seeds import seeded


def pairs(d, n=3, scale=0.5, seed=0):
    """x (n, d), y (n + 1, d) with entries of both signs, float64."""
    g = seeded(seed)
    vectors = []
    for count in (n, n + 1):
        v = scale * torch.randn(count, d, generator=g, dtype=torch.float64)
        vectors.append(v / v.norm(dim=-1, keepdim=True).clamp(min=1))
    return vectors
