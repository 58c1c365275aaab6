"""make kernels: Figures 16 to 18 of Performers, generalised attention with many kernels, with and without denominators.

The data and the models are those of `proteins`, trained for fewer steps. A run whose loss is not finite is stopped by
the trainer; it is named and counted here, beside those that end finite and no better than the frequencies of letters.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple, get_args

import numpy as np

from crt_exp.attention.generalized import Function, Generalized
from crt_exp.report import palette, protein_runs
from crt_exp.report.evidence import Claim, Gate, Unjudged, Verdict, detectable, independent, judged, won_by
from crt_exp.report.fig4_page import show
from crt_exp.report.protein_page import COSTS
from crt_exp.report.protein_runs import (
    DATASETS,
    GENERATED,
    REAL,
    SOURCE,
    SOURCES,
    B,
    Dataset,
    Setting,
    U,
    train,
    training,
    values,
)
from crt_exp.report.writing import Cells, label_ends, markdown, new_figure, write_report

TITLE = "Performers Figures 16 to 18: kernels of generalised attention on proteins"
STEPS = {"small": {GENERATED: 800, REAL: 80}, "gpu": {GENERATED: 3000, REAL: 1500},
         "full": {GENERATED: 5000, REAL: 100_000}}
NEAR = 0.02  # nats that leaving the denominators out may cost and count as not hurting
LINEAR = "Linear Transformer"
COLOURS = dict(zip(get_args(Function), ("#009E73", "#56B4E9", "#D55E00", "#0072B2", "#CC79A7", "#E69F00", "#882255",
                                        "#117733", "#7A5195"), strict=True))


class Arm(NamedTuple):
    """A kernel phi(u) = f(W u), or f(u) where projection is False, or a control by its name."""

    kernel: str
    normalize: bool = True
    projection: bool = True

    @property
    def control(self) -> bool:
        return self.kernel in ("exact", "uniform")

    def __str__(self) -> str:
        name = self.kernel if self.projection else f"{self.kernel} without projection ({LINEAR})"
        return name if self.normalize else f"{name} without denominators"

    def options(self, setting: Setting) -> tuple[str, ...]:
        """Behind the choice of attention."""
        given = (f"attention.kernel={self.kernel}", f"attention.normalize={str(self.normalize).lower()}")
        if self.projection:
            return (*given, f"features.m={setting.m}")
        return (*given, "attention.phi.projection=false", "attention.phi.kernel_epsilon=0")  # as its authors have it


KERNELS = [Arm(f, normalize) for normalize in (True, False) for f in get_args(Function)]
LINEAR_TRANSFORMER = Arm("elu+1", projection=False)
CONTROLS = [Arm("exact"), Arm("uniform")]
ARMS = {U: [*CONTROLS, *KERNELS, LINEAR_TRANSFORMER, LINEAR_TRANSFORMER._replace(normalize=False)],
        B: [LINEAR_TRANSFORMER]}  # Figure 18 has it in both directions
Found = dict[tuple[str, Arm, int], dict[str, Any]]


def main(size: str) -> None:
    setting, cells = replace(protein_runs.SETTINGS[size], steps=STEPS[size]), Cells("kernels", SOURCES)
    keys = {dataset: runs_of(setting, dataset) for dataset in DATASETS}
    for dataset, here in keys.items():
        cells.fill(list(here.values()), train, dataset, setting.workers)
    write(size, setting, {dataset: values(cells, here) for dataset, here in keys.items()}, cells.seconds())


def runs_of(setting: Setting, dataset: Dataset) -> dict[tuple[str, Arm, int], dict[str, Any]]:
    return {(way, arm, seed): run_of(arm, way, seed, setting, dataset)
            for seed in range(setting.seeds) for way, arms in ARMS.items() for arm in arms}


def run_of(arm: Arm, way: str, seed: int, setting: Setting, dataset: Dataset) -> dict[str, Any]:
    if arm.control:
        return {"overrides": training(arm.kernel, way, seed, setting, dataset)["overrides"]}
    return training("generalized", way, seed, setting, dataset, more=arm.options(setting))


# ---- what was found


def last(found: Found, arm: Arm, metric: str, way: str = U) -> dict[int, float]:
    """seed -> the metric on test, of the runs that ended with a number."""
    return {seed: run["last"][metric] for (d, other, seed), run in found.items()
            if (d, other) == (way, arm) and "last" in run and run["last"][metric] is not None}


def mean(found: Found, arm: Arm, metric: str) -> float:
    """Of the runs that ended with a number; of none, infinite."""
    return float(np.mean([*last(found, arm, metric).values()] or [np.inf]))


def difference(found: Found, first: Arm, second: Arm, metric: str) -> np.ndarray:
    a, b = last(found, first, metric), last(found, second, metric)
    return np.array([a[seed] - b[seed] for seed in a if seed in b])


def diverged(found: Found, arm: Arm, way: str = U) -> list[str]:
    """What the runs said that were stopped, seed by seed."""
    return [f"seed {seed}: {run['diverged']}" for (d, other, seed), run in found.items()
            if (d, other) == (way, arm) and "diverged" in run]


def useless(found: Found, arm: Arm, way: str = U) -> int:
    """How many ended finite and no better than the frequencies of letters."""
    loss, unigram = (last(found, arm, metric, way) for metric in ("perplexity", "unigram_perplexity"))
    return sum(loss[seed] >= unigram[seed] for seed in loss)


def best_other(found: Found) -> Arm | None:
    """The kernel beside ReLU, with denominators, that is best on validation: it is compared on test."""
    ends = {arm: [run["curve"][-1]["accuracy"] for (way, other, _), run in found.items()
                  if (way, other) == (U, arm) and run.get("curve")]
            for arm in KERNELS if arm.normalize and arm.kernel != "relu"}
    ended = {arm: np.mean(each) for arm, each in ends.items() if each}
    return max(ended, key=ended.get) if ended else None


def gate(found: Found) -> Gate:
    """It fails where no exact model ended beside a uniform one."""
    costs = difference(found, *CONTROLS[::-1], "loss")
    return Gate("what uniform attention costs (U), in nats", float(np.mean(costs)) if len(costs) else np.nan, COSTS)


def verdicts_of(found: dict[Dataset, Found]) -> list[Verdict | Unjudged]:
    """Of both sources together; none is judged where attention gains too little."""
    judging, left = [], []
    for dataset, here in found.items():
        asked = gate(here)
        made = [replace(claim, text=f"{SOURCE[dataset]}: {claim.text}") for claim in claims(here)]
        if asked.passed:
            judging += made
        else:
            left += [Unjudged(claim, asked) for claim in made]
    return [*judged(judging), *left]


def claims(found: Found) -> list[Claim]:
    relu, other = Arm("relu"), best_other(found)
    told = [("ReLU ends more accurate than exact attention", 100 * difference(found, relu, CONTROLS[0], "accuracy"),
             "points"),
            (f"without denominators ReLU ends less than {NEAR:g} nats above what it is with them",
             NEAR - difference(found, relu._replace(normalize=False), relu, "loss"), "nats"),
            (f"ReLU ends more accurate than the {LINEAR}",
             100 * difference(found, relu, LINEAR_TRANSFORMER, "accuracy"), "points")]
    if other:
        told.insert(1, (f"ReLU ends more accurate than {other}, on validation the best of the others",
                        100 * difference(found, relu, other, "accuracy"), "points"))
    return [Claim(text, independent(differences), unit) for text, differences, unit in told if len(differences) > 1]


# ---- the page


def write(size: str, setting: Setting, found: dict[Dataset, Found], seconds: float) -> None:
    verdicts = verdicts_of(found)
    said = summary(found, verdicts)
    body = "\n".join([said, "", *(section(dataset, here) for dataset, here in found.items()), TABLE])
    title = TITLE + ("" if size == "full" else " (small models)")
    path = write_report("kernels", title, body, csv_rows(found, verdicts), figure(found), facts(size, setting), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def summary(found: dict[Dataset, Found], verdicts: Sequence[Verdict | Unjudged]) -> str:
    return "\n".join([controls_that_win(found), "", *map(str, verdicts), "", *map(power, found, found.values())])


def section(dataset: Dataset, found: Found) -> str:
    return "\n".join([f"## {SOURCE[dataset].capitalize()}\n", str(gate(found)), "", stopped(found), "",
                      "Next letters (U):\n", table(found), *both_ways(found)])


def controls_that_win(found: dict[Dataset, Found]) -> str:
    """Which arms, exact attention among them, end worse on test than uniform attention, and than the frequencies of
    letters; so do those of which no run ended."""
    arms = [arm for arm in ARMS[U] if arm != CONTROLS[1]]
    uniform, letters = {}, {}
    for dataset, here in found.items():
        least = mean(here, CONTROLS[1], "loss")
        uniform[SOURCE[dataset]] = [str(arm) for arm in arms if mean(here, arm, "loss") > least]
        letters[SOURCE[dataset]] = [str(arm) for arm in arms if not last(here, arm, "loss") or mean(
            here, arm, "perplexity") > mean(here, arm, "unigram_perplexity")]
    of = len(arms) * len(found)
    return f"{won_by('uniform attention', uniform, of)}\n\n{won_by('the law of letters, by frequency', letters, of)}"


def stopped(found: Found) -> str:
    """The runs that diverged, counted by denominators and sign, each named."""
    told, total = [], 0
    for way, arms in ARMS.items():
        for arm in arms:
            messages = diverged(found, arm, way)
            total += len(messages)
            told += [f"- {arm} ({way}), {message}" for message in messages]
    first = f"{total} of {len(found)} runs diverged: their loss, gradient or weights were no numbers."
    linear = sum(len(diverged(found, LINEAR_TRANSFORMER, way)) for way in (U, B))
    counted = sum(arm == LINEAR_TRANSFORMER for _, arm, _ in found)
    return "\n".join([f"{first} Of the {LINEAR} {linear} of {counted} did (Performers Figure 18, at 36 layers: all).",
                      *told])


def power(dataset: Dataset, found: Found) -> str:
    pairs = difference(found, Arm("relu"), CONTROLS[0], "accuracy")
    if len(pairs) < 2:
        return ""
    return (f"On {SOURCE[dataset]} a difference between ReLU and exact attention would be shown, were it the only "
            f"claim, with a probability of 80% from {100 * detectable(pairs):.2g} points of accuracy on ({len(pairs)} "
            "pairs).\n")


TABLE = ("Test split, mean over seeds with its interval. Of positive kernels denominators cannot vanish. Diverged: "
         "stopped by a number that is not finite. Useless: ended finite, no better than the frequencies of letters.\n")


def table(found: Found) -> str:
    rows = [row(found, str(arm), arm, arm._replace(normalize=False)) for arm in
            [*CONTROLS, *(arm for arm in KERNELS if arm.normalize), LINEAR_TRANSFORMER]]
    columns = [f"{what}{how}" for how in ("", ", no denominators")
               for what in ("accuracy %", "loss, nats", "diverged", "useless")]
    return markdown(["kernel", "positive", *columns], rows)


def row(found: Found, name: str, *pair: Arm) -> list[Any]:
    cells: list[Any] = [name, "" if pair[0].control else "yes" if Generalized(f=pair[0].kernel).positive else "no"]
    for arm in pair:
        runs = sum((way, other) == (U, arm) for way, other, _ in found)
        if not runs:
            cells += 4 * [""]
            continue
        accuracy, loss = (np.array([*last(found, arm, metric).values()]) for metric in ("accuracy", "loss"))
        cells += [show(100 * accuracy, ".2f"), show(loss), f"{len(diverged(found, arm))} of {runs}",
                  f"{useless(found, arm)} of {runs}"]
    return cells


def both_ways(found: Found) -> list[str]:
    """The Linear Transformer bidirectional, beside the empirical baseline of masked letters."""
    accuracy = last(found, LINEAR_TRANSFORMER, "accuracy", B)
    if not accuracy:
        return []
    unigram = next(iter(last(found, LINEAR_TRANSFORMER, "unigram_accuracy", B).values()))
    return [f"Masked letters (B): the {LINEAR} gets {show([100 * a for a in accuracy.values()], '.2f')}% right, the "
            f"empirical baseline {100 * unigram:.2f}%.\n"]


def csv_rows(found: dict[Dataset, Found], verdicts: Sequence[Verdict | Unjudged]) -> list[dict[str, Any]]:
    rows = []
    for dataset, (way, arm, seed), run in ((d, key, run) for d, runs in found.items() for key, run in runs.items()):
        head = {"dataset": dataset, "direction": way, **arm._asdict(), "seed": seed}
        rows += [head | {"what": "validation", **point} for point in run.get("curve", [])]
        rows.append(head | ({"what": "diverged", "said": run["diverged"]} if "diverged" in run else {"what": "test"} | {
            key: run["last"][key] for key in ("loss", "accuracy", "perplexity", "unigram_perplexity")}))
    return [*rows, *(verdict.row() for verdict in verdicts)]


def facts(size: str, setting: Setting) -> str:
    made = "; ".join(f"{SOURCE[dataset]}: `{' '.join(setting.data(dataset))} trainer.steps={setting.steps[dataset]}`"
                     for dataset in DATASETS)
    return (f"SIZE={size}. {made}; {setting.seeds} seeds of weights, order and noise, the same in all arms; m = "
            f"{setting.m}, orthogonal, never redrawn. Arms: `attention=generalized attention.kernel=... "
            "attention.normalize=...`. Otherwise conf/task/trembl.yaml; the last weights are tested. Intervals: 95%, "
            "Student; p-values with Holm's correction.")


# ---- picture


def figure(found: dict[Dataset, Found]):
    """Validation accuracy against the step."""
    fig, axes = new_figure(len(found), 2, figsize=(13, 4.8 * len(found)), sharey="row", squeeze=False)
    for ax, (dataset, normalize) in zip(axes.flat, product(found, (True, False))):
        arms = [*CONTROLS, *(arm for arm in ARMS[U] if arm.normalize == normalize and not arm.control)]
        ax.set(xlabel="step", title=f"{SOURCE[dataset]}, {'with' if normalize else 'without'} denominators:\n"
                                    "accuracy on validation, %")
        draw(ax, found[dataset], arms)
    fig.tight_layout()
    return fig


def draw(ax, found: Found, arms: Sequence[Arm]) -> None:
    ends = []
    for arm in arms:
        curves = [run["curve"] for (way, other, _), run in found.items() if (way, other) == (U, arm) and "curve" in run]
        stops = len(diverged(found, arm))
        if not curves:
            continue
        steps = [point["step"] for point in curves[0]]
        middle = np.mean([[100 * point["accuracy"] for point in curve] for curve in curves], 0)
        ax.plot(steps, middle, color=colour(arm), ls="-" if arm.projection else "--", lw=1.4, marker="o", ms=2.5)
        ends.append((f"{arm.kernel if arm.projection else LINEAR}{f' ({stops} diverged)' if stops else ''}", steps[-1],
                     middle[-1], colour(arm)))
    label_ends(ax, ends)


def colour(arm: Arm) -> str:
    if arm.kernel == "uniform":
        return palette.CONTROL
    return palette.EXACT if arm.kernel == "exact" else COLOURS[arm.kernel]
