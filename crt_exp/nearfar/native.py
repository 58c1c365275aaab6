"""Near-far attention in C, for float32 on CPUs.

Bidirectional and cross-attention: clusters.c, forward.c and backward.c. Causal: scores.c, past.c, causal_forward.c and
causal_backward.c. They compute the same as choice.py, both_directions.py, causal.py and retrieval.py.

Notation as in dispatch.py: Z = batch x key heads, G query heads of each, L queries, S keys, d, dv; n heavy hitters, K
clusters.
"""

import ctypes
from typing import NamedTuple

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


class Call(ctypes.Structure):
    """The C structure `NearFar`: sizes, views and pointers of a call."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in SIZES.split()),
        ("factor", ctypes.c_double),
        *((name, View) for name in VIEWS.split()),
        *((name, ctypes.c_void_p) for name in POINTERS.split()),
    ]


class CausalInputs(NamedTuple):
    """Inputs of a causal call, in addition to the vectors.

    keep: (Z, S) or None. metric: its tilt is 0. factor: factor of queries and keys.
    sizes: block, heavy, clusters, open (of the last queries), open_first (of the first queries) and first_renewal.
    """

    keep: Tensor | None
    metric: KeyMetric
    sizes: dict[str, int]
    factor: float = 1.0


class PastMemory(NamedTuple):
    """State of the past in decoding, for at most `capacity` tokens."""

    metric: KeyMetric
    capacity: int
    numbers: Tensor  # (Z, n), not shared between states


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
    clusters = min(sizes.cells, S)
    cross = metric is not None
    if metric is None:
        metric = KeyMetric(y.new_empty(Z, 1, d), y.new_empty(Z, 1, d), y.new_empty(Z, d, d))
    sets = KeySets(
        metric=KeyMetric(*(t.contiguous() for t in metric)),
        heavy=y.new_empty(Z, heavy, dtype=torch.long),
        there=y.new_empty(Z, heavy, dtype=torch.bool),
        pool=y.new_empty(Z, S, dtype=torch.bool),
        cluster=y.new_empty(Z, S, dtype=torch.long),
        centres=y.new_empty(Z, clusters, d),
    )
    views = {"x": x, "y": y.unsqueeze(1)}
    pointers = _set_pointers(sets) | {"keep": keep}
    numbers = {"heavy": heavy, "clusters": clusters, "factor": factor, "cross": cross}
    _call("near_far_choose", views, pointers, numbers)
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
    Z, G, L, d = x.shape
    S = y.shape[1]
    clusters = sets.centres.shape[1]
    slope_rows = v.shape[-1] if sizes.first_order else 0
    intermediates = {
        "u": y.new_empty(Z, S),
        "square": y.new_empty(Z, S),
        "level": y.new_empty(Z, clusters),
        "sums": y.new_empty(Z, clusters, d + 2),
        "spread": y.new_empty(Z, clusters),
        "slope": y.new_empty(Z, slope_rows, d),
        "logsum": y.new_empty(Z, G, L),
    }
    numbers = {
        "block": min(sizes.block, S),
        "heavy": sets.heavy.shape[1],
        "clusters": clusters,
        "first_order": sizes.first_order,
        "cross": cross,
        "factor": factor,
    }
    pointers = _set_pointers(sets) | intermediates
    return _NearFarInC.apply("near_far", pointers, numbers, x, y, v)


def causal(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    inputs: CausalInputs,
    memory: PastMemory | None = None,
) -> Tensor:
    """Return the outputs of causal queries, all after the first renewal.

    x (Z, G, L, d) are the last queries of keys y (Z, S, d), v (Z, S, dv). Differentiable in x, y and v without the
    memory of decoding.
    The memory is overwritten. Rows of keys and values must then be padded with zeros to multiples of 16.
    """
    pointers, numbers = causal_arguments(x, y, v, inputs)
    if memory is not None:
        pointers["decoding_state"] = memory.numbers
        numbers["capacity"] = memory.capacity
        if x[..., 0].numel() <= FEW:  # threads would wait for each other and for busy cores
            numbers["threads"] = 1
    return _NearFarInC.apply("near_far_causal", pointers, numbers, x, y, v)


def empty_memory(
    y: Tensor,
    dv: int,
    metric: KeyMetric,
    sizes: dict[str, int],
    capacity: int,
) -> PastMemory:
    """Return the empty memory of decoding for keys y (Z, S, d)."""
    call = Call(d=y.shape[-1], dv=dv, capacity=capacity, **sizes)
    library = native.library()
    assert library is not None
    size = library.near_far_causal_size
    size.restype = ctypes.c_int64
    numbers = y.new_empty(len(y), size(ctypes.byref(call)))
    numbers[:, :2] = 0
    return PastMemory(metric, capacity, numbers)


def causal_arguments(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    inputs: CausalInputs,
) -> tuple[dict[str, Tensor | None], dict[str, float]]:
    """Return the tensors and numbers of a causal call.

    If gradients may be needed, `gaps` (Z, gap_capacity) stores the distances between retrieved keys (encode_gaps in
    near_far.h), and `gap_offset` (Z, G, L) the offset of the first distance of each query. The allocation is for the
    worst case; the system provides only pages that are written.
    """
    Z, G, L, _ = x.shape
    S = y.shape[1]
    open = min(inputs.sizes["open"], S)
    numbers = {"capacity": S, "factor": inputs.factor, **inputs.sizes, "open": open}
    pointers = {
        "keep": inputs.keep,
        "shift": inputs.metric.shift,
        "root": inputs.metric.root,
        "logsum": y.new_empty(Z, G, L),
    }
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, y, v)):
        capacity = G * L * (open + S // (MAX_GAP - 1) + 2)
        numbers["gap_capacity"] = capacity
        pointers["gaps"] = torch.empty(Z, capacity, dtype=torch.uint8, device="cpu")
        pointers["gap_offset"] = torch.empty(Z, G, L, dtype=torch.int64, device="cpu")
    return pointers, numbers


class _NearFarInC(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, pointers, numbers, x, y, v):
        out = x.new_empty(*x.shape[:3], v.shape[-1])
        views = {"x": x, "y": y.unsqueeze(1), "v": v.unsqueeze(1), "out": out}
        _call(name, views, pointers, numbers)
        ctx.name = name
        ctx.pointers = pointers
        ctx.numbers = numbers
        ctx.save_for_backward(x, y, v, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        check_gradient(grad)
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "near-far attention: no second derivatives; use torch.func.hessian"
            )
        x, y, v, out = ctx.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dy = torch.empty_like(y, memory_format=torch.contiguous_format)
        dv = torch.empty_like(v, memory_format=torch.contiguous_format)
        views = {
            "x": x,
            "y": y.unsqueeze(1),
            "v": v.unsqueeze(1),
            "out": out,
            "grad": grad,
            "dx": dx,
            "dy": dy.unsqueeze(1),
            "dvalues": dv.unsqueeze(1),
        }
        _call(f"{ctx.name}_backward", views, ctx.pointers, ctx.numbers)
        return None, None, None, dx, dy, dv


def _set_pointers(sets: KeySets) -> dict[str, Tensor]:
    pointers = sets._asdict()
    metric = pointers.pop("metric")
    pointers["positions"] = pointers.pop("heavy")
    return pointers | metric._asdict()


def _call(
    name: str,
    views: dict[str, Tensor],
    pointers: dict[str, Tensor | None],
    numbers: dict[str, float],
) -> None:
    """Call a function of the library. Raises MemoryError and NotFinite."""
    Z, G, L, d = views["x"].shape
    S = views["y"].shape[2]
    dv = views.get("v", views["y"]).shape[-1]
    call = Call(threads=torch.get_num_threads(), block=1, Z=Z, G=G, L=L, S=S, d=d, dv=dv)
    for field, number in numbers.items():
        setattr(call, field, number)
    alive = []  # contiguous copies must outlive the call
    for field, view in views.items():
        rows = view if view.stride(-1) == 1 else view.contiguous()
        alive.append(rows)
        setattr(call, field, View(rows.data_ptr(), *rows.stride()[:3]))
    for field, pointer in pointers.items():
        if pointer is not None:
            entries = pointer.contiguous()
            alive.append(entries)
            setattr(call, field, entries.data_ptr())
    status = getattr(native.library(), name)(ctypes.byref(call))
    if status == NO_MEMORY:
        raise MemoryError(f"out of memory for near-far attention of {S} tokens with d={d}")
    if status == NOT_FINITE:
        raise NotFinite(NOT_FINITE_MESSAGE)
