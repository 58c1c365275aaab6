"""Arguments key=value of the commands that use a run: the fields of a dataclass say what each key takes."""

from collections.abc import Sequence
from typing import Any, TypeVar, get_args

from crt_exp.config import ConfigError, unknown
from crt_exp.hints import describe, parameters
from crt_exp.schema import check_keys

Options = TypeVar("Options")


def read(kind: type[Options], arguments: Sequence[str]) -> Options:
    """Raises ConfigError for what is not key=value, for a key that does not exist, comes twice or is missing, and for
    a value that does not fit."""
    wanted, given = parameters(kind), {}
    for argument in arguments:
        key, sign, text = argument.partition("=")
        if not sign:
            raise ConfigError(f"{argument!r} is not of the form key=value")
        if key not in wanted:
            raise unknown("key", key, list(wanted))
        if key in given:
            raise ConfigError(f"{key}=... comes twice: give it once")
        given[key] = value_of(key, text, wanted[key].hint)
    for key, (hint, required) in wanted.items():
        if required and not given.get(key):
            raise ConfigError(f"{key}=... is missing: it takes {describe(hint)}")
    check_keys("", given, wanted)
    return kind(**given)


def value_of(key: str, text: str, hint: Any) -> Any:
    """Strings stay as they are typed, the others are read as YAML reads them."""
    import yaml

    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(f"{key} = {text!a}: it holds bytes that are no UTF-8")
    if str in (hint, *get_args(hint)):
        return None if text == "null" and hint is not str else text
    try:
        value = yaml.safe_load(text)
        return float(value) if isinstance(value, str) else value  # YAML reads 1e-1 as a string
    except (yaml.YAMLError, ValueError):
        return text
