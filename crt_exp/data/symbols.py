"""What a recogniser writes: characters, words, or pieces of words, as numbers from 0 on; blank comes after the last."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from crt_exp.data.cache import cached, key_of, warn
from crt_exp.data.vocabularies import loaded, unigram_model

ALPHABET = " 'ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # LibriSpeech's
Kind = Literal["characters", "words", "pieces"]


class UnknownSymbol(ValueError):
    """A text that holds what the vocabulary does not; the message names it."""


@dataclass(frozen=True)
class Symbols:
    """The vocabulary; `pieces` keeps a model of sentencepiece, `entries` its pieces."""

    kind: Kind
    entries: tuple[str, ...]
    pieces: bytes = b""

    @classmethod
    def of(cls, kind: Kind, texts: Iterable[str], size: int, cache_dir: str | Path | None = None) -> "Symbols":
        """Those of the texts: all their characters or words, or `size` pieces, fewer where the texts have no more."""
        if kind == "pieces":
            made = cls.of_pieces(trained(list(texts), size, cache_dir))
            if len(made) < size:
                warn("these transcripts give %s pieces, fewer than the %s that were asked for", len(made), size)
            return made
        symbols = {part for text in texts for part in (text if kind == "characters" else text.split())}
        return cls(kind, tuple(sorted(symbols)))

    @classmethod
    def of_pieces(cls, model: bytes) -> "Symbols":
        processor = loaded(model)
        return cls("pieces", tuple(processor.id_to_piece(i) for i in range(processor.get_piece_size())), model)

    def __post_init__(self):
        object.__setattr__(self, "numbers", {entry: i for i, entry in enumerate(self.entries)})
        object.__setattr__(self, "processor", loaded(self.pieces) if self.kind == "pieces" else None)

    def __len__(self) -> int:
        return len(self.entries)

    def encode(self, text: str) -> list[int]:
        """Raises UnknownSymbol."""
        if self.processor is not None:
            return self.known(self.processor.encode(text), text)
        parts = text if self.kind == "characters" else text.split()
        if unknown := next((part for part in parts if part not in self.numbers), None):
            raise UnknownSymbol(f"{unknown!r} is not among the {len(self)} {self.kind} of the vocabulary")
        return [self.numbers[part] for part in parts]

    def known(self, numbers: list[int], text: str) -> list[int]:
        if self.processor.unk_id() in numbers:
            alphabet = {character for entry in self.entries for character in entry}
            unknown = next((c for c in text if c not in alphabet and c != " "), text)
            raise UnknownSymbol(f"{unknown!r} is in none of the {len(self)} pieces of the vocabulary")
        return numbers

    def decode(self, numbers: Sequence[int]) -> str:
        if self.processor is not None:
            return self.processor.decode(list(numbers))
        return " ".join(("" if self.kind == "characters" else " ").join(self.entries[i] for i in numbers).split())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Symbols) and self.content() == other.content()

    def __hash__(self) -> int:
        return hash(self.content())

    def content(self) -> tuple:
        return self.kind, self.entries, self.pieces


def trained(texts: list[str], size: int, cache_dir: str | Path | None) -> bytes:
    """A unigram model of sentencepiece, kept in `cache_dir` by its texts. Raises DataError for a size too small."""
    def model() -> dict[str, np.ndarray]:
        made = unigram_model(texts, f"{size} pieces of these {len(texts)} transcripts",
                             "task.pieces, or task.symbols=characters", vocab_size=size, character_coverage=1.0)
        return {"model": np.frombuffer(made, np.uint8)}

    return cached(cache_dir, key_of("sentencepiece 1", size, *texts), model)["model"].tobytes()
