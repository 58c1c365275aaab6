"""The driver of what measures: cells and draws of a page's file, arms by name, and what is refused."""

from itertools import compress, product
from pathlib import Path

import pandas as pd
import pytest

from crt_exp.config import ConfigError
from crt_exp.report import draws, page
from crt_exp.probes import grid
from crt_exp.probes.grid import Part, arm_of, expanded
from crt_exp.probes.training import Grid

COMMITTED = Path(__file__).parents[2] / "outputs/report"
DRIVEN = [name for name in page.names() if draws.there(name, COMMITTED)
          and "sizes" in page.load(name)]
PLACE = ("setting", "arm", "metric", "table", "x", "unit")
# Rows of earlier measurements, whose draws are not left.
EARLIER = {"table1": "table == 'means'", "fig4-right": "metric != 'mib'"}
LACKING = ("adapt", "fig2", "hrf-flops")    # pages of rows that lack some of their fields


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


@pytest.mark.parametrize("given, message", [
    ({"probes": {}}, "unknown key of a part 'probes'; did you mean probe"),
    ({"arms": {}}, "a part of a page lacks arms"),
    ({"arms": {"{features}": {"m": 4}}}, "{features}: features: got None, expected a list"),
    ({"arms": {"{features}": {"features": "*", "without": {"poss": "why"}}}}, "did you mean pos")], ids=str)
def test_a_part_that_is_no_part(given, message):
    with pytest.raises(ConfigError, match=message.replace("{", r"\{")):
        Part.read({"probe": {"_target_": "x"}, "fields": [{}], "arms": ["exact"]} | given)


@pytest.mark.parametrize("given, message", [("favorppp m=8", "did you mean favorpp"), ("pos 8", "8 is no option"),
                                            ({"features": "pos", "sampler": "hadamard", "sampler.block": 1},
                                             "did you mean blocks")], ids=str)
def test_an_arm_that_is_none(given, message):
    with pytest.raises(ConfigError, match=message):
        arm_of(given)


def test_a_page_that_says_not_what_measures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="nothing says what it measures"):
        next(grid.measure("mine", [], {}))


# Settings, tables and arms that stand in a file of draws and are of measurements before: `choices` or facts say so.
BEFORE = {"fidelity": {"means"}, "fig3": {"directly after the swap, an earlier model", "squared_norm"},
          "hrf-speech": {"directly after the swap, an earlier model"}, "proteins-long": {"median", "left"},
          "encoders": {"error_ratio"}}
TRAINED = [name for name in DRIVEN if "runs" in page.load(name)["sizes"]["small"]]


def declared(size):
    """(setting, arm, metric, table) of what a size draws; None for what only rows say."""
    for part in map(Part.read, size.get("parts", [])):
        for setting, what in product(part.settings, part.fields):
            named = what.get("arm", "")
            arms = [*part.arms] if not named or part.together and "{" in named else [None if "{" in named else named]
            yield from ((setting, arm, what["metric"], what.get("table", "")) for arm in arms)
        for setting, (name, given) in product(part.settings, part.controls.items()):
            yield from ((setting, name, what["metric"], what.get("table", "")) for what in given)
    for each in map(Grid.read, size["runs"]):
        for setting, arm in product(each.settings, each.arms):
            places = [setting, *(f"{setting}, {name}" for name in each.apart.values())]
            yield from ((setting, arm, metric, "validation") for metric in each.metrics)
            yield from ((place, arm, metric, table) for place in places for metric in each.tested or [None]
                        for table in ("test", "parts"))
            yield from ((place, name, None, "test") for place in places for name in each.baselines.values())
            yield from ((setting, arm, metric, "step") for metric in ("steps_per_s", "mib") if each.cost)
            yield from ((setting, arm, option.rpartition(".")[2], "chosen") for option in each.search)
    for given in size.get("derived", []):
        into = given.get("into", {})
        for metric in given["metrics"].values() if "metrics" in given else [given["metric"]]:
            yield from ((into.get(setting), arm, metric, given["table"]) for setting in into or [None]
                        for arm in given.get("arms", [given.get("arm")]))


@pytest.mark.parametrize("name", TRAINED)
def test_committed_places_are_those_of_parts_and_runs(name):
    """Setting, arm, metric and table of every draw."""
    places = {*declared(page.load(name)["sizes"]["small"])}
    frame = pd.read_csv(draws.path_of(name, COMMITTED), usecols=["setting", "arm", "metric", "table"], dtype=str)
    found = {*frame[["setting", "arm", "metric", "table"]].fillna("").itertuples(index=False, name=None)}
    odd = [each for each in found if not BEFORE.get(name, set()) & {*each} and not any(
        all(ours in (theirs, None) for ours, theirs in zip(place, each)) for place in places)]
    assert not odd


@pytest.mark.parametrize("name", [name for name in DRIVEN if name not in TRAINED])
def test_draws_that_are_committed_are_of_cells_that_the_page_declares(name):
    """The same settings, arms, metrics and tables, and the same x and units where a page says them, not rows."""
    size = page.load(name)["sizes"]["small"]
    frame = pd.read_csv(draws.path_of(name, COMMITTED), dtype=str, keep_default_na=False, usecols=PLACE)
    frame["x"] = frame["x"].map({x: plain(x) for x in frame["x"].unique()})
    earlier = frame.query(EARLIER[name]) if name in EARLIER else frame[:0]
    frame = frame.drop(earlier.index)
    models = {start: ["its folder"] for start in size.get("starts", {})}
    declared = {place for part in size["parts"] for place in placed(Part.read(part, models))}
    of_cells, lost = pd.Series(False, frame.index), {*zip(earlier["setting"], earlier["arm"])}
    lost |= {(setting, None) for setting, _ in lost}                                   # of arms that rows name
    for told in {tuple(value is not None for value in place) for place in declared}:
        here = {(*compress(place, told),): place for place in declared
                if tuple(value is not None for value in place) == told}
        there = pd.MultiIndex.from_frame(frame[[*compress(PLACE, told)]])
        of_cells |= there.isin([*here])
        missing = {*here} - {*there.unique()}
        assert name in LACKING or {here[known][:2] for known in missing} <= lost
    arms, found = {place[:2] for place in declared}, {*zip(frame["setting"], frame["arm"])} | lost
    left = {*zip(frame["setting"][~of_cells], frame["arm"][~of_cells])}
    assert not (left & arms if "derived" in size else left)
    assert {place for place in arms if None not in place} <= found


def placed(part):
    """PLACE of each value that a part declares, with None for what only a row says."""
    for setting, arm, x, seed, key in part.places():
        unit, given = str(seed) if part.seeds > 1 else "", part.arms.get(arm)
        values = [(arm, what, unit, given.get("over", 1) if isinstance(given, dict) else 1) for what in part.fields]
        if arm in ("", next(iter(part.arms))) and not seed:
            values += [(name, what, "", 1) for name, given in part.controls.items()
                       for what in ([given] if isinstance(given, dict) else given)]
        for name, what, unit, over in values:
            place = {"setting": setting, "arm": name, "metric": what["metric"], "table": ""} | {
                key: None if "{" in what[key] else what[key] for key in ("setting", "arm", "table") if key in what}
            for each in xs(what, key["probe"]) if "x" in what else [x]:
                told = isinstance(each, int | float | str)
                yield (*place.values(), plain(each / over if over != 1 else each) if told else None,
                       None if "unit" in what or what.get("each") == "unit" else unit)


def xs(what, probe):
    """Values of x that rows take from the probe's arguments, one or a list of them."""
    given = probe.get(what["x"], probe.get(what["x"] + "s"))
    return given if isinstance(given, list) else [given]


def plain(x):
    """100 and "100.0" alike."""
    try:
        return f"{float(x):g}"
    except ValueError:
        return x


def test_what_a_user_gave_stands_in_a_size_and_other_files_are_other_cells(tmp_path):
    (tmp_path / "a.fasta").write_text("MK")
    size = {"probe": {"input": {"option": "input"}, "m": {"option": "m"}, "content": {"digest": ["input", "m"]}}}
    found = grid.given(size, {"input": str(tmp_path / "a.fasta")})["probe"]
    assert found["input"] == str(tmp_path / "a.fasta") and found["m"] is None and len(found["content"]) == 1
    (tmp_path / "a.fasta").write_text("MKL")
    assert grid.given(size, {"input": str(tmp_path / "a.fasta")})["probe"]["content"] != found["content"]
    assert grid.given(size, {}) == {"probe": {"input": None, "m": None, "content": []}}


def test_starts_stand_for_the_models_of_all_seeds():
    part = {"runs": {"starts": "exact"}, "run": {"start": "exact"}}
    assert grid.started(part, {"exact": ["a", "b"]}, 3) == {"runs": ["a", "b"], "run": "b"}
    with pytest.raises(ConfigError, match="did you mean exact"):
        grid.started({"starts": "exakt"}, {"exact": ["a"]}, 0)
