"""Sweeps: their runs, failures, and the result table at the end."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from crt_exp.experiments.runner.configuration import (
    GROUPS,
    choice,
    mechanism_part,
    override_key,
)
from crt_exp.experiments.runner.exit_handling import fail
from crt_exp.experiments.runner.sweep_table import draw, finished_runs, settings_of, table
from crt_exp.registry import ConfigError, leaves, uses

BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
PLUGINS = Plugins.instance().class_name_to_class  # Hydra's scan defines each class anew
BasicSweeper = PLUGINS[BASIC]


@dataclass
class Sweep:
    """A sweep of this process: its directory and start time.

    Attributes:
        failures: one line for each failed run.
    """

    directory: Path
    began: float
    failures: list[str] = field(default_factory=list)


sweeps: list[Sweep] = []  # of this process


def description(task: Any, mechanism: Any) -> dict[str, Any]:
    """Return keys of the final record: the metric with its direction, and columns of features (M)."""
    keys = {"metric": task.metric, "direction": direction(task)}
    if mechanism.columns and "m" in task.uses:
        keys["M"] = mechanism.columns
    return keys


def direction(task: Any) -> str:
    """Return "minimize" or "maximize" (optuna's terms) for the metric of a task."""
    return "minimize" if task.lower_is_better else "maximize"


def check_direction(task_class: type, asked: Any) -> None:
    """Raise ConfigError if hydra.sweeper.direction (`asked`) is the wrong one."""
    needed = direction(task_class)
    if isinstance(asked, Enum):  # of optuna
        asked = asked.name
    if asked in ("minimize", "maximize") and asked != needed:
        raise ConfigError(
            f"hydra.sweeper.direction={asked}: expected {needed} for the metric of the task"
        )


# ---- the runs of a sweep


class UsedOptionsSweeper(BasicSweeper):
    """Hydra's basic sweeper, without overrides that the mechanism of a run does not use.

    A failed run does not end the sweep.
    """

    def setup(self, **options: Any) -> None:
        super().setup(**options)
        self.launch = self.launcher.launch
        self.launcher.launch = self.launch_and_record

    def launch_and_record(
        self, jobs: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Launch a batch of runs; failed runs go to the list of failures, and have no result.

        Exits with one line if the launcher itself fails, as without Slurm or for a partition that does not exist.
        """
        try:
            results = self.launch(jobs, initial_job_idx=initial_job_idx)
        except RuntimeError as error:
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                raise
            fail(ConfigError(f"hydra/launcher={choice('hydra/launcher')}: {last_line(error)}"))
        every = list(chain.from_iterable(self.overrides))
        for job, result in zip(jobs, results):
            if result.status != JobStatus.COMPLETED:
                varied = [o for o in job if any(o not in other for other in every)]
                line = f"  {' '.join(varied)}: {last_line(result._return_value)}"
                sweeps[-1].failures.append(line)
                result.status = JobStatus.COMPLETED  # else Hydra would raise the first error
                result.return_value = None
        return results

    def split_arguments(
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        (jobs,) = BasicSweeper.split_arguments(overrides, None)
        compose = partial(self.hydra_context.config_loader.load_sweep_config, self.config)
        jobs, notes = without_unused(jobs, compose)
        for note in notes:
            print(note, flush=True)
        return list(self.split_overrides_to_chunks(jobs, max_batch_size))


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message, or its type."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1]


def without_unused(
    jobs: Sequence[Sequence[str]], compose: Callable[[list[str]], DictConfig]
) -> tuple[list[list[str]], list[str]]:
    """Drop overrides that the mechanism of a job does not use; equal rests are one job.

    An override that no job uses stays, so that the check of a run refuses it.

    Args:
        jobs: overrides of each job, with equal keys in equal order.
        compose: composes a configuration from overrides.

    Returns:
        The jobs, and a line for each choice that does not use a key.
    """
    keys = [override.partition("=")[0] for override in jobs[0]]
    unused: dict[tuple[str, ...], dict[str, str]] = {}
    for job in jobs:
        choices = tuple(filter(chooses_files, job))
        if choices not in unused:
            cfg = compose([*choices])
            users = {key: _non_user(cfg, key) for key in keys}
            unused[choices] = {key: choice for key, choice in users.items() if choice}
    without_user = set(keys).intersection(*unused.values())
    runs = []
    shortened = set()
    notes: dict[str, None] = {}
    for job in jobs:
        dropped = unused[tuple(filter(chooses_files, job))]
        run = []
        for key, override in zip(keys, job):
            if key in without_user or key not in dropped:
                run.append(override)
            else:
                notes[f"{dropped[key]} does not use {override_key(key)}: run without"] = None
        if len(run) == len(job):
            runs.append(run)
        elif tuple(run) not in shortened:
            shortened.add(tuple(run))
            runs.append(run)
    return runs, [*notes]


def chooses_files(override: str) -> bool:
    """Whether an override selects files of the configuration."""
    key = override_key(override)
    return key in (*GROUPS, "experiment") or key.startswith("hydra")


def _non_user(cfg: DictConfig, key: str) -> str | None:
    """Return the choice that does not use an override's key, such as attention=exact."""
    part = mechanism_part(key)
    if part is None:
        return None
    group, _, option = override_key(key).partition(".")
    used = {"attention", "features", "sampler", "m"}
    if cfg.get("attention") is not None:
        used = {"attention", *uses(OmegaConf.to_container(cfg.attention))}
    if part not in used:
        return f"attention={cfg.hydra.runtime.choices.attention}"
    if not option or part == "m" or key.startswith("+"):
        return None
    options = dict(leaves(OmegaConf.to_container(cfg[group]))) if cfg.get(group) else {}
    if option in options:
        return None
    return f"{group}={cfg.hydra.runtime.choices.get(group) or 'null'}"


# ---- the end of a sweep


class SweepStart(Callback):
    """Hydra callback that records directory and start time of a sweep in `sweeps`."""

    def on_multirun_start(self, config, **kwargs) -> None:
        sweeps.append(Sweep(Path(str(config.hydra.sweep.dir)), time.time()))


def show() -> bool:
    """Print the result table of this process's sweep, and its failures.

    Writes sweep.csv and, if a number was varied, sweep.png. Returns whether a run failed.
    """
    has_failed = False
    while sweeps:
        sweep = sweeps.pop()
        runs = finished_runs(sweep.directory, sweep.began)
        if len(runs) > 1:
            runs.to_csv(sweep.directory / "sweep.csv", index=False)
            settings = settings_of(runs)
            files = "sweep.csv has one row per run"
            if draw(settings, sweep.directory / "sweep.png"):
                files += ", sweep.png shows the table"
            print(f"{table(runs, settings)}\n[{sweep.directory}; {files}]", flush=True)
        if sweep.failures:
            has_failed = True
            lines = [f"crt_exp: {len(sweep.failures)} runs of the sweep failed:", *sweep.failures]
            print("\n".join(lines), file=sys.stderr, flush=True)
    return has_failed
