"""README.md and docs/: links lead somewhere, names exist, and figures are those of the reports."""

import csv
import importlib
import re
from importlib.util import module_from_spec, spec_from_file_location

import pytest
import yaml
from pages import BLOCKS, PAGES, ROOT, project

from crt_exp.config import choices
from crt_exp.oldreport.page import Page, shown


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
    target = re.sub("^(make|python -m crt_exp.oldreport) ", "", asked).replace("_", "-")
    assert command.strip("`").removeprefix("make ") == target
    seconds = float(re.search(r"(\d+) s of computing", report)[1])
    assert abs(int(minutes) - seconds / 60) < 1


def paragraphs_on_reports():
    for page in PAGES:
        for text in re.split(r"\n\n|\n(?=[|-] )", page.read_text()):
            if "outputs/report/" in text and not text.startswith("```"):
                yield pytest.param(page, text, id=f"{page.stem}: {text[:30]}")


@pytest.mark.parametrize("page, text", list(paragraphs_on_reports()))
def test_numbers_beside_a_report_are_its_own(page, text):
    """Decimals and counts of three digits that a paragraph or a row tells stand in one of the reports that it links, or
    in its csv of tables."""
    links = {(page.parent / link).with_suffix("") for link in re.findall(r"\]\(([^)]*outputs/report/[^)]+)\)", text)}
    files = [link.with_name(link.name + end) for link in links for end in (".md", "-tables.csv")]
    reports = "".join(file.read_text() for file in files if file.is_file())
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


# The front page's tables: (first cell of the head) -> the attention of each column, or the column of each attention.
MODELS = {"new text": ("plain, 4096 tokens", "above", "", None, ".3f"),
          "a passage said again": ("said again, 4096 tokens", "above", "", None, ".3f"),
          "LibriSpeech": ("LibriSpeech", "wer", "", None, ".1f"),
          "cosine": ("texts of WikiText-2", "cosine", "", 512, ".3f")}
CAUSAL = {"near-far": "nearfar", "window and first tokens": "window block=64 first=16",
          "FAVOR++, m = 256": "favorpp m=256", "uniform": "uniform", "exact": "exact"}
BOTH = {"cosine": CAUSAL | {"near-far": "nearfar exact_until=0"}}


def tables_of(head):
    """Rows of the front page's tables whose head begins with these words: {column: cell}."""
    for text in (ROOT / "README.md").read_text().split("\n\n"):
        rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines()
                if line.startswith("| ")]
        if rows and rows[0][0] == head:
            yield from (dict(zip(rows[0], row)) for row in rows[2:])


def test_what_models_lose_is_that_of_the_page():
    """Every cell is of the column's own attention, by the committed draws, or says that it was not measured."""
    page, rows = Page("pretrained"), [*tables_of("directly after the swap")]
    assert len(rows) == len(MODELS)
    for row in rows:
        (name,) = (name for name in MODELS if name in row["directly after the swap"])
        setting, metric, table, x, spec = MODELS[name]
        for column, arm in BOTH.get(name, CAUSAL).items():
            values = page.values(metric, setting, arm, table=table, x=x)
            itself = {"above": "0", "cosine": "1"}.get(metric) if arm == "exact" else None
            assert row[column] == (itself or shown(values, spec) or "not measured"), (name, column)


# ---- the front


COLUMNS = {"Nystroem": ("Nystroem m=128", ""), "geom": ("geom", "geom"), "oprf": ("oprf", "oprf"),
           "trig": ("trig m=64", "trig"), "RBFSampler": ("RBFSampler m=128", ""), "gerf": ("gerf m=64", "gerf"),
           "pos": ("pos", "pos"), "exact kernel": ("exact", ""), "majority class": ("majority", "")}


def test_maps_are_ranked_at_equal_columns():
    """The front page's table, in descending order of that column, from the draws."""
    page, rows = Page("table1"), [*tables_of("features")]
    ranked = [float(row["128 columns"].split()[0]) for row in rows]
    assert len(rows) == len(COLUMNS) and ranked == sorted(ranked, reverse=True)
    for row in rows:
        name = row["features"].split(":")[0].strip("`")
        for column, arm in zip(("128 columns", "128 projections"), COLUMNS[name]):
            values = page.values("accuracy", "average", arm)
            assert row.get(column, "").strip("| ") == shown(values, ".1f", page.interval), (name, column)


def test_what_is_too_long_for_a_page_is_a_csv_that_the_site_filters():
    site = hook("site_verdicts")
    for path in (ROOT / "outputs/report").glob("*-tables.csv"):
        page = path.with_name(path.name.replace("-tables.csv", ".md"))
        assert f"]({path.name})" in page.read_text()
    table = site.long_tables(ROOT / "outputs/report/hadamard-tables.csv")
    assert '<select data-column="0">' in table and table.count("<tr>") > 300 and 'data-name="row"' in table
