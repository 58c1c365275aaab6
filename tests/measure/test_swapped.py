"""Kept runs with other attention at tiny sizes, of letters, speech and images: losses, layers, and training on."""

import numpy as np
import pytest
import torch
from small_bert import write_text

from crt_exp.attention import exact_attention
from crt_exp.mechanism import Mechanism
from crt_exp.measure import grid, swapped, training
from crt_exp.oldreport import draws, page, render
from crt_exp.oldreport.page import Page

LAYERS = "crt_exp.measure.swapped.layers"
LOSSES = "crt_exp.measure.swapped.losses"
TINY = ["+task.sizes.heads=2", "+task.sizes.layers=1", "+task.sizes.d_ff=16", "+task.sizes.d=16"]
LETTERS = ["task=trembl", "task.generated.sequences=60", "task.validation_share=0.2", "task.test_share=0.2",
           "trainer.batch=4", "trainer.steps=2", "trainer.eval_every=1", "trainer.select=last", "task.max_length=24",
           "task.generated.shortest=8", "task.generated.longest=24"]


@pytest.mark.slow
def test_exact_models_swapped_and_trained_on(tmp_path, monkeypatch, one_thread):
    """redraw: step 0 of an arm that trains on is the swap with its noise; nothing is computed twice."""
    monkeypatch.chdir(tmp_path)
    setting = "generated families, U"
    given = page.load("redraw")["sizes"]["small"]
    arms = {"exact": "exact", "uniform": "uniform", "favorp": "favorp m=4", "favorpp": "favorpp m=4"}
    later = {"exact, trained on": "exact", "favorp": "favorp m=4"}
    tiny = {"settings": {setting: {"start": {"start": setting}}}, "workers": 1}
    swap, step_0, layers = (part | tiny for part in given["parts"])
    swap |= {"arms": arms, "seeds": 4, "units": 2, "seeds_of": {"exact": 2, "uniform": 2}}
    layers |= {"arms": {"favorp": "favorp m=4", "favorpp": "favorpp m=4"}, "seeds": 2}
    run = given["runs"][0] | {"settings": {setting: ["task.direction=unidirectional"]}, "arms": later, "seeds": 2,
                              "common": LETTERS, "workers": 1, "where": given["runs"][0]["where"] | {"least": -9.0}}
    start = {"count": 2, "common": [*LETTERS, *TINY, "attention=exact"], "stages": [["task.direction=unidirectional"]]}
    size = given | {"workers": 1, "parts": [swap, step_0 | {"arms": later, "seeds": 2}, layers], "runs": [run],
                    "starts": {setting: start}}
    made = [*grid.measure("redraw", ["tasks/trembl.py"], size)]
    swaps = [draw for draw in made if draw.table == "swap" and draw.metric == "loss"]
    assert [sum(draw.arm == arm for draw in swaps) for arm in arms] == [2, 2, 4, 4]
    assert {draw.unit for draw in swaps} == {0, 1}
    curve = [draw for draw in made if draw.table == "validation" and draw.metric == "loss" and draw.unit == 1]
    assert sorted((draw.arm, draw.x) for draw in curve) == sorted((arm, x) for arm in later for x in (0, 1, 2))
    seen = {(draw.arm, draw.metric) for draw in made if draw.table == "layers"}
    assert {("favorp", "predicted_error"), ("favorpp", "measured_error"), ("exact", "square_sum"),
            ("exact", "in_range"), ("uniform", "measured_error"), ("favorp", "predicted_log_ratio"),
            ("favorpp", "predicted_error")} <= seen
    draws.write("redraw", made, tmp_path)
    assert "| FAVOR+ |" in render.text(Page("redraw", tmp_path), False)
    assert [*grid.measure("redraw", ["tasks/trembl.py"], size)] == made


@pytest.mark.slow
def test_recognisers_at_a_tiny_size(monkeypatch, tmp_path, one_thread):
    """The real thing, a few steps of each run: swapped as it is, fitted to clusters, trained on, errors by layer."""
    from tests.small_speech import write_digits

    write_digits(tmp_path / "speech/free-spoken-digit-dataset/recordings")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    sizes = {"layers": 1, "dim": 8, "ffn": 8, "channels": 2, "predictor": 8, "joiner": 8, "kernel": 3}
    common = ["task=librispeech", "task.corpus=fsdd", *(f"+task.sizes.{k}={v}" for k, v in sizes.items()),
              "task.strings.train=12", "task.strings.validation=3", "task.strings.test=3", "trainer.select=last"]
    run = {"metrics": ["loss"], "tested": ["loss", "wer"], "cost": False, "workers": 1, "common": common, "seeds": 2,
           "seeds_of": {"exact": 1}, "before": {"task.init": "the model"}, "arms": ["exact", "favorp m=4"]}
    start, swap = {"start": {"start": "the model"}}, {"settings": {"swapped": {}}, "workers": 1}
    clusters = "hrf_cluster m=4"
    model = {"common": common, "stages": [["attention=exact", "trainer.steps=2"]]}
    size = {"workers": 1, "starts": {"the model": model},
            "parts": [swap | {"probe": {"_target_": LOSSES, **start, "splits": ["test"], "fit": 4}, "seeds": 2,
                              "arms": {"clusters": clusters},
                              "fields": [{"metric": "loss", "field": "test_loss", "table": "test"}]},
                      swap | {"probe": {"_target_": LAYERS, **start, "rows": 1, "batches": 4, "spread": True},
                              "arms": {"favorp m=4": None, "clusters": clusters}, "fields": [
                          {"metric": "squared_norm", "field": "S", "each": "unit", "x": "number", "table": "layers"},
                          {"metric": "output", "field": "output", "x": "number", "table": "layers"}]}],
            "runs": [run | {"settings": {"models": []}, "arms": {"the model": {"start": "the model"}}, "seeds": 1},
                     run | {"settings": {"swapped": ["trainer.steps=0"]}},
                     run | {"settings": {"trained": ["trainer.steps=2", "trainer.eval_every=1"]}}]}
    units = {}
    for draw in grid.measure("fig3", ["tasks/librispeech.py"], size):
        units.setdefault((draw.setting, draw.arm, draw.table, draw.metric), []).append(draw.unit)
    assert units["swapped", "exact", "test", "loss"] == [0] and units["swapped", "favorp m=4", "test", "wer"] == [0, 1]
    assert units["swapped", "clusters", "test", "loss"] == [0, 1] == units["trained", "favorp m=4", "test", "loss"]
    assert len(units["swapped", "favorp m=4", "layers", "squared_norm"]) == 4
    assert {("swapped", "clusters", "layers", "output"), ("models", "the model", "test", "wer")} <= {*units}
    kept = [path for path in training.HOME.iterdir() if path.is_dir()]
    assert {path.name.partition("-")[0] for path in kept} == {"exact", "favorp"}


@pytest.mark.slow
def test_a_checkpoint_of_digits_swapped_uptrained_and_from_scratch(tmp_path, monkeypatch, one_thread):
    """fig4-left."""
    monkeypatch.chdir(tmp_path)
    model = ["task.sizes.patch=2", "task.sizes.width=32", "task.sizes.depth=2", "task.sizes.heads=2"]
    images = ["task.dataset=digits", "task.size=8"]
    pair, uniform, heads, long = page.load("fig4-left")["sizes"]["small"]["parts"]
    ratio = page.load("fig4-left")["sizes"]["small"]["derived"][0] | {"arm": "favorp m=8", "over": "favorpp m=8"}
    run = {"metrics": ["loss", "accuracy"], "tested": ["accuracy"], "cost": False, "seeds": 1, "workers": 1,
           "arms": ["exact", "uniform", "favorpp m=8"], "common": ["task=imagenet", *images]}
    swapped = run | {"before": {"task.init": "the exact model"}}
    on = swapped | {"settings": {"uptrained": ["trainer.steps=2", "trainer.eval_every=1"]}}
    scratch = run | {"settings": {"from scratch": [*model, "trainer.steps=2", "trainer.eval_every=2"]}}
    size = {"workers": 1, "starts": {"the exact model": {"common": images, "stages": [
                ["task=mae", "attention=exact", *model, "trainer.steps=3"],
                ["task=imagenet", "attention=exact", "trainer.steps=3"]]}},
            "parts": [pair | {"arms": ["favorp m=8", "favorpp m=8"], "seeds": 2, "workers": 1},
                      uniform | {"arms": {"uniform": "favorp m=8"}, "seeds": 2, "workers": 1},
                      heads | {"arms": {"exact": "favorp m=8"}, "workers": 1},
                      long | {"settings": {"long": {}}, "arms": ["exact", "favorpp m=8"],
                              "probe": long["probe"] | {"pixels": 16, "count": 20}}],
            "runs": [swapped | {"settings": {"uptrained": ["trainer.steps=0"]}}], "derived": [ratio]}
    cost = {"metric": "loss", "arm": "uniform", "than": "exact", "setting": "uptrained", "x": 0}

    def where(least):
        return [cost | {"least": least}, {"metric": "share", "arm": "exact", "setting": "uptrained", "least": 0.0}]

    def measured(least):
        gated = [each | {"where": where(least)} for each in (on, scratch)]
        return [*grid.measure("fig4-left", ["measure/swapped.py"], size | {"runs": [*size["runs"], *gated]})]
    made = measured(9.0)
    assert {draw.setting for draw in made} == {"uptrained", "long"}
    assert {draw.x for draw in made if draw.metric == "loss" and draw.setting == "uptrained"} == {0}
    errors = {arm: [draw.value for draw in made if draw.metric == "measured" and draw.arm == arm]
              for arm in ("favorp m=8", "favorpp m=8")}
    ratio = next(draw.value for draw in made if draw.metric == "measured_ratio")
    assert ratio == pytest.approx(np.exp(np.subtract(*(np.mean(np.log(each)) for each in errors.values()))))
    made = measured(-9.0)
    assert {draw.setting for draw in made} == {"uptrained", "from scratch", "long"}
    assert {draw.x for draw in made if draw.metric == "loss" and draw.setting == "uptrained"} == {0, 1, 2}
    assert {draw.metric for draw in made if draw.setting == "long"} >= {"accuracy", "loss", "ms_image", "mib"}
    assert [draw.arm for draw in made if draw.metric == "share"] == ["exact"]


# ---- models of texts


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
