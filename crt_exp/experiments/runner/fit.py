"""Build, check and execute a run from a composed configuration.

Incompatible choices raise ConfigError before anything is written.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from crt_exp.experiments.data import rank, world_size
from crt_exp.experiments.runner.configuration import (
    check_composed,
    choice,
    is_sweep,
    mechanism_part,
    output_directory,
    override_key,
    overrides,
)
from crt_exp.experiments.runner.loggers import CURVES, draw_curves
from crt_exp.experiments.runner.run import PARTIAL, Run
from crt_exp.experiments.runner.sweep import check_direction, direction
from crt_exp.registry import ConfigError, import_object, instantiate


def build(cfg: DictConfig) -> tuple[Any, Any]:
    """Create task and mechanism of a composed configuration. Raises ConfigError."""
    from crt_exp.mechanism import Mechanism

    check_composed(cfg)
    if is_sweep():
        check_direction(
            import_object(cfg.task._target_), HydraConfig.get().sweeper.get("direction")
        )
    task = instantiate(cfg.task)
    mechanism = Mechanism.from_config(cfg, choice)
    if mechanism.features is not None and not (
        mechanism.own_kernel and getattr(task, "of_rows", False)
    ):
        with errors_of("features"):
            mechanism.map()
    refuse(
        [
            o
            for o in overrides()
            if (part := mechanism_part(o)) and part not in getattr(task, "uses", {part})
        ]
    )
    (check_measurement if hasattr(task, "records") else check_training)(cfg, task, mechanism)
    return task, mechanism


@contextmanager
def errors_of(group: str) -> Iterator[None]:
    """Prefix a constructor's ValueError with the choice that caused it."""
    try:
        yield
    except ValueError as error:
        said = f"{group}={choice(group)}: "
        raise ConfigError(f"{said}{str(error).removeprefix(said)}") from None


def refuse(unused: list[str]) -> None:
    if unused:
        raise ConfigError(f"task={choice('task')}: does not use {' '.join(unused)}; remove it")


def overrides_of(node: str) -> list[str]:
    """Return the overrides of a node of the configuration and of keys below it."""
    return [o for o in overrides() if f"{override_key(o)}.".startswith(f"{node}.")]


def check_measurement(cfg: DictConfig, task: Any, mechanism: Any) -> None:
    """Raise ConfigError for several processes, or a mechanism that is not measurable."""
    if world_size() > 1:
        raise ConfigError(f"task={choice('task')}: supports one process only; remove torchrun")
    refuse(overrides_of("trainer"))
    whole = getattr(
        task, "measures_whole", None
    )  # the task accepts attention without a feature map
    if not (mechanism.estimates or mechanism.is_exact or whole and whole(mechanism)):
        raise ConfigError(
            f"task={choice('task')}: attention={mechanism.name} has no feature map; expected "
            "features=..., attention=favorpp or attention=exact"
        )


def check_training(cfg: DictConfig, task: Any, mechanism: Any) -> None:
    from crt_exp.experiments.runner.trainer import planned_steps

    config = instantiate(cfg.trainer)
    config.check_processes(world_size())
    if config.strategy == "fsdp" and world_size() > 1:
        task.check_shards()
    if config.adapt:
        task.check_adapters()
    elif unused := overrides_of("trainer.lora"):
        raise ConfigError(
            f"trainer.adapt=null: does not use {' '.join(unused)}; set trainer.adapt=lora"
        )
    planned_steps(config, task, world_size())
    if choice("attention"):
        with errors_of("attention"):
            mechanism.layer(2, 8)


def fit(cfg: DictConfig, task: Any, mechanism: Any) -> float | None:
    """Execute the rest of a run, print its summary and return the final metric.

    Returns None on processes other than the first. Stand-in data are named before the run and in the summary. Raises
    Stopped after a signal or a divergence.
    """
    stand_in = getattr(task, "stand_in", "")
    if stand_in and rank() == 0:
        print(stand_in, flush=True)
    records = (run_measurement if hasattr(task, "records") else run_training)(cfg, task, mechanism)
    if not records:
        return None
    part = (
        f"; on a random sample of {records[-1][PARTIAL]:.0f} batches only"
        if PARTIAL in records[-1]
        else ""
    )
    print(f"{task.summary(records)}{part}{stand_in and f'; {stand_in}'}  [{output_directory()}]")
    return records[-1][task.metric]


def run_measurement(cfg: DictConfig, task: Any, mechanism: Any) -> list[dict]:
    """Return the records of a task that only measures."""
    from accelerate.utils import set_seed

    with Run(cfg, task, output_directory()) as run:
        set_seed(cfg.seed)
        if hasattr(task, "directory"):  # tasks with a state of their own
            task.directory = run.directory
        for record in (
            ()
            if is_finished(run.records)
            else task.records(mechanism, cfg.seed, done=list(run.records))
        ):
            ending = (
                {"metric": task.metric, "direction": direction(task)} if record.get("final") else {}
            )
            if ending and hasattr(
                task, "keep"
            ):  # write all files before the final record marks the run as done
                task.keep([*run.records, record | ending], run.directory)
            run.log(**record, **ending)
    return run.records


def run_training(cfg: DictConfig, task: Any, mechanism: Any) -> list[dict]:
    """Return the records of a task that trains; empty except on the first process."""
    from accelerate.utils import set_seed

    from crt_exp.experiments.runner.distributed import Distributed
    from crt_exp.experiments.runner.trainer import Trainer

    config = instantiate(cfg.trainer)
    with (
        Distributed(config.precision, config.cpu, config.find_unused_parameters) as distributed,
        Run(cfg, task, output_directory(), distributed.main) as run,
    ):
        set_seed(cfg.seed)
        if not distributed.broadcast(is_finished(run.records)):
            Trainer(config, task, mechanism, run, distributed, cfg.seed).fit()
        if distributed.main and not (run.directory / CURVES).is_file():
            draw_curves(run.records, task.metric, run.directory)
    return run.records


def is_finished(records: list[dict]) -> bool:
    """Return whether nothing is left to run."""
    return bool(records and records[-1].get("final"))
