"""Means of repeated measurements with 95% intervals, and their format."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.05  # significance level of tests; intervals have level 1 - LEVEL


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


def mean_ci(
    values: Sequence[float], against: float = 0.0, level: float = LEVEL, overlap: float = 0.0
) -> Mean:
    """Return Student's interval of independent samples, and the p-value.

    Args:
        against: Mean under the null hypothesis.
        level: 1 - confidence level.
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
    return Mean(mean, t_quantile(n, level) * error, p, n)


def t_quantile(n: int, level: float = LEVEL) -> float:
    """Half-width of Student's interval of n samples, in standard errors."""
    from scipy import stats

    return float(stats.t.isf(level / 2, n - 1))


def interval(values: Sequence[float], name: str) -> dict[str, float | None]:
    """Mean, standard deviation and half-width of the 95% Student interval, for a record.

    The last two are None for a single value.
    """
    n = len(values)
    std, half = None, None
    if n > 1:
        std = float(np.std(values, ddof=1))
        half = t_quantile(n) * std / n**0.5
    return {name: float(np.mean(values)), f"{name}_std": std, f"{name}_ci95": half, "repeats": n}


def geometric_mean_ci(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean and the ends of its 95% interval."""
    log = mean_ci(np.log(values))
    return math.exp(log.mean), math.exp(log.mean - log.half), math.exp(log.mean + log.half)


def geometric_interval(values: Sequence[float], spec: str) -> str:
    """Format a geometric mean with its 95% interval, which needs two values; none as "".

    >>> geometric_interval([1.0, 2.0, 4.0], ".1f")
    '2.0 (0.4 to 11.2)'
    """
    if not len(values):
        return ""
    mean, low, high = geometric_mean_ci(values)
    if len(values) == 1:
        return f"{mean:{spec}}"
    return f"{mean:{spec}} ({low:{spec}} to {high:{spec}})"


def interval_or_range(percent: Sequence[float]) -> str:
    """Format percentages as mean ± 95% CI; below 5 samples, as a range; none as "".

    >>> interval_or_range([90.0, 92.0])
    '90 to 92'
    """
    if not len(percent):
        return ""
    if len(percent) < 5:
        return f"{min(percent):.0f} to {max(percent):.0f}"
    return f"{mean_ci(percent):.1f}"
