"""Sweeps of runs: override lists, execution by a Hydra launcher, result rows."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from datetime import date
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
from tqdm import tqdm

from crt_exp.experiments.data.corpora import prepare
from crt_exp.experiments.report.rows import ORIGIN
from crt_exp.experiments.runner.command_line import search_path
from crt_exp.experiments.runner.configuration import override
from crt_exp.experiments.runner.exit_handling import DIVERGED_CODE
from crt_exp.experiments.runner.run import PARTIAL, read_records, versions, write_atomic
from crt_exp.registry import CONF, ConfigError, json_object
from crt_exp.validation import split_words, to_text

HOME = "{runs}"  # placeholder in overrides for the folder of the page's runs
DIVERGED = "diverged"  # marker file in the folder of a run with a non-finite loss
VALIDATION = ("validation", "val", "held_out")  # splits of evaluations during training
PART = re.compile(r"(.+)_part(\d+)")  # metric of one jackknife part of the test split
METHODS = ("attention", "features")  # axes whose values are methods, such as "favorpp m=256"


class RunsFailed(ValueError):
    """Some runs of a sweep failed; finished runs are preserved."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep: its overrides and the columns of its rows.

    alone: execute in a separate process, for timings. environment: variables of that process.
    """

    overrides: tuple[str, ...]
    columns: Mapping[str, Any]
    alone: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the run's folder: the values of its columns."""
        values = "_".join(str(value) for value in self.columns.values())
        return re.sub(r"[^\w.+=-]+", "-", values) or "run"


def sweep(
    options: str = "",
    alone: bool = False,
    environment: Mapping[str, str] | None = None,
    **axes: Any,
) -> list[PlannedRun]:
    """Return one run for each combination of the axes' values.

    Args:
        options: Overrides of all runs, in one string; options with spaces are quoted as in a shell.
        alone: Execute each run in a separate process.
        environment: Variables of the processes of runs that are alone.
        axes: An override key with its values, or a column with {value: overrides in one string}, or a column with the
            one value that all runs have. The values of `attention` and `features` are methods, and their column is
            `method`. The column of another key is its last part.

    >>> [run.name for run in sweep("task=uci", attention=["exact", "favorpp m=64"], seed=range(2))]
    ['exact_0', 'exact_1', 'favorpp-m=64_0', 'favorpp-m=64_1']
    """
    names, values_of_axes = [], []
    for key, values in axes.items():
        names.append("method" if key in METHODS else key.rpartition(".")[2])
        values_of_axes.append(_axis_values(key, values))
    runs = []
    common = shlex.split(options)
    for combination in itertools.product(*values_of_axes):
        overrides = [*common]
        columns = {}
        for name, (value, value_overrides) in zip(names, combination):
            columns[name] = value
            overrides += value_overrides
        last = {override.partition("=")[0]: override for override in overrides}
        runs.append(PlannedRun(tuple(last.values()), columns, alone, environment or {}))
    return runs


def _axis_values(key: str, values: Any) -> list[tuple[Any, list[str]]]:
    """Return each value of an axis with its overrides."""
    if isinstance(values, str):
        return [(values, [])]
    if key in METHODS:
        return [(text, _method_overrides(key, text)) for text in values]
    if isinstance(values, Mapping):
        return [(value, shlex.split(text)) for value, text in values.items()]
    overrides = []
    for value in values:
        text = value if isinstance(value, str) else to_text(value)
        overrides.append((value, [f"{key}={text}"]))
    return overrides


def staged_sweep(
    name: str, options: str, stages: Mapping[int, str], seeds: int = 1
) -> list[PlannedRun]:
    """Return training runs, each initialised from the one before.

    Args:
        name: Name of the sweep.
        stages: Tokens of a row -> options of the stage.
    """
    runs = []
    previous = None
    for block, stage_options in stages.items():
        starts = {seed: f"seed={seed}" for seed in range(seeds)}
        if previous:
            starts = seeds_from(f"task.init={HOME}/{name}/{previous}", range(seeds))
        runs += sweep(f"{options} {stage_options}", **{"task.block": [block]}, seed=starts)
        previous = block
    return runs


def seeds_from(start: str, models: Iterable[int], first_seed: int = 0) -> dict[int, str]:
    """Return values of the axis `seed` for runs that start from models, one run for each.

    start: override of the model, without its number at the end.

    >>> seeds_from("task.init={runs}/books/exact", range(2), first_seed=8)
    {0: 'seed=8 task.init={runs}/books/exact_0', 1: 'seed=9 task.init={runs}/books/exact_1'}
    """
    return {model: f"seed={first_seed + model} {start}_{model}" for model in models}


def quoted_override(key: str, value: Any) -> str:
    """Return key=value for the options of `sweep`, quoted for the shell and for Hydra."""
    return shlex.quote(f"{key}={to_text(value)}")


def _method_overrides(group: str, text: str) -> list[str]:
    """Return the overrides of a method such as "favorpp m=256" or "pos sampler=iid"."""
    name, options = split_words(text)
    keys = {"m": "features.m", "sampler": "sampler", "features": "features"}
    overrides = [f"{group}={name}"]
    for option, value in options.items():
        key = option if "." in option else f"{group}.{option}"
        overrides.append(f"{keys.get(option, key)}={to_text(value)}")
    return overrides


# ---- running


def run_missing(
    runs: Sequence[PlannedRun], folder: Path, home: Path, launcher: str = "basic"
) -> None:
    """Execute unfinished runs, each in `folder`/<name>; interrupted runs continue.

    Args:
        home: Folder that `{runs}` in overrides stands for.
        launcher: Hydra's launcher: basic (in this process), joblib, submitit_local or submitit_slurm.

    Raises:
        RunsFailed: After all runs, if some failed.
    """
    missing = [run for run in runs if not is_finished(folder / run.name)]
    failed = []
    own = [f"logger={os.environ.get('LOGGER', 'none')}", "resume=auto"]
    for alone, group in itertools.groupby(missing, lambda run: run.alone):
        jobs = []
        for run in group:
            overrides = [override.replace(HOME, str(home)) for override in run.overrides]
            overrides += own
            prepare(overrides)
            jobs.append((run, overrides))
        execute = _run_in_processes if alone else _launch
        failed += execute(jobs, folder, launcher)
    if failed:
        raise RunsFailed(
            f"{len(failed)} of {len(runs)} runs failed, see the errors above: "
            f"{', '.join(str(folder / name) for name in failed[:5])}; `make data` fetches missing data"
        )


def is_finished(directory: Path) -> bool:
    records = read_records(directory / "metrics.jsonl")
    return bool(records and records[-1].get("final")) or (directory / DIVERGED).is_file()


def _launch(
    jobs: Sequence[tuple[PlannedRun, list[str]]], folder: Path, launcher: str
) -> Iterator[str]:
    """Execute runs by a Hydra launcher; yield the names of failed runs."""
    from hydra import initialize_config_dir
    from hydra._internal.callbacks import Callbacks
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins
    from hydra.types import HydraContext, RunMode

    from crt_exp.train import run as task_function

    settings = [
        "hydra.mode=MULTIRUN",
        f"hydra/launcher={launcher}",
        f"hydra.sweep.dir={folder.absolute()}",
        *search_path(),
    ]
    directory = str(CONF.resolve())
    with initialize_config_dir(version_base="1.3", config_dir=directory, job_name="crt_exp"):
        hydra = GlobalHydra.instance().hydra
        config = hydra.compose_config("config", settings, run_mode=RunMode.MULTIRUN)
        context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(config))
        instance = Plugins.instance().instantiate_launcher(
            hydra_context=context, task_function=task_function, config=config
        )
        batches = [jobs]
        if launcher == "basic":
            batches = [[job] for job in jobs]  # so that a failure is reported at once
        for batch in tqdm(batches, desc=folder.name, unit="run", mininterval=mininterval()):
            arguments = []
            for run, overrides in batch:
                arguments.append([*overrides, f'hydra.sweep.subdir="{run.name}"'])
            with redirect_stdout(StringIO()):  # the table at the end has what runs print
                results = instance.launch(arguments, 0)
            for (run, _), result in zip(batch, results):
                if _has_failed(result, folder / run.name):
                    yield run.name


def _has_failed(result: Any, directory: Path) -> bool:
    """Whether a run failed; a run that diverged is marked, and did not fail."""
    try:
        _ = result.return_value  # re-raises the error of the run
    except Exception as error:
        if getattr(error, "code", None) != DIVERGED_CODE:
            return True
        directory.mkdir(parents=True, exist_ok=True)  # it may have diverged before its first record
        if not (directory / "versions.json").is_file():
            write_atomic(directory / "versions.json", json.dumps(versions(0)))
        (directory / DIVERGED).touch()
    return False


def mininterval() -> float:
    """Seconds between two states of a progress bar: fewer in a log than on a terminal."""
    return 0.5 if sys.stderr.isatty() else 30.0


def _run_in_processes(
    jobs: Sequence[tuple[PlannedRun, list[str]]], folder: Path, launcher: str
) -> Iterator[str]:
    """Execute runs one after another, each in a new process."""
    own = search_path()
    for run, overrides in jobs:
        place = override("hydra.run.dir", folder / run.name)
        command = [sys.executable, "-m", "crt_exp", *overrides, *own, place]
        if subprocess.run(command, env=os.environ | run.environment).returncode:
            yield run.name


# ---- from records to rows


def rows_of_runs(
    runs: Sequence[PlannedRun],
    folder: Path,
    sweep: str,
    columns: Sequence[str],
    metrics: Sequence[str],
) -> pd.DataFrame:
    """Return one row for each metric of each record of finished runs.

    A list in a record gives one row per value. columns: columns from the run or the record. Validation records are used
    only if `step` is a column.
    """
    rows = []
    for run in runs:
        directory = folder / run.name
        records = _finished_records(directory)
        if not records:
            continue
        origin = _origin(directory, records[-1])
        seconds = origin.pop("seconds")
        for record in _evaluations(records, columns):
            values = {"sample": run.columns.get("seed", ""), "method": "", **run.columns, **record}
            for row in _rows_of_record(values, columns, metrics):
                rows.append({"sweep": sweep, **row, "seconds": seconds, **origin})
                seconds = ""  # on the first row of a run
    names = ["sweep", *columns, "sample", "metric", "value", *ORIGIN]
    return pd.DataFrame(rows, columns=names).fillna("")


def _finished_records(directory: Path) -> list[dict[str, Any]]:
    """Return the records of a finished run, or [] if it is unfinished."""
    if (directory / DIVERGED).is_file():
        return [{"split": "test", "diverged": 1, "final": True}]
    records = read_records(directory / "metrics.jsonl")
    if not records or not records[-1].get("final"):
        return []
    if PARTIAL in records[-1]:
        raise ConfigError(
            f"{directory}: incomplete evaluation (trainer.evaluate); delete the directory and run again"
        )
    speed = _steps_per_second(records)
    if speed:
        records[-1] = {**records[-1], "steps_per_s": speed}
    return records


def _origin(directory: Path, last: Mapping[str, Any]) -> dict[str, Any]:
    written = directory / "metrics.jsonl"
    if (directory / DIVERGED).is_file():
        written = directory / DIVERGED
    versions = json_object(directory / "versions.json")
    packages = versions["packages"]
    return {
        "seconds": last.get("time_s", ""),
        "commit": (versions["commit"] or "")[:12],
        "date": str(date.fromtimestamp(written.stat().st_mtime)),
        "versions": f"torch {packages['torch']}, numpy {packages['numpy']}; {versions['machine']}",
    }


def _evaluations(
    records: Sequence[Mapping[str, Any]], columns: Sequence[str]
) -> list[Mapping[str, Any]]:
    """Leave out records of training, and those of validation unless `step` is a column."""
    excluded = ["train"]
    if "step" not in columns:
        excluded += VALIDATION
    return [record for record in records if record.get("split") not in excluded]


def _rows_of_record(
    values: Mapping[str, Any], columns: Sequence[str], metrics: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the columns, sample, metric and value of each value of a record."""
    for key, value in values.items():
        part = PART.fullmatch(key)
        metric = part[1] if part else key
        if metric not in metrics:
            continue
        row = {"split": "parts"} if part else {}
        lists = []  # columns with one entry for each value
        for name in columns:
            column = values.get(name, "")
            if not isinstance(column, list):
                row.setdefault(name, column)
            elif isinstance(value, list) and len(column) == len(value):
                lists.append(name)
        for i, entry in enumerate(value if isinstance(value, list) else [value]):
            if entry is None:
                continue
            sample = int(part[2]) if part else values["sample"]
            if isinstance(sample, list):
                sample = sample[i]
            elif isinstance(value, list) and not lists:
                sample = i
            listed = {name: values[name][i] for name in lists}
            yield {**row, **listed, "sample": sample, "metric": metric, "value": entry}


def _steps_per_second(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the median over the intervals between training records."""
    train = [record for record in records if record.get("split") == "train"]
    rates = []
    for first, second in itertools.pairwise(train):
        seconds = second["time_s"] - first["time_s"]
        if seconds > 0:
            rates.append((second["step"] - first["step"]) / seconds)
    return median(rates) if rates else None
