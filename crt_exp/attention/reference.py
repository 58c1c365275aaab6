"""Attention by its definition in O(L S M) time, the reference for tests.

Tests and diagnostics compare the engines with it, so it shares no computation with them. It uses only phi_q and phi_k
of a map.
Each entry sum_m phi_q(x_i)_m phi_k(y_j)_m of the kernel matrix has a log scale of its own, so that nothing overflows or
underflows. All computations use float64.

Notation: L queries x, S keys y, d, values v (..., S, dv), M features. x = d^(-1/4) q and y = d^(-1/4) k are scaled, so
that x.y is the logit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.checks import check_inputs
from crt_exp.features.base import FeatureMap, Features
from crt_exp.samplers.noise import match_float64

CLAMP = 1e-6  # floor of a clamped denominator, relative to the sum of absolute terms
ELEMENTS = 2**22  # elements of a block of the (L, S, M) terms


class Kernel(NamedTuple):
    """Kernel matrix value * exp(log), with sums of absolute terms modulus * exp(log).

    All are (B,H,L,S), and 0 for keys that a query does not see.
    """

    value: Tensor
    modulus: Tensor
    log: Tensor

    def at(self, top: Tensor) -> tuple[Tensor, Tensor]:
        """Return both matrices divided by exp(top)."""
        scale = torch.exp(self.log - top)
        return self.value * scale, self.modulus * scale


def attention_reference(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    phi: FeatureMap,
    noise,
    params=(),
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    denominator: str = "none",
    normalize: bool = True,
    scale: float = 1.0,
) -> Tensor:
    """Compute `attention` by its definition, from the full kernel matrix.

    Arguments, result and errors are those of `attention`. Differentiable by autograd.

    >>> from crt_exp.attention import attention
    >>> from crt_exp.features import OPRF
    >>> from crt_exp.samplers import iid
    >>> x, y, v = torch.randn(3, 1, 2, 7, 4).double()
    >>> method = (OPRF(A=-0.1), iid(8, 4, torch.Generator()), OPRF(A=-0.1).fit(None))
    >>> torch.allclose(attention(x, y, v, *method), attention_reference(x, y, v, *method))
    True
    """
    if denominator not in ("none", "clamp", "abs"):
        raise ValueError(f"denominator={denominator!r}: expected one of none, clamp, abs")
    check_inputs(x, y, v, noise, params, causal, key_mask)
    seen = _seen(x, y, causal, key_mask)
    groups = x.shape[1] // y.shape[1]
    keys, values = (_unpadded(t, key_mask).double().repeat_interleave(groups, 1) for t in (y, v))
    noise = match_float64(noise, torch.float64)
    kernel = _kernel(
        phi.phi_q(scale * x.double(), noise, params), phi.phi_k(scale * keys, noise, params), seen
    )
    if not normalize:
        return (kernel.at(torch.zeros(()))[0] @ values).to(v.dtype)
    weights, modulus = kernel.at(kernel.log.detach().amax(-1, keepdim=True).clamp(min=-1e300))
    total = _guarded(weights.sum(-1, keepdim=True), modulus.sum(-1, keepdim=True), denominator)
    return torch.where(total == 0, 0.0, weights @ values / torch.where(total == 0, 1.0, total)).to(
        v.dtype
    )


def _seen(x: Tensor, y: Tensor, causal: bool, key_mask: Tensor | None) -> Tensor:
    """Return which keys each query sees, (B or 1, 1, L, S)."""
    L, S = x.shape[2], y.shape[2]
    position = torch.arange(S, device=x.device)
    seen = torch.ones(1, 1, L, S, dtype=torch.bool, device=x.device)
    if causal:
        seen = seen & (position <= position[S - L :, None])
    return seen if key_mask is None else seen & key_mask[:, None, None, :]


def _unpadded(t: Tensor, key_mask: Tensor | None) -> Tensor:
    """Replace padded positions, which may hold NaN, by zeros."""
    return t if key_mask is None else t.masked_fill(~key_mask[:, None, :, None], 0)


def _kernel(fq: Features, fk: Features, seen: Tensor) -> Kernel:
    """Compute the kernel matrix in blocks of queries, to save memory."""
    fq, fk = (
        Features(*torch.broadcast_tensors(f.value.to(f.log_scale), f.log_scale)) for f in (fq, fk)
    )
    size = max(1, ELEMENTS // max(1, fk.log_scale.numel()))
    blocks = zip(
        *(t.split(size, -2) for t in (*fq, seen.expand(-1, -1, fq.log_scale.shape[-2], -1)))
    )
    kernels = [_block(value, log, fk, see) for value, log, see in blocks]
    return Kernel(*(torch.cat(parts, -2) for parts in zip(*kernels)))


def _block(value: Tensor, log: Tensor, fk: Features, seen: Tensor) -> Kernel:
    log = log.unsqueeze(-2) + fk.log_scale.unsqueeze(-3)  # (B, H, l, S, M)
    top = log.detach().amax(-1)
    terms = torch.exp(log - top.unsqueeze(-1)) * value.unsqueeze(-2) * fk.value.unsqueeze(-3)
    total, modulus = (torch.where(seen, t, 0.0) for t in (terms.sum(-1), terms.abs().sum(-1)))
    return Kernel(total, modulus, torch.where(seen, top, -torch.inf))


def _guarded(total: Tensor, modulus: Tensor, denominator: str) -> Tensor:
    """Apply the denominator policy, with sign(0) = 1 and the floor CLAMP * modulus."""
    if denominator == "abs":
        return total.abs()
    floor = CLAMP * modulus.detach() if denominator == "clamp" else torch.zeros_like(modulus)
    return torch.where(total.abs() >= floor, total, torch.where(total < 0, -floor, floor))


def attention_matrix(
    x: Tensor,
    y: Tensor,
    phi: FeatureMap | None = None,
    noise=None,
    params=(),
    *,
    causal: bool = False,
    rows: Tensor | None = None,
) -> Tensor:
    """Return the attention matrix (B,H,L,S) in float64, with rows of sum 1.

    It belongs to a feature map, or to exact softmax without one. One product of full features takes O(L S M), without
    the log scales of the reference: a causal row is 0 if all its kernels underflow relative to another key of the
    sequence (beyond e^700).
    x, y, noise and params are those of `attention`.

    Args:
        rows: indices of the queries to return, by default all.
    """
    L, S = x.shape[2], y.shape[2]
    index = torch.arange(L, device=x.device) if rows is None else rows
    x, y = x[:, :, index], y.repeat_interleave(x.shape[1] // y.shape[1], 1)
    future = causal & (torch.arange(S, device=x.device) > index[:, None] + S - L)
    if phi is None:
        return (x.double() @ y.double().mT).masked_fill(future, -torch.inf).softmax(-1)
    if causal:  # maxima over the whole sequence may lie far above those of the past
        x, y = x.double(), y.double()
    fq, fk = phi.phi_q(x, noise, params), phi.phi_k(y, noise, params)
    top = fk.log_scale.amax(-2, keepdim=True)
    log = fq.log_scale + top
    queries, keys = (
        fq.value * torch.exp(log - log.amax(-1, keepdim=True)),
        fk.value * torch.exp(fk.log_scale - top),
    )
    kernel = (queries @ keys.mT).masked_fill(future, 0)  # each row relative to its largest term
    total = kernel.sum(-1, keepdim=True)
    return (kernel / torch.where(total == 0, 1, total)).double()


def softmax_attention(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Compute exact softmax attention with logits x.y; 0 in rows without keys.

    It is the limit of every softmax estimator as m grows.

    >>> x, y, v = torch.randn(3, 1, 2, 6, 4)
    >>> exact = (x @ y.mT).softmax(-1) @ v
    >>> torch.allclose(softmax_attention(x, y, v), exact, atol=1e-6)
    True
    """
    check_inputs(x, y, v, None, (), causal, key_mask)
    y, v = (_unpadded(t, key_mask).repeat_interleave(x.shape[1] // t.shape[1], 1) for t in (y, v))
    allowed = _seen(x, y, causal, key_mask)
    logits = (x @ y.mT).masked_fill(~allowed, -torch.inf)
    weights = torch.where(allowed.any(-1, keepdim=True), logits, 0.0).softmax(-1)
    return torch.where(allowed, weights, 0.0).to(v.dtype) @ v
