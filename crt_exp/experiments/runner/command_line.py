"""Check the command line before Hydra runs and torch is imported; print --help.

Errors are one line. --help prints the groups with their choices, and every key with its comment in the configuration
file.
"""

import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from crt_exp.experiments.data import inside_torchrun, rank
from crt_exp.experiments.runner.configuration import (
    GROUPS,
    check_plain,
    explain_error,
    override_key,
    plain_config,
    same_ending,
)
from crt_exp.experiments.runner.sweep import chooses_files, without_unused
from crt_exp.registry import (
    ALIASES,
    CONF,
    OWN,
    ConfigError,
    canonical,
    choices,
    file_of,
    own_names,
)
from crt_exp.validation import either, to_text, unknown

COLUMN = 40  # column of the comments in --help
NOUNS = {
    "task": "a task",
    "features": "a feature map",
    "sampler": "a sampler",
    "attention": "an attention",
    "trainer": "a trainer",
    "logger": "a logger",
    "experiment": "an experiment",
}  # what a choice of a group is
LINE = re.compile(
    r"^( *)(\w+): ?.*?(?:\s*(?<!\S)# (.*))?$"
)  # indentation, key and comment of a line


def check_command_line(args: list[str]) -> str | None:
    """Check `args`; return the text of --help if they ask for it, else None.

    Raises ConfigError, with the nearest name, for unknown choices and keys and for invalid values. In a sweep, each
    value of each key is checked.
    """
    parser = get_args_parser()
    parser.error = refuse
    flags = parser.parse_args(args)
    if flags.hydra_help or flags.info or flags.shell_completion:
        return None
    if flags.multirun and inside_torchrun():
        raise ConfigError("-m: not supported inside torchrun; start torchrun for each run")
    folders = [flags.config_dir] if flags.config_dir else []
    refuse_home("--config-dir", flags.config_dir or "")
    with own_names(folders):
        jobs = varied_jobs(flags.overrides) if flags.multirun else [flags.overrides]
        for job in jobs:
            cfg = compose(job)
            HydraConfig.instance().set_config(cfg)  # needed by interpolations
            if flags.help:
                return help_text(cfg)
            if flags.multirun:  # all runs before the first; a run without a sweep is checked once
                check_plain(plain_config(cfg))
    if flags.cfg or rank() > 0:
        return None
    kind = "sweep" if flags.multirun else "run"
    named = f"hydra.{kind}.dir"
    directory = Path(cfg.hydra[kind].dir)
    refuse_home(named, str(directory))
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{named}={directory}: {error.strerror}; expected a writable folder"
        ) from None
    with suppress(OSError):  # not empty; Hydra creates it with a new timestamp
        directory.rmdir()
    return None


def refuse(message: str) -> None:
    raise ConfigError(message)


def with_file_names(args: list[str]) -> list[str]:
    """Replace other names, such as attention=favor++ and task=sweep, by file names."""
    renamed = []
    for arg in args:
        key, sign, names = arg.partition("=")
        if sign and key.lstrip("+") in ALIASES:
            files = [canonical(key.lstrip("+"), name) for name in names.split(",")]
            arg = f"{key}={','.join(files)}"
        renamed.append(arg)
    return renamed


def varied_jobs(overrides: list[str]) -> Iterator[list[str]]:
    """Yield runs of a sweep that together contain each value of each key."""
    with (
        one_line(),
        hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF.resolve())),
    ):
        parsed = OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(
            overrides
        )
        if any(
            o.key_or_group == "hydra/sweeper" for o in parsed
        ):  # this sweeper chooses the values itself
            parsed = [o for o in parsed if not o.is_sweep_override()]
        (jobs,) = BasicSweeper.split_arguments(parsed, None)
    jobs, _ = without_unused(jobs, compose)
    seen: set[str] = set()
    for job in jobs:
        if not seen.issuperset(job) or not job:
            yield job
        seen.update(job)


def compose(overrides: list[str]):
    """Compose the configuration of one run, including the files of `own_names`."""
    with (
        one_line(overrides),
        hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF.resolve())),
    ):
        return hydra.compose(
            "config", overrides=[*search_path(), *overrides], return_hydra_config=True
        )


def search_path() -> list[str]:
    """Return the override that adds the folders of `own_names` to Hydra's search path."""
    paths = ["'file://{}'".format(str(folder).replace("'", "\\'")) for folder in OWN.get()]
    return [f"hydra.searchpath=[{','.join(paths)}]"] if paths else []


@contextmanager
def one_line(overrides: list[str] = ()) -> Iterator[None]:
    """Turn Hydra's errors into ConfigErrors of one line; `overrides` are those composed."""
    try:
        yield
    except OverrideParseException as error:
        key = error.override.partition("=")[0]
        raise ConfigError(
            f"{error.override}: expected key=value; quote values with special characters twice, "
            f"'{key}=\"...\"', and write $HOME for ~"
        ) from None
    except MissingConfigException as error:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        raise unknown_choice(group, name, error.options or []) from None
    except (HydraException, OmegaConfBaseException) as error:
        cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
        if isinstance(cause, ConfigAttributeError | ConfigKeyError):
            raise unknown_key(cause, overrides) from None
        if isinstance(cause, OmegaConfBaseException):
            raise explain_error(cause) from None
        raise ConfigError(" ".join(str(error).split())) from None
    except ValueError as error:  # features=null
        raise ConfigError(f"{error}; to remove a group, write ~group") from None


def unknown_choice(group: str, name: str, options: list[str]) -> ConfigError:
    """Build the error for an unknown choice, with the groups that have this name."""
    others = []
    for other in (*GROUPS, "experiment"):
        if canonical(other, name) in choices(other):
            others.append(f"{name} is {NOUNS[other]}: {other}={name}")
    if others:
        return ConfigError("; ".join([f"unknown {group} {name!r}", *others]))
    plugin = " (plugins: pip install 'crt_exp[sweep]')" if group.startswith("hydra/") else ""
    return ConfigError(f"{unknown(group, name, [*options, *ALIASES.get(group, ())])}{plugin}")


def unknown_key(error: OmegaConfBaseException, overrides: list[str]) -> ConfigError:
    """Build the error for an unknown key.

    Names the choices that use the key, or keys elsewhere with this last part, or the closest key.
    """
    full = str(error.full_key)
    path, _, key = full.rpartition(".")
    if key in GROUPS and not path:
        options = [name for name in map(override_key, overrides) if name.startswith(f"{key}.")]
        users = users_of(options[0]) if options else []
        return ConfigError(f"{key}: none is chosen, add {key}={either(users or ['...'])}")
    start = f"{path}." if path else ""
    siblings = [f"{start}{name}" for name in map(str, error.parent_node or ()) if name[0] != "_"]
    if not path:
        siblings += {*GROUPS, "experiment"} - {*siblings}
    nearest = unknown("key", full, sorted(siblings))
    group = full.partition(".")[0]
    if group == "hydra":
        return nearest
    cfg = compose(list(filter(chooses_files, overrides)))
    elsewhere = same_ending(plain_config(cfg), key)
    question = ""
    if elsewhere:
        question = f"; did you mean {either(elsewhere)}?"
    users = users_of(full)
    if users:
        hint = question or f"; {group}={either(users)} does"
        return ConfigError(f"{group}={cfg.hydra.runtime.choices[group]}: does not use {full}{hint}")
    if elsewhere:
        return ConfigError(f"unknown key {full!r}{question}")
    hints = []
    for other in GROUPS:
        if users := users_of(f"{other}.{key}"):
            hints.append(f"{other}.{key} needs {other}={either(users)}")
    return ConfigError("; ".join([f"unknown key {full!r}", *hints])) if hints else nearest


def users_of(key: str) -> list[str]:
    """Return the choices of a key's group whose files have the key."""
    group = key.partition(".")[0]
    if group not in GROUPS:
        return []
    users = []
    for name in choices(group):
        if key in keys_of(file_of(group, name), group):
            users.append(name)
    return users


def refuse_home(key: str, folder: str) -> None:
    """Raise ConfigError for ~, which would be the name of a folder."""
    if folder.startswith("~"):
        raise ConfigError(f"{key}={folder}: ~ is not expanded here; write $HOME for ~")


# ---- --help


def help_text(cfg: DictConfig) -> str:
    """Fill the help template of conf/config.yaml for a composed configuration."""
    groups = [
        wrap(f"{group}: {', '.join(choices(group))}", 2)
        for group in sorted([*GROUPS, "experiment"])
    ]
    keys = lines_of(plain_config(cfg), comments(cfg), "")
    template = cfg.hydra.help.template.replace("$APP_CONFIG_GROUPS", "\n".join([*groups, ""]))
    return template.replace("$CONFIG", "\n".join([*keys, ""]))


def comments(cfg: DictConfig) -> dict[str, str]:
    """Return the comments on keys in config.yaml and in the chosen files."""
    result = keys_of(CONF / "config.yaml", "")
    chosen = dict(cfg.hydra.runtime.choices)
    chosen = {"trainer": chosen.pop("trainer"), **chosen}  # a task may replace keys of trainer
    for place, name in chosen.items():
        path = place.partition("@")[0]
        group = path.partition("/")[0]
        if group in (*GROUPS, "experiment"):
            for folder in (CONF, *OWN.get()):
                for key, comment in keys_of(folder / path / f"{name}.yaml", group).items():
                    result[key] = comment or result.get(key)
    return {key: comment for key, comment in result.items() if comment}


def wrap(text: str, indent: int) -> str:
    return textwrap.fill(
        text, 120, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def lines_of(node: dict[str, Any], comments: dict[str, str], prefix: str) -> Iterator[str]:
    """Yield key=value and its comment, for each key.

    Keys such as `_target_` are left out.
    """
    for key, value in node.items():
        name = f"{prefix}{key}"
        is_group = isinstance(value, dict) and bool(value)
        setting = f"{name}.*" if is_group else f"{name}={to_text(value)}"
        if not key.startswith("_") and (name in comments or not is_group):
            yield wrap(f"{setting:<{COLUMN - 2}}  {comments.get(name, '')}", COLUMN)
        if is_group:
            yield from lines_of(value, comments, f"{name}.")


def keys_of(path: Path, package: str) -> dict[str, str | None]:
    """Return the dotted keys of a file and its defaults, each with its comment or None."""
    keys = {}
    if not path.is_file():
        return keys
    text = path.read_text()
    for entry in (yaml.safe_load(text) or {}).get("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            keys |= keys_of(path.parent / f"{entry.partition('@')[0]}.yaml", package)
    parents = []  # indentation and name of the keys around a line
    if package and "@package _global_" not in text:
        parents = [(-1, package)]
    for line in text.splitlines():
        match = LINE.match(line)
        if match:
            indent, key, comment = match.groups()
            parents = [parent for parent in parents if parent[0] < len(indent)]
            parents.append((len(indent), key))
            name = ".".join(name for _, name in parents)
            keys[name] = comment or keys.get(name)
    return keys
