"""python -m crt_exp.recipes: a table of the recipes of conf/experiment, what each trains and what that takes.

conf/recipes.yaml holds the arms, settings and seeds of each, as they are typed (recipe_words.py), and what the data
would tell; nothing is read but configuration, and no model is made but on the meta device. A training step counts
three forward passes, four where blocks are computed again. `make plan` prints the table.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from crt_exp.attention import Linformer
from crt_exp.config import ConfigError
from crt_exp.mechanism import Mechanism
from crt_exp.outlines import Facts, Outline, outline
from crt_exp.recipe_words import declared, lines, names, seeds_of, settings_of, spec_of, trials_of

KEPT = 3                                                     # checkpoints of a run: the newest two and the best
BYTES = 12 * KEPT + 4                                        # a parameter: with two moments of Adam each; and the model
WORDS = ("attention", "features", "sampler")                 # keys of the mechanism
HEAD = ("recipe", "runs", "steps", "parameters", "tokens a run", "GPU hours a run", "GPU hours", "disk, GB")


class RecipeRun(NamedTuple):
    """One of a recipe's runs. words: what is typed behind experiment=<recipe>."""

    recipe: str
    setting: str
    arm: str
    words: tuple[str, ...]
    facts: Facts
    cfg: DictConfig
    mechanism: Mechanism


class Cost(NamedTuple):
    steps: int
    parameters: int
    tokens: float
    hours: float


# ---- runs ------------------------------------------------------------------------------------------------------------


@cache
def composed(name: str) -> DictConfig:
    from crt_exp.runner.command_line import compose

    return compose([f"experiment={name}"])


def runs(name: str) -> Iterator[RecipeRun]:
    """Of the paper's arms, in each setting one, the first seed; the first is the one of the paper."""
    spec = spec_of(name)
    for setting, arm, words in lines(name):
        told = spec | settings_of(name)[setting]
        facts = {key: value for key, value in told.items() if key in Facts.__annotations__}
        yield RecipeRun(name, setting, arm, words, Facts(**facts), *applied(composed(name), words))


def applied(cfg: DictConfig, words: Sequence[str]) -> tuple[DictConfig, Mechanism]:
    """A composed configuration with what is typed behind it, and the attention that this names."""
    options, name = {"m": cfg.features.m}, "favorpp"
    cfg = OmegaConf.masked_copy(cfg, ["task", "trainer", "features"])
    for word in words:
        key, _, text = word.lstrip("+").partition("=")
        value = OmegaConf.create(f"value: {text}").value
        if key == "attention":
            name = text
        elif key.partition(".")[0] in WORDS:
            options[key.removeprefix("attention.") if key != "features.m" else "m"] = value
        else:
            OmegaConf.update(cfg, key, value, force_add=True)
    return cfg, mechanism_of(name, options)


def mechanism_of(name: str, options: dict[str, Any]) -> Mechanism:
    own = {key: value for key, value in options.items() if key != "m"}
    return Mechanism.of(name, **(options if Mechanism.of(name, **own).draws else own))


def count(name: str) -> int:
    """Runs of a recipe: the paper's arms x settings x seeds, and the values of a search."""
    return len([*lines(name)]) * seeds_of(name) * trials_of(name)


def beside(name: str) -> int:
    """Runs of the arms that the reports compare too."""
    return len([*lines(name, beside=True)]) * seeds_of(name) * trials_of(name) - count(name)


# ---- costs -----------------------------------------------------------------------------------------------------------


def steps_of(run: RecipeRun) -> int:
    """Optimiser steps. Raises ConfigError where the rows of the data are wanted and not known."""
    trainer, facts = run.cfg.trainer, run.facts
    if trainer.steps is not None:
        return trainer.steps
    if facts.rows is None:
        raise ConfigError(f"conf/recipes.yaml: {run.recipe} needs rows, for it trains {trainer.epochs} epochs")
    return round(trainer.epochs * facts.rows / rows_of_step(run))


def rows_of_step(run: RecipeRun) -> float:
    """Utterances where micro-batches are filled by seconds, words where they are columns of a text."""
    task, trainer, facts = run.cfg.task, run.cfg.trainer, run.facts
    if "batch_seconds" in task:
        return task.batch_seconds * (trainer.processes or 1) * trainer.accumulate * facts.rows / facts.seconds
    return trainer.batch * task.get("bptt", 1)


_OUTLINES: dict[tuple, Outline] = {}


def outline_of(run: RecipeRun) -> Outline:
    """Made once for all arms that have the same sizes: attention other than Linformer's learns no weight of its own."""
    attention = run.mechanism if run.mechanism.kind is Linformer else Mechanism.of("exact")
    task = {key: value for key, value in run.cfg.task.items() if key != "init"}
    key = (OmegaConf.to_yaml(OmegaConf.create(task)), run.facts, str(attention.describe()))
    if key not in _OUTLINES:
        _OUTLINES[key] = outline(run.cfg, attention, run.facts)
    return _OUTLINES[key]


def cost_of(run: RecipeRun) -> Cost:
    made, steps, trainer = outline_of(run), steps_of(run), run.cfg.trainer
    rows = steps * rows_of_step(run)
    forward = made.flops(run.mechanism) * (4 if run.cfg.task.get("checkpointing") else 3)
    gpu = declared()["gpu"]
    speed = gpu["tflops"][trainer.precision] * 1e12 * spec_of(run.recipe).get("used", gpu["used"])
    return Cost(steps, made.parameters, rows * made.tokens, rows * forward / speed / 3600)


def row_of(name: str) -> list[str]:
    """Of the table: steps, parameters, tokens and hours are those of the first run, or from the least to the most."""
    costs = [cost_of(run) for run in runs(name)]
    times = seeds_of(name) * trials_of(name)
    hours = times * sum(cost.hours for cost in costs)
    disk = times * sum(cost.parameters for cost in costs) * BYTES / 1e9
    each = [between([cost[i] for cost in costs]) for i in range(4)]
    return [f"`{name}`", str(count(name)), *each, short(hours), short(disk)]


def between(values: Sequence[float]) -> str:
    low, high = short(min(values)), short(max(values))
    return low if low == high else f"{low} to {high}"


def short(value: float) -> str:
    """Two digits: 0.34, 12, 340, 1,100, 19 M, 131 G."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{float(f'{value / size:.3g}'):g} {unit}"
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def table() -> str:
    gpu = declared()["gpu"]
    lines = [HEAD, ["---"] * len(HEAD), *map(row_of, names())]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    specs = {name: spec_of(name) for name in names()}
    less = ", ".join(f"{spec['used']:.0%} by `{name}`" for name, spec in specs.items() if "used" in spec)
    more = ", ".join(f"`{name}` {beside(name)}" for name in names() if beside(name))
    return (f"{rows}\n\nGPU hours: FLOPs of the matrix products of a model, three times forward, on one {gpu['name']}: "
            f"{gpu['tflops']['bf16']} TFLOP/s in\nbfloat16 and {gpu['tflops']['no']} in float32, of which "
            f"{gpu['used']:.0%} is used, an assumption ({less}).\n"
            f"Disk: {KEPT} checkpoints of a run with Adam's moments, and its final weights.\n"
            f"Not counted are the runs of arms that the reports compare beside those of the papers: {more}.\n")


def main() -> None:
    argparse.ArgumentParser(prog="python -m crt_exp.recipes", description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        print(table(), end="")
    except ConfigError as error:
        print(f"crt_exp.recipes: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
