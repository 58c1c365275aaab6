"""A verdict's line and the index show the value and what it is compared with, whatever way the claim compares them."""

import math
import re

import numpy as np
import pytest

from crt_exp.report import index
from crt_exp.report.evidence import Bar, Claim, Interval, Unmeasured, exactly, independent, judged
from crt_exp.report.page import Page, names
from crt_exp.report import draws
from crt_exp.probes.cells import Draw

VALUES = {"exact": [1.0, 1.1, 1.2], "ours": [1.02, 1.15, 1.21], "uniform": [2.0, 2.2, 2.3]}
EXACT, OURS, UNIFORM = (np.array(each) for each in VALUES.values())
METRICS = {"loss": {"unit": "nats", "better": "lower"}, "score": {"unit": "%"}}
COST = OURS - EXACT
SHARE = np.mean(UNIFORM - OURS) / np.mean(UNIFORM - EXACT)
RATIO = float(np.exp(np.mean(np.log(OURS / UNIFORM))))
WAYS = {
    "at most": ({"arm": "ours", "at_most": 1.5}, f"{independent(OURS):.3g} nats (bar: at most 1.5; n = 3"),
    "at least": ({"arm": "ours", "at_least": 1.0}, f"{independent(OURS):.3g} nats (bar: at least 1; n = 3"),
    "at most, log": ({"arm": "ours", "at_most": 1.5, "scale": "log"}, f"{math.exp(np.mean(np.log(OURS))):.3g} ["),
    "against": ({"arm": "ours", "against": "exact", "at_most": 0.05},
                f"{independent(COST):+.3g} nats (bar: worse by at most 0.05; n = 3"),
    "margin": ({"better": "ours", "worse": "uniform", "margin": 0.5},
               f"{independent(UNIFORM - OURS):+.3g} nats (bar: at least 0.5; n = 3"),
    "margin, log": ({"better": "ours", "worse": "uniform", "margin": 1.5, "scale": "log"}, f"{RATIO:.3g} ["),
    "margin of what is to be high": ({"better": "uniform", "worse": "ours", "margin": 1.5, "scale": "log",
                                      "metric": "score"}, f"{1 / RATIO:.3g} ["),
    "equal": ({"better": "exact", "worse": "ours", "equal": 0.1},
              f"{independent(COST):+.3g} nats (bar: -0.1 to 0.1; n = 3"),
    "equal, the other side": ({"better": "ours", "worse": "exact", "equal": 0.1},
                              f"{independent(-COST):+.3g} nats (bar: -0.1 to 0.1; n = 3"),
    "equal, log": ({"better": "ours", "worse": "exact", "equal": 0.25, "scale": "log"}, "times (bar: 0.8 to 1.25; "),
    "keeps": ({"arm": "ours", "keeps": 0.5, "of": "exact", "over": "uniform"}, f"a share of {SHARE:.3g}, "),
    "none": ({"better": "ours", "worse": "uniform"}, f"{independent(UNIFORM - OURS):+.3g} nats (n = 3"),
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
    assert ("bar" in row) == (way != "none") and row["difference"] == made.claim.difference.mean


def test_one_draw_and_a_closed_form_have_a_bar_too(tmp_path):
    entry = {"arm": "ours", "at_most": 1.5}
    assert ": 1.02 nats (bar: at most 1.5; n = 1)" in str(verdict(tmp_path, entry, {"ours": [1.02]}))
    near = {"better": "exact", "worse": "ours", "equal": 0.1}
    made = verdict(tmp_path, near, {"exact": [1.0], "ours": [1.02]})
    assert ": +0.02 nats (bar: -0.1 to 0.1; n = 1)" in str(made) and made.claim.difference.mean == pytest.approx(0.08)
    exact = Claim("less", exactly(-0.2), "", bar=Bar(3, 1, "at least 3", "times", log=True), closed=0.1)
    assert f": {3 * math.exp(-0.2):.3g} times (bar: at least 3; exact); by the closed form 3.32" in str(
        judged([exact])[0])


def test_signs_show_the_median_and_the_bar(tmp_path):
    entry = {"arm": "ours", "at_most": 1.2, "test": "sign"}
    assert ": 2 of 3 beyond the bar, median 1.15 nats (bar: at most 1.2; sign test, p = 1)" in str(
        verdict(tmp_path, entry))


def test_the_index_has_value_and_bar():
    claim = Claim("costs little", Interval(0.0406, 0.0045, 1e-5, 5), "nats",
                  bar=Bar(0.05, -1, "at most 0.05", "nats", sign=True))
    row = {"family": "bars", **{key: str(value) for key, value in judged([claim])[0].row().items()}}
    assert "| costs little |  | +0.0094 ± 0.0045 nats | at most 0.05 | 5 |" in index.section(index.Path("a.md"), [row])


@pytest.mark.parametrize("name", names())
def test_committed_lines_put_the_value_on_the_side_of_the_bar_that_the_verdict_says(name):
    """The number that is printed, read back: above or below the bar as the difference is above or below 0."""
    if not draws.there(name):
        return
    claims = [each.claim for each in Page(name).verdicts if not isinstance(each, Unmeasured)]
    for claim in claims:
        text = claim.bar.shown(claim.difference) if claim.bar else ""
        if not text or "a share of" in text or abs(claim.difference.mean) < 0.01 * abs(claim.bar.at):
            continue  # three digits do not tell, or the bar is of each unit
        value, margin = float(re.match(r"[+-]?[\d.e+-]+", text)[0]), [float(x) for x in re.findall(
            r"-?[\d.]+(?:e[+-]?\d+)?", claim.bar.said)]
        inside = {"at most": value < margin[0], "at least": value > margin[0]}.get(
            " ".join(claim.bar.said.split()[-3:-1]), margin[0] < value < margin[-1])
        assert inside == (claim.difference.mean > 0), f"{claim.text}: {text}, {claim.bar.said}"
