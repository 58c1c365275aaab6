"""Means with intervals, and verdicts on the papers' claims: Student's t-tests with Holm's correction over a page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

LEVEL = 0.05
DECIDED = ("supported", "contradicted")
UNDECIDED, CONFLICT, NOT_MEASURED = "inconclusive", "theory and measurement disagree", "not measured"
WORDS = (*DECIDED, CONFLICT, UNDECIDED, NOT_MEASURED)


class Mean(NamedTuple):
    """A mean of n samples, the half-width of its interval, and the p-value of a mean that is `against`."""

    mean: float
    half: float
    p: float
    n: int

    def __format__(self, spec: str) -> str:
        return f"{self.mean:{spec}} ± {self.half:{spec.replace('+', '')}}" if self.n > 1 else f"{self.mean:{spec}}"


def mean_ci(values: Sequence[float], against: float = 0.0, level: float = LEVEL, overlap: float = 0.0) -> Mean:
    """Student's interval of independent samples. overlap: test rows over training rows of random splits of one data
    set, whose variance is (1/n + overlap) times that of the values (Nadeau and Bengio, Machine Learning 52, 2003)."""
    values = np.asarray(values, float)
    n = len(values)
    if n < 2:
        return Mean(float(values[0]) if n else math.nan, math.nan, 1.0, n)
    if not np.isfinite(values).all():
        raise ValueError(f"sample {np.argmin(np.isfinite(values))} is not finite: count such samples apart")
    mean, error = float(values.mean()), float(values.std(ddof=1)) * math.sqrt(1 / n + overlap)
    p = float(2 * stats.t.sf(abs(mean - against) / error, n - 1)) if error else float(mean == against)
    return Mean(mean, float(stats.t.isf(level / 2, n - 1)) * error, p, n)


def geometric_mean_ci(values: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean and the ends of its 95% interval."""
    log = mean_ci(np.log(values))
    return math.exp(log.mean), math.exp(log.mean - log.half), math.exp(log.mean + log.half)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number (Holm, 1979)."""
    order = np.argsort(p_values)
    raised = np.maximum.accumulate(np.arange(len(order), 0, -1) * np.asarray(p_values, float)[order])
    return np.minimum(1, raised)[np.argsort(order)].tolist()


Samples = pd.Series | Sequence[float] | float


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, tested on one or several cases (data sets, sizes).

    text: the claim in the terms of the page. cases: case -> samples of the value that is compared with `above` or
    `below` (default: above 0); a case without samples is left out. A float instead of samples is a closed form,
    without chance.
    paper: what the paper reports, or case -> that. unit: of the value. log: samples are logarithms, and values are
    shown as ratios; power: they are logarithms too large for that, shown as e^value. sign_test: over samples, for heavy
    tails. overlap: see `mean_ci`. theory: case -> the value by a closed form, which the verdict must not contradict.
    fails: case -> a sanity check that failed there, which leaves the case inconclusive.
    reason: one sentence on why; not_measured: why no sample can judge the claim.
    """

    text: str
    cases: Mapping[str, Samples] = field(default_factory=dict)
    paper: str | Mapping[str, str] = ""
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

    def of(self, case: str) -> "Tested":
        """The test of one case, before the correction."""
        if self.not_measured:
            return Tested(self, case, Mean(math.nan, math.nan, 1.0, 0))
        side, bound = (1, self.above) if self.below is None else (-1, self.below)
        threshold = float((bound.get(case, 0.0) if isinstance(bound, Mapping) else bound) or 0.0)
        limit = math.log(threshold) if self.log and threshold else threshold
        samples = np.asarray(self.cases[case], float)
        gains = side * (samples - limit)
        wins, losses = int((gains > 0).sum()), int((gains < 0).sum())
        if isinstance(self.cases[case], float | int):
            found = Mean(float(samples), 0.0, float(samples == limit), 0)
        elif self.sign_test:
            p = float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
            found = Mean(float(np.median(samples)), math.nan, p, len(samples))
        else:
            found = mean_ci(samples, limit, overlap=self.overlap)
        agrees = wins > losses if self.sign_test else side * (found.mean - limit) >= 0
        return Tested(self, case, found, threshold, limit, agrees, wins)


@dataclass(frozen=True)
class Tested:
    """A claim in one case: its mean, and after `judge` its corrected p-value and verdict.

    limit: the threshold, of log claims its logarithm. agrees: whether the samples lie on the claim's side of it; wins:
    how many do.
    """

    claim: Claim
    case: str
    found: Mean
    threshold: float = 0.0
    limit: float = 0.0
    agrees: bool = True
    wins: int = 0
    p: float = math.nan
    verdict: str = NOT_MEASURED
    level: float = LEVEL  # of the interval that is shown

    @property
    def number(self) -> float:
        """The value as shown."""
        return math.exp(self.found.mean) if self.claim.log else self.found.mean

    @property
    def ends(self) -> tuple[float, float]:
        """Of the interval of the corrected test, which excludes the threshold exactly where the verdict is decided."""
        half, n = self.found.half, self.found.n - 1
        if n > 0 and half > 0:
            half *= float(stats.t.isf(self.level / 2, n) / stats.t.isf(LEVEL / 2, n))
        ends = self.found.mean - half, self.found.mean + half
        return tuple(math.exp(end) for end in ends) if self.claim.log else ends

    def shown(self) -> str:
        """The value with its interval and unit."""
        claim, sign = self.claim, "" if self.threshold or self.claim.log or self.claim.power else "+"
        text = f"{self.number:{sign}.3g}"
        low, high = self.ends
        if claim.sign_test:
            text = f"{text} (median; {self.wins} of {self.found.n} samples {self.word} the threshold)"
        elif claim.power:
            text = f"e^{text}" + (f" [e^{low:.3g}, e^{high:.3g}]" if self.found.n > 1 else "")
        elif self.found.n > 1:
            text += f" [{low:.3g}, {high:.3g}]" if claim.log else f" ± {(high - low) / 2:.2g}"
        return f"{text} {claim.unit}".rstrip()

    @property
    def word(self) -> str:
        return "above" if self.claim.below is None else "below"

    @property
    def paper(self) -> str:
        given = self.claim.paper
        return given.get(self.case, "") if isinstance(given, Mapping) else given


def judge(claims: Sequence[Claim], reduced: bool = False) -> list[Tested]:
    """All cases of a page's claims with their verdicts; Holm's correction is over all cases that are judged.

    reduced: the runs are smaller than the paper's, which the words say.
    """
    tested = [claim.of(case) for claim in claims for case in ([""] if claim.not_measured else claim.cases)
              if claim.not_measured or np.size(claim.cases[case])]
    judged = [each for each in tested if not each.claim.not_measured and each.case not in each.claim.fails]
    corrected = dict(zip(map(id, judged), holm([each.found.p for each in judged])))
    return [_with_verdict(each, corrected.get(id(each), math.nan), reduced) for each in tested]


def _with_verdict(each: Tested, p: float, reduced: bool) -> Tested:
    if each.claim.not_measured:
        return each
    word = DECIDED[not each.agrees]
    if (each.claim.theory.get(each.case, each.limit) - each.limit) * (each.found.mean - each.limit) < 0:
        word = CONFLICT
    if not p <= LEVEL:
        word = UNDECIDED
    note = " (reduced scale)" if reduced and word in DECIDED else ""
    level = LEVEL * each.found.p / p if p and p == p and each.found.p else LEVEL
    return replace(each, p=p, verdict=word + note, level=level)
