"""Sweeps of runs: override lists, execution by a Hydra launcher, result rows."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import date
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
from tqdm import tqdm

from crt_exp.experiments.data.corpora import prepare
from crt_exp.experiments.report.rows import ORIGIN
from crt_exp.experiments.runner.command_line import with_folders
from crt_exp.experiments.runner.configuration import override
from crt_exp.experiments.runner.exit_handling import DIVERGED_CODE
from crt_exp.experiments.runner.run import PARTIAL, read_records, versions, write_atomic
from crt_exp.registry import CONF, ConfigError, json_object, own_folders
from crt_exp.validation import split_words, to_text

HOME = "{runs}"  # placeholder in overrides for the folder of the page's runs
DIVERGED = "diverged"  # marker file in the folder of a run with a non-finite loss
VALIDATION = ("validation", "val", "held_out")  # splits of evaluations during training
PART = re.compile(r"(.+)_part(\d+)")  # metric of one jackknife part of the test split
METHODS = ("attention", "features")  # axes whose values are methods, such as "favorpp m=256"


class RunsFailed(ValueError):
    """Some runs of a sweep failed; finished runs are preserved."""


@dataclass(frozen=True)
class Run:
    """One run of a sweep: its overrides and the columns of its rows.

    alone: execute in a separate process, for timings.
    """

    overrides: tuple[str, ...]
    columns: Mapping[str, Any]
    alone: bool = False

    @property
    def name(self) -> str:
        """Name of the run's folder: the values of its columns."""
        return (
            re.sub(r"[^\w.+=-]+", "-", "_".join(str(value) for value in self.columns.values()))
            or "run"
        )


def sweep(options: str = "", alone: bool = False, **axes: Any) -> list[Run]:
    """Return one run for each combination of the axes' values.

    Example: `sweep("task=uci", attention=["exact", "favorpp m=64"], **{"task.dataset": ["wine", "digits"]},
    seed=range(3))`.

    Args:
        options: Overrides of all runs, in one string; options with spaces are quoted as in a shell.
        alone: Execute each run in a separate process.
        axes: An override key with its values, or a column with {value: overrides in one string}. The values of
            `attention` and `features` are methods, and their column is `method`. The column of another key is its last
            part.
    """
    names, choices = [], []
    for key, values in axes.items():
        if key in METHODS:
            names.append("method")
            choices.append([(text, _method_overrides(key, text)) for text in values])
            continue
        names.append(key.rpartition(".")[2])
        if isinstance(values, Mapping):
            choices.append([(value, shlex.split(text)) for value, text in values.items()])
        else:
            choices.append([(value, [_axis_override(key, value)]) for value in values])
    runs = []
    common = shlex.split(options)
    for combination in itertools.product(*choices):
        overrides = [*common]
        columns = {}
        for name, (value, value_overrides) in zip(names, combination):
            columns[name] = value
            overrides += value_overrides
        last = {override.partition("=")[0]: override for override in overrides}
        runs.append(Run(tuple(last.values()), columns, alone))
    return runs


def _axis_override(key: str, value: Any) -> str:
    text = value if isinstance(value, str) else to_text(value)
    return f"{key}={text}"


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


def run_missing(runs: Sequence[Run], folder: Path, home: Path, launcher: str = "basic") -> None:
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


def _launch(jobs: Sequence[tuple[Run, list[str]]], folder: Path, launcher: str) -> Iterator[str]:
    """Execute runs by a Hydra launcher; yield the names of failed runs."""
    from hydra import initialize_config_dir
    from hydra._internal.callbacks import Callbacks
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins
    from hydra.types import HydraContext, RunMode

    from crt_exp.train import run as task_function

    with initialize_config_dir(
        version_base="1.3", config_dir=str(CONF.resolve()), job_name="crt_exp"
    ):
        hydra = GlobalHydra.instance().hydra
        settings = [
            "hydra.mode=MULTIRUN",
            f"hydra/launcher={launcher}",
            f"hydra.sweep.dir={folder.absolute()}",
            *with_folders(own_folders()),
        ]
        config = hydra.compose_config("config", settings, run_mode=RunMode.MULTIRUN)
        context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(config))
        instance = Plugins.instance().instantiate_launcher(
            hydra_context=context, task_function=task_function, config=config
        )
        batches = [jobs]
        if launcher == "basic":
            batches = [[job] for job in jobs]  # so that a failure is reported at once
        for batch in tqdm(batches, desc=folder.name, unit="run", mininterval=mininterval()):
            arguments = [
                [*overrides, f'hydra.sweep.subdir="{run.name}"'] for run, overrides in batch
            ]
            with redirect_stdout(StringIO()):  # the table at the end has what runs print
                results = instance.launch(arguments, 0)
            for (run, _), result in zip(batch, results):
                try:
                    _ = result.return_value  # re-raises the error of the run
                except Exception as error:
                    if getattr(error, "code", None) != DIVERGED_CODE:
                        yield run.name
                        continue
                    # It does not exist if the run diverged before its first record.
                    directory = folder / run.name
                    directory.mkdir(parents=True, exist_ok=True)
                    if not (directory / "versions.json").is_file():
                        write_atomic(directory / "versions.json", json.dumps(versions(0)))
                    (directory / DIVERGED).touch()


def mininterval() -> float:
    """Seconds between two states of a progress bar: fewer in a log than on a terminal."""
    return 0.5 if sys.stderr.isatty() else 30.0


def _run_in_processes(
    jobs: Sequence[tuple[Run, list[str]]], folder: Path, launcher: str
) -> Iterator[str]:
    """Execute runs one after another, each in a new process."""
    own = with_folders(own_folders())
    for run, overrides in jobs:
        place = override("hydra.run.dir", folder / run.name)
        if subprocess.run([sys.executable, "-m", "crt_exp", *overrides, *own, place]).returncode:
            yield run.name


# ---- from records to rows


def rows_of_runs(
    runs: Sequence[Run], folder: Path, sweep: str, columns: Sequence[str], metrics: Sequence[str]
) -> pd.DataFrame:
    """Return one row for each metric of each record of finished runs.

    A list in a record gives one row per value. columns: columns from the run or the record. Validation records are used
    only if `step` is a column.
    """
    rows = []
    for run in runs:
        rows += _rows_of_run(run, folder / run.name, sweep, columns, metrics)
    names = ["sweep", *columns, "sample", "metric", "value", *ORIGIN]
    return pd.DataFrame(rows, columns=names).fillna("")


def _rows_of_run(
    run: Run, directory: Path, sweep: str, columns: Sequence[str], metrics: Sequence[str]
) -> Iterator[dict[str, Any]]:
    records = read_records(directory / "metrics.jsonl")
    diverged = (directory / DIVERGED).is_file()
    if diverged:
        records = [{"split": "test", "diverged": 1, "final": True}]
    if not records or not records[-1].get("final"):
        return
    if PARTIAL in records[-1]:
        raise ConfigError(
            f"{directory}: incomplete evaluation (trainer.evaluate); delete the directory and run again"
        )
    made, written = (
        json_object(directory / "versions.json"),
        directory / (DIVERGED if diverged else "metrics.jsonl"),
    )
    origin = {
        "seconds": records[-1].get("time_s", ""),
        "commit": (made["commit"] or "")[:12],
        "date": str(date.fromtimestamp(written.stat().st_mtime)),
        "versions": f"torch {made['packages']['torch']}, numpy {made['packages']['numpy']}; {made['machine']}",
    }
    speed = _steps_per_second(records)
    for record in records:
        if (
            record.get("split") == "train"
            or record.get("split") in VALIDATION
            and "step" not in columns
        ):
            continue
        given = {"sample": run.columns.get("seed", ""), "method": "", **run.columns, **record}
        if record.get("final") and speed:
            given["steps_per_s"] = speed
        for key, value in given.items():
            part, many = PART.fullmatch(key), isinstance(value, list)
            metric, sample = (part[1], int(part[2])) if part else (key, given["sample"])
            for i, each in enumerate(value if many else [value]):
                if metric not in metrics or each is None:
                    continue
                along = {
                    name: given[name][i] if many and len(given[name]) == len(value) else ""
                    for name in columns
                    if isinstance(given.get(name), list)
                }
                place = {name: given.get(name, "") for name in columns} | along
                if part and "split" in columns:
                    place["split"] = "parts"
                numbered = many and not any(at != "" for at in along.values())
                own = (
                    given["sample"][i]
                    if isinstance(given["sample"], list)
                    else i
                    if numbered
                    else sample
                )
                yield {
                    "sweep": sweep,
                    **place,
                    "sample": own,
                    "metric": metric,
                    "value": each,
                    **origin,
                }
                origin = origin | {"seconds": ""}


def _steps_per_second(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the median over the intervals between training records."""
    train = [
        (record["step"], record["time_s"]) for record in records if record.get("split") == "train"
    ]
    rates = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in zip(train, train[1:]) if b[1] > a[1]]
    return median(rates) if rates else None
