"""Reports on errors and accuracies: verdicts, first lines and pages follow what was measured, given here."""

import math

import numpy as np
import pytest
import torch

from crt_exp.features import Statistics
from crt_exp.report import performers_fig2, table1, writing
from crt_exp.report.evidence import judged, won_by
from crt_exp.studies import variance_curves

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def same_draws():
    """Every test draws the same numbers, alone or among others."""
    global RNG
    RNG = np.random.default_rng(0)


def errors(level, n=15):
    return (level * RNG.lognormal(0, 0.05, n)).tolist()


def words(claims):
    return {verdict.claim.text: verdict.word for verdict in judged(claims)}


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The text of a report that was written there, once its picture is."""
    monkeypatch.setattr(writing, "REPORT", tmp_path)

    def read(name):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert "verdict" in (tmp_path / f"{name}.csv").read_text().splitlines()[0]
        return (tmp_path / f"{name}.md").read_text()
    return read


def test_the_first_line_says_what_a_control_beats():
    assert won_by("the mean of V", {"scale 1": ["a", "b"], "scale 2": []}, 4) == (
        "**The mean of V, a control, beats 2 of 4 arms.** scale 1: a, b.")
    assert won_by("the mean of V", {"scale 1": []}, 4) == "None of 4 arms is worse than the mean of V, a control."


# ---- Performers


def test_fig1_says_where_the_estimate_zero_errs_by_less():
    """Its square is the kernel's, of which one projection of PosRF has e^s - 1 times as much variance."""
    zero, lengths = torch.tensor(variance_curves.gains(8)["zero"]), torch.arange(1, 101).double()
    assert torch.allclose(zero.double(), -torch.expm1(lengths).log(), rtol=1e-5)


def test_poles_of_performers_fig2_are_no_numbers():
    """trig has no variance at x = y, positive features none at x = -y: neither is the rounding of a closed form."""
    angles, ones = torch.tensor([0.0, math.pi, 1.0], dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for name in performers_fig2.MAPS:
        found = performers_fig2.log_ratio(performers_fig2.of_map(name), angles, ones).tolist()
        assert found[0] == -math.inf and found[1] == math.inf and math.isfinite(found[2])
    zero = performers_fig2.log_ratio(performers_fig2.of_zero, angles, ones).tolist()
    assert zero[0] == -math.inf and all(map(math.isfinite, zero[1:]))
    assert f"{performers_fig2.ANGLES[90]:.2f}" == "0.00"  # and not -0.00


def test_performers_fig2_says_where_the_estimate_zero_is_nearer():
    """Of two long opposite vectors the kernel is e^-4: 64 projections of trig are further from it than 0 is."""
    opposite, long = torch.tensor([0.99 * math.pi]).double(), torch.tensor([2.0]).double()
    ratio = performers_fig2.log_ratio(performers_fig2.of_zero, opposite, long)
    x, y = torch.tensor([[2.0, 0.0]]).double(), 2 * torch.stack([opposite.cos(), opposite.sin()], -1)
    features = performers_fig2.palette.feature_map("trig")
    params = features.fit(Statistics.of(x[None], y[None]))
    mse = features.log_mse(x[None], y[None], params, performers_fig2.M).squeeze()
    assert ratio.item() == pytest.approx((mse - 2 * (x * y).sum()).item()) and ratio.item() > 0
    behind = {name: -ratio for name in performers_fig2.MAPS}
    said = performers_fig2.where_zero_wins(behind | {performers_fig2.ZERO: ratio})
    assert said.startswith("**The estimate 0") and "trig on 100%, pos on 100%" in said


# ---- Chefs' Random Tables


def results_table1():
    level = {"oprf": 0.8, "trig": 0.9, "majority": 0.3, "Nystroem": 0.95}
    sizes = {d: 5 if d in table1.LARGE else 10 for d in table1.PAPER}
    return {(d, c, n, m): {"accuracy": (level.get(n, 0.6) + 0.01 * RNG.normal(size=sizes[d])).tolist(),
                           "validation": (level.get(n, 0.6) + 0.01 * RNG.normal(size=sizes[d])).tolist(),
                           "sigma": [0.1] * sizes[d]}
            for d in table1.PAPER for c in table1.codings(d) for n, m in table1.columns_of(table1.M)}


@pytest.mark.slow
def test_table1_says_what_refutes_the_paper():
    results = results_table1()
    told = words(table1.claims(results))
    text = "128 projections: the average of {} over the eight sets is above that of {}"
    assert told[text.format("oprf", "pos")] == "holds" and told[text.format("oprf", "trig")] == "fails"
    against = table1.against_the_paper(results)
    assert "trig on wifi 15.2" in against and "above the best map (trig)" in against
    assert table1.by_validation(results, "wifi")[0] == "trig, ordinal"
    assert table1.controls_that_win(results).startswith("None of")


@pytest.mark.slow
def test_page_of_table1(page):
    table1.write(results_table1(), 10, 3, 1.0)
    assert "Nystroem" in page("table1")
