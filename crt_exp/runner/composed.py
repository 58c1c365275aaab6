"""The composed configuration, checked as one: which keys there are, what each takes,
and that every group names code of its kind.

Nothing is listed twice: keys, types and bounds of a group are the parameters of its `_target_` (schema.py), so a new
task, map or sampler is checked without a line here.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from crt_exp.config import ConfigError, choices, located, unknown
from crt_exp.schema import Count, Parameter, at_least, at_most, check_keys, parameters, shown

HYDRA_KEYS = ("_target_", "_partial_", "_convert_")  # how a file says what is built; the command line may not name them
TOP = {"seed": Parameter(Annotated[int, at_least(0), at_most(2**32 - 1)], True),  # what NumPy's generators take
       "resume": Parameter(Literal["never", "auto"], True)}


@dataclass(frozen=True)
class Group:
    """What the `_target_` of a group must be, and which of its parameters the configuration does not give."""

    what: str
    is_one: Callable[[Any], bool]
    supplied: tuple[str, ...] = ()                                        # by the run itself
    extra: dict[str, Parameter] = field(default_factory=dict)             # keys that are no parameters of it
    parts: dict[str, "Group"] = field(default_factory=dict)               # keys with a `_target_` of their own
    partial: bool = False                                                 # called later, by the run: `_partial_: true`
    optional: bool = False


def is_map(target: Any) -> bool:
    from crt_exp.features import FeatureMap

    return isinstance(target, type) and issubclass(target, FeatureMap)


def is_task(target: Any) -> bool:
    return (isinstance(target, type) and hasattr(target, "summary")
            and (hasattr(target, "records") or hasattr(target, "batches")))


def is_trainer(target: Any) -> bool:
    from crt_exp.runner.trainer_config import TrainerConfig

    return isinstance(target, type) and issubclass(target, TrainerConfig)


def is_logger(target: Any) -> bool:
    return isinstance(target, type) and all(hasattr(target, name) for name in ("start", "log", "finish"))


def takes(*names: str) -> Callable[[Any], bool]:
    return lambda target: callable(target) and set(names) <= parameters(target).keys()


MAP = Group("a FeatureMap", is_map, ("kernel",))
GROUPS = {
    "task": Group("a class that measures (`records`) or trains (`batches`), see tasks/base.py", is_task),
    "features": replace(MAP, extra={"m": Parameter(Count, True)}),
    "sampler": Group("a function of m, d, generator and batch", takes("m", "d", "generator", "batch"),
                     ("m", "d", "generator", "batch", "dtype"), partial=True),
    "attention": Group("a module made of heads and d", takes("heads", "d"),
                       ("sampler", "m", "heads", "d", "kv_heads", "causal", "scaling", "seed", "layer"),
                       {"kernel": Parameter(str, False)}, {"phi": MAP}, partial=True, optional=True),
    "trainer": Group("a TrainerConfig", is_trainer),
    "logger": Group("a class with `start`, `log` and `finish`", is_logger),
}


def check_composed(cfg: DictConfig) -> None:
    """Raises ConfigError for the first key that is unknown, missing or of the wrong kind; everything is looked at."""
    check_plain(plain(cfg))


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The configuration without Hydra's own part, interpolations resolved. Raises ConfigError where one cannot be."""
    try:
        return OmegaConf.to_container(OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"]), resolve=True,
                                      throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise explained(error) from None


def explained(error: OmegaConfBaseException) -> ConfigError:
    """The key, and what is wrong, in one line."""
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(f"{error.full_key} = ???: it must be given, {error.full_key}=...")
    text = str(error.msg or error).splitlines()[0]
    text = re.sub("^[A-Za-z]*Error raised while resolving interpolation: ", "", text).strip('"')
    return ConfigError(f"{error.full_key}: {text}" if error.full_key else text)


def check_plain(given: dict[str, Any]) -> None:
    """The same of plain dictionaries."""
    for key in given:
        if key not in TOP and key not in GROUPS:
            raise unknown("key", key, [*TOP, *GROUPS])
    check_keys("", {key: value for key, value in given.items() if key in TOP}, TOP)
    for name, group in GROUPS.items():
        node = given.get(name)
        unchosen = isinstance(node, dict) and node.keys() <= group.extra.keys()  # what config.yaml holds
        if node is not None and not unchosen:
            check_node(name, node, group)
        elif not group.optional:
            raise ConfigError(f"{name} is missing: a run needs one, {name}=... (known: {' '.join(choices(name))})")


def check_node(path: str, node: Any, group: Group) -> None:
    """One `_target_` with its keys."""
    if not isinstance(node, dict) or "_target_" not in node:
        raise ConfigError(f"{path} = {shown(node)}: it takes {group.what}, described in a file with a _target_")
    target = located(path, node["_target_"])
    if not group.is_one(target):
        raise ConfigError(f"{path}._target_ = {node['_target_']}: it takes {group.what}")
    if bool(node.get("_partial_")) != group.partial:
        raise ConfigError(f"{path}: its file must {'' if group.partial else 'not '}say _partial_: true")
    given = {key: value for key, value in node.items() if key not in HYDRA_KEYS}
    for key in group.parts.keys() & given.keys():
        check_node(f"{path}.{key}", given.pop(key), group.parts[key])
    for key, value in given.items():
        if names_code({key: value}):
            raise ConfigError(f"{path}.{key} = {shown(value)}: it names code to run, and this key takes none")
    apart = (*group.supplied, *group.parts)
    wanted = {key: parameter for key, parameter in parameters(target).items() if key not in apart}
    check_keys(f"{path}.", given, wanted | group.extra)


def names_code(value: Any) -> bool:
    """Whether a key such as _target_ stands anywhere in it."""
    if isinstance(value, dict):
        return any(str(key).startswith("_") or names_code(inner) for key, inner in value.items())
    return isinstance(value, list) and any(map(names_code, value))
