"""Engine in C for float32 on CPUs, and the library of all C sources.

`engines` has the formulas, and native.c the loops. All products of a chunk run while its features are in the cache
of one core; plain PyTorch takes 2 to 3.5 times as long.
The C compiler of this machine compiles the library at first use, and later processes reuse the file. Code of clang
takes about 1.2 times as long as code of gcc.

Environment: CC names the compiler (default cc), and XDG_CACHE_HOME the folder of the library (default ~/.cache).
CRT_EXP_ENGINE=plain uses plain PyTorch instead. So does a machine on which the compiler fails, with a warning.
"""

import ctypes
import functools
import hashlib
import logging
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from crt_exp.attention import engines
from crt_exp.attention.checks import NOT_FINITE_MESSAGE
from crt_exp.attention.engines import (
    BAD_DIRECTIONS,
    CHUNK,
    NO_MEMORY,
    NOT_FINITE,
    Form,
    Gradients,
    Saved,
)
from crt_exp.features.base import NotFinite

SEGMENT = 512  # tokens between two states that the causal forward pass stores
ENGINES = Path(__file__).parent
NEAR_FAR = ENGINES.parents[1] / "nearfar"
SOURCES = tuple(sorted([*ENGINES.glob("*.[ch]"), *NEAR_FAR.glob("*.[ch]")]))
FLAGS = "-std=gnu11 -D_GNU_SOURCE -O3 -march=native -fopenmp -shared -fPIC"


class View(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("token", ctypes.c_int64),
    ]


SIZES = ("B", "H", "L", "S", "d", "dv", "M", "segment", "threads")
VIEWS = (
    "x",
    "y",
    "v",
    "rows",
    "scale",
    "bias",
    "out",
    "logsum",
    "states",
    "logs",
    "grad",
    "dlogsum",
    "dx",
    "dy",
    "dvalues",
    "dweights",
    "dbias",
)


class AttentionCall(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in SIZES),
        ("norm_weight", ctypes.c_double),
        *((name, View) for name in VIEWS),
        ("keep", ctypes.c_void_p),
        ("levels", ctypes.c_void_p),
    ]


def available() -> bool:
    """Return whether the library can be used."""
    return library() is not None


# set by torch.compiler.assume_constant_result, which would import the compiler; that takes longer than torch
available._dynamo_marked_constant = True


class Engine:
    """Bidirectional or causal engine with the interface in `engines/__init__.py`."""

    def __init__(self, causal: bool):
        self.causal = causal
        self.unit = math.log(2) if causal else 1.0

    def empty(self, x: Tensor, y: Tensor, v: Tensor, form: Form) -> Saved:
        B, H, L, _ = x.shape
        dv = v.shape[-1]
        M = form.rows.shape[-2]
        state_batch = (B, H)
        level_shape = (0,)
        if self.causal:
            state_batch = (B, H, -(-L // SEGMENT))
            level_shape = (B, H, -(-L // CHUNK))
        return Saved(
            out=v.new_empty(B, H, L, dv),
            logsum=v.new_empty(B, H, L),
            states=v.new_empty(*state_batch, dv + 1, M),
            logs=v.new_empty(*state_batch, M),
            levels=torch.empty(level_shape, dtype=torch.uint8, device="cpu"),
        )

    def forward(self, x: Tensor, y: Tensor, v: Tensor, form: Form) -> Saved:
        saved = self.empty(x, y, v, form)
        self._call("forward", x, y, v, form, saved)
        return saved

    def backward(
        self,
        x: Tensor,
        y: Tensor,
        v: Tensor,
        form: Form,
        saved: Saved,
        grad: Tensor,
        grad_logsum: Tensor | None = None,
    ) -> Gradients:
        grads = Gradients.empty(x, y, v, form.rows, form.learned)
        views = {"grad": grad, "dx": grads.x, "dy": grads.y, "dvalues": grads.v}
        if grad_logsum is not None:
            views["dlogsum"] = grad_logsum / self.unit
        if form.learned:
            views["dweights"] = grads.weights
            views["dbias"] = grads.bias.unsqueeze(-2)
        self._call("backward", x, y, v, form, saved, **views)
        return grads

    def sum_keys(self, y: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        """Return what `engines` describes: the states of a forward pass with one query, which is zero."""
        saved = self.forward(torch.zeros_like(y[:, :, :1]), y, v, form)
        return saved.states, saved.logs + form.bias

    def _call(
        self,
        direction: str,
        x: Tensor,
        y: Tensor,
        v: Tensor,
        form: Form,
        saved: Saved,
        **views: Tensor,
    ) -> None:
        B, H, L, d = x.shape
        S, dv = v.shape[2:]
        call = AttentionCall(B=B, H=H, L=L, S=S, d=d, dv=dv, M=form.rows.shape[-2], segment=SEGMENT)
        call.threads = torch.get_num_threads()
        call.norm_weight = form.norm_weight
        views |= {"x": x, "y": y, "v": v}
        views |= {"rows": form.rows, "scale": form.scale, "bias": form.bias.unsqueeze(-2)}
        saved = Saved(*map(Tensor.contiguous, saved))
        views |= {"out": saved.out, "logsum": saved.logsum}
        views |= {"states": saved.states, "logs": saved.logs}
        alive = []  # contiguous copies must outlive the call
        for name, t in views.items():
            if t.stride(-1) != 1:
                t = t.contiguous()
            alive.append(t)
            steps = [0, 0, 0]  # strides of batch, head and token; 0 for broadcast dimensions
            for dim in range(min(3, t.ndim)):
                if t.shape[dim] != 1:
                    steps[dim] = t.stride(dim)
            setattr(call, name, View(t.data_ptr(), *steps))
        if form.keep is not None:
            keep = form.keep.contiguous()
            call.keep = keep.data_ptr()
        if self.causal:
            call.levels = saved.levels.data_ptr()
        kind = "causal" if self.causal else "bidirectional"
        status = getattr(library(), f"{kind}_{direction}")(ctypes.byref(call))
        if status == NO_MEMORY:
            raise MemoryError(
                f"out of memory for attention features with d={d}, m={form.rows.shape[-2]}; use fewer features"
            )
        if status == BAD_DIRECTIONS:
            raise NotFinite("noise, params: expected finite values")
        if status == NOT_FINITE:
            raise NotFinite(NOT_FINITE_MESSAGE)


bidirectional, causal = Engine(False), Engine(True)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library, or None if it is disabled or failed."""
    if engines.PLAIN_CHOSEN:
        return None
    try:
        return ctypes.CDLL(str(compiled()))
    except (OSError, subprocess.SubprocessError, ValueError, RuntimeError) as e:
        lines = str(getattr(e, "stderr", None) or e).strip().splitlines()
        lines = [line for line in lines if "error" in line] or lines or ["no message"]
        logging.getLogger(__name__).warning(
            "the C kernels could not be compiled or loaded (%s): using PyTorch, which takes 2 to 3.5 times as "
            "long. Install a C compiler (or set CC) and make XDG_CACHE_HOME writable; CRT_EXP_ENGINE=plain "
            "hides this warning",
            lines[0],
        )
        return None


def compiled() -> Path:
    """Return the file of the library, after compiling it if needed.

    A new file is moved to the cache atomically. Raises OSError, SubprocessError, ValueError (CC) or RuntimeError (no
    home folder) on failure.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home).expanduser() / "crt_exp" / "native"
    file = folder / f"native-{_kind(compiler)}.so"
    if file.exists():
        return file
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if sys.stderr.isatty():
        print(
            "compiling the attention kernels for this CPU, once, about 10 s",
            file=sys.stderr,
            flush=True,
        )
    with tempfile.TemporaryDirectory(dir=folder, prefix="new-") as private:
        new = Path(private) / file.name
        sources = [source for source in SOURCES if source.suffix == ".c"]
        subprocess.run(
            [*compiler, *FLAGS.split(), f"-I{ENGINES}", "-o", new, *sources, "-lm"],
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=300,
        )
        os.replace(new, file)
    return file


def _kind(compiler: list[str]) -> str:
    """Return a hash of all that determines the library.

    That is the sources, the compiler with its version, and the processor, because -march=native depends on it and
    machines may share home folders.
    """
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, text=True, errors="replace", timeout=60
    )
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
    else:
        lines = [platform.platform(), platform.processor()]
    properties = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    processor = sorted(properties or lines)
    parts = [
        *(file.read_text() for file in SOURCES),
        *compiler,
        FLAGS,
        version.stdout,
        *platform.libc_ver(),
        platform.machine(),
        *processor,
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
