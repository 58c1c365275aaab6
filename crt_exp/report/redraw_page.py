"""The page of `redraw`: verdicts first, then what they rest on, and its picture."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from crt_exp.report import palette
from crt_exp.report.evidence import Gate, Unjudged, Verdict, detectable, independent
from crt_exp.report.fig4_page import show
from crt_exp.report.protein_page import colour
from crt_exp.report.redraw_runs import Arm, Found, Setting, World
from crt_exp.report.redraw_verdicts import (
    RECOVERED,
    above,
    curve,
    error_ratio,
    gap,
    recovery,
    steps_to_recover,
    verdicts_of,
)
from crt_exp.report.writing import label_ends, markdown, new_figure, write_report

TITLE = "Performers Figures 5 and 15: exact weights in random features, recovery and redraws"
POLICY = {0: "", 1: ", redrawn every step", 100: ", every 100 steps"}
LINES = {0: "-", 1: "--", 100: ":"}


def write(size: str, setting: Setting, found: dict[World, Found], asked: dict[World, list[Gate]],
          seconds: float) -> None:
    verdicts = verdicts_of(setting, found, asked)
    said = summary(setting, found, verdicts)
    parts = [said, ""]
    for world in setting.worlds:
        parts += section(setting, world, found[world], asked[world])
    rows = [*csv_rows(setting, found), *(verdict.row() for verdict in verdicts)]
    title = TITLE + ("" if size == "full" else " (small models)")
    path = write_report("redraw", title, "\n".join(parts), rows, figure(setting, found), facts(size, setting), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def summary(setting: Setting, found: dict[World, Found], verdicts: Sequence[Verdict | Unjudged]) -> str:
    return "\n".join([*controls_that_win(setting, found), *map(str, verdicts), "", reached(setting, found), "",
                      power(setting, found)])


def section(setting: Setting, world: World, found: Found, asked: Sequence[Gate]) -> list[str]:
    failed = [] if all(gate.passed for gate in asked) else [
        "A gate failed, so this world says little of mechanisms: its figures stand here to be seen.\n"]
    return [f"## {str(world).capitalize()}\n", *map(str, asked), "", *failed,
            f"The measured error of FAVOR+ is {error_ratio(found, 'measured'):.3g} times that of FAVOR++ (m = "
            f"{setting.base.m}, geometric mean over layers), which is no gate.\n",
            "Directly after the swap, on test:\n", swap_table(setting, found), "Trained on:\n",
            recovery_table(setting, world, found), "Layers of the exact models:\n", layer_table(found)]


# ---- text


def controls_that_win(setting: Setting, found: dict[World, Found]) -> list[str]:
    """Where uniform attention's loss at the end is no higher than that of random features."""
    told = []
    for world, here in found.items():
        end = setting.steps(world)[-1]
        beaten = [arm_name(arm) for arm in dict.fromkeys(arm for arm, _ in here.trained) if arm.random and
                  len(d := gap(here, arm, Arm("uniform"), setting, end)) and np.mean(d) >= 0]
        if beaten:
            told.append(f"**{world}: uniform attention, a control, ends no worse than {', '.join(beaten)}.**\n")
    return told


def reached(setting: Setting, found: dict[World, Found]) -> str:
    """In how many runs the accuracy is back within the limit."""
    told = []
    for world, here in found.items():
        for name in ("favorp", "favorpp"):
            steps = steps_to_recover(here, Arm(name), setting)
            if steps:
                within = sum(step <= setting.limit(world) for step in steps.values())
                told.append(f"{world}, {palette.label(name)}: {within} of {len(steps)} runs")
    return (f"Runs with {RECOVERED:.0%} of the lost accuracy back within {setting.share:.0%} of the exact model's "
            f"steps: {'; '.join(told)}." if told else "")


def power(setting: Setting, found: dict[World, Found]) -> str:
    here, limit = found[setting.main], setting.limit(setting.main)
    pairs = gap(here, Arm("favorp"), Arm("favorpp"), setting, limit)
    told = "" if len(pairs) < 2 else (
        f"Between FAVOR+ and FAVOR++ after {limit} steps ({setting.main}) {detectable(pairs):.2g} nats would be shown, "
        f"were it the only claim, with a probability of 80% ({len(pairs)} pairs). ")
    return (f"{told}Arms of one seed are pairs: the same exact model, order and masks. There are {setting.base.seeds} "
            "exact models, and seeds go round them: intervals are mostly over noise and order.")


def arm_name(arm: Arm) -> str:
    return palette.label(arm.name) + POLICY.get(arm.redraw, f", every {arm.redraw} steps")


def facts(size: str, setting: Setting) -> str:
    base = setting.base
    told = "; ".join(f"{world}: `{' '.join(base.data(world.dataset))} trainer.steps={base.steps[world.dataset]}`"
                     for world in dict.fromkeys(World(w.dataset, setting.main.direction) for w in setting.worlds))
    return (f"SIZE={size}. Exact models: {base.seeds} of each world, those of `make proteins`: {told}. Swapped: "
            f"{setting.swaps} seeds of noise ({setting.other_swaps} on proteomes); trained on with the same options, "
            f"`{' '.join(setting.options)}`, {setting.seeds} seeds of noise and order ({setting.other_seeds} on "
            f"proteomes), new optimiser, m = {base.m}, orthogonal. Curves are of validation, which chooses nothing. "
            "Intervals: 95%, Student; p-values with Holm's correction.")


# ---- tables


def swap_table(setting: Setting, found: Found) -> str:
    worst = np.mean([*above(found, "uniform", None).values()])
    rows = []
    for name, m in dict.fromkeys((name, m) for name, m, _ in found.swaps):
        loss, accuracy = (np.array([*above(found, name, m, metric).values()]) for metric in ("loss", "accuracy"))
        rows.append([palette.label(name), m or "", len(loss), show(loss, "+.4f"), show(100 * accuracy, "+.2f"),
                     show(loss / worst, ".2f") if worst > 0 else ""])
    return markdown(["attention", "m", "n", "loss above exact, nats", "accuracy above exact, points",
                     "of what uniform costs"], rows)


def recovery_table(setting: Setting, world: World, found: Found) -> str:
    """Loss above the exact model as it was at the swap, and when the accuracy is back."""
    steps = setting.steps(world)
    shown = [steps[0], setting.limit(world), steps[-1]]
    rows = []
    for arm in dict.fromkeys(arm for arm, _ in found.trained):
        points, runs = curve(found, arm, setting, "loss"), [r for (a, _), r in found.trained.items() if a == arm]
        back = recovery(found, arm, setting, setting.limit(world))
        rows.append([arm_name(arm), *(show([*points.get(step, {}).values()], "+.3f") for step in (0, *shown)),
                     show(100 * back, "+.2f"), first_step(steps_to_recover(found, arm, setting)),
                     f"{sum('diverged' in run for run in runs)} of {len(runs)}"])
    return markdown(["attention", "loss above exact at step 0", *(f"after {step}" for step in shown),
                     f"accuracy beyond {RECOVERED:.0%} recovered after {setting.limit(world)}, points",
                     "first step with that, median", "diverged"], rows)


def first_step(steps: dict[int, float]) -> str:
    middle = float(np.median([*steps.values()])) if steps else math.inf
    return "not reached" if math.isinf(middle) else f"{middle:g}"


def layer_table(found: Found) -> str:
    rows, names = [], ("favorp", "favorpp")
    for i in range(len(next(iter(found.layers.values())))):
        of = [layers[i] for layers in found.layers.values()]
        S = [s for layer in of for s in layer["S"]]
        rows.append([i, f"{np.mean(S):.1f} ({min(S):.1f} to {max(S):.1f})",
                     *(f"{np.mean([layer[which][name] for layer in of]):.3g}" for which in ("predicted", "measured")
                       for name in names), f"{np.mean([layer['uniform'] for layer in of]):.3g}"])
    columns = [f"{which} error of {palette.label(name)}" for which in ("predicted", "measured") for name in names]
    return markdown(["layer", "mean \\|x + y\\|^2 (heads)", *columns, "uniform's error"], rows)


def csv_rows(setting: Setting, found: dict[World, Found]) -> list[dict[str, Any]]:
    rows = []
    for world, here in found.items():
        for (name, m, seed), run in here.swaps.items():
            rows += [{"world": str(world), "what": f"swap, {split}", "attention": name, "m": m or "", "seed": seed,
                      "step": 0, **run[split]} for split in run]
        for (arm, seed), run in here.trained.items():
            head = {"world": str(world), "attention": arm.name, "redraw_every": arm.redraw, "seed": seed}
            rows += [head | {"what": "uptrained", **point} for point in run.get("curve", [])]
            rows += [head | {"what": "diverged", "said": run["diverged"]}] if "diverged" in run else []
    return rows


# ---- picture


def figure(setting: Setting, found: dict[World, Found]):
    """A row for each world: directly after the swap, and in recovery."""
    fig, axes = new_figure(len(found), 2, figsize=(13, 4 * len(found)), squeeze=False, width_ratios=(1, 1.4))
    for (left, right), world in zip(axes, setting.worlds):
        draw_swap(left, world, found[world])
        draw_recovery(right, setting, world, found[world])
    fig.tight_layout()
    return fig


def draw_swap(ax, world: World, found: Found) -> None:
    arms = [arm for arm in dict.fromkeys((name, m) for name, m, _ in found.swaps) if arm[0] != "exact"]
    for row, (name, m) in enumerate(arms):
        values = [*above(found, name, m).values()]
        half = independent(values).half if len(values) > 1 else None
        ax.errorbar(np.mean(values), row, xerr=half, color=colour(name), marker="o", ms=5, lw=1.2, capsize=2)
    ax.axvline(0, color=palette.EXACT, lw=1)
    ax.set_yticks(range(len(arms)), [palette.label(name) + (f", m = {m}" if m else "") for name, m in arms])
    ax.invert_yaxis()
    ax.set_title(f"{world}: loss above exact directly after the swap, nats")


def draw_recovery(ax, setting: Setting, world: World, found: Found) -> None:
    """Means over seeds, with intervals where nothing is redrawn."""
    ends = []
    for arm in dict.fromkeys(arm for arm, _ in found.trained):
        points = curve(found, arm, setting, "loss")
        if not points:
            continue
        steps = sorted(points)
        losses = [[*points[step].values()] for step in steps]
        mean = np.array([np.mean(each) for each in losses])
        ax.plot(steps, mean, color=colour(arm.name), ls=LINES.get(arm.redraw, ":"), lw=1.4, marker="o", ms=2.5)
        if arm.redraw == 0 and min(map(len, losses)) > 1:
            half = np.array([independent(each).half for each in losses])
            ax.fill_between(steps, mean - half, mean + half, color=colour(arm.name), alpha=0.12, lw=0)
        ends.append((arm_name(arm), steps[-1], mean[-1], colour(arm.name)))
    ax.axvline(setting.limit(world), color=palette.CONTROL, lw=1)
    ax.set(xlabel="step", title=f"{world}: loss above the exact model, nats\n"
                                f"(grey line: {setting.share:.0%} of its steps)")
    label_ends(ax, ends)
