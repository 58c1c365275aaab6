"""The C sources as a library: compiled for this machine at first use, by its C compiler, and kept for later processes.

gcc makes the fastest code; that of clang takes about 1.2 times as long.

A kept library appears whole or not at all, and is loaded only where this user alone could have written it.

Environment: CC names the compiler (default cc), XDG_CACHE_HOME where the library is kept (default ~/.cache), and
CRT_EXP_NATIVE=0 keeps to PyTorch's matrix products; so does a machine on which the compiler fails, with a warning that
says so.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENGINES = Path(__file__).parent
NEAR_FAR = ENGINES.parents[1] / "nearfar" / "engine"
SOURCES = (*(ENGINES / name for name in ("constants.h", "vectors.h", "products.c", "native.c")),
           *(NEAR_FAR / name for name in ("constants.h", "near_far.h", "choice.c", "near_far.c", "past.h", "scores.c",
                                          "retrieved.c", "recall.c", "left.c", "recall_backward.c")))
FLAGS = "-std=gnu11 -D_GNU_SOURCE -O3 -march=native -fopenmp -shared -fPIC"
PRODUCTS = "PyTorch's matrix products do the work, in 1.5 to 3 times the time"
SILENCE = "CRT_EXP_NATIVE=0 silences this"
FAILURES = (OSError, subprocess.SubprocessError, ValueError)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library, or None."""
    if os.environ.get("CRT_EXP_NATIVE", "1") == "0":
        return None
    try:
        with compiled() as file:
            return _loaded(file)
    except FAILURES as e:
        _warn("the attention kernels for this CPU could not be compiled (%s): %s. Install a C compiler, or name one in "
              "CC; %s", _reason(e), PRODUCTS, SILENCE)
        return None


def _reason(error: Exception) -> str:
    """What a compiler has to say, in a line."""
    message = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    lines = message.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


def _loaded(file: Path) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(file))
    except OSError as e:  # a folder from which nothing may be run, or a library of the compiler that is not there
        _warn("the attention kernels for this CPU were compiled but could not be loaded (%s): %s. XDG_CACHE_HOME says "
              "where they are kept; %s", e, PRODUCTS, SILENCE)
        return None


@contextmanager
def compiled() -> Iterator[Path]:
    """A file of the library to load: the one that is kept, or a new one, kept for others where that can be done.

    Raises OSError, SubprocessError or ValueError (CC) where the compiler fails.
    """
    command = [*shlex.split(os.environ.get("CC", "cc")), *FLAGS.split()]
    name = f"native-{_kind(command)}.so"
    folder, trouble = _cache()
    if folder is not None and _is_kept(folder / name):
        yield folder / name
        return
    with tempfile.TemporaryDirectory(prefix="crt_exp-") as private:
        made = Path(private) / name
        if sys.stderr.isatty():
            print("compiling the attention kernels for this processor, once: some 10 s", file=sys.stderr, flush=True)
        sources = [source for source in SOURCES if source.suffix == ".c"]
        subprocess.run([*command, f"-I{ENGINES}", "-o", made, *sources, "-lm"], check=True, capture_output=True,
                       text=True, errors="replace", timeout=300)
        try:
            kept = made if folder is None else _write(folder / name, made.read_bytes())
        except OSError as e:
            kept, trouble = made, e
        if trouble:
            _warn("the compiled attention kernels cannot be kept (%s): every process compiles them for itself, which "
                  "takes some seconds. Name a folder in XDG_CACHE_HOME that you alone can write to; %s",
                  trouble, SILENCE)
        yield kept


def _kind(command: list[str]) -> str:
    """A name for what decides the library: the sources, the compiler with its version, and the machine."""
    version = subprocess.run([*shlex.split(os.environ.get("CC", "cc")), "--version"], capture_output=True, text=True,
                             errors="replace", timeout=60).stdout
    parts = [*(file.read_text() for file in SOURCES), *command, version, *platform.libc_ver(), _processor()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What -march=native depends on: home folders are shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    return platform.machine() + "".join(sorted({l for l in lines if l.startswith(("model name", "flags", "Features"))}))


def _cache() -> tuple[Path | None, str]:
    """The folder of this user's libraries and "", or None and why there is none."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "crt_exp"
        folder = home / "native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The outer folder holds other things too, made with the user's own umask, which often lets a group write.
        bad = next((path for path, others in ((home, 0o002), (folder, 0o022)) if not _ours(path, others)), None)
    except (OSError, RuntimeError) as e:  # RuntimeError: there is no home
        return None, str(e)
    return (folder, "") if bad is None else (None, f"{bad} belongs to another user, or others can write to it")


def _ours(path: Path, others: int = 0o022) -> bool:
    """Whether this user owns a file or folder and `others`, bits of its mode, cannot write to it."""
    status = path.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & others


def _is_kept(file: Path) -> bool:
    """Whether a library is there and is ours."""
    ours = file.exists() and _ours(file)
    if file.exists() and not ours:
        _warn("%s belongs to another user, or others can write to it: it is not loaded, but compiled again", file)
    return ours


def _write(file: Path, content: bytes) -> Path:
    """The file, written whole or not at all, for this user alone: renamed when it is on the disk. Another process may
    read it, or write the same, at any moment."""
    handle, new = tempfile.mkstemp(dir=file.parent, prefix="new-")
    try:
        with open(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(new, file)
    except BaseException:
        Path(new).unlink(missing_ok=True)
        raise
    return file


def _warn(message: str, *values: object) -> None:
    logging.getLogger(__name__).warning(message, *values)
