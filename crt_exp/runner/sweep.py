"""The table that a sweep ends with."""

import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback

from crt_exp.config import ConfigError
from crt_exp.runner.run import PARTIAL, SWEEP, read_records
from crt_exp.stored import json_object

if TYPE_CHECKING:
    from pandas import DataFrame

SHOWN = 20  # rows of the table on the terminal; sweep.csv has one for each run
DATA = ["task", "task.dataset", "task.corpus", "task.csv", "task.text", "task.data_dir", "task.hub.name",
        "task.environment"]  # settings are compared where these are the same
RECORD = ["metric", "value", "direction", "step", "time_s", PARTIAL]  # columns of the final record

_started: list[Path] = []


def direction(task: Any) -> str:
    """Whether the metric of a task, or of a class of tasks, is to be minimized or maximized (optuna's words)."""
    return "minimize" if getattr(task, "lower_is_better", False) else "maximize"


def check_direction(task_class: type, metric: str | None, asked: Any) -> None:
    """Raises ConfigError where `asked`, a sweeper's hydra.sweeper.direction, looks for the worst value."""
    asked, needed = str(getattr(asked, "name", asked)), direction(task_class)
    if asked in ("minimize", "maximize") and asked != needed:
        raise ConfigError(f"hydra.sweeper.direction={asked}: expected {needed} for the metric of this task ({metric})")


class Begun(Callback):
    """Hydra calls it when a sweep begins: the sweep gets a name, which its runs note."""

    def on_multirun_start(self, config, **kwargs) -> None:
        _started.append(Path(str(config.hydra.sweep.dir)))
        os.environ[SWEEP] = f"{_started[-1].name}/{uuid.uuid4().hex}"


def show() -> None:
    """Prints the table of the sweep that this process ran, if it ran one, and writes its sweep.csv."""
    while _started:
        directory = _started.pop()
        runs = finished_runs(directory, os.environ.pop(SWEEP))
        if len(runs) > 1:
            runs.to_csv(directory / "sweep.csv", index=False)
            print(f"{table(runs)}\n[{directory}; one line a run in sweep.csv]")


def finished_runs(directory: Path, sweep: str) -> "DataFrame":
    """The finished runs of a sweep: name, the overrides that are not the same in all, and the final record."""
    from pandas import DataFrame

    rows = []
    for path in directory.glob("**/versions.json"):  # those of earlier sweeps too
        versions, records = json_object(path), read_records(path.with_name("metrics.jsonl"))
        if versions.get("sweep") == sweep and records and records[-1].get("final"):
            last = records[-1]
            settings = (override.lstrip("+~").partition("=") for override in versions["overrides"])
            rows.append({"run": str(path.parent.relative_to(directory)), **{key: text for key, _, text in settings},
                         "value": last[last["metric"]],
                         **{key: last[key] for key in RECORD if key in last}})
    if not rows:
        return DataFrame()
    runs = DataFrame(sorted(rows, key=lambda row: (len(row["run"]), row["run"])))
    keys = [key for key in runs if key not in ("run", *RECORD)]
    runs[keys] = runs[keys].fillna("")
    return runs[["run", *(key for key in keys if runs[key].nunique() > 1), *(key for key in RECORD if key in runs)]]


def table(runs: "DataFrame") -> str:
    """One line a setting, the best of each data set first, with mean and interval over its seeds; then these best."""
    keys = [key for key in runs if key not in ("run", "seed", *RECORD)]
    settings, metrics = by_setting(runs, keys), [*runs["metric"].unique()]
    header = [*keys, "seeds" if "seed" in runs else "runs", *(metrics if len(metrics) == 1 else ["metric", "value"])]
    columns = [*keys, "runs", *(["metric"] if len(metrics) > 1 else []), "text"]
    title = [f"sweep of {len(runs)} runs", *([f"{metrics[0]} is to be {runs['direction'][0]}d"] * (len(metrics) == 1)),
             *(["mean over seeds with its 95% interval"] if len(settings) < len(runs) else [])]
    lines = [", ".join(title) + ":", *aligned([header, *settings[columns].astype(str).values.tolist()[:SHOWN]])]
    if len(settings) > SHOWN:
        lines.append(f"  ... and {len(settings) - SHOWN} more")
    if PARTIAL in runs:
        lines.append("trainer.evaluate: these results are on a part of the evaluation data")
    for _, compared in settings.groupby("set"):
        best = compared.iloc[0]
        given = {key: f"{key}={best[key]}" for key in keys if best[key]}
        data = "".join(f" of {given.pop(key)}" for key in DATA if key in given)
        if len(compared) > 1 and best["rank"] == best["rank"]:  # a choice, and a number
            lines.append(f"best{data}: {' '.join(given.values())}, {best['metric']} {best['text']}")
    return "\n".join(lines)


def by_setting(runs: "DataFrame", keys: list[str]) -> "DataFrame":
    """Runs that differ in their seed alone as one row; `set` numbers data sets, in each the best comes first."""
    from pandas import DataFrame

    from crt_exp.tasks.metrics import interval

    rows = []
    for _, group in runs.groupby(["metric", *keys], sort=False):
        first, pool = group.iloc[0], interval(group["value"].astype(float), "mean")
        text = f"{pool['mean']:.4f}" + (f" +- {pool['mean_ci95']:.4f}" if len(group) > 1 else "")
        rank = pool["mean"] if first["direction"] == "minimize" else -pool["mean"]
        rows.append({**first[["metric", *keys]], "runs": len(group), "text": text, "rank": rank})
    settings = DataFrame(rows)
    settings["set"] = settings.groupby(["metric", *(key for key in keys if key in DATA)], sort=False).ngroup()
    return settings.sort_values(["set", "rank"], kind="stable")


def aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
