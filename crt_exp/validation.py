"""Check options against the annotations of a constructor, with one-line errors.

    def __init__(self, scaling: Literal["standard", "minmax", "none"], repeats: Count, sigmas: Several[Positive]): ...

The annotations define keys, types and bounds; pydantic checks them. Values from Python, files and the command line get
the same check and the same error: "task.repeats=1.5: expected an integer >= 1".
"""

import difflib
import functools
import inspect
import re
import sys
import types
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from numbers import Number
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import yaml
from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

Entry = TypeVar("Entry")
# packages whose frames a warning skips, so that it names a line of the user
LIBRARIES = (
    "accelerate",
    "contextlib",
    "crt_exp",
    "joblib",
    "peft",
    "sklearn",
    "timm",
    "torch",
    "torchaudio",
    "transformers",
)
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(ge=0, lt=1)]  # such as that of a dropout
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # the range of NumPy's seeds
Complex = Annotated[
    complex, Strict(False)
]  # YAML has no complex numbers, so strings such as 0.1+0.2j are accepted
INTEGERS: dict[int | None, Any] = {}  # bound -> annotation of `whole_number`
Several = Annotated[Sequence[Entry], Field(min_length=1)]


@dataclass(frozen=True)
class Files:
    """Mark in an annotation: the string names a file or a folder, or is one of `words`.

    A run records the named files, and a continued run must read the same ones.
    """

    words: tuple[str, ...] = ()


FileName = Annotated[str, Files()]


class ConfigError(ValueError):
    """An invalid configuration; the message states what to change."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the innermost line outside LIBRARIES."""
    frame = sys._getframe(1)
    level = 2
    while frame.f_back and frame.f_globals["__name__"].partition(".")[0] in LIBRARIES:
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)


def unknown(what: str, name: str, known: Collection[str]) -> ConfigError:
    """Build the error for an unknown name, with the closest known names."""
    known = list(known)
    near = did_you_mean(name, known) or f"; known: {' '.join(known) or 'none'}"
    return ConfigError(f"unknown {what} {name!r}{near}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with the known names that begin with `name`, or the closest one.

    Upper and lower case are equal.
    """
    words = {word.lower(): word for word in known}
    name = name.lower()
    near = [lower for lower in words if name and lower.startswith(name)]
    near = near or difflib.get_close_matches(name, words, n=1, cutoff=0.5)
    near = [words[lower] for lower in near]
    return f"; did you mean {either(near)}?" if near else ""


def either(names: Sequence[str]) -> str:
    """Join names as "a, b or c"."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


# ---- one value


def check(key: str, value: Any, hint: Any) -> None:
    """Raise ConfigError ("key=value: expected ...") if a value violates an annotation."""
    if is_typeddict(hint) and isinstance(value, Mapping):
        check_options(key, hint, value)
    elif value == "???" or not fits(value, hint):  # Hydra's mark of a missing value
        near = ""
        if get_origin(hint) is Literal:
            near = did_you_mean(format_value(value), map(str, get_args(hint)))
        raise ConfigError(f"{key}={format_value(value)}: expected {describe(hint)}{near}")


def fits(value: Any, hint: Any) -> bool:
    for sequence in (tuple, list):  # a strict check distinguishes tuples and lists, yaml does not
        with suppress(ValidationError):
            return bool(adapter(hint).validate_python((plain(value, sequence),)))
    return False


# bounded, because annotations with a Field are equal to themselves alone
@functools.lru_cache(maxsize=1024)
def adapter(hint: Any) -> TypeAdapter:
    """Strict pydantic adapter of a one-element tuple.

    Rejects "3" as an integer, and true and nan as numbers.
    """
    config = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)
    if is_typeddict(hint):
        hint = dict
    return TypeAdapter(tuple[hint], config=config)


def plain(value: Any, sequence: type = list) -> Any:
    """Convert to dict, `sequence` and Python numbers, from OmegaConf and NumPy too."""
    if isinstance(value, Mapping):
        return {key: plain(entry, sequence) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return sequence(plain(entry, sequence) for entry in value)
    return value.item() if isinstance(value, Number) and hasattr(value, "item") else value


def whole_number(value: Any, name: str, least: int | None = 1) -> int:
    """Return an integer as int. Raises ConfigError for others and below `least`."""
    # one annotation per bound, so that `adapter` finds it again
    hint = INTEGERS.setdefault(least, Annotated[int, Field(ge=least)])
    check(name, value, hint)
    return int(value)


SIGNS = {
    "ge": ">=",
    "gt": ">",
    "le": "<=",
    "lt": "<",
    "min_length": "of length >=",
    "max_length": "of length <=",
    "multiple_of": "that is a multiple of",
}
NAMES = {
    int: "an integer",
    float: "a number",
    complex: "a number such as 0.1+0.2j",
    bool: "true or false",
    str: "a string",
    dict: "keys with values",
    type(None): "null",
    Any: "any value",
    Sequence: "a list",
    list: "a list",
    tuple: "a list",
}


def describe(hint: Any) -> str:
    """Describe what an annotation accepts, such as "an integer >= 1 or null"."""
    bare, *extra = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    limits = []
    for part in extra:
        if isinstance(part, FieldInfo):
            for bound in part.metadata:
                for name, limit in asdict(bound).items():
                    limits.append(f"{SIGNS[name]} {limit}")
    bounds = " and ".join(limits)
    kind = get_origin(bare) or bare
    options = get_args(bare)
    if kind is Literal:
        return either([str(option) for option in options])
    if kind in (Union, types.UnionType):
        return either([describe(option) for option in options])
    if is_typeddict(kind):
        kind = dict
    name = NAMES.get(kind) or f"a {kind.__name__}"
    if name != "a list" or not options:
        return " ".join(filter(None, [name, bounds]))
    entries = [describe(entry) for entry in options if entry is not ...]
    if kind is tuple and ... not in options:
        name += f" of {len(entries)} entries"
    every = ""
    if options[0] is not Any:
        every = f"(each {', '.join(dict.fromkeys(entries))})"
    return " ".join(filter(None, [name, bounds, every]))


def format_value(value: Any) -> str:
    """Format a value for an error message, in at most 100 characters."""
    if isinstance(value, str | list | tuple):
        value = value[:100]
    text = to_text(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


# ---- values as strings


class Values(yaml.SafeLoader):
    """YAML loader for null, true, false, numbers such as 1e-3, and no aliases."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def compose_node(self, parent: yaml.Node, index: int) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(
                problem="aliases are refused", problem_mark=self.peek_event().start_mark
            )
        return super().compose_node(parent, index)


for _tag, _pattern in (
    ("null", "null|Null|NULL|~|"),
    ("bool", "true|True|false|False"),
    ("int", r"[-+]?\d+"),
    ("float", r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"),
):
    Values.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), None)


def parse_value(text: str) -> Any:
    """Parse a command-line value as YAML; return the string itself if that fails."""
    try:
        return yaml.load(text, Values)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def to_text(value: Any) -> str:
    """Format a value so that `parse_value` returns it unchanged.

    Accepts null, booleans, numbers, strings and lists of these.
    """
    if isinstance(value, str):
        quote = "'" if '"' in value else '"'
        if PLAIN.fullmatch(value) and parse_value(value) == value:
            return value
        return f"{quote}{value}{quote}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{','.join(map(to_text, value))}]" if isinstance(value, Sequence) else str(value)


WORD = re.compile(
    r"""(?:\[[^\]]*\]|"[^"]*"|'[^']*'|\S)+"""
)  # spaces in brackets and quotes do not split words
PLAIN = re.compile(r"[\w.+*/:-]+")


def split_words(text: str) -> tuple[str, dict[str, Any]]:
    """Split "window block=32 first=16" into name and options. Raises ConfigError."""
    words = WORD.findall(text) if isinstance(text, str) else []
    pairs = [word.partition("=") for word in words[1:]]
    options = {key: parse_value(value) for key, sign, value in pairs if key and sign}
    if not words or "=" in words[0] or len(options) < len(pairs):
        raise ConfigError(
            f"attention {text!r}: expected a name, then key=value, each key once, such as "
            "'window block=32 first=16'"
        )
    return words[0], options


def join_words(name: str, options: Mapping[str, Any]) -> str:
    """Join a name and options into a string; the inverse of `split_words`."""
    return " ".join([name, *(f"{key}={to_text(value)}" for key, value in options.items())])


def parse_arguments(kind: type, words: Sequence[str]) -> Any:
    """Build an options dataclass from key=value words. Raises ConfigError."""
    wanted = parameters(kind)
    values = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign or key in values:
            raise ConfigError(f"{' '.join(words)}: expected key=value, each key once")
        values[key] = parse_value(text)
        if key in wanted and text != "null" and fits(text, wanted[key].hint):
            values[key] = text
    check_options("", kind, values)
    return kind(**values)


# ---- the parameters of a constructor


class Parameter(NamedTuple):
    """The annotation of a parameter, whether it is required, and its default."""

    hint: Any
    required: bool
    default: Any = inspect.Parameter.empty


@functools.cache
def parameters(target: Any) -> dict[str, Parameter]:
    """The keyword parameters of a class or function, or the keys of a TypedDict.

    A constructor with **options also takes the parameters of the next class in its MRO. These are not required, because
    the constructor may supply them.
    """
    by_name: dict[str, Parameter] = {}
    if is_typeddict(target):
        hints = get_type_hints(target, include_extras=True)
        for name, hint in hints.items():
            if get_origin(hint) is NotRequired:
                hint = get_args(hint)[0]
            by_name[name] = Parameter(hint, name in target.__required_keys__)
        return by_name
    owners = [cls for cls in getattr(target, "__mro__", ()) if "__init__" in vars(cls)]
    for maker in (target, *owners[1:-1]):  # the last owner is object
        function = maker.__init__ if isinstance(maker, type) else maker
        hints = {}
        with suppress(NameError):  # an annotation needs an import for type checkers only
            hints = get_type_hints(function, include_extras=True)
        signature = inspect.signature(maker).parameters.values()
        for p in signature:
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                required = p.default is p.empty and maker is target
                by_name.setdefault(p.name, Parameter(hints.get(p.name, Any), required, p.default))
        if all(p.kind is not p.VAR_KEYWORD for p in signature):
            break
    return by_name


def check_options(
    prefix: str, target: Any, values: Mapping[str, Any], complete: bool = True
) -> None:
    """Raise ConfigError for a wrong value, named with `prefix`.

    Args:
        target: a class, a function, a TypedDict, or a dictionary of `Parameter`.
        complete: also refuse unknown and missing keys.
    """
    wanted = target if isinstance(target, dict) else parameters(target)
    start = f"{prefix}." if prefix else ""
    for key in values:
        if complete and key not in wanted:
            raise unknown("key", f"{start}{key}", [f"{start}{word}" for word in wanted])
    for key, parameter in wanted.items():
        if key in values:
            check(f"{start}{key}", values[key], parameter.hint)
    for key, parameter in wanted.items():
        if complete and parameter.required and key not in values:
            raise ConfigError(f"{start}{key}: missing, expected {describe(parameter.hint)}")


def files_named(key: str, value: Any, hint: Any) -> Iterator[tuple[str, str]]:
    """Yield key and name of the files that a value names, by its annotation.

    >>> [*files_named("text", ["a.txt", "b"], list[FileName] | None)], [*files_named("text", "a.txt", str)]
    ([('text', 'a.txt'), ('text', 'b')], [])
    """
    bare, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    kind = get_origin(bare) or bare
    options = get_args(bare)
    for mark in marks:
        if isinstance(mark, Files) and isinstance(value, str) and value not in mark.words:
            yield key, value
    if kind in (Union, types.UnionType):
        for option in options:
            yield from files_named(key, value, option)
    elif isinstance(value, Mapping) and is_typeddict(kind):
        for name, parameter in parameters(kind).items():
            yield from files_named(f"{key}.{name}", value.get(name), parameter.hint)
    elif isinstance(value, Mapping) and kind is dict and options:
        for entry in value.values():
            yield from files_named(key, entry, options[1])
    elif isinstance(value, Sequence) and not isinstance(value, str) and options:
        for entry in value:
            yield from files_named(key, entry, options[0])


def checked(prefix: str, kind: type | None = None) -> Any:
    """Class decorator: check constructor arguments; errors name `<prefix>.<name>`.

    Without a class, return the decorator.
    """
    if kind is None:
        return functools.partial(checked, prefix)
    construct = kind.__init__
    arguments = inspect.signature(construct)

    @functools.wraps(construct)
    def checking(self, *args, **options):
        values = arguments.bind(self, *args, **options).arguments
        check_options(prefix, kind, values, complete=False)
        construct(self, *args, **options)

    kind.__init__ = checking
    return kind
