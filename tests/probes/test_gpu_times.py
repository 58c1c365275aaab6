"""The probes of a GPU at tiny sizes on the CPU; measurements in parts."""

import pytest
import torch

from crt_exp.models.conformer_transducer import PRESETS
from crt_exp.report import page
from crt_exp.probes import cells, gpu, grid

SPEC = page.load("speed-gpu")
PARTS = SPEC["sizes"]["gpu"]["parts"]


@pytest.fixture
def one_turn(monkeypatch):
    monkeypatch.setattr(gpu, "WARM", 0)
    monkeypatch.setattr(gpu, "TURNS", 1)


def test_every_arm_and_pass_is_measured(monkeypatch, tmp_path, one_turn):
    monkeypatch.chdir(tmp_path)
    parts = [part | {"sweep": {"length": [64]}, "seeds": 1, "apart": False, "workers": 1,
                     "probe": part["probe"] | {"device": "cpu"}} for part in PARTS[:2]]
    draws = [*grid.measure("mine", [], {"parts": parts})]
    assert {draw.arm for draw in draws} == {*SPEC["arms"]}
    assert {draw.setting for draw in draws} == {f"{way}, {each}" for way in ("both directions", "causal")
                                                for each in gpu.PASSES} | {"a decoded token"}
    assert {setting for bar in SPEC["bars"] for setting in bar["settings"]} <= {draw.setting for draw in draws}
    assert all(draw.value > 0 for draw in draws if draw.metric == "ms")


@pytest.mark.parametrize("kind, size", [("vit", 32), ("conformer", 1)])
def test_a_training_step_of_a_model(kind, size, monkeypatch, one_turn):
    monkeypatch.setitem(PRESETS, "paper", PRESETS["small"])
    row, = gpu.steps({"near": "nearfar"}, kind, size, 0, "cpu")
    assert row["arm"] == "near" and row["ms"] > 0 and {*row} == {"arm", "ms", "mib"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so():
    *_, key = next(grid.Part.read(PARTS[0]).places())
    with pytest.raises(gpu.NoGPU, match="measured on a GPU, and torch sees none here"):
        grid.rows(**key)


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
