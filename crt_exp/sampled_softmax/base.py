"""Class samplers: interface, fixed distributions, and dense distributions.

Fixed distributions invert the distribution function F at a uniform number u. To exclude the target t, u is uniform on
[0, 1 - q_t), and values from F(t) on are increased by q_t. This is exact and needs no rejection. Dense distributions
compute one weight for each pair of query and class, for one block of queries at a time.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from crt_exp.features.base import NotFinite
from crt_exp.validation import NotNegative, check, whole_number

PAIRS = 2**20  # pairs of query and class per block, so that the block fits the cache


class Drawn(NamedTuple):
    """k classes per query, sampled with replacement, with log probabilities.

    >>> drawn = Uniform(10).draw(torch.randn(3, 4), torch.tensor([0, 1, 2]), k=5)
    >>> drawn.ids.shape
    torch.Size([3, 5])
    """

    ids: Tensor  # (B, k) int64; never the query's target
    log_q: Tensor  # (B, k): log probability of ids in the distribution without the target


class ClassSampler(nn.Module, ABC):
    """A distribution over V classes for each query, without gradient.

    Tables are buffers, so they move with `.to()` and are saved exactly. Samplers that depend on class vectors need
    `rebuild` before `draw`; `SampledSoftmax` calls it. Outdated tables increase the variance but cause no bias:
    returned probabilities are those of the tables.

    >>> drawn = Uniform(11).draw(torch.zeros(1, 4), torch.tensor([7]), k=1)
    >>> drawn.log_q.exp()  # one of ten classes
    tensor([[0.1000]])
    """

    looks_at_classes = False  # the distribution depends on class vectors; if False, `rebuild` and `update` do nothing

    def __init__(self, classes: int):
        super().__init__()
        self.classes = whole_number(classes, "classes", 2)

    @abstractmethod
    def draw(self, hidden: Tensor, targets: Tensor, k: int) -> Drawn:
        """Sample k classes for each row of hidden (B, d), with replacement.

        Targets (B,) are excluded. The random numbers are those of torch's default generator of the device.

        Args:
            k: any integer >= 1.

        Raises:
            ValueError: `rebuild` is required and was not called.
        """

    def rebuild(
        self, weight: Tensor, bias: Tensor | None = None, hidden: Tensor | None = None
    ) -> None:
        """Build all tables from class vectors (V, d) and biases (V,).

        Args:
            hidden: queries (B, d) for fitting parameters. Default: those of the last `draw`, else class vectors with
                both signs.
        """

    def update(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Update the tables for the classes `rows`, after an optimiser step.

        Rows may be unsorted and repeated.

        Raises:
            ValueError: a vector is not finite; the tables are unchanged.
        """

    @property
    def built(self) -> bool:
        """Whether `draw` can be called."""
        return True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ClassSampler":
        """Apply `fn` but keep the dtype of the tables, for example in `half()`."""

        def moved(t: Tensor) -> Tensor:
            applied = fn(t)
            return applied if applied.dtype == t.dtype else t.to(applied.device)

        return super()._apply(moved, recurse)


def blocks(step: int, queries: Tensor, *others: Tensor | None) -> Iterator[tuple]:
    """Yield blocks of `step` queries of each tensor; None stays None."""
    step = max(1, step)
    for start in range(0, max(1, len(queries)), step):
        rows = slice(start, start + step)
        parts: list[Tensor | None] = [queries[rows]]
        for other in others:
            parts.append(None if other is None else other[rows])
        yield tuple(parts)


def first_false(fine: Tensor) -> int | None:
    """Return the index of the first false entry (n,), or None."""
    return None if bool(fine.all()) else int((~fine).nonzero()[0])


def check_queries(hidden: Tensor) -> None:
    """Raise NotFinite if a query (B, d) is not finite, naming the first one."""
    wrong = first_false(hidden.isfinite().all(-1))
    if wrong is not None:
        raise NotFinite(f"query {wrong} is not finite; check the layers before the head")


def check_classes(weight: Tensor, bias: Tensor | None, classes: int, d: int) -> None:
    """Raise ValueError unless vectors are (classes, d) and biases (classes,)."""
    for what, t, shape in (("class vectors", weight, (classes, d)), ("biases", bias, (classes,))):
        if t is not None and tuple(t.shape) != shape:
            raise ValueError(f"{what}: shape {tuple(t.shape)}, expected {shape}")


def check_rows(rows: Tensor, classes: int) -> Tensor:
    """Return the distinct rows, sorted.

    Raises:
        ValueError: a row is no class index.
    """
    rows = rows.reshape(-1).unique()
    outside = rows[(rows < 0) | (rows >= classes)]
    if rows.is_floating_point() or len(outside):
        raise ValueError(f"rows {rows}: expected integers from 0 to {classes - 1}")
    return rows


def check_finite(weight: Tensor, bias: Tensor | None, rows: Tensor | None = None) -> None:
    """Raise NotFinite if a class vector or bias is not finite, naming the first one.

    Args:
        rows: class indices (r,) for the message; None: all classes.
    """
    fine = weight.isfinite().all(-1)
    if bias is not None:
        fine = fine & bias.isfinite()
    wrong = first_false(fine)
    if wrong is not None:
        number = wrong if rows is None else int(rows[wrong])
        raise NotFinite(f"class {number}: vector or bias is not finite; the tables are unchanged")


class FixedDistribution(ClassSampler):
    """A query-independent distribution q, defined by F(c) = q_0 + ... + q_(c-1)."""

    @abstractmethod
    def below(self, ids: Tensor) -> Tensor:
        """Return F(c), the probability of all classes before c, float64."""

    @abstractmethod
    def at(self, u: Tensor) -> Tensor:
        """Return the class c with F(c) <= u < F(c + 1), for float64 u in [0, 1)."""

    @abstractmethod
    def log_probability(self, ids: Tensor) -> Tensor:
        """Return log q_c, float64, in the shape of ids."""

    def draw(self, hidden: Tensor, targets: Tensor, k: int) -> Drawn:
        u = torch.rand(len(hidden), k, dtype=torch.float64, device=hidden.device)
        t = targets[:, None]
        log_q_t = self.log_probability(t)
        q_t = log_q_t.exp()
        before = self.below(t)
        u = u * (1 - q_t)
        ids = self.at(torch.where(u >= before, u + q_t, u).clamp(max=1 - 2.0**-53))
        # rounding errors of u may hit the target
        ids = torch.where(ids == t, torch.where(t + 1 < self.classes, t + 1, t - 1), ids)
        # log(q_c / (1 - q_t))
        log_q = self.log_probability(ids) - torch.log(-torch.expm1(log_q_t.clamp(max=-1e-12)))
        return Drawn(ids, log_q.to(torch.float32))


class Uniform(FixedDistribution):
    """The uniform distribution over classes.

    >>> samples = Uniform(10).draw(torch.zeros(3, 4), torch.tensor([0, 1, 2]), k=5)
    >>> samples.ids.shape, round(float(samples.log_q[0, 0].exp()), 4)  # 1 / 9, without the target
    (torch.Size([3, 5]), 0.1111)
    """

    def below(self, ids: Tensor) -> Tensor:
        return ids.double() / self.classes

    def at(self, u: Tensor) -> Tensor:
        return (u * self.classes).long().clamp(max=self.classes - 1)

    def log_probability(self, ids: Tensor) -> Tensor:
        log_q = -math.log(self.classes)
        return torch.full(ids.shape, log_q, dtype=torch.float64, device=ids.device)


class LogUniform(FixedDistribution):
    """The log-uniform distribution, for classes sorted by descending frequency.

    q_c = log((c + 2) / (c + 1)) / log(V + 1), an approximation of Zipf's law.

    >>> [round(float(p), 4) for p in LogUniform(3).log_probability(torch.arange(3)).exp()]
    [0.5, 0.2925, 0.2075]
    """

    def below(self, ids: Tensor) -> Tensor:
        return torch.log1p(ids.double()) / math.log(self.classes + 1)

    def at(self, u: Tensor) -> Tensor:
        return torch.expm1(u * math.log(self.classes + 1)).long().clamp(0, self.classes - 1)

    def log_probability(self, ids: Tensor) -> Tensor:
        return (torch.log1p(1 / (1 + ids.double())) / math.log(self.classes + 1)).log()


class Unigram(FixedDistribution):
    """A distribution proportional to counts (V,), such as class frequencies.

    Count 0 is replaced by 1/2, because classes that are never sampled bias the normaliser.

    Raises:
        ValueError: a count is negative or not finite, or counts are not one-dimensional.

    >>> Unigram(torch.tensor([3, 1])).log_probability(torch.arange(2)).exp()
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """

    probability: Tensor
    ends: Tensor

    def __init__(self, counts: Tensor):
        counts = torch.as_tensor(counts).double()
        if counts.ndim != 1:
            raise ValueError(
                f"counts: shape {tuple(counts.shape)}, expected (V,), one count per class"
            )
        super().__init__(len(counts))
        wrong = first_false(counts.isfinite() & (counts >= 0))
        if wrong is not None:
            raise ValueError(
                f"count of class {wrong}: {float(counts[wrong])}; expected a finite number >= 0"
            )
        counts = torch.where(counts > 0, counts, 0.5)
        probability = counts / counts.sum()
        self.register_buffer("probability", probability)
        ends = probability.cumsum(0)
        ends[-1] = 1.0
        self.register_buffer("ends", ends)  # F(c + 1)

    def below(self, ids: Tensor) -> Tensor:
        return torch.where(ids > 0, self.ends[(ids - 1).clamp(min=0)], 0.0)

    def at(self, u: Tensor) -> Tensor:
        return torch.searchsorted(self.ends, u, right=True).clamp(max=self.classes - 1)

    def log_probability(self, ids: Tensor) -> Tensor:
        return self.probability[ids].log()


def head_tensors(head: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return `weight` (V, d) of a head, and its `bias` (V,) or None."""
    return cast(Tensor, head.weight), getattr(head, "bias", None)


class LogitDistribution(ClassSampler):
    """Base class: q proportional to exp(`log_weights`), O(V d) per query.

    Args:
        head: module with `weight` (V, d) and optional `bias` (V,), read at each call.
    """

    def __init__(self, head: nn.Module):
        super().__init__(len(head_tensors(head)[0]))
        self._head = [head]  # a list, so that the parameters of the head are not registered here

    def draw(self, hidden: Tensor, targets: Tensor, k: int) -> Drawn:
        return draw_dense(self.weights, self.classes, hidden, targets, k)

    @abstractmethod
    def log_weights(self, logits: Tensor) -> Tensor:
        """Return log weights of logits (b, V); may modify them in place."""

    @torch.no_grad()
    def weights(self, hidden: Tensor) -> Tensor:
        """Return weights (b, V) of queries (b, d), at most 1."""
        weight, bias = head_tensors(self._head[0])
        logits = nn.functional.linear(hidden.to(weight.dtype), weight, bias).float()
        logs = self.log_weights(logits)
        return logs.sub_(logs.amax(-1, keepdim=True)).exp_()


class ExactSoftmax(LogitDistribution):
    """q = softmax(o), the reference for other distributions.

    >>> head = nn.Linear(4, 3)
    >>> weights = ExactSoftmax(head).weights(torch.ones(1, 4))
    >>> bool(torch.allclose(weights / weights.sum(), head(torch.ones(1, 4)).softmax(-1)))
    True
    """

    def log_weights(self, logits: Tensor) -> Tensor:
        return logits


class Quadratic(LogitDistribution):
    """q_c proportional to alpha o_c^2 + 1 (Blanc and Rendle 2018, alpha = 100).

    This implementation is dense. Their tree samples from the same distribution in O(d^2 log V).

    >>> Quadratic(nn.Linear(4, 3), alpha=0.0).weights(torch.ones(1, 4))
    tensor([[1., 1., 1.]])
    """

    def __init__(self, head: nn.Module, alpha: float = 100.0):
        super().__init__(head)
        check("alpha", alpha, NotNegative)
        self.alpha = float(alpha)

    def log_weights(self, logits: Tensor) -> Tensor:
        if not self.alpha:
            return logits.zero_()
        return nn.functional.softplus(
            logits.abs_().log_().mul_(2).add_(math.log(self.alpha))
        )  # avoids overflow


def draw_dense(
    weights_of: Callable[[Tensor], Tensor],
    classes: int,
    hidden: Tensor,
    targets: Tensor,
    k: int,
    ids: Tensor | None = None,
) -> Drawn:
    """Sample k classes per query in proportion to weights_of(hidden) (B, V) >= 0, without targets.

    Rows without positive weights are uniform. The weights of one block of queries are computed at a time, and modified
    in place.

    Args:
        ids: classes (B, k) that replace samples; -1 means sample.
    """
    parts = []
    for h, t, own in blocks(PAIRS // classes, hidden, targets, ids):
        weights = weights_of(h).scatter_(1, t[:, None], 0.0)
        total = weights.sum(-1, keepdim=True, dtype=torch.float64)
        weights.masked_fill_(total == 0, 1.0).scatter_(1, t[:, None], 0.0)
        u = torch.rand(len(weights), k, dtype=torch.float64, device=weights.device)
        samples, total = choose_columns(weights, u)
        if own is not None:
            samples = torch.where(own >= 0, own, samples)
        parts.append((samples, (weights.gather(1, samples) / total).log().float()))
    samples, log_q = map(torch.cat, zip(*parts))
    return Drawn(samples, log_q)


def choose_columns(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Sample k columns per row of weights (B, M) >= 0 by uniform numbers u (B, k).

    The result is (B, k), and the sums of the weights (B, 1) in float64.
    """
    ends = weights.cumsum(-1, dtype=torch.float64)
    total = ends[:, -1:]
    columns = torch.searchsorted(ends, u * total, right=True)
    return columns.clamp_(max=weights.shape[1] - 1), total
