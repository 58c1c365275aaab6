"""What arguments take: types and bounds, said once, where a constructor names its parameters.

    def __init__(self, scaling: Literal["standard", "minmax", "none"], repeats: Count, sigmas: Several[Positive]): ...

From such annotations come the check and its words: "repeats = 1.5: it takes a whole number of at least 1". A class
under `@checked` checks its arguments when it is made; what files and the command line give is checked by schema.py.
"""

import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import (Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints,
                    is_typeddict)

LARGEST = 2**63  # what torch's and NumPy's whole numbers hold is below it


@dataclass(frozen=True)
class Bound:
    """What `Annotated` adds to a type: words that follow those of the type, and the condition they state."""

    words: str
    holds: Callable[[Any], bool]


def at_least(low: float) -> Bound:
    return Bound(f"of at least {low}", lambda value: value >= low)


def at_most(high: float) -> Bound:
    return Bound(f"of at most {high}", lambda value: value <= high)


def above(low: float) -> Bound:
    return Bound(f"above {low}", lambda value: value > low)


def below(high: float) -> Bound:
    return Bound(f"below {high}", lambda value: value < high)


Entry = TypeVar("Entry")
Count = Annotated[int, at_least(1)]
Whole = Annotated[int, at_least(0)]
Positive = Annotated[float, above(0)]
NotNegative = Annotated[float, at_least(0)]
Several = Annotated[Sequence[Entry], Bound("of at least one entry", len)]


# ---- one value -------------------------------------------------------------------------------------------------------


class Misfit(NamedTuple):
    """A value that does not fit: that of a key, or the entry of its list."""

    key: str
    value: Any
    hint: Any


def check(key: str, value: Any, hint: Any) -> None:
    """Raises ValueError, naming the argument or the entry of its list, what it takes and what it got."""
    if misfit := wrong(key, value, hint):
        wanted = describe(misfit.hint) + advice(misfit.value, misfit.hint)
        raise ValueError(f"{misfit.key} = {shown(misfit.value)}: it takes {wanted}")


def wrong(key: str, value: Any, hint: Any) -> Misfit | None:
    """The innermost place that is wrong; None where all is right."""
    bare, bounds = unwrapped(hint)
    if get_origin(bare) in (Union, types.UnionType):
        return wrong_for_all(key, value, bare)
    right, inner = wrong_entry(key, value, bare) if is_list(bare) else (is_a(value, bare), None)
    if inner or (right and all(bound.holds(value) for bound in bounds)):
        return inner
    return Misfit(key, value, hint)


def wrong_for_all(key: str, value: Any, union: Any) -> Misfit | None:
    """Where none of several types fits; a list is looked into."""
    places = [wrong(key, value, option) for option in get_args(union)]
    if None in places:
        return None
    return next((place for place in places if place.key != key), Misfit(key, value, union))


def wrong_entry(key: str, values: Any, hint: Any) -> tuple[bool, Misfit | None]:
    """Whether it is a list with as many entries as there must be, and the first wrong one of them."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return False, None
    entries = entry_hints(hint, len(values))
    places = (wrong(f"{key}[{i}]", value, entry) for i, (value, entry) in enumerate(zip(values, entries)))
    return len(entries) == len(values), next(filter(None, places), None)


def fits(value: Any, hint: Any) -> bool:
    return wrong("", value, hint) is None


def is_a(value: Any, hint: Any) -> bool:
    """Whether a single value is of a type. A whole number is a number too;
    true and false are none, and nan and inf neither."""
    if hint is Any:
        return True
    if get_origin(hint) is Literal:
        unquoted = value is False and "no" in get_args(hint)  # what YAML reads where `no` stands without quotes
        return unquoted or any(value == option and type(value) is type(option) for option in get_args(hint))
    if hint in (int, float, complex):
        return is_number(value, hint)
    kind = get_origin(hint) or hint
    return isinstance(value, Mapping if kind is dict or is_typeddict(kind) else type(None) if kind is None else kind)


def is_number(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return False
    if kind is complex and isinstance(value, (str, complex)):
        return parses(value, complex)
    if not isinstance(value, Integral if kind is int else Real):
        return False
    return abs(value) < LARGEST if isinstance(value, Integral) else math.isfinite(value)


def parses(text: Any, kind: type) -> bool:
    try:
        number = kind(text)
    except (ValueError, TypeError):
        return False
    return abs(number) < math.inf


def unwrapped(hint: Any) -> tuple[Any, tuple[Bound, ...]]:
    """A hint without the bounds of `Annotated`, and these."""
    if get_origin(hint) is not Annotated:
        return hint, ()
    bare, *extra = get_args(hint)
    return bare, tuple(part for part in extra if isinstance(part, Bound))


def is_list(hint: Any) -> bool:
    return (get_origin(hint) or hint) in (Sequence, list, tuple)


def entry_hints(hint: Any, count: int) -> list[Any]:
    """What each of `count` entries takes; as many as there must be where that is fixed."""
    arguments = get_args(hint) or (Any,)
    fixed = get_origin(hint) is tuple and arguments[-1] is not ...
    return list(arguments) if fixed else [arguments[0]] * count


def whole_number(value, name: str, least: int | None = 1, what: str = "it") -> int:
    """A whole number, NumPy's too, as an int. Raises ValueError for bools, floats and what is less than `least`."""
    if isinstance(value, Integral) and not isinstance(value, bool) and (least is None or value >= least):
        return int(value)
    at_least = "" if least is None else f" of at least {least}"
    raise ValueError(f"{name} = {value!r}: {what} must be a whole number{at_least}")


# ---- words -----------------------------------------------------------------------------------------------------------

NAMES = {int: "a whole number", float: "a number", complex: "a number, complex ones written as 0.1+0.2j",
         bool: "true or false", str: "a string", dict: "keys with values", type(None): "null", None: "null",
         Any: "any value"}


def describe(hint: Any) -> str:
    """What a key takes, such as "a whole number of at least 1, or null"."""
    bare, bounds = unwrapped(hint)
    options = get_args(bare)
    if get_origin(bare) in (Union, types.UnionType):
        *others, last = map(describe, options)
        return f"{', '.join(others)}, or {last}"
    if get_origin(bare) is Literal:
        return f"{', '.join(map(str, options[:-1]))} or {options[-1]}" if len(options) > 1 else str(options[0])
    words = " and ".join(bound.words for bound in bounds).replace(" and of ", " and ")
    if is_list(bare):
        entries = entry_hints(bare, 1)
        size = words or (f"of {len(entries)} entries" if len(entries) > 1 else "")
        each = "" if entries[0] is Any else f", each {describe(entries[0])}"
        return " ".join(filter(None, ["a list", size])) + each
    kind = dict if is_typeddict(bare) else get_origin(bare) or bare
    name = NAMES.get(kind) or f"a {getattr(kind, '__name__', kind)}"
    return f"{name} {words}".rstrip()


def shown(value: Any) -> str:
    """As YAML writes it, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Sequence) and not isinstance(value, str):
        text = f"[{', '.join(map(shown, value[:20]))}]"
    elif isinstance(value, Integral) and abs(value) >= 10**40:  # Python refuses to write out thousands of digits
        text = f"a number of {int(math.log10(abs(value))) + 1} digits"
    else:
        text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def advice(value: Any, hint: Any) -> str:
    """How the same thing is written so that it fits, where that is clear."""
    if isinstance(value, float) and value.is_integer() and fits(int(value), hint):
        return f" (write {int(value)})"
    if isinstance(value, str) and any(parses(value, kind) and fits(kind(value), hint) for kind in (int, float)):
        return f" (write {value} without quotes)"
    if isinstance(value, (int, float)) and abs(value) < LARGEST and fits(shown(value), hint):
        return f" (write '\"{shown(value)}\"', quotes within quotes, if that is meant)"
    return ""


# ---- the parameters of a constructor ---------------------------------------------------------------------------------


class Parameter(NamedTuple):
    """What it takes, and whether it must be given."""

    hint: Any
    required: bool


@functools.cache
def parameters(target: Any) -> dict[str, Parameter]:
    """What a class or function takes by name, or a TypedDict holds; an unannotated parameter takes what its default is.
    A constructor that takes any further options (**options) takes those of the next class that it inherits from, which
    it may give itself: they need not be given."""
    if is_typeddict(target):
        hints = get_type_hints(target, include_extras=True)
        return {name: Parameter(hint, name in target.__required_keys__) for name, hint in hints.items()}
    found: dict[str, Parameter] = {}
    for maker in makers(target):
        hints = annotations(maker)
        for p in named(maker):
            required = p.default is p.empty and maker is target
            found.setdefault(p.name, Parameter(hints.get(p.name, like(p.default)), required))
    return found


def defaults(target: Any) -> dict[str, Any]:
    """Of the parameters that have one."""
    every = {p.name: p.default for maker in reversed(makers(target)) for p in named(maker)}
    return {name: value for name, value in every.items() if value is not inspect.Parameter.empty}


def makers(target: Any) -> list[Any]:
    """Itself, and of a class those that it inherits from as far as constructors hand further options on."""
    found, owners = [target], [cls for cls in getattr(target, "__mro__", ()) if "__init__" in vars(cls)]
    for cls in owners[1:]:
        if not takes_any(found[-1]) or cls is object:
            break
        found.append(cls)
    return found


def takes_any(maker: Any) -> bool:
    """Whether it takes further options of any name."""
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signed(maker))


def named(maker: Any) -> list[inspect.Parameter]:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p for p in signed(maker) if p.kind in by_name]


def signed(maker: Any) -> list[inspect.Parameter]:
    """All parameters; none of what does not say what it takes, of C, such as `min` and functools.partial."""
    try:
        return [*inspect.signature(maker).parameters.values()]
    except ValueError:
        return []


def annotations(maker: Any) -> dict[str, Any]:
    """Those that can be resolved: not of names that are imported for type checkers alone."""
    try:
        return get_type_hints(maker.__init__ if isinstance(maker, type) else maker, include_extras=True)
    except NameError:
        return {}


def like(default: Any) -> Any:
    """The hint for values like a default."""
    if isinstance(default, (list, tuple)):
        return Sequence
    if isinstance(default, (int, float)):
        return bool if isinstance(default, bool) else float
    return Any


def checked(prefix: str, check: Callable[[str, Any, Any], None] = check) -> Callable[[type], type]:
    """A class decorator: the constructor checks its arguments by their annotations, and calls
    them `<prefix>.<name>`."""
    def decorate(cls: type) -> type:
        construct, signature = cls.__init__, inspect.signature(cls.__init__)

        @functools.wraps(construct)
        def checking(self, *args, **options):
            given = signature.bind(self, *args, **options).arguments
            for name, (hint, _) in parameters(cls).items():
                if name in given:
                    check(f"{prefix}.{name}", given[name], hint)
            construct(self, *args, **options)

        cls.__init__ = checking
        return cls
    return decorate
