"""What the names of conf/attention, conf/features and conf/sampler stand for: the contents of their files with other
values for some of their keys, objects and classes in their place, and which of these an attention uses.
"""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from crt_exp.config import (CONF, ConfigError, file_of, imported, is_known, known, located, place, plain_number,
                            read_conf, unknown)
from crt_exp.hints import defaults, parameters, shown
from crt_exp.schema import FEATURES, SAMPLER, Group, check_defined, check_keys, check_node, is_map
from crt_exp.source import options_in_source

OF_MAP = "features."            # before an option of the map; so are those of the sampler and of phi
GROUPS = {"features": FEATURES, "sampler": SAMPLER}
GONE = {"far": "cells", "error": None}  # options that saved models may name, each at the one value that is left of it
MISSING = "???"                 # of what a file does not say and a user must
BASE = "base/random_features"  # within conf/attention: what a map alone gets around it where a layer is asked for


class GroupChoice(NamedTuple):
    """A choice of a group: its name, and its contents (with `_target_`) or the object itself."""

    name: str
    content: Any

    def described(self) -> Any:
        """Plain numbers and strings; of an object what it says of itself."""
        return self.content if isinstance(self.content, dict) else repr(self.content)

    def word(self) -> str:
        """The choice as text has it: its name, or where the class or function of an object lies. Of an object that is
        made of objects, "Sum(...)", which stands for nothing."""
        if isinstance(self.content, dict):
            return self.name
        made_by = self.content if hasattr(self.content, "__qualname__") else type(self.content)
        spelled = all(isinstance(value, str | int | float | None) for value in self.changes("").values())
        return place(made_by) if spelled else f"{made_by.__qualname__}(...)"

    def changes(self, group: str) -> dict[str, Any]:
        """Options that are not those of its file, or what a dataclass was made with that is not its default."""
        if isinstance(self.content, dict):
            written = read_conf(file_of(group, self.name)) if is_known(group, self.name) else {}
            return {key: value for key, value in self.content.items()
                    if not key.startswith("_") and written.get(key) != value}
        made_with = fields(self.content) if is_dataclass(self.content) else ()
        return {each.name: value for each in made_with if (value := getattr(self.content, each.name)) != each.default}


def read_preset(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The contents of conf/attention/<name>.yaml on those that it builds on, and the choices of other
    groups that it makes."""
    node, named, below = read_conf(file_of("attention", name)), {}, {}
    for entry in node.pop("defaults", []):
        if isinstance(entry, str):
            below = below | read_preset(entry.split("@")[0])[0]
        else:
            named |= {key.removeprefix("override /").split("@")[0]: value for key, value in entry.items()}
    return below | node, named


def node_of(there: str | type, group: Group) -> dict[str, Any]:
    """The file that a class, or what lies at a place, would have: its options with their defaults, and ??? for those
    without one."""
    target = located("", there)
    apart = {*group.supplied, *group.needed, *group.parts}
    own = {name: part for name, part in parameters(target).items() if name not in apart}
    node = {"_target_": there, **({"_partial_": True} if group.partial else {})}
    return node | {name: MISSING for name, part in own.items() if part.required} | {
        name: plain_number(value) for name, value in defaults(target).items() if name in own and is_plain(value)}


def is_plain(value: Any) -> bool:
    """Whether it stands in a file as itself."""
    return all(map(is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, str | int | float | None)


def default_choice(group: str) -> str:
    """The choice of a group where none is made: that of the command line."""
    return next(entry[group] for entry in read_conf(CONF / "config.yaml")["defaults"]
                if isinstance(entry, dict) and group in entry)


def default_m() -> int:
    """The number of projections where none is given: that of the command line."""
    return read_conf(CONF / "config.yaml")["features"]["m"]


def still_known(saved: Any) -> Any:
    """What was saved of a mechanism, without the options of GONE."""
    if not isinstance(saved, dict):
        return saved
    return {key: still_known(value) for key, value in saved.items() if (key, value) not in GONE.items()}


def uses(options: Any) -> frozenset[str]:
    """Which of features, sampler and m the attention of a file makes use of."""
    target = options["_target_"]
    if "phi" not in (options_in_source(str(target)) or parameters(located("attention", target))):
        return frozenset()
    if "phi" not in options:
        return frozenset({"features", "sampler", "m"})
    return frozenset({"sampler", "m"} if options["phi"].get("projection", True) else ())


def part_of(group: str, choice: Any, changes: dict[str, Any]) -> GroupChoice | None:
    """A choice by its name, with other values for some of its keys, or an object."""
    if not isinstance(choice, str):
        if changes:
            raise ConfigError(f"{group}.{next(iter(changes))} is an option of a file of conf/{group}: build the object "
                              "with it")
        if not (is_map(type(choice)) if group == "features" else callable(choice)):
            raise ConfigError(f"{group} = {shown(choice)}: it takes a name of conf/{group} or the object itself")
        return GroupChoice(getattr(choice, "__name__", type(choice).__name__), choice)
    if not is_known(group, choice):
        raise unknown(group, choice, known(group))
    content = read_conf(file_of(group, choice))
    check_options(f"{group} {choice}", changes, content)
    content |= changes
    check_given(group, content)
    check_node(group, content, GROUPS[group])
    return GroupChoice(choice, content)


def by_place(group: str, choice: Any, options: dict[str, Any]) -> Any:
    """The function that a word such as "mine.ShiftedRF" names, or an object of the class, given itself or by such a
    word, made with those of the options that are the map's, which it takes out; other choices as they are."""
    if not isinstance(choice, type) and not (isinstance(choice, str) and "." in choice):
        return choice
    target = imported(choice)
    if not GROUPS[group].is_one(target):
        raise ConfigError(f"{place(choice)}: it takes {GROUPS[group].what}")
    if group == "sampler":
        return target
    check_defined(group, target)
    own = {key.removeprefix(OF_MAP): options.pop(key) for key in list(options) if key.startswith(OF_MAP)}
    check_keys(OF_MAP, own, parameters(target))
    return target(**own)


def apart(options: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Options of the map, of the sampler and of phi, by part, and those of the attention."""
    changes: dict[str, dict[str, Any]] = {"features": {}, "sampler": {}, "phi": {}}
    for key in list(options):
        part, dot, name = key.partition(".")
        if dot and part in changes:
            changes[part][name] = options.pop(key)
    return changes, options


def with_phi(node: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """With other values for some of the keys of the map that the file itself holds."""
    if not changes:
        return node
    check_options("phi", changes, node.get("phi", {}))
    return node | {"phi": node["phi"] | changes}


def check_options(what: str, given: Iterable[str], content: Iterable[str]) -> None:
    """Raises ConfigError for a key that a file does not have, or that says which class it stands for."""
    known = [str(key) for key in content if not str(key).startswith("_")]
    for key in given:
        if key not in known:
            raise unknown(f"option of {what}", key, known)


def check_given(what: str, content: dict[str, Any]) -> None:
    """Raises ConfigError for a key that its file leaves to the user, who left it out."""
    if missing := [key for key, value in content.items() if value == MISSING]:
        raise ConfigError(f"{what}.{missing[0]} must be given: it has no default")


def resolved(node: dict[str, Any], above: dict[str, Any] | None = None) -> dict[str, Any]:
    """With the values that `${..key}` names, of the mapping above."""
    def value_of(value: Any) -> Any:
        if isinstance(value, dict):
            return resolved(value, node)
        named = above is not None and isinstance(value, str) and value.startswith("${..") and value.endswith("}")
        return above[value[4:-1]] if named else value

    return {key: value_of(value) for key, value in node.items()}
