"""Files out of archives that others made: nothing is written outside the folder that is meant, no link is followed, and
an archive that unpacks to much more than it is, is refused.
"""

import gzip
import posixpath
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from crt_exp.data import DataError
from crt_exp.data.sources import File

CHUNK, BLOCK = 1 << 20, 1 << 12  # bytes copied at once; those that even an empty file takes
RATIO, FLOOR = 100, 1 << 30  # times its size, or bytes, that an archive may unpack to; texts reach 10 times
UNREADABLE = (zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, RuntimeError)


class TooLarge(Exception):
    """An archive unpacks to more than it may."""


def unpack(url: str, part: Path, temporary: dict[File, Path]) -> None:
    """Write the members named in the keys, files or whole folders, to the paths given. Raises DataError."""
    for path in temporary.values():
        remove(path)                                         # left by a run that was killed
    left = max(RATIO * part.stat().st_size, FLOOR)
    try:
        for name, stream in entries(url, part):
            for file, path in temporary.items():
                if name == file.member or name.startswith(file.member + "/"):
                    left -= write(stream, path / inside(file, name), left)
    except TooLarge:
        raise DataError(f"{url} gave an archive of {part.stat().st_size} bytes that unpacks to more than {RATIO} times "
                        "as much; it was thrown away.\nNo published one does: do not fetch it again.") from None
    except UNREADABLE as error:
        raise DataError(f"{url} gave an archive that cannot be unpacked ({error}); it was thrown away.\n"
                        "Run the command again.") from None


def inside(file: File, name: str) -> str:
    """Where an entry lies below the path of its file, with the ending that files of the folder have."""
    below = name.removeprefix(file.member).lstrip("/")
    return below + file.ending if below and not below.endswith(file.ending) else below


def entries(url: str, part: Path) -> Iterator[tuple[str, BinaryIO]]:
    """Names and contents of the plain files in an archive, links left out. Names are normalised, so that ".." cannot
    lead out."""
    if url.endswith(".zip"):
        with zipfile.ZipFile(part) as archive:
            for info in archive.infolist():
                if not info.is_dir() and not stat.S_ISLNK(info.external_attr >> 16):
                    with archive.open(info) as stream:
                        yield posixpath.normpath(info.filename), stream
    elif url.endswith((".tgz", ".tar.gz")):
        with gzip.open(part) as plain, tarfile.open(fileobj=plain, mode="r|") as archive:
            for info in archive:
                if info.isfile():
                    yield posixpath.normpath(info.name), archive.extractfile(info)
            while plain.read(CHUNK):                         # only the end of the stream checks its checksum
                pass
    else:
        with gzip.open(part) as stream:
            yield posixpath.basename(url).removesuffix(".gz"), stream


def write(stream: BinaryIO, path: Path, most: int) -> int:
    """How many bytes it took. Raises TooLarge where it would be more than `most`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = BLOCK
    with open(path, "wb") as out:
        while size <= most and (chunk := stream.read(CHUNK)):
            size += len(chunk)
            out.write(chunk)
    if size > most:
        raise TooLarge
    return size


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
