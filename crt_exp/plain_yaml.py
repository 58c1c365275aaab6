"""The part of YAML that conf/ is written in, read without a package: so the library needs none for its configuration.

Mappings and lists by indentation, in which a list holds scalars or single keys; plain and quoted scalars, lists in
brackets, blocks of text behind |, comments. Anything else is an error that names the line: aliases, tags, mappings in
braces. Tests compare it with OmegaConf on every file that the library reads.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

WORDS = {"null": None, "~": None, "": None, "true": True, "false": False}
INTEGER, FLOAT = re.compile(r"[-+]?\d+"), re.compile(r"[-+]?(\d+\.?\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?)")
COMMENT = re.compile(r"""^((?:[^"'#]|(?<!\s)#|"[^"]*"|'[^']*')*?)(?:(?:^|\s)#.*)?$""")


class Line(NamedTuple):
    number: int
    indent: int
    text: str


def read(path: Path) -> dict[str, Any]:
    """Raises ValueError naming file and line for what is not written in this way."""
    lines = [Line(number, len(raw) - len(raw.lstrip(" ")), raw.strip("\n"))
             for number, raw in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)]
    try:
        content, rest = mapping(significant(lines), 0)
    except ValueError as error:
        raise ValueError(f"{path}, {error}") from None
    if rest:
        raise ValueError(f"{path}, line {rest[0].number}: it is indented unlike the lines above it")
    return content


def significant(lines: list[Line]) -> list[Line]:
    """Without comments and blank lines; blocks of text are folded into the line that opens them."""
    kept, block = [], None
    for line in lines:
        if block is not None and (not line.text.strip() or line.indent > block):
            continue
        text = COMMENT.match(line.text)[1].strip()
        block = line.indent if text.endswith(": |") else None
        if text:
            kept.append(line._replace(text=text.removesuffix(" |") if block is not None else text))
    return kept


def mapping(lines: list[Line], indent: int) -> tuple[dict[str, Any], list[Line]]:
    """The keys at this indentation, and the lines behind them."""
    keys: dict[str, Any] = {}
    while lines and lines[0].indent == indent and not lines[0].text.startswith("- "):
        line, lines = lines[0], lines[1:]
        key, colon, value = line.text.partition(":")
        if not colon or value[:1] not in ("", " ") or key in keys:
            raise ValueError(f"line {line.number}: it takes `key: value`, each key once")
        if not value.strip() and lines and (lines[0].indent > indent or lines[0].text.startswith("- ")):
            keys[unquoted(key)], lines = nested(lines, indent)
        else:
            keys[unquoted(key)] = scalar(value.strip(), line.number)
    return keys, lines


def nested(lines: list[Line], indent: int) -> tuple[Any, list[Line]]:
    if not lines[0].text.startswith("- "):
        return mapping(lines, lines[0].indent)
    inner, entries = lines[0].indent, []
    while lines and lines[0].indent == inner and lines[0].text.startswith("- "):
        text = lines[0].text[2:].strip()
        key, colon, value = text.partition(": ")
        entries.append({key: scalar(value.strip(), lines[0].number)} if colon else scalar(text, lines[0].number))
        lines = lines[1:]
    return entries, lines


def scalar(text: str, number: int) -> Any:
    if text[:1] in ("{", "&", "*", "!", ">"):
        raise ValueError(f"line {number}: {text[:1]} begins what this file may not hold: write keys below each other")
    if text.startswith("["):
        if not text.endswith("]"):
            raise ValueError(f"line {number}: a list in brackets ends on its line")
        inner = text[1:-1].strip()
        return [scalar(part.strip(), number) for part in inner.split(",")] if inner else []
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if INTEGER.fullmatch(text):
        return int(text)
    return float(text) if FLOAT.fullmatch(text) else unquoted(text)


def unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
