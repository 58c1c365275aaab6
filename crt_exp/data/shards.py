"""Tar shards in WebDataset's layout, looked through before anything is read of them.

Readers of tar files take a header that is damaged, or missing, for the end of the archive, and go on with what came
before: a shard of 40 images gives 10 without a word. Here the end must be where the file ends.
"""

import glob
import gzip
import json
import re
import tarfile
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from crt_exp.data import DataError

KEY = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")                # of WebDataset: what stands before the first dot
PICKLED = ("pth", "pt", "pkl", "pickle", "pyd")
END = 1024                                                   # bytes, all zero, that end an archive


class Shard(NamedTuple):
    path: str
    examples: int
    problem: str | None      # where it is damaged


def local(data_files: Any, split: str) -> list[str] | None:
    """The files of a split, sorted by pattern; None where some lie elsewhere than on this machine's disks.

    data_files: a pattern, a list of them, or these by split, as `datasets` takes them. Raises DataError for a pattern
    without a file and a split without a pattern."""
    by_split = data_files if isinstance(data_files, dict) else {split: data_files}
    if split not in by_split:
        raise DataError(f"task.hub.data_files names {', '.join(by_split)} but not {split!r}: add it, or set "
                        "task.hub.split and task.hub.validation to what it names")
    patterns = [by_split[split]] if isinstance(by_split[split], str) else list(by_split[split])
    if any("://" in pattern or pattern.startswith("pipe:") for pattern in patterns):
        return None
    matches = [sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True)) for pattern in patterns]
    if missing := [pattern for pattern, files in zip(patterns, matches) if not files]:
        raise DataError(f"task.hub.data_files: no file fits {missing[0]!r}. A pattern is a path with * in it")
    return [file for files in matches for file in files]


def intact(paths: list[str], skip: bool) -> list[Shard]:
    """Those that are whole. Raises DataError for one that is damaged, or with `skip` says once which are left out."""
    shards = [looked_through(path) for path in paths]
    damaged = [f"{shard.path}: {shard.problem}" for shard in shards if shard.problem]
    if not damaged:
        return shards
    if not skip or len(damaged) == len(shards):
        more = f"; so are {len(damaged) - 1} more shards" if damaged[1:] else ""
        raise DataError(f"{damaged[0]}{more}. Get it again, or leave such shards out: task.unreadable=skip")
    warnings.warn(f"{len(damaged)} of {len(shards)} shards are damaged and left out: {'; '.join(damaged)}",
                  stacklevel=3)
    return [shard for shard in shards if not shard.problem]


def looked_through(path: str) -> Shard:
    """Counts the examples; compares them with WebDataset's own index (index.json in the folder), where there is one.

    Raises DataError for a file that cannot be opened, and for pickled members, which may run code when they are read.
    """
    examples, key = 0, None
    try:
        with tarfile.open(path) as tar:
            for name in names(tar):
                match = KEY.fullmatch(name)
                if match is None:
                    continue
                if match[2].rsplit(".", 1)[-1].lower() in PICKLED:
                    raise DataError(f"{path}: {name} is pickled, and reading it may run what it holds: make the shards "
                                    "without it")
                examples, key = examples + (match[1] != key), match[1]
            problem = after(tar)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        problem = f"damaged behind its {examples} examples ({error})" if examples else f"not a tar file ({error})"
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    return Shard(path, examples, problem or unlike_index(Path(path), examples))


def names(tar: tarfile.TarFile) -> Iterator[str]:
    """Of the members that a reader of examples takes."""
    for member in tar:
        name = member.name.rsplit("/", 1)[-1]
        if member.isreg() and not name.startswith((".", "__")):
            yield member.name
        tar.members = []                                      # else it keeps all headers


def after(tar: tarfile.TarFile) -> str | None:
    """What is wrong with the bytes behind the last member: an archive ends with zeros alone."""
    tar.fileobj.seek(tar.offset)
    rest, size = tar.fileobj.read(1 << 20), 0
    while rest:
        if rest.strip(b"\0"):
            return f"the header at byte {tar.offset} is damaged, and with it all that follows"
        size, rest = size + len(rest), tar.fileobj.read(1 << 20)
    return None if size >= END else f"cut at byte {tar.offset + size}: the end of the archive is missing"


def unlike_index(path: Path, examples: int) -> str | None:
    """Compared with WebDataset's index.json: its shardlist has url, nsamples and filesize of each shard."""
    try:
        listed = json.loads((path.parent / "index.json").read_text())["shardlist"]
        own = next(entry for entry in listed if Path(entry["url"]).name == path.name)
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None                                           # no index, or one of another kind
    if own.get("nsamples", examples) != examples:
        return f"it holds {examples} examples, but index.json says {own['nsamples']}"
    size = path.stat().st_size
    return None if own.get("filesize", size) == size else f"{size} bytes, but index.json says {own['filesize']}"
