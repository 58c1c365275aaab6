"""Sets of the Hugging Face hub: when they are read in place of files, and how they are streamed."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from crt_exp.atomic_write import whole
from crt_exp.data import DataError
from crt_exp.data.cache import warn
from crt_exp.data.sources import SOURCES, no_folder, task_folder

PATIENCE = 5  # seconds for the hub's first answer


class Hub(TypedDict):
    """A set, named as on the hub, such as "Salesforce/wikitext" with config "wikitext-103-raw-v1"; or files in a format
    such as "text", "json" or "webdataset". Tasks add what they read of it."""

    name: str | None
    config: str | None
    data_files: str | Sequence[str] | dict[str, Any] | None


# ---- files or the hub ------------------------------------------------------------------------------------------------
def is_on_hub(source: str, name: str, path: Path | None, data_dir: str | Path | None = None) -> bool:
    """Whether task.source = auto, files or hub means the hub for the set `name` of the table of sources.

    auto: files where task.data_dir is set or `path`, a file or folder of the set, is there; else the hub, with a line
    that says so. Raises DataError for a folder that the hub has no use for.
    """
    if source == "hub":
        no_folder(data_dir, "task.source=hub", "leave it out, or set task.source=files")
    if source != "auto" or data_dir or (path is not None and path.exists()):
        return source == "hub"
    size = SOURCES[name].size
    warn("%s: %s of the Hugging Face hub%s", name, SOURCES[name].hub, f", {size}" if size else "")
    return True


def text_folder(source: str, name: str, data_dir: str | Path | None = None) -> Path | None:
    """The folder with the files of the text `name`, which are written once where they come from the hub."""
    files, folder = SOURCES[name].files, task_folder(name, data_dir)
    if not is_on_hub(source, name, folder, data_dir):
        return folder
    from datasets import config, load_dataset

    folder = Path(config.HF_DATASETS_CACHE, "crt_exp", name)
    folder.mkdir(parents=True, exist_ok=True)
    hub, *configs = SOURCES[name].hub.split()
    revision = None if configs else "refs/convert/parquet"   # of a set whose own branch holds a script
    for file, split in zip(files, ("train", "validation", "test")):
        path = folder / Path(file.path).name
        if not path.is_file():
            load = partial(load_dataset, hub, *configs, revision=revision, split=split)
            rows = from_hub(load, hub, how_to_fetch(name))
            with whole(path) as part:
                lines = (line.rstrip("\n") + "\n" for line in rows[rows.column_names[0]])
                part.write_text("".join(lines), encoding="utf-8")
    return folder


def how_to_fetch(name: str) -> str:
    return f"Or get the files: `python -m crt_exp.data fetch {name} --dir DIR`, then set CRT_DATA=DIR"


@cache
def check_network() -> None:
    """Where the hub does not answer, its libraries read their copies at once, without attempts for half a minute."""
    from huggingface_hub import constants, get_session

    try:
        constants.HF_HUB_OFFLINE or get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # each version's client has its own
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True


def from_hub(load: Callable[[], Any], name: str, otherwise: str = "Or give text files of your own.",
             files: Any = None) -> Any:
    """`load()`, whose errors become one DataError: no connection, no such set, no such configuration or split.

    files: those that are read in place of a set of the hub. otherwise: what else to do.
    """
    if not files:
        check_network()
    try:
        return load()
    except Exception as error:  # each library and format has its own
        place, check = (files, "") if files else ("the Hugging Face hub", " Check the name and the network.")
        raise DataError(f"{name} cannot be read from {place}: {reason_of(error)}.{check} {otherwise}") from None


# ---- streams ---------------------------------------------------------------------------------------------------------
def hub_examples(hub: Hub, split: str, rank: int = 0, world: int = 1, seed: int = 0, buffer: int = 10_000,
                 prepared: Callable[[Any], Any] = lambda stream: stream,
                 otherwise: str = "Or give text files of your own.") -> Callable[[int], Iterator[dict[str, Any]]]:
    """examples(epoch): this process's part of a split in the order of the pass `epoch`.

    The order of each pass is drawn in a window of `buffer` examples (0: as stored); ranks take disjoint parts.
    prepared: changes the stream of `datasets` before it is read. otherwise: what an error advises. Raises DataError
    where the set cannot be had.
    """
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node

    load = partial(load_dataset, hub["name"], hub["config"], split=split, streaming=True, data_files=hub["data_files"])
    stream = prepared(from_hub(load, hub["name"], otherwise, hub["data_files"]))

    def examples(epoch: int) -> Iterator[dict[str, Any]]:
        shuffled = stream.shuffle(seed=order_seed(seed, epoch), buffer_size=buffer) if buffer else stream
        return iter(split_dataset_by_node(shuffled, rank=rank, world_size=world))

    return examples


def reason_of(error: Exception) -> str:
    """The first line of what a reader says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def order_seed(seed: int, epoch: int) -> int:
    """Of the order of a pass."""
    return int(np.random.SeedSequence((seed, 2, epoch)).generate_state(1, np.uint64)[0] >> np.uint64(1))
