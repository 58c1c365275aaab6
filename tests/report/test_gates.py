"""Gates of pages: none asks for more than the paper's own numbers have, and presets say what is known of redraws."""

import math
from pathlib import Path

import pytest

from crt_exp.config import CONF
from crt_exp.probes import grid
from crt_exp.report import __main__ as command_line
from crt_exp.report import draws, page
from crt_exp.report.page import Page

# Performers, Table 2: perplexities of the empirical baseline and of exact attention, on the test split and held out.
TABLE_2 = {"U": (17.80, 9.37), "B": (17.80, 9.22), "U, held out": (17.93, 13.20), "B, held out": (17.93, 12.09)}


@pytest.mark.parametrize("name", ["proteins", "proteins-long", "kernels"])
def test_gates_on_proteins_ask_no_more_than_the_exact_model_of_the_paper_has(name):
    made, asked = Page(name), 0
    for setting, gate in made.gates:
        place = setting.partition(", ")[2] or "U, held out"   # of chains, whose models of Figure 7 reach as much
        assert gate.least <= math.log(TABLE_2[place][0] / TABLE_2[place][1])
        asked += 1
    assert asked


@pytest.mark.parametrize("name", [name for name in page.names() if page.load(name).get("gates")])
def test_gates_say_where_their_bar_is_from(name):
    """In a comment beside them."""
    assert "\ngates:  # " in page.file_of(name).read_text()


@pytest.mark.parametrize("size, stops", [("small", True), ("full", False)])
def test_no_condition_stops_a_run_at_full(size, stops, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(grid, "measure", lambda name, begin, chosen, keep: asked.append(chosen))
    monkeypatch.setattr(draws, "write", lambda name, made, folder: folder)
    command_line.measure("proteins", size, Path("out"), False, False)
    assert any("where" in each for each in asked[0]["runs"]) == stops
    assert all(each["arms"] for each in asked[0]["runs"])


@pytest.mark.parametrize("name", ["favorp", "favorpp"])
def test_presets_say_what_is_known_of_redraws(name):
    text = " ".join((CONF / f"attention/{name}.yaml").read_text().replace("# ", "").split())
    assert "make redraw)" in text and "From scratch" in text and "make redraw-scratch)" in text
