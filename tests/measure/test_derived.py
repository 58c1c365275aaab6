"""Draws of draws: means of units that share a model, ratios of arms."""

from math import log

import pytest

from crt_exp.measure.cells import Draw
from crt_exp.measure.derived import means, ratios


def test_pairs_are_averaged_by_encoder():
    made = [Draw("A", arm, "loss", pair + 0.5 * (arm == "favorp m=8"), pair, 0, "validation")
            for arm in ("exact", "favorp m=8", "elu") for pair in range(4)]
    made += [Draw("A", "uniform", "loss", 9.0, 0, 0, "validation"), Draw("A", "exact", "loss", 9.0, 0, "", "test")]
    found = means(made, "loss", "validation", ["exact", "uniform", "favorp m=8"], 2, {"A": "each"})
    assert {(draw.setting, draw.arm, draw.unit): draw.value for draw in found} == {
        ("each", "exact", "A, 0"): 1.0, ("each", "exact", "A, 1"): 2.0, ("each", "favorp m=8", "A, 0"): 1.5,
        ("each", "favorp m=8", "A, 1"): 2.5}


def test_ratios_are_of_geometric_means():
    made = [Draw("A", arm, "error", value, unit, x, "layers") for unit in (0, 1) for x in (0, 1)
            for arm, value in (("a", 2.0 * 4**x * (1 + unit)), ("b", 1.0))]
    given = {"metrics": {"error": "ratio"}, "arm": "a", "over": "b", "table": "layers"}
    whole, = ratios(made, **given)
    assert whole.value == pytest.approx(4 * 2**0.5) and (whole.metric, whole.unit, whole.x) == ("ratio", "", "")
    each = [*ratios(made, **given, per=["unit", "x"], log=True)]
    assert [(draw.unit, draw.x) for draw in each] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [draw.value for draw in each] == pytest.approx([log(2), log(8), log(4), log(16)])
    models = [*ratios(made, **given, per=["unit"], into={"A": "each"})]
    assert [(draw.setting, draw.unit, draw.x) for draw in models] == [("each", "A, 0", ""), ("each", "A, 1", "")]
    assert [*ratios(made, **given, into={"B": "each"})] == [] == [*ratios(made[:1], **given)]
