"""Micro-batches made in worker processes, and images to make them of.

Images are listed or streamed. Batches do not depend on the number of workers or on a resume: the training process
determines the order. The global generators of Python, NumPy and torch are seeded for each row before its augmentation,
and restored afterwards.
"""

import json
import os
import random
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice, repeat
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from joblib import cpu_count
from pydantic import Field
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from crt_exp.experiments.data import DataError, images, world_size
from crt_exp.experiments.data.plan import Plan
from crt_exp.experiments.data.sources import Hub, from_hub, reason_of
from crt_exp.registry import ConfigError
from crt_exp.validation import Count, Whole

Generator = np.random.Generator
Row = tuple[int, Any, int]  # row number (seeds the augmentation), source for `read`, label
RowBatches = Iterator[list[Row]]  # micro-batches of rows to read
Workers = Annotated[int, Field(ge=0, le=128)] | None


def listed_batches(part: images.Images, split: str, plan: Plan, repeats: int = 1) -> RowBatches:
    """Yield the micro-batches of `plan` from listed images.

    Evaluation reads them in a fixed random order: they are listed by class, and any first batches are a sample.
    """
    order = evaluation_order(len(part))
    for rows in plan.rows(len(part), split, repeats):
        if split != "train":
            rows = order[rows]
        places = rows % len(part)
        yield [(int(row), part.sources[i], int(part.labels[i])) for row, i in zip(rows, places)]


def evaluation_order(n: int) -> np.ndarray:
    """The fixed random order in which an evaluation reads n listed images."""
    return np.random.default_rng(0).permutation(n)


class ImageHub(Hub):
    """Hugging Face image data set, or files such as WebDataset shards."""

    split: str
    validation: str
    image: str
    label: str
    classes: Count | None
    buffer: Whole
    validation_images: Count


class Mark(NamedTuple):
    """Start of a shuffle window in a stream.

    number: images that this process read before. place: index of the file among those of the process in this pass.
    state: position of `datasets` within the file.
    """

    number: int = 0
    epoch: int = 0
    place: int = 0
    state: dict[str, Any] | None = None


class Streamed:
    """Images streamed by `datasets`.

    "train" is endless. "val" is the first `validation_images` images, or a sample of these. Each pass deals the files
    to the processes in a new order. A process shuffles its images in windows of `buffer`. A checkpoint holds the mark
    of the current window; a resumed run reads this window again.
    """

    def __init__(self, hub: ImageHub):
        self.hub = hub
        self.marks = deque([Mark()])
        self.stream = self.open_split(hub["split"])
        if (files := self.stream.num_shards) < world_size():
            raise DataError(
                f"task.hub.split={hub['split']}: {files} files, expected at least {world_size()}"
            )
        names = getattr((self.stream.features or {}).get(hub["label"]), "names", [])
        self.classes = tuple(names or map(str, range(hub["classes"] or 0)))

    def open_split(self, name: str) -> Any:
        """IterableDataset of undecoded images. Raises DataError."""
        from datasets import Image, load_dataset

        hub, files = self.hub, self.hub["data_files"]
        load = partial(
            load_dataset, hub["name"], hub["config"], split=name, streaming=True, data_files=files
        )
        stream = from_hub(load, hub["name"], "Or give a folder, task.data_dir.", files)
        return stream.cast_column(hub["image"], Image(decode=False))

    def training(self, plan: Plan, repeats: int = 1) -> RowBatches:
        """Yield endless micro-batches, with each image `repeats` times in turn.

        Row numbers are unique over epochs and processes.
        """
        size = plan.batch // plan.world // plan.micro
        self.marks = deque([self.marks[0]])
        self.images_per_step = plan.micro * size / repeats
        first = self.marks[0].number * repeats
        every = chain.from_iterable(repeat(image, repeats) for image in self.shuffle_windows(plan))
        mine = islice(enumerate(every, first), plan.start * plan.micro * size - first, None)
        while True:
            yield [
                self.row_of(number * plan.world + plan.rank, example)
                for number, example in islice(mine, size)
            ]

    def shuffle_windows(self, plan: Plan) -> Iterator[dict[str, Any]]:
        """This process's images from the first mark on, shuffled in windows."""
        number = self.marks[0].number
        examples = self.read_passes(plan, self.marks[0])

        def window() -> Iterator[dict[str, Any]]:
            return islice(iter(partial(next, examples), None), self.hub["buffer"] or 1)

        now = list(window()) or list(window())  # empty where a pass is just over
        while now:
            np.random.default_rng([plan.seed, plan.rank, number, 2]).shuffle(now)
            number += len(now)
            self.marks.append(Mark(number, *self.place, self.part.state_dict()))
            later = []
            following = window()
            while now:
                later += islice(following, 1)
                yield now.pop()
            now = [*later, *following] or list(window())
        raise DataError(f"task.hub.split={self.hub['split']}: no image in the files of one process")

    def read_passes(self, plan: Plan, mark: Mark) -> Iterator[dict[str, Any] | None]:
        """This process's images from a mark on, in stored order; None ends a pass."""
        files = np.arange(self.stream.num_shards)
        state = mark.state
        first = mark.place
        for epoch in count(mark.epoch):
            order = (
                np.random.default_rng([plan.seed, epoch, 2]).permutation(files)
                if self.hub["buffer"]
                else files
            )
            for place, file in [*enumerate(order[plan.rank :: plan.world].tolist())][first:]:
                self.place = (epoch, place)
                self.part = self.stream.shard(len(files), file)
                if state:
                    self.part.load_state_dict(state)
                state = None
                first = 0
                yield from self.read_examples(self.part)
            yield None

    def read_examples(self, examples: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The examples. Raises DataError if reading fails."""
        try:
            yield from examples
        except Exception as error:  # of tarfile, zlib, the network
            raise DataError(f"{self.hub['name']}: not readable ({reason_of(error)})") from None

    def drop_marks(self, step: int) -> None:
        """Drop the marks that a checkpoint of this step does not need."""
        while len(self.marks) > 1 and self.marks[1].number <= step * self.images_per_step:
            self.marks.popleft()

    def state_dict(self) -> dict[str, Any]:
        return {"stream": json.dumps(self.marks[0]), "processes": world_size()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises DataError if the number of processes changed."""
        processes = state.get("processes")
        if processes != world_size():
            raise DataError(
                f"checkpoint: stream positions of {processes} processes, expected {world_size()}; use the "
                "same number of processes, or another hydra.run.dir"
            )
        self.marks = deque([Mark(*json.loads(state["stream"]))])

    def validation(self, plan: Plan) -> RowBatches:
        """Yield this process's part of the first images, or of a sample of them.

        Raises DataError if the split has fewer images.
        """
        wanted = self.hub["validation_images"]
        examples = enumerate(self.read_examples(self.open_split(self.hub["validation"])))
        for rows in plan.ordered(wanted):
            batch = []
            due = set(rows.tolist())
            while due:
                number, example = next(examples, (None, None))
                if number is None:
                    raise DataError(
                        f"task.hub.validation_images={wanted}: split {self.hub['validation']} has "
                        "fewer; set less"
                    )
                if number in due:
                    due.remove(number)
                    batch.append(self.row_of(number, example))
            yield batch

    def row_of(self, number: int, example: dict[str, Any]) -> Row:
        """Row of an example; raises DataError for a missing image or an invalid label."""
        image = example.get(self.hub["image"])
        label = example.get(self.hub["label"])
        name = f"{self.hub['name']}, {example.get('__key__') or f'image {number}'}"
        if not image or label not in range(len(self.classes)):
            presence = "present" if image else "missing"
            raise DataError(
                f"{name}: {self.hub['image']} is {presence}, {self.hub['label']} "
                f"is {label}, expected 0 to {len(self.classes) - 1}; set task.hub.image, task.hub.label "
                f"(columns: {', '.join(example)}) and task.hub.classes"
            )
        if image["bytes"] is None:
            return number, image["path"], label
        return number, (image["bytes"], name), label


# ---- batches ---------------------------------------------------------------------------------------------------------


class MappedDataset(Dataset):
    """What a function makes of each key."""

    def __init__(self, make: Callable[[Any], Any]):
        self.make = make

    def __getitem__(self, key: Any) -> Any:
        return self.make(key)


def by_workers(make: Callable[[Any], Any], asked: Iterable[Any], workers: int | None) -> DataLoader:
    """Apply `make` to each item in order, in worker processes.

    workers: number of processes; 0: in this process; None: one per core, at most 8.
    """
    if workers is None:  # the processes of a run share the machine's cores
        workers = max(1, min(8, cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    own = torch.Generator()  # else each epoch would draw from the global one
    return DataLoader(
        MappedDataset(make),
        sampler=asked,
        batch_size=None,
        num_workers=workers,
        worker_init_fn=leave_signals,
        generator=own,
    )


@dataclass(eq=False)
class Micro:
    """Builds micro-batches from lists of rows, in any process.

    Args:
        read: returns the PIL.Image of a source, or raises Unreadable.
        transform: PIL.Image to tensor (3, H, W); draws from global generators.
        finish: images (B, 3, H, W), labels (B,) and row generators to a batch.
        rng: row number to generator.
    """

    read: Callable[[Any], Any]
    transform: Callable[[Any], Tensor]
    finish: Callable[[Tensor, Tensor, list[Generator]], dict[str, Tensor]]
    rng: Callable[[int], Generator]

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor] | str:
        """Batch of the rows, or the message of Unreadable: an error that leaves a worker loses it."""
        pixels = []
        labels = []
        draws = []
        for number, source, label in rows:
            try:
                image = self.read(source)
            except images.Unreadable as error:
                return str(error)
            draw = self.rng(number)
            with seeded_globals(draw):
                pixels.append(self.transform(image))
            labels.append(label)
            draws.append(draw)
        return self.finish(torch.stack(pixels), torch.tensor(labels), draws)


@contextmanager
def seeded_globals(draw: Generator) -> Iterator[None]:
    """Seed the global generators from `draw`, and restore them at the end.

    Raises ConfigError outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "task.workers=0: not supported with trainer.prefetch; set trainer.prefetch=0"
        )
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    seeds = draw.integers(2**32, size=3).tolist()
    random.seed(seeds[0])
    np.random.seed(seeds[1])
    torch.default_generator.manual_seed(seeds[2])  # torch.manual_seed would also seed GPUs
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def leave_signals(worker: int) -> None:
    """Ignore SIGINT and SIGHUP in workers; the training process handles both."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
