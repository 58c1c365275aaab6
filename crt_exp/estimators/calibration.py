"""A temperature and offsets of logits, by maximum likelihood.

Legend: n rows, C classes; theta = (slope, offsets), 1 + C numbers.
"""

import torch
from torch import Tensor

PRECISION = 0.01, 1.0  # of normal priors of slope, in units of 1 / spread of the logits, and of each offset
STEPS, CLOSE = 100, 1e-12


def calibrated(logits: Tensor, y: Tensor, w: Tensor) -> tuple[float, Tensor]:
    """Slope and offsets (C,) that make softmax(slope logits + offsets) most likely for one-hot y (n, C) with weights w.

    By Newton's method: the loss is convex. Priors keep the slope finite where the classes lie apart, and the offset of
    a class that few rows have near 0.
    """
    logits = logits - logits.mean(1, keepdim=True)
    unit = (w @ logits.square().mean(1) / w.sum()).sqrt().clamp(min=1e-12)
    logits, count = logits / unit, logits.shape[1]
    prior = torch.tensor([PRECISION[0], *[PRECISION[1]] * count], dtype=logits.dtype)
    theta = torch.zeros_like(prior)
    for _ in range(STEPS):
        step, decrease = newton_step(theta, logits, y, w, prior)
        theta = shortened(theta, step, decrease, lambda t: loss(t, logits, y, w, prior))
        if decrease < CLOSE * (1 + w.sum()):
            break
    return float(theta[0] / unit), theta[1:]


def loss(theta: Tensor, logits: Tensor, y: Tensor, w: Tensor, prior: Tensor) -> Tensor:
    scores = theta[0] * logits + theta[1:]
    return -(w[:, None] * y * scores.log_softmax(1)).sum() + (prior * theta.square()).sum() / 2


def newton_step(theta: Tensor, logits: Tensor, y: Tensor, w: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    """The step, and by how much the quadratic model falls with it."""
    p = (theta[0] * logits + theta[1:]).softmax(1)
    wp, error = w[:, None] * p, w[:, None] * (p - y)
    apart = logits - (p * logits).sum(1, keepdim=True)
    gradient = torch.cat([(error * logits).sum()[None], error.sum(0)]) + prior * theta
    hessian = torch.diag(torch.cat([(wp * apart.square()).sum()[None], wp.sum(0)]) + prior)
    hessian[1:, 1:] -= wp.mT @ p
    hessian[0, 1:] = hessian[1:, 0] = (wp * apart).sum(0)
    step = -torch.linalg.solve(hessian, gradient)
    return step, -(gradient @ step) / 2


def shortened(theta: Tensor, step: Tensor, decrease: Tensor, value) -> Tensor:
    """theta + step, halved until it gains a part of what it promises; theta itself where rounding leaves no gain."""
    before = value(theta)
    for _ in range(40):
        if value(theta + step) <= before - decrease / 4:
            return theta + step
        step, decrease = step / 2, decrease / 2
    return theta
