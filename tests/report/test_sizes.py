"""Every page at the sizes that are not committed, of simulated draws: nothing is empty, absent or of another size."""

import re

import pytest

from crt_exp.probes import grid
from crt_exp.report import draws, figures, page, render, tables
from crt_exp.report.page import Page
from tests.report.simulated import frame_of

SIZED = [(name, size) for name in page.names() for size, given in page.load(name).get("sizes", {}).items()
         if size != page.home(page.load(name)) and given and name != "attention-maps"]  # pictures of a model's matrices
FAST = [("fig4-left", "full"), ("pixels", "full")]


def simulated(name, size, folder, monkeypatch):
    draws.write(name, [draws.Draw(**row) for row in frame_of(name, size, monkeypatch).to_dict("records")], folder)
    return Page(name, folder, size=size)


# Settings and tables of earlier measurements of the committed pages, which no size repeats.
EARLIER = {"hrf-speech": ["directly after the swap, an earlier model"],
           "fig4-right": ["Its quartiles: the first", "Its quartiles: the third"],
           "performers-fig2": ["log MSE(trig) / MSE at length 1, by angle in degrees"],  # two angles have none
           "fidelity": ["{setting}: loss of exact attention, nats"]}


def settings_of(made, size):
    given = made.file["sizes"].get(size) or {}
    return {setting for family in ("parts", "runs") for each in given.get(family, [])
            for setting in grid.expanded(each.get("settings", {}))}


def left_to_full(made):
    """Settings of the papers' recipes, which no other size has."""
    return set() if made.size == "full" else settings_of(made, "full") - settings_of(made, made.size) - settings_of(
        made, page.home(made.file))


def absent(made):
    """Claims and bars of the file of which no setting has a verdict."""
    elsewhere = {*EARLIER.get(made.name, []), *left_to_full(made)}
    for family in page.FAMILIES:
        found = [getattr(verdict, "claim", verdict).text for verdict in made.families[family]]
        for entry in made.spec.get(family, []):
            names = {name: ".*" for name in ("setting", "x", "margin")}
            pattern = re.sub("|".join(map(re.escape, (f"\\{{{name}\\}}" for name in names))), ".*",
                             re.escape(entry["text"]))
            earlier = entry.get("settings") and not {*entry["settings"]} - elsewhere
            if not earlier and not any(re.fullmatch(pattern, text) for text in found):
                yield entry["text"]


def empty_tables(made, text):
    """Titles of tables of which there is none, and headings of those with a column without a cell."""
    here = [table for table in made.spec.get("tables", []) if not table.get("settings")
            or {*table["settings"]} - left_to_full(made)]
    for table in [] if made.own("sections") else here:
        of = {**made.spec, "tables": [table]}
        if table.get("title") not in EARLIER.get(made.name, []) and not tables.sections(
                Page(made.name, made.folder, {key: of[key] for key in of if key != "sizes"}, made.draws)):
            yield table.get("title")
    left = [f"## {title}" for title in EARLIER.get(made.name, [])]
    for section in re.split(r"\n(?=#)", text):
        table = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("|")]
        if table and (len(table) < 3 or not all(any(cell.strip() for cell in column) for column in zip(*table[2:]))):
            yield from {section.splitlines()[0]} - {*left}


def empty_panels(made):
    fig = made.own("figure")(made) if made.own("figure") else figures.figure(made)
    for ax in fig.axes if fig else ():
        if ax.axison and not (ax.lines or ax.collections or ax.images or ax.patches or ax.containers):
            yield ax.get_title()


def of_another_size(made, text):
    """Words of the home size, but those of settings and of the paper, and the name of a preset."""
    text = text.replace("task.preset=small", "")
    papers = [str(entry.get("paper", "")) for family in page.FAMILIES for entry in made.spec.get(family, [])]
    for quoted in sorted([*papers, *(f"{setting}{end}" for setting in made.settings for end in (":", ","))], key=len,
                         reverse=True):
        text = text.replace(quoted, "") if "small" in quoted else text
    return re.findall(r".{40}\bsmall\b.{40}|.*\bnan\b.*", text)


@pytest.mark.parametrize("name, size", [each if each in FAST else pytest.param(*each, marks=pytest.mark.slow)
                                        for each in SIZED])
def test_a_page_of_another_size_is_whole(name, size, tmp_path, monkeypatch):
    import matplotlib.pyplot as plt

    made = simulated(name, size, tmp_path, monkeypatch)
    text = render.text(made, False)
    found = {"absent": [*absent(made)], "tables": [*empty_tables(made, text)], "panels": [*empty_panels(made)],
             "words": of_another_size(made, text)}
    plt.close("all")
    assert not any(found.values()), found
