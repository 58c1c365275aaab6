"""A part of a page: some arms, the first seeds, cells of the whole."""

import sys

import pytest

from crt_exp.measure import grid, training
from crt_exp.measure.chosen import chosen
from crt_exp.oldreport import __main__ as command_line
from crt_exp.oldreport import draws

RUNS = {"metrics": ["loss"], "settings": {"A": []}, "seeds": 3, "before": {"task.init": "of {arm}"},
        "arms": {"exact": None, "favorp m=8": None, "favorp, redrawn": "favorp m=8 redraw_every=1"},
        "where": {"metric": "loss", "arm": "exact", "least": 1.0}}
SIZE = {"starts": {f"of {arm}": {"count": 2, "stages": [["a=1"]]} for arm in RUNS["arms"]} | {
            "of a probe": {"stages": [["a=2"]]}},
        "runs": [RUNS],
        "parts": [{"probe": {"_target_": "x", "start": {"start": "of a probe"}}, "seeds": 4,
                   "fields": [{"metric": "error"}], "arms": {"{features}": {"features": ["pos", "trig"]}}}]}


def test_a_part_has_the_cells_of_the_whole_and_the_starts_that_it_needs():
    part = chosen(SIZE, "exact trig", 1)
    assert [*part["starts"]] == ["of exact", "of a probe"] and part["starts"]["of exact"]["count"] == 1
    models, sources = training.last(SIZE["starts"], ()), ("tasks/lra.py",)
    whole, some = (training.Grid.read(size["runs"][0], models).keys(["A"], sources) for size in (SIZE, part))
    assert {*some} == {("A", "exact", 0)} and some["A", "exact", 0] == whole["A", "exact", 0]
    places = [grid.Part.read(size["parts"][0], {"of a probe": ["f"]}).places() for size in (SIZE, part)]
    whole, some = ([(arm, seed, key) for _, arm, _, seed, key in each] for each in places)
    assert some == [each for each in whole if each[:2] == ("trig", 0)] and not part["runs"][0].get("where")


def test_a_part_is_not_written_over_the_committed_page(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["report", "proteins", "--arms", "exact", "--out", str(draws.FOLDER)])
    with pytest.raises(SystemExit) as stop:
        command_line.main()
    assert stop.value.code == 2 and "holds whole pages" in capsys.readouterr().err
