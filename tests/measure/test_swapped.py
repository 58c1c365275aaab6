"""Kept runs with other attention and without training: losses, layers, larger images; models of texts."""

import numpy as np
import pytest
import torch
from small_bert import write_glue, write_text

from crt_exp.attention import exact_attention
from crt_exp.data import DataError, glue
from crt_exp.mechanism import Mechanism
from crt_exp.measure import grid, swapped, texts
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


def test_matched_heads_have_the_moments_of_the_model():
    t = torch.randn(1, 2, 500, 3) @ torch.randn(1, 2, 3, 3) + torch.randn(1, 2, 1, 3)
    drawn = swapped.normal(*swapped.law(t), 200_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.mean(2), t.mean(2), atol=0.05, rtol=0.05)
    centred = [u - u.mean(2, keepdim=True) for u in (drawn, t)]
    covariances = [u.mT @ u / u.shape[2] for u in centred]
    torch.testing.assert_close(*covariances, atol=0.05, rtol=0.05)


def test_exact_attention_of_matched_heads():
    """The layer is given unscaled queries, the reference scaled ones."""
    q, k, v = torch.randn(3, 1, 2, 9, 4)
    layer = Mechanism.parse("exact").layer(2, 4)
    torch.testing.assert_close(layer(q, k, v), exact_attention(q / 4**0.25, k / 4**0.25, v))


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", str(tmp_path / "data"))
    for part, lines in {"train": 300, "valid": 290, "test": 280}.items():
        write_text(tmp_path / "data" / "wikitext2" / f"wiki.{part}.tokens", lines)
    return tmp_path / "data"


OWN = ["task=mlm", "task.sizes.hidden_size=16", "task.sizes.num_hidden_layers=2", "task.cache_dir=null",
       "task.sizes.num_attention_heads=2"]
ON = {"metrics": ["loss"], "tested": ["loss"], "cost": False, "seeds": 2, "workers": 1}
ERRORS = "crt_exp.measure.swapped.errors"


@pytest.mark.slow
def test_tiny_models_swapped_and_trained_on(words):
    stages = [[f"task.block={block}", "trainer.batch=4", "trainer.steps=4"] for block in (16, 32)]
    about = {"split": "test", "calibration": "train", "length": 32, "texts": 3, "calibration_texts": 2}
    runs = ON | {"before": {"task.model": "BERT"}, "arms": ["exact", "favorpp m=8"],
                 "where": {"metric": "above", "arm": "uniform", "setting": "BERT", "least": -1.0},
                 "common": ["task=mlm", "task.init=uptrain", "task.block=32", "trainer.batch=4", "task.cache_dir=null",
                            "task.validation_text=outputs/texts/validation-8.tokens"]}
    layers = {"table": "layers", "x": "layers"}
    part = {"probe": {"_target_": ERRORS, "start": {"start": "BERT"}, "texts": about}, "settings": {"BERT": {}},
            "seeds": 2, "seeds_of": {"exact": 1, "uniform": 1}, "arms": ["exact", "uniform", "favorpp m=8"],
            "workers": 1, "fields": [{"metric": "above", "field": "above", "each": "unit"},
                       {"metric": "attention_error", "field": "attention_error_layers", **layers}],
            "controls": {"exact": [{"metric": each, "field": each, **layers}
                                   for each in ("S", "S_least", "S_largest")]}}
    matched = {"probe": {"_target_": "crt_exp.measure.swapped.matched", "start": {"start": "BERT"},
                         "texts": {"split": "test", "calibration": None, "length": 16, "texts": 2}},
               "sweep": {"length": [16]}, "seeds": 2, "workers": 1,
               "fields": [{"metric": "attention_error", "field": "attention_error"}]}
    size = {"workers": 1, "starts": {"BERT": {"common": [*OWN, "task.vocabulary_size=300", "attention=exact"],
                                              "stages": stages}},
            "parts": [part, matched | {"settings": {"heads": {}}, "arms": ["favorpp m=8"]},
                      matched | {"settings": {"heads": {"cells": 64}}, "arms": ["nearfar exact_until=0"]}],
            "runs": [{**runs, "settings": {"on": ["trainer.steps=0"]}},
                     {**runs, "settings": {"on": ["trainer.steps=2", "trainer.eval_every=1"]}}]}
    made = [*grid.measure("fidelity", ["measure/swapped.py"], size)]
    above = [draw for draw in made if draw.metric == "above"]
    assert len(above) == 3 * (1 + 1 + 2) and max(abs(d.value) for d in above if d.arm == "exact") < 1e-4
    assert {draw.metric for draw in made if draw.table == "layers"} == {"S", "S_least", "S_largest", "attention_error"}
    assert sum(draw.setting == "heads" for draw in made) == 2 * 2 * 2
    curve = [draw.x for draw in made if draw.setting == "on" and draw.table == "validation" and draw.unit == 1]
    assert curve == 2 * [0] + 2 * [1, 2]


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
