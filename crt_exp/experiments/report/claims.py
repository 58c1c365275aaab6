"""Claims of the papers and their verdicts: t-tests with Holm's correction over a page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from crt_exp.experiments.intervals import LEVEL, Mean, mean_ci, t_quantile
from crt_exp.experiments.report.rows import Rows

SUPPORTED = "supported"
CONTRADICTED = "contradicted"
CONFLICT = "theory and measurement disagree"
UNDECIDED = "inconclusive"
NOT_JUDGED = "measured, not judged"
NOT_MEASURED = "not measured"
WORDS = (SUPPORTED, CONTRADICTED, CONFLICT, UNDECIDED, NOT_JUDGED, NOT_MEASURED)
LARGEST_EQUALITY = 0.25

Samples = pd.Series | Sequence[float] | float


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, tested on one or several cases (data sets, sizes).

    Args:
        text: The claim in the terms of the page.
        cases: Samples by case, compared with `above` or `below` (default: above 0). With both, the claim is that the
            value lies between (equivalence, by two one-sided tests). A float is a closed form, without variance. Cases
            without samples are left out.
        paper: The result that the paper reports, or a mapping from cases; empty for our own questions.
        needs: What would decide cases that are inconclusive or not measured.
        above: Threshold, or a mapping from cases.
        below: Threshold, or a mapping from cases.
        unit: Unit of the value. Default: "times" for ratios, else none.
        log: Samples are logarithms; values are shown as ratios.
        power: Samples are logarithms of numbers too large to show; values are shown as e^value.
        sign_test: Use a sign test over samples, for heavy-tailed values.
        overlap: See `mean_ci`.
        theory: Closed-form values by case, which the verdict must not contradict.
        fails: Failed sanity checks by case; these cases are inconclusive.
        reason: One sentence of explanation.
        not_measured: Why no sample can test the claim.
        not_judged: What was measured, and why it does not test the claim.

    >>> [case.verdict for case in judge([Claim("more", {"A": [1.0, 1.1, 0.9], "B": [1.0]}, above=0.5)])]
    ['supported', 'inconclusive']
    """

    text: str
    cases: Mapping[str, Samples] = field(default_factory=dict)
    paper: str | Mapping[str, str] = ""
    needs: str = ""
    above: float | Mapping[str, float] | None = None
    below: float | Mapping[str, float] | None = None
    unit: str = ""
    log: bool = False
    power: bool = False
    sign_test: bool = False
    overlap: float = 0.0
    theory: Mapping[str, float] = field(default_factory=dict)
    fails: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    not_measured: str = ""
    not_judged: str = ""

    @property
    def untested(self) -> str:
        """Why no sample tests the claim, or ""."""
        return self.not_measured or self.not_judged

    @property
    def shown_unit(self) -> str:
        default = "times" if self.log else ""
        return self.unit or default

    @property
    def between(self) -> bool:
        return self.above is not None and self.below is not None

    def limit(self, bound: float | Mapping[str, float] | None, case: str) -> float:
        """A threshold in the unit of the samples, which are logarithms for claims with `log`."""
        threshold = of_case(bound, case) or 0.0
        return math.log(threshold) if self.log and threshold else threshold

    def test_case(self, case: str) -> "CaseResult":
        """Test one case, before the correction for multiple tests.

        Of the two thresholds of an equivalence, the one that is nearer to the mean decides.
        """
        samples = np.asarray(self.cases[case], float)
        sign = 1 if self.below is None else -1
        if self.between:
            middle = (self.limit(self.above, case) + self.limit(self.below, case)) / 2
            sign = 1 if samples.mean() < middle else -1
        bound = self.above if sign > 0 else self.below
        limit = self.limit(bound, case)
        gains = sign * (samples - limit)
        wins = int((gains > 0).sum())
        losses = int((gains < 0).sum())
        if samples.ndim == 0:
            estimate = Mean(float(samples), 0.0, float(samples == limit), 0)
        elif self.sign_test:
            p = float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
            estimate = Mean(float(np.median(samples)), math.nan, p, len(samples))
        else:
            estimate = mean_ci(samples, limit, overlap=self.overlap)
        agrees = sign * (estimate.mean - limit) >= 0
        if self.sign_test:
            agrees = wins > losses
        threshold = float(of_case(bound, case) or 0.0)
        return CaseResult(self, case, estimate, sign, threshold, limit, agrees, wins)


def of_case(value: Any, case: str) -> Any:
    """The value of a case; a value that is no mapping belongs to all cases."""
    return value.get(case) if isinstance(value, Mapping) else value


@dataclass(frozen=True)
class CaseResult:
    """One case of a claim: its mean and, after `judge`, p-value and verdict.

    sign: 1 if the value is claimed to be above its threshold, -1 if it is claimed to be below. limit: threshold in the
    unit of the samples. agrees: whether the mean (or most samples, for a sign test) is on the claim's side of the
    threshold. wins: number of samples on that side.
    """

    claim: Claim
    case: str
    estimate: Mean
    sign: int = 1
    threshold: float = 0.0
    limit: float = 0.0
    agrees: bool = True
    wins: int = 0
    p: float = math.nan
    verdict: str = NOT_MEASURED
    level: float = LEVEL  # level of the interval that `to_text` prints

    @property
    def number(self) -> float:
        """The mean, as a ratio for claims with `log`."""
        return math.exp(self.estimate.mean) if self.claim.log else self.estimate.mean

    @property
    def ends(self) -> tuple[float, float]:
        """Ends of the corrected interval.

        The interval excludes the threshold exactly if the verdict is supported or contradicted.
        """
        mean, half, _, n = self.estimate
        if n > 1 and half > 0:
            half *= t_quantile(n, self.level) / t_quantile(n)
        low, high = mean - half, mean + half
        return (math.exp(low), math.exp(high)) if self.claim.log else (low, high)

    def to_text(self) -> str:
        """Format the value with its interval and unit."""
        claim = self.claim
        ratio = self.threshold or claim.log or claim.power
        text = f"{self.number:.3g}" if ratio else f"{self.number:+.3g}"
        low, high = self.ends
        several = self.estimate.n > 1
        if claim.sign_test:
            text += f" (median; {self.wins} of {self.estimate.n} samples {self.side} the threshold)"
        elif claim.power:
            text = f"e^{text} [e^{low:.3g}, e^{high:.3g}]" if several else f"e^{text}"
        elif several:
            text += f" [{low:.3g}, {high:.3g}]" if claim.log else f" ± {(high - low) / 2:.2g}"
        return f"{text} {claim.shown_unit}".rstrip()

    @property
    def base_verdict(self) -> str:
        """The verdict without a note on scale or data."""
        return self.verdict.partition(" (")[0]

    @property
    def equality(self) -> str:
        """For an undecided ratio, how far from 1 it is at most by its interval, if that is at most 25%."""
        if self.base_verdict != UNDECIDED or self.check or not self.claim.log:
            return ""
        if self.limit != 0 or not self.estimate.half > 0:
            return ""
        low, high = self.ends
        most = max(high, 1 / low) - 1
        return f"equal within {most:.0%}" if most <= LARGEST_EQUALITY else ""

    @property
    def side(self) -> str:
        return "above" if self.sign > 0 else "below"

    @property
    def paper(self) -> str:
        return of_case(self.claim.paper, self.case) or ""

    @property
    def check(self) -> str:
        """The failed sanity check, or ""."""
        return self.claim.fails.get(self.case, "")


def judge(claims: Sequence[Claim], reduced: bool = False, stand_in: str = "") -> list[CaseResult]:
    """Return all cases of a page's claims with verdicts, corrected by Holm's method.

    reduced: the runs are smaller than the paper's. stand_in: prefix of cases whose data replace the paper's data.
    Verdicts state both.
    """
    results = []
    for claim in claims:
        if claim.untested:
            verdict = NOT_JUDGED if claim.not_judged else NOT_MEASURED
            estimate = Mean(math.nan, math.nan, 1.0, 0)
            results.append(CaseResult(claim, "", estimate, verdict=verdict))
            continue
        for case, samples in claim.cases.items():
            if np.size(samples):
                results.append(claim.test_case(case))
    tested = [result for result in results if not (result.claim.untested or result.check)]
    corrected = holm([result.estimate.p for result in tested])
    p_values = dict(zip(map(id, tested), corrected))
    judged = []
    for result in results:
        if not result.claim.untested:
            p = p_values.get(id(result), math.nan)
            result = _with_verdict(result, p, reduced, stand_in)
        judged.append(result)
    return judged


def _with_verdict(result: CaseResult, p: float, reduced: bool, stand_in: str) -> CaseResult:
    limit = result.limit
    closed_form = result.claim.theory.get(result.case, limit)
    verdict = SUPPORTED if result.agrees else CONTRADICTED
    if not p <= LEVEL:
        verdict = UNDECIDED
    elif (closed_form - limit) * (result.estimate.mean - limit) < 0:
        verdict = CONFLICT
    elif stand_in and result.case.startswith(stand_in):
        verdict += " (stand-in data)"
    elif reduced:
        verdict += " (reduced scale)"
    level = LEVEL
    if p > 0 and result.estimate.p:
        level = LEVEL * result.estimate.p / p
    return replace(result, p=p, verdict=verdict, level=level)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for multiple tests (Holm, 1979).

    >>> [round(p, 2) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p_values)
    factors = np.arange(len(order), 0, -1)
    raised = np.maximum.accumulate(factors * np.asarray(p_values, float)[order])
    return np.minimum(1, raised)[np.argsort(order)].tolist()


LEAST_SHARE = 0.25  # of the gain of exact attention; with less, a method is not trained yet


def training_check(name: str, share: float) -> str:
    """Return why a method is not trained yet, or "".

    share: its gain over uniform attention, as a share of that of exact attention.

    >>> training_check("ReLU", 0.12)
    'not trained yet: ReLU has 12% of the gain of exact attention over uniform attention (at least 25% needed)'
    """
    if not share < LEAST_SHARE:
        return ""
    return (
        f"not trained yet: {name} has {share:.0%} of the gain of exact attention over uniform attention "
        f"(at least {LEAST_SHARE:.0%} needed)"
    )


def control_checks(
    rows: Rows,
    cases: Mapping[str, Mapping[str, object]],
    metric: str = "loss",
    least: float = 0.5,
    unit: str = "nats",
    control: str = "uniform",
) -> dict[str, str]:
    """Return the cases in which attention matters too little to compare methods, with the reason.

    Args:
        cases: Filter of the rows of each case.
        metric: What the control increases; "above" is the increase itself.
        least: The least increase with which methods can be compared.
        control: Method that does not use the keys.
    """
    fails = {}
    for case, where in cases.items():
        if metric == "above":
            cost = rows.values(metric, control, **where).mean()
        else:
            cost = rows.paired(control, "exact", metric, **where).mean()
        if cost < least:
            fails[case] = (
                f"loss increase of {control} attention: {cost:.3g} {unit} (at least {least:g} needed)"
            )
    return fails
