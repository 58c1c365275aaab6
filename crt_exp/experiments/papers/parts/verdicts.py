"""Verdicts of the claims of all pages: index.md, and the counts and undecided claims of results.md."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

import pandas as pd

from crt_exp.experiments.report import Rows, pages
from crt_exp.experiments.report.claims import (
    CONFLICT,
    NOT_JUDGED,
    NOT_MEASURED,
    UNDECIDED,
    WORDS,
    CaseResult,
)
from crt_exp.experiments.report.tables import to_markdown

Verdicts = Mapping[str, Sequence[CaseResult]]  # page -> cases of its claims
RULES = """How claims are judged:

- Only fresh samples decide. If samples are added after a look at the first ones, the added samples decide alone.
- A case with a failed sanity check is inconclusive. Attention has to matter (the cost of uniform attention), and the
  method under test has to be trained (its gain over uniform attention).
- A verdict needs p < 0.05 after Holm's correction over the page. Without it the case is inconclusive.
- A comparison in a setting that the paper does not have is our own and is not counted.
- Intervals cover the samples that a page names. Where all samples use one checkpoint, other models are not covered."""


def index_text(rows: Mapping[str, Rows], verdicts: Verdicts) -> str:
    """Return index.md: each page with its counts of verdicts and its finding."""
    table = verdict_counts(verdicts)
    table["finding"] = [pages.load(name).finding_text(rows[name]) for name in verdicts]
    return (
        "# Pages of results\n\n[Which attention to take](results.md), and one page for each experiment.\n\n"
        + to_markdown(table).rstrip()
        + "\n"
    )


def verdict_counts(verdicts: Verdicts) -> pd.DataFrame:
    """One row a page: how many cases of the paper's claims have each verdict."""
    counts = {}
    for name, results in verdicts.items():
        title = f"[{pages.load(name).title}]({name}.md)"
        counts[title] = Counter(result.base_verdict for result in results if result.paper)
    table = pd.DataFrame(counts, index=[*WORDS]).T.astype(object).rename_axis("page")
    if table[CONFLICT].isna().all():
        table = table.drop(columns=CONFLICT)
    return table.map(lambda count: "" if pd.isna(count) else f"{count:.0f}")


def undecided_claims(verdicts: Verdicts) -> pd.DataFrame:
    """One row a claim that is not decided, with its cases and what it would take."""
    table = []
    for name, results in verdicts.items():
        for claim, group in groupby(results, lambda result: result.claim.text):
            undecided = []
            for result in group:
                if result.paper and result.base_verdict in (UNDECIDED, NOT_JUDGED, NOT_MEASURED):
                    undecided.append(result)
            if not undecided:
                continue
            cases = "; ".join(result.case for result in undecided)
            if len(undecided) > 3:
                cases = f"{len(undecided)} cases"
            needs = undecided[-1].claim.needs
            table.append([f"[{name}]({name}.md)", claim, cases, needs])
    return pd.DataFrame(table, columns=["page", "claim", "cases", "needs"])
