"""Sources of all data sets: the table of files, and Hugging Face data sets.

The table sources.csv has a line for each file. Its columns are the fields of `Source` and `File`; fields of the set
stand in the first line of the set. Error messages of loaders and the commands list, fetch and verify read the table.
Paths are relative to the data folder ($CRT_DATA). A new data set is a new line. URLs lead to the publisher's server, or
to the publisher's replacement. The order of articles in WikiText-2's training file differs between copies, so only its
size is checked.
"""

import csv
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypedDict

from crt_exp.atomic_write import atomic_path
from crt_exp.experiments.data import DataError, Folder, warn
from crt_exp.validation import FileName, did_you_mean

Place = Literal["auto", "files", "hub"]  # option task.source


@dataclass(frozen=True)
class File:
    """One file, or one folder that is fetched as a whole.

    Attributes:
        rows: lines that are not blank, or files in a folder; 0: not checked.
        digest: "kind:value"; empty: not checked. Kinds are those of hashlib, `size` (bytes), `gunzip` and `rows`.
            `gunzip` is the SHA-256 of the decompressed content. `rows` is the SHA-256 of the fields, with uniform
            separators and line ends.
    """

    path: str
    url: str = ""  # of the file or its archive; empty: manual download
    member: str = ""  # name inside the archive
    rows: int = 0
    digest: str = ""
    archive_sha256: str = ""
    ending: str = ""  # suffix of files in a folder, added to names without it; empty: audio, images


@dataclass(frozen=True)
class Source:
    """One data set: name for fetch and verify, tasks, official page and files."""

    name: str
    tasks: str
    page: str
    embedded: str = ""  # not empty: needs no file
    size: str = ""  # of the download
    note: str = ""  # how to get the set, and its licence
    hub: str = ""  # name and configuration on the Hugging Face hub
    files: list[File] = field(default_factory=list)


def read_sources() -> dict[str, Source]:
    sources: dict[str, Source] = {}
    of_file = [field.name for field in fields(File)]
    with Path(__file__).with_name("sources.csv").open(newline="", encoding="utf-8") as table:
        for row in csv.DictReader(table):
            file = File(**{name: row.pop(name) for name in of_file})
            source = sources.setdefault(row["name"], Source(**row))
            if file.path:
                source.files.append(replace(file, rows=int(file.rows or 0)))
    return sources


SOURCES = read_sources()


def select(name: str) -> list[Source]:
    """Source called `name`, else all sources in `name`/, such as "uci".

    Raises DataError if there is none.

    >>> [source.name for source in select("uci/car")]
    ['uci/car']
    """
    name = name.strip("/")
    if name in SOURCES:
        return [SOURCES[name]]
    inside = [source for source in SOURCES.values() if source.name.startswith(f"{name}/")]
    if not inside:
        groups = dict.fromkeys(known.split("/")[0] for known in SOURCES)
        expected = f"; expected one of {', '.join(groups)}, or a part such as uci/abalone"
        near = did_you_mean(name, [*groups, *SOURCES])
        raise DataError(f"unknown data set {name!r}{near or expected}")
    return inside


def data_root(folder: Folder = None) -> Path | None:
    """Folder that holds uci/, glue/ and others: `folder`, else $CRT_DATA, else None."""
    folder = folder or os.environ.get("CRT_DATA")
    return Path(folder).expanduser() if folder else None


def task_folder(name: str, data_dir: Folder = None) -> Path | None:
    """Folder of a task's files: `data_dir`, else $CRT_DATA/name, else None.

    data_dir: the option task.data_dir. Raises DataError if $CRT_DATA is not a folder.
    """
    if data_dir:
        return Path(data_dir).expanduser()
    root = data_root()
    if root is None:
        return None
    if not root.is_dir():
        raise DataError(
            f"CRT_DATA={root}: no such folder; expected one with {name}; correct CRT_DATA, or run "
            f"`python -m crt_exp data fetch NAME --dir {root}`"
        )
    return root / name


def refuse_data_dir(data_dir: Folder, by: str) -> None:
    """Raise DataError if a data folder is set for a source that reads none.

    Otherwise a user would believe that the folder was read.
    """
    if data_dir:
        raise DataError(f"task.data_dir={data_dir}: not used by {by}; leave it out")


def missing_file(name: str, path: Path | None, file: int = 0) -> DataError:
    """Error for a missing file of source `name`.

    path: the expected path; None: neither $CRT_DATA nor task.data_dir is set. file: index in the files of the source.
    """
    source = SOURCES[name]
    root = data_root() or Path("DIR")
    wanted = Path(source.files[file].path)
    what = f"{path} is not there" if path else "CRT_DATA is not set"
    on_hub = ", or take the copy on the Hugging Face hub, task.source=hub" if source.hub else ""
    return DataError(
        f"{name} needs {wanted.name}: {what}. Get it with `python -m crt_exp data fetch {name} --dir "
        f"{root}` or from {source.page}, then set CRT_DATA={root} or task.data_dir={root / wanted.parent}"
        + on_hub
    )


PATIENCE = 5  # seconds to wait for the hub


class Hub(TypedDict):
    """A Hugging Face data set, or local files.

    Examples: name "Salesforce/wikitext" with config "wikitext-103-raw-v1"; or name "text", "json" or "webdataset" with
    data_files. Tasks add the columns and splits that they read.
    """

    name: str | None
    config: str | None
    data_files: FileName | Sequence[FileName] | dict[str, FileName | Sequence[FileName]] | None


# ---- files or the hub ------------------------------------------------------------------------------------------------
def is_on_hub(source: str, name: str, path: Path | None, data_dir: Folder = None) -> bool:
    """Whether to read set `name` from the hub, given task.source.

    Args:
        source: auto, files or hub. auto reads files if task.data_dir is set or `path` exists. Else it reads the hub and
            warns.
        path: a file or folder of the set.

    Raises:
        DataError: source=hub with a data folder.
    """
    if source == "hub":
        refuse_data_dir(data_dir, "task.source=hub")
    if source != "auto" or data_dir or (path is not None and path.exists()):
        return source == "hub"
    size = SOURCES[name].size or "size unknown"
    warn("%s: %s of the Hugging Face hub, %s", name, SOURCES[name].hub, size)
    return True


def text_folder(source: str, name: str, data_dir: Folder = None) -> Path | None:
    """Folder with the files of the text `name`.

    A text from the hub is written to files once.
    """
    folder = task_folder(name, data_dir)
    if not is_on_hub(source, name, folder, data_dir):
        return folder
    for file, split in zip(SOURCES[name].files, ("train", "validation", "test")):
        path = written_once(f"{name}/{Path(file.path).name}", partial(hub_lines, name, split))
    return path.parent


def hub_lines(name: str, split: str) -> Sequence[str]:
    """Lines of a split of the text `name` on the hub. Raises DataError."""
    from datasets import load_dataset

    hub, *configs = SOURCES[name].hub.split()
    revision = None if configs else "refs/convert/parquet"  # the main branch holds a script
    load = partial(load_dataset, hub, *configs, revision=revision, split=split)
    rows = from_hub(load, hub, how_to_fetch(name))
    return rows[rows.column_names[0]]


def written_once(name: str, lines: Callable[[], Iterable[str]]) -> Path:
    """File `name` of lines, in the cache of `datasets`; `lines` is called if the file is not there."""
    from datasets import config

    path = Path(config.HF_DATASETS_CACHE, "crt_exp", name)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as part, part.open("w", encoding="utf-8") as stream:
            stream.writelines(line.rstrip("\n") + "\n" for line in lines())
    return path


def stand_in(name: str, read: str, choice: str, source: str) -> str:
    """Value of `Task.stand_in`: the substitute, and how to read `name` instead."""
    return f"no {name} here: {read} (task.{choice} after `python -m crt_exp data fetch {source}`)"


def how_to_fetch(name: str) -> str:
    return (
        f"Or get the files: `python -m crt_exp data fetch {name} --dir DIR`, then set CRT_DATA=DIR"
    )


@cache
def check_network() -> None:
    """Switch Hugging Face libraries to offline mode if the hub does not answer.

    Otherwise the libraries retry for half a minute before they read local copies.
    """
    from huggingface_hub import constants, get_session

    try:
        constants.HF_HUB_OFFLINE or get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # error classes differ between versions
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True


def from_hub(
    load: Callable[[], Any],
    name: str,
    otherwise: str = "Or give files of your own.",
    files: Any = None,
) -> Any:
    """Return `load()`; turn its errors into one DataError.

    Errors include no connection, no such set, and no such configuration or split.

    Args:
        otherwise: advice that ends the message.
        files: local files that are read instead of a hub data set.
    """
    if not files and os.path.exists(name):
        files = name
    if not files:
        check_network()
    try:
        return load()
    except Exception as error:  # each library has its own errors
        if "trust_remote_code" in str(error):
            raise DataError(f"{name}: needs the code of its repository, which is not run") from None
        if files:
            while error.__cause__:  # "An error occurred while generating the dataset"
                error = error.__cause__
            problem = f"not readable from {files}: {reason_of(error)}."
        else:
            problem = f"not readable from the Hugging Face hub: {reason_of(error)}."
            problem += " Check the name and the network."
        raise DataError(f"{name}: {problem} {otherwise}".strip()) from None


def load_rows(
    hub: Hub,
    split: str,
    columns: Sequence[str] = (),
    otherwise: str = "Or give files of your own.",
) -> Any:
    """Split of a Hugging Face data set, or of local files.

    Args:
        columns: keys of `hub` that name columns.
        otherwise: see `from_hub`.

    Raises:
        DataError: the split is unavailable, or lacks a column.
    """
    from datasets import load_dataset

    name = hub["name"]
    files = hub["data_files"]
    load = partial(load_dataset, name, hub["config"], data_files=files, split=split)
    rows = from_hub(load, name, otherwise, files)
    for key in columns:
        if hub[key] not in rows.column_names:
            known = ", ".join(rows.column_names)
            raise DataError(f"task.hub.{key}={hub[key]}: expected a column of {name}: {known}")
    return rows


def reason_of(error: Exception) -> str:
    """First line of an error message, at most 300 characters."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
