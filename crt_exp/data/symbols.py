"""What a recogniser writes: characters, words, or pieces of words, as numbers from 0 on; blank comes after the last."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from crt_exp.data import DataError
from crt_exp.data.vocabularies import loaded, unigram_model

ALPHABET = " 'ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # LibriSpeech's
Kind = Literal["characters", "words", "pieces"]


@dataclass(frozen=True)
class Symbols:
    """The vocabulary; `pieces` keeps a model of sentencepiece, `entries` its pieces."""

    kind: Kind
    entries: tuple[str, ...]
    pieces: bytes = b""

    @classmethod
    def of(cls, kind: Kind, texts: Sequence[str], size: int) -> "Symbols":
        """Those of the texts: all their characters or words, or `size` pieces, fewer where the texts have no more."""
        if kind == "pieces":
            return cls.of_pieces(unigram_model(texts, f"{size} pieces", "task.pieces, or task.symbols=characters",
                                               vocab_size=size, character_coverage=1.0))
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
        """Raises DataError for a symbol that the vocabulary does not hold."""
        if self.processor is not None:
            parts = self.processor.encode(text, out_type=str)
        else:
            parts = text if self.kind == "characters" else text.split()
        if unknown := next((part for part in parts if part not in self.numbers), None):
            raise DataError(f"{unknown!r} is not among the {len(self)} {self.kind} of the vocabulary")
        return [self.numbers[part] for part in parts]

    def decode(self, numbers: Sequence[int]) -> str:
        if self.processor is not None:
            return self.processor.decode(list(numbers))
        return " ".join(("" if self.kind == "characters" else " ").join(self.entries[i] for i in numbers).split())
