"""Words in columns and documents in rows: official files, text files, and what perplexity per word counts."""

import os
from pathlib import Path

import numpy as np
import pytest

from crt_exp.data import DataError, corpora
from crt_exp.data.corpora import Rows, TokenText, columns, word_corpus
from crt_exp.data.text import IGNORED
from crt_exp.data.vocabularies import new_tokenizer

official = pytest.mark.skipif(not os.environ.get("CRT_DATA"),
                              reason="CRT_DATA is not set: the official files are needed")
WORD_ENDS = np.array([0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1], np.float32)


def write_ptb(folder: Path, train="a b a\n c <unk> \n", valid="a z\n", test="b\n") -> Path:
    for split, text in (("train", train), ("valid", valid), ("test", test)):
        (folder / f"ptb.{split}.txt").write_text(text)
    return folder


def refused(call, *arguments) -> str:
    with pytest.raises(DataError) as error:
        call(*arguments)
    return str(error.value)


# ---- words


def test_words_of_official_files(tmp_path):
    found = word_corpus("ptb", write_ptb(tmp_path))
    assert found.words == ("<eos>", "a", "<unk>", "b", "c") and found.parts["train"].dtype == np.int32
    assert [part.tolist() for part in found.parts.values()] == [[1, 3, 1, 0, 4, 2, 0], [1, 2, 0], [3, 0]]
    assert found.counts.tolist() == [2, 2, 1, 1, 1] and found.eos == 0


def test_bad_official_files(tmp_path, monkeypatch):
    monkeypatch.delenv("CRT_DATA", raising=False)
    assert "CRT_DATA is not set" in refused(word_corpus, "ptb", None, None, "files")
    message = refused(word_corpus, "wikitext2", tmp_path)
    assert str(tmp_path / "wiki.train.tokens") in message and "python -m crt_exp.data fetch wikitext2" in message
    assert "'z' and <unk> are not" in refused(word_corpus, "ptb", write_ptb(tmp_path, train="a b\n"))
    assert "too few lines" in refused(word_corpus, "ptb", write_ptb(tmp_path, test=""))


@official
@pytest.mark.parametrize(("name", "words", "tokens"), [("ptb", 10000, [929589, 73760, 82430]),
                                                       ("wikitext2", 33278, [2088628, 217646, 245569])])
def test_published_tokens(name, words, tokens):
    found = word_corpus(name)
    assert len(found.words) == len(set(found.words)) == words and [*map(len, found.parts.values())] == tokens
    assert (np.diff(found.counts) <= 0).all() and found.counts[-1] > 0


def test_a_text_file_is_cut_into_parts_and_its_rare_words_are_unknown(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("a b\n\n" * 18 + "a\n" + "b zebra\n")
    assert "'zebra' and <unk> are not" in refused(word_corpus, str(path))    # nothing is rare, so no <unk>
    path.write_text("once a b\n" + "a b\n\n" * 18 + "a\n" + "b zebra\n")
    found = word_corpus(str(path))
    assert found.words == ("<eos>", "a", "b", "<unk>") and found.parts["train"].tolist()[:4] == [3, 1, 2, 0]
    assert found.parts["validation"].tolist() == [1, 2, 0, 1, 2, 0] and found.parts["test"].tolist() == [1, 0, 2, 3, 0]
    path.write_text("a b\n\n\nc\n")
    assert "too few lines" in refused(word_corpus, str(path))


@pytest.mark.parametrize("n, count", [(11, 3), (12, 3), (10, 4), (2, 5)])
@pytest.mark.parametrize("whole", [True, False])
def test_columns_hold_every_word_after_the_one_before_it(n, count, whole):
    text = np.arange(1, n + 1)
    tokens, labels = columns(text, count, eos=0, whole=whole).reshape(2, -1)
    predicted = labels[labels != IGNORED]
    assert predicted.tolist() == (text if whole else text[:n // count * count]).tolist()
    assert tokens[labels != IGNORED].tolist() == [0, *predicted][:len(predicted)]


# ---- documents


def test_rows_of_a_text():
    """Every token is predicted once, from the one before it."""
    text = TokenText(np.arange(1, 12, dtype=np.int32), np.array([4, 11]), WORD_ENDS)
    packed, apart = Rows.packed(text, 4, 0, whole=False), Rows.of_lines(text, 5, 0)
    rows, lines = ([data[i] for i in range(len(data))] for data in (packed, apart))
    assert [row.labels.tolist() for row in rows] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert [row.tokens.tolist() for row in rows] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [row.labels.tolist() for row in lines] == [[1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [row.tokens.tolist() for row in lines] == [[0, 1, 2, 3], [0, 5, 6, 7, 8]]
    whole = Rows.packed(text, 4, 0, whole=True)
    assert apart.lengths.tolist() == [4, 5] and whole.lengths.tolist() == [4, 4, 3]
    assert whole[2].labels.tolist() == [9, 10, 11] and whole.tokens_per_word([1, 2]) == 7 / 3


def test_parts_that_are_held_out():
    text = TokenText(np.arange(100, dtype=np.int32), np.array([30, 60, 80, 90, 100]), np.full(100, 0.5, np.float32))
    found = text.held_out(0.1, apart=False)
    assert [len(found[split].tokens) for split in ("train", "validation", "test")] == [80, 10, 10]
    assert found["test"].tokens[0] == 90 and found["test"].words.sum() == 5
    found = text.held_out(0.2, apart=True)
    assert [found[split].ends.tolist() for split in found] == [[30, 60, 80], [10], [10]]
    assert "no tokens of 100 left" in refused(text.held_out, 0.001, False)


@pytest.mark.parametrize("apart", [False, True])
def test_tokens_and_words_of_files(apart, tmp_path, monkeypatch):
    """Words count where they end, and a line end is one; the tokens are made once."""
    path = tmp_path / "a.txt"
    path.write_text("one two\n\nthree\n")
    tokenizer = new_tokenizer("byte_pairs", path, 300)
    found = TokenText.read([path], tokenizer, 7, apart, tmp_path / "cache")
    assert found.words.sum() == 5 and found.tokens.dtype == np.uint16 and len(found.ends) == 1 + apart
    parts = [tokenizer.decode(part[:-1]) for part in np.split(found.tokens, found.ends)[:-1]]
    assert parts == (["one two\n", "three\n"] if apart else ["one two\nthree\n"])
    for part in (found.part(0, 4), found.part(4, len(found.tokens) - 1)):
        text = tokenizer.decode([token for token in part.tokens if token != 7])
        assert part.words.sum() == len(text.split()) + text.count("\n"), text
    monkeypatch.setattr(corpora, "token_lists", None)
    again = TokenText.read([path], tokenizer, 7, apart, tmp_path / "cache")
    assert all(np.array_equal(getattr(again, name), getattr(found, name)) for name in ("tokens", "ends", "words"))
    assert found.counts(300).tolist() == np.bincount(found.tokens, minlength=300).tolist()


def test_ids_beyond_16_bits_and_empty_files(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one two\n")
    tokenizer = new_tokenizer("byte_pairs", path, 300)
    assert TokenText.read([path], tokenizer, 70_000, False).tokens[-1] == 70_000
    path.write_text("\n \n")
    assert "a.txt: empty" in refused(TokenText.read, [path], tokenizer, 7, False, tmp_path / "cache")
    assert [*(tmp_path / "cache").iterdir()] == []
