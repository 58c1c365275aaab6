"""How an attention is spelled in one line, "window block=32 first=16": a name, then options with values as in YAML.
What the words stand for is `Mechanism.parse`'s matter.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from crt_exp.config import ConfigError, Values
from crt_exp.hints import shown

WORD = re.compile(r"""(?:\[[^\]]*\]|"[^"]*"|'[^']*'|\S)+""")  # blanks within brackets and quotes divide nothing
PLAIN = re.compile(r"[\w.+*/:-]+")
EXAMPLE = "such as 'window block=32 first=16'"


def read(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the options. Raises ConfigError naming the word that is neither."""
    words = WORD.findall(text) if isinstance(text, str) else []
    if not words or "=" in words[0]:
        raise ConfigError(f"attention {shown(text)!r}: it takes a name and options after it, {EXAMPLE}")
    options: dict[str, Any] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise ConfigError(f"attention {text!r}: {word} is no option; write key=value after the name, {EXAMPLE}")
        if key in options:
            raise ConfigError(f"attention {text!r}: {key} is given twice")
        options[key] = _value(text, key, value)
    return words[0], options


def write(name: str, options: Mapping[str, Any]) -> str:
    """The reverse."""
    return " ".join([name, *(f"{key}={written(value)}" for key, value in options.items())])


def written(value: Any) -> str:
    """A value so that it is read as itself: null, true or false, a number, a word, a list of these."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(written, value))}]"
    if not isinstance(value, str):
        return repr(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else shown(value)
    if PLAIN.fullmatch(value) and yaml.load(value, Values) == value:
        return value
    quote = "'" if '"' in value else '"'
    return f"{quote}{value}{quote}"


def _value(text: str, key: str, value: str) -> Any:
    try:
        found = yaml.load(value, Values)
    except yaml.YAMLError:
        found = {}
    if any(isinstance(each, dict | list) for each in (found if isinstance(found, list) else [found])):
        raise ConfigError(f"attention {text!r}: {key} = {value}: it takes a number, a word, true, false, null or "
                          "a list of these in brackets")
    return found
