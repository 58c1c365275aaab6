"""Where every data set comes from: one table, read by the loaders' messages and by list, fetch and verify.

The table is sources.csv, a line for each file, whose columns are the fields of `Source` and `File`; what belongs to the
set stands in its first line. Paths are relative to the data folder ($CRT_DATA). A new data set is a new line; URLs lead
to the publisher's own server, or to the publisher's stand-in where that server is gone. The order of the articles in
WikiText-2's training file differs between copies, so only its size is checked.
"""

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

from crt_exp.data import DataError


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
