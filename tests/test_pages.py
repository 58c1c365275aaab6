"""README.md and docs/: links lead somewhere, names exist, and figures are those of the reports."""

import csv
import importlib
import re

import pytest
import words
import yaml
from helpers.pages import BLOCKS, PAGES, ROOT, project

from crt_exp.experiments.papers.parts.settings import FAMILIES
from crt_exp.experiments.papers.results import model_times
from crt_exp.experiments.papers.whole_models import BUILDS
from crt_exp.experiments.report import mean_ci
from crt_exp.experiments.report.rows import read_rows
from crt_exp.registry import choices


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            is_local = not target.startswith("https://")
            assert not is_local or (page.parent / target).exists(), (page, target)


def test_files_that_are_named_exist():
    """`tests/maps.py`, `conf/attention/`: what begins like a path of the repository is one, or a file of a recipe."""
    own = {block.title for block in BLOCKS if block.title}
    for page in PAGES:
        for path in re.findall(r"`((?:crt_exp|conf|tests|docs)/[\w./-]+)`", page.read_text()):
            assert path in own or (ROOT / path).exists(), (page, path)


def test_site_holds_every_page():
    site = re.findall(r": (\S+\.md)", (ROOT / "mkdocs.yml").read_text())
    pages = []
    for page in PAGES[1:]:
        pages.append(str(page.relative_to(ROOT / "docs")))
    assert sorted(site) == sorted(pages)


def test_site_lists_every_task():
    text = (ROOT / "docs" / "run.md").read_text()
    section = text.split("\n## Tasks\n")[1]
    section = section.split("\n## ")[0]
    listed = []
    for cell in re.findall(r"^\| (`[^|]+) \|", section, re.M):
        listed += re.findall(r"`(\w+)`", cell)
    assert sorted(listed) == sorted(choices("task"))


def test_files_of_pages_are_short():
    for path in (ROOT / "crt_exp" / "experiments" / "papers").rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 200, path


MEMBERS = re.compile(r"^::: (\S+)\n    options:\n      members: \[(.*)\]$", re.M)


def test_api_names_exist():
    for page in (ROOT / "docs" / "api").glob("*.md"):
        listed = MEMBERS.findall(page.read_text())
        assert listed
        for module_name, members in listed:
            module = importlib.import_module(module_name)
            for name in members.split(", "):
                assert getattr(module, name).__doc__, f"{module_name}.{name}"


NUMBER = re.compile(r"(?<![\w.=])\d+\.\d+(?:e-?\d+)?|(?<![\w.=])\d{3,}(?![\w.])")


def paragraphs_with_reports():
    """Paragraphs and rows of tables that link a page of results."""
    for page in PAGES:
        for text in re.split(r"\n\n|\n(?=[|-] )", page.read_text()):
            if "outputs/report/" in text and not text.startswith("```"):
                yield page, text


def linked_reports(page, text):
    files = set()
    for link in re.findall(r"\]\(([^)]*outputs/report/[^)]+)\)", text):
        files.add((page.parent / link).with_suffix(".md"))
    return "".join(file.read_text() for file in files if file.is_file())


def test_numbers_beside_a_report_are_its_own():
    """Decimals and counts of three digits in a paragraph or a row stand in one of the pages that it links."""
    paragraphs = [*paragraphs_with_reports()]
    assert paragraphs
    for page, text in paragraphs:
        reports = linked_reports(page, text)
        for number in NUMBER.findall(text):
            is_reported = re.search(rf"(?<![\d.]){number}(?!\d)", reports)
            assert is_reported, (page, text, number)


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
                cells = line.strip("| ").split(" | ")
                rows.append([cell.strip() for cell in cells])
        if rows and rows[0][0] == head:
            for row in rows[2:]:
                yield dict(zip(rows[0], row))


def test_losses_of_a_swap_are_those_of_the_page():
    swap = read_rows("swap", ROOT / "outputs/report")
    table = [*tables_of("SmolLM2-135M-Instruct")]
    assert len(table) == len(METHODS)
    for row in table:
        method = METHODS[row["SmolLM2-135M-Instruct"]]
        for text, column in {"new text": "new text", "repeated": "repeated passage"}.items():
            where = {"model": "SmolLM2-135M", "length": 4096, "text": text}
            mean = mean_ci(swap.values("above", method, **where))
            assert row[column] == f"{mean:.3f}", (method, column)


def test_counts_of_verdicts_are_those_of_the_claims():
    with (ROOT / "outputs/report/claims.csv").open(newline="") as file:
        verdicts = [row["verdict"] for row in csv.DictReader(file) if row["paper"]]
    counts = {}
    for kind in ("supported", "contradicted", "inconclusive"):
        counts[kind] = sum(verdict.startswith(kind) for verdict in verdicts)
    rest = len(verdicts) - sum(counts.values())
    listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"{listed}, {rest} not measured or judged" in text


def test_times_of_a_swap_are_those_of_the_page():
    times = model_times(read_rows("whole_models", ROOT / "outputs/report"))
    measured = {FAMILIES[family]: builds for family, builds in times.items()}
    for row in tables_of("SmolLM2-135M-Instruct"):
        builds = measured.get(METHODS[row["SmolLM2-135M-Instruct"]].split()[0], {})
        for build in BUILDS:
            expected = f"{1 / builds[build]:.2f}" if build in builds else ""
            assert row.get(f"speed, {build}", "") == expected


def test_accuracies_of_maps_are_those_of_the_page():
    """In descending order, from the main table of the page."""
    (row,) = tables_of("128 columns")
    page = (ROOT / "outputs/report/crt_uci.md").read_text()
    values = []
    for name, value in row.items():
        if name != "128 columns":
            values.append(value)
    numbers = []
    for value in values:
        numbers.append(float(value.split()[0]))
    assert numbers == sorted(numbers, reverse=True)
    for value in values:
        assert f"| {value} |" in page
