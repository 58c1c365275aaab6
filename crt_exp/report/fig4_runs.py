"""The runs of `fig4_left`: what one SIZE stands for, each arm as a command line, and what is kept of it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crt_exp.report import runs

RUN_SOURCES = ("tasks/image_task.py", "tasks/imagenet.py", "tasks/mae.py", "models/vision.py", "data/images.py",
               "data/loading.py")
HOME = runs.Home(Path("outputs/fig4-left"), RUN_SOURCES)
LINEAR, CONTROLS = ("favorp", "favorpp"), ("exact", "uniform")
NEAR_FAR = "nearfar"
NAMES = (*CONTROLS, NEAR_FAR, *LINEAR)


@dataclass(frozen=True)
class Bounds:
    """What the exact checkpoint must show before an arm is trained: at least these."""

    above_chance: float = 3.0   # its accuracy, in times that of a guess
    costs: float = 0.3          # nats that uniform attention costs directly after the swap
    heads: float = 0.5          # share of the heads whose mean |x + y|^2 lies between 4 and 24
    error: float = 1.2          # predicted error of FAVOR+ over that of FAVOR++


@dataclass(frozen=True)
class Setting:
    """What one SIZE stands for. images, model: options of all runs; the next four: of that kind of run alone."""

    dataset: str
    classes: int
    images: tuple[str, ...]
    model: tuple[str, ...]
    mae: tuple[str, ...] | None        # None: `fine_tuning` starts from a published checkpoint
    fine_tuning: tuple[str, ...]
    uptraining: tuple[str, ...]
    scratch: tuple[str, ...]
    m: int                             # of what is trained
    ms: tuple[int, ...]                # directly after the swap
    steps: tuple[int, ...]             # of uptraining after which the loss is judged; the last one ends it
    long: int                          # pixels of a side of the long images
    long_images: int
    near: tuple[tuple[str, int], ...]  # sizes of near-far attention, which draws no noise
    swaps: int = 16                    # seeds directly after the swap
    seeds: int = 5
    scratch_seeds: int = 5
    workers: int | None = None         # runs at a time; None: one a core
    least: Bounds = Bounds()


@dataclass
class Found:
    """All that was computed. Keys: name, projections (None: it has none) and seed."""

    exact: dict[str, Any]                                    # the last record of the exact checkpoint
    swaps: dict[tuple[str, int | None, int], dict[str, Any]]
    layers: dict[tuple[str, int], list[dict[str, Any]]]
    uptrained: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    scratch: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    long: dict[str, dict[str, float]] = field(default_factory=dict)


# ---- runs: the key of a cell is all that a run depends on


def checkpoint(setting: Setting) -> list[dict[str, Any]]:
    """The runs that make the exact checkpoint, the last of them its own."""
    fine_tuning = ["task=imagenet", *setting.images, *setting.fine_tuning, "attention=exact"]
    if setting.mae is None:
        return [{"overrides": [*fine_tuning, "task.init=pretrained"]}]
    pretraining = ["task=mae", *setting.images, *setting.model, *setting.mae, "attention=exact"]
    return [{"overrides": pretraining}, {"overrides": [*fine_tuning, f"task.init={HOME.place(pretraining)}"]}]


def swapped(name: str, m: int | None, seed: int, setting: Setting, run: str) -> dict[str, Any]:
    return {"overrides": ["task=imagenet", *setting.images, "trainer.steps=0", *attention(name, m, setting),
                          f"seed={seed}", f"task.init={run}"]}


def uptraining(name: str, seed: int, setting: Setting, run: str) -> dict[str, Any]:
    return {"overrides": ["task=imagenet", *setting.images, *setting.uptraining, f"trainer.steps={setting.steps[-1]}",
                          *attention(name, m_of(name, setting), setting), f"seed={seed}", f"task.init={run}"]}


def from_scratch(name: str, seed: int, setting: Setting) -> dict[str, Any]:
    return {"overrides": ["task=imagenet", *setting.images, *setting.model, *setting.scratch,
                          *attention(name, m_of(name, setting), setting), f"seed={seed}"]}


def attention(name: str, m: int | None, setting: Setting) -> list[str]:
    given = [f"attention.{key}={size}" for key, size in options_of(name, setting).items()]
    return [f"attention={name}", *given] + [f"features.m={m}"] * (m is not None)


def options_of(name: str, setting: Setting) -> dict[str, int]:
    return dict(setting.near) if name == NEAR_FAR else {}


def m_of(name: str, setting: Setting) -> int | None:
    return setting.m if name in LINEAR else None


def ms_of(name: str, setting: Setting) -> tuple[int | None, ...]:
    return setting.ms if name in LINEAR else (None,)


def keep(overrides: list[str]) -> dict[str, Any]:
    """The last record of a run that stays in outputs/fig4-left/."""
    return HOME.kept(overrides)[-1]


def last(overrides: list[str]) -> dict[str, Any]:
    return HOME.passing(overrides)[-1]


def train(overrides: list[str]) -> dict[str, Any]:
    """{"curve": the evaluations}, or {"diverged": what the run said} of one whose loss was not finite."""
    try:
        records = HOME.passing([*overrides, "trainer.keep=1"])
    except runs.Diverged as failure:
        return {"diverged": str(failure)}
    return {"curve": [{key: r[key] for key in ("step", "accuracy", "loss")} for r in records
                      if r["split"] == "val" and not r.get("final")]}
