"""FASTA files of proteins (plain or gz), UniProt's with its headers or any others, and an index of their sequences.

The index holds letters as numbers, memory-mapped, and is built once for a list of files. It is stale where a file has
another size than when it was built, or another time of change and another checksum, and where one of its own files is
not as it was written, by its digest: then it is built again, and said.
"""

import gzip
import hashlib
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from crt_exp.data import DataError
from crt_exp.data.cache import alone, key_of, warn
from crt_exp.data.endings import files_ending

FORMAT = 3
BLOCK = 1 << 22                                              # bytes that are read at once
BATCH = 1 << 14                                              # entries that are written at once
LONGEST = 1 << 24                                            # bytes of an entry; proteins have up to 45,000
SAMPLED = 1 << 30                                            # bytes of an index file: larger ones are sampled
LONGEST_NAME = 16                                            # bytes of an accession; UniProt's have 10, isoforms 13
HEADER = re.compile(rb"(?:sp|tr)\|([^|\s]+?)(?:\.\d+)?(?:[|\s]|$)")   # without the version of the sequence
SUFFIXES = (".fasta", ".fa", ".faa", ".fas", ".pep")         # not .fna: nucleotides, whose letters are known too
ENDINGS = (*SUFFIXES, *(ending + ".gz" for ending in SUFFIXES))
ARRAYS = {"tokens": np.uint8, "ends": np.int64, "accessions": f"S{LONGEST_NAME}", "hashes": np.uint32,
          "files": np.uint16}
UNKNOWN = 255


class FastaEntry(NamedTuple):
    """One sequence: its accession, its letters as numbers, the line of its header, and whether that is UniProt's."""

    accession: bytes
    tokens: bytes
    line: int
    official: bool


# ---- files -----------------------------------------------------------------------------------------------------------


def fasta_files(folder: Path) -> list[Path]:
    """Those of a folder, by name; says in a line what else lies there."""
    return [Path(file) for file in files_ending(folder, ENDINGS, folder.iterdir())]


def stem(path: Path) -> str:
    """The name without .fasta and .gz."""
    return (path.stem if path.suffix.lower() == ".gz" else path.name).rsplit(".", 1)[0]


def entries(path: Path, letters: str) -> Iterator[FastaEntry]:
    """The sequences of a file; a letter is its place in `letters`. Raises DataError, naming the line."""
    table = bytes(letters.encode().find(bytes([i])) % 256 for i in range(256))
    for line, record in records(path):
        header, _, body = record.partition(b"\n")
        accession = name_of(path, line, header)
        tokens = body.translate(table, b"\n")
        if UNKNOWN in tokens:
            raise unknown_letter(path, line, accession, body, letters)
        if not tokens:
            raise DataError(f"{path}, line {line}: {accession.decode(errors='replace')} has no sequence.")
        yield FastaEntry(accession, tokens, line, is_official(header))


def is_official(header: bytes) -> bool:
    return header.startswith((b"sp|", b"tr|"))


def name_of(path: Path, line: int, header: bytes) -> bytes:
    """UniProt's accession; of another header its first word; where that is longer than what is kept a digest of it.
    Raises DataError, naming the line."""
    match = HEADER.match(header) if is_official(header) else re.match(rb"\s*(\S+)", header)
    if match is None and is_official(header):
        raise DataError(f"{path}, line {line}: {shown(b'>' + header)} names no accession, as >sp|P12345|NAME does.")
    if match is None:
        raise DataError(f"{path}, line {line}: the header names no sequence: write >NAME.")
    return match[1] if len(match[1]) <= LONGEST_NAME else digest(match[1])


def digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest()[:LONGEST_NAME].encode()


def records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each entry without its ">", and the line that it begins at. Raises DataError."""
    line, pieces, end = 1, [], None                         # of the entry that is being read; a line feed held back
    for block in with_line_feeds(blocks(path)):
        if end is None and not block.startswith(b">"):
            begins = shown(block.partition(b"\n")[0])
            raise DataError(f"{path}, line 1: {begins} is no header: a FASTA file begins with '>'.")
        block = block[1:] if end is None else end + block
        end = b"\n" if block.endswith(b"\n") else b""       # ">" may begin the next block
        *complete, rest = block[:len(block) - len(end)].split(b"\n>")
        for piece in complete:
            record, pieces = b"".join((*pieces, piece)), []
            yield line, record
            line += record.count(b"\n") + 1
        pieces.append(rest)
        if sum(map(len, pieces)) > LONGEST:
            raise DataError(f"{path}, line {line}: an entry of more than {LONGEST} bytes. Is it a file of proteins?")
    if end is None:
        raise DataError(f"{path}: the file is empty.")
    yield line, b"".join((*pieces, end))


def with_line_feeds(read: Iterable[bytes]) -> Iterator[bytes]:
    """The same content with its lines ended by line feeds, where they end with carriage returns, or with both."""
    held = b""                                               # a carriage return whose line feed may come next
    for block in read:
        block = held + block
        held = b"\r" if block.endswith(b"\r") else b""
        if block := block.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n"):
            yield block
    if held:
        yield b"\n"


def blocks(path: Path) -> Iterator[bytes]:
    """The content, unpacked where it is packed. Raises DataError."""
    size = 0
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as stream:
            while block := stream.read(BLOCK):
                size += len(block)
                yield block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the gz file is cut off or damaged, after {size} bytes of content or a little later "
                        f"({error}). Get it again.") from None
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read ({error.strerror or error}).") from None


def unknown_letter(path: Path, line: int, accession: bytes, body: bytes, letters: str) -> DataError:
    """The error for the first letter of an entry that is none of `letters`."""
    known = letters.encode()
    for number, row in enumerate(body.split(b"\n"), line + 1):
        for letter in row:
            if letter not in known:
                return DataError(f"{path}, line {number}: {shown(bytes([letter]))} in {accession.decode()} is no amino "
                                 f"acid; known are {letters}.")
    raise AssertionError("every letter is known")


def shown(content: bytes) -> str:
    text = content.decode("ascii", "backslashreplace")
    return repr(text if len(text) <= 40 else text[:37] + "...")


# ---- the index -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Index:
    """Sequences by row: letters of row i are tokens[starts[i]:ends[i]].

    hashes: 32 bits of each accession, to split by. files: the place of its file, or generated family, in names.
    """

    tokens: np.ndarray                                       # (letters,) uint8
    ends: np.ndarray                                         # (n,) int64
    accessions: np.ndarray                                   # (n,) S16
    hashes: np.ndarray                                       # (n,) uint32
    files: np.ndarray                                        # (n,) uint16
    names: tuple[str, ...]
    paths: tuple[Path, ...] = ()
    held: Any = field(default=None, repr=False, compare=False)   # keeps a temporary folder alive

    def __len__(self) -> int:
        return len(self.ends)

    def start(self, row: int) -> int:
        return int(self.ends[row - 1]) if row else 0

    def sequence(self, row: int) -> np.ndarray:
        return self.tokens[self.start(row):int(self.ends[row])]

    @property
    def lengths(self) -> np.ndarray:
        """Letters of each sequence, (n,) int64."""
        return np.diff(self.ends, prepend=0)

    def place(self, row: int, letters: str) -> str:
        """File and line of a sequence, for messages: it reads that file again."""
        file = int(self.files[row])
        before = row - int(np.searchsorted(self.files, file))                        # of the same file
        return f"{self.paths[file]}, line {next(islice(entries(self.paths[file], letters), before, None)).line}"


def indexed(files: Sequence[Path], letters: str, cache_dir: str | Path | None = None) -> Index:
    """The index of these files, kept in `cache_dir` (None: in a temporary folder). Raises DataError."""
    files = [Path(file).expanduser() for file in files]
    held = None
    if cache_dir is not None:
        folder = Path(cache_dir).expanduser() / f"proteins-{key_of(FORMAT, letters, *map(os.path.abspath, files))}"
        with alone(folder.parent):
            reason = stale(folder, files)
            if reason is None or rebuilt(folder, files, letters, reason):
                return opened(folder, files)
    held = tempfile.TemporaryDirectory(prefix="crt_exp-proteins-")
    build(files, letters, Path(held.name))
    return opened(Path(held.name), files, held)


def rebuilt(folder: Path, files: Sequence[Path], letters: str, reason: str) -> bool:
    """Builds the index of a folder; False, once said, where it cannot be written there."""
    if folder.exists():
        warn("the index %s is stale, %s: it is built again", folder, reason)
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        build(files, letters, part)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
        return True
    except OSError as error:
        warn("the index of proteins cannot be written to %s (%s): it is built in every run. Give another directory "
             "(task.cache_dir=DIR), or none (null)", folder.parent, error.strerror or error)
        return False
    finally:
        shutil.rmtree(part, ignore_errors=True)


def build(files: Sequence[Path], letters: str, folder: Path) -> None:
    """Writes the arrays of `Index` and a manifest, a batch of entries at a time."""
    before = [described(file) for file in files]
    with Writer(folder) as writer:
        for number, file in enumerate(files):
            for entry in entries(file, letters):
                writer.add(entry, number)
    tell_apart(folder, np.frombuffer(writer.official, bool))
    manifest = {"format": FORMAT, "sources": before, "digests": {name: digests(folder / name) for name in ARRAYS}}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


def tell_apart(folder: Path, official: np.ndarray) -> None:
    """Sequences of headers that begin with the same word, as >protein 1 and >protein 2 do, get names of their own:
    digests of their letters, so that copies keep one name. official (n,) bool: UniProt's headers, which stay."""
    rows = np.flatnonzero(~official)
    if not len(rows):
        return
    tokens, ends, names, hashes = (np.memmap(folder / name, ARRAYS[name], "r+")
                                   for name in ("tokens", "ends", "accessions", "hashes"))
    _, place, count = np.unique(names[rows], return_inverse=True, return_counts=True)
    made: dict[bytes, dict[int, bytes]] = {}
    for row in rows[count[place] > 1].tolist():
        letters = tokens[ends[row - 1] if row else 0:ends[row]].tobytes()
        made.setdefault(bytes(names[row]), {})[row] = digest(letters)
    for row, own in ((row, own) for rows_of in made.values() if len(set(rows_of.values())) > 1
                     for row, own in rows_of.items()):
        names[row], hashes[row] = own, hash_of(own)
    for array in (names, hashes):
        array.flush()


class Writer:
    """The arrays of an index as files that grow; `official` has a byte for each entry."""

    def __init__(self, folder: Path):
        self.folder, self.pending, self.end, self.official = folder, [], 0, bytearray()
        self.files = {name: (folder / name).open("wb") for name in ARRAYS}

    def add(self, entry: FastaEntry, file: int) -> None:
        self.pending.append((entry.tokens, entry.accession, file))
        self.official.append(entry.official)
        if len(self.pending) == BATCH:
            self.flush()

    def flush(self) -> None:
        if not self.pending:
            return
        tokens, accessions, files = zip(*self.pending)
        ends = self.end + np.cumsum([len(part) for part in tokens])
        hashes = [hash_of(accession) for accession in accessions]
        for name, values in {"ends": ends, "accessions": accessions, "hashes": hashes, "files": files}.items():
            self.files[name].write(np.array(values, ARRAYS[name]).tobytes())
        self.files["tokens"].write(b"".join(tokens))
        self.end, self.pending = int(ends[-1]), []

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self.flush()
        for file in self.files.values():
            file.close()


def hash_of(accession: bytes) -> int:
    """32 bits that depend on the accession alone, in every version of the data."""
    return int.from_bytes(hashlib.blake2b(accession, digest_size=4).digest(), "little")


def digests(file: Path) -> dict[str, Any]:
    """Size and checksums of a file of an index: of the whole, and of 1024 samples of it where it is large."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        whole = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"size": size, "sha256": whole, "samples": sampled(file, size) if size > SAMPLED else None}


def sampled(file: Path, size: int) -> str:
    digest, step = hashlib.sha256(), max(1, size // 1024)
    with open(file, "rb") as stream:
        for start in range(0, size, step):
            stream.seek(start)
            digest.update(stream.read(min(step, 1 << 16)))
    return digest.hexdigest()


def intact(file: Path, written: dict[str, Any], whole: bool) -> bool:
    """Whether a file is as it was written, all of it if `whole`, else by samples where it is large."""
    size = file.stat().st_size
    if size != written["size"] or whole or written["samples"] is None:
        return size == written["size"] and digests(file)["sha256"] == written["sha256"]
    return sampled(file, size) == written["samples"]


def described(file: Path) -> dict[str, Any]:
    """Size, time of change and checksum of a file. Raises DataError."""
    try:
        stat = file.stat()
        with open(file, "rb") as stream:
            return {"size": stat.st_size, "changed": stat.st_mtime_ns,
                    "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
    except OSError as error:
        raise DataError(f"{file}: the file cannot be read ({error.strerror or error}).") from None


def damaged(folder: Path, whole: bool) -> str | None:
    """Why the files of an index are not as they were written; None where they are. whole: reads all of them, where
    samples of large ones are enough else."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        bad = [name for name in ARRAYS if not intact(folder / name, manifest["digests"][name], whole)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read ({error})"
    return f"its file {bad[0]} is not as it was written" if bad else None


def stale(folder: Path, files: Iterable[Path]) -> str | None:
    """Why an index cannot be used; None where it can. A file of sequences is read only where its size is as it was and
    its time of change is not."""
    if reason := damaged(folder, whole=False):
        return reason
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for file, saved in zip(files, manifest["sources"], strict=True):
            stat = file.stat()
            if stat.st_size != saved["size"]:
                return f"{file} has {stat.st_size} bytes where it had {saved['size']}"
            if stat.st_mtime_ns != saved["changed"] and described(file)["sha256"] != saved["sha256"]:
                return f"{file} has another checksum"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read ({error})"
    return None


def opened(folder: Path, files: Sequence[Path], held: Any = None) -> Index:
    arrays = {name: np.memmap(folder / name, dtype, "r") for name, dtype in ARRAYS.items()}
    return Index(**arrays, names=tuple(map(stem, files)), paths=tuple(files), held=held)
