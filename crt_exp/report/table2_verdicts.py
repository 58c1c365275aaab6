"""What `table2` asks of its encoders before it swaps anything for good, and what it concludes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from crt_exp.data.glue import TASKS
from crt_exp.report import palette, table2_glue
from crt_exp.report.evidence import Claim, Gate, Interval, Unjudged, Verdict, detectable, independent, judged, won_by
from crt_exp.report.table2_runs import ELU, EXACT, JUDGED, UNIFORM, Kind, Setting
from crt_exp.studies.fidelity import Arm

LOW, HIGH = 4, 24           # mean |x + y|^2 at which the closed forms of FAVOR+ and FAVOR++ differ


@dataclass
class Found:
    """What was computed; keys as in `table2_runs`. kinds: those whose gates were passed; datasets: those on which the
    exact encoders beat both controls, and the first."""

    setting: Setting
    trained: dict[tuple[str, int], dict[str, Any]]                          # kind, seed
    unigrams: dict[str, float]                                              # kind
    looks: dict[tuple[str, int], dict[str, Any]]                            # kind, seed
    kinds: list[Kind] = field(default_factory=list)
    swaps: dict[tuple[str, Arm, int], float] = field(default_factory=dict)  # kind, arm, pair
    uptrained: dict[tuple[str, Arm, int], dict[str, Any]] = field(default_factory=dict)
    controls: dict[str, dict[str, Any]] = field(default_factory=dict)       # task
    datasets: list[str] = field(default_factory=list)
    tuned: dict[tuple[Arm, str, int], dict[str, Any]] = field(default_factory=dict)       # arm, task, seed
    pretrained: dict[str, dict[str, Any]] = field(default_factory=dict)     # attention
    scratch_unigram: float = float("nan")
    scratch: dict[tuple[str, str, int], dict[str, Any]] = field(default_factory=dict)     # attention, task, seed
    diverged: list[str] = field(default_factory=list)                       # runs of GLUE, which are not in these

    @property
    def fine_tuned(self) -> Kind | None:
        """The encoders from which task=glue starts."""
        return next((kind for kind in self.kinds if kind.fine_tuned), None)

    def looks_of(self, kind: Kind) -> list[dict[str, Any]]:
        return [look for (title, _), look in self.looks.items() if title == kind.title]


def label(arm: Arm) -> str:
    return palette.label(arm.name) + (f", m = {arm.m}" if arm.m else "")


# ---- gates


def gates(found: Found, kind: Kind) -> list[Gate]:
    setting, looks = found.setting, found.looks_of(kind)
    S = [s for look in looks for layer in look["S"] for s in layer]
    return [
        Gate(f"{kind.title}: what uniform attention costs directly after the swap, in nats, the least of the encoders",
             min(float(np.mean(look["uniform"])) for look in looks), setting.costs),
        Gate(f"{kind.title}: share of the heads whose mean |x + y|^2 lies between {LOW} and {HIGH}",
             float(np.mean([LOW <= s <= HIGH for s in S])), setting.heads),
        Gate(f"{kind.title}: error of FAVOR+ over that of FAVOR++, m = {setting.m}, on captured queries, keys and "
             "values, geometric mean over layers", error_ratio(looks), setting.error)]


def error_ratio(looks: Sequence[dict[str, Any]]) -> float:
    logs = [np.log(plain / better) for look in looks
            for plain, better in zip(*(look["errors"][name] for name in JUDGED))]
    return float(np.exp(np.mean(logs)))


def unjudged(found: Found, asked: Mapping[str, Sequence[Gate]]) -> list[Unjudged]:
    """Of each kind that failed a gate, what its layers alone say."""
    made = []
    for kind in (kind for kind in found.setting.kinds if kind not in found.kinds):
        ratios = [float(np.log(error_ratio([look]))) for look in found.looks_of(kind)]
        text = (f"{kind.title}: FAVOR++ is nearer to exact attention than FAVOR+, m = {found.setting.m}, by the errors "
                "of layers")
        made.append(Unjudged(Claim(text, independent(ratios), "in the logarithm"),
                             next(gate for gate in asked[kind.title] if not gate.passed)))
    return made


# ---- losses, by pair


def losses(found: Found, kind: Kind, arm: Arm, step: int) -> dict[int, float]:
    """pair -> held-out loss after that step, of the runs that did not diverge."""
    if step == 0:
        return {pair: loss for (title, other, pair), loss in found.swaps.items() if (title, other) == (kind.title, arm)}
    return {pair: run[str(step)] for (title, other, pair), run in found.uptrained.items()
            if (title, other) == (kind.title, arm) and str(step) in run}


def gap(found: Found, kind: Kind, first: Arm, second: Arm, step: int) -> np.ndarray:
    """Loss of the first above that of the second, nats, of each pair that has both."""
    a, b = losses(found, kind, first, step), losses(found, kind, second, step)
    return np.array([a[pair] - b[pair] for pair in a if pair in b])


def above(found: Found, kind: Kind, arm: Arm, step: int) -> np.ndarray:
    """Loss above that of exact attention trained on as long, of each pair."""
    return gap(found, kind, arm, EXACT, step)


def steps_of(found: Found, kind: Kind, arm: Arm) -> list[int]:
    """0, and those after which it was looked at."""
    trained = {int(step) for (title, other, _), run in found.uptrained.items() if (title, other) == (kind.title, arm)
               for step in run if step.isdecimal()}
    return [0, *sorted(trained)]


# ---- claims, each a difference that is above 0 where it holds


def verdicts(found: Found, asked: Mapping[str, Sequence[Gate]],
             of_glue: Sequence[tuple[Claim, Gate]]) -> list[Verdict | Unjudged]:
    judging = [*claims(found), *(claim for claim, gate in of_glue if gate.passed)]
    left = [Unjudged(claim, gate) for claim, gate in of_glue if not gate.passed]
    return [*judged(judging), *unjudged(found, asked), *left]


def claims(found: Found) -> list[Claim]:
    return [claim for kind in found.kinds for claim in [*judged_pairs(found, kind), *other_pairs(found, kind)]]


def judged_pairs(found: Found, kind: Kind) -> list[Claim]:
    made = []
    for m in found.setting.ms:
        plain, better = (Arm(name, m) for name in JUDGED)
        for step in (0, *(found.setting.steps if m in kind.trained_ms else ())):
            made += claim(f"{kind.title}: FAVOR++ is nearer to exact attention than FAVOR+ {when(step)}, m = {m}",
                          gap(found, kind, plain, better, step))
    return made


def other_pairs(found: Found, kind: Kind) -> list[Claim]:
    """Arms that join, directly after the swap; FAVOR++ beside the others of the paper's table, trained on."""
    m, end = found.setting.m, found.setting.steps[-1]
    better, made = Arm("favorpp", m), []
    for arm in (Arm("favorsharp", m), kind.near):
        made += claim(f"{kind.title}: {label(arm)} is nearer to exact attention than {label(better)} {when(0)}",
                      gap(found, kind, better, arm, 0))
    for arm in (Arm("relu", m), ELU, UNIFORM):
        made += claim(f"{kind.title}: {label(better)} is nearer to exact attention than {label(arm)} {when(end)}",
                      gap(found, kind, arm, better, end))
    return made


def when(step: int) -> str:
    return f"after {step} steps of uptraining" if step else "directly after the swap"


def claim(text: str, differences: np.ndarray) -> list[Claim]:
    """None where fewer than two pairs ended."""
    return [Claim(text, independent(differences), "nats")] if len(differences) > 1 else []


def glue_claims(found: Found) -> list[tuple[Claim, Gate]]:
    """Of each task, with what uniform attention costs there: where that is little, it cannot tell mechanisms apart."""
    glue, made = found.setting.glue, []
    for data, (how, m, runs, arm) in product(found.datasets, (
            ("swapped into exact encoders and fine-tuned", glue.m, found.tuned, Arm),
            ("pretrained from scratch", glue.scratch_m, found.scratch, lambda name, m: name))):
        of, (plain, better) = answers(runs, data), (arm(name, m) for name in JUDGED)
        exact, uniform = (scores(runs, arm(name, None), data) for name in ("exact", "uniform"))
        if {plain, better} <= of.keys() and exact and uniform:
            made.append((Claim(f"{data.upper()}: {how}, FAVOR++ scores above FAVOR+, m = {m}",
                               difference(found, data, of[better], of[plain]), "points"),
                         Gate(f"{data.upper()}: what uniform attention costs, {how}, in points",
                              float(np.mean(exact) - np.mean(uniform)), found.setting.points)))
    return made


# ---- GLUE


def answers(runs: dict[tuple[Any, str, int], dict[str, Any]], data: str) -> dict[Any, table2_glue.Runs]:
    """Of runs by arm, set and seed: arm -> seed -> answers on this set."""
    made: dict[Any, dict[int, list[float]]] = {}
    for (arm, other, seed), run in runs.items():
        if other == data:
            made.setdefault(arm, {})[seed] = run["answers"]
    return made


def difference(found: Found, data: str, first: table2_glue.Runs, second: table2_glue.Runs) -> Interval:
    return table2_glue.difference(data, first, second, found.controls[data]["labels"])


def scores(runs: Mapping[Any, dict[str, Any]], row: Any, data: str) -> list[float]:
    """Percent, of each seed."""
    return [100 * run["score"] for (name, other, _), run in runs.items() if (name, other) == (row, data)]


def ended(found: Found, runs: Mapping[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """The runs of GLUE whose loss stayed finite; the others are named in `found`."""
    for (name, data, seed), run in runs.items():
        if "diverged" in run:
            shown = f"from scratch, {palette.label(name)}" if isinstance(name, str) else label(name)
            found.diverged.append(f"{shown} on {data}, seed {seed}")
    return {key: run for key, run in runs.items() if "diverged" not in run}


def has_signal(found: Found, data: str) -> bool:
    """Whether the exact encoders beat both controls."""
    exact = scores(found.tuned, EXACT, data)
    return bool(exact) and float(np.mean(exact)) > table2_glue.best_control(data, found.controls[data])


# ---- what is told of them


def power(found: Found) -> list[str]:
    """What the pairs can show, judged by the spread of their differences at step 0."""
    told = []
    for kind in found.kinds:
        for m in found.setting.ms:
            d = gap(found, kind, *(Arm(name, m) for name in JUDGED), 0)
            told.append(f"{kind.title}, m = {m}: FAVOR+ lies {independent(d):+.3f} nats above FAVOR++ directly after "
                        f"the swap ({len(d)} pairs); so many pairs show a difference of {detectable(d):.3f} nats with "
                        "a probability of 80%, were it the only claim")
    return told


def beaten(found: Found) -> str:
    """Where uniform attention loses no more than another arm, on the same pairs."""
    places: dict[str, list[str]] = {}
    count = 0
    for kind in found.kinds:
        for step in (0, *found.setting.steps):
            for arm in kind.swapped(found.setting.ms):
                d = gap(found, kind, arm, UNIFORM, step)
                if arm in (EXACT, UNIFORM) or not len(d):
                    continue
                count += 1
                if np.mean(d) >= 0:
                    places.setdefault(f"{kind.title}, {when(step)}", []).append(label(arm))
    return won_by("uniform attention", places, count)


def beaten_on_glue(found: Found) -> str:
    """Arms that score no better than uniform attention that was trained as they were, or than no model at all."""
    places: dict[str, list[str]] = {}
    count = 0
    for data, controls in found.controls.items():
        groups = ((found.tuned, UNIFORM, label, ""), (found.scratch, "uniform", palette.label, "from scratch, "))
        for runs, uniform, called, how in groups:
            mean = {row: np.mean(scores(runs, row, data)) for row in dict.fromkeys(row for row, other, _ in runs
                                                                                  if other == data)}
            bar = max(table2_glue.best_control(data, controls), mean.get(uniform, -np.inf))
            for row in (row for row in mean if row != uniform):
                count += 1
                if mean[row] <= bar:
                    places.setdefault(TASKS[data].folder, []).append(f"{how}{called(row)}")
    return won_by("the best of uniform attention and answers without a model", places, count) if count else ""
