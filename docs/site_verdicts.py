"""The index of the reports, in the site: one table of all verdicts, which site.js filters by paper, report, verdict."""

import csv
import re
from functools import cache
from html import escape
from pathlib import Path

import yaml

REPORTS = Path("outputs/report")
VERDICTS = "report/index.md"
HEADER = ("paper", "report", "of", "verdict", "claim", "the paper's number", "value", "bar", "n",
          "p")
FILTERS = ("paper", "report", "of", "verdict")    # columns of which one value is chosen


def on_page_markdown(markdown, page, config, files):
    """The summary and the counts stay; a section for each page becomes rows of the table."""
    if page.file.src_uri != VERDICTS:
        return markdown
    top, counts = markdown.index("\n## "), markdown.index("\n## [")
    table = table_of_verdicts(Path(config.config_file_path).parent)
    return f"{markdown[:top]}\n{table}{markdown[top:counts]}"


def table_of_verdicts(root):
    """As HTML, one row a verdict of index.csv, below a choice for each column of FILTERS and a field for words."""
    with open(root / REPORTS / "index.csv", newline="", encoding="utf-8") as file:
        rows = [cells_of(row, paper_of(root, row["report"])) for row in csv.DictReader(file)]
    chosen = "".join(choice(place, name, rows) for place, name in enumerate(HEADER) if name in FILTERS)
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADER)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (f'<div class="verdicts"><p class="filters">{chosen}'
            '<label>words <input type="search"></label> <output></output></p>\n'
            f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n")


def choice(place, name, rows):
    values = sorted({re.sub("<[^>]*>", "", row[place]) for row in rows})
    options = "".join(f"<option>{value}</option>" for value in values)
    return f'<label>{name} <select data-column="{place}"><option value="">all</option>{options}</select></label> '


def cells_of(row, paper):
    half = f" ± {float(row['difference_ci95']):.2g}" if row["difference_ci95"] and row["n"] != "0" else ""
    difference = f"{float(row['difference']):+.3g}{half} {row['unit']}" if row["difference"] else ""
    chance = f"{float(row['p_holm']):.2g}" if row["p_holm"] else "not judged" if row["not_judged"] else ""
    report, whose = escape(row["report"]), "the paper" if row["family"] == "claims" else "own"
    return [escape(paper), f'<a href="../{report}/">{report}</a>', whose, escape(row["verdict"]), escape(row["claim"]),
            escape(row["paper"]), escape(row["value"] or difference), escape(row["bar"]),
            "exact" if row["n"] == "0" else row["n"], chance]


@cache
def paper_of(root, report):
    """The paper that a page looks at, before its authors in brackets; "none" of a page of own questions."""
    file = root / f"conf/report/{report}.yaml"
    source = yaml.safe_load(file.read_text(encoding="utf-8")).get("source", "") if file.is_file() else ""
    return re.split(r" \(|, ", source)[0] or "none"
