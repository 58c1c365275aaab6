"""What tasks on the sequence model share: options of the model, weights of a run, next or masked symbols, metrics.

Legend: B rows of a batch, L tokens of the longest, n predicted tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.config import ConfigError
from crt_exp.data.text import IGNORED
from crt_exp.options import Whole
from crt_exp.mechanism import Mechanism
from crt_exp.models import language
from crt_exp.models.language import PRESETS, LanguageDescription, Dropout, LanguageModel, Positions
from crt_exp.swap.calibration import fill_statistics, learns
from crt_exp.tasks.base import Batch, Plan, Reader, Task

Share = Annotated[float, Field(gt=0, lt=1)]


@dataclass(eq=False)
class SequenceTask(Task):
    """Options of the model; `conf/task/trembl.yaml` explains them."""

    preset: Literal[*PRESETS] | None
    sizes: dict[str, Any]
    positions: Positions | None
    dropout: Dropout
    checkpointing: bool

    # the option that says how many tokens the longest row has
    length_option = "max_length"

    def new_description(self, symbols: int, length: int, causal: bool, tied: bool = True) -> LanguageDescription:
        sizes = language.sizes_of(self.preset or "tiny", self.sizes, "task.sizes")
        return LanguageDescription(symbols, length, sizes, causal, self.positions or "learned", tied, self.dropout)


@dataclass(eq=False)
class SymbolTask(SequenceTask):
    """Symbols that are predicted from others, with the weights of a run or new ones. Subclasses have `causal`, and
    `predictable`, the number of symbols whose predictions count, which are the first ones."""

    tied: bool | None
    init: str
    calibration: Whole

    metric, lower_is_better = "perplexity", True
    counted = "tokens"                                       # what the metrics call the symbols that they count
    ours = ""                                                # such as "a run of task=trembl", for messages

    def load(self) -> None:
        """What task.init keeps. Raises DataError."""
        self.kept = None if self.init == "scratch" else language.load(self.init, "task.init")

    def describe(self, symbols: int, length: int, vocabulary: Mapping[str, Any]) -> None:
        """The model of task.init, which the options may not contradict, or a new one. vocabulary: what is kept with it,
        as JSON. Raises ConfigError."""
        self.vocabulary = dict(vocabulary)
        if self.kept is None:
            tied = True if self.tied is None else self.tied
            self.description = self.new_description(symbols, length, self.causal, tied)
        else:
            self.description = self.kept_description(length)

    def kept_description(self, length: int) -> LanguageDescription:
        theirs = self.kept.description
        if self.kept.symbols != self.vocabulary:
            raise ConfigError(f"task.init = {self.init} was trained on other symbols: give {self.ours}")
        wanted = {"direction": (self.causal, theirs.causal), "positions": (self.positions, theirs.positions),
                  "tied": (self.tied, theirs.tied), "preset": (self.preset and self.given_sizes(theirs), theirs.sizes),
                  "sizes": (self.sizes and self.given_sizes(theirs), theirs.sizes)}
        for key, (given, kept) in wanted.items():
            if given not in (None, {}, kept):
                raise ConfigError(f"task.{key} is not that of task.init = {self.init}"
                                  + ("" if key == "direction" else f", which has {kept}: leave it out"))
        if theirs.positions == "learned" and length > theirs.length:
            raise ConfigError(f"task.{self.length_option} = {getattr(self, self.length_option)}: task.init = "
                              f"{self.init} has positions for {theirs.length}")
        return replace(theirs, dropout=self.dropout)

    def given_sizes(self, theirs: LanguageDescription) -> dict[str, int]:
        preset = dict(theirs.sizes) if self.preset is None else {}
        return preset | dict(self.sizes) if preset else language.sizes_of(self.preset, self.sizes, "task.sizes")

    # ---- model

    def build(self, mechanism: Mechanism) -> nn.Module:
        self.mechanism = mechanism
        model = LanguageModel(self.description, mechanism.layer, self.checkpointing)
        if self.kept is not None and not language.fill(model, self.kept, mechanism):
            self.calibrate(model)
        return model

    def calibrate(self, model: nn.Module) -> None:
        """Fills the statistics that causal features are fitted to: the weights come from another attention."""
        if learns(model):
            batches = zip(range(self.calibration), self.batches("train", Plan(8)))
            read = [{key: batch[key] for key in batch if key != "labels"} for _, batch in batches]
            if read:
                fill_statistics(model, read)

    def predicted(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits (n, V) in float32 and tokens (n,) of the places that are to be predicted."""
        chosen = batch["labels"] != IGNORED
        logits = model(**{key: part for key, part in batch.items() if key != "labels"}, chosen=chosen)
        return logits.float(), batch["labels"][chosen]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over what is to be predicted; 0 where that is nothing."""
        logits, labels = self.predicted(model, batch)
        return F.cross_entropy(logits, labels, reduction="sum") / max(1, len(labels))

    def weight(self, batch: Batch) -> Tensor:
        return (batch["labels"] != IGNORED).sum()

    # ---- metrics

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> dict[str, float]:
        return self.metrics(model, split, reader)

    @torch.no_grad()
    def metrics(self, model: nn.Module, split: str, reader: Reader) -> dict[str, float]:
        """Over predictable symbols: loss in nats, its exponential, the share that is right; the same of the unigram."""
        unigram = torch.from_numpy(self.unigram)
        loss = right = count = base = base_right = 0
        for batch in reader.batches(split):
            logits, labels = self.predicted(model, batch)
            counted = labels < self.predictable
            loss += float(F.cross_entropy(logits, labels, reduction="none")[counted].double().sum())
            labels, answers = labels[counted], logits[counted].argmax(-1)
            right, count = right + int((answers == labels).sum()), count + len(labels)
            base -= float(unigram[labels.cpu()].log().sum())
            base_right += int((labels == int(unigram.argmax())).sum())
        loss, right, count, base, base_right = reader.sum(loss, right, count, base, base_right)
        return {"loss": loss / count, "perplexity": exp(loss / count), "accuracy": right / count, self.counted: count,
                "unigram_loss": base / count, "unigram_perplexity": exp(base / count),
                "unigram_accuracy": base_right / count}

    @property
    def unigram(self) -> np.ndarray:
        """The share of each predictable symbol in the training rows, of which each is there once more."""
        raise NotImplementedError

    def export(self, model: nn.Module, tensors: dict[str, Tensor], directory: Path) -> None:
        language.keep(self.description, self.mechanism, self.vocabulary, tensors, directory)


def exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
