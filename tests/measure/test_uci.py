"""Kernel regression as draws: splits, peers, the choice of validation, averages of splits that all sets have."""

import pytest

from crt_exp.measure import grid
from crt_exp.measure.uci import CHOICE
from crt_exp.oldreport.page import load


@pytest.mark.usefixtures("one_thread")
def test_draws_of_a_tiny_size(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    size = load("table1")["sizes"]["small"]
    arms = {name: size["parts"][0]["arms"][name] for name in ("exact", "majority")}
    arms |= {"Nystroem m=16": {"attention": "exact", "probe": {"peer": "Nystroem", "columns": 16}},
             "{features}": {"features": ["trig", "oprf"], "m": 16}}
    part = size["parts"][0] | {"workers": 1, "arms": arms,
                               "settings": {"wine": {"dataset": "wine", "coding": "ordinal"},
                                            "iris": {"dataset": "iris", "coding": "ordinal", "repeats": 2}}}
    part["probe"] |= {"split": [0.6, 0.15, 0.25], "sigmas": [0.1, 0.3], "repeats": 4, "draws": 1}
    draws = [*grid.measure("mine", [], size | {"parts": [part]})]
    value = {(draw.setting, draw.arm, draw.unit): draw.value for draw in draws if draw.metric == "accuracy"}
    assert {unit for setting, arm, unit in value if setting == "average" and arm == "oprf"} == {0, 1}
    assert value["average", "oprf", 1] == pytest.approx((value["wine", "oprf", 1] + value["iris", "oprf", 1]) / 2)
    assert value["wine", "exact", 0] > value["wine", "majority", 0] and "Nystroem m=16" in {arm for _, arm, _ in value}
    picked = {setting for setting, arm, _ in value if arm == CHOICE}
    assert picked == {"wine", "iris"}
    valid = {draw.arm: draw.value for draw in draws
             if (draw.metric, draw.setting, draw.unit) == ("validation", "wine", 0)}
    best = max(("trig", "oprf"), key=valid.get)
    assert value["wine", CHOICE, 0] == value["wine", best, 0]
