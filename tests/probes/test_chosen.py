"""A part of a page: some arms, the first seeds, cells of the whole."""

import sys

import pytest

from crt_exp.config import ConfigError
from crt_exp.probes import grid, training
from crt_exp.probes.chosen import chosen, known
from crt_exp.report import __main__ as command_line
from crt_exp.report import draws, page, render
from crt_exp.report.page import Page
from crt_exp.probes.cells import Draw

RUNS = {"metrics": ["loss"], "settings": {"A": []}, "seeds": 3, "before": {"task.init": "of {arm}"},
        "arms": {"exact": None, "favorp m=8": None, "favorp, redrawn": "favorp m=8 redraw_every=1"},
        "where": {"metric": "loss", "arm": "exact", "least": 1.0}}
SIZE = {"starts": {f"of {arm}": {"count": 2, "stages": [["a=1"]]} for arm in RUNS["arms"]} | {
            "of a probe": {"stages": [["a=2"]]}},
        "runs": [RUNS],
        "parts": [{"probe": {"_target_": "x", "start": {"start": "of a probe"}}, "seeds": 4,
                   "fields": [{"metric": "error"}], "arms": {"{features}": {"features": ["pos", "trig"]}}}]}
FULL = {name: page.load(name)["sizes"]["full"] for name in page.names() if page.load(name)["sizes"].get("full")}


@pytest.mark.parametrize("words, names", [
    ("exact", ["exact"]), ("exact favorp", ["exact", "favorp m=8", "favorp, redrawn"]), ("favorp m=8", ["favorp m=8"]),
    ("exact; trig;", ["exact", "trig"]), ("", ["pos", "trig", "exact", "favorp m=8", "favorp, redrawn"])], ids=str)
def test_arms_are_named_as_on_the_page_or_by_their_first_word(words, names):
    assert sorted(known(chosen(SIZE, words))) == sorted(names)


def test_a_part_has_the_cells_of_the_whole_and_the_starts_that_it_needs():
    part = chosen(SIZE, "exact trig", 1)
    assert [*part["starts"]] == ["of exact", "of a probe"] and part["starts"]["of exact"]["count"] == 1
    models, sources = training.last(SIZE["starts"], ()), ("tasks/lra.py",)
    whole, some = (training.Grid.read(size["runs"][0], models).keys(["A"], sources) for size in (SIZE, part))
    assert {*some} == {("A", "exact", 0)} and some["A", "exact", 0] == whole["A", "exact", 0]
    places = [grid.Part.read(size["parts"][0], {"of a probe": ["f"]}).places() for size in (SIZE, part)]
    whole, some = ([(arm, seed, key) for _, arm, _, seed, key in each] for each in places)
    assert some == [each for each in whole if each[:2] == ("trig", 0)] and not part["runs"][0].get("where")


@pytest.mark.parametrize("size, words, seeds, message", [
    (SIZE, "exakt", 0, "did you mean exact"), (SIZE, "", -1, "expected at least 1"),
    ({"lengths": [8]}, "exact", 0, "measures in a way of its own")], ids=str)
def test_what_cannot_be_chosen(size, words, seeds, message):
    with pytest.raises(ConfigError, match=message):
        chosen(size, words, seeds)


@pytest.mark.parametrize("name", [*FULL])
def test_every_page_has_parts(name):
    """Of its first arm: it alone is left, with its starts."""
    size = grid.given(FULL[name], {})
    first = known(size)[0]
    part = chosen(size, f"{first};", 1)
    assert known(part) == [first]
    assert [*map(grid.Part.read, part.get("parts", []))] or [*map(training.Grid.read, part.get("runs", []))]


def test_the_page_of_a_part_says_so_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(draws, "FOLDER", tmp_path)
    place = page.folder_of(page.load("proteins"), "full", part=True)
    assert place == tmp_path / "full/part" and page.folder_of(page.load("proteins"), "small", part=True) == (
        tmp_path / "part")
    draws.write("proteins", [Draw("TrEMBL, U", "exact", "loss", 2.0, 0, table="test")], place)
    text = render.text(Page("proteins", place, size="full", part='ARMS="exact" SEEDS=1'), False)
    assert 'A part of the page: ARMS="exact" SEEDS=1 of all' in text
    assert 'Command: `make proteins SIZE=full ARMS="exact" SEEDS=1`' in text and " nan" not in text
    assert "what uniform attention costs, in nats: not measured (at least 0.5)" in text
    assert "A part of the page: some arms or seeds" in render.text(Page("proteins", place), False)


def test_a_part_is_not_written_over_the_committed_page(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["report", "proteins", "--arms", "exact", "--out", str(draws.FOLDER)])
    with pytest.raises(SystemExit) as stop:
        command_line.main()
    assert stop.value.code == 2 and "holds whole pages" in capsys.readouterr().err
