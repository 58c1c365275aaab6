"""Training runs on a grid of settings, arms and seeds: curves on validation, the end on test, what a step costs.

Arms of one seed read the same rows in the same order and start from the same weights; that seed also draws their noise.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

from crt_exp import mechanism_text
from crt_exp.config import ConfigError, unknown
from crt_exp.presets import OF_MAP
from crt_exp.measure import runs, texts
from crt_exp.measure.cells import Cells, Draw, Key
from crt_exp.runner.run import PARTIAL
from crt_exp.times import added

HOME = Path("outputs/runs")
TIMED, WARM = 8, 2  # steps of the run that is timed, and those before
FINAL = ("step", "epoch", "split", "time_s", "final")
PART = "_part"  # in keys of the test record, before the number of a part of the split
VALIDATION = ("validation", "val", "held_out")  # splits of the records that make curves
PLACE = ("metric", "setting", "table", "x")
CONDITION = ("arm", "than", "over", "least", *PLACE)
Arm = str | Sequence[str] | Mapping[str, str] | None
Models = Mapping[str, Sequence[Key]]  # of each start by seed, the key of its last run


@dataclass(frozen=True)
class Grid:
    """What a page's file says of some runs. common: options of all, or lists of them. settings: options of each. arms:
    options of each, an attention in text ("favorp m=64"), null where the name is it, or {start: name} for the models of
    a start. before: {option: start}, the models that runs begin with, of their seed, which goes round through them;
    {setting} and {arm} in the name are those of the run. offset: so much more is the seed than the unit, so that runs
    do not read what their start has read in the same order. only: the arms of a setting that does not have all.
    seeds_of: of arms that have another number of them, in all settings or in those that are named. first: so many of
    the seeds are trained, 0: all. where: settings are
    trained where all these conditions hold of the draws before, see `holds`. metrics: of the records on validation,
    those that are kept; tested: of the one on test (default: all). baselines: prefix -> name: what the test record of
    the arm "exact" holds under keys with this prefix, as draws of an arm, for what needs no model; apart: suffix ->
    name: its metrics with this suffix are draws of a setting of their own. cost: whether steps are timed. search:
    {option: values}, each of which is tried, and the draws are of the run that ends with the largest metric `best` of
    its setting. models: of starts.
    """

    settings: Mapping[str, Sequence[str]]
    arms: Mapping[str, Arm] | Sequence[str]
    metrics: Sequence[str]
    common: Sequence[str | Sequence[str]] = ()
    before: Mapping[str, str] = field(default_factory=dict)
    offset: int = 0
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    where: Mapping[str, Any] | Sequence[Mapping[str, Any]] = ()
    cost: bool = True
    tested: Sequence[str] = ()
    baselines: Mapping[str, str] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)
    seeds: int = 3
    seeds_of: Mapping[str, int | Mapping[str, int]] = field(default_factory=dict)
    first: int = 0
    workers: int | None = None
    search: Mapping[str, Sequence[str]] = field(default_factory=dict)
    best: Mapping[str, str] = field(default_factory=dict)
    models: Models = field(default_factory=dict)

    @classmethod
    def read(cls, given: Mapping[str, Any], models: Models | None = None) -> "Grid":
        """Raises ConfigError for a key that is not one, and for one that is missing."""
        known = [each.name for each in fields(cls) if each.name != "models"]
        for key in given:
            if key not in known:
                raise unknown("key of a grid of runs", key, known)
        if missing := [key for key in ("settings", "arms", "metrics") if not given.get(key)]:
            raise ConfigError(f"a grid of runs lacks {missing[0]}: got {', '.join(given)}")
        arms, where = given["arms"], given.get("where", [])
        arms = arms if isinstance(arms, Mapping) else dict.fromkeys(arms)
        where = [where] if isinstance(where, Mapping) else where
        return cls(**{**given, "models": models or {}, "arms": arms, "where": where})

    def count(self, arm: str, setting: str) -> int:
        """Of its seeds in a setting."""
        given = self.seeds_of.get(arm, self.seeds)
        whole = given if isinstance(given, int) else given.get(setting, self.seeds)
        return min(self.first or whole, whole)

    def names(self, setting: str) -> list[str]:
        """The arms of a setting."""
        return [arm for arm in self.arms if arm in self.only.get(setting, self.arms)]

    def trials(self) -> list["Grid"]:
        """One for each value of `search`; itself without any."""
        return [replace(self, search={}, common=[*self.common, f"{option}={value}"])
                for option, values in self.search.items() for value in values] or [self]

    def model(self, name: str, seed: int) -> Key:
        if name not in self.models:
            raise unknown("start", name, [*self.models])
        return self.models[name][seed % len(self.models[name])]

    def options(self, setting: str, arm: str, seed: int) -> list[str]:
        """The command line of a run."""
        given = self.arms[arm]
        if isinstance(given, Mapping):
            return self.model(given["start"], seed)["overrides"]
        begun = [f"{option}={folder(self.model(name.format(setting=setting, arm=arm), seed))}"
                 for option, name in self.before.items()]
        every = runs.flat([*self.common, *self.settings[setting], *self.words(arm)])
        own = [*{option.split("=")[0]: option for option in every}.values()]    # of options of one name the last
        return [*own, *begun, f"seed={self.offset + seed}"]

    def words(self, arm: str) -> list[str]:
        """The options of an arm."""
        given = self.arms[arm]
        return given if isinstance(given, list) else words(given or arm)

    def key(self, setting: str, arm: str, seed: int, sources: Sequence[str]) -> Key:
        if isinstance(given := self.arms[arm], Mapping):
            return self.model(given["start"], seed)
        return {"overrides": self.options(setting, arm, seed), "sources": list(sources)}

    def keys(self, settings: Sequence[str], sources: Sequence[str]) -> dict[tuple[str, str, int], Key]:
        """(setting, arm, seed) -> key; seed by seed, so that an interrupted measurement has whole seeds."""
        places = [(setting, arm, seed) for setting in settings for arm in self.names(setting)
                  for seed in range(self.count(arm, setting))]
        return {place: self.key(*place, sources) for place in sorted(places, key=lambda place: place[2])}


def words(text: str) -> list[str]:
    """An attention in text as options of the command line."""
    name, options = mechanism_text.read(text)
    places = {"m": f"{OF_MAP}m", "sampler": "sampler"}
    return [f"attention={name}", *(
        f"{places.get(key, key if key.startswith(OF_MAP) else f'attention.{key}')}={mechanism_text.written(value)}"
        for key, value in options.items())]


def folder(key: Key) -> str:
    """Of a kept run."""
    return str(runs.Home(HOME, tuple(key["sources"])).place(key["overrides"]))


def begun(given: Mapping[str, Any], cells: Cells, sources: Sequence[str], label: str, workers: int | None = None
          ) -> dict[str, list[Key]]:
    """Trains all `starts` of a page, stage by stage: name -> the last run of each, by seed. What is there is not
    trained again, and a run whose folder is gone is, though its cell is kept."""
    lines = {name: stages(name, each, sources) for name, each in given.items()}
    every = [line for each in lines.values() for line in each]
    for number in range(max(map(len, every), default=0)):
        keys = [line[number] for line in every if number < len(line)]
        cells.fill(keys, train, f"{label}: starts, stage {number + 1}", workers)
        for key in keys:
            if not Path(folder(key)).is_dir():
                train(**key)
    return {name: [line[-1] for line in each] for name, each in lines.items()}


def stages(name: str, given: Mapping[str, Any], sources: Sequence[str]) -> list[list[Key]]:
    """Of a start: the keys of its stages, by seed."""
    start = runs.Start.read(name, given)
    home = start.home(HOME, sources)
    return [[{"overrides": line, "sources": [*home.sources]} for line in start.lines(seed, home)]
            for seed in range(start.count)]


def last(given: Mapping[str, Any], sources: Sequence[str]) -> dict[str, list[Key]]:
    """The keys of the models of starts: name -> the last run of each, by seed."""
    return {name: [line[-1] for line in stages(name, each, sources)] for name, each in given.items()}


def measured(grid: Grid, made: Sequence[Draw], cells: Cells, sources: Sequence[str], name: str) -> Iterator[Draw]:
    """The draws of a grid: tables "validation" (x: step), "test", "parts" (of the test split, which are its units),
    "chosen" (what was searched for) and "step" (steps_per_s, mib; of seed 0); made: those before, of which its
    conditions are."""
    passed = [setting for setting in grid.settings if all(holds(each, setting, made) for each in grid.where)]
    trials = grid.trials()
    keys = [trial.keys(passed, sources) for trial in trials]
    cells.fill([key for each in keys for key in each.values()], train, f"{name}: training", grid.workers)
    for setting, arm, seed in keys[0]:
        key = best(cells, [each[setting, arm, seed] for each in keys], grid.best.get(setting))
        for metric, value in searched(grid, key).items():
            yield cells.draw(key, setting, arm, metric, value, seed, table="chosen")
        yield from of_run(grid, cells, key, setting, arm, seed)
    if grid.cost:
        yield from costs(trials[0], sources, cells, name)


def best(cells: Cells, keys: Sequence[Key], metric: str | None) -> Key:
    """That of the run that ends with the largest metric on validation, the first of equals; one that diverged has
    none. Where nothing is held out the split that is tested is that of validation."""
    return max(keys, key=lambda key: ended(cells[key]).get(metric, -math.inf)) if len(keys) > 1 else keys[0]


def searched(grid: Grid, key: Key) -> dict[str, str]:
    """Of the options of a run those that were searched for, each by the last part of its name."""
    given = dict(option.split("=", 1) for option in key.get("overrides", ()))
    return {name.rpartition(".")[2]: given[name] for name in grid.search}


def ended(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record by which a run is chosen."""
    return (result.get("curve") or [result.get("last", {})])[-1]


def holds(condition: Mapping[str, Any], setting: str, made: Sequence[Draw]) -> bool:
    """Whether an arm's mean is at least `least`: of a metric, in the setting of the run or in the one that is named, at
    a table and x where these are named; less that of the arm `than`, or their geometric mean over that of `over`.
    Raises ConfigError for a key that is not one."""
    for key in condition:
        if key not in CONDITION:
            raise unknown("key of a condition", key, [*CONDITION])
    asked = {"setting": setting} | {key: value for key, value in condition.items() if key in PLACE}
    if isinstance(metrics := asked.get("metric"), Mapping):
        if asked["setting"] not in metrics:
            raise unknown("setting of a condition", asked["setting"], [*metrics])
        asked["metric"] = metrics[asked["setting"]]
    here = [draw for draw in made if all(getattr(draw, key) == value for key, value in asked.items())]
    of = {arm: [draw.value for draw in here if draw.arm == arm]
          for arm in (condition[key] for key in ("arm", "than", "over") if key in condition)}
    if not all(of.values()):
        return False
    if "over" in condition:
        return geometric_mean(of[condition["arm"]]) / geometric_mean(of[condition["over"]]) >= condition["least"]
    less = fmean(of[condition["than"]]) if "than" in condition else 0.0
    return fmean(of[condition["arm"]]) - less >= condition["least"]


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
        metric, _, part = metric.partition(PART)
        if isinstance(value, (int, float)) and (metric in grid.tested if grid.tested else metric not in FINAL):
            unit, table = (int(part), "parts") if part else (seed, "test")
            yield cells.draw(key, place, arm, metric, value, unit, table=table)
    if arm == "exact" and seed == 0:
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


def costs(grid: Grid, sources: Sequence[str], cells: Cells, name: str) -> Iterator[Draw]:
    keys = {(setting, arm): {"step": grid.options(setting, arm, 0), "sources": list(sources)}
            for setting, arm in product(grid.settings, grid.arms)}
    cells.fill([*keys.values()], cost, f"{name}: steps", apart=True)
    for (setting, arm), key in keys.items():
        for metric, value in cells[key].items():
            yield cells.draw(key, setting, arm, metric, value, 0, table="step")


def train(overrides: list[str], sources: list[str]) -> dict[str, Any]:
    """{"curve": the evaluations on validation, "last": the final record}, or {"diverged": the message}, of a run that
    stays in its folder and goes on there where it was interrupted."""
    home = runs.Home(HOME, tuple(sources))
    texts.prepare(overrides)
    try:
        records = home.kept(overrides)
    except runs.DivergedRun as failure:
        return {"diverged": failure.reason}
    if PARTIAL in records[-1]:
        raise ConfigError(f"{home.place(overrides)}: trainer.evaluate limited its evaluations, and a page needs "
                          "complete ones: run it without trainer.evaluate")
    curve = [record for record in records if record["split"] in VALIDATION and not record.get("final")]
    return {"curve": curve, "last": records[-1]}


def cost(step: list[str], sources: list[str]) -> dict[str, float]:
    """Of a training step: steps/s, the median of some, and the peak MiB of the run. For a process of its own."""
    short = [option for option in step if not option.startswith(("trainer.steps=", "trainer.log_every="))]
    home, records = runs.Home(HOME, tuple(sources)), []
    mib = added(lambda: records.extend(home.passing([*short, f"trainer.steps={WARM + TIMED}", "trainer.log_every=1"])))
    times = [record["time_s"] for record in records if record["split"] == "train"]
    return {"steps_per_s": 1 / median(b - a for a, b in zip(times[WARM:], times[WARM + 1:])), "mib": mib}
