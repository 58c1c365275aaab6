"""Near-far attention in C, for float32 on CPUs.

Bidirectional and cross-attention: clusters.c, forward.c and backward.c. Causal: scores.c, past.c, causal_forward.c and
causal_backward.c. They compute the same as choice.py, both_directions.py, causal.py and retrieval.py.

Notation as in call.py: Z = batch x key heads, G query heads of each, L queries, S keys, d, dv; n heavy hitters, K
clusters.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.checks import check_gradient, check_result, compute_dtype, transformed
from crt_exp.attention.engines import NO_MEMORY, NOT_FINITE, native
from crt_exp.attention.engines.native import View
from crt_exp.nearfar.choice import MAX_GAP, Choice, KeyMetric, Sizes

FEW = 16  # queries of a step that one thread computes: about 50 us each
THREADS = 4  # for each head, which one thread computes: PyTorch uses more threads better
SIZES = (
    "Z",
    "G",
    "L",
    "S",
    "d",
    "dv",
    "block",
    "heavy",
    "clusters",
    "first_order",
    "cross",
    "open",
    "open_first",
    "first_renewal",
    "capacity",
    "gap_capacity",
    "threads",
)
VIEWS = ("x", "y", "v", "out", "grad", "dx", "dy", "dvalues")
PLAIN = (
    "keep",
    "shift",
    "tilt",
    "root",
    "centres",
    "positions",
    "cluster",
    "there",
    "pool",
    "u",
    "square",
    "level",
    "sums",
    "spread",
    "slope",
    "logsum",
    "gaps",
    "gap_offset",
    "decoding_state",
)


class Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in SIZES),
        ("factor", ctypes.c_double),
        *((name, View) for name in VIEWS),
        *((name, ctypes.c_void_p) for name in PLAIN),
    ]


class Given(NamedTuple):
    """Inputs of a causal call, in addition to the vectors.

    keep: (Z, S) or None. shift, root: the metric. factor: factor of queries and keys.
    sizes: block, heavy, clusters, open (of the last queries), open_first (of the first queries) and first_renewal.
    """

    keep: Tensor | None
    shift: Tensor
    root: Tensor
    sizes: dict[str, int]
    factor: float = 1.0


class State(NamedTuple):
    """State of the past in decoding, for at most `room` tokens."""

    room: int
    kept: Tensor  # (Z, numbers), not shared between states


def applies(*tensors: Tensor) -> bool:
    """Return whether this engine can process the tensors.

    They must be on the CPU and not in float64, the library must be available, and neither torch.compile nor torch.func
    may be tracing.
    """
    if (
        torch.compiler.is_compiling()
        or transformed(*tensors)
        or compute_dtype(*tensors) == torch.float64
    ):
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
) -> tuple[KeyMetric, Choice]:
    """Choose metric, heavy hitters and clusters for factor x and factor y.

    x (Z, G, L, d), y (Z, S, d). A given metric (Z, ...) means that they belong to two sequences. Raises NotFinite if
    queries and keys of one sequence are not finite.
    """
    (Z, S, d), n, K = y.shape, min(sizes.heavy, y.shape[1]), min(sizes.cells, y.shape[1])
    cross, new = metric is not None, y.new_empty
    metric = KeyMetric(
        *(t.contiguous() for t in metric or (new(Z, 1, d), new(Z, 1, d), new(Z, d, d)))
    )
    choice = Choice(
        new(Z, n, dtype=torch.long),
        new(Z, n, dtype=torch.bool),
        new(Z, S, dtype=torch.bool),
        new(Z, S, dtype=torch.long),
        new(Z, K, d),
    )
    _call(
        "near_far_choose",
        {"x": x, "y": y.unsqueeze(1)},
        _sets(metric, choice) | {"keep": keep},
        {"heavy": n, "clusters": K, "factor": factor, "cross": cross},
    )
    return metric, choice


def attend(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    metric: KeyMetric,
    choice: Choice,
    sizes: Sizes,
    factor: float = 1.0,
    cross: bool = False,
) -> Tensor:
    """Return the outputs (Z, G, L, dv) for factor x and factor y.

    x (Z, G, L, d), y (Z, S, d), v (Z, S, dv). With `cross` no key is near. Differentiable in x, y and v.
    """
    (Z, G, L, d), S, (n, K), new = (
        x.shape,
        y.shape[1],
        (choice.heavy.shape[1], choice.centres.shape[1]),
        y.new_empty,
    )
    kept = {
        "u": new(Z, S),
        "square": new(Z, S),
        "level": new(Z, K),
        "sums": new(Z, K, d + 2),
        "spread": new(Z, K),
        "slope": new(Z, v.shape[-1] if sizes.first_order else 0, d),
        "logsum": new(Z, G, L),
    }
    numbers = {
        "block": min(sizes.block, S),
        "heavy": n,
        "clusters": K,
        "first_order": sizes.first_order,
        "cross": cross,
        "factor": factor,
    }
    return _InC.apply("near_far", _sets(metric, choice) | kept, numbers, x, y, v)


def causal(x: Tensor, y: Tensor, v: Tensor, given: Given, state: State | None = None) -> Tensor:
    """Return the outputs of causal queries, all after the first renewal.

    x (Z, G, L, d) are the last queries of keys y (Z, S, d), v (Z, S, dv). Differentiable in x, y and v without a
    decoding state.
    A decoding state is overwritten. Rows of keys and values must then be padded with zeros to multiples of 16.
    """
    plain, numbers = causal_memory(x, y, v, given)
    if state is not None:
        plain["decoding_state"], numbers["capacity"] = state.kept, state.room
        if plain["logsum"].numel() <= FEW:  # threads would wait for each other and for busy cores
            numbers["threads"] = 1
    return _InC.apply("near_far_causal", plain, numbers, x, y, v)


def new_state(y: Tensor, dv: int, options: dict[str, int], room: int) -> State:
    """Return the empty decoding state for keys y (Z, S, d)."""
    size = native.library().near_far_causal_size
    size.restype = ctypes.c_int64
    kept = y.new_empty(
        len(y), size(ctypes.byref(Call(d=y.shape[-1], dv=dv, capacity=room, **options)))
    )
    kept[:, :2] = 0
    return State(room, kept)


def causal_memory(
    x: Tensor, y: Tensor, v: Tensor, given: Given
) -> tuple[dict[str, Tensor | None], dict[str, float]]:
    """Return the tensors and numbers of a causal call.

    If gradients may be needed, `gaps` (Z, gap_capacity) stores the distances between retrieved keys (encode_gaps in
    near_far.h), and `gap_offset` (Z, G, L) the offset of the first distance of each query. The allocation is for the
    worst case; the system provides only pages that are written.
    """
    (Z, G, L, _), S = x.shape, y.shape[1]
    numbers = (
        {"capacity": S, "factor": given.factor}
        | given.sizes
        | {"open": min(given.sizes["open"], S)}
    )
    plain = {
        "keep": given.keep,
        "shift": given.shift,
        "root": given.root,
        "logsum": y.new_empty(Z, G, L),
    }
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, y, v)):
        numbers["gap_capacity"] = G * L * (numbers["open"] + S // (MAX_GAP - 1) + 2)
        plain["gaps"] = torch.empty(Z, numbers["gap_capacity"], dtype=torch.uint8, device="cpu")
        plain["gap_offset"] = torch.empty(Z, G, L, dtype=torch.int64, device="cpu")
    return plain, numbers


class _InC(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, plain, numbers, x, y, v):
        out = x.new_empty(*x.shape[:3], v.shape[-1])
        _call(name, {"x": x, "y": y.unsqueeze(1), "v": v.unsqueeze(1), "out": out}, plain, numbers)
        ctx.call = name, plain, numbers
        ctx.save_for_backward(x, y, v, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        check_gradient(grad)
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "near-far attention: no second derivatives; use torch.func.hessian"
            )
        (x, y, v, out), (name, plain, numbers) = ctx.saved_tensors, ctx.call
        dx, dy, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, y, v))
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
        _call(f"{name}_backward", views, plain, numbers)
        return None, None, None, dx, dy, dv


def _sets(metric: KeyMetric, choice: Choice) -> dict[str, Tensor]:
    sets = metric._asdict() | choice._asdict()
    return {"positions": sets.pop("heavy"), **sets}


def _call(
    name: str, views: dict[str, Tensor], plain: dict[str, Tensor | None], numbers: dict[str, float]
) -> None:
    """Call a function of the library. Raises MemoryError and NotFinite."""
    (Z, G, L, d), S, dv = (
        views["x"].shape,
        views["y"].shape[2],
        views.get("v", views["y"]).shape[-1],
    )
    views = {key: t if t.stride(-1) == 1 else t.contiguous() for key, t in views.items()}
    plain = {key: t.contiguous() for key, t in plain.items() if t is not None}
    call = Call(
        **{"threads": torch.get_num_threads(), "block": 1, **numbers},
        Z=Z,
        G=G,
        L=L,
        S=S,
        d=d,
        dv=dv,
        **{key: View(t.data_ptr(), *t.stride()[:3]) for key, t in views.items()},
        **{key: t.data_ptr() for key, t in plain.items()},
    )
    status = getattr(native.library(), name)(ctypes.byref(call))
    if status == NO_MEMORY:
        raise MemoryError(f"out of memory for near-far attention of {S} tokens with d={d}")
    if status == NOT_FINITE:
        check_result(torch.tensor(torch.inf, device="cpu"))
