"""Protein language models: next or masked letters of UniProt's sequences, with any attention (Performers 4.3, C).

Accuracy and perplexity are those of letters: of all of them (unidirectional; the end of a sequence is learned and not
counted) or of the masked ones (bidirectional). Beside them stand the unigram baseline and, for generated families, the
floor that no model can get below. Legend: B rows of a batch, L tokens of the longest, n predicted tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from torch import nn

from crt_exp.config import ConfigError
from crt_exp.data import DataError, protein
from crt_exp.data.sources import no_folder, task_folder
from crt_exp.data.protein_families import Families, FamilyOptions
from crt_exp.data.glue import by_length
from crt_exp.data.protein import LETTERS, Chains, ProteinRows, Singles
from crt_exp.options import Count, checked
from crt_exp.tasks.base import Batch, Plan, Reader
from crt_exp.tasks.sequences import Share, SymbolTask, exp

VOCABULARY = {"letters": LETTERS, "begin": protein.BEGIN, "end": protein.END, "size": protein.TOKENS}


@checked("task")
@dataclass(eq=False)
class TrEMBL(SymbolTask):
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
    generated: FamilyOptions
    bucketed: bool
    cache_dir: str | None

    counted, ours, predictable = "letters", "a run of task=trembl", len(LETTERS)

    def __post_init__(self):
        self.causal = self.direction == "unidirectional"
        self.load()
        self.describe(protein.TOKENS, self.max_length, VOCABULARY)
        self.masking = protein.masking(self.share)
        self.made = Families.of(self.generated) if self.dataset == "generated" else None
        self.check_options()
        self.index = self.made.drawn(self.generated) if self.made else protein.uniprot(self.data_dir, self.cache_dir)
        self.rows = {split: self.rows_of(rows, split) for split, rows in self.split().items()}

    def inputs(self) -> list[Path | None]:
        return [] if self.made else [task_folder("protein", self.data_dir)]

    # ---- options

    def check_options(self) -> None:
        if self.validation_share + self.test_share >= 1:
            raise ConfigError(f"task.validation_share = {self.validation_share} and task.test_share = "
                              f"{self.test_share} leave nothing to train on")
        if self.made:
            no_folder(self.data_dir, "task.dataset=generated", "leave it out, or set task.dataset=uniprot")
        if self.made and (self.families or self.held_out_files is not None):
            raise ConfigError("task.families and task.held_out_files are for dataset=uniprot: generated families are "
                              "held out by task.generated.held_out")
        if self.held_out_families is not None and self.families is None:
            raise ConfigError("task.held_out_families needs the table of families: task.families=<file>")

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

    def rows_of(self, rows: np.ndarray, split: str) -> ProteinRows:
        if self.chains:
            result = Chains(self.index, rows, self.max_length)
            if not len(result):
                raise DataError(f"the {len(rows)} sequences of {split} fill no row of task.max_length = "
                                f"{self.max_length}: give more sequences, another share, or shorter rows")
            return result
        result = Singles(self.index, rows, self.max_length)
        if self.longer == "refuse":
            result.check_whole()
        return result

    def length(self, split: str) -> int:
        return len(self.rows[split])

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        data = self.rows[split]
        for numbers in by_length(data.lengths, split, plan, self.bucketed):
            rows = [data[i] for i in numbers]
            if self.causal:
                yield protein.next_tokens(rows)
            else:
                yield protein.masked_tokens(rows, map(plan.rng, numbers), self.masking)

    # ---- metrics

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> dict[str, float]:
        metrics = self.metrics(model, split, reader)
        if split == "test" and "ood" in self.rows:
            metrics |= {f"{key}_ood": value for key, value in self.metrics(model, "ood", reader).items()}
        return metrics | self.statistics() if split == "test" else metrics

    def metrics(self, model: nn.Module, split: str, reader: Reader) -> dict[str, float]:
        """With the floor."""
        return super().metrics(model, split, reader) | self.floors.get(split, {})

    @cached_property
    def unigram(self) -> np.ndarray:
        return protein.frequencies(self.rows["train"])

    @cached_property
    def floors(self) -> dict[str, dict[str, float]]:
        """Of the next letters of generated families: the cross-entropy of their true chances."""
        if self.made is None or not self.causal or self.chains:
            return {}
        floors = {split: self.floor(split) for split in self.rows if split != "train"}
        return {split: {"floor_loss": loss, "floor_perplexity": exp(loss)} for split, loss in floors.items()}

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
        result = {}
        for split, rows in self.rows.items():
            lengths = rows.lengths if self.chains else self.index.lengths[rows.rows]
            result |= {f"{split}_{key}": value for key, value in protein.statistics(lengths).items()}
        return result

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        floor = f", floor {last['floor_perplexity']:.2f}" if "floor_perplexity" in last else ""
        return (f"trembl: perplexity {last['perplexity']:.2f} (unigram {last['unigram_perplexity']:.2f}{floor}), "
                f"{last['accuracy']:.1%} of the letters right ({last['split']}, step {last['step']})")

