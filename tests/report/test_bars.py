"""A verdict's line and the index show the value and what it is compared with, whatever way the claim compares them."""

import math
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from crt_exp.report import draws, index, verdicts
from crt_exp.report.evidence import (
    Bar,
    Claim,
    Interval,
    Share,
    Unmeasured,
    exactly,
    independent,
    judged,
    share_between,
)
from crt_exp.report.page import Page, names
from crt_exp.probes.cells import Draw

VALUES = {"exact": [1.0, 1.1, 1.2], "ours": [1.02, 1.15, 1.21], "uniform": [2.0, 2.2, 2.3]}
EXACT, OURS, UNIFORM = (np.array(each) for each in VALUES.values())
METRICS = {"loss": {"unit": "nats", "better": "lower"}, "score": {"unit": "%"}}
COST = OURS - EXACT
SHARE = np.mean(UNIFORM - OURS) / np.mean(UNIFORM - EXACT)
RATIO = float(np.exp(np.mean(np.log(OURS / UNIFORM))))
WAYS = {
    "at most": ({"arm": "ours", "at_most": 1.5}, f"{independent(OURS):.3g} nats (bar: at most 1.5)"),
    "at least": ({"arm": "ours", "at_least": 1.0}, f"{independent(OURS):.3g} nats (bar: at least 1)"),
    "at most, log": ({"arm": "ours", "at_most": 1.5, "scale": "log"}, f"{math.exp(np.mean(np.log(OURS))):.3g} ["),
    "against": ({"arm": "ours", "against": "exact", "at_most": 0.05},
                f"{independent(COST):+.3g} nats (bar: worse by at most 0.05)"),
    "margin": ({"better": "ours", "worse": "uniform", "margin": 0.5},
               f"{independent(UNIFORM - OURS):+.3g} nats (bar: at least 0.5)"),
    "margin, log": ({"better": "ours", "worse": "uniform", "margin": 1.5, "scale": "log"}, f"{RATIO:.3g} ["),
    "margin of what is to be high": ({"better": "uniform", "worse": "ours", "margin": 1.5, "scale": "log",
                                      "metric": "score"}, f"{1 / RATIO:.3g} ["),
    "equal": ({"better": "exact", "worse": "ours", "equal": 0.1},
              f"{independent(COST):+.3g} nats (bar: -0.1 to 0.1)"),
    "equal, the other side": ({"better": "ours", "worse": "exact", "equal": 0.1},
                              f"{independent(-COST):+.3g} nats (bar: -0.1 to 0.1)"),
    "equal, log": ({"better": "ours", "worse": "exact", "equal": 0.25, "scale": "log"}, "times (bar: 0.8 to 1.25)"),
    "keeps": ({"arm": "ours", "keeps": 0.5, "of": "exact", "over": "uniform"}, f"{SHARE:.3g} ["),
    "none": ({"better": "ours", "worse": "uniform"}, f"{independent(UNIFORM - OURS):+.3g} nats (bar: above 0)"),
    "none, log": ({"better": "ours", "worse": "uniform", "scale": "log"}, f"{RATIO:.3g} ["),
}


def verdict(tmp_path, entry, values=VALUES):
    rows = [Draw("A", arm, metric, value, unit) for metric in METRICS for arm, each in values.items()
            for unit, value in enumerate(each)]
    draws.write("mine", rows, tmp_path)
    spec = {"title": "A page", "metrics": METRICS, "main": "loss", "bars": [{"text": "claim", **entry}]}
    made, = Page("mine", tmp_path, spec).verdicts
    return made


@pytest.mark.parametrize("way", WAYS)
def test_the_line_shows_the_value_and_its_bar(way, tmp_path):
    entry, shown = WAYS[way]
    made = verdict(tmp_path, entry)
    assert f": claim: {shown}" in str(made) or shown.startswith("times") and shown in str(made), str(made)
    row = made.row()
    assert row["bar"] and row["value"] in str(made) and row["difference"] == made.claim.difference.mean


def test_one_draw_and_a_closed_form_have_a_bar_too(tmp_path):
    entry = {"arm": "ours", "at_most": 1.5}
    assert ": 1.02 nats (bar: at most 1.5)" in str(verdict(tmp_path, entry, {"ours": [1.02]}))
    near = {"better": "exact", "worse": "ours", "equal": 0.1}
    made = verdict(tmp_path, near, {"exact": [1.0], "ours": [1.02]})
    assert ": +0.02 nats (bar: -0.1 to 0.1)" in str(made) and made.claim.difference.mean == pytest.approx(0.08)
    exact = Claim("less", exactly(-0.2), "", bar=Bar(3, 1, "at least 3", "times", log=True), closed=0.1)
    assert f": {3 * math.exp(-0.2):.3g} times (bar: at least 3)" in str(judged([exact])[0])
    assert exact.shown_closed() == "3.32"


def test_signs_show_the_median_and_the_bar(tmp_path):
    entry = {"arm": "ours", "at_most": 1.2, "test": "sign"}
    assert ": 2 of 3 beyond the bar, median 1.15 nats (bar: at most 1.2)" in str(
        verdict(tmp_path, entry))


def test_a_logarithm_is_shown_as_a_power():
    """The paper's "more than e^60", and no nats of a logarithm."""
    claim = Claim("less", Interval(1.2, 0.3, 0.01, 9), bar=Bar(60, 1, "at least e^60", power=True), paper="e^60")
    assert claim.shown() == "e^61.2 [e^60.9, e^61.5] (bar: at least e^60; the paper: e^60)"


def test_the_interval_of_a_share_covers_where_the_claim_tells_nothing():
    """Fieller's: its ends are the shares at which Student's test of ours - s whole has p = 0.05."""
    ours, whole = np.array([0.9, 0.8, 1.1, 0.7]), np.array([1.0, 1.1, 1.2, 0.9])
    assert [independent(ours - end * whole).p for end in share_between(ours, whole)] == pytest.approx([0.05, 0.05])
    assert math.isnan(share_between(ours, whole - 1)[0])


def test_claims_that_differ_in_their_setting_share_a_line():
    """With the ends of their values."""
    alike = judged([Claim(f"{name}: less", independent([value, value + 0.1, value - 0.1]), "nats", kind="less")
                    for name, value in (("A", 1.0), ("B", -2.0), ("C", 3.0))])
    assert verdicts.lines(alike) == ["- **holds in 2, fails in 1 of 3**: less: -2 to +3 nats (bar: above 0)"]


COMMITTED = sorted((Path(__file__).parents[2] / "outputs/report").glob("*.md"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_no_committed_line_shows_a_bare_margin(path):
    """A verdict has its value and its bar, whatever page writes it, and no difference of logarithms."""
    text = path.read_text()
    judged = [line for line in text.splitlines() if line.startswith("- **") and re.match(
        r"- \*\*(holds|fails|conflict|cannot tell here)", line) and "not measured here" not in line]
    assert all("(bar" in line for line in judged), [line for line in judged if "(bar" not in line]
    assert "in the logarithm" not in text and "beyond the bar:" not in text


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
