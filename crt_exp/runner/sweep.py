"""The result table at the end of a sweep."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback

from crt_exp.config import ConfigError, json_object
from crt_exp.runner.run import PARTIAL, read_records

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

_started: list[tuple[Path, float]] = []


def direction(task: Any) -> str:
    """Return "minimize" or "maximize" (optuna's terms) for the metric of a task."""
    return "minimize" if getattr(task, "lower_is_better", False) else "maximize"


def check_direction(task_class: type, asked: Any) -> None:
    """Raise ConfigError if hydra.sweeper.direction (`asked`) is the wrong one."""
    asked, needed = str(getattr(asked, "name", asked)), direction(task_class)
    if asked in ("minimize", "maximize") and asked != needed:
        raise ConfigError(
            f"hydra.sweeper.direction={asked}: expected {needed} for the metric of the task"
        )


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
    for path in directory.glob("**/versions.json"):  # older files belong to earlier sweeps
        records = (
            read_records(path.with_name("metrics.jsonl")) if path.stat().st_mtime >= began else []
        )
        if records and records[-1].get("final"):
            last = records[-1]
            settings = (
                override.lstrip("+~").partition("=") for override in json_object(path)["overrides"]
            )
            rows.append(
                {
                    "run": str(path.parent.relative_to(directory)),
                    **{key: text for key, _, text in settings},
                    "value": last[last["metric"]],
                    **{key: last[key] for key in RECORD if key in last},
                }
            )
    runs = DataFrame(sorted(rows, key=lambda row: (len(row["run"]), row["run"])))
    keys = [key for key in runs if key not in ("run", *RECORD)]
    runs[keys] = runs[keys].fillna("")
    constant = [key for key in keys if runs[key].nunique() == 1]
    return runs[[key for key in ("run", *keys, *RECORD) if key in runs and key not in constant]]


def table(runs: "DataFrame") -> str:
    """Format one line per setting: mean and 95% interval over seeds, best first.

    Settings are grouped by data set.
    """
    from crt_exp.times import interval

    keys, rows = [key for key in runs if key not in ("run", "seed", *RECORD)], []
    for place, group in runs.groupby(["metric", *keys], sort=False):
        pool = interval(group["value"].astype(float), "mean")
        text = f"{pool['mean']:.4f}" + (f" +- {pool['mean_ci95']:.4f}" if len(group) > 1 else "")
        rank = pool["mean"] if group["direction"].iloc[0] == "minimize" else -pool["mean"]
        data = tuple(
            value for key, value in zip(["metric", *keys], place) if key in ("metric", *DATA)
        )
        rows.append((data, rank != rank, rank, [*place[1:], len(group), place[0], text]))
    cells = [list(map(str, row[-1])) for row in sorted(rows, key=lambda row: row[:3])]
    more = [f"  ... and {len(cells) - SHOWN} more in sweep.csv"] if len(cells) > SHOWN else []
    partial = (
        ["trainer.evaluate: these results are on a part of the evaluation data"]
        if PARTIAL in runs
        else []
    )
    return "\n".join(
        [
            f"sweep of {len(runs)} runs, mean over seeds with its 95% interval, the best of each data set "
            "first:",
            *aligned([[*keys, "runs", "metric", "value"], *cells[:SHOWN]]),
            *more,
            *partial,
        ]
    )


def aligned(rows: list[list[str]]) -> list[str]:
    """Format rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
        for row in rows
    ]
