"""The Long Range Arena: classes of long sequences, or of pairs of them, with any attention (Performers D.5).

The sequence model reads all symbols at once, and its states are averaged. Legend: B rows of a batch, two for an example
of retrieval, L symbols of the longest.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.data import arena, check_classes
from crt_exp.data.arena import LONGEST, SPLITS, Dataset, Labelled
from crt_exp.data.plan import by_length, few, masked, padded
from crt_exp.data.sources import task_folder
from crt_exp.options import Count, checked
from crt_exp.mechanism import Mechanism
from crt_exp.models.language import Classifier
from crt_exp.tasks.base import Batch, Plan, Reader
from crt_exp.tasks.sequences import SequenceTask, without_labels


@checked("task")
@dataclass(eq=False)
class LRA(SequenceTask):
    """See `conf/task/lra.yaml` for the options.

    Raises DataError for files that are missing or malformed, ConfigError for options that do not go together.
    """

    dataset: Dataset
    data_dir: str | None
    scale: Literal["small", "full"]
    rules: dict[str, Any]
    evaluated: Count | None
    max_length: Count | None
    cache_dir: str | None

    metric = "accuracy"

    def __post_init__(self):
        self.arena = arena.load(self.dataset, self.data_dir, self.rules, self.scale, self.cache_dir)
        check_classes(self.arena.splits["train"].labels.tolist(), f"task.dataset={self.dataset}, training split")
        whole = max(int(lengths_of(self.arena.splits[split], 1).max()) for split in SPLITS)
        self.row_length = min(whole, LONGEST) if self.max_length is None else self.max_length
        self.description = self.new_description(self.arena.symbols + 1, self.row_length, causal=False)
        for split in SPLITS[1:]:
            data = self.arena.splits[split]
            self.arena.splits[split] = data.take(few(len(data), self.evaluated))

    # ---- data

    def inputs(self) -> list[Path | None]:
        return [task_folder("images/cifar10", self.data_dir) if self.dataset == "image" else
                self.data_dir and Path(self.data_dir).expanduser()]

    def length(self, split: str) -> int:
        return len(self.arena.splits[split])

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        """tokens (B, L), key_mask where there is padding, labels (B / together,)."""
        data, together = self.arena.splits[split], self.arena.together
        lengths = np.minimum(lengths_of(data, together), self.row_length)
        for numbers in by_length(lengths, split, plan, like_together=True):
            rows = [data.rows[together * i + j][:self.row_length] for i in numbers for j in range(together)]
            tokens = padded(rows, self.arena.symbols)
            yield masked(tokens, [len(row) for row in rows]) | {"labels": torch.from_numpy(data.labels[numbers])}

    # ---- model

    def build(self, mechanism: Mechanism) -> nn.Module:
        return Classifier(self.description, self.arena.classes, mechanism.layer, self.checkpointing,
                          self.arena.together)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(**without_labels(batch)).float()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(self.outputs(model, batch), batch["labels"])

    # ---- metrics

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> dict[str, float]:
        """Beside the share of examples of the class that is the most frequent one of the training split."""
        majority = int(np.bincount(self.arena.splits["train"].labels).argmax())
        loss = right = count = base = 0
        for batch in reader.batches(split):
            logits, labels = self.outputs(model, batch), batch["labels"]
            loss += float(F.cross_entropy(logits, labels, reduction="sum"))
            right, count = right + int((logits.argmax(-1) == labels).sum()), count + len(labels)
            base += int((labels == majority).sum())
        loss, right, count, base = reader.sum(loss, right, count, base)
        return {"accuracy": right / count, "loss": loss / count, "majority_accuracy": base / count, "examples": count}


def lengths_of(data: Labelled, together: int) -> np.ndarray:
    """Symbols of each example, the longer one of a pair: (n,)."""
    return np.array([len(row) for row in data.rows]).reshape(-1, together).max(1)
