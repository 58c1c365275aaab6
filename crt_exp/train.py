"""The command line: compose and check a configuration, then run its task.

Errors in the configuration are reported before anything is written.
"""

import sys

# before the imports below: __main__ reports import errors and ^C in one line
if __name__ == "__main__":
    import os
    import runpy

    if not __package__:  # run as a file: its folder on sys.path would hide other modules
        sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
        paths = [sys.path[0], os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # for subprocesses

    runpy.run_module("crt_exp", run_name="__main__", alter_sys=True)
    sys.exit()

import signal
from datetime import timedelta
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from crt_exp.experiments.data import inside_torchrun, rank, world_size
from crt_exp.experiments.runner.command_line import check_command_line, with_file_names
from crt_exp.experiments.runner.configuration import (
    check_plain,
    choice,
    is_sweep,
    mechanism_part,
    output_directory,
    overrides,
    plain_config,
)
from crt_exp.experiments.runner.exit_handling import (
    FAILED_RUN_CODE,
    Stopped,
    exit_process,
    fail,
    report_errors,
)
from crt_exp.experiments.runner.loggers import CURVES, draw_curves
from crt_exp.experiments.runner.run import PARTIAL, RunDirectory, agree_on_start, is_finished
from crt_exp.experiments.runner.sweep import (
    BASIC,
    PLUGINS,
    UsedOptionsSweeper,
    check_direction,
    description,
    show,
    sweeps,
)
from crt_exp.optional import HideBroken
from crt_exp.registry import CONF, ConfigError, construct, import_object, own_names

# of processes that wait for one that reads or writes; NCCL's own is 10 minutes
PATIENCE = timedelta(hours=2)


def main() -> None:
    """Run the command line, in one process or in every process of torchrun."""
    sys.meta_path.insert(0, HideBroken)
    if world_size() > 1:
        agree_on_start()
    try:
        sys.argv[1:] = with_file_names(sys.argv[1:])
        if text := check_command_line(sys.argv[1:]):
            print(text, end="")
            return
    except ConfigError as error:
        fail(error)
    has_failed = False  # a run of a sweep
    PLUGINS[BASIC] = UsedOptionsSweeper  # Hydra's basic sweeper
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(run)()
    except KeyboardInterrupt:  # between two runs of a sweep
        fail(Stopped("stopped by SIGINT", 128 + signal.SIGINT), 128 + signal.SIGINT)
    finally:
        if sweeps:
            try:
                has_failed = show()
            except (ConfigError, OSError) as error:
                fail(error)
    if has_failed:
        sys.exit(FAILED_RUN_CODE)
    if world_size() > 1:
        exit_process()


def run(cfg: DictConfig) -> float | None:
    """Run one composed configuration, print its summary; return the task's metric for Hydra sweeps.

    Only the first process returns a metric; the others return None. Stand-in data are named before the run and in the
    summary. Errors, signals and divergence end the process with one line.
    """
    sources = HydraConfig.get().runtime.config_sources
    own = [
        source.path
        for source in sources
        if source.provider.endswith("command-line") and source.schema == "file"
    ]  # folders that the user added to Hydra's search path
    with report_errors(), own_names(own):
        config = plain_config(cfg)
        check_plain(config)  # before the imports of tasks, which take seconds
        from crt_exp.experiments.tasks.base import Measurement
        from crt_exp.mechanism import Mechanism

        if is_sweep():
            task_class = import_object(config["task"]["_target_"])
            check_direction(task_class, HydraConfig.get().sweeper.get("direction"))
        task = construct(config["task"])
        mechanism = Mechanism.from_config(config, choice)
        is_measurement = isinstance(task, Measurement)
        unused = [o for o in overrides() if mechanism_part(o) not in (None, *task.uses)]
        if is_measurement:
            unused += overrides("trainer")
        if unused:
            raise ConfigError(f"task={choice('task')}: does not use {' '.join(unused)}; remove it")
        group = "features"
        try:
            if group in mechanism.parts:
                mechanism.map(own_kernel=task.accepts_own_kernel)
            if choice("attention") and not is_measurement:
                group = "attention"
                mechanism.layer(2, 8)
        except ValueError as error:  # of a constructor
            prefix = f"{group}={choice(group)}: "
            raise ConfigError(f"{prefix}{str(error).removeprefix(prefix)}") from None
        if task.stand_in and rank() == 0:
            print(task.stand_in, flush=True)
        if is_measurement:
            records = run_measurement(config, task, mechanism)
        else:
            records = run_training(config, task, mechanism)
        if not records:
            return None
        last = records[-1]
        notes = [task.summary(records)]
        if PARTIAL in last:
            notes.append(f"on a random sample of {last[PARTIAL]:.0f} batches only")
        if task.stand_in:
            notes.append(task.stand_in)
        print(f"{'; '.join(notes)}  [{output_directory()}]")
        return last[task.metric]


def run_measurement(config: dict[str, Any], task: Any, mechanism: Any) -> list[dict]:
    """Return the records of a task that only measures."""
    from accelerate.utils import set_seed

    if world_size() > 1:
        raise ConfigError(f"task={choice('task')}: supports one process only; remove torchrun")
    if not (mechanism.estimates or mechanism.is_exact or task.measures_whole(mechanism)):
        raise ConfigError(
            f"task={choice('task')}: attention={mechanism.name} has no feature map; expected "
            "features=..., attention=favorpp or attention=exact"
        )
    with RunDirectory(config, task, output_directory()) as run:
        set_seed(config["seed"])
        if is_finished(run.records):
            return run.records
        task.directory = run.directory
        for record in task.records(mechanism, config["seed"], done=list(run.records)):
            if record.get("final"):
                record |= description(task, mechanism)
                # all files are written before the final record marks the run as done
                task.save_results([*run.records, record], run.directory)
            run.log(**record)
    return run.records


def run_training(config: dict[str, Any], task: Any, mechanism: Any) -> list[dict]:
    """Return the records of a task that trains; empty except on the first process."""
    import torch
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import gather_object, set_seed

    from crt_exp.experiments.runner.trainer import Trainer, planned_steps

    trainer = construct(config["trainer"])
    if trainer.strategy == "fsdp" and not inside_torchrun():
        raise ConfigError(
            "trainer.strategy=fsdp: expected several processes; start with torchrun "
            "--nproc_per_node=N -m crt_exp, or use trainer=default"
        )
    if trainer.strategy == "fsdp" and world_size() > 1:
        task.check_shards()
    if trainer.adapt:
        task.check_adapters()
    elif overrides("trainer.lora"):
        unused = " ".join(overrides("trainer.lora"))
        raise ConfigError(f"trainer.adapt=null: does not use {unused}; set trainer.adapt=lora")
    steps = planned_steps(trainer, task, world_size())
    accelerator = Accelerator(
        cpu=trainer.cpu or not torch.accelerator.is_available(),
        mixed_precision=trainer.precision,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )
    failed = True
    try:
        with RunDirectory(config, task, output_directory(), accelerator.is_main_process) as run:
            set_seed(config["seed"])
            if not gather_object([is_finished(run.records)])[0]:  # those of the first process
                Trainer(trainer, task, mechanism, run, accelerator, config["seed"], steps).fit()
            if accelerator.is_main_process and not (run.directory / CURVES).is_file():
                draw_curves(run.records, task.metric, run.directory)
        failed = False
    finally:
        # after an error, the other processes may not reach this point
        if not failed or accelerator.num_processes == 1:
            # leave the process group and reset accelerate, for the next run of a sweep
            accelerator.free_memory()
            accelerator.end_training()
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
    return run.records
