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


def about_zero(tilt, root, ridge):
    """The root of the second moments about 0 of queries whose mean is `tilt`, about which they have root root^T, with
    that ridge on the diagonal."""
    eye, moments = torch.eye(len(root), dtype=root.dtype), root @ root.T
    moments = moments - ridge / (1 + ridge) * moments.diagonal().mean() * eye + torch.outer(tilt, tilt)
    return torch.linalg.cholesky(moments + 1e-4 * moments.diagonal().mean() * eye)


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


def head(x, y, v, keep, *, block, heavy, cells, first_order=False, cross=False, codebook=None, mass=True,
         read=None):
    """In both directions: outputs (L, dv) of queries x (L, d), keys y (S, d), v (S, dv), keep (S,). read: places (L, o)
    of the keys that each query asks for, -1 for none; queries are measured about 0 then, and what is left in a cell
    counts as what lies below them."""
    L, S = len(x), len(y)
    y, v = torch.where(keep[:, None], y, 0.0), torch.where(keep[:, None], v, 0.0)
    if cross:
        c, tilt = y[keep].detach().mean(0), torch.zeros_like(y[0])
        centred = (y[keep] - c).detach()
        moments = centred.T @ centred / keep.sum()
        root = torch.linalg.cholesky(moments + 1e-4 * moments.diagonal().mean() * torch.eye(len(c), dtype=y.dtype))
        if codebook is not None:
            tilt, root = codebook
    else:
        c, tilt, root = measure(x[keep], y, keep)
    if read is not None:
        tilt, root = torch.zeros_like(tilt), about_zero(tilt, root, 0.0 if cross else 1e-4)
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
    is_read = torch.zeros(L, S + 1, dtype=torch.bool)
    if read is not None:
        is_read[torch.arange(L)[:, None], read] = True                     # the last column: those that are none
    is_read = is_read[:, :S]
    assert not (is_read & ~far).any()                                      # each key counts once
    far = far & ~is_read
    logits = (x @ y.T).masked_fill(~(near & keep | is_heavy | is_read), EMPTY)
    if read is None:
        virtual, values = cell_logits(x, y, v, z, root, tilt, pool, far, cell, len(centres), mass)
    else:
        lows = torch.where(is_read, x @ y.T, torch.inf).detach().amin(1)
        virtual, values = logits_below(lows, x, y, v, root, pool, far, cell, len(centres))
    out = mixed(logits, v, virtual, values)
    if first_order:
        u = torch.where(pool, torch.exp(y @ tilt - w[pool].max()), 0.0) if pool.any() else torch.zeros(S).to(y)
        means = torch.stack([(u[cell == k, None] * y[cell == k]).sum(0) / u[cell == k].sum().clamp(min=1e-30)
                             for k in range(len(centres))])
        C = (u[:, None] * v).T @ (y - means[cell]) / u.sum().clamp(min=1e-30)
        out = out + shares(logits, virtual) * ((x - tilt) @ C.T)
    return out


def cell_logits(x, y, v, z, root, tilt, pool, far, cell, K, mass):
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
        logit = (x - tilt) @ mu + level + torch.where(there, N, 1.0).log() + (torch.log1p(tau / 2) if mass else 0)
        logits.append(torch.where(there, logit, EMPTY))
        values.append((far * u) @ v / torch.where(there, N, 1.0)[:, None])
    if not logits:
        return x.new_full((len(x), 0), EMPTY), x.new_zeros(len(x), 0, v.shape[-1])
    return torch.stack(logits, -1), torch.stack(values, 1)


def logits_below(lows, x, y, v, root, pool, far, cell, K):
    """As cell_logits, of what lies below the logits `lows` (L,) in each cell, where they are normal: with the mean's
    logit for their mean, and as wide in all directions of z; the keys of a cell count alike."""
    logits, values = [], []
    for k in range(K):
        mine = pool & (cell == k)
        if not mine.any():
            continue
        mu = y[mine].mean(0)
        tau = ((y[mine] - mu) @ root).square().sum(-1).mean().detach()
        sd = torch.linalg.solve(root, x.detach().T).norm(dim=0) * (tau / len(mu)).sqrt()
        each, left = (x @ mu).detach(), far & mine                                          # (L,), (L, S)
        t = (lows - each) / sd.clamp(min=1e-30)
        below = sd**2 / 2 + torch.special.log_ndtr(t - sd) - torch.special.log_ndtr(t)
        more = torch.where(sd > 1e-6, below, (lows - each).clamp(max=0))
        N = left.sum(1)
        logits.append(torch.where(N > 0, x @ mu + more + N.clamp(min=1).log(), EMPTY))
        values.append(left.to(v.dtype) @ v / N.clamp(min=1)[:, None])
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
    out, read = x.new_empty(B, H, L, v.shape[-1]), sizes.pop("read", None)
    rows = []
    for i in range(B):
        mask = torch.ones(S, dtype=torch.bool) if keep is None else keep[i]
        for h in range(H):
            own = sizes | ({} if read is None else {"read": read[i, h]})
            rows.append(grouped_head(x[i, h // G * G:h // G * G + G], h % G, y[i, h // G], v[i, h // G], mask, **own))
    return torch.stack(rows).view(out.shape)


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


def causal_head(x, y, v, keep, book, *, block, heavy, first_order=False, mass=True):
    """Of one head, a query at a time. book: c, tilt, root, centres (K, d). The queries are the last ones."""
    c, tilt, root, centres = book
    L, S = len(x), len(y)
    y, v = torch.where(keep[:, None], y - c, 0.0), torch.where(keep[:, None], v, 0.0)
    z, places = (y @ root).detach(), (centres - c) @ root
    score = z.square().sum(-1) / 2 + (y @ tilt).detach()
    cell = torch.cdist(z, places).argmin(-1)
    out = []
    for i in range(L):
        at, start = i + S - L, first_of(keep)
        first = start + max(0, ((at - start) // block - 1) * block)                   # of the window
        past = [j for j in range(first) if keep[j]]
        best = sorted(past, key=lambda j: (-float(score[j]), j))[:heavy]
        exact = [j for j in range(first, at + 1) if keep[j]] + best
        rest = torch.tensor([j for j in past if j not in best], dtype=torch.long)
        logits, values, log_u, means = [x[i] @ y[j] for j in exact], [v[j] for j in exact], [], []
        for k in range(len(centres)):
            mine = rest[cell[rest] == k]
            if not len(mine):
                continue
            u = torch.exp(y[mine] @ tilt)
            mu = u @ y[mine] / u.sum()
            tau = (u * ((y[mine] - mu) @ root).square().sum(-1)).sum() / u.sum()
            logits.append((x[i] - tilt) @ mu + u.sum().log() + (torch.log1p(tau / 2) if mass else 0))
            values.append(u @ v[mine] / u.sum())
            log_u, means = [*log_u, *u], [*means, *((j, mu) for j in mine.tolist())]
        if not logits:
            out.append(v.new_zeros(v.shape[-1]))
            continue
        shares = torch.stack(logits).softmax(0)
        out.append(shares @ torch.stack(values))
        if first_order and log_u:
            u = torch.stack(log_u)
            C = sum(w * torch.outer(v[j], y[j] - mu) for w, (j, mu) in zip(u, means)) / u.sum()
            out[-1] = out[-1] + shares[len(exact):].sum() * (C @ (x[i] - tilt))
    return torch.stack(out)


def causal(x, y, v, book, keep=None, **sizes):
    """(B, H, L, d), (B, Hkv, S, d); book: of (Hkv, ...) each."""
    B, H, L, _ = x.shape
    G, S = H // y.shape[1], y.shape[2]
    masks = torch.ones(B, S, dtype=torch.bool) if keep is None else keep
    rows = [causal_head(x[i, h], y[i, h // G], v[i, h // G], masks[i], [t[h // G] for t in book], **sizes)
            for i in range(B) for h in range(H)]
    return torch.stack(rows).view(B, H, L, -1)
