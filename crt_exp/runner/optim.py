"""Optimisers and learning-rate schedules."""

import math
from collections.abc import Callable

import torch
from torch import nn

OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
SCHEDULES = ("linear", "cosine", "constant", "inverse_sqrt")


def make_optimizer(model: nn.Module, name: str, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
                   scale: Callable[[str], float] = lambda name: 1.0,
                   decays: Callable[[str, nn.Parameter], bool] = lambda name, parameter: parameter.dim() >= 2
                   ) -> torch.optim.Optimizer:
    """Adam or AdamW over groups of equal `scale(parameter name)`, with weight decay where `decays`: matrices alone.

    A scale of 0 freezes the parameter. Each group keeps its own highest learning rate as `peak`.
    """
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for key, parameter in model.named_parameters():
        factor = scale(key)
        if factor == 0:
            parameter.requires_grad_(False)
        if parameter.requires_grad:
            groups.setdefault((factor, decays(key, parameter)), []).append(parameter)
    if not groups:
        raise ValueError("the model has no parameter to train: all are frozen, or what its attention learns is fitted "
                         "without gradients (attention.learn=parameters trains that of random features); "
                         "trainer.steps=0 evaluates it as it is")
    described = [{"params": params, "lr": lr * factor, "peak": lr * factor,
                  "weight_decay": weight_decay if decayed else 0.0} for (factor, decayed), params in groups.items()]
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for group in groups.values() for p in group)
    return OPTIMIZERS[name](described, betas=tuple(betas), eps=eps, fused=fused)


def schedule(kind: str, step: int, total: int | None, warmup: float) -> float:
    """Factor on the learning rate of step `step` (0 is the first):
    linear warm-up, then `kind` down to 0 after `total` steps. inverse_sqrt: as 1 / sqrt(step), after the warm-up from 1
    down (Vaswani et al., 2017).

    warmup: steps, or below 1 a fraction of `total`.
    """
    first = warmup if warmup >= 1 else math.ceil(warmup * (total or 0))
    if step < first:
        return (step + 1) / (first + 1)
    if kind == "constant":
        return 1.0
    if kind == "inverse_sqrt":
        return math.sqrt((first + 1) / (step + 1))
    left = max(0.0, (total - step) / max(1, total - first))  # 1 at the end of the warm-up
    return left if kind == "linear" else (1 - math.cos(math.pi * left)) / 2


def set_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
