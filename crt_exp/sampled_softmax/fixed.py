"""Laws that are the same for every query: uniform, log-uniform, unigram.

A draw turns one uniform number into a class by the inverse of the distribution function. To leave the target t out,
the number is taken from [0, 1 - q_t) and what lies at or above F(t) is moved up by q_t: exact, and nothing is redrawn.
"""

import math
from abc import abstractmethod

import torch
from torch import Tensor

from crt_exp.sampled_softmax.base import ClassSampler, Drawn, without


class FixedLaw(ClassSampler):
    """A law q over classes, given by F(c) = q_0 + ... + q_(c-1) and its inverse."""

    @abstractmethod
    def below(self, ids: Tensor) -> Tensor:
        """F(c), the probability of the classes before c, float64."""

    @abstractmethod
    def at(self, u: Tensor) -> Tensor:
        """The class c with F(c) <= u < F(c + 1), for float64 u in [0, 1)."""

    @abstractmethod
    def log_probability(self, ids: Tensor) -> Tensor:
        """log q_c, float64, of the shape of ids."""

    def draw(self, hidden: Tensor, targets: Tensor | None, k: int) -> Drawn:
        u = torch.rand(len(hidden), k, dtype=torch.float64, device=hidden.device)
        if targets is None:
            ids = self.at(u)
            return Drawn(ids, self.log_probability(ids).to(torch.float32), None)
        t = targets[:, None]
        target_log_q = self.log_probability(t)
        q_t, before = target_log_q.exp(), self.below(t)
        u = u * (1 - q_t)
        ids = self.at(torch.where(u >= before, u + q_t, u).clamp(max=1 - 2.0**-53))
        ids = torch.where(ids == t, self._neighbour(t), ids)  # u within rounding of the target's interval
        log_q = without(self.log_probability(ids), target_log_q[:, 0])
        return Drawn(ids, log_q.to(torch.float32), target_log_q[:, 0].to(torch.float32))

    def log_q(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return self.log_probability(ids).to(torch.float32)

    def _neighbour(self, ids: Tensor) -> Tensor:
        return torch.where(ids + 1 < self.classes, ids + 1, ids - 1)


class Uniform(FixedLaw):
    """All classes alike."""

    def below(self, ids: Tensor) -> Tensor:
        return ids.double() / self.classes

    def at(self, u: Tensor) -> Tensor:
        return (u * self.classes).long().clamp(max=self.classes - 1)

    def log_probability(self, ids: Tensor) -> Tensor:
        return torch.full(ids.shape, -math.log(self.classes), dtype=torch.float64, device=ids.device)


class LogUniform(FixedLaw):
    """q_c = log((c + 2) / (c + 1)) / log(V + 1): about Zipf's law, for classes numbered from the most frequent on."""

    def below(self, ids: Tensor) -> Tensor:
        return torch.log1p(ids.double()) / math.log(self.classes + 1)

    def at(self, u: Tensor) -> Tensor:
        return torch.expm1(u * math.log(self.classes + 1)).long().clamp(0, self.classes - 1)

    def log_probability(self, ids: Tensor) -> Tensor:
        return (torch.log1p(1 / (1 + ids.double())) / math.log(self.classes + 1)).log()


class Unigram(FixedLaw):
    """In proportion to counts (V,): how often each class occurs in the training data, or any power of that.

    Raises ValueError for counts that are negative or not finite. A class of count 0 would never be drawn, and so biases
    the normaliser: it counts as one half.
    """

    def __init__(self, counts: Tensor):
        counts = torch.as_tensor(counts).double()
        if counts.ndim != 1:
            raise ValueError(f"the counts of a unigram law have one number for each class, not shape "
                             f"{tuple(counts.shape)}")
        super().__init__(len(counts))
        if not bool((counts.isfinite() & (counts >= 0)).all()):
            wrong = int((~(counts.isfinite() & (counts >= 0))).nonzero()[0])
            raise ValueError(f"the count of class {wrong} is {float(counts[wrong])}: counts are finite, and at least 0")
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
