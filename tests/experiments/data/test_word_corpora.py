"""Corpora of words, documents, files of result pages, and the cache of arrays."""

from pathlib import Path

import numpy as np
import pytest
from helpers.refusals import refused

from crt_exp.experiments.data import corpora, glue
from crt_exp.experiments.data.corpora import Rows, TokenText, columns, word_corpus
from crt_exp.experiments.data.files import cached
from crt_exp.experiments.data.text import (
    IGNORED,
)

WORD_ENDS = np.array([0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1], np.float32)


# ------------------------------------------------------------------------------------------- corpora of words
def write_ptb(folder: Path, train="a b a\n c <unk> \n", valid="a z\n", test="b\n") -> Path:
    cases = [
        ("train", train),
        ("valid", valid),
        ("test", test),
    ]
    for split, lines in cases:
        (folder / f"ptb.{split}.txt").write_text(lines)
    return folder


def test_words_of_official_files(tmp_path):
    found = word_corpus("ptb", write_ptb(tmp_path))
    assert found.words == ("<eos>", "a", "<unk>", "b", "c")
    assert found.parts["train"].dtype == np.int32
    actual = [part.tolist() for part in found.parts.values()]
    assert actual == [
        [1, 3, 1, 0, 4, 2, 0],
        [1, 2, 0],
        [3, 0],
    ]
    actual = found.counts.tolist()
    assert actual == [2, 2, 1, 1, 1]
    assert found.eos == 0
    message = refused(word_corpus, "wikitext2", tmp_path)
    assert str(tmp_path / "wiki.train.tokens") in message
    assert "python -m crt_exp data fetch wikitext2" in message
    assert "'z' and <unk> are not" in refused(
        word_corpus, "ptb", write_ptb(tmp_path, train="a b\n")
    )
    assert "too few lines" in refused(word_corpus, "ptb", write_ptb(tmp_path, test=""))


def test_rare_words_of_a_split_file_are_unknown(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("once a b\n" + "a b\n\n" * 18 + "a\n" + "b zebra\n")
    found = word_corpus(str(path))
    assert found.words == ("<eos>", "a", "b", "<unk>")
    actual = found.parts["train"].tolist()[:4]
    assert actual == [
        3,
        1,
        2,
        0,
    ]
    actual = found.parts["validation"].tolist()
    assert actual == [1, 2, 0, 1, 2, 0]
    actual = found.parts["test"].tolist()
    assert actual == [1, 0, 2, 3, 0]


@pytest.mark.parametrize(
    "n, count, whole",
    [
        (11, 3, True),
        (11, 3, False),
        (12, 3, True),
        (2, 5, True),
    ],
)
def test_columns_hold_every_word_after_the_one_before_it(n, count, whole):
    words = np.arange(1, n + 1)
    tokens, labels = columns(words, count, eos=0, whole=whole).reshape(2, -1)
    predicted = labels[labels != IGNORED]
    actual = predicted.tolist()
    expected = (words if whole else words[: n // count * count]).tolist()
    assert actual == expected
    actual = tokens[labels != IGNORED].tolist()
    expected = [0, *predicted][: len(predicted)]
    assert actual == expected


# --------------------------------------------------------------------------------------------------- documents
def test_every_token_of_a_row_is_predicted_from_the_one_before_it():
    document = TokenText(np.arange(1, 12, dtype=np.int32), np.array([4, 11]), WORD_ENDS)
    packed = Rows.packed(document, 4, 0, whole=False)
    apart = Rows.of_lines(document, 5, 0)
    both = []
    for data in (packed, apart):
        both.append([data[i] for i in range(len(data))])
    rows, lines = both
    actual = [labels.tolist() for _, labels in rows]
    assert actual == [[1, 2, 3, 4], [5, 6, 7, 8]]
    actual = [tokens.tolist() for tokens, _ in rows]
    assert actual == [[0, 1, 2, 3], [4, 5, 6, 7]]
    actual = [labels.tolist() for _, labels in lines]
    assert actual == [[1, 2, 3, 4], [5, 6, 7, 8, 9]]
    actual = [tokens.tolist() for tokens, _ in lines]
    assert actual == [[0, 1, 2, 3], [0, 5, 6, 7, 8]]
    whole = Rows.packed(document, 4, 0, whole=True)
    assert apart.lengths.tolist() == [4, 5]
    assert whole.lengths.tolist() == [4, 4, 3]
    actual = whole[2][1].tolist()
    assert actual == [9, 10, 11]
    assert whole.tokens_per_word([1, 2]) == 7 / 3


def test_held_out_parts_of_a_document():
    document = TokenText(
        np.arange(100, dtype=np.int32),
        np.array([30, 60, 80, 90, 100]),
        np.full(100, 0.5, np.float32),
    )
    found = document.held_out(0.1, apart=False)
    actual = [len(found[split].tokens) for split in ("train", "validation", "test")]
    assert actual == [80, 10, 10]
    assert found["test"].tokens[0] == 90
    assert found["test"].words.sum() == 5
    found = document.held_out(0.2, apart=True)
    actual = [found[split].ends.tolist() for split in found]
    assert actual == [[30, 60, 80], [10], [10]]
    assert "no tokens of 100 left" in refused(document.held_out, 0.001, False)


@pytest.mark.parametrize("apart", [False, True])
def test_tokens_and_words_of_files(apart, byte_pairs, tmp_path, monkeypatch):
    """Words count where they end, and a line end is one; the tokens are made once."""
    path = tmp_path / "a.txt"
    path.write_text("one two\n\nthree\n")
    found = TokenText.read([path], byte_pairs, 7, apart, tmp_path / "cache")
    assert found.words.sum() == 5
    assert found.tokens.dtype == np.uint16
    assert len(found.ends) == 1 + apart
    parts = []
    for part in np.split(found.tokens, found.ends)[:-1]:
        parts.append(byte_pairs.decode(part[:-1]))
    assert parts == (["one two\n", "three\n"] if apart else ["one two\nthree\n"])
    cases = [found.part(0, 4), found.part(4, len(found.tokens) - 1)]
    for part in cases:
        words = byte_pairs.decode([token for token in part.tokens if token != 7])
        actual = part.words.sum()
        expected = len(words.split()) + words.count("\n")
        assert actual == expected, words
    monkeypatch.setattr(corpora, "token_lists", None)
    again = TokenText.read([path], byte_pairs, 7, apart, tmp_path / "cache")
    for name in ("tokens", "ends", "words"):
        assert np.array_equal(getattr(again, name), getattr(found, name))
    actual = found.counts(300).tolist()
    expected = np.bincount(found.tokens, minlength=300).tolist()
    assert actual == expected


def test_ids_beyond_16_bits_and_empty_files(byte_pairs, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one two\n")
    actual = TokenText.read([path], byte_pairs, 70_000, False).tokens[-1]
    assert actual == 70_000
    path.write_text("\n \n")
    assert "a.txt: empty" in refused(
        TokenText.read, [path], byte_pairs, 7, False, tmp_path / "cache"
    )
    assert [*(tmp_path / "cache").iterdir()] == []


# ----------------------------------------------------------------------- files of result pages, made on demand
@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def test_parts_of_qnli_share_no_question(data):
    """They are made of dev alone."""
    option = f"task.data_dir={corpora.FOLDER}/qnli-2"
    assert "glue/QNLI needs dev.tsv" in refused(corpora.prepare, [option])
    lines = [f"{i}\tWho is {i % 5}?\tIt is {i}.\t{'not_' * (i % 2)}entailment\n" for i in range(13)]
    (data / "glue/QNLI").mkdir(parents=True)
    (data / "glue/QNLI/dev.tsv").write_text("index\tquestion\tsentence\tlabel\n" + "".join(lines))
    corpora.prepare([option])
    train = glue.load("qnli", "train", corpora.FOLDER / "qnli-2")
    dev = glue.load("qnli", "dev", corpora.FOLDER / "qnli-2")
    assert {*dev.texts[0]} == {"Who is 0?", "Who is 2?", "Who is 4?"}
    assert {*train.texts[0]}.isdisjoint(dev.texts[0])
    actual = sorted(train.texts[1] + dev.texts[1])
    expected = sorted(glue.load("qnli", "dev").texts[1])
    assert actual == expected


def test_no_row_of_a_part_of_sst2_is_a_phrase_of_the_other_part(data):
    words = [f"a{i} b{i} c{i} good film" for i in range(9)]
    rows = [
        *words,
        *(line[:8] for line in words),
        "good film",
        "film",
        *(line[-11:] for line in words),
    ]
    (data / "glue/SST-2").mkdir(parents=True)
    (data / "glue/SST-2/train.tsv").write_text(
        "sentence\tlabel\n" + "".join(f"{line}\t{i % 2}\n" for i, line in enumerate(rows))
    )
    folder = corpora.FOLDER / "sst2-9"
    corpora.prepare([f"task.data_dir={folder}"])
    train = glue.load("sst2", "train", folder).texts[0]
    dev = glue.load("sst2", "dev", folder).texts[0]
    assert 9 <= len(dev) <= 11
    assert len(train) == 27 - len(dev)
    padded = []
    for lines in (train, dev):
        padded.append([f" {line} " for line in lines])
    for one in padded[0]:
        for other in padded[1]:
            assert one not in other
            assert other not in one


# ------------------------------------------------------------------------------------------------------- cache
def some_arrays():
    return {"tokens": np.arange(5)}


def test_a_stopped_process_leaves_no_half_written_array(tmp_path, monkeypatch):
    save = np.save

    def stop(*arguments):
        save(*arguments)
        assert not [*(tmp_path / "cache").glob("[!t]*/")]  # what kill -9 would leave
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(np, "save", stop)
        cached(tmp_path / "cache", some_arrays, "key")
    actual = cached(tmp_path / "cache", some_arrays, "key")["tokens"]
    assert actual.tolist() == [*range(5)]
    assert isinstance(actual, np.memmap)


def test_damage_and_folders_that_cannot_be_written_are_refused(tmp_path):
    cached(tmp_path / "cache", some_arrays, "key")
    [file] = tmp_path.glob("cache/*/tokens.npy")
    file.write_bytes(file.read_bytes()[:-1])
    assert "remove this folder" in refused(cached, tmp_path / "cache", some_arrays, "key")
    (tmp_path / "file").write_text("")
    assert "expected a writable folder, or null" in refused(
        cached, tmp_path / "file", some_arrays, "key"
    )
