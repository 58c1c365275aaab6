"""Which files decide a page: found by imports, so that no list by hand can leave one out."""

import ast
import shutil

import pytest

from crt_exp.config import CONF
from crt_exp.measure import sources
from crt_exp.oldreport import page


def files(begin):
    return {sources.name_of(file) for file in sources.closure(tuple(begin))}


def of_page(name):
    return files(sources.of_page(page.load(name)))


CHANGES = [
    ("crt_exp/runner/optim.py", "\n\n\n", "\n\n\nextra = 1\n\n\n", {"lra"}),
    ("crt_exp/runner/optim.py", '"""', '"""Again: ', set()),
    ("crt_exp/runner/trainer.py", "\n\n\n", "\n\n\n# a comment\n", set()),
    ("crt_exp/attention/engines/native.c", "static", "static ", {"lra"}),
    ("crt_exp/features/exponential.py", "\n\n\n", "\n\n\nextra = 1\n\n\n", {"lra", "hrf-pointwise"}),
    ("conf/trainer/default.yaml", "lr: 1.0e-4", "lr: 2.0e-4", {"lra"}),
    ("conf/trainer/default.yaml", "# the highest learning rate", "# of Adam", set()),
    ("conf/task/lra.yaml", "trainer:", "extra: 1\ntrainer:", {"lra"}),
    ("conf/task/books.yaml", "trainer:", "extra: 1\ntrainer:", set()),
    ("conf/config.yaml", "m: 256", "m: 128", {"lra", "hrf-pointwise"}),
    ("conf/config.yaml", "usage:", "use:", set())]


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the package and its configuration, whose files may be changed."""
    for what, folder in ((sources.PACKAGE, "crt_exp"), (CONF, "conf")):
        shutil.copytree(what, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "conf"))
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "crt_exp")
    monkeypatch.setattr(sources, "CONF", tmp_path / "conf")
    yield tmp_path
    forget()


def forget():
    for cached in (sources.fingerprint, sources.closure):
        cached.cache_clear()


def fingerprints():
    forget()
    return {name: sources.fingerprint(sources.of_page(page.load(name))) for name in ("lra", "hrf-pointwise")}


def test_cells_are_stale_where_a_statement_of_their_files_changed(copied):
    """Those of runs where the trainer did, those of maps not; and no others for comments, docstrings and help."""
    known = fingerprints()
    for name, before, after, stale in CHANGES:
        file, text = copied / name, (copied / name).read_text(encoding="utf-8")
        assert before in text
        file.write_text(text.replace(before, after, 1), encoding="utf-8")
        now = fingerprints()
        assert {each for each in now if now[each] != known[each]} == stale, (name, after)
        known = now


def test_code_is_what_it_does_and_not_how_it_is_written():
    def said(text):
        return ast.dump(sources.statements(text))

    plain = 'def f(x):\n    """Doubles."""\n    return 2 * x\n'
    assert said(plain) == said('def f(x):\n    """Twice x."""\n    return (2\n            * x)  # why\n')
    assert said(plain) != said(plain.replace("2 * x", "3 * x"))
