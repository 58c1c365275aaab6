"""Partial attention: sums over sets of keys, to be added and normalized.

    near = softmax_partial(x, y[:, :, :n], v[:, :, :n])
    far = partial_attention(x, y[:, :, n:], v[:, :, n:], phi, noise, params)
    out = finish(merge(near, far))

The R rows of a `Partial` are queries (the sums of each query) or features (the state: sums over keys for each feature).
`merge` adds partials as online softmax does, and `finish` divides.
Gradients flow through the sums, and therefore into `output` and `logsum`. Log scales carry no gradient, because they
cancel in numerator / denominator.

Notation: L queries x, S keys y, values v (..., S, dv), M features; a and b are the log features of queries and keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.checks import check_inputs, finite, repeat_heads, without_padding
from crt_exp.attention.engines import TINY
from crt_exp.features.base import Features
from crt_exp.features.blocks import Block, Blocks
from crt_exp.samplers.noise import transforming
from crt_exp.validation import warn

POLICIES = ("none", "clamp", "abs")
CLAMP = 1e-6  # floor of a clamped denominator, relative to the sum of absolute terms


class Partial(NamedTuple):
    """Numerators and denominators sums * exp(log_scale), row by row.

    log_scale is -inf in rows without keys.

    >>> half = Partial(torch.tensor([[3.0, 1.0]]), torch.zeros(1, 1))
    >>> finish(merge(half, half))
    tensor([[3.]])
    """

    sums: Tensor  # (..., R, dv + 1): [numerator, denominator]
    log_scale: Tensor  # (..., R, 1), or (..., 1, 1) for all rows
    modulus: Tensor | None = None  # (..., R, 1): sum of absolute terms, for clamping

    def over(self, log_scale: Tensor) -> "Partial":
        """Return the same sums relative to a log scale that is at least as large."""
        weight = torch.exp(self.log_scale - finite(log_scale))
        modulus = None if self.modulus is None else weight * self.modulus
        return Partial(weight * self.sums, log_scale, modulus)

    @property
    def output(self) -> Tensor:
        """numerator / denominator (..., R, dv), 0 in rows without keys."""
        return finish(self)

    @property
    def logsum(self) -> Tensor:
        """Log of the absolute denominator in nats, (..., R, 1).

        It is -inf where the denominator is 0.
        """
        denominator = self.sums[..., -1:]
        empty = denominator == 0
        logs = torch.where(empty, 1.0, denominator).abs().log() + self.log_scale
        return torch.where(empty, -torch.inf, logs)


class ScaledKeys(NamedTuple):
    phi: Tensor  # (..., S, M): features of the keys times exp(-top)
    top: Tensor  # (..., M or 1, 1): maximum of b over the unmasked keys, by feature


def softmax_partial(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Partial:
    """Return the partial of exact softmax attention with logits x.y.

    x (B,H,L,d), y (B,Hkv,S,d), v (B,Hkv,S,dv). Memory is O(L S). Other arguments are those of `attention`.

    >>> x, y, v = torch.randn(3, 1, 2, 6, 4)
    >>> exact = (x @ y.mT).softmax(-1) @ v
    >>> torch.allclose(softmax_partial(x, y, v).output, exact, atol=1e-5)
    True
    """
    dtype = check_inputs(x, y, v, None, (), causal, key_mask)
    x = x.to(dtype)
    y = repeat_heads(y, x.shape[1]).to(dtype)
    v = repeat_heads(v, x.shape[1]).to(dtype)
    seen = torch.ones(x.shape[2], y.shape[2], dtype=torch.bool, device=x.device)
    if causal:
        seen = seen.tril(y.shape[2] - x.shape[2])
    y, v = without_padding(key_mask, y, v)
    if key_mask is not None:
        seen = seen & key_mask[:, None, None]
    logits = (x @ y.mT).masked_fill(~seen, -torch.inf)
    top = logits.detach().amax(-1, keepdim=True)
    return Partial(torch.exp(logits - finite(top)) @ with_ones(v), top)


def scale_keys(f: Features | Blocks, keep: Tensor | None = None) -> ScaledKeys:
    """Divide key features by their maxima; keep (..., S) is True for keys to keep."""
    if isinstance(f, Blocks):
        return ScaledKeys(*scale_blocked_keys(f, keep))
    log = f.log_scale
    if keep is not None:
        log = torch.where(keep[..., None], log, -torch.inf)
    top = log.detach().amax(-2, keepdim=True).mT
    return ScaledKeys(f._replace(log_scale=log - finite(top).mT).exp(), top)


def summarise(keys: ScaledKeys, v: Tensor, modulus: bool = False) -> Partial:
    """Sum phi_k(y_j) [v_j, 1] over the keys; rows are features."""
    absolute = keys.phi.abs().sum(-2).unsqueeze(-1) if modulus else None
    return Partial(keys.phi.mT @ with_ones(v), keys.top, absolute)


def read(f: Features | Blocks, state: Partial) -> Partial:
    """Combine query features with a state; rows are queries."""
    phi, top = _scale_queries(f, state.log_scale)
    modulus = None if state.modulus is None else phi.abs() @ state.modulus
    return Partial(phi @ state.sums, top, modulus)


def within(f: Features, keys: ScaledKeys, v: Tensor, modulus: bool = False) -> Partial:
    """Return the partial of causal attention within a chunk (keys j <= i).

    The scale is a maximum over the whole chunk, later keys included. A very large later key makes the terms of earlier
    rows underflow. `small_denominators` finds such rows, and the caller uses shorter chunks.
    """
    phi, top = _scale_queries(f, keys.top)
    kernel = (phi @ keys.phi.mT).tril()
    absolute = None
    if modulus:
        absolute = (phi.abs() @ keys.phi.abs().mT).tril().sum(-1, keepdim=True)
    return Partial(kernel @ with_ones(v), top, absolute)


def merge(a: Partial | None, b: Partial) -> Partial:
    """Add two partials with the same rows; None is the empty partial.

    >>> x, y, v = torch.randn(3, 1, 2, 6, 4)
    >>> first = softmax_partial(x, y[:, :, :4], v[:, :, :4])
    >>> rest = softmax_partial(x, y[:, :, 4:], v[:, :, 4:])
    >>> whole = softmax_partial(x, y, v)
    >>> torch.allclose(merge(first, rest).output, whole.output, atol=1e-5)
    True
    """
    if a is None:
        return b
    top = torch.maximum(a.log_scale, b.log_scale)
    left = a.over(top)
    right = b.over(top)
    modulus = None
    if left.modulus is not None and right.modulus is not None:
        modulus = left.modulus + right.modulus
    return Partial(left.sums + right.sums, top, modulus)


def small_denominators(p: Partial, seen: Tensor | None) -> Tensor:
    """Return which rows (..., R, 1) have too small a denominator to be accurate.

    seen (..., R): rows with keys, None for all. Rows without keys are not reported.
    """
    small = p.sums[..., -1:].detach().abs() < TINY
    return small if seen is None else small & seen[..., None]


def finish(p: Partial, policy: str = "none", normalize: bool = True) -> Tensor:
    """Return the attention outputs (..., R, dv), 0 in rows without keys.

    Args:
        policy: treatment of denominators delta of signed features. "none" leaves them, "clamp" uses sgn(delta)
            max(|delta|, CLAMP * modulus) with sgn(0) = 1, "abs" uses |delta|.
        normalize: False returns the numerators.

    >>> rows = Partial(torch.tensor([[6.0, -2.0]]), torch.zeros(1, 1))
    >>> finish(rows, policy="abs")
    tensor([[3.]])
    """
    numerator = p.sums[..., :-1]
    if not normalize:
        return numerator * torch.exp(p.log_scale)
    den = p.sums[..., -1:]
    if policy == "abs":
        den = den.abs()
    elif policy == "clamp":
        assert p.modulus is not None
        floor = CLAMP * p.modulus.detach()
        signed_floor = torch.where(den < 0, -floor, floor)
        den = torch.where(den.abs() < floor, signed_floor, den)
    empty = den == 0
    return torch.where(empty, 0.0, numerator / torch.where(empty, 1.0, den))


class DenominatorCount:
    """Counts denominators that are not positive.

    Counts stay on the device; reading them waits for the device.

    >>> count = DenominatorCount()
    >>> count.add(Partial(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.zeros(2, 1)))
    >>> count.nonpositive, count.total
    (1, 2)
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self.total = 0
        self._bad: Tensor | int = 0

    def add(self, p: Partial) -> None:
        """Count the denominators of a partial.

        Exported programs and transforms of torch.func do not count.
        """
        if torch.compiler.is_exporting() or transforming():
            return
        has_keys = (p.sums[..., :-1] != 0).any(-1, keepdim=True)
        denominator = p.sums[..., -1:]
        wrong = (denominator < 0) | ((denominator == 0) & has_keys)
        self._bad = self._bad + wrong.sum()
        self.total += wrong.numel()

    @property
    def nonpositive(self) -> int:
        return int(self._bad)

    @property
    def fraction(self) -> float:
        return self.nonpositive / max(self.total, 1)

    def warn(self) -> None:
        """Warn about non-positive denominators, unless that would wait for a device."""
        if torch.as_tensor(self._bad).device.type == "cpu" and self.nonpositive:
            warn(
                f"{self.nonpositive} of {self.total} denominators <= 0: those outputs are unreliable. Use "
                "more features, a positive map or denominator='clamp'",
                RuntimeWarning,
            )


def _scale_queries(f: Features | Blocks, key_top: Tensor) -> tuple[Tensor, Tensor]:
    """Return features scaled by exp(a + c - r), and r (..., L, 1).

    c is the log scale of the keys, and r the maximum of a + c over the features.
    """
    if isinstance(f, Blocks):
        return scale_blocked_queries(f, key_top)
    log = f.log_scale + key_top.mT
    top = log.detach().amax(-1, keepdim=True)
    return f._replace(log_scale=log - finite(top)).exp(), top


def with_ones(v: Tensor) -> Tensor:
    return torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1)


# Hybrid features: R weights, D features of a base, M = sum R D columns. Logs and maxima are computed on the D base
# columns; only the factor of the product with the values has M columns.


def scale_blocked_keys(f: Blocks, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return key features (..., S, M) over their maxima, and the maxima (..., M, 1).

    The maxima are those of the base features. keep (..., S) is True for keys to keep.
    """
    tops = []
    scaled = []
    for part in f.parts:
        log = part.base.log_scale
        if keep is not None:
            log = torch.where(keep[..., None], log, -torch.inf)
        top = part.column_maxima(log.detach())
        tops.append(top)
        log = log - finite(part.to_base(top))
        scaled.append(part.base._replace(log_scale=log).exp())
    return weighted_features(f.parts, scaled), torch.cat(tops, -2)


def scale_blocked_queries(f: Blocks, key_top: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(a + c - r) (..., L, M) and r (..., L, 1) of hybrid features.

    c is the log scale of the keys, and r the maximum of a + c over the features.
    """
    tops = key_top.split([part.width for part in f.parts], -2)
    logs = []
    row_tops = []
    for part, key_top_of_part in zip(f.parts, tops):
        log = part.base.log_scale + part.to_base(key_top_of_part)
        rows = torch.broadcast_shapes(part.weight.shape[:-1], part.base.log_scale.shape[:-1])
        logs.append(log)
        row_tops.append(log.detach().amax(-1, keepdim=True).expand(*rows, 1))
    top = torch.stack(row_tops).amax(0)
    scaled = []
    for part, log in zip(f.parts, logs):
        scaled.append(part.base._replace(log_scale=log - finite(top)).exp())
    return weighted_features(f.parts, scaled), top


def weighted_features(parts: tuple[Block, ...], scaled: list[Tensor]) -> Tensor:
    """Multiply base features by weights.

    Column (a, r, d) of a part is weight_r times feature (a, d) of its base, where a is a group of the part.
    """
    products = []
    for part, t in zip(parts, scaled):
        product = part.weight[..., None, :, None] * t.unflatten(-1, (part.groups, 1, -1))
        products.append(product.flatten(-3))
    return torch.cat(products, -1)
