"""Texts and vocabularies that runs of a measurement name, made from WikiText-2 where they are not there."""

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from crt_exp.data.text import bert_tokenizer, lines_of, official_file
from crt_exp.data.vocabulary import SPECIAL

FOLDER = Path("outputs/texts")


def prepare(options: Sequence[str]) -> None:
    """Makes what options name in FOLDER: "validation-8.tokens" and "characters-88"."""
    for option in options:
        place = Path(option.partition("=")[2])
        if place.parent == FOLDER:
            kind, _, number = place.name.removesuffix(".tokens").partition("-")
            MADE[kind](place, int(number))


def held_out(place: Path, every: int) -> None:
    """A part of the validation text: every so-many-th line."""
    lines = official_file("wikitext2", "valid").read_text(encoding="utf-8").splitlines(keepends=True)
    written(place, "".join([line for line in lines if line.strip()][::every]))


def characters(folder: Path, size: int) -> None:
    """vocab.txt of the most frequent characters of the training text, each to begin a word and to go on with it."""
    if (folder / "vocab.txt").exists():
        return
    counts: Counter = Counter()
    special = written(folder / "special.txt", "".join(f"{word}\n" for word in SPECIAL))
    normalizer = bert_tokenizer(special).backend_tokenizer.normalizer
    for line in lines_of([official_file("wikitext2", "train")]):
        counts.update(normalizer.normalize_str(line))
    known = sorted(sorted(filter(str.strip, counts), key=lambda c: (-counts[c], c))[:size])
    words = (*SPECIAL, *("##" + character for character in known), *known)
    written(folder / "vocab.txt", "".join(f"{word}\n" for word in words))


def written(path: Path, text: str) -> Path:
    """Whole or not at all, and not again where it is the same: another process may be reading it."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)
    return path


MADE = {"validation": held_out, "characters": characters}
