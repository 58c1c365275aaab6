"""Where every data set comes from: one table, read by the loaders' messages and by list, fetch and verify.

The table is sources.csv, a line for each file, whose columns are the fields of `Source` and `File`; what belongs to the
set stands in its first line. Paths are relative to the data folder ($CRT_DATA), whose subfolders are named as in the
table. A new data set is a new line; URLs lead to the publisher's own server, or to the publisher's stand-in where that
server is gone. UCI no longer lists the Boston housing data: StatLib is where they were first published. The order of
the articles in WikiText-2's training file differs between copies, so only its size is checked.
"""

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from crt_exp.data import DataError

UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


@dataclass(frozen=True)
class File:
    """One file, or one folder that is taken whole.

    rows: lines that are not blank (sequences in a FASTA file, recordings or images in a folder); 0 = not checked.
    digest: "kind:value", with kind `rows` (sha256 of the fields, separators and line ends made alike), `sha256`,
    `sha1`, `md5`, `gunzip` (sha256 of the decompressed content), `letters` (sha256 of a FASTA file without its headers)
    or `size` (bytes). Empty: only the rows are checked.
    """

    path: str
    url: str = ""                # the file or the archive that holds it; empty: it can only be got by hand
    member: str = ""             # its name inside the archive
    rows: int = 0
    at_least: bool = False       # `rows` is a lower bound, for what changes with each release
    digest: str = ""
    archive_sha256: str = ""
    digests: str = ""            # the publisher's list of md5 sums, for what changes with each release
    ending: str = ""             # of a folder's files, put behind names that lack it; empty: recordings, images
    made: str = ""               # the module of this package whose `make(path)` makes it of the files before it

    @property
    def is_folder(self) -> bool:
        return "." not in self.path.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Source:
    """One data set: the name for fetch and verify, which tasks read it, its official page and its files."""

    name: str
    tasks: str
    page: str
    files: tuple[File, ...] = ()
    embedded: bool = False       # usable without any file
    size: str = ""               # of the download
    note: str = ""
    licence: str = ""            # and what it asks

    @property
    def bytes(self) -> float:
        """Of the download; 0 where the table does not say."""
        number, _, unit = self.size.partition(" ")
        return float(number) * UNITS[unit] if unit in UNITS else 0.0

    @property
    def terms(self) -> str:
        """Size and licence in words, where they are known."""
        size = f"{self.size} to download" if self.bytes else ""
        return ", ".join(filter(None, (size, f"licence: {self.licence}" if self.licence else "")))


def rows_of(table: str) -> Iterator[dict[str, str]]:
    """The lines of a csv file of this folder."""
    with Path(__file__).with_name(table).open(newline="", encoding="utf-8") as stream:
        yield from csv.DictReader(stream)


def read_sources() -> dict[str, Source]:
    result: dict[str, Source] = {}
    for row in rows_of("sources.csv"):
        name, rows = row["name"], int(row["rows"] or 0)
        source = result.setdefault(name, Source(name, row["tasks"], row["page"], (), bool(row["embedded"]), row["size"],
                                                row["note"], row["licence"]))
        file = File(row["path"], row["url"], row["member"], rows, bool(row["at_least"]), row["digest"],
                    row["archive_sha256"], row["digests"], row["ending"], row["made"])
        result[name] = replace(source, files=(*source.files, file)) if file.path else source
    return result


SOURCES = read_sources()
TABLE = tuple(SOURCES.values())


def select(name: str) -> list[Source]:
    """The source called `name`, else all below it ("uci" is every uci/...). DataError where there is none."""
    name = name.strip("/")
    sources = [source for source in TABLE if source.name == name] or [
        source for source in TABLE if source.name.startswith(name + "/")]
    if not sources:
        raise DataError(f"There is no data set {name!r}. Known: {', '.join(groups())},\n"
                        "or one set of them such as uci/abalone; `python -m crt_exp.data list` shows all.")
    return sources


def groups() -> list[str]:
    return list(dict.fromkeys(source.name.split("/")[0] for source in TABLE))


def data_root(folder: str | Path | None = None) -> Path | None:
    """The folder that holds uci/, glue/ and so on: `folder`, else $CRT_DATA, else None."""
    folder = folder or os.environ.get("CRT_DATA")
    return Path(folder).expanduser() if folder else None


def task_folder(name: str, data_dir: str | Path | None = None) -> Path | None:
    """The folder of one task's files: `data_dir` (the option task.data_dir), else $CRT_DATA/name, else None."""
    if data_dir:
        return Path(data_dir).expanduser()
    root = data_root()
    return root / name if root else None


def no_folder(data_dir: str | Path | None, by: str, instead: str = "leave it out") -> None:
    """Raises DataError where a folder is given to something that reads none: it would be taken for what was read."""
    if data_dir:
        raise DataError(f"task.data_dir = {data_dir} is not used by {by}: {instead}")


def missing(name: str, path: Path | None, file: int = 0) -> DataError:
    """The error for a file of source `name` that is not at `path`; None: nobody said where the data are."""
    source = SOURCES[name]
    wanted = Path(source.files[file].path)
    what = f"{path} is not there" if path else "CRT_DATA is not set"
    placed = path is not None and path.parts[-len(wanted.parts):] == wanted.parts
    root = Path(*path.parts[:-len(wanted.parts)]) if placed else Path("DIR")
    return DataError(
        f"{name} needs the file {wanted.name}: {what}.\n"
        f"Get it with `python -m crt_exp.data fetch {name} --dir {root}`, or from {source.page},\n"
        f"into {root / wanted.parent}; then set CRT_DATA={root} or task.data_dir={root / wanted.parent}.")
