"""Long Range Arena classification, and autoregressive models of images.

task=lra (Performers D.5) classifies sequences or pairs of sequences. The sequence model reads all symbols at once, and
its states are averaged. task=pixels (Performers 4.4, Fig. 7 left) predicts the next pixel value in raster order.
Notation: B rows of a batch (two for an example of retrieval), L symbols of the longest row or values of an image.
"""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.experiments.data import arena, check_classes, images
from crt_exp.experiments.data.arena import LONGEST, PAGES, Dataset, Labelled
from crt_exp.experiments.data.images import VALUES, square_image
from crt_exp.experiments.data.plan import SPLITS, by_length, counts_of, row_sample, token_batch
from crt_exp.experiments.models.language import Classifier
from crt_exp.experiments.tasks.base import Batch, Metrics, Plan, Reader, task_class
from crt_exp.experiments.tasks.sequences import SequenceTask, SymbolTask
from crt_exp.mechanism import Mechanism
from crt_exp.validation import Count

BEGIN = VALUES  # start symbol of task=pixels
COUNTED = 500  # training images that give the unigram frequencies of task=pixels


@task_class
class LRA(SequenceTask):
    """Long Range Arena classification; see `conf/task/lra.yaml` for the options.

    Raises:
        DataError: files are missing or malformed.
        ConfigError: options contradict each other.
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
        self.splits = self.arena.splits
        check_classes(
            self.splits["train"].labels.tolist(),
            f"task.dataset={self.dataset}, training split",
        )
        whole = max(int(lengths_of(self.splits[split], 1).max()) for split in SPLITS)
        self.row_length = self.max_length or (
            min(whole, LONGEST) if self.dataset in PAGES else whole
        )
        self.description = self.new_description(
            self.arena.symbols + 1, self.row_length, causal=False
        )
        for split in SPLITS[1:]:
            data = self.splits[split]
            self.splits[split] = data.take(row_sample(len(data), self.evaluated))

    # ---- data

    def inputs(self) -> list[Path | None]:
        if self.dataset == "image":
            return images.image_folders("cifar10", self.data_dir)
        return [self.data_dir and Path(self.data_dir).expanduser()]

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        """Yield tokens (B, L), key_mask if there is padding, labels (B / together,)."""
        data = self.splits[split]
        together = self.arena.together
        lengths = np.minimum(lengths_of(data, together), self.row_length)
        for examples in by_length(lengths, split, plan, group_lengths=True):
            part = data.take(examples)
            rows = [row[: self.row_length] for row in part.rows]
            labels = torch.from_numpy(part.labels)
            yield token_batch(rows, self.arena.symbols) | {"labels": labels}

    # ---- model

    def build(self, mechanism: Mechanism) -> nn.Module:
        return Classifier(
            self.description,
            self.arena.classes,
            mechanism.layer,
            self.checkpointing,
            self.arena.together,
        )

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(**self.model_inputs(batch)).float()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(self.outputs(model, batch), batch["labels"])

    # ---- metrics

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> Metrics:
        """Accuracy, loss, and accuracy of the majority class of the training split."""
        majority = int(np.bincount(self.splits["train"].labels).argmax())

        def measure(batch: Batch) -> dict[str, Any]:
            logits = self.outputs(model, batch)
            labels = batch["labels"]
            return {
                "accuracy": (logits.argmax(-1) == labels).sum(),
                "loss": F.cross_entropy(logits, labels, reduction="sum"),
                "majority_accuracy": (labels == majority).sum(),
                "count": len(labels),
            }

        return reader.means(split, measure, "examples")


def lengths_of(data: Labelled, together: int) -> np.ndarray:
    """Symbols of each example, of the longer row for a pair: (n,)."""
    return np.array([len(row) for row in data.rows]).reshape(-1, together).max(1)


# ---- task=pixels


@task_class
class Pixels(SymbolTask):
    """Pixel-by-pixel image model; see `conf/task/pixels.yaml` for the options.

    Raises:
        DataError: images are missing or smaller than `size`.
        ConfigError: options contradict each other.
    """

    dataset: str
    data_dir: str | None
    size: Annotated[int, Field(ge=8, le=64)] | None
    channels: Literal[1, 3] | None
    held_out: Annotated[float, Field(gt=0, lt=1)]
    evaluated: Count | None

    metric = "bits_per_dim"
    reported = ("unigram_bits_per_dim",)
    counted = "dimensions"
    compatible_runs = "a run of task=pixels of the same size and channels"
    causal = True
    predictable = VALUES
    length_option = "size"

    def __post_init__(self):
        self.stand_in = "" if self.inputs() else images.STAND_IN
        self.size = self.size or (32 if self.inputs() else 8)
        self.channels = self.channels or (3 if self.inputs() else 1)
        self.row_length = self.size**2 * self.channels
        self.describe(
            VALUES + 1,
            self.row_length,
            {"pixels": VALUES, "begin": BEGIN, "size": self.size, "channels": self.channels},
        )
        self.splits = self.split()
        square_image(
            self.splits["train"], 0, self.size, self.channels
        )  # raises for too small images before training

    # ---- data

    def inputs(self) -> list[Path | None]:
        return images.image_folders(self.dataset, self.data_dir)

    def split(self) -> dict[str, images.Images]:
        loaded = images.load(self.dataset, self.data_dir)
        train, validation = loaded["train"].held_out(self.held_out)
        read = {"validation": validation, "test": loaded["val"]}
        return {"train": train} | {
            split: data.take(row_sample(len(data), self.evaluated)) for split, data in read.items()
        }

    def values(self, split: str, i: int) -> np.ndarray:
        """Pixel values of image i in raster order, (L,) int64."""
        return (
            square_image(self.splits[split], i, self.size, self.channels)
            .reshape(-1)
            .astype(np.int64)
        )

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        """Yield labels (B, L), the pixel values, and tokens (B, L), shifted by one."""
        for rows in plan.rows(self.length(split), split):
            labels = torch.from_numpy(np.stack([self.values(split, i) for i in rows]))
            tokens = torch.cat([torch.full_like(labels[:, :1], BEGIN), labels[:, :-1]], 1)
            yield {"tokens": tokens, "labels": labels}

    # ---- metrics

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> Metrics:
        metrics = super().evaluate(model, split, reader)
        return metrics | {
            "bits_per_dim": metrics["loss"] / math.log(2),
            "unigram_bits_per_dim": math.log2(metrics["unigram_perplexity"]),
        }

    def counts(self) -> np.ndarray:
        values = partial(self.values, "train")
        return counts_of(values, self.length("train"), COUNTED, VALUES)
