"""Fetch files from their official servers and check what is there: the work behind `python -m crt_exp.data`.

A file appears under its name only when it is whole and its content is the published one. Until then it is NAME.part,
which a repeated call continues with an HTTP Range request.
"""

import gzip
import hashlib
import math
import os
import posixpath
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from crt_exp.data import DataError
from crt_exp.data.archives import UNREADABLE, remove, unpack
from crt_exp.data.download import download, published
from crt_exp.data.sources import File, Source

OK, MISSING, TRUNCATED, WRONG, SUBSET = "ok", "missing", "truncated", "wrong content", "subset"
MEDIA = (".flac", ".wav", ".jpg", ".jpeg", ".png")


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
    """A folder with fewer files than published is a subset, which is usable."""
    ending = file.ending or MEDIA
    count = sum(name.lower().endswith(ending) for _, _, names in os.walk(path) for name in names)
    if not count:
        return Finding(WRONG, f"no {f'{file.ending} files' if file.ending else 'recordings or images'} in it")
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
    known = file.digest or recorded(path)
    if known and digest(path, known.split(":")[0]) != known:
        return Finding(WRONG, "other content than published")
    return Finding(OK, f"{rows} rows" if rows else f"{path.stat().st_size} bytes")


def beside(path: Path) -> Path:
    """Where the digest stands that the publisher's list had for a file when it was fetched, as md5sum writes it."""
    return path.with_name(f".{path.name}.md5")


def recorded(path: Path) -> str:
    return f"md5:{beside(path).read_text().split()[0]}" if beside(path).is_file() else ""


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


def sha256_of(path: Path, opened: Callable[..., BinaryIO] = open, kind: str = "sha256") -> str:
    with opened(path, "rb") as stream:
        return hashlib.file_digest(stream, kind).hexdigest()


def sha256_of_letters(path: Path) -> str:
    """Of a FASTA file, without its headers, which change with each release."""
    letters = b"".join(line.strip() for line in path.read_bytes().splitlines() if not line.startswith(b">"))
    return hashlib.sha256(letters).hexdigest()


def sha256_of_gunzipped(path: Path) -> str:
    try:
        return sha256_of(path, gzip.open)
    except UNREADABLE:
        return "not a whole gzip file"


DIGESTS = {"rows": sha256_of_rows, "sha256": sha256_of, "gunzip": sha256_of_gunzipped, "letters": sha256_of_letters,
           "md5": partial(sha256_of, kind="md5"), "sha1": partial(sha256_of, kind="sha1"),
           "size": lambda path: str(path.stat().st_size)}


# ---------------------------------------------------------------------------------------------------- fetching
def fetch(source: Source, root: Path, say: Callable[[str], None] = print, most: float = math.inf) -> None:
    """Bring every file of `source` that is missing or bad below `root`; leave good ones as they are.

    A bad file is replaced, a folder never. most: bytes of a download that need no asking. Raises DataError at the first
    file that cannot be had.
    """
    wanted = []
    for file in source.files:
        finding = inspect(file, root / file.path)
        if finding.state == OK:
            say(f"{root / file.path}: already there, {finding.detail}")
        else:
            wanted.append(fetchable(source, file, finding, root))
    if wanted and source.terms:
        say(f"{source.name}: {source.terms}")
    for url, files in groupby((file for file in wanted if file.url), key=lambda file: file.url):
        fetch_url(source, url, {file: root / file.path for file in files}, say, most)
    for file in wanted:
        if file.made:
            say(f"{root / file.path}: {import_module(f'crt_exp.data.{file.made}').make(root / file.path)}")


def fetchable(source: Source, file: File, finding: Finding, root: Path) -> File:
    """`file`, or the DataError that says why it cannot be fetched."""
    if (root / file.path).is_dir():
        raise DataError(f"{root / file.path} is there already ({finding.detail}); nothing was changed.\n"
                        f"To fetch the whole of {source.name}, move that folder away first.")
    if not file.url and not file.made:
        hint = f"; {source.note}" if source.note else ""
        terms = f" ({source.terms})" if source.terms else ""
        raise DataError(f"{file.path} has no direct link{terms}. Get it from {source.page}{hint},\n"
                        f"and put it at {root / file.path}.")
    return file


def fetch_url(source: Source, url: str, targets: dict[File, Path], say: Callable[[str], None], most: float) -> None:
    """Download `url`, the one file itself or an archive of several, and put the files into place."""
    file, target = next(iter(targets.items()))
    name = posixpath.basename(urlsplit(url).path)
    part = target.with_name(name + ".part")
    try:
        digest_now = published(file.digests, name) if file.digests else file.digest
        download(url, part, f"By hand: get {file.path} from {source.page} and put it at {target}.", bool(file.member),
                 most)
        if file.member:
            install_members(url, part, targets)
        else:
            install(url, replace(file, digest=digest_now), part, target)
        if file.digests:
            beside(target).write_text(f"{digest_now.removeprefix('md5:')}  {name}\n")
    except OSError as error:                                 # disk full, no permission
        raise DataError(f"Cannot write {target}: {error.strerror or error}.") from None
    for file, target in targets.items():
        say(f"{target}: {inspect(file, target).detail}")


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
