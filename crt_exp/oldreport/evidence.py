"""What a report may conclude: intervals, gates on the setting, verdicts on claims.

Legend: n independent draws (seeds, data sets drawn again); all intervals are two-sided, 95% unless said otherwise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.special import bdtr, stdtr, stdtrit

LEVEL = 0.05  # of all verdicts of a family together
LOOKS = {1: LEVEL, 2: 0.029, 3: 0.022}  # of each look, where all looks together keep LEVEL (Pocock, 1977)
Word = Literal["holds", "fails", "conflict", "not comparable", "cannot tell here"]
WORDS: tuple[Word, ...] = ("holds", "fails", "conflict", "not comparable", "cannot tell here")
NAMED = 4     # arms of one place that a first line names


@dataclass(frozen=True)
class Interval:
    """A mean, the half-width of its interval, and the probability of a mean as far from 0 where the truth is 0."""

    mean: float
    half: float
    p: float
    n: int
    level: float = LEVEL
    sides: int = 2  # of the test: 1 for equivalence

    def at(self, level: float) -> "Interval":
        """Student's interval that excludes 0 where p <= level."""
        if not self.half > 0:  # of no width, or of a sign test
            return self
        wanted, had = (stdtrit(self.n - 1, each / self.sides) for each in (level, self.level))
        return replace(self, half=self.half * float(wanted / had), level=level)

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    @property
    def positive(self) -> bool:
        """Which side of 0 the draws are on."""
        return self.mean > 0

    def shown(self, bar: "Bar") -> str:
        """The value that is compared with the bar, which this interval, of how far it lies beyond, is not."""
        return bar.shown(self)

    def __format__(self, spec: str) -> str:
        return f"{self.mean:{spec}} ± {self.half:{spec.replace('+', '')}}"


@dataclass(frozen=True)
class Signs(Interval):
    """Of a sign test: the median stands for the mean, without width; `above` and `below` 0 of n values."""

    above: int = 0
    below: int = 0

    @property
    def positive(self) -> bool:
        return self.above > self.below

    def shown(self, bar: "Bar") -> str:
        equal = self.n - self.above - self.below
        ties = f", {equal} at it" if equal else ""
        return f"{self.above} of {self.n} beyond the bar{ties}, median {bar.shown(self)}"


@dataclass(frozen=True)
class Bar:
    """What the value of a claim is compared with. The claim's difference is how far the value lies beyond it: on the
    side 1, above `at`, or -1, below; with `log` the difference of their logarithms, and `unit` that of the values.
    said: the bar in words; sign: whether the value is a difference, which is shown with its sign; power: values are
    logarithms, and e^value is shown."""

    at: float
    side: int
    said: str
    unit: str = ""
    log: bool = False
    sign: bool = False
    power: bool = False

    def value(self, difference: float) -> float:
        return self.at * math.exp(self.side * difference) if self.log else self.at + self.side * difference

    def shown(self, beyond: Interval) -> str:
        """The value with its interval, given how far it lies beyond the bar."""
        value = self.number(self.value(beyond.mean))
        if beyond.n > 1 and not math.isnan(beyond.half):
            ends = sorted(self.value(end) for end in (beyond.low, beyond.high))
            value += (f" ± {beyond.half:.3g}" if not self.log and not self.power else
                      f" [{self.number(ends[0])}, {self.number(ends[1])}]")
        return f"{value} {self.unit}".rstrip()

    def number(self, value: float) -> str:
        if self.power:
            return f"e^{value:.3g}"
        return f"{value:{'+.3g' if self.sign and not self.log else '.3g'}}"


@dataclass(frozen=True)
class Share(Bar):
    """A bar that is a share of what another arm gains, which differs from unit to unit: the claim's difference is how
    far the gain lies beyond `at` of the other. ours, whole: the gains of both."""

    ours: Sequence[float] = ()
    whole: Sequence[float] = ()

    def value(self, difference: float) -> float:
        return float(np.mean(self.ours) / np.mean(self.whole))

    def shown(self, beyond: Interval) -> str:
        low, high = share_between(self.ours, self.whole, beyond.level) if len(self.ours) > 1 else (math.nan, math.nan)
        ends = "" if math.isnan(low) else f" [{low:.3g}, {high:.3g}]"
        return f"{self.value(beyond.mean):.3g}{ends} of it"


def independent(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Student's interval of the mean of independent draws. ValueError: below two draws, or one is not finite."""
    return _student(values, 1 / len(values) if len(values) else 1, level)


def exactly(value: float) -> Interval:
    """Of what a closed form tells without any draw: an interval of no width."""
    return Interval(value, 0.0, float(value == 0), 0)


def overlapping(values: Sequence[float], test_share: float, level: float = LEVEL) -> Interval:
    """Nadeau and Bengio's interval for random splits of one data set, which overlap and so are not independent.

    test_share: rows of the test part over rows of the training part. The variance of the mean is (1/n + test_share)
    times that of the values (Nadeau and Bengio, Machine Learning 52, 2003, section 3).
    """
    return _student(values, 1 / max(len(values), 1) + test_share, level)


def inside(values: np.ndarray, bound: float) -> np.ndarray:
    """Draws of how far the mean lies inside -bound to bound: a claim of equivalence, which more draws can confirm (two
    one-sided tests). The mean of bound - |values| could not: it stays below bound however equal the means are."""
    return bound - np.sign(np.sum(values)) * values


def equivalent(values: Sequence[float], bound: float) -> Interval:
    """How far the mean lies inside -bound to bound, with the p-value of two one-sided tests (TOST)."""
    distance = independent(inside(np.asarray(values, float), bound), 2 * LEVEL)
    return replace(distance, p=distance.p / 2, level=LEVEL, sides=1)


def share_between(ours: Sequence[float], whole: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """The shares s at which the mean of ours - s whole may be 0 (Fieller's interval of a ratio of means); not numbers
    where these are no interval, as `whole` may have mean 0 itself."""
    ours, whole = _checked(ours), _checked(whole)
    spread = float(stdtrit(len(ours) - 1, 1 - level / 2))**2 / len(ours) * np.cov(ours, whole)
    a = whole.mean()**2 - spread[1, 1]
    b, c = ours.mean() * whole.mean() - spread[0, 1], ours.mean()**2 - spread[0, 0]
    if a <= 0:
        return math.nan, math.nan
    root = math.sqrt(max(b * b - a * c, 0.0))
    return float((b - root) / a), float((b + root) / a)


def signs(values: Sequence[float]) -> Signs:
    """The sign test of a median of 0, for values of which single ones decide a mean; zeros are left out of it."""
    values = _checked(values)
    above, below = int((values > 0).sum()), int((values < 0).sum())
    p = min(1.0, 2 * float(bdtr(min(above, below), above + below, 0.5))) if above + below else 1.0
    return Signs(float(np.median(values)), math.nan, p, len(values), above=above, below=below)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number: any wrong rejection among them has at most the level's probability."""
    order, adjusted, largest = np.argsort(p_values), [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = largest
    return adjusted


@dataclass(frozen=True)
class Claim:
    """An ordering: `difference` is above 0 if it holds. unit: of the difference. bar: what the text's value, which is
    shown beside it, is compared with: without another the difference itself with 0.
    closed: the same difference by a closed form, which no draw disturbs; heavy tails may hide it from few draws.
    paper: the paper's number or words; why: one sentence; looks: at the draws, before the verdict; kind: the text
    without setting and place, which claims have in common that ask the same of several."""

    text: str
    difference: Interval
    unit: str = ""
    closed: float | None = None
    paper: str = ""
    why: str = ""
    looks: int = 1
    bar: Bar | None = None
    kind: str = ""

    @property
    def against(self) -> Bar:
        return self.bar or Bar(0.0, 1, "above 0", self.unit, sign=True)

    def shown(self) -> str:
        """Value and bar, and the paper's number, as a verdict's line has them."""
        paper = f"; the paper: {self.paper}" if self.paper else ""
        return f"{self.value} (bar: {self.against.said}{paper})"

    @property
    def value(self) -> str:
        return self.difference.shown(self.against)

    def row(self, word: Word) -> dict[str, float | int | str]:
        """For the index of all verdicts."""
        interval = self.difference
        width = {} if math.isnan(interval.half) else {"difference_ci95": interval.at(LEVEL).half}
        bar = self.against
        closed = {} if self.closed is None else {"closed_form": bar.number(bar.value(self.closed))}
        return {"claim": self.text, "verdict": word, "value": self.value, "bar": self.against.said,
                "difference": interval.mean, **width, "unit": self.unit, "n": interval.n, **closed,
                **stated(paper=self.paper, why=self.why)}


def stated(**texts: str) -> dict[str, str]:
    """Those that are not empty."""
    return {key: text for key, text in texts.items() if text}


@dataclass(frozen=True)
class Verdict:
    """A claim judged; p is corrected for the number of claims judged together."""

    claim: Claim
    p: float
    level: float = LEVEL

    @property
    def word(self) -> Word:
        """By the draws; "conflict" where these decide and a closed form says the contrary."""
        if self.p > self.level:
            return "cannot tell here"
        word: Word = "holds" if self.claim.difference.positive else "fails"
        return "conflict" if (self.claim.closed or 0) * self.claim.difference.mean < 0 else word

    def row(self) -> dict[str, float | int | str]:
        """For the index of all verdicts."""
        return {**self.claim.row(self.word), "p_holm": self.p}

    def __str__(self) -> str:
        """A line of a list in Markdown; n, p and what else it rests on stand in the table of all verdicts."""
        return f"- **{self.word}**: {self.claim.text}: {self.claim.shown()}"


@dataclass(frozen=True)
class Unmeasured:
    """What a paper says and this page does not measure, or not so that it could be compared."""

    text: str
    word: Word
    reason: str
    paper: str = ""

    def row(self) -> dict[str, float | int | str]:
        return {"claim": self.text, "verdict": self.word, "why": self.reason, **stated(paper=self.paper)}

    def __str__(self) -> str:
        paper = f" (the paper: {self.paper})" if self.paper else ""
        return f"- **{self.word}**: {self.text}{paper}: {self.reason}"


def won_by(control: str, beaten: Mapping[str, Sequence[str]], of: int) -> str:
    """The first line of a report: which of so many arms a control beats, by where (where -> arms); many are counted."""
    count = sum(map(len, beaten.values()))
    if not count:
        return f"None of {of} arms is worse than {control}, a control."
    shown = "; ".join(f"{where + ': ' if where else ''}{', '.join(arms) if len(arms) <= NAMED else len(arms)}"
                     for where, arms in beaten.items() if arms)
    return f"**{control[0].upper()}{control[1:]}, a control, beats {count} of {of} arms.** {shown}."


def judged(claims: Sequence[Claim]) -> list[Verdict]:
    """All verdicts of a family, with Holm's correction over them, each at the level that its looks leave.

    The interval of each is that of its corrected test: it excludes the bar where the verdict is holds or fails."""
    verdicts = []
    for claim, p in zip(claims, holm([claim.difference.p for claim in claims])):
        level = LOOKS[claim.looks]
        own = claim.difference.at(level * claim.difference.p / p if p else level)
        verdicts.append(Verdict(replace(claim, difference=own), p, level))
    return verdicts


@dataclass(frozen=True)
class Unjudged:
    """A claim that its setting cannot tell, for a gate failed: whatever its difference, which is shown all the same.
    It counts for no correction."""

    claim: Claim
    gate: "Gate"
    word: Word = "cannot tell here"

    def row(self) -> dict[str, float | int | str]:
        return {**self.claim.row(self.word), "not_judged": f"{self.gate.text}: {self.gate.shown}"}

    def __str__(self) -> str:
        return f"- **{self.word}**, a gate failed: {self.claim.text}: {self.claim.shown()}"


@dataclass(frozen=True)
class Gate:
    """What must hold before a report spends its time: `value` between `least` and `most`. family: the verdicts that it
    is asked for, "claims" or "bars"; empty: all."""

    text: str
    value: float
    least: float = -math.inf
    most: float = math.inf
    family: str = ""

    @property
    def shown(self) -> str:
        return "not measured" if math.isnan(self.value) else f"{self.value:.3g}"

    @property
    def passed(self) -> bool:
        return self.least <= self.value <= self.most

    def __str__(self) -> str:
        least = [f"at least {self.least:g}"] if self.least > -math.inf else []
        most = [f"at most {self.most:g}"] if self.most < math.inf else []
        word = "passed" if self.passed else "**failed**"
        return f"- {word}: {self.text}: {self.shown} ({' and '.join(least + most)})"


def _student(values: Sequence[float], variance_share: float, level: float) -> Interval:
    values = _checked(values)
    n, mean = len(values), float(values.mean())
    error = float(values.std(ddof=1)) * math.sqrt(variance_share)
    p = float(2 * stdtr(n - 1, -abs(mean) / error)) if error > 0 else float(mean == 0)
    return Interval(mean, float(stdtrit(n - 1, 1 - level / 2)) * error, p, n, level)


def _checked(values: Sequence[float]) -> np.ndarray:
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or len(values) < 2:
        raise ValueError(f"an interval needs at least two draws, not values of shape {values.shape}")
    if not np.isfinite(values).all():
        first = int(np.argmin(np.isfinite(values)))
        raise ValueError(f"draw {first} is not a finite number: name and count such draws apart")
    return values
