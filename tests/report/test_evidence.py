"""Intervals, verdicts and gates: they cover what they say, and refuse what they cannot judge."""

import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from crt_exp.report.evidence import (
    Claim,
    Gate,
    GateFailed,
    Interval,
    Unjudged,
    bootstrapped,
    check_gates,
    detectable,
    exactly,
    holm,
    independent,
    inside,
    judged,
    over_runs,
    overlapping,
    paired,
)


def test_student_equals_scipy():
    values = np.random.default_rng(0).normal(1, 2, 9)
    found, test = independent(values), stats.ttest_1samp(values, 0)
    low, high = test.confidence_interval(0.95)
    assert np.allclose([found.low, found.high, found.p], [low, high, test.pvalue])
    first, second = values, values[::-1] + 0.3
    assert np.isclose(paired(first, second).p, stats.ttest_rel(first, second).pvalue)


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


def test_bootstrap_of_a_paired_difference():
    """Of a mean it has the error that the mean has; what both models share cancels."""
    rng = np.random.default_rng(2)
    shared, gain = rng.normal(0, 5, 300), rng.normal(0.4, 1, 300)
    found = bootstrapped(lambda rows: (shared + gain)[rows].mean() - shared[rows].mean(), 300, draws=2000)
    assert np.isclose(found.mean, gain.mean()) and found.n == 300
    assert np.isclose(found.half, 1.96 * gain.std() / 300**0.5, rtol=0.06) and found.p < 1e-4
    assert bootstrapped(lambda rows: 0.0, 5).p == 1


def test_runs_and_examples_both_count():
    """Covers the truth where scores of a few runs share a test set that was drawn, as that of runs alone does not."""
    rng, covered = np.random.default_rng(3), Counter()
    for _ in range(400):
        runs = 0.5 + rng.normal(0, 0.5) + rng.normal(0, 0.5, 4)  # the examples' chance, the trainings'
        found = over_runs(runs, Interval(0.5, 1.96 * 0.5, 0.0, 100))
        covered["both"] += found.low <= 0.5 <= found.high
        covered["runs"] += independent(runs).low <= 0.5 <= independent(runs).high
    assert covered["both"] > 0.94 * 400 > 0.9 * 400 > covered["runs"]


def test_equivalence_is_confirmed_by_more_draws():
    """The mean of |d| stays above the bound where the mean of d is 0."""
    draws = np.random.default_rng(4).normal(0, 0.04, 400)
    assert np.mean(np.abs(draws)) > 0.02
    word = lambda values: judged([Claim("near", independent(inside(values, 0.02)))])[0].word
    assert [word(draws[:4]), word(draws), word(draws + 0.05), word(draws - 0.05)] == [
        "open", "confirmed", "refuted", "refuted"]


def test_holm_by_hand():
    assert np.allclose(holm([0.01, 0.04, 0.03]), [0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def test_verdicts_say_all_three_words():
    values = {"up": [1.0, 1.1, 0.9, 1.0], "down": [-1.0, -1.1, -0.9, -1.0], "none": [1.0, -1.0, 0.5, -0.4]}
    verdicts = judged([Claim(name, independent(v), "nats") for name, v in values.items()])
    assert [v.word for v in verdicts] == ["confirmed", "refuted", "open"]
    assert "**refuted**: down: -1 ± 0.13 nats (n = 4" in str(verdicts[1])
    assert verdicts[0].row()["verdict"] == "confirmed" and verdicts[0].p > verdicts[0].claim.difference.p


def test_a_closed_form_is_told_as_exact():
    verdict = judged([Claim("less variance", exactly(1.234), "nats"), Claim("by draws", independent([1.0, -1.0]))])[0]
    assert verdict.word == "confirmed" and verdict.row()["n"] == 0
    assert str(verdict) == "- **confirmed**: less variance: +1.23 nats (exact)"


def test_what_a_failed_gate_leaves_unjudged_is_open_with_its_figure():
    gate = Gate("what uniform attention costs, in nats", 0.1, 0.5)
    left = Unjudged(Claim("A is better than B", independent([1.0, 1.1, 0.9]), "nats"), gate)
    assert left.word == "open" and left.row()["verdict"] == "open" and left.row()["difference"] == pytest.approx(1)
    assert str(left).startswith("- **open**, not judged: A is better than B: +1") and "is 0.1" in str(left)


def test_detectable_difference_has_the_power_it_states():
    rng, n, found = np.random.default_rng(2), 12, 0
    effect = detectable(rng.normal(size=4000), n)
    for _ in range(2000):
        found += independent(rng.normal(effect, 1, n)).p < 0.05
    assert 0.77 < found / 2000 < 0.83


def test_gates_stop_with_their_figures():
    gates = [Gate("uniform attention costs, in nats", 0.7, least=0.5), Gate("mean |x + y|^2", 31.0, least=4, most=24)]
    assert [g.passed for g in gates] == [True, False]
    with pytest.raises(GateFailed, match=r"mean \|x \+ y\|\^2: 31 \(at least 4 and at most 24\)"):
        check_gates(gates)
    assert check_gates(gates[:1]) == gates[:1]


def test_what_cannot_be_judged_is_refused():
    with pytest.raises(ValueError, match="at least two draws"):
        independent([1.0])
    with pytest.raises(ValueError, match="draw 1 is not a finite number"):
        independent([1.0, math.nan, 2.0])
    assert independent([0.0, 0.0]).p == 1 and independent([1.0, 1.0]).p == 0
