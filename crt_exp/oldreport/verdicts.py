"""The verdicts of a page: a line for each of the paper's claims, and folded tables of all with what they rest on."""

from collections import Counter
from collections.abc import Sequence

from crt_exp.drawing import markdown
from crt_exp.oldreport.evidence import WORDS, Unmeasured, Verdict, Unjudged
from crt_exp.oldreport.page import FAMILIES, Page

Judged = Verdict | Unjudged | Unmeasured
MOST = 24  # rows of a folded table; the index's csv has the others
INTERVALS = ("Each interval belongs to the test after Holm's correction: it excludes the bar exactly where the claim "
             "is decided.")
HEAD = {"claim": "claim", "verdict": "verdict", "value": "value", "bar": "bar", "closed_form": "closed form", "n": "n",
        "p": "p", "more": "more"}


def sections(page: Page) -> list[str]:
    """The paper's claims, one line each, and their table; then the table of own bars."""
    claims, bars = page.families.values()
    own = [details(f"{FAMILIES['bars']}: {counted(bars)}", f"{table(page, bars)}\n\n{INTERVALS}")] if bars else []
    if not claims:
        return own
    return [f"## {FAMILIES['claims']}: {counted(claims)}\n\n" + "\n".join(lines(claims)) + f"\n\n{INTERVALS}",
            details("The same with number of units and p-value", table(page, claims)), *own]


def counted(judged: Sequence[Judged]) -> str:
    count = Counter(verdict.word for verdict in judged)
    return ", ".join(f"{count[word]} {word}" for word in WORDS if count[word])


def lines(judged: Sequence[Judged]) -> list[str]:
    """One for each kind of claim, which several settings or places may have."""
    kinds: dict[str, list[Judged]] = {}
    for verdict in judged:
        kinds.setdefault(verdict.text if isinstance(verdict, Unmeasured) else verdict.claim.kind or verdict.claim.text,
                         []).append(verdict)
    return [str(each[0]) if len(each) == 1 else line(kind, each) for kind, each in kinds.items()]


def line(kind: str, alike: Sequence[Judged]) -> str:
    """Of claims that differ in their setting: how many have each verdict, between which values, and the bar."""
    claims = [verdict.claim for verdict in alike]
    values = sorted({claim.against.value(claim.difference.mean) for claim in claims})
    bars, papers = ({*each} for each in zip(*((claim.against.said, claim.paper) for claim in claims)))
    ends = dict.fromkeys(claims[0].against.number(value) for value in (values[0], values[-1]))
    unit = claims[0].against.unit
    shown = f": {' to '.join(ends)} {unit}".rstrip() if len(bars) == 1 else ""
    told = "; ".join([f"bar: {next(iter(bars))}" if len(bars) == 1 else "bars: those of the paper",
                      *(f"the paper: {paper}" for paper in papers if paper and len(papers) == 1)])
    count = Counter(verdict.word for verdict in alike)
    words = ", ".join(f"{word} in {count[word]}" for word in WORDS if count[word])
    every = "both" if len(alike) == 2 else f"all {len(alike)}"
    of = f"{words} of {len(alike)}" if len(count) > 1 else f"{alike[0].word} in {every}"
    return f"- **{of}**: {kind}{shown} ({told})"


def table(page: Page, judged: Sequence[Judged]) -> str:
    if len(judged) > MOST:
        return (f"All {len(judged)}, with value, bar, number of units and p-value, are the rows {page.name} of "
                "[index.csv](index.csv).")
    rows = [row(verdict) for verdict in judged]
    used = [key for key in HEAD if any(each.get(key) for each in rows)]
    return markdown([HEAD[key] for key in used], [[each.get(key, "") for key in used] for each in rows]).rstrip()


def row(verdict: Judged) -> dict[str, str]:
    """p is corrected by Holm; more: a failed gate and the page's own sentence."""
    given = {key: str(value) for key, value in verdict.row().items()}
    more = [given.get(key, "") for key in ("not_judged", "why")]
    units = "exact" if given.get("n") == "0" else given.get("n", "")
    chance = f"{float(given['p_holm']):.2g}" if "p_holm" in given and units not in ("exact", "1") else ""
    return given | {"n": units, "p": chance, "more": "; ".join(filter(None, more))}


def details(summary: str, text: str) -> str:
    """Folded, on GitHub and in the site."""
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{text}\n\n</details>' if text else ""
