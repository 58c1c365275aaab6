"""The page that decides: from committed draws, and of pages that are there."""

from pathlib import Path

import pytest

from crt_exp.measure.cells import Draw
from crt_exp.oldreport import decide, draws
from crt_exp.oldreport.decide import Decision
from crt_exp.oldreport.evidence import independent
from crt_exp.oldreport.page import Metric

COMMITTED = Path(__file__).parents[2] / "outputs/report"


@pytest.fixture(scope="module")
def committed():
    return Decision(COMMITTED)


def test_the_committed_page_is_that_of_the_draws(committed):
    assert (COMMITTED / "decide.md").read_text() == decide.text(committed), "make report"


def test_every_row_finds_its_claim(committed):
    for entry in committed.spec["claims"]:
        if entry["page"] in committed.pages:
            assert [*committed.judged(entry)], f"{entry['page']}: no claim begins with {entry['begins']}"
    assert all(row.why for row in committed.rows), "a row without its sentence"
    assert 15 <= len(committed.rows) <= 22, "the page that decides shows about 20; the index has the others"


def losses(values, setting="A"):
    return [Draw(setting, arm, "loss", value, unit) for arm, each in values.items() for unit, value in enumerate(each)]


SPEC = {"title": "T", "picture": {"setting": "none", "length": 16.0},
        "methods": {"near-far": {"arm": "nearfar"}, "window": {"arm": "window"}},
        "speed": {"page": "speed", "lengths": [16.0], "directions": {}},
        "settings": [{"page": "copying", "setting": "A", "name": "A", "metric": "loss", "direction": "both", "d": 4,
                      "least": 0.5}],
        "forest": [{"page": "copying", "setting": "A", "when": "directly", "metric": "loss", "better": "nearfar",
                    "worse": "window", "name": "A"}],
        "claims": [], "missing": [{"paper": "P", "said": "S", "because": "of this"}]}


def test_shares_are_of_what_uniform_attention_costs_in_settings_that_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(decide.Page, "metric", lambda self, name: Metric(name, better="lower"))
    values = {"exact": [1.0, 2.0], "uniform": [3.0, 4.0], "nearfar": [1.1, 2.3], "window": [2.0, 3.0]}
    draws.write("copying", losses(values), tmp_path)
    made = Decision(tmp_path, SPEC)
    assert made.settings[0][1] == pytest.approx({"near-far": 0.1, "window": 0.5})
    interval, expected = made.forest[0][1], independent([0.9 / 2, 0.7 / 2])
    assert (interval.mean, interval.half) == pytest.approx((expected.mean, expected.half))
    assert "To swap without training take near-far" in made.sentence()
    assert made.table()[0] == ["near-far", "both", "10%", "", "`nearfar`", "", ""]
    values["uniform"] = [1.2, 2.2]
    draws.write("copying", losses(values), tmp_path)
    assert Decision(tmp_path, SPEC).settings == []
    assert "- P: S. Not here, because of this." in decide.text(made)


TIMED = {"nearfar": "nearfar", "uniform": "uniform",
         **{name: f"{name} m=256" for name in ("favorsharp", "favorpp", "favorp")}}  # arms of the page speed
LEAVES = {"both": {"exact_until"}}  # options that say nothing at the lengths of the times


def alike(arm, direction):
    """An attention in text, by what it computes at the lengths that are timed."""
    name, *options = arm.split()
    options += ["m=256"] if name.startswith("favor") and not any(o.startswith("m=") for o in options) else []
    return name, {option for option in options if option.partition("=")[0] not in LEAVES.get(direction, ())}


def arms_of(committed, entry):
    return committed.arms(entry)


def test_one_name_is_one_method(committed):
    """What a method loses and what it takes are of the same attention; what was not timed so has no time."""
    for entry, shares in committed.settings:
        timed = committed.spec["speed"]["directions"][entry["direction"]]["arms"]
        for method in {*shares, "uniform"} & {*timed}:
            lost, took = arms_of(committed, entry)[method], TIMED[timed[method].removesuffix(" causal")]
            assert alike(lost, entry["direction"]) == alike(took, entry["direction"]), f"{entry['name']}: {method}"
