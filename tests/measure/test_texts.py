"""Texts, vocabularies and halves of QNLI that options name; and answers to GLUE without a model."""

import numpy as np
import pytest
from small_bert import write_glue, write_text

from crt_exp.data import DataError, glue
from crt_exp.measure import texts
from crt_exp.measure.glue_baselines import GLUEBaselines, answers_of, cut
from crt_exp.mechanism import Mechanism


def test_texts_are_made_where_options_name_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", str(tmp_path / "data"))
    for part in ("train", "valid"):
        write_text(tmp_path / "data/wikitext2" / f"wiki.{part}.tokens", 30)
    texts.prepare(["a=1", f"task.vocabulary={texts.FOLDER}/characters-20",
                   f"task.validation_text={texts.FOLDER}/validation-3.tokens"])
    words = (texts.FOLDER / "characters-20/vocab.txt").read_text().splitlines()
    assert "##e" in words and "e" in words and len(words) == 5 + 2 * min(20, (len(words) - 5) // 2)
    assert len((texts.FOLDER / "validation-3.tokens").read_text().splitlines()) == 10


def test_parts_of_qnli_share_no_question(tmp_path, monkeypatch):
    """They are made of dev alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", str(tmp_path / "data"))
    option = f"task.data_dir={texts.FOLDER}/qnli-2"
    with pytest.raises(DataError, match="glue/QNLI needs the file dev.tsv"):
        texts.prepare([option])
    lines = [f"{i}\tWho is {i % 5}?\tIt is {i}.\t{'not_' * (i % 2)}entailment\n" for i in range(13)]
    (tmp_path / "data/glue/QNLI").mkdir(parents=True)
    (tmp_path / "data/glue/QNLI/dev.tsv").write_text("index\tquestion\tsentence\tlabel\n" + "".join(lines))
    for _ in range(2):
        texts.prepare([option])
        train, dev = (glue.load("qnli", split, texts.FOLDER / "qnli-2") for split in ("train", "dev"))
        assert {*dev.sentence1} == {"Who is 0?", "Who is 2?", "Who is 4?"}
        assert {*train.sentence1}.isdisjoint(dev.sentence1)
        assert sorted(train.sentence2 + dev.sentence2) == sorted(glue.load("qnli", "dev").sentence2)
    rows = GLUEBaselines("qnli", f"{texts.FOLDER}/qnli-2").records(Mechanism.parse("exact"), 0)
    assert [row["method"] for row in rows] == ["majority class", "word overlap"]


def test_answers_without_a_model(tmp_path, monkeypatch):
    """Words of both sentences over words of either; the cut of a class task is the best one of training."""
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    for name, folder in (("sst2", "SST-2"), ("stsb", "STS-B")):
        write_glue(tmp_path / "glue" / folder, name)
    shared = np.array([0.1, 0.2, 0.6, 0.9])
    assert cut("mrpc", shared, [0, 0, 1, 1], np.array([0.0, 0.7, 1.0])) == [0, 1, 1]
    assert cut("rte", shared, [1, 1, 0, 0], np.array([0.0, 1.0])) == [1, 0]
    row, = GLUEBaselines("sst2").records(Mechanism.parse("exact"), 0)
    assert row["method"] == "majority class" and 0 <= row["accuracy"] <= 1
    answers, labels = answers_of("stsb")["word overlap"]
    assert len(answers) == len(labels) == 12 and min(answers) >= 0
