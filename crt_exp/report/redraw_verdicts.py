"""What `redraw` asks of exact models before it trains an arm, and what it concludes."""

import math

import numpy as np

from crt_exp.report import palette
from crt_exp.report.evidence import Claim, Gate, Unjudged, Verdict, independent, judged
from crt_exp.report.redraw_runs import Arm, Found, Setting, World

RECOVERED = 0.9  # of the accuracy that the swap loses


# ---- gates: can these exact models tell mechanisms apart?


def gates(setting: Setting, found: Found) -> list[Gate]:
    S, least = [s for layers in found.layers.values() for layer in layers for s in layer["S"]], setting.least
    costs = np.mean([*above(found, "uniform", None).values()])
    return [
        Gate("what uniform attention costs directly after the swap, in nats", float(costs), least.costs),
        Gate("share of the heads whose mean |x + y|^2 lies between 4 and 24", float(np.mean([4 <= s <= 24 for s in S])),
             least.heads),
        Gate(f"predicted error of FAVOR+ over that of FAVOR++, m = {setting.m}, geometric mean over layers",
             error_ratio(found, "predicted"), least.error)]


def above(found: Found, name: str, m: int | None, metric: str = "loss", split: str = "test") -> dict[int, float]:
    """seed -> how far it lies above its exact model, directly after the swap."""
    models = sum(other == "exact" for other, _, _ in found.swaps)
    return {seed: run[split][metric] - found.swaps["exact", None, seed % models][split][metric]
            for (other, here, seed), run in found.swaps.items() if (other, here) == (name, m)}


def error_ratio(found: Found, which: str) -> float:
    """Error of FAVOR+ over that of FAVOR++. The measured one is told and is no gate: that would choose settings in
    which FAVOR++ wins."""
    logs = [math.log(layer[which]["favorp"] / layer[which]["favorpp"])
            for layers in found.layers.values() for layer in layers]
    return float(np.exp(np.mean(logs)))


# ---- recovery, on validation, which chooses nothing


def curve(found: Found, arm: Arm, setting: Setting, metric: str) -> dict[int, dict[int, float]]:
    """step -> seed -> how far the run lies above its exact model as it was at the swap; step 0 is the swap itself."""
    m = setting.m if arm.random else None
    models, points = setting.base.seeds, {}
    for (other, seed), run in found.trained.items():
        if other != arm or "curve" not in run:
            continue
        base = found.swaps["exact", None, seed % models]["validation"][metric]
        first = found.swaps[arm.name, m, seed if arm.random else seed % models]["validation"][metric]
        for step, value in [(0, first), *((point["step"], point[metric]) for point in run["curve"])]:
            points.setdefault(step, {})[seed] = value - base
    return points


def recovery(found: Found, arm: Arm, setting: Setting, step: int) -> np.ndarray:
    """By how much more than RECOVERED of the accuracy lost is back after that step, of each seed."""
    points = curve(found, arm, setting, "accuracy")
    lost, left = points.get(0, {}), points.get(step, {})
    return np.array([(1 - RECOVERED) * -lost[seed] + left[seed] for seed in left])


def steps_to_recover(found: Found, arm: Arm, setting: Setting) -> dict[int, float]:
    """seed -> the first evaluated step with RECOVERED of the accuracy back; infinity where there is none."""
    points = curve(found, arm, setting, "accuracy")
    lost = points.get(0, {})
    return {seed: next((step for step in sorted(points) if step and points[step].get(seed, -math.inf)
                        >= (1 - RECOVERED) * lost[seed]), math.inf) for seed in lost}


def gap(found: Found, first: Arm, second: Arm, setting: Setting, step: int) -> np.ndarray:
    """Loss of the first above that of the second after that step, of each seed with which both ran."""
    a, b = (curve(found, arm, setting, "loss").get(step, {}) for arm in (first, second))
    return np.array([a[seed] - b[seed] for seed in a if seed in b])


# ---- the papers' orderings, each as a difference that is above 0 where it holds, paired by seed


def verdicts_of(setting: Setting, found: dict[World, Found], asked: dict[World, list[Gate]]
                ) -> list[Verdict | Unjudged]:
    """None is judged in a world whose exact models cannot tell mechanisms apart: it counts in no correction."""
    judging, left = [], []
    for world, here in found.items():
        made = [*orderings(setting, world, here), *recoveries(setting, world, here)]
        claims = [named(world, claim) for claim in made]
        if failed := [gate for gate in asked[world] if not gate.passed]:
            left += [Unjudged(claim, failed[0]) for claim in claims]
        else:
            judging += claims
    return [*judged(judging), *left]


def named(world: World, claim: Claim) -> Claim:
    return Claim(f"{world}: {claim.text}", claim.difference, claim.unit)


def recoveries(setting: Setting, world: World, found: Found) -> list[Claim]:
    limit, made = setting.limit(world), []
    for name in ("favorpp", "favorp"):
        text = (f"{palette.label(name)} has {RECOVERED:.0%} of the accuracy that it loses back after {limit} steps, "
                f"{setting.share:.0%} of the exact model's")
        made += claim(text, 100 * recovery(found, Arm(name), setting, limit), "points beyond")
    return made


def orderings(setting: Setting, world: World, found: Found) -> list[Claim]:
    made, plain, better = [], Arm("favorp"), Arm("favorpp")
    for m in setting.ms:
        a, b = above(found, "favorp", m), above(found, "favorpp", m)
        made += claim(f"directly after the swap FAVOR++ loses less than FAVOR+, m = {m}",
                      np.array([a[seed] - b[seed] for seed in a if seed in b]), "nats")
    steps, end = setting.steps(world), setting.steps(world)[-1]
    for step in dict.fromkeys((steps[0], setting.limit(world), end)):
        made += claim(f"after {step} steps FAVOR++ loses less than FAVOR+",
                      gap(found, plain, better, setting, step), "nats")
    if world != setting.main:
        return made
    made += claim(f"after {end} steps FAVOR+ without redraws lies above exact attention trained on as long",
                  gap(found, plain, Arm("exact"), setting, end), "nats")
    for redraw, often in ((1, "every step"), (100, "every 100 steps")):
        for arm in (plain, better):
            text = f"after {end} steps {palette.label(arm.name)} redrawn {often} loses less than without redraws"
            made += claim(text, gap(found, arm, arm._replace(redraw=redraw), setting, end), "nats")
    made += claim(f"after {steps[0]} steps SMREG loses less than FAVOR+, redrawn every step",
                  gap(found, plain._replace(redraw=1), Arm("smreg", 1), setting, steps[0]), "nats")
    made += claim(f"after {end} steps FAVOR+ loses less than trigonometric features",
                  gap(found, Arm("favor"), plain, setting, end), "nats")
    return made


def claim(text: str, differences: np.ndarray, unit: str) -> list[Claim]:
    """None where fewer than two pairs of runs ended."""
    return [Claim(text, independent(differences), unit)] if len(differences) > 1 else []
