"""The configuration tree: the names of conf/, the files behind them, and the objects that these describe.

The files of `conf/` are the only table of names: "oprf" is `conf/features/oprf.yaml`, for the library as for the
command line. Folders of one's own (`own_names`) add to it.
"""

import json
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from crt_exp.options import (ConfigError, Parameter, Values, annotations_in_source, check_options,  # noqa: F401
                             format_value, parameters, unknown)

_PACKAGED = Path(__file__).with_name("conf")
ALIASES = {"attention": {"performer": "favorp", "favor+": "favorp", "favor++": "favorpp", "favor#": "favorsharp"}}
LARGEST = 2**17  # characters of a YAML file
_OWN: ContextVar[tuple[Path, ...]] = ContextVar("own_names", default=())
CONF = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parent.parent / "conf"


# ---- names


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@contextmanager
def own_names(folders: Iterable[str | Path]) -> Iterator[None]:
    """Within it the names of these folders, laid out as conf/, are known too, also when a saved attention is read.

    `--config-dir` adds them to a run and to a report. Their classes are imported, so give folders that you trust.
    Raises ConfigError for a path that is no folder, and for a name that conf/ has.
    """
    paths = tuple(Path(folder).expanduser().absolute() for folder in folders)  # processes may stand elsewhere
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{path}: expected a folder with names of your own, as --config-dir and names=... take")
        for file in sorted(path.glob("*/*.yaml")):
            if (taken := CONF / file.parent.name / file.name).is_file() and not taken.samefile(file):
                raise ConfigError(f"{file}: the name {file.stem} is taken by {taken}: give the file another name")
    before = _OWN.set(paths)
    try:
        yield
    finally:
        _OWN.reset(before)


def own_folders() -> tuple[Path, ...]:
    """Those of `own_names`."""
    return _OWN.get()


def known(group: str) -> list[str]:
    """The choices of a group, with those of `own_names`: no path is made of a word that is none of these."""
    return sorted({path.stem for folder in (CONF, *_OWN.get()) for path in (folder / group).glob("*.yaml")})


def is_known(group: str, name: Any) -> bool:
    return isinstance(name, str) and name in known(group)


def file_of(group: str, name: str) -> Path:
    """The file of a choice, of conf/ or of `own_names`."""
    return next(file for folder in (CONF, *_OWN.get()) if (file := folder / group / f"{name}.yaml").is_file())


def canonical(group: str, name: Any) -> Any:
    """The name of the file in conf/ that a name of the papers means; others as they are."""
    return ALIASES.get(group, {}).get(str(name).lower(), name)


def read_yaml(path: Path) -> dict[str, Any]:
    """The plain values of a YAML file, which may come from anybody. Raises ConfigError, naming the line."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LARGEST + 1)
        content = yaml.load(text, Values) if len(text) <= LARGEST else None
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected keys with values, in at most {LARGEST} characters")
    return content


# ---- objects


def imported(name: Any) -> Any:
    """The class or function at a place such as "crt_exp.features.OPRF"; a class itself. Raises ConfigError."""
    if not isinstance(name, str):
        return name
    try:
        return pkgutil.resolve_name(name)
    except Exception as error:  # whatever the import of somebody's module raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{name} cannot be imported: {reason}") from None


def place(made: Any) -> str:
    """The place of a class or function; a place itself."""
    return f"{made.__module__}.{made.__qualname__}" if hasattr(made, "__qualname__") else str(made)


def own_options(node: dict[str, Any]) -> dict[str, Any]:
    """The keys of a node but those that state what it builds, which the command line may not name."""
    return {key: value for key, value in node.items() if key[0] != "_"}


def construct(node: dict[str, Any], **options: Any) -> Any:
    """The object that a node describes: its `_target_`, called with its keys; no other value is built or imported."""
    return imported(node["_target_"])(**own_options(node), **options)


def instantiate(node: Any) -> Any:
    """The object that a node of a composed configuration describes."""
    from omegaconf import OmegaConf

    return construct(OmegaConf.to_container(node, resolve=True))


# ---- the node of a file: a `_target_` with its keys


@dataclass(frozen=True)
class Group:
    """What the `_target_` of a group must be, and which of its parameters the configuration does not give."""

    what: str
    is_one: Callable[[Any], bool]
    supplied: tuple[str, ...] = ()                                        # by the run itself
    extra: dict[str, Parameter] = field(default_factory=dict)             # further keys, where it has its parts
    parts: dict[str, "Group"] = field(default_factory=dict)               # keys with a `_target_` of their own
    optional: bool = False

    def options(self, target: Any) -> dict[str, Parameter]:
        """The keys that a class has in a file."""
        apart = (*self.supplied, *self.parts)
        return {key: parameter for key, parameter in parameters(target).items() if key not in apart}


def check_node(path: str, node: Any, group: Group) -> None:
    """Raises ConfigError for another `_target_` than the group takes, and for keys that do not fit."""
    if not isinstance(node, dict) or "_target_" not in node:
        raise ConfigError(f"{path}={format_value(node)}: expected {group.what}, described in a file with a _target_")
    target = imported(node["_target_"])
    if not group.is_one(target):
        raise ConfigError(f"{path}._target_={place(target)}: expected {group.what}")
    given = own_options(node)
    for key in group.parts.keys() & given.keys():
        check_node(f"{path}.{key}", given.pop(key), group.parts[key])
    has_parts = group.parts.keys() <= node.keys()
    check_options(path, group.options(target) | (group.extra if has_parts else {}), given)


def uses(attention: dict[str, Any]) -> frozenset[str]:
    """Which of features, sampler and m the attention of a file makes use of."""
    target = attention["_target_"]
    if "phi" not in (annotations_in_source(place(target)) or parameters(imported(target))):
        return frozenset()
    if "phi" not in attention:
        return frozenset({"features", "sampler", "m"})
    return frozenset({"sampler", "m"} if attention["phi"].get("projection", True) else ())


def takes(*names: str) -> Callable[[Any], bool]:
    return lambda target: callable(target) and set(names) <= parameters(target).keys()


def is_map(target: Any) -> bool:
    return isinstance(target, type) and all(hasattr(target, name) for name in ("phi_q", "phi_k", "projections"))


FEATURES = Group("a FeatureMap", is_map, ("kernel",))
SAMPLER = Group("a function of m, d, generator and batch", takes("m", "d", "generator", "batch"),
                ("m", "d", "generator", "batch", "dtype"))
SIZES = ("heads", "d", "kv_heads", "causal", "cross", "scaling", "seed", "layer")
ATTENTION = Group(f"a module made of {', '.join(SIZES)} (hand on **options)", takes(*SIZES), ("sampler", "m", *SIZES),
                  {"kernel": Parameter(str, False)}, {"phi": FEATURES}, optional=True)


# ---- JSON files of runs and models, which may come from anybody


def read_json(text: str | bytes, named: Any, line: int = 1) -> dict[str, Any]:
    """The object that begins at a line of a file. Raises ConfigError, naming the line that is wrong."""
    try:
        content = json.loads(text)
    except (RecursionError, ValueError) as error:  # a number of thousands of digits too
        raise ConfigError(f"{named}, from line {line} on: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{named}, line {line}: expected a JSON object")
    return content


def json_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file. Raises ConfigError."""
    try:
        return read_json(path.read_bytes(), path)
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from None
