"""`SumTree`: sums of the rows of a table over groups, groups of groups, and so on, kept while rows change.

Legend: V classes, M features; level 0 is the table (V, M), a row of level l + 1 the sum of FAN rows of level l.
"""

import torch
from torch import Tensor, nn

FAN = 16           # children of a node
EXHAUSTED = 1e-9   # a sum less one of its rows, as a share of it, below which rounding would decide: taken as 0
FLAT = 2**12       # nodes at most of a level whose distribution functions are inverted at once


class SumTree(nn.Module):
    """A table of V rows and the sums above it, all of them buffers. The sums take a fifteenth of the table's rows.

    dtype: of the sums. A change of r rows takes O(r M log V): their differences are added to the sums above, and with
    rounding the sums drift from those of the rows; `resum` sums again.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.rows, self.width = rows, width
        self.register_buffer("level0", torch.zeros(_padded(rows), width))
        self.depth = 1
        while len(self.level(self.depth - 1)) > FAN:
            groups = len(self.level(self.depth - 1)) // FAN
            self.register_buffer(f"level{self.depth}", torch.zeros(_padded(groups), width, dtype=dtype))
            self.depth += 1

    def level(self, number: int) -> Tensor:
        """Rows of level `number`, with rows of zeros at the end up to a multiple of FAN."""
        return getattr(self, f"level{number}")

    @property
    def leaves(self) -> Tensor:
        """The table, (V, M)."""
        return self.level0[:self.rows]

    @property
    def total(self) -> Tensor:
        """The sum of all rows as the tree has it, (M,) float64."""
        return self.level(self.depth - 1).sum(0, dtype=torch.float64)

    def counts(self, number: int, nodes: Tensor) -> Tensor:
        """How many rows of the table lie below nodes of a level."""
        size = FAN**number
        return (self.rows - nodes * size).clamp(0, size)

    def set(self, rows: Tensor, values: Tensor) -> None:
        """New values (r, M) of sorted, distinct rows (r,)."""
        change = values.double() - self.level0.index_select(0, rows).double()
        self.level0[rows] = values
        for number in range(1, self.depth):
            rows, members = torch.unique_consecutive(rows // FAN, return_counts=True)
            change = torch.segment_reduce(change, "sum", lengths=members, unsafe=True)
            level = self.level(number)
            level[rows] = (level.index_select(0, rows).double() + change).to(level.dtype)

    def resum(self) -> None:
        """All sums, again, from the table."""
        for number in range(1, self.depth):
            self.level(number).copy_(self._sums(number))

    def _sums(self, number: int) -> Tensor:
        level, below = self.level(number), self.level(number - 1)
        summed = below.view(-1, FAN, self.width).sum(1, dtype=level.dtype)
        return torch.nn.functional.pad(summed, (0, 0, 0, len(level) - len(summed)))

    def draw(self, mass: Tensor, k: int, without: Tensor | None = None) -> Tensor:
        """k rows for each query, (B, k): a column in proportion to mass (B, M), then a row in proportion to the entries
        of that column, none of them negative.

        without: a row (B,) that is left out of the draws of its query. O(FAN log V) a draw, and O(FLAT M) for all.
        """
        u = torch.rand(len(mass), k, self.start + 2, dtype=torch.float64, device=mass.device)
        ends = self.level(self.start).double().mT.contiguous().cumsum_(-1)                # (M, nodes)
        return self.rows_of(ends, mass, u, without)

    @property
    def start(self) -> int:
        """The level at which the way down begins."""
        return next(number for number in range(self.depth) if len(self.level(number)) <= FLAT)

    def rows_of(self, ends: Tensor, mass: Tensor, u: Tensor, without: Tensor | None) -> Tensor:
        """The rows (B, k) that uniform numbers u (B, k, 2 + levels below `start`) stand for."""
        column = choose_columns(mass, u[..., 0])
        taken = None if without is None else self.level0[without].gather(1, column).double()
        node = self._invert(ends, column, u[..., 1], without, taken)
        for number in reversed(range(self.start)):
            weights = self.level(number).view(-1, FAN, self.width)[node, :, column].double()  # (B, k, FAN)
            if without is not None:
                self._leave_out(weights, number, node, without[:, None], taken)
            node = node * FAN + choose(weights, u[..., self.start + 1 - number])
            node = node.clamp_(max=self._last(number))
        return node

    def _invert(self, ends: Tensor, column: Tensor, u: Tensor, without: Tensor | None, taken: Tensor | None) -> Tensor:
        """Nodes (B, k) of level `start`, each in proportion to its column, whose sums up to each node are ends.

        One search for all draws: column i's distribution function takes the numbers from i to i + 1.
        """
        total, nodes = ends[:, -1:].clone(), ends.shape[1]
        ends = (ends / total).add_(torch.arange(len(ends), device=ends.device)[:, None]).flatten()
        if without is not None:  # the interval of the row's node is shorter by what is taken, those behind it move up
            taken = taken / total.flatten()[column]
            place = column * nodes + without[:, None] // FAN**self.start
            u = u * (1 - taken)
            u = torch.where(u + column >= ends[place] - taken, u + taken, u)
        places = torch.searchsorted(ends, u + column, right=True) - column * nodes
        return places.clamp_(0, self._last(self.start))

    def _last(self, number: int) -> int:
        """The last node of a level with rows: where little of a column is left, rounding can choose one behind it."""
        return (self.rows - 1) // FAN**number

    def _leave_out(self, weights: Tensor, number: int, node: Tensor, row: Tensor, taken: Tensor) -> None:
        """Takes the entries `taken` (B, k) of a row off the weights (B, k, FAN) of the child that it lies below."""
        ancestor = row // FAN**number
        place = (ancestor % FAN).expand_as(node)[..., None]
        held = weights.gather(-1, place)
        rest = held - taken[..., None] if number else torch.zeros_like(held)
        rest = torch.where(rest > EXHAUSTED * held, rest, 0.0)
        below = (ancestor // FAN == node)[..., None]
        weights.scatter_(-1, place, torch.where(below, rest, held))


def choose(weights: Tensor, u: Tensor) -> Tensor:
    """A number of the last axis for each of weights (..., n), none of them negative, in proportion: the one that the
    uniform number u (...) stands for."""
    ends = weights.cumsum(-1)
    return (ends <= u[..., None] * ends[..., -1:]).sum(-1).clamp_(max=weights.shape[-1] - 1)


def choose_columns(mass: Tensor, u: Tensor) -> Tensor:
    """The same with k uniform numbers (B, k) for each row of mass (B, M), (B, k)."""
    ends = mass.double().cumsum(-1)
    return torch.searchsorted(ends, u * ends[:, -1:], right=True).clamp_(max=mass.shape[1] - 1)


def _padded(rows: int) -> int:
    return -(-rows // FAN) * FAN
