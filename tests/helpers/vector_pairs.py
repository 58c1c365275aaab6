"""Vectors whose kernel values are estimated."""

import torch

from helpers.seeds import seeded


def pairs(d, n=3, scale=0.5, seed=0):
    """x (n, d), y (n + 1, d) with entries of both signs, float64."""
    g = seeded(seed)
    x, y = (scale * torch.randn(k, d, generator=g, dtype=torch.float64) for k in (n, n + 1))
    return (v / v.norm(dim=-1, keepdim=True).clamp(min=1) for v in (x, y))
