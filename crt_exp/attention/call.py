"""Attention in linear time and memory with any feature map: Y = diag(A 1)^-1 A V with A = phi_q(x) phi_k(y)^T.

Legend: B batch, H query heads, Hkv key heads, L queries, S keys, d, values of dimension dv, M features.
"""

import torch
from torch import Tensor

from crt_exp.attention.checks import check_inputs, compute_dtype, repeat_heads
from crt_exp.attention.engines.chunks import chunked_partial
from crt_exp.attention.engines.operators import positive_attention, positive_partial
from crt_exp.attention.partials import DenominatorCount, Partial, check_policy, finish
from crt_exp.features.base import FeatureMap
from crt_exp.features.exponential import PositiveExponential
from crt_exp.samplers.noise import at_least_float32, leaves, precise


def attention(x: Tensor, y: Tensor, v: Tensor, phi: FeatureMap, noise, params=(), *, causal: bool = False,
              key_mask: Tensor | None = None, denominator: str = "none", normalize: bool = True,
              counter: DenominatorCount | None = None, scale: float = 1.0) -> Tensor:
    """Estimates softmax attention of queries x (B,H,L,d) to keys y (B,Hkv,S,d) with values v (B,Hkv,S,dv): (B,H,L,dv).

    The logit is scale^2 x.y: for scaled dot products give x = d^(-1/4) q and y = d^(-1/4) k, or q and k and scale =
    d^(-1/4), which multiplies both without a pass over them. Hkv divides H, and consecutive query heads share a key
    head. `noise` is a Noise of batch (), (1,) or (H,) (a tuple of them for Sum and Product), `params` come from
    `phi.fit` of the scaled vectors, with leading dimensions that broadcast to (B, H). Differentiable in x, y and v, and
    in rows and parameters that require a gradient. Time O((L + S) M (d + dv)); memory O(L + M dv) beyond inputs and
    outputs, in the backward pass too: in closed form for positive exponential maps, while autograd computes the chunks
    of other maps again where the features are many (causal: with a state of M dv numbers for every 512 tokens). The
    transforms of torch.func (grad, vmap, jvp, ...), forward mode and torch.export go through plain operations: O(L M)
    memory; second derivatives by autograd alone exist for the other maps. With one projection a query's feature
    cancels: its gradient is zero up to rounding.

    `causal`: query i sees keys j <= i + S - L. `key_mask` (B, S), True = keep: masked keys may hold anything; a query
    that sees no key gets 0. Nothing is added to features or denominators. Half precision is computed in float32.

    Signed maps can have denominators that are not positive: `denominator` leaves them ("none"), keeps them off zero
    ("clamp", at 1e-6 of the sum of absolute values) or takes their absolute value ("abs"); `counter` counts them, and
    without one a warning says how many there were (on the CPU). `normalize=False` gives the numerator phi_q(x)
    phi_k(y)^T v alone.

    Raises ValueError where shapes, mask, noise or parameters do not fit, and where queries or keys are not finite (CPU
    only: on other devices the check would wait for the result).
    """
    check_policy(denominator)
    check_inputs(x, y, v, noise, params, causal, key_mask)
    heads, noise = x.shape[1], precise(noise, compute_dtype(x, y, v))
    x, y, v = _together(x, y, v, noise, params, causal)
    count = counter or DenominatorCount()
    if isinstance(phi, PositiveExponential) and normalize:
        out = positive_attention(x, y, v, phi, noise, params, causal, key_mask, scale)
    else:
        x, y = (x, y) if scale == 1 else (at_least_float32(x) * scale, at_least_float32(y) * scale)
        rows = chunked_partial(x, y, v, phi, noise, params, causal, key_mask, denominator == "clamp")
        count.add(rows)
        out = finish(rows, denominator, normalize).to(v.dtype)
    if counter is None and normalize and not torch.compiler.is_compiling():
        count.warn()
    return _apart(out, heads)


def partial_attention(x: Tensor, y: Tensor, v: Tensor, phi: FeatureMap, noise, params=(), *, causal: bool = False,
                      key_mask: Tensor | None = None, modulus: bool = False, scale: float = 1.0) -> Partial:
    """What the queries gather from these keys: a Partial with a row for each query, (B,H,L,.), to be merged with that
    of others.

    `merge` adds the partials of parts of the keys, `finish` or `.output` divide; `.logsum` is the log of the
    denominator in nats. Differentiable in x, y and v, through outputs and log-sums alike. `modulus`: with the sums of
    absolute values that `finish(..., "clamp")` needs. The rest as for `attention`. Raises ValueError as it does.
    """
    check_inputs(x, y, v, noise, params, causal, key_mask)
    heads, noise = x.shape[1], precise(noise, compute_dtype(x, y, v))
    x, y, v = _together(x, y, v, noise, params, causal)
    if isinstance(phi, PositiveExponential) and not modulus:
        rows = positive_partial(x, y, v, phi, noise, params, causal, key_mask, scale)
    else:
        x, y = at_least_float32(x) * scale, at_least_float32(y) * scale
        rows = chunked_partial(x, y, v, phi, noise, params, causal, key_mask, modulus)
    return Partial(*(None if t is None else _apart(t, heads) for t in rows))


def _together(x: Tensor, y: Tensor, v: Tensor, noise, params, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """With as many key heads as query heads: query heads that share keys and features become one longer set of queries,
    else the keys are repeated."""
    key_heads, batches = y.shape[1], [n.batch for n in leaves(noise)] + [t.shape[:-2] for t in leaves(params)]
    shared = all(not batch or batch[-1] == 1 for batch in batches)
    if x.shape[1] != key_heads and not causal and shared:
        x = x.unflatten(1, (key_heads, -1)).flatten(2, 3)
    return x, repeat_heads(y, x.shape[1]), repeat_heads(v, x.shape[1])


def _apart(t: Tensor, heads: int) -> Tensor:
    """Rows of the query heads again."""
    groups = heads // t.shape[1]
    return t if groups == 1 else t.unflatten(2, (groups, -1)).flatten(1, 2)
