"""Language models of long documents or single sentences (Performers Fig. 5).

Models predict next or masked tokens. Rows are documents packed into a fixed length, or single lines. Perplexity per
word is exp(loss x tokens per word), as in Performers A.1.1.
Notation: B rows of a batch, L tokens of a row.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from torch import nn

from crt_exp.experiments.data import DataError
from crt_exp.experiments.data.corpora import Rows, TokenText
from crt_exp.experiments.data.plan import bucketed, token_batch
from crt_exp.experiments.data.sources import stand_in
from crt_exp.experiments.data.text import Masking, flag_table, split_files
from crt_exp.experiments.data.vocabularies import fast_tokenizer, new_tokenizer
from crt_exp.experiments.tasks.base import Batch, Metrics, Plan, Reader, exp, task_class
from crt_exp.experiments.tasks.sequences import SymbolTask
from crt_exp.registry import ConfigError
from crt_exp.validation import Count, FileName

HELD_OUT = 0.05  # share of the text for validation, and again for test, if they have no text


@task_class
class Books(SymbolTask):
    """Language model of documents; see `conf/task/books.yaml` for the options.

    Raises:
        DataError: a text is missing or empty.
        ConfigError: options contradict each other.
    """

    text: FileName | list[FileName] | None
    validation_text: FileName | list[FileName] | None
    test_text: FileName | list[FileName] | None
    data_dir: str | None
    rows: Literal["packed", "apart"]
    vocabulary: Literal["byte_pairs", "sentencepiece"]
    vocabulary_size: Count
    evaluated: Count | None
    max_length: Annotated[int, Field(ge=2)]
    cache_dir: str | None
    direction: Literal["unidirectional", "bidirectional"] = "unidirectional"

    compatible_runs = "a run of task=books with the same tokenizer"
    reported = ("word_perplexity", "unigram_word_perplexity")

    def __post_init__(self):
        if self.text is None:
            self.stand_in = stand_in("books", "WikiText-2", "text=DIR", "pg19")
        self.causal = self.direction == "unidirectional"
        apart = self.rows == "apart"
        files = self.files()
        if self.saved is not None and "tokenizer" in self.saved.symbols:
            tokenizer = fast_tokenizer(self.saved.symbols["tokenizer"])
            self.end = self.saved.symbols["end"]
        else:
            tokenizer = new_tokenizer(
                self.vocabulary, files["train"], self.vocabulary_size, False, self.cache_dir
            )
            self.end = tokenizer.eos_token_id
        self.predictable = max(tokenizer.get_vocab().values()) + 1
        mask = {} if self.causal else {"mask": self.predictable}  # one more symbol
        self.describe(
            self.predictable + len(mask),
            self.max_length,
            {"tokenizer": tokenizer.backend_tokenizer.to_str(), "end": self.end} | mask,
        )
        texts = {}
        for split, own in files.items():
            texts[split] = TokenText.read(own, tokenizer, self.end, apart, self.cache_dir)
        if len(texts) == 1:
            texts = texts["train"].held_out(HELD_OUT, apart)
        self.data = {}
        self.splits = {}
        for split, text in texts.items():
            whole = split != "train"
            if apart:
                data = Rows.of_lines(text, self.max_length, self.end)
            else:
                data = Rows.packed(text, self.max_length, self.end, whole)
            count = len(data)
            if not count:
                raise DataError(
                    f"task.max_length={self.max_length}: {split} has only {len(text.tokens)} tokens; "
                    "use a longer text, or a smaller value"
                )
            if whole and self.evaluated is not None:
                count = min(count, self.evaluated)
            self.data[split] = data
            self.splits[split] = np.linspace(0, len(data) - 1, count).round().astype(np.int64)

    # ---- text

    def files(self) -> dict[str, list[Path]]:
        """Files of each split; only "train" if the other splits are held out of it."""
        if (self.validation_text is None) != (self.test_text is None):
            raise ConfigError("task.validation_text, task.test_text: set both or neither")
        named = {"train": self.text, "validation": self.validation_text, "test": self.test_text}
        return split_files(named, self.data_dir)

    def inputs(self) -> list[Path]:
        return list(chain.from_iterable(self.files().values()))

    # ---- rows

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        data = self.data[split]
        places = self.splits[split]
        if split == "train" and self.rows == "apart":
            batches = bucketed(data.lengths, plan)
        else:
            batches = plan.rows(len(places), split)
        for numbers in batches:
            tokens = []
            labels = []
            for i in numbers:
                inputs, targets = data[places[i]]
                if not self.causal:
                    inputs, targets = self.masking.mask_row(targets, plan.rng(i))
                tokens.append(inputs)
                labels.append(targets)
            yield token_batch(tokens, self.end, labels)

    @cached_property
    def masking(self) -> Masking:
        """BERT's masking; end tokens are never masked, random tokens are never the mask."""
        special = flag_table(self.predictable + 1, [self.end, self.predictable])
        return Masking(self.predictable, special, self.predictable)

    # ---- metrics

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> Metrics:
        metrics = super().evaluate(model, split, reader)
        ratio = self.data[split].tokens_per_word(self.splits[split])
        return metrics | {
            "word_perplexity": exp(metrics["loss"] * ratio),
            "tokens_per_word": ratio,
            "unigram_word_perplexity": exp(math.log(metrics["unigram_perplexity"]) * ratio),
        }

    def counts(self) -> np.ndarray:
        return self.data["train"].text.counts(self.predictable)
