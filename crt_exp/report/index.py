"""make report: every verdict of the reports, on orderings that papers state and on bars and questions of our own, from
their csv files."""

import csv
import re
from collections import Counter
from pathlib import Path

from crt_exp.report.page import Page, names
from crt_exp.report.writing import csv_text, markdown
from crt_exp.runner.run import write_atomic

WORDS = ("confirmed", "refuted", "open", "conflict")
NAME = "index"


def main(folder: Path) -> None:
    """Raises ValueError where there is no report."""
    pages = sorted(path for path in folder.glob("*.md") if path.stem != NAME)
    if not pages:
        raise ValueError(f"no report in {folder}: make one first, such as `make fig2`")
    found = {page.stem: verdicts(page) for page in pages}
    path = folder / f"{NAME}.md"
    write_atomic(path, text(pages, found))
    write_atomic(path.with_suffix(".csv"), csv_text([{"report": name, **row} for name, rows in found.items()
                                                     for row in rows]))
    print(f"{summary(found)}\nwritten: {path}, {path.with_suffix('.csv')}")


def verdicts(page: Path) -> list[dict[str, str]]:
    """Of a page that conf/report declares, from its draws; of another, the rows of its csv that judge a claim."""
    if page.stem in names():
        rows = [verdict.row() for verdict in Page(page.stem, page.parent).verdicts]
        return [{key: str(value) for key, value in row.items()} for row in rows]
    path = page.with_suffix(".csv")
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("verdict")]
    return [{key: value for key, value in row.items() if value} for row in rows]


def text(pages: list[Path], found: dict[str, list[dict[str, str]]]) -> str:
    judged = [page for page in pages if found[page.stem]]
    silent = ", ".join(f"[{page.stem}]({page.name})" for page in pages if page not in judged)
    parts = ["# Verdicts: orderings of the papers, and bars and questions of our own\n", f"{summary(found)}\n",
             counts(judged, found)]
    parts += [section(page, found[page.stem]) for page in judged]
    return "\n".join([*parts, f"Reports without a verdict: {silent}." if silent else "",
                      "\nCommand: `make report`."]) + "\n"


def summary(found: dict[str, list[dict[str, str]]]) -> str:
    told = Counter(row["verdict"] for rows in found.values() for row in rows)
    unjudged = sum("not_judged" in row for rows in found.values() for row in rows)
    return (f"{sum(told.values())} verdicts in {sum(map(bool, found.values()))} reports: "
            f"{', '.join(f'{told[word]} {word}' for word in WORDS)}, {unjudged} of these because a gate failed.")


def counts(pages: list[Path], found: dict[str, list[dict[str, str]]]) -> str:
    rows = []
    for page in pages:
        told = Counter(row["verdict"] for row in found[page.stem])
        rows.append([f"[{page.stem}]({page.name})", *(told[word] for word in WORDS), made_by(page)])
    return markdown(["report", *WORDS, "commit"], rows)


def made_by(page: Path) -> str:
    """The commit that a page names."""
    told = re.search(r"(?:; |Code: )commit (\w+)", page.read_text(encoding="utf-8"))
    return told[1] if told else ""


def section(page: Path, rows: list[dict[str, str]]) -> str:
    shown = [[f"**{row['verdict']}**", row["claim"], difference(row), *chance(row)]
             for row in sorted(rows, key=lambda row: WORDS.index(row["verdict"]))]
    return f"## [{page.stem}]({page.name})\n\n" + markdown(["verdict", "claim", "difference", "n", "p"], shown)


def difference(row: dict[str, str]) -> str:
    """With its 95% interval, above 0 where the claim holds."""
    if "difference" not in row:
        return ""
    half = f" ± {number(row['difference_ci95'])}" if "difference_ci95" in row and not exact(row) else ""
    return f"{float(row['difference']):+.3g}{half} {row.get('unit', '')}".rstrip()


def chance(row: dict[str, str]) -> tuple[str, str]:
    """How many draws, and the p-value."""
    if exact(row):
        return "exact", ""
    return row.get("n", ""), number(row["p_holm"]) if "p_holm" in row else "not judged" if "not_judged" in row else ""


def exact(row: dict[str, str]) -> bool:
    """By a closed form, without any draw."""
    return row.get("n") == "0"


def number(value: str) -> str:
    return f"{float(value):.2g}"
