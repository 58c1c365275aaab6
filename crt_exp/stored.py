"""Files of runs and models, which may come from anybody, read as data: nothing is resolved, imported or called."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from pydantic import Field

from crt_exp.config import ConfigError
from crt_exp.options import check, format_value

LARGEST = 2**26   # bytes of a JSON file; the longest config.json of a run holds a tokenizer
SIZE = 2**16      # projections, cells, tokens of a block: sizes that memory is allocated for
TOGETHER = 2**26  # and the product of sizes that are multiplied
COUNTED = ("exact_until", "redraw_every", "fit_steps", "seed")  # integers that no memory is allocated for

Word = Annotated[str, Field(max_length=100)]
Integer = Annotated[int, Field(gt=-2**63, lt=2**63)]
Value = bool | Integer | float | Word | None
SavedValue = Value | Sequence[Value]


class SavedAttention(TypedDict):
    """What `Mechanism.saved` writes; `described` is compared and never built."""

    name: Word | None
    m: Annotated[int, Field(ge=1, le=SIZE)] | None
    seed: Integer
    features: Word | None
    sampler: Word | None
    options: dict[Word, SavedValue]
    described: dict
    rebuilds: NotRequired[bool]
    causal: NotRequired[bool | None]


def check_saved(saved: Any) -> None:
    """Raises ConfigError for what no `Mechanism.saved` gives, and for sizes that there is no memory for."""
    check("attention", saved, SavedAttention)
    sizes = {key: value for key, value in saved["options"].items() if type(value) is int and key not in COUNTED}
    of_map = [value for key, value in sizes.items() if key.startswith("features.")] + [saved["m"] or 1]
    largest = sorted(value for key, value in sizes.items() if not key.startswith("features."))[-2:]
    if max(sizes.values(), default=0) > SIZE or max(math.prod(of_map), math.prod(largest)) > TOGETHER:
        raise ConfigError(f"m={saved['m']}, {format_value([*sizes.items()])}: too large for a layer")


def read_json(text: str | bytes, named: Any, line: int = 1) -> dict[str, Any]:
    """The object that begins at a line of a file. Raises ConfigError, naming the line that is wrong."""
    try:
        content = json.loads(text)
    except (RecursionError, ValueError) as error:  # a number of thousands of digits too
        raise ConfigError(f"{named}, from line {line} on: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{named}, line {line}: expected a JSON object")
    return content


def json_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from None
    if len(text) > LARGEST:
        raise ConfigError(f"{path}: expected at most {LARGEST} bytes")
    return read_json(text, path)
