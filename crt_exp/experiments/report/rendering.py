"""Markdown and picture of a page, from its rows.

The Markdown shows claims, figure and first table; further tables and the description of the measurement are folded.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crt_exp.experiments.drawing import markdown, save_figure
from crt_exp.experiments.report.claims import WORDS, CaseResult
from crt_exp.experiments.report.pages import Page
from crt_exp.experiments.report.rows import FOLDER, Rows, read_rows, rows_path
from crt_exp.experiments.report.tables import Tables, to_markdown, with_index
from crt_exp.experiments.runner.run import write_atomic

QUOTED = ", paper"  # ends the label of a row with the paper's values of a method
LONG = 40  # maximum rows of a folded table; longer tables are left out
NO_TABLE = "No table: the values need rows of other sweeps, methods or seeds."
INTERVAL = (
    "Claim intervals are Holm-corrected over the page, and all other intervals are plain 95% CIs. A claim interval "
    "excludes the threshold where the claim is supported or contradicted."
)


def render(
    page: Page, folder: Path = FOLDER, size: str = "small", part: str = ""
) -> list[CaseResult]:
    """Write <page>.md and <page>.png from the rows in `folder`; return the verdicts.

    part: command-line options of a partial page (some methods or seeds), which has no verdicts.
    """
    rows = read_rows(page.name, folder)
    results = [] if part else page.verdicts(rows, size)
    is_drawn = draw(page, rows, folder / f"{page.name}.png")
    text = page_text(page, rows, results, is_drawn, folder, size, part)
    write_atomic(folder / f"{page.name}.md", text)
    return results


def draw(page: Page, rows: Rows, path: Path) -> bool:
    """Save the figure of a page; return whether the rows give one."""
    figure = page.figure(rows) if page.figure else None
    if figure is None:
        return False
    import matplotlib.pyplot as plt

    figure.tight_layout()
    remove_empty_axes(figure)
    if figure.axes:
        save_figure(figure, path)
    plt.close(figure)
    return bool(figure.axes)


def remove_empty_axes(figure: Any) -> None:
    """Remove axes that show no value of a row."""
    for ax in figure.axes:
        lines = [line for line in ax.lines if line.get_transform() == ax.transData]
        if not (lines or ax.images or ax.collections):
            ax.remove()


def first_table(page: Page, folder: Path = FOLDER, part: str = "") -> str:
    """Format the first table of a page for the terminal."""
    tables = measured_tables(page.tables(read_rows(page.name, folder)), part)
    if not tables:
        return NO_TABLE
    title, table = next(iter(tables.items()))
    return f"{title}\n{with_index(table).astype(str).to_string(index=False)}"


def page_text(
    page: Page,
    rows: Rows,
    results: Sequence[CaseResult],
    is_drawn: bool,
    folder: Path,
    size: str,
    part: str,
) -> str:
    sections = [f"# {page.title}", _summary(page, rows, size, part)]
    by_claim = groupby(results, lambda result: id(result.claim))
    sections.append("\n".join(claim_line([*cases]) for _, cases in by_claim))
    if is_drawn:
        sections.append(f"![{page.title}]({page.name}.png)")
    tables = measured_tables(page.tables(rows), part)
    if not tables:
        sections.append(NO_TABLE)
    for title, table in [*tables.items()][:1]:
        sections.append(f"## {title}\n\n{to_markdown(table)}")
    sections.append(details("All claims", claims_table(results)))
    for title, table in [*tables.items()][1:]:
        if len(table) <= LONG:
            sections.append(details(title, to_markdown(table)))
    measurement = measurement_details(page, rows, folder, size, part)
    sections.append(details("How it was measured", measurement))
    return "\n\n".join(section.rstrip() for section in sections if section) + "\n"


def _summary(page: Page, rows: Rows, size: str, part: str) -> str:
    """Return the finding, or the part or size that the rows have."""
    if part:
        return f"Part: {part}."
    if size != "small":
        return f"SIZE={size}."
    return page.finding_text(rows)


def measurement_details(page: Page, rows: Rows, folder: Path, size: str, part: str) -> str:
    frame = rows.frame
    days = sorted({*frame["date"]} - {""})
    period = f"{days[0]} to {days[-1]}" if len(days) > 1 else "".join(days)
    seconds = pd.to_numeric(frame["seconds"], errors="coerce").sum()
    command = f"python -m crt_exp report {page.name} --run"
    if size != "small":
        command += f" --size {size}"
    if part:
        command += f" {part}"
    path = rows_path(page.name, folder).name
    bullets = [
        *page.measured,
        f"Rows: [{path}]({path}), {len(frame)} values, {period}, {seconds:.0f} s of computing.",
        "; ".join(frame["versions"].unique()) + ".",
        f"Command: `{command}`. Commits: {commits_of(frame)}.",
    ]
    return "\n".join(f"- {bullet}" for bullet in bullets)


def commits_of(frame: pd.DataFrame) -> str:
    """List the commits of rows, with the share of rows from trees with uncommitted changes.

    >>> commits_of(pd.DataFrame({"commit": ["b1+", "a2", "a2", "a2"]}))
    'a2, b1+ (+: uncommitted changes, 25% of the values)'
    """
    commits = frame["commit"].astype(str)
    listed = ", ".join(sorted({*commits} - {""})) or "none"
    changed = commits.str.endswith("+").mean()
    return f"{listed} (+: uncommitted changes, {changed:.0%} of the values)" if changed else listed


# ---- claims


def claim_line(results: Sequence[CaseResult]) -> str:
    """Format a claim, with all its cases, as one Markdown bullet: the sentence, the verdicts, ours, the paper's."""
    first = results[0]
    claim = first.claim
    papers = [result.paper for result in results if result.paper]
    part = "" if len(papers) == len(results) else f" ({len(papers)} of {len(results)} cases)"
    paper = f" Paper{part}: {papers[0]}." if len({*papers}) == 1 else ""
    sentence = f"- {claim.text[0].upper()}{claim.text[1:]}."
    if claim.untested:
        return f"{sentence} **{first.verdict.capitalize()}**: {claim.untested}.{paper}"
    if len(results) == 1:
        case = f" ({first.case})" if first.case else ""
        check = f" Sanity check: {first.check}." if first.check else ""
        return (
            f"{sentence} **{first.verdict.capitalize()}**{case}: {first.to_text()}.{paper}{check}"
        )
    ordered = sorted(results, key=lambda result: WORDS.index(result.base_verdict))
    counts = Counter(result.verdict for result in ordered)
    verdicts = ", ".join(f"{verdict} in {count}" for verdict, count in counts.items())
    numbers = [result.number for result in results]
    base = "e^" if claim.power else ""
    ends = f"{base}{min(numbers):.3g} to {base}{max(numbers):.3g} {claim.shown_unit}".rstrip()
    return f"{sentence} **{verdicts.capitalize()}** of {len(results)} cases: {ends}.{paper}"


def claims_table(results: Sequence[CaseResult]) -> str:
    """Format all cases as a Markdown table; above LONG cases, link claims.csv; none as ""."""
    tested = [result for result in results if not result.claim.untested]
    if not tested:
        return ""
    if len(tested) > LONG:
        return (
            f"{len(tested)} cases: the rows of this page in [claims.csv](claims.csv).\n\n{INTERVAL}"
        )
    table = markdown(pd.DataFrame([_claims_row(result) for result in tested]))
    return f"{table}\n{INTERVAL}"


def _claims_row(result: CaseResult) -> dict[str, Any]:
    n = result.estimate.n
    notes = [result.check, result.equality, theory(result), result.claim.reason]
    return {
        "claim": result.claim.text,
        "case": result.case,
        "ours": result.to_text(),
        "threshold": threshold(result),
        "paper": result.paper,
        "n": n or "exact",
        "p": f"{result.p:.2g}" if n > 1 and not np.isnan(result.p) else "",
        "verdict": result.verdict,
        "note": "; ".join(note for note in notes if note),
    }


def threshold(result: CaseResult) -> str:
    claim = result.claim
    if claim.between:
        return f"between {claim.above:g} and {claim.below:g}"
    base = "e^" if claim.power else ""
    value = result.threshold or float(claim.log)
    return f"{result.side} {base}{value:g}"


def theory(result: CaseResult) -> str:
    closed_form = result.claim.theory.get(result.case)
    if closed_form is None:
        return ""
    if result.claim.log:
        closed_form = np.exp(closed_form)
    return f"theory: {closed_form:.3g}"


def claims_frame(page: str, results: Sequence[CaseResult]) -> pd.DataFrame:
    """Return one row per case, for claims.csv."""
    table = []
    for result in results:
        claim = result.claim
        low, high = result.ends
        table.append(
            {
                "page": page,
                "claim": claim.text,
                "case": result.case,
                "verdict": result.verdict,
                "value": result.number,
                "low": low,
                "high": high,
                "threshold": threshold(result),
                "unit": claim.shown_unit,
                "n": result.estimate.n,
                "p_holm": result.p,
                "paper": result.paper,
                "theory": theory(result),
                "sanity_check": result.check,
                "reason": claim.reason or claim.untested,
                "needs": claim.needs,
            }
        )
    return pd.DataFrame(table)


# ---- tables


def details(summary: str, text: str) -> str:
    """Wrap text in a folded HTML section, for GitHub and the website; no text as ""."""
    if not text:
        return ""
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{text}\n\n</details>'


def measured_tables(tables: Mapping[str, pd.DataFrame], part: str) -> Tables:
    """Leave out tables and rows without a measured value; in a partial page, columns too.

    Labels with the word "paper" mark values of the papers. A partial page leaves out "<method>, paper" without
    "<method>".
    """
    selected = {}
    for title, table in tables.items():
        filled = (table.notna() & (table != "")).to_numpy(bool)
        quoted_rows = np.array(["paper" in str(name) for name in table.index], bool)
        quoted_columns = np.array(["paper" in str(name) for name in table.columns], bool)
        measured = filled & ~quoted_rows[:, None] & ~quoted_columns
        rows = measured.any(axis=1)
        names = {*table.index[rows]}
        for place in np.flatnonzero(quoted_rows):
            method, is_of_method, _ = str(table.index[place]).partition(QUOTED)
            rows[place] = not (part and is_of_method) or method in names
        columns = measured.any(axis=0) | (quoted_columns & filled[rows].any(axis=0))
        if not part:
            columns[:] = True
        if measured.any():
            selected[title] = table.loc[rows, columns]
    return selected
