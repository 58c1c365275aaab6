"""From a composed configuration to its records: what it builds, checked; then measured where the task only measures,
trained on this process, or on those that a torchrun starts.

Choices that do not go together are ConfigErrors, raised before anything is written.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from crt_exp.config import ConfigError, imported, instantiate
from crt_exp.data.ranks import inside_torchrun, world_size
from crt_exp.runner.command_line import with_folders
from crt_exp.runner.configuration import (check_composed, choice, folders, in_sweep, key_of, output_directory, override,
                                          overrides, part_of)
from crt_exp.runner.curves import CURVES
from crt_exp.runner.curves import draw as draw_curves
from crt_exp.runner.ending import DIVERGED_CODE, ERROR_CODE, Stopped, ending_together, refuse_together
from crt_exp.runner.processes import ProcessesFailed, raise_interrupts, take_away, torchrun
from crt_exp.runner.run import PARTIAL, Run, read_records
from crt_exp.runner.sweep import check_direction, direction


def build(cfg: DictConfig) -> tuple[Any, Any]:
    """The task and the Mechanism of a composed configuration. Raises ConfigError for whatever cannot be run."""
    check_composed(cfg)
    check_sweeper(cfg)
    task = instantiate(cfg.task)
    mechanism = mechanism_of(cfg, task)
    (check_probe if is_probe(task) else check_training)(cfg, task, mechanism)
    return task, mechanism


def is_probe(task: Any) -> bool:
    """Whether a task only measures, and does not train."""
    return hasattr(task, "records")


# ---- choices that do not go together ---------------------------------------------------------------------------------


def mechanism_of(cfg, task):
    """The Mechanism that the configuration names. Bad options of its parts are refused before any data is read, and
    maps with a kernel of their own by tasks that are not `of_rows`."""
    from crt_exp.mechanism import Mechanism

    mechanism = Mechanism.composed(cfg, choice)
    if mechanism.features is not None:
        with named("features"):
            if not (mechanism.own_kernel and getattr(task, "of_rows", False)):
                mechanism.map()
    return mechanism


@contextmanager
def named(group: str) -> Iterator[None]:
    """The errors of a constructor with the choice that it belongs to."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{group}={choice(group)}: {error}") from None


def given(node: str) -> list[str]:
    """The overrides of a node of the configuration, or of keys below it."""
    return [o for o in overrides() if f"{key_of(o)}.".startswith(f"{node}.")]


def check_used(task) -> None:
    """Choices that the task, with its options, does not use."""
    unused = [o for o in overrides() if (part := part_of(o)) and part not in task.uses]
    if unused:
        raise ConfigError(f"task={choice('task')} with these options does not use {' '.join(unused)}: leave that out")


def check_sweeper(cfg) -> None:
    """A sweeper that would look for the worst value."""
    from hydra.core.hydra_config import HydraConfig

    if in_sweep():
        kind = imported(cfg.task._target_)
        check_direction(kind, getattr(kind, "metric", None), HydraConfig.get().sweeper.get("direction"))


def check_probe(cfg, task, mechanism) -> None:
    """What a task that only measures cannot do: run on several processes, and measure what has no feature map."""
    if world_size() > 1 or cfg.trainer.processes:
        raise ConfigError(f"task={choice('task')} runs on one process: leave torchrun and trainer.processes out")
    if unused := given("trainer"):
        raise ConfigError(f"task={choice('task')}, which has no use for the trainer, does not use {' '.join(unused)}: "
                          "leave that out")
    if hasattr(task, "uses"):
        check_used(task)
    if not mechanism.estimates and not mechanism.is_exact and not measures_whole(cfg, mechanism):
        raise ConfigError(f"task={choice('task')} measures feature maps of a kernel, and attention={mechanism.name} "
                          "estimates none: choose features=..., a preset such as attention=favorpp, or attention=exact")


def measures_whole(cfg, mechanism) -> bool:
    """Whether the probe also measures this attention, which has no feature map."""
    measures = getattr(imported(cfg.task._target_), "measures_whole", None)
    return measures is not None and measures(mechanism)


def check_training(cfg, task, mechanism) -> None:
    """What can be known before the processes of a run start: each of them would find the same."""
    from crt_exp.runner.trainer import planned_steps
    from crt_exp.runner.trainer_config import check_processes

    config = instantiate(cfg.trainer)
    processes = world_size() if inside_torchrun() else config.processes or 1
    check_processes(config, processes)
    if config.strategy == "fsdp" and processes > 1:
        task.check_shards()
    if config.adapt:
        task.check_adapters()
    elif unused := given("trainer.lora"):
        raise ConfigError(f"trainer.adapt=null does not use {' '.join(unused)}: give trainer.adapt=lora, or leave that "
                          "out")
    planned_steps(config, task, processes)
    check_used(task)
    if choice("attention"):
        with named("attention"):
            mechanism.layer(2, 8)


# ---- the run ---------------------------------------------------------------------------------------------------------


def starts_processes(cfg) -> bool:
    """Whether the run is that of processes which are still to be started."""
    return bool(cfg.trainer.processes) and not inside_torchrun()


def fit_on_processes(cfg) -> float:
    """The run on `trainer.processes` processes, started by torchrun; returns the metric that it recorded."""
    arguments = [*overrides(), *with_folders(folders()), override("hydra.run.dir", output_directory())]
    try:
        torchrun(cfg.trainer.processes, arguments)
    except ProcessesFailed as error:
        take_away([output_directory()])
        raise Stopped(str(error), error.code, said=error.code in (ERROR_CODE, DIVERGED_CODE)) from None
    last = read_records(output_directory() / "metrics.jsonl")[-1]
    return last[last["metric"]]


def fit(cfg, task, mechanism) -> float | None:
    """Runs what is not yet in the run directory, prints the task's summary, and returns the metric of the last record;
    None on processes but the first. Raises Stopped after a signal or a divergence."""
    records, directory = (measured if is_probe(task) else trained)(cfg, task, mechanism)
    if not records:
        return None
    part = f"; on the first {records[-1][PARTIAL]:.0f} batches only" if PARTIAL in records[-1] else ""
    print(f"{task.summary(records)}{part}  [{directory}]")
    return records[-1][task.metric]


def measured(cfg, task, mechanism) -> tuple[list[dict], Path]:
    """The records of a task that only measures."""
    raise_interrupts()
    from crt_exp.runner.progress import measuring

    with Run(cfg, task, output_directory()) as current:
        if not finished(current.records):
            with measuring(current.records, current.note):
                log_records(cfg, task, mechanism, current)
    return current.records, current.directory


def log_records(cfg, task, mechanism, current: Run) -> None:
    """Logs the records that a run lacks."""
    if hasattr(task, "directory"):  # of probes that go on from a state of their own
        task.directory = current.directory
    for record in task.records(mechanism, cfg.seed, done=list(current.records)):
        ending = {"metric": task.metric, "direction": direction(task)} if record.get("final") else {}
        if ending and hasattr(task, "keep"):  # a run is done when all its files are there
            task.keep([*current.records, record | ending], current.directory)
        current.log(**record, **ending)


def trained(cfg, task, mechanism) -> tuple[list[dict], Path]:
    """The records of a task that trains; none on processes but the first."""
    from crt_exp.runner.trainer import Trainer
    from crt_exp.runner.trainer_config import start_world

    config = instantiate(cfg.trainer)
    world = start_world(config)
    raise_interrupts()
    with ending_together(world), open_run(cfg, task, world) as current:
        if not world.broadcast(finished(current.records)):
            Trainer(config, task, mechanism, current, world, cfg.seed).fit()
        if world.main and not (current.directory / CURVES).is_file():
            draw_curves(current.records, task.metric, current.directory)
    return current.records, current.directory


def open_run(cfg, task, world) -> Run | None:
    """The run directory, on every process; where the first cannot have it, all end with the exit code of that error."""
    current, problem = None, None
    try:
        current = Run(cfg, task, output_directory(), world.main)
    except (ValueError, OSError) as error:
        if world.size == 1:
            raise
        problem = str(error)
    problem = world.broadcast(problem)
    if problem:
        refuse_together(problem, world)
    return current


def finished(records: list[dict]) -> bool:
    """Whether nothing is left to run."""
    return bool(records and records[-1].get("final"))
