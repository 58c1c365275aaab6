"""The keys that each query reads for itself: their logits and the weighted sums of their values, in torch's operators
and, where nothing is differentiated, in C (reads.c); fused_reads.py is the faster twin on GPUs.

Legend: Z = batch x key heads, queries q (Z, ..., d), places (Z, ..., o) of keys or values (Z, S, .), -1 for none.
"""

import ctypes

import torch
from torch import Tensor

from crt_exp.attention.checks import transformed
from crt_exp.attention.engines import native_library
from crt_exp.nearfar.engine import fused, fused_reads, native
from crt_exp.nearfar.engine.constants import HIDDEN


class Reads(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_int64) for name in ("Z", "R", "o", "d", "head", "threads")),
                *((name, ctypes.c_void_p) for name in ("places", "rows", "given", "out"))]


def logits(q: Tensor, keys: Tensor, places: Tensor) -> Tensor:
    """q.key (Z, ..., o), HIDDEN for none."""
    if in_c(q, keys):
        return _read("near_far_read_logits", q, keys, places, places.shape)
    if on_gpu(q, keys, places):
        return fused_reads.logits(q, keys, places)
    own = rows(keys, places.clamp(min=0))
    return (own @ q.unsqueeze(-1)).squeeze(-1).masked_fill(places < 0, HIDDEN)


def sums(weight: Tensor, values: Tensor, places: Tensor) -> Tensor:
    """Sums (Z, ..., dv) of values (Z, S, dv) with weights (Z, ..., o), which are 0 for none."""
    if in_c(weight, values):
        return _read("near_far_read_sums", weight, values, places, (*places.shape[:-1], values.shape[-1]))
    if on_gpu(weight, values, places):
        return fused_reads.sums(weight, values, places)
    return (weight.unsqueeze(-2) @ rows(values, places.clamp(min=0))).squeeze(-2)


def rows(t: Tensor, index: Tensor) -> Tensor:
    """Rows (Z, ..., k) of t (Z, S, k) at index (Z, ...)."""
    gathered = t.gather(1, index.flatten(1).unsqueeze(-1).expand(-1, -1, t.shape[-1]))
    return gathered.view(*index.shape, t.shape[-1])


def in_c(given: Tensor, table: Tensor) -> bool:
    differentiated = torch.is_grad_enabled() and (given.requires_grad or table.requires_grad)
    return given.dtype == table.dtype == torch.float32 and not differentiated and native.applies(given, table)


def on_gpu(given: Tensor, table: Tensor, places: Tensor) -> bool:
    """Whether Triton's kernels read them."""
    plain = torch.compiler.is_compiling() or transformed(given, table)
    return not plain and places.numel() > 0 and fused.applies(given, table)


def _read(name: str, given: Tensor, table: Tensor, places: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Raises IndexError for a place beyond the table."""
    if not places.numel():
        return given.new_zeros(shape)
    (Z, S, d), (given, places) = table.shape, (given.contiguous(), places.contiguous())
    if table.stride()[1:] != (d, 1):
        table = table.contiguous()
    if int(places.max()) >= S:
        raise IndexError(f"place {int(places.max())}: there are {S} keys")
    out = given.new_empty(shape)
    call = Reads(Z=Z, R=places[0, ..., 0].numel(), o=places.shape[-1], d=d, head=table.stride(0),
                 threads=torch.get_num_threads(), places=places.data_ptr(), rows=table.data_ptr(),
                 given=given.data_ptr(), out=out.data_ptr())
    getattr(native_library.library(), name)(ctypes.byref(call))
    return out
