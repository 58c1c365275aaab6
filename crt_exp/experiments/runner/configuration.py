"""The composed configuration of a run, and the check of its keys and values.

Keys, types and bounds of a group are those of the constructor that `_target_` names.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from crt_exp.registry import (
    ATTENTION,
    FEATURES,
    SAMPLER,
    ConfigError,
    Group,
    check_node,
    choices,
    construct,
    leaves,
    read_yaml,
    uses,
)
from crt_exp.validation import (
    Count,
    Parameter,
    Seed,
    check_options,
    either,
    format_value,
    unknown,
)

# ---- Hydra's state


def choice(group: str) -> str | None:
    """Return the choice of a group."""
    return HydraConfig.get().runtime.choices.get(group)


def overrides(node: str = "") -> list[str]:
    """Return the overrides of this run, or those of a node and of keys below it; empty outside a run."""
    if not HydraConfig.initialized():
        return []
    every = list(HydraConfig.get().overrides.task)
    return [o for o in every if not node or f"{override_key(o)}.".startswith(f"{node}.")]


def output_directory() -> Path:
    """Return the run directory."""
    return Path(HydraConfig.get().runtime.output_dir)


def is_sweep() -> bool:
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def directory_override() -> tuple[str, Path]:
    """Return the key and value that select this run's or sweep's directory again."""
    if is_sweep():
        return "hydra.sweep.dir", Path(HydraConfig.get().sweep.dir).absolute()
    return "hydra.run.dir", output_directory()


def override_key(override: str) -> str:
    """Return the key of an override, without signs."""
    return override.split("=")[0].lstrip("+~")


def mechanism_part(override: str) -> str | None:
    """Return the part of a mechanism that an override sets, or None.

    Parts: attention, features, sampler, m.
    """
    key = override_key(override)
    if key == "features.m":
        return "m"
    group = key.split(".")[0]
    return group if group in ("attention", "features", "sampler") else None


def override(key: str, value: Any) -> str:
    """Return key=value in Hydra's grammar, with quotes where needed."""
    text = str(value)
    if re.fullmatch(r"/[\w./-]+", text, re.ASCII):
        return f"{key}={text}"
    return f"{key}={QuotedString(text, Quote.double).with_quotes()}"


# ---- keys and groups


TOP = {
    "seed": Parameter(Seed, True),
    "resume": Parameter(Literal["never", "auto"], True),
}
GROUPS = {
    "features": replace(FEATURES, extra={"m": Parameter(Count, True)}),
    "sampler": SAMPLER,
    "attention": ATTENTION,
    "trainer": Group(
        "a TrainerConfig",
        base="crt_exp.experiments.runner.trainer_config.TrainerConfig",
    ),
    "logger": Group(
        "a subclass of Logger, see runner/loggers.py",
        base="crt_exp.experiments.runner.loggers.Logger",
    ),
    "task": Group(  # last: some tasks import large libraries
        "a subclass of Measurement or Task, see tasks/base.py",
        base="crt_exp.experiments.tasks.base.BaseTask",
    ),
}


def plain_config(cfg: DictConfig) -> dict[str, Any]:
    """Return the configuration without Hydra's node, with interpolations resolved.

    Raises ConfigError if an interpolation fails.
    """
    try:
        return OmegaConf.to_container(
            OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"]),
            resolve=True,
            throw_on_missing=True,
        )
    except OmegaConfBaseException as error:
        raise explain_error(error) from None


def same_ending(config: dict[str, Any], key: str) -> list[str]:
    """Return the dotted keys of a configuration whose last part is `key`."""
    return [name for name, _ in leaves(config) if name.rpartition(".")[2] == key]


def explain_error(error: OmegaConfBaseException) -> ConfigError:
    """Return a one-line ConfigError with the key and the problem."""
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(f"{error.full_key}=???: missing, expected {error.full_key}=...")
    text = str(error.msg or error).splitlines()[0]
    text = re.sub("^[A-Za-z]*Error raised while resolving interpolation: ", "", text).strip('"')
    if error.full_key:
        text = f"{error.full_key}: {text}"
    return ConfigError(text)


def check_plain(config: dict[str, Any]) -> None:
    """Check a composed configuration, as plain values, with the classes that it names.

    Raises ConfigError for the first unknown, missing or invalid key, and for choices that the attention does not use.
    """
    for key in config:
        if key not in TOP and key not in GROUPS:
            elsewhere = [name for name in same_ending(config, key) if name != key]
            if elsewhere:
                raise ConfigError(f"unknown key {key!r}; did you mean {either(elsewhere)}?")
            raise unknown("key", key, [*TOP, *GROUPS])
    check_options("", TOP, {key: value for key, value in config.items() if key in TOP})
    for name, group in GROUPS.items():
        node = config.get(name)
        unchosen = (
            isinstance(node, dict) and node.keys() <= group.extra.keys()
        )  # only the keys of config.yaml
        if node is not None and not unchosen:
            check_node(name, node, group)
        elif not group.optional:
            raise ConfigError(
                f"{name}: missing, expected {name}=... (known: {' '.join(choices(name))})"
            )
    if attention := config.get("attention"):
        absent = {"features", "sampler", "m"} - uses(attention)
        if unused := [o for o in overrides() if mechanism_part(o) in absent]:
            raise ConfigError(
                f"attention={choice('attention')}: does not use {' '.join(unused)}; remove it"
            )


# ---- the configuration in a run directory


def load_task(run: str | Path, **changes: Any) -> Any:
    """Create the task of a run as configured, with changes to some keys.

    The file is untrusted data: only tasks of this package with plain option values are created. Raises ConfigError for
    others.
    """
    path = Path(run).expanduser() / "config.yaml"
    node = read_yaml(path).get("task")
    if not isinstance(node, dict) or not str(node.get("_target_")).startswith("crt_exp."):
        raise ConfigError(f"{path}: task={format_value(node)}: expected a task of this package")
    check_node("task", node | changes, GROUPS["task"])
    return construct(node | changes)
