"""The command line: compose a configuration, run its task, write its results.

Everything that a user can get wrong in the configuration is found here, before anything is written, and said in a few lines.
"""

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

from omegaconf import ListConfig

from crt_exp.config import CONF, ConfigError, choices, groups, unknown
from crt_exp.processes import (Preempted, ProcessesFailed, agree_on_start, inside_torchrun, lost_process, rank, torchrun,
                               world_size)

ERROR_CODE, DIVERGED_CODE = 2, 3  # and 128 + the signal where a run was told to stop and left a checkpoint
PATIENCE = 10.0  # seconds: torchrun ends the other processes as soon as one has failed
PLUGINS = {"joblib": "hydra_joblib_launcher", "submitit_local": "hydra_submitit_launcher",
           "submitit_slurm": "hydra_submitit_launcher", "optuna": "hydra_optuna_sweeper"}


def main() -> None:
    """The console script `crt_exp` and `python -m crt_exp`, alone or on every process of a torchrun."""
    import hydra

    agree_on_start()
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
    except Stopped as stopped:
        end_run(stopped, stopped.code)
    except (ValueError, OSError, DataError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        remove_empty(output_directory())
        end_run(error, ERROR_CODE)


def end_run(error: Exception, code: int) -> None:
    """Tells an error and exits; in a sweep only a signal ends the other runs too."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if HydraConfig.get().mode != RunMode.MULTIRUN or code >= 128:
        fail(error, code)
    tell(error)
    raise RunFailed(f"the run in {output_directory()} failed: its error stands above") from None


class RunFailed(Exception):
    """One run of a sweep failed, and what it failed of was told."""


def run(cfg) -> float | None:
    """Runs what is not yet in the run directory, and returns the task's metric for sweeps (None on processes but the first)."""
    check_attention(cfg)
    if cfg.trainer.processes and not inside_torchrun():
        return run_processes(cfg)
    task = instantiate(cfg.task)
    mechanism = build_mechanism(cfg)
    records, directory = study(cfg, task, mechanism) if is_study(task) else train(cfg, task)
    if not records:
        return None
    print(f"{task.summary(records)}  [{directory}]")
    return records[-1][task.metric]


def study(cfg, task, mechanism) -> tuple[list[dict], Path]:
    """The records of a task that only measures."""
    from crt_exp.run import Run

    if world_size() > 1 or cfg.trainer.processes:
        raise ConfigError(f"task={choice('task')} does not train: start it on one process")
    with Run(cfg, output_directory()) as current:
        if not finished(current.records):
            for record in task.records(mechanism, cfg.seed, done=list(current.records)):
                current.log(**record)
    return current.records, current.directory


def train(cfg, task) -> tuple[list[dict], Path]:
    """The records of a task that trains; none on processes but the first. Raises Stopped after a signal or a divergence."""
    from crt_exp.attention.choices import attention_of
    from crt_exp.nonfinite import Diverged
    from crt_exp.run import Run
    from crt_exp.trainer import Trainer
    from crt_exp.trainer_config import start_world

    config = instantiate(cfg.trainer, _convert_="all")
    attention = attention_of(choice("attention"), cfg.get("attention"), cfg.features, cfg.sampler, cfg.seed)
    world = start_world(config)
    try:
        with Run(cfg, output_directory(), world.main) as current:
            if not world.broadcast(finished(current.records)):
                Trainer(config, task, attention, current, world, cfg.seed).fit()
    except (Preempted, Diverged) as error:
        if isinstance(error, Preempted):
            stopped = Stopped(f"stopped by {error}; continue with resume=auto hydra.run.dir={output_directory()}", error.code)
        else:
            stopped = Stopped(str(error), DIVERGED_CODE)
        tell(stopped)
        world.barrier()  # torchrun ends all processes when one has ended: the first must have spoken
        raise stopped from None
    except RuntimeError as error:
        if world.size > 1 and lost_process(error):
            raise Stopped(f"process {rank()} cannot go on, for another is gone: {str(error).splitlines()[0]}", 1) from None
        raise
    finally:
        if world.size == 1 or sys.exc_info()[0] is None:
            world.close()
    return current.records, current.directory


def run_processes(cfg) -> float:
    """The same run on `trainer.processes` processes, started by torchrun; returns the metric that it recorded."""
    from hydra.core.hydra_config import HydraConfig

    from crt_exp.run import read_records

    sources = [f"{s.schema}://{s.path}" for s in HydraConfig.get().runtime.config_sources if s.provider.endswith("command-line")]
    try:
        torchrun(cfg.trainer.processes, [*_task_overrides(), *with_folders(sources)], output_directory())
    except (Preempted, ProcessesFailed) as error:
        message = f"stopped by {error}; continue with resume=auto hydra.run.dir={output_directory()}"
        raise Stopped(message if isinstance(error, Preempted) else str(error), error.code) from None
    last = read_records(output_directory() / "metrics.jsonl")[-1]
    return last[last["metric"]]


class Stopped(Exception):
    """A run that ended early with an exit code of its own: on all its processes, so that only the first one tells it."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code, self.told = code, rank() > 0


def is_study(task: Any) -> bool:
    return hasattr(task, "records")


def finished(records: list[dict]) -> bool:
    return bool(records and records[-1].get("final"))


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
    if rank() == 0 and directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()


def fail(error: Exception, code: int = ERROR_CODE) -> None:
    """Tells an error and exits."""
    tell(error)
    sys.exit(code)


def tell(error: Exception) -> None:
    """One message. Most errors are found by every process: the others give the first one time to tell it."""
    if isinstance(error, Stopped):
        if not error.told:
            print(f"crt_exp: {error}", file=sys.stderr, flush=True)
        error.told = True
        return
    if rank() > 0:
        time.sleep(PATIENCE)
    print(f"crt_exp: error{f' on process {rank()}' if rank() else ''}: {error}", file=sys.stderr, flush=True)


# ---- the command line, checked before Hydra acts on it -------------------------------------------------------------------


def check_command_line(args: list[str]) -> None:
    """Raises ConfigError for a group choice or a key that does not exist, naming the nearest one that does."""
    from hydra._internal.utils import get_args_parser

    flags = get_args_parser().parse_args(args)
    if flags.help or flags.hydra_help or flags.info or flags.shell_completion:
        return
    if flags.multirun and inside_torchrun():
        raise ConfigError("a sweep (-m) cannot run inside torchrun: leave torchrun out and add trainer.processes=N, which starts "
                          "one for each run")
    overrides = parse_overrides(flags.overrides)
    if any(o.key_or_group in ("hydra/launcher", "hydra/sweeper") for o in overrides):
        adjust_plugins()
    folders = search_path(flags.config_dir, overrides)
    overrides = [o for o in overrides if o.key_or_group != "hydra.searchpath"]
    for override in overrides:
        check_choice(override, folders)
    cfg = compose([first_value(o) for o in overrides if is_group(o)], folders)
    for override in overrides:
        check_key(override, cfg)
        check_sweep(override, flags.multirun)
    final = compose([first_value(o) for o in overrides], folders)
    for override in overrides:
        if not is_group(override) and not override.is_delete() and not override.key_or_group.startswith("hydra"):
            check_type(override, cfg, final)
    if not flags.cfg and rank() == 0:
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
    name = override.key_or_group.split("@")[0]
    return name in groups() or "/" in name


def values(override) -> list:
    """What an override sets, one value for each run of a sweep."""
    if override.is_sweep_override() and override.is_discrete_sweep():
        return list(override.sweep_string_iterator())
    return [override.get_value_element_as_str() if override.value() is not None else None]


def check_choice(override, folders: list[str]) -> None:
    """Raises for a choice that no file stands for, here or in `folders`, and for a plugin that is not installed."""
    group = override.key_or_group.split("@")[0]
    if not is_group(override) or override.is_delete():
        return
    for value in map(str, values(override)):
        if group in ("hydra/launcher", "hydra/sweeper"):
            check_plugin(group, value)
        elif "/" not in group and value not in ("None", "null", *choices(group), *added(group, folders)):
            raise unknown(group, value, choices(group) + added(group, folders))


def search_path(config_dir: str | None, overrides: list) -> list[str]:
    """Folders with further configuration files, from --config-dir and hydra.searchpath, as Hydra writes them: file://..."""
    given = [str(getattr(path, "text", path)) for o in overrides if o.key_or_group == "hydra.searchpath" for path in o.value()]
    return ([f"file://{Path(config_dir).absolute()}"] if config_dir else []) + given


def added(group: str, folders: list[str]) -> list[str]:
    """The choices of a group that such folders add."""
    return sorted(path.stem for folder in folders for path in Path(folder.removeprefix("file://"), group).glob("*.yaml"))


def adjust_plugins() -> None:
    """Puts conf/sweeps.yaml over the plugins' own values: Hydra allows no file with the name of a plugin's configuration."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins
    from omegaconf import OmegaConf

    Plugins.instance()  # imports the plugins, which register themselves
    store = ConfigStore.instance()
    for group, presets in OmegaConf.load(CONF / "sweeps.yaml").items():
        for name in set(presets) & {path.removesuffix(".yaml") for path in store.list(group)}:
            own = store.load(f"{group}/{name}.yaml")
            store.store(name, OmegaConf.merge(own.node, presets[name]), group=group, provider=own.provider)


def check_plugin(group: str, value: str) -> None:
    if value not in PLUGINS:
        return
    try:
        found = importlib.util.find_spec(f"hydra_plugins.{PLUGINS[value]}")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError(f"{group}={value} needs {PLUGINS[value].replace('_', '-')}: pip install 'crt_exp[sweep]'")


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
    if first is None:  # a continuous sweep (interval): its lower end
        first = override.value().start
    prefix = "+" if override.is_add() else "++" if override.is_force_add() else ""
    return f"{prefix}{override.key_or_group}={first}"


def compose(overrides: list[str], folders: list[str] = ()):
    """The configuration, with files from `folders` (--config-dir) beside the product's own."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF.resolve())):
            return hydra_compose("config", overrides=[*with_folders(folders), *overrides], return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error.__cause__ or error).splitlines()[0]) from None


def with_folders(folders: list[str]) -> list[str]:
    """The override that adds folders to Hydra's search path."""
    paths = ",".join("'{}'".format(folder.replace("'", "\\'")) for folder in folders)
    return [f"hydra.searchpath=[{paths}]"] if folders else []


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
