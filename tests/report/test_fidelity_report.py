"""make fidelity: every run that it starts is a command line, models that cannot tell stop it, verdicts follow the
losses, and a whole report of tiny models."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_bert import write_text

from crt_exp.attention import exact_attention
from crt_exp.report import fidelity, fidelity_page, fidelity_runs, writing
from crt_exp.report.evidence import GateFailed, check_gates, judged
from crt_exp.report.fidelity_runs import BERT, CAUSAL, CHEAP, DEFAULT, QUALITY, WINDOW, Found, Model
from crt_exp.report.fidelity_verdicts import beaten_by_control, claims, gates
from crt_exp.runner.command_line import check_command_line
from crt_exp.studies.fidelity import Arm

PRESENT = ("exact", "uniform", "identity", "window block=32 first=16", "relu", "favorp", "favorpp")


@pytest.fixture
def all_known(monkeypatch):
    """As where near-far attention is there: its arms are made without it."""
    monkeypatch.setattr(fidelity_runs, "known", lambda attentions: tuple(a for a in attentions if a != "favorsharp"))

    def arms_of(attentions, ms):
        return [Arm(text, m) for text in attentions for m in (ms if text in ("relu", "favorp", "favorpp") else [None])]
    monkeypatch.setattr(fidelity_runs.study, "arms_of", arms_of)
    monkeypatch.setattr(Found, "draws", lambda self, arm: self.setting.draws if arm.m else 1)


SETTING = replace(fidelity.SETTINGS["small"], texts=6, draws=2, seeds=3, lengths=(128, 2048), cost_lengths=(512, 1024))


def found_of(near=0.001, favor=0.3, uniform=0.6):
    """Losses above exact of near-far attention, FAVOR++ and uniform attention; the others are between."""
    rng, setting = np.random.default_rng(0), SETTING
    above = {DEFAULT: near, CHEAP: near, QUALITY: near, "favorpp": favor, "favorp": favor, "uniform": uniform,
             "exact": 0.0, WINDOW: 0.08, "identity": 2.0, "relu": 0.5}
    noisy = lambda value: (value + 1e-4 * rng.normal(size=setting.texts)).tolist()

    def swap(arm):
        return {"attention_error_layers": [0.1] * 4, "hidden_error_layers": [0.1] * 4,
                "above_texts": noisy(above[arm.text]),
                **{f"{key}_texts": noisy(0.2) for key in ("attention_error", "hidden_error")},
                "cosine_texts": noisy(0.995)}
    swaps = {(model.title, arm, draw): swap(arm) for model in setting.models for arm in setting.arms
             for draw in range(setting.draws if arm.m else 1)}
    layers = [{"layer": i, "path": "a", "mean_sq_sum": [7.0, 9.0]} for i in range(4)]
    looks = {title: {"losses": noisy(4.0), "layers": layers} for title in (BERT, CAUSAL)}
    found = Found(setting, {BERT: {"loss": 3.0}, CAUSAL: {"loss": 4.0}}, looks, swaps)
    steps = [0, *setting.steps(setting.model(CAUSAL))]
    curve = lambda top: {str(step): 4.0 + top / (1 + step) + 1e-4 * rng.normal() for step in steps}
    found.uptrained = {(CAUSAL, arm, seed): curve(above[arm.text]) for arm in setting.uptrained_arms()
                       for seed in range(3)}
    for length in setting.lengths:
        for arm in setting.arms_at(length):
            for draw in range(setting.draws):
                found.matched[length, arm, draw] = [0.1, 0.2]
                found.by_length[length, arm, draw] = {"hidden_error_texts": [0.1, 0.3]}
    found.costs = {length: {"ms": {arm.label: [1.0, 2.0] for arm in fidelity.costing(setting, length)},
                            "mib": {arm.label: 3.0 for arm in fidelity.costing(setting, length)}}
                   for length in setting.cost_lengths}
    return found


def words(found):
    return {verdict.claim.text: verdict.word for verdict in judged(claims(found))}


def test_verdicts_follow_the_losses(all_known):
    told = words(found_of())
    assert len(told) == 5 + 2 + 1 and set(told.values()) == {"holds"}
    told = words(found_of(near=0.05, favor=0.1))
    refuted = [text for text, word in told.items() if word == "fails"]
    assert len(refuted) == 5 and sum("near-far" in text for text in refuted) == 4


def test_models_to_which_attention_matters_little_stop_the_report(all_known):
    assert all(gate.passed for gate in check_gates(gates(found_of())))
    with pytest.raises(GateFailed, match=r"causal: what uniform attention costs .*0\.3"):
        check_gates(gates(found_of(uniform=0.3)))


def test_controls_that_win_are_named(all_known):
    told = "".join(beaten_by_control(found_of()))
    assert "the window with first tokens, a control, loses no more than ReLU, m = 64" in told and "near-far" not in told


@pytest.mark.slow
def test_page(all_known, tmp_path, monkeypatch, capsys):
    """Controls that win come first."""
    monkeypatch.setattr(writing, "REPORT", tmp_path)
    found = found_of()
    fidelity_page.write("small", found, gates(found), 1.0)
    text = (tmp_path / "fidelity.md").read_text()
    assert text.splitlines()[2].startswith("**BERT: the window with first tokens, a control")
    assert "| near-far, default | 1 | +0.0010" in text and "no difference is shown" in text
    assert "| 2048 | nearfar cells=128 |" in text and "Not in this installation: favorsharp" in text
    assert (tmp_path / "fidelity.png").stat().st_size > 20_000 and "written:" in capsys.readouterr().out


@pytest.mark.parametrize("size", ["small", *[pytest.param(size, marks=pytest.mark.slow) for size in ("gpu", "full")]])
@pytest.mark.slow
def test_every_run_is_a_command_line(size, monkeypatch):
    monkeypatch.setenv("CRT_DATA", "/data")
    setting, seen = fidelity.SETTINGS[size], set()
    stages = [(stages[-1], ["task.init=before"] if stages[1:] else []) for model in setting.models
              for stages in [model.key(number)["stages"] for number in range(len(model.stages))]]
    more = ["task.model=before", "trainer.eval_every=3", "trainer.keep=1", "trainer.select=last"]
    trained = [(key["overrides"], more)
               for key in fidelity.uptraining(setting).values()]
    for overrides, more in [*stages, *trained]:
        shape = tuple(option.split("=")[0] for option in overrides)
        if (shape, overrides[1]) not in seen:
            seen.add((shape, overrides[1]))
            check_command_line([*overrides, *more, "logger=none", "hydra.run.dir=run"])
    assert len(seen) >= 4


def test_arms_that_are_not_there_are_named_and_left_out():
    assert {arm.text for arm in SETTING.arms} >= set(PRESENT)
    cells = [arm.text for length in (128, 512, 2048) for arm in SETTING.arms_at(length) if "cells" in arm.text]
    assert cells in ([], [f"{DEFAULT} cells={k}" for k in (32, 64, 128)])


def test_stages_go_on_from_each_other():
    model = Model("m", ("a=1",), (("trainer.steps=3",), ("trainer.steps=5",)))
    assert model.steps == 8 and len(model.key(0)["stages"]) == 1 and model.directory == str(
        fidelity_runs.place(model.key(1)["stages"])) != str(fidelity_runs.place(model.key(0)["stages"]))
    setting = replace(SETTING, models=(replace(model, stages=(("trainer.steps=1000",),)),))
    assert setting.steps(setting.model("m")) == [10, 30, 100]


def test_matched_heads_have_the_moments_of_the_model():
    t = torch.randn(1, 2, 500, 3) @ torch.randn(1, 2, 3, 3) + torch.randn(1, 2, 1, 3)
    drawn = fidelity_runs.normal(*fidelity_runs.law(t), 200_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.mean(2), t.mean(2), atol=0.05, rtol=0.05)
    covariance = lambda u: (u - u.mean(2, keepdim=True)).mT @ (u - u.mean(2, keepdim=True)) / u.shape[2]
    torch.testing.assert_close(covariance(drawn), covariance(t), atol=0.05, rtol=0.05)


@pytest.mark.slow
def test_a_whole_report(tmp_path, monkeypatch, capsys):
    """Tiny models of a tiny text: trained in two stages, swapped, uptrained, timed; the second call computes none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(writing, "REPORT", tmp_path / "report")
    for part, lines in {"train": 300, "valid": 290, "test": 280}.items():
        write_text(tmp_path / "data" / "wikitext2" / f"wiki.{part}.tokens", lines)
    small = (*fidelity.sizes(16, 2, 2), "task.vocabulary_size=300", "task.cache_dir=null", *fidelity.ONCE)
    stages = (fidelity.stage(16, 8, 20, "5e-3"), fidelity.stage(32, 4, 20, "5e-3"))
    models = (Model(BERT, (*small, *fidelity.ENCODER), stages), Model(CAUSAL, (*small, *fidelity.DECODER), stages))
    setting = fidelity_runs.Setting(models, ("exact", "uniform", WINDOW, "favorpp"), ms=(8, 256), texts=3, length=32,
                                    draws=2, seeds=2, shares=(0.05, 0.1, 0.2), lengths=(16, 64), cost_lengths=(64,),
                                    rounds=1, least=-1.0, workers=1, calibration_texts=2)
    monkeypatch.setitem(fidelity.SETTINGS, "small", setting)
    fidelity.main("small")
    before = [json.loads(line)["date"] for line in (tmp_path / "outputs/fidelity/cells.jsonl").open()]
    text = (tmp_path / "report" / "fidelity.md").read_text()
    assert "## causal model, directly after the swap" in text and "| causal: FAVOR++, m = 256 |" in text
    exact = next(line for line in text.splitlines() if line.startswith("| exact |"))
    assert "0.0000 ± 0.0000" in exact and "1.0000" in exact
    fidelity.main("small")
    assert len((tmp_path / "outputs/fidelity/cells.jsonl").read_text().splitlines()) == len(before)


def test_exact_attention_of_matched_heads():
    """The layer is given unscaled queries, the reference scaled ones."""
    q, k, v = torch.randn(3, 1, 2, 9, 4)
    layer = Arm("exact", None).mechanism().layer(2, 4)
    torch.testing.assert_close(layer(q, k, v), exact_attention(q / 4**0.25, k / 4**0.25, v))
