"""The files that a run reads, with size and modification time, in its inputs.json. A resumed run must read the same.

Files and folders are named by the options below, whatever the task, and by `task.inputs()`: the data of task.data_dir
or of $CRT_DATA. What is drawn, embedded or streamed is no file.
"""

import glob
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from crt_exp.config import ConfigError
from crt_exp.data.cache import warn
from crt_exp.stored import read_json

OPTIONS = ("model", "init", "start", "tokenizer", "vocabulary", "text", "validation_text", "test_text", "calibration",
           "csv", "images", "audio", "families", "hub.data_files")
NAME = "inputs.json"
DATA = "data"                # what task.inputs() names
LISTED = 1000                # files that are listed one by one; of more, their folders are
States = dict[str, dict[str, str]]    # option -> file or folder below what the option names -> its size and time


def check_inputs(directory: Path, given: Mapping[str, Any], task: Any, goes_on: bool) -> str:
    """What inputs.json is to hold. Raises ConfigError for a run that goes on and whose inputs are others, naming them.

    given: the options of the task.
    """
    path, now = directory / NAME, states(named(given, task), directory)
    if goes_on and path.is_file():
        check_same(directory, read_json(path.read_text(encoding="utf-8"), path), now)
    elif goes_on and now:
        warn("%s was begun without inputs.json: its inputs are taken to be as they were", directory)
    return json.dumps(now, indent=1) + "\n"


def check_same(directory: Path, old: Mapping[str, Any], now: States) -> None:
    if changed := differing(old, now):
        more = f", and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise ConfigError(f"{directory} was run with other inputs: {', '.join(changed[:3])}{more}. Bring back what was "
                          f"there, choose another hydra.run.dir, or delete {directory / NAME} where only the times of "
                          "the files are others")


def differing(old: Mapping[str, Any], new: States) -> list[str]:
    """Which files have changed, are gone or were added."""
    result = []
    for option in sorted(old.keys() | new.keys()):
        before, after = old.get(option), new.get(option, {})
        before = before if isinstance(before, dict) else {}
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                what = "has changed" if name in before and name in after else "is gone" if name in before else "is new"
                result.append(f"{name} ({'of the data' if option == DATA else f'of task.{option}'}) {what}")
    return result


# ---- what is read ----------------------------------------------------------------------------------------------------


def named(given: Mapping[str, Any], task: Any) -> dict[str, list[Path]]:
    """The files and folders of each option, those that are there: other values are names, such as those of a hub."""
    result = {option: [path for text in texts(option_of(given, option)) for path in paths(text)] for option in OPTIONS}
    result[DATA] = [path for path in getattr(task, "inputs", tuple)() if path is not None and path.exists()]
    return {option: found for option, found in result.items() if found}


def option_of(given: Any, option: str) -> Any:
    for key in option.split("."):
        given = given.get(key) if isinstance(given, Mapping) else None
    return given


def texts(value: Any) -> Iterator[str]:
    """A text, those of a list, or the values of a dictionary of them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for each in value.values() for text in texts(each))
    elif isinstance(value, Iterable):
        yield from (text for each in value for text in texts(each))


def paths(text: str) -> list[Path]:
    """What a text names: a file, a folder, the model of a run, or the files of a pattern."""
    path = os.path.expanduser(text)
    if not os.path.exists(path):
        return [Path(each) for each in sorted(glob.glob(path, recursive=True))] if "*" in text else []
    if os.path.isfile(os.path.join(path, "config.yaml")):  # a run: its log and figures may change
        return [Path(path, name) for name in ("model", "adapter") if os.path.isdir(os.path.join(path, name))]
    return [Path(path)]


def files_of(places: Iterable[Path], run: Path) -> dict[str, Path]:
    """Regular files by their names below the place that they have in common, without hidden ones and those of a run."""
    run, found = run.absolute(), set()
    for place in places:
        place = place.absolute()
        found |= set(walked(place, run)) if place.is_dir() else {place}
    files = sorted(path for path in found if path.is_file())
    common = os.path.commonpath([file.parent for file in files]) if files else ""
    return {os.path.relpath(file, common): file for file in files}


def walked(folder: Path, run: Path, above: frozenset = frozenset()) -> Iterator[Path]:
    """Files below a folder; links to a folder above are passed by."""
    status = os.stat(folder)
    if folder == run or (place := (status.st_dev, status.st_ino)) in above:
        return
    for entry in os.scandir(folder):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from walked(Path(entry.path), run, above | {place})
        else:
            yield Path(entry.path)


# ---- size and time ---------------------------------------------------------------------------------------------------


def states(places: Mapping[str, list[Path]], run: Path) -> States:
    return {option: grouped(files_of(found, run)) for option, found in places.items()}


def grouped(files: dict[str, Path]) -> dict[str, str]:
    """Size and modification time of each file, or, of more than LISTED files, of all files of each folder together."""
    if len(files) <= LISTED:
        return {name: state([path]) for name, path in files.items()}
    folders: dict[str, list[Path]] = {}
    for name, path in files.items():
        folders.setdefault(os.path.dirname(name) or ".", []).append(path)
    return {folder: state(paths) for folder, paths in folders.items()}


def state(paths: list[Path]) -> str:
    each = [path.stat() for path in paths]
    newest = max(status.st_mtime_ns for status in each)
    return f"files: {len(each)}, bytes: {sum(status.st_size for status in each)}, newest, in ns: {newest}"
