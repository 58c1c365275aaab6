"""What tasks that read images share: where these come from, and how workers make batches of them."""

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from joblib import cpu_count
from pydantic import Field
from torch import Tensor, nn

from crt_exp.config import ConfigError
from crt_exp.data import DataError
from crt_exp.data import images as data
from crt_exp.data.loading import Draw, ImageHub, Micro, Streamed, listed
from crt_exp.data.sources import SOURCES, is_on_hub, task_folder
from crt_exp.tasks.base import Batch, Plan, Task

TOKENS = ("cls_token", "mask_token", "reg_token", "dist_token", "pos_embed", "position_embeddings")


@dataclass(eq=False)
class ImageTask(Task):
    """Images of a folder, of the embedded digits, or streamed; `val` is the split that is tested."""

    dataset: str
    data_dir: str | None
    source: Literal["auto", "files", "hub"]
    hub: ImageHub
    held_out: Annotated[float, Field(ge=0, lt=1)]
    unreadable: Literal["error", "skip"]
    workers: Annotated[int, Field(ge=0, le=128)] | None

    validation, test = "val", "val"

    def __post_init__(self):
        name = f"images/{self.dataset}"
        if self.hub["name"] is None and name in SOURCES and SOURCES[name].hub and is_on_hub(
                self.source, name, task_folder(name), self.data_dir):
            self.hub = self.hub | {"name": SOURCES[name].hub}
        if self.source == "hub" and self.hub["name"] is None:
            raise ConfigError(f"task.source=hub: the name of task.dataset={self.dataset} on the hub is not known: set "
                              "task.hub.name")
        self.left_out, self.embedded = 0, not self.inputs() and self.hub["name"] is None
        if self.hub["name"] is not None:
            if self.data_dir or self.held_out:
                raise ConfigError(f"task.hub.name={self.hub['name']}: expected no task.data_dir and no task.held_out")
            stream = Streamed(self.hub)
            self.classes, self.read_source = stream.classes, data.read
            self.asked = {"train": stream.training, "val": stream.validation}
            self.lengths = {"train": None, "val": self.hub["validation_images"]}
        else:
            splits = data.load(self.dataset, self.data_dir)
            if self.held_out:
                self.validation = "held_out"
                splits["train"], splits["held_out"] = splits["train"].held_out(self.held_out)
            self.classes, self.read_source = splits["train"].classes, splits["train"].read
            self.asked = {split: partial(listed, part, split) for split, part in splits.items()}
            self.lengths = {split: len(part) for split, part in splits.items()}
        self.processes = self.workers                        # they cost more than images of 8 x 8 pixels
        if self.workers is None:
            self.processes = 0 if self.embedded else cores()

    def inputs(self) -> list[Path | None]:
        if self.hub["name"] is not None or self.dataset == data.DIGITS and self.data_dir is None:
            return []
        return [task_folder(f"images/{self.dataset}", self.data_dir)]

    def length(self, split: str) -> int | None:
        return self.lengths[split]

    def read(self, split: str, plan: Plan, transform: Callable[[Any], Tensor],
             finish: Callable[[Tensor, Tensor, list[Draw]], Batch], repeats: int = 1) -> Iterator[Batch]:
        """The batches that `finish` makes of images, labels and their rows' generators.

        Raises DataError for an image that cannot be read; with task.unreadable=skip it is named, counted and left out.
        """
        asked = self.asked[split](plan, repeats) if split == "train" else self.asked[split](plan)
        micro = Micro(self.read_source, transform, finish, plan.rng)
        for batch, problems in micro.batches(asked, self.processes):
            if problems and (batch is None or self.unreadable == "error"):
                raise DataError(f"{problems[0]} Replace it, or leave such images out: task.unreadable=skip")
            self.left_out += len(problems)
            for problem in problems:
                warnings.warn(f"{problem} It is left out.", stacklevel=2)
            yield batch

    def weight(self, batch: Batch) -> float | None:
        """Where images may be left out, micro-batches differ in size."""
        return float(len(next(iter(batch.values())))) if self.unreadable == "skip" else None

    def decays(self, name: str, parameter: nn.Parameter) -> bool:
        """Position embeddings and tokens have no weight decay, as in the recipes of MAE and DeiT."""
        return parameter.dim() >= 2 and name.split(".")[-1] not in TOKENS


def cores() -> int:
    """Of this process: those of the machine are shared by its processes; at most 8."""
    return max(1, min(8, cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
