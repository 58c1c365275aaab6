"""The configuration tree: where it lies, how names become objects, and what a mistyped name was meant to be.

The files of `conf/` are the only table of names: "oprf" is `conf/features/oprf.yaml`, for the library as for the
command line. Folders of one's own (`own_names`) add to it.
"""

import difflib
import pkgutil
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import yaml

_PACKAGED = Path(__file__).with_name("conf")
ALIASES = {"attention": {"performer": "favorp", "favor+": "favorp", "favor++": "favorpp", "favor#": "favorsharp"}}
NAMED = ("attention", "features", "sampler")  # the groups that a Mechanism is made of
_OWN: ContextVar[tuple[Path, ...]] = ContextVar("own_names", default=())
CONF = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parent.parent / "conf"


class ConfigError(ValueError):
    """A configuration that cannot be run; the message says what to change."""


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@contextmanager
def own_names(folders: Iterable[str | Path]) -> Iterator[None]:
    """Within it the names of these folders, laid out as conf/, stand for what they say, as `--config-dir` adds them to
    a run and to a report, also when a saved attention is read: their classes are imported, so give folders that you
    trust. Raises ConfigError for what is no folder, and for a name that is taken."""
    paths = tuple(Path(folder).expanduser().absolute() for folder in folders)  # processes may stand elsewhere
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{path}: there is none; it takes a folder with the names of your own, as --config-dir "
                              "and names=... do")
        check_free(path)
    before = _OWN.set(paths)
    try:
        yield
    finally:
        _OWN.reset(before)


def check_free(folder: Path) -> None:
    """Raises ConfigError for a file that another one of conf/ would be read instead of."""
    for path in sorted(path for group in NAMED for path in (folder / group).glob("*.yaml")):
        if (taken := CONF / path.parent.name / path.name).is_file() and not taken.samefile(path):
            raise ConfigError(f"{path}: the name {path.stem} is taken by {taken}: give the file another name")


def own_folders() -> tuple[Path, ...]:
    """Those of `own_names`."""
    return _OWN.get()


def known(group: str) -> list[str]:
    """The choices of a group, with those of `own_names`. They are the names of files: no path is made of a word that a
    user typed or a file holds before it is one of them."""
    return sorted({path.stem for folder in _folders() for path in (folder / group).glob("*.yaml")})


def is_known(group: str, name: str) -> bool:
    return name in known(group)


def file_of(group: str, name: str) -> Path:
    """The file of a choice: that of conf/, which no other takes the place of, or one of `own_names`."""
    found = (folder / group / f"{name}.yaml" for folder in _folders())
    return next(filter(Path.is_file, found), CONF / group / f"{name}.yaml")


def _folders() -> tuple[Path, ...]:
    return CONF, *_OWN.get()


def groups() -> list[str]:
    return sorted(path.name for path in CONF.iterdir() if path.is_dir())


def canonical(group: str, name: str) -> str:
    """The name of the file in conf/ that a name of the papers means; others as they are."""
    return ALIASES.get(group, {}).get(name.lower(), name)


def unknown(what: str, name: str, known: list[str]) -> ConfigError:
    """The error for a name that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name, [*known, *ALIASES.get(what, ())], n=1, cutoff=0.5)
    hint = f"did you mean {canonical(what, near[0])}?" if near else f"known: {' '.join(known) or 'none'}"
    return ConfigError(f"unknown {what} {name!r}; {hint}")


def plain_number(value: Any) -> Any:
    """A number of NumPy as Python's, in a list too; other values as they are."""
    import numpy as np

    if isinstance(value, (list, tuple)):
        return [plain_number(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def located(path: str, name: Any) -> Any:
    """The class or function that the `_target_` of a node names. Raises ConfigError where it cannot be imported."""
    try:
        return imported(name)
    except ConfigError as error:
        raise ConfigError(f"{path}._target_ = {error}") from None


def imported(name: Any) -> Any:
    """What lies at a place such as "crt_exp.features.OPRF"; a class itself. Raises ConfigError."""
    if isinstance(name, type):
        return name
    try:
        return pkgutil.resolve_name(name)
    except Exception as error:  # whatever the import of somebody's module raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{name} cannot be imported: {reason}") from None


def place(made: Any) -> str:
    """Where a class or function lies; a place itself."""
    return made if isinstance(made, str) else f"{made.__module__}.{made.__qualname__}"


class Values(yaml.SafeLoader):
    """YAML whose words are null, true and false, and whose numbers may have an exponent without a point: 1e-3."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        if len({*keys}) < len(keys):
            raise yaml.constructor.ConstructorError(problem="a key comes twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (("null", "null|Null|NULL|~|", ["n", "N", "~", ""]),
                               ("bool", "true|True|false|False", [*"tTfF"]), ("int", r"[-+]?\d+", [*"-+0123456789"]),
                               ("float", r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", [*"-+0123456789."])):
    Values.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)


def read_conf(path: Path) -> dict[str, Any]:
    """A file of conf/ that the library reads without OmegaConf, or one of `own_names`. Raises ConfigError naming the
    line."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Values)
    except (yaml.YAMLError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from None


def construct(node: dict[str, Any], **options: Any) -> Any:
    """What the plain values of a file stand for, as Hydra has it: the `_target_` with its keys, or with `_partial_` one
    that waits for the rest. Nodes are checked by `schema.check_node` before; the constructor's own errors are raised.
    """
    values = {key: construct(value) if isinstance(value, dict) and "_target_" in value else value
              for key, value in node.items() if key not in ("_target_", "_partial_", "_convert_")} | options
    target = located("", node["_target_"])
    return partial(target, **values) if node.get("_partial_") else target(**values)


def instantiate(node: Any, **options: Any) -> Any:
    """hydra.utils.instantiate with the constructor's own error in place of Hydra's wrapping."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as build_node

    try:
        return build_node(node, **options)
    except InstantiationException as error:
        raise (error.__cause__ or error) from None
