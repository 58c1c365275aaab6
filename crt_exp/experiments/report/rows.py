"""Result rows of a page (outputs/report/<page>.csv), means and verdicts.

One row is one measured value. Columns: `sweep` (the sweep that made the row), the columns of the page (data set,
method, m, step, ...), `sample` (the independent unit: a seed, pair, document or process; empty for a closed form),
`metric`, `value`, and the origin: `seconds` (on the first row of a run), `commit`, `date`, `versions`.

Means have 95% intervals. Verdicts on the papers' claims are Student's t-tests with Holm's correction over a page.
"""

import gzip
import math
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from crt_exp.experiments.runner.run import names_in, write_atomic

FOLDER = Path("outputs/report")
ORIGIN = ("seconds", "commit", "date", "versions")
TEXT = (
    "sweep",
    "method",
    "sample",
    "metric",
    *ORIGIN,
)  # columns that are text, whatever it looks like
LARGEST = 2**20  # maximum bytes of an uncompressed file
LEVEL = 0.05  # significance level of tests; intervals have level 1 - LEVEL
DECIDED = ("supported", "contradicted")
UNDECIDED, CONFLICT, NOT_MEASURED = (
    "inconclusive",
    "theory and measurement disagree",
    "not measured",
)
WORDS = (*DECIDED, CONFLICT, UNDECIDED, NOT_MEASURED)


class Rows:
    """Result rows of a page, with filters column=value or column=[values]."""

    def __init__(self, frame: pd.DataFrame):
        self.frame = frame
        self._columns = {
            name: frame[name].to_numpy() for name in frame.columns if name not in ORIGIN
        }
        self._groups = frame.groupby(["metric", "method"], sort=False).indices

    def select(self, metric: str, method: str | None = None, **where: Any) -> pd.DataFrame:
        """Return the rows of a metric, in their order."""
        return self.frame.iloc[self._places(metric, method, where)]

    def values(self, metric: str, method: str, log: bool = False, **where: Any) -> pd.Series:
        """Return values by sample, float64; several rows of a sample are averaged.

        log: average logarithms.
        """
        places = self._places(metric, method, where)
        values = self._columns["value"][places].astype(float)
        return (
            pd.Series(np.log(values) if log else values, self._columns["sample"][places])
            .groupby(level=0, sort=False)
            .mean()
        )

    def paired(
        self, first: str, second: str, metric: str, log: bool = False, **where: Any
    ) -> pd.Series:
        """Return first - second by sample, for samples that both methods have.

        log: difference of logarithms. A value without a sample is deterministic, and is compared with each sample of
        the other method.
        """
        one, two = (self.values(metric, method, log, **where) for method in (first, second))
        one, two = _spread(one, two), _spread(two, one)
        return (one - two).dropna()

    def ratio(self, first: str, second: str, metric: str, **where: Any) -> pd.Series:
        """Return log(first / second) by sample; exp of the mean is the geometric mean."""
        return self.paired(first, second, metric, log=True, **where)

    def methods(self, metric: str, **where: Any) -> list[str]:
        """Return the methods that have a metric, in the order of the rows."""
        return [*self.frame.iloc[self._places(metric, None, where)]["method"].unique()]

    def _places(self, metric: str, method: str | None, where: dict[str, Any]) -> np.ndarray:
        places = (
            np.flatnonzero(self._columns["metric"] == metric)
            if method is None
            else self._groups.get((metric, method), np.empty(0, int))
        )
        for name, wanted in where.items():
            column = self._columns[name][places]
            empty = isinstance(wanted, str) and wanted == "" and column.dtype != object
            places = places[
                pd.isna(column)
                if empty
                else np.isin(column, wanted)
                if isinstance(wanted, list | tuple | range)
                else column == wanted
            ]
        return places


def _spread(values: pd.Series, other: pd.Series) -> pd.Series:
    return (
        pd.Series(values.iloc[0], other.index) if [*values.index] == [""] and len(other) else values
    )


def share(gain: pd.Series, whole: pd.Series) -> pd.Series:
    """Return samples whose mean is mean(gain) / mean(whole).

    The spread of the samples is that of the ratio (delta method).
    """
    both = pd.DataFrame({"gain": gain, "whole": whole}).dropna()
    ratio = both["gain"].mean() / both["whole"].mean()
    return ratio + (both["gain"] - ratio * both["whole"]) / both["whole"].mean()


# ---- files


def read_rows(page: str, folder: Path = FOLDER) -> Rows:
    """Read the rows of a page.

    Raises:
        FileNotFoundError: If the page has no rows.
        OSError: If the file cannot be read.
        ValueError: If the file is truncated or lacks columns.
    """
    path = rows_path(page, folder)
    content = path.read_bytes()
    try:
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        text = content.decode()
        if not text.endswith("\n"):
            raise ValueError("the last line is incomplete")
        frame = pd.read_csv(StringIO(text), keep_default_na=False, na_values={}, dtype=str)
        if frame.isna().any(axis=None):
            raise ValueError("a line has too few fields")
    except (EOFError, gzip.BadGzipFile, ValueError, zlib.error) as error:
        raise ValueError(
            f"{path}: truncated or damaged ({error}); restore the file, or run `python -m crt_exp report "
            f"{page} --run`"
        ) from None
    for name in frame.columns:
        if name not in TEXT:
            frame[name] = _numbers(frame[name], measured=name == "value")
    if missing := {"method", "sample", "metric", "value", *ORIGIN} - {*frame.columns}:
        raise ValueError(
            f"{path}: columns {', '.join(frame.columns)}; missing {', '.join(sorted(missing))}"
        )
    return Rows(frame)


def _numbers(column: pd.Series, measured: bool) -> pd.Series:
    """Convert text to numbers if this loses nothing; empty values become nan.

    measured: the column holds measured values, where 1e5, inf and nan are numbers too.
    """
    values = {text: _number(text, measured) for text in column.unique() if text}
    if not values or None in values.values():
        return column
    return pd.Series([values.get(text, math.nan) for text in column], column.index)


def _number(text: str, measured: bool) -> float | None:
    """Return the number that is written as `text`, or None."""
    for kind in (int, float):
        with suppress(ValueError):
            number = kind(text)
            if measured or str(number) == text and math.isfinite(number):
                return number
    return None


def rows_path(page: str, folder: Path = FOLDER) -> Path:
    """Return the file of a page's rows. Raises FileNotFoundError if there is none."""
    present = names_in(folder)
    for name in (f"{page}.csv", f"{page}.csv.gz"):
        if name in present:
            return folder / name
    raise FileNotFoundError(
        f"{folder / page}.csv: no rows; run `python -m crt_exp report {page} --run`"
    )


def write_rows(page: str, frame: pd.DataFrame, folder: Path = FOLDER) -> Path:
    """Write rows atomically; files above 1 MiB are compressed."""
    text = frame.to_csv(index=False, lineterminator="\n").encode()
    folder.mkdir(parents=True, exist_ok=True)
    plain, packed = folder / f"{page}.csv", folder / f"{page}.csv.gz"
    path, other = (plain, packed) if len(text) <= LARGEST else (packed, plain)
    write_atomic(path, text if path == plain else gzip.compress(text, mtime=0))
    other.unlink(missing_ok=True)
    return path


def concatenate(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate sweeps; columns that a sweep lacks are empty, origin columns last."""
    frame = pd.concat(frames, ignore_index=True).fillna("")
    return frame[[name for name in frame.columns if name not in ORIGIN] + [*ORIGIN]]


# ---- means and verdicts


class Mean(NamedTuple):
    """Mean of n samples, half-width of its interval, p-value against a value."""

    mean: float
    half: float
    p: float
    n: int

    def __format__(self, spec: str) -> str:
        if self.n == 0:
            return ""
        return (
            f"{self.mean:{spec}} ± {self.half:{spec.replace('+', '')}}"
            if self.n > 1
            else f"{self.mean:{spec}}"
        )


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
    values = np.asarray(values, float)
    n = len(values)
    if n < 2:
        return Mean(float(values[0]) if n else math.nan, math.nan, 1.0, n)
    if not np.isfinite(values).all():
        raise ValueError(
            f"sample {np.argmin(np.isfinite(values))}: expected a finite value; exclude diverged samples"
        )
    mean, error = float(values.mean()), float(values.std(ddof=1)) * math.sqrt(1 / n + overlap)
    p = (
        float(2 * stats.t.sf(abs(mean - against) / error, n - 1))
        if error
        else float(mean == against)
    )
    return Mean(mean, float(stats.t.isf(level / 2, n - 1)) * error, p, n)


def geometric_mean_ci(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean and the ends of its 95% interval."""
    log = mean_ci(np.log(values))
    return math.exp(log.mean), math.exp(log.mean - log.half), math.exp(log.mean + log.half)


def geometric_interval(values: Sequence[float], spec: str) -> str:
    """Format a geometric mean with its 95% interval, which needs two values; none as ""."""
    if not len(values):
        return ""
    mean, low, high = geometric_mean_ci(values)
    return f"{mean:{spec}} ({low:{spec}} to {high:{spec}})" if len(values) > 1 else f"{mean:{spec}}"


def interval_or_range(percent: pd.Series) -> str:
    """Format percentages as mean ± 95% CI; below 5 samples, as a range; none as ""."""
    if not len(percent):
        return ""
    return (
        f"{mean_ci(percent):.1f}"
        if len(percent) >= 5
        else f"{percent.min():.0f} to {percent.max():.0f}"
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for multiple tests (Holm, 1979)."""
    order = np.argsort(p_values)
    raised = np.maximum.accumulate(
        np.arange(len(order), 0, -1) * np.asarray(p_values, float)[order]
    )
    return np.minimum(1, raised)[np.argsort(order)].tolist()


Samples = pd.Series | Sequence[float] | float


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, tested on one or several cases (data sets, sizes).

    Args:
        text: The claim in the terms of the page.
        cases: Samples by case, compared with `above` or `below` (default: above 0). A float is a closed form, without
            variance. Cases without samples are left out.
        paper: The result that the paper reports, or a mapping from cases; empty for our own questions.
        needs: What would decide cases that are inconclusive or not measured.
        above: Threshold, or a mapping from cases.
        below: Threshold, or a mapping from cases.
        unit: Unit of the value.
        log: Samples are logarithms; values are shown as ratios.
        power: Samples are logarithms of numbers too large to show; values are shown as e^value.
        sign_test: Use a sign test over samples, for heavy-tailed values.
        overlap: See `mean_ci`.
        theory: Closed-form values by case, which the verdict must not contradict.
        fails: Failed sanity checks by case; these cases are inconclusive.
        reason: One sentence of explanation.
        not_measured: Why no sample can test the claim.
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

    def of(self, case: str) -> "TestedClaim":
        """Test one case, before the correction for multiple tests."""
        if self.not_measured:
            return TestedClaim(self, case, Mean(math.nan, math.nan, 1.0, 0))
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
        return TestedClaim(self, case, found, threshold, limit, agrees, wins)


@dataclass(frozen=True)
class TestedClaim:
    """One case of a claim: its mean and, after `judge`, p-value and verdict.

    limit is the threshold, or its logarithm for claims with `log`. agrees: whether the mean (or most samples, for a
    sign test) is on the claim's side of the threshold. wins: number of samples on that side.
    """

    claim: Claim
    case: str
    estimate: Mean
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
        half, n = self.estimate.half, self.estimate.n - 1
        if n > 0 and half > 0:
            half *= float(stats.t.isf(self.level / 2, n) / stats.t.isf(LEVEL / 2, n))
        ends = self.estimate.mean - half, self.estimate.mean + half
        return tuple(math.exp(end) for end in ends) if self.claim.log else ends

    def to_text(self) -> str:
        """Format the value with its interval and unit."""
        claim, sign = (
            self.claim,
            "" if self.threshold or self.claim.log or self.claim.power else "+",
        )
        text = f"{self.number:{sign}.3g}"
        low, high = self.ends
        if claim.sign_test:
            text = f"{text} (median; {self.wins} of {self.estimate.n} samples {self.side} the threshold)"
        elif claim.power:
            text = f"e^{text}" + (f" [e^{low:.3g}, e^{high:.3g}]" if self.estimate.n > 1 else "")
        elif self.estimate.n > 1:
            text += f" [{low:.3g}, {high:.3g}]" if claim.log else f" ± {(high - low) / 2:.2g}"
        return f"{text} {claim.unit}".rstrip()

    @property
    def base_verdict(self) -> str:
        """The verdict without a note on scale or data."""
        return self.verdict.partition(" (")[0]

    @property
    def side(self) -> str:
        return "above" if self.claim.below is None else "below"

    @property
    def paper(self) -> str:
        given = self.claim.paper
        return given.get(self.case, "") if isinstance(given, Mapping) else given


def judge(claims: Sequence[Claim], reduced: bool = False, stand_in: str = "") -> list[TestedClaim]:
    """Return all cases of a page's claims with verdicts, corrected by Holm's method.

    reduced: the runs are smaller than the paper's. stand_in: prefix of cases whose data replace the paper's data.
    Verdicts state both.
    """
    tested = []
    for claim in claims:
        if claim.not_measured:
            tested.append(claim.of(""))
            continue
        for case, samples in claim.cases.items():
            if np.size(samples):
                tested.append(claim.of(case))
    judged = []
    for case in tested:
        if not case.claim.not_measured and case.case not in case.claim.fails:
            judged.append(case)
    p_values = holm([case.estimate.p for case in judged])
    corrected = dict(zip(map(id, judged), p_values))
    verdicts = []
    for case in tested:
        p = corrected.get(id(case), math.nan)
        verdicts.append(_with_verdict(case, p, reduced, stand_in))
    return verdicts


def _with_verdict(case: TestedClaim, p: float, reduced: bool, stand_in: str) -> TestedClaim:
    if case.claim.not_measured:
        return case
    word = DECIDED[0] if case.agrees else DECIDED[1]
    closed_form = case.claim.theory.get(case.case, case.limit)
    if (closed_form - case.limit) * (case.estimate.mean - case.limit) < 0:
        word = CONFLICT
    if not p <= LEVEL:
        word = UNDECIDED
    verdict = word
    if word in DECIDED:
        if stand_in and case.case.startswith(stand_in):
            verdict = f"{word} (stand-in data)"
        elif reduced:
            verdict = f"{word} (reduced scale)"
    level = LEVEL
    if p and not math.isnan(p) and case.estimate.p:
        level = LEVEL * case.estimate.p / p
    return replace(case, p=p, verdict=verdict, level=level)
