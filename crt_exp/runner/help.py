"""--help: the groups with their choices, and every key with the comment that stands beside it in its file."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from crt_exp.config import CONF, known, own_folders
from crt_exp.options import written
from crt_exp.runner.configuration import GROUPS, plain

COLUMN = 40  # of the comments
LINE = re.compile(r"^( *)(\w+): ?.*?(?:\s*(?<!\S)# (.*))?$")  # of a file: indentation, key and comment


def help_text(cfg: DictConfig) -> str:
    """The template of conf/config.yaml, filled for a composed configuration."""
    groups = [wrap(f"{group}: {', '.join(known(group))}", 2) for group in sorted([*GROUPS, "experiment"])]
    keys = lines_of(plain(cfg), comments(cfg), "")
    template = cfg.hydra.help.template.replace("$APP_CONFIG_GROUPS", "\n".join([*groups, ""]))
    return template.replace("$CONFIG", "\n".join([*keys, ""]))


def comments(cfg: DictConfig) -> dict[str, str]:
    """The comments on keys in config.yaml and in the files that were chosen."""
    found = dict(comments_of(CONF / "config.yaml", ""))
    chosen = [(place.partition("@")[0], name) for place, name in cfg.hydra.runtime.choices.items() if name]
    for group, name in sorted(chosen, key=lambda choice: choice[0] != "trainer"):  # a task may set keys of trainer
        for folder in (CONF, *own_folders()) if group.partition("/")[0] in (*GROUPS, "experiment") else ():
            found |= comments_of(Path(folder, group, f"{name}.yaml"), group.partition("/")[0])
    return found


def wrap(text: str, indent: int) -> str:
    return textwrap.fill(text, 120, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def lines_of(node: dict[str, Any], comments: dict[str, str], prefix: str) -> Iterator[str]:
    """key=value and its comment, for each key; `_target_` and the like are not for the command line."""
    for key, value in node.items():
        name, inner = f"{prefix}{key}", isinstance(value, dict) and bool(value)
        shown = f"{name}.*" if inner else f"{name}={written(value)}"
        if not key.startswith("_") and (name in comments or not inner):
            yield wrap(f"{shown:<{COLUMN - 2}}  {comments.get(name, '')}", COLUMN)
        if inner:
            yield from lines_of(value, comments, f"{name}.")


def comments_of(path: Path, package: str) -> Iterator[tuple[str, str]]:
    """Dotted keys of a file, and of those of its group that it begins with, with the comments on their lines."""
    text = path.read_text() if path.is_file() else ""
    for entry in (yaml.safe_load(text) or {}).get("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            yield from comments_of(path.parent / f"{entry.partition('@')[0]}.yaml", package)
    above = [] if "@package _global_" in text or not package else [(-1, package)]
    for indent, key, comment in (match.groups() for match in map(LINE.match, text.splitlines()) if match):
        above = [(depth, name) for depth, name in above if depth < len(indent)] + [(len(indent), key)]
        if comment:
            yield ".".join(name for _, name in above), comment
