"""Texts as numbers of words: the Penn Treebank, WikiText-2, any text file, and a generated chain with a known entropy.

A text is read in columns: it is cut into as many pieces as are read side by side, and each batch goes on where the last
one ended. Every word is predicted from those before it in its column, the first of a text from <eos>.

Legend: V words of the vocabulary, n words of a text, B columns, T words of each column in a batch.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, TypedDict

import numpy as np
from pydantic import Field

from crt_exp.data import DataError
from crt_exp.data.sources import no_folder
from crt_exp.data.text import IGNORED, numbered_lines, official_file, text_path
from crt_exp.options import Count, Positive, Whole

EOS, UNKNOWN = "<eos>", "<unk>"
OFFICIAL = ("ptb", "wikitext2")
HELD_OUT = 0.05  # of the lines of a text file, for validation; as many for the test


class Corpus(NamedTuple):
    """A text as word ids, one <eos> at the end of each line."""

    words: tuple[str, ...]                                   # (V,) from the most frequent in the training text down
    train: np.ndarray                                        # (n,) int32
    valid: np.ndarray
    test: np.ndarray

    @property
    def eos(self) -> int:
        return self.words.index(EOS)

    @property
    def counts(self) -> np.ndarray:
        """How often each word is in the training text, (V,)."""
        return np.bincount(self.train, minlength=len(self.words))


# ---- files -----------------------------------------------------------------------------------------------------------


class WordText(NamedTuple):
    """Words of a part of a file, each line's with <eos> behind them, and the line at which it begins.

    source: the set that the file belongs to; None: it is the user's own.
    """

    words: list[str]
    path: Path
    first_line: int = 1
    source: str | None = None


def corpus(name: str, data_dir: str | Path | None = None, min_count: int = 1) -> Corpus:
    """Word-level Penn Treebank ("ptb") or WikiText-2 ("wikitext2") from the official files, "wordnet", or the text
    file `name`.

    Of a text file the last lines are for validation and test. min_count: words that are rarer in the training text are
    <unk>. Equal counts are ordered by the word, so that the ids do not depend on the order of the articles. A word that
    the training text lacks counts as <unk>. Raises DataError where there is none.
    """
    if name not in OFFICIAL:
        no_folder(data_dir, f"task.corpus={name}, a file of its own")
    parts = ([text_of(path, name) for path in files_of(name, data_dir)] if name in OFFICIAL
             else parts_of(text_path(name)))
    counts = Counter(parts[0].words)
    rare = {word for word, count in counts.items() if count < min_count and word not in (EOS, UNKNOWN)}
    kept = Counter(UNKNOWN if word in rare else word for word in parts[0].words) if rare else counts
    words = tuple(sorted(kept, key=lambda word: (-kept[word], word)))
    ids = {word: i for i, word in enumerate(words)}
    return Corpus(words, *(word_ids(part, ids) for part in parts))


def files_of(name: str, data_dir: str | Path | None) -> list[Path]:
    """What is read: the official files, or the one text."""
    if name not in OFFICIAL:
        return [Path(name).expanduser()]
    return [official_file(name, split, data_dir) for split in ("train", "valid", "test")]


def text_of(path: Path, source: str) -> WordText:
    """A whole file. Raises DataError where it holds no line."""
    words = [word for _, line in numbered_lines(path) for word in (*line.split(), EOS)]
    if not words:
        raise DataError(f"{path}: the file is empty. Get it again: `python -m crt_exp.data fetch {source}`.")
    return WordText(words, path, source=source)


def parts_of(path: Path) -> list[WordText]:
    """Training, validation and test part of a text file, without blank lines. Raises DataError."""
    if not path.is_file():
        raise DataError(f"The text {path} is not there. Give task.corpus=ptb, wikitext2, generated, wordnet, or a "
                        "text file (UTF-8), a sentence or paragraph a line.")
    lines = [(number, line.split()) for number, line in numbered_lines(path) if line.strip()]
    held = math.ceil(HELD_OUT * len(lines))
    if len(lines) <= 2 * held:
        raise DataError(f"{path}: {len(lines)} lines with words leave none for training besides validation and test. "
                        "Give a longer text, a sentence or paragraph a line.")
    cuts = (0, len(lines) - 2 * held, len(lines) - held, len(lines))
    return [WordText([word for _, line in lines[a:b] for word in (*line, EOS)], path, lines[a][0])
            for a, b in zip(cuts, cuts[1:])]


def word_ids(text: WordText, ids: dict[str, int]) -> np.ndarray:
    """(n,) int32. Raises DataError, naming file, line and word, where a word is unknown and so is <unk>."""
    unknown = ids.get(UNKNOWN, -1)
    result = np.fromiter((ids.get(word, unknown) for word in text.words), np.int32, len(text.words))
    if result.min() < 0:
        raise lacking(text, text.words[int(result.argmin())])
    return result


def lacking(text: WordText, word: str) -> DataError:
    line = next(number for number, line in numbered_lines(text.path)
                if number >= text.first_line and word in line.split())
    advice = "task.min_count=2 makes <unk> of the words that it has once"
    if text.source:
        advice = f"The files do not belong together. Get them again: `python -m crt_exp.data fetch {text.source}`"
    return DataError(f"{text.path}, line {line}: {word!r} is not in the training text, which has no <unk> for it "
                     f"either.\n{advice}.")


# ---- a chain ---------------------------------------------------------------------------------------------------------


class ChainOptions(TypedDict):
    """What is generated: a vocabulary, words of each part, and how much the next word depends on the one before."""

    words: Annotated[int, Field(ge=2)]
    train: Count
    validation: Count
    test: Count
    evenness: Positive                                       # small: few words follow a word; large: all of them
    seed: Whole


@dataclass(frozen=True)
class Chain:
    """A Markov chain over words. chances (V, V): row by row, of the next word after each; word 0 is <eos>."""

    chances: np.ndarray

    @classmethod
    def of(cls, options: ChainOptions) -> "Chain":
        """Rows scatter around the law of Zipf, 1 / (rank + 2)."""
        rng, V = np.random.default_rng([options["seed"], 0]), options["words"]
        zipf = 1 / np.arange(3, V + 3)
        return cls(rng.dirichlet(options["evenness"] * V * zipf / zipf.sum(), V))

    def corpus(self, options: ChainOptions) -> Corpus:
        """Parts drawn one after another; the first word of each follows an <eos>."""
        rng = np.random.default_rng([options["seed"], 1])
        cumulated, V = self.chances.cumsum(1), len(self.chances)
        parts = [drawn(cumulated, options[part], rng) for part in ("train", "validation", "test")]
        order = np.lexsort((np.arange(V), -np.bincount(parts[0], minlength=V)))
        new = np.empty(V, np.int32)
        new[order] = np.arange(V)
        words = tuple(EOS if i == 0 else f"w{i}" for i in order)
        return Corpus(words, *(new[part] for part in parts))

    def log_chances(self, corpus: Corpus, part: np.ndarray) -> np.ndarray:
        """log p of each word of a part given the one before it, (n,) nats: no model's loss is lower in the mean."""
        old = np.array([0 if word == EOS else int(word[1:]) for word in corpus.words])
        now = old[part]
        return np.log(np.maximum(self.chances[np.concatenate([[0], now[:-1]]), now], 1e-300))

    def entropy(self) -> float:
        """Of a word given all before it, in nats: that of the rows, in the mean over the stationary law."""
        values, vectors = np.linalg.eig(self.chances.T)
        stationary = np.abs(vectors[:, np.argmax(values.real)].real)
        rows = -(self.chances * np.log(np.maximum(self.chances, 1e-300))).sum(1)
        return float(stationary @ rows / stationary.sum())


def drawn(cumulated: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` words of the chain, the first after word 0."""
    result, uniforms, last, V = np.empty(count, np.int32), rng.random(count), 0, len(cumulated)
    for i in range(count):
        last = min(int(np.searchsorted(cumulated[last], uniforms[i], "right")), V - 1)
        result[i] = last
    return result


# ---- columns ---------------------------------------------------------------------------------------------------------


class Columns(NamedTuple):
    """A text in B columns: what is read and what is to be predicted, (B, words of a column) int64."""

    tokens: np.ndarray
    labels: np.ndarray

    def steps(self, length: int) -> int:
        """Batches of T = length words of each column; the last one may hold fewer."""
        return -(-self.tokens.shape[1] // length)

    def batches(self, length: int, start: int = 0) -> Iterator["Columns"]:
        for at in range(start * length, self.tokens.shape[1], length):
            yield Columns(self.tokens[:, at:at + length], self.labels[:, at:at + length])

    def rows(self, first: int, last: int) -> "Columns":
        return Columns(self.tokens[first:last], self.labels[first:last])


def columns(text: Sequence[int] | np.ndarray, count: int, eos: int, whole: bool) -> Columns:
    """The text in `count` columns, of equal length. whole: every word has its place, and the last column is filled up
    with places that count for nothing; else the last n mod count words are left out."""
    text = np.asarray(text, np.int64)
    length = -(-len(text) // count) if whole else len(text) // count
    text = text[:count * length]
    labels, tokens = np.full(count * length, IGNORED, np.int64), np.full(count * length, eos, np.int64)
    labels[:len(text)], tokens[1:len(text)] = text, text[:-1]
    return Columns(tokens.reshape(count, length), labels.reshape(count, length))
