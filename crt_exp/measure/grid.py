"""The driver of what measures: a page's file holds settings, arms, swept values and seeds, and this their product.

A probe is `probe(arm, **setting, seed) -> rows` and knows no cells, files or pages. It is a class made of the setting
whose `records(mechanism, seed)` yields rows (a `Probe` of base.py is one that task=... runs as well), or a function,
whose arm is what the file says: a name of what is compared.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from itertools import groupby, product
from pathlib import Path
from string import Formatter
from typing import Any

from crt_exp import drawing, mechanism_text
from crt_exp.config import ConfigError, construct, is_known, known, located, unknown
from crt_exp.mechanism import Mechanism
from crt_exp.presets import OF_MAP
from crt_exp.measure.cells import Cells, Draw, Key
from crt_exp.measure.sources import TRAINING

EVERY = "*"                                             # all maps or samplers of conf/
GROUPS: dict[str, Callable[[], Sequence[str]]] = {"features": drawing.maps, "sampler": drawing.samplers}
OF_SAMPLER = "sampler."                                 # before an option of the sampler, as OF_MAP of the map
Arm = str | Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """What a page's file says of some settings and their arms.

    probe: `_target_` and arguments. settings: name -> more arguments; arm: what all arms have there. arms: name -> an
    arm as `arm_of` reads it, or null, where its name says it all; over: what x is divided by, probe: more arguments.
    Names in braces stand for lists, see `expanded`. sweep: {argument: values}, which are x where a field has no other.
    seeds: of the probe, and seeds_of: of arms that have fewer; with more than one they are the units, or go round
    through so many `units`; first: so many of the seeds are measured, 0: all. fields: what of a row is drawn, and
    controls: name -> such fields of the first arm, see `drawn`. workers, apart: as for `Cells.fill`. together: all arms
    in one cell, for times in turns: the probe gets them by name, and its rows say whose they are. folders: of the
    models of `starts`, by seed: {start: name} in probe, settings and arms stands for that of the cell's seed, which
    goes round through them, {starts: name} for all of them.

    Cells of parts with the same workers that follow each other are measured seed by seed: an interruption leaves whole
    seeds, and what changes on the machine meanwhile changes for all arms.
    """

    probe: Mapping[str, Any]
    fields: Sequence[Mapping[str, Any]]
    arms: Mapping[str, Arm | None]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    controls: Mapping[str, Mapping[str, Any] | Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    seeds: int = 1
    seeds_of: Mapping[str, int] = field(default_factory=dict)
    units: int = 0
    first: int = 0
    workers: int | None = None
    apart: bool = False
    together: bool = False
    folders: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, part: Mapping[str, Any], folders: Mapping[str, Sequence[str]] | None = None) -> "Part":
        """Raises ConfigError for a key that is not one, and for one that is missing."""
        known = [each.name for each in fields(cls) if each.name != "folders"]
        for key in part:
            if key not in known:
                raise unknown("key of a part", key, known)
        if missing := [key for key in ("probe", "fields", "arms") if not part.get(key)]:
            raise ConfigError(f"a part of a page lacks {missing[0]}: got {', '.join(part)}")
        return cls(**{**part, "arms": expanded(part["arms"]), "settings": expanded(part.get("settings", {"": {}})),
                      "folders": folders or {}})

    def places(self) -> Iterator[tuple[str, str, Any, int, Key]]:
        """(setting, arm, x, seed, key) of each cell."""
        name, values = next(iter(self.sweep.items()), ("", [""]))
        arms = [""] if self.together else self.arms
        seeds = range(min(self.first or self.seeds, self.seeds))
        for setting, arm, x, seed in product(self.settings, arms, values, seeds):
            if seed >= self.seeds_of.get(arm, self.seeds):
                continue
            given = dict(self.settings[setting] or {})
            common, swept = given.pop("arm", {}), {name: x} if name else {}
            if self.together:
                made, more = {each: self.made(each, common)[0] for each in self.arms}, {}
            else:
                made, more = self.made(arm, common)
            probe = {**self.probe, **given, **more, **swept}
            key = {"probe": probe, "arms" if self.together else "arm": made, "seed": seed}
            yield setting, arm, x, seed, started(key, self.folders, seed)

    def made(self, arm: str, common: Mapping[str, Any]) -> tuple[Arm, Mapping[str, Any]]:
        """The arm with what all arms of its setting have, and its arguments of the probe."""
        given = arm if self.arms[arm] is None else self.arms[arm]
        if isinstance(given, str):
            return ({**common, **words(given)} if common else given), {}
        rest = {key: value for key, value in given.items() if key not in ("over", "probe")}
        return {**common, **rest}, given.get("probe", {})

    def draws(self, cells: Cells) -> Iterator[Draw]:
        for setting, arm, x, seed, key in self.places():
            given = self.arms.get(arm)
            over = given.get("over", 1) if isinstance(given, Mapping) else 1
            unit = seed % (self.units or self.seeds) if self.seeds > 1 else ""
            for row, what in product(cells[key], self.fields):
                yield from drawn(cells, key, row, what, Place(setting, arm, unit, x), over)
        yield from self.drawn_controls(cells)

    def drawn_controls(self, cells: Cells) -> Iterator[Draw]:
        """Once for each setting, x and row of the first arm and seed."""
        first = next(iter(self.arms))
        for setting, arm, x, seed, key in self.places():
            if arm in ("", first) and not seed:
                for name, given in self.controls.items():
                    for row, what in product(cells[key], [given] if isinstance(given, Mapping) else given):
                        yield from drawn(cells, key, row, what, Place(setting, name, "", x))


@dataclass(frozen=True)
class Place:
    """Where a draw stands."""

    setting: str
    arm: str
    unit: int | str
    x: Any
    table: str = ""

    def of(self, row: Mapping[str, Any], what: Mapping[str, Any]) -> "Place":
        """With what a row says of it."""
        said = {name: what[name].format(**row) for name in ("setting", "arm", "table") if name in what}
        return replace(self, **said, **{name: row[what[name]] for name in ("unit", "x") if name in what})


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """The draws of a size: of all `parts`, of the grids of `runs`, one after the other, for they have conditions on the
    draws before, and last those that are `derived` of all these by functions. Models of `starts` are trained first."""
    if not size.get("parts") and not size.get("runs"):
        raise ConfigError(f"{name}: nothing says what it measures: a size takes parts or runs, or the file `measure`")
    cells, made, models = Cells(name, sources, keep), [], {}
    if "starts" in size or "runs" in size:
        training = import_module(TRAINING)
        models = training.begun(size.get("starts", {}), cells, sources, name, size.get("workers"))
    folders = {start: [training.folder(key) for key in keys] for start, keys in models.items()}
    parts = [Part.read(part, folders) for part in size.get("parts", [])]
    for (workers, apart), alike in groupby(parts, lambda part: (part.workers, part.apart)):
        places = sorted((place for part in alike for place in part.places()), key=lambda place: place[3])
        cells.fill([key for *_, key in places], rows, name, workers, apart)
    for part in parts:
        made += part.draws(cells)
    for given in size.get("runs", []):
        made += training.measured(training.Grid.read(given, models), [*made], cells, sources, name)
    yield from made
    for derived in size.get("derived", []):
        yield from construct(derived, draws=made)


def rows(probe: dict[str, Any], seed: int, arm: Any = None, arms: Mapping[str, Any] | None = None
         ) -> list[dict[str, Any]]:
    """All rows of a cell, of one arm or of all together."""
    given = dict(probe)
    target = located("probe", given.pop("_target_"))
    if isinstance(target, type):
        made = arm_of(arm) if arms is None else {name: arm_of(each) for name, each in arms.items()}
        return list(target(**given).records(made, seed))
    found = target(arm if arms is None else arms, **given, seed=seed)
    return [found] if isinstance(found, dict) else list(found)


def drawn(cells: Cells, key: Key, row: Mapping[str, Any], what: Mapping[str, Any], place: Place,
          over: int = 1) -> Iterator[Draw]:
    """The values of one field of a row; none where the row lacks it, or where it is null.

    what: metric, and field or value; x: another field; each: unit, where of a list one value is one independent group;
    unit: another field; table, setting, arm: text with fields in braces; unless: a field that, where it is true, hides
    this one; digits: to which it is rounded.
    """
    value = what["value"] if "value" in what else row.get(what["field"])
    if value is None or row.get(what.get("unless")):
        return
    several, place = isinstance(value, list), place.of(row, what)
    for i, each in enumerate(value if several else [value]):
        if each is not None:
            x, unit = place.x[i] if isinstance(place.x, list) else place.x, place.unit
            yield cells.draw(key, place.setting, place.arm, what["metric"],
                             round(each, what["digits"]) if "digits" in what else each,
                             i if several and what.get("each") == "unit" else unit, x / over if over != 1 else x,
                             place.table)


# ---- what names stand for


def digest(path: Path) -> str:
    """Of a file, or of the weights in a folder; empty where there is none."""
    path, made = path.expanduser(), hashlib.sha256()
    for each in sorted(path.rglob("*.safetensors")) if path.is_dir() else filter(Path.is_file, [path]):
        made.update(each.read_bytes())
    return made.hexdigest()[:16]


def started(value: Any, folders: Mapping[str, Sequence[str]], seed: int) -> Any:
    """With the folder of a model in the place of each {start: name}, those of all seeds of {starts: name}. Raises
    ConfigError."""
    if isinstance(value, Mapping):
        if len(value) != 1 or not {"start", "starts"} & {*value} or not isinstance(name := [*value.values()][0], str):
            return {key: started(each, folders, seed) for key, each in value.items()}
        if name not in folders:
            raise unknown("start", name, [*folders])
        return [*folders[name]] if "starts" in value else folders[name][seed % len(folders[name])]
    return [started(each, folders, seed) for each in value] if isinstance(value, list) else value


def arm_of(given: Arm) -> Mechanism:
    """Of "favorpp m=64", a name of conf/attention, or "pos m=64 sampler=iid", one of conf/features, or of the same as a
    mapping: attention or features, m or the most columns, sampler, and options: of the attention or, of a map alone, of
    the map; "sampler.blocks" is one of the sampler. Raises ConfigError."""
    options = dict(words(given) if isinstance(given, str) else given)
    name, features, columns = (options.pop(key, None) for key in ("attention", "features", "columns"))
    chosen = {"features": features} | {key: options.pop(key) for key in ("m", "sampler") if key in options}
    if name is None:
        options = {key if key.startswith(OF_SAMPLER) else OF_MAP + key.removeprefix(OF_MAP): value
                   for key, value in options.items()}
    if columns is not None:
        chosen["m"] = columns // Mechanism.of(name, **chosen | {"m": 1}, **options).map().rank(1)
    return Mechanism.of(name, **chosen, **options)


def words(text: str) -> dict[str, Any]:
    """"pos m=64" as a mapping."""
    name, options = mechanism_text.read(text)
    group = next((group for group in ("attention", "features") if is_known(group, name)), None)
    if group is None:
        raise unknown("arm", name, [*known("attention"), *known("features")])
    return {group: name} | options


def expanded(entries: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """Settings or arms, by name. A list of names is each of them; {"pos x {sampler}": {features: pos, sampler: [iid,
    orthogonal]}} is two, and "*" in place of a list all maps or samplers of conf/ that go together but those `without`
    (the name of one, or of the arm -> the reason). Raises ConfigError for a name without a list."""
    if not isinstance(entries, Mapping):
        return dict.fromkeys(entries)
    return {name: given for title, entry in entries.items() for name, given in products(title, entry)}


def products(title: str, entry: Any) -> Iterator[tuple[str, Any]]:
    names = [name for _, name, _, _ in Formatter().parse(title) if name]
    if not names:
        yield title, entry
        return
    entry = dict(entry)
    without, listed = entry.pop("without", {}), entry | entry.get("arm", {})
    if missing := [name for name in names if not isinstance(listed.get(name), list) and listed.get(name) != EVERY]:
        raise ConfigError(f"{title}: {missing[0]}: got {listed.get(missing[0])!r}, expected a list")
    left, seen = {*without}, []
    for values in product(*(GROUPS[name]() if listed[name] == EVERY else listed[name] for name in names)):
        chosen, name = dict(zip(names, values)), title.format(**dict(zip(names, values)))
        excluded = {name, *values} & {*without}
        left, seen = left - excluded, [*seen, *values, name]
        if not excluded and (listed.get("sampler") != EVERY or goes(chosen, listed)):
            yield name, with_chosen(entry, chosen)
    if left:
        raise unknown(f"name among those without which {title} is", min(left), [*dict.fromkeys(seen)])


def goes(chosen: Mapping[str, Any], listed: Mapping[str, Any]) -> bool:
    """Whether the map takes the sampler's rows."""
    return "features" not in listed or drawing.go_together(chosen.get("features", listed["features"]),
                                                           chosen["sampler"])


def with_chosen(entry: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    return {key: with_chosen(value, chosen) if key == "arm" else chosen.get(key, value) for key, value in entry.items()}
