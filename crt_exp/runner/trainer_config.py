"""The keys of `conf/trainer/`, and the optimiser and learning rates that they name."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn

from crt_exp.config import ConfigError
from crt_exp.options import Count, NotNegative, Positive, Whole, checked
from crt_exp.runner.adapters import Lora

OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
Beta = Annotated[float, Field(ge=0, lt=1)]


@checked("trainer")
@dataclass(frozen=True)
class TrainerConfig:
    """How to train; `conf/trainer/default.yaml` explains each key. Raises ConfigError."""

    batch: Count
    epochs: Positive
    steps: Whole | None
    accumulate: Count
    eval_batch: Count | None
    optimizer: Literal["adamw", "adam"]
    lr: Positive
    betas: tuple[Beta, Beta]
    eps: Positive
    weight_decay: NotNegative
    schedule: Literal["linear", "cosine", "constant", "inverse_sqrt"]
    warmup: NotNegative
    clip: Positive | None
    precision: Literal["no", "bf16", "fp16"]
    compile: bool
    strategy: Literal["ddp", "fsdp"]
    find_unused_parameters: bool
    cpu: bool
    eval_every: Count | None
    evaluate: Count | None
    log_every: Count
    save_every: Count | None
    save_minutes: Positive | None
    keep: Count
    select: Literal["best", "last"]
    prefetch: Whole
    adapt: Literal["lora"] | None
    lora: Lora
    freeze: Sequence[str]

    def __post_init__(self):
        if self.strategy == "fsdp" and self.precision == "fp16":
            raise ConfigError("trainer.precision=fp16: does not go with trainer=fsdp; use bf16")
        if self.strategy == "fsdp" and self.adapt:
            raise ConfigError("trainer.adapt=lora: every process holds its few weights whole; leave trainer=fsdp out")
        if self.adapt and importlib.util.find_spec("peft") is None:
            raise ConfigError("trainer.adapt=lora: needs the package peft; pip install 'crt_exp[adapt]'")

    def check_processes(self, processes: int) -> None:
        """Raises ConfigError where the batch does not divide over this number of processes, and for fp16 on a CPU."""
        if self.batch % (parts := processes * self.accumulate):
            raise ConfigError(f"trainer.batch={self.batch}: does not divide over {processes} processes x "
                              f"{self.accumulate} micro-batches; expected a multiple of {parts}")
        if self.precision == "fp16" and (self.cpu or not torch.accelerator.is_available()):
            raise ConfigError("trainer.precision=fp16: expected a GPU; use bf16 or no")


def make_optimizer(model: nn.Module, config: TrainerConfig, scale: Callable[[str], float],
                   decays: Callable[[str, nn.Parameter], bool]) -> torch.optim.Optimizer:
    """Adam or AdamW over groups of equal `scale(parameter name)`, with weight decay where `decays`.

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
        raise ConfigError("no parameter to train: all are frozen or fitted without gradients; expected "
                          "attention.learn=parameters, or trainer.steps=0 to evaluate only")
    described = [{"params": params, "lr": config.lr * factor, "peak": config.lr * factor,
                  "weight_decay": config.weight_decay * decayed} for (factor, decayed), params in groups.items()]
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for group in groups.values() for p in group)
    return OPTIMIZERS[config.optimizer](described, betas=tuple(config.betas), eps=config.eps, fused=fused)


def schedule(kind: str, step: int, total: int | None, warmup: float) -> float:
    """Factor on the learning rate of step `step` (0 is the first): linear warm-up, then `kind` down to 0 after `total`.

    inverse_sqrt: as 1 / sqrt(step), after the warm-up (Vaswani et al., 2017). warmup: steps, or below 1 a fraction.
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
