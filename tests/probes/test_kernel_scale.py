"""kernel-scale: every arm on few rows, errors beside the constant's, and arms left out where they do not fit."""

import numpy as np
import pytest

from crt_exp.probes import kernel_scale
from crt_exp.probes.kernel_scale import ARMS, Parts, error, errors
from crt_exp.report.page import load

FEW = {name: {"of": name} for name in ARMS if name != "exact"}


@pytest.mark.filterwarnings("ignore")  # of iterations that end early
def test_every_arm_beats_the_constant_on_generated_rows(monkeypatch):
    monkeypatch.setattr(kernel_scale, "TESTED", 400)
    monkeypatch.setattr(kernel_scale, "fit_length_scales", lambda X, y, **_: np.full(X.shape[1], 2.0))  # in seconds
    arms = {**FEW, "exact": {"of": "exact", "most": 300}, "missing": {"of": "exact", "most": 299}}
    found = {row["arm"]: row for row in errors(arms, "generated", 300, 30, 0)}
    assert {*found} == {*arms} - {"missing"}
    assert found["trivial"]["error"] == pytest.approx(1, abs=0.02)
    assert all(row["error"] < 1 for name, row in found.items() if name != "trivial")
    assert 0.8 < found["ours"]["coverage"] <= 1


@pytest.mark.filterwarnings("ignore")
def test_classes_and_numbers_of_tables():
    found = {row["arm"]: row["error"] for row in errors({**FEW, "exact": {"of": "exact"}}, "iris", 0, 16, 0)}
    assert {*found} == {*FEW} and found["ours"] < 0.3 < found["trivial"]
    parts = Parts(np.zeros((2, 1)), np.array([0.0, 2.0]), np.zeros((2, 1)), np.array([1.0, 3.0]))
    assert error(parts, np.array([1.0, 3.0])) == 0 and error(parts, np.array([2.0, 2.0])) == 1


def test_the_page_names_arms_that_there_are():
    for size in load("kernel-scale")["sizes"].values():
        for part in size["parts"]:
            assert {arm["of"] for arm in part["arms"].values()} <= {*ARMS}
