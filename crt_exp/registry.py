"""The names of the configuration, their yaml files, and the objects they describe.

The files of conf/ define the names, for the library and for the command line: "oprf" is conf/features/oprf.yaml.
`own_names` adds folders of the user.
"""

import json
import os
import pkgutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import isroutine
from pathlib import Path
from typing import Any

import yaml

from crt_exp.optional import explain
from crt_exp.validation import (  # noqa: F401
    ConfigError,
    Parameter,
    Values,
    check_options,
    format_value,
    parameters,
    unknown,
)

_PACKAGED = Path(__file__).with_name("conf")
ALIASES = {
    "attention": {
        "performer": "favorp",
        "favor+": "favorp",
        "favor++": "favorpp",
        "favor#": "favorsharp",
    },
    "task": {"sweep": "arm_sweeping"},
}
LARGEST = 2**17  # maximum number of characters of a YAML file
OWN: ContextVar[tuple[Path, ...]] = ContextVar("own_names", default=())  # folders of `own_names`
CONF = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parent.parent / "conf"


# ---- names


@contextmanager
def own_names(folders: Iterable[str | Path]) -> Iterator[None]:
    """Context manager that adds the names of folders laid out like conf/.

    `--config-dir` does this for a run and for a report. The names also apply to saved mechanisms. The classes of these
    folders are imported, so pass only folders that you trust. Raises ConfigError for a path that is not a folder, and
    for a name that conf/ already has.
    """
    # worker processes may have another working directory
    paths = tuple(Path(folder).expanduser().absolute() for folder in folders)
    for path in paths:
        if not path.is_dir():
            raise ConfigError(
                f"{path}: expected a folder of custom names, as for --config-dir and names=..."
            )
        for file in sorted(path.glob("*/*.yaml")):
            taken = CONF / file.parent.name / file.name
            if taken.is_file() and not taken.samefile(file):
                raise ConfigError(
                    f"{file}: the name {file.stem} exists in {taken}; rename the file"
                )
    before = OWN.set(paths)
    try:
        yield
    finally:
        OWN.reset(before)


def user_message(error: Exception) -> str | None:
    """Return what to tell the user about an error; None for a bug, which keeps its traceback."""
    if isinstance(error, RuntimeError) and "home directory" in str(error):
        return "~NAME of a path names no user; write $HOME or the whole path"  # of expanduser()
    message = explain(error)
    if message is None and isinstance(error, RuntimeError | ImportError):
        return None
    return message or str(error)


def choices(group: str) -> list[str]:
    """The names of a group, including those of `own_names`.

    Only these names become parts of file paths.
    """
    names = set()
    for folder in (CONF, *OWN.get()):
        names |= {path.stem for path in (folder / group).glob("*.yaml")}
    return sorted(names)


def file_of(group: str, name: str) -> Path:
    """The yaml file of a name."""
    files = [folder / group / f"{name}.yaml" for folder in (CONF, *OWN.get())]
    return next(filter(Path.is_file, files))


def canonical(group: str, name: Any) -> Any:
    """Replace an alias such as "favor++" by its name in conf/."""
    return ALIASES.get(group, {}).get(str(name).lower(), name)


def fetched(name: str | Path, option: str = "") -> Path | None:
    """The folder of a fetched model such as models/minilm; None for other names.

    An existing path with that name takes precedence. Raises ConfigError, naming `option`, if the model was not fetched.
    """
    if not str(name).startswith("models/") or Path(name).exists():
        return None
    root = os.environ.get("CRT_DATA")
    folder = Path(root or ".", name).expanduser()
    if root and (folder / "config.json").is_file():
        return folder
    where = f"not in CRT_DATA={root}" if root else "CRT_DATA is not set"
    raise ConfigError(
        f"{f'{option}=' if option else ''}{name}: {where}; run `python -m crt_exp data fetch {name} "
        f"--dir {root or 'DIR'}`, then set CRT_DATA={root or 'DIR'}"
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of plain values, which may be untrusted.

    Raises ConfigError, naming the line.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LARGEST + 1)
        content = yaml.load(text, Values) if len(text) <= LARGEST else None
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected keys with values, at most {LARGEST} characters")
    return content


# ---- objects

# subpackages of `experiments` that runs and models saved by version 0.1.0 name without it
MOVED = ("data", "evolution", "measure", "models", "runner", "tasks")
RENAMED = {
    "crt_exp.experiments.evolution.robotics.Sweep": "crt_exp.experiments.evolution.robotics.ArmSweeping"
}


def import_object(name: Any) -> Any:
    """Import the class or function at a path such as "crt_exp.features.OPRF".

    Returns other objects unchanged. Raises ConfigError if the import fails.
    """
    if not isinstance(name, str):
        return name
    name = present_path(name)
    try:
        return pkgutil.resolve_name(name)
    except Exception as error:  # the imported module can raise anything
        broken = explain(error)
        if broken:
            raise ConfigError(f"{name}: {broken}") from None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{name} cannot be imported: {reason}") from None


def present_path(name: str) -> str:
    """Today's import path of an object that a saved run names."""
    if not isinstance(name, str):
        return name
    package, _, rest = name.partition(".")
    if package == "crt_exp" and rest.partition(".")[0] in MOVED:
        name = f"crt_exp.experiments.{rest}"
    return RENAMED.get(name, name)


def import_path(target: Any) -> str:
    """The import path of a class or function; the string of others."""
    if isinstance(target, type) or isroutine(target):
        return f"{target.__module__}.{target.__qualname__}"
    return str(target)


def own_options(node: dict[str, Any]) -> dict[str, Any]:
    """The keys of a node without `_target_` and other keys that start with "_"."""
    return {key: value for key, value in node.items() if key[0] != "_"}


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and values of a nested dictionary."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            name = f"{prefix}.{key}" if prefix else str(key)
            yield from leaves(value, name)
    else:
        yield prefix, node


def differences(old: Any, new: Any) -> dict[str, str]:
    """The dotted keys in which two configurations differ, each with both values.

    An absent key equals null.

    >>> differences({"lr": 1, "seed": {"a": None}}, {"lr": 2})
    {'lr': 'lr (it was 1, now 2)'}
    """
    old = dict(leaves(old))
    new = dict(leaves(new))
    result = {}
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            result[key] = f"{key} (it was {old.get(key, 'absent')}, now {new.get(key, 'absent')})"
    return result


def construct(node: dict[str, Any], **options: Any) -> Any:
    """Call the `_target_` of a node with its keys. No other value is imported."""
    return import_object(node["_target_"])(**own_options(node), **options)


# ---- the node of a file: a `_target_` with its keys


@dataclass(frozen=True)
class Group:
    """What the `_target_` of a configuration group must be, and which keys it takes."""

    what: str
    base: str = ""  # class of which it is a subclass, imported when needed because torch is slow
    takes: tuple[str, ...] = ()  # parameters that it must have, and that the run supplies
    supplied: tuple[str, ...] = ()  # further parameters that the run supplies
    # further keys, if all parts are present
    extra: dict[str, Parameter] = field(default_factory=dict)
    parts: dict[str, "Group"] = field(default_factory=dict)  # keys with a `_target_` of their own
    optional: bool = False

    def is_one(self, target: Any) -> bool:
        if self.base:
            return isinstance(target, type) and issubclass(target, import_object(self.base))
        return callable(target) and set(self.takes) <= parameters(target).keys()

    def options(self, target: Any) -> dict[str, Parameter]:
        """The parameters of a class that a file may set."""
        apart = (*self.takes, *self.supplied, *self.parts)
        return {key: parameter for key, parameter in parameters(target).items() if key not in apart}


def check_node(path: str, node: Any, group: Group) -> None:
    """Raise ConfigError if a node has the wrong `_target_` or wrong keys."""
    if not isinstance(node, dict) or "_target_" not in node:
        raise ConfigError(
            f"{path}={format_value(node)}: expected {group.what}, a file with a _target_"
        )
    target = import_object(node["_target_"])
    if not group.is_one(target):
        raise ConfigError(f"{path}._target_={import_path(target)}: expected {group.what}")
    options = own_options(node)
    expected = group.options(target)
    if group.parts.keys() <= options.keys():
        expected |= group.extra
    for key in group.parts.keys() & options.keys():
        check_node(f"{path}.{key}", options.pop(key), group.parts[key])
    check_options(path, expected, options)


def uses(attention: dict[str, Any]) -> frozenset[str]:
    """Which of features, sampler and m an attention node uses."""
    if "phi" not in parameters(import_object(attention["_target_"])):
        return frozenset()
    if "phi" not in attention:
        return frozenset({"features", "sampler", "m"})
    return frozenset({"sampler", "m"}) if attention["phi"].get("projection", True) else frozenset()


FEATURES = Group("a FeatureMap", base="crt_exp.features.base.FeatureMap", supplied=("kernel",))
SAMPLER = Group(
    "a function of m, d, generator and batch",
    takes=("m", "d", "generator", "batch"),
    supplied=("dtype",),
)
SIZES = ("heads", "d", "kv_heads", "causal", "cross", "scaling", "seed", "layer")
ATTENTION = Group(
    f"a module made of {', '.join(SIZES)} (hand on **options)",
    takes=SIZES,
    supplied=("sampler", "m"),
    extra={"kernel": Parameter(str, False)},
    parts={"phi": FEATURES},
    optional=True,
)


# ---- JSON files of runs and models, which may be untrusted


def read_json(text: str | bytes, named: Any, line: int = 1) -> dict[str, Any]:
    """Parse a JSON object that starts at `line` of a file.

    Raises ConfigError, naming the wrong line.
    """
    try:
        content = json.loads(text)
    except (RecursionError, ValueError) as error:  # also of integers with thousands of digits
        raise ConfigError(f"{named}, from line {line} on: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{named}, line {line}: expected a JSON object")
    return content


def json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises ConfigError."""
    try:
        return read_json(path.read_bytes(), path)
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from None
