"""Draws of a page at any size without measuring: its places come from the driver, its values from a seed.

What only rows say (names, and x of what a probe finds itself) is as in the committed draws of the page.
"""

import re
from collections import defaultdict
from itertools import product
from pathlib import Path
from string import Formatter

import numpy as np
import pandas as pd
import yaml

from crt_exp.config import CONF
from crt_exp.probes import grid, training
from crt_exp.probes.cells import Cells
from crt_exp.report import draws, page

COMMITTED = Path(__file__).parents[2] / "outputs/report"
RECORD = {"seconds": 1.0, "commit": "", "date": "2026-01-01", "versions": ""}
EVALUATIONS = 20  # of a curve at most
ROWS = {"crt_vit_mae_uptrain": 1281167, "crt_vit_scratch": 1281167}  # images of ImageNet, to count steps of an epoch


class Known:
    """The committed draws: what values a metric has, and what rows say."""

    def __init__(self, name):
        self.frame = draws.read(name, COMMITTED) if draws.there(name, COMMITTED) else pd.DataFrame(
            columns=draws.COLUMNS)
        self.parts = [*dict.fromkeys(self.frame[self.frame["table"] == "parts"]["unit"])]
        self.values = {metric: [*dict.fromkeys(each["value"])] for metric, each in self.frame.groupby("metric")}

    def of(self, column, metric, template="{}"):
        """What a column of a metric has that a template can be made to be: field -> values; [None] where none."""
        pattern = re.compile("".join(f"(?P<{field}>.+)" if field else re.escape(text)
                                     for text, field in pieces(template)))
        found = self.frame[self.frame["metric"] == metric][column] if metric else []
        return [match.groupdict() for match in map(pattern.fullmatch, dict.fromkeys(map(str, found))) if match]

    def xs(self, metric):
        return [x.item() if hasattr(x, "item") else x for x in
                dict.fromkeys(self.frame[self.frame["metric"] == metric]["x"]) if x == x and x != ""] or [1]

    def units(self, metric):
        return [*dict.fromkeys(self.frame[self.frame["metric"] == metric]["unit"])] or ["0"]


def few(values, most=128):
    """Some of many, the last among them."""
    return values[::-1][::1 + (len(values) - 1) // most][::-1]


def pieces(template):
    for text, field, _, _ in Formatter().parse(template):
        yield text, ""
        if field:
            yield "", field


class Simulated(Cells):
    """Cells of any key; those of a part are of that which was asked last."""

    def __init__(self, name, known, rng):
        self.known, self.rng, self.credited, self.part, self.grid = known, rng, set(), None, None
        self.kept = defaultdict(lambda: RECORD)

    def fill(self, *args, **more):
        return self

    def value(self, metric):
        values = self.known.values.get(metric)
        return values[self.rng.integers(len(values))] if values else float(self.rng.uniform(0.5, 1.5))

    def __getitem__(self, key):
        if "overrides" in key:
            return self.run(key["overrides"])
        if "step" in key:
            return {metric: self.value(metric) for metric in ("steps_per_s", "mib")}
        if "cases" in key:
            return [[self.value("letters_per_s") for _ in range(key["rounds"])] for _ in key["cases"]]
        if "length" in key:
            return self.value("mib")
        if "names" in key:
            return [[self.value("ms") for _ in range(key["rounds"])] for _ in product(key["names"], key["positions"])]
        return [*self.rows(key)]

    # ---- a run

    def run(self, overrides):
        steps, every = schedule(overrides)
        ends = [*range(every, steps, every), steps][::-1]
        ends = ends[::max(1, len(ends) // EVALUATIONS)][::-1]
        metrics = [*dict.fromkeys([*self.known.values, *getattr(self.grid, "metrics", ())])]
        curve = [{"step": step, **{metric: self.value(metric) for metric in metrics}} for step in ends]
        test = {metric: self.value(metric) for metric in metrics}
        if isinstance(self.grid, training.Grid):
            test |= {f"{prefix}{metric}": self.value(metric) for prefix, arm in self.grid.baselines.items()
                     for metric in {*self.known.frame[self.known.frame["arm"] == arm]["metric"]}}
            test |= {f"{key}{suffix}": value for suffix in self.grid.apart for key, value in test.items()}
            test = {key: value for key, value in test.items() if not isinstance(value, str)}
            test |= {f"{key}{training.PART}{i}": self.value(key) for key in self.grid.tested for i in self.known.parts}
        return {"curve": curve if steps else [], "last": {"step": steps, **test}}

    # ---- a part

    def rows(self, key):
        fields = [*self.part.fields, *(what for given in self.part.controls.values()
                                       for what in ([given] if isinstance(given, dict) else given))]
        said = {}
        for what in fields:
            for column in ("arm", "setting", "table"):
                for name in [name for _, name in pieces(what.get(column, "")) if name]:
                    told = key["probe"].get(f"{name}s")
                    values = [*told] if told else [
                        each[name] for each in self.known.of(column, what["metric"], what[column])]
                    shared = column == "arm" and self.part.together and (not values or {*values} & {*self.part.arms})
                    more = [*self.part.arms] if shared else values or ["one"]
                    said[name] = [*dict.fromkeys([*said.get(name, []), *more])]
            if "unit" in what:
                said.setdefault(what["unit"], self.known.units(what["metric"]))
            if "x" in what:
                given = key["probe"].get(what["x"], key["probe"].get(f"{what['x']}s"))
                told = given if isinstance(given, list) else [given] if given is not None else None
                more = few([*told] if told else self.known.xs(what["metric"]))
                said[what["x"]] = [*dict.fromkeys([*said.get(what["x"], []), *more])]
        swept = next(iter(self.part.sweep), None)
        several = key["probe"][swept] if swept and isinstance(key["probe"][swept], list) else None
        for chosen in map(dict, map(lambda values: zip(said, values), product(*said.values()))):
            row = {**chosen}
            for what in fields:
                if "field" in what and what["field"] not in chosen:
                    count = 3 if what.get("each") == "unit" else len(several) if several else 0
                    values = [self.value(what["metric"]) for _ in range(count or 1)]
                    row[what["field"]] = values if count else values[0]
            yield row


def schedule(overrides):
    """Steps of a run and between its evaluations, where the options or their recipes say them."""
    said, rows = {}, None
    for option in overrides:
        name, _, value = option.partition("=")
        if name in ("experiment", "task"):
            said |= trainer_of(CONF / name / f"{value}.yaml")
            rows = ROWS.get(value)
        elif name in ("trainer.steps", "trainer.eval_every"):
            said[name.removeprefix("trainer.")] = int(value)
    epoch = rows // said["batch"] if rows and "batch" in said else None
    steps = said.get("steps", said["epochs"] * epoch if epoch and "epochs" in said else 300)
    return steps, min(said.get("eval_every") or epoch or steps // 3, steps) or 1


def trainer_of(file):
    """What a file of conf/ says of the trainer, with those that it builds on."""
    given, said = yaml.safe_load(file.read_text()), {}
    for other in given.get("defaults", []):
        if isinstance(other, str) and other != "_self_":
            said |= trainer_of(file.with_name(f"{other}.yaml"))
    return said | {key: value for key, value in (given.get("trainer") or {}).items() if value}


def frame_of(name, size, monkeypatch, seed=0, choose=None):
    """The draws of a page at a size, as its own driver makes them of simulated cells."""
    spec, known, rng = page.load(name), Known(name), np.random.default_rng(seed)
    cells = Simulated(name, known, rng)

    def of_part(part, _, real=grid.Part.draws):
        cells.part = part
        return [*real(part, cells)]

    def of_run(given, _, *args, real=training.of_run):
        cells.grid = given
        return [*real(given, cells, *args)]

    def begun(given, _, begin, *args):
        return training.last(given, begin)

    monkeypatch.setattr(grid, "Cells", lambda *args: cells)
    monkeypatch.setattr(grid.Part, "draws", of_part)
    monkeypatch.setattr(training, "of_run", of_run)
    monkeypatch.setattr(training, "begun", begun)
    monkeypatch.setattr(training, "folder", lambda key: "outputs/runs/a")
    chosen = grid.unconditional(grid.given(spec["sizes"][size], {}))
    chosen = choose(chosen) if choose else chosen
    made = [*grid.measure(name, ("tasks/lra.py",), chosen)]
    return pd.DataFrame([vars(draw) for draw in made], columns=draws.COLUMNS)
