"""A layer of random-feature attention and its inputs, for tests of its state."""

import torch

from crt_exp import samplers
from crt_exp.attention import RandomFeatureAttention
from crt_exp.features import OPRF
from helpers.seeds import seeded

B = 2
H = 4
L = 12
D = 8


def qkv(seed=0, heads=H, kv_heads=H, length=L, batch=B):
    g = seeded(seed)

    def draw(h):
        return torch.randn(batch, h, length, D, generator=g)

    return draw(heads), draw(kv_heads), draw(kv_heads)


def make(phi=None, m=16, **options):
    return RandomFeatureAttention(phi or OPRF(), samplers.orthogonal, m, H, D, **options)


def state(module):
    return {k: v.clone() for k, v in module.state_dict().items()}


def same(a, b):
    if a.keys() != b.keys():
        return False
    return all(torch.equal(a[k], b[k]) for k in a)
