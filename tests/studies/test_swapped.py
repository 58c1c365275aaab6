"""Exact models trained in stages and swapped: runs, texts, matched heads, and all of it at a tiny size."""

import pytest
import torch
from small_bert import write_text

from crt_exp.attention import exact_attention
from crt_exp.report import page
from crt_exp.runner.command_line import check_command_line
from crt_exp.studies import runs, swapped, texts, training
from crt_exp.studies.fidelity import Arm
from crt_exp.studies.training import Grid

HOME = runs.Home(training.HOME, ("tasks/mlm.py",))


@pytest.mark.slow
@pytest.mark.parametrize("size", ["small", "gpu", "full"])
def test_every_run_of_fidelity_is_a_command_line(size, monkeypatch):
    monkeypatch.setenv("CRT_DATA", "/data")
    given = page.load("fidelity")["sizes"][size]
    for model in given["models"].values():
        grid = Grid(settings={}, arms={"exact": []}, metrics=["loss"], before=model["before"])
        for line in grid.stages("exact", 0, HOME):
            check_command_line([*line, "logger=none", "hydra.run.dir=run"])
        for options in model["settings"].values():
            check_command_line(["task=fidelity", "task.model=run", *given["common"], *options, "logger=none",
                                "hydra.run.dir=run"])
    for each in given["grids"]:
        grid = Grid(**{key: value for key, value in each.items() if key != "model"})
        for setting, arm in [(setting, arm) for setting in grid.settings for arm in grid.arms]:
            check_command_line([*grid.options(setting, arm, 0, HOME), "logger=none", "hydra.run.dir=run"])


def test_stages_go_on_from_each_other_and_runs_from_the_last():
    grid = Grid(settings={"A": ["b=2"]}, arms={"exact": ["attention=exact"], "favorp": ["attention=favorp"]},
                metrics=["loss"], before={"common": ["a=1"], "stages": [["steps=3"], ["steps=5"]], "count": 2,
                                          "by": "task.model"})
    first, second = grid.stages("exact", 0, HOME)
    assert f"task.init={HOME.place(first)}" in second and "seed=0" in second
    starts = [grid.options("A", arm, seed, HOME)[2] for arm, seed in (("exact", 0), ("favorp", 2), ("exact", 1))]
    assert starts[0] == starts[1] == f"task.model={HOME.place(second)}" != starts[2]
    own = Grid(grid.settings, grid.arms, ["loss"], before={**grid.before, "own": True})
    assert "attention=favorp" in own.stages("favorp", 0, HOME)[0]


def test_a_run_without_steps_is_the_beginning_of_a_curve(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = {0: {"curve": [], "last": {"step": 0, "loss": 3.0, "split": "validation", "final": True}},
               4: {"curve": [{"step": 4, "loss": 2.0}], "last": {"step": 4, "loss": 2.0, "final": True}}}
    monkeypatch.setattr(training, "train", lambda overrides, sources, kept=False: records[int(overrides[0][6:])])
    grid = {"metrics": ["loss"], "cost": False, "seeds": 1, "workers": 1, "arms": {"exact": []}}
    made = training.measure("g", ["tasks/mlm.py"], {"grids": [{**grid, "settings": {"A": [f"steps={n}"]}}
                                                              for n in (0, 4)]})
    assert [(draw.x, draw.value) for draw in made if draw.table == "validation"] == [(0, 3.0), (4, 2.0)]


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
    drawn = swapped.normal(*swapped.law(t), 200_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.mean(2), t.mean(2), atol=0.05, rtol=0.05)
    centred = [u - u.mean(2, keepdim=True) for u in (drawn, t)]
    covariances = [u.mT @ u / u.shape[2] for u in centred]
    torch.testing.assert_close(*covariances, atol=0.05, rtol=0.05)


def test_exact_attention_of_matched_heads():
    """The layer is given unscaled queries, the reference scaled ones."""
    q, k, v = torch.randn(3, 1, 2, 9, 4)
    layer = Arm("exact", None).mechanism().layer(2, 4)
    torch.testing.assert_close(layer(q, k, v), exact_attention(q / 4**0.25, k / 4**0.25, v))


@pytest.mark.slow
def test_tiny_models_swapped_and_trained_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", str(tmp_path / "data"))
    for part, lines in {"train": 300, "valid": 290, "test": 280}.items():
        write_text(tmp_path / "data" / "wikitext2" / f"wiki.{part}.tokens", lines)
    common = ["task=mlm", "task.sizes.hidden_size=16", "task.sizes.num_hidden_layers=2",
              "task.sizes.num_attention_heads=2", "task.vocabulary_size=300", "task.cache_dir=null"]
    stages = [[f"task.block={block}", "trainer.batch=4", "trainer.steps=4"] for block in (16, 32)]
    before = {"common": [*common, "attention=exact"], "by": "task.model", "stages": stages}
    grid = {"model": "BERT", "metrics": ["loss"], "cost": False, "seeds": 2, "workers": 1, "before": before,
            "common": ["task=mlm", "task.init=uptrain", "task.block=32", "trainer.batch=4", "task.cache_dir=null",
                       "task.validation_text=outputs/texts/validation-8.tokens"],
            "arms": {"exact": ["attention=exact"], "favorpp m=8": ["attention=favorpp", "features.m=8"]}}
    size = {"least": -1.0, "workers": 1,
            "common": ["task.text=data/wikitext2/wiki.test.tokens", "task.texts=3", "task.draws=2", "task.lengths=[]",
                       "task.ms=[8]", "task.calibration_texts=2", "task.length=32"],
            "models": {"BERT": {"before": before, "settings": {"BERT": ["task.attentions=[exact,uniform,favorpp]"]},
                                "matched": {"setting": "heads", "texts": 2, "at": 16, "draws": 2, "lengths": [16],
                                            "arms": ["favorpp m=8", "nearfar exact_until=0 cells"]}}},
            "grids": [{**grid, "settings": {"on": ["trainer.steps=0"]}},
                      {**grid, "settings": {"on": ["trainer.steps=2", "trainer.eval_every=1"]}}]}
    made = [*swapped.measure("fidelity", ["studies/swapped.py"], size)]
    above = [draw for draw in made if draw.metric == "above"]
    assert len(above) == 3 * (1 + 1 + 2) and max(abs(d.value) for d in above if d.arm == "exact") < 1e-4
    assert {draw.metric for draw in made if draw.table == "layers"} == {"S", "S_least", "S_largest", "attention_error",
                                                                        "hidden_error"}
    assert sum(draw.setting == "heads" for draw in made) == 2 * 2 * 2
    curve = [draw.x for draw in made if draw.setting == "on" and draw.table == "validation" and draw.unit == 1]
    assert curve == 2 * [0] + 2 * [1, 2]
