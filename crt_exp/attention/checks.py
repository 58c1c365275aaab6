"""Helpers of attention: argument checks, precision, padding, torch.compile.

Notation: B batch, H query heads, Hkv key heads (H is a multiple of Hkv), L queries, S keys, d, dv, b tokens of a block.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from crt_exp.features.base import NotFinite, all_true, values_readable
from crt_exp.samplers.noise import Nested, Noise, leaves, transforming

NOT_FINITE_MESSAGE = (
    "queries, keys: NaN, infinity or overflowing norms; scale the vectors down, or use bfloat16 or "
    "float32"
)


def check_inputs(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    noise: Nested,
    params: Nested,
    causal: bool,
    key_mask: Tensor | None,
) -> torch.dtype:
    """Check the arguments of attention and return the dtype to compute in.

    x (B,H,L,d), y (B,Hkv,S,d), v (B,Hkv,S,dv), key_mask (B,S). Raises ValueError if shapes, dtypes, devices, random
    projections or parameters do not fit together.
    """
    for name, t in (("x", x), ("y", y), ("v", v)):
        if t.ndim != 4 or not t.is_floating_point() or 0 in t.shape[1:] or t.device != x.device:
            raise ValueError(
                f"{name} {tuple(t.shape)} {t.dtype} on {t.device}: expected floating-point (B, H, L, d), not "
                "empty, on one device"
            )
    B, H, L, d = x.shape
    S = y.shape[2]
    fits = len(y) == len(v) == B and y.shape[3] == d and y.shape[1:3] == v.shape[1:3]
    if not fits or H % y.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)}, y {tuple(y.shape)}, v {tuple(v.shape)}: expected (B, H, L, d), (B, Hkv, "
            "S, d), (B, Hkv, S, dv), where Hkv divides H"
        )
    if causal and L > S:
        raise ValueError(
            f"causal=True: L={L}, S={S}: expected L <= S (queries are the last tokens)"
        )
    if key_mask is not None:
        check_key_mask(key_mask, y)
    for part in leaves(noise):
        if not isinstance(part, Noise) or part.d != d or not _broadcasts(part.batch, x):
            raise ValueError(
                f"noise={part!r}: expected a sampler's output with d={d} and batch broadcastable to (B, H)="
                f"{(B, H)}"
            )
    for part in leaves(params):
        if not isinstance(part, Tensor) or (part.ndim > 2 and not _broadcasts(part.shape[:-2], x)):
            raise ValueError(
                f"parameter {tuple(getattr(part, 'shape', ()))}: expected a tensor of `fit`, broadcastable to "
                f"(B, H, 1, ...)={(B, H, 1)}"
            )
    return torch.float64 if torch.float64 in (x.dtype, y.dtype, v.dtype) else torch.float32


def check_kv_heads(heads: int, kv_heads: int) -> None:
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"kv_heads={kv_heads}: expected a divisor of heads={heads}")


def check_key_mask(key_mask: Tensor, y: Tensor) -> None:
    fits = key_mask.shape == (y.shape[0], y.shape[2]) and key_mask.dtype == torch.bool
    if not fits or key_mask.device != y.device:
        raise ValueError(
            f"key_mask={tuple(key_mask.shape)} {key_mask.dtype} on {key_mask.device}: expected a boolean "
            f"(B, S)={(y.shape[0], y.shape[2])}, True = keep, on {y.device}; pairwise masks are not "
            "supported"
        )


def _broadcasts(shape: tuple[int, ...], x: Tensor) -> bool:
    """Return whether a shape broadcasts to the batch and heads of x."""
    if len(shape) > 2:
        return False
    batch = (1, 1, *shape)[-2:]
    return batch[0] in (1, x.shape[0]) and batch[1] in (1, x.shape[1])


def repeat_heads(t: Tensor, heads: int) -> Tensor:
    """Repeat key heads for the query heads that share them.

    (B, Hkv, S, k) -> (B, H, S, k); consecutive query heads share a key head.
    """
    if t.shape[1] == heads:
        return t
    return t[:, :, None].expand(-1, -1, heads // t.shape[1], -1, -1).flatten(1, 2)


def without_padding(key_mask: Tensor | None, *tensors: Tensor) -> list[Tensor]:
    """Replace masked tokens of tensors (B, ., S, .), which may hold NaN, by zeros."""
    if key_mask is None:
        return list(tensors)
    unmasked = key_mask[:, None, :, None]
    return [torch.where(unmasked, t, 0.0) for t in tensors]


def batch_indices(rows: Tensor, batch: int) -> Tensor:
    """Convert batch indices or a boolean mask to non-negative indices."""
    return torch.arange(batch, device=rows.device)[rows]


def finite(top: Tensor) -> Tensor:
    """Replace a maximum of -inf by 0, so that exp(-inf - 0) is 0 and not NaN."""
    return torch.where(top == -torch.inf, 0.0, top)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return float64 if any tensor is float64, else float32.

    Sums of many terms are not accurate in half precision.
    """
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def transformed(*tensors: Tensor) -> bool:
    """Return whether torch.func or forward-mode differentiation is active.

    Custom operators would lose such transforms and tangents, so that plain torch operations must do the work.
    """
    if transforming():
        return True
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def requires_gradient(noise: Nested, params: Nested) -> bool:
    """Return whether random projections or parameters require a gradient."""
    if not torch.is_grad_enabled():
        return False
    tensors = leaves(params)
    for part in leaves(noise):
        tensors += part.tensors()
    return any(t.requires_grad for t in tensors)


def check_gradient(grad: Tensor) -> None:
    """Raise ValueError for a batched gradient and for one with a tangent."""
    batched: Any = torch._C._parse_dispatch_key("Batched")
    if torch._C._dispatch_keys(grad).has(batched) or transformed(grad):
        raise ValueError(
            "batched gradients are not supported: use torch.func.jacrev, jacfwd, hessian or vmap"
        )


def check_result(logs: Tensor) -> None:
    """Raise NotFinite if a log-sum or squared norm is NaN or +inf (CPU only).

    Then queries or keys are not finite. On other devices the check would wait for the result.
    """
    if values_readable(logs) and not all_true(logs < torch.inf):
        raise NotFinite(NOT_FINITE_MESSAGE)


def check_entries(t: Tensor) -> None:
    """Raise NotFinite if the sum of all entries is not finite (CPU only).

    One reduction is cheap enough for short calls.
    """
    if values_readable(t) and not math.isfinite(t.sum(dtype=compute_dtype(t)).item()):
        raise NotFinite(NOT_FINITE_MESSAGE)


# Left padding: positions and blocks are counted from the first real token of each row. The outputs of a row therefore
# do not depend on the padding that other rows of its batch need.


def first_unmasked(keep: Tensor) -> Tensor:
    """Return the position (B,) of the first real token in keep (B, S); 0 if none."""
    return keep.to(torch.uint8).argmax(1)


class LeftShift(NamedTuple):
    """Shift the tokens of each row, so that its first real token begins a block.

    by (B,): number of positions by which the tokens of a row move towards the end.
    """

    by: Tensor
    added: int  # positions

    @classmethod
    def plan(cls, keep: Tensor, b: int) -> "LeftShift | None":
        """Return the shift for a mask, or None if no row needs one.

        Only CPUs test whether a row needs one; other devices would have to wait for the result.
        """
        by = -first_unmasked(keep) % b
        if transforming() or not values_readable(keep):
            return cls(by, b - 1)
        added = int(by.max()) if len(by) else 0
        return cls(by, added) if added else None

    def apply(self, t: Tensor) -> Tensor:
        """Shift t (B, ., n, k).

        The contents of added positions are arbitrary.
        """
        return _gather_tokens(t, self._sources(t.shape[2]))

    def apply_to_mask(self, keep: Tensor) -> Tensor:
        """Shift a key mask (B, n); added positions are False."""
        n = keep.shape[1]
        sources = self._sources(n)
        inside = (sources >= 0) & (sources < n)
        return keep.gather(1, sources.clamp(0, n - 1)) & inside

    def undo(self, t: Tensor) -> Tensor:
        """Undo `apply`."""
        positions = torch.arange(t.shape[2] - self.added, device=t.device)
        return _gather_tokens(t, positions + self.by.unsqueeze(1))

    def _sources(self, n: int) -> Tensor:
        """Return the positions before the shift (B, n + added)."""
        return torch.arange(n + self.added, device=self.by.device) - self.by.unsqueeze(1)


def from_first(t: Tensor, keep: Tensor, n: int) -> Tensor:
    """Return n tokens of t (B, ., S, k) from the first real token of each row on.

    Positions after the last token are 0.
    """
    positions = torch.arange(n, device=t.device) + first_unmasked(keep).unsqueeze(1)
    beyond = (positions >= t.shape[2])[:, None, :, None]
    return _gather_tokens(t, positions).masked_fill(beyond, 0)


def _gather_tokens(t: Tensor, positions: Tensor) -> Tensor:
    """Gather the given positions (B, n) of each row of t (B, ., S, k)."""
    index = positions.clamp(0, t.shape[2] - 1)[:, None, :, None]
    return t.gather(2, index.expand(-1, t.shape[1], -1, t.shape[3]))


# torch.compile


def has_dynamic_size(*tensors: torch.Tensor) -> bool:
    """Return whether torch.compile traces these tensors with a dynamic size."""
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not all(has_static_value(t.numel()) for t in tensors)


def outside_graphs(function: Callable) -> Callable:
    """Keep a function out of graphs, like `torch.compiler.disable`.

    The compiler is imported only where it runs, because its import takes longer than that of torch.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call
