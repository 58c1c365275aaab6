"""Intervals cover what they state, and verdicts leave open what the samples cannot decide."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from crt_exp.experiments.intervals import (
    binomial_interval,
    mean_ci,
    paired_shares_interval,
    student_interval,
)
from crt_exp.experiments.report import Rows, control_checks
from crt_exp.experiments.report.claims import CONFLICT, UNDECIDED, Claim, holm, judge

CASES = {
    "up": [1.0, 1.1, 0.9, 1.0],
    "down": [-1.0, -1.1, -0.9, -1.0],
    "none": [1.0, -1.0, 0.5, -0.4],
}


def verdicts(*claims, **options):
    return [result.verdict for result in judge(claims, **options)]


def test_mean_ci_equals_scipy():
    values = np.random.default_rng(0).normal(1, 2, 9)
    mean = mean_ci(values, against=0.5)
    test = stats.ttest_1samp(values, 0.5)
    low, high = test.confidence_interval(0.95)
    assert mean.mean - mean.half == pytest.approx(low)
    assert mean.mean + mean.half == pytest.approx(high)
    assert mean.p == pytest.approx(test.pvalue)


@pytest.mark.parametrize(
    "mean, verdict",
    [(1.0, "supported"), (1.24, "inconclusive"), (0.7, "contradicted"), (1.6, "contradicted")],
)
def test_equivalence_needs_both_sides(mean, verdict):
    samples = np.log(mean) + np.linspace(-0.1, 0.1, 20)
    claim = Claim("equal", {"A": samples}, above=0.8, below=1.25, log=True)
    assert verdicts(claim) == [verdict]


def test_an_undecided_ratio_near_1_is_equal_within_its_interval():
    near = np.linspace(-0.2, 0.2, 40)
    far = np.linspace(-2, 2, 40)
    claim = Claim("less", {"near": near, "far": far}, below=1, log=True)
    near, far = judge([claim])
    assert near.equality == f"equal within {near.ends[1] - 1:.0%}"
    assert far.equality == ""


def test_equal_samples_are_certain_and_infinite_ones_refused():
    assert mean_ci([0.0, 0.0]).p == 1
    assert mean_ci([1.0, 1.0]).p == 0
    with pytest.raises(ValueError, match="sample 1: expected a finite value"):
        mean_ci([1.0, math.nan, 2.0])


def test_a_mean_is_rounded_to_two_digits_of_its_interval():
    assert str(mean_ci([100.0, 300.0, 250.0])) == "217 ± 259"
    assert str(mean_ci([])) == ""
    assert f"{mean_ci([2.5]):.2f}" == "2.50"


def test_overlapping_splits_get_wider_intervals_that_cover():
    """Means of random halves of one sample: Student's interval is far too narrow, Nadeau and Bengio's is not."""
    rng = np.random.default_rng(1)
    covered = {0.0: 0, 1.0: 0}
    for _ in range(400):
        sample = rng.normal(size=40)
        values = [rng.permutation(sample)[:20].mean() for _ in range(15)]
        for overlap in covered:
            mean = mean_ci(values, overlap=overlap)
            covered[overlap] += abs(mean.mean) <= mean.half
    assert covered[0.0] < 0.7 * 400
    assert covered[1.0] > 0.93 * 400


def test_holm_by_hand():
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_verdicts_of_both_sides():
    above = Claim("above", CASES)
    below = Claim("below", CASES, below=0)
    assert verdicts(above) == ["supported", "contradicted", UNDECIDED]
    assert verdicts(below) == ["contradicted", "supported", UNDECIDED]


def test_closed_forms_need_no_samples():
    low = Claim("closed form", {"": -61.2}, below=-60)
    high = Claim("closed form", {"": -61.2}, above=-60)
    assert verdicts(low, high) == ["supported", "contradicted"]


def test_verdicts_state_scale_and_data():
    claim = Claim("above", CASES)
    reduced = verdicts(claim, reduced=True)
    stand_in = verdicts(claim, stand_in="up")
    assert reduced[0] == "supported (reduced scale)"
    assert stand_in[0] == "supported (stand-in data)"


def test_a_verdict_does_not_contradict_theory():
    theory = {"up": -1.0, "down": -1.0}
    claim = Claim("above", CASES, theory=theory)
    assert verdicts(claim)[:2] == [CONFLICT, "contradicted"]


def test_a_failed_check_leaves_a_case_open():
    fails = {"up": "uniform attention costs 0"}
    claim = Claim("above", CASES, fails=fails)
    assert verdicts(claim)[0] == UNDECIDED


def test_too_few_samples_decide_nothing():
    one = Claim("one sample", {"": [3.0]})
    none = Claim("none", {"": []})
    absent = Claim("no sample", not_measured="too large")
    other = Claim("no comparison", not_judged="no run diverged")
    assert verdicts(one, none, absent, other) == [UNDECIDED, "not measured", "measured, not judged"]


def test_sign_test_equals_scipy_where_one_sample_decides_the_mean():
    cases = {"": [-60.0, *np.linspace(0.5, 1.5, 11)]}
    signs = Claim("above", cases, sign_test=True)
    mean = Claim("above", cases)
    by_signs, by_mean = judge([signs, mean])
    assert by_signs.estimate.p == pytest.approx(stats.binomtest(11, 12).pvalue)
    assert by_signs.verdict == "supported"
    assert by_mean.verdict == UNDECIDED
    assert by_signs.to_text() == "+0.95 (median; 11 of 12 samples above the threshold)"


def test_ratios_are_tested_as_logarithms():
    values = np.array([0.5, 0.6, 0.55, 0.45])
    claim = Claim("half", {"": np.log(values)}, below=0.8, log=True, unit="times")
    (result,) = judge([claim])
    mean = stats.gmean(values)
    assert result.verdict == "supported"
    assert result.to_text().startswith(f"{mean:.3g} [")
    assert result.number == pytest.approx(mean)


@pytest.mark.parametrize("seed", range(20))
def test_an_interval_excludes_the_threshold_exactly_where_the_verdict_is_decided(seed):
    rng = np.random.default_rng(seed)
    cases = {}
    for i, mean in enumerate(rng.uniform(0, 2, size=rng.integers(2, 9))):
        cases[str(i)] = rng.normal(mean, size=rng.integers(3, 12))
    claims = [
        Claim("above", cases),
        Claim("overlap", cases, overlap=0.05),
        Claim("ratio", cases, below=1.5, log=True),
    ]
    for result in judge(claims):
        threshold = 1.5 if result.claim.log else 0.0
        low, high = result.ends
        excludes = low > threshold or high < threshold
        assert excludes == (result.verdict != UNDECIDED), result.claim


def test_a_control_that_costs_too_little_fails_the_check():
    frame = pd.DataFrame(
        {
            "dataset": ["a", "a", "b", "b"],
            "method": ["exact", "uniform", "exact", "uniform"],
            "value": [1.0, 1.4, 1.0, 2.0],
        }
    )
    rows = Rows(frame.assign(sample="0", metric="loss"))
    cases = {"A": {"dataset": "a"}, "B": {"dataset": "b"}}
    assert control_checks(rows, cases) == {
        "A": "loss increase of uniform attention: 0.4 nats (at least 0.5 needed)"
    }


def test_intervals_stay_on_the_scale_of_the_metric():
    values = [1.0, 1.0, 0.6]
    assert mean_ci(values).mean + mean_ci(values).half > 1
    assert student_interval(values, "accuracy").high == 1
    assert student_interval(values, "perplexity").low == 1
    assert 0 < binomial_interval([1.0, 1.0], rows=9).low < binomial_interval([1.0] * 9, rows=9).low
    assert binomial_interval([8 / 9], rows=9) == pytest.approx(
        stats.binomtest(8, 9).proportion_ci(), rel=1e-6
    )


def test_the_interval_of_paired_shares_covers_the_difference():
    """Method 10, which exchanges sign with its arguments."""
    first = [1] * 48 + [0] * 2
    second = [1] * 36 + [0] * 12 + [1] * 2
    low, high = paired_shares_interval(first, second)
    assert low < 0.2 < high
    assert paired_shares_interval(second, first) == pytest.approx((-high, -low))
    assert paired_shares_interval(first, first) == pytest.approx((0, 0), abs=0.15)
