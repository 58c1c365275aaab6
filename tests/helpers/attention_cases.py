"""Tensors, maps and noise for tests of attention, and how results are compared."""

import copy

import torch

from crt_exp import samplers
from crt_exp.attention import Generalized, attention
from crt_exp.attention.engines import chunks
from crt_exp.features import (
    OPRF,
    SDERF,
    SMREG,
    AngularHybrid,
    ClusteredHybrid,
    GeomRF,
    Mixture,
    PosRF,
    Statistics,
    Sum,
    TrigRF,
)
from helpers.maps import independent
from helpers.seeds import seeded

FEW = [
    Mixture(),
    Mixture(weights="unbiased"),
    OPRF(),
    PosRF(),
    SMREG(),
    SDERF(antithetic=True),
    OPRF(antithetic=True),
    TrigRF(),
    GeomRF(),
    Sum(TrigRF(), PosRF(), weights=(0.3, 0.7)),
]
BLOCKED = [AngularHybrid(n=2), ClusteredHybrid()]
OTHER = [
    Generalized(f="relu"),
    Generalized(f="elu+1", projection=False),
    Generalized(f="exp"),
    Generalized(f="cos"),
]
OUTLIER = 40.0
SHAPES = {
    "self": {},
    "masked": {"masked": True},
    "cross": {"L": 5, "S": 13, "masked": True},
    "grouped": {"Hkv": 2, "S": 14},
    "shared": {"Hkv": 2, "shared": True, "masked": True},
}


def set_chunks(monkeypatch, size):
    monkeypatch.setattr(chunks, "CHUNK", size)
    monkeypatch.setattr(chunks, "WIDE", size)
    monkeypatch.setattr(chunks, "PIECES", (size, max(size // 2, 1), 1))
    monkeypatch.setattr(chunks, "STRETCH", 2 * size)
    monkeypatch.setattr(chunks, "MAX_SAVED", 0)


def sample_inputs(L, S, kv_heads=3):
    """x (2,3,L,4), y and v (2,kv_heads,S,4) with gradients, float64, and a key mask (2,S)."""
    g = seeded()
    x = torch.randn(2, 3, L, 4, generator=g, dtype=torch.float64)
    y = torch.randn(2, kv_heads, S, 4, generator=g, dtype=torch.float64)
    v = torch.randn(2, kv_heads, S, 4, generator=g, dtype=torch.float64)
    keep = torch.rand(2, S, generator=g) < 0.7
    return x.requires_grad_(), y.requires_grad_(), v.requires_grad_(), keep


class Case:
    """x (B,H,L,d), y (B,Hkv,S,d), v (B,Hkv,S,dv), and a map with noise and fitted parameters."""

    def __init__(
        self,
        phi,
        B=2,
        H=4,
        Hkv=None,
        L=11,
        S=11,
        d=4,
        dv=3,
        m=6,
        scale=0.6,
        masked=False,
        shared=False,
        seed=0,
        dtype=torch.float64,
    ):
        g = seeded(seed)

        def draw(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        Hkv = Hkv or H
        self.phi = phi.of_size(m)
        self.heads = H
        self.x = (scale * draw(B, H, L, d)).to(dtype).requires_grad_()
        self.y = (scale * draw(B, Hkv, S, d)).to(dtype).requires_grad_()
        self.v = draw(B, Hkv, S, dv).to(dtype).requires_grad_()
        batch = () if shared else (H,)
        self.noise = independent(
            phi, lambda: samplers.orthogonal(m, d, g, batch=batch, dtype=torch.float64)
        )
        if shared:
            stats = Statistics.of(self.x.flatten(0, 2), self.y.flatten(0, 2))
        else:
            stats = Statistics.of(self.x, self.y.repeat_interleave(H // Hkv, 1))
        self.params = self.phi.fit(stats)
        self.mask = None
        if masked:
            self.mask = torch.rand(B, S, generator=g) > 0.3
            self.mask[0, :5] = False
        self.grad = draw(B, H, L, dv).to(dtype)

    @property
    def inputs(self):
        return self.x, self.y, self.v

    def tokens(self, first, last):
        """Queries, keys and values of tokens [first, last)."""
        return [t[:, :, first:last] for t in self.inputs]

    def __call__(self, function=attention, x=None, y=None, v=None, **options):
        if self.mask is not None:
            options = {"key_mask": self.mask} | options
        x = self.x if x is None else x
        y = self.y if y is None else y
        v = self.v if v is None else v
        return function(x, y, v, self.phi, self.noise, self.params, **options)

    def with_grads(self, function=attention, **options):
        out = self(function, **options)
        return out, *torch.autograd.grad(out, self.inputs, self.grad.to(out.dtype))


def assert_same(ours, expected, rtol=1e-9):
    """Equal up to rtol of the largest entry of each tensor."""
    for a, b in zip(ours, expected, strict=True):
        assert a.shape == b.shape
        assert a.isfinite().all()
        assert b.isfinite().all()
        difference = (a.double() - b.double()).abs().max()
        size = b.double().abs().max().clamp(min=1e-3)
        assert difference <= rtol * size, (a, b)


def in_float64(case):
    """The case with the same rounded vectors."""
    exact = copy.copy(case)
    for name in ("x", "y", "v", "grad"):
        setattr(exact, name, getattr(case, name).detach().double().requires_grad_())
    return exact
