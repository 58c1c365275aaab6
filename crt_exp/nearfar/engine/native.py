"""Near-far attention on CPUs in float32, in C. In both directions, and to another sequence: the twin of
nearfar/choice.py in the choice of the sets, and of sets.py, cell_sums.py and block_sums.py in what they give
(choice.c, cells.c, near_far.c). Causal: that of nearfar/recall.py (looks.c, opened.c, left.c, recall.c,
recall_backward.c).

Legend as in nearfar/call.py: Z = batch x key heads, G query heads of each, L queries, S keys, d, dv; n heavy keys, K
cells.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.checks import check_gradient, check_result, compute_dtype, transformed
from crt_exp.attention.engines import native
from crt_exp.attention.engines.constants import BAD_SIZES, NO_MEMORY, NOT_FINITE
from crt_exp.attention.engines.native import View
from crt_exp.nearfar.choice import KeyMetric
from crt_exp.nearfar.engine.constants import WIDEST

FEW = 16       # queries of a step that one thread takes: some 50 us each
THREADS = 4    # a head, which one thread takes: of more, PyTorch's products make better use
SIZES = ("Z", "G", "L", "S", "d", "dv", "block", "heavy", "cells", "first_order", "cross", "threads")
VIEWS = ("x", "y", "v", "out", "grad", "dx", "dy", "dvalues")     # of both calls
PLAIN = ("keep", "shift", "tilt", "root", "centres", "places", "cell", "there", "pool", "u", "square", "level", "sums",
         "spread", "slope", "logsum", "share")


class NearFarCall(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_int64) for name in SIZES), ("factor", ctypes.c_double),
                *((name, View) for name in VIEWS), *((name, ctypes.c_void_p) for name in PLAIN)]


class RecallCall(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_int64) for name in ("Z", "G", "L", "S", "d", "dv", "block", "heavy", "cells", "open",
                                                      "least", "until", "room", "bytes", "threads")),
                ("factor", ctypes.c_double), *((name, View) for name in VIEWS),
                *((name, ctypes.c_void_p) for name in ("keep", "shift", "root", "gaps", "gaps_at", "logsum", "share",
                                                       "spread", "kept"))]


class Recalled(NamedTuple):
    out: Tensor       # (Z, G, L, dv), behind that of the queries before the first renewal
    logsum: Tensor    # (Z, G, L), in base 2
    share: Tensor     # (Z, G, L): how much of the weight of each query lies in the cells
    spread: Tensor    # (Z,): mean tau of the cells that the last query sees
    gaps: Tensor | None      # (Z, bytes) uint8: where gradients are, between the keys that are read (put_gaps, past.h)
    gaps_at: Tensor | None   # (Z, G, L): where those of a query begin


class Sets(NamedTuple):
    """What is chosen: the fields of `KeyMetric` and of `Choice`."""

    shift: Tensor     # (Z, 1, d)
    tilt: Tensor      # (Z, 1, d)
    root: Tensor      # (Z, d, d)
    places: Tensor    # (Z, n)
    there: Tensor     # (Z, n)
    pool: Tensor      # (Z, S)
    cell: Tensor      # (Z, S)
    centres: Tensor   # (Z, K, d)


class Attended(NamedTuple):
    out: Tensor       # (Z, G, L, dv)
    share: Tensor     # (Z, G, L): how much of the weight of each query lies in the cells
    logsum: Tensor    # (Z, G, L), in base 2
    u: Tensor         # (Z, S): weights of keys in their cells
    square: Tensor    # (Z, S): |z - centre|^2
    level: Tensor     # (Z, K)
    sums: Tensor      # (Z, K, d + 2): of [u y, u |z - centre|^2, u]
    spread: Tensor    # (Z, K)
    slope: Tensor     # (Z, dv, d), or nothing


def applies(*tensors: Tensor) -> bool:
    """Whether these tensors are for this engine: on the CPU, to be computed with in float32, where the library can be
    had; not in graphs of torch.compile and transforms of torch.func."""
    if torch.compiler.is_compiling() or transformed(*tensors) or compute_dtype(*tensors) == torch.float64:
        return False
    return all(t.device.type == "cpu" for t in tensors) and native.library() is not None


@torch.no_grad()
def choose(x: Tensor, y: Tensor, heavy: int, cells: int, keep: Tensor | None, factor: float = 1.0,
           metric: KeyMetric | None = None) -> Sets:
    """Of queries factor x (Z, G, L, d) and keys factor y (Z, S, d), which are of one sequence; or, where the metric of
    (Z, ...) is given, of two. Raises NotFinite where queries and keys of one sequence are not finite."""
    (Z, S, d), n, K = y.shape, min(heavy, y.shape[1]), min(cells, y.shape[1])
    places, there = y.new_empty(Z, n, dtype=torch.long), y.new_empty(Z, n, dtype=torch.bool)
    pool, cell = y.new_empty(Z, S, dtype=torch.bool), y.new_empty(Z, S, dtype=torch.long)
    sets = Sets(y.new_empty(Z, 1, d), y.new_empty(Z, 1, d), y.new_empty(Z, d, d), places, there, pool, cell,
                y.new_empty(Z, K, d))
    if metric is not None:
        sets = Sets(*(t.contiguous() for t in metric), *sets[3:])
    _call("near_far_choose", dict(x=x, y=y.unsqueeze(1)), dict(keep=keep, **sets._asdict()), dv=d, block=1,
          heavy=n, cells=K, factor=factor, cross=metric is not None)
    return sets


def attend(x: Tensor, y: Tensor, v: Tensor, sets: Sets, block: int, first_order: bool, factor: float = 1.0,
           cross: bool = False) -> Attended:
    """What queries factor x (Z, G, L, d) gather from keys factor y (Z, S, d), v (Z, S, dv); `cross`: no key is near.
    Differentiable in x, y and v; the outputs alone carry gradients."""
    options = {"block": block, "first_order": first_order, "factor": factor, "cross": cross}
    return Attended(*_Attend.apply(sets, options, x, y, v))


def recall(x: Tensor, y: Tensor, v: Tensor, given: "Given", near: Tensor | None = None) -> Recalled:
    """What causal queries x (Z, G, L, d), the last ones of keys y (Z, S, d), v (Z, S, dv), gather, all behind the first
    renewal, with the outputs `near` (Z, G, ., dv) of those before. Differentiable by the outputs alone."""
    back = torch.is_grad_enabled() and any(t.requires_grad for t in (x, y, v))
    return Recalled(*_Recall.apply(given, near, back, x, y, v))


@torch.no_grad()
def recall_step(x: Tensor, y: Tensor, v: Tensor, given: "Given", room: int, kept: Tensor) -> Recalled:
    """What queries (Z, G, L, d) behind the first renewal, the last ones of the keys, gather, without gradients.
    kept: what the call before knew, or `room_for_steps`, for as many tokens; it is overwritten. Rows of keys and
    values are as far apart as d and dv rounded up to multiples of 16, with zeros between."""
    result = _room_for(x, y, v, given)
    call = _recall_call(x, y, v, given, result, room)
    call.kept = kept.data_ptr()
    if result.share.numel() <= FEW:     # threads would wait for each other, and for a core where others have them
        call.threads = 1
    _do("near_far_recall", call)
    return result


def room_for_steps(y: Tensor, dv: int, options: dict[str, int], room: int) -> Tensor:
    """(Z, numbers): what `recall_step` knows before its first call, for keys y (Z, S, d) of which there will be at most
    so many."""
    call = RecallCall(d=y.shape[-1], dv=dv, room=room, **options)
    size = native.library().near_far_recall_size
    size.restype = ctypes.c_int64
    kept = y.new_empty(len(y), size(ctypes.byref(call)))
    kept[:, :2] = 0
    return kept


class Given(NamedTuple):
    """keep (Z, S) or None; the metric; block, heavy, cells, open (of the last queries), least (of the first ones) and
    until, the first renewal; queries are factor x and keys factor y."""

    keep: Tensor | None
    shift: Tensor
    root: Tensor
    sizes: dict[str, int]
    factor: float = 1.0


class _Recall(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given, near, back, x, y, v):
        ctx.given, ctx.short = given, 0 if near is None else near.shape[2]
        result = _room_for(x, y, v, given, ctx.short, back)
        if near is not None:
            result.out[:, :, :ctx.short] = near
        _do("near_far_recall", _recall_call(x, y, v, given, _behind(result, ctx.short)))
        ctx.save_for_backward(x, y, v, *result)
        ctx.mark_non_differentiable(*(t for t in result[1:] if t is not None))
        ctx.set_materialize_grads(False)
        return tuple(result)

    @staticmethod
    def backward(ctx, grad, *_):
        (x, y, v, *result), short = ctx.saved_tensors, ctx.short
        if grad is None:
            return (None,) * 6
        views, gradients = _gradients(grad[:, :, short:], x, y, v)
        _do("near_far_recall_backward", _recall_call(x, y, v, ctx.given, _behind(Recalled(*result), short), **views))
        return None, grad[:, :, :short] if short else None, None, *gradients


def _room_for(x: Tensor, y: Tensor, v: Tensor, given: Given, short: int = 0, back: bool = False) -> Recalled:
    """back: whether gradients will be asked for. Of the memory of gaps, which is for the most that there can be, a
    system gives what is written."""
    (Z, G, L, _), S, new = x.shape, y.shape[1], y.new_empty
    gaps, gaps_at = None, None
    if back:
        most = min(given.sizes["open"], S) + S // (WIDEST - 1) + 2
        gaps, gaps_at = torch.empty(Z, G * L * most, dtype=torch.uint8), torch.empty(Z, G, L, dtype=torch.int64)
    return Recalled(new(Z, G, short + L, v.shape[-1]), new(Z, G, L), new(Z, G, L), new(Z), gaps, gaps_at)


def _behind(result: Recalled, short: int) -> Recalled:
    """Without the outputs of the first queries."""
    return result._replace(out=result.out[:, :, short:])


def _recall_call(x: Tensor, y: Tensor, v: Tensor, given: Given, result: Recalled, room: int | None = None,
                 **views: Tensor) -> RecallCall:
    (Z, G, L, d), S = x.shape, y.shape[1]
    views = dict(x=x, y=y.unsqueeze(1), v=v.unsqueeze(1), out=result.out) | views
    plain = {"keep": given.keep, "shift": given.shift, "root": given.root, **result._asdict()}
    del plain["out"]
    sizes = given.sizes | {"open": min(given.sizes["open"], S)}
    return _filled(RecallCall, views, plain, Z=Z, G=G, L=L, S=S, d=d, dv=v.shape[-1], room=room or S,
                   bytes=0 if result.gaps is None else result.gaps.shape[1], factor=given.factor, **sizes)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sets, options, x, y, v):
        (Z, G, L, d), S, K, dv, new = x.shape, y.shape[1], sets.centres.shape[1], v.shape[-1], y.new_empty
        result = Attended(new(Z, G, L, dv), new(Z, G, L), new(Z, G, L), new(Z, S), new(Z, S), new(Z, K),
                          new(Z, K, d + 2), new(Z, K), new(Z, dv if options["first_order"] else 0, d))
        ctx.sets, ctx.options = sets, options
        _run("near_far_forward", ctx, x, y, v, result)
        ctx.save_for_backward(x, y, v, *result)
        ctx.mark_non_differentiable(*result[1:])
        ctx.set_materialize_grads(False)
        return tuple(result)

    @staticmethod
    def backward(ctx, grad, *_):
        x, y, v, *result = ctx.saved_tensors
        if grad is None:
            return (None,) * 5
        views, gradients = _gradients(grad, x, y, v)
        _run("near_far_backward", ctx, x, y, v, Attended(*result), **views)
        return None, None, *gradients


def _run(name: str, ctx, x: Tensor, y: Tensor, v: Tensor, result: Attended, **views: Tensor) -> None:
    plain = ctx.sets._asdict() | result._asdict()
    views = dict(x=x, y=y.unsqueeze(1), v=v.unsqueeze(1), out=plain.pop("out")) | views
    n, K = ctx.sets.places.shape[1], ctx.sets.centres.shape[1]
    _call(name, views, plain, dv=v.shape[-1], heavy=n, cells=K, **ctx.options)


def _call(name: str, views: dict[str, Tensor], plain: dict[str, Tensor | None], **sizes: float) -> None:
    (Z, G, L, d), S = views["x"].shape, views["y"].shape[2]
    sizes["block"] = min(sizes["block"], S)
    _do(name, _filled(NearFarCall, views, plain, Z=Z, G=G, L=L, S=S, d=d, **sizes))


# ---- what both calls share


def _filled(kind: type[ctypes.Structure], views: dict[str, Tensor], plain: dict[str, Tensor | None],
            **numbers: float) -> ctypes.Structure:
    """A call with the addresses of these tensors, which live as long as it does."""
    views = {key: t if t.stride(-1) == 1 else t.contiguous() for key, t in views.items()}
    plain = {key: t.contiguous() for key, t in plain.items() if t is not None}
    call = kind(threads=torch.get_num_threads(), **numbers,
                **{key: View(t.data_ptr(), *t.stride()[:3]) for key, t in views.items()},
                **{key: t.data_ptr() for key, t in plain.items()})
    call.tensors = views, plain
    return call


def _do(name: str, call: ctypes.Structure) -> None:
    status = getattr(native.library(), name)(ctypes.byref(call))
    if status == NO_MEMORY:
        raise MemoryError(f"no memory for near-far attention of {call.S} tokens with d = {call.d}")
    if status == BAD_SIZES:
        sizes = ", ".join(f"{size} = {getattr(call, size)}" for size in ("block", "heavy", "cells", "open"))
        raise ValueError(f"near-far attention of {call.S} keys with {sizes}: none can be more than there are keys")
    if status == NOT_FINITE:
        check_result(torch.tensor(torch.inf, device="cpu"))


def _gradients(grad: Tensor, x: Tensor, y: Tensor, v: Tensor) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """The views of a backward pass, and the gradients to x, y and v that it writes. Raises ValueError for a batch of
    gradients (see `check_gradient`) and NotImplementedError where the pass itself is to be differentiated."""
    check_gradient(grad)
    if torch.is_grad_enabled():
        raise NotImplementedError("near-far attention has no second derivatives by torch.autograd: use torch.func, "
                                  "such as torch.func.hessian, which goes through plain operations")
    dx, dy, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, y, v))
    return {"grad": grad, "dx": dx, "dy": dy.unsqueeze(1), "dvalues": dv.unsqueeze(1)}, (dx, dy, dv)
