"""Protein language models: next or masked letters of UniProt's sequences, with any attention (Performers 4.3, C).

Accuracy and perplexity are those of letters: of all of them (unidirectional; the end of a sequence is learned and not
counted) or of the masked ones (bidirectional). Beside them stand the unigram baseline and, for generated families, the
floor that no model can get below. Legend: B rows of a batch, L tokens of the longest, n predicted tokens.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.attention import LinearAttention
from crt_exp.config import ConfigError
from crt_exp.data import DataError, protein
from crt_exp.data.families import Families, Options
from crt_exp.data.glue import bucketed
from crt_exp.data.protein import LETTERS, Chains, Rows, Singles
from crt_exp.data.text import IGNORED
from crt_exp.mechanism import Mechanism
from crt_exp.models import language
from crt_exp.models.language import PRESETS, Description, Dropout, LanguageModel, Positions
from crt_exp.schema import Count, Whole, above, below, checked
from crt_exp.swap.swap import fill_statistics
from crt_exp.tasks.base import Batch, Plan, Reader, Task

Share = Annotated[float, above(0), below(1)]
VOCABULARY = {"letters": LETTERS, "begin": protein.BEGIN, "end": protein.END, "size": protein.TOKENS}


@checked("task")
@dataclass(eq=False)
class TrEMBL(Task):
    """See `conf/task/trembl.yaml` for the options.

    Raises DataError for files that are missing or malformed, ConfigError for options that do not go together.
    """

    dataset: Literal["generated", "uniprot"]
    data_dir: str | None
    direction: Literal["unidirectional", "bidirectional"]
    max_length: Count
    chains: bool
    longer: Literal["cut", "refuse"]
    share: Share
    validation_share: Share
    test_share: Share
    families: str | None
    held_out_families: Sequence[str] | None
    held_out_files: Sequence[str] | None
    generated: Options
    preset: Literal[*PRESETS] | None
    sizes: dict[str, Any]
    positions: Positions | None
    tied: bool | None
    dropout: Dropout
    checkpointing: bool
    init: str
    calibration: Whole
    bucketed: bool
    cache_dir: str | None

    metric, lower_is_better = "perplexity", True

    def __post_init__(self):
        self.causal = self.direction == "unidirectional"
        self.kept = None if self.init == "scratch" else language.load(self.init, "task.init")
        self.description = self.described()
        self.masking = protein.masking(self.share)
        self.made = Families.of(self.generated) if self.dataset == "generated" else None
        self.check_options()
        self.index = self.made.drawn(self.generated) if self.made else protein.uniprot(self.data_dir, self.cache_dir)
        self.rows = {split: self.rows_of(rows, split) for split, rows in self.split().items()}

    # ---- options

    def check_options(self) -> None:
        if self.validation_share + self.test_share >= 1:
            raise ConfigError(f"task.validation_share = {self.validation_share} and task.test_share = "
                              f"{self.test_share} leave nothing to train on")
        if self.made and (self.families or self.held_out_files is not None):
            raise ConfigError("task.families and task.held_out_files are for dataset=uniprot: generated families are "
                              "held out by task.generated.held_out")
        if self.held_out_families is not None and self.families is None:
            raise ConfigError("task.held_out_families needs the table of families: task.families=<file>")

    def described(self) -> Description:
        """That of task.init, which the options may not contradict, or of a new model."""
        if self.kept is None:
            sizes = language.sizes_of(self.preset or "tiny", self.sizes, "task.sizes")
            tied = True if self.tied is None else self.tied
            return Description(protein.TOKENS, self.max_length, sizes, self.causal, self.positions or "learned", tied,
                               self.dropout)
        theirs = self.kept.description
        if self.kept.symbols != VOCABULARY:
            raise ConfigError(f"task.init = {self.init} was trained on other symbols: give a run of task=trembl")
        wanted = {"direction": (self.causal, theirs.causal), "positions": (self.positions, theirs.positions),
                  "tied": (self.tied, theirs.tied), "preset": (self.preset and self.given_sizes(theirs), theirs.sizes),
                  "sizes": (self.sizes and self.given_sizes(theirs), theirs.sizes)}
        for key, (given, found) in wanted.items():
            if given not in (None, {}, found):
                raise ConfigError(f"task.{key} is not that of task.init = {self.init}"
                                  + ("" if key == "direction" else f", which has {found}: leave it out"))
        if theirs.positions == "learned" and self.max_length > theirs.length:
            raise ConfigError(f"task.max_length = {self.max_length}: task.init = {self.init} has positions for "
                              f"{theirs.length}")
        return replace(theirs, dropout=self.dropout)

    def given_sizes(self, theirs: Description) -> dict[str, int]:
        preset = dict(theirs.sizes) if self.preset is None else {}
        return preset | dict(self.sizes) if preset else language.sizes_of(self.preset, self.sizes, "task.sizes")

    # ---- data

    def split(self) -> dict[str, np.ndarray]:
        return protein.split_rows(self.index, self.held_out(), self.validation_share, self.test_share)

    def held_out(self) -> np.ndarray:
        """Which sequences are out of distribution, (n,) bool."""
        if self.made:
            return self.index.files >= self.made.inside
        if self.families is not None:
            return protein.held_out_by_family(self.index, self.families, self.held_out_families or protein.HELD_OUT)
        return protein.held_out_by_file(self.index, self.held_out_files)

    def rows_of(self, rows: np.ndarray, split: str) -> Rows:
        if self.chains:
            found = Chains(self.index, rows, self.max_length)
            if not len(found):
                raise DataError(f"the {len(rows)} sequences of {split} fill no row of task.max_length = "
                                f"{self.max_length}: give more sequences, another share, or shorter rows")
            return found
        found = Singles(self.index, rows, self.max_length)
        if self.longer == "refuse":
            found.check_whole()
        return found

    def length(self, split: str) -> int:
        return len(self.rows[split])

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        data = self.rows[split]
        for numbers in self.numbers(data.lengths, split, plan):
            rows = [data[i] for i in numbers]
            if self.causal:
                yield protein.next_tokens(rows)
            else:
                yield protein.masked_tokens(rows, map(plan.rng, numbers), self.masking)

    def numbers(self, lengths: np.ndarray, split: str, plan: Plan) -> Iterator[np.ndarray]:
        """Evaluation goes by length, for the metrics do not depend on the order."""
        if split == "train":
            return bucketed(lengths, plan) if self.bucketed else plan.rows(len(lengths), split)
        order = np.argsort(lengths, kind="stable")
        return (order[places] for places in plan.rows(len(lengths), split))

    # ---- model

    def build(self, mechanism: Mechanism) -> nn.Module:
        self.mechanism = mechanism
        model = LanguageModel(self.description, mechanism.layer, self.checkpointing)
        if self.kept is not None and not language.fill(model, self.kept, mechanism):
            self.calibrate(model)
        return model

    def calibrate(self, model: nn.Module) -> None:
        """Fills the statistics that causal features are fitted to: the weights come from another attention."""
        if any(part.learns for part in model.modules() if isinstance(part, LinearAttention)):
            batches = zip(range(self.calibration), self.batches("train", Plan(8)))
            read = [{key: batch[key] for key in batch if key != "labels"} for _, batch in batches]
            if read:
                fill_statistics(model, read)

    def predicted(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits (n, V) in float32 and tokens (n,) of the places that are to be predicted."""
        chosen = batch["labels"] != IGNORED
        return model(batch["tokens"], batch.get("key_mask"), chosen).float(), batch["labels"][chosen]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(*self.predicted(model, batch))

    def weight(self, batch: Batch) -> Tensor:
        return (batch["labels"] != IGNORED).sum()

    # ---- metrics

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> dict[str, float]:
        found = self.metrics(model, split, reader)
        if split == "test" and "ood" in self.rows:
            found |= {f"{key}_ood": value for key, value in self.metrics(model, "ood", reader).items()}
        return found | self.statistics() if split == "test" else found

    @torch.no_grad()
    def metrics(self, model: nn.Module, split: str, reader: Reader) -> dict[str, float]:
        """Over letters: loss in nats, its exponential, the share that is right; the same of the unigram; the floor."""
        unigram = torch.from_numpy(self.unigram)
        loss = right = count = base = base_right = 0
        for batch in reader.batches(split):
            logits, labels = self.predicted(model, batch)
            letters = labels < len(LETTERS)
            loss += float(F.cross_entropy(logits, labels, reduction="none")[letters].double().sum())
            labels, answers = labels[letters], logits[letters].argmax(-1)
            right, count = right + int((answers == labels).sum()), count + len(labels)
            base -= float(unigram[labels.cpu()].log().sum())
            base_right += int((labels == int(unigram.argmax())).sum())
        loss, right, count, base, base_right = reader.sum(loss, right, count, base, base_right)
        found = {"loss": loss / count, "perplexity": exp(loss / count), "accuracy": right / count, "letters": count,
                 "unigram_perplexity": exp(base / count), "unigram_accuracy": base_right / count}
        return found | self.floors.get(split, {})

    @cached_property
    def unigram(self) -> np.ndarray:
        return protein.frequencies(self.rows["train"])

    @cached_property
    def floors(self) -> dict[str, dict[str, float]]:
        """Of the next letters of generated families: the cross-entropy of their true chances."""
        if self.made is None or not self.causal or self.chains:
            return {}
        found = {split: self.floor(split) for split in self.rows if split != "train"}
        return {split: {"floor_loss": loss, "floor_perplexity": exp(loss)} for split, loss in found.items()}

    def floor(self, split: str) -> float:
        rows = self.rows[split]
        letters = np.zeros((len(rows), self.max_length), np.uint8)
        for i in range(len(rows)):
            letters[i, :rows.lengths[i]] = rows[i].tokens
        letters = letters[:, :self.made.longest]
        inside = np.arange(letters.shape[1]) < rows.lengths[:, None]
        return float(-self.made.log_chances(letters, held_out=split == "ood")[inside].mean())

    def statistics(self) -> dict[str, float]:
        """Of each split: of whole sequences, or of the rows of chains (Performers Table 1)."""
        found = {}
        for split, rows in self.rows.items():
            lengths = rows.lengths if self.chains else self.index.lengths[rows.rows]
            found |= {f"{split}_{key}": value for key, value in protein.statistics(lengths).items()}
        return found

    # ---- what is left

    def export(self, model: nn.Module, tensors: dict[str, Tensor], directory: Path) -> None:
        language.keep(self.description, self.mechanism, VOCABULARY, tensors, directory)

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        floor = f", floor {last['floor_perplexity']:.2f}" if "floor_perplexity" in last else ""
        return (f"trembl: perplexity {last['perplexity']:.2f} (unigram {last['unigram_perplexity']:.2f}{floor}), "
                f"{last['accuracy']:.1%} of the letters right ({last['split']}, step {last['step']})")


def exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
