"""Near-far attention in C, for float32 on CPUs.

Bidirectional and cross-attention: clusters.c, forward.c and backward.c. Causal: scores.c, past.c, causal_forward.c and
causal_backward.c. They compute the same as choice.py, both_directions.py, causal.py and retrieval.py.

Notation as in dispatch.py: Z = batch x key heads, G query heads of each, L queries, S keys, d, dv; n heavy hitters, K
clusters.
"""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.checks import (
    NOT_FINITE_MESSAGE,
    check_gradient,
    compute_dtype,
    transformed,
)
from crt_exp.attention.engines import NO_MEMORY, NOT_FINITE, native
from crt_exp.attention.engines.native import View
from crt_exp.features.base import NotFinite
from crt_exp.nearfar.choice import MAX_GAP, KeyMetric, KeySets, Sizes

FEW = 16  # queries of a step that one thread computes: about 50 us each
THREADS = 4  # for each head, which one thread computes: PyTorch uses more threads better
# fields of the C structure `NearFar`
SIZES = (
    "Z G L S d dv block heavy clusters first_order cross open open_first first_renewal capacity gap_capacity "
    "threads"
)
VIEWS = "x y v out grad dx dy dvalues"
POINTERS = (
    "keep shift tilt root centres positions cluster there pool u square level sums spread slope logsum gaps "
    "gap_offset decoding_state"
)
Fields = dict[
    str, Any
]  # values of the structure by name: tensors, numbers, or None for a null pointer


class Call(ctypes.Structure):
    """The C structure `NearFar`: sizes, views and pointers of a call."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in SIZES.split()),
        ("factor", ctypes.c_double),
        *((name, View) for name in VIEWS.split()),
        *((name, ctypes.c_void_p) for name in POINTERS.split()),
    ]


class PastMemory(NamedTuple):
    """What a causal call knows of at most `capacity` tokens: the metric, and in decoding the state of the past."""

    metric: KeyMetric  # its tilt is 0
    capacity: int
    numbers: Tensor | None = None  # (Z, n), not shared between states


def applies(*tensors: Tensor) -> bool:
    """Return whether this engine can process the tensors.

    They must be on the CPU and not in float64, the library must be available, and neither torch.compile nor torch.func
    may be tracing.
    """
    if torch.compiler.is_compiling() or transformed(*tensors):
        return False
    if compute_dtype(*tensors) == torch.float64:
        return False
    return all(t.device.type == "cpu" for t in tensors) and native.library() is not None


@torch.no_grad()
def choose(
    x: Tensor,
    y: Tensor,
    sizes: Sizes,
    keep: Tensor | None,
    factor: float = 1.0,
    metric: KeyMetric | None = None,
) -> KeySets:
    """Choose metric, heavy hitters and clusters for factor x and factor y.

    x (Z, G, L, d), y (Z, S, d). A given metric (Z, ...) means that they belong to two sequences. Raises NotFinite if
    queries and keys of one sequence are not finite.
    """
    Z, S, d = y.shape
    heavy = min(sizes.heavy, S)
    cross = metric is not None
    if metric is None:
        metric = KeyMetric(y.new_empty(Z, 1, d), y.new_empty(Z, 1, d), y.new_empty(Z, d, d))
    sets = KeySets(
        metric=metric,
        heavy=y.new_empty(Z, heavy, dtype=torch.long),
        there=y.new_empty(Z, heavy, dtype=torch.bool),
        pool=y.new_empty(Z, S, dtype=torch.bool),
        cluster=y.new_empty(Z, S, dtype=torch.long),
        centres=y.new_empty(Z, min(sizes.cells, S), d),
    )
    _call("near_far_choose", _set_fields(sets, factor, cross) | {"keep": keep}, x, y)
    return sets


def attend(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    sets: KeySets,
    sizes: Sizes,
    factor: float = 1.0,
    cross: bool = False,
) -> Tensor:
    """Return the outputs (Z, G, L, dv) for factor x and factor y.

    x (Z, G, L, d), y (Z, S, d), v (Z, S, dv). With `cross` no key is near. Differentiable in x, y and v.
    """
    Z, S, d = y.shape
    clusters = sets.centres.shape[1]
    slope_rows = v.shape[-1] if sizes.first_order else 0
    fields = _set_fields(sets, factor, cross) | {
        "block": min(sizes.block, S),
        "first_order": sizes.first_order,
        "u": y.new_empty(Z, S),
        "square": y.new_empty(Z, S),
        "level": y.new_empty(Z, clusters),
        "sums": y.new_empty(Z, clusters, d + 2),
        "spread": y.new_empty(Z, clusters),
        "slope": y.new_empty(Z, slope_rows, d),
        "logsum": y.new_empty(x.shape[:3]),
    }
    return _NearFarInC.apply("near_far", fields, x, y, v)


def _set_fields(sets: KeySets, factor: float, cross: bool) -> Fields:
    fields = sets.metric._asdict() | sets._asdict()
    del fields["metric"]
    return fields | {
        "positions": sets.heavy,
        "heavy": sets.heavy.shape[1],
        "clusters": sets.centres.shape[1],
        "factor": factor,
        "cross": cross,
    }


def causal(x: Tensor, y: Tensor, v: Tensor, fields: Fields) -> Tensor:
    """Return the outputs of causal queries, all after the first renewal, with their `causal_fields`.

    Differentiable in x, y and v without the state of decoding.
    The state is overwritten. Rows of keys and values must then be padded with zeros to multiples of 16.
    """
    return _NearFarInC.apply("near_far_causal", fields, x, y, v)


def empty_memory(
    y: Tensor,
    dv: int,
    metric: KeyMetric,
    sizes: Sizes,
    capacity: int,
) -> PastMemory:
    """Return the empty state of decoding for keys y (Z, S, d)."""
    call = Call(d=y.shape[-1], dv=dv, capacity=capacity, **_size_fields(sizes, capacity))
    library = native.library()
    assert library is not None
    size = library.near_far_causal_size
    size.restype = ctypes.c_int64
    numbers = y.new_empty(len(y), size(ctypes.byref(call)))
    numbers[:, :2] = 0
    return PastMemory(metric, capacity, numbers)


def _size_fields(sizes: Sizes, keys: int) -> Fields:
    """Return the sizes of a causal call with at most `keys` keys (more than a block)."""
    return {
        "heavy": min(sizes.heavy, keys),
        "clusters": min(sizes.cells, keys),
        "open": min(sizes.retrieval_count(keys), keys),
        "open_first": min(sizes.open, keys),
        "block": sizes.block,
        "first_renewal": sizes.first_renewal,
    }


def causal_fields(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    keep: Tensor | None,
    sizes: Sizes,
    past: PastMemory,
    factor: float = 1.0,
) -> Fields:
    """Return the fields of a call for the last queries factor x (Z, G, L, d) of keys factor y (Z, S, d).

    v (Z, S, dv), keep (Z, S) or None.
    If gradients may be needed, `gaps` (Z, gap_capacity) stores the distances between retrieved keys (encode_gaps in
    near_far.h), and `gap_offset` (Z, G, L) the offset of the first distance of each query. The allocation is for the
    worst case; the system provides only pages that are written.
    """
    Z, G, L, _ = x.shape
    S = y.shape[1]
    fields = _size_fields(sizes, past.capacity)
    open = min(fields["open"], S)
    fields |= {
        "open": open,
        "factor": factor,
        "capacity": past.capacity,
        "decoding_state": past.numbers,
        "keep": keep,
        "shift": past.metric.shift,
        "root": past.metric.root,
        "logsum": y.new_empty(Z, G, L),
    }
    if (
        past.numbers is not None and Z * G * L <= FEW
    ):  # threads would wait for each other and for busy cores
        fields["threads"] = 1
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, y, v)):
        capacity = G * L * (open + S // (MAX_GAP - 1) + 2)
        fields["gap_capacity"] = capacity
        fields["gaps"] = torch.empty(Z, capacity, dtype=torch.uint8, device="cpu")
        fields["gap_offset"] = torch.empty(Z, G, L, dtype=torch.int64, device="cpu")
    return fields


class _NearFarInC(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, fields, x, y, v):
        out = x.new_empty(*x.shape[:3], v.shape[-1])
        _call(name, fields, x, y, v, out)
        ctx.name = name
        ctx.fields = fields
        ctx.save_for_backward(x, y, v, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        check_gradient(grad)
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "near-far attention: no second derivatives; use torch.func.hessian"
            )
        saved = ctx.saved_tensors
        grads = []
        for t in saved[:3]:
            grads.append(torch.empty_like(t, memory_format=torch.contiguous_format))
        _call(f"{ctx.name}_backward", ctx.fields, *saved, grad, *grads)
        return None, None, *grads


def _call(name: str, fields: Fields, *views: Tensor) -> None:
    """Call a function of the library with the first ones of VIEWS. Raises MemoryError and NotFinite."""
    x, y, *_ = views
    Z, G, L, d = x.shape
    S = y.shape[1]
    call = Call(
        threads=torch.get_num_threads(),
        block=1,
        Z=Z,
        G=G,
        L=L,
        S=S,
        d=d,
    )
    alive = []  # contiguous copies must outlive the call
    for field, view in zip(VIEWS.split(), views):
        rows = view if view.stride(-1) == 1 else view.contiguous()
        if rows.ndim == 3:  # shared by all heads
            rows = rows.unsqueeze(1)
        alive.append(rows)
        setattr(call, field, View(rows.data_ptr(), *rows.stride()[:3]))
    if len(views) > 2:
        call.dv = views[2].shape[-1]
    for field, value in fields.items():
        if isinstance(value, Tensor):
            entries = value.contiguous()
            alive.append(entries)
            value = entries.data_ptr()
        setattr(call, field, value)
    status = getattr(native.library(), name)(ctypes.byref(call))
    if status == NO_MEMORY:
        raise MemoryError(f"out of memory for near-far attention of {S} tokens with d={d}")
    if status == NOT_FINITE:
        raise NotFinite(NOT_FINITE_MESSAGE)
