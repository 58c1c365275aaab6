"""Texts as numbers of words: official files, text files, a generated chain, and the columns in which they are read."""

import os
from pathlib import Path

import numpy as np
import pytest

from crt_exp.data import DataError
from crt_exp.data.text import IGNORED
from crt_exp.data.words import Chain, columns, corpus

official = pytest.mark.skipif(not os.environ.get("CRT_DATA"),
                              reason="CRT_DATA is not set: the official files are needed")
GENERATED = {"words": 12, "train": 3000, "validation": 4000, "test": 50, "evenness": 0.3, "seed": 0}


def write_ptb(folder: Path, train="a b a\n c <unk> \n", valid="a z\n", test="b\n") -> Path:
    for split, text in (("train", train), ("valid", valid), ("test", test)):
        (folder / f"ptb.{split}.txt").write_text(text)
    return folder


def refused(*arguments, **options) -> str:
    with pytest.raises(DataError) as error:
        corpus(*arguments, **options)
    return str(error.value)


def test_words_of_official_files(tmp_path):
    found = corpus("ptb", write_ptb(tmp_path))
    assert found.words == ("<eos>", "a", "<unk>", "b", "c") and found.train.dtype == np.int32 and found.eos == 0
    assert [part.tolist() for part in found[1:]] == [[1, 3, 1, 0, 4, 2, 0], [1, 2, 0], [3, 0]]
    assert found.counts.tolist() == [2, 2, 1, 1, 1]


def test_bad_official_files(tmp_path, monkeypatch):
    monkeypatch.delenv("CRT_DATA", raising=False)
    assert "CRT_DATA is not set" in refused("ptb", source="files")
    message = refused("wikitext2", tmp_path)
    assert str(tmp_path / "wiki.train.tokens") in message and "python -m crt_exp.data fetch wikitext2" in message
    message = refused("ptb", write_ptb(tmp_path, train="a b\n"))
    assert "ptb.valid.txt, line 1: 'z' is not in the training text" in message and "fetch ptb" in message
    assert "ptb.test.txt: the file is empty" in refused("ptb", write_ptb(tmp_path, test=""))


@official
@pytest.mark.parametrize(("name", "words", "tokens"), [("ptb", 10000, (929589, 73760, 82430)),
                                                       ("wikitext2", 33278, (2088628, 217646, 245569))])
def test_published_tokens(name, words, tokens):
    found = corpus(name)
    assert len(found.words) == len(set(found.words)) == words and tuple(map(len, found[1:])) == tokens
    counts = np.bincount(found.train, minlength=words)
    assert (np.diff(counts) <= 0).all() and counts[-1] > 0   # every word of the vocabulary is in the training text


def test_a_text_file_is_cut_into_parts_and_its_unknown_words_are_named(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("a b\n\n" * 18 + "a\n" + "b zebra\n")
    message = refused(str(path))
    assert f"{path}, line 38: 'zebra' is not in the training text" in message and "task.min_count=2" in message
    assert "'zebra' is not" in refused(str(path), min_count=2)                       # nothing is rare, so no <unk>
    path.write_text("once a b\n" + "a b\n\n" * 18 + "a\n" + "b zebra\n")
    found = corpus(str(path), min_count=2)
    assert found.words == ("<eos>", "a", "b", "<unk>") and found.train.tolist()[:4] == [3, 1, 2, 0]
    assert [part.tolist() for part in found[2:]] == [[1, 2, 0, 1, 2, 0], [1, 0, 2, 3, 0]]


def test_text_files_that_are_none(tmp_path):
    assert "is not there" in refused(str(tmp_path / "gone.txt"))
    (tmp_path / "short.txt").write_text("a b\n\n\nc\n")
    assert "2 lines with words leave none for training" in refused(str(tmp_path / "short.txt"))


def test_the_floor_of_a_chain_is_its_entropy():
    chain = Chain.of(GENERATED)
    found = chain.corpus(GENERATED)
    assert sorted(found.words) == sorted(["<eos>", *(f"w{i}" for i in range(1, 12))])
    assert (np.diff(found.counts) <= 0).all() and [len(part) for part in found[1:]] == [3000, 4000, 50]
    losses = -chain.log_chances(found, found.valid)
    assert abs(losses.mean() - chain.entropy()) < 5 * losses.std() / len(losses)**0.5
    again = Chain.of(GENERATED).corpus(GENERATED)
    assert again.words == found.words and all((a == b).all() for a, b in zip(again[1:], found[1:]))


@pytest.mark.parametrize("n, count", [(11, 3), (12, 3), (10, 4), (2, 5)])
@pytest.mark.parametrize("whole", [True, False])
def test_columns_hold_every_word_after_the_one_before_it(n, count, whole):
    text = np.arange(1, n + 1)
    found = columns(text, count, eos=0, whole=whole)
    labels, tokens = found.labels.reshape(-1), found.tokens.reshape(-1)
    predicted = labels[labels != IGNORED]
    assert predicted.tolist() == (text if whole else text[:n // count * count]).tolist()
    assert tokens[labels != IGNORED].tolist() == [0, *predicted][:len(predicted)]
    assert found.labels.shape[0] == count


def test_batches_of_columns_start_anywhere():
    found = columns(np.arange(23), 2, eos=0, whole=False)
    parts = [*found.batches(4)]
    assert [part.tokens.shape for part in parts] == [(2, 4), (2, 4), (2, 3)] and found.steps(4) == 3
    assert (np.concatenate([part.labels for part in parts], 1) == found.labels).all()
    assert all((a.tokens == b.tokens).all() for a, b in zip(found.batches(4, start=1), parts[1:]))
