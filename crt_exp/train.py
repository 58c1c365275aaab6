"""The command line: compose a configuration, check it, run its task, write its results.

Everything that a user can get wrong in the configuration is found before anything is written, and said in a few lines.
"""

import signal
import sys
from pathlib import Path
from typing import Any

from crt_exp.config import CONF, ConfigError, instantiate
from crt_exp.ranks import inside_torchrun, world_size
from crt_exp.runner.checks import check_attention, check_study, check_sweeper, check_training, mechanism_of
from crt_exp.runner.command_line import check_command_line, with_file_names, with_folders
from crt_exp.runner.composed import check_composed
from crt_exp.runner.ending import (
    DIVERGED_CODE,
    ERROR_CODE,
    Stopped,
    ending_together,
    fail,
    mistakes_told,
    refuse_together,
    remove_empty,
)
from crt_exp.runner.invocation import folders, output_directory, overrides
from crt_exp.runner.processes import agree_on_start, leave, raise_interrupts
from crt_exp.runner.sweep import direction, show
from crt_exp.runner.torchrun import ProcessesFailed, torchrun


def main() -> None:
    """The console script `crt_exp` and `python -m crt_exp`, alone or on every process of a torchrun."""
    import hydra

    agree_on_start()
    try:
        sys.argv[1:] = with_file_names(sys.argv[1:])
        check_command_line(sys.argv[1:])
    except ConfigError as error:
        fail(error)
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(run)()
    except KeyboardInterrupt:  # between the runs of a sweep
        fail(Stopped("stopped by SIGINT", 128 + signal.SIGINT), 128 + signal.SIGINT)
    finally:
        show_sweep()
    if world_size() > 1:
        leave()


def show_sweep() -> None:
    try:
        show()
    except (ConfigError, OSError) as error:
        fail(error)


def run(cfg) -> float | None:
    """One run of the composed configuration; returns the task's metric for sweeps (None on processes but the first)."""
    with mistakes_told():
        return measured(cfg)


def measured(cfg) -> float | None:
    """Runs what is not yet in the run directory, and returns the metric of its last record."""
    check_composed(cfg)
    check_attention(cfg)
    check_sweeper(cfg)
    task = instantiate(cfg.task)
    mechanism = mechanism_of(cfg)
    if is_study(task):
        check_study(cfg, task, mechanism)
        records, directory = study(cfg, task, mechanism)
    else:
        check_training(cfg, task, mechanism)
        if cfg.trainer.processes and not inside_torchrun():
            del task, mechanism  # each process makes its own
            return run_processes(cfg)
        records, directory = train(cfg, task, mechanism)
    if not records:
        return None
    print(f"{task.summary(records)}  [{directory}]")
    return records[-1][task.metric]


def study(cfg, task, mechanism) -> tuple[list[dict], Path]:
    """The records of a task that only measures."""
    from crt_exp.runner.run import Run

    raise_interrupts()
    with Run(cfg, output_directory()) as current:
        if not finished(current.records):
            for record in task.records(mechanism, cfg.seed, done=list(current.records)):
                ending = {"metric": task.metric, "direction": direction(task)} if record.get("final") else {}
                current.log(**record, **ending)
            if hasattr(task, "keep"):
                task.keep(current.records, current.directory)
    return current.records, current.directory


def train(cfg, task, mechanism) -> tuple[list[dict], Path]:
    """The records of a task that trains; none on processes but the first.
    Raises Stopped after a signal or a divergence."""
    from crt_exp.runner.trainer import Trainer
    from crt_exp.runner.trainer_config import start_world

    config = instantiate(cfg.trainer, _convert_="all")
    world = start_world(config)
    raise_interrupts()
    with ending_together(world), open_run(cfg, world) as current:
        if not world.broadcast(finished(current.records)):
            Trainer(config, task, mechanism, current, world, cfg.seed).fit()
    return current.records, current.directory


def open_run(cfg, world):
    """The run directory, on every process; where the first cannot have it, all end with the exit code of that error."""
    from crt_exp.runner.run import Run

    current, problem = None, None
    try:
        current = Run(cfg, output_directory(), world.main)
    except (ValueError, OSError) as error:
        if world.size == 1:
            raise
        problem = str(error)
    problem = world.broadcast(problem)
    if problem:
        refuse_together(problem, world)
    return current


def run_processes(cfg) -> float:
    """The same run on `trainer.processes` processes, started by torchrun; returns the metric that it recorded."""
    from crt_exp.runner.run import read_records

    try:
        torchrun(cfg.trainer.processes, [*overrides(), *with_folders(folders())], output_directory())
    except ProcessesFailed as error:
        remove_empty(output_directory())
        raise Stopped(str(error), error.code, told=error.code in (ERROR_CODE, DIVERGED_CODE)) from None
    last = read_records(output_directory() / "metrics.jsonl")[-1]
    return last[last["metric"]]


def is_study(task: Any) -> bool:
    return hasattr(task, "records")


def finished(records: list[dict]) -> bool:
    return bool(records and records[-1].get("final"))
