"""Means of repeated measurements with 95% intervals, and their format."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

LEVEL = 0.05  # significance level of tests; intervals have level 1 - LEVEL
OVER = "interval_over"  # key of a final record: what the run's own interval was computed over
# smallest and largest value of a metric; metrics without an entry are unbounded
SCALES = {
    "accuracy": (0.0, 1.0),
    "f1": (0.0, 1.0),
    "mcc": (-1.0, 1.0),
    "pearson": (-1.0, 1.0),
    "spearman": (-1.0, 1.0),
    "r2": (-math.inf, 1.0),
    "wer": (0.0, math.inf),
    "cer": (0.0, math.inf),
    "loss": (0.0, math.inf),
    "perplexity": (1.0, math.inf),
}


class Mean(NamedTuple):
    """Mean of n samples, half-width of its interval, p-value against a value.

    >>> str(mean_ci([1.0, 1.1, 0.9]))
    '1.00 ± 0.25'
    >>> f"{mean_ci([1.0, 1.1, 0.9]):.1f}"
    '1.0 ± 0.2'
    """

    mean: float
    half: float
    p: float
    n: int

    def __format__(self, spec: str) -> str:
        if self.n == 0:
            return ""
        if self.n == 1:
            return f"{self.mean:{spec}}"
        spec = spec or self.two_digits
        return f"{self.mean:{spec}} ± {self.half:{spec.replace('+', '')}}"

    def __str__(self) -> str:
        return format(self)

    @property
    def two_digits(self) -> str:
        """Format of numbers that gives the half-width two significant digits."""
        if not self.half:
            return ".3g"
        return f".{max(0, 1 - math.floor(math.log10(self.half)))}f"


def mean_ci(values: Sequence[float], against: float = 0.0, overlap: float = 0.0) -> Mean:
    """Return Student's interval of independent samples, and the p-value.

    Args:
        against: Mean under the null hypothesis.
        overlap: Test rows over training rows, for random splits of one data set. The variance is (1/n + overlap) times
            that of the values (Nadeau and Bengio, Machine Learning 52, 2003).

    Raises:
        ValueError: If a sample is not finite.
    """
    from scipy import stats  # slow to import

    values = np.asarray(values, float)
    n = len(values)
    if n < 2:
        return Mean(float(values[0]) if n else math.nan, math.nan, 1.0, n)
    finite = np.isfinite(values)
    if not finite.all():
        sample = np.argmin(finite)
        raise ValueError(f"sample {sample}: expected a finite value; exclude diverged samples")
    mean = float(values.mean())
    error = float(values.std(ddof=1)) * math.sqrt(1 / n + overlap)
    p = float(mean == against)
    if error:
        p = float(2 * stats.t.sf(abs(mean - against) / error, n - 1))
    return Mean(mean, t_quantile(n) * error, p, n)


def t_quantile(n: int, level: float = LEVEL) -> float:
    """Half-width of Student's interval of n samples, in standard errors."""
    from scipy import stats

    return float(stats.t.isf(level / 2, n - 1))


# ---- intervals within the scale of a metric


class Interval(NamedTuple):
    """The ends of a 95% interval; nan if there is none."""

    low: float
    high: float


def scale_of(metric: str) -> Interval:
    """Return the smallest and the largest value of a metric.

    >>> scale_of("accuracy_top5"), scale_of("bits_per_dim")
    (Interval(low=0.0, high=1.0), Interval(low=-inf, high=inf))
    """
    return Interval(*SCALES.get(metric.partition("_")[0], (-math.inf, math.inf)))


def student_interval(values: Sequence[float], metric: str, overlap: float = 0.0) -> Interval:
    """Return Student's interval of a metric, without the part outside the metric's scale.

    The true value lies on the scale, so the cut does not change the coverage. The ends are nan for less than two
    values, and if a value is not finite. overlap: see `mean_ci`.

    >>> student_interval([0.8, 1.0, 1.0], "accuracy").high
    1.0
    """
    values = np.asarray(values, float)
    if len(values) < 2 or not np.isfinite(values).all():
        return Interval(math.nan, math.nan)
    mean = mean_ci(values, overlap=overlap)
    scale = scale_of(metric)
    return Interval(max(mean.mean - mean.half, scale.low), min(mean.mean + mean.half, scale.high))


def binomial_interval(shares: Sequence[float], rows: int, overlap: float = 0.0) -> Interval:
    """Return the exact binomial interval of the mean of shares, such as accuracies of splits.

    The number of trials is the effective number of rows: the one that has the variance between the shares (Korn and
    Graubard, Survey Methodology 24, 1998). It is at most the total number of rows.

    Args:
        rows: rows of each share.
        overlap: see `mean_ci`.

    >>> low, high = binomial_interval([1.0, 8 / 9, 7 / 9, 8 / 9, 8 / 9], rows=9)
    >>> f"{low:.2f} to {high:.2f}"
    '0.75 to 0.96'
    """
    from scipy import stats

    n = len(shares)
    mean = float(np.mean(shares))
    total = n * rows
    trials = total
    if n > 1:
        variance = float(np.var(shares, ddof=1)) * (1 / n + overlap)
        if variance:
            trials = mean * (1 - mean) / variance
        trials *= (t_quantile(total) / t_quantile(n)) ** 2
    trials = min(trials, total)
    right = mean * trials
    wrong = trials - right
    low = float(stats.beta.ppf(LEVEL / 2, right, wrong + 1)) if right > 0 else 0.0
    high = float(stats.beta.ppf(1 - LEVEL / 2, right + 1, wrong)) if wrong > 0 else 1.0
    return Interval(low, high)


def interval_record(metric: str, interval: Interval, over: str) -> dict[str, Any]:
    """Return the keys of a final record with the run's own interval of its metric.

    over: what was repeated, such as "5 splits". The ends are None if there is no interval.
    """
    record: dict[str, Any] = {}
    for name, end in interval._asdict().items():
        record[f"{metric}_{name}"] = end if math.isfinite(end) else None
    return record | {OVER: over}


def recorded_interval(record: Mapping[str, Any], metric: str) -> Interval:
    """Return the interval of a metric in a final record; its ends are nan if the run recorded none."""
    ends = [record.get(f"{metric}_{name}") for name in Interval._fields]
    return Interval(*[math.nan if end is None else end for end in ends])


def interval_text(record: Mapping[str, Any], metric: str) -> str:
    """Format the interval of a final record, to follow the value; "" if there is none."""
    low, high = recorded_interval(record, metric)
    if math.isnan(low):
        return ""
    return f" ({low:.4f} to {high:.4f}, 95% interval over {record[OVER]})"


def paired_shares_interval(first: Sequence[bool], second: Sequence[bool]) -> Interval:
    """Return the interval of the difference first - second of two shares on the same examples.

    Wilson intervals of both shares, combined with their correlation (Newcombe, Statistics in Medicine 17, 1998, method
    10).

    >>> low, high = paired_shares_interval([1] * 9 + [0], [1] * 6 + [0] * 4)
    >>> f"{low:.2f} to {high:.2f}"
    '0.00 to 0.56'
    """
    from scipy import stats

    first = np.asarray(first, bool)
    second = np.asarray(second, bool)
    shares = []
    ends = []
    for right in (first, second):
        test = stats.binomtest(int(right.sum()), len(right))
        shares.append(right.mean())
        ends.append(test.proportion_ci(1 - LEVEL, method="wilson"))
    correlation = 0.0
    if 0 < shares[0] < 1 and 0 < shares[1] < 1:
        correlation = np.corrcoef(first, second)[0, 1]
    difference = shares[0] - shares[1]
    down = _hypotenuse(shares[0] - ends[0].low, ends[1].high - shares[1], correlation)
    up = _hypotenuse(ends[0].high - shares[0], shares[1] - ends[1].low, correlation)
    return Interval(float(difference - down), float(difference + up))


def _hypotenuse(a: float, b: float, correlation: float) -> float:
    return math.sqrt(max(0.0, a * a - 2 * correlation * a * b + b * b))


def geometric_interval(values: Sequence[float], spec: str) -> str:
    """Format a geometric mean with its 95% interval, which needs two values; none as "".

    >>> geometric_interval([1.0, 2.0, 4.0], ".1f")
    '2.0 (0.4 to 11.2)'
    """
    if not len(values):
        return ""
    mean, half, _, n = mean_ci(np.log(values))
    if n == 1:
        return f"{math.exp(mean):{spec}}"
    low, high = math.exp(mean - half), math.exp(mean + half)
    return f"{math.exp(mean):{spec}} ({low:{spec}} to {high:{spec}})"


def ratio_interval(logs: Sequence[float], spec: str) -> str:
    """Format the geometric mean of ratios, of which these are the logarithms, with its 95% interval.

    >>> ratio_interval([0.0, 0.0], ".1f")
    '1.0 (1.0 to 1.0)'
    """
    return geometric_interval(np.exp(logs), spec)
