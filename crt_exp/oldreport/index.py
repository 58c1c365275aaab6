"""make report: every verdict of the reports, on orderings that papers state and on bars and questions of our own, from
their csv files: counted in index.md, each a row of index.csv."""

import re
from collections import Counter
from pathlib import Path

import pandas as pd

from crt_exp.drawing import markdown
from crt_exp.oldreport.evidence import WORDS
from crt_exp.oldreport.page import FAMILIES, Page, names
from crt_exp.runner.run import write_atomic

NAME = "index"
WITHOUT = (NAME, "decide")  # judge nothing themselves


def main(folder: Path) -> None:
    """Raises ValueError where there is no report."""
    pages = sorted(path for path in folder.glob("*.md") if path.stem not in WITHOUT)
    if not pages:
        raise ValueError(f"no report in {folder}: make one first, such as `make fig2`")
    rows_of = {page.stem: verdicts(page) for page in pages}
    path = folder / f"{NAME}.md"
    write_atomic(path, text(pages, rows_of))
    table = pd.DataFrame([{"report": name, **row} for name, rows in rows_of.items() for row in rows])
    write_atomic(path.with_suffix(".csv"), table.to_csv(index=False, lineterminator="\n"))
    print(f"{summary(rows_of)}\nwritten: {path}, {path.with_suffix('.csv')}")


def verdicts(page: Path) -> list[dict[str, str]]:
    """Of a page that conf/report declares, from its draws; of others none."""
    rows = Page(page.stem, page.parent).rows() if page.stem in names() else []
    return [{key: str(value) for key, value in row.items()} for row in rows]


def text(pages: list[Path], verdicts_of: dict[str, list[dict[str, str]]]) -> str:
    judged = [page for page in pages if verdicts_of[page.stem]]
    silent = ", ".join(f"[{page.stem}]({page.name})" for page in pages if page not in judged)
    parts = ["# Verdicts: the papers' claims, and bars and questions of our own\n", f"{summary(verdicts_of)}\n"]
    parts += [f"## {heading}\n\n{counts(judged, verdicts_of, family)}" for family, heading in FAMILIES.items()]
    parts += [f"Every verdict with value, bar, number of units and p-value: [{NAME}.csv]({NAME}.csv); the site filters "
              "them by paper, page, verdict and words.\n"]
    return "\n".join([*parts, f"Reports without a verdict: {silent}." if silent else "",
                      "\nCommand: `make report`."]) + "\n"


def summary(verdicts_of: dict[str, list[dict[str, str]]]) -> str:
    """One line for each family."""
    lines = []
    for family, heading in FAMILIES.items():
        rows = [row for rows in verdicts_of.values() for row in rows if row["family"] == family]
        count = Counter(row["verdict"] for row in rows)
        unjudged = sum("not_judged" in row for row in rows)
        lines.append(f"{heading}: {len(rows)} verdicts: {', '.join(f'{count[word]} {word}' for word in WORDS)}, "
                     f"{unjudged} of these because a gate failed.")
    return "\n\n".join(lines)


def counts(pages: list[Path], verdicts_of: dict[str, list[dict[str, str]]], family: str) -> str:
    rows = []
    for page in pages:
        count = Counter(row["verdict"] for row in verdicts_of[page.stem] if row["family"] == family)
        if count:
            rows.append([f"[{page.stem}]({page.name})", *(count[word] for word in WORDS), made_by(page)])
    return markdown(["report", *WORDS, "commit"], rows)


def made_by(page: Path) -> str:
    """The commit that a page names."""
    match = re.search(r"(?:; |Code: )commit (\w+)", page.read_text(encoding="utf-8"))
    return match[1] if match else ""
