"""Texts, vocabularies and halves of QNLI that options name."""

import pytest
from small_bert import write_text

from crt_exp.data import DataError, corpora, glue


def test_texts_are_made_where_options_name_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", str(tmp_path / "data"))
    for part in ("train", "valid"):
        write_text(tmp_path / "data/wikitext2" / f"wiki.{part}.tokens", 30)
    corpora.prepare(["a=1", f"task.vocabulary={corpora.FOLDER}/characters-20",
                   f"task.validation_text={corpora.FOLDER}/validation-3.tokens"])
    words = (corpora.FOLDER / "characters-20/vocab.txt").read_text().splitlines()
    assert "##e" in words and "e" in words and len(words) == 5 + 2 * min(20, (len(words) - 5) // 2)
    assert len((corpora.FOLDER / "validation-3.tokens").read_text().splitlines()) == 10


def test_parts_of_qnli_share_no_question(tmp_path, monkeypatch):
    """They are made of dev alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", str(tmp_path / "data"))
    option = f"task.data_dir={corpora.FOLDER}/qnli-2"
    with pytest.raises(DataError, match="glue/QNLI needs dev.tsv"):
        corpora.prepare([option])
    lines = [f"{i}\tWho is {i % 5}?\tIt is {i}.\t{'not_' * (i % 2)}entailment\n" for i in range(13)]
    (tmp_path / "data/glue/QNLI").mkdir(parents=True)
    (tmp_path / "data/glue/QNLI/dev.tsv").write_text("index\tquestion\tsentence\tlabel\n" + "".join(lines))
    for _ in range(2):
        corpora.prepare([option])
        train, dev = (glue.load("qnli", split, corpora.FOLDER / "qnli-2") for split in ("train", "dev"))
        assert {*dev.texts[0]} == {"Who is 0?", "Who is 2?", "Who is 4?"}
        assert {*train.texts[0]}.isdisjoint(dev.texts[0])
        assert sorted(train.texts[1] + dev.texts[1]) == sorted(glue.load("qnli", "dev").texts[1])


def test_held_out_rows_of_sst2_share_no_sentence_with_those_trained_on(tmp_path, monkeypatch):
    """No row of one split is a phrase of a row of the other."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", str(tmp_path / "data"))
    words = [f"a{i} b{i} c{i} good film" for i in range(9)]
    rows = [*words, *(text[:8] for text in words), "good film", "film", *(text[-11:] for text in words)]
    (tmp_path / "data/glue/SST-2").mkdir(parents=True)
    (tmp_path / "data/glue/SST-2/train.tsv").write_text(
        "sentence\tlabel\n" + "".join(f"{text}\t{i % 2}\n" for i, text in enumerate(rows)))
    folder = corpora.FOLDER / "sst2-9"
    corpora.prepare([f"task.data_dir={folder}"])
    train, dev = (glue.load("sst2", split, folder).texts[0] for split in ("train", "dev"))
    assert 9 <= len(dev) <= 11 and len(train) == 27 - len(dev)
    padded = [[f" {text} " for text in texts] for texts in (train, dev)]
    assert not any(one in other or other in one for one in padded[0] for other in padded[1])
