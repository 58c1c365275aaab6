"""Rows of the board: one method on one model and length, as json of one form, and the page of all of them.

Legend: nats are those above exact attention.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, TypedDict

from crt_exp.config import ConfigError
from crt_exp.hints import Count, NotNegative, Positive, parameters
from crt_exp.metrics import interval
from crt_exp.schema import check_keys
from crt_exp.whole_files import whole

FOLDER = Path("outputs/board")
TEXT = "WikiText-2, validation"
NOTE = """# The board

Pretrained models, their attention replaced, nothing trained: nats a token above exact attention on new text and on text
that is said again, with 95% intervals over rows of text. Of each row the second half is judged, of repeated text but
for its first tokens. Keys: how many a query reads, on average. Times are of the attention layers for one row, beside
those of exact attention in the same rounds; they compare within a row alone, for processors differ.
[What a row says, and how to add one](../../docs/board.md). Command: `make board`.
"""


class Text(TypedDict):
    """Of each row of text its nats a token `above` exact attention's and the `exact` ones; mean and half of the
    interval of the first."""

    above: Sequence[float]
    exact: Sequence[float]
    mean: float
    ci95: NotNegative


class BoardRow(TypedDict):
    """The form of a file. ms: of the layers, and exact attention's; mib: at the peak; None: not measured."""

    form: Literal[1]
    method: str
    model: str
    sha256: str
    text: Literal["WikiText-2, validation"]
    length: Count
    new: Text
    repeated: Text
    keys: Positive | None
    ms: Positive | None
    exact_ms: Positive | None
    mib: NotNegative | None
    processor: str
    versions: str
    commit: str
    date: str


def read(path: Path) -> BoardRow:
    """Raises ConfigError, naming file and key, for what is not of the form."""
    try:
        row = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: it cannot be read as json ({error})") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{path}: it takes an object with the keys of a row")
    try:
        check_keys("", row, parameters(BoardRow))
    except ConfigError as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None
    for name in ("new", "repeated"):
        if row[name] != text_of(row[name]["above"], row[name]["exact"]):
            raise ConfigError(f"{path}: {name}.mean and {name}.ci95 are not those of its values")
    return row


def text_of(above: Sequence[float], exact: Sequence[float]) -> Text:
    """Raises ConfigError for fewer than two rows of text, which have no interval."""
    if len(above) < 2 or len(above) != len(exact):
        raise ConfigError(f"got {len(above)} and {len(exact)} rows of text, expected the same number, at least 2")
    found = interval(above, "above")
    return {"above": list(above), "exact": list(exact), "mean": round(found["above"], 6),
            "ci95": round(found["above_ci95"], 6)}


def path_of(row: BoardRow, folder: Path) -> Path:
    words = re.sub(r"[^\w.=]+", "-", f"{row['model'].rpartition('/')[2]} {row['length']} {row['method']}").strip("-")
    return folder / f"{words}.json"


def write(row: BoardRow, folder: Path) -> Path:
    path = path_of(row, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as part:
        part.write_text(json.dumps(row, indent=1) + "\n")
    return path


def rows(folder: Path) -> dict[Path, BoardRow]:
    return {path: read(path) for path in sorted(folder.glob("*.json"))}


# ---- the page


def render(folder: Path = FOLDER) -> Path:
    """board.md, of all rows of the folder, a table for each model and length."""
    tables: dict[tuple[str, int], list[BoardRow]] = {}
    for row in rows(folder).values():
        tables.setdefault((row["model"], row["length"]), []).append(row)
    parts = [NOTE, *(table(*key, each) for key, each in sorted(tables.items()))]
    path = folder / "board.md"
    with whole(path) as part:
        part.write_text("\n".join(parts))
    return path


def table(model: str, length: int, each: Iterable[BoardRow]) -> str:
    head = ["method", "new text", "said again", "keys", "ms (exact)", "MiB", "processor", "measured"]
    lines = [head, ["---", *["---:"] * 5, "---", "---"]]
    for row in sorted(each, key=lambda row: row["repeated"]["mean"]):
        spent = "" if row["ms"] is None else f"{row['ms']:.0f} ({row['exact_ms']:.0f})"
        lines.append([f"`{row['method']}`", *(f"{row[name]['mean']:.4f} ± {row[name]['ci95']:.4f}"
                                              for name in ("new", "repeated")),
                      "" if row["keys"] is None else f"{row['keys']:.0f}", spent,
                      "" if row["mib"] is None else f"{row['mib']:.0f}", row["processor"],
                      f"{row['date']}, {row['commit']}"])
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"## {model}, {length} tokens of {TEXT}\n\n{body}\n"
