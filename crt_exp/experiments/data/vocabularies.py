"""Vocabularies from text: WordPiece, byte pairs, sentencepiece, speech symbols.

The same text gives the same vocabulary in every process.
"""

import io
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np

from crt_exp.experiments.data import DataError, Folder
from crt_exp.experiments.data.files import Arrays, cached
from crt_exp.experiments.data.text import SPECIAL, Paths, lines_of, text_files

Kind = Literal["wordpiece", "byte_pairs", "sentencepiece"]
# WikiText writes <unk> for rare words
END = "<|endoftext|>"
UNKNOWN = "<unk>"
BYTES = 256
ALPHABET = 1000  # most frequent characters in a WordPiece vocabulary
SENTENCES = 2_000_000  # lines that sentencepiece reads
LONGEST = 2**16  # longest line for sentencepiece, in bytes


def new_tokenizer(
    kind: Kind, text: Paths, size: int, lowercase: bool = True, cache_dir: Folder = None
):
    """Train a transformers tokenizer with at most `size` entries.

    A small text gives fewer entries. `cache_dir` stores the result. Raises DataError if `size` is too small for the
    characters or the 256 bytes.
    """
    from transformers import BertTokenizerFast

    build = {"wordpiece": wordpieces, "byte_pairs": byte_pairs, "sentencepiece": pieces}[kind]

    def make() -> Arrays:
        return {"json": np.frombuffer(build(text, size, lowercase).encode(), np.uint8)}

    key = ("vocabulary 1", kind, size, lowercase)
    stored = cached(cache_dir, make, *key, files=text_files(text))
    description = stored["json"].tobytes().decode()
    if kind == "wordpiece":
        return BertTokenizerFast(vocab=json.loads(description), do_lower_case=lowercase)
    return fast_tokenizer(description, unk_token=UNKNOWN, eos_token=END, bos_token=END)


def fast_tokenizer(description: str, **marks: str):
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(description), **marks)


def wordpieces(text: Paths, size: int, lowercase: bool) -> str:
    """JSON of the ids of WordPieces.

    The library numbers "##" characters in hash order and breaks ties by this order. Passing the characters as special
    tokens makes the result deterministic.
    """
    from tokenizers.implementations import BertWordPieceTokenizer

    tokenizer = BertWordPieceTokenizer(lowercase=lowercase)
    alphabet = frequent_characters(text, ALPHABET, lowercase)
    first = [*SPECIAL, *("##" + c for c in alphabet)]
    check_size(size, len(first) + len(alphabet), f"the {len(alphabet)} characters of this text")
    tokenizer.train_from_iterator(
        lines_of(text),
        vocab_size=size,
        show_progress=False,
        special_tokens=first,
        initial_alphabet=alphabet,
        limit_alphabet=ALPHABET,
    )
    return json.dumps(dict(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])))


def frequent_characters(text: Paths, count: int, lowercase: bool = True) -> list[str]:
    """The most frequent characters of a text but blanks, as WordPiece reads it, sorted."""
    from tokenizers.normalizers import BertNormalizer

    normalizer = BertNormalizer(lowercase=lowercase)
    counts: Counter[str] = Counter()
    for line in lines_of(text):
        counts.update(normalizer.normalize_str(line))
    counts.pop(" ", None)
    return sorted(sorted(counts, key=lambda letter: (-counts[letter], letter))[:count])


def byte_pairs(text: Paths, size: int, lowercase: bool) -> str:
    """JSON of a byte-pair tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    check_size(size, BYTES + 2, f"the {BYTES} bytes and two marks")
    tokenizer = lowercased(Tokenizer(models.BPE()), lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    lines = (f"{line}\n" for line in lines_of(text, UNKNOWN))  # line ends are tokens too
    tokenizer.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[UNKNOWN, END],
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    return tokenizer.to_str()


def pieces(text: Paths, size: int, lowercase: bool) -> str:
    """JSON of a sentencepiece unigram tokenizer.

    A piece that begins a word includes the blank before the word. A line end is a piece of its own. Unknown characters
    become bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    lines = islice(lines_of(text, " "), SENTENCES)
    if lowercase:
        lines = map(str.lower, lines)
    model = load_sentencepiece(
        unigram_model(
            lines,
            f"{size} pieces of this text, {BYTES} of them the bytes",
            "task.vocabulary_size, or task.vocabulary=byte_pairs",
            vocab_size=size - 2,
            byte_fallback=True,
            unk_piece=UNKNOWN,
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            max_sentence_length=LONGEST,
        )
    )
    scores = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
    tokenizer = lowercased(
        Tokenizer(models.Unigram([*scores, ("\n", 0.0)], unk_id=0, byte_fallback=True)), lowercase
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Metaspace("▁", prepend_scheme="never"),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([UNKNOWN, END])
    return tokenizer.to_str()


def unigram_model(texts: Iterable[str], wanted: str, instead: str, **options: Any) -> bytes:
    """Train a sentencepiece model on one thread.

    wanted, instead: what fails and what to set, for the message. Raises DataError.
    """
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            hard_vocab_limit=False,
            num_threads=1,
            bos_id=-1,
            eos_id=-1,
            normalization_rule_name="identity",
            minloglevel=2,
            **options,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise DataError(
            f"sentencepiece cannot build {wanted}: {error}; set another {instead}"
        ) from None
    return model.getvalue()


def load_sentencepiece(model: bytes):
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_proto=model)


def lowercased(tokenizer, lowercase: bool):
    from tokenizers import normalizers

    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def check_size(size: int, least: int, what: str) -> None:
    if size < least:
        raise DataError(f"task.vocabulary_size={size}: expected at least {least}, for {what}")


# ---- symbols of speech recognition -----------------------------------------------------------------------------------

LETTERS = " 'ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # of LibriSpeech transcripts
SymbolKind = Literal["characters", "words", "pieces"]


def split_text(text: str, kind: SymbolKind) -> Sequence[str]:
    """Characters or words of a transcript.

    >>> split_text("A CAB", "words")
    ['A', 'CAB']
    """
    return text.split() if kind == "words" else text


@dataclass(frozen=True)
class Symbols:
    """Output vocabulary of a speech recogniser.

    pieces: serialised sentencepiece model; `entries` then holds its pieces.
    """

    kind: SymbolKind
    entries: tuple[str, ...]
    pieces: bytes = b""

    @classmethod
    def from_texts(cls, kind: SymbolKind, texts: Sequence[str], size: int) -> "Symbols":
        """Vocabulary of transcripts: characters, words, or at most `size` pieces."""
        if kind == "pieces":
            model = unigram_model(
                texts,
                f"{size} pieces",
                "task.pieces, or task.symbols=characters",
                vocab_size=size,
                character_coverage=1.0,
            )
            return cls.from_pieces(model)
        symbols: set[str] = set()
        for text in texts:
            symbols.update(split_text(text, kind))
        return cls(kind, tuple(sorted(symbols)))

    @classmethod
    def from_pieces(cls, model: bytes) -> "Symbols":
        """Vocabulary of a serialised sentencepiece model."""
        processor = load_sentencepiece(model)
        pieces = (processor.id_to_piece(i) for i in range(processor.get_piece_size()))
        return cls("pieces", tuple(pieces), model)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Id of each entry."""
        return {entry: number for number, entry in enumerate(self.entries)}

    @cached_property
    def processor(self) -> Any:
        return load_sentencepiece(self.pieces)

    def __len__(self) -> int:
        return len(self.entries)

    def encode(self, text: str) -> list[int]:
        """Ids of a string; raises DataError for a symbol outside the vocabulary."""
        if self.kind == "pieces":
            parts = self.processor.encode(text, out_type=str)
        else:
            parts = split_text(text, self.kind)
        for part in parts:
            if part not in self.numbers:
                raise DataError(f"{part!r} is not in the vocabulary of {len(self)} {self.kind}")
        return [self.numbers[part] for part in parts]

    def decode(self, numbers: Sequence[int]) -> str:
        if self.kind == "pieces":
            return self.processor.decode(list(numbers))
        blank = "" if self.kind == "characters" else " "
        text = blank.join(self.entries[number] for number in numbers)
        return " ".join(text.split())
