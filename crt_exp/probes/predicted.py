"""What the closed forms predict of a mechanism at the queries and keys of a trained model."""

import torch
from torch import Tensor

from crt_exp.features import FeatureMap, Statistics


def predicted_error(phi: FeatureMap, stats: Statistics, m: int) -> float:
    """The root of the mean over heads of the squares of `predicted_errors`."""
    return float(predicted_errors(phi, stats, m).square().mean().sqrt())


def predicted_errors(phi: FeatureMap, stats: Statistics, m: int) -> Tensor:
    """(heads,): sqrt(Var / K^2) of an entry of the kernel matrix, m iid projections, at a typical pair of each head."""
    moment = phi.log_relative_second_moment(*typical_pair(stats), phi.fit(stats))
    return (torch.expm1(moment.double()) / m).sqrt().flatten()


def typical_pair(stats: Statistics) -> tuple[Tensor, Tensor]:
    """x and y (heads, 1, d) with the mean |x|^2, |y|^2 and |x + y|^2 of the statistics; spread over the coordinates."""
    a, b = stats.x.mean_norm, stats.y.mean_norm
    inner = ((stats.mean_sq_sum - a - b) / 2).clamp(-(a * b).sqrt(), (a * b).sqrt())
    d = stats.d
    ones = torch.ones(d, dtype=torch.float64, device=a.device) / d**0.5
    signs = torch.ones_like(ones)
    signs[1::2] = -1
    across = signs - (signs @ ones) * ones  # orthogonal to ones
    across = across / across.norm().clamp(min=1e-12)
    along = inner / a.clamp(min=1e-30).sqrt()
    rest = (b - along.square()).clamp(min=0).sqrt()
    x, y = a.sqrt()[:, None] * ones, along[:, None] * ones + rest[:, None] * across
    return x[:, None], y[:, None]
