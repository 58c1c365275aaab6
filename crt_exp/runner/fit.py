"""From a composed configuration to its records: what it builds, checked; then measured or trained.

Choices that do not go together are ConfigErrors, raised before anything is written.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from crt_exp.config import ConfigError, imported, instantiate
from crt_exp.data import rank, world_size
from crt_exp.runner.configuration import (check_composed, choice, in_sweep, key_of, output_directory, overrides,
                                          part_of)
from crt_exp.runner.loggers import CURVES, draw_curves
from crt_exp.runner.run import PARTIAL, Run
from crt_exp.runner.sweep import check_direction, direction


def build(cfg: DictConfig) -> tuple[Any, Any]:
    """The task and the Mechanism of a composed configuration. Raises ConfigError for whatever cannot be run."""
    from crt_exp.mechanism import Mechanism

    check_composed(cfg)
    if in_sweep():
        check_direction(imported(cfg.task._target_), HydraConfig.get().sweeper.get("direction"))
    task = instantiate(cfg.task)
    mechanism = Mechanism.composed(cfg, choice)
    if mechanism.features is not None and not (mechanism.own_kernel and getattr(task, "of_rows", False)):
        with errors_of("features"):
            mechanism.map()
    refuse([o for o in overrides() if (part := part_of(o)) and part not in getattr(task, "uses", {part})])
    (check_measurement if hasattr(task, "records") else check_training)(cfg, task, mechanism)
    return task, mechanism


@contextmanager
def errors_of(group: str) -> Iterator[None]:
    """The errors of a constructor with the choice that it belongs to."""
    try:
        yield
    except ValueError as error:
        said = f"{group}={choice(group)}: "
        raise ConfigError(f"{said}{str(error).removeprefix(said)}") from None


def refuse(unused: list[str]) -> None:
    if unused:
        raise ConfigError(f"task={choice('task')}: does not use {' '.join(unused)}; leave that out")


def given(node: str) -> list[str]:
    """The overrides of a node of the configuration, or of keys below it."""
    return [o for o in overrides() if f"{key_of(o)}.".startswith(f"{node}.")]


def check_measurement(cfg: DictConfig, task: Any, mechanism: Any) -> None:
    """What a task that only measures cannot do: run on several processes, and measure what has no feature map."""
    if world_size() > 1:
        raise ConfigError(f"task={choice('task')}: runs on one process; leave torchrun out")
    refuse(given("trainer"))
    whole = getattr(task, "measures_whole", None)  # attention without a feature map too
    if not (mechanism.estimates or mechanism.is_exact or whole and whole(mechanism)):
        raise ConfigError(f"task={choice('task')}: measures feature maps of a kernel, attention={mechanism.name} has "
                          "none; expected features=..., attention=favorpp or attention=exact")


def check_training(cfg: DictConfig, task: Any, mechanism: Any) -> None:
    from crt_exp.runner.trainer import planned_steps

    config = instantiate(cfg.trainer)
    config.check_processes(world_size())
    if config.strategy == "fsdp" and world_size() > 1:
        task.check_shards()
    if config.adapt:
        task.check_adapters()
    elif unused := given("trainer.lora"):
        raise ConfigError(f"trainer.adapt=null: does not use {' '.join(unused)}; add trainer.adapt=lora")
    planned_steps(config, task, world_size())
    if choice("attention"):
        with errors_of("attention"):
            mechanism.layer(2, 8)


def fit(cfg: DictConfig, task: Any, mechanism: Any) -> float | None:
    """Run what is not yet in the run directory, print the task's summary, and return the metric of the last record.

    None on processes but the first. Stand-in data are named before and in the summary. Raises Stopped after a signal
    or a divergence.
    """
    stand_in = getattr(task, "stand_in", "")
    if stand_in and rank() == 0:
        print(stand_in, flush=True)
    records = (measured if hasattr(task, "records") else trained)(cfg, task, mechanism)
    if not records:
        return None
    part = f"; on the first {records[-1][PARTIAL]:.0f} batches only" if PARTIAL in records[-1] else ""
    print(f"{task.summary(records)}{part}{stand_in and f'; {stand_in}'}  [{output_directory()}]")
    return records[-1][task.metric]


def measured(cfg: DictConfig, task: Any, mechanism: Any) -> list[dict]:
    """The records of a task that only measures."""
    from accelerate.utils import set_seed

    with Run(cfg, task, output_directory()) as run:
        set_seed(cfg.seed)
        if hasattr(task, "directory"):  # of tasks that continue from a state of their own
            task.directory = run.directory
        for record in () if finished(run.records) else task.records(mechanism, cfg.seed, done=list(run.records)):
            ending = {"metric": task.metric, "direction": direction(task)} if record.get("final") else {}
            if ending and hasattr(task, "keep"):  # a run is done when all its files are there
                task.keep([*run.records, record | ending], run.directory)
            run.log(**record, **ending)
    return run.records


def trained(cfg: DictConfig, task: Any, mechanism: Any) -> list[dict]:
    """The records of a task that trains; none on processes but the first."""
    from accelerate.utils import set_seed

    from crt_exp.runner.distributed import Distributed
    from crt_exp.runner.trainer import Trainer

    config = instantiate(cfg.trainer)
    with Distributed(config.precision, config.cpu, config.find_unused_parameters) as distributed, \
            Run(cfg, task, output_directory(), distributed.main) as run:
        set_seed(cfg.seed)
        if not distributed.broadcast(finished(run.records)):
            Trainer(config, task, mechanism, run, distributed, cfg.seed).fit()
        if distributed.main and not (run.directory / CURVES).is_file():
            draw_curves(run.records, task.metric, run.directory)
    return run.records


def finished(records: list[dict]) -> bool:
    """Whether nothing is left to run."""
    return bool(records and records[-1].get("final"))
