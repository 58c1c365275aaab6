"""README.md and docs/: links lead somewhere, names exist, and figures are those of the reports."""

import csv
import importlib
import re
from importlib.util import module_from_spec, spec_from_file_location

import pytest
import yaml
from pages import BLOCKS, PAGES, ROOT, project

from crt_exp.config import choices


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_are_named_exist(page):
    """`tests/maps.py`, `conf/attention/`: what begins like a path of the repository is one, or a file of a recipe."""
    own = {block.title for block in BLOCKS if block.title}
    for path in re.findall(r"`((?:crt_exp|conf|tests|docs)/[\w./-]+)`", page.read_text()):
        assert path in own or (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_picture_has_a_text(page):
    text = page.read_text()
    assert all(told.strip() for told in re.findall(r"!\[(.*?)\]\(", text)) and "<img" not in text


def hook(name):
    """A module of docs/ that mkdocs loads."""
    spec = spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_of_verdicts_holds_the_index():
    """What site.js filters: a row a verdict, and choices that are values of their columns."""
    site = hook("site_verdicts")
    table = site.table_of_verdicts(ROOT)
    with open(ROOT / "outputs/report/index.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert table.count("<tr>") == 1 + len(rows)
    for place in (0, 1, 2, 3):
        options = re.search(rf'<select data-column="{place}">(.*?)</select>', table)[1]
        assert options.count("<option>") > 1
    assert site.paper_of(ROOT, "fig3") == "Chefs' Random Tables" and site.paper_of(ROOT, "copying") == "none"


def test_site_holds_every_page():
    nav = re.findall(r": (\S+\.md)", (ROOT / "mkdocs.yml").read_text())
    assert sorted(nav) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES[1:])


def test_api_names_exist():
    for page in (ROOT / "docs" / "api").glob("*.md"):
        found = re.findall(r"^::: (\S+)\n    options:\n      members: \[(.*)\]$", page.read_text(), re.M)
        assert found
        for module, members in found:
            for name in members.split(", "):
                assert getattr(importlib.import_module(module), name).__doc__, f"{module}.{name}"


def table_of_tasks():
    """The rows of the front page's table, a task or two in each."""
    page = (ROOT / "README.md").read_text()
    lines = [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in cells] for cells in lines if len(cells) == 5]
    return [cells for cells in rows if not cells[0].startswith(("task", "---"))]


def rows_of_tasks():
    """Those whose report is there."""
    for cells in table_of_tasks():
        if "](outputs/report/" in cells[4]:
            yield pytest.param(*cells, id=cells[0].split(":")[0])


@pytest.mark.parametrize("task, data, command, minutes, result", list(rows_of_tasks()))
def test_command_and_time_are_those_of_the_report(task, data, command, minutes, result):
    """The command is that of the report which the row links, and so is the time."""
    report = (ROOT / re.search(r"\]\((outputs/report/[^)]+)\)", result)[1]).read_text()
    asked = re.search(r"Command: `([^`]+)`", report)[1].removesuffix(" --size small")
    target = re.sub("^(make|python -m crt_exp.report) ", "", asked).replace("_", "-")
    assert command.strip("`").removeprefix("make ") == target
    seconds = float(re.search(r"(\d+) s of computing", report)[1])
    assert abs(int(minutes) - seconds / 60) < 1


def test_pictures_of_the_site_open_in_full_size():
    """But for those that lead elsewhere, as in the gallery's index."""
    site = hook("site_pictures")
    lone, led = '<img alt="a" src="../b.png" />', '<a href="c/"><img alt="d" src="d.png" /></a>'
    shown = site.on_page_content(f"<p>{lone}</p><p>{led}</p>", None, None, None)
    assert shown == f'<p><a href="../b.png" title="full size">{lone}</a></p><p>{led}</p>'


def paragraphs_on_reports():
    for page in PAGES:
        for text in re.split(r"\n\n|\n(?=[|-] )", page.read_text()):
            if "outputs/report/" in text and not text.startswith("```"):
                yield pytest.param(page, text, id=f"{page.stem}: {text[:30]}")


@pytest.mark.parametrize("page, text", list(paragraphs_on_reports()))
def test_numbers_beside_a_report_are_its_own(page, text):
    """Decimals and counts of three digits that a paragraph or a row tells stand in one of the reports that it links."""
    links = re.findall(r"\]\(([^)]*outputs/report/[^)]+)\)", text)
    reports = "".join((page.parent / link).with_suffix(".md").read_text() for link in links)
    told = re.sub(r"` \| \d+ \| ", "", text)  # minutes are another test's
    numbers = re.findall(r"(?<![\w.=])\d+\.\d+(?:e-?\d+)?|(?<![\w.=])\d{3,}(?![\w.])", told)
    assert not [number for number in numbers if not re.search(rf"(?<![\d.]){number}(?!\d)", reports)]


def test_tasks_of_the_front_page_exist():
    """It names those with a report; the page of commands names all."""
    page = (ROOT / "docs" / "commands.md").read_text().split("## Tasks and their data")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == set(choices("task"))
    named = {name for row in table_of_tasks() for name in re.findall(r"`(\w+)`", row[0])}
    assert named <= set(choices("task"))


def test_citation_and_version_agree():
    import crt_exp

    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == project()["version"] == crt_exp.__version__ and cited["license"] == project()["license"]
    assert all({"title", "authors", "year"} <= set(paper) for paper in cited["references"])
