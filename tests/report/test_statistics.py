"""Intervals and verdicts: they cover what they state, and leave open what they cannot decide."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from crt_exp.report.rows import CONFLICT, UNDECIDED, Claim, geometric_mean_ci, holm, judge, mean_ci, share


def words(claims, **options):
    return [each.verdict for each in judge(claims, **options)]


def test_mean_ci_equals_scipy():
    values = np.random.default_rng(0).normal(1, 2, 9)
    found, test = mean_ci(values, against=0.5), stats.ttest_1samp(values, 0.5)
    low, high = stats.ttest_1samp(values, 0.5).confidence_interval(0.95)
    assert np.allclose([found.mean - found.half, found.mean + found.half, found.p], [low, high, test.pvalue])


def test_overlapping_splits_get_wider_intervals_that_cover():
    """Means of random halves of one sample: Student's interval is far too narrow, Nadeau and Bengio's is not."""
    rng, covered = np.random.default_rng(1), {0.0: 0, 1.0: 0}
    for _ in range(400):
        sample = rng.normal(size=40)
        values = [rng.permutation(sample)[:20].mean() for _ in range(15)]
        for overlap in covered:
            found = mean_ci(values, overlap=overlap)
            covered[overlap] += abs(found.mean) <= found.half
    assert covered[0.0] < 0.7 * 400 and covered[1.0] > 0.93 * 400


def test_holm_by_hand():
    assert np.allclose(holm([0.01, 0.04, 0.03]), [0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def test_all_verdicts():
    cases = {"up": [1.0, 1.1, 0.9, 1.0], "down": [-1.0, -1.1, -0.9, -1.0], "none": [1.0, -1.0, 0.5, -0.4]}
    assert words([Claim("above", cases)]) == ["supported", "contradicted", UNDECIDED]
    assert words([Claim("below", cases, below=0)]) == ["contradicted", "supported", UNDECIDED]
    assert words([Claim("above", cases)], reduced=True)[0] == "supported (reduced scale)"
    assert words([Claim("above", cases, theory={"up": -1.0, "down": -1.0})])[:2] == [CONFLICT, "contradicted"]
    assert words([Claim("above", cases, fails={"up": "uniform attention costs 0"})])[0] == UNDECIDED
    assert words([Claim("closed", {"": -61.2}, below=-60), Claim("closed", {"": -61.2}, above=-60)]) == [
        "supported", "contradicted"]
    assert words([Claim("one sample", {"": [3.0]}), Claim("none", {"": []}),
                  Claim("no sample", not_measured="too large")]) == [UNDECIDED, "not measured"]


def test_sign_test_equals_scipy_where_one_sample_decides_the_mean():
    values = [-60.0, *np.linspace(0.5, 1.5, 11)]
    by_signs, by_mean = judge([Claim("above", {"": values}, sign_test=True), Claim("above", {"": values})])
    assert np.isclose(by_signs.estimate.p, stats.binomtest(11, 12).pvalue)
    assert (by_signs.verdict, by_mean.verdict) == ("supported", UNDECIDED)
    assert by_signs.to_text() == "+0.95 (median; 11 of 12 samples above the threshold)"


def test_ratios_are_tested_as_logarithms():
    values = np.log([0.5, 0.6, 0.55, 0.45])
    (found,) = judge([Claim("half", {"": values}, below=0.8, log=True, unit="times")])
    assert found.verdict == "supported" and found.to_text().startswith(f"{np.exp(values.mean()):.3g} [")
    assert found.number == pytest.approx(geometric_mean_ci(np.exp(values))[0])


@pytest.mark.parametrize("seed", range(20))
def test_an_interval_excludes_the_threshold_exactly_where_the_verdict_is_decided(seed):
    rng = np.random.default_rng(seed)
    cases = {str(i): rng.normal(mean, size=rng.integers(3, 12))
             for i, mean in enumerate(rng.uniform(0, 2, size=rng.integers(2, 9)))}
    claims = [Claim("above", cases), Claim("overlap", cases, overlap=0.05), Claim("ratio", cases, below=1.5, log=True)]
    for each in judge(claims):
        bar = 1.5 if each.claim.log else 0.0
        low, high = each.ends
        assert (low > bar or high < bar) == (each.verdict != UNDECIDED)


def test_a_share_has_the_mean_of_the_ratio_and_an_interval_that_covers():
    rng, covered = np.random.default_rng(2), 0
    for _ in range(400):
        whole = rng.normal(3, 0.5, 12)
        samples = share(pd.Series(0.7 * whole + rng.normal(0, 0.2, 12)), pd.Series(whole))
        found = mean_ci(samples)
        covered += abs(found.mean - 0.7) <= found.half
    assert covered > 0.9 * 400
    assert samples.mean() == pytest.approx(0.7, abs=0.1)


def test_what_cannot_be_tested_is_refused():
    with pytest.raises(ValueError, match="sample 1: expected a finite value"):
        mean_ci([1.0, math.nan, 2.0])
    assert mean_ci([0.0, 0.0]).p == 1 and mean_ci([1.0, 1.0]).p == 0
