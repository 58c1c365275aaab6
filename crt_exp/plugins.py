"""What installed packages add to the names of conf/: their entry points of the group crt_exp.mechanisms.

    [project.entry-points."crt_exp.mechanisms"]
    topk = "theirs.layers:TopK"     # a class: attention or a feature map, by the name of the entry
    theirs = "theirs"               # a package with a folder conf/ in it, laid out as ours, whose files are names

A name of conf/ stays what it is. A package is not imported before one of its names is asked for, or all are listed.
"""

import sys
import warnings
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

GROUP = "crt_exp.mechanisms"


def folders() -> tuple[Path, ...]:
    """The folders of names of all packages that have one."""
    return _folders(tuple(sys.path))


def place(group: str, name: str) -> str | None:
    """Where the class of an entry lies, "theirs.layers.TopK"; None for a name of none, or of one of the other group.
    Raises ValueError, naming the package, where it cannot be loaded."""
    entry = _classes(tuple(sys.path)).get(name)
    if entry is None or _loaded_group(entry) != group:
        return None
    return entry.value.replace(":", ".")


def names(group: str) -> list[str]:
    """Of all classes of a group but those that cannot be loaded, which the error for their own name says."""
    return [name for name, entry in _classes(tuple(sys.path)).items() if _loads_as(entry, group)]


def _loads_as(entry: EntryPoint, group: str) -> bool:
    try:
        return _loaded_group(entry) == group
    except ValueError:
        return False


def _loaded_group(entry: EntryPoint) -> str:
    """"features" of a feature map, "attention" of whatever else, which is checked where it is used."""
    try:
        loaded = entry.load()
    except Exception as error:  # whatever the import of somebody's module raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{_named(entry)} cannot be imported: {reason}") from None
    if not isinstance(loaded, type):
        raise ValueError(f"{_named(entry)}: got {loaded!r}, expected a class of attention or of feature maps")
    return "features" if hasattr(loaded, "phi_q") else "attention"


def homes(words: set[str]) -> list[Path]:
    """The folders and modules of the packages that these words are names of: what decides what they stand for."""
    classes = [entry for name, entry in _classes(tuple(sys.path)).items() if name in words]
    specs = [find_spec(entry.module) for entry in classes]
    listing = [folder.parent for folder in folders() if words & {path.stem for path in folder.glob("*/*.yaml")}]
    return [*listing, *(Path(spec.origin) for spec in specs if spec and spec.origin)]


# ---- of one sys.path, on which packages are looked for once


@cache
def _entries(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))


@cache
def _classes(path: tuple[str, ...]) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in _entries(path) if entry.attr}


@cache
def _folders(path: tuple[str, ...]) -> tuple[Path, ...]:
    found = {entry: _folder(entry) for entry in _entries(path) if not entry.attr}
    for entry in (entry for entry, folder in found.items() if folder is None):
        warnings.warn(f"{_named(entry)} adds no names: expected a package with a folder conf in it, or "
                      "package.module:Class", stacklevel=2)
    return tuple(filter(None, found.values()))


def _folder(entry: EntryPoint) -> Path | None:
    try:
        spec = find_spec(entry.module)
    except (ImportError, ValueError):
        return None
    places = (Path(place, "conf") for place in (spec and spec.submodule_search_locations) or ())
    return next(filter(Path.is_dir, places), None)


def _named(entry: EntryPoint) -> str:
    package = f" of the package {entry.dist.name}" if entry.dist else ""
    return f"the plugin {entry.name} = {entry.value}{package} ({GROUP})"
