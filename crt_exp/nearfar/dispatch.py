"""Entry point of near-far attention: checks, preparation and choice of the engine.

A query of block t sees

- near: exactly, the keys of blocks t - 1, t and t + 1 (causal: of t - 1, and of t up to itself);
- heavy hitters: exactly, the keys with the largest scores (causal: among the blocks up to t - 2);
- retrieved (causal): exactly, `sizes.open` more keys, those with the query's largest logits;
- clusters: all other keys of a cluster as one key, their mean, with the weight and value of those that are far from t.

Each unmasked key is in exactly one of these sets of each query.
The choice of the sets and the metric of keys (choice.py) carry no gradient; all sums do. The method was derived for
this project.

Notation: B batch, H query heads, Hkv key heads, G = H / Hkv, Z = B Hkv, L queries x, S keys y, d, values v (., S, dv);
N blocks of b tokens, n heavy hitters, K clusters.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from crt_exp.attention.baselines import VECTOR
from crt_exp.attention.checks import (
    LeftShift,
    check_entries,
    check_inputs,
    compute_dtype,
    first_unmasked,
    has_dynamic_size,
    outside_graphs,
    transformed,
    without_padding,
)
from crt_exp.nearfar import native
from crt_exp.nearfar.both_directions import Bidirectional
from crt_exp.nearfar.causal import Causal, join_parts
from crt_exp.nearfar.choice import KeyMetric, Sizes, exact_attention
from crt_exp.samplers.noise import no_autocast, transforming

# keys of heads computed together: larger temporaries need fresh memory, which is slower
PART = 2**15
# keys of all heads up to which a call stores its intermediates; beyond, only the sets
MAX_SAVED_KEYS = 2**17


def near_far_attention(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    sizes: Sizes,
    *,
    causal: bool = False,
    cross: bool = False,
    metric: KeyMetric | None = None,
    key_mask: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Approximate softmax attention with logits factor^2 x.y by near-far attention.

    It is exact if at most `sizes.exact_until` keys count, if block >= S or heavy >= S, or if every key has its own
    cluster.
    Otherwise a bidirectional call chooses metric, heavy hitters and clusters from its own sequence, and a causal call
    from the sequence's past (causal.py).
    Blocks are counted from the first real token of each row. A length that the block does not divide is padded. There
    are at most as many heavy hitters and clusters as keys.

    Time is O(L (b + n + K) (d + dv)), causal also O(L S d) in 8-bit products. Memory is O(L (b + n + K + d + dv) + L /
    b K dv) for a part of the heads at a time, nothing of size L x S.

    Args:
        x: queries (B,H,L,d).
        y: keys (B,Hkv,S,d).
        v: values (B,Hkv,S,dv).
        sizes: sizes of the sets; `sizes.open` keys are retrieved by each causal query.
        causal: query i has position i + S - L and sees no later key.
        cross: queries belong to another sequence. No key is near; only heavy hitters and clusters are used.
        metric: moments of earlier queries (B Hkv, ...) if `cross`; without it queries are assumed to be as large as the
            keys.
        key_mask: (B, S), True for keys to keep.
        factor: factor of x and y.

    Returns:
        Outputs (B,H,L,dv), 0 for queries that see no key. Differentiable in x, y and v with the sets held constant.

    Raises:
        ValueError: shapes, sizes or mask do not fit, or queries or keys are not finite (CPU).

    >>> q, k, v = torch.randn(3, 1, 4, 256, 16, generator=torch.Generator().manual_seed(0))
    >>> sizes = Sizes(block=16, heavy=16, cells=32)
    >>> out = near_far_attention(q, k, v, sizes, factor=16**-0.25)
    >>> exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    >>> mean = v.mean(2, keepdim=True)
    >>> bool((out - exact).norm() < 0.9 * (mean - exact).norm())
    True
    """
    check_inputs(x, y, v, None, (), causal, key_mask)
    _check_sizes(x, y, sizes, causal, cross)
    if key_mask is not None and not cross and x.shape[2] == y.shape[2]:  # padding may hold NaN
        x = torch.where(key_mask[:, None, :, None] | x.isfinite(), x, 0.0)
    most_threads = native.THREADS * y.shape[0] * y.shape[1]
    in_c = native.applies(x, y, v) and torch.get_num_threads() <= most_threads
    if not in_c and factor != 1:
        x = x * factor
        y = y * factor
        factor = 1.0
    y, v = without_padding(key_mask, y, v)
    until = sizes.first_renewal if causal else sizes.exact_until
    exact = partial(_exact_outputs, causal=causal, factor=factor)
    if y.shape[2] <= until:
        return exact(x, y, v, key_mask)
    if causal and has_dynamic_size(x, y):
        # unrolled blocks and renewals take minutes to compile for each length
        from torch._dynamo import graph_break

        graph_break(
            msg="attention=nearfar: causal calls need compile(dynamic=False), or compile without fullgraph=True"
        )
        return _outside_graph(x, y, v, sizes, causal=True, key_mask=key_mask, factor=factor)
    method: Any = Bidirectional(sizes, cross, metric, factor, in_c)
    if causal:
        method = Causal(sizes, factor, in_c)
    if key_mask is None:
        return _by_heads(method, x, y, v, None)
    near_far = partial(_attend_past if causal else _attend_both_directions, method)
    if causal or not until:
        return near_far(x, y, v, key_mask)
    return apply_by_row(key_mask.sum(1) <= until, exact, near_far, x, y, v, key_mask)


_outside_graph = outside_graphs(near_far_attention)


def _check_sizes(x: Tensor, y: Tensor, sizes: Sizes, causal: bool, cross: bool) -> None:
    least = {"block": 1, "heavy": 0, "cells": 1, "open": int(causal), "exact_until": 0}
    for name, minimum in least.items():
        size = getattr(sizes, name)
        if size < minimum:
            raise ValueError(f"{name}={size}: expected an integer >= {minimum}")
    if isinstance(y.shape[2], torch.SymInt) and torch.compiler.is_exporting():
        raise ValueError(
            "dynamic sequence length: near-far attention must be exported with a fixed length"
        )
    if not causal and not cross and x.shape[2] != y.shape[2]:
        raise ValueError(
            f"L={x.shape[2]}, S={y.shape[2]}: expected L == S, or cross=True for two sequences"
        )


# ---- rows of a batch


def apply_by_row(
    which: Tensor,
    first: Callable[..., Tensor],
    second: Callable[..., Tensor],
    *inputs: Tensor,
) -> Tensor:
    """Apply `first` to rows where `which` (B,) is True, and `second` to the others.

    Inputs are queries, keys, values and mask. No row's outputs depend on other rows.
    """
    if torch.compiler.is_compiling() or transforming():
        return torch.where(which[:, None, None, None], first(*inputs), second(*inputs))
    number = int(which.sum())  # the only wait for a device
    if number == 0:
        return second(*inputs)
    if number == len(which):
        return first(*inputs)
    order = which.long().argsort(descending=True, stable=True)
    x, _, v, _ = inputs
    out = v.new_zeros(*x.shape[:3], v.shape[3])
    for rows, attend in ((order[:number], first), (order[number:], second)):
        out[rows] = attend(*(t[rows] for t in inputs))
    return out


def _attend_both_directions(
    method: Bidirectional,
    x: Tensor,
    y: Tensor,
    v: Tensor,
    key_mask: Tensor,
) -> Tensor:
    """Apply the method with blocks counted from each row's first real token."""
    shift = None
    if not method.cross:
        shift = LeftShift.plan(key_mask, method.sizes.block)
    if shift is None:
        out = _by_heads(method, x, y, v, key_mask)
    else:
        x, y, v = (shift.apply(t) for t in (x, y, v))
        out = shift.undo(_by_heads(method, x, y, v, shift.apply_to_mask(key_mask)))
    seen = key_mask.any(-1)[:, None, None, None]
    return torch.where(seen, out, 0.0)  # outputs of queries without keys are arbitrary


def _attend_past(
    method: Causal,
    x: Tensor,
    y: Tensor,
    v: Tensor,
    key_mask: Tensor,
) -> Tensor:
    """Apply the method to groups of rows with equal first real tokens.

    Renewals are counted from there.
    """
    if torch.compiler.is_compiling() or transforming():
        raise ValueError(
            "key_mask: not supported by causal near-far attention under torch.compile, torch.export or "
            "torch.func: omit it, or use attention=favorpp"
        )
    before = y.shape[2] - x.shape[2]
    firsts = first_unmasked(key_mask).tolist()  # the only wait for a device
    if not any(firsts):
        out = _by_heads(method, x, y, v, key_mask)
    else:
        out = v.new_zeros(*x.shape[:3], v.shape[3])
        for first in set(firsts):
            rows = [row for row, start in enumerate(firsts) if start == first]
            lead = max(0, first - before)
            vectors = (x[rows, :, lead:], y[rows, :, first:], v[rows, :, first:])
            out[rows, :, lead:] = _by_heads(method, *vectors, key_mask[rows, first:])
    seen = key_mask.cumsum(-1)[:, None, before:, None] > 0
    return torch.where(seen, out, 0.0)  # outputs of queries without keys are arbitrary


# ---- heads


def split_key_heads(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return queries (Z, G, L, d), keys and values (Z, S, .), and the mask (Z, S)."""
    Hkv = y.shape[1]
    x = x.unflatten(1, (Hkv, x.shape[1] // Hkv)).flatten(0, 1)
    keep = None
    if key_mask is not None:
        keep = key_mask.repeat_interleave(Hkv, 0)
    return x, y.flatten(0, 1), v.flatten(0, 1), keep


def join_key_heads(out: Tensor, y: Tensor) -> Tensor:
    """Return outputs (Z, G, L, dv) as (B, H, L, dv), for keys y (B, Hkv, S, d)."""
    return out.unflatten(0, y.shape[:2]).flatten(1, 2)


def _exact_outputs(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    causal: bool,
    factor: float,
) -> Tensor:
    if compute_dtype(x, y, v) == torch.float64:
        x, y, v = (t.double() for t in (x, y, v))
    out = exact_attention(x, y, v, causal, key_mask, factor**2)
    if transformed(x, y, v):
        return out
    check_entries(out)
    if y.shape[2] < VECTOR:  # torch's kernel for few keys hides NaN
        check_entries(y)
    return out


def _by_heads(method: Any, x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Apply a `Bidirectional` or `Causal` method to a part of the heads at a time, in its precision.

    With many keys the backward pass recomputes each part.
    """
    *tensors, keep = split_key_heads(x, y, v, key_mask)
    Z, S = tensors[1].shape[:2]
    dtype = compute_dtype(x, y, v)
    at_once = method.native or torch.compiler.is_compiling() or transformed(x, y, v)
    size = max(Z, 1)
    if not at_once:
        size = max(1, PART // S)
    recompute = size < Z and Z * S > MAX_SAVED_KEYS and torch.is_grad_enabled()
    parts = []
    with no_autocast(x):
        for start in range(0, max(Z, 1), size):
            rows = slice(start, start + size)
            x_part, y_part, v_part = (t[rows].to(dtype) for t in tensors)
            keep_part = None if keep is None else keep[rows]
            sets = method.choose(x_part, y_part, keep_part, rows)
            inputs = (x_part, y_part, v_part, sets)
            if recompute:
                out = checkpoint(
                    method.attend, *inputs, use_reentrant=False, preserve_rng_state=False
                )
            else:
                out = method.attend(*inputs)
            parts.append(out)
        return join_key_heads(join_parts(parts, 0).to(v.dtype), y)
