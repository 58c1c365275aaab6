"""Language models of long texts: next or masked tokens of documents packed into rows, or of sentences apart (Performers
Fig. 5).

Perplexity per word is exp(loss x tokens of a word), as Performers A.1.1 has it. At the test documents are also read
beyond the length of a training row, with what the attention remembers. Legend: B rows of a batch, L tokens of a row, V.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, TypedDict

import numpy as np
import torch
from pydantic import Field
from torch import nn

from crt_exp.config import ConfigError
from crt_exp.data import DataError, books
from crt_exp.data.sources import no_folder
from crt_exp.data.books import Apart, PackedRows, LineSource, TokenText, piece, tokens_per_word
from crt_exp.data.byte_pairs import byte_pairs
from crt_exp.data.glue import bucketed
from crt_exp.data.hub import Hub
from crt_exp.data.rows import masked, padded
from crt_exp.data.sentence_pieces import sentence_pieces
from crt_exp.data.text import IGNORED, Masking, fast_tokenizer, official_file, table
from crt_exp.options import Count, Whole, checked
from crt_exp.models import encoders
from crt_exp.models.carried import carried_losses
from crt_exp.tasks.base import Batch, Plan, Reader
from crt_exp.tasks.sequences import Share, SymbolTask, exp

NAMES = {"train": "train", "validation": "valid", "test": "test"}


class BooksHub(Hub):
    """The first `documents` of its splits are read."""

    splits: Sequence[str]
    column: str
    documents: Count


class Carried(TypedDict):
    """Pieces of the test text, `times` L tokens each, that are read chunk by chunk; 0: none."""

    times: Whole
    pieces: Count
    chunk: Count


@checked("task")
@dataclass(eq=False)
class Books(SymbolTask):
    """See `conf/task/books.yaml` for the options.

    Raises DataError for texts that are missing or empty, ConfigError for options that do not go together.
    """

    text: str | list[str] | None
    validation_text: str | list[str] | None
    test_text: str | list[str] | None
    data_dir: str | None
    hub: BooksHub
    rows: Literal["packed", "apart"]
    held_out: Annotated[float, Field(gt=0, lt=0.5)]
    tokenizer: str | None
    vocabulary: Literal["byte_pairs", "sentencepiece"]
    vocabulary_size: Count
    lowercase: bool
    evaluated: Count | None
    max_length: Annotated[int, Field(ge=2)]
    carried: Carried
    cache_dir: str | None
    direction: Literal["unidirectional", "bidirectional"] = "unidirectional"
    share: Share = 0.15

    ours = "a run of task=books with the same tokenizer (task.tokenizer=null takes that of the run)"

    def __post_init__(self):
        self.causal = self.direction == "unidirectional"
        self.check_direction()
        self.load()
        sources = self.sources()
        tokenizer = self.made_tokenizer(sources["train"])
        self.end = self.end_of(tokenizer)
        self.predictable = max(tokenizer.get_vocab().values()) + 1
        mask = {} if self.causal else {"mask": self.predictable}   # one symbol more
        self.describe(self.predictable + len(mask), self.max_length,
                      {"tokenizer": tokenizer.backend_tokenizer.to_str(), "end": self.end} | mask)
        if self.carried["times"] > 1 and self.description.positions == "learned":
            raise ConfigError(f"task.carried.times = {self.carried['times']} reads beyond task.max_length, where "
                              "learned positions end: choose task.positions=rotary or none, or task.carried.times=0")
        self.texts = self.read(sources, tokenizer)
        self.data = {split: self.in_rows(split, text) for split, text in self.texts.items()}
        self.check_filled()
        self.places = {split: self.some(len(data), split) for split, data in self.data.items()}

    def check_direction(self) -> None:
        if not self.causal and self.carried["times"]:
            raise ConfigError(f"task.carried.times = {self.carried['times']}: a bidirectional model reads no text on "
                              "beyond a row; add task.carried.times=0")

    # ---- text

    def sources(self) -> dict[str, LineSource]:
        """Those of the splits; of the training split alone where the others are held out of it."""
        if self.hub["name"] is not None and self.text is not None:
            raise ConfigError("task.text and task.hub.name both name a text: leave one of them out")
        if (self.validation_text is None) != (self.test_text is None):
            raise ConfigError("task.validation_text and task.test_text go together: give both, or none")
        if self.hub["name"] is not None or self.text is not None:
            no_folder(self.data_dir, "task.hub.name" if self.text is None else "task.text")
        if self.hub["name"] is not None:
            return {split: LineSource((), self.hub, name) for split, name in zip(NAMES, self.hub["splits"])}
        if self.text is None:
            return {split: LineSource([official_file("wikitext2", name, self.data_dir)])
                    for split, name in NAMES.items()}
        given = {"train": self.text, "validation": self.validation_text, "test": self.test_text}
        return {split: books.files_of(paths) for split, paths in given.items() if paths is not None}

    def inputs(self) -> list[Path]:
        return [file for source in self.sources().values() for file in source.files]

    def made_tokenizer(self, source: LineSource):
        """That of task.tokenizer, of task.init, or one made from the training text."""
        if self.tokenizer is not None:
            return encoders.load_tokenizer(encoders.Origin(self.tokenizer, "task.tokenizer", False, False))
        if self.kept is not None and "tokenizer" in self.kept.symbols:
            return saved_tokenizer(self.kept.symbols)
        make = byte_pairs if self.vocabulary == "byte_pairs" else sentence_pieces
        with source.as_files() as files:
            return make(files, self.vocabulary_size, self.lowercase, self.cache_dir)

    def end_of(self, tokenizer) -> int:
        if tokenizer.eos_token_id is None or not getattr(tokenizer, "is_fast", False):
            raise DataError(f"task.tokenizer = {self.tokenizer}: a fast tokenizer with a token for the end of a text "
                            "(eos_token) is needed, such as openai-community/gpt2")
        return tokenizer.eos_token_id

    def read(self, sources: dict[str, LineSource], tokenizer) -> dict[str, TokenText]:
        apart = self.rows == "apart"
        texts = {split: books.read(source, tokenizer, self.end, apart, self.cache_dir)
                 for split, source in sources.items()}
        return texts if len(texts) > 1 else texts["train"].held_out(self.held_out, apart)

    def in_rows(self, split: str, text: TokenText) -> PackedRows | Apart:
        """Of all tokens, but for the last ones of training."""
        if self.rows == "apart":
            return Apart(text, self.max_length, self.end)
        return PackedRows(text, self.max_length, self.end, whole=split != "train")

    def check_filled(self) -> None:
        for split, data in self.data.items():
            if not len(data):
                raise DataError(f"the {len(data.text.tokens)} tokens of {split} fill no row of task.max_length = "
                                f"{self.max_length}: give more text, or shorter rows")

    # ---- rows

    def some(self, rows: int, split: str) -> np.ndarray:
        few = rows if split == "train" or self.evaluated is None else min(rows, self.evaluated)
        return np.linspace(0, rows - 1, few).round().astype(np.int64)

    def length(self, split: str) -> int:
        return len(self.places[split])

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        data = self.data[split]
        numbers = bucketed(data.lengths, plan) if self.by_length(split) else plan.rows(self.length(split), split)
        for chosen in numbers:
            rows = [data[self.places[split][i]] for i in chosen]
            pairs = rows if self.causal else [self.corrupted(row, plan.rng(i)) for i, row in zip(chosen, rows)]
            tokens, labels = zip(*pairs)
            yield masked(padded(tokens, self.end), list(map(len, tokens))) | {"labels": padded(labels, IGNORED)}

    def corrupted(self, row: books.PackedRow, rng: np.random.Generator) -> books.PackedRow:
        """BERT's corruption of the tokens that a row of next tokens would predict."""
        ids = row.labels[None].astype(np.int64)
        result = self.masking(ids, rng.random((3, *ids.shape)))
        return books.PackedRow(result["input_ids"][0].numpy(), result["labels"][0].numpy())

    @cached_property
    def masking(self) -> Masking:
        """The end of a text is never masked, and no random token is the mask."""
        symbols = self.predictable + 1
        return Masking(self.predictable, table(symbols, [self.end, self.predictable]), np.zeros(symbols, bool),
                       self.share, self.predictable)

    def by_length(self, split: str) -> bool:
        return split == "train" and self.rows == "apart"

    # ---- metrics

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> dict[str, float]:
        metrics = self.metrics(model, split, reader)
        ratio = tokens_per_word(self.data[split], self.places[split])
        metrics |= {"word_perplexity": exp(metrics["loss"] * ratio), "tokens_per_word": ratio,
                  "unigram_word_perplexity": exp(math.log(metrics["unigram_perplexity"]) * ratio)}
        return metrics | self.carried_on(model, reader) if split == "test" and self.carried["times"] else metrics

    @cached_property
    def unigram(self) -> np.ndarray:
        counts = self.texts["train"].counts(self.predictable) + 1.0
        return counts / counts.sum()

    def carried_on(self, model: nn.Module, reader: Reader) -> dict[str, float]:
        """The mean loss of the tokens of the first, second, ... length of a training row, in pieces of the test text
        that are read from their beginning on; attention that keeps keys keeps those of one length."""
        L, times, text = self.max_length, self.carried["times"], self.texts["test"]
        starts = range(0, len(text.tokens) - times * L + 1, times * L)[:self.carried["pieces"]]
        if not starts:
            raise DataError(f"the test text has {len(text.tokens)} tokens, and task.carried.times = {times} asks for "
                            f"pieces of {times * L}: give more text, or fewer times")
        sums, count = torch.zeros(times, dtype=torch.float64), 0
        for start in starts[reader.plan.rank::reader.plan.world]:
            losses = self.piece_losses(model, piece(text, start, start + times * L, self.end), reader.device)
            sums, count = sums + losses.view(times, L).mean(1), count + 1
        *sums, count = reader.sum(*sums, count)
        return {f"loss_at_{i}": total / count for i, total in enumerate(sums, 1)}

    def piece_losses(self, model: nn.Module, row: books.PackedRow, device: torch.device) -> torch.Tensor:
        """(T,) nats, float64, on the CPU."""
        tokens, labels = (torch.from_numpy(part.astype(np.int64))[None].to(device) for part in row)
        chunk = min(self.carried["chunk"], self.max_length)
        return torch.cat([loss[0].double().cpu() for loss in carried_losses(model, tokens, labels, chunk,
                                                                            self.max_length)])

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        words, unigram = last["word_perplexity"], last["unigram_word_perplexity"]
        return (f"books: perplexity {last['perplexity']:.2f} per token, {words:,.0f} per word (unigram {unigram:,.0f}; "
                f"{last['split']}, step {last['step']})")


def saved_tokenizer(symbols: dict):
    """The tokenizer that a run keeps."""
    end = fast_tokenizer(symbols["tokenizer"]).convert_ids_to_tokens(symbols["end"])
    return fast_tokenizer(symbols["tokenizer"], eos_token=end, bos_token=end)
