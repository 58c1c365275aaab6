"""The index of all verdicts is that of the committed reports, and a verdict is on the side of its bar that it says."""

import re
from functools import cache
from pathlib import Path

import pytest

from crt_exp.oldreport import draws, index
from crt_exp.oldreport.evidence import Share, Unmeasured
from crt_exp.oldreport.page import Page, names

COMMITTED = sorted((Path(__file__).parents[2] / "outputs/report").glob("*.md"))


@cache
def committed(name, folder):
    """A page with its draws, read and judged once."""
    return Page(name, folder)


def test_the_committed_index_is_that_of_the_committed_reports(monkeypatch):
    monkeypatch.setattr(index, "Page", committed)
    pages = [path for path in COMMITTED if path.stem not in index.WITHOUT]
    made = index.text(pages, {page.stem: index.verdicts(page) for page in pages})
    assert COMMITTED[0].with_name("index.md").read_text() == made, "make report"


@pytest.mark.parametrize("name", names())
def test_committed_lines_put_the_value_on_the_side_of_the_bar_that_the_verdict_says(name):
    """The number that is printed, read back: above or below the bar as the difference is above or below 0."""
    if not draws.there(name):
        return
    claims = [each.claim for each in committed(name, COMMITTED[0].parent).verdicts if not isinstance(each, Unmeasured)]
    for claim in claims:
        text = claim.against.shown(claim.difference).replace("e^", "")
        if isinstance(claim.bar, Share) or abs(claim.difference.mean) < 0.01 * abs(claim.against.at):
            continue  # three digits do not tell, or the bar is of each unit
        value, margin = float(re.match(r"[+-]?[\d.e+-]+", text)[0]), [float(x) for x in re.findall(
            r"-?[\d.]+(?:e[+-]?\d+)?", claim.against.said)]
        inside = {"most": value < margin[0], "below": value < margin[0], "least": value > margin[0],
                  "above": value > margin[0]}.get(claim.against.said.split()[-2], margin[0] < value < margin[-1])
        assert inside == (claim.difference.mean > 0), f"{claim.text}: {text}, {claim.against.said}"


def test_no_report_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no report in .*make one first"):
        index.main(tmp_path)
