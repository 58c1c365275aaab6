"""Where every data set comes from: one table, folders of files, and sets of the Hugging Face hub.

The table is sources.csv, read by the loaders' messages and by list, fetch and verify: a line for each file, whose
columns are the fields of `Source` and `File`; what belongs to the set stands in its first line. Paths are relative to
the data folder ($CRT_DATA). A new data set is a new line; URLs lead to the publisher's own server, or to the
publisher's stand-in where that server is gone. The order of the articles in WikiText-2's training file differs between
copies, so only its size is checked.
"""

import csv
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, TypedDict

from crt_exp.data import DataError, warn
from crt_exp.atomic_write import whole


@dataclass(frozen=True)
class File:
    """One file, or one folder that is taken whole.

    rows: lines that are not blank (in a folder: its files); 0 = not checked. digest: "kind:value", with a kind of
    hashlib, `size` (bytes), `gunzip` (SHA-256 of the decompressed content) or `rows` (SHA-256 of the fields, separators
    and line ends made alike); empty: not checked.
    """

    path: str
    url: str = ""                # the file or the archive that holds it; empty: it can only be got by hand
    member: str = ""             # its name inside the archive
    rows: int = 0
    digest: str = ""
    archive_sha256: str = ""
    ending: str = ""             # of a folder's files, put behind names that lack it; empty: recordings, images


@dataclass(frozen=True)
class Source:
    """One data set: the name for fetch and verify, which tasks read it, its official page and its files."""

    name: str
    tasks: str
    page: str
    embedded: str = ""           # not empty: usable without any file
    size: str = ""               # of the download
    note: str = ""               # how to get it, and its licence
    hub: str = ""                # its name on the Hugging Face hub, then its configuration there
    files: list[File] = field(default_factory=list)


def rows_of(table: str) -> Iterator[dict[str, str]]:
    """The lines of a csv file of this folder."""
    with Path(__file__).with_name(table).open(newline="", encoding="utf-8") as stream:
        yield from csv.DictReader(stream)


def read_sources() -> dict[str, Source]:
    result: dict[str, Source] = {}
    for row in rows_of("sources.csv"):
        of_set, of_file = ({each.name: row[each.name] for each in fields(kind) if each.name in row}
                           for kind in (Source, File))
        source = result.setdefault(row["name"], Source(**of_set))
        if row["path"]:
            source.files.append(File(**of_file | {"rows": int(row["rows"] or 0)}))
    return result


SOURCES = read_sources()


def select(name: str) -> list[Source]:
    """The source called `name`, else all below it ("uci" is every uci/...). DataError where there is none."""
    name = name.strip("/")
    found = [SOURCES[name]] if name in SOURCES else [SOURCES[each] for each in SOURCES if each.startswith(name + "/")]
    if not found:
        known = ", ".join(dict.fromkeys(each.split("/")[0] for each in SOURCES))
        raise DataError(f"there is no data set {name!r}: expected one of {known}, or a part such as uci/abalone")
    return found


def data_root(folder: str | Path | None = None) -> Path | None:
    """The folder that holds uci/, glue/ and so on: `folder`, else $CRT_DATA, else None."""
    folder = folder or os.environ.get("CRT_DATA")
    return Path(folder).expanduser() if folder else None


def task_folder(name: str, data_dir: str | Path | None = None) -> Path | None:
    """The folder of one task's files: `data_dir` (the option task.data_dir), else $CRT_DATA/name, else None."""
    root = data_root()
    return Path(data_dir).expanduser() if data_dir else root and root / name


def no_folder(data_dir: str | Path | None, by: str, instead: str = "leave it out") -> None:
    """Raises DataError where a folder is given to something that reads none: it would be taken for what was read."""
    if data_dir:
        raise DataError(f"task.data_dir={data_dir} is not used by {by}: {instead}")


def missing(name: str, path: Path | None, file: int = 0) -> DataError:
    """The error for a file of source `name` that is not at `path`; None: nobody said where the data are."""
    source, root = SOURCES[name], data_root() or Path("DIR")
    wanted = Path(source.files[file].path)
    what = f"{path} is not there" if path else "CRT_DATA is not set"
    on_hub = ", or take the copy on the Hugging Face hub, task.source=hub" if source.hub else ""
    return DataError(f"{name} needs {wanted.name}: {what}. Get it with `python -m crt_exp.data fetch {name} --dir "
                     f"{root}` or from {source.page}, then set CRT_DATA={root} or task.data_dir={root / wanted.parent}"
                     + on_hub)


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


def stand_in(name: str, read: str, choice: str, source: str) -> str:
    """For `Task.stand_in`: what is read in place of `name`, which a choice reads after `fetch source`."""
    return f"no {name} here: {read} (task.{choice} after `python -m crt_exp.data fetch {source}`)"


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


def reason_of(error: Exception) -> str:
    """The first line of what a reader says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
