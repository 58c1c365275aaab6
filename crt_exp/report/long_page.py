"""The page of a report on long sequences: verdicts first, gates, a table of each set, and its picture."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crt_exp.report import palette
from crt_exp.report.evidence import Claim, Gate, Unjudged, Verdict, independent, judged
from crt_exp.report.fig4_page import show
from crt_exp.report.long_runs import BLIND, CONTROLS, Setting
from crt_exp.report.protein_page import colour, listed
from crt_exp.report.writing import label_ends, markdown, new_figure, plain_ticks, write_report

Found = dict[tuple[str, str, int], dict[str, Any]]           # (set, arm, seed) -> what `train` gave
Costs = dict[tuple[str, str], dict[str, float]]              # (set, arm) -> what `cost` gave


def nothing(found: Found) -> str:
    return ""


def label(arm: str) -> str:
    """The attention as papers call it, and what follows a comma as it is."""
    name, *rest = arm.split(",")
    return ",".join([palette.label(name), *rest])


@dataclass(frozen=True)
class Page:
    """What one report tells. metric: of the final record, `scale` times it in `unit`; sign: 1 where more is better, -1
    where less is. baseline: the metric of what predicts without a model, and its name. least: what the controls that
    look at no query and no key must cost for the orderings to be judged. claims: (text, the better arm, the worse)."""

    name: str
    title: str
    metric: str
    unit: str
    sign: int
    baseline: tuple[str, str]
    least: float
    claims: tuple[tuple[str, str, str], ...]
    scale: float = 1.0
    spec: str = ".3f"
    more: Callable[[Found], str] = nothing                   # a further section
    chosen: str = ""                                         # how a setting was come by

    def values(self, found: Found, which: str, arm: str) -> dict[int, float]:
        """seed -> the metric, of the runs that did not diverge."""
        return {seed: self.scale * run["last"][self.metric] for (w, a, seed), run in found.items()
                if (w, a) == (which, arm) and "last" in run and run["last"][self.metric] is not None}

    def gain(self, found: Found, which: str, better: str, worse: str) -> np.ndarray:
        """By how much one arm is better than another, of each seed with which both ended."""
        a, b = (self.values(found, which, arm) for arm in (better, worse))
        return np.array([self.sign * (a[seed] - b[seed]) for seed in a if seed in b])

    @property
    def points(self) -> str:
        """The unit of differences."""
        return "points" if self.unit == "%" else self.unit

    def told(self, where: str) -> str:
        """The metric and its unit, once where they are the same."""
        name = self.metric.replace("_", " ")
        return f"{self.unit}{where}" if self.unit.startswith(name) else f"{name}{where}, {self.unit}"

    # ---- verdicts

    def gates(self, found: Found, setting: Setting) -> dict[str, Gate]:
        """What the better of the controls that look at no query and no key costs, of those that were trained."""
        made = {}
        for which in setting.sets:
            costs = {name: float(np.mean(gain)) for name in BLIND
                     if len(gain := self.gain(found, which, "exact", name))}
            if costs:
                named = " and ".join(costs) if len(costs) == 1 else f"the better of {' and '.join(costs)}"
                made[which] = Gate(f"{which}: what {named} attention costs, in {self.points}", min(costs.values()),
                                   self.least)
        return made

    def verdicts(self, found: Found, gates: dict[str, Gate]) -> list[Verdict | Unjudged]:
        judging, left = [], []
        for which, gate in gates.items():
            pairs = [(text, self.gain(found, which, better, worse)) for text, better, worse in self.claims]
            made = [Claim(f"{which}: {text}", independent(gain), self.points) for text, gain in pairs if len(gain) > 1]
            if gate.passed:
                judging += made
            else:
                left += [Unjudged(claim, gate) for claim in made]
        return [*judged(judging), *left]

    def controls_that_win(self, found: Found, setting: Setting) -> list[str]:
        told = []
        for which in setting.sets:
            for control, value, beside in self.controls(found, which, setting):
                beaten = [label(arm) for arm in beside if arm.split(",")[0] not in CONTROLS
                          and len(values := [*self.values(found, which, arm).values()])
                          and self.sign * value >= self.sign * np.mean(values)]
                if beaten:
                    told.append(f"**{which}: {control}, a control, ends no worse than {listed(beaten)}.**\n")
        return told

    def controls(self, found: Found, which: str, setting: Setting) -> Iterator[tuple[str, float, Iterable[str]]]:
        """The name of each, its metric, and the arms that stand beside it: what no attention trains to, from new
        weights or from those of the exact model, and what predicts without a model."""
        for arms in (setting.arms, setting.moved):
            for arm in arms:
                name, *rest = arm.split(",")
                if name in CONTROLS and (values := [*self.values(found, which, arm).values()]):
                    yield f"{name} attention{','.join(['', *rest])}", float(np.mean(values)), arms
        if (value := self.without_model(found, which)) is not None:
            yield f"the {self.baseline[1]}", value, (*setting.arms, *setting.moved)

    # ---- page

    def write(self, size: str, setting: Setting, found: Found, costs: Costs, seconds: float) -> None:
        gates = self.gates(found, setting)
        verdicts = self.verdicts(found, gates)
        said = "\n".join([*self.controls_that_win(found, setting), *map(str, verdicts)])
        body = "\n".join([said, "", "What the sets can tell (trained models, mean over seeds), asked first: the other "
                          "arms are trained on those that pass, and those are drawn.", "",
                          *map(str, gates.values()), "", *(self.section(which, setting, found, costs)
                                                           for which in setting.sets), self.more(found)])
        rows = [*csv_rows(found, costs, self.metric), *(verdict.row() for verdict in verdicts)]
        path = write_report(self.name, self.title, body, rows, self.figure(setting, found, costs, gates),
                            self.facts(size, setting), seconds)
        print(f"{said}\nwritten: {path}")

    def section(self, which: str, setting: Setting, found: Found, costs: Costs) -> str:
        baseline = self.without_model(found, which)
        rows = [[self.baseline[1], "" if baseline is None else f"{baseline:{self.spec}}", "", "", "", ""]]
        for arm in (*setting.arms, *setting.moved):
            values = np.array([*self.values(found, which, arm).values()])
            above = self.gain(found, which, arm, "exact") if arm != "exact" else []
            spent = costs.get((which, arm))
            runs = [run for (w, a, _), run in found.items() if (w, a) == (which, arm)]
            ended = show(values, self.spec) if runs else "not trained"
            step = (f"{spent['steps_per_s']:.2f}", f"{spent['bytes'] / 2**20:.0f}") if spent else ("", "")
            rows.append([label(arm), ended, show(above, f"+{self.spec}") if len(above) else "",
                         *step, f"{sum('diverged' in run for run in runs)} of {len(runs)}" if runs else ""])
        columns = ["attention", self.told(""), "better than exact by", "steps/s",
                   "memory, MiB", "diverged"]
        return f"## {which}\n\n{markdown(columns, rows)}"

    def without_model(self, found: Found, which: str) -> float | None:
        """The metric of the baseline."""
        records = [run["last"] for (w, _, _), run in found.items() if w == which and "last" in run]
        return self.scale * records[0][self.baseline[0]] if records else None

    def facts(self, size: str, setting: Setting) -> str:
        sets = "; ".join(f"{which}: `{' '.join(options)}`" for which, options in setting.sets.items())
        arms = "; ".join(f"{arm}: `{' '.join(options)}`" for arm, options in (setting.arms | setting.moved).items())
        moved = " Arms with task.init start from the exact weights of their seed." if setting.moved else ""
        return (f"SIZE={size}. {self.chosen}{sets}. {arms}.{moved} {setting.seeds} seeds of weights, order and "
                "noise, the same in all arms. The last weights are tested, and validation chooses nothing. A step's "
                "time is the middle of some, alone on the machine; memory is the most that a short run held beyond "
                "what its process began with, its data among it. Mean over seeds with its interval: 95%, Student; "
                "p-values with Holm's correction.")

    # ---- picture

    def figure(self, setting: Setting, found: Found, costs: Costs, gates: dict[str, Gate]):
        """Of the sets that pass their gates; of all where none does."""
        shown = [which for which, gate in gates.items() if gate.passed] or [*setting.sets]
        fig, axes = new_figure(2, len(shown), figsize=(6.5 * max(len(shown), 1.4), 8.5), squeeze=False)
        for (above, below), which in zip(axes.T, shown):
            self.draw(above, which, setting, found)
            self.draw_costs(below, which, setting, found, costs)
        fig.tight_layout()
        return fig

    def draw_costs(self, ax, which: str, setting: Setting, found: Found, costs: Costs) -> None:
        """The metric beside steps/s, the area of a point the memory."""
        speeds = {arm: costs[which, arm] for arm in setting.arms if (which, arm) in costs}
        points = []
        for arm, spent in speeds.items():
            if values := [*self.values(found, which, arm).values()]:
                points.append((label(arm), spent["steps_per_s"], np.mean(values), colour(arm)))
                ax.scatter(*points[-1][1:3], s=spent["bytes"] / 2**22, color=colour(arm), alpha=0.6, linewidths=0)
        ax.set(xlabel="steps/s in training", xscale="log",
               title=f"{which}: {self.told(' on test')}; area: memory")
        ax.margins(0, 0.3)
        rates = [spent["steps_per_s"] for spent in speeds.values()]
        ax.set_xlim(0.8 * min(rates), 1.25 * max(rates))
        plain_ticks(ax.xaxis)
        name_points(ax, points, fontsize=8)

    def draw(self, ax, which: str, setting: Setting, found: Found) -> None:
        """Curves on validation, means over the seeds that did not diverge."""
        ends = []
        for arm in (*setting.arms, *setting.moved):
            points: dict[int, list[float]] = {}
            for (w, a, _), run in found.items():
                for point in run.get("curve", []) if (w, a) == (which, arm) else []:
                    points.setdefault(point["step"], []).append(self.scale * point[self.metric])
            if points:
                mean = [np.mean(values) for values in points.values()]
                ax.plot([*points], mean, color=colour(arm.split(",")[0]), lw=1.4, marker="o", ms=2.5)
                ends.append((label(arm), [*points][-1], mean[-1], colour(arm.split(",")[0])))
        ax.set(xlabel="step", title=f"{which}: {self.told(' on validation')}")
        label_ends(ax, ends)


def csv_rows(found: Found, costs: Costs, metric: str) -> list[dict[str, Any]]:
    rows = [{"set": which, "attention": arm, "what": "step", **cost} for (which, arm), cost in costs.items()]
    for (which, arm, seed), run in found.items():
        head = {"set": which, "attention": arm, "seed": seed}
        rows += [head | {"what": "validation", "step": point["step"], metric: point[metric]}
                 for point in run.get("curve", [])]
        rows.append(head | ({"what": "diverged", "said": run["diverged"]} if "diverged" in run
                            else {"what": "test", metric: run["last"][metric], "loss": run["last"]["loss"]}))
    return rows


OFFSETS = (9, -18, 19, -28, 29, -38)  # of names from their points, in points of print
RADIUS = 8                            # of a point, about


def name_points(ax, names: Sequence[tuple[str, float, float, str]], **style) -> None:
    """Writes (name, x, y, colour) above or below its point, by the first of OFFSETS at which it covers no name before
    it and no other point, with a line to it. The scales and limits of the axes must be set."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    ax.figure.canvas.draw()
    radius = RADIUS * ax.figure.dpi / 72
    places = [ax.transData.transform((x, y)) for _, x, y, _ in names]
    points = [Bbox([place - radius, place + radius]) for place in places]
    taken = []
    for i in sorted(range(len(names)), key=lambda i: names[i][1]):
        name, x, y, shade = names[i]
        line = {"arrowstyle": "-", "color": shade, "lw": 0.7, "shrinkB": 0}
        made = ax.annotate(name, (x, y), color=shade, textcoords="offset points", xytext=(0, 0), ha="center",
                           va="bottom", arrowprops=line, **style)
        others = [*points[:i], *points[i + 1:], *taken]
        for offset in OFFSETS:
            made.set_position((0, offset))
            made.update_positions(ax.figure.canvas.get_renderer())
            box = Text.get_window_extent(made)
            if not any(box.overlaps(other) for other in others):
                break
        taken.append(box)
