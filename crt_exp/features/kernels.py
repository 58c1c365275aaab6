"""Exact kernels: the oracles that every estimator is measured against.

Legend: x, y (..., d) vectors; N = |x|^2 + |y|^2; K Gaussian kernel, SM softmax kernel. All functions are elementwise in
the leading dimensions, which broadcast: `log_kernel("softmax", x[..., :, None, :], y[..., None, :, :])` is a matrix.
"""

import math
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

Kernel = Literal["softmax", "gaussian"]


def check_kernel(kernel: str) -> None:
    if kernel not in get_args(Kernel):
        raise ValueError(f"unknown kernel {kernel!r}: choose one of {', '.join(get_args(Kernel))}")


def log_kernel(kernel: Kernel, x: Tensor, y: Tensor) -> Tensor:
    """log SM(x, y) = x.y, or log K(x, y) = -|x - y|^2 / 2, in nats."""
    check_kernel(kernel)
    if kernel == "softmax":
        return (x * y).sum(-1)
    return -(x - y).square().sum(-1) / 2


def angle(x: Tensor, y: Tensor) -> Tensor:
    """The angle between x and y in [0, pi], accurate at both ends; pi/2 where either vector is zero."""
    nx, ny = x.norm(dim=-1, keepdim=True), y.norm(dim=-1, keepdim=True)
    zero = ((nx == 0) | (ny == 0)).squeeze(-1)
    u, v = x / nx.where(nx > 0, torch.ones_like(nx)), y / ny.where(ny > 0, torch.ones_like(ny))
    theta = 2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1))
    return theta.masked_fill(zero, math.pi / 2)


def log_0f1(b: float, z: Tensor) -> Tensor:
    """log 0F1(; b; z) for z >= 0, b > 0, in float64; the mean of exp over a sphere (math: Bessel I, scaled).

    Not differentiable (evaluated by scipy). Sums the series where the scaled Bessel function underflows.
    """
    from scipy.special import gammaln, ive

    values = z.detach().double().cpu().numpy()
    t = 2 * np.sqrt(np.maximum(values, 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        bessel = ive(b - 1, t)
        closed = gammaln(b) + (1 - b) * np.log(t / 2) + np.log(bessel) + t
    series = (t < 1e-3) | (bessel < 1e-290)
    result = np.where(series, _log_0f1_series(b, np.where(series, values, 0.0)), closed)
    return torch.from_numpy(np.asarray(result)).to(z.device)


def _log_0f1_series(b: float, z: np.ndarray) -> np.ndarray:
    terms = max(60, int(4 * np.sqrt(z.max(initial=0.0))) + 60)  # the largest term sits near k = sqrt(z)
    k = np.arange(1, terms)
    with np.errstate(divide="ignore"):
        steps = np.log(z)[..., None] - np.log(k * (b + k - 1))
    logs = np.concatenate([np.zeros_like(z)[..., None], np.cumsum(steps, axis=-1)], axis=-1)
    top = logs.max(axis=-1)
    return top + np.log(np.exp(logs - top[..., None]).sum(axis=-1))
