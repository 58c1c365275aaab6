"""Training runs on a grid of settings, arms and seeds: curves on validation, the end on test, what a step costs.

Arms of one seed read the same rows in the same order and start from the same weights; that seed also draws their noise.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby, product
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from crt_exp.runner.run import as_committed_with
from crt_exp.studies import runs, texts
from crt_exp.studies.cells import PAGES, Cells, Draw, Key, committed
from crt_exp.times import added

HOME = Path("outputs/runs")
TIMED, WARM = 8, 2  # steps of the run that is timed, and those before
BEGIN = "exact models"  # the setting of runs that moved arms start from
FINAL = ("step", "epoch", "split", "time_s", "final")
VALIDATION = ("validation", "val")  # splits of the records that make curves


@dataclass(frozen=True)
class Grid:
    """What a page's file says under `sizes`. common: options of all runs, or lists of them. settings: options of each.
    arms: options of each attention. moved: arms that start from the weights of the run of `start` with their seed,
    which is then `offset` more, so that they do not read the rows in the same order; then: their options in a
    setting. begin: name -> options of one run in whose weights all moved arms start, in the place of that of
    `start`. only: the arms of a setting that does not have all. seeds_of: of arms that have another number of them,
    in all settings or in those that are named. metrics: of the records on validation, those that are kept; tested:
    of the one on test (default: all). baselines: prefix -> name: what the test record holds under keys with this
    prefix, as draws of an arm, for what needs no model; apart: suffix -> name: its metrics with this suffix are
    draws of a setting of their own. gated: the arms that are trained first, in every setting; the others only where
    `start` is better than each of them by `least` on the first metric (`higher`: more is better). before: {common,
    stages, count, own, by}, the models that all arms start from: a stage goes on from the run of the one before, the
    option `by` takes the last; seeds go round through `count` of them; with `own` they have the attention of the
    arm, and not what their options name."""

    settings: Mapping[str, Sequence[str]]
    arms: Mapping[str, Sequence[str]]
    metrics: Sequence[str]
    common: Sequence[str] = ()
    moved: Mapping[str, Sequence[str]] = field(default_factory=dict)
    then: Mapping[str, Sequence[str]] = field(default_factory=dict)
    offset: int = 0
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    start: str = "exact"
    gated: Sequence[str] = ()
    least: float = 0.0
    higher: bool = True
    cost: bool = True
    tested: Sequence[str] = ()
    baselines: Mapping[str, str] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)
    begin: Mapping[str, Sequence[str]] = field(default_factory=dict)
    seeds: int = 3
    seeds_of: Mapping[str, int | Mapping[str, int]] = field(default_factory=dict)
    workers: int | None = None
    before: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "common", runs.flat(self.common))
        object.__setattr__(self, "before", {**self.before, "common": runs.flat(self.before.get("common", []))})

    def count(self, arm: str, setting: str | None = None) -> int:
        """Of its seeds: in a setting, or the most of them."""
        given = self.seeds_of.get(arm, self.seeds)
        if isinstance(given, int):
            return given
        return given.get(setting, self.seeds) if setting else max(self.seeds, *given.values())

    def stages(self, arm: str, seed: int, home: runs.Home) -> list[list[str]]:
        """The command lines of the model that a run starts from, the last of them its own; none without `before`."""
        own, lines = self.arms[arm] if self.before.get("own") else [], []
        for stage in self.before.get("stages", []):
            begun = [f"task.init={home.place(lines[-1])}"] if lines else []
            lines.append([*self.before["common"], *stage, *own, *begun, f"seed={seed % self.before.get('count', 1)}"])
        return lines

    def names(self, setting: str) -> list[str]:
        """The arms of a setting, those that go on from others last."""
        every = [*self.arms, *self.moved]
        return [arm for arm in every if arm in self.only.get(setting, every)]

    def options(self, setting: str, arm: str, seed: int, home: runs.Home) -> list[str]:
        """The command line of a run."""
        if arm not in self.moved:
            stages = self.stages(arm, seed, home)
            start = [f"{self.before['by']}={home.place(stages[-1])}"] if stages else []
            return [*self.common, *self.settings[setting], *self.arms[arm], *start, f"seed={seed}"]
        if self.begin:
            begun = home.place(self.beginning(home)["overrides"])
            return [*self.common, *self.settings[setting], *self.moved[arm], f"seed={seed}", f"task.init={begun}"]
        begun = home.place(self.options(setting, self.start, seed, home))
        last = [*self.then.get(setting, ()), *self.moved[arm]]
        own = {option.split("=")[0] for option in last}
        rest = [option for option in (*self.common, *self.settings[setting])  # it keeps the sizes of its start
                if option.split("=")[0] not in own and not option.startswith(("+task.sizes.", "task.preset="))]
        return [*rest, *last, f"seed={self.offset + seed}", f"task.init={begun}"]

    def beginning(self, home: runs.Home) -> Key:
        """The run in whose weights moved arms start, where there is one for all of them."""
        options = [*self.common, *next(iter(self.begin.values())), "seed=0"]
        return {"overrides": options, "sources": list(home.sources), "kept": True}

    def is_start(self, arm: str) -> bool:
        """Whether moved arms start from its runs."""
        return arm == self.start and bool(self.moved) and not self.begin

    def key(self, setting: str, arm: str, seed: int, home: runs.Home) -> Key:
        kept = {"kept": True} if self.is_start(arm) else {}
        return {"overrides": self.options(setting, arm, seed, home), "sources": list(home.sources), **kept}

    def step_key(self, setting: str, arm: str, home: runs.Home) -> Key:
        """Of what a step costs."""
        return {"step": [*self.common, *self.settings[setting], *self.arms[arm], "seed=0"],
                "sources": list(home.sources)}


def begun(given: Mapping[str, Any], cells: Cells, sources: Sequence[str], label: str, workers: int | None = None
          ) -> dict[str, list[str]]:
    """Trains all `starts` of a page, stage by stage: name -> the folder of each of its last runs, by seed. What is
    there is not trained again, and a run whose folder is gone is, though its cell is kept."""
    starts = {name: runs.Start.read(name, each) for name, each in given.items()}
    homes = {name: start.home(HOME, sources) for name, start in starts.items()}
    lines = {(name, seed): start.lines(seed, homes[name]) for name, start in starts.items()
             for seed in range(start.count)}
    for number in range(max(map(len, lines.values()), default=0)):
        made = {homes[name].place(each[number]): {"overrides": each[number], "sources": [*homes[name].sources],
                                                  "kept": True}
                for (name, _), each in lines.items() if number < len(each)}
        cells.fill([*made.values()], train, f"{label}: starts, stage {number + 1}", workers)
        for place, key in made.items():
            if not place.is_dir():
                train(**key)
    return {name: [str(homes[name].place(lines[name, seed][-1])) for seed in range(start.count)]
            for name, start in starts.items()}


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """The draws of a grid, or of all `grids`: tables "validation" (x: step), "test" and "step" (steps_per_s, mib; of
    seed 0). A run that all moved arms start from is the only arm of the setting BEGIN. keep: what stands among the
    committed draws and is asked for by the same options is not trained again, so that a page gets more seeds in the
    time of these; of pages of one grid."""
    home, cells = runs.Home(HOME, tuple(sources)), Cells(name, sources, keep)
    if keep and "grids" not in size:  # two of them could share a setting
        restore(Grid(**size), grids_before(name), home, cells, committed(name))
    for each in size.get("grids", [size]):
        yield from measured(Grid(**each), home, cells, name)


def grids_before(name: str) -> list[Grid]:
    """Those of the page's file as it was when its draws were committed."""
    text = as_committed_with(f"conf/report/{name}.yaml", f"{PAGES}/{name}.csv*")
    known = {each.name for each in fields(Grid)}
    return [Grid(**{key: value for key, value in size.items() if key in known})
            for size in ((yaml.safe_load(text) or {}).get("sizes", {}) if text else {}).values()
            if {"settings", "arms", "metrics"} <= {*size}]


def restore(grid: Grid, before: Sequence[Grid], home: runs.Home, cells: Cells, rows: Sequence[dict[str, str]]) -> None:
    """The cells of runs and of their steps from the draws of grids that asked for them by the same options, but of runs
    in whose weights others start."""
    drawn: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        table = "step" if row["table"] == "step" else ""
        drawn.setdefault((row["setting"], row["arm"], row["unit"], table), []).append(row)
    for setting, arm in product(grid.settings, grid.arms):
        if not any(setting in old.settings and arm in old.arms and
                   old.options(setting, arm, 0, home) == grid.options(setting, arm, 0, home) for old in before):
            continue
        timed = drawn.get((setting, arm, "0", "step"))
        if timed:
            cells.restore(grid.step_key(setting, arm, home), numbers(timed), timed)
        for seed in range(0 if grid.is_start(arm) else grid.count(arm, setting)):
            own = drawn.get((setting, arm, str(seed), ""))
            if own:
                value, commits = value_of(grid, drawn, setting, arm, seed)
                if len(commits) == 1:  # a cell has one
                    cells.restore(grid.key(setting, arm, seed, home), value, own)


def value_of(grid: Grid, drawn: Mapping[tuple[str, ...], Sequence[dict[str, str]]], setting: str, arm: str,
             seed: int) -> tuple[dict[str, Any], set[str]]:
    """What `train` returned, as far as `of_run` draws it, and the commits of these draws."""
    own = drawn[setting, arm, str(seed), ""]
    commits = {row["commit"] for row in own}
    if any(row["metric"] == "diverged" for row in own):
        return {"diverged": "as drawn"}, commits
    curve = [{"step": int(step), **numbers(at)} for step, at in
             groupby((row for row in own if row["table"] == "validation"), lambda row: row["x"])]
    sources = {"": (arm, str(seed))}
    if arm == grid.start and seed == 0:
        sources |= {prefix: (name, "") for prefix, name in grid.baselines.items()}
    last = {}
    for suffix, place in {"": setting, **{end: f"{setting}, {name}" for end, name in grid.apart.items()}}.items():
        for prefix, of in sources.items():
            tested = [row for row in drawn.get((place, *of, ""), ()) if row["table"] == "test"]
            last |= {f"{prefix}{metric}{suffix}": value for metric, value in numbers(tested).items()}
            commits |= {row["commit"] for row in tested}
    return {"curve": curve, "last": last}, commits


def numbers(rows: Iterable[dict[str, str]]) -> dict[str, float]:
    return {row["metric"]: float(row["value"]) for row in rows}


def measured(grid: Grid, home: runs.Home, cells: Cells, name: str) -> Iterator[Draw]:
    every = [*grid.arms, *grid.moved]
    first = [arm for arm in every if arm == grid.start or arm in grid.gated]
    yield from began(grid, home, cells, name)
    train_all(grid, home, cells, list(grid.settings), first, f"{name}: {', '.join(first)}")
    passed = [setting for setting in grid.settings if gate(grid, home, cells, setting)]
    train_all(grid, home, cells, passed, every, f"{name}: training")
    for setting in grid.settings:
        for arm in grid.names(setting):
            for seed in range(grid.count(arm, setting)):
                key = grid.key(setting, arm, seed, home)
                if setting in passed or key in cells:
                    yield from of_run(grid, cells, key, setting, arm, seed)
    if grid.cost:
        yield from costs(grid, home, cells, name)


def began(grid: Grid, home: runs.Home, cells: Cells, name: str) -> Iterator[Draw]:
    """Trains the run that all moved arms start from, where there is one; drawn once of all grids that share it."""
    if grid.begin:
        key = grid.beginning(home)
        if key not in cells:
            cells.fill([key], train, f"{name}: {next(iter(grid.begin))}", 1)
        if not cells.is_drawn(key):
            yield from of_run(grid, cells, key, BEGIN, next(iter(grid.begin)), 0)


def train_all(grid: Grid, home: runs.Home, cells: Cells, settings: Sequence[str], arms: Sequence[str],
              label: str) -> None:
    """Seed by seed, so that an interrupted measurement has whole seeds, and arms that others go on from first."""
    for stage in (grid.arms, grid.moved):
        part = [arm for arm in arms if arm in stage]
        most = max((grid.count(arm) for arm in part), default=0)
        keys = [grid.key(setting, arm, seed, home) for seed, setting, arm in product(range(most), settings, part)
                if seed < grid.count(arm, setting) and arm in grid.names(setting)]
        train_before(grid, home, cells, [(arm, seed) for arm in part for seed in range(grid.count(arm))], label)
        cells.fill(keys, train, label, grid.workers)


def train_before(grid: Grid, home: runs.Home, cells: Cells, arms: Sequence[tuple[str, int]], label: str) -> None:
    """The models that these arms and seeds start from, stage by stage; what is there is not trained again."""
    lines = [grid.stages(*each, home) for each in arms]
    for number in range(max(map(len, lines), default=0)):
        made = {home.place(each[number]): each[number] for each in lines}
        keys = [{"overrides": line, "sources": list(home.sources), "kept": True} for line in made.values()]
        cells.fill(keys, train, f"{label}, stage {number + 1}", grid.workers)
        for place, key in zip(made, keys):
            if not place.is_dir():  # a cell may be kept and its directory gone
                train(**key)


def gate(grid: Grid, home: runs.Home, cells: Cells, setting: str) -> bool:
    """Whether attention matters in this setting: `start` is better than all gated arms by `least`, on average."""
    if not grid.gated:
        return True
    metric, sign = grid.metrics[0], 1 if grid.higher else -1
    means = {}
    for arm in (grid.start, *grid.gated):
        ends = [cells[grid.key(setting, arm, seed, home)].get("last", {}).get(metric)
                for seed in range(grid.count(arm, setting))]
        ends = [end for end in ends if end is not None]
        means[arm] = sum(ends) / len(ends) if ends else float("nan")
    return all(sign * (means[grid.start] - means[arm]) >= grid.least for arm in grid.gated)


def of_run(grid: Grid, cells: Cells, key: Key, setting: str, arm: str, seed: int) -> Iterator[Draw]:
    result = cells[key]
    if "diverged" in result:
        yield cells.draw(key, setting, arm, "diverged", 1, seed, table="test")
        return
    at_once = [result["last"]] if result["last"].get("step") == 0 else []  # a run without steps is a curve's beginning
    for record in [*result["curve"], *at_once]:
        for metric in grid.metrics:
            if record.get(metric) is not None:
                yield cells.draw(key, setting, arm, metric, record[metric], seed, record["step"], "validation")
    for key_of, value in result["last"].items():
        place, metric = placed(grid, setting, key_of)
        if isinstance(value, (int, float)) and (metric in grid.tested if grid.tested else metric not in FINAL):
            yield cells.draw(key, place, arm, metric, value, seed, table="test")
    if arm == grid.start and seed == 0:
        yield from of_baselines(grid, cells, key, setting)


def of_baselines(grid: Grid, cells: Cells, key: Key, setting: str) -> Iterator[Draw]:
    for key_of, value in cells[key]["last"].items():
        for prefix, name in grid.baselines.items():
            if key_of.startswith(prefix):
                place, metric = placed(grid, setting, key_of.removeprefix(prefix))
                yield cells.draw(key, place, name, metric, value, table="test")


def placed(grid: Grid, setting: str, key: str) -> tuple[str, str]:
    """The setting and the metric of a key of the test record."""
    for suffix, name in grid.apart.items():
        if key.endswith(suffix):
            return f"{setting}, {name}", key.removesuffix(suffix)
    return setting, key


def costs(grid: Grid, home: runs.Home, cells: Cells, name: str) -> Iterator[Draw]:
    keys = {(setting, arm): grid.step_key(setting, arm, home) for setting, arm in product(grid.settings, grid.arms)}
    cells.fill([*keys.values()], cost, f"{name}: steps", apart=True)
    for (setting, arm), key in keys.items():
        for metric, value in cells[key].items():
            yield cells.draw(key, setting, arm, metric, value, 0, table="step")


def train(overrides: list[str], sources: list[str], kept: bool = False) -> dict[str, Any]:
    """{"curve": the evaluations on validation, "last": the final record}, or {"diverged": the message}."""
    home = runs.Home(HOME, tuple(sources))
    texts.prepare(overrides)
    try:
        records = home.kept(overrides) if kept else home.passing([*overrides, "trainer.keep=1"])
    except runs.Diverged as failure:
        return {"diverged": failure.reason}
    curve = [record for record in records if record["split"] in VALIDATION and not record.get("final")]
    return {"curve": curve, "last": records[-1]}


def cost(step: list[str], sources: list[str]) -> dict[str, float]:
    """Of a training step: steps/s, the median of some, and the peak MiB of the run. For a process of its own."""
    short = [option for option in step if not option.startswith(("trainer.steps=", "trainer.log_every="))]
    home, records = runs.Home(HOME, tuple(sources)), []
    mib = added(lambda: records.extend(home.passing([*short, f"trainer.steps={WARM + TIMED}", "trainer.log_every=1"])))
    times = [record["time_s"] for record in records if record["split"] == "train"]
    return {"steps_per_s": 1 / median(b - a for a, b in zip(times[WARM:], times[WARM + 1:])), "mib": mib}
