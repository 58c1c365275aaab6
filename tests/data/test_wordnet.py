"""The text that comes along: the same everywhere, written once, of a licence that is named."""

import hashlib
import sys

import pytest

from crt_exp.data import DataError, wordnet, words
from crt_exp.data.text import text_files


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "crt_exp"


def test_it_is_the_same_plain_text_everywhere(cache):
    (path,) = text_files("wordnet")
    content = path.read_bytes()
    assert path == cache / "wordnet.txt" and content.isascii() and 200_000 < len(content) < 210_000
    assert hashlib.sha256(content).hexdigest() == wordnet.DIGEST


def test_it_is_written_once_and_mended(cache, monkeypatch):
    (path,) = text_files(["wordnet"])
    with monkeypatch.context() as patch:
        patch.setattr(wordnet, "definitions", None)  # which imports timm: that takes seconds
        assert text_files("wordnet") == [path]
    path.write_text("cut")
    assert text_files("wordnet")[0].stat().st_size > 200_000 and list(cache.iterdir()) == [path]


def test_a_file_of_that_name_is_itself(cache, tmp_path):
    (tmp_path / "wordnet").write_text("mine\n")
    assert text_files("wordnet")[0].read_text() == "mine\n" and not cache.exists()


def test_words_of_it(cache):
    found = words.corpus("wordnet", min_count=2)
    assert len(found.train) > 10 * len(found.valid) > 1000 and "<unk>" in found.words


def test_what_hinders_it_is_said(cache, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match="name a folder in XDG_CACHE_HOME"):
        text_files("wordnet")
    monkeypatch.setattr(wordnet, "DIGEST", "another")
    with pytest.raises(DataError, match="is another one in this timm"):
        wordnet.definitions()
    monkeypatch.setitem(sys.modules, "timm.data", None)
    with pytest.raises(DataError, match="comes with the package timm"):
        wordnet.definitions()
