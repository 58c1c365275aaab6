"""Tensors for tests of near-far attention, how results are compared, and the method by its definition, one head at a
time, with matrices of all pairs: shares no line with the package.

Legend: L queries x, S keys y, values v, K cells. Constants of a head: c, b = `tilt`, the root of Sigma_x.
"""

from itertools import product

import torch

from crt_exp.nearfar import native
from crt_exp.nearfar.causal import Causal, options_of, renewals, unmasked_keys
from crt_exp.nearfar.choice import MAX_GAP
from crt_exp.nearfar.retrieval import retrieved_positions

EMPTY = float("-inf")


def tensors(B=2, H=2, kv_heads=2, L=23, S=None, d=4, dv=3, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)

    def draw(heads, n, k):
        return torch.randn(B, heads, n, k, generator=g, dtype=dtype)

    x = draw(H, L, d)
    y = draw(kv_heads, S or L, d) + 1
    v = draw(kv_heads, S or L, dv)
    keep = torch.rand(B, S or L, generator=g) < 0.7
    keep[:, -1] = True
    return x.requires_grad_(), y.requires_grad_(), v.requires_grad_(), keep


def same(out, expected, inputs, seed=3, **close):
    """Outputs, and gradients of one random sum of them."""
    torch.testing.assert_close(out, expected, **close)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=out.dtype)
    for ours, theirs in zip(
        *(torch.autograd.grad((t * weight).sum(), inputs) for t in (out, expected))
    ):
        torch.testing.assert_close(ours, theirs, **close)


def as_integers(t):
    """Vectors (..., d) as whole numbers up to 127 and their steps, by the definition: random signs and Hadamard
    matrices of a power of 2 of columns that divides d, filled up to a multiple of 16; halves away from 0."""
    t = torch.nn.functional.pad(t.double(), (0, -t.shape[-1] % 16))
    d = t.shape[-1]
    run = 1
    while d % (2 * run) == 0:
        run *= 2
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < run:
        hadamard = torch.kron(
            torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), hadamard
        )
    high = [(p + 1) * 2654435769 % 2**32 >= 2**31 for p in range(d)]
    signs = torch.tensor([-1.0 if each else 1.0 for each in high], dtype=torch.float64)
    turned = ((t * signs).unflatten(-1, (-1, run)) @ hadamard).flatten(-2)
    step = turned.abs().amax(-1, keepdim=True) / 127
    parts = torch.where(step > 0, turned / step, 0.0)
    return parts.sign() * (parts.abs() + 0.5).floor(), step.squeeze(-1)


@torch.enable_grad()
def read_in_c(x, y, v, given):
    """The places (Z, G, L, open) of keys that queries read in the C engine, -1 for none, by the gaps between them."""
    plain, numbers = native.causal_arguments(x.detach().requires_grad_(), y, v, given)
    native._NearFarInC.apply("near_far_causal", plain, numbers, x.detach(), y, v)
    places = torch.full((*x.shape[:3], min(given.sizes["open"], y.shape[1])), -1)
    for z, g, i in product(*map(range, x.shape[:3])):
        gaps = plain["gaps"][z, plain["gap_offset"][z, g, i] :].numpy()
        gaps = gaps[: (gaps == 0).argmax()].astype(int)
        ends = gaps < MAX_GAP
        own = (gaps - ~ends).cumsum()[ends] - 1
        places[z, g, i, : len(own)] = torch.from_numpy(own)
    return places


def choices(x, y, v, sizes, keep=None):
    """The places (Z, G, L, open) of keys that queries behind the first renewal read, sorted: by the C engine, and by
    PyTorch."""
    Z, S = y.shape[:2]
    call = Causal(sizes)
    metric, epochs = call.choose(x, y, keep, slice(None))
    start = renewals(sizes, 0)[0]
    given = native.CausalInputs(keep, metric.shift, metric.root, options_of(sizes, S))
    ours = read_in_c(x[:, :, start:], y, v, given)
    theirs = torch.full_like(ours, -1)
    kept = unmasked_keys(y, keep)
    for i in range(start, S):
        epoch = next(e for e in epochs if e.start <= i < e.stop)
        far = (i // sizes.block - 1) * sizes.block
        member = torch.cat([epoch.member, kept[:, epoch.member.shape[1] : far]], 1)
        read = retrieved_positions(
            y[:, :far], member.unsqueeze(1), x[:, :, i], sizes.opens(epoch.start)
        )
        theirs[:, :, i - start, : read.shape[-1]] = read
    return ours.sort(-1).values, theirs.sort(-1).values


# ---- in both directions, by the definition


def first_of(keep):
    """The place from which blocks are counted."""
    return int(keep.nonzero()[0]) if keep.any() else 0


def measure(x, y, keep):
    """c, tilt and the lower triangular root of Sigma_x, of one sequence."""
    x = x.detach()
    y = y.detach()
    c = y[keep].mean(0)
    tilt = x.mean(0)
    moments = (x - tilt).T @ (x - tilt) / len(x)
    ridge = 1e-4 * moments.diagonal().mean()
    return c, tilt, torch.linalg.cholesky(moments + ridge * torch.eye(len(c), dtype=x.dtype))


def picked(z, w, pool, K):
    """Centres of cells: eight at a time of the largest u D, then one pass of Lloyd's algorithm."""
    u = torch.where(pool, torch.exp(w - w[pool].max()), 0.0) if pool.any() else torch.zeros_like(w)
    D = (z - (u[:, None] * z).sum(0) / u.sum().clamp(min=1e-30)).square().sum(-1)
    centres = []
    while len(centres) < K:
        for j in (u * D).argsort(descending=True)[: min(8, K - len(centres))].tolist():
            centres.append(z[j])
        D = torch.stack([D, *((z - p).square().sum(-1) for p in centres)]).amin(0)
    centres = torch.stack(centres)
    cell = torch.cdist(z, centres).argmin(-1)
    for k in range(K):
        mine = (cell == k) & pool
        if mine.any():
            centres[k] = (u[mine, None] * z[mine]).sum(0) / u[mine].sum()
    return centres


def head(x, y, v, keep, queries, *, block, heavy, cells, first_order=False, cross=False):
    """In both directions: outputs (L, dv) of queries x (L, d), keys y (S, d), v (S, dv), keep (S,); keys are measured
    by all `queries` (G, L, d) of the group."""
    L = len(x)
    S = len(y)
    y = torch.where(keep[:, None], y, 0.0)
    v = torch.where(keep[:, None], v, 0.0)
    if cross:
        c = y[keep].detach().mean(0)
        tilt = torch.zeros_like(y[0])
        centred = (y[keep] - c).detach()
        moments = centred.T @ centred / keep.sum()
        root = torch.linalg.cholesky(
            moments + 1e-4 * moments.diagonal().mean() * torch.eye(len(c), dtype=y.dtype)
        )
    else:
        c, tilt, root = measure(queries[:, keep].flatten(0, 1), y, keep)
    y = y - c
    z = (y @ root).detach()
    w = (y @ tilt).detach()
    score = (z.square().sum(-1) / 2 + w).masked_fill(~keep, EMPTY)
    is_heavy = torch.zeros(S, dtype=torch.bool)
    is_heavy[score.argsort(descending=True)[:heavy]] = True
    is_heavy &= keep
    pool = keep & ~is_heavy
    centres = picked(z, w, pool, min(cells, S))
    cell = torch.cdist(z, centres).argmin(-1)
    at = (torch.arange(S) - first_of(keep)).div(block, rounding_mode="floor")
    near = torch.zeros(L, S, dtype=torch.bool) if cross else (at[:, None] - at).abs() <= 1
    far = ~near & pool
    logits = (x @ y.T).masked_fill(~(near & keep | is_heavy), EMPTY)
    virtual, values = cell_logits(x, y, v, z, root, tilt, pool, far, cell, len(centres))
    out, share = mixed(logits, v, virtual, values)
    if first_order:
        u = (
            torch.where(pool, torch.exp(y @ tilt - w[pool].max()), 0.0)
            if pool.any()
            else torch.zeros(S).to(y)
        )
        means = torch.stack(
            [
                (u[cell == k, None] * y[cell == k]).sum(0) / u[cell == k].sum().clamp(min=1e-30)
                for k in range(len(centres))
            ]
        )
        C = (u[:, None] * v).T @ (y - means[cell]) / u.sum().clamp(min=1e-30)
        out = out + share * ((x - tilt) @ C.T)
    return out


def cell_logits(x, y, v, z, root, tilt, pool, far, cell, K):
    """Logits (L, K) and values (L, K, dv) of the keys that stand for cells; -inf for cells that no query may see."""
    logits = []
    values = []
    for k in range(K):
        mine = pool & (cell == k)
        if not mine.any():
            continue
        level = (y[mine] @ tilt).detach().max()
        u = torch.where(mine, torch.exp(y @ tilt - level), 0.0)
        mu = u @ y / u.sum()
        tau = (u * ((y - mu) @ root).square().sum(-1)).sum() / u.sum()
        N = (far * u).sum(1)  # (L,)
        there = (far & mine).any(1)
        logit = (x - tilt) @ mu + level + torch.where(there, N, 1.0).log() + torch.log1p(tau / 2)
        logits.append(torch.where(there, logit, EMPTY))
        values.append((far * u) @ v / torch.where(there, N, 1.0)[:, None])
    if not logits:
        return x.new_full((len(x), 0), EMPTY), x.new_zeros(len(x), 0, v.shape[-1])
    return torch.stack(logits, -1), torch.stack(values, 1)


def mixed(logits, v, virtual, values):
    all_logits = torch.cat([logits, virtual], -1)
    none = all_logits.isinf().all(-1, keepdim=True)
    weights = torch.where(none, 0.0, torch.where(none, 0.0, all_logits).softmax(-1))
    own, far = weights.split([logits.shape[-1], virtual.shape[-1]], -1)
    return own @ v + (far[..., None] * values).sum(1), far.sum(-1, keepdim=True)


def all_pairs(x, y, v, keep=None, **sizes):
    """(B, H, L, d), (B, Hkv, S, d): outputs by the definition."""
    G = x.shape[1] // y.shape[1]
    rows = []
    for i in range(len(x)):
        mask = torch.ones(y.shape[2], dtype=torch.bool) if keep is None else keep[i]
        for h in range(x.shape[1]):
            group = x[i, h // G * G : h // G * G + G]
            rows.append(head(x[i, h], y[i, h // G], v[i, h // G], mask, group, **sizes))
    return torch.stack(rows).view(*x.shape[:3], v.shape[-1])
