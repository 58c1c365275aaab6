"""Sets of the Hugging Face hub, and files in its formats, streamed: never stored whole, and shared by processes."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from tarfile import TarError
from typing import Any, TypedDict

import numpy as np

from crt_exp.data import DataError


class Hub(TypedDict):
    """A set, named as on the hub, such as "Salesforce/wikitext" with config "wikitext-103-raw-v1"; or files in a format
    such as "text", "json" or "webdataset". Tasks add what they read of it."""

    name: str | None
    config: str | None
    data_files: str | Sequence[str] | dict[str, Any] | None


def hub_examples(hub: Hub, split: str, rank: int = 0, world: int = 1, seed: int = 0, buffer: int = 10_000,
                 prepared: Callable[[Any], Any] = lambda stream: stream,
                 otherwise: str = "Or give text files of your own.") -> Callable[[int], Iterator[dict[str, Any]]]:
    """examples(epoch): this process's part of a split in the order of the pass `epoch`.

    The order of each pass is drawn in a window of `buffer` examples (0: as stored); ranks take disjoint parts.
    prepared: changes the stream of `datasets` before it is read. otherwise: what an error advises at its end. Raises
    DataError where the set cannot be had.
    """
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node

    load = partial(load_dataset, hub["name"], hub["config"], split=split, streaming=True, data_files=hub["data_files"])
    stream = prepared(from_hub(load, hub["name"], otherwise, first_of(hub["data_files"], split)))

    def examples(epoch: int) -> Iterator[dict[str, Any]]:
        shuffled = stream.shuffle(seed=order_seed(seed, epoch), buffer_size=buffer) if buffer else stream
        return iter(split_dataset_by_node(shuffled, rank=rank, world_size=world))

    return examples


def reason_of(error: Exception) -> str:
    """The first line of what a reader says."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    if text.startswith("invalid literal for int()"):
        return f"a label is not a whole number ({text.rsplit(': ', 1)[-1]})"
    if "share the same prefix or the same types" in text:
        return "its first examples do not all have the same members (an image and a label each)"
    return text


def first_of(data_files: Any, split: str) -> str | None:
    """The first of the files, or of their patterns."""
    while data_files and not isinstance(data_files, str):
        data_files = data_files.get(split) if isinstance(data_files, dict) else data_files[0]
    return data_files or None


def order_seed(seed: int, epoch: int) -> int:
    """Of the order of a pass."""
    return int(np.random.SeedSequence((seed, 2, epoch)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def from_hub(load: Callable[[], Any], name: str, otherwise: str = "Or give text files of your own.",
             files: str | None = None) -> Any:
    """`load()`, whose errors become one DataError: no connection, no such set, no such configuration or split.

    files: those that are read in place of a set of the hub.
    """
    from datasets.exceptions import DatasetsError

    try:
        return load()
    except (OSError, EOFError, ValueError, TarError, DatasetsError) as error:
        reason = reason_of(error)
        if files:
            raise DataError(f"{name} cannot read {files}: {reason}.") from None
        raise DataError(f"{name} cannot be read from the Hugging Face hub: {reason}.\n"
                        "Check the name and the network; without network, a set works that was loaded once "
                        f"(HF_HUB_OFFLINE=1).\n{otherwise}") from None
