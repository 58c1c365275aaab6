"""Tokens of books that need not fit in memory: the same as in memory, made in pieces, whole or not there."""

import logging
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from crt_exp.data import DataError, books, cache, mapped, sentence_pieces
from crt_exp.data.byte_pairs import byte_pairs

WORDS = ["a", "bird", "that", "sings", "in", "the", "old", "tree", "by", "a", "river", "does", "not", "know", "who"]
TYPES = {"tokens": np.uint16, "ends": np.int64}


def a_book(path, lines, seed):
    draw = np.random.default_rng(seed)
    path.write_text("\n".join(" ".join(draw.choice(WORDS, 9)) + "\n" * int(draw.integers(2)) for _ in range(lines)))
    return path


@pytest.fixture
def shelf(tmp_path):
    """A folder of books, and byte pairs of it."""
    (tmp_path / "shelf").mkdir()
    files = [a_book(tmp_path / "shelf" / f"{i}.txt", 40 * (i + 1), i) for i in range(4)]
    return tmp_path / "shelf", byte_pairs(files, 300)


@pytest.mark.parametrize("apart", [False, True])
def test_mapped_tokens_are_those_in_memory(shelf, apart, tmp_path, monkeypatch):
    """And the whole text, document by document; the second time nothing is tokenised."""
    folder, tokenizer = shelf
    here = books.read(books.files_of(str(folder)), tokenizer, 7, apart)
    there = books.read(books.files_of(str(folder)), tokenizer, 7, apart, tmp_path / "cache")
    monkeypatch.setattr(books, "token_spans", None)
    again = books.read(books.files_of(str(folder)), tokenizer, 7, apart, tmp_path / "cache")
    for each in (there, again):
        assert isinstance(each.tokens, np.memmap) and each.tokens.dtype == np.uint16
        for name in ("tokens", "ends", "words"):
            assert np.array_equal(getattr(each, name), getattr(here, name))
    texts = [tokenizer.decode(part[:-1]) for part in np.split(here.tokens, here.ends)[:-1]]
    files = sorted(folder.iterdir())
    lines = [[f"{line}\n" for line in file.read_text().splitlines() if line] for file in files]
    assert texts == ([line for each in lines for line in each] if apart else ["".join(each) for each in lines])
    assert here.counts(300).tolist() == np.bincount(here.tokens, minlength=300).tolist()


def test_counts_are_made_in_pieces(monkeypatch):
    monkeypatch.setattr(books, "COUNTED", 7)
    text = books.TokenText(np.arange(50, dtype=np.uint16) % 9, np.array([50]), np.zeros(50, np.float32))
    assert text.counts(12).tolist() == np.bincount(text.tokens, minlength=12).tolist()


def test_ids_beyond_16_bits(shelf, tmp_path):
    folder, tokenizer = shelf
    text = books.read(books.files_of(str(folder)), tokenizer, 70_000, False, tmp_path / "cache")
    assert text.tokens.dtype == np.uint32 and text.tokens[text.ends - 1].tolist() == [70_000] * 4


def peak_of(lines, tokenizer, folder):
    """Bytes of Python and NumPy while a book of so many lines is tokenised."""
    book = a_book(folder / f"{lines}.txt", lines, 0)
    tracemalloc.start()
    books.read(books.files_of(str(book)), tokenizer, 7, False, folder / "cache")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_is_that_of_some_lines(shelf, tmp_path):
    """However long a book is."""
    few, many = (peak_of(lines, shelf[1], tmp_path) for lines in (1200, 4800))
    assert many < 1.2 * few, (few, many)


def test_arrays_of_many_pieces(tmp_path):
    """Larger by far than what is in memory meanwhile; one piece may lack an array, and an array may be empty."""
    def pieces():
        for i in range(400):
            yield {"tokens": np.full(50_000, i)}

    tracemalloc.start()
    found = mapped.mapped(tmp_path, "key", pieces, TYPES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found["tokens"].nbytes == 40_000_000 and peak < 2_000_000
    assert found["tokens"][::50_000].tolist() == [*range(400)] and found["ends"].shape == (0,)


# ---- whole or not there


KILLED = """
import os, signal, sys, numpy as np
from pathlib import Path
from crt_exp.data import mapped

def pieces():
    for i in range(3):
        yield {"tokens": np.full(9, i)}
    os.kill(os.getpid(), signal.SIGKILL)

mapped.mapped(Path(sys.argv[1]), "key", pieces, {"tokens": np.uint16, "ends": np.int64})
"""


def some():
    yield {"tokens": np.arange(5), "ends": np.array([5])}


def test_a_killed_tokenisation_leaves_nothing_half_written(tmp_path):
    """kill -9 in the middle: nothing has the name of the whole, and the next one takes away what was left."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=env)
    assert done.returncode == -signal.SIGKILL and not (tmp_path / "key.arrays").exists()
    assert len([*tmp_path.iterdir()]) == 1
    assert mapped.mapped(tmp_path, "key", some, TYPES)["tokens"].tolist() == [*range(5)]
    assert [path.name for path in tmp_path.iterdir()] == ["key.arrays"]


def test_an_error_in_the_middle_leaves_nothing(shelf, tmp_path):
    folder, tokenizer = shelf
    (folder / "9.txt").write_text("\n \n")
    with pytest.raises(DataError, match=r"9\.txt: the text is empty"):
        books.read(books.files_of(str(folder)), tokenizer, 7, False, tmp_path / "cache")
    assert [*(tmp_path / "cache").iterdir()] == []


@pytest.mark.parametrize("damage", ["shorter", "gone", "no sizes"])
def test_a_folder_that_is_not_as_it_was_written_is_made_again(damage, tmp_path, caplog):
    mapped.mapped(tmp_path, "key", some, TYPES)
    cache.warn.cache_clear()
    tokens = tmp_path / "key.arrays/tokens.bin"
    match damage:
        case "shorter":
            tokens.write_bytes(tokens.read_bytes()[:-1])
        case "gone":
            tokens.unlink()
        case "no sizes":
            (tmp_path / "key.arrays" / mapped.SIZES).write_text("{")
    with caplog.at_level(logging.WARNING):
        found = mapped.mapped(tmp_path, "key", some, TYPES)
    assert found["tokens"].tolist() == [*range(5)] and "is not as it was written" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["key.arrays"]


def test_where_nothing_can_be_written_the_tokens_are_in_memory(tmp_path, caplog):
    cache.warn.cache_clear()
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        found = mapped.mapped(tmp_path / "file", "key", some, TYPES)
    assert found["tokens"].tolist() == [*range(5)] and "cannot be written" in caplog.text


# ---- a vocabulary


def test_pieces_are_made_from_a_sample_of_lines():
    """All lines in their order where there are no more; else so many, all alike, the same each time."""
    lines = [str(i) for i in range(400)]
    assert sentence_pieces.sample(lines, 400) == lines == sentence_pieces.sample(iter(lines), 500)
    chosen = sentence_pieces.sample(iter(lines), 100)
    assert chosen == sentence_pieces.sample(iter(lines), 100) and len({*chosen}) == 100 and {*chosen} <= {*lines}
    for part in range(4):                    # 25 of each quarter, with a standard deviation of 3.8
        assert abs(sum(part * 100 <= int(line) < part * 100 + 100 for line in chosen) - 25) < 16
