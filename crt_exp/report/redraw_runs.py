"""The runs of `redraw`: an exact model's weights moved into other attention, measured as they are and trained on.

Exact models are those of `protein_runs`. Noise, order and masks of an arm come from its seed; the exact model that it
starts from goes round with the seed, so that all arms of a seed are pairs.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from crt_exp.report import protein_runs
from crt_exp.report.protein_runs import GENERATED, LINEAR, REAL, SOURCE, B, U, place, task

SOURCES = (*protein_runs.SOURCES, "report/redraw_checkpoint.py")
BATCHES = 4          # of 8 validation rows, on which queries and keys are captured
OFFSET = 1000        # to the seeds of uptraining, so that no arm reads the rows in the order of its exact model


class World(NamedTuple):
    """What the exact models were trained on."""

    dataset: str
    direction: str

    def __str__(self) -> str:
        return f"{SOURCE[self.dataset]}, {'U' if self.direction == U else 'B'}"


class Arm(NamedTuple):
    """A choice of conf/attention; redraw: training passes between new projections, 0 never."""

    name: str
    redraw: int = 0

    @property
    def random(self) -> bool:
        return self.name in (*LINEAR, "favor")


@dataclass(frozen=True)
class Bounds:
    """What a world must show, to tell mechanisms apart: at least these."""

    costs: float = 0.5          # nats that uniform attention costs directly after the swap
    heads: float = 0.5          # share of the heads whose mean |x + y|^2 lies between 4 and 24
    error: float = 1.2          # predicted error of FAVOR+ over that of FAVOR++


@dataclass(frozen=True)
class Setting:
    """What one SIZE stands for. main: the world that must pass its gates; others: those that are told all the same.

    ms: projections directly after the swap; arms that train have the last of them. options: of runs that train on, and
    `evaluations` of them until `share` of the steps of the exact model, as many again after it. arms: trained on in
    the main world, other_arms in the others.
    """

    base: protein_runs.Setting
    options: tuple[str, ...]
    ms: tuple[int, ...]
    main: World = World(GENERATED, U)
    others: tuple[World, ...] = (World(REAL, U), World(REAL, B))
    swapped: tuple[str, ...] = ("exact", "uniform", "identity", "favor", *LINEAR, "elu", "reformer")
    arms: tuple[Arm, ...] = (
        Arm("exact"), Arm("uniform"), Arm("favor"), Arm("relu"), Arm("smreg"), Arm("smreg", 1),
        *(Arm(name, redraw) for name in ("favorp", "favorpp") for redraw in (0, 1, 100)))
    other_arms: tuple[Arm, ...] = (Arm("exact"), Arm("uniform"), Arm("favorp"), Arm("favorpp"))
    share: float = 0.1
    evaluations: int = 4
    swaps: int = 12             # seeds directly after the swap, in the main world and in the others
    other_swaps: int = 3
    seeds: int = 5              # of runs that train on; no more than those of the swap, which is their step 0
    other_seeds: int = 3
    least: Bounds = Bounds()

    @property
    def m(self) -> int:
        return self.ms[-1]

    @property
    def worlds(self) -> tuple[World, ...]:
        return (self.main, *self.others)

    def start(self, world: World, seed: int) -> str:
        """The exact model of a seed."""
        return str(place(world.direction, seed % self.base.seeds, self.base, world.dataset))

    def steps(self, world: World) -> list[int]:
        """Those after which models are evaluated; the middle one is `share` of the exact model's."""
        every = max(1, round(self.share * self.base.steps[world.dataset] / self.evaluations))
        return [every * (i + 1) for i in range(2 * self.evaluations)]

    def limit(self, world: World) -> int:
        """Steps within which the paper's recovery must be done."""
        return self.steps(world)[self.evaluations - 1]


SETTINGS = {
    # heads of 16: with 32 projections FAVOR+ and FAVOR++ both lose what uniform attention loses, and nothing is told
    "small": Setting(protein_runs.SETTINGS["small"], options=("trainer.warmup=5",), ms=(32, 256)),
    "gpu": Setting(protein_runs.SETTINGS["gpu"], options=("trainer.warmup=20",), ms=(32, 128), swaps=16, seeds=10),
    "full": Setting(protein_runs.SETTINGS["full"], options=("trainer.warmup=1000",), ms=(64, 256)),
}


# ---- keys


def swapping(world: World, setting: Setting) -> dict[tuple[str, int | None, int], dict[str, Any]]:
    """(attention, m, seed) -> key; what draws no noise is measured once for each exact model."""
    keys, seeds = {}, setting.swaps if world == setting.main else setting.other_swaps
    for name in setting.swapped:
        ms = setting.ms if name in ("favorp", "favorpp") else (setting.m,) if Arm(name).random else (None,)
        for m in ms:
            for seed in range(seeds if Arm(name).random else setting.base.seeds):
                keys[name, m, seed] = {"start": setting.start(world, seed), "name": name, "m": m, "seed": OFFSET + seed,
                                       "options": dict(options_of(name, setting))}
    return keys


def looking(world: World, setting: Setting) -> dict[int, dict[str, Any]]:
    """Each exact model."""
    return {seed: {"start": setting.start(world, seed), "m": setting.m, "batches": BATCHES}
            for seed in range(setting.base.seeds)}


def uptraining(world: World, setting: Setting) -> dict[tuple[Arm, int], dict[str, Any]]:
    arms, seeds = ((setting.arms, setting.seeds) if world == setting.main else
                   (setting.other_arms, setting.other_seeds))
    return {(arm, seed): run_of(world, arm, seed, setting) for seed in range(seeds) for arm in arms}


def run_of(world: World, arm: Arm, seed: int, setting: Setting) -> dict[str, Any]:
    every = setting.steps(world)
    redraw = [f"attention.redraw_every={arm.redraw}"] if arm.redraw else []
    m = [f"features.m={setting.m}"] if arm.random else []
    given = [*task(world.dataset, world.direction, setting.base), *setting.options, f"trainer.eval_every={every[0]}",
             f"trainer.steps={every[-1]}", f"attention={arm.name}", *m, *redraw, f"seed={OFFSET + seed}",
             f"task.init={setting.start(world, seed)}"]
    return {"overrides": once(given)}


def once(overrides: list[str]) -> list[str]:
    """Of several values of a key the last, in its place."""
    keyed = {override.split("=")[0]: override for override in overrides}
    return list(keyed.values())


def options_of(name: str, setting: Setting) -> list[tuple[str, int]]:
    """Of the attention itself, for `Mechanism.of`."""
    given = setting.base.options.get(name, ())
    return [(key.removeprefix("attention."), int(value)) for key, value in (option.split("=") for option in given)]


# ---- results


@dataclass
class Found:
    """What was computed of a world."""

    swaps: dict[tuple[str, int | None, int], dict[str, Any]]
    layers: dict[int, list[dict[str, Any]]]
    trained: dict[tuple[Arm, int], dict[str, Any]] = field(default_factory=dict)
