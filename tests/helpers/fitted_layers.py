"""Layers with a map that is fitted to vectors, and their inputs."""

import torch

from crt_exp import samplers
from crt_exp.attention import RandomFeatureAttention
from crt_exp.features import SDERF
from helpers.seeds import seeded

B = 2
H = 4
L = 40
D = 8


def qkv(seed=0, kv_heads=H):
    g = seeded(seed)
    shift = 2 * torch.randn(1, 1, 1, D, generator=g)

    def draw(heads):
        return torch.randn(B, heads, L, D, generator=g)

    return draw(H), draw(kv_heads) + shift, draw(kv_heads)


def layer(phi=None, **options):
    return RandomFeatureAttention(
        phi or SDERF(antithetic=True), samplers.orthogonal, 16, H, D, **options
    )


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)
