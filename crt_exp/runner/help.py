"""--help: the groups that the command line takes, and every key with the words that stand beside it in its file."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from crt_exp.config import CONF, file_of
from crt_exp.runner.configuration import GROUPS, plain

WIDTH, COLUMN = 120, 40
LINE = re.compile(r"^( *)(\w+): ?(.*?)(?:\s*(?<!\S)# (.*))?$")  # of a file: its depth, key, value and words


def help_text(cfg: Any, listed: dict[str, list[str]]) -> str:
    """The template of conf/config.yaml, filled with the choices of groups and the keys of a composed configuration."""
    groups = "\n".join(filled(f"{group}: ", ", ".join(names)) for group, names in sorted(listed.items()))
    keys = "\n".join(lines_of(plain(cfg), words_of(cfg.hydra.runtime.choices)))
    return str(cfg.hydra.help.template).replace("$APP_CONFIG_GROUPS", groups + "\n").replace("$CONFIG", keys + "\n")


def lines_of(given: dict[str, Any], words: dict[str, str], prefix: str = "") -> Iterator[str]:
    """key=value, and what it is; `_target_` and the like are not for the command line."""
    for key, value in given.items():
        name = f"{prefix}{key}"
        if key.startswith("_"):
            continue
        inner = isinstance(value, dict) and bool(value)
        typed = f"{name}.*" if inner else f"{name}={written(value)}"
        if name in words or not inner:
            yield filled(f"{typed:<{COLUMN - 2}}  ", words.get(name, ""), COLUMN)
        if inner:
            yield from lines_of(value, words, f"{name}.")


def written(value: Any) -> str:
    """As it is typed."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")
    return text.replace(", ", ",")


def filled(first: str, text: str, indent: int = 2) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=" " * indent, break_long_words=False,
                         break_on_hyphens=False) if text else first.rstrip()


# ---- the words of files ----------------------------------------------------------------------------------------------


def words_of(chosen: dict[str, str | None]) -> dict[str, str]:
    """The words beside each key, those of the files that were chosen over those of config.yaml."""
    result = dict(words_in(CONF / "config.yaml", ""))
    for place, name in sorted(chosen.items(), key=lambda choice: choice[0].partition("@")[0] != "trainer"):
        group = place.partition("@")[0]
        if name and group.partition("/")[0] in {*GROUPS, "experiment"}:
            result |= words_of_choice(group, str(name))
    return result


def words_of_choice(group: str, name: str) -> dict[str, str]:
    """Of a choice, with those of the choices of its group that it begins with."""
    path = file_of(group, name)
    if not path.is_file():
        return {}  # the class of a plugin
    text, result = path.read_text(), {}
    for other in (yaml.safe_load(text) or {}).get("defaults", []):
        if isinstance(other, str) and other != "_self_":
            result |= words_of_choice(group, other.partition("@")[0])
    return result | dict(words_in(path, "" if "@package _global_" in text else group.partition("/")[0]))


def words_in(path: Path, prefix: str) -> Iterator[tuple[str, str]]:
    """Dotted keys with the words on their lines."""
    above: list[tuple[int, str]] = []
    for line in path.read_text().splitlines():
        if match := LINE.match(line):
            depth, key, _, words = match.groups()
            above = [(other, name) for other, name in above if other < len(depth)] + [(len(depth), key)]
            if words:
                yield ".".join([*filter(None, [prefix]), *(name for _, name in above)]), words
