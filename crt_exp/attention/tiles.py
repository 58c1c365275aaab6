"""What the closed-form engines share: which heads go together, scratch memory, and vectors laid out with tokens last.

Legend: n heads of one tile (over batches too), k chunks of C tokens, M features, d, dv. A block of chunks is (k n, rows, C).

Tokens come last everywhere: of the layouts tried, matrix products of these small sizes run fastest there (a transposed
large operand costs a quarter more, or twice as much for chunks of 64). One row of ones in the vectors meets one column of
offsets in the directions and the reverse, so that a single product gives log features with both offsets added:
[W, offset of the feature, 1] @ [x; 1; offset of the token].
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from crt_exp.attention.checks import check_result

Index = tuple[slice, slice]  # batches, heads
PAD = 16  # rows a power of two apart fall on the same cache lines, which halves the speed of transposed copies


class Scratch:
    """Buffers that all chunks of a call share: fresh ones cost more in page faults than in arithmetic."""

    def __init__(self, like: Tensor):
        self._like, self._flat = like, {}

    def __call__(self, name: str, *shape: int, pad: int = 0) -> Tensor:
        """An uninitialised tensor; the same name gives the same memory. Rows are `pad` elements apart."""
        *outer, last = shape
        size = math.prod(outer) * (last + pad)
        if name not in self._flat or self._flat[name].numel() < size:
            self._flat[name] = self._like.new_empty(size)
        return self._flat[name][:size].view(*outer, last + pad)[..., :last]


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


def by_chunk(t: Tensor, chunks: int) -> Tensor:
    """(b, h, k C, ...) seen as (k, b, h, C, ...)."""
    b, h, tokens, *rest = t.shape
    return t.view(b, h, chunks, tokens // chunks, *rest).movedim(2, 0) if chunks > 1 else t.unsqueeze(0)


def load(dst: Tensor, src: Tensor) -> None:
    """src (b, h, k C, rows) into dst (k b h, rows, C), cast on the way."""
    b, h, tokens, _ = src.shape
    k = tokens // dst.shape[-1]
    dst.view(k, b, h, *dst.shape[1:]).copy_(by_chunk(src, k).mT)


def load_row(dst: Tensor, src: Tensor) -> None:
    """src (b, h, k C) into dst (k b h, C)."""
    b, h, tokens = src.shape
    k = tokens // dst.shape[-1]
    dst.view(k, b, h, -1).copy_(by_chunk(src, k))


def store(dst: Tensor, src: Tensor) -> None:
    """The reverse of `load`: src (k b h, rows, C) into dst (b, h, k C, rows)."""
    b, h, tokens, _ = dst.shape
    k = tokens // src.shape[-1]
    by_chunk(dst, k).copy_(src.view(k, b, h, *src.shape[1:]).mT)


def store_row(dst: Tensor, src: Tensor) -> None:
    b, h, tokens = dst.shape
    k = tokens // src.shape[-1]
    by_chunk(dst, k).copy_(src.view(k, b, h, -1))


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


class Tile:
    """One range of batches and heads: its directions in both orientations, and its vectors, chunk by chunk."""

    def __init__(self, form: Form, index: Index, sizes: tuple[int, int], scratch: Scratch, chunks: int = 1):
        self.index, self.scratch, self.form, self.chunks = index, scratch, form, chunks
        self.n = math.prod(i.stop - i.start for i in index)
        b, h = (i.stop - i.start for i in index)
        M, d = form.rows.shape[-2:]
        self.d, self.dv = sizes
        copies = 1 if self.n == 1 else chunks  # one head serves all its chunks with stride 0
        self._w = scratch("w", copies, self.n, M, d + 2)
        self._wt = scratch("wt", copies, self.n, d + 1, M)
        scaled = part(form.rows, index) * part(form.scale, index)
        self._w.view(copies, b, h, M, d + 2)[..., :d] = scaled
        self._w[..., d + 1] = 1
        self._wt.view(copies, b, h, d + 1, M)[..., :d, :] = scaled.mT
        self._wt[..., d, :] = 1
        self.bias = part(form.bias, index).expand(b, h, M).reshape(self.n, M)

    def log_features(self, vectors: Tensor, offset: Tensor, name: str) -> Tensor:
        """W x + offset of the feature (n, M) + offset of the token, (k n, M, C)."""
        self._w[..., self.d] = offset
        w = self._chunks(self._w, vectors.shape[0])
        return torch.bmm(w, vectors, out=self.scratch(name, vectors.shape[0], self.form.width, vectors.shape[-1]))

    def back(self, grad: Tensor, rows: int) -> Tensor:
        """[W^T; 1] grad: gradients of log features (k n, M, C) to the first `rows` rows of the vectors (k n, rows, C)."""
        wt = self._chunks(self._wt, grad.shape[0])[:, :rows]
        return torch.bmm(wt, grad, out=self.scratch("back", grad.shape[0], rows, grad.shape[-1]))

    def _chunks(self, w: Tensor, count: int) -> Tensor:
        return w[0].expand(count, -1, -1) if self.n == 1 else w.flatten(0, 1)[:count]

    def queries(self, x: Tensor, tokens: slice, size: int, offset: Tensor | None = None) -> Tensor:
        """[x; 1; offset], (k n, d + 2, size) for a range of k * size tokens; offset (B, H, L) or None for 0."""
        chunk = self._vectors("x", x, tokens, size)
        if offset is None:
            chunk[:, self.d + 1] = 0
        else:
            load_row(chunk[:, self.d + 1], offset[self.index][:, :, tokens])
        return chunk

    def keys(self, y: Tensor, tokens: slice, size: int) -> Tensor:
        """[y; 1; -norm_weight |y|^2], with zeros and -inf for masked keys."""
        chunk = self._vectors("y", y, tokens, size)
        mask = self._masked(tokens, size)
        if mask is not None:
            chunk[:, : self.d].masked_fill_(mask.unsqueeze(1), 0)  # padding may hold NaN
        offset = chunk[:, : self.d].square().sum(1).mul_(-self.form.norm_weight)
        check_result(-offset)
        chunk[:, self.d + 1] = offset if mask is None else offset.masked_fill_(mask, -torch.inf)
        return chunk

    def values(self, v: Tensor, tokens: slice, size: int) -> Tensor:
        """[v; 1], (k n, dv + 1, size)."""
        chunk = self.scratch("values", self._blocks(tokens, size), self.dv + 1, size, pad=PAD)
        load(chunk[:, : self.dv], v[self.index][:, :, tokens])
        mask = self._masked(tokens, size)
        if mask is not None:
            chunk[:, : self.dv].masked_fill_(mask.unsqueeze(1), 0)
        chunk[:, self.dv] = 1
        return chunk

    def output_grads(self, grad: Tensor, out: Tensor, tokens: slice, size: int) -> Tensor:
        """[g; -g.out], (k n, dv + 1, size): the gradients to numerator and denominator of normalised rows."""
        chunk = self.scratch("grads", self._blocks(tokens, size), self.dv + 1, size, pad=PAD)
        g, o = (t[self.index][:, :, tokens].to(chunk.dtype) for t in (grad, out))
        load(chunk[:, : self.dv], g)
        load_row(chunk[:, self.dv], (g * o).sum(-1).neg_())
        return chunk

    def _vectors(self, name: str, source: Tensor, tokens: slice, size: int) -> Tensor:
        chunk = self.scratch(name, self._blocks(tokens, size), self.d + 2, size, pad=PAD)
        load(chunk[:, : self.d], source[self.index][:, :, tokens])
        chunk[:, self.d] = 1
        return chunk

    def _blocks(self, tokens: slice, size: int) -> int:
        return (tokens.stop - tokens.start) // size * self.n

    def _masked(self, tokens: slice, size: int) -> Tensor | None:
        """True where a key is padding, (k n, size)."""
        return None if self.form.keep is None else ~self.per_head(self.form.keep, tokens, size)

    def per_head(self, of_tokens: Tensor, tokens: slice, size: int) -> Tensor:
        """A range of (B, S) for the heads of this tile, (k n, size)."""
        b, h = (i.stop - i.start for i in self.index)
        chunks = of_tokens[self.index[0], tokens].unflatten(1, (-1, size))  # (b, k, size)
        return chunks.movedim(1, 0)[:, :, None].expand(-1, b, h, -1).reshape(-1, size)
