"""The result table of a sweep, and its picture."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from crt_exp.experiments.intervals import OVER, recorded_interval, student_interval
from crt_exp.experiments.runner.run import (
    METRICS,
    PARTIAL,
    VERSIONS,
    is_finished,
    read_records,
    saved_overrides,
)

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
PROJECTIONS, COLUMNS = "features.m", "M"  # columns of the table: projections, columns of features
RECORD = [
    "metric",
    "value",
    "low",
    "high",
    "over",
    "direction",
    "step",
    "time_s",
    PARTIAL,
]  # columns from the final record

RANK = "rank"  # column of a setting's place in the table
INTERVAL = "95% CI"


def finished_runs(directory: Path, began: float = 0.0) -> "DataFrame":
    """Return finished runs: name, varied overrides and final record.

    began: start time of the sweep; earlier runs are left out.
    """
    from pandas import DataFrame

    rows = []
    for path in directory.glob(f"**/{VERSIONS}"):
        if path.stat().st_mtime < began:  # of an earlier sweep
            continue
        records = read_records(path.with_name(METRICS))
        if is_finished(records):
            rows.append(final_row(path.parent, directory, records[-1]))
    runs = DataFrame(sorted(rows, key=lambda row: (len(row["run"]), row["run"])))
    keys = [key for key in runs if key not in ("run", COLUMNS, *RECORD)]
    if COLUMNS in runs:
        place = len(keys)
        if PROJECTIONS in keys:
            place = keys.index(PROJECTIONS) + 1
        keys.insert(place, COLUMNS)
    runs[keys] = runs[keys].fillna("")
    constant = [key for key in keys if runs[key].nunique() == 1]
    return runs[[key for key in ("run", *keys, *RECORD) if key in runs and key not in constant]]


def final_row(run: Path, directory: Path, last: dict[str, Any]) -> dict[str, Any]:
    """Return name, overrides and final record of a run."""
    row = {"run": str(run.relative_to(directory)), **saved_overrides(run)}
    row["value"] = last[last["metric"]]
    for key in RECORD:
        if key in last:
            row[key] = last[key]
    if COLUMNS in last:
        row[COLUMNS] = str(last[COLUMNS])
    if OVER in last:
        row["low"], row["high"] = recorded_interval(last, last["metric"])
        row["over"] = last[OVER]
    return row


def settings_of(runs: "DataFrame") -> "DataFrame":
    """Return one row per setting: its keys, runs, metric, value, low, high and over.

    The value is the mean over seeds, the interval that over seeds. A setting with one run has the run's own interval.
    The best setting of each data set comes first.
    """
    from pandas import DataFrame

    keys = [key for key in runs if key not in ("run", "seed", *RECORD)]
    settings = []
    for (metric, *values), group in runs.groupby(["metric", *keys], sort=False):
        scores = group["value"].astype(float)
        mean = float(scores.mean(skipna=False))
        only = group.iloc[0]
        if len(group) > 1:
            low, high = student_interval(scores, metric)
            over = f"{len(group)} seeds"
        else:
            low, high, over = only.get("low"), only.get("high"), only.get("over")
        rank = mean if only["direction"] == "minimize" else -mean
        ends = {"low": low, "high": high, "over": over, "direction": only["direction"]}
        setting = dict(zip(keys, values)) | {"runs": len(group), "metric": metric, "value": mean}
        settings.append(setting | ends | {RANK: rank})
    data = [key for key in keys if key in DATA]
    ranked = DataFrame(settings).sort_values(["metric", *data, RANK]).drop(columns=RANK)
    return ranked.reset_index(drop=True)


def table(runs: "DataFrame", settings: "DataFrame") -> str:
    """Format one line per setting: mean, 95% interval and what the interval is over."""
    from pandas import isna

    shown = settings.head(SHOWN).copy()
    intervals = []
    for low, high in zip(shown.pop("low"), shown.pop("high")):
        intervals.append("" if isna(low) or isna(high) else f"{low:.4f} to {high:.4f}")
    over = shown.pop("over")
    shown.pop("direction")
    shown["value"] = shown["value"].map("{:.4f}".format)
    if any(intervals):
        shown[INTERVAL] = intervals
        shown["interval over"] = over.fillna("")
    lines = [
        f"sweep of {len(runs)} runs, mean over seeds, the best of each data set first:",
        shown.to_string(index=False),
    ]
    if len(settings) > SHOWN:
        lines.append(f"  ... and {len(settings) - SHOWN} more in sweep.csv")
    if PARTIAL in runs:
        lines.append("trainer.evaluate: these results are on a part of the evaluation data")
    return "\n".join(lines)


# ---- the picture


def swept_number(settings: "DataFrame") -> str | None:
    """Return the key with numbers as values that is the horizontal axis: features.m, or the first."""
    from pandas import to_numeric

    numeric = []
    for key in settings.columns[: settings.columns.get_loc("runs")]:
        values = settings[key][settings[key] != ""]
        numbers = to_numeric(values, errors="coerce")
        if key != COLUMNS and numbers.notna().all() and numbers.nunique() > 1:
            numeric.append(key)
    if PROJECTIONS in numeric:
        return PROJECTIONS
    return next(iter(numeric), None)


def draw(settings: "DataFrame", path: Path) -> bool:
    """Save the metric against the number that was varied; return whether there is one.

    One panel for each metric and data set, and one line for each combination of other keys. A setting without the
    number, such as exact attention, is a dashed line. Bars are 95% intervals.
    """
    key = swept_number(settings)
    if key is None:
        return False
    import matplotlib.pyplot as plt

    from crt_exp.experiments.drawing import new_figure, save_figure

    keys = settings.columns[: settings.columns.get_loc("runs")]
    panel_keys = ["metric", *[name for name in keys if name in DATA]]
    line_keys = [name for name in keys if name not in (key, COLUMNS, *panel_keys)]
    panels = [*settings.groupby(panel_keys, sort=False)]
    figure, axes = new_figure(
        1, len(panels), figsize=(5.2 * len(panels), 3.9), squeeze=False, layout="constrained"
    )
    for ax, ((metric, *data), panel) in zip(axes.flat, panels):
        lines = [((), panel)]
        if line_keys:
            lines = [*panel.groupby(line_keys, sort=False)]
        for values, line in lines:
            draw_line(ax, line, key, " ".join(filter(None, map(str, values))))
        better = "lower" if panel["direction"].iloc[0] == "minimize" else "higher"
        ax.set(xlabel=key, ylabel=f"{metric} ({better} is better)", title=" ".join(data))
        if line_keys:
            ax.legend(fontsize=8)
    save_figure(figure, path)
    plt.close(figure)
    return True


def draw_line(ax: Any, line: "DataFrame", key: str, label: str) -> None:
    """Draw one combination of keys, with its 95% intervals."""
    from pandas import to_numeric

    from crt_exp.experiments.drawing import colour

    line = line.assign(place=to_numeric(line[key], errors="coerce")).sort_values("place")
    place, value, low, high = line[["place", "value", "low", "high"]].to_numpy(float).T
    style = {"color": colour(label), "label": label, "lw": 1.5}
    if np.isnan(place).all():
        ax.axhline(value[0], ls="--", **style)
        return
    if place[0] > 0:
        ax.set_xscale("log")
    ax.errorbar(place, value, [value - low, high - value], marker="o", ms=3.5, **style)
