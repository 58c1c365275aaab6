"""What the closed-form engines share: which heads go together, scratch memory, and offsets of log features.

Legend: n heads of one tile (over batches too), T tokens, M features, d, dv. Inside the engines the batch and head dimensions of a
tile are one: x (n, T, d).
"""

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from crt_exp.attention.checks import check_result

Index = tuple[slice, slice]  # batches, heads
DEVICE_ELEMENTS = 2**25      # of one feature buffer on an accelerator, which wants large launches
ARENA = 2**25                # bytes of scratch memory that a thread keeps


class Scratch:
    """Buffers that all chunks of a call share, and on the CPU all calls of a thread: a fresh page of memory costs more than the
    arithmetic on it. A thread keeps at most ARENA bytes."""

    def __init__(self, like: Tensor):
        self.made = {}  # views of buffers that are made once
        self._like, self._named, self._used, self._arena = like, {}, 0, like.new_empty(0)

    def __enter__(self) -> "Scratch":
        if self._like.device.type == "cpu":
            self._arena = _kept.__dict__.pop("arena", self._arena).view(self._like.dtype)
        return self

    def __exit__(self, *_) -> None:
        if self._like.device.type == "cpu":
            wanted = min(self._used, ARENA // self._like.itemsize)
            keep = self._arena if self._arena.numel() >= wanted else self._like.new_empty(wanted)
            _kept.arena = keep.view(torch.uint8)

    def __call__(self, name: str, *shape: int, pad: int = 0) -> Tensor:
        """An uninitialised tensor; the same name gives the same memory. Rows are `pad` elements apart."""
        *outer, last = shape
        size = math.prod(outer) * (last + pad)
        if name not in self._named or self._named[name].numel() < size:
            self._named[name] = self._take(size)
        return self._named[name][:size].view(*outer, last + pad)[..., :last]

    def _take(self, size: int) -> Tensor:
        start, self._used = self._used, self._used + -(-size // 16) * 16  # a cache line
        return self._arena[start:start + size] if self._used <= self._arena.numel() else self._like.new_empty(size)


_kept = threading.local()


def tiles(batch: int, heads: int, most: int) -> Iterator[Index]:
    """Ranges of (batches, heads) that cover all of them, at most `most` heads at a time."""
    per_head = max(1, min(heads, most))
    per_batch = max(1, min(batch, most // heads)) if per_head == heads else 1
    for b in range(0, batch, per_batch):
        for h in range(0, heads, per_head):
            yield slice(b, min(b + per_batch, batch)), slice(h, min(h + per_head, heads))


def part(t: Tensor, index: Index) -> Tensor:
    """t[index], where a dimension of size 1 stands for all of them."""
    return t[tuple(i if n > 1 else slice(None) for i, n in zip(index, t.shape))]


def flat(t: Tensor, index: Index) -> Tensor:
    """t (B, H, ...) as (n, ...) for the heads of a tile: a view where t is contiguous, or one batch entry is taken."""
    return t[index].flatten(0, 1)


def finite(log: Tensor) -> Tensor:
    """-inf, the log-sum or maximum over no key, as 0: what it scales is 0 then, and no NaN may arise."""
    return torch.where(log == -torch.inf, 0.0, log)


@dataclass
class Form:
    """log phi(x) = scale rows.x + bias - norm_weight |x|^2, with what the engines are given besides the vectors."""

    rows: Tensor                # (B or 1, H or 1, M, d)
    scale: Tensor               # (B or 1, H or 1, 1, 1)
    bias: Tensor                # (B or 1, H or 1, M)
    norm_weight: float
    keep: Tensor | None         # (B, S)

    @property
    def width(self) -> int:
        return self.rows.shape[-2]

    def tile_rows(self, index: Index) -> Tensor:
        """scale rows for the heads of a tile, (n, M, d)."""
        b, h = (i.stop - i.start for i in index)
        return (part(self.rows, index) * part(self.scale, index)).expand(b, h, -1, -1).flatten(0, 1)

    def tile_bias(self, index: Index) -> Tensor:
        b, h = (i.stop - i.start for i in index)
        return part(self.bias, index).expand(b, h, -1).flatten(0, 1)

    def masked(self, index: Index) -> Tensor | None:
        """True where a key is padding, (n, S)."""
        if self.keep is None:
            return None
        return ~self.keep[index[0], None].expand(-1, index[1].stop - index[1].start, -1).flatten(0, 1)

    def norms(self, x: Tensor) -> Tensor:
        """|x| of all tokens, (B, H, L). Raises ValueError where it is not finite (CPU)."""
        norms = torch.linalg.vector_norm(x, dim=-1, dtype=self.rows.dtype)
        check_result(norms)
        return norms

    def key_offsets(self, y: Tensor) -> Tensor:
        """-norm_weight |y|^2, -inf where masked, (B, H, S). Raises ValueError where it is not finite (CPU)."""
        squares = torch.linalg.vector_norm(y, dim=-1, dtype=self.rows.dtype).square_()
        if self.keep is not None:
            squares.masked_fill_(~self.keep[:, None], 0)  # padding may hold NaN
        check_result(squares)
        offsets = squares.mul_(-self.norm_weight)
        return offsets if self.keep is None else offsets.masked_fill_(~self.keep[:, None], -torch.inf)


def row_dots(a: Tensor, b: Tensor, dtype: torch.dtype, block: int = 512) -> Tensor:
    """sum_k a_tk b_tk of (B, H, T, k), without products of that size."""
    return torch.cat([(p.to(dtype) * q).sum(-1) for p, q in zip(a.split(block, 2), b.split(block, 2))], 2)
