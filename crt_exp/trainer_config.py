"""The keys of `conf/trainer/`, checked before anything is read or written."""

import math
from dataclasses import dataclass

import torch

from crt_exp.config import ConfigError
from crt_exp.optim import OPTIMIZERS, SCHEDULES
from crt_exp.processes import World, world_size

PRECISIONS = ("no", "bf16", "fp16")
STRATEGIES = ("ddp", "fsdp")
OPTIONAL = ("steps", "eval_batch", "eval_every", "save_every", "save_minutes", "patience", "processes", "clip")


@dataclass(frozen=True)
class TrainerConfig:
    """How to train; `conf/trainer/default.yaml` explains each key. Raises ConfigError for values that make no sense."""

    batch: int
    epochs: float
    steps: int | None
    accumulate: int
    eval_batch: int | None
    optimizer: str
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    schedule: str
    warmup: float
    clip: float | None
    precision: str
    compile: bool
    strategy: str
    find_unused_parameters: bool
    cpu: bool
    processes: int | None
    eval_every: int | None
    log_every: int
    save_every: int | None
    save_minutes: float | None
    keep: int
    select: str
    patience: int | None
    prefetch: int
    profile: bool

    def __post_init__(self):
        if self.precision is False:  # what YAML makes of an unquoted no
            object.__setattr__(self, "precision", "no")
        for key, allowed in {"optimizer": OPTIMIZERS, "schedule": SCHEDULES, "precision": PRECISIONS, "strategy": STRATEGIES,
                             "select": ("best", "last")}.items():
            if getattr(self, key) not in allowed:
                raise ConfigError(f"trainer.{key} = {getattr(self, key)}: choose one of {', '.join(allowed)}")
        for key in ("batch", "accumulate", "eval_batch", "eval_every", "log_every", "save_every", "keep", "patience",
                    "processes"):
            self._check(key, lambda v: isinstance(v, int) and v >= 1, "a whole number of at least 1")
        for key in ("steps", "prefetch"):
            self._check(key, lambda v: isinstance(v, int) and v >= 0, "a whole number of at least 0")
        for key in ("epochs", "lr", "eps", "clip", "save_minutes"):
            self._check(key, lambda v: 0 < v < math.inf, "a positive number")
        for key in ("weight_decay", "warmup"):
            self._check(key, lambda v: 0 <= v < math.inf, "a number of at least 0")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError(f"trainer.betas = {list(self.betas)}: two numbers from 0 to below 1")
        if self.strategy == "fsdp" and self.precision == "fp16":
            raise ConfigError("trainer.precision = fp16 does not go with trainer=fsdp: use bf16")

    def _check(self, key: str, valid, kind: str) -> None:
        value = getattr(self, key)
        if value is None and key in OPTIONAL:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not valid(value):
            raise ConfigError(f"trainer.{key} = {value}: it takes {kind}")


def start_world(config: TrainerConfig) -> World:
    """Sets up the processes. Raises ConfigError where batch, precision and processes do not go together."""
    parts = world_size() * config.accumulate
    if config.batch % parts:
        raise ConfigError(f"trainer.batch = {config.batch} does not divide over {world_size()} processes x {config.accumulate} "
                          f"micro-batches: choose a multiple of {parts}")
    if config.precision == "fp16" and (config.cpu or not torch.accelerator.is_available()):
        raise ConfigError("trainer.precision = fp16 needs a GPU: use bf16 or no")
    try:
        return World(config.precision, config.cpu, config.find_unused_parameters)
    except ValueError as error:  # accelerate's words for a precision that the device lacks
        raise ConfigError(f"trainer.precision = {config.precision}: {error}") from None
