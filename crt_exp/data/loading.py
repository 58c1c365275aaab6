"""Micro-batches made by worker processes, and the images of these, listed or streamed, decoded and augmented.

They are the same for any number of workers and after any resume: the process that trains makes the order, and before a
row is augmented the generators of Python, NumPy and torch are seeded from the row's own, and put back afterwards.
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

from crt_exp.config import ConfigError
from crt_exp.data import DataError, images, world_size
from crt_exp.data.sources import Hub, from_hub, reason_of
from crt_exp.data.plan import Plan
from crt_exp.options import Count, Whole

Draw = np.random.Generator
Row = tuple[int, Any, int]     # its number, which decides what is drawn, what `read` takes, and its label
Asked = Iterator[list[Row]]    # micro-batches, yet to be read
Workers = Annotated[int, Field(ge=0, le=128)] | None


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


class Mark(NamedTuple):
    """Where a window of a stream begins. number: images that this process has read before; place: of the file among
    its files of the pass; state: of `datasets`, within that file."""

    number: int = 0
    epoch: int = 0
    place: int = 0
    state: dict[str, Any] | None = None


class Streamed:
    """Images that `datasets` streams: "train" without end, and of "val" the first `validation_images`.

    Processes share out the files of each pass, in a new order. A process draws the order of its images in windows of
    `buffer`. A checkpoint holds the mark of the window under way, and a run that goes on reads that window again.
    """

    def __init__(self, hub: ImageHub):
        self.hub, self.marks = hub, deque([Mark()])
        self.stream = self.split(hub["split"])
        if (files := self.stream.num_shards) < world_size():
            raise DataError(f"task.hub.split={hub['split']}: {files} files for {world_size()} processes, expected one "
                            "for each; start fewer processes, or cut the files")
        names = getattr((self.stream.features or {}).get(hub["label"]), "names", [])
        self.classes = tuple(names or map(str, range(hub["classes"] or 0)))

    def split(self, name: str) -> Any:
        """An IterableDataset of images as they are stored. Raises DataError."""
        from datasets import Image, load_dataset

        hub, files = self.hub, self.hub["data_files"]
        load = partial(load_dataset, hub["name"], hub["config"], split=name, streaming=True, data_files=files)
        stream = from_hub(load, hub["name"], "Or give a folder, task.data_dir.", files)
        return stream.cast_column(hub["image"], Image(decode=False))

    def training(self, plan: Plan, repeats: int = 1) -> Asked:
        """Pass after pass, each image `repeats` times; rows are numbered over all passes and processes."""
        size = plan.batch // plan.world // plan.micro
        self.marks, self.images_per_step = deque([self.marks[0]]), plan.micro * size / repeats
        first = self.marks[0].number * repeats
        every = chain.from_iterable(repeat(each, repeats) for each in self.shuffled(plan))
        mine = islice(enumerate(every, first), plan.start * plan.micro * size - first, None)
        while True:
            yield [self.row(number * plan.world + plan.rank, each) for number, each in islice(mine, size)]

    def shuffled(self, plan: Plan) -> Iterator[dict[str, Any]]:
        """This process's images from the first mark on; each one that leaves a window brings in one of the next."""
        number, examples = self.marks[0].number, self.passes(plan, self.marks[0])

        def window() -> Iterator[dict[str, Any]]:
            return islice(iter(partial(next, examples), None), self.hub["buffer"] or 1)

        now = list(window()) or list(window())               # empty where a pass is just over
        while now:
            np.random.default_rng([plan.seed, plan.rank, number, 2]).shuffle(now)
            number += len(now)
            self.marks.append(Mark(number, *self.place, self.part.state_dict()))
            later, following = [], window()
            while now:
                later += islice(following, 1)
                yield now.pop()
            now = [*later, *following] or list(window())
        raise DataError(f"task.hub.split={self.hub['split']}: a process found no image in its files")

    def passes(self, plan: Plan, mark: Mark) -> Iterator[dict[str, Any] | None]:
        """This process's images from a mark on, as they are stored; None at the end of each pass."""
        files, state, first = np.arange(self.stream.num_shards), mark.state, mark.place
        for epoch in count(mark.epoch):
            order = np.random.default_rng([plan.seed, epoch, 2]).permutation(files) if self.hub["buffer"] else files
            for place, file in [*enumerate(order[plan.rank::plan.world].tolist())][first:]:
                self.place, self.part = (epoch, place), self.stream.shard(len(files), file)
                if state:
                    self.part.load_state_dict(state)
                state, first = None, 0
                yield from self.readable(self.part)
            yield None

    def readable(self, examples: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """All of them. Raises DataError where reading fails."""
        try:
            yield from examples
        except Exception as error:  # of tarfile, zlib, the network
            raise DataError(f"{self.hub['name']} cannot be read: {reason_of(error)}") from None

    def trained(self, step: int) -> None:
        """Forget the marks that a checkpoint of this step does not need."""
        while len(self.marks) > 1 and self.marks[1].number <= step * self.images_per_step:
            self.marks.popleft()

    def state_dict(self) -> dict[str, Any]:
        return {"stream": json.dumps(self.marks[0]), "processes": world_size()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises DataError for the checkpoint of another number of processes, or of a version that kept no mark."""
        if state.get("processes") != world_size():
            raise DataError(f"the checkpoint has stream positions of {state.get('processes', 0)} processes, expected "
                            f"{world_size()}; continue with as many, or start over in another hydra.run.dir")
        self.marks = deque([Mark(*json.loads(state["stream"]))])

    def validation(self, plan: Plan) -> Asked:
        """This process's part of the first images, in order. Raises DataError where there are fewer."""
        wanted = self.hub["validation_images"]
        at, last = (wanted * rank // plan.world for rank in (plan.rank, plan.rank + 1))
        mine = islice(enumerate(self.readable(self.split(self.hub["validation"]))), at, last)
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


class Made(Dataset):
    """What a function makes of each key."""

    def __init__(self, make: Callable[[Any], Any]):
        self.make = make

    def __getitem__(self, key: Any) -> Any:
        return self.make(key)


def by_workers(make: Callable[[Any], Any], asked: Iterable[Any], workers: int | None) -> DataLoader:
    """`make` of all that is asked, in order, by worker processes (0: by this one; None: one a core, at most 8)."""
    if workers is None:                                      # the processes of a run share the machine's cores
        workers = max(1, min(8, cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    own = torch.Generator()                                  # else each epoch would draw from the global one
    return DataLoader(Made(make), sampler=asked, batch_size=None, num_workers=workers, worker_init_fn=leave_signals,
                      generator=own)


@dataclass(eq=False)
class Micro:
    """Makes micro-batches of lists of rows, wherever it is called.

    read: a source to a PIL.Image, raises Unreadable. transform: that to a tensor (3, H, W), drawing from global
    generators. finish: images (B, 3, H, W), labels (B,) and the rows' generators to the batch. rng: a row's generator.
    """

    read: Callable[[Any], Any]
    transform: Callable[[Any], Tensor]
    finish: Callable[[Tensor, Tensor, list[Draw]], dict[str, Tensor]]
    rng: Callable[[int], Draw]

    def __call__(self, rows: Sequence[Row]) -> tuple[dict[str, Tensor] | None, list[str]]:
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
