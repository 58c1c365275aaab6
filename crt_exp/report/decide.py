"""outputs/report/decide.md and its pictures: which attention, from which length on, at what cost, by all draws.

conf/decide.yaml names what is looked at. A page that is not there is left out; all numbers come from draws.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import yaml

from crt_exp.config import CONF
from crt_exp.drawing import markdown, save_figure
from crt_exp.report import decide_figure, draws
from crt_exp.report.decide_figure import UNIFORM, WHEN
from crt_exp.report.evidence import Interval, Unmeasured, independent
from crt_exp.report.page import Page, names
from crt_exp.runner.run import write_atomic

NAME = "decide"


class ClaimRow(NamedTuple):
    """A claim of a paper as this page shows it."""

    paper: str
    said: str
    number: str
    ours: str
    word: str
    units: str
    page: str
    why: str


class Decision:
    """What conf/decide.yaml names, of the pages of a folder that are there."""

    def __init__(self, folder: Path, spec: dict[str, Any] | None = None):
        self.folder = folder
        self.spec = yaml.safe_load((CONF / f"{NAME}.yaml").read_text(encoding="utf-8")) if spec is None else spec
        self.pages = {name: Page(name, folder) for name in names() if draws.there(name, folder)}

    @cached_property
    def settings(self) -> list[tuple[dict[str, Any], dict[str, float]]]:
        """Directly after the swap: (entry, method -> share of uniform attention's cost that it loses)."""
        return self.passing("settings")

    def passing(self, key: str) -> list[tuple[dict[str, Any], dict[str, float]]]:
        """Of the entries that pass their gate."""
        entries = [(entry, self.costs(entry)) for entry in self.spec.get(key, []) if entry["page"] in self.pages]
        return [(entry, {method: cost / costs[UNIFORM] for method, cost in costs.items() if method != UNIFORM})
                for entry, costs in entries if costs.get(UNIFORM, 0.0) >= entry["least"]]

    def costs(self, entry: dict[str, Any]) -> dict[str, float]:
        """method -> by how much it is worse than exact attention, with `uniform` among them."""
        arms = {method: given["arm"] for method, given in self.spec["methods"].items() if "arm" in given}
        arms[UNIFORM] = UNIFORM
        every = {method: self.cost(entry, arm) for method, arm in (arms | entry.get("arms", {})).items()}
        return {method: cost for method, cost in every.items() if not math.isnan(cost)}

    def cost(self, entry: dict[str, Any], arm: str) -> float:
        page, where = self.pages[entry["page"]], places(entry)
        if entry.get("above"):
            values = page.values(entry["metric"], arm=arm, **where).to_numpy()
        else:
            values = page.gain(entry["metric"], entry.get("exact", "exact"), arm, **where)
        return float(values.mean()) if len(values) else math.nan

    @cached_property
    def times(self) -> dict[str, dict[str, dict[float, float]]]:
        """direction -> method -> length -> time over that of exact attention; empty without the page."""
        speed = self.spec["speed"]
        page = self.pages.get(speed["page"])
        result: dict[str, dict[str, dict[float, float]]] = {}
        for direction, entry in speed["directions"].items() if page else ():
            exact = self.times_of(entry, entry["exact"])
            ratios = {method: {x: time / exact[x] for x, time in self.times_of(entry, arm).items() if x in exact}
                      for method, arm in entry["arms"].items()}
            result[direction] = {method: each for method, each in ratios.items() if each}
        return result

    def times_of(self, entry: dict[str, Any], arm: str) -> dict[float, float]:
        """length -> the geometric mean of the times of an arm, at the lengths that it was timed at."""
        speed, where = self.spec["speed"], {key: entry.get(key) for key in ("setting", "table")}
        times = {x: geometric(self.pages[speed["page"]].values(entry["metric"], arm=arm, x=x, **where))
                 for x in speed["lengths"]}
        return {x: time for x, time in times.items() if time > 0}

    @cached_property
    def forest(self) -> list[tuple[dict[str, Any], Interval]]:
        """(entry, FAVOR++ nearer than FAVOR+ by this share of what uniform attention costs)."""
        rows = []
        for entry in self.spec["forest"]:
            page = self.pages.get(entry["page"])
            gain = page.gain(entry["metric"], entry["better"], entry["worse"], **places(entry)) if page else []
            if len(gain) > 1:
                whole = self.cost(entry | entry.get("uniform", {}), UNIFORM)
                rows.append((entry, independent(gain / whole)))
        return rows

    @cached_property
    def rows(self) -> list[ClaimRow]:
        """The claims of the papers that conf/decide.yaml names; the index has all."""
        return [row for entry in self.spec["claims"] if entry["page"] in self.pages for row in self.judged(entry)]

    def judged(self, entry: dict[str, Any]) -> Iterator[ClaimRow]:
        page = self.pages[entry["page"]]
        for verdict in page.families["claims"]:
            text = verdict.text if isinstance(verdict, Unmeasured) else verdict.claim.text
            if not text.startswith(entry["begins"]):
                continue
            if isinstance(verdict, Unmeasured):
                yield ClaimRow(entry["paper"], entry["said"], verdict.paper, "", verdict.word, "", page.name,
                               verdict.reason)
                continue
            claim, gate = verdict.claim, getattr(verdict, "gate", None)
            why = f"{gate.text} is {gate.value:.3g}" if gate else claim.why or entry.get("why", "")
            units = "exact" if claim.difference.n == 0 else f"{claim.difference.n}"
            yield ClaimRow(entry["paper"], entry["said"], claim.paper, f"{text}: {claim.shown()}",
                           verdict.word, units, page.name, why or getattr(verdict, "power", ""))

    def sentences(self) -> list[str]:
        return [*filter(None, (self.without_training(), self.cost_sentence(), self.with_training()))]

    def without_training(self) -> str:
        best, listed = self.ordered(self.settings)
        return best and (f"**Without training take {best}**: directly after a swap it loses the least of what uniform "
                         f"attention costs, median over the settings that pass their gate: {listed}.")

    def ordered(self, settings: list[tuple[dict[str, Any], dict[str, float]]]) -> tuple[str, str]:
        """The family of methods whose best loses least, by medians, and all methods; two empty strings without
        settings."""
        shares = {method: [each[method] for _, each in settings if method in each] for method in self.spec["methods"]}
        ordered = sorted((median(each), method, each) for method, each in shares.items() if each)
        listed = "; ".join(f"{method}: {middle:.0%} ({min(each):.0%} to {max(each):.0%} of {len(each)})"
                           for middle, method, each in ordered)
        return (ordered[0][1].partition(",")[0] if ordered else "", listed)

    def cost_sentence(self) -> str:
        parts = [f"{'causal' if direction == 'causal' else 'in both directions'} {'; '.join(map(faster, *zip(*rest)))}"
                 for direction, methods in self.times.items()
                 if (rest := [(method, ratios) for method, ratios in methods.items() if method != UNIFORM])]
        lengths = ", ".join(f"{x:.0f}" for x in self.spec["speed"]["lengths"])
        return ("**Below the lengths named here take exact attention**: a training step over exact attention's time at "
                f"L = {lengths}, {'; '.join(parts)}.") if parts else ""

    def with_training(self) -> str:
        best, listed = self.ordered(self.passing("trained"))
        parts = [f"after a little training on the median is {listed}"] if best else []
        for when, text in WHEN.items():
            group = [interval for entry, interval in self.forest if entry["when"] == when]
            if group:
                above, below = sum(each.low > 0 for each in group), sum(each.high < 0 for each in group)
                parts.append(f"{text} FAVOR++ is nearer than FAVOR+ in {above} of {len(group)} settings, farther in "
                             f"{below}")
        return f"**With training take {best or 'either'}**: {'; '.join(parts)}." if parts else ""


def faster(method: str, ratios: dict[float, float]) -> str:
    first = min((x for x, ratio in ratios.items() if ratio < 1), default=None)
    times = ", ".join(f"{ratio:.2g}" for ratio in ratios.values())
    return f"{method}: {times} (faster {f'from {first:.0f} on' if first else 'at none of these'})"


def places(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: entry.get(key) for key in ("setting", "table", "x")}


def geometric(values) -> float:
    return float(np.exp(np.log(values).mean())) if len(values) else math.nan


def write(folder: Path = draws.FOLDER) -> Path:
    """The page and its pictures, each written atomically."""
    decision = Decision(folder)
    save_figure(decide_figure.figure(decision), folder / f"{NAME}.png")
    save_figure(decide_figure.forest_figure(decision.forest), folder / f"{NAME}-forest.png")
    write_atomic(folder / f"{NAME}.md", text(decision))
    return folder / f"{NAME}.md"


def text(decision: Decision) -> str:
    rows = [[row.paper, row.said, row.number, row.ours, f"**{row.word}**", row.units, commands(decision, row), row.why]
            for row in decision.rows]
    header = ["paper", "it says", "its number", "ours", "verdict", "units", "command, commit, page", "why"]
    forest = [[entry["name"], WHEN[entry["when"]], f"{100 * interval.mean:+.1f} ± {100 * interval.half:.1f}",
               str(interval.n), f"[{entry['page']}]({entry['page']}.md)"] for entry, interval in decision.forest]
    chosen = "\n".join(f"- [{name}]({name}.md): {sentence}" for name, page in decision.pages.items()
                       for sentence in page.spec.get("choices", []))
    missing = "\n".join(f"- {entry['paper']}: {entry['said']}. Not here, because {entry['because']}."
                        for entry in decision.spec["missing"])
    parts = [f"# {decision.spec['title']}", *decision.sentences(), f"![{decision.spec['title']}]({NAME}.png)",
             "Time of a training step over exact attention's against the share of uniform attention's cost that is "
             "lost directly after the swap, of settings in which uniform attention costs enough; what loses more than "
             f"{decide_figure.MOST:g} of it is drawn there.",
             "## FAVOR++ against FAVOR+, % of what uniform attention costs\n\n"
             f"![By how much FAVOR++ is nearer to exact attention than FAVOR+]({NAME}-forest.png)\n\n"
             + markdown(["setting", "when", "nearer by", "units", "page"], forest).rstrip(),
             "## What the papers say, and what is seen here\n\nThe claims that decide most; [the index](index.md) has "
             "every claim of every page.\n\n" + markdown(header, rows).rstrip(),
             f"## What the papers say and no page measures\n\n{missing}",
             f"## Choices: settings tuned, seeds added, criteria changed\n\n{chosen}",
             "Command: `make report`; every number is computed from the committed draws of the pages named."]
    return "\n\n".join(parts) + "\n"


def commands(decision: Decision, row: ClaimRow) -> str:
    if not row.page:
        return ""
    commits = sorted({commit.rstrip("+") for commit in decision.pages[row.page].draws["commit"]} - {""})
    return f"`make {row.page}`, {commits[-1] if commits else 'no commit'}, [{row.page}]({row.page}.md)"
