"""Kept runs with other attention and without training: losses, layers, larger images; models of texts."""

import numpy as np
import pytest
from small_bert import write_glue, write_text

from crt_exp.data import DataError, glue
from crt_exp.measure import swapped, texts
from crt_exp.runner.run import read_records

MODEL = ["task.dataset=digits", "task.size=8", "task.workers=0", "task.sizes.patch=2", "task.sizes.width=32",
         "task.sizes.depth=2", "task.sizes.heads=2"]


# ---- a kept run with other attention


@pytest.fixture
def measured(typed, tmp_path, one_thread):
    """measured(task, options...): records of a measuring task that starts from a run of task=imagenet on digits."""
    def run(name, *options):
        code, _, errors = typed(*options, "logger=none", f"hydra.run.dir={name}")
        assert code == 0, errors
        return read_records(tmp_path / name / "metrics.jsonl")
    run("start", "task=imagenet", *MODEL, "attention=exact", "trainer.steps=3")
    return run


def test_a_kept_run_with_other_attention(measured):
    """Its losses are those of a run of no steps that starts from it, with the same projections."""
    ours = ["attention=favorpp", "features.m=8"]
    swap, = measured("loss", "task=swap_loss", "task.start=start", "task.splits=[val]", *ours, "task.offset=2",
                     "seed=1")
    *_, run = measured("run", "task=imagenet", *MODEL[:3], "task.init=start", *ours, "seed=3", "trainer.steps=0")
    assert swap["accuracy"] == pytest.approx(run["accuracy"])
    exact, = measured("exact", "task=swap_loss", "task.start=start", "task.splits=[val]", "attention=exact")
    assert exact["loss"] != pytest.approx(swap["loss"]) and exact["split"] == "val" and exact["final"]

    *layers, last = measured("layers", "task=swap_layers", "task.start=start", "task.rows=4", *ours)
    assert [each["layer"] for each in layers] == [0, 1]
    for each in layers:
        assert each["inside"] == [int(4 <= S <= 24) for S in each["S"]] and len(each["entries"]) == 2
        assert each["entry"] == pytest.approx(np.sqrt(np.mean(np.square(each["entries"]))))
        assert each["S_mean"] == pytest.approx(np.mean(each["S"]))
    assert last["error"] == pytest.approx(np.mean([each["output"] for each in layers]))
    assert last["share"] == np.mean([each["inside"] for each in layers])

    large = [measured(f"large-{len(method)}", "task=swap_images", "task.start=start", "task.pixels=16",
                      "task.count=20", *method) for method in (["attention=exact"], ours)]
    assert large[0][0]["loss"] != large[1][0]["loss"] and all(each["ms_image"] > 0 for each, in large)


# ---- models of texts


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
    rows = [*swapped.scores("", "qnli", 0, f"{texts.FOLDER}/qnli-2")]
    assert [row["arm"] for row in rows] == ["majority class", "word overlap"]


# ---- answers without a model


def test_answers_without_a_model(tmp_path, monkeypatch):
    """Words of both sentences over words of either; the cut of a class task is the best one of training."""
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    for name, folder in (("sst2", "SST-2"), ("stsb", "STS-B")):
        write_glue(tmp_path / "glue" / folder, name)
    shared = np.array([0.1, 0.2, 0.6, 0.9])
    assert swapped.cut("mrpc", shared, [0, 0, 1, 1], np.array([0.0, 0.7, 1.0])) == [0, 1, 1]
    assert swapped.cut("rte", shared, [1, 1, 0, 0], np.array([0.0, 1.0])) == [1, 0]
    row, = swapped.scores("", "sst2", 0)
    assert row["arm"] == "majority class" and 0 <= row["accuracy"] <= 1
    answers, labels = swapped.answers_of("stsb")["word overlap"]
    assert len(answers) == len(labels) == 12 and min(answers) >= 0
