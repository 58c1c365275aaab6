"""Base classes of tasks on the sequence model, and task=recall.

`SequenceTask` holds the options of the model. `SymbolTask` adds initial weights, loss and metrics for next or masked
symbols.

task=recall is multi-query associative recall (Arora et al., 2023). A row has P key-value pairs among noise, followed by
Q queries for the values of keys. With one pair it is a needle-in-a-haystack test. Attention that cannot retrieve single
keys fails here, however well it models text.
Notation: B rows of a batch, L tokens of a row, n predicted tokens, V symbols.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.experiments.data.text import IGNORED
from crt_exp.experiments.models import language
from crt_exp.experiments.models.language import (
    PRESETS,
    LanguageDescription,
    LanguageModel,
    Positions,
)
from crt_exp.experiments.tasks.base import (
    Batch,
    Metrics,
    Plan,
    Reader,
    Task,
    Tensors,
    exp,
    smoothed,
    task_class,
)
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError
from crt_exp.validation import Count, Files, Rate, Whole

Share = Annotated[float, Field(gt=0, lt=1)]
SPLITS = {"train": 0, "validation": 1, "test": 2}
NOISE = 64  # noise symbols of task=recall
WIDTH = 128  # default width of new models of task=recall


@dataclass(eq=False)
class SequenceTask(Task):
    """Options of the sequence model; `conf/task/trembl.yaml` explains them."""

    preset: Literal[*PRESETS] | None
    sizes: dict[str, Any]
    positions: Positions | None
    dropout: Rate
    checkpointing: bool

    # name of the option that sets the length of the longest row
    length_option = "max_length"
    # whether new models share the weights of input and output embeddings
    tied = True

    def new_description(self, symbols: int, length: int, causal: bool) -> LanguageDescription:
        sizes = language.sizes_of(self.preset or "tiny", self.sizes, "task.sizes")
        positions = self.positions or "learned"
        return LanguageDescription(
            symbols, length, sizes, causal, positions, self.tied, self.dropout
        )


@dataclass(eq=False)
class SymbolTask(SequenceTask):
    """Prediction of next or masked symbols, with new weights or those of a run.

    Subclasses define these attributes:

    Attributes:
        causal: whether symbols are predicted from earlier symbols alone.
        predictable: number of symbols whose predictions count; these symbols have the first ids.
    """

    init: Annotated[str, Files(("scratch",))]
    calibration: Whole

    metric = "perplexity"
    lower_is_better = True
    reported = ("unigram_perplexity", "accuracy")
    counted = "tokens"  # name of the number of symbols in the metrics
    compatible_runs = ""  # compatible runs, for messages: "a run of task=trembl"

    @cached_property
    def saved(self) -> language.SavedLanguageModel | None:
        """The model of task.init; raises DataError."""
        return None if self.init == "scratch" else language.load(self.init, "task.init")

    def describe(self, symbols: int, length: int, vocabulary: Mapping[str, Any]) -> None:
        """Set the model description from task.init, or from the options.

        vocabulary: saved with the model, as JSON. Raises ConfigError if options contradict the model of task.init.
        """
        self.vocabulary = dict(vocabulary)
        if self.saved is None:
            self.description = self.new_description(symbols, length, self.causal)
        else:
            self.description = self.saved_description(length)

    def saved_description(self, length: int) -> LanguageDescription:
        theirs = self.saved.description
        if self.saved.symbols != self.vocabulary:
            raise ConfigError(
                f"task.init={self.init}: trained with other symbols; expected {self.compatible_runs}"
            )
        sizes = (
            language.sizes_of(self.preset, self.sizes, "task.sizes")
            if self.preset
            else theirs.sizes | dict(self.sizes)
        )
        same = {
            "direction": self.causal == theirs.causal,
            "positions": self.positions in (None, theirs.positions),
            "preset and task.sizes": sizes == theirs.sizes,
        }
        if wrong := next((key for key, right in same.items() if not right), None):
            raise ConfigError(f"task.{wrong}: differs from task.init={self.init}; remove it")
        if theirs.positions == "learned" and length > theirs.length:
            raise ConfigError(
                f"task.{self.length_option}: rows of {length} symbols; expected at most the "
                f"{theirs.length} positions of task.init={self.init}"
            )
        return replace(theirs, dropout=self.dropout)

    # ---- model

    def build(self, mechanism: Mechanism) -> nn.Module:
        self.mechanism = mechanism
        model = LanguageModel(self.description, mechanism.layer, self.checkpointing)
        if self.saved is not None and not language.load_weights(model, self.saved, mechanism):
            self.calibrate(model)
        return model

    def predicted(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits (n, V) in float32 and labels (n,) at the predicted positions."""
        chosen = batch["labels"] != IGNORED
        logits = model(**self.model_inputs(batch), chosen=chosen)
        return logits.float(), batch["labels"][chosen]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy over predicted positions; 0 if there are none."""
        logits, labels = self.predicted(model, batch)
        return F.cross_entropy(logits, labels, reduction="sum") / max(1, len(labels))

    def weight(self, batch: Batch) -> Tensor:
        return (batch["labels"] != IGNORED).sum()

    # ---- metrics

    @abstractmethod
    def counts(self) -> np.ndarray:
        """Counts of the predictable symbols in training rows, (predictable,)."""

    @cached_property
    def unigram(self) -> np.ndarray:
        return smoothed(self.counts())

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> Metrics:
        """Loss in nats, perplexity and accuracy over predictable symbols.

        `unigram_...` are the metrics of the unigram baseline.
        """
        unigram = torch.from_numpy(self.unigram)
        most_frequent = int(unigram.argmax())

        def measure(batch: Batch) -> dict[str, Any]:
            logits, labels = self.predicted(model, batch)
            counted = labels < self.predictable
            losses = F.cross_entropy(logits, labels, reduction="none")[counted]
            labels = labels[counted]
            return {
                "loss": losses.double().sum(),
                "accuracy": (logits[counted].argmax(-1) == labels).sum(),
                "unigram_loss": -unigram[labels.cpu()].log().sum(),
                "unigram_accuracy": (labels == most_frequent).sum(),
                "count": len(labels),
            }

        means = reader.means(split, measure, self.counted)
        return means | {
            "perplexity": exp(means["loss"]),
            "unigram_perplexity": exp(means["unigram_loss"]),
        }

    def export(self, model: nn.Module, tensors: Tensors, directory: Path) -> None:
        language.save_model(self.description, self.mechanism, self.vocabulary, tensors, directory)


# ---- task=recall


@task_class
class Recall(SymbolTask):
    """Associative recall; see `conf/task/recall.yaml` for the options.

    Raises ConfigError if options contradict each other.
    """

    block: Annotated[int, Field(ge=8)]
    pairs: Count
    queries: Count | None
    symbols: Count
    rows: Count
    evaluated: Count

    metric = "accuracy"
    lower_is_better = False
    reported = ()
    counted = "queries"
    causal = True
    length_option = "block"
    tied = False
    compatible_runs = "a run of task=recall of as many symbols"

    def __post_init__(self):
        self.predictable = self.symbols
        self.asked = self.pairs if self.queries is None else self.queries
        if self.pairs > self.symbols:
            raise ConfigError(
                f"task.pairs={self.pairs}: expected at most task.symbols={self.symbols}"
            )
        if 2 * (self.pairs + self.asked) > self.block:
            raise ConfigError(
                f"task.block={self.block}: expected at least {2 * (self.pairs + self.asked)}, for "
                f"{self.pairs} pairs and {self.asked} queries"
            )
        if self.saved is None and self.preset is None:
            self.sizes = {"d": WIDTH} | dict(self.sizes)
        self.describe(
            2 * self.symbols + NOISE, self.block, {"values": self.symbols, "noise": NOISE}
        )

    # ---- rows

    def length(self, split: str) -> int:
        return self.rows if split == "train" else self.evaluated

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        for chosen in plan.rows(self.length(split), split):
            tokens, labels = zip(*[self.row(split, i) for i in chosen])
            yield {
                "tokens": torch.from_numpy(np.stack(tokens)),
                "labels": torch.from_numpy(np.stack(labels)),
            }

    def row(self, split: str, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels (L,) of row i.

        The first symbols are values, then come keys, then noise.
        """
        rng = np.random.default_rng([SPLITS[split], self.block, self.pairs, i])
        n = self.symbols
        tokens = rng.integers(2 * n, 2 * n + NOISE, self.block)
        labels = np.full(self.block, IGNORED)
        keys = n + rng.permutation(n)[: self.pairs]
        values = rng.integers(0, n, self.pairs)
        asked = rng.integers(0, self.pairs, self.asked)
        slots = self.block // 2  # of two tokens
        pair_slots = slots * self.pairs // (self.pairs + self.asked)  # those before queries
        places = 2 * rng.permutation(pair_slots)[: self.pairs]
        later = 2 * (pair_slots + rng.permutation(slots - pair_slots)[: self.asked])
        tokens[places] = keys
        tokens[places + 1] = values
        tokens[later] = keys[asked]
        tokens[later + 1] = values[asked]
        labels[later] = values[asked]
        return tokens, labels

    # ---- metrics

    def counts(self) -> np.ndarray:
        return np.zeros(self.symbols)
