"""conf/recipes.yaml: what each recipe of conf/experiment is run with, and its runs as the file of a page says runs.

A run's words are `experiment=<recipe>`, those of its setting, then those of its arm. Arms are those of the paper, and
`beside` them those that the reports compare too. `begins`: arm -> {recipe: arm}, the run whose folder its task.init is.
`only`: the paper's arms of a setting that does not have all. `search`: {option: values}, of which the best run counts,
by the metric `best` of its setting. `alone`: why no page has the recipe's runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import yaml

from crt_exp.config import CONF, ConfigError, unknown

OWN = ("settings", "only", "arms", "beside", "begins", "seeds", "search", "used", "alone")  # of a recipe, beside Facts
OF_RECIPE = ("common", "before", "only", "seeds", "seeds_of", "search", "best")  # what no page says of a recipe's runs
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Line(NamedTuple):
    """One of a recipe's runs. words: what is typed behind experiment=<recipe>."""

    setting: str
    arm: str
    words: tuple[str, ...]


@cache
def declared() -> dict[str, Any]:
    return yaml.load((CONF / "recipes.yaml").read_text(encoding="utf-8"), Loader=LOADER)


def names() -> list[str]:
    return list(declared()["recipes"])


def spec_of(name: str) -> dict[str, Any]:
    if name not in names():
        raise unknown("recipe", name, names())
    return declared()["recipes"][name]


def settings_of(name: str) -> dict[str, dict[str, Any]]:
    """Setting -> its words and what its data say; of a recipe without any the one of no name."""
    return spec_of(name).get("settings", {"": {"words": []}})


def arms_of(name: str, beside: bool = True) -> dict[str, list[str]]:
    """Arm -> its words."""
    spec = spec_of(name)
    return spec["arms"] | (spec.get("beside", {}) if beside else {})


def arms_in(name: str, setting: str, beside: bool = True) -> list[str]:
    """The arms that a setting has."""
    spec = spec_of(name)
    own = spec.get("only", {}).get(setting, list(spec["arms"]))
    return [*own, *(spec.get("beside", {}) if beside else ())]


def lines(name: str, beside: bool = False) -> Iterator[Line]:
    """Of each setting and arm one, the first seed; the first is the one of the paper."""
    arms = arms_of(name)
    for setting, given in settings_of(name).items():
        for arm in arms_in(name, setting, beside):
            yield Line(setting, arm, (*given["words"], *arms[arm]))


def seeds_of(name: str) -> int:
    return spec_of(name).get("seeds", 1)


def trials_of(name: str) -> int:
    """Of a run: as many as `search` has values."""
    return max([len(values) for values in spec_of(name).get("search", {}).values()], default=1)


# ---- a page's sizes --------------------------------------------------------------------------------------------------


def written_out(size: Mapping[str, Any]) -> dict[str, Any]:
    """A size of a page with {recipe: name, ...} among its runs and starts as the words that this stands for. A run may
    choose among the settings and arms of its recipe and say what belongs to a page; runs of arms that begin with others
    have these as starts. A start takes the setting and the arm. Raises ConfigError."""
    starts = {name: start_of(given) if "recipe" in given else given for name, given in size.get("starts", {}).items()}
    grids: list[Mapping[str, Any]] = []
    for given in size.get("runs", []):
        grids += grids_of(given, starts) if "recipe" in given else [given]
    return {**size, **({"starts": starts} if starts else {}), **({"runs": grids} if grids else {})}


def start_of(given: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in given.items() if key not in ("recipe", "setting", "arm")}
    name = given["recipe"]
    setting = chosen("setting", name, [given["setting"]] if "setting" in given else None, settings_of(name))[0]
    arm = chosen("arm", name, [given["arm"]] if "arm" in given else None, arms_in(name, setting))[0]
    return {"count": seeds_of(name), **rest, "stages": stages_of(name, setting, arm)}


def stages_of(name: str, setting: str, arm: str) -> list[list[str]]:
    """The words of the run that a run begins with, and its own."""
    begun = [stages_of(other, next(iter(settings_of(other))), first)
             for other, first in spec_of(name).get("begins", {}).get(arm, {}).items()]
    return [*(begun[0] if begun else []),
            [f"experiment={name}", *settings_of(name)[setting]["words"], *arms_of(name)[arm]]]


def grids_of(given: Mapping[str, Any], starts: dict[str, Any]) -> list[dict[str, Any]]:
    """The grids that a run of a recipe stands for, one for all arms that begin alike; puts what they begin with among
    the starts."""
    name = given["recipe"]
    rest = {key: value for key, value in given.items() if key not in ("recipe", "settings", "arms")}
    if said := [key for key in OF_RECIPE if key in given]:
        raise ConfigError(f"runs of the recipe {name}: {said[0]} stands in conf/recipes.yaml, no page says it again")
    settings = chosen("setting", name, given.get("settings"), settings_of(name))
    there = dict.fromkeys(arm for setting in settings for arm in arms_in(name, setting))
    arms = chosen("arm", name, given.get("arms"), there)
    alike: dict[str, list[str]] = {}
    for arm in arms:
        alike.setdefault(begun(name, arm, starts), []).append(arm)
    return [{**rest, **grid_of(name, settings, some, start)} for start, some in alike.items()]


def begun(name: str, arm: str, starts: dict[str, Any]) -> str:
    """The start of an arm, which is put among the others; empty where it has none."""
    for other, first in spec_of(name).get("begins", {}).get(arm, {}).items():
        starts.setdefault(f"{other}: {first}", start_of({"recipe": other, "arm": first}))
        return f"{other}: {first}"
    return ""


def grid_of(name: str, settings: Sequence[str], arms: Sequence[str], start: str) -> dict[str, Any]:
    spec, of, every = spec_of(name), settings_of(name), arms_of(name)
    own = {setting: [arm for arm in arms_in(name, setting) if arm in arms] for setting in settings}
    made = {"common": [f"experiment={name}"], "settings": {setting: of[setting]["words"] for setting in settings},
            "arms": {arm: every[arm] for arm in arms}, "seeds": seeds_of(name),
            "only": {setting: some for setting, some in own.items() if len(some) < len(arms)}}
    if start:
        made["before"] = {"task.init": start}
    if "search" in spec:
        made |= {"search": spec["search"], "best": {setting: of[setting]["best"] for setting in settings}}
    return made


def chosen(kind: str, name: str, given: Sequence[str] | None, known: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Those of a recipe that a page names, or all. Raises ConfigError for another name."""
    for each in given or ():
        if each not in known:
            raise unknown(f"{kind} of the recipe {name}", each, [*known])
    return [*known] if given is None else [*given]
