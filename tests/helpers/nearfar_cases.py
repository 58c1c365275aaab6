"""Tensors for tests of near-far attention, the reference for batches, and the choice of keys by its definition."""

import itertools

import torch
import torch.nn.functional as F
from torch.testing import assert_close

from crt_exp.nearfar import native
from crt_exp.nearfar.causal import Causal
from crt_exp.nearfar.choice import MAX_GAP, unmasked_keys
from crt_exp.nearfar.dispatch import join_key_heads, split_key_heads
from crt_exp.nearfar.reference import bidirectional_reference, causal_reference
from crt_exp.nearfar.retrieval import retrieved_positions
from helpers.seeds import seeded


def tensors(
    B=2,
    H=2,
    kv_heads=2,
    L=23,
    S=None,
    d=4,
    dv=3,
    seed=0,
    dtype=torch.float64,
):
    """Queries, keys and values that need a gradient, and a mask."""
    g = seeded(seed)
    S = S or L

    def draw(heads, n, k):
        return torch.randn(B, heads, n, k, generator=g, dtype=dtype)

    x = draw(H, L, d)
    y = draw(kv_heads, S, d) + 1
    v = draw(kv_heads, S, dv)
    keep = torch.rand(B, S, generator=g) < 0.7
    keep[:, -1] = True
    for t in (x, y, v):
        t.requires_grad_()
    return x, y, v, keep


def at_tokens(inputs, at):
    """A range of tokens of each of some tensors (B, H, S, .)."""
    return [t[:, :, at] for t in inputs]


def one_by_one(first, last):
    """The tokens [0, first) at once, then each one up to `last`."""
    yield slice(0, first)
    for i in range(first, last):
        yield slice(i, i + 1)


def random_integers(g):
    """A function that draws an integer between two bounds."""

    def pick(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=g))

    return pick


def by_reference(x, y, v, sizes, causal=False, cross=False, key_mask=None):
    """The reference for queries (B, H, L, d); 0 for queries that see no key."""
    *inputs, keep = split_key_heads(x, y, v, key_mask)
    if causal:
        out = causal_reference(*inputs, sizes, keep)
    else:
        out = bidirectional_reference(*inputs, sizes, keep, cross)
    return join_key_heads(out, y)


def same(out, expected, inputs, seed=3, retain_graph=False, **close):
    """Outputs, and gradients of one random sum of them."""
    assert_close(out, expected, **close)
    weight = torch.randn(out.shape, generator=seeded(seed), dtype=out.dtype)
    ours = torch.autograd.grad((out * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs, retain_graph=retain_graph)
    for gradient, other in zip(ours, theirs):
        assert_close(gradient, other, **close)


def as_integers(t):
    """Vectors (..., d) as whole numbers up to 127 and their steps, by the definition: random signs and Hadamard
    matrices of a power of 2 of columns that divides d, filled up to a multiple of 16; halves away from 0."""
    t = F.pad(t.double(), (0, -t.shape[-1] % 16))
    d = t.shape[-1]
    run = 1
    while d % (2 * run) == 0:
        run *= 2
    step_of_two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < run:
        hadamard = torch.kron(step_of_two, hadamard)
    multiples = torch.arange(1, d + 1) * 2654435769 % 2**32
    signs = torch.where(multiples >= 2**31, -1.0, 1.0).double()
    blocks = (t * signs).unflatten(-1, (-1, run))
    rotated = (blocks @ hadamard).flatten(-2)
    step = rotated.abs().amax(-1, keepdim=True) / 127
    parts = torch.where(step > 0, rotated / step, 0.0)
    numbers = parts.sign() * (parts.abs() + 0.5).floor()
    return numbers, step.squeeze(-1)


@torch.enable_grad()
def retrieved_in_c(x, y, v, keep, sizes, metric):
    """The positions (Z, G, L, open) of keys that queries retrieve in the C engine, -1 for none, by the gaps between
    them."""
    past = native.PastMemory(metric, y.shape[1])
    fields = native.causal_fields(x.detach().requires_grad_(), y, v, keep, sizes, past)
    native.causal(x.detach(), y, v, fields)
    most = fields["open"]
    positions = torch.full((*x.shape[:3], most), -1)
    for z, g, i in itertools.product(*map(range, x.shape[:3])):
        start = int(fields["gap_offset"][z, g, i])
        gaps = fields["gaps"][z, start:].numpy()
        gaps = gaps[: (gaps == 0).argmax()].astype(int)
        ends = gaps < MAX_GAP
        actual = (gaps - ~ends).cumsum()[ends] - 1
        positions[z, g, i, : len(actual)] = torch.from_numpy(actual)
    return positions


def retrieved_in_both(x, y, v, sizes, keep=None):
    """The positions (Z, G, L, open) of keys that queries behind the first renewal retrieve, sorted: by the C engine,
    and by PyTorch."""
    S = y.shape[1]
    _, metric, epochs = Causal(sizes).choose(x, y, keep)
    start = sizes.first_renewal
    in_c = retrieved_in_c(x[:, :, start:], y, v, keep, sizes, metric)
    expected = torch.full_like(in_c, -1)
    unmasked = unmasked_keys(y, keep)
    for epoch in epochs:
        for i in range(epoch.start, min(epoch.stop, S)):
            far = (i // sizes.block - 1) * sizes.block
            known = epoch.sets.pool.shape[1]
            member = torch.cat([epoch.sets.pool, unmasked[:, known:far]], 1).unsqueeze(1)
            count = sizes.retrieval_count(epoch.start)
            actual = retrieved_positions(y[:, :far], member, x[:, :, i], count)
            expected[:, :, i - start, : actual.shape[-1]] = actual
    return in_c.sort(-1).values, expected.sort(-1).values


# ---- the choice of keys by its definition, for one head


def metric_by_definition(x, y):
    """c, b and the lower triangular root of Sigma_x, of queries (n, d) and keys (S, d)."""
    shift = y.mean(0)
    tilt = x.mean(0)
    moments = (x - tilt).T @ (x - tilt) / len(x)
    ridge = 1e-4 * moments.diagonal().mean()
    eye = torch.eye(len(shift), dtype=x.dtype)
    return shift, tilt, torch.linalg.cholesky(moments + ridge * eye)


def centres_by_definition(z, w, pool, clusters):
    """Centres of clusters: eight at a time of the largest u D, then one pass of Lloyd's algorithm."""
    u = torch.where(pool, torch.exp(w - w[pool].max()), 0.0)
    mean = (u[:, None] * z).sum(0) / u.sum()
    distances = (z - mean).square().sum(-1)
    chosen = []
    while len(chosen) < clusters:
        most = min(8, clusters - len(chosen))
        chosen += (u * distances).argsort(descending=True)[:most].tolist()
        nearest = torch.cdist(z, z[chosen]).square().amin(-1)
        distances = torch.minimum(distances, nearest)
    centres = z[chosen]
    cluster = torch.cdist(z, centres).argmin(-1)
    for k in range(clusters):
        own = (cluster == k) & pool
        if own.any():
            centres[k] = (u[own, None] * z[own]).sum(0) / u[own].sum()
    return centres
