"""The library of the engines in C is compiled once, kept whole, and done without where it cannot be."""

import errno
import logging
import multiprocessing
import os
import re
import shutil

import pytest
import torch
from native_cases import Case, assert_near, needs_library

from crt_exp.attention.engines import constants, native, native_library
from crt_exp.features import OPRF

HEADER = native_library.ENGINES / "constants.h"


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


def test_message_of_the_compiler(small, caplog):
    native_library.SOURCES[0].write_text("int main(void) { return 0 }\n")
    with caplog.at_level(logging.WARNING):
        assert native.library() is None
    assert "error" in caplog.text and list(small.iterdir()) == []


def test_compiled_once(small):
    made = kept()
    assert [f.name for f in small.iterdir()] == [made.name]
    before = made.stat()
    assert kept() == made and made.stat().st_ino == before.st_ino  # not even written again


STRANGE = {"library writable by others": lambda file: file.chmod(0o622),
           "folder writable by others": lambda file: file.parent.chmod(0o770),
           "outer folder writable by all": lambda file: file.parents[1].chmod(0o777)}


@pytest.mark.parametrize("change", STRANGE)
def test_what_others_could_have_written_is_not_loaded(change, small, caplog):
    """A library that somebody else might have put there."""
    made = kept()
    foreign = b"what another user wrote"
    made.write_bytes(foreign)
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
    assert len(list(small.iterdir())) == 1 and kept().parent == small


def test_c_and_python_read_the_same_numbers():
    """Each number stands in constants.h alone: no source defines it again."""
    text = "\n".join(file.read_text() for file in native_library.SOURCES if file != HEADER)
    names = constants.numbers(HEADER)
    assert names.keys() >= {"CHUNK", "TINY", "NO_MEMORY"}
    for name, value in names.items():
        assert getattr(constants, name) == float(value)
        assert not re.search(rf"\b{name}\s*=[^=]|#define {name}\b", text), name
    assert HEADER in native_library.SOURCES and '#include "constants.h"' in text
