"""What `fig4_left` asks of its exact checkpoint before it trains an arm, and what it concludes from the arms."""

import numpy as np

from crt_exp.report.evidence import Claim, Gate, Unjudged, Verdict, independent, judged, paired
from crt_exp.report.fig4_runs import LINEAR, Found, Setting

NEAR = 0.1  # nats: a run from scratch that ends no further above exact attention counts as stable


# ---- gates: can this checkpoint tell mechanisms apart?


def gates(setting: Setting, found: Found) -> list[Gate]:
    S, least = [s for layer in found.layers["favorp", 0] for s in layer["S"]], setting.least
    return [
        Gate("accuracy of the exact checkpoint over that of a guess", found.exact["accuracy"] * setting.classes,
             least.above_chance),
        Gate("what uniform attention costs directly after the swap, in nats",
             swap_loss(found, "uniform") - swap_loss(found, "exact"), least.costs),
        Gate("share of the heads whose mean |x + y|^2 lies between 4 and 24", float(np.mean([4 <= s <= 24 for s in S])),
             least.heads),
        Gate("predicted error of FAVOR+ over that of FAVOR++, geometric mean over layers",
             error_ratio(found, "predicted"), least.error)]


def swap_loss(found: Found, name: str) -> float:
    """Of a control, which draws no noise."""
    return found.swaps[name, None, 0]["loss"]


def error_ratio(found: Found, which: str) -> float:
    """Error of FAVOR+ over that of FAVOR++, geometric mean over layers and draws. The measured one is told and is no
    gate: that would choose settings in which FAVOR++ wins."""
    logs = [np.log(plain[which] / better[which]) for name, seed in found.layers if name == "favorp"
            for plain, better in zip(found.layers["favorp", seed], found.layers["favorpp", seed])]
    return float(np.exp(np.mean(logs)))


def scratch_gate(setting: Setting, found: Found) -> Gate:
    """Whether so many steps from new weights tell attention from none."""
    return Gate("what uniform attention costs from scratch, in nats",
                float(np.mean(difference(found.scratch, "uniform", "exact", "loss"))), setting.least.costs)


# ---- the paper's orderings, each as a difference that is above 0 where it holds, paired by seed


def verdicts(setting: Setting, found: Found) -> list[Verdict | Unjudged]:
    """Those from scratch only where attention matters there."""
    gate, from_scratch = scratch_gate(setting, found), scratch_claims(setting, found)
    if gate.passed:
        return list(judged([*claims(setting, found), *from_scratch]))
    return [*judged(claims(setting, found)), *(Unjudged(claim, gate) for claim in from_scratch)]


def claims(setting: Setting, found: Found) -> list[Claim]:
    """Of the exact checkpoint, swapped and uptrained."""
    made = []
    for m in setting.ms:
        losses = ([found.swaps[name, m, seed]["loss"] for seed in range(setting.swaps)] for name in LINEAR)
        made.append(Claim(f"directly after the swap FAVOR++ loses less than FAVOR+, m = {m}", paired(*losses), "nats"))
    for step in setting.steps:
        made += claim(f"after {step} steps of uptraining FAVOR++ loses less than FAVOR+, m = {setting.m}",
                      difference(found.uptrained, "favorp", "favorpp", "loss", step), "nats")
    return made + claim(f"uptrained, FAVOR++ ends more accurate than FAVOR+, m = {setting.m}",
                        100 * difference(found.uptrained, "favorpp", "favorp", "accuracy"), "points")


def scratch_claims(setting: Setting, found: Found) -> list[Claim]:
    return [*claim(f"from scratch, FAVOR++ ends more accurate than FAVOR+, m = {setting.m}",
                   100 * difference(found.scratch, "favorpp", "favorp", "accuracy"), "points"),
            *claim(f"from scratch FAVOR++ ends less than {NEAR:g} nats above exact attention",
                   NEAR - difference(found.scratch, "favorpp", "exact", "loss"), "nats")]


def claim(text: str, differences: np.ndarray, unit: str) -> list[Claim]:
    """None where fewer than two pairs of runs ended; the report counts those that diverged."""
    return [Claim(text, independent(differences), unit)] if len(differences) > 1 else []


def difference(curves: dict, first: str, second: str, metric: str, step: int | None = None) -> np.ndarray:
    """first - second, of each seed with which both ended."""
    a, b = (after(curves, name, metric, step) for name in (first, second))
    return np.array([a[seed] - b[seed] for seed in a if seed in b])


def after(curves: dict, name: str, metric: str, step: int | None = None) -> dict[int, float]:
    """seed -> the metric after that step (None: at the end), of the runs that did not diverge."""
    return {seed: next(r[metric] for r in reversed(run["curve"]) if step in (None, r["step"]))
            for (other, seed), run in curves.items() if other == name and "curve" in run}
