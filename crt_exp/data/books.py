"""Books as tokens: documents one after another, or sentences apart; and their words, for perplexities per word.

A document is a file, or an example of a set of the hub; END stands behind each. Words are those between blanks, and a
line end counts as one, for it is predicted too. Legend: n tokens of a text, L tokens of a row.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, tee
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from crt_exp.data import DataError
from crt_exp.data.byte_pairs import UNKNOWN
from crt_exp.data.cache import key_of
from crt_exp.data.mapped import mapped
from crt_exp.data.text import (
    Spans,
    content,
    fingerprint,
    hub_documents,
    lines_of,
    numbered_lines,
    text_files,
    token_spans,
)

FIRST = 10**8                                                # of the hub, for a vocabulary
COUNTED = 2**24


class LineSource(NamedTuple):
    """Where lines are: files, each a document; or the first `count` documents of a split of the hub."""

    files: Sequence[Path]
    hub: dict | None = None
    split: str | None = None

    def documents(self, unknown: str) -> Iterator[Iterator[tuple[str, int]]]:
        """Of each document its lines, each with how many words it has. Raises DataError, in the end of one without a
        word."""
        for file in self.files:
            counts = (len(line.split()) + 1 for _, line in numbered_lines(file) if line.strip())
            lines = (f"{line}\n" for line in lines_of([file], unknown))
            yield filled(str(file), zip(lines, counts, strict=True))
        for i, text in enumerate(self._streamed()):
            lines = (f"{line}\n" for line in text.split("\n") if line.strip())
            yield filled(f"{self.hub['name']}, {self.split}, document {i}",
                         ((line, len(line.split()) + 1) for line in lines))

    def _streamed(self) -> Iterable[str]:
        """Blank examples, which sets of lines have, are left out."""
        if self.hub is None:
            return ()
        read = hub_documents(self.hub, self.split, self.hub["column"], buffer=0)
        return islice(filter(str.strip, read(0)), self.hub["documents"])

    @contextmanager
    def as_files(self) -> Iterator[Sequence[Path]]:
        """The files; of the hub one with the first documents, FIRST characters or the last of these more."""
        if self.hub is None:
            yield self.files
            return
        with TemporaryDirectory() as folder:
            path, written = Path(folder) / "first.txt", 0
            with path.open("w", encoding="utf-8") as file:
                for document in self.documents(UNKNOWN):
                    written += sum(file.write(line) for line, _ in document)
                    if written >= FIRST:
                        break
            yield [path]

    def key(self) -> list[str]:
        """What a cache of its tokens depends on, where that is known."""
        return [f"{file.suffix}:{content(file)}" for file in self.files]


def filled(name: str, lines: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """The lines. Raises DataError where there is none."""
    empty = True
    for line in lines:
        empty = False
        yield line
    if empty:
        raise DataError(f"{name}: the text is empty. Leave it out, or get it again.")


def files_of(paths: str | Sequence[str]) -> LineSource:
    return LineSource(text_files(paths))


@dataclass(frozen=True, eq=False)
class TokenText:
    """tokens (n,) uint16 or uint32, END behind each document, or each line where lines stand apart; ends: the places
    behind these. words (n,) float32: how many words end with each token. Those of files are mapped from a cache."""

    tokens: np.ndarray
    ends: np.ndarray
    words: np.ndarray

    def counts(self, symbols: int) -> np.ndarray:
        """How often each of them is there; COUNTED tokens at a time are in memory."""
        places = range(0, len(self.tokens), COUNTED)
        return sum((np.bincount(self.tokens[at:at + COUNTED], minlength=symbols) for at in places),
                   np.zeros(symbols, np.int64))

    def part(self, first: int, last: int) -> "TokenText":
        """Tokens first to last."""
        ends = self.ends[(self.ends > first) & (self.ends <= last)] - first
        return TokenText(self.tokens[first:last], ends, self.words[first:last])

    def held_out(self, share: float, apart: bool) -> dict[str, "TokenText"]:
        """The last two shares are for validation and test; where lines stand apart they stay whole. Raises
        DataError."""
        counted = len(self.ends) if apart else len(self.tokens)
        held = round(share * counted)
        if not 0 < held < counted / 2:
            raise DataError(f"task.held_out = {share} of {counted} {'lines' if apart else 'tokens'} leaves none for "
                            "validation, test or training: give more text, or task.validation_text and task.test_text")
        cuts = [counted - 2 * held, counted - held]
        first, last = (int(self.ends[cut - 1]) for cut in cuts) if apart else cuts
        return {"train": self.part(0, first), "validation": self.part(first, last),
                "test": self.part(last, len(self.tokens))}


def read(source: LineSource, tokenizer, end: int, apart: bool, cache_dir: str | Path | None = None) -> TokenText:
    """The tokens of a source; those of files are kept in `cache_dir` by content, and no more than some lines of them
    are in memory. Raises DataError."""
    key = key_of("books 3", apart, end, fingerprint(tokenizer), *source.key())
    highest = max(end, *tokenizer.get_vocab().values())
    types = {"tokens": np.uint16 if highest < 2**16 else np.uint32, "ends": np.int64, "words": np.float32}
    return TokenText(**mapped(None if source.hub else cache_dir, key, partial(pieces, source, tokenizer, end, apart),
                              types))


def pieces(source: LineSource, tokenizer, end: int, apart: bool) -> Iterator[dict[str, np.ndarray]]:
    """Of each line, and of the end behind each document or line: what a TokenText holds of it."""
    place = 0
    for document in source.documents(tokenizer.unk_token or UNKNOWN):
        numbered, again = tee(document)
        coded = token_spans((line for line, _ in again), tokenizer)
        for (line, count), spans in zip(numbered, coded, strict=True):
            place += len(spans.ids)
            yield {"tokens": spans.ids, "words": words_of(line, spans, count)}
            if apart:
                place += 1
                yield ended(end, place)
        if not apart:
            place += 1
            yield ended(end, place)


def ended(end: int, place: int) -> dict[str, np.ndarray]:
    return {"tokens": np.array([end]), "words": np.zeros(1), "ends": np.array([place])}


def words_of(line: str, spans: Spans, count: int) -> np.ndarray:
    """How many of the line's words end with each of its tokens, (n,) float32. count: its words as they are counted,
    which is not those between its blanks where marks were undone."""
    if not len(spans.ids):
        return np.zeros(0, np.float32)
    ends = np.array([*(match.end() for match in re.finditer(r"\S+", line)), len(line)])
    last = np.array([stop for _, stop in spans.places])
    places = np.searchsorted(np.maximum.accumulate(last), ends).clip(max=len(last) - 1)
    return (np.bincount(places, minlength=len(last)) * (count / len(ends))).astype(np.float32)


class PackedRow(NamedTuple):
    """What is read and what is predicted, (T,) each."""

    tokens: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of exactly L tokens, each going on where the one before ended. whole: the last tokens, which fill none, are
    a shorter row."""

    text: TokenText
    longest: int
    end: int
    whole: bool = False

    @property
    def lengths(self) -> np.ndarray:
        return np.minimum(len(self.text.tokens) - self.longest * np.arange(len(self)), self.longest)

    def __len__(self) -> int:
        n = len(self.text.tokens)
        return -(-n // self.longest) if self.whole else n // self.longest

    def span(self, i: int) -> tuple[int, int]:
        return i * self.longest, min((i + 1) * self.longest, len(self.text.tokens))

    def __getitem__(self, i: int) -> PackedRow:
        return piece(self.text, *self.span(i), self.end)


@dataclass(frozen=True, eq=False)
class Apart:
    """A row for each line, cut to L tokens."""

    text: TokenText
    longest: int
    end: int

    @property
    def lengths(self) -> np.ndarray:
        return np.minimum(np.diff(self.text.ends, prepend=0), self.longest)

    def __len__(self) -> int:
        return len(self.text.ends)

    def span(self, i: int) -> tuple[int, int]:
        first = int(self.text.ends[i - 1]) if i else 0
        return first, min(int(self.text.ends[i]), first + self.longest)

    def __getitem__(self, i: int) -> PackedRow:
        labels = self.text.tokens[slice(*self.span(i))]
        return PackedRow(np.concatenate([[self.end], labels[:-1]]), labels)


def tokens_per_word(data: PackedRows | Apart, rows: Iterable[int]) -> float:
    """Of these rows."""
    spans = [data.span(i) for i in rows]
    return sum(last - first for first, last in spans) / sum(float(data.text.words[a:b].sum()) for a, b in spans)


def piece(text: TokenText, first: int, last: int, end: int) -> PackedRow:
    """Tokens first to last, read from the one before the first."""
    before = [end] if first == 0 else text.tokens[first - 1:first]
    return PackedRow(np.concatenate([before, text.tokens[first:last - 1]]), text.tokens[first:last])
