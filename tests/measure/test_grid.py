"""The driver of what measures: cells and draws of a page's file, arms by name, and what is refused."""

import pytest

from crt_exp.measure import grid
from crt_exp.measure.grid import arm_of, expanded


class Norms:
    """A probe: squared norms of some rows of the noise."""

    def __init__(self, d, rows):
        self.d, self.rows = d, rows

    def records(self, mechanism, seed):
        for m in self.rows:
            yield {"m": m, "norms": [float(m * self.d + seed), None], "named": mechanism.features.name,
                   "hidden": m > 2, "half": 0.123456}


def turns(arm, d, seed):
    return [{"who": name, "ms": 1.0 + d + seed} for name in arm]


def compared(arm, d, seed):
    return {"value": d * len(arm) + seed}


def measured(tmp_path, monkeypatch, *parts, **more):
    monkeypatch.chdir(tmp_path)
    common = {"probe": {"_target_": f"{__name__}.Norms", "d": 2, "rows": [1, 3]}, "workers": 1,
              "arms": {"pos": {"features": "pos"}}}
    return [*grid.measure("mine", [], {"parts": [common | part for part in parts], **more})]


def test_a_field_says_unit_x_and_table(tmp_path, monkeypatch):
    made = measured(tmp_path, monkeypatch, {"settings": {"A": {"d": 4}}, "fields": [
        {"metric": "norm", "field": "norms", "each": "unit", "x": "m", "table": "of {named}"},
        {"metric": "half", "field": "half", "digits": 2, "unless": "hidden"}, {"metric": "none", "field": "lacking"}]})
    assert [(draw.setting, draw.arm, draw.metric, draw.value, draw.unit, draw.x, draw.table) for draw in made] == [
        ("A", "pos", "norm", 4.0, 0, 1, "of pos"), ("A", "pos", "half", 0.12, "", "", ""),
        ("A", "pos", "norm", 12.0, 0, 3, "of pos")]
    assert [draw.seconds != "" for draw in made] == [True, False, False]     # of the whole cell, once


def test_seeds_are_units_swept_values_are_x_and_controls_stand_once(tmp_path, monkeypatch):
    made = measured(tmp_path, monkeypatch, {
        "sweep": {"d": [2, 4]}, "seeds": 2, "arms": {"pos": {"features": "pos"}, "far": {"features": "pos", "over": 2,
                                                                                         "probe": {"rows": [1]}}},
        "fields": [{"metric": "norm", "field": "norms"}],
        "controls": {"zero": [{"metric": "norm", "value": 0.0, "x": "m"}, {"metric": "half", "field": "half"}]}})
    of = {(draw.arm, draw.x, draw.unit): draw.value for draw in made if draw.metric == "norm"}
    assert of["pos", 4, 1] == 13.0 and of["far", 2.0, 1] == 5.0 and ("far", 4, 0) not in of
    zero = [(draw.metric, draw.value, draw.x) for draw in made if draw.arm == "zero"]
    assert zero == [("norm", 0.0, 1), ("half", 0.123456, 2), ("norm", 0.0, 3), ("half", 0.123456, 2),
                    ("norm", 0.0, 1), ("half", 0.123456, 4), ("norm", 0.0, 3), ("half", 0.123456, 4)]


def test_arms_together_are_one_cell_and_rows_say_whose_they_are(tmp_path, monkeypatch):
    made = measured(tmp_path, monkeypatch, {"probe": {"_target_": f"{__name__}.turns", "d": 1}, "seeds": 2,
                                            "together": True, "arms": ["trig", "pos m=8"], "fields": [
                                                {"metric": "ms", "field": "ms", "arm": "{who}"}]})
    assert [(draw.arm, draw.unit, draw.value) for draw in made] == [("trig", 0, 2.0), ("pos m=8", 0, 2.0),
                                                                    ("trig", 1, 3.0), ("pos m=8", 1, 3.0)]


def doubled(draws, metric):
    """Draws of draws."""
    for draw in draws:
        yield draw.__class__(draw.setting, "doubled", metric, 2 * draw.value)


def test_a_function_takes_the_arm_as_it_is_written_and_draws_are_derived(tmp_path, monkeypatch):
    made = measured(tmp_path, monkeypatch, {"probe": {"_target_": f"{__name__}.compared", "d": 2}, "arms": ["ab", "c"],
                                            "fields": [{"metric": "v", "field": "value"}]},
                    derived=[{"_target_": f"{__name__}.doubled", "metric": "w"}])
    assert [(draw.arm, draw.metric, draw.value) for draw in made] == [
        ("ab", "v", 4), ("c", "v", 2), ("doubled", "w", 8), ("doubled", "w", 4)]


def test_names_in_braces_are_products():
    listed = expanded({"{features} x {sampler}": {"features": "*", "sampler": "*", "m": 4, "without": {
        "auto": "why", "halton": "why", "pos x iid": "why"}}})
    assert listed["trig x sobol"] == {"features": "trig", "sampler": "sobol", "m": 4}
    assert "pois x iid" in listed and "pois x hadamard" not in listed        # discrete maps take exactly Gaussian rows
    assert not [name for name in listed if "auto" in name or "halton" in name or name == "pos x iid"]
    settings = expanded({"{features}, {scale:g}": {"scale": [1.0, 0.5], "arm": {"features": ["pos", "trig"]}}})
    assert settings["pos, 1"] == {"scale": 1.0, "arm": {"features": "pos"}} and len(settings) == 4
    assert expanded(["exact", "pos m=4"]) == {"exact": None, "pos m=4": None}


@pytest.mark.parametrize("given, made", [
    ("exact", ("exact", None, None)), ("favorpp m=64 sampler=givens", ("favorpp", 64, "givens")),
    ("trig m=8", ("trig", 8, "orthogonal")), ({"features": "angular", "columns": 288, "sampler": "iid"},
                                              ("angular", 8, "iid"))], ids=str)
def test_arms_are_read_at_one_place(given, made):
    found = arm_of(given)
    assert (found.name, found.m, found.sampler_part and found.sampler_part.name) == made


def test_options_of_an_arm_reach_its_attention_map_and_sampler():
    assert arm_of("window block=32 first=16").options["block"] == 32
    assert arm_of({"features": "pois_plus", "margin": 0.1}).map().margin == 0.1
    assert arm_of({"features": "trig", "sampler": "hadamard", "sampler.blocks": 1}).sampler.keywords["blocks"] == 1
