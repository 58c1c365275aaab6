"""Relative errors of softmax estimates over the angle between two vectors of one length (HRF 3.2).

Legend: theta angle, r length, m projections of a base, n of the coefficient, all iid. An error is
sqrt(MSE) / SM; the positive base is HypRF.
"""

import math

import torch
from torch import Tensor


def trig_relative_error(theta: Tensor, r: Tensor | float, m: int) -> Tensor:
    """Of TrigRF: sqrt(2/m) sinh(2 r^2 sin^2(theta/2)) (HRF (25)); zero at theta = 0."""
    return math.sqrt(2 / m) * torch.sinh(2 * r**2 * torch.sin(theta / 2).square())


def positive_relative_error(theta: Tensor, r: Tensor | float, m: int) -> Tensor:
    """Of HypRF: sqrt(2/m) sinh(2 r^2 cos^2(theta/2)) (HRF (25)); zero at theta = pi."""
    return math.sqrt(2 / m) * torch.sinh(2 * r**2 * torch.cos(theta / 2).square())


def angular_relative_error(theta: Tensor, r: Tensor | float, m: int, n: int) -> Tensor:
    """Of AngularHybrid, with shared or independent projections of the bases (HRF Theorem D.1); zero at both ends."""
    share = theta / math.pi
    of_positive = share * (share - share / n + 1 / n)
    of_trig = (1 - share) * (1 - share + share / n)
    return (of_positive * positive_relative_error(theta, r, m).square()
            + of_trig * trig_relative_error(theta, r, m).square()).sqrt()


def largest_relative_error(r: float, m: int) -> float:
    """Over all angles, of TrigRF and of HypRF alike: sqrt(2/m) sinh(2 r^2) (HRF (26))."""
    return math.sqrt(2 / m) * math.sinh(2 * r**2)


def largest_angular_error(r: float, m: int, n: int) -> float:
    """A bound on the error of AngularHybrid over all angles, for r >= 1 (HRF (27)); within a factor 3 for large n.

    Raises ValueError for r < 1, where it was not derived.
    """
    if r < 1:
        raise ValueError(f"r = {r}: the bound on the angular hybrid holds for lengths of at least 1")
    shrunk = math.sqrt(1 / math.pi - 1 / (n * math.pi) + r / (n * math.sqrt(math.pi)))
    return largest_relative_error(r, m) * shrunk / r


def angular_error_at_the_ends(r: float, m: int, n: int) -> float:
    """The limit of the error of AngularHybrid over sqrt(theta) as theta -> 0, and over sqrt(pi - theta) as theta -> pi
    (HRF Theorem 3.5): e^(2 r^2) (1 - e^(-4 r^2)) / sqrt(2 pi m n)."""
    return 2 * math.sinh(2 * r**2) / math.sqrt(2 * math.pi * m * n)
