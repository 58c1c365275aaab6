"""Training runs on a grid of settings, arms and seeds: curves on validation, the end on test, what a step costs.

Arms of one seed read the same rows in the same order and start from the same weights; that seed also draws their noise.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from crt_exp.studies import runs
from crt_exp.studies.cells import Cells, Draw, Key
from crt_exp.studies.memory import in_new_process, peak, reset_peak

HOME = Path("outputs/runs")
TIMED, WARM = 8, 2  # steps of the run that is timed, and those before
FINAL = ("step", "epoch", "split", "time_s", "final")


@dataclass(frozen=True)
class Grid:
    """What a page's file says under `sizes`. common: options of all runs. settings: options of each. arms: options of
    each attention. moved: arms that start from the weights of the run of `start` with their seed. metrics: of the
    records, those that are kept. gated: the arms that are trained first, in every setting; the others only where
    `start` is better than each of them by `least` on the first metric (`higher`: more is better)."""

    settings: Mapping[str, Sequence[str]]
    arms: Mapping[str, Sequence[str]]
    metrics: Sequence[str]
    common: Sequence[str] = ()
    moved: Mapping[str, Sequence[str]] = field(default_factory=dict)
    start: str = "exact"
    gated: Sequence[str] = ()
    least: float = 0.0
    higher: bool = True
    cost: bool = True
    baseline: Sequence[str] = ()  # (key of the test record, name): what predicts without a model, as an arm
    seeds: int = 3
    workers: int | None = None

    def options(self, setting: str, arm: str, seed: int, home: runs.Home) -> list[str]:
        """The command line of a run."""
        if arm not in self.moved:
            return [*self.common, *self.settings[setting], *self.arms[arm], f"seed={seed}"]
        begun = home.place(self.options(setting, self.start, seed, home))
        own = {option.split("=")[0] for option in self.moved[arm]}
        rest = [option for option in (*self.common, *self.settings[setting])  # it keeps the sizes of its start
                if option.split("=")[0] not in own and not option.startswith(("+task.sizes.", "task.preset="))]
        return [*rest, *self.moved[arm], f"seed={seed}", f"task.init={begun}"]

    def key(self, setting: str, arm: str, seed: int, home: runs.Home) -> Key:
        kept = {"kept": True} if arm == self.start and self.moved else {}
        return {"overrides": self.options(setting, arm, seed, home), "sources": list(home.sources), **kept}


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """The draws of a grid: tables "validation" (x: step), "test" and "step" (steps_per_s, mib; of seed 0)."""
    grid, home, cells = Grid(**size), runs.Home(HOME, tuple(sources)), Cells(name, sources, keep)
    every = [*grid.arms, *grid.moved]
    first = [arm for arm in every if arm == grid.start or arm in grid.gated]
    train_all(grid, home, cells, list(grid.settings), first, f"{name}: {', '.join(first)}")
    passed = [setting for setting in grid.settings if gate(grid, home, cells, setting)]
    train_all(grid, home, cells, passed, every, f"{name}: training")
    for setting in grid.settings:
        for arm, seed in product(every if setting in passed else first, range(grid.seeds)):
            yield from of_run(grid, cells, grid.key(setting, arm, seed, home), setting, arm, seed)
    if grid.cost:
        yield from costs(grid, home, cells, name)


def train_all(grid: Grid, home: runs.Home, cells: Cells, settings: Sequence[str], arms: Sequence[str],
              label: str) -> None:
    """Seed by seed, so that an interrupted measurement has whole seeds, and arms that others go on from first."""
    for part in ([arm for arm in arms if arm in grid.arms], [arm for arm in arms if arm in grid.moved]):
        keys = [grid.key(setting, arm, seed, home)
                for seed, setting, arm in product(range(grid.seeds), settings, part)]
        cells.fill(keys, train, label, grid.workers)


def gate(grid: Grid, home: runs.Home, cells: Cells, setting: str) -> bool:
    """Whether attention matters in this setting: `start` is better than all gated arms by `least`, on average."""
    metric, sign = grid.metrics[0], 1 if grid.higher else -1
    means = {}
    for arm in (grid.start, *grid.gated):
        ends = [cells[grid.key(setting, arm, seed, home)].get("last", {}).get(metric) for seed in range(grid.seeds)]
        ends = [end for end in ends if end is not None]
        means[arm] = sum(ends) / len(ends) if ends else float("nan")
    return all(sign * (means[grid.start] - means[arm]) >= grid.least for arm in grid.gated)


def of_run(grid: Grid, cells: Cells, key: Key, setting: str, arm: str, seed: int) -> Iterator[Draw]:
    result = cells[key]
    if "diverged" in result:
        yield cells.draw(key, setting, arm, "diverged", 1, seed, table="test")
        return
    for record in result["curve"]:
        for metric in grid.metrics:
            if record.get(metric) is not None:
                yield cells.draw(key, setting, arm, metric, record[metric], seed, record["step"], "validation")
    for metric, value in result["last"].items():
        if metric not in FINAL and isinstance(value, (int, float)):
            yield cells.draw(key, setting, arm, metric, value, seed, table="test")
    if grid.baseline and arm == grid.start and seed == 0:
        value, name = result["last"][grid.baseline[0]], grid.baseline[1]
        yield cells.draw(key, setting, name, grid.metrics[0], value, table="test")


def costs(grid: Grid, home: runs.Home, cells: Cells, name: str) -> Iterator[Draw]:
    keys = {(setting, arm): {"step": [*grid.common, *grid.settings[setting], *options, "seed=0"],
                             "sources": list(home.sources)}
            for setting in grid.settings for arm, options in grid.arms.items()}
    cells.fill([*keys.values()], cost, f"{name}: steps", 1)
    for (setting, arm), key in keys.items():
        for metric, value in cells[key].items():
            yield cells.draw(key, setting, arm, metric, value, 0, table="step")


def train(overrides: list[str], sources: list[str], kept: bool = False) -> dict[str, Any]:
    """{"curve": the evaluations on validation, "last": the final record}, or {"diverged": the message}."""
    home = runs.Home(HOME, tuple(sources))
    try:
        records = home.kept(overrides) if kept else home.passing([*overrides, "trainer.keep=1"])
    except runs.Diverged as failure:
        return {"diverged": failure.reason}
    return {"curve": [record for record in records if record["split"] == "validation"], "last": records[-1]}


def cost(step: list[str], sources: list[str]) -> dict[str, float]:
    """Of a training step: steps/s, the median of some, and the peak MiB of the run, in a process of its own."""
    return in_new_process(timed_steps, overrides=step, sources=sources)


def timed_steps(overrides: list[str], sources: list[str]) -> dict[str, float]:
    short = [option for option in overrides if not option.startswith(("trainer.steps=", "trainer.log_every="))]
    start = reset_peak()
    records = runs.Home(HOME, tuple(sources)).passing([*short, f"trainer.steps={WARM + TIMED}", "trainer.log_every=1"])
    times = [record["time_s"] for record in records if record["split"] == "train"]
    return {"steps_per_s": 1 / median(b - a for a, b in zip(times[WARM:], times[WARM + 1:])),
            "mib": (peak() - start) / 2**20}
