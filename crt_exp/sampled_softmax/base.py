"""What every sampler of classes is: draws with their probabilities, and the hook after the optimiser's step."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from crt_exp.options import whole_number
from crt_exp.features.base import NotFinite


class Drawn(NamedTuple):
    """k classes for each of B queries, drawn with replacement, and the logarithms of their probabilities."""

    ids: Tensor           # (B, k) int64; never the query's target where targets were given
    log_q: Tensor         # (B, k): of each draw's class in the law that it was drawn from, classes other than t
    target_log_q: Tensor | None  # (B,): of the target in the law over all classes; None where none were given


class ClassSampler(nn.Module, ABC):
    """A law over V classes for each query. Draws and probabilities carry no gradient.

    Its tables are buffers: they move with `.to()`, and a sampler that was saved and restored goes on with the same law
    bit for bit. Those that look at the class vectors are built by `rebuild`, which `draw` asks for with a ValueError
    where it was never called (`SampledSoftmax` calls it). Tables that are behind the vectors cost variance, never
    correctness: the probabilities are those of the tables.
    """

    looks_at_classes = False  # whether the law depends on class vectors, so that `rebuild` and `update` do something

    def __init__(self, classes: int):
        super().__init__()
        self.classes = whole_number(classes, "classes", 2)

    @abstractmethod
    def draw(self, hidden: Tensor, targets: Tensor | None, k: int) -> Drawn:
        """k classes for each row of hidden (B, d), from the law without the row's target (B,) where targets are given.

        Drawn by torch's default generator of the device, with replacement; k may be any number of at least 1.
        """

    @abstractmethod
    def log_q(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Log probabilities of ids (B, k) in the law over all classes, (B, k)."""

    def rebuild(self, weight: Tensor, bias: Tensor | None = None, hidden: Tensor | None = None) -> None:
        """Builds all tables from class vectors (V, d) and biases (V,). hidden: queries to fit parameters to (B, d),
        by default those of the last draw, and where there are none, vectors like those of the classes, of either sign.
        """

    def update(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Takes over the vectors and biases of the classes `rows` (any order, repeated or not) after the optimiser's
        step. Raises ValueError, with the tables as they were, where one of them is not finite."""

    @property
    def built(self) -> bool:
        """Whether `draw` can be called."""
        return True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ClassSampler":
        """As of any module, but for `half()` and its like: the tables stay as precise as they are."""
        def moved(t: Tensor) -> Tensor:
            applied = fn(t)
            return applied if applied.dtype == t.dtype else t.to(applied.device)
        return super()._apply(moved, recurse)


def blocks(step: int, *of_queries: Tensor | None):
    """Tensors of all queries in parts of `step` queries; None stays None."""
    step = max(1, step)
    for start in range(0, max(1, len(of_queries[0])), step):
        yield tuple(None if each is None else each[start:start + step] for each in of_queries)


def joined(parts: list[Drawn]) -> Drawn:
    """The draws of blocks of queries as one."""
    targets = None if parts[0].target_log_q is None else torch.cat([one.target_log_q for one in parts])
    return Drawn(torch.cat([one.ids for one in parts]), torch.cat([one.log_q for one in parts]), targets)


def without(log_q: Tensor, target_log_q: Tensor) -> Tensor:
    """log of q_c / (1 - q_t), the law without the target: log_q (B, k), target_log_q (B,) of the law over all."""
    return log_q - torch.log(-torch.expm1(target_log_q.clamp(max=-1e-12)))[:, None]


def check_queries(hidden: Tensor) -> None:
    """Raises NotFinite naming the first query (B, d) that is not finite."""
    fine = hidden.isfinite().all(-1)
    if not bool(fine.all()):
        raise NotFinite(f"query {int((~fine).nonzero()[0])} is not finite: look at the layers below the head")


def check_classes(weight: Tensor, bias: Tensor | None, classes: int, d: int) -> None:
    """Raises ValueError where class vectors are not (classes, d), or biases not (classes,)."""
    for what, t, shape in (("class vectors", weight, (classes, d)), ("biases", bias, (classes,))):
        if t is not None and tuple(t.shape) != shape:
            raise ValueError(f"{what} of shape {tuple(t.shape)}: this sampler takes {shape}")


def check_rows(rows: Tensor, classes: int) -> Tensor:
    """The distinct rows, sorted. Raises ValueError for numbers of no class."""
    rows = rows.reshape(-1).unique()
    if rows.is_floating_point():
        raise ValueError(f"rows must be whole numbers of classes, not {rows.dtype}")
    outside = rows[(rows < 0) | (rows >= classes)]
    if len(outside):
        raise ValueError(f"class {int(outside[0])} of an update is none of the {classes} classes (0 to {classes - 1})")
    return rows


def check_finite(weight: Tensor, bias: Tensor | None, rows: Tensor | None) -> None:
    """Raises NotFinite naming the first class with a vector or bias that is not finite. rows: the numbers of the
    classes (r,), None where they are all."""
    if bool(weight.detach().sum().isfinite()) and (bias is None or bool(bias.detach().sum().isfinite())):
        return
    fine = weight.detach().isfinite().all(-1)
    fine = fine if bias is None else fine & bias.detach().isfinite()
    if bool(fine.all()):
        return  # only the sum overflowed
    place = int((~fine).nonzero()[0])
    number = place if rows is None else int(rows[place])
    raise NotFinite(f"the vector or bias of class {number} is not finite: the tables of the sampler keep what they "
                    "were; look for the update that made it so")
