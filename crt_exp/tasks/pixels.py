"""Images drawn value by value: next pixel values in raster order, with any attention (Performers 4.4, Fig. 7 left).

Legend: s pixels of a side, C channels, L = s^2 C values of an image, B images of a batch.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn

from crt_exp.data import images
from crt_exp.data.images import DIGITS, VALUES, squared
from crt_exp.data.plan import few
from crt_exp.data.sources import task_folder
from crt_exp.options import Count, checked
from crt_exp.tasks.base import Batch, Plan, Reader
from crt_exp.tasks.sequences import SymbolTask

BEGIN = VALUES
COUNTED = 500                                                # training images that the unigram is counted on


@checked("task")
@dataclass(eq=False)
class Pixels(SymbolTask):
    """See `conf/task/pixels.yaml` for the options.

    Raises DataError for images that are missing or smaller than `size`, ConfigError for options that do not go
    together.
    """

    dataset: str
    data_dir: str | None
    size: Annotated[int, Field(ge=8, le=64)] | None
    channels: Literal[1, 3] | None
    held_out: Annotated[float, Field(gt=0, lt=1)]
    evaluated: Count | None

    metric, counted, ours = "bits_per_dim", "dimensions", "a run of task=pixels of the same size and channels"
    causal, predictable, length_option = True, VALUES, "size"

    def __post_init__(self):
        self.size = self.size or (32 if self.inputs() else 8)
        self.channels = self.channels or (3 if self.inputs() else 1)
        self.row_length = self.size**2 * self.channels
        self.load()
        self.describe(VALUES + 1, self.row_length, {"pixels": VALUES, "begin": BEGIN, "size": self.size,
                                                    "channels": self.channels})
        self.splits = self.split()
        squared(self.splits["train"], 0, self.size, self.channels)  # images that are too small are refused at once

    # ---- data

    def inputs(self) -> list[Path | None]:
        embedded = self.dataset == DIGITS and self.data_dir is None
        return [] if embedded else [task_folder(f"images/{self.dataset}", self.data_dir)]

    def split(self) -> dict[str, images.Images]:
        loaded = images.load(self.dataset, self.data_dir)
        train, validation = loaded["train"].held_out(self.held_out)
        read = {"validation": validation, "test": loaded["val"]}
        return {"train": train} | {split: data.take(few(len(data), self.evaluated)) for split, data in read.items()}

    def length(self, split: str) -> int:
        return len(self.splits[split])

    def values(self, split: str, i: int) -> np.ndarray:
        """(L,) int64."""
        return squared(self.splits[split], i, self.size, self.channels).reshape(-1).astype(np.int64)

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        """labels: the values; tokens: what comes before each."""
        for rows in plan.rows(self.length(split), split):
            labels = torch.from_numpy(np.stack([self.values(split, i) for i in rows]))
            tokens = torch.cat([torch.full_like(labels[:, :1], BEGIN), labels[:, :-1]], 1)
            yield {"tokens": tokens, "labels": labels}

    # ---- metrics

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> dict[str, float]:
        metrics = super().evaluate(model, split, reader)
        return metrics | {"bits_per_dim": metrics["loss"] / math.log(2),
                          "unigram_bits_per_dim": math.log2(metrics["unigram_perplexity"])}

    @cached_property
    def unigram(self) -> np.ndarray:
        chosen = np.linspace(0, self.length("train") - 1, min(COUNTED, self.length("train"))).astype(np.int64)
        counts = np.ones(VALUES)
        for i in chosen:
            counts += np.bincount(self.values("train", i), minlength=VALUES)
        return counts / counts.sum()
