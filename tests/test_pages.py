"""README.md and docs/: links lead somewhere, names exist, and figures are those of the reports."""

import importlib
import re

import pandas as pd
import pytest
import yaml
from pages import BLOCKS, PAGES, ROOT, project

from crt_exp.config import choices
from crt_exp.report import mean_ci, pages
from crt_exp.report.rows import read_rows


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
def test_command_and_time_are_those_of_the_page(task, data, command, minutes, result):
    """The command makes a sweep of the page that the row links, and the time is that of its runs."""
    target = command.strip("`").removeprefix("make ")
    name = re.search(r"\]\(outputs/report/([^)]+)\.md\)", result)[1]
    assert pages.load(target).page.name == name
    frame = read_rows(name, ROOT / "outputs/report").frame
    seconds = pd.to_numeric(frame.loc[frame["sweep"].str.match(f"{target}(/|$)"), "seconds"], errors="coerce").sum()
    assert abs(int(minutes) - seconds / 60) < 1


def paragraphs_on_reports():
    for page in PAGES:
        for text in re.split(r"\n\n|\n(?=[|-] )", page.read_text()):
            if "outputs/report/" in text and not text.startswith("```"):
                yield pytest.param(page, text, id=f"{page.stem}: {text[:30]}")


@pytest.mark.parametrize("page, text", list(paragraphs_on_reports()))
def test_numbers_beside_a_report_are_its_own(page, text):
    """Decimals and counts of three digits in a paragraph or a row stand in one of the pages that it links."""
    links = {(page.parent / link).with_suffix("") for link in re.findall(r"\]\(([^)]*outputs/report/[^)]+)\)", text)}
    reports = "".join(link.with_suffix(".md").read_text() for link in links if link.with_suffix(".md").is_file())
    told = re.sub(r"` \| \d+ \| ", "", text)  # minutes are another test's
    numbers = re.findall(r"(?<![\w.=])\d+\.\d+(?:e-?\d+)?|(?<![\w.=])\d{3,}(?![\w.])", told)
    assert not [number for number in numbers if not re.search(rf"(?<![\d.]){number}(?!\d)", reports)]


def test_tasks_of_the_front_page_exist():
    """It names those with a report; docs/run.md names all."""
    page = (ROOT / "docs" / "run.md").read_text().split("\n## Tasks\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", page, re.M)
    assert sorted(name for cell in cells for name in re.findall(r"`(\w+)`", cell)) == sorted(choices("task"))
    named = {name for row in table_of_tasks() for name in re.findall(r"`(\w+)`", row[0])}
    assert named <= set(choices("task"))


def test_citation_and_version_agree():
    import crt_exp

    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == project()["version"] == crt_exp.__version__ and cited["license"] == project()["license"]
    assert all({"title", "authors", "year"} <= set(paper) for paper in cited["references"])


# The front page's tables: cell of the first column -> where its values are, and the method of each column.
SMOLLM2 = {"metric": "above", "model": "SmolLM2-135M", "length": 4096}
MODELS = {"new text": (SMOLLM2 | {"text": "new text"}, 1, ".3f"),
          "repeated passage": (SMOLLM2 | {"text": "repeated"}, 1, ".3f"),
          "LibriSpeech": ({"metric": "wer", "text": "utterances"}, 100, ".1f"),
          "cosine": ({"metric": "cosine", "text": "new text", "length": 512, "sweep": "pretrained/embeddings"}, 1,
                     ".3f")}
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
    """Every cell has the values of its column's attention in the committed rows."""
    rows, cells = read_rows("swap", ROOT / "outputs/report"), [*tables_of("without training")]
    assert len(cells) == len(MODELS)
    for row in cells:
        (name,) = (name for name in MODELS if name in row["without training"])
        where, scale, spec = MODELS[name]
        for column, method in BOTH.get(name, CAUSAL).items():
            values = scale * rows.values(method=method, **where)
            itself = {"above": "0", "cosine": "1"}.get(where["metric"]) if method == "exact" else None
            ends = f"{values.min():.0f} to {values.max():.0f}"  # of few samples
            assert row[column] in (itself, f"{mean_ci(values):{spec}}", ends), (name, column)


# ---- the front


COLUMNS = {"Nystroem": ("Nystroem m=128", ""), "geom": ("geom", "geom"), "oprf": ("oprf", "oprf"),
           "trig": ("trig m=64", "trig"), "RBFSampler": ("RBFSampler m=128", ""), "gerf": ("gerf m=64", "gerf"),
           "pos": ("pos", "pos"), "exact kernel": ("exact", ""), "majority class": ("majority", "")}


def test_maps_are_ranked_at_equal_columns():
    """The front page's table, in descending order of that column, from the main table of the page."""
    rows = [*tables_of("features")]
    ranked = [float(row["128 columns"].split()[0]) for row in rows]
    page = (ROOT / "outputs/report/crt_uci.md").read_text()
    assert len(rows) == len(COLUMNS) and ranked == sorted(ranked, reverse=True)
    for row in rows:
        for value in (row["128 columns"], row.get("128 projections", "")):
            assert value.strip("| ") in page, row
