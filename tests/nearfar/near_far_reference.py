"""Near-far attention by its definition, one head at a time, with matrices of all pairs: shares no line with the
package.

Legend: L queries x, S keys y, values v, K cells. Constants of a head: c, b = `tilt`, the root of Sigma_x.
"""

import torch

EMPTY = float("-inf")


def first_of(keep):
    """The place from which blocks are counted."""
    return int(keep.nonzero()[0]) if keep.any() else 0


def measure(x, y, keep):
    """c, tilt and the lower triangular root of Sigma_x, of one sequence."""
    x, y = x.detach(), y.detach()
    c, tilt = y[keep].mean(0), x.mean(0)
    moments = (x - tilt).T @ (x - tilt) / len(x)
    ridge = 1e-4 * moments.diagonal().mean()
    return c, tilt, torch.linalg.cholesky(moments + ridge * torch.eye(len(c), dtype=x.dtype))


def picked(z, w, pool, K):
    """Centres of cells: eight at a time of the largest u D, then one pass of Lloyd's algorithm."""
    u = torch.where(pool, torch.exp(w - w[pool].max()), 0.0) if pool.any() else torch.zeros_like(w)
    D = (z - (u[:, None] * z).sum(0) / u.sum().clamp(min=1e-30)).square().sum(-1)
    centres = []
    while len(centres) < K:
        for j in (u * D).argsort(descending=True)[:min(8, K - len(centres))].tolist():
            centres.append(z[j])
        D = torch.stack([D, *((z - p).square().sum(-1) for p in centres)]).amin(0)
    centres = torch.stack(centres)
    cell = torch.cdist(z, centres).argmin(-1)
    for k in range(K):
        mine = (cell == k) & pool
        if mine.any():
            centres[k] = (u[mine, None] * z[mine]).sum(0) / u[mine].sum()
    return centres


def head(x, y, v, keep, *, block, heavy, cells, first_order=False, cross=False):
    """In both directions: outputs (L, dv) of queries x (L, d), keys y (S, d), v (S, dv), keep (S,)."""
    L, S = len(x), len(y)
    y, v = torch.where(keep[:, None], y, 0.0), torch.where(keep[:, None], v, 0.0)
    if cross:
        c, tilt = y[keep].detach().mean(0), torch.zeros_like(y[0])
        centred = (y[keep] - c).detach()
        moments = centred.T @ centred / keep.sum()
        root = torch.linalg.cholesky(moments + 1e-4 * moments.diagonal().mean() * torch.eye(len(c), dtype=y.dtype))
    else:
        c, tilt, root = measure(x[keep], y, keep)
    y = y - c
    z, w = (y @ root).detach(), (y @ tilt).detach()
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
    out = mixed(logits, v, virtual, values)
    if first_order:
        u = torch.where(pool, torch.exp(y @ tilt - w[pool].max()), 0.0) if pool.any() else torch.zeros(S).to(y)
        means = torch.stack([(u[cell == k, None] * y[cell == k]).sum(0) / u[cell == k].sum().clamp(min=1e-30)
                             for k in range(len(centres))])
        C = (u[:, None] * v).T @ (y - means[cell]) / u.sum().clamp(min=1e-30)
        out = out + shares(logits, virtual) * ((x - tilt) @ C.T)
    return out


def cell_logits(x, y, v, z, root, tilt, pool, far, cell, K):
    """Logits (L, K) and values (L, K, dv) of the keys that stand for cells; -inf for cells that no query may see."""
    logits, values = [], []
    for k in range(K):
        mine = pool & (cell == k)
        if not mine.any():
            continue
        level = (y[mine] @ tilt).detach().max()
        u = torch.where(mine, torch.exp(y @ tilt - level), 0.0)
        mu = u @ y / u.sum()
        tau = (u * ((y - mu) @ root).square().sum(-1)).sum() / u.sum()
        N = (far * u).sum(1)                                                          # (L,)
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
    return own @ v + (far[..., None] * values).sum(1)


def shares(logits, virtual):
    return torch.cat([logits, virtual], -1).softmax(-1)[:, logits.shape[-1]:].sum(-1, keepdim=True)


def both(x, y, v, keep=None, **sizes):
    """(B, H, L, d), (B, Hkv, S, d): the queries of the heads of a group are measured together."""
    B, H, L, _ = x.shape
    G, S = H // y.shape[1], y.shape[2]
    rows = []
    for i in range(B):
        mask = torch.ones(S, dtype=torch.bool) if keep is None else keep[i]
        for h in range(H):
            rows.append(grouped_head(x[i, h // G * G:h // G * G + G], h % G, y[i, h // G], v[i, h // G], mask, **sizes))
    return torch.stack(rows).view(B, H, L, v.shape[-1])


def grouped_head(xs, which, y, v, keep, **sizes):
    """One head of a group: `measure` sees the queries of all of it."""
    global measure
    if len(xs) == 1 or sizes.get("cross"):
        return head(xs[which], y, v, keep, **sizes)
    own = measure
    try:
        measure = lambda x, y, keep_: own(xs[:, keep].flatten(0, 1), y, keep_)
        return head(xs[which], y, v, keep, **sizes)
    finally:
        measure = own
