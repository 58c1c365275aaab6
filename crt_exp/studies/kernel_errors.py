"""Errors of kernel estimates: arms of maps and samplers, each measured by a study of conf/task in several settings.

An arm is a choice of conf/features with m projections of some sampler and, where they differ, options of its file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from hydra.utils import get_class

from crt_exp.mechanism import Mechanism
from crt_exp.presets import OF_MAP
from crt_exp.studies.cells import Cells, Draw, Key


@dataclass(frozen=True)
class Part:
    """What a page's file says of some settings and their arms.

    study: the class of a study and its arguments. settings: name -> more arguments. sweep: {argument: values}, whose
    values are x where a field has none of its own. arms: name -> {features, m or columns, sampler, and options of the
    map; study: more arguments; over: what x is divided by}. fields: what of a record is drawn: {metric, field, x:
    another field, each: unit (a list, one value an independent group of draws), table}. controls: name -> such a field,
    or {metric, value}. seeds: of the data; with more than one they are the units.
    """

    study: Mapping[str, Any]
    settings: Mapping[str, Mapping[str, Any]]
    arms: Mapping[str, Mapping[str, Any]]
    fields: Sequence[Mapping[str, Any]]
    controls: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    seeds: int = 1

    def places(self) -> Iterator[tuple[str, str, Any, int, Key]]:
        """(setting, arm, x, seed, key) of each cell."""
        name, values = next(iter(self.sweep.items()), ("", [""]))
        for setting, arm, x, seed in product(self.settings, self.arms, values, range(self.seeds)):
            given = dict(self.arms[arm])
            more = given.pop("study", {})
            given.pop("over", None)
            swept = {name: [x] if name.endswith("s") else x} if name else {}
            yield setting, arm, x, seed, {"study": {**self.study, **self.settings[setting], **more, **swept},
                                          "arm": given, "seed": seed}


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """The draws of all parts that the size lists."""
    parts, cells = [Part(**part) for part in size["parts"]], Cells(name, sources, keep)
    cells.fill(distinct([key for part in parts for *_, key in part.places()]), records, name)
    for part in parts:
        for setting, arm, x, seed, key in part.places():
            over, unit = part.arms[arm].get("over", 1), seed if part.seeds > 1 else ""
            for record in cells[key]:
                for what in part.fields:
                    yield from drawn(cells, key, record, what, setting, arm, x, unit, over)
        yield from controls(cells, part)


def drawn(cells: Cells, key: Key, record: Mapping[str, Any], what: Mapping[str, Any], setting: str, arm: str, x: Any,
          unit: Any, over: int) -> Iterator[Draw]:
    """The values of one field of a record; none where the record lacks it."""
    value = what["value"] if "value" in what else record.get(what["field"])
    if value is None:
        return
    table = what.get("table", "").format(**record)
    places = record[what["x"]] if "x" in what else x
    several = isinstance(value, list)
    for i, each in enumerate(value if several else [value]):
        place = places[i] if isinstance(places, list) else places
        of = i if several and what.get("each") == "unit" else unit
        yield cells.draw(key, setting, arm, what["metric"], each, of, place / over if over != 1 else place, table)


def controls(cells: Cells, part: Part) -> Iterator[Draw]:
    """Once for each setting, x and record of the first arm and seed."""
    first = next(iter(part.arms))
    for setting, arm, x, seed, key in part.places():
        if arm == first and not seed:
            for name, what in part.controls.items():
                for record in cells[key]:
                    yield from drawn(cells, key, record, what, setting, name, x, "", 1)


def records(study: dict[str, Any], arm: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """All records of a study with this arm."""
    given = dict(study)
    return list(get_class(given.pop("_target_"))(**given).records(mechanism(**arm), seed))


def mechanism(features: str, m: int | None = None, columns: int | None = None, sampler: str = "iid",
              **options: Any) -> Mechanism:
    """With m projections, or as many as make at most so many columns, as the papers count them."""
    own = {OF_MAP + name: value for name, value in options.items()}
    if m is None:
        one = Mechanism.of(features=features, m=1, sampler=sampler, **own)
        m = columns // one.map().rank(1)
    return Mechanism.of(features=features, m=m, sampler=sampler, **own)


def distinct(keys: Sequence[Key]) -> list[Key]:
    """Each key once, in order."""
    kept: list[Key] = []
    for key in keys:
        if key not in kept:
            kept.append(key)
    return kept
