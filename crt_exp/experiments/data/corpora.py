"""Text corpora: words in columns (task=ptb), tokens of documents (task=books).

A text in columns is cut into equal parts that are read in parallel. Each batch continues where the last one ended.
Every word is predicted from earlier words of its column; the first word of the text is predicted from <eos>. The module
also makes the text files and configurations that options of result pages name.

Notation: V words of the vocabulary, n words or tokens of a corpus, T tokens of a row.
"""

import math
import random
import re
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations, tee
from pathlib import Path
from typing import NamedTuple

import numpy as np

from crt_exp.experiments.data import DataError, Folder, numbered_lines
from crt_exp.experiments.data.files import Arrays, cached
from crt_exp.experiments.data.glue import TASKS, split_file
from crt_exp.experiments.data.sources import refuse_data_dir
from crt_exp.experiments.data.text import (
    IGNORED,
    PARTS,
    SPECIAL,
    fingerprint,
    lines_of,
    official_file,
    text_path,
    token_lists,
)
from crt_exp.experiments.data.vocabularies import frequent_characters, new_tokenizer

EOS = "<eos>"
UNKNOWN = "<unk>"
OFFICIAL = ("ptb", "wikitext2")
HELD_OUT = 0.05  # share of lines for validation, and again for test
COUNTED = 2**24  # tokens per call of bincount


# ---- words -----------------------------------------------------------------------------------------------------------


class Corpus(NamedTuple):
    """A text as word ids, with <eos> at the end of each line."""

    words: tuple[str, ...]  # (V,) by falling frequency in the training text
    parts: dict[str, np.ndarray]  # train, validation, test: (n,) int32

    @property
    def eos(self) -> int:
        return self.words.index(EOS)

    @property
    def counts(self) -> np.ndarray:
        """Count of each word in the training text, (V,)."""
        return np.bincount(self.parts["train"], minlength=len(self.words))


def word_files(name: str, data_dir: Folder, source: str = "auto") -> list[Path]:
    """Official files of "ptb" or "wikitext2", or one text file ("wordnet" works).

    Raises DataError.
    """
    if name in OFFICIAL:
        return [official_file(name, part, data_dir, source) for part in PARTS.values()]
    refuse_data_dir(data_dir, f"task.corpus={name}, a file of its own")
    return [text_path(name)]


def word_corpus(
    name: str,
    data_dir: Folder = None,
    source: str = "auto",
) -> Corpus:
    """Words of `word_files`; a single file is split into three parts by lines.

    The last lines of a single file are the validation and test parts. Words that are missing in the training text
    become <unk>, as do words that a single file has once. Words of equal count are sorted, so that ids do not depend on
    the order of articles.

    Raises DataError if a file is too short. Also raises DataError if another part has a new word and the training
    text has no <unk>.
    """
    official = name in OFFICIAL
    files = word_files(name, data_dir, source)
    parts = [word_lines(file, official) for file in files]
    if not official:
        (lines,) = parts
        held_out = math.ceil(HELD_OUT * len(lines))
        parts = [lines[: -2 * held_out], lines[-2 * held_out : -held_out], lines[-held_out:]]
    if not all(parts):
        raise DataError(
            f"{', '.join(map(str, files))}: too few lines for three splits; expected one sentence per line"
        )
    texts = [list(chain.from_iterable(lines)) for lines in parts]
    counts = Counter(texts[0]) if official else repeated_words(texts[0])
    words = tuple(sorted(counts, key=lambda word: (-counts[word], word)))
    ids = {word: i for i, word in enumerate(words)}
    arrays = {}
    for part, text in zip(PARTS, texts):
        numbers = [ids.get(word, ids.get(UNKNOWN)) for word in text]
        if None in numbers:
            word = text[numbers.index(None)]
            raise DataError(f"{files[0]}: {word!r} and <unk> are not in the training text")
        arrays[part] = np.array(numbers, np.int32)
    return Corpus(words, arrays)


def word_lines(file: Path, keep_blank: bool) -> list[list[str]]:
    """Words of each line, and <eos>."""
    lines = []
    for _, line in numbered_lines(file):
        if keep_blank or line.strip():
            lines.append([*line.split(), EOS])
    return lines


def repeated_words(text: Sequence[str]) -> Counter[str]:
    """Count words; those that stand once count as <unk>."""
    counts = Counter(text)
    for word, count in list(counts.items()):
        if count == 1 and word not in (EOS, UNKNOWN):
            del counts[word]
            counts[UNKNOWN] += count
    return counts


def columns(text: np.ndarray, count: int, eos: int, whole: bool) -> np.ndarray:
    """Inputs and targets of a text in `count` equal columns, (2, count, length) int64.

    whole=True keeps every word and pads the last column with ignored targets. whole=False drops the last n mod count
    words.
    """
    length = -(-len(text) // count) if whole else len(text) // count
    text = text[: count * length]
    labels = np.full(count * length, IGNORED, np.int64)
    tokens = np.full(count * length, eos, np.int64)
    labels[: len(text)] = text
    tokens[1 : len(text)] = text[:-1]
    return np.stack([tokens, labels]).reshape(2, count, length)


# ---- documents -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TokenText:
    """Token ids of documents, with the end token after each document or line.

    Attributes:
        tokens: (n,) uint16 or uint32.
        ends: index after each end token.
        words: (n,) float32, number of words that end with each token. A line end counts as a word, because it is
            predicted.
    """

    tokens: np.ndarray
    ends: np.ndarray
    words: np.ndarray

    @classmethod
    def read(
        cls,
        files: Sequence[Path],
        tokenizer,
        end: int,
        apart: bool,
        cache_dir: Folder = None,
    ) -> "TokenText":
        """Tokens of files, one document each, stored in `cache_dir`.

        apart: put the end token after each line. Raises DataError for a file without words.
        """
        make = partial(tokens_of, files, tokenizer, end, apart)
        key = ("documents 1", apart, end, fingerprint(tokenizer))
        return cls(**cached(cache_dir, make, *key, files=files))

    def counts(self, symbols: int) -> np.ndarray:
        """Count of each token id, with bounded memory."""
        total = np.zeros(symbols, np.int64)
        for start in range(0, len(self.tokens), COUNTED):
            total += np.bincount(self.tokens[start : start + COUNTED], minlength=symbols)
        return total

    def part(self, first: int, last: int) -> "TokenText":
        ends = self.ends[(self.ends > first) & (self.ends <= last)] - first
        return TokenText(self.tokens[first:last], ends, self.words[first:last])

    def held_out(self, share: float, apart: bool) -> dict[str, "TokenText"]:
        """Split off the last two shares for validation and test.

        With apart=True lines stay whole. Raises DataError if a split is empty.
        """
        unit = "lines" if apart else "tokens"
        counted = len(self.ends) if apart else len(self.tokens)
        held = round(share * counted)
        if not 0 < held < counted / 2:
            raise DataError(
                f"task.held_out={share}: no {unit} of {counted} left for one of "
                "the splits; use a longer text, or set task.validation_text and task.test_text"
            )
        first = counted - 2 * held
        last = counted - held
        if apart:
            first = int(self.ends[first - 1])
            last = int(self.ends[last - 1])
        return {
            "train": self.part(0, first),
            "validation": self.part(first, last),
            "test": self.part(last, len(self.tokens)),
        }


def tokens_of(files: Sequence[Path], tokenizer, end: int, apart: bool) -> Arrays:
    """Arrays of a TokenText."""
    tokens = array("I")
    words = array("f")
    ends = array("q")

    def close() -> None:
        tokens.append(end)
        words.append(0)
        ends.append(len(tokens))

    for file in files:
        start = len(tokens)
        lines, again = tee(f"{line}\n" for line in lines_of(file, tokenizer.unk_token or UNKNOWN))
        counts = (len(line.split()) + 1 for _, line in numbered_lines(file) if line.strip())
        for line, count, (ids, spans) in zip(
            lines, counts, token_lists(again, tokenizer, spans=True)
        ):
            tokens.extend(ids)
            words.extend(words_of(line, spans, count))
            if apart:
                close()
        if len(tokens) == start:
            raise DataError(f"{file}: empty; remove it, or fetch it again")
        if not apart:
            close()
    kind = np.uint16 if max(tokens) < 2**16 else np.uint32
    return {"tokens": np.array(tokens, kind), "words": np.array(words), "ends": np.array(ends)}


def words_of(line: str, spans: list[tuple[int, int]], count: int) -> list[float]:
    """Number of words that end with each token of a line.

    count: words of the line in the file. Undoing WikiText's marks changes the number of words between blanks, so the
    result is scaled to `count`.
    """
    if not spans:
        return []
    ends = [*(match.end() for match in re.finditer(r"\S+", line)), len(line)]
    places = np.searchsorted(np.maximum.accumulate([stop for _, stop in spans]), ends).clip(
        max=len(spans) - 1
    )
    return (np.bincount(places, minlength=len(spans)) * (count / len(ends))).tolist()


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of tokens first[i] to last[i].

    A row continues the row before it; with apart=True each row begins with the end token.
    """

    text: TokenText
    first: np.ndarray
    last: np.ndarray
    end: int
    apart: bool

    @classmethod
    def packed(cls, text: TokenText, longest: int, end: int, whole: bool) -> "Rows":
        """Rows of exactly `longest` tokens; whole: add a shorter last row."""
        n = len(text.tokens)
        stop = n if whole else n - longest + 1
        first = np.arange(0, stop, longest)
        return cls(text, first, np.minimum(first + longest, n), end, False)

    @classmethod
    def of_lines(cls, text: TokenText, longest: int, end: int) -> "Rows":
        """One row for each line, truncated to `longest` tokens."""
        first = np.concatenate([[0], text.ends])[:-1]
        return cls(text, first, np.minimum(text.ends, first + longest), end, True)

    def __len__(self) -> int:
        return len(self.first)

    @property
    def lengths(self) -> np.ndarray:
        return self.last - self.first

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Input tokens and labels, (T,) each."""
        first = self.first[i]
        labels = self.text.tokens[first : self.last[i]]
        before = self.end if self.apart or first == 0 else self.text.tokens[first - 1]
        return np.append(before, labels[:-1]), labels

    def tokens_per_word(self, rows: Iterable[int]) -> float:
        spans = [(self.first[i], self.last[i]) for i in rows]
        return float(
            sum(b - a for a, b in spans) / sum(float(self.text.words[a:b].sum()) for a, b in spans)
        )


# ---- text files and model configurations of result pages -------------------------------------------------------------

FOLDER = Path("outputs/texts")
Phrase = tuple[str, ...]  # words
LLAMA = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 384,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}


def prepare(options: Sequence[str]) -> None:
    """Make the text files and configurations in FOLDER that options name.

    Names, alone or in a list, are such as "validation-8.tokens", "drawn-14000.tokens", "characters-88", "llama-2048",
    "qnli-2" and "sst2-20000". Existing ones stay. Each is moved into place when complete, because other processes may
    read it.
    """
    for option in options:
        for name in re.split(r"[\[\],]", option.partition("=")[2]):
            place = Path(name)
            if place.parent != FOLDER or place.exists():
                continue
            kind, _, number = place.stem.partition("-")
            FOLDER.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
                part = Path(folder) / place.name
                MAKE[kind](part, int(number))
                part.replace(place)


def write_held_out(file: Path, every: int) -> None:
    """Write every `every`-th line of WikiText-2's validation text."""
    text = official_file("wikitext2", "valid").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines(keepends=True) if line.strip()]
    file.write_text("".join(lines[::every]), encoding="utf-8")


def write_random_words(file: Path, lines: int) -> None:
    """Write lines of 40 random training words, predictable only by repetition."""
    text = official_file("wikitext2", "train").read_text(encoding="utf-8")
    words = sorted(set(text.lower().split()))
    rng = random.Random(0)
    sampled = [" ".join(rng.choices(words, k=40)) for _ in range(lines)]
    file.write_text("\n".join(sampled), encoding="utf-8")


def write_llama(folder: Path, size: int) -> None:
    """Save a Llama configuration and a byte-pair tokenizer of `size` entries."""
    from transformers import LlamaConfig

    tokenizer = new_tokenizer(
        "byte_pairs", official_file("wikitext2", "train"), size, True, FOLDER / "tokens"
    )
    tokenizer.save_pretrained(folder)
    LlamaConfig(
        vocab_size=len(tokenizer),
        architectures=["LlamaForCausalLM"],
        bos_token_id=None,
        eos_token_id=None,
        **LLAMA,
    ).save_pretrained(folder)


def write_characters(folder: Path, size: int) -> None:
    """Write vocab.txt of the `size` most frequent characters of the training text.

    Each character has two entries: at the start of a word and inside.
    """
    folder.mkdir()
    known = frequent_characters(official_file("wikitext2", "train"), size)
    entries = [*SPECIAL, *(f"##{character}" for character in known), *known]
    (folder / "vocab.txt").write_text("\n".join([*entries, ""]), encoding="utf-8")


def write_qnli(folder: Path, parity: int) -> None:
    """Split the questions of the published dev.tsv into halves train.tsv and dev.tsv.

    parity: selects the half for dev.tsv.
    """
    header, *lines = official_lines("qnli", "dev")
    questions: dict[str, int] = {}
    halves: tuple[list[str], list[str]] = ([], [])
    for line in lines:
        question = line.split("\t")[1]
        number = questions.setdefault(question, len(questions))
        halves[number % 2].append(line)
    write_splits(folder, header, train=halves[1 - parity % 2], dev=halves[parity % 2])


def write_sst2(folder: Path, rows: int) -> None:
    """Split the published train.tsv so that train and dev share no sentence.

    dev.tsv has at least `rows` rows. A row belongs to every sentence that contains it as a phrase. Rows of sentences on
    both sides are left out.
    """
    header, *lines = official_lines("sst2", "train")
    phrases = [tuple(line.split("\t")[0].split()) for line in lines]
    sentences = sentences_with(phrases)
    order = sorted(set().union(*sentences.values()))
    random.Random(0).shuffle(order)
    rank = {sentence: i for i, sentence in enumerate(order)}
    ranks = []
    for phrase in phrases:
        ranks.append(sorted(rank[sentence] for sentence in sentences[phrase]))
    last = sorted(own[-1] for own in ranks)[rows - 1]
    train = [line for line, own in zip(lines, ranks) if own[0] > last]
    dev = [line for line, own in zip(lines, ranks) if own[-1] <= last]
    write_splits(folder, header, train=train, dev=dev)


def sentences_with(phrases: Sequence[Phrase]) -> dict[Phrase, set[Phrase]]:
    """Return the sentences that contain each phrase; sentences are phrases within no other."""
    known = set(phrases)
    sentences: dict[Phrase, set[Phrase]] = {}
    for text in sorted(known, key=lambda text: (-len(text), text)):
        if text not in sentences:
            for start, end in combinations(range(len(text) + 1), 2):
                phrase = text[start:end]
                if phrase in known:
                    sentences.setdefault(phrase, set()).add(text)
    return sentences


def official_lines(name: str, split: str) -> list[str]:
    """Lines of an official GLUE file, header first. Raises DataError if it is missing."""
    return split_file(TASKS[name], split).read_text(encoding="utf-8").splitlines(keepends=True)


def write_splits(folder: Path, head: str, **splits: list[str]) -> None:
    folder.mkdir()
    for split, lines in splits.items():
        (folder / f"{split}.tsv").write_text("".join([head, *lines]), encoding="utf-8")


MAKE = {
    "validation": write_held_out,
    "drawn": write_random_words,
    "characters": write_characters,
    "llama": write_llama,
    "qnli": write_qnli,
    "sst2": write_sst2,
}
