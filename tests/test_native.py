"""The engines in C equal those of PyTorch in float64, in outputs and gradients, however they are compiled and fed."""

import ctypes
import errno
import logging
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from crt_exp import samplers
from crt_exp.attention import attention, near_far_attention
from crt_exp.attention.cells import Sizes
from crt_exp.attention.engines import native, native_library
from crt_exp.attention.engines.protocol import Form
from crt_exp.features import OPRF, SMREG, HypRF, PosRF, Statistics

KINDS = ("x86-64-v4", "x86-64-v3", "x86-64")  # 16, 8 and 4 lanes
needs_library = pytest.mark.skipif(native.library() is None, reason="no C compiler here, or CRT_EXP_NATIVE=0")
SHAPES = {
    "usual": dict(L=130, S=130, d=64, dv=64, m=128),
    "one token": dict(L=1, S=1, d=2, dv=1, m=1),
    "odd sizes": dict(L=67, S=67, d=5, dv=17, m=19),
    "wide": dict(L=70, S=70, d=80, dv=72, m=200),
    "cross": dict(L=33, S=201, d=8, dv=4, m=16),
    "many queries": dict(B=3, H=1, L=200, S=200, d=16, dv=15, m=16),
    "several segments": dict(B=1, L=1100, S=1163, d=4, dv=3, m=8),
    "masked": dict(L=150, S=150, d=8, dv=8, m=32, masked=True),
    "grouped": dict(H=4, Hkv=2, L=90, S=90, d=8, dv=8, m=16),
    "long vectors": dict(L=300, S=300, d=8, dv=8, m=16, scale=3.0),
}


class Case:
    def __init__(self, phi, B=2, H=2, Hkv=None, L=8, S=8, d=4, dv=4, m=8, scale=0.4, masked=False):
        g = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(*shape, generator=g)
        Hkv = Hkv or H
        self.phi, self.noise = phi, samplers.orthogonal(m, d, g, batch=(H,))
        self.x, self.y, self.v = scale * draw(B, H, L, d), scale * draw(B, Hkv, S, d), draw(B, Hkv, S, dv)
        self.params = phi.fit(Statistics.of(self.x, self.y.repeat_interleave(H // Hkv, 1)))
        self.grad, self.mask = draw(B, H, L, dv), None
        if masked:
            self.mask = torch.rand(B, S, generator=g) > 0.3
            self.mask[0, :70], self.mask[1] = False, self.mask[1] & (torch.arange(S) < 100)

    def run(self, dtype=torch.float32, causal=False, x=None, y=None, v=None, grad=None):
        """Outputs and gradients, with NaN in the padding."""
        x, y, v = (a if a is not None else b for a, b in zip((x, y, v), (self.x, self.y, self.v)))
        x, y, v = (t.to(dtype).detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, y, v))
        if self.mask is not None:
            with torch.no_grad():
                for t in (y, v):
                    t.masked_fill_(~self.mask[:, None, :, None], torch.nan)
        out = attention(x, y, v, self.phi, self.noise, self.params, causal=causal, key_mask=self.mask)
        grad = (self.grad if grad is None else grad).to(dtype)
        return [out.detach(), *torch.autograd.grad(out, (x, y, v), grad)]


def assert_near(ours, expected, tolerance=1e-5):
    for name, a, b in zip(("out", "dx", "dy", "dv"), ours, expected, strict=True):
        assert a.shape == b.shape and a.isfinite().all(), name
        assert (a.double() - b.double()).abs().max() <= tolerance * b.double().abs().max().clamp(min=1e-2), name


@pytest.fixture
def threads():
    """Sets the number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def built(monkeypatch, tmp_path):
    """Takes a library that is compiled another way for the rest of the test."""
    def build(flags):
        monkeypatch.setattr(native_library, "FLAGS", flags)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with native_library.compiled() as file:
            library = ctypes.CDLL(str(file))
        monkeypatch.setattr(native, "library", lambda: library)
    return build


@needs_library
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("phi", [PosRF(), OPRF(), HypRF(), SMREG()], ids=lambda phi: type(phi).__name__)
def test_equals_float64(phi, shape, causal):
    case = Case(phi, **SHAPES[shape])
    assert native.applies(case.x, case.y, case.v)
    assert_near(case.run(causal=causal), case.run(torch.float64, causal=causal))


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[:2]), KINDS[2]])
def test_every_width_of_vectors(kind, built):
    if platform.machine() != "x86_64":
        pytest.skip("these are kinds of x86-64 processors")
    flags = Path("/proc/cpuinfo").read_text()
    if {"x86-64-v4": "avx512vl", "x86-64-v3": "avx2", "x86-64": "sse2"}[kind] not in flags:
        pytest.skip(f"this processor is no {kind}")
    built(native_library.FLAGS.replace("-march=native", f"-march={kind}"))
    for shape in ("usual", "odd sizes", "masked", "cross"):
        for causal in (False, True):
            case = Case(OPRF(), **SHAPES[shape])
            assert_near(case.run(causal=causal), case.run(torch.float64, causal=causal))
    assert_near_far_is_near()


def assert_near_far_is_near():
    """Near-far attention in C, with and without whole vectors in a row."""
    for d, dv in ((16, 16), (5, 18)):
        x, y, v, grad = (torch.randn(1, 2, 60, size) for size in (d, d, dv, dv))
        found = []
        for dtype in (torch.float32, torch.float64):
            inputs = [t.to(dtype).requires_grad_() for t in (x, y, v)]
            out = near_far_attention(*inputs, Sizes(4, 3, 6, True)).out
            found.append([out.detach(), *torch.autograd.grad(out, inputs, grad.to(dtype))])
        assert_near(*found)


@needs_library
@pytest.mark.parametrize("causal", [False, True])
def test_more_threads_than_heads(causal, threads):
    case = Case(OPRF(), B=1, H=3, L=700, S=700, d=8, dv=5, m=16)
    expected = case.run(torch.float64, causal=causal)
    for n in (1, 7, 30):
        threads(n)
        assert_near(case.run(causal=causal), expected)


@needs_library
@pytest.mark.parametrize("causal", [False, True])
def test_repeats_exactly(causal, threads):
    """The same numbers for every run, and for every number of threads that leaves heads whole."""
    case = Case(OPRF(), B=4, H=2, L=300, S=300)
    threads(1)
    first = case.run(causal=causal)
    for n in (1, 2, 3, 8):
        threads(n)
        assert all(torch.equal(a, b) for a, b in zip(case.run(causal=causal), first))


@needs_library
@pytest.mark.parametrize("causal", [False, True])
def test_any_strides(causal):
    """Heads behind tokens, as projections leave them; columns apart; an expanded gradient; an odd address."""
    case = Case(OPRF(), L=70, S=70, d=6, dv=5)
    expected = case.run(causal=causal)
    behind = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (case.x, case.y, case.v)]
    columns = [t.mT.contiguous().mT for t in (case.x, case.y, case.v)]
    shifted = [torch.cat([torch.zeros(1), t.flatten()])[1:].view(t.shape) for t in (case.x, case.y, case.v)]
    for x, y, v in (behind, columns, shifted):
        assert_near(case.run(causal=causal, x=x, y=y, v=v), expected, 1e-6)
    ones = torch.ones(()).expand(case.grad.shape)
    assert_near(case.run(causal=causal, grad=ones), case.run(torch.float64, causal=causal, grad=ones))


@needs_library
@pytest.mark.parametrize("at", [199, 130, 64])
def test_underflow_takes_a_chunk_token_by_token(at):
    """A key so large that in its scale the terms of the rows before it in its chunk underflow."""
    case = Case(OPRF(A=-0.05), B=1, H=2, L=200, S=200)
    with torch.no_grad():
        case.y[:, :, :at] += 8.0
    expected = case.run(torch.float64, causal=True)
    assert_near(case.run(causal=True), expected, 1e-3)
    rows, scale, bias = case.phi.exponent(case.noise, case.params)
    form = Form(rows[None], scale.view(1, 1, 1, 1).float(), bias.view(1, -1, bias.shape[-1]).float(), 0.5, None)
    levels = native.causal.forward(case.x, case.y, case.v, form).levels
    assert levels.shape == (1, 2, 4) and levels[..., at // 64].all() == (at % 64 > 0)


@needs_library
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("grow", [(0.01, 4.0), (4.0, 0.01)], ids=["growing", "shrinking"])
def test_keys_that_outgrow_each_other(causal, grow):
    """The reference of the features moves many times over."""
    case = Case(PosRF(), B=1, H=2, L=1200, S=1200, scale=0.5)
    steps = torch.linspace(*grow, 1200)[:, None]
    exact = case.run(torch.float64, causal=causal, y=case.y * steps)
    assert_near(case.run(causal=causal, y=case.y * steps), exact, 1e-4)


@needs_library
@pytest.mark.parametrize("first", [13.334, 13.4, 20.0, 300.0])
def test_features_that_fill_up_a_vector_leave_no_trace(first):
    """m = 1 is filled up to 16: what the others hold must not reach gradients, however long the keys are."""
    case = Case(PosRF(), B=1, H=1, L=1, S=2, d=1, dv=1, m=1)
    case.y = torch.tensor([0.0, first]).view(1, 1, 2, 1)
    ours, expected = case.run(causal=True), case.run(torch.float64, causal=True)
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6)
    case = Case(PosRF(), B=1, H=1, L=1100, S=1100, d=4, m=9, scale=0.1)
    case.y[:, :, 512:576] = first * torch.nn.functional.normalize(case.y[:, :, 512:576], dim=-1)
    assert_near(case.run(causal=True), case.run(torch.float64, causal=True), 1e-4)


@needs_library
@pytest.mark.parametrize("causal", [False, True])
def test_bad_directions(causal):
    case = Case(OPRF(), L=20, S=20)
    case.noise.weight[1, 3] = torch.nan
    with pytest.raises(ValueError, match="noise or the parameters"):
        case.run(causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_empty_batch(causal, dtype):
    case = Case(PosRF(), L=20, S=20)
    empty = [t[:0] for t in (case.x, case.y, case.v, case.grad)]
    ours = case.run(dtype, causal, *empty)
    assert [t.shape for t in ours] == [e.shape for e in (empty[2], *empty[:3])]


@needs_library
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30, 2e15])
def test_not_finite(name, value, causal):
    case = Case(OPRF(), L=100, S=100)
    with torch.no_grad():
        getattr(case, name)[1, 1, 77, 2] = value
    with pytest.raises(ValueError, match="NaN or infinite"):
        case.run(causal=causal)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache folder, and a process that has not asked for the library yet.
    Gives the folder of the libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CRT_EXP_NATIVE", raising=False)
    native.library.cache_clear()
    yield tmp_path / "crt_exp" / "native"
    native.library.cache_clear()


@pytest.fixture
def small(cache, monkeypatch):
    """The same with a library that compiles at once."""
    if not shutil.which(os.environ.get("CC", "cc")):
        pytest.skip("no C compiler here")
    source = cache.parents[1] / "small.c"
    source.write_text("int answer(void) { return 42; }\n")
    monkeypatch.setattr(native_library, "SOURCES", (source,))
    return cache


def kept():
    """The library's file, whole.
    It is not loaded: a process that has one by this name would not look at the file again."""
    with native_library.compiled() as file:
        content = file.read_bytes()
        assert b"answer" in content and len(content) > 10_000
        return file


def test_without_a_compiler(cache, monkeypatch, caplog):
    """One warning that says what is missing and what it costs, and the same results."""
    case = Case(OPRF(), L=70, S=70)
    expected = case.run(torch.float64)
    for compiler, reason in (("no-such-compiler", "no-such-compiler"), ("'unclosed", "No closing quotation")):
        monkeypatch.setenv("CC", compiler)
        native.library.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert_near(case.run(), expected)
            case.run()
        assert len(caplog.records) == 1 and reason in caplog.text and "Install a C compiler" in caplog.text
    caplog.clear()
    native.library.cache_clear()
    monkeypatch.setenv("CRT_EXP_NATIVE", "0")
    case.run()
    assert native.library() is None and not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_every_compiler(compiler, built, monkeypatch):
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler} here")
    monkeypatch.setenv("CC", compiler)
    built(native_library.FLAGS)
    for causal in (False, True):
        case = Case(OPRF(), **SHAPES["odd sizes"])
        assert_near(case.run(causal=causal), case.run(torch.float64, causal=causal))
    assert_near_far_is_near()


@pytest.mark.slow
@needs_library
def test_built_ahead_of_use(tmp_path):
    """By a command that says where the library lies and how long it took, once."""
    def build():
        done = subprocess.run([sys.executable, "-m", "crt_exp.attention.engines.native"], capture_output=True,
                              text=True, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)})
        return done.returncode, done.stdout + done.stderr

    code, said = build()
    library, = (tmp_path / "crt_exp" / "native").glob("*.so")
    assert code == 0 and re.fullmatch(rf"{re.escape(str(library))} compiled in \d+\.\d s\n", said)
    before = library.stat()
    assert build() == (0, f"{library} was there already\n") and library.stat().st_ino == before.st_ino


@pytest.mark.parametrize("name, value, reason", [("CC", "no-such-compiler", "cannot be built: .*no-such-compiler"),
                                                 ("XDG_CACHE_HOME", "/dev/null", "cannot be kept .*name a folder"),
                                                 ("CRT_EXP_NATIVE", "0", "nothing to compile")])
def test_what_cannot_be_built_ahead_says_why(name, value, reason, cache, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=reason):
        native_library.build()


def test_message_of_the_compiler(small, caplog):
    native_library.SOURCES[0].write_text("int main(void) { return 0 }\n")
    with caplog.at_level(logging.WARNING):
        assert native.library() is None
    assert "error" in caplog.text and list(small.iterdir()) == []


def test_compiled_once(small):
    made = kept()
    assert sorted(f.name for f in small.iterdir()) == sorted([made.name, made.with_suffix(".sha256").name])
    before = made.stat()
    assert kept() == made and made.stat().st_ino == before.st_ino  # not even written again


def cut(file):
    file.write_bytes(file.read_bytes()[:-5000])


def spoil(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE = {"cut short": cut, "garbage": lambda file: file.write_text("garbage"), "one bit": spoil,
          "empty": lambda file: file.write_bytes(b""), "no record": lambda file: file.with_suffix(".sha256").unlink(),
          "record cut short": lambda file: file.with_suffix(".sha256").write_bytes(b"15"),
          "only a record": lambda file: file.unlink()}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_library_is_compiled_anew(damage, small, caplog):
    """It is not loaded, which could kill the process without a word, and the next process finds it whole."""
    made = kept()
    whole = made.read_bytes()
    DAMAGE[damage](made)
    assert kept() == made and made.read_bytes() == whole and not caplog.records
    before = made.stat().st_ino
    assert kept() == made and made.stat().st_ino == before


@pytest.mark.slow
@needs_library
def test_cut_library_kills_no_process(cache):
    """The real one, in processes of its own."""
    code = "from crt_exp.attention.engines import native; print(native.library() is not None)"
    run = lambda: subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {
        "XDG_CACHE_HOME": str(cache.parents[1])})
    with native_library.compiled() as made:
        cut(made)
    done = run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


STRANGE = {"library writable by others": lambda file: file.chmod(0o622),
           "record writable by others": lambda file: file.with_suffix(".sha256").chmod(0o666),
           "folder writable by others": lambda file: file.parent.chmod(0o770),
           "outer folder writable by all": lambda file: file.parents[1].chmod(0o777)}


@pytest.mark.parametrize("change", STRANGE)
def test_what_others_could_have_written_is_not_loaded(change, small, caplog):
    """A library with its right record, that somebody else might have put there."""
    made = kept()
    foreign = b"what another user wrote"
    made.write_bytes(foreign)
    native_library._record(made).write_bytes(native_library._seal(foreign))
    STRANGE[change](made)
    with caplog.at_level(logging.WARNING):
        used = kept()
    assert len(caplog.records) == 1 and "others can write to it" in caplog.text
    if "folder" in change:
        assert used != made and made.read_bytes() == foreign and not used.exists()
    else:  # replaced: the folder is ours
        assert used == made and kept() == made and made.stat().st_mode & 0o077 == 0


def test_folder_of_another_user_is_not_used(small, monkeypatch, caplog):
    made = kept()
    monkeypatch.setattr(os, "geteuid", lambda: made.stat().st_uid + 1)
    with caplog.at_level(logging.WARNING):
        assert kept() != made
    assert len(caplog.records) == 1 and "belongs to another user" in caplog.text


@pytest.mark.slow
@needs_library
def test_cache_that_cannot_be_written(cache, monkeypatch, caplog, tmp_path):
    """One warning; the engine works."""
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    case = Case(OPRF(), L=20, S=20)
    with caplog.at_level(logging.WARNING):
        assert native.applies(case.x)
        assert_near(case.run(), case.run(torch.float64))
    assert len(caplog.records) == 1 and "every process compiles them for itself" in caplog.text


def test_full_disk_leaves_nothing_behind(small, monkeypatch, caplog):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING):
        kept()
    assert list(small.iterdir()) == [] and "No space left" in caplog.text


def test_another_version_of_the_compiler_compiles_anew(small, monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"

    def named(version):
        compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit\nexec cc "$@"\n')
        compiler.chmod(0o755)
        return kept()

    monkeypatch.setenv("CC", str(compiler))
    assert named("one 12.1") == named("one 12.1") != named("one 12.2")


def test_many_processes_at_once(small):
    """All compile, all write, and each finds a whole library at every moment."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=kept) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 8
    assert len(list(small.iterdir())) == 2 and kept().parent == small


@needs_library
def test_no_memory(monkeypatch):
    class Full:
        def __getattr__(self, name):
            return lambda call: native.NO_MEMORY

    monkeypatch.setattr(native, "library", lambda: Full())
    with pytest.raises(MemoryError, match="d = 4, m = 8"):
        Case(OPRF()).run()
