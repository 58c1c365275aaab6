"""The runs that reports on long sequences share: sets of data, arms on each, seeds, and what a step costs.

Arms of one seed read the same rows in the same order and start from the same weights; that seed is their noise's too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from crt_exp.report import runs
from crt_exp.report.evidence import Gate
from crt_exp.report.writing import Cells
from crt_exp.studies.memory import in_new_process, peak, reset_peak

SOURCES = ("tasks/sequences.py", "tasks/lra.py", "tasks/pixels.py", "tasks/books.py", "models/language.py",
           "models/classifier.py", "models/carried.py", "models/transformer.py", "data/labelled.py", "data/listops.py",
           "data/pathfinder.py", "data/pixels.py", "data/books.py", "attention/reformer.py", "attention/baselines.py")
HOME = runs.Home(Path("outputs/long"), SOURCES)
BLIND = ("uniform", "identity")                              # controls that look at no query and no key
CONTROLS = (*BLIND, "window")
GATE_ARMS = ("exact", "uniform")
# Of near-far attention on rows as short as 64
FEW = ("attention.block=8", "attention.heavy=8", "attention.cells=8", "attention.exact_until=0")
TIMED, WARM = 8, 2                                           # steps of the run that is timed, and those before
LAST = ("trainer.select=last", "trainer.save_every=1000000")  # validation is for the curves and chooses nothing


@dataclass(frozen=True)
class Setting:
    """What one SIZE stands for. sets: options of all runs on each set, by its name in the tables. arms: options of each
    attention. moved: arms that start from the weights of the exact run of their seed. drawn: (set, arm) whose first run
    is kept, to draw from."""

    sets: dict[str, tuple[str, ...]]
    arms: dict[str, tuple[str, ...]]
    moved: dict[str, tuple[str, ...]]
    drawn: tuple[tuple[str, str], ...] = ()
    seeds: int = 3
    workers: int | None = None


def attention(name: str, m: int | None = None, *options: str) -> tuple[str, ...]:
    return (f"attention={name}", *([] if m is None else [f"features.m={m}"]), *options)


def window(block: int, first: int) -> tuple[str, ...]:
    """The control with a near view alone: the blocks of a near-far arm, and as many first tokens as that has heavy
    keys."""
    return attention("window", None, f"attention.block={block}", f"attention.first={first}")


def model(heads: int, layers: int, d_ff: int, d: int) -> tuple[str, ...]:
    return tuple(f"+task.sizes.{key}={value}" for key, value in locals().items())


# ---- runs: the key of a cell is all that it depends on


def training(setting: Setting, which: str, arm: str, seed: int) -> dict[str, Any]:
    if arm in setting.moved:
        start = HOME.place(training(setting, which, "exact", seed)["overrides"])
        own = {option.split("=")[0] for option in setting.moved[arm]}
        rest = [option for option in setting.sets[which]  # sizes are those of the run that it starts from
                if option.split("=")[0] not in own and not option.startswith(("+task.sizes.", "task.preset="))]
        return {"overrides": [*rest, *setting.moved[arm], f"seed={seed}", f"task.init={start}"]}
    given = [*setting.sets[which], *setting.arms[arm], f"seed={seed}"]
    kept = (arm == "exact" and setting.moved) or (not seed and (which, arm) in setting.drawn)
    return {"overrides": given} | ({"kept": True} if kept else {})


def keys_of(setting: Setting) -> dict[tuple[str, str, int], dict[str, Any]]:
    """(set, arm, seed) -> key; seed by seed, so that an interrupted report has whole seeds, and exact arms first."""
    return {(which, arm, seed): training(setting, which, arm, seed)
            for seed in range(setting.seeds) for which in setting.sets for arm in (*setting.arms, *setting.moved)}


def train(overrides: list[str], kept: bool = False) -> dict[str, Any]:
    """{"curve": the evaluations on validation, "last": the final record}, or {"diverged": what the run said}."""
    try:
        records = HOME.kept(overrides) if kept else HOME.passing([*overrides, "trainer.keep=1"])
    except runs.Diverged as failure:
        return {"diverged": failure.reason}
    return {"curve": [record for record in records if record["split"] == "validation"], "last": records[-1]}


def cost(overrides: list[str]) -> dict[str, float]:
    """Of a training step: steps/s, the middle of some, and the bytes that the run held at most, in a process of its
    own."""
    return in_new_process(step, overrides=overrides)


def step(overrides: list[str]) -> dict[str, float]:
    short = [option for option in overrides if not option.startswith(("trainer.steps=", "trainer.log_every="))]
    start = reset_peak()
    records = HOME.passing([*short, f"trainer.steps={WARM + TIMED}", "trainer.log_every=1"])
    times = [record["time_s"] for record in records if record["split"] == "train"]
    return {"steps_per_s": 1 / median(b - a for a, b in zip(times[WARM:], times[WARM + 1:])), "bytes": peak() - start}


Gates = Callable[[dict[tuple, Any], Setting], dict[str, Gate]]


def filled(name: str, setting: Setting, gates: Gates) -> tuple[dict[tuple, Any], dict[tuple, Any], Cells]:
    """Results by (set, arm, seed), costs by (set, arm), and the cells. Exact and uniform attention come first; the
    other arms are trained on the sets whose gate these passed."""
    keys, cells = keys_of(setting), Cells(name, SOURCES)
    first = {place: key for place, key in keys.items() if place[1] in GATE_ARMS}
    cells.fill([*first.values()], train, f"{name}: exact and uniform", setting.workers)
    passed = {which for which, gate in gates({place: cells[key] for place, key in first.items()}, setting).items()
              if gate.passed}
    keys = {place: key for place, key in keys.items() if place in first or place[0] in passed}
    cells.fill([*keys.values()], train, f"{name}: training", setting.workers)
    steps = step_keys(setting)
    cells.fill([*steps.values()], cost_of, f"{name}: steps", 1)
    return *({place: cells[key] for place, key in part.items()} for part in (keys, steps)), cells


def step_keys(setting: Setting) -> dict[tuple[str, str], dict[str, Any]]:
    """(set, arm) -> key of what a step costs."""
    return {(which, arm): {"overrides": [*setting.sets[which], *options, "seed=0"], "what": "step"}
            for which in setting.sets for arm, options in setting.arms.items()}


def cost_of(overrides: list[str], what: str) -> dict[str, float]:
    """`cost`, with a key that no run has."""
    return cost(overrides)
