"""Draws down a `SumTree` and products with rows of its table on CPUs, in C: the twin of `SumTree.rows_of` and of
`TreeFeatures._products`. See tree_draws.c, which is compiled with the attention kernels."""

import ctypes

import torch
from torch import Tensor

from crt_exp.attention.engines import native_library
from crt_exp.attention.engines.constants import LEVELS, NO_MEMORY
from crt_exp.samplers.noise import transforming

SIZES = ("B", "k", "M", "rows", "nodes", "start", "threads")


class Draws(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_int64) for name in SIZES),
                *((name, ctypes.c_void_p) for name in ("mass", "ends", "u", "table")),
                ("levels", ctypes.c_void_p * LEVELS),
                *((name, ctypes.c_void_p) for name in ("without", "weight", "ids", "products"))]


def applies(table: Tensor, *sums: Tensor) -> bool:
    """Whether the table and the levels above it are for this engine: float32 and float64 on the CPU, as they were made,
    where the library can be had; not in graphs of torch.compile and transforms of torch.func."""
    return (table.device.type == "cpu" and table.dtype == torch.float32
            and all(level.dtype == torch.float64 for level in sums) and not torch.compiler.is_compiling()
            and not transforming() and native_library.library() is not None)


def rows_of(levels: list[Tensor], start: int, rows: int, ends: Tensor, mass: Tensor, u: Tensor,
            without: Tensor | None) -> Tensor:
    """As `SumTree.rows_of`. levels: of the tree, from the table on; ends (M, nodes): sums of the columns of level
    `start` up to each node."""
    (B, k, _), M, nodes = u.shape, *ends.shape
    mass, ends, u = (t.contiguous() for t in (mass.double(), ends, u))
    without = None if without is None else without.long().contiguous()
    ids = u.new_empty(B, k, dtype=torch.long)
    pointers = [0, *(level.data_ptr() for level in levels[1:start])]
    _call("tree_draw", B=B, k=k, M=M, rows=rows, nodes=nodes, start=start, mass=mass, ends=ends, u=u, table=levels[0],
          levels=(ctypes.c_void_p * LEVELS)(*pointers), without=without, ids=ids)
    return ids


def products(weight: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """weight (B, M) float32 times the rows of ids (B, k), (B, k). Raises IndexError for an id that is no row."""
    weight, ids = weight.contiguous(), ids.long().contiguous()
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(table):
        raise IndexError(f"ids from {int(ids.min())} to {int(ids.max())}: the table has {len(table)} rows")
    out = table.new_empty(ids.shape)
    _call("tree_products", B=len(ids), k=ids.shape[1], M=weight.shape[1], weight=weight, table=table, ids=ids,
          products=out)
    return out


def _call(name: str, **fields) -> None:
    fields = {key: value.data_ptr() if isinstance(value, Tensor) else value for key, value in fields.items()}
    call = Draws(threads=torch.get_num_threads(), **fields)
    if getattr(native_library.library(), name)(ctypes.byref(call)) == NO_MEMORY:
        raise MemoryError(f"no memory for the masses of {call.M} features a thread")
