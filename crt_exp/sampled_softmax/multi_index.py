"""`MultiIndex`: class vectors in cells of two codebooks; draws look at cells, not at classes (MIDX, Chen et al. 2025).

Legend as in the package; K codewords of each codebook, K^2 cells. A class vector with its bias, [e_c, b_c], is cut in
two halves, of which each has its nearest codeword; the logit by codewords, o^_c = [h, 1] . [codeword, codeword], is one
for all classes of a cell.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.hints import whole_number
from crt_exp.sampled_softmax.base import Drawn, TableLaw, blocks, check_classes, joined

STEPS = 10       # of Lloyd's algorithm in a rebuild, from the codewords that are there
PAIRS = 2**22    # of a query and a cell, or of a class and a codeword, at once


class MultiIndex(TableLaw):
    """q_c in proportion to exp(o^_c): a cell in proportion to its classes times exp(o^), then a class of it, all alike.

    O(K d + K^2) a query, whatever V. codewords: K. The codewords are made by `rebuild`, k-means from random classes
    (`seed`) or from the codewords before; `update` moves classes to other cells. Source: Chen et al., Adaptive sampled
    softmax with inverted multi-index (2025), the product quantiser with uniform draws within a cell.
    """

    def __init__(self, classes: int, d: int, codewords: int = 32, seed: int = 0):
        super().__init__(classes, d)
        self.seed = seed
        self.codewords = whole_number(codewords, "codewords", 1, "the number of codewords of each half")
        half, cells = (d + 2) // 2, self.codewords**2  # of d numbers, the bias, and a zero where these are odd
        self.register_buffer("books", torch.zeros(2, self.codewords, half))
        self.register_buffer("cell", torch.zeros(self.classes, dtype=torch.long))   # of each class
        self.register_buffer("order", torch.arange(self.classes))                   # the classes, cell by cell
        self.register_buffer("place", torch.arange(self.classes))                   # of each class in it
        self.register_buffer("starts", torch.zeros(cells + 1, dtype=torch.long))    # of the cells in it

    # ---- tables

    def _rebuild(self, weight: Tensor, bias: Tensor | None, hidden: Tensor | None) -> None:
        halves = self._halves(weight, bias)
        books = self.books.clone() if self.built else self._first(halves)
        for _ in range(STEPS):
            books = torch.stack([centred(rows, book) for rows, book in zip(halves, books)])
        self.books.copy_(books)
        self._index(self._cells(halves))

    def _update(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        self._index(self.cell.index_copy(0, rows, self._cells(self._halves(weight, bias))))
        return True

    @torch.no_grad()
    def drift(self, weight: Tensor, bias: Tensor | None = None) -> dict[str, float]:
        """cells: the share of the classes whose vectors now lie in another cell."""
        check_classes(weight, bias, self.classes, self.d)
        return {"cells": float((self._cells(self._halves(weight, bias)) != self.cell).double().mean())}

    def _halves(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(2, n, half) float32."""
        column = weight.new_zeros(len(weight)) if bias is None else bias
        return self._cut(torch.cat([weight.float(), column.float()[:, None]], 1))

    def _cut(self, rows: Tensor) -> Tensor:
        """Rows (n, d + 1) as halves (2, n, half)."""
        half = self.books.shape[-1]
        return F.pad(rows, (0, 2 * half - rows.shape[1])).unflatten(1, (2, half)).transpose(0, 1)

    def _first(self, halves: Tensor) -> Tensor:
        """Halves of random classes, each twice at most where there are fewer classes than codewords."""
        drawn = torch.randperm(self.classes, generator=torch.Generator().manual_seed(self.seed))
        return halves[:, drawn.repeat(math.ceil(self.codewords / self.classes))[:self.codewords].to(halves.device)]

    def _cells(self, halves: Tensor) -> Tensor:
        first, second = (nearest(rows, book) for rows, book in zip(halves, self.books))
        return first * self.codewords + second

    def _index(self, cell: Tensor) -> None:
        order = cell.argsort(stable=True)
        self.cell.copy_(cell)
        self.order.copy_(order)
        self.place.index_copy_(0, order, torch.arange(self.classes, device=order.device))
        self.starts[1:] = cell.bincount(minlength=self.codewords**2).cumsum(0)

    # ---- draws

    @torch.no_grad()
    def draw(self, hidden: Tensor, targets: Tensor | None, k: int) -> Drawn:
        self._check(hidden)
        return joined([self._drawn(h, t, k) for h, t in blocks(PAIRS // self.codewords**2, hidden, targets)])

    def _drawn(self, hidden: Tensor, targets: Tensor | None, k: int) -> Drawn:
        logits = self._logits(hidden)                                                   # (b, K^2) float64
        counts = self.starts.diff().expand_as(logits)
        target_log_q = None
        if targets is not None:
            own = self.cell[targets][:, None]
            logits = levelled(logits, counts)
            log_z = (logits + counts.log()).logsumexp(-1, keepdim=True)
            target_log_q = (logits.gather(1, own) - log_z).float()[:, 0]
            counts = counts.scatter_add(1, own, -torch.ones_like(own))
        logits = levelled(logits, counts)
        weights = logits + counts.log()                                                 # -inf for an empty cell
        log_z = weights.logsumexp(-1, keepdim=True)
        ends = (weights - log_z).exp().cumsum(-1)
        u = torch.rand(len(hidden), k, dtype=torch.float64, device=hidden.device) * ends[:, -1:]
        cells = torch.searchsorted(ends, u, right=True).clamp_(max=ends.shape[1] - 1)
        size = counts.gather(1, cells)
        at = self.starts[cells] + (torch.rand_like(u) * size).long().clamp(max=size - 1)
        if targets is not None:
            behind = (cells == own) & (at >= self.place[targets][:, None])
            at = at + behind
        return Drawn(self.order[at], (logits.gather(1, cells) - log_z).float(), target_log_q)

    @torch.no_grad()
    def log_q(self, hidden: Tensor, ids: Tensor) -> Tensor:
        self._check(hidden)
        counts = self.starts.diff()
        logits = levelled(self._logits(hidden), counts)
        log_z = (logits + counts.log()).logsumexp(-1, keepdim=True)
        return (logits.gather(1, self.cell[ids]) - log_z).float()

    def _logits(self, hidden: Tensor) -> Tensor:
        """o^ of every cell, (b, K^2) float64."""
        halves = self._cut(F.pad(hidden.float(), (0, 1), value=1.0))
        up, across = power_of_two(halves), power_of_two(self.books)                     # products may overflow
        first, second = (halves / up @ (self.books / across).mT).double() * up.double() * across.double()
        return (first[:, :, None] + second[:, None, :]).flatten(1)

    def extra_repr(self) -> str:
        return f"classes={self.classes}, d={self.d}, codewords={self.codewords}"


def levelled(logits: Tensor, counts: Tensor) -> Tensor:
    """Logits (b, K^2) less the largest of a cell with classes: beside 1e20 the log of a count would be lost."""
    return logits - logits.masked_fill(counts == 0, -math.inf).amax(-1, keepdim=True)


def power_of_two(t: Tensor) -> Tensor:
    """The least above the largest entry, by which division is exact: squares of what is left do not overflow."""
    largest = t.abs().amax() if t.numel() else t.new_zeros(())
    return torch.ldexp(t.new_ones(()), torch.frexp(largest).exponent.clamp(-120, 120))


def nearest(rows: Tensor, book: Tensor) -> Tensor:
    """The nearest codeword (K, half) of each row (n, half), (n,)."""
    step = max(1, PAIRS // len(book))
    scale = torch.maximum(power_of_two(rows), power_of_two(book))
    rows, book = rows / scale, book / scale
    length = book.square().sum(-1) / 2
    return torch.cat([(length - part @ book.mT).argmin(-1) for part in rows.split(step)])


def centred(rows: Tensor, book: Tensor) -> Tensor:
    """One step of Lloyd's algorithm: means of the rows nearest to each codeword; one without rows stays."""
    chosen = nearest(rows, book)
    count = chosen.bincount(minlength=len(book))[:, None]
    sums = torch.zeros_like(book).index_add_(0, chosen, rows)
    return torch.where(count > 0, sums / count.clamp(min=1), book)
