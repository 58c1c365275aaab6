"""Models of texts with other attention: matched heads, and fidelity and table2 at a tiny size."""

import pytest
import torch
from small_bert import write_glue, write_text

from crt_exp.attention import exact_attention
from crt_exp.mechanism import Mechanism
from crt_exp.probes import grid, swapped_texts, texts


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


def test_matched_heads_have_the_moments_of_the_model():
    t = torch.randn(1, 2, 500, 3) @ torch.randn(1, 2, 3, 3) + torch.randn(1, 2, 1, 3)
    drawn = swapped_texts.normal(*swapped_texts.law(t), 200_000, torch.Generator().manual_seed(0))
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
ERRORS = "crt_exp.probes.swapped_texts.errors"


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
    matched = {"probe": {"_target_": "crt_exp.probes.swapped_texts.matched", "start": {"start": "BERT"},
                         "texts": {"split": "test", "calibration": None, "length": 16, "texts": 2}},
               "sweep": {"length": [16]}, "seeds": 2, "workers": 1,
               "fields": [{"metric": "attention_error", "field": "attention_error"}]}
    size = {"workers": 1, "starts": {"BERT": {"common": [*OWN, "task.vocabulary_size=300", "attention=exact"],
                                              "stages": stages}},
            "parts": [part, matched | {"settings": {"heads": {}}, "arms": ["favorpp m=8"]},
                      matched | {"settings": {"heads": {"cells": 64}}, "arms": ["nearfar exact_until=0"]}],
            "runs": [{**runs, "settings": {"on": ["trainer.steps=0"]}},
                     {**runs, "settings": {"on": ["trainer.steps=2", "trainer.eval_every=1"]}}]}
    made = [*grid.measure("fidelity", ["probes/swapped_texts.py"], size)]
    above = [draw for draw in made if draw.metric == "above"]
    assert len(above) == 3 * (1 + 1 + 2) and max(abs(d.value) for d in above if d.arm == "exact") < 1e-4
    assert {draw.metric for draw in made if draw.table == "layers"} == {"S", "S_least", "S_largest", "attention_error"}
    assert sum(draw.setting == "heads" for draw in made) == 2 * 2 * 2
    curve = [draw.x for draw in made if draw.setting == "on" and draw.table == "validation" and draw.unit == 1]
    assert curve == 2 * [0] + 2 * [1, 2]


@pytest.mark.slow
def test_tiny_encoders_swapped_trained_on_and_fine_tuned(words):
    write_glue(words / "glue" / "SST-2", "sst2")
    own = [*OWN, "task.vocabulary_size=150", "trainer.batch=4", "trainer.steps=2"]
    start = {"common": [*own, "attention=exact"], "stages": [["task.block=16"]]}
    about = {"split": "valid", "calibration": None, "length": None, "texts": 3}
    part = {"probe": {"_target_": ERRORS, "start": {"start": "kind"}, "texts": about, "draws": 1, "window": [4, 24]},
            "settings": {"kind": {}}, "seeds": 2, "workers": 1}
    error = {"metric": "attention_error", "field": "attention_error_layers", "x": "layers", "table": "layers"}
    common = ["task=mlm", "task.init=uptrain", "task.block=16", "trainer.batch=4", "task.cache_dir=null"]
    runs = ON | {"before": {"task.model": "{setting}"}, "arms": ["exact", "favorp m=4"], "common": common,
                 "where": {"metric": "share", "arm": "exact", "least": 0.0}}
    tuned = ON | {"metrics": ["accuracy"], "tested": ["accuracy"], "seeds": 1, "arms": ["favorp m=4"],
                  "settings": {"scratch": ["task.dataset=sst2"]}, "before": {"task.init": "of {arm}"}, "common": [
                      "task=glue", "task.max_length=16", "task.cache_dir=null", "trainer.epochs=1", "trainer.batch=8"]}
    size = {"workers": 1, "starts": {"kind": start | {"count": 2}, "of favorp m=4": {
                "common": [*own, "attention=favorp", "features.m=4"], "stages": [["task.block=16"]]}},
            "parts": [part | {"arms": ["favorp m=4", "favorpp m=4"], "fields": [error]},
                      part | {"arms": ["uniform"], "fields": [error, {"metric": "cost", "field": "cost"}]},
                      part | {"arms": ["exact"], "fields": [
                          {"metric": "S", "field": "S", "x": "layers"}, {"metric": "pretrained", "field": "exact"},
                          {"metric": "share", "field": "share", "unit": "no_unit"}]},
                      {"probe": {"_target_": "crt_exp.probes.swapped_texts.unigram", "start": {"start": "kind"}},
                       "settings": {"kind": {}}, "arms": ["unigram"], "seeds": 2, "workers": 1,
                       "fields": [{"metric": "pretrained", "field": "loss"}]},
                      {"probe": {"_target_": "crt_exp.probes.glue_controls.scores", "data": "sst2"}, "arms": ["none"],
                       "settings": {"scratch": {}}, "workers": 1,
                       "fields": [{"metric": "accuracy", "field": "accuracy", "arm": "{arm}", "table": "test"}]}],
            "runs": [runs | {"settings": {"kind": ["trainer.steps=0"]}},
                     runs | {"settings": {"kind": ["trainer.steps=2", "trainer.eval_every=1"]}}, tuned],
            "derived": [{"_target_": "crt_exp.probes.derived.means", "metric": "loss", "table": "validation",
                         "arms": ["exact", "favorp m=4"], "count": 2, "into": {"kind": "each"}}]}
    made = [*grid.measure("table2", ["probes/swapped_texts.py"], size)]
    each = [draw for draw in made if draw.setting == "each" and draw.metric == "loss"]
    assert {draw.unit for draw in each} == {"kind, 0", "kind, 1"} and {draw.x for draw in each} == {0, 1, 2}
    assert {draw.metric for draw in made if draw.setting == "kind"} == {
        "S", "attention_error", "cost", "pretrained", "share", "loss"}
    scores = {draw.arm: draw.value for draw in made if draw.setting == "scratch"}
    assert {*scores} == {"favorp m=4", "majority class"} and all(0 <= score <= 1 for score in scores.values())
    for run in size["runs"][:2]:
        run["where"] = {"metric": "share", "arm": "exact", "least": 2.0}       # a kind that cannot tell is not swapped
    again = [*grid.measure("table2", ["probes/swapped_texts.py"], size)]
    assert not [draw for draw in again if draw.setting == "kind" and draw.metric == "loss"]
