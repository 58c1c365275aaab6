"""Times of estimators as draws, at tiny sizes."""

import pytest

from crt_exp import drawing
from crt_exp.studies import estimator_times

SIZE = {"processes": 2, "rounds": 2, "rows": 20, "columns": 4, "width": 8}


@pytest.mark.slow
def test_every_map_transforms(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(estimator_times, "REST", 0)
    monkeypatch.setattr("crt_exp.studies.cells.in_new_process", lambda call, **given: call(**given))  # all in this one
    draws = [*estimator_times.measure("bench-estimators", ["estimators.py"], SIZE)]
    arms = {draw.arm for draw in draws}
    assert {*drawing.maps(estimator_times.WITHOUT), estimator_times.PEER, estimator_times.CONTROL} < arms
    assert "trig, 16 columns" in arms and "gerf" not in arms
    assert len(draws) == len(arms) * 2 * 2 * 2 and all(draw.value > 0 for draw in draws)
