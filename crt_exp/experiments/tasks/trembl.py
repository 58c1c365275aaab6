"""Protein language models on UniProt sequences (Performers 4.3, C).

A model predicts next letters (unidirectional) or masked letters (bidirectional). Accuracy and perplexity count letters
only. A unidirectional model also learns the end of a sequence, which the metrics leave out. The metrics include a
unigram baseline.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from torch import nn

from crt_exp.experiments.data import DataError, protein
from crt_exp.experiments.data.plan import by_length, counts_of, token_batch
from crt_exp.experiments.data.protein import LETTERS, Chains, FamilyOptions, Singles
from crt_exp.experiments.data.sources import stand_in, task_folder
from crt_exp.experiments.tasks.base import Batch, Metrics, Plan, Reader, task_class
from crt_exp.experiments.tasks.sequences import Share, SymbolTask
from crt_exp.registry import ConfigError
from crt_exp.validation import Count, FileName

VOCABULARY = {
    "letters": LETTERS,
    "begin": protein.BEGIN,
    "end": protein.END,
    "size": protein.TOKENS,
}


@task_class
class TrEMBL(SymbolTask):
    """Protein language model; see `conf/task/trembl.yaml` for the options.

    Raises:
        DataError: files are missing or malformed.
        ConfigError: options contradict each other.
    """

    dataset: Literal["generated", "uniprot"]
    data_dir: str | None
    direction: Literal["unidirectional", "bidirectional"]
    max_length: Count
    chains: bool
    validation_share: Share
    test_share: Share
    families: FileName | None
    held_out_files: Sequence[str] | None
    generated: FamilyOptions
    cache_dir: str | None

    counted = "letters"
    predictable = len(LETTERS)
    compatible_runs = "a run of task=trembl on the same task.dataset, split by letters"

    def __post_init__(self):
        self.causal = self.direction == "unidirectional"
        self.synthetic = self.dataset == "generated"
        split_by = {} if self.synthetic else {"split": "letters"}
        self.describe(protein.TOKENS, self.max_length, VOCABULARY | split_by)
        self.masking = protein.letter_masking()
        self.check_options()
        if self.synthetic:
            self.stand_in = stand_in("TrEMBL", "generated families", "dataset=uniprot", "protein")
            self.sequences = protein.generate(self.generated)
        else:
            self.sequences = protein.read_uniprot(self.data_dir, self.cache_dir)
        split = protein.split_rows(
            self.sequences, self.held_out(), self.validation_share, self.test_share
        )
        kind = Chains if self.chains else Singles
        self.splits = {
            name: kind(self.sequences, rows, self.max_length) for name, rows in split.items()
        }
        if empty := [name for name, rows in self.splits.items() if not len(rows)]:
            raise DataError(
                f"task.max_length={self.max_length}: {empty[0]} has too few symbols for one row"
            )

    def inputs(self) -> list[Path | None]:
        return [] if self.synthetic else [task_folder("protein", self.data_dir)]

    def check_options(self) -> None:
        if self.validation_share + self.test_share >= 1:
            raise ConfigError(
                f"task.validation_share={self.validation_share} + task.test_share={self.test_share}: "
                "expected < 1"
            )
        if self.synthetic and (self.data_dir or self.families or self.held_out_files is not None):
            raise ConfigError(
                "task.dataset=generated: expected no task.data_dir, task.families or "
                "task.held_out_files; set task.dataset=uniprot"
            )

    # ---- data

    def held_out(self) -> np.ndarray:
        """Mask of out-of-distribution sequences, (n,) bool."""
        if self.synthetic:
            return self.sequences.files >= self.generated["families"]
        if self.families is not None:
            return protein.held_out_by_family(self.sequences, self.families)
        return protein.held_out_by_file(self.sequences, self.held_out_files)

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        data = self.splits[split]
        for numbers in by_length(data.lengths, split, plan, group_lengths=True):
            rows = [data[i] for i in numbers]
            if self.causal:
                yield protein.next_token_batch(rows, self.max_length)
            else:
                masked = map(self.masking.mask_row, rows, map(plan.rng, numbers))
                inputs, labels = zip(*masked)
                yield token_batch(inputs, protein.PAD, labels)

    # ---- metrics

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> Metrics:
        metrics = super().evaluate(model, split, reader)
        if split != "test":
            return metrics
        if "ood" in self.splits:
            metrics |= {
                f"{key}_ood": value for key, value in super().evaluate(model, "ood", reader).items()
            }
        return metrics | self.statistics()

    def counts(self) -> np.ndarray:
        rows = self.splits["train"]
        return counts_of(rows.__getitem__, len(rows), protein.COUNTED, self.predictable)

    def statistics(self) -> Metrics:
        """Length statistics of each split (Performers Table 1).

        With task.chains they are statistics of rows, else of whole sequences.
        """
        result = {}
        for split, rows in self.splits.items():
            lengths = rows.lengths if self.chains else self.sequences.lengths[rows.rows]
            result |= {
                f"{split}_{key}": value for key, value in protein.length_statistics(lengths).items()
            }
        return result
