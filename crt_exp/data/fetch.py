"""Fetch files from their official servers and check what is there: the work behind `python -m crt_exp.data`.

A file appears under its name only when it is whole and its content is the published one. Until then it is NAME.part,
which a repeated call continues with an HTTP Range request.
"""

import gzip
import hashlib
import os
import posixpath
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from itertools import groupby
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from crt_exp.data import DataError
from crt_exp.data.sources import File, Source

OK, MISSING, TRUNCATED, WRONG, SUBSET = "ok", "missing", "truncated", "wrong content", "subset"
CHUNK = 1 << 20
MEDIA = (".flac", ".wav", ".jpg", ".jpeg", ".png")
UNREADABLE = (zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError)


@dataclass(frozen=True)
class Finding:
    """What `inspect` says of one file: one of the five states above, and the reason in a few words."""

    state: str
    detail: str

    @property
    def bad(self) -> bool:
        return self.state in (TRUNCATED, WRONG)


# ---------------------------------------------------------------------------------------------------- checking
def inspect(file: File, path: Path) -> Finding:
    """Compare what lies at `path` with what `file` should be. It never raises for a bad file."""
    try:
        if not path.exists():
            return Finding(MISSING, "not there")
        if path.is_dir() != file.is_folder:
            return Finding(WRONG, "a folder where a file should be" if path.is_dir() else "a file, not a folder")
        return inspect_folder(file, path) if path.is_dir() else inspect_file(file, path)
    except OSError as error:
        return Finding(WRONG, f"cannot be read ({error.strerror or error})")


def unreadable(folder: Path) -> list[str]:
    """What is wrong with a folder of images; numpy and Pillow are imported only for that."""
    from crt_exp.data import images

    return images.problems(folder)


def inspect_folder(file: File, path: Path) -> Finding:
    """A folder with fewer recordings or images than published is a subset, which is usable."""
    count = sum(name.lower().endswith(MEDIA) for _, _, names in os.walk(path) for name in names)
    if not count:
        return Finding(WRONG, "no recordings or images in it")
    if file.path.startswith("images/") and (wrong := unreadable(path)):
        more = f" And {len(wrong) - 1} more such." if wrong[1:] else ""
        return Finding(WRONG, f"{wrong[0]}{more}".replace("\n", " "))
    if count < file.rows:
        return Finding(SUBSET, f"{count} of {file.rows} files")
    good = count == file.rows or not file.rows
    return Finding(OK, f"{count} files") if good else Finding(WRONG, f"{count} files, not {file.rows}")


def inspect_file(file: File, path: Path) -> Finding:
    rows = count_rows(path, b">" if file.path.endswith(".fasta") else b"") if file.rows else 0
    if rows < file.rows or not path.stat().st_size:
        return Finding(TRUNCATED, f"{rows} of {file.rows} rows" if file.rows else "empty")
    if rows > file.rows and not file.at_least:
        return Finding(WRONG, f"{rows} rows, not {file.rows}")
    if file.digest and digest(path, file.digest.split(":")[0]) != file.digest:
        return Finding(WRONG, "other content than published")
    return Finding(OK, f"{rows} rows" if rows else f"{path.stat().st_size} bytes")


def count_rows(path: Path, start: bytes = b"") -> int:
    """Lines that are not blank and begin with `start`."""
    with open(path, "rb") as lines:
        return sum(line.startswith(start) and not line.isspace() for line in lines)


def digest(path: Path, kind: str) -> str:
    """The digest of `path` as "kind:value"; kinds as in `sources.File`."""
    return f"{kind}:{DIGESTS[kind](path)}"


def sha256_of_rows(path: Path) -> str:
    """Independent of line ends, blank lines, a missing last line end, and spaces around or as separators."""
    text = path.read_text(encoding="utf-8", errors="replace")  # line ends become line feeds
    rows = (line.split(",") if "," in line else line.split() for line in text.split("\n") if line.strip())
    plain = "\n".join(",".join(field.strip() for field in row) for row in rows)
    return hashlib.sha256(plain.encode()).hexdigest()


def sha256_of(path: Path, opened: Callable[..., BinaryIO] = open) -> str:
    with opened(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_of_gunzipped(path: Path) -> str:
    try:
        return sha256_of(path, gzip.open)
    except UNREADABLE:
        return "not a whole gzip file"


DIGESTS = {"rows": sha256_of_rows, "sha256": sha256_of, "gunzip": sha256_of_gunzipped,
           "size": lambda path: str(path.stat().st_size)}


# ---------------------------------------------------------------------------------------------------- fetching
def fetch(source: Source, root: Path, say: Callable[[str], None] = print) -> None:
    """Bring every file of `source` that is missing or bad below `root`; leave good ones as they are.

    A bad file is replaced, a folder never. Raises DataError at the first file that cannot be had.
    """
    wanted = []
    for file in source.files:
        finding = inspect(file, root / file.path)
        if finding.state == OK:
            say(f"{root / file.path}: already there, {finding.detail}")
        else:
            wanted.append(fetchable(source, file, finding, root))
    for url, files in groupby(wanted, key=lambda file: file.url):
        fetch_url(source, url, {file: root / file.path for file in files}, say)


def fetchable(source: Source, file: File, finding: Finding, root: Path) -> File:
    """`file`, or the DataError that says why it cannot be fetched."""
    if (root / file.path).is_dir():
        raise DataError(f"{root / file.path} is there already ({finding.detail}); nothing was changed.\n"
                        f"To fetch the whole of {source.name}, move that folder away first.")
    if not file.url:
        hint = f"; {source.note}" if source.note else ""
        raise DataError(f"{file.path} has no direct link. Get it from {source.page}{hint},\n"
                        f"and put it at {root / file.path}.")
    return file


def fetch_url(source: Source, url: str, targets: dict[File, Path], say: Callable[[str], None]) -> None:
    """Download `url`, the one file itself or an archive of several, and put the files into place."""
    file, target = next(iter(targets.items()))
    part = target.with_name(posixpath.basename(urlsplit(url).path) + ".part")
    try:
        download(url, part, f"By hand: get {file.path} from {source.page} and put it at {target}.")
        if file.member:
            install_members(url, part, targets)
        else:
            install(url, file, part, target)
    except OSError as error:                                 # disk full, no permission
        raise DataError(f"Cannot write {target}: {error.strerror or error}.") from None
    for file, target in targets.items():
        say(f"{target}: {inspect(file, target).detail}")


def download(url: str, part: Path, by_hand: str = "", timeout: float = 30.0) -> None:
    """Write `url` to `part`, continuing what lies there. Raises DataError; then `part` keeps what came.

    Should the file have changed on the server meanwhile, the joined halves fail the check of the content, which every
    plain file in the table has, or the archive's own checksums.
    """
    done = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "crt_exp", "Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout) as reply:
            continued = reply.status == 206 and reply.headers.get("Content-Range", "").startswith(f"bytes {done}-")
            save(reply, part, done if continued else 0)
    except urllib.error.HTTPError as error:
        if error.code == 416 and done:                       # nothing after `done`: whole, or the check will tell
            return
        raise DataError(f"The server refused {url}: {error.code} {error.reason}.\n{by_hand}") from None
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(f"No connection for {url}: {reason}.\n"
                        f"Check the network and run the command again. {by_hand}") from None


def save(reply: HTTPResponse, part: Path, done: int) -> None:
    """Append the body of `reply` to the first `done` bytes of `part`, with a progress bar on a terminal."""
    from tqdm import tqdm

    total = None if reply.length is None else done + reply.length
    part.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "ab" if done else "wb") as out, tqdm(
            total=total, initial=done, desc=part.stem, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        while chunk := reply.read(CHUNK):
            out.write(chunk)
            bar.update(len(chunk))
    size = part.stat().st_size
    if total is not None and size < total:                   # a short body is no error to read()
        raise ConnectionError(f"it broke off after {size} of {total} bytes, which are kept")


def install(url: str, file: File, temporary: Path, target: Path) -> None:
    """Move a complete file or folder to its name, if it is what it should be; else remove it and raise DataError."""
    finding = inspect(file, temporary)
    if finding.state != OK:
        remove(temporary)
        raise DataError(f"{url} gave {target.name} with {finding.detail}: {finding.state}; it was thrown away.\n"
                        "Run the command again. If this comes back, the published file has changed.")
    if temporary.is_file():
        with open(temporary, "rb+") as stream:
            os.fsync(stream.fileno())                        # the content before the name
    os.replace(temporary, target)


def install_members(url: str, part: Path, targets: dict[File, Path]) -> None:
    """Take the files out of the archive `part` and install each; then the archive is removed, as is a bad one."""
    temporary = {file: path.with_name(path.name + ".unpacked") for file, path in targets.items()}
    try:
        check_archive(url, part, next(iter(targets)).archive_sha256)
        unpack(url, part, temporary)
        for file, path in temporary.items():
            install(url, file, path, targets[file])
    except DataError:
        remove(part)
        raise
    finally:
        for path in temporary.values():
            remove(path)
    remove(part)


def check_archive(url: str, part: Path, expected: str) -> None:
    if expected and sha256_of(part) != expected:
        raise DataError(f"{url} gave an archive with another checksum than the published one; it was thrown away.\n"
                        "Run the command again. If this comes back, the published archive has changed.")


def unpack(url: str, part: Path, temporary: dict[File, Path]) -> None:
    """Write the members named in the keys, files or whole folders, to the paths given."""
    for path in temporary.values():
        remove(path)                                         # left by a run that was killed
    try:
        for name, stream in entries(url, part):
            for file, path in temporary.items():
                if name == file.member or name.startswith(file.member + "/"):
                    write(stream, path / name.removeprefix(file.member).lstrip("/"))
    except UNREADABLE as error:
        raise DataError(f"{url} gave an archive that cannot be unpacked ({error}); it was thrown away.\n"
                        "Run the command again.") from None


def entries(url: str, part: Path) -> Iterator[tuple[str, BinaryIO]]:
    """Names and contents of the plain files in an archive. Names are normalised, so that ".." cannot lead out."""
    if url.endswith(".zip"):
        with zipfile.ZipFile(part) as archive:
            for info in archive.infolist():
                if not info.is_dir():
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


def write(stream: BinaryIO, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as out:
        shutil.copyfileobj(stream, out, CHUNK)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
