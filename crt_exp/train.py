"""The command line: compose a configuration, run its task, write its results.

Everything that a user can get wrong in the configuration is found here, before anything is written, and said in a few lines.
"""

import os
import sys
from pathlib import Path
from typing import Any

from omegaconf import ListConfig

from crt_exp.config import CONF, ConfigError, choices, groups, unknown

ERROR_CODE = 2


def main() -> None:
    """The console script `crt_exp` and `python -m crt_exp`."""
    import hydra

    try:
        check_command_line(sys.argv[1:])
    except ConfigError as error:
        fail(error)
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(guarded)()


def guarded(cfg) -> Any:
    """`run`, with a user's mistake told in one message and no traceback."""
    from crt_exp.data import DataError

    try:
        return run(cfg)
    except (ValueError, OSError, DataError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        remove_empty(output_directory())
        fail(error)


def run(cfg) -> float:
    """Builds the task, runs what is not yet in the run directory, and returns the task's metric for sweeps."""
    from crt_exp.run import Run

    check_attention(cfg)
    task = instantiate(cfg.task)
    mechanism = build_mechanism(cfg)
    with Run(cfg, output_directory()) as current:
        records = list(current.records)
        if not (records and records[-1].get("final")):
            for record in task.records(mechanism, cfg.seed, done=records):
                current.log(**record)
                records.append(record)
    print(f"{task.summary(records)}  [{current.directory}]")
    return records[-1][task.metric]


def build_mechanism(cfg):
    """The feature map, the sampler and m that the configuration names; the exact kernel for attention=exact."""
    from omegaconf import OmegaConf

    from crt_exp.tasks.base import EXACT, Mechanism

    if choice("attention") == "exact":
        return EXACT
    options = OmegaConf.to_container(cfg.features, resolve=True)
    m = options.pop("m")
    if not isinstance(m, int) or m < 1:
        raise ConfigError(f"features.m = {m}: the number of projections must be a whole number of at least 1")
    instantiate(options)  # reports bad options of the map before any data is read
    return Mechanism(choice("features"), options, choice("sampler"), instantiate(cfg.sampler), m)


def check_attention(cfg) -> None:
    """Choices that do not go together."""
    if choice("attention") not in ("exact", "identity"):
        return
    given = [o for o in _task_overrides() if o.split("=")[0].lstrip("+").startswith(("features", "sampler"))]
    if given:
        raise ConfigError(f"attention={choice('attention')} uses no random features: leave out {' '.join(given)}")


def instantiate(node, **options) -> Any:
    """hydra.utils.instantiate with the constructor's own message in place of Hydra's wrapping."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as build

    try:
        return build(node, **options)
    except InstantiationException as error:
        if "unexpected keyword" in str(error.__cause__):
            raise ConfigError(str(error.__cause__)) from None
        raise (error.__cause__ or error) from None


def choice(group: str) -> str | None:
    from hydra.core.hydra_config import HydraConfig

    return HydraConfig.get().runtime.choices.get(group)


def _task_overrides() -> list[str]:
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task)


def output_directory() -> Path:
    from hydra.core.hydra_config import HydraConfig

    return Path(HydraConfig.get().runtime.output_dir)


def remove_empty(directory: Path) -> None:
    """Takes away what Hydra made before a run that never began."""
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()


def fail(error: Exception) -> None:
    print(f"crt_exp: error: {error}", file=sys.stderr)
    sys.exit(ERROR_CODE)


# ---- the command line, checked before Hydra acts on it -------------------------------------------------------------------


def check_command_line(args: list[str]) -> None:
    """Raises ConfigError for a group choice or a key that does not exist, naming the nearest one that does."""
    from hydra._internal.utils import get_args_parser

    flags = get_args_parser().parse_args(args)
    if flags.help or flags.hydra_help or flags.info or flags.shell_completion:
        return
    if flags.multirun and "LOCAL_RANK" in os.environ:
        raise ConfigError("a sweep (-m) cannot run inside torchrun: start one torchrun for each run instead")
    overrides = parse_overrides(flags.overrides)
    for override in overrides:
        check_choice(override)
    cfg = compose([first_value(o) for o in overrides if is_group(o)])
    for override in overrides:
        check_key(override, cfg)
        check_sweep(override, flags.multirun)
    final = compose([first_value(o) for o in overrides])
    for override in overrides:
        if not is_group(override) and not override.is_delete() and not override.key_or_group.startswith("hydra"):
            check_type(override, cfg, final)
    if not flags.cfg:
        check_writable(planned_directory(final, flags.multirun))


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
            raise ConfigError(f"cannot read {arg!r}; quote values that hold spaces, commas or brackets: 'key=\"a, b\"'") from None
    return parsed


def is_group(override) -> bool:
    return override.key_or_group.split("@")[0] in groups()


def values(override) -> list:
    """What an override sets, one value for each run of a sweep."""
    if override.is_sweep_override() and override.is_discrete_sweep():
        return list(override.sweep_string_iterator())
    return [override.get_value_element_as_str() if override.value() is not None else None]


def check_choice(override) -> None:
    group = override.key_or_group.split("@")[0]
    if not is_group(override) or override.is_delete():
        return
    for value in values(override):
        if value not in (None, "null") and str(value) not in choices(group):
            raise unknown(group, str(value), choices(group))


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


def check_type(override, before, after) -> None:
    """Raises where a number, a list or a switch is replaced by something of another kind."""
    from omegaconf import OmegaConf

    old, new = (OmegaConf.select(cfg, override.key_or_group) for cfg in (before, after))
    kinds = {"a number": (int, float), "a list": ListConfig, "true or false": bool}
    for kind, types in kinds.items():
        is_kind = lambda v, types=types: isinstance(v, types) and (types is bool or not isinstance(v, bool))
        if is_kind(old) and new is not None and not is_kind(new):
            raise ConfigError(f"{override.key_or_group} = {new}: it takes {kind}, such as {old}")


def check_sweep(override, multirun: bool) -> None:
    if override.is_sweep_override() and not multirun:
        raise ConfigError(f"{override.input_line} names several values: add -m to sweep over them, or quote one value that holds "
                          "commas: 'key=\"a,b\"'")


def first_value(override) -> str:
    """The override as text; of a sweep its first value."""
    if not override.is_sweep_override():
        return override.input_line
    first = values(override)[0] if override.is_discrete_sweep() else None
    if first is None:  # a continuous sweep (interval): only a sweeper can take a value from it
        return override.input_line
    prefix = "+" if override.is_add() else "++" if override.is_force_add() else ""
    return f"{prefix}{override.key_or_group}={first}"


def compose(overrides: list[str]):
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF.resolve())):
            return hydra_compose("config", overrides=overrides, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error.__cause__ or error).splitlines()[0]) from None


def planned_directory(cfg, multirun: bool) -> Path:
    """Where Hydra will write; its own settings must be current for the interpolations in the name."""
    from hydra.core.hydra_config import HydraConfig

    HydraConfig.instance().set_config(cfg)
    return Path(str(cfg.hydra.sweep.dir if multirun else cfg.hydra.run.dir))


def check_writable(directory: Path) -> None:
    """Raises where the run directory cannot be made, leaving nothing behind."""
    made = []
    try:
        for path in [*reversed(directory.absolute().parents), directory.absolute()]:
            if not path.exists():
                path.mkdir()
                made.append(path)
        probe = directory / ".crt_exp_probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}; choose another hydra.run.dir") from None
    finally:
        for path in reversed(made):
            path.rmdir()
