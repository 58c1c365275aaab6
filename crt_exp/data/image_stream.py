"""Images of the Hugging Face hub, and tar shards in WebDataset's layout, streamed.

The process that trains reads the encoded images in order and hands them to the workers, which decode: so the order and
what is drawn do not depend on the number of workers, and a continued run reads what came before without decoding it.
"""

from collections.abc import Iterator
from itertools import chain, count, islice, repeat
from typing import Any

from crt_exp.config import ConfigError
from crt_exp.data import DataError, shards
from crt_exp.data import images as data
from crt_exp.data.hub import Hub, hub_examples, reason_of
from crt_exp.data.loading import Example
from crt_exp.data.plan import Plan
from crt_exp.options import Count, Whole

WEBDATASET = "webdataset"                                    # of data_files that are tar shards


class ImageHub(Hub):
    """What is read of it."""

    split: str
    validation: str
    image: str
    label: str
    classes: Count | None
    buffer: Whole
    validation_images: Count


class Streamed:
    """Splits "train", without end, and "val", of which the first `validation_images` are read.

    skip: shards that are damaged are named and left out; without it they are a DataError, as too few images are."""

    def __init__(self, hub: ImageHub, skip: bool = False):
        self.hub = hub
        if hub["name"] == WEBDATASET:
            self.hub = hub | {"data_files": self.whole_shards(skip)}
        self.classes = self.class_names()

    def whole_shards(self, skip: bool) -> Any:
        """The shards of both splits, those on this machine looked through."""
        hub, files = self.hub, {}
        for split, least in ((hub["split"], 1), (hub["validation"], hub["validation_images"])):
            paths = shards.local(hub["data_files"], split)
            if paths is None:
                return hub["data_files"]
            whole = shards.intact(paths, skip)
            count = sum(shard.examples for shard in whole)
            if count < least:
                raise self.too_few(count) if count else DataError(f"{paths[0]} holds no example: members are named "
                                                                  "KEY.jpg and KEY.cls")
            files[split] = [shard.path for shard in whole]
        return files

    def too_few(self, count: int) -> DataError:
        return DataError(f"task.hub.validation_images = {self.hub['validation_images']}, but {self.hub['validation']} "
                         f"holds {count} images: set it to {count} or less")

    def class_names(self) -> tuple[str, ...]:
        """Those that the set tells, else numbers. Raises ConfigError where nobody says how many."""
        streams: list[Any] = []
        self.examples(self.hub["split"], prepared=lambda stream: streams.append(stream.features) or stream)
        names = getattr((streams[0] or {}).get(self.hub["label"]), "names", None)
        if names is None and self.hub["classes"] is None:
            raise ConfigError(f"{self.hub['name']} does not say how many classes it has: set task.hub.classes")
        if names is not None and self.hub["classes"] not in (None, len(names)):
            raise ConfigError(f"task.hub.classes = {self.hub['classes']}: {self.hub['name']} has {len(names)}; leave "
                              "it out")
        return tuple(names or map(str, range(self.hub["classes"])))

    def examples(self, split: str, **options: Any):
        return hub_examples(self.hub, split, otherwise="Or name a folder of images, task.dataset or task.data_dir.",
                            **options)

    def encoded(self, stream: Any) -> Any:
        """The stream with its images as they are stored."""
        from datasets import Image

        if stream.features is not None and self.hub["image"] not in stream.features:
            raise ConfigError(f"{self.hub['name']} has no column {self.hub['image']!r}; it has "
                              f"{', '.join(stream.features)}: set task.hub.image and task.hub.label (jpg and cls in "
                              "WebDataset's shards)")
        return stream.cast_column(self.hub["image"], Image(decode=False))

    def length(self, split: str) -> int | None:
        return None if split == "train" else self.hub["validation_images"]

    def asked(self, split: str, plan: Plan, repeats: int = 1) -> Iterator[list[Example]]:
        """The micro-batches that `plan` names, yet to be decoded."""
        return self.training(plan, repeats) if split == "train" else self.validation(plan)

    def training(self, plan: Plan, repeats: int) -> Iterator[list[Example]]:
        """Pass after pass, each image `repeats` times; rows are numbered over all passes and processes."""
        rows = plan.batch // plan.world // plan.micro
        passes = self.examples(self.hub["split"], rank=plan.rank, world=plan.world, seed=plan.seed,
                               buffer=self.hub["buffer"], prepared=self.encoded)
        read = chain.from_iterable(self.whole(passes(epoch)) for epoch in count())
        numbered = enumerate(chain.from_iterable(repeat(example, repeats) for example in read))
        mine = islice(numbered, plan.start * plan.micro * rows, None)
        while True:
            yield [self.example(number * plan.world + plan.rank, example) for number, example in islice(mine, rows)]

    def validation(self, plan: Plan) -> Iterator[list[Example]]:
        """This process's part of the first images, in order."""
        read = self.whole(self.examples(self.hub["validation"], buffer=0, prepared=self.encoded)(0))
        first, last = (self.hub["validation_images"] * rank // plan.world for rank in (plan.rank, plan.rank + 1))
        mine = islice(enumerate(read), first, last)
        count = first
        while batch := [self.example(number, example) for number, example in islice(mine, plan.batch)]:
            count += len(batch)
            yield batch
        if count < last:
            raise self.too_few(count)

    def whole(self, examples: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """All examples of a pass. Raises DataError where there is none, and where a file ends before its time."""
        number, file = 0, ""
        try:
            for example in examples:
                number, file = number + 1, example.get("__url__", "")
                yield example
        except DataError:
            raise
        except Exception as error:  # tarfile and zlib have their own
            place = f"{number} (of {file})" if file else number
            raise DataError(f"{self.hub['name']} cannot be read after its image {place}: {reason_of(error)}") from None
        if not number:
            raise DataError(f"{self.hub['name']} has no image for this process: it needs one for each process")

    def example(self, number: int, example: dict[str, Any]) -> Example:
        """Raises DataError for a label that is no class, and where there is no image."""
        image, label = example.get(self.hub["image"]), example.get(self.hub["label"])
        name = str(example.get("__key__") or (image or {}).get("path") or f"image {number}")
        if not image:
            raise DataError(f"{self.hub['name']}, {name}: there is no {self.hub['image']}. Check task.hub.image, or "
                            "leave such examples out of the set.")
        if not isinstance(label, int) or not 0 <= label < len(self.classes):
            raise DataError(f"{self.hub['name']}, {name}: {self.hub['label']} = {label} is none of the "
                            f"{len(self.classes)} classes. Check task.hub.label and task.hub.classes.")
        return Example(number, (image["bytes"], f"{self.hub['name']}, {name}"), label)

    def read(self, source: tuple[bytes, str]) -> Any:
        return data.read(*source)
