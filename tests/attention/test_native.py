"""The engines in C equal those of PyTorch in float64, in outputs and gradients, however they are compiled and fed.
Their library is compiled once, kept whole, and done without where it cannot be."""

import ctypes
import logging
import multiprocessing
import os
import platform
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.covering import in_turn
from helpers.native_cases import Case, assert_near, needs_library
from helpers.nearfar_cases import retrieved_in_both
from helpers.seeds import seeded

from crt_exp.attention import engines
from crt_exp.attention.engines import native
from crt_exp.features import OPRF, SMREG, HypRF, PosRF
from crt_exp.nearfar import choice, near_far_attention
from crt_exp.nearfar import native as near_far
from crt_exp.nearfar.choice import Sizes

KINDS = ("x86-64-v4", "x86-64-v3", "x86-64")  # 16, 8 and 4 lanes
SHAPES = {
    "usual": dict(L=130, S=130, d=64, dv=64, m=128),
    "one token": dict(L=1, S=1, d=2, dv=1, m=1),
    "odd sizes": dict(L=67, S=67, d=5, dv=17, m=19),
    "wide": dict(L=70, S=70, d=80, dv=72, m=200),
    "cross": dict(L=33, S=201, d=8, dv=4, m=16),
    "many queries": dict(B=3, H=1, L=200, S=200, d=16, dv=15, m=16),
    "several segments": dict(B=1, L=1100, S=1163, d=4, dv=3, m=8),
    "masked": dict(L=150, S=150, d=8, dv=8, m=32, masked=True),
    "seen keys before the queries alone": dict(L=33, S=201, d=8, dv=4, m=16, masked=True),
    "grouped": dict(H=4, Hkv=2, L=90, S=90, d=8, dv=8, m=16),
    "long vectors": dict(L=300, S=300, d=8, dv=8, m=16, scale=3.0),
}


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
        monkeypatch.setattr(native, "FLAGS", flags)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        library = ctypes.CDLL(str(native.compiled()))
        monkeypatch.setattr(native, "library", lambda: library)

    return build


@needs_library
@pytest.mark.parametrize(
    "shape, phi", in_turn(SHAPES, [PosRF(), OPRF(), HypRF(), SMREG()]), ids=str
)
def test_equals_float64(phi, shape):
    for causal in (False, True):
        for learned in (False, True)[: 1 + phi.trainable]:
            case = Case(phi, **SHAPES[shape], learned=learned)
            # gradients to rows sum over all tokens: of long vectors PyTorch's float32 products are 1.2e-5 off as well
            tolerance = 1e-5
            if learned:
                tolerance = 2e-5
            assert_near(case.run(causal=causal), case.run(torch.float64, causal=causal), tolerance)


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_every_width_of_vectors(kind, built, monkeypatch):
    if platform.machine() != "x86_64":
        pytest.skip("these are kinds of x86-64 processors")
    flags = Path("/proc/cpuinfo").read_text()
    if {"x86-64-v4": "avx512vl", "x86-64-v3": "avx2", "x86-64": "sse2"}[kind] not in flags:
        pytest.skip(f"this processor is no {kind}")
    built(native.FLAGS.replace("-march=native", f"-march={kind}"))
    for shape in ("usual", "odd sizes", "masked", "cross"):
        for causal in (False, True):
            case = Case(OPRF(), **SHAPES[shape])
            assert_near(case.run(causal=causal), case.run(torch.float64, causal=causal))
    assert_near_far_is_near()
    assert_recall_is_its_twin(monkeypatch)
    assert_choices_are_those_of_pytorch()


def assert_choices_are_those_of_pytorch():
    """Bit for bit, whatever the vectors."""
    for d in (20, 64):
        g = seeded(d)
        x = torch.randn(2, 2, 500, d, generator=g)
        y = torch.randn(2, 500, d, generator=g)
        v = torch.randn(2, 500, d, generator=g)
        ours, theirs = retrieved_in_both(x, y, v, Sizes(16, 0, 6, open=9, exact_until=64))
        assert torch.equal(ours, theirs)


def assert_near_far_is_near():
    """Near-far attention in C, with and without whole vectors in a row."""
    for d, dv in ((16, 16), (5, 18)):
        x, y = torch.randn(2, 1, 2, 60, d)
        v, grad = torch.randn(2, 1, 2, 60, dv)
        actual = []
        for dtype in (torch.float32, torch.float64):
            inputs = []
            for t in (x, y, v):
                inputs.append(t.to(dtype).requires_grad_())
            out = near_far_attention(*inputs, Sizes(4, 3, 6, True))
            actual.append([out.detach(), *torch.autograd.grad(out, inputs, grad.to(dtype))])
        assert_near(*actual)


def assert_recall_is_its_twin(monkeypatch):
    x, y, v, grad = torch.randn(4, 1, 2, 600, 20, generator=seeded())
    inputs = []
    for t in (x, y, v):
        inputs.append(t.requires_grad_())
    sizes = Sizes(8, 3, 6, open=12, exact_until=60)
    actual = []
    for in_c in (True, False):
        if not in_c:
            monkeypatch.setattr(near_far, "applies", lambda *tensors: False)
        out = near_far_attention(*inputs, sizes, causal=True)
        actual.append([out.detach(), *torch.autograd.grad(out, inputs, grad)])
    assert_near(*actual)


@needs_library
@pytest.mark.parametrize(
    "causal, learned",
    [
        (False, False),
        (False, True),
        (True, True),
    ],
)
def test_more_threads_than_heads(causal, learned, threads):
    case = Case(OPRF(), B=1, H=3, L=700, S=700, d=8, dv=5, m=16, learned=learned)
    expected = case.run(torch.float64, causal=causal)
    for n in (1, 7, 30):
        threads(n)
        assert_near(case.run(causal=causal), expected)


@needs_library
@pytest.mark.parametrize("causal", [False, True])
def test_repeats_exactly(causal, threads):
    """The same numbers for every run, and for every number of threads that leaves heads whole."""
    case = Case(OPRF(), B=4, H=2, L=300, S=300, learned=True)
    threads(1)
    first = case.run(causal=causal)
    for n in (1, 2, 3, 8):
        threads(n)
        for a, b in zip(case.run(causal=causal), first):
            assert torch.equal(a, b)


@needs_library
@pytest.mark.parametrize("causal", [False, True])
def test_any_strides(causal):
    """Heads behind tokens, as projections leave them; columns apart; an expanded gradient; an odd address."""
    case = Case(OPRF(), L=70, S=70, d=6, dv=5)
    expected = case.run(causal=causal)
    layouts = [
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.mT.contiguous().mT,
        lambda t: torch.cat([torch.zeros(1), t.flatten()])[1:].view(t.shape),
    ]
    for layout in layouts:
        x, y, v = map(layout, case.inputs)
        assert_near(case.run(causal=causal, x=x, y=y, v=v), expected, 1e-6)
    ones = torch.ones(()).expand(case.grad.shape)
    assert_near(
        case.run(causal=causal, grad=ones), case.run(torch.float64, causal=causal, grad=ones)
    )


@needs_library
@pytest.mark.parametrize("at", [130, 64])
def test_underflow_takes_a_chunk_token_by_token(at):
    """A key so large that in its scale the terms of the rows before it in its chunk underflow."""
    case = Case(OPRF(A=-0.05), B=1, H=2, L=200, S=200, learned=True)
    with torch.no_grad():
        case.y[:, :, :at] += 8.0
    expected = case.run(torch.float64, causal=True)
    assert_near(
        case.run(causal=True)[:5], expected[:5], 1e-3
    )  # that to A is a difference of much larger numbers


@needs_library
@pytest.mark.parametrize(
    "grow, causal", in_turn([(0.01, 4.0), (4.0, 0.01)], [True, False], times=2), ids=str
)
def test_keys_that_outgrow_each_other(causal, grow):
    """The reference of the features moves many times over."""
    case = Case(PosRF(), B=1, H=2, L=1200, S=1200, scale=0.5)
    steps = torch.linspace(*grow, 1200)[:, None]
    exact = case.run(torch.float64, causal=causal, y=case.y * steps)
    assert_near(case.run(causal=causal, y=case.y * steps), exact, 1e-4)


@needs_library
@pytest.mark.parametrize("first", [13.334, 300.0])
def test_features_that_fill_up_a_vector_leave_no_trace(first):
    """m = 1 is filled up to 16: what the others hold must not reach gradients, however long the keys are."""
    case = Case(PosRF(), B=1, H=1, L=1, S=2, d=1, dv=1, m=1)
    case.y = torch.tensor([0.0, first]).view(1, 1, 2, 1)
    for a, b in zip(case.run(causal=True), case.run(torch.float64, causal=True)):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6)


@needs_library
@pytest.mark.parametrize(
    "value, name, causal", in_turn([torch.nan, torch.inf, 1e30, 2e15], ["x", "y"], [False, True])
)
def test_non_finite_inputs_are_refused(name, value, causal):
    case = Case(OPRF(), L=100, S=100)
    with torch.no_grad():
        getattr(case, name)[1, 1, 77, 2] = value
    with pytest.raises(ValueError, match="NaN, infinity|finite values"):
        case.run(causal=causal)
    case = Case(OPRF(), L=20, S=20)
    case.noise.weight[1, 3] = torch.nan
    with pytest.raises(ValueError, match="noise, params"):
        case.run(causal=causal)


@needs_library
def test_no_memory(monkeypatch):
    monkeypatch.setattr(
        native, "library", lambda: SimpleNamespace(causal_forward=lambda call: native.NO_MEMORY)
    )
    with pytest.raises(MemoryError, match="d=4, m=8"):
        Case(OPRF()).run(causal=True)


# ---- the library -----------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache folder, and a process that has not asked for the library yet.
    Gives the folder of the libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(engines, "PLAIN_CHOSEN", False)
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
    monkeypatch.setattr(native, "SOURCES", (source,))
    return cache


def compiled_file():
    """The library's file, whole.
    It is not loaded: a process that has one by this name would not look at the file again."""
    file = native.compiled()
    content = file.read_bytes()
    assert b"answer" in content
    assert len(content) > 10_000
    return file


@pytest.mark.parametrize(
    "compiler, reason", [("no-such-compiler", "no-such"), ("'unclosed", "No closing")]
)
def test_without_a_compiler(compiler, reason, cache, monkeypatch, caplog):
    """One warning that says what is missing and what it costs, and the same results."""
    case = Case(OPRF(), L=70, S=70)
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING):
        assert_near(case.run(), case.run(torch.float64))
        case.run()
    assert len(caplog.records) == 1
    assert reason in caplog.text
    assert "Install a C compiler" in caplog.text
    caplog.clear()
    native.library.cache_clear()
    monkeypatch.setattr(engines, "PLAIN_CHOSEN", True)
    assert native.library() is None
    assert not caplog.records


def test_compiled_once_for_each_version_of_the_compiler(small, monkeypatch, tmp_path):
    made = compiled_file()
    before = made.stat()
    actual = [f.name for f in small.iterdir()]
    assert actual == [made.name]
    assert compiled_file() == made
    assert made.stat().st_ino == before.st_ino  # not even written again
    compiler = tmp_path / "compiler"

    def named(version):
        compiler.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit\nexec cc "$@"\n'
        )
        compiler.chmod(0o755)
        return compiled_file()

    monkeypatch.setenv("CC", str(compiler))
    assert named("one 12.1") == named("one 12.1") != named("one 12.2")


def test_many_processes_at_once(small):
    """All compile, all write, and each finds a whole library at every moment."""
    context = multiprocessing.get_context("fork")
    workers = []
    for _ in range(4):
        workers.append(context.Process(target=compiled_file))
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert len(list(small.iterdir())) == 1
    assert compiled_file().parent == small


def test_the_library_fails_with_a_message(small, monkeypatch, caplog, tmp_path):
    """Of the compiler, or of the folder that cannot be written: one warning, and the products do the work."""
    native.SOURCES[0].write_text("int main(void) { return 0 }\n")
    (tmp_path / "file").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        assert native.library() is None
        assert native.library() is None
        assert list(small.iterdir()) == []
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        native.library.cache_clear()
        assert native.library() is None
    assert len(caplog.records) == 2
    assert "error" in caplog.messages[0]
    assert "XDG_CACHE_HOME" in caplog.messages[1]


@pytest.mark.parametrize("header, module", [("vectors.h", engines), ("near_far.h", choice)])
def test_constants_are_those_of_the_c_sources(header, module):
    text = Path(module.__file__).with_name(header).read_text()
    defined = re.findall(r"^#define (\w+) +\(?([-+.e\d]+)", text, re.MULTILINE)
    assert len(defined) > 4
    for name, number in defined:
        assert getattr(module, name) == float(number), name


def test_fields_are_those_of_the_c_structure():
    text = Path(choice.__file__).with_name("near_far.h").read_text()
    fields = re.search(r"typedef struct \{([^}]*)\} NearFar;", text)[1]
    fields = re.sub(r"/\*.*?\*/", "", fields, flags=re.DOTALL)
    names = re.findall(r"\b(\w+)[,;]", fields)
    assert [name for name, _ in near_far.Call._fields_] == names
