"""Encoders whose attention is swapped, trained on and fine-tuned: runs, means by encoder, GLUE without a model."""

import numpy as np
import pytest
from small_bert import write_glue, write_text

from crt_exp.report import page
from crt_exp.runner.command_line import check_command_line
from crt_exp.studies import runs, swapped_encoders, training
from crt_exp.studies.cells import Draw

HOME = runs.Home(training.HOME, ("tasks/mlm.py",))


@pytest.mark.slow
@pytest.mark.parametrize("size", ["small", "gpu", "full"])
def test_every_run_of_table2_is_a_command_line(size, monkeypatch):
    monkeypatch.setenv("CRT_DATA", "/data")
    seen = set()
    for given in page.load("table2")["sizes"][size]["grids"]:
        grid, _, _ = swapped_encoders.apart(given)
        lines = [line for arm in grid.arms for line in grid.stages(arm, 1, HOME)]
        lines += [grid.options(setting, arm, 1, HOME) for setting in grid.settings for arm in grid.names(setting)]
        for line in lines:
            names = tuple(option if option.startswith("attention=") else option.split("=")[0] for option in line)
            assert len({*(name.split("=")[0] for name in names)}) == len(names)
            if names not in seen:
                seen.add(names)
                check_command_line([*line, "logger=none", "hydra.run.dir=run"])
    assert len(seen) > 15


def test_arms_of_a_pair_differ_in_attention_alone():
    for given in page.load("table2")["sizes"]["small"]["grids"][:8]:
        grid, kind, _ = swapped_encoders.apart(given)
        shared = {tuple({*grid.options(kind, arm, 3, HOME)} - {*grid.arms[arm]}) for arm in grid.arms}
        assert len({frozenset(each) for each in shared}) == 1
        assert grid.count("favorp m=256") == 12 and grid.stages("exact", 3, HOME) == grid.stages("exact", 1, HOME)


def test_pairs_are_averaged_by_encoder():
    made = [Draw("A", arm, "loss", pair + 0.5 * (arm == "favorp m=8"), pair, 0, "validation")
            for arm in ("exact", "favorp m=8", "elu") for pair in range(4)]
    made += [Draw("A", "uniform", "loss", 9.0, 0, 0, "validation"), Draw("A", "exact", "loss", 9.0, 0, "", "test")]
    means = {(draw.arm, draw.unit): draw.value for draw in swapped_encoders.by_encoder(made, "A", "each", 2)}
    assert means == {("exact", "A, 0"): 1.0, ("exact", "A, 1"): 2.0, ("favorp m=8", "A, 0"): 1.5,
                     ("favorp m=8", "A, 1"): 2.5}


def test_answers_without_a_model(tmp_path, monkeypatch):
    """Words of both sentences over words of either; the cut of a class task is the best one of training."""
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    for name, folder in (("sst2", "SST-2"), ("stsb", "STS-B")):
        write_glue(tmp_path / "glue" / folder, name)
    shared = np.array([0.1, 0.2, 0.6, 0.9])
    assert swapped_encoders.cut("mrpc", shared, [0, 0, 1, 1], np.array([0.0, 0.7, 1.0])) == [0, 1, 1]
    assert swapped_encoders.cut("rte", shared, [1, 1, 0, 0], np.array([0.0, 1.0])) == [1, 0]
    assert {*swapped_encoders.scores("sst2")} == {"majority class"}
    answers, labels = swapped_encoders.answers_of("stsb")["word overlap"]
    assert len(answers) == len(labels) == 12 and min(answers) >= 0


@pytest.mark.slow
def test_tiny_encoders_swapped_trained_on_and_fine_tuned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", str(tmp_path / "data"))
    for part, lines in {"train": 300, "valid": 290, "test": 280}.items():
        write_text(tmp_path / "data" / "wikitext2" / f"wiki.{part}.tokens", lines)
    write_glue(tmp_path / "data" / "glue" / "SST-2", "sst2")
    own = ["task=mlm", "task.sizes.hidden_size=16", "task.sizes.num_hidden_layers=2", "task.cache_dir=null",
           "task.sizes.num_attention_heads=2", "task.vocabulary_size=150", "trainer.batch=4", "trainer.steps=2"]
    before = {"by": "task.model", "count": 2, "common": [*own, "attention=exact"], "stages": [["task.block=16"]]}
    arms = {"exact": ["attention=exact"], "favorp m=4": ["attention=favorp", "features.m=4"]}
    grid = {"metrics": ["loss"], "tested": ["loss"], "cost": False, "seeds": 2, "workers": 1, "before": before,
            "arms": arms, "look": {"each": "each", "texts": 3, "m": 4, "draws": 1},
            "common": ["task=mlm", "task.init=uptrain", "task.block=16", "trainer.batch=4", "task.cache_dir=null"]}
    tuned = {"metrics": ["accuracy"], "tested": ["accuracy"], "cost": False, "seeds": 1, "workers": 1,
             "arms": {"favorp m=4": arms["favorp m=4"]}, "settings": {"scratch": ["task.dataset=sst2"]}, "common": [
                 "task=glue", "task.max_length=16", "task.cache_dir=null", "trainer.epochs=1", "trainer.batch=8"],
             "before": {"by": "task.init", "own": True, "common": own, "stages": [["task.block=16"]]}}
    on = ["trainer.steps=2", "trainer.eval_every=1"]
    size = {"heads": -1.0, "glue": {"scratch": "sst2"}, "grids": [
        {**grid, "settings": {"kind": ["trainer.steps=0"]}}, {**grid, "look": {}, "settings": {"kind": on}}, tuned]}
    made = [*swapped_encoders.measure("table2", ["studies/swapped_encoders.py"], size)]
    each = [draw for draw in made if draw.setting == "each" and draw.metric == "loss"]
    assert {draw.unit for draw in each} == {"kind, 0", "kind, 1"} and {draw.x for draw in each} == {0, 1, 2}
    assert {draw.metric for draw in made if draw.setting == "kind"} == {
        "S", "S_least", "S_largest", "attention_error", "cost", "pretrained", "share", "loss"}
    scores = {draw.arm: draw.value for draw in made if draw.setting == "scratch"}
    assert {*scores} == {"favorp m=4", "majority class"} and all(0 <= score <= 1 for score in scores.values())
    size["heads"] = 2.0                                     # a kind that cannot tell is not swapped
    again = [*swapped_encoders.measure("table2", ["studies/swapped_encoders.py"], size)]
    assert not [draw for draw in again if draw.setting == "kind" and draw.metric == "loss"]
