"""The attention engine's materialised twins, O(L S) memory: the definition that tests and diagnostics compare with.

Legend: L queries x, S keys y, d, values v (..., S, dv), M features; a, b log features of queries and keys. x and y are
already scaled: x = d^(-1/4) q, y = d^(-1/4) k, so that x.y is the logit.
"""

import torch
from torch import Tensor

from crt_exp.attention.checks import check_inputs, compute_dtype, repeat_heads
from crt_exp.attention.partials import Partial, check_policy, finish
from crt_exp.features.base import FeatureMap, Features


def attention_reference(x: Tensor, y: Tensor, v: Tensor, phi: FeatureMap, noise, params=(), *, causal: bool = False,
                        key_mask: Tensor | None = None, denominator: str = "none", normalize: bool = True,
                        scale: float = 1.0) -> Tensor:
    """`attention` by its definition: the whole kernel matrix of the whole features, differentiable by autograd.

    Causal row i is the attention of query i alone to the keys j <= i + S - L, so nothing of the future can enter.
    Arguments, result and errors are those of `attention`.
    """
    check_policy(denominator)
    check_inputs(x, y, v, noise, params, causal, key_mask)
    y, v = repeat_heads(y, x.shape[1]), repeat_heads(v, x.shape[1])
    dtype = compute_dtype(x, y, v)
    x, y, values, keep = x.to(dtype) * scale, y.to(dtype) * scale, v.to(dtype), None
    if key_mask is not None:
        keep = key_mask[:, None]                                                  # (B, 1, S)
        y, values = (torch.where(keep[..., None], t, 0.0) for t in (y, values))   # padding may hold NaN
    fq, fk = phi.phi_q(x, noise, params), phi.phi_k(y, noise, params)
    L, S = x.shape[-2], y.shape[-2]
    if not causal:
        return finish(_gather(fq, fk, values, keep), denominator, normalize).to(v.dtype)
    rows = []
    for i in range(L):
        past = slice(0, i + S - L + 1)
        p = _gather(_tokens(fq, slice(i, i + 1)), _tokens(fk, past), values[..., past, :],
                    None if keep is None else keep[..., past])
        rows.append(finish(p, denominator, normalize))
    return torch.cat(rows, -2).to(v.dtype)


def attention_matrix(x: Tensor, y: Tensor, phi: FeatureMap | None = None, noise=None, params=(), *, causal: bool = False,
                     rows: Tensor | None = None) -> Tensor:
    """The attention matrix (B,H,L,S) itself, float64, rows of sum 1: of a feature map, or exact softmax without one.

    rows: numbers of the queries that are wanted; default all. x, y, noise and params as for `attention`. A row whose kernels all
    underflow beside those of another key of the sequence (causal, beyond e^700) is 0.
    """
    L, S = x.shape[2], y.shape[2]
    index = torch.arange(L, device=x.device) if rows is None else rows
    x, y = x[:, :, index], repeat_heads(y, x.shape[1])
    future = causal & (torch.arange(S, device=x.device) > index[:, None] + S - L)
    if phi is None:
        return (x.double() @ y.double().mT).masked_fill(future, -torch.inf).softmax(-1)
    if causal:  # the maxima are those of the whole sequence, which may lie far above those of the past
        x, y = x.double(), y.double()
    queries, keys, _ = _stabilised(phi.phi_q(x, noise, params), phi.phi_k(y, noise, params), None)
    kernel = (queries @ keys.mT).masked_fill(future, 0)
    total = kernel.sum(-1, keepdim=True)
    return (kernel / torch.where(total == 0, 1, total)).double()


def _gather(fq: Features, fk: Features, v: Tensor, keep: Tensor | None) -> Partial:
    queries, keys, r = _stabilised(fq, fk, keep)
    kernel, modulus = queries @ keys.mT, queries.abs() @ keys.abs().mT
    return Partial(kernel @ v, kernel.sum(-1, keepdim=True), r, modulus.sum(-1, keepdim=True))


def _stabilised(fq: Features, fk: Features, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """c_m = max_j b_jm, r_i = max_m (a_im + c_m); the kernel matrix is exp(a + c - r) exp(b - c)^T exp(r), exact."""
    b = fk.log_scale if keep is None else fk.log_scale.masked_fill(~keep[..., None], -torch.inf)
    c = b.detach().amax(-2, keepdim=True)
    c = torch.where(c.isinf(), 0.0, c)                                            # no key at all
    r = (fq.log_scale + c).detach().amax(-1, keepdim=True)
    return fq.value * torch.exp(fq.log_scale + c - r), fk.value * torch.exp(b - c), r


def _tokens(f: Features, index: slice) -> Features:
    return Features(*(t if t.ndim < 2 or t.shape[-2] == 1 else t[..., index, :] for t in f))


def softmax_attention(x: Tensor, y: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
    """Exact softmax attention with logits x.y, the limit of every softmax estimator as m grows; 0 for a row without keys."""
    check_inputs(x, y, v, None, (), causal, key_mask)
    y, v = repeat_heads(y, x.shape[1]), repeat_heads(v, x.shape[1])
    if key_mask is not None:
        y, v = (torch.where(key_mask[:, None, :, None], t, 0.0) for t in (y, v))
    logits = x @ y.mT
    allowed = torch.ones(logits.shape[-2:], dtype=torch.bool, device=x.device)
    if causal:
        allowed = allowed.tril(y.shape[-2] - x.shape[-2])
    if key_mask is not None:
        allowed = allowed & key_mask[:, None, None]
    logits = logits.masked_fill(~allowed, -torch.inf)
    weights = torch.where(allowed.any(-1, keepdim=True), logits, 0.0).softmax(-1)
    return torch.where(allowed, weights, 0.0).to(v.dtype) @ v
