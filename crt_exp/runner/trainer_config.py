"""The keys of `conf/trainer/`, checked before anything is read or written."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field

from crt_exp.config import ConfigError
from crt_exp.options import Count, NotNegative, Positive, Whole, checked
from crt_exp.data.ranks import inside_torchrun, world_size
from crt_exp.runner.adapters import Lora, check_installed
from crt_exp.runner.optim import OPTIMIZERS, SCHEDULES
from crt_exp.runner.processes import World

Beta = Annotated[float, Field(ge=0, lt=1)]


@checked("trainer")
@dataclass(frozen=True)
class TrainerConfig:
    """How to train; `conf/trainer/default.yaml` explains each key. Raises ConfigError for values that make no sense."""

    batch: Count
    epochs: Positive
    steps: Whole | None
    accumulate: Count
    eval_batch: Count | None
    optimizer: Literal[*OPTIMIZERS]
    lr: Positive
    betas: tuple[Beta, Beta]
    eps: Positive
    weight_decay: NotNegative
    schedule: Literal[*SCHEDULES]
    warmup: NotNegative
    clip: Positive | None
    precision: Literal["no", "bf16", "fp16"]
    compile: bool
    strategy: Literal["ddp", "fsdp"]
    find_unused_parameters: bool
    cpu: bool
    processes: Count | None
    eval_every: Count | None
    evaluate: Count | None
    log_every: Count
    save_every: Count | None
    save_minutes: Positive | None
    keep: Count
    select: Literal["best", "last"]
    patience: Count | None
    prefetch: Whole
    adapt: Literal["lora"] | None
    lora: Lora
    freeze: Sequence[str]

    def __post_init__(self):
        if self.precision is False:  # what YAML makes of an unquoted no
            object.__setattr__(self, "precision", "no")
        if self.strategy == "fsdp" and self.precision == "fp16":
            raise ConfigError("trainer.precision = fp16 does not go with trainer=fsdp: use bf16")
        if self.adapt:
            check_installed()
            if self.strategy == "fsdp":
                raise ConfigError("trainer.adapt = lora trains few parameters, which every process holds whole: leave "
                                  "trainer=fsdp out")


def check_processes(config: TrainerConfig, processes: int) -> None:
    """Raises ConfigError where batch, precision and GPUs do not suffice for so many processes."""
    parts = processes * config.accumulate
    if config.batch % parts:
        raise ConfigError(f"trainer.batch = {config.batch} does not divide over {processes} processes x "
                          f"{config.accumulate} micro-batches: choose a multiple of {parts}")
    gpus = 0 if config.cpu or not torch.accelerator.is_available() else torch.accelerator.device_count()
    if config.precision == "fp16" and not gpus:
        raise ConfigError("trainer.precision = fp16 needs a GPU: use bf16 or no")
    if gpus and (here := local_world_size(config.processes)) > gpus:
        one = "torchrun --nproc_per_node" if inside_torchrun() else "trainer.processes"
        fewer = f"{one}={gpus} with trainer.accumulate={config.accumulate * -(-here // gpus)} keeps the micro-batches"
        raise ConfigError(f"{one} = {here}: this machine has {gpus} GPUs, one for each process: {fewer}; "
                          "trainer.cpu=true uses none")


def local_world_size(asked: int | None) -> int:
    """Processes on this machine: those of the torchrun around this one, whatever is asked, which it overrules."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if inside_torchrun() else asked or 1


def start_world(config: TrainerConfig) -> World:
    """Sets up the processes. Raises ConfigError where batch, precision and processes do not go together."""
    check_processes(config, world_size())
    try:
        return World(config.precision, config.cpu, config.find_unused_parameters)
    except ValueError as error:  # accelerate's words for a precision that the device lacks
        raise ConfigError(f"trainer.precision = {config.precision}: {error}") from None
