"""The command line: compose a configuration, run its task, write its results.

Everything that a user can get wrong in the configuration is found here, before anything is written, and said in a few lines.
"""

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra.errors import CompactHydraException

from crt_exp.composed import check_composed, located
from crt_exp.config import CONF, ConfigError, instantiate
from crt_exp.runner.command_line import check_command_line, with_folders
from crt_exp.runner.processes import (
    Preempted,
    ProcessesFailed,
    agree_on_start,
    clear_when_early,
    inside_torchrun,
    leave,
    lost_process,
    override,
    raise_interrupts,
    rank,
    torchrun,
    world_size,
)
from crt_exp.runner.sweep import check_direction, direction, show

ERROR_CODE, DIVERGED_CODE = 2, 3  # and 128 + the signal where a run was told to stop and left a checkpoint
NO_MEMORY = ("allocate memory", "out of memory", "not enough memory", "Storage size calculation", "numel: integer")  # by torch
PATIENCE = 10.0  # seconds: torchrun ends the other processes as soon as one has failed


def main() -> None:
    """The console script `crt_exp` and `python -m crt_exp`, alone or on every process of a torchrun."""
    import hydra

    agree_on_start()
    try:
        check_command_line(sys.argv[1:])
    except ConfigError as error:
        fail(error)
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(guarded)()
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


def guarded(cfg) -> Any:
    """`run`, with a user's mistake told in one message and no traceback."""
    from crt_exp.data import DataError

    clear_when_early(output_directory())
    try:
        return run(cfg)
    except (Preempted, KeyboardInterrupt) as error:
        remove_empty(output_directory())
        stopped = interrupted(error)
        end_run(stopped, stopped.code)
    except Stopped as stopped:
        end_run(stopped, stopped.code)
    except (ValueError, OSError, DataError, RuntimeError, MemoryError) as error:
        told = out_of_memory(error) if isinstance(error, (RuntimeError, MemoryError)) else error
        if told is None or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        remove_empty(output_directory())
        end_run(told, ERROR_CODE)


def out_of_memory(error: Exception) -> Exception | None:
    """The message for tensors that this machine cannot hold; None for an error of another kind."""
    if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in NO_MEMORY):
        return None
    asked = re.search(r"allocate (\d+) bytes", str(error))
    size = f"{int(asked[1]) / 2**30:.1f} GiB were asked for" if asked else (str(error).splitlines() or ["MemoryError"])[0][:200]
    return ConfigError(f"out of memory: {size}; choose a smaller features.m, trainer.batch (larger trainer.accumulate) or task")


def end_run(error: Exception, code: int) -> None:
    """Tells an error and exits; in a sweep only a signal ends the other runs too."""
    if not in_sweep() or code >= 128:
        fail(error, code)
    if "SUBMITIT_EXECUTOR" in os.environ:  # what a job prints goes to a file of its own
        raise RunFailed(story(error)) from None
    if not getattr(error, "told", False):
        say(f"crt_exp: the run in {output_directory()} failed: {'as one before it' if str(error) in _told else error}")
    _told.add(str(error))
    raise RunFailed("a run of this sweep failed; its error stands above") from None


_told: set[str] = set()  # the errors of a sweep's runs


class RunFailed(CompactHydraException):
    """One run of a sweep failed; Hydra tells it in the end, without a traceback."""


def run(cfg) -> float | None:
    """Runs what is not yet in the run directory, and returns the task's metric for sweeps (None on processes but the first)."""
    check_composed(cfg)
    check_attention(cfg)
    check_sweeper(cfg)
    task = instantiate(cfg.task)
    mechanism = mechanism_of(cfg)
    if is_study(task):
        records, directory = study(cfg, task, mechanism)
    else:
        check_training(cfg, task)
        if cfg.trainer.processes and not inside_torchrun():
            del task, mechanism  # each process makes its own
            return run_processes(cfg)
        records, directory = train(cfg, task)
    if not records:
        return None
    print(f"{task.summary(records)}  [{directory}]")
    return records[-1][task.metric]


def study(cfg, task, mechanism) -> tuple[list[dict], Path]:
    """The records of a task that only measures."""
    from crt_exp.runner.run import Run

    if world_size() > 1 or cfg.trainer.processes:
        raise ConfigError(f"task={choice('task')} does not train: start it on one process")
    if not mechanism.estimates and mechanism.name != "exact":
        raise ConfigError(f"task={choice('task')} measures feature maps of a kernel, and attention={mechanism.name} estimates "
                          "none: choose features=..., a preset such as attention=favorpp, or attention=exact")
    raise_interrupts()
    with Run(cfg, output_directory()) as current:
        if not finished(current.records):
            for record in task.records(mechanism, cfg.seed, done=list(current.records)):
                ending = {"metric": task.metric, "direction": direction(task)} if record.get("final") else {}
                current.log(**record, **ending)
    return current.records, current.directory


def check_training(cfg, task) -> None:
    """What can be known before the processes of a run start, and before anything is written: each of them would find the same."""
    from crt_exp.runner.trainer import planned_steps
    from crt_exp.runner.trainer_config import check_processes

    config = instantiate(cfg.trainer, _convert_="all")
    check_processes(config, world_size() if inside_torchrun() else config.processes or 1)
    planned_steps(config, task)
    if choice("attention"):
        with named("attention"):
            mechanism_of(cfg).layer(2, 8)


def train(cfg, task) -> tuple[list[dict], Path]:
    """The records of a task that trains; none on processes but the first. Raises Stopped after a signal or a divergence."""
    from crt_exp.nonfinite import Diverged
    from crt_exp.runner.trainer import Trainer
    from crt_exp.runner.trainer_config import start_world

    config = instantiate(cfg.trainer, _convert_="all")
    world = start_world(config)
    raise_interrupts()
    try:
        with open_run(cfg, world) as current:
            if not world.broadcast(finished(current.records)):
                Trainer(config, task, mechanism_of(cfg), current, world, cfg.seed).fit()
    except (Preempted, Diverged) as error:
        stopped = interrupted(error) if isinstance(error, Preempted) else Stopped(str(error), DIVERGED_CODE)
        if getattr(error, "alone", False):
            tell_alone(stopped)
        else:
            tell(stopped)
            world.barrier()  # torchrun ends all processes when one has ended: the first must have spoken
        raise stopped from None
    except RuntimeError as error:
        if world.size > 1 and lost_process(error):
            raise Stopped(f"process {rank()} cannot go on, for another is gone: {str(error).splitlines()[0]}", 1) from None
        raise
    finally:
        if world.size == 1 or sys.exc_info()[0] is None:
            world.close()
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
        refused = Stopped(f"error: {problem}", ERROR_CODE)
        tell(refused)
        remove_empty(output_directory())
        world.barrier()
        raise refused
    return current


def run_processes(cfg) -> float:
    """The same run on `trainer.processes` processes, started by torchrun; returns the metric that it recorded."""
    from hydra.core.hydra_config import HydraConfig

    from crt_exp.runner.run import read_records

    sources = [f"{s.schema}://{s.path}" for s in HydraConfig.get().runtime.config_sources if s.provider.endswith("command-line")]
    try:
        torchrun(cfg.trainer.processes, [*_task_overrides(), *with_folders(sources)], output_directory())
    except ProcessesFailed as error:
        remove_empty(output_directory())
        raise Stopped(str(error), error.code, told=error.code in (ERROR_CODE, DIVERGED_CODE)) from None
    last = read_records(output_directory() / "metrics.jsonl")[-1]
    return last[last["metric"]]


class Stopped(Exception):
    """A run that ended early with an exit code of its own: on all its processes, so that only the first one tells it."""

    def __init__(self, message: str, code: int, told: bool = False):
        super().__init__(message)
        self.code, self.told = code, told or rank() > 0


def interrupted(error: Preempted | KeyboardInterrupt) -> Stopped:
    """What ends a run that was told to stop, with the words that continue it, as a shell takes them."""
    from hydra.core.hydra_config import HydraConfig

    name, code = (str(error), error.code) if isinstance(error, Preempted) else ("SIGINT", 128 + signal.SIGINT)
    place = ("hydra.run.dir", output_directory())
    if in_sweep():
        place = ("hydra.sweep.dir", Path(HydraConfig.get().sweep.dir).absolute())
    return Stopped(f"stopped by {name}; continue with resume=auto {shlex.quote(override(*place))}", code)


def is_study(task: Any) -> bool:
    return hasattr(task, "records")


def finished(records: list[dict]) -> bool:
    return bool(records and records[-1].get("final"))


def mechanism_of(cfg):
    """The Mechanism that the configuration names; bad options of its parts are told before any data is read."""
    from crt_exp.mechanism import Mechanism

    mechanism = Mechanism.composed(cfg, choice)
    if mechanism.estimates:
        with named("features"):
            mechanism.map()
    return mechanism


@contextmanager
def named(group: str) -> Iterator[None]:
    """The errors of a constructor with the choice that it belongs to."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{group}={choice(group)}: {error}") from None


def check_attention(cfg) -> None:
    """Choices that the attention makes no use of."""
    from crt_exp.mechanism import uses

    if cfg.get("attention") is None:
        return
    used = uses(cfg.attention)
    unused = [o for o in _task_overrides() if (part := _part_of(o)) and part not in used]
    if unused:
        raise ConfigError(f"attention={choice('attention')} makes no use of it: leave out {' '.join(unused)}")


def _part_of(override: str) -> str | None:
    """Which part of a mechanism an override chooses: features, sampler or m."""
    key = override.split("=")[0].lstrip("+~")
    return "m" if key == "features.m" else next((part for part in ("features", "sampler") if key.split(".")[0] == part), None)


def check_sweeper(cfg) -> None:
    """A sweeper that would look for the worst value."""
    from hydra.core.hydra_config import HydraConfig

    if in_sweep():
        kind = located("task", cfg.task._target_)
        check_direction(kind, getattr(kind, "metric", None), HydraConfig.get().sweeper.get("direction"))


def choice(group: str) -> str | None:
    from hydra.core.hydra_config import HydraConfig

    return HydraConfig.get().runtime.choices.get(group)


def _task_overrides() -> list[str]:
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task)


def output_directory() -> Path:
    from hydra.core.hydra_config import HydraConfig

    return Path(HydraConfig.get().runtime.output_dir)


def remove_empty(directory: Path) -> None:
    """Takes away what Hydra made before a run that never began."""
    if rank() == 0 and directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()


def fail(error: Exception, code: int = ERROR_CODE) -> None:
    """Tells an error and exits."""
    tell(error)
    sys.exit(code)


def tell(error: Exception) -> None:
    """One message. Most errors are found by every process: the others give the first one time to tell it."""
    if isinstance(error, Stopped):
        if not error.told:
            say(f"crt_exp: {story(error)}")
        error.told = True
        return
    if rank() > 0:
        time.sleep(PATIENCE)
    say(f"crt_exp: error{f' on process {rank()}' if rank() else ''}: {story(error)}")


def tell_alone(stopped: Stopped) -> None:
    """What other processes may not know of, or find for themselves: the first one's word comes first."""
    if rank() > 0:
        time.sleep(PATIENCE)
        stopped.told = False
    tell(stopped)


def story(error: Exception) -> str:
    """The message; of a sweep's run that failed, with its directory."""
    told_to_stop = isinstance(error, Stopped) and error.code >= 128
    return f"the run in {output_directory()} failed: {error}" if in_sweep() and not told_to_stop else str(error)


def in_sweep() -> bool:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def say(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone (SIGHUP)
        print(text, file=sys.stderr, flush=True)
