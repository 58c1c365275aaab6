"""What lies in the folder of a run or of a model, read as data: nothing in it is resolved, imported or called.

Such a folder may come from anybody. So a file is read whole only where it has a size that a run or a model gives it, no
value stands deeper than theirs do, and YAML has no aliases, ten lines of which stand for 10^10 values.
"""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from crt_exp.config import ConfigError
from crt_exp.hints import LARGEST as LARGEST_NUMBER
from crt_exp.hints import Bound, Count, at_most, parameters, shown
from crt_exp.schema import check_keys

if TYPE_CHECKING:
    from omegaconf import DictConfig

LARGEST = 2**26  # bytes; the longest config.json of a run holds a tokenizer
DEEPEST = 32     # levels of dictionaries and lists
MOST = 2**16     # values of a config.yaml
SIZE = 2**16     # projections, cells, tokens of a block: what memory is taken for, of one kind
TOGETHER = 2**26  # and of kinds that are multiplied
COUNTED = ("exact_until", "redraw_every", "fit_steps", "seed")  # whole numbers that no memory is taken for


# ---- JSON

def json_of(text: str | bytes, named: Any) -> Any:
    """What it says. Raises ConfigError, which begins with `named`, for what is not JSON or is nested too deeply."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise too_deep(named) from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{named}, line {error.lineno}: not valid JSON: {error.msg}") from None
    except ValueError as error:                    # a whole number of thousands of digits
        raise ConfigError(f"{named}: not valid JSON: {str(error).partition(';')[0]}") from None
    check_depth(content, named)
    return content


def json_file(path: Path) -> Any:
    """The same of a file. Raises ConfigError where it cannot be read."""
    return json_of(text_of(path), path)


def json_object(path: Path) -> dict[str, Any]:
    """The same of a file that holds keys with values."""
    content = json_file(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return content


def read_json(text: str, path: Path, line: int = 1) -> dict[str, Any]:
    """The object that begins at that line of a file. Raises ConfigError with the line that is wrong."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {line + error.lineno - 1}: not valid JSON: {error.msg}") from None
    except (RecursionError, ValueError):
        raise ConfigError(f"{path}, line {line}: not valid JSON: nested too deeply, or a number too long") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}, line {line}: not a JSON object")
    return content


def check_depth(content: Any, named: Any) -> None:
    """Raises ConfigError for dictionaries and lists within each other beyond `DEEPEST`; a level at a time, so that no
    depth is too much for it."""
    level = [content]
    for _ in range(DEEPEST + 1):
        level = [value for node in level if isinstance(node, (dict, list, tuple))
                 for value in (node.values() if isinstance(node, dict) else node)]
        if not level:
            return
    raise too_deep(named)


def too_deep(named: Any) -> ConfigError:
    return ConfigError(f"{named}: values stand more than {DEEPEST} levels deep, and no run or model writes such a file")


def text_of(path: Path) -> str:
    """Raises ConfigError for a file that is too large, no text, or cannot be read."""
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise ConfigError(f"{path} has {size} bytes, and no run or model writes more than {LARGEST} there")
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


# ---- YAML

def read_yaml(path: Path) -> "DictConfig":
    """The config.yaml of a run, to compare with. Raises ConfigError naming the wrong line."""
    from omegaconf import DictConfig, OmegaConf
    from yaml import YAMLError

    text = text_of(path)
    try:
        check_events(text, path)
        content = OmegaConf.create(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{path}, line 1: it holds no keys with values")
    return content


def check_events(text: str, path: Path) -> None:
    """Raises ConfigError for aliases, for values beyond `DEEPEST` and for more than `MOST`, as they are met."""
    import yaml

    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        line = f"{path}, line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"{line}: *{event.anchor} is an alias, and no run writes any: write its values out")
        if depth > DEEPEST:
            raise too_deep(line)
        if count > MOST:
            raise ConfigError(f"{line}: it holds more than {MOST} values, and no run writes so many")


def yaml_object(path: Path) -> dict[str, Any]:
    """The same as plain dictionaries, in which an interpolation is a string."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(read_yaml(path), resolve=False)


# ---- an attention, as `Mechanism.saved` writes it

Word = Annotated[str, Bound("of at most 100 letters", lambda text: len(text) <= 100)]
Size = Annotated[Count, at_most(SIZE)]


class Named(TypedDict):
    """Names of conf/, plain values of their options, and what these stood for, which is compared and never built."""

    name: Word | None
    m: Size | None
    seed: int
    features: Word | None
    sampler: Word | None
    options: dict
    described: dict


class Saved(Named, total=False):
    rebuilds: bool
    causal: bool | None


def check_saved(saved: Any) -> None:
    """Raises ConfigError for what no `Mechanism.saved` gives: other keys, dictionaries where names stand, sizes for
    which there is no memory."""
    if not isinstance(saved, dict):
        raise ConfigError(f"{shown(saved)} is no keys with values")
    check_depth(saved, "it")
    check_keys("", saved, parameters(Saved))
    for key, value in saved["options"].items():
        check_option(key, value)
    sizes = {key: value for key, value in saved["options"].items() if is_size(key, value)}
    of_map = [value for key, value in sizes.items() if key.startswith("features.")] + [saved["m"] or 1]
    largest = sorted(value for key, value in sizes.items() if not key.startswith("features."))[-2:]
    if max(math.prod(of_map), math.prod(largest)) > TOGETHER:
        raise ConfigError(f"m = {saved['m']}, {', '.join(f'{key} = {value}' for key, value in sizes.items())}: "
                          "together they are too large for a layer")


def check_option(key: str, value: Any) -> None:
    """Raises ConfigError for what is not a plain value, and for too large a size."""
    several = isinstance(value, (list, tuple))
    for each in value if several else [value]:
        if not isinstance(each, (str, int, float, type(None))) or len(key) > 100 or len(str(each)) > 100:
            raise ConfigError(f"options.{key[:100]} = {shown(value)}: it takes a number, a word, true, false or null")
        if is_size(key, each) and not 0 <= each <= SIZE:
            raise ConfigError(f"options.{key} = {shown(each)}: it takes a whole number from 0 to {SIZE}")
        if isinstance(each, int) and abs(each) >= LARGEST_NUMBER:
            raise ConfigError(f"options.{key} = {shown(each)}: it takes a number below {LARGEST_NUMBER}")


def is_size(key: str, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and key not in COUNTED
