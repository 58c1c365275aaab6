"""Intervals, verdicts and gates: they cover what they say, and refuse what they cannot judge."""

import math

import numpy as np
import pytest
from scipy import stats

from crt_exp.oldreport.evidence import (
    Claim,
    Gate,
    Share,
    Unjudged,
    equivalent,
    holm,
    independent,
    inside,
    judged,
    overlapping,
    share_between,
    signs,
)


def test_student_equals_scipy():
    values = np.random.default_rng(0).normal(1, 2, 9)
    found, test = independent(values), stats.ttest_1samp(values, 0)
    low, high = test.confidence_interval(0.95)
    assert np.allclose([found.low, found.high, found.p], [low, high, test.pvalue])


def test_overlapping_splits_get_wider_intervals_that_cover():
    """Means of random halves of one sample: Student's interval is far too narrow, Nadeau and Bengio's is not."""
    rng, covered = np.random.default_rng(1), {"student": 0, "nadeau-bengio": 0}
    for _ in range(400):
        sample = rng.normal(size=40)
        values = [rng.permutation(sample)[:20].mean() for _ in range(15)]
        covered["student"] += independent(values).low <= 0 <= independent(values).high
        wide = overlapping(values, test_share=1.0)
        covered["nadeau-bengio"] += wide.low <= 0 <= wide.high
    assert covered["student"] < 0.7 * 400 and covered["nadeau-bengio"] > 0.93 * 400


def test_equivalence_is_confirmed_by_more_draws():
    """The mean of |d| stays above the bound where the mean of d is 0."""
    draws = np.random.default_rng(4).normal(0, 0.04, 400)
    assert np.mean(np.abs(draws)) > 0.02
    word = lambda values: judged([Claim("near", independent(inside(values, 0.02)))])[0].word
    assert [word(draws[:4]), word(draws), word(draws + 0.05), word(draws - 0.05)] == [
        "cannot tell here", "holds", "fails", "fails"]


def test_two_one_sided_tests_equal_scipy():
    values = np.random.default_rng(5).normal(0.05, 0.1, 12)
    lower = stats.ttest_1samp(values, -0.2, alternative="greater").pvalue
    upper = stats.ttest_1samp(values, 0.2, alternative="less").pvalue
    assert np.isclose(equivalent(values, 0.2).p, max(lower, upper))


def test_sign_test_equals_scipy_where_one_draw_decides_the_mean():
    values = [-60.0, *np.linspace(0.5, 1.5, 11)]
    interval = signs(values)
    assert np.isclose(interval.p, stats.binomtest(11, 12).pvalue) and (interval.above, interval.n) == (11, 12)
    by_signs, by_mean = judged([Claim("above", interval)])[0], judged([Claim("above", independent(values))])[0]
    assert (by_signs.word, by_mean.word) == ("holds", "cannot tell here")
    assert "11 of 12 beyond the bar, median +0.95 (bar: above 0)" in str(by_signs)
    assert "difference_ci95" not in by_signs.row() and signs([0.0, 0.0, 1.0]).p == 1.0
    ties = judged([Claim("above", signs([1.0] * 8 + [0.0] * 12))])[0]
    assert ties.word == "holds" and "8 of 20 beyond the bar, 12 at it, median +0" in str(ties)


def test_a_second_look_lowers_the_level():
    values = [1.0, 0.2, 0.9, 0.6, 0.1]
    once, twice = (judged([Claim("up", independent(values), "nats", looks=looks)])[0] for looks in (1, 2))
    assert 0.029 < once.p < 0.05 and (once.word, twice.word) == ("holds", "cannot tell here")


def test_holm_by_hand():
    assert np.allclose(holm([0.01, 0.04, 0.03]), [0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def test_verdicts_say_all_three_words():
    values = {"up": [1.0, 1.1, 0.9, 1.0], "down": [-1.0, -1.1, -0.9, -1.0], "none": [1.0, -1.0, 0.5, -0.4]}
    verdicts = judged([Claim(name, independent(v), "nats") for name, v in values.items()])
    assert [v.word for v in verdicts] == ["holds", "fails", "cannot tell here"]
    assert "**fails**: down: -1 ± 0.198 nats (bar: above 0)" in str(verdicts[1])
    assert verdicts[0].row()["verdict"] == "holds" and verdicts[0].p > verdicts[0].claim.difference.p


@pytest.mark.parametrize("seed", range(20))
def test_an_interval_excludes_the_bar_exactly_where_the_verdict_is_decided(seed):
    rng = np.random.default_rng(seed)
    draws = [rng.normal(mean, size=rng.integers(3, 12)) for mean in rng.uniform(0, 2, size=rng.integers(1, 9))]
    made = [independent(values) for values in draws] + [overlapping(values, 0.05) for values in draws]
    claims = [Claim("above", each, looks=looks) for each in made for looks in (1, 2)]
    claims += [Claim("equal", equivalent(values, 1.0)) for values in draws]
    for verdict in judged(claims):
        interval = verdict.claim.difference
        assert (interval.low > 0 or interval.high < 0) == (verdict.word != "cannot tell here")
    gains = [(whole * rng.uniform(0.3, 0.8) + rng.normal(size=9), whole) for whole in rng.normal(3, size=(3, 9))]
    for verdict in judged([Claim("share", independent(ours - whole / 2), bar=Share(0.5, 1, "", ours=ours, whole=whole))
                           for ours, whole in gains]):
        low, high = map(float, verdict.claim.value.split("[")[1].split("]")[0].split(", "))
        assert (low > 0.5 or high < 0.5) == (verdict.word != "cannot tell here")


def test_what_a_failed_gate_leaves_unjudged_is_open_with_its_figure():
    gate = Gate("what uniform attention costs, in nats", 0.1, 0.5)
    left = Unjudged(Claim("A is better than B", independent([1.0, 1.1, 0.9]), "nats"), gate)
    assert left.row()["verdict"] == left.word == "cannot tell here" and left.row()["difference"] == pytest.approx(1)
    assert str(left).startswith("- **cannot tell here**, a gate failed: A is better than B: +1")
    assert left.row()["not_judged"] == "what uniform attention costs, in nats: 0.1"


def test_what_cannot_be_judged_is_refused():
    with pytest.raises(ValueError, match="at least two draws"):
        independent([1.0])
    with pytest.raises(ValueError, match="draw 1 is not a finite number"):
        independent([1.0, math.nan, 2.0])
    assert independent([0.0, 0.0]).p == 1 and independent([1.0, 1.0]).p == 0


def test_the_interval_of_a_share_covers_where_the_claim_tells_nothing():
    """Fieller's: its ends are the shares at which Student's test of ours - s whole has p = 0.05."""
    ours, whole = np.array([0.9, 0.8, 1.1, 0.7]), np.array([1.0, 1.1, 1.2, 0.9])
    assert [independent(ours - end * whole).p for end in share_between(ours, whole)] == pytest.approx([0.05, 0.05])
    assert math.isnan(share_between(ours, whole - 1)[0])
