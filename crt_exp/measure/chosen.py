"""A part of a measurement: some arms of a page's size, the first of its seeds. Cells are those of the whole."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from crt_exp.config import ConfigError, unknown
from crt_exp.measure.grid import expanded
from crt_exp.measure.training import Grid

Size = Mapping[str, Any]


def chosen(size: Size, arms: str = "", seeds: int = 0) -> dict[str, Any]:
    """A size with these arms alone, and so many seeds at most; empty and 0: all. Who chooses arms chooses them whatever
    the conditions of runs say, and starts that none of them begins with are not trained.

    Raises ConfigError for an arm of another name, for fewer than one seed, and where nothing can be chosen from.
    """
    if not {"parts", "runs"} & {*size}:
        raise ConfigError("arms and seeds are chosen among parts and runs; this report measures in a way of its own")
    if seeds < 0:
        raise ConfigError(f"seeds: got {seeds}, expected at least 1")
    names = named(arms, known(size))
    made = dict(size)
    for family in ("parts", "runs"):
        entries = (of_entry(entry, names, seeds) for entry in size.get(family, []))
        made[family] = [entry for entry in entries if entry["arms"]]
    begun = {*begins(made)}
    made["starts"] = {name: start | ({"count": min(start.get("count", 1), seeds)} if seeds else {})
                      for name, start in size.get("starts", {}).items() if name in begun}
    return {key: value for key, value in made.items() if value or key not in ("parts", "runs", "starts")}


def known(size: Size) -> list[str]:
    """The names of all arms."""
    return [*dict.fromkeys(name for family in ("parts", "runs") for entry in size.get(family, [])
                           for name in expanded(entry["arms"]))]


def named(text: str, known: Sequence[str]) -> list[str]:
    """Names apart by semicolons, or by spaces where each is one word; a name stands for all arms that it begins too:
    favorp for "favorp m=64" and "favorp, redrawn". Raises ConfigError for one that begins none."""
    whole = ";" in text or text in known
    found = []
    for word in filter(None, (word.strip() for word in (text.split(";") if whole else text.split()))):
        meant = [word] if word in known and whole else [
            name for name in known if word in (name, name.split(" ")[0], name.split(", ")[0])]
        if not meant:
            raise unknown("arm", word, known)
        found += meant
    return found if text.strip() else [*known]


def of_entry(entry: Size, names: Sequence[str], seeds: int) -> dict[str, Any]:
    """A part or a grid of runs with these arms and seeds."""
    arms = {name: given for name, given in expanded(entry["arms"]).items() if name in names}
    made = {key: value for key, value in entry.items() if key != "where"} | {"arms": arms}
    return made | ({"first": seeds} if seeds else {})


def begins(size: Size) -> Iterator[str]:
    """The names of starts that parts and runs begin with."""
    for given in size["runs"]:
        grid = Grid.read(given)
        for name, setting, arm in product(grid.before.values(), grid.settings, grid.arms):
            yield name.format(setting=setting, arm=arm)
    yield from of_values([size["parts"], [each["arms"] for each in size["runs"]]])


def of_values(value: Any) -> Iterator[str]:
    """{start: name} and {starts: name}, however deep."""
    if isinstance(value, Mapping):
        yield from (name for key, name in value.items() if key in ("start", "starts") and isinstance(name, str))
    for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from of_values(each)
