"""Long tables of the reports, in the site, which site.js filters: all verdicts in the index, by paper, report, verdict;
and below a page what it has as a csv, by table and column."""

import csv
import re
from functools import cache
from html import escape
from pathlib import Path

import yaml

REPORTS = Path("outputs/report")
VERDICTS = "report/index.md"
TABLES = "-tables.csv"
HEADER = ("paper", "report", "of", "verdict", "claim", "the paper's number", "value", "bar", "n",
          "p")
FILTERS = ("paper", "report", "of", "verdict")    # columns of which one value is chosen


def on_page_markdown(markdown, page, config, files):
    """The index gets its table below its summary, and a page that links a csv of tables these at its end."""
    root, name = Path(config.config_file_path).parent, Path(page.file.src_uri).stem
    if page.file.src_uri == VERDICTS:
        top = markdown.index("\n## ")
        return f"{markdown[:top]}\n{table_of_verdicts(root)}{markdown[top:]}"
    if f"]({name}{TABLES})" in markdown:
        return f"{markdown}\n## Long tables\n\n{long_tables(root / REPORTS / f'{name}{TABLES}')}"
    return markdown


def table_of_verdicts(root):
    """One row a verdict of index.csv."""
    with open(root / REPORTS / "index.csv", newline="", encoding="utf-8") as file:
        return filtered(HEADER, [cells_of(row, paper_of(root, row["report"])) for row in csv.DictReader(file)], FILTERS)


def long_tables(path):
    """One row a value of the tables of a page."""
    with open(path, newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    return filtered(header, [[escape(cell) for cell in row] for row in rows], ("table", "column"))


def filtered(header, rows, filters):
    """As HTML, below a choice for each column of `filters` and a field for words."""
    chosen = "".join(choice(place, name, rows) for place, name in enumerate(header) if name in filters)
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "\n".join("<tr>" + "".join(f'<td data-name="{name}">{cell}</td>' for name, cell in zip(header, row)) + "</tr>"
                     for row in rows)
    return (f'<div class="verdicts"><p class="filters">{chosen}'
            '<label>words <input type="search"></label> <output></output></p>\n'
            f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n")


def choice(place, name, rows):
    values = sorted({re.sub("<[^>]*>", "", row[place]) for row in rows})
    options = "".join(f"<option>{value}</option>" for value in values)
    return f'<label>{name} <select data-column="{place}"><option value="">all</option>{options}</select></label> '


def cells_of(row, paper):
    chance = f"{float(row['p_holm']):.2g}" if row["p_holm"] else "not judged" if row["not_judged"] else ""
    report, whose = escape(row["report"]), "the paper" if row["family"] == "claims" else "own"
    return [escape(paper), f'<a href="../{report}/">{report}</a>', whose, escape(row["verdict"]), escape(row["claim"]),
            escape(row["paper"]), escape(row["value"]), escape(row["bar"]),
            "exact" if row["n"] == "0" else row["n"], chance]


@cache
def paper_of(root, report):
    """The paper that a page looks at, before its authors in brackets; "none" of a page of own questions."""
    file = root / f"conf/report/{report}.yaml"
    source = yaml.safe_load(file.read_text(encoding="utf-8")).get("source", "") if file.is_file() else ""
    return re.split(r" \(|, ", source)[0] or "none"
