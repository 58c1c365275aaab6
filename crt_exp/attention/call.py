"""Attention in linear time and memory with any feature map: Y = diag(A 1)^-1 A V with A = phi_q(x) phi_k(y)^T.

Legend: B batch, H query heads, Hkv key heads, L queries, S keys, d, values of dimension dv, M features.
"""

import torch
from torch import Tensor

from crt_exp.attention.checks import check_inputs, compute_dtype, repeat_heads
from crt_exp.attention.engines.at_once import attend_at_once
from crt_exp.attention.engines.generic import Call, chunked_attention
from crt_exp.attention.engines.operators import positive_attention
from crt_exp.attention.partials import DenominatorCount, check_policy
from crt_exp.features.base import FeatureMap
from crt_exp.features.exponential import PositiveExponential
from crt_exp.nested import Nested, leaves
from crt_exp.samplers.noise import precise


def attention(x: Tensor, y: Tensor, v: Tensor, phi: FeatureMap, noise, params=(), *, causal: bool = False,
              key_mask: Tensor | None = None, denominator: str = "none", normalize: bool = True,
              counter: DenominatorCount | None = None, scale: float = 1.0) -> Tensor:
    """Estimates softmax attention of queries x (B,H,L,d) to keys y (B,Hkv,S,d) with values v (B,Hkv,S,dv): (B,H,L,dv).

    The logit is scale^2 x.y: for scaled dot products give x = d^(-1/4) q and y = d^(-1/4) k, or q and k and scale = d^(-1/4),
    which multiplies both without a pass over them. Hkv divides H, and consecutive query heads share a key head. `noise` is a
    Noise of batch (), (1,) or (H,) (a tuple of them for Sum and Product), `params` come from `phi.fit` of the scaled vectors,
    with leading dimensions that broadcast to (B, H). Differentiable in x, y and v; noise and parameters are constants.
    Time O((L + S) M (d + dv)); memory O(L + M dv) beyond inputs and outputs, in the backward pass too. Forward-mode and second
    derivatives, the transforms of torch.func (grad, vmap, jvp, ...) and torch.export go through plain operations: O(L M) memory.

    `causal`: query i sees keys j <= i + S - L. `key_mask` (B, S), True = keep: masked keys may hold anything; a query that sees
    no key gets 0. Nothing is added to features or denominators. Half precision is computed in float32.

    Signed maps can have denominators that are not positive: `denominator` leaves them ("none"), keeps them off zero
    ("clamp", at 1e-6 of the sum of absolute values) or takes their absolute value ("abs"); `counter` counts them, and without one
    a warning says how many there were (on the CPU). `normalize=False` gives the numerator phi_q(x) phi_k(y)^T v alone.

    Raises ValueError where shapes, mask, noise or parameters do not fit, and where queries or keys are not finite (CPU only: on
    other devices the check would wait for the result).
    """
    check_policy(denominator)
    check_inputs(x, y, v, noise, params, causal, key_mask)
    heads, key_heads, noise = x.shape[1], y.shape[1], precise(noise, compute_dtype(x, y, v))
    if heads != key_heads and not causal and _shared_by_heads(noise, params):
        x = x.unflatten(1, (key_heads, -1)).flatten(2, 3)  # heads with the same keys and features are one longer set of queries
    y, v = repeat_heads(y, x.shape[1]), repeat_heads(v, x.shape[1])
    if isinstance(phi, PositiveExponential) and normalize:
        out = positive_attention(x, y, v, phi, noise, params, causal, key_mask, scale)
    else:
        x, y = (x, y) if scale == 1 else (x * scale, y * scale)
        count = counter or DenominatorCount()
        call = Call(phi, noise, params, causal, key_mask, denominator, normalize, count)
        exporting = torch.compiler.is_exporting()
        out = attend_at_once(x, y, v, call.whole()) if exporting else chunked_attention(x, y, v, call)
        if counter is None and normalize and not torch.compiler.is_compiling():
            count.warn()
    return out if x.shape[1] == heads else out.unflatten(2, (heads // key_heads, -1)).flatten(1, 2)


def _shared_by_heads(noise: Nested, params: Nested) -> bool:
    """Whether all heads have the same noise and parameters."""
    batches = [n.batch for n in leaves(noise)] + [t.shape[:-2] for t in leaves(params)]
    return all(not batch or batch[-1] == 1 for batch in batches)
