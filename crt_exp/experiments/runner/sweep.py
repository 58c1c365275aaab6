"""Sweeps: their runs, and the result table at the end."""

import time
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from crt_exp.experiments.runner.configuration import (
    GROUPS,
    leaves,
    mechanism_part,
    override_key,
)
from crt_exp.experiments.runner.run import PARTIAL, read_records
from crt_exp.registry import ConfigError, json_object, uses

if TYPE_CHECKING:
    from pandas import DataFrame

SHOWN = 20  # maximum rows on the terminal; sweep.csv has one row per run
DATA = [
    "task",
    "task.dataset",
    "task.corpus",
    "task.csv",
    "task.text",
    "task.data_dir",
    "task.hub.name",
    "task.environment",
]  # settings are ranked within equal values of these keys
RECORD = [
    "metric",
    "value",
    "direction",
    "step",
    "time_s",
    PARTIAL,
]  # columns from the final record

RANK = "rank"  # column of a setting's place in the table

BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
PLUGINS = Plugins.instance().class_name_to_class  # Hydra's scan defines each class anew
BasicSweeper = PLUGINS[BASIC]
_started: list[tuple[Path, float]] = []


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
    """Hydra's basic sweeper, without overrides that the mechanism of a run does not use."""

    def split_arguments(
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        (jobs,) = BasicSweeper.split_arguments(overrides, None)
        jobs, notes = without_unused(jobs, self._compose)
        for note in notes:
            print(note, flush=True)
        return list(self.split_overrides_to_chunks(jobs, max_batch_size))

    def _compose(self, overrides: list[str]) -> DictConfig:
        return self.hydra_context.config_loader.load_sweep_config(self.config, overrides)


def use_sweeper() -> None:
    """Let Hydra build `UsedOptionsSweeper` as its basic sweeper."""
    PLUGINS[BASIC] = UsedOptionsSweeper


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


# ---- the result table


class SweepStart(Callback):
    """Hydra callback that records directory and start time of a sweep for `show`."""

    def on_multirun_start(self, config, **kwargs) -> None:
        _started.append((Path(str(config.hydra.sweep.dir)), time.time()))


def show() -> None:
    """Print the result table of this process's sweep, if any, and write sweep.csv."""
    while _started:
        directory, began = _started.pop()
        runs = finished_runs(directory, began)
        if len(runs) > 1:
            runs.to_csv(directory / "sweep.csv", index=False)
            print(f"{table(runs)}\n[{directory}; sweep.csv has one row per run]")


def finished_runs(directory: Path, began: float = 0.0) -> "DataFrame":
    """Return finished runs: name, varied overrides and final record.

    began: start time of the sweep; earlier runs are left out.
    """
    from pandas import DataFrame

    rows = []
    for path in directory.glob("**/versions.json"):
        if path.stat().st_mtime < began:  # of an earlier sweep
            continue
        records = read_records(path.with_name("metrics.jsonl"))
        if records and records[-1].get("final"):
            rows.append(final_row(path, directory, records[-1]))
    runs = DataFrame(sorted(rows, key=lambda row: (len(row["run"]), row["run"])))
    keys = [key for key in runs if key not in ("run", *RECORD)]
    runs[keys] = runs[keys].fillna("")
    constant = [key for key in keys if runs[key].nunique() == 1]
    return runs[[key for key in ("run", *keys, *RECORD) if key in runs and key not in constant]]


def final_row(versions: Path, directory: Path, last: dict[str, Any]) -> dict[str, Any]:
    """Return name, overrides and final record of the run whose versions.json is given."""
    row = {"run": str(versions.parent.relative_to(directory))}
    for override in json_object(versions)["overrides"]:
        key, _, value = override.lstrip("+~").partition("=")
        row[key] = value
    row["value"] = last[last["metric"]]
    for key in RECORD:
        if key in last:
            row[key] = last[key]
    return row


def table(runs: "DataFrame") -> str:
    """Format one line per setting: mean and 95% interval over seeds, best first.

    Settings are grouped by data set.
    """
    from pandas import DataFrame

    from crt_exp.experiments.intervals import interval

    keys = [key for key in runs if key not in ("run", "seed", *RECORD)]
    settings = []
    for (metric, *values), group in runs.groupby(["metric", *keys], sort=False):
        pool = interval(group["value"].astype(float), "mean")
        mean = f"{pool['mean']:.4f}"
        if len(group) > 1:
            mean += f" +- {pool['mean_ci95']:.4f}"
        minimized = group["direction"].iloc[0] == "minimize"
        rank = pool["mean"] if minimized else -pool["mean"]
        setting = dict(zip(keys, values))
        settings.append(setting | {"runs": len(group), "metric": metric, "value": mean, RANK: rank})
    data = [key for key in keys if key in DATA]
    ranked = DataFrame(settings).sort_values(["metric", *data, RANK]).drop(columns=RANK)
    lines = [
        f"sweep of {len(runs)} runs, mean over seeds with its 95% interval, the best of each data set "
        "first:",
        ranked.head(SHOWN).to_string(index=False),
    ]
    if len(ranked) > SHOWN:
        lines.append(f"  ... and {len(ranked) - SHOWN} more in sweep.csv")
    if PARTIAL in runs:
        lines.append("trainer.evaluate: these results are on a part of the evaluation data")
    return "\n".join(lines)
