"""Sets of the Hugging Face hub, and files in its formats, streamed: never stored whole, and shared by processes."""

from collections.abc import Callable, Iterator
from tarfile import TarError
from typing import Any

import numpy as np

from crt_exp.data import DataError


def hub_examples(name: str, config: str | None = None, split: str = "train", rank: int = 0, world: int = 1,
                 seed: int = 0, buffer: int = 10_000, data_files: Any = None,
                 prepared: Callable[[Any], Any] = lambda stream: stream,
                 otherwise: str = "Or give text files of your own.") -> Callable[[int, int], Iterator[dict[str, Any]]]:
    """examples(epoch, skip): this process's part of the set in the order of the pass `epoch`, without the first `skip`.

    name: as on the hub, such as "Salesforce/wikitext" with config "wikitext-103-raw-v1"; or a format such as "text",
    "json" or "webdataset" with `data_files`. The order of each pass is drawn in a window of `buffer` examples (0: as
    stored); ranks take disjoint parts. prepared: changes the stream of `datasets` before it is read. otherwise: what an
    error advises at its end. Raises DataError where the set cannot be had.
    """
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node

    load = lambda: load_dataset(name, config, split=split, streaming=True, data_files=data_files)
    stream = prepared(from_hub(load, name, otherwise))

    def examples(epoch: int, skip: int) -> Iterator[dict[str, Any]]:
        shuffled = stream.shuffle(seed=order_seed(seed, epoch), buffer_size=buffer) if buffer else stream
        return iter(split_dataset_by_node(shuffled, rank=rank, world_size=world).skip(skip))

    return examples


def order_seed(seed: int, epoch: int) -> int:
    """Of the order of a pass."""
    return int(np.random.SeedSequence((seed, 2, epoch)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def from_hub(load: Callable[[], Any], name: str, otherwise: str = "Or give text files of your own.") -> Any:
    """`load()`, whose errors become one DataError: no connection, no such set, no such configuration or split."""
    from datasets.exceptions import DatasetsError

    try:
        return load()
    except (OSError, EOFError, ValueError, TarError, DatasetsError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"{name} cannot be read from the Hugging Face hub: {reason}.\n"
                        "Check the name and the network; without network, a set works that was loaded once "
                        f"(HF_HUB_OFFLINE=1).\n{otherwise}") from None
