"""The command line, checked before Hydra acts on it: what does not exist is named with the nearest thing that does."""

import functools
import os
import re
import sys
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from crt_exp.config import ALIASES, CONF, ConfigError, canonical, groups, known, unknown
from crt_exp.data.ranks import inside_torchrun, rank
from crt_exp.runner.configuration import GROUPS, check_plain, explained, key_of, part_of, plain
from crt_exp.runner.help import help_text
from crt_exp.runner.exit_handling import remove_empty
from crt_exp.runner.sweep import adjust_plugins, check_plugin
from crt_exp.runner.written import check_values
from crt_exp.schema import names_code


LONGEST_NAME = 255  # bytes of a file's name
CHOOSING = ("experiment", "attention")  # what decides which choices of other keys are used
HOME = re.compile(r"""(?<=[=,["'])~[\w.-]*(?=[/"'])""")  # where a path of a value begins


class Shown(Exception):
    """What --help asks for; nothing runs."""


def check_command_line(args: list[str]) -> None:
    """Raises Shown for --help; ConfigError for a group choice or a key that does not exist, naming the nearest one that
    does, and for values that do not fit; of a sweep, for each of its values."""
    from hydra._internal.utils import get_args_parser

    flags = get_args_parser().parse_args(args)
    if flags.hydra_help or flags.info or flags.shell_completion:
        return
    if flags.config_name or flags.config_path:
        raise ConfigError("--config-name and --config-path would replace the whole configuration: add files of your "
                          "own with --config-dir=DIR, which holds DIR/<group>/<name>.yaml")
    if flags.experimental_rerun:
        raise ConfigError("--experimental-rerun would run what a file says: repeat the run's command, it stands in "
                          "versions.json")
    if flags.multirun and inside_torchrun():
        raise ConfigError("a sweep (-m) cannot run inside torchrun: start one torchrun for each run, or leave torchrun "
                          "out and choose a launcher, hydra/launcher=...")
    overrides = parse_overrides(flags.overrides)
    if any(o.key_or_group in ("hydra/launcher", "hydra/sweeper") for o in overrides):
        adjust_plugins()
    folders = search_path(flags.config_dir, overrides)
    overrides = [o for o in overrides if o.key_or_group != "hydra.searchpath"]
    for override in overrides:
        check_names_no_code(override)
    for override in overrides:
        check_choice(override, folders)
    first = without_unused([first_value(o) for o in overrides], overrides, folders)
    final = composed([o for o in overrides if first_value(o) in first], folders)
    if flags.help:
        raise Shown(help_text(final, {group: listed(group, folders) for group in (*GROUPS, "experiment")}))
    for override in overrides:
        check_sweep(override, flags.multirun)
    if flags.cfg:
        return
    directory = planned_directory(final, flags.multirun)
    if flags.multirun:
        check_name(overrides, folders)
    runs = list(variants(overrides, final, folders))
    for given in runs:
        check_values(given)
    for given in runs:
        check_plain(given)
    if rank() == 0:
        check_writable(directory)
    if flags.multirun:
        leave_out_unused(folders)


def with_file_names(args: list[str]) -> list[str]:
    """Arguments with the home directory in place of ~, and in which the papers' names of attention, such as favor++,
    are those of its files."""
    renamed = []
    for arg in args:
        arg = HOME.sub(lambda found: os.path.expanduser(found[0]), arg)
        key, sign, text = arg.partition("=")
        group = key.lstrip("+")
        names = (canonical(group, name.strip()) for name in text.split(","))
        renamed.append(f"{key}={','.join(names)}" if sign and group in ALIASES else arg)
    return renamed


def parse_overrides(args: list[str]) -> list:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed = []
    for arg in args:
        if "=" not in arg and not arg.startswith("~"):
            raise ConfigError(f"{arg!r} is not of the form key=value or group=choice")
        try:
            parsed.append(parser.parse_override(arg))
        except HydraException:
            key = arg.partition("=")[0]
            raise ConfigError(f"cannot read {arg!r}: a value with other characters than letters, digits and ./-+_:@%* "
                              f"(# = ~ , brackets, quotes, accents) takes quotes within quotes: '{key}=\"...\"', of a "
                              f"list '{key}=[\"...\",\"...\"]'") from None
    return parsed


def check_names_no_code(override) -> None:
    """What is built stands in files alone, those of conf/ and of a folder that the user names."""
    keys = override.key_or_group.split("@")[0].split(".")
    if any(key.startswith("_") for key in keys) or (not override.is_sweep_override() and names_code(override.value())):
        raise ConfigError(f"{override.input_line}: the command line cannot name code to run; write it to "
                          "DIR/<group>/<name>.yaml and add --config-dir=DIR <group>=<name>")


def is_group(override) -> bool:
    name = override.key_or_group.split("@")[0]
    return name in groups() or "/" in name


def values(override) -> list:
    """What an override sets, one value for each run of a sweep."""
    from hydra.core.override_parser.types import Glob

    if isinstance(override.value(), Glob):
        return override.value().filter(known(override.key_or_group))
    if override.is_sweep_override() and override.is_discrete_sweep():
        return list(override.sweep_string_iterator())
    if override.is_sweep_override():  # an interval; a number from an open one lies between its ends
        start, end = override.value().start, override.value().end
        return [start, end] if isinstance(start, int) else [(start + end) / 2]
    return [override.get_value_element_as_str() if override.value() is not None else None]


def check_choice(override, folders: list[str]) -> None:
    """Raises for a choice that no file stands for, here or in `folders`, and for a plugin that is not installed."""
    group = override.key_or_group.split("@")[0]
    if not is_group(override) or override.is_delete():
        return
    for value in map(str, values(override)):
        if group in GROUPS and value in ("None", "null"):
            advice = f"leave it out, or write ~{group}" if GROUPS[group].optional else "a run needs one"
            raise ConfigError(f"{group} = null: {advice} (known: {' '.join(listed(group, folders))})")
        if group in ("hydra/launcher", "hydra/sweeper"):
            check_plugin(group, value)
        elif "/" not in group and value not in ("None", "null", *listed(group, folders)):
            raise unknown(group, value, listed(group, folders))


def search_path(config_dir: str | None, overrides: list) -> list[str]:
    """Folders with further configuration files, from --config-dir and hydra.searchpath,
    as Hydra writes them: file://..."""
    given = [o.value() for o in overrides if o.key_or_group == "hydra.searchpath"]
    if any(not isinstance(paths, list) for paths in given):
        raise ConfigError(f"hydra.searchpath = {given[0]}: it takes a list of folders, [file:///home/me/conf]")
    given = [str(path) for paths in given for path in paths]
    if config_dir and not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir={config_dir}: there is no such folder")
    return ([f"file://{Path(config_dir).absolute()}"] if config_dir else []) + given


def listed(group: str, folders: list[str]) -> list[str]:
    """The choices of a group, with those that such folders add."""
    return known(group) + added(group, folders)


def added(group: str, folders: list[str]) -> list[str]:
    """The choices of a group that such folders add."""
    files = (path for folder in folders for path in Path(folder.removeprefix("file://"), group).glob("*.yaml"))
    return sorted(path.stem for path in files)


def composed(overrides: list, folders: list[str]):
    """The configuration of the first values. Raises ConfigError, for a key that does not exist with the nearest one."""
    try:
        return compose([first_value(o) for o in overrides], folders)
    except ConfigError as error:
        if str(error).startswith("Could not delete"):
            raise ConfigError(f"{error} ~name deletes a key or a group; a path is written key=~/..., and a text that "
                              "begins with ~ 'key=\"~...\"'") from None
        chosen = compose([first_value(o) for o in overrides if is_group(o)], folders)
        for override in overrides:
            check_key(override, chosen)
        raise


def check_key(override, cfg) -> None:
    """Follows the key into the composed configuration; + and ~ may name what is not there or goes away."""
    from omegaconf import DictConfig

    if is_group(override) or override.is_add() or override.is_force_add() or override.is_delete():
        return
    node, path = cfg, override.key_or_group.split(".")
    for depth, part in enumerate(path):
        if not isinstance(node, DictConfig):
            return  # an element of a list: Hydra checks it
        if part not in node:
            known = [".".join([*path[:depth], str(k)]) for k in node if k != "_target_" and (depth or k != "hydra")]
            tops = [] if depth else groups()
            raise unknown("key", override.key_or_group, sorted({*known, *tops}))
        node = node._get_node(part)  # unresolved: an interpolation is a valid key too


def variants(overrides: list, cfg, folders: list[str]) -> Iterator[dict]:
    """The composed configuration as plain dictionaries: first values of a sweep, then each other value of each key, in
    a run whose attention uses it."""
    yield plain(cfg)
    compose_once = functools.cache(lambda job: plain(compose([*job], folders)))
    for override in overrides:
        for value in values(override)[1:] if override.is_sweep_override() else ():
            text = f"{override.get_key_element()}={value}"
            for chosen in attentions(overrides):
                others = {o.key_or_group: first_value(o) for o in overrides} | {key_of(each): each for each in chosen}
                job = without_unused([*(others | {override.key_or_group: text}).values()], overrides, folders)
                if text in job:
                    break
            if is_group(override):
                yield compose_once(tuple(job))
            else:
                base = tuple(first_value(override) if each == text else each for each in job)
                yield with_value(compose_once(base), override.key_or_group, parse_overrides([text])[0].value())


def check_name(overrides: list, folders: list[str]) -> None:
    """Raises ConfigError where a run of a sweep, that of the longest values, would have too long a directory name."""
    longest = [f"{o.get_key_element()}={max(map(str, values(o)), key=len)}" if o.is_sweep_override() else o.input_line
               for o in overrides]
    job = [*without_unused(longest, overrides, folders), "hydra.job.num=0", "hydra.job.id=0"]
    try:
        subdir = str(compose(job, folders).hydra.sweep.subdir)
    except OmegaConfBaseException as error:
        raise explained(error) from None
    if (size := max(len(os.fsencode(part)) for part in Path(subdir).parts)) > LONGEST_NAME:
        raise ConfigError(f"hydra.sweep.subdir={subdir[:60]}...: a name of {size} bytes, expected at most "
                          f"{LONGEST_NAME}: choose another hydra.sweep.subdir, such as '${{hydra.job.num}}'")


# ---- what the attention of a run of a sweep does not use -------------------------------------------------------------


def attentions(overrides: list) -> list[tuple[str, ...]]:
    """The overrides that choose the attention, of each run of a sweep."""
    chosen = (o for o in overrides if o.key_or_group in CHOOSING and not o.is_delete())
    return [*product(*([f"{o.get_key_element()}={value}" for value in values(o)] if o.is_sweep_override()
                       else [o.input_line] for o in chosen))]


@functools.cache
def attention_of(chosen: tuple[str, ...], folders: tuple[str, ...]) -> Any:
    """The attention that some overrides choose, as its file has it."""
    return compose([*chosen], [*folders]).get("attention")


def without_unused(job: list[str], overrides: list, folders: list[str]) -> list[str]:
    """The overrides of one run of a sweep, without those that its attention does not use, where the sweep has several
    values of that choice or another attention that uses it."""
    swept = {o.key_or_group for o in overrides if o.is_sweep_override()}
    if not swept or not any(part_of(o) and o.partition("=")[0] != "attention" for o in job):
        return job
    chosen = tuple(o for o in job if key_of(o) in CHOOSING and o[0] != "~")
    mine, *others = (attention_of(each, tuple(folders)) for each in (chosen, *attentions(overrides)))
    return [o for o in job if used(o, mine) or not (key_of(o) in swept and part_of(o) != "attention"
                                                    or any(used(o, each) for each in others))]


def used(override: str, attention: Any) -> bool:
    """Whether an attention makes use of what an override chooses."""
    from crt_exp.presets import uses

    part, (_, *path) = part_of(override), key_of(override).split(".")
    if attention is None or part is None or override.startswith("+"):
        return True
    return (not path or path[0] in attention) if part == "attention" else part in uses(attention)


def leave_out_unused(folders: list[str]) -> None:
    """Lets Hydra's sweeper make each run without what its attention does not use, and runs that are then the same once.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    split = getattr(BasicSweeper.split_arguments, "__wrapped__", BasicSweeper.split_arguments)

    @functools.wraps(split)
    def split_arguments(overrides: list, max_batch_size: int | None) -> list[list[list[str]]]:
        jobs = [*chain(*split(overrides, None))]
        kept = [without_unused(job, overrides, folders) for job in jobs]
        said = dict.fromkeys(f"{' '.join(o for o in job if key_of(o) in CHOOSING)} does not use {unused}: left out of "
                             "its runs" for job, rest in zip(jobs, kept) for unused in job if unused not in rest)
        runs = [[*job] for job in dict.fromkeys(map(tuple, kept))]
        repeated = [f"{len(jobs) - len(runs)} of {len(jobs)} runs would repeat another one and are skipped"]
        print("".join(f"{line}\n" for line in [*said, *repeated * (len(runs) < len(jobs))]), end="", file=sys.stderr)
        return [*BasicSweeper.split_overrides_to_chunks(runs, max_batch_size)]

    BasicSweeper.split_arguments = staticmethod(split_arguments)


def with_value(node: dict, key: str, value) -> dict:
    """A copy in which a dotted key has another value."""
    name, _, rest = key.partition(".")
    inner = node.get(name)
    return node | {name: with_value(inner, rest, value) if rest and isinstance(inner, dict) else value}


def check_sweep(override, multirun: bool) -> None:
    if override.is_sweep_override() and not multirun:
        raise ConfigError(f"{override.input_line} names several values: add -m to sweep over them, or quote one value "
                          "that holds commas: 'key=\"a,b\"'")


def first_value(override) -> str:
    """The override as text; of a sweep its first value."""
    if not override.is_sweep_override():
        return override.input_line
    return f"{override.get_key_element()}={values(override)[0]}"


def compose(overrides: list[str], folders: list[str] = ()):
    """The configuration, with files from `folders` (--config-dir) besides the product's own."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    running, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None  # that of a sweep that has begun
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF.resolve())):
            return hydra_compose("config", overrides=[*with_folders(folders), *overrides], return_hydra_config=True)
    except OmegaConfBaseException as error:
        raise explained(error) from None
    except (HydraException, ValueError) as error:
        cause = error.__cause__
        if isinstance(cause, OmegaConfBaseException):
            raise explained(cause) from None
        raise ConfigError(str(error).splitlines()[0]) from None
    finally:
        GlobalHydra.instance().hydra = running


def with_folders(folders: list[str]) -> list[str]:
    """The override that adds folders to Hydra's search path."""
    paths = ",".join("'{}'".format(folder.replace("'", "\\'")) for folder in folders)
    return [f"hydra.searchpath=[{paths}]"] if folders else []


def planned_directory(cfg, multirun: bool) -> Path:
    """Where Hydra will write; its own settings become current, for the interpolations in this name and
    in the configuration."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import read_write

    HydraConfig.instance().set_config(cfg)
    directory = Path(str(cfg.hydra.sweep.dir if multirun else cfg.hydra.run.dir))
    if directory.parts[:1] and directory.parts[0].startswith("~"):
        raise ConfigError(f"hydra.{'sweep' if multirun else 'run'}.dir={directory}: a file of the configuration cannot "
                          "use ~, write the whole path")
    with read_write(cfg.hydra):
        cfg.hydra.runtime.output_dir, cfg.hydra.job.id, cfg.hydra.job.num = str(directory), "0", 0
    HydraConfig.instance().set_config(cfg)
    return directory


def check_writable(directory: Path) -> None:
    """Raises where the run directory cannot be made, leaving nothing behind. Where it can, what it lies in stays:
    another run may begin there at this moment."""
    made = []
    try:
        for path in [*reversed(directory.absolute().parents), directory.absolute()]:
            if not path.exists():
                path.mkdir(exist_ok=True)
                made.append(path)
        probe = directory / ".crt_exp_probe"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        remove_empty(reversed(made))
        raise ConfigError(f"cannot write to {directory}: {error.strerror}; choose another hydra.run.dir") from None
    remove_empty(made[-1:])
