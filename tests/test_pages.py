"""README.md and docs/: links lead somewhere, names exist, and figures are those of the reports."""

import importlib
import re

import pytest
import words
import yaml
from helpers.pages import BLOCKS, PAGES, ROOT, project

from crt_exp.experiments.papers.results import SPEED, times
from crt_exp.experiments.papers.swap import COMMON
from crt_exp.experiments.report import mean_ci
from crt_exp.experiments.report.rows import read_rows
from crt_exp.registry import choices


def test_links_and_files_that_are_named_exist():
    """`tests/maps.py`, `conf/attention/`: what begins like a path of the repository is one, or a file of a recipe."""
    own = {block.title for block in BLOCKS if block.title}
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), (page, target)
        for path in re.findall(r"`((?:crt_exp|conf|tests|docs)/[\w./-]+)`", page.read_text()):
            assert path in own or (ROOT / path).exists(), (page, path)


def test_site_holds_every_page_and_every_task():
    nav = re.findall(r": (\S+\.md)", (ROOT / "mkdocs.yml").read_text())
    actual = sorted(nav)
    expected = sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES[1:])
    assert actual == expected
    page = (ROOT / "docs" / "run.md").read_text().split("\n## Tasks\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", page, re.M)
    actual = sorted(name for cell in cells for name in re.findall(r"`(\w+)`", cell))
    expected = sorted(choices("task"))
    assert actual == expected


def test_api_names_exist():
    for page in (ROOT / "docs" / "api").glob("*.md"):
        found = re.findall(
            r"^::: (\S+)\n    options:\n      members: \[(.*)\]$", page.read_text(), re.M
        )
        assert found
        for module, members in found:
            for name in members.split(", "):
                assert getattr(importlib.import_module(module), name).__doc__, f"{module}.{name}"


def test_numbers_beside_a_report_are_its_own():
    """Decimals and counts of three digits in a paragraph or a row stand in one of the pages that it links."""
    paragraphs = []
    for page in PAGES:
        for text in re.split(r"\n\n|\n(?=[|-] )", page.read_text()):
            if "outputs/report/" in text and not text.startswith("```"):
                paragraphs.append((page, text))
    assert paragraphs
    for page, text in paragraphs:
        links = re.findall(r"\]\(([^)]*outputs/report/[^)]+)\)", text)
        files = {(page.parent / link).with_suffix(".md") for link in links}
        reports = "".join(file.read_text() for file in files if file.is_file())
        numbers = re.findall(r"(?<![\w.=])\d+\.\d+(?:e-?\d+)?|(?<![\w.=])\d{3,}(?![\w.])", text)
        odd = [number for number in numbers if not re.search(rf"(?<![\d.]){number}(?!\d)", reports)]
        assert not odd, (page, text)


@pytest.mark.slow
def test_words_and_sentences_are_plain():
    assert not [*words.hits()]


def test_citation_and_version_agree():
    import crt_exp

    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == project()["version"] == crt_exp.__version__
    assert cited["license"] == project()["license"]
    for paper in cited["references"]:
        assert {"title", "authors", "year"} <= set(paper)


# ---- the tables of README.md


METHODS = {
    "near-far attention": "nearfar",
    "window": "window block=64 first=16",
    "FAVOR++, m = 256": "favorpp m=256",
    "uniform attention": "uniform",
}


def tables_of(head):
    """Rows of the front page's tables whose head begins with these words: {column: cell}."""
    for text in (ROOT / "README.md").read_text().split("\n\n"):
        rows = []
        for line in text.splitlines():
            if line.startswith("| "):
                rows.append([cell.strip() for cell in line.strip("| ").split(" | ")])
        if rows and rows[0][0] == head:
            yield from (dict(zip(rows[0], row)) for row in rows[2:])


def test_cost_of_a_swap_is_that_of_the_page():
    swap, speed = (read_rows(name, ROOT / "outputs/report") for name in ("swap", "perf_speed"))
    spent = {
        SPEED[name]: each[4096] for name, each in times(speed, " causal").items() if 4096 in each
    }
    rows = [*tables_of("SmolLM2-135M")]
    assert len(rows) == len(METHODS)
    for row in rows:
        method = METHODS[row["SmolLM2-135M"]]
        for text, column in {"new text": "new text", "repeated": "repeated passage"}.items():
            values = swap.values(
                "above", method, model="SmolLM2-135M", length=4096, text=text, **COMMON
            )
            assert row[column] == f"{mean_ci(values):.3f}", (method, column)
        name = method.split()[0]
        actual = row.get("time of a training step", "")
        assert actual == (f"{spent[name]:.2g}" if name in spent else "")


def test_accuracies_of_maps_are_those_of_the_page():
    """In descending order, from the main table of the page."""
    (row,) = tables_of("128 columns")
    page = (ROOT / "outputs/report/crt_uci.md").read_text()
    values = [value for name, value in row.items() if name != "128 columns"]
    numbers = [float(value.split()[0]) for value in values]
    assert numbers == sorted(numbers, reverse=True)
    for value in values:
        assert f"| {value} |" in page
