"""What tasks that read images share: where these come from, and how workers make batches of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor, nn

from crt_exp.config import ConfigError
from crt_exp.data import images as data
from crt_exp.data.image_stream import ImageHub, Streamed
from crt_exp.data.loading import Draw, Folders, Loader, Micro, fitting_workers
from crt_exp.data.sources import task_folder
from crt_exp.tasks.base import Batch, Plan, Task

TOKENS = ("cls_token", "mask_token", "reg_token", "dist_token", "pos_embed", "position_embeddings")


@dataclass(eq=False)
class ImageTask(Task):
    """Images of a folder, of the embedded digits, or streamed; `val` is the split that is tested."""

    dataset: str
    data_dir: str | None
    hub: ImageHub
    held_out: Annotated[float, Field(ge=0, lt=1)]
    unreadable: Literal["error", "skip"]
    workers: Annotated[int, Field(ge=0, le=128)] | None

    validation, test = "val", "val"

    def __post_init__(self):
        self.check_source()
        self.images = Streamed(self.hub, self.unreadable == "skip") if self.hub["name"] is not None else self.listed()
        self.classes = self.images.classes
        workers = 0 if self.embedded else fitting_workers()  # processes cost more than images of 8 x 8 pixels
        self.loader = Loader(workers if self.workers is None else self.workers, self.unreadable == "skip")

    def listed(self) -> Folders:
        splits = data.load(self.dataset, self.data_dir)
        if self.held_out:
            self.validation = "held_out"
            splits["train"], splits["held_out"] = splits["train"].held_out(self.held_out)
        return Folders(splits)

    def inputs(self) -> list[Path | None]:
        streamed = self.hub["name"] is not None
        return [] if self.embedded or streamed else [task_folder(f"images/{self.dataset}", self.data_dir)]

    @property
    def embedded(self) -> bool:
        return self.dataset == data.DIGITS and self.data_dir is None and self.hub["name"] is None

    @property
    def source_name(self) -> str:
        """What the images are called."""
        return self.hub["name"] or (Path(self.data_dir).name if self.data_dir else self.dataset)

    def check_source(self) -> None:
        """Raises ConfigError where two places are named, or rows of a stream are to be held out."""
        if self.hub["name"] is not None and (self.data_dir or self.held_out):
            raise ConfigError("task.hub.name names images that are streamed: leave out "
                              f"{'task.data_dir' if self.data_dir else 'task.held_out, and name task.hub.validation'}")

    def length(self, split: str) -> int | None:
        return self.images.length(split)

    def read(self, split: str, plan: Plan, transform: Callable[[Any], Tensor],
             finish: Callable[[Tensor, Tensor, list[Draw]], Batch], repeats: int = 1) -> Iterator[Batch]:
        """The batches that `finish` makes of images, labels and their rows' generators."""
        micro = Micro(self.images.read, transform, finish, plan.rng)
        return self.loader(self.images.asked(split, plan, repeats), micro)

    def weight(self, batch: Batch) -> float | None:
        """Where images may be left out, micro-batches differ in size."""
        return float(len(next(iter(batch.values())))) if self.loader.skip else None

    def decays(self, name: str, parameter: nn.Parameter) -> bool:
        """Position embeddings and tokens have no weight decay, as in the recipes of MAE and DeiT."""
        return parameter.dim() >= 2 and name.split(".")[-1] not in TOKENS
