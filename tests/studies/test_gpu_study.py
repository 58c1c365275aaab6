"""The study of a GPU at tiny sizes on the CPU; measurements in parts."""

import pytest
import torch

from crt_exp.models.conformer_transducer import PRESETS
from crt_exp.report import page
from crt_exp.studies import cells, gpu, sources

SPEC = page.load("speed-gpu")


def measured(monkeypatch, tmp_path, **size):
    """In this process, one turn each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("crt_exp.studies.cells.in_new_process", lambda call, **key: call(**key))
    monkeypatch.setattr(gpu, "WARM", 0)
    monkeypatch.setattr(gpu, "TURNS", 1)
    return list(gpu.measure("mine", ["studies/gpu.py"], {"processes": 1, "models": [], "device": "cpu"} | size))


def test_every_arm_and_pass_is_measured(monkeypatch, tmp_path):
    draws = measured(monkeypatch, tmp_path, lengths=[64])
    assert {draw.arm for draw in draws} == {*gpu.ARMS} == {*SPEC["arms"]}
    assert {draw.setting for draw in draws} == {f"{way}, {each}" for way in ("both directions", "causal")
                                                for each in gpu.PASSES} | {"a decoded token"}
    assert {setting for bar in SPEC["bars"] for setting in bar["settings"]} <= {draw.setting for draw in draws}
    assert all(draw.value > 0 for draw in draws if draw.metric == "ms")


@pytest.mark.parametrize("kind, size", [("vit", 32), ("conformer", 1)])
def test_a_training_step_of_a_model(kind, size, monkeypatch):
    monkeypatch.setitem(PRESETS, "paper", PRESETS["small"])
    monkeypatch.setattr(gpu, "WARM", 0)
    monkeypatch.setattr(gpu, "TURNS", 1)
    monkeypatch.setattr(gpu, "ARMS", {"nearfar": {}})
    monkeypatch.setitem(gpu.MODELS, "tiny", (kind, size))
    assert [(arm, metric) for _, arm, metric, _ in gpu.steps("tiny", "cpu")] == [("nearfar", "ms"), ("nearfar", "mib")]


def test_every_model_of_the_page_is_known():
    assert {*SPEC["sizes"]["gpu"]["models"]} == {*gpu.MODELS}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so():
    with pytest.raises(gpu.NoGPU, match="measured on a GPU, and torch sees none here"):
        next(gpu.measure("speed-gpu", sources.of_page(SPEC), SPEC["sizes"]["gpu"]))


def test_a_measurement_in_parts(monkeypatch, tmp_path):
    """Nothing begins after the minutes that are given; the same command goes on."""
    keys = [{"i": i} for i in range(5)]
    now = iter([0.0, 0.0, 0.0, 99.0, *[0.0] * 9])
    monkeypatch.setattr(cells.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(cells, "_end", float("inf"))                  # as it is again behind this test
    cells.limit(1)
    made = cells.Cells("mine", [], folder=tmp_path)
    with pytest.raises(cells.OutOfTime, match="3 of 5 cells are left"):
        made.fill(keys, dict, "mine", workers=1)
    assert cells.Cells("mine", [], folder=tmp_path).fill(keys, dict, "mine", workers=1)[keys[4]] == {"i": 4}
