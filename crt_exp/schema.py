"""What the keys of the configuration take: the parameters of what they name, by their annotations (hints.py).

The command line checks by them whatever a `_target_` names (runner/configuration.py); a task under `@checked` does so
in Python too. What does not fit is a ConfigError: "task.repeats = 1.5: it takes a whole number of at least 1".
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, is_typeddict

from crt_exp import hints
from crt_exp.config import ConfigError, located, place, unknown
from crt_exp.hints import Parameter, describe, makers, parameters, shown, takes_any


def check(key: str, value: Any, hint: Any) -> None:
    """Raises ConfigError where `hints.check` raises ValueError; keys with values are looked into."""
    if is_typeddict(hint) and isinstance(value, Mapping):
        check_keys(f"{key}.", value, parameters(hint))
        return
    try:
        hints.check(key, value, hint)
    except ValueError as error:
        raise ConfigError(str(error)) from None


checked = functools.partial(hints.checked, check=check)


def check_keys(prefix: str, given: dict[str, Any], wanted: dict[str, Parameter]) -> None:
    """Raises ConfigError for keys that are unknown or missing and for values that do not fit;
    `prefix` goes before each key."""
    for key in given:
        if key not in wanted:
            raise unknown("key", f"{prefix}{key}", [f"{prefix}{name}" for name in wanted])
    for key, (hint, required) in wanted.items():
        if key in given:
            check(f"{prefix}{key}", given[key], hint)
        elif required:
            raise ConfigError(f"{prefix}{key} is missing: it takes {describe(hint)}")


# ---- the node of a file: a `_target_` with its keys ------------------------------------------------------------------

HYDRA_KEYS = ("_target_", "_partial_", "_convert_")  # how a file says what is built; the command line may not name them


@dataclass(frozen=True)
class Group:
    """What the `_target_` of a group must be, and which of its parameters the configuration does not give."""

    what: str
    is_one: Callable[[Any], bool]
    supplied: tuple[str, ...] = ()                                        # by the run itself, to those that take them
    needed: tuple[str, ...] = ()                                          # by the run itself, to all
    extra: dict[str, Parameter] = field(default_factory=dict)             # further keys, where it has its parts
    parts: dict[str, "Group"] = field(default_factory=dict)               # keys with a `_target_` of their own
    partial: bool = False                                                 # called later, by the run: `_partial_: true`
    optional: bool = False


def takes(*names: str) -> Callable[[Any], bool]:
    return lambda target: callable(target) and set(names) <= parameters(target).keys()


def check_node(path: str, node: Any, group: Group) -> None:
    """One `_target_` with its keys."""
    if not isinstance(node, dict) or "_target_" not in node:
        raise ConfigError(f"{path} = {shown(node)}: it takes {group.what}, described in a file with a _target_")
    target = located(path, node["_target_"])
    check_kind(path, target, node["_target_"], group)
    if bool(node.get("_partial_")) != group.partial:
        raise ConfigError(f"{path}: its file must {'' if group.partial else 'not '}say _partial_: true")
    given = {key: value for key, value in node.items() if key not in HYDRA_KEYS}
    for key in group.parts.keys() & given.keys():
        check_node(f"{path}.{key}", given.pop(key), group.parts[key])
    for key, value in given.items():
        if names_code({key: value}):
            raise ConfigError(f"{path}.{key} = {shown(value)}: it names code to run, and this key takes none")
    apart = (*group.supplied, *group.needed, *group.parts)
    wanted = {key: parameter for key, parameter in parameters(target).items() if key not in apart}
    check_keys(f"{path}.", given, wanted | (group.extra if group.parts.keys() <= node.keys() else {}))


def check_kind(path: str, target: Any, there: Any, group: Group) -> None:
    """What lies there, as one of a group."""
    if not group.is_one(target):
        raise ConfigError(f"{path}._target_ = {place(there)}: it takes {group.what}")
    check_defined(path, target)
    check_takes(path, target, group.needed)


def check_defined(path: str, target: Any) -> None:
    """Raises ConfigError for a class that leaves to others what it has to define."""
    from crt_exp.features.base import FeatureMap

    missing = sorted(getattr(target, "__abstractmethods__", ()))
    if is_map(target) and (target.phi_q, getattr(target, "bind", None)) == (FeatureMap.phi_q, FeatureMap.bind):
        missing.append("phi_q")
    if missing:
        raise ConfigError(f"{path}: {target.__name__} does not define {', '.join(missing)}")


def check_takes(path: str, target: Any, needed: tuple[str, ...]) -> None:
    """Raises ConfigError where a constructor does not take what every one is given."""
    lacking = [name for name in needed if name not in parameters(target)]
    if lacking and not takes_any(makers(target)[-1]):
        raise ConfigError(f"{path}: {target.__name__} takes no {', '.join(lacking)}, which all are made with: end the "
                          "arguments of its __init__ with **options and hand them on, "
                          "super().__init__(heads, d, **options)")


def names_code(value: Any) -> bool:
    """Whether a key such as _target_ stands anywhere in it."""
    if isinstance(value, dict):
        return any(str(key).startswith("_") or names_code(inner) for key, inner in value.items())
    return isinstance(value, list) and any(map(names_code, value))


def is_map(target: Any) -> bool:
    return isinstance(target, type) and all(hasattr(target, name) for name in ("phi_q", "phi_k", "projections"))


def is_layer(target: Any) -> bool:
    """A class of layers, or a function that makes one."""
    return (isinstance(target, type) and hasattr(target, "forward")) or takes("heads", "d")(target)


FEATURES = Group("a FeatureMap", is_map, ("kernel",))
SAMPLER = Group("a function of m, d, generator and batch", takes("m", "d", "generator", "batch"),
                ("m", "d", "generator", "batch", "dtype"), partial=True)
ATTENTION = Group("a module made of heads and d", is_layer, ("sampler", "m"),
                  ("heads", "d", "kv_heads", "causal", "cross", "scaling", "seed", "layer"),
                  {"kernel": Parameter(str, False)}, {"phi": FEATURES}, partial=True, optional=True)
