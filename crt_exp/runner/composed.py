"""The composed configuration, checked as one: which keys there are, what each takes,
and that every group names code of its kind.

Nothing is listed twice: keys, types and bounds of a group are the parameters of its `_target_` (schema.py), so a new
task, map or sampler is checked without a line here.
"""

import re
from dataclasses import replace
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from crt_exp.config import ConfigError, choices, unknown
from crt_exp.schema import (ATTENTION, FEATURES, SAMPLER, Count, Group, Parameter, at_least, at_most, check_keys,
                            check_node)

TOP = {"seed": Parameter(Annotated[int, at_least(0), at_most(2**32 - 1)], True),  # what NumPy's generators take
       "resume": Parameter(Literal["never", "auto"], True)}


def is_task(target: Any) -> bool:
    return (isinstance(target, type) and hasattr(target, "summary")
            and (hasattr(target, "records") or hasattr(target, "batches")))


def is_trainer(target: Any) -> bool:
    from crt_exp.runner.trainer_config import TrainerConfig

    return isinstance(target, type) and issubclass(target, TrainerConfig)


def is_logger(target: Any) -> bool:
    return isinstance(target, type) and all(hasattr(target, name) for name in ("start", "log", "finish"))


GROUPS = {
    "task": Group("a class that measures (`records`) or trains (`batches`), see tasks/base.py", is_task),
    "features": replace(FEATURES, extra={"m": Parameter(Count, True)}),
    "sampler": SAMPLER,
    "attention": ATTENTION,
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
