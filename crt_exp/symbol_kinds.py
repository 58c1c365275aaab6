"""What the symbols of a sequence model stand for when sequences are drawn from it: letters, pixels of an image, text.

Each kind says what a prompt is, which symbols may be drawn, and how sequences are written. A prompt is read by the
model behind its mark for a beginning, and is part of what is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np

from crt_exp.config import ConfigError
from crt_exp.data import image_values
from crt_exp.data.images import read
from crt_exp.hints import Count, Whole, at_most, shown
from crt_exp.schema import check
from crt_exp.whole_files import whole


class Kind(Protocol):
    """begin: the symbol before the first. end: the one that ends a sequence, or None. symbols: how many may be drawn,
    the first ones and `end`. unit: what one is called."""

    begin: int
    end: int | None
    symbols: int
    unit: str

    def prompt(self, given: str) -> list[int]:
        """The symbols of what the user gave. Raises ConfigError, DataError."""

    def write(self, rows: Sequence[Sequence[int]], seeds: Sequence[int], settings: str, output: str | None) -> None:
        """The sequences, prompt included, to the terminal or a file, whole or not at all."""


KEPT = {"letters": str, "tokenizer": str, "pixels": Annotated[Count, at_most(256)], "begin": Whole, "end": Whole,
        "size": Annotated[Count, at_most(2**12)], "channels": Literal[1, 3]}    # what a run may have kept of them


def kind_of(symbols: dict[str, Any], run: str, known: float, output: str | None) -> Kind:
    """That of the model of a run. known: the share of an image's rows that a prompt gives. Raises ConfigError, also
    where there is no file for images."""
    if not isinstance(symbols, dict):
        raise ConfigError(f"run = {run}: its vocabulary is {shown(symbols)}, and no keys with values")
    for key in symbols.keys() & KEPT.keys():
        check(f"run = {run}: vocabulary.{key}", symbols[key], KEPT[key])
    if symbols.keys() >= {"letters", "begin", "end", "size"}:
        return Letters(symbols["letters"], symbols["begin"], symbols["end"])
    if symbols.keys() >= {"pixels", "begin", "size", "channels"}:
        if output is None:
            raise ConfigError("this run draws images: name the PNG to write, output=<file>")
        return Pixels(symbols["pixels"], symbols["begin"], symbols["size"], symbols["channels"], known)
    if symbols.keys() >= {"tokenizer", "end"}:
        return Text(symbols["tokenizer"], symbols["end"])
    raise ConfigError(f"run = {run} has no letters, pixels or text to write: give a run of task=trembl, pixels or "
                      "books")


@dataclass
class Letters:
    """Of proteins: a line for each sequence, or a FASTA file."""

    letters: str
    begin: int
    end: int
    unit = "letters"

    def __post_init__(self):
        self.symbols = len(self.letters)

    def prompt(self, given: str) -> list[int]:
        for place, letter in enumerate(given, 1):
            if letter not in self.letters:
                raise ConfigError(f"prompt: {letter!r}, letter {place}, is not in the vocabulary of the run, "
                                  f"{self.letters}")
        return [self.letters.index(letter) for letter in given]

    def write(self, rows, seeds, settings, output) -> None:
        lines = ["".join(self.letters[i] for i in row) for row in rows]
        if output is None:
            print("\n".join(lines))
            return
        entries = [f">sample-{seed} {settings}\n" + "".join(f"{row[j:j + 60]}\n" for j in range(0, len(row), 60))
                   for seed, row in zip(seeds, lines)]
        write_text("".join(entries), output)


@dataclass
class Text:
    """A text for each sequence, with a line between."""

    tokenizer: str
    end: int
    unit = "tokens"

    def __post_init__(self):
        from tokenizers import Tokenizer

        try:
            self.made = Tokenizer.from_str(self.tokenizer)
        except Exception as error:  # tokenizers raises nothing else
            raise ConfigError(f"the tokenizer that this run kept cannot be read: {error}") from None
        self.begin, self.symbols = self.end, max(self.made.get_vocab().values()) + 1

    def prompt(self, given: str) -> list[int]:
        return self.made.encode(given, add_special_tokens=False).ids

    def write(self, rows, seeds, settings, output) -> None:
        text = "\n\n".join(self.made.decode(list(row)) for row in rows)
        print(text) if output is None else write_text(f"{text}\n", output)


SEEN = 96  # pixels of a side that a drawn image has at least, about


@dataclass
class Pixels:
    """Images in a PNG, eight side by side. A prompt is the file of an image: the share `known` of its rows, from the
    top, is given and the rest drawn; the image itself stands first."""

    values: int
    begin: int
    size: int
    channels: int
    known: float
    end = None
    unit = "values"
    across = 8

    def __post_init__(self):
        self.symbols, self.truth = self.values, None

    def prompt(self, given: str) -> list[int]:
        if not given:
            return []
        self.truth = image_values.in_square(read(given), self.size, self.channels, given)
        return self.truth[:round(self.known * self.size)].reshape(-1).tolist()

    def write(self, rows, seeds, settings, output) -> None:
        shape = (self.size, self.size, self.channels)
        images = [np.array(row, np.uint8).reshape(shape) for row in rows]
        images = images if self.truth is None else [self.truth, *images]
        times = max(1, SEEN // self.size)                    # each value a square, for small images to be seen
        images = [image.repeat(times, 0).repeat(times, 1) for image in images]
        lines = [images[i:i + self.across] for i in range(0, len(images), self.across)]
        image_values.save(image_values.grid(lines), Path(output))


def write_text(text: str, output: str) -> None:
    with whole(Path(output)) as part:
        part.write_text(text)
