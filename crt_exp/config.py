"""The configuration tree: where it lies, how names become objects, and what a mistyped name was meant to be.

The files of `conf/` are the only table of names: "oprf" is `conf/features/oprf.yaml`,
for the library as for the command line.
"""

import difflib
import pkgutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

_PACKAGED = Path(__file__).with_name("conf")
ALIASES = {"attention": {"performer": "favorp", "favor+": "favorp", "favor++": "favorpp", "favor#": "favorsharp"}}
_OWN: ContextVar[tuple[Path, ...]] = ContextVar("own_names", default=())
CONF = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parent.parent / "conf"


class ConfigError(ValueError):
    """A configuration that cannot be run; the message says what to change."""


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@contextmanager
def own_names(folders: Iterable[str | Path]) -> Iterator[None]:
    """Within it the names of these folders, laid out as conf/, stand for what they say when a saved attention is read,
    as `--config-dir` adds them to a run: their classes are imported, so give folders that you trust. Raises ConfigError
    for what is no folder."""
    paths = tuple(Path(folder).expanduser() for folder in folders)
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"names = {path}: it takes a folder with the names of your own, as --config-dir does")
    before = _OWN.set(paths)
    try:
        yield
    finally:
        _OWN.reset(before)


def known(group: str) -> list[str]:
    """The choices of a group, with those of `own_names`."""
    return sorted({path.stem for folder in (CONF, *_OWN.get()) for path in (folder / group).glob("*.yaml")})


def file_of(group: str, name: str) -> Path:
    """The file of a choice: that of conf/, which no other takes the place of, or one of `own_names`."""
    found = (folder / group / f"{name}.yaml" for folder in (CONF, *_OWN.get()))
    return next(filter(Path.is_file, found), CONF / group / f"{name}.yaml")


def groups() -> list[str]:
    return sorted(path.name for path in CONF.iterdir() if path.is_dir())


def canonical(group: str, name: str) -> str:
    """The name of the file in conf/ that a name of the papers means; others as they are."""
    return ALIASES.get(group, {}).get(name.lower(), name)


def unknown(what: str, name: str, known: list[str]) -> ConfigError:
    """The error for a name that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name, [*known, *ALIASES.get(what, ())], n=1, cutoff=0.5)
    hint = f"; did you mean {canonical(what, near[0])}?" if near else ""
    return ConfigError(f"unknown {what} {name!r}{hint}\n  known: {' '.join(known) or 'none'}")


def plain_number(value: Any) -> Any:
    """A number of NumPy as Python's, in a list too; other values as they are."""
    import numpy as np

    if isinstance(value, (list, tuple)):
        return [plain_number(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def located(path: str, name: Any) -> Any:
    """The class or function that the `_target_` of a node names. Raises ConfigError where it cannot be imported."""
    try:
        return pkgutil.resolve_name(name)
    except Exception as error:  # whatever the import of somebody's module raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{path}._target_ = {name} cannot be imported: {reason}") from None


def read_conf(path: Path) -> dict[str, Any]:
    """A file of conf/ that the library reads, with or without OmegaConf, or one of `own_names`. Raises ConfigError
    naming the line."""
    from crt_exp.plain_yaml import read

    try:
        return read(path)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None


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
