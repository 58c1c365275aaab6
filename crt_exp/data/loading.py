"""Micro-batches of images, decoded and augmented in worker processes.

Images are listed or streamed. Batches do not depend on the number of workers or on a resume: the training process
determines the order. The global generators of Python, NumPy and torch are seeded for each row before its augmentation,
and restored afterwards.
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
Row = tuple[int, Any, int]     # row number (seeds the augmentation), source for `read`, label
Asked = Iterator[list[Row]]    # micro-batches of rows to read


def listed(part: images.Images, split: str, plan: Plan, repeats: int = 1) -> Asked:
    """Yield the micro-batches of `plan` from listed images."""
    for rows in plan.rows(len(part), split, repeats):
        places = rows % len(part)
        yield [(int(row), part.sources[i], int(part.labels[i])) for row, i in zip(rows, places)]


class ImageHub(Hub):
    """Hugging Face image data set, or files such as WebDataset shards."""

    split: str
    validation: str
    image: str
    label: str
    classes: Count | None
    buffer: Whole
    validation_images: Count


class Streamed:
    """Images streamed by `datasets`.

    "train" is endless. "val" is the first `validation_images` images.
    """

    def __init__(self, hub: ImageHub):
        self.hub, self.names = hub, []
        self.examples(hub["split"])
        self.classes = tuple(self.names or map(str, range(hub["classes"] or 0)))

    def examples(self, split: str, **options: Any) -> Callable[[int], Iterator[dict[str, Any]]]:
        """Examples of each epoch, with undecoded images."""
        from datasets import Image

        def encoded(stream: Any) -> Any:
            self.names = getattr((stream.features or {}).get(self.hub["label"]), "names", [])
            return stream.cast_column(self.hub["image"], Image(decode=False))

        return hub_examples(self.hub, split, prepared=encoded, otherwise="Or give a folder, task.data_dir.", **options)

    def training(self, plan: Plan, repeats: int = 1) -> Asked:
        """Yield endless micro-batches, with each image `repeats` times in turn.

        Row numbers are unique over epochs and processes.
        """
        size = plan.batch // plan.world // plan.micro
        passes = self.examples(self.hub["split"], rank=plan.rank, world=plan.world, seed=plan.seed,
                               buffer=self.hub["buffer"])
        every = chain.from_iterable(repeat(each, repeats) for number in count() for each in self.whole(passes(number)))
        mine = islice(enumerate(every), plan.start * plan.micro * size, None)
        while True:
            yield [self.row(number * plan.world + plan.rank, each) for number, each in islice(mine, size)]

    def whole(self, examples: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """All examples of an epoch; raises DataError if empty or unreadable."""
        number = 0
        try:
            for number, each in enumerate(examples, 1):  # noqa: B007
                yield each
        except Exception as error:  # from tarfile, zlib or the network
            raise DataError(f"{self.hub['name']} cannot be read after image {number}: {reason_of(error)}") from None
        if not number:
            raise DataError(f"task.hub.split={self.hub['split']}: expected an image for each process, found fewer")

    def validation(self, plan: Plan) -> Asked:
        """Yield this process's part of the first images, in order.

        Raises DataError if the split has fewer images.
        """
        wanted = self.hub["validation_images"]
        at, last = (wanted * rank // plan.world for rank in (plan.rank, plan.rank + 1))
        mine = islice(enumerate(self.whole(self.examples(self.hub["validation"], buffer=0)(0))), at, last)
        while batch := [self.row(number, each) for number, each in islice(mine, plan.batch)]:
            at += len(batch)
            yield batch
        if at < last:
            raise DataError(f"task.hub.validation_images={wanted}: {self.hub['validation']} holds fewer, lower it")

    def row(self, number: int, example: dict[str, Any]) -> Row:
        """Row of an example; raises DataError for a missing image or an invalid label."""
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
    """Builds micro-batches from lists of rows, in any process.

    Args:
        read: returns the PIL.Image of a source, or raises Unreadable.
        transform: PIL.Image to tensor (3, H, W); draws from global generators.
        finish: images (B, 3, H, W), labels (B,) and row generators to a batch.
        rng: row number to generator.
    """

    read: Callable[[Any], Any]
    transform: Callable[[Any], Tensor]
    finish: Callable[[Tensor, Tensor, list[Draw]], dict[str, Tensor]]
    rng: Callable[[int], Draw]

    def __getitem__(self, rows: Sequence[Row]) -> tuple[dict[str, Tensor] | None, list[str]]:
        """Batch of the readable rows (None if there are none), and problems of the others."""
        pixels, labels, draws, problems = [], [], [], []
        for number, source, label in rows:
            try:
                image = self.read(source)
            except images.Unreadable as error:               # raising in a worker would lose class and message
                problems.append(str(error))
                continue
            draw = self.rng(number)
            with drawing(draw):
                pixels.append(self.transform(image))
            labels.append(label)
            draws.append(draw)
        return self.finish(torch.stack(pixels), torch.tensor(labels), draws) if pixels else None, problems

    def batches(self, asked: Asked, workers: int) -> DataLoader:
        """Load batches and problems of `asked` in order; workers=0: in this process."""
        own = torch.Generator()                              # otherwise each epoch draws from the global generator
        return DataLoader(self, sampler=asked, batch_size=None, num_workers=workers, worker_init_fn=leave_signals,
                          generator=own)


@contextmanager
def drawing(draw: Draw) -> Iterator[None]:
    """Seed the global generators from `draw`, and restore them at the end.

    Raises ConfigError in a thread that runs beside training.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("task.workers=0 draws in the process that trains: set trainer.prefetch=0, or task.workers=1")
    kept = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    seeds = draw.integers(2**32, size=3).tolist()
    random.seed(seeds[0])
    np.random.seed(seeds[1])
    torch.default_generator.manual_seed(seeds[2])            # torch.manual_seed would also seed GPUs
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.default_generator.set_state(kept[2])


def leave_signals(worker: int) -> None:
    """Ignore SIGINT and SIGHUP in workers; the training process handles both."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
