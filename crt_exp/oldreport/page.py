"""A page: a pure function of committed draws and of one file, conf/report/<name>.yaml.

The file holds what a reader may want to change or check: title, facts, arms and their names, gates, claims, tables and
panels. What cannot be said there stands in report/pages/<name>.py, whose functions `sections`, `figure`, `first_lines`
take the page and come in the place of those made from the file, while its `claims` and `bars`, (setting, Claim) each,
come after those of the file.

    title:      heading of the page                    data:     the files that its measurement reads, for `make help`
    finding:    what the committed draws show, in one sentence
    facts:      data, sizes, seeds, and what a reader must know; of SIZE=small, which `{size}` in it names, as `choices`
    arms:       arm -> its name on the page            controls: arms that look at nothing, or nearly so
    metrics:    metric -> {name, unit, scale, better: higher or lower, format, power}; main, at, table: the one
                (default: the first), its place x and its table by which controls are compared with arms
    gates:      what must hold before a setting is judged, see `Page.gates`
    claims:     the paper's own sentences, at most five; bars: own bars and questions. Entries of both: see `claims`;
                Holm's correction over each family apart
    independence: what the unit is (a model, data set, process, seed, text)
    overlap:    rows of the test part over rows of the training part, where units are random splits of one data set: all
                intervals are then Nadeau and Bengio's
    looks:      at the draws before the verdicts were final (default 1); 2 lowers the level from 0.05 to 0.029
    choices:    sentences on settings tuned, seeds added and criteria changed, with their commits
    tables, panels: see `tables` and `figures`
    commands:   true, for those of the first grid of `runs`, or text
    sizes:      SIZE -> starts, parts, runs, derived: see `crt_exp.measure.grid.measure`; facts: of this size;
                instead: what stands at this size in place of words, arms, settings and places x, see `at_size`
"""

import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from crt_exp.config import CONF, ConfigError, unknown
from crt_exp.drawing import LABELS
from crt_exp.oldreport import claims, draws
from crt_exp.oldreport.evidence import (
    LOOKS,
    Claim,
    Gate,
    Interval,
    Unjudged,
    Unmeasured,
    Verdict,
    independent,
    judged,
    overlapping,
    won_by,
)

FOLDER = CONF / "report"
KEYS = ("title", "finding", "data", "source", "facts", "arms", "controls", "metrics", "main", "at", "table", "gates",
        "claims", "bars", "independence", "looks", "choices", "overlap", "tables", "panels", "commands",
        "sizes")
SAFE = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C reads all pages in a tenth of the time
NO_ROWS = np.empty(0, int)
PART = "part"                           # folder of pages of some arms or seeds
X_KEYS = ("x", "at", "of_x", "over_x")  # of places
MEASURING = ("sizes",)
FAMILIES = {"claims": "The paper's claims", "bars": "Own bars and questions"}  # judged apart


def names() -> list[str]:
    """Of all pages: the files of conf/report."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def file_of(name: str) -> Path:
    """Of a page of conf/report, or a file of one's own, "mine/page.yaml". Raises ConfigError for a name of none."""
    path = Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise unknown("report", name, names())
    return path


def load(name: str) -> dict[str, Any]:
    """The file of a page. Raises ConfigError where it is not valid YAML, has an unknown key or lacks one."""
    path = file_of(name)
    try:
        spec = yaml.load(path.read_text(encoding="utf-8"), Loader=SAFE)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(spec, dict):
        raise ConfigError(f"{path}: got {type(spec).__name__}, expected keys such as {', '.join(KEYS[:4])}")
    for key in spec:
        if key not in KEYS:
            raise unknown(f"key of {path.name}", key, KEYS)
    for key in ("title", "metrics"):
        if key not in spec:
            raise ConfigError(f"{path}: the key {key} is missing")
    for family in FAMILIES:
        claims.checked(spec.get(family, []), path)
    if spec.get("looks", 1) not in LOOKS:
        raise ConfigError(f"{path}: looks: got {spec['looks']}, expected {', '.join(map(str, LOOKS))}")
    return spec


def home(spec: dict[str, Any]) -> str:
    """The size whose pages are committed: small, or of a page without it the only one."""
    sizes = spec.get("sizes", {})
    return "small" if "small" in sizes or not sizes else next(iter(sizes))


def folder_of(spec: dict[str, Any], size: str, given: Path | None = None, part: bool = False) -> Path:
    """Where a page of this size is written, each size apart, and a part of it apart from the whole. Raises ConfigError
    where a given folder is another's."""
    if part:
        whole = folder_of(spec, size)
        if given is not None and given.resolve() in (whole.resolve(), draws.FOLDER.resolve()):
            raise ConfigError(f"{given} holds whole pages: leave --out out, then a part goes to {whole / PART}, or "
                              "name another folder")
        return given or whole / PART
    if size == home(spec):
        return given or draws.FOLDER
    if given is not None and given.resolve() == draws.FOLDER.resolve():
        raise ConfigError(f"{given} holds the page of SIZE={home(spec)}: leave --out out, then SIZE={size} goes to "
                          f"{draws.FOLDER / size}, or name another folder")
    return given or draws.FOLDER / size


def at_size(spec: dict[str, Any], size: str) -> dict[str, Any]:
    """The file with `instead` of this size: text -> text, wherever it stands, the longest first, and place x -> place.
    What measures stays as it is."""
    instead = spec.get("sizes", {}).get(size, {}).get("instead", {})
    texts = {old: str(new) for old, new in instead.items() if isinstance(old, str)}
    if not instead:
        return spec
    found = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")

    def read(node: Any, key: str = "") -> Any:
        if isinstance(node, str):
            return found.sub(lambda match: texts[match[0]], node)
        if isinstance(node, dict):
            return {read(name): read(value, name) for name, value in node.items()}
        if isinstance(node, list):
            return [read(value, key) for value in node]
        return instead.get(node, node) if key in X_KEYS else node

    return {key: value if key in MEASURING else read(value, key) for key, value in spec.items()}


@dataclass(frozen=True)
class Metric:
    """How values are shown: times `scale`, in `unit`, by `format`; sign: 1 where higher is better, -1 where lower;
    power: they are logarithms, of which verdicts show e^value."""

    name: str
    unit: str = ""
    scale: float = 1.0
    better: str = "higher"
    format: str = ".3g"
    power: bool = False

    @property
    def sign(self) -> int:
        return 1 if self.better == "higher" else -1

    @property
    def points(self) -> str:
        """The unit of differences."""
        return "points" if self.unit == "%" else self.unit

    @property
    def heading(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit and self.unit not in self.name else self.name


class Page:
    """A file of conf/report with its draws. size: of these; without it that of the folder's name, else `home`. part:
    the words that chose some arms or seeds of it."""

    def __init__(self, name: str, folder: Path = draws.FOLDER, spec: dict[str, Any] | None = None,
                 frame: pd.DataFrame | None = None, size: str | None = None, part: str = ""):
        self.name, self.folder, self.path = Path(name).stem, folder, name
        self.file = load(name) if spec is None else spec
        self.size = size or (folder.name if folder.name in self.file.get("sizes", {}) else home(self.file))
        self.part = part or ("some arms or seeds" if folder.name == PART else "")
        self.draws = draws.read(self.name, folder) if frame is None else frame

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The file as its size has it."""
        return at_size(self.file, self.size)

    @property
    def is_own(self) -> bool:
        """Whether its file is none of conf/report."""
        return self.path.endswith(".yaml")

    @property
    def declared(self) -> str:
        """Where its file stands."""
        return self.path if self.is_own else f"conf/report/{self.name}.yaml"

    @cached_property
    def code(self) -> Any:
        """report/pages/<name>.py, or None."""
        module = f"crt_exp.oldreport.pages.{self.name.replace('-', '_')}"
        return import_module(module) if importlib.util.find_spec(module) else None

    def own(self, function: str) -> Any:
        """A function of the page's own module, or None."""
        return getattr(self.code, function, None)

    # ---- names

    @cached_property
    def settings(self) -> list[str]:
        """In the order of the draws."""
        return [*dict.fromkeys(self.draws["setting"])]

    @cached_property
    def arms(self) -> list[str]:
        """Those of the file in its order, then those that only the draws have."""
        return [*dict.fromkeys([*self.spec.get("arms", {}), *self.draws["arm"]])]

    @property
    def controls(self) -> list[str]:
        return [*self.spec.get("controls", [])]

    def label(self, arm: str) -> str:
        """The name of an arm on the page: that of the file, or the attention as papers call it with its options."""
        given = self.spec.get("arms") or {}
        if given.get(arm):
            return given[arm]
        name, *options = arm.split(" ")
        if not all("=" in option for option in options):
            return arm
        return ", ".join([LABELS.get(name, name), *(option.replace("=", " = ") for option in options)])

    def metric(self, name: str) -> Metric:
        given = (self.spec.get("metrics") or {}).get(name, {})
        return Metric(**{"name": name.replace("_", " "), **given})

    @property
    def main(self) -> str:
        """The metric by which arms are compared: that of `main`, or the first."""
        return self.spec.get("main") or next(iter(self.spec["metrics"]))

    # ---- values

    def select(self, metric: str, setting: str | None = None, arm: str | None = None, table: str | None = None,
               x: Any = None) -> pd.DataFrame:
        """The draws of a metric; x: a value, a list of them, or "last"."""
        return self.draws.iloc[self._rows(metric, setting, arm, table, x)]

    def values(self, metric: str, setting: str | None = None, arm: str | None = None, table: str | None = None,
               x: Any = None, log: bool = False) -> pd.Series:
        """unit -> value, scaled as shown; the mean where a unit has several draws, geometric with `log`."""
        rows = self._rows(metric, setting, arm, table, x)
        values = self.metric(metric).scale * self._column["value"][rows].astype(float)
        places, units = pd.factorize(self._column["unit"][rows])
        sums = np.bincount(places, np.log(values) if log else values, len(units)) / np.bincount(places)
        return pd.Series(np.exp(sums) if log else sums, units)

    def _rows(self, metric: str, setting: str | None, arm: str | None, table: str | None, x: Any) -> np.ndarray:
        """The numbers of these draws, in their order."""
        rows = self._of_metric.get(metric, NO_ROWS)
        if setting is not None and arm is not None:
            rows = self._of_arm.get((metric, setting, arm), NO_ROWS)
        for column, value in (("setting", setting), ("arm", arm), ("table", table)):
            rows = rows if value is None else rows[self._column[column][rows] == value]
        if x is None or not len(rows):
            return rows
        places = self._column["x"][rows]
        return rows[np.isin(places, pd.Series(places).max() if isinstance(x, str) and x == "last" else x)]

    @cached_property
    def _column(self) -> dict[str, np.ndarray]:
        return {name: self.draws[name].to_numpy() for name in ("setting", "arm", "table", "unit", "x", "value")}

    @cached_property
    def _of_metric(self) -> dict[str, np.ndarray]:
        return self.draws.groupby("metric", sort=False).indices

    @cached_property
    def _of_arm(self) -> dict[tuple[str, str, str], np.ndarray]:
        return self.draws.groupby(["metric", "setting", "arm"], sort=False).indices

    def gain(self, metric: str, better: str, worse: str, log: bool = False, **where: Any) -> np.ndarray:
        """By how much one arm is better than another, of each unit that both have; of logarithms with `log`. A value
        without a unit, of what involves no chance, is compared with every unit of the other arm."""
        first, second = (self.values(metric, arm=arm, log=log, **self._shared(metric, better, worse, where))
                         for arm in (better, worse))
        first, second = spread(first, second), spread(second, first)
        shared = first.index.intersection(second.index)
        pair = [np.log(each[shared]) if log else each[shared] for each in (first, second)]
        return self.metric(metric).sign * (pair[0] - pair[1]).to_numpy()

    def _shared(self, metric: str, better: str, worse: str, where: dict[str, Any]) -> dict[str, Any]:
        """The same selection at the places x that both arms have."""
        if where.get("x") is not None:
            return where
        places = [{*self.select(metric, where.get("setting"), arm, where.get("table"))["x"].dropna()}
                  for arm in (better, worse)]
        return where | {"x": sorted(places[0] & places[1], key=str)} if all(places) else where

    def interval(self, values: Sequence[float]) -> Interval:
        """Of a mean over units: Student's, or that of overlapping splits."""
        share = self.spec.get("overlap")
        return independent(values) if share is None else overlapping(values, share)

    # ---- gates and claims

    @cached_property
    def gates(self) -> list[tuple[str, Gate]]:
        """(setting, gate) of each entry {text, metric, of, than, settings, table, x, least, most, family,
        optional} of the file: the mean of the arm `of`, or, with `than`, by how much `of` is better than the best of
        these arms. least: a number, or setting -> number. An optional one is not asked where it has no draws, and none
        is of a setting that has none."""
        gates = [(entry, setting, self._gate(entry, setting)) for entry in self.spec.get("gates", [])
                 for setting in entry.get("settings") or self.settings if setting in self.settings]
        return [(setting, gate) for entry, setting, gate in gates
                if not (entry.get("optional") and math.isnan(gate.value))]

    def _gate(self, entry: dict[str, Any], setting: str) -> Gate:
        where = {"setting": setting, "table": entry.get("table"), "x": entry.get("x")}
        if "than" not in entry:
            value = self.values(entry["metric"], arm=entry["of"], **where).mean()
        else:
            others = [entry["than"]] if isinstance(entry["than"], str) else entry["than"]
            gains = [self.gain(entry["metric"], entry["of"], other, **where) for other in others]
            value = min((float(gain.mean()) for gain in gains if len(gain)), default=math.nan)
        least = claims.setting_value(entry.get("least", -math.inf), setting, -math.inf)
        return Gate(entry["text"].format(setting=setting), float(value), least, entry.get("most", math.inf),
                    entry.get("family", ""))

    @cached_property
    def families(self) -> dict[str, list[Verdict | Unjudged | Unmeasured]]:
        """The verdicts of `claims` and of `bars`."""
        return {family: self._judged(family) for family in FAMILIES}

    def _judged(self, family: str) -> list[Verdict | Unjudged | Unmeasured]:
        """In the order of the file; Holm's correction over those whose setting passed its gates."""
        failed = {setting: gate for setting, gate in self.gates if not gate.passed and gate.family in ("", family)}
        made = [*claims.entry_claims(self, self.spec.get(family, []))]
        looks = self.spec.get("looks", 1)
        made += [(setting, replace(claim, looks=looks) if isinstance(claim, Claim) else claim)
                 for setting, claim in (self.own(family)(self) if self.own(family) else [])]
        verdicts = iter(judged([claim for setting, claim in made
                                if isinstance(claim, Claim) and setting not in failed]))
        return [claim if isinstance(claim, Unmeasured) else Unjudged(claim, failed[setting]) if setting in failed
                else next(verdicts) for setting, claim in made]

    @property
    def verdicts(self) -> list[Verdict | Unjudged | Unmeasured]:
        """Of both families, the paper's claims first."""
        return [verdict for family in self.families.values() for verdict in family]

    def rows(self) -> list[dict[str, Any]]:
        """Of all verdicts, for the index."""
        return [{"family": family, **verdict.row()} for family, verdicts in self.families.items()
                for verdict in verdicts]

    # ---- what is said first

    def first_lines(self) -> list[str]:
        """Which arms a control beats, or equals, in each setting, by the means of the main metric."""
        if self.own("first_lines"):
            return self.own("first_lines")(self)
        lines = []
        for control in self.controls:
            beaten = {setting: [self.label(arm) for arm in self.beaten_by(control, setting)]
                      for setting in self.settings}
            if any(beaten.values()):
                lines.append(won_by(self.label(control), beaten, self._compared()))
        return lines

    def _compared(self) -> int:
        """How many arms are compared with the controls, over all settings."""
        where = {"table": self.spec.get("table"), "x": self.spec.get("at")}
        return sum(len({*self.select(self.main, setting, **where)["arm"]} - {*self.controls})
                   for setting in self.settings)

    def beaten_by(self, control: str, setting: str) -> list[str]:
        metric, where = self.metric(self.main), {"setting": setting, "table": self.spec.get("table"),
                                                 "x": self.spec.get("at")}
        mean = self.values(self.main, arm=control, **where).mean()
        means = {arm: self.values(self.main, arm=arm, **where).mean() for arm in self.arms if arm not in self.controls}
        return [arm for arm, value in means.items() if not math.isnan(value) and metric.sign * (mean - value) >= 0]


def spread(values: pd.Series, other: pd.Series) -> pd.Series:
    """A single value without a unit at every unit of the other."""
    return pd.Series(values.iloc[0], other.index) if [*values.index] == [""] and len(other) else values


def shown(values: Sequence[float], spec: str = ".3g", interval: Callable[..., Interval] = independent) -> str:
    """A mean with its 95% interval, a single value as it is, nothing where there is none."""
    values = np.asarray(values, float)
    if len(values) == 0:
        return ""
    if len(values) == 1:
        return f"{values[0]:{spec}}"
    return f"{interval(values):{spec}}"
