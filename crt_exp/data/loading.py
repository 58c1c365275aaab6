"""Micro-batches of images, listed or streamed, decoded and augmented in worker processes.

They are the same for any number of workers and after any resume: the process that trains makes the order, and before a
row is augmented the generators of Python, NumPy and torch are seeded from the row's own, and put back afterwards.
"""

import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count, islice, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from crt_exp.config import ConfigError
from crt_exp.data import DataError, images
from crt_exp.data.sources import Hub, hub_examples, reason_of
from crt_exp.data.plan import Plan
from crt_exp.options import Count, Whole

Draw = np.random.Generator
Row = tuple[int, Any, int]     # its number, which decides what is drawn, what `read` takes, and its label
Asked = Iterator[list[Row]]    # micro-batches, yet to be read


def listed(part: images.Images, split: str, plan: Plan, repeats: int = 1) -> Asked:
    """The micro-batches that `plan` names of images that are listed."""
    for rows in plan.rows(len(part), split, repeats):
        places = rows % len(part)
        yield [(int(row), part.sources[i], int(part.labels[i])) for row, i in zip(rows, places)]


class ImageHub(Hub):
    """A set of the hub, or files that `datasets` reads, such as WebDataset's shards."""

    split: str
    validation: str
    image: str
    label: str
    classes: Count | None
    buffer: Whole
    validation_images: Count


class Streamed:
    """Images that `datasets` streams: "train" without end, and of "val" the first `validation_images`."""

    def __init__(self, hub: ImageHub):
        self.hub, self.names = hub, []
        self.examples(hub["split"])
        self.classes = tuple(self.names or map(str, range(hub["classes"] or 0)))

    def examples(self, split: str, **options: Any) -> Callable[[int], Iterator[dict[str, Any]]]:
        """Those of each pass, with their images as they are stored."""
        from datasets import Image

        def encoded(stream: Any) -> Any:
            self.names = getattr((stream.features or {}).get(self.hub["label"]), "names", [])
            return stream.cast_column(self.hub["image"], Image(decode=False))

        return hub_examples(self.hub, split, prepared=encoded, otherwise="Or give a folder, task.data_dir.", **options)

    def training(self, plan: Plan, repeats: int = 1) -> Asked:
        """Pass after pass, each image `repeats` times; rows are numbered over all passes and processes."""
        size = plan.batch // plan.world // plan.micro
        passes = self.examples(self.hub["split"], rank=plan.rank, world=plan.world, seed=plan.seed,
                               buffer=self.hub["buffer"])
        every = chain.from_iterable(repeat(each, repeats) for number in count() for each in self.whole(passes(number)))
        mine = islice(enumerate(every), plan.start * plan.micro * size, None)
        while True:
            yield [self.row(number * plan.world + plan.rank, each) for number, each in islice(mine, size)]

    def whole(self, examples: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """All of a pass. Raises DataError where there is none, and where reading fails."""
        number = 0
        try:
            for number, each in enumerate(examples, 1):  # noqa: B007
                yield each
        except Exception as error:  # of tarfile, zlib, the network
            raise DataError(f"{self.hub['name']} cannot be read after image {number}: {reason_of(error)}") from None
        if not number:
            raise DataError(f"task.hub.split={self.hub['split']}: expected an image for each process, found fewer")

    def validation(self, plan: Plan) -> Asked:
        """This process's part of the first images, in order. Raises DataError where there are fewer."""
        wanted = self.hub["validation_images"]
        at, last = (wanted * rank // plan.world for rank in (plan.rank, plan.rank + 1))
        mine = islice(enumerate(self.whole(self.examples(self.hub["validation"], buffer=0)(0))), at, last)
        while batch := [self.row(number, each) for number, each in islice(mine, plan.batch)]:
            at += len(batch)
            yield batch
        if at < last:
            raise DataError(f"task.hub.validation_images={wanted}: {self.hub['validation']} holds fewer, lower it")

    def row(self, number: int, example: dict[str, Any]) -> Row:
        """Raises DataError where there is no image, or a label that is no class."""
        image, label = example.get(self.hub["image"]), example.get(self.hub["label"])
        name = f"{self.hub['name']}, {example.get('__key__') or f'image {number}'}"
        if not image or label not in range(len(self.classes)):
            raise DataError(f"{name}: {self.hub['image']} is {'there' if image else 'missing'}, {self.hub['label']} is "
                            f"{label} of {len(self.classes)} classes: set task.hub.image, task.hub.label (of "
                            f"{', '.join(example)}) and task.hub.classes")
        return number, (image["bytes"], name), label


# ---- batches ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Micro(Dataset):
    """Makes micro-batches of lists of rows, wherever it is called.

    read: a source to a PIL.Image, raises Unreadable. transform: that to a tensor (3, H, W), drawing from global
    generators. finish: images (B, 3, H, W), labels (B,) and the rows' generators to the batch. rng: a row's generator.
    """

    read: Callable[[Any], Any]
    transform: Callable[[Any], Tensor]
    finish: Callable[[Tensor, Tensor, list[Draw]], dict[str, Tensor]]
    rng: Callable[[int], Draw]

    def __getitem__(self, rows: Sequence[Row]) -> tuple[dict[str, Tensor] | None, list[str]]:
        """The batch of those that can be read (None: of none), and what is wrong with the others."""
        pixels, labels, draws, problems = [], [], [], []
        for number, source, label in rows:
            try:
                image = self.read(source)
            except images.Unreadable as error:               # an error that leaves a worker loses its class and words
                problems.append(str(error))
                continue
            draw = self.rng(number)
            with drawing(draw):
                pixels.append(self.transform(image))
            labels.append(label)
            draws.append(draw)
        return self.finish(torch.stack(pixels), torch.tensor(labels), draws) if pixels else None, problems

    def batches(self, asked: Asked, workers: int) -> DataLoader:
        """Batches and problems of `asked`, in order, by worker processes (0: by this one)."""
        own = torch.Generator()                              # else each epoch would draw from the global one
        return DataLoader(self, sampler=asked, batch_size=None, num_workers=workers, worker_init_fn=leave_signals,
                          generator=own)


@contextmanager
def drawing(draw: Draw) -> Iterator[None]:
    """Global generators seeded from `draw`, put back at the end. Raises ConfigError in a thread next to training."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("task.workers=0 draws in the process that trains: set trainer.prefetch=0, or task.workers=1")
    kept = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    seeds = draw.integers(2**32, size=3).tolist()
    random.seed(seeds[0])
    np.random.seed(seeds[1])
    torch.default_generator.manual_seed(seeds[2])            # torch.manual_seed would seed GPUs too
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.default_generator.set_state(kept[2])


def leave_signals(worker: int) -> None:
    """The process that trains decides what ^C and a closed terminal mean."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
