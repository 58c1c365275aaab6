"""The tables of a page, as its file declares them.

A table is {title, settings, rows, columns}; it is made for each of `settings` (default: all; "all at once": [] gives
one table over all settings). rows: "arms" (default) or a list of arms. A column is one of

    {name, metric, table, x}                 mean of the units, 95% interval; format: other than the metric's
    {..., against: arm}                      by how much the row's arm is better, paired by unit
    {..., each: x}                           one column for every x of the draws, named by `name` with {x}
    {..., each: setting}                     one column for every setting
    {..., over: arm}                         the ratio to that arm's, paired by unit, geometric mean with its interval
    {..., share: arm}                        the mean as a share of that arm's
    {..., lost: [best, worst]}               what is lost against `best` as a share of what `worst` loses, by unit
    {name, count: metric}                    how many units have that metric, of all that the arm has; with no better
                                             than: arm, in how many it is no better than that arm's mean
    {..., arms: {arm: other}}                in these rows the values of another arm, such as one of as many columns
    {..., places: {arm: x}}                  in these rows another x
    {name, paper: {arm: text}}               what a paper reports
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from crt_exp.drawing import markdown
from crt_exp.oldreport.evidence import independent
from crt_exp.oldreport.page import Page, shown


MOST = 1200  # words of the tables that a page shows; the others are a csv


@dataclass(frozen=True)
class Table:
    """A table with its heading. kind: of a table for each of several settings, what these have in common."""

    title: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    kind: str = ""

    def __str__(self) -> str:
        note = f"{self.note}\n\n" if self.note else ""
        return f"## {self.title}\n\n{note}{markdown(self.header, self.rows)}".rstrip()

    def cells(self) -> Iterator[dict[str, str]]:
        """One for every value."""
        for name, *values in self.rows:
            for column, value in zip(self.header[1:], values):
                yield {"table": self.title, "row": str(name), "column": column, "value": str(value)}


def sections(page: Page) -> list[Table]:
    """All tables, in the order of the file, but those of which there are no draws."""
    made = (section(page, table, setting) for table in page.spec.get("tables", [])
            for setting in table.get("settings", page.settings) or [None])
    return [each for each in made if each.rows]


def section(page: Page, table: dict[str, Any], setting: str | None) -> Table:
    """Without rows where no row has a cell."""
    columns = [*expanded(page, table["columns"], setting)]
    names = arms(page, table, setting)
    rows = [[page.label(arm), *(cell(page, column, arm) for column in columns)] for arm in names]
    kind = table.get("title", "{setting}")
    header = [table.get("head", ""), *(column["name"] for column in columns)]
    rows = [row for row in rows if any(row[1:])]
    return Table(kind.format(setting=setting), table.get("note", ""), header, rows, kind)


def fitting(made: Sequence[Table | str], most: int = MOST) -> tuple[list[Table | str], list[Table]]:
    """What a page shows, and the tables of which it links a csv: a kind of tables is shown where all of them fit into
    the words that those before have left."""
    shown, left = [], most
    for kind in dict.fromkeys(each.kind for each in made if isinstance(each, Table)):
        words = sum(len(str(each).split()) for each in made if isinstance(each, Table) and each.kind == kind)
        if words <= left:
            left -= words
            shown.append(kind)
    apart = [each for each in made if isinstance(each, Table) and each.kind not in shown]
    return [each for each in made if each not in apart], apart


def arms(page: Page, table: dict[str, Any], setting: str | None) -> list[str]:
    """The rows: arms that the setting has, or those that are named."""
    if isinstance(table.get("rows"), list):
        return table["rows"]
    frame = page.draws if setting is None else page.draws[page.draws["setting"] == setting]
    here = {*frame["arm"]}
    return [arm for arm in page.arms if arm in here]


def expanded(page: Page, columns: list[dict[str, Any]], setting: str | None) -> Iterator[dict[str, Any]]:
    """The columns with their setting and x; those with `each` once for each."""
    for column in columns:
        own = {"setting": setting, **column}
        if "each" not in column:
            yield own
            continue
        axis = column["each"]
        frame = page.select(column["metric"], own["setting"], table=column.get("table"))
        for value in dict.fromkeys(frame[axis].dropna()):
            text = f"{value:g}" if isinstance(value, float) else value
            yield own | {axis: value, "name": column["name"].format(**{axis: text})}


def cell(page: Page, column: dict[str, Any], arm: str) -> str:
    where = {key: column.get(key) for key in ("setting", "table", "x")}
    where["x"] = column.get("places", {}).get(arm, where["x"])
    if "paper" in column:
        return column["paper"].get(arm, "")
    arm = column.get("arms", {}).get(arm, arm)
    if "count" in column:
        have = page.values(column["count"], arm=arm, **where)
        if "no better than" in column:
            limit = page.values(column["count"], arm=column["no better than"], **where).mean()
            have = have[page.metric(column["count"]).sign * (have - limit) <= 0]
        units = page.draws[(page.draws["arm"] == arm) & (page.draws["setting"] == column["setting"])
                           & (page.draws["unit"] != "")]["unit"].nunique()
        return f"{len(have)} of {units}" if units else ""
    metric = column["metric"]
    spec = column.get("format", page.metric(metric).format)
    if "share" in column:
        mean, whole = (page.values(metric, arm=each, **where).mean() for each in (arm, column["share"]))
        return "" if mean != mean else f"{mean / whole:.1%}"
    if "lost" in column:
        ours, best, worst = (page.values(metric, arm=each, **where) for each in (arm, *column["lost"]))
        return "" if arm in column["lost"] else shown(((best - ours) / (best - worst)).dropna(), ".2f")
    if "over" in column:
        ratio = np.exp(-page.metric(metric).sign * page.gain(metric, column["over"], arm, log=True, **where))
        return "" if arm == column["over"] or not len(ratio) else geometric(pd.Series(ratio), spec)
    if "against" in column:
        gain = page.gain(metric, arm, column["against"], log=column.get("scale") == "log", **where)
        return "" if arm == column["against"] else shown(gain, f"+{spec}", page.interval)
    values = page.values(metric, arm=arm, log=column.get("scale") == "log", **where)
    return shown(values, spec, page.interval) if column.get("scale") != "log" else geometric(values, spec)


def geometric(values: pd.Series, spec: str) -> str:
    """The geometric mean with its 95% interval, whose ends are not at equal distances."""
    if len(values) < 2 or (values <= 0).any():
        return shown(values, spec)
    log = independent(np.log(values))
    middle, low, high = (f"{math.exp(value):{spec}}" for value in (log.mean, log.low, log.high))
    return middle if log.half == 0 else f"{middle} ({low} to {high})"
