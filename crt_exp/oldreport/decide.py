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
from crt_exp.oldreport import decide_figure, draws
from crt_exp.oldreport.decide_figure import UNIFORM, WHEN
from crt_exp.oldreport.evidence import Interval, Unmeasured, independent
from crt_exp.oldreport.page import Page, names
from crt_exp.oldreport.verdicts import details
from crt_exp.runner.run import write_atomic

NAME = "decide"


class ClaimRow(NamedTuple):
    """A claim of a paper as this page shows it."""

    paper: str
    said: str
    number: str
    ours: str
    word: str
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

    def arms(self, entry: dict[str, Any]) -> dict[str, str]:
        """method -> the arm that stands for it in a setting."""
        arms = {method: given["arm"] for method, given in self.spec["methods"].items() if "arm" in given}
        return arms | {UNIFORM: UNIFORM} | entry.get("arms", {})

    def costs(self, entry: dict[str, Any]) -> dict[str, float]:
        """method -> by how much it is worse than exact attention, with `uniform` among them."""
        every = {method: self.cost(entry, arm) for method, arm in self.arms(entry).items()}
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
            yield ClaimRow(entry["paper"], entry["said"], claim.paper,
                           f"{text}: {claim.value} (bar: {claim.against.said})",
                           verdict.word, page.name, why)

    def sentence(self) -> str:
        """What to take; empty without settings."""
        best, trained = self.best(self.settings), self.best(self.passing("trained"))
        after = f", and to train on from there {trained}" if trained else ""
        return (f"**To swap without training take {best}{after}; where a time below is above 1, exact attention is the "
                "faster one.**") if best else ""

    def best(self, settings: list[tuple[dict[str, Any], dict[str, float]]]) -> str:
        """The family of the method that loses least, by medians."""
        shares = {method: [each[method] for _, each in settings if method in each] for method in self.spec["methods"]}
        ordered = sorted((median(each), method) for method, each in shares.items() if each)
        return ordered[0][1].partition(",")[0] if ordered else ""

    def table(self) -> list[list[str]]:
        """One row for a method in a direction: what it loses, by which arm, and what it takes, by which arm."""
        return [row for direction in dict.fromkeys([*self.times, *(entry["direction"] for entry, _ in self.settings)])
                for method in self.spec["methods"] if any((row := self.row(direction, method))[2:])]

    def row(self, direction: str, method: str) -> list[str]:
        here = [[(entry, shares) for entry, shares in settings if entry.get("direction", "both") == direction
                 and method in shares] for settings in (self.settings, self.passing("trained"))]
        arms = dict.fromkeys(self.arms(entry)[method] for settings in here for entry, _ in settings)
        times = self.times.get(direction, {}).get(method, {})
        timed = self.spec["speed"]["directions"].get(direction, {}).get("arms", {}).get(method, "") if times else ""
        took = [f"{times[x]:.2g}" if x in times else "" for x in self.spec["speed"]["lengths"]]
        return [method, "causal" if direction == "causal" else "both", *(lost(shares, method) for shares in here),
                "; ".join(f"`{arm}`" for arm in arms), *took, timed and f"`{timed}`"]

    def nearer(self) -> str:
        """In how many settings FAVOR++ is nearer than FAVOR+, and in how many farther."""
        parts = []
        for when, text in WHEN.items():
            group = [interval for entry, interval in self.forest if entry["when"] == when]
            above, below = sum(each.low > 0 for each in group), sum(each.high < 0 for each in group)
            parts += [f"{text} nearer in {above} of {len(group)} settings, farther in {below}"] * bool(group)
        return f"FAVOR++ is {'; '.join(parts)}." if parts else ""


def lost(settings: list[tuple[dict[str, Any], dict[str, float]]], method: str) -> str:
    """The median with the ends, and of how many settings."""
    shares = [each[method] for _, each in settings]
    if len(shares) < 2:
        return percent(shares[0]) if shares else ""
    return f"{percent(median(shares))} ({percent(min(shares))} to {percent(max(shares))} of {len(shares)})"


def percent(share: float) -> str:
    """Without the sign of a 0."""
    return f"{share:.0%}".replace("-0%", "0%")


def places(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: entry.get(key) for key in ("setting", "table", "x")}


def geometric(values) -> float:
    return float(np.exp(np.log(values).mean())) if len(values) else math.nan


def write(folder: Path = draws.FOLDER) -> Path:
    """The page and its pictures, each written atomically."""
    decision = Decision(folder)
    if any(entry["name"] == decision.spec["picture"]["setting"] for entry, _ in decision.settings):
        save_figure(decide_figure.figure(decision), folder / f"{NAME}.png")
    save_figure(decide_figure.forest_figure(decision.forest), folder / f"{NAME}-forest.png")
    write_atomic(folder / f"{NAME}.md", text(decision))
    return folder / f"{NAME}.md"


def text(decision: Decision) -> str:
    rows = [[row.paper, row.said, row.number, row.ours, f"**{row.word}**", row.page and f"[{row.page}]({row.page}.md)",
             row.why] for row in decision.rows]
    header = ["paper", "it says", "its number", "ours", "verdict", "page", "why"]
    forest = [[entry["name"], WHEN[entry["when"]], f"{100 * interval.mean:+.1f} ± {100 * interval.half:.1f}",
               str(interval.n), f"[{entry['page']}]({entry['page']}.md)"] for entry, interval in decision.forest]
    missing = "\n".join(f"- {entry['paper']}: {entry['said']}. Not here, because {entry['because']}."
                        for entry in decision.spec["missing"])
    lengths = [f"time, L = {x:.0f}" for x in decision.spec["speed"]["lengths"]]
    methods = ["attention", "direction", "lost directly after the swap", "after training on", "by the arm", *lengths,
               "by the arm of the page speed"]
    parts = [f"# {decision.spec['title']}", decision.sentence(), f"![{decision.spec['title']}]({NAME}.png)",
             "Lost: of what uniform attention costs, the median over the settings in which that is enough. Time: of a "
             "training step over that of exact attention in the same direction. Both are of the arms beside them; "
             f"empty: not measured. The picture is of one setting at {decision.spec['picture']['length']:.0f} tokens.",
             markdown(methods, decision.table()).rstrip(),
             f"## FAVOR++ against FAVOR+, % of what uniform attention costs\n\n{decision.nearer()}\n\n"
             f"![By how much FAVOR++ is nearer to exact attention than FAVOR+]({NAME}-forest.png)",
             details("The same as a table",
                     markdown(["setting", "when", "nearer by", "units", "page"], forest).rstrip()),
             "## What the papers say, and what is seen here\n\nThe claims that decide most; [the index](index.md) has "
             "every claim of every page.\n\n" + markdown(header, rows).rstrip(),
             details("What the papers say and no page measures", missing),
             "What was tuned, added or changed after results stands under Choices on each page. Command: `make "
             "report`; every number is computed from committed draws."]
    return "\n\n".join(parts) + "\n"
