"""The library of the engines in C is compiled once, kept whole, and done without where it cannot be."""

import logging
import multiprocessing
import os
import re
import shutil

import pytest
import torch
from native_cases import Case, assert_near

from crt_exp.attention import engines
from crt_exp.attention.engines import native
from crt_exp.features import OPRF

HEADER = native.ENGINES / "vectors.h"


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
    monkeypatch.setattr(native, "SOURCES", (source,))
    return cache


def kept():
    """The library's file, whole.
    It is not loaded: a process that has one by this name would not look at the file again."""
    file = native.compiled()
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


def test_message_of_the_compiler(small, caplog):
    native.SOURCES[0].write_text("int main(void) { return 0 }\n")
    with caplog.at_level(logging.WARNING):
        assert native.library() is None
    assert "error" in caplog.text and list(small.iterdir()) == []


def test_compiled_once(small):
    made = kept()
    assert [f.name for f in small.iterdir()] == [made.name]
    before = made.stat()
    assert kept() == made and made.stat().st_ino == before.st_ino  # not even written again


def test_folder_that_cannot_be_written(cache, monkeypatch, caplog, tmp_path):
    """One warning; the products do the work."""
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert native.library() is None and native.library() is None
    assert len(caplog.records) == 1 and "XDG_CACHE_HOME" in caplog.text


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
    assert len(list(small.iterdir())) == 1 and kept().parent == small


def test_c_and_python_read_the_same_numbers():
    """Each number stands in vectors.h alone: no source defines it again."""
    text = "\n".join(file.read_text() for file in native.SOURCES if file != HEADER)
    names = engines.numbers(HEADER)
    assert names.keys() >= {"CHUNK", "TINY", "NO_MEMORY"}
    for name, value in names.items():
        assert getattr(engines, name) == float(value)
        assert not re.search(rf"\b{name}\s*=[^=]|#define {name}\b", text), name
    assert HEADER in native.SOURCES and '#include "vectors.h"' in text
