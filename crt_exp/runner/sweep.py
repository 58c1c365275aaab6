"""Sweeps: the presets of Hydra's launchers and sweepers, and the table that a sweep ends with."""

import csv
import importlib.util
import io
import itertools
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hydra.experimental.callback import Callback

from crt_exp.config import CONF, ConfigError
from crt_exp.runner.run import SWEEP
from crt_exp.stored import json_object, read_json

PLUGINS = {"joblib": "hydra_joblib_launcher", "submitit_local": "hydra_submitit_launcher",
           "submitit_slurm": "hydra_submitit_launcher", "slurm": "hydra_submitit_launcher",  # conf/hydra/launcher/slurm
           "optuna": "hydra_optuna_sweeper"}
SHOWN = 20  # rows of the table on the terminal; sweep.csv has them all
DATA = {"task", "task.dataset", "task.corpus", "task.csv", "task.text", "task.data_dir", "task.hub.name",
        "task.environment"}  # what a run is measured on: one is no better than another
DIRECTIONS = ("minimize", "maximize")  # in optuna's words

# ---- plugins ---------------------------------------------------------------------------------------------------------


def adjust_plugins() -> None:
    """Puts conf/sweeps.yaml over the plugins' own values:
    Hydra allows no file with the name of a plugin's configuration."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins
    from omegaconf import OmegaConf

    Plugins.instance()  # imports the plugins, which register themselves
    store = ConfigStore.instance()
    for group, presets in OmegaConf.load(CONF / "sweeps.yaml").items():
        for name in set(presets) & {path.removesuffix(".yaml") for path in store.list(group)}:
            own = store.load(f"{group}/{name}.yaml")
            store.store(name, OmegaConf.merge(own.node, presets[name]), group=group, provider=own.provider)


def check_plugin(group: str, value: str) -> None:
    """Raises ConfigError for a launcher or sweeper whose package is not installed."""
    if value not in PLUGINS:
        return
    try:
        spec = importlib.util.find_spec(f"hydra_plugins.{PLUGINS[value]}")
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise ConfigError(f"{group}={value} needs {PLUGINS[value].replace('_', '-')}: pip install 'crt_exp[sweep]'")


def direction(task) -> str:
    """Whether the metric of a task (or of a class of tasks) is to be minimized or maximized."""
    return DIRECTIONS[not getattr(task, "lower_is_better", False)]


def check_direction(task_class: type, metric: str | None, asked) -> None:
    """Raises ConfigError where a sweeper looks for the worst value;
    `asked`: its hydra.sweeper.direction, if it has one."""
    asked, needed = str(getattr(asked, "name", asked)), direction(task_class)
    if asked in DIRECTIONS and asked != needed:
        of = f" ({metric})" if isinstance(metric, str) else ""
        raise ConfigError(f"the metric of this task{of} is to be {needed}d: add hydra.sweeper.direction={needed}")


# ---- the table -------------------------------------------------------------------------------------------------------

_started: list[Path] = []


class Begun(Callback):
    """Hydra calls it when a sweep begins; it keeps the directory for `show`, and gives the sweep a name
    that its runs note."""

    def on_multirun_start(self, config, **kwargs) -> None:
        _started.append(Path(str(config.hydra.sweep.dir)))
        os.environ[SWEEP] = f"{_started[-1].name}/{uuid.uuid4().hex}"


@dataclass(frozen=True)
class Done:
    """One finished run of a sweep: the overrides by key, and its final record."""

    name: str
    settings: dict[str, str]
    record: dict

    @property
    def metric(self) -> str:
        return self.record["metric"]

    @property
    def value(self) -> float | None:
        return self.record[self.metric]

    @property
    def rank(self) -> tuple[bool, float]:
        """The smallest is the best; what is not a number comes last."""
        return (self.value is None, 0.0 if self.value is None else self.value * sign(self.record))


def sign(record: dict) -> int:
    return 1 if record["direction"] == "minimize" else -1


def show() -> None:
    """Prints the table of the sweep that this process ran, if it ran one, and writes its sweep.csv."""
    while _started:
        directory = _started.pop()
        runs = finished_runs(directory, os.environ.pop(SWEEP))
        if len(runs) > 1:
            write_csv(directory / "sweep.csv", runs)
            draw(runs, directory / "sweep.png")
            print(table(runs) + f"\n[{directory}; one line a run in sweep.csv, a picture in sweep.png]")


def finished_runs(directory: Path, sweep: str) -> list[Done]:
    """The finished runs of a sweep, in the order of their numbers;
    below its directory runs of earlier sweeps may lie too."""
    runs = []
    for path in directory.glob("**/versions.json"):
        versions = json_object(path)
        if versions.get("sweep") != sweep:
            continue
        metrics = path.with_name("metrics.jsonl")
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        record = read_json(lines[-1], metrics, len(lines)) if lines and lines[-1].endswith("}") else {}
        if record.get("final"):
            overrides = (o.partition("=") for o in versions.get("overrides", []))
            settings = {key.lstrip("+~"): value for key, _, value in overrides}
            runs.append(Done(str(path.parent.relative_to(directory)), settings, record))
    return sorted(runs, key=lambda run: (len(run.name), run.name))


def varied(finished: list[Done]) -> list[str]:
    """The keys that are not the same in all runs."""
    keys = dict.fromkeys(key for run in finished for key in run.settings)
    return [key for key in keys if len({run.settings.get(key) for run in finished}) > 1]


def write_csv(path: Path, finished: list[Done]) -> None:
    from crt_exp.runner.run import write_atomic

    keys, text = varied(finished), io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", *keys, "metric", "value", "step", "time_s"])
    for run in finished:
        writer.writerow([run.name, *(run.settings.get(key, "") for key in keys), run.metric, run.value,
                         run.record.get("step"), run.record.get("time_s")])
    write_atomic(path, text.getvalue())


def table(finished: list[Done]) -> str:
    """One line a setting, the best of each data set first, with mean and interval over its seeds; then these best."""
    from crt_exp.runner.run import PARTIAL

    keys = [key for key in varied(finished) if key != "seed"]
    rows = ordered(finished)
    several = len({run.metric for run in finished}) > 1
    lines = [[*(runs[0].settings.get(key, "") for key in keys), str(len(runs)), *[runs[0].metric] * several,
              pooled(runs)[1]] for runs in rows]
    header = [*keys, "seeds" if "seed" in varied(finished) else "runs",
              *(["metric", "value"] if several else [finished[0].metric])]
    record = finished[0].record
    parts = [f"sweep of {len(finished)} runs"
             + ("" if several else f", {record['metric']} is to be {record['direction']}d")
             + (", mean over seeds with its 95% interval" if any(len(runs) > 1 for runs in rows) else "") + ":",
             *aligned([header, *lines[:SHOWN]])]
    if len(lines) > SHOWN:
        parts.append(f"  ... and {len(lines) - SHOWN} more")
    if any(PARTIAL in run.record for run in finished):
        parts.append("trainer.evaluate: these results are on a part of the evaluation data")
    return "\n".join([*parts, *best(rows, keys)])


def ordered(finished: list[Done]) -> list[list[Done]]:
    """The runs of each setting: data set by data set in the order of the runs, and of each the best first."""
    settings = [*by_setting(finished).values()]
    groups = [*dict.fromkeys(map(data_of, settings))]
    return sorted(settings, key=lambda runs: (groups.index(data_of(runs)), pooled(runs)[0]))


def data_of(runs: list[Done]) -> tuple:
    """The metric and the data set that settings must share to be compared."""
    return runs[0].metric, *((key, value) for key, value in runs[0].settings.items() if key in DATA)


def best(rows: list[list[Done]], keys: list[str]) -> Iterator[str]:
    """Of the ordered settings the first of each data set, where that is a choice."""
    compared = [[*group] for _, group in itertools.groupby(rows, data_of)]
    for group in compared:
        rank, value = pooled(group[0])
        given = {key: f"{key}={value}" for key, value in group[0][0].settings.items() if key in keys}
        on = "".join(f" of {text}" for key, text in given.items() if key in DATA)
        if len(group) > 1 and not rank[0]:
            chosen = " ".join(text for key, text in given.items() if key not in DATA)
            yield f"best{on}: {chosen}, {group[0][0].metric} {value}"


def draw(finished: list[Done], path: Path) -> None:
    """Each setting's metric, a point a run and the mean over seeds; the first SHOWN, where all have one metric."""
    from crt_exp.drawing import new_figure, save_figure

    rows = [runs for runs in ordered(finished) if all(run.value is not None for run in runs)][:SHOWN]
    if not rows or len({run.metric for run in finished}) > 1:
        return
    keys = [key for key in varied(finished) if key != "seed"]
    drawn, axes = new_figure(figsize=(7, 0.8 + 0.3 * len(rows)))
    for place, runs in enumerate(rows):
        values = [run.value for run in runs]
        axes.plot(values, [place] * len(values), "o", ms=4, color="#999999")
        axes.plot(sum(values) / len(values), place, "|", ms=14, mew=2, color="#0072B2")
    names = [" ".join(f"{key.rpartition('.')[2]}={runs[0].settings.get(key, '')}" for key in keys) for runs in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set(title=f"{finished[0].metric}, to be {finished[0].record['direction']}d; grey: runs, blue: mean over seeds")
    save_figure(drawn, path)


def by_setting(finished: list[Done]) -> dict[tuple, list[Done]]:
    """Runs that differ in their seed alone are one setting."""
    keys = [key for key in varied(finished) if key != "seed"]
    settings: dict[tuple, list[Done]] = {}
    for run in finished:
        settings.setdefault((run.metric, *(run.settings.get(key, "") for key in keys)), []).append(run)
    return settings


def pooled(runs: list[Done]) -> tuple[tuple[bool, float], str]:
    """The rank of a setting among others, and its value as text."""
    values = [run.value for run in runs]
    if None in values:
        return (True, 0.0), "not a number"
    if len(values) == 1:
        return runs[0].rank, f"{values[0]:.4f}"
    from crt_exp.tasks.metrics import interval

    pool = interval(values, "mean")
    return (False, pool["mean"] * sign(runs[0].record)), f"{pool['mean']:.4f} +- {pool['mean_ci95']:.4f}"


def aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
