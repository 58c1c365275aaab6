"""Attention that the engines in C serve, and how near it must be."""

import os
import shutil

import pytest
import torch

from crt_exp import samplers
from crt_exp.attention import attention
from crt_exp.attention.engines import native
from crt_exp.features import Statistics
from crt_exp.samplers.noise import DenseNoise, leaves, map_leaves
from helpers.seeds import seeded

WANTED = os.environ.get("CRT_EXP_ENGINE") != "plain" and shutil.which(
    os.environ.get("CC", "cc").split()[0]
)
needs_library = pytest.mark.skipif(
    not WANTED and native.library() is None,  # where it does not compile, tests fail
    reason="no C compiler here, or CRT_EXP_ENGINE=plain",
)


class Case:
    """learned: rows and parameters get a gradient."""

    def __init__(
        self,
        phi,
        B=2,
        H=2,
        Hkv=None,
        L=8,
        S=8,
        d=4,
        dv=4,
        m=8,
        scale=0.4,
        masked=False,
        learned=False,
    ):
        g = seeded()

        def draw(*shape):
            return torch.randn(*shape, generator=g)

        Hkv = Hkv or H
        self.learned = learned
        self.phi = phi
        self.noise = phi.noise(m, lambda p: samplers.orthogonal(p.m, d, g, batch=(H,)))
        self.x = scale * draw(B, H, L, d)
        self.y = scale * draw(B, Hkv, S, d)
        self.v = draw(B, Hkv, S, dv)
        self.params = phi.fit(Statistics.of(self.x, self.y.repeat_interleave(H // Hkv, 1)))
        self.grad = draw(B, H, L, dv)
        self.mask = None
        if masked:
            self.mask = torch.rand(B, S, generator=g) > 0.3
            self.mask[0, :70] = False
            self.mask[1, 100:] = False

    @property
    def inputs(self):
        return self.x, self.y, self.v

    def run(
        self,
        dtype=torch.float32,
        causal=False,
        x=None,
        y=None,
        v=None,
        grad=None,
        function=attention,
    ):
        """Outputs and gradients, with NaN in the padding; of a map that learns those to rows and parameters too."""
        wanted = []
        for given, own in ((x, self.x), (y, self.y), (v, self.v)):
            t = (own if given is None else given).to(dtype).detach()
            wanted.append(t.clone(memory_format=torch.preserve_format).requires_grad_())
        x, y, v = wanted
        if self.mask is not None:
            with torch.no_grad():
                for t in (y, v):
                    t.masked_fill_(~self.mask[:, None, :, None], torch.nan)
        noise = self.noise
        params = self.params
        if self.learned:
            noise = map_leaves(
                lambda n: DenseNoise(n.rows().to(dtype, copy=True).requires_grad_(), True), noise
            )
            params = map_leaves(lambda t: t.clone().requires_grad_(t.is_floating_point()), params)
            wanted += [n.rows() for n in leaves(noise)]
            wanted += [t for t in leaves(params) if t.requires_grad]
        out = function(x, y, v, self.phi, noise, params, causal=causal, key_mask=self.mask)
        if grad is None:
            grad = self.grad
        return [out.detach(), *torch.autograd.grad(out, wanted, grad.to(dtype))]


def assert_near(ours, expected, tolerance=1e-5):
    assert len(ours) == len(expected)
    for name, a, b in zip(("out", "dx", "dy", "dv", "drows", "dparams"), ours, expected):
        assert a.shape == b.shape, name
        assert a.isfinite().all(), name
        difference = (a.double() - b.double()).abs().max()
        size = b.double().abs().max().clamp(min=1e-2)
        assert difference <= tolerance * size, name
