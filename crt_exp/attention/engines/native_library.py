"""The C sources as a library: compiled for this machine at first use, by its C compiler, and kept for later processes.

gcc makes the fastest code; that of clang takes about 1.2 times as long.

Environment: CC names the compiler (default cc), XDG_CACHE_HOME where the library is kept (default ~/.cache), and
CRT_EXP_NATIVE=0 keeps to PyTorch's matrix products; so does a machine on which the compiler fails, with a warning.
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
from pathlib import Path

ENGINES = Path(__file__).parent
NEAR_FAR = ENGINES.parents[1] / "nearfar"
SOURCES = tuple(sorted(file for folder in (ENGINES, NEAR_FAR) for file in folder.glob("*.[ch]")))
FLAGS = "-std=gnu11 -D_GNU_SOURCE -O3 -march=native -fopenmp -shared -fPIC"


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library, or None."""
    if os.environ.get("CRT_EXP_NATIVE", "1") == "0":
        return None
    try:
        return ctypes.CDLL(str(compiled()))
    except (OSError, subprocess.SubprocessError, ValueError, RuntimeError) as e:
        lines = str(getattr(e, "stderr", None) or e).strip().splitlines()
        reason = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        logging.getLogger(__name__).warning(
            "the attention kernels for this CPU could not be compiled or loaded (%s): PyTorch's matrix products do the "
            "work, in 1.5 to 3 times the time. Install a C compiler or name one in CC, and a folder of your own in "
            "XDG_CACHE_HOME; CRT_EXP_NATIVE=0 silences this", reason)
        return None


def compiled() -> Path:
    """The library's file: the one that is kept, or a new one, which appears whole or not at all.

    Raises OSError, SubprocessError, ValueError (CC) or RuntimeError (no home) where that fails.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "crt_exp" / "native"
    file = folder / f"native-{_kind(compiler)}.so"
    if file.exists():
        return file
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if sys.stderr.isatty():
        print("compiling the attention kernels for this processor, once: some 10 s", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="new-") as private:
        new = Path(private) / file.name
        sources = [source for source in SOURCES if source.suffix == ".c"]
        subprocess.run([*compiler, *FLAGS.split(), f"-I{ENGINES}", "-o", new, *sources, "-lm"], check=True,
                       capture_output=True, text=True, errors="replace", timeout=300)
        os.replace(new, file)
    return file


def _kind(compiler: list[str]) -> str:
    """A name for what decides the library: the sources, the compiler with its version, and the processor, on which
    -march=native depends: home folders are shared by machines."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, errors="replace", timeout=60)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.platform(), platform.processor()]
    processor = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))} or lines)
    parts = [*(file.read_text() for file in SOURCES), *compiler, FLAGS, version.stdout, *platform.libc_ver(),
             platform.machine(), *processor]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
