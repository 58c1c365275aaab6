"""Attention by its definition, O(L S M) time: what tests and diagnostics compare the engines with, and shares no line
with them.

Notation: L queries x, S keys y, d, values v (..., S, dv), M features. x and y are already scaled: x = d^(-1/4) q,
y = d^(-1/4) k, so that x.y is the logit.

Of a feature map it takes phi_q and phi_k alone. Each entry of the kernel matrix, sum_m phi_q(x_i)_m phi_k(y_j)_m, is
summed in logs of its own, so nothing underflows or overflows whatever the other entries are; the rows are normalised as
a softmax is. Everything is computed in float64, whatever comes in.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.checks import check_inputs
from crt_exp.features.base import FeatureMap, Features
from crt_exp.samplers.noise import precise

CLAMP = 1e-6       # the floor of a clamped denominator, as a part of the sum of its terms' absolute values
ELEMENTS = 2**22   # numbers of a block of the (L, S, M) terms


class Kernel(NamedTuple):
    """The kernel matrix value * exp(log) and that of absolute values modulus * exp(log), (B,H,L,S), 0 where unseen."""

    value: Tensor
    modulus: Tensor
    log: Tensor

    def at(self, top: Tensor) -> tuple[Tensor, Tensor]:
        """Both matrices over exp(top)."""
        scale = torch.exp(self.log - top)
        return self.value * scale, self.modulus * scale


def attention_reference(x: Tensor, y: Tensor, v: Tensor, phi: FeatureMap, noise, params=(), *, causal: bool = False,
                        key_mask: Tensor | None = None, denominator: str = "none", normalize: bool = True,
                        scale: float = 1.0) -> Tensor:
    """`attention` by its definition: the whole kernel matrix of the whole features, differentiable by autograd.

    Arguments, result and errors are those of `attention`.
    """
    if denominator not in ("none", "clamp", "abs"):
        raise ValueError(f"denominator = {denominator!r}: choose one of none, clamp, abs")
    check_inputs(x, y, v, noise, params, causal, key_mask)
    seen = _seen(x, y, causal, key_mask)
    groups = x.shape[1] // y.shape[1]
    keys, values = (_unpadded(t, key_mask).double().repeat_interleave(groups, 1) for t in (y, v))
    noise = precise(noise, torch.float64)
    kernel = _kernel(phi.phi_q(scale * x.double(), noise, params), phi.phi_k(scale * keys, noise, params), seen)
    if not normalize:
        return (kernel.at(0)[0] @ values).to(v.dtype)
    weights, modulus = kernel.at(kernel.log.detach().amax(-1, keepdim=True).clamp(min=-1e300))
    total = _guarded(weights.sum(-1, keepdim=True), modulus.sum(-1, keepdim=True), denominator)
    return torch.where(total == 0, 0.0, weights @ values / torch.where(total == 0, 1.0, total)).to(v.dtype)


def _seen(x: Tensor, y: Tensor, causal: bool, key_mask: Tensor | None) -> Tensor:
    """Which keys each query sees, (B or 1, 1, L, S)."""
    L, S = x.shape[2], y.shape[2]
    position = torch.arange(S, device=x.device)
    seen = torch.ones(1, 1, L, S, dtype=torch.bool, device=x.device)
    if causal:
        seen = seen & (position <= position[S - L:, None])
    return seen if key_mask is None else seen & key_mask[:, None, None, :]


def _unpadded(t: Tensor, key_mask: Tensor | None) -> Tensor:
    """Zeros in place of what lies at padded positions, which may be NaN."""
    return t if key_mask is None else t.masked_fill(~key_mask[:, None, :, None], 0)


def _kernel(fq: Features, fk: Features, seen: Tensor) -> Kernel:
    """In blocks of queries: at once, the terms (B,H,L,S,M) would be M matrices."""
    fq, fk = (Features(*torch.broadcast_tensors(f.value.to(f.log_scale), f.log_scale)) for f in (fq, fk))
    size = max(1, ELEMENTS // max(1, fk.log_scale.numel()))
    blocks = zip(*(t.split(size, -2) for t in (*fq, seen.expand(-1, -1, fq.log_scale.shape[-2], -1))))
    kernels = [_block(value, log, fk, see) for value, log, see in blocks]
    return Kernel(*(torch.cat(parts, -2) for parts in zip(*kernels)))


def _block(value: Tensor, log: Tensor, fk: Features, seen: Tensor) -> Kernel:
    log = log.unsqueeze(-2) + fk.log_scale.unsqueeze(-3)                           # (B, H, l, S, M)
    top = log.detach().amax(-1)
    terms = torch.exp(log - top.unsqueeze(-1)) * value.unsqueeze(-2) * fk.value.unsqueeze(-3)
    total, modulus = (torch.where(seen, t, 0.0) for t in (terms.sum(-1), terms.abs().sum(-1)))
    return Kernel(total, modulus, torch.where(seen, top, -torch.inf))


def _guarded(total: Tensor, modulus: Tensor, denominator: str) -> Tensor:
    """The denominators as the policy has them: with sign(0) = 1, at least CLAMP of the modulus, or positive."""
    if denominator == "abs":
        return total.abs()
    floor = CLAMP * modulus.detach() if denominator == "clamp" else torch.zeros_like(modulus)
    return torch.where(total.abs() >= floor, total, torch.where(total < 0, -floor, floor))


def attention_matrix(x: Tensor, y: Tensor, phi: FeatureMap | None = None, noise=None, params=(), *,
                     causal: bool = False, rows: Tensor | None = None) -> Tensor:
    """The attention matrix (B,H,L,S) itself, float64, rows of sum 1: of a feature map, or exact softmax without one.

    rows: numbers of the queries that are wanted; default all. x, y, noise and params as for `attention`. One product of
    whole features, O(L S M) without the reference's care: a row whose kernels all underflow compared with those of
    another key of the sequence (causal, beyond e^700) is 0.
    """
    L, S = x.shape[2], y.shape[2]
    index = torch.arange(L, device=x.device) if rows is None else rows
    x, y = x[:, :, index], y.repeat_interleave(x.shape[1] // y.shape[1], 1)
    future = causal & (torch.arange(S, device=x.device) > index[:, None] + S - L)
    if phi is None:
        return (x.double() @ y.double().mT).masked_fill(future, -torch.inf).softmax(-1)
    if causal:  # the maxima are those of the whole sequence, which may lie far above those of the past
        x, y = x.double(), y.double()
    fq, fk = phi.phi_q(x, noise, params), phi.phi_k(y, noise, params)
    top = fk.log_scale.amax(-2, keepdim=True)
    log = fq.log_scale + top
    queries, keys = fq.value * torch.exp(log - log.amax(-1, keepdim=True)), fk.value * torch.exp(fk.log_scale - top)
    kernel = (queries @ keys.mT).masked_fill(future, 0)  # row by row over the largest of its terms
    total = kernel.sum(-1, keepdim=True)
    return (kernel / torch.where(total == 0, 1, total)).double()


def softmax_attention(x: Tensor, y: Tensor, v: Tensor, *, causal: bool = False,
                      key_mask: Tensor | None = None) -> Tensor:
    """Exact softmax attention with logits x.y, the limit of every softmax estimator as m grows;
    0 for a row without keys."""
    check_inputs(x, y, v, None, (), causal, key_mask)
    y, v = (_unpadded(t, key_mask).repeat_interleave(x.shape[1] // t.shape[1], 1) for t in (y, v))
    allowed = _seen(x, y, causal, key_mask)
    logits = (x @ y.mT).masked_fill(~allowed, -torch.inf)
    weights = torch.where(allowed.any(-1, keepdim=True), logits, 0.0).softmax(-1)
    return torch.where(allowed, weights, 0.0).to(v.dtype) @ v
