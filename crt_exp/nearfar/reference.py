"""Near-far attention by its equations, for all pairs of queries and keys.

The outputs of a query i are

    out_i = sum_k e^logit_ik value_ik / sum_k e^logit_ik

over single keys, whose logits are x_i.y_k, and over clusters, whose logits and values stand for the keys that the query
does not see exactly. The engines (both_directions.py, causal.py, and the C sources) compute the same without matrices
of all pairs; the tests compare their outputs and gradients with these. The sets are those that choice.py chooses.

Notation as in dispatch.py. Queries q are (Z, L, G, d): the heads of a group follow the position. Keys are relative to
their shift, which no softmax sees. Masks are (Z, L, 1 or G, S).
"""

import torch
from torch import Tensor

from crt_exp.attention.checks import first_unmasked
from crt_exp.attention.reference import softmax_attention
from crt_exp.nearfar.both_directions import Bidirectional
from crt_exp.nearfar.causal import Causal, Epoch
from crt_exp.nearfar.choice import (
    MASKED,
    MIN_WEIGHT,
    KeySets,
    Sizes,
    log_number,
    nearest_centre,
    one_hot,
    rows_at,
    unmasked_keys,
    zero_masked,
)
from crt_exp.nearfar.retrieval import log_mean_below, retrieved_positions


def bidirectional_reference(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    sizes: Sizes,
    keep: Tensor | None = None,
    cross: bool = False,
) -> Tensor:
    """Return the outputs (Z, G, L, dv) of queries (Z, G, L, d) to keys (Z, S, d) in both directions.

    keep (Z, S). With `cross` no key is near.

    >>> x, y, v = torch.randn(1, 2, 12, 4), torch.randn(1, 12, 4), torch.randn(1, 12, 3)
    >>> out = bidirectional_reference(x, y, v, Sizes(block=12))
    >>> exact = softmax_attention(x, y.unsqueeze(1), v.unsqueeze(1))
    >>> torch.allclose(out, exact, atol=1e-5)
    True
    """
    keep = unmasked_keys(y, keep)
    y = zero_masked(y, keep)
    v = zero_masked(v, keep)
    sets = Bidirectional(sizes, cross).choose(x, y, keep)
    tilt = sets.metric.tilt
    root = sets.metric.root
    q = x.transpose(1, 2)
    y = y - sets.metric.shift
    w = sets.metric.log_weights(y)
    near = torch.zeros_like(keep)[:, None, None]
    if not cross:
        near = near_pairs(keep, sizes.block)
    heavy = keep & ~sets.pool

    top = w.detach().masked_fill(~sets.pool, MASKED).amax(1, keepdim=True)
    u = (w - top).masked_fill(~sets.pool, -torch.inf).exp()[:, None, None]
    members = one_hot(sets.cluster, sets.centres.shape[1], y.dtype)
    mu, tau = cluster_moments(y, u, members, root)
    values, N = cluster_means(v, u * ~near, members)
    cluster_logits = (q - tilt.unsqueeze(1)) @ mu.squeeze(2).mT + top[..., None, None]
    cluster_logits = cluster_logits + torch.log1p(tau / 2) + log_number(N)

    parts = [
        (near_logits(q, y, near & (keep & ~heavy)[:, None, None]), v[:, None, None]),
        (heavy_logits(q, y, sets), rows_at(v, sets.heavy)[:, None, None]),
        (cluster_logits, values),
    ]
    out, cluster_share = combine(parts)
    if sizes.first_order:
        u = u.squeeze(2)
        residuals = y - rows_at(mu[:, 0, 0], sets.cluster)
        slope = (u * v.mT) @ residuals / u.sum(-1, keepdim=True).clamp(min=MIN_WEIGHT)
        out = out + cluster_share * ((q - tilt.unsqueeze(1)) @ slope.unsqueeze(1).mT)
    return out.transpose(1, 2)


def causal_reference(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    sizes: Sizes,
    keep: Tensor | None = None,
) -> Tensor:
    """Return the outputs (Z, G, S, dv) of queries (Z, G, S, d), each of which sees the keys up to its own.

    y (Z, S, d), v (Z, S, dv), keep (Z, S).
    """
    keep = unmasked_keys(y, keep)
    y = zero_masked(y, keep)
    v = zero_masked(v, keep)
    until = sizes.first_renewal
    early = (x[:, :, :until], y[:, None, :until], v[:, None, :until])
    outputs = [softmax_attention(*early, causal=True, key_mask=keep[:, :until])]
    for epoch in Causal(sizes).choose(x, y, keep).epochs:
        position = torch.arange(epoch.start, min(epoch.stop, y.shape[1]))
        q = x[:, :, position].transpose(1, 2)
        outputs.append(_epoch_reference(epoch, position, q, y, v, sizes, keep))
    return torch.cat(outputs, 2)


def _epoch_reference(
    epoch: Epoch,
    position: Tensor,
    q: Tensor,
    y: Tensor,
    v: Tensor,
    sizes: Sizes,
    keep: Tensor,
) -> Tensor:
    """Return the outputs of queries at these positions, between two renewals."""
    sets = epoch.sets
    root = sets.metric.root
    first_near = (position // sizes.block - 1) * sizes.block
    key = torch.arange(y.shape[1])
    single = keep.scatter(1, sets.heavy, False)[:, None, None]
    past = single & (key <= position[:, None, None])
    near = past & (key >= first_near[:, None, None])
    far = past & ~near

    count = sizes.retrieval_count(epoch.start)
    retrieved = retrieved_positions(y, far, q, count)
    is_retrieved = one_hot(retrieved + 1, y.shape[1] + 1, torch.bool)[..., 1:].any(-2)
    rest = far & ~is_retrieved
    y = y - sets.metric.shift
    members = one_hot(nearest_centre(y @ root, sets.centres), sets.centres.shape[1], y.dtype)
    mu, tau = cluster_moments(y, far.to(y.dtype), members, root)
    values, N = cluster_means(v, rest.to(y.dtype), members)
    mean_logits = q @ mu.squeeze(2).mT
    with torch.no_grad():  # the rest of a cluster has logits below the least retrieved one
        logits = near_logits(q, y, is_retrieved).masked_fill(~is_retrieved, torch.inf)
        sd = torch.linalg.vector_norm(q @ root.unsqueeze(1), dim=-1, keepdim=True) * tau.sqrt()
        correction = log_mean_below(mean_logits, sd, logits.amin(-1, keepdim=True)) - mean_logits

    parts = [
        (near_logits(q, y, near | is_retrieved), v[:, None, None]),
        (heavy_logits(q, y, sets), rows_at(v, sets.heavy)[:, None, None]),
        (mean_logits + correction + log_number(N), values),
    ]
    out, _ = combine(parts)
    return out.transpose(1, 2)


def near_pairs(keep: Tensor, block: int) -> Tensor:
    """Return which keys lie in neighbouring blocks of each query, (Z, S, 1, S).

    Blocks are counted from the first real token.
    """
    position = torch.arange(keep.shape[1]) - first_unmasked(keep).unsqueeze(1)
    number = position.div(block, rounding_mode="floor")
    return (number[:, :, None, None] - number[:, None, None]).abs() <= 1


def near_logits(q: Tensor, y: Tensor, seen: Tensor) -> Tensor:
    """Return x_i.y_j (Z, L, G, S) of single keys, MASKED where they are not seen."""
    return (q @ y.unsqueeze(1).mT).masked_fill(~seen, MASKED)


def heavy_logits(q: Tensor, y: Tensor, sets: KeySets) -> Tensor:
    """Return x_i.y_j (Z, L, G, n) of the heavy hitters."""
    return near_logits(q, rows_at(y, sets.heavy), sets.there[:, None, None])


def cluster_means(t: Tensor, weight: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Return weighted means (Z, L, G, K, k) of the rows t (Z, S, k) of each cluster, and the weights N (Z, L, G, K).

    weight (Z, L, G, S), where L and G may be 1; members (Z, S, K).
    """
    N = weight @ members.unsqueeze(1)
    sums = torch.einsum("zlgs,zsk,zsc->zlgkc", weight, members, t)
    return sums / N.clamp(min=MIN_WEIGHT).unsqueeze(-1), N


def cluster_moments(
    y: Tensor,
    weight: Tensor,
    members: Tensor,
    root: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the means mu (Z, L, G, K, d) of clusters, and their variance tau in z (Z, L, G, K)."""
    mu, _ = cluster_means(y, weight, members)
    squares = (y @ root).square().sum(-1, keepdim=True)
    mean_square, _ = cluster_means(squares, weight, members)
    tau = mean_square.squeeze(-1) - (mu @ root[:, None, None]).square().sum(-1)
    return mu, tau.clamp(min=0)


def combine(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the softmax over the logits of all parts times their values, and the share of the last part.

    Logits (Z, L, G, k), values (Z, L, G, k, dv), where L and G may be 1.
    """
    logits = [logit for logit, _ in parts]
    widths = [logit.shape[-1] for logit in logits]
    weights = torch.cat(logits, -1).softmax(-1).split(widths, -1)
    out = torch.zeros(()).to(logits[0])
    for weight, (_, values) in zip(weights, parts):
        out = out + torch.einsum("zlgk,zlgkc->zlgc", weight, values)
    return out, weights[-1].sum(-1, keepdim=True)
