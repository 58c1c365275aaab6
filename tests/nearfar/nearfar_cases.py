"""Tensors for tests of near-far attention, and how results are compared."""

from itertools import product

import torch

from crt_exp.nearfar import native
from crt_exp.nearfar.choice import MAX_GAP
from crt_exp.nearfar.retrieval import retrieved_positions
from crt_exp.nearfar.causal import Causal, options_of, renewals, unmasked_keys


def tensors(B=2, H=2, kv_heads=2, L=23, S=None, d=4, dv=3, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    draw = lambda heads, n, k: torch.randn(B, heads, n, k, generator=g, dtype=dtype)
    x, y, v = draw(H, L, d), draw(kv_heads, S or L, d) + 1, draw(kv_heads, S or L, dv)
    keep = torch.rand(B, S or L, generator=g) < 0.7
    keep[:, -1] = True
    return x.requires_grad_(), y.requires_grad_(), v.requires_grad_(), keep


def same(out, expected, inputs, seed=3, **close):
    """Outputs, and gradients of one random sum of them."""
    torch.testing.assert_close(out, expected, **close)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=out.dtype)
    for ours, theirs in zip(*(torch.autograd.grad((t * weight).sum(), inputs) for t in (out, expected))):
        torch.testing.assert_close(ours, theirs, **close)


def as_integers(t):
    """Vectors (..., d) as whole numbers up to 127 and their steps, by the definition: random signs and Hadamard
    matrices of a power of 2 of columns that divides d, filled up to a multiple of 16; halves away from 0."""
    t = torch.nn.functional.pad(t.double(), (0, -t.shape[-1] % 16))
    d, run = t.shape[-1], 1
    while d % (2 * run) == 0:
        run *= 2
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < run:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), hadamard)
    high = [(p + 1) * 2654435769 % 2**32 >= 2**31 for p in range(d)]
    signs = torch.tensor([-1.0 if each else 1.0 for each in high], dtype=torch.float64)
    turned = ((t * signs).unflatten(-1, (-1, run)) @ hadamard).flatten(-2)
    step = turned.abs().amax(-1, keepdim=True) / 127
    parts = torch.where(step > 0, turned / step, 0.0)
    return parts.sign() * (parts.abs() + 0.5).floor(), step.squeeze(-1)


@torch.enable_grad()
def read_in_c(x, y, v, given):
    """The places (Z, G, L, open) of keys that queries read in the C engine, -1 for none, by the gaps between them."""
    plain, numbers = native.causal_memory(x.detach().requires_grad_(), y, v, given)
    native._InC.apply("near_far_causal", plain, numbers, x.detach(), y, v)
    places = torch.full((*x.shape[:3], min(given.sizes["open"], y.shape[1])), -1)
    for z, g, i in product(*map(range, x.shape[:3])):
        gaps = plain["gaps"][z, plain["gap_offset"][z, g, i]:].numpy()
        gaps = gaps[:(gaps == 0).argmax()].astype(int)
        ends = gaps < MAX_GAP
        own = (gaps - ~ends).cumsum()[ends] - 1
        places[z, g, i, :len(own)] = torch.from_numpy(own)
    return places


def choices(x, y, v, sizes, keep=None):
    """The places (Z, G, L, open) of keys that queries behind the first renewal read, sorted: by the C engine, and by
    PyTorch."""
    Z, S = y.shape[:2]
    call = Causal(sizes)
    metric, epochs = call.choose(x, y, keep, slice(None))
    start = renewals(sizes, 0)[0]
    given = native.Given(keep, metric.shift, metric.root, options_of(sizes, S))
    ours = read_in_c(x[:, :, start:], y, v, given)
    theirs, kept = torch.full_like(ours, -1), unmasked_keys(y, keep)
    for i in range(start, S):
        epoch = next(e for e in epochs if e.start <= i < e.stop)
        far = (i // sizes.block - 1) * sizes.block
        member = torch.cat([epoch.member, kept[:, epoch.member.shape[1]:far]], 1)
        read = retrieved_positions(y[:, :far], member.unsqueeze(1), x[:, :, i], sizes.opens(epoch.start))
        theirs[:, :, i - start, :read.shape[-1]] = read
    return ours.sort(-1).values, theirs.sort(-1).values
