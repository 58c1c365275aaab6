"""Compare results: python -m crt_exp compare RUN RUN [RUN ...].

RUN is the directory of a finished run, or a folder of runs such as a sweep. Runs that differ only in the seed are one
result. Every other result is compared with the first one, on what both recorded:
  seeds      final metrics of equal seeds: paired t test
  splits     metrics of equal random splits (task=uci): t test corrected for overlapping splits
  examples   predictions of equal test examples (predictions.csv.gz); the interval covers examples, not training
             right or wrong        exact McNemar test, Newcombe's interval
             wer, mcc, f1, r2, ... paired t test of jackknife values

A difference is RUN minus the first result. Intervals are 95% intervals, without a correction for several comparisons.
Exit code 2: an error, or nothing could be compared.
"""

import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from crt_exp.experiments.intervals import Interval, mean_ci, paired_shares_interval, scale_of
from crt_exp.experiments.predictions import ANSWERS, read_predictions
from crt_exp.experiments.runner.run import (
    CONFIG,
    FREE_KEYS,
    METRICS,
    PARTIAL,
    is_finished,
    read_records,
    saved_overrides,
)
from crt_exp.experiments.runner.sweep_table import DATA
from crt_exp.registry import ConfigError, leaves, read_yaml, user_message

if TYPE_CHECKING:
    from pandas import DataFrame

SEEDS, SPLITS, EXAMPLES = "seeds", "splits", "examples"
JACKKNIFE_PARTS = 200  # maximum number of groups of examples that are left out in turn


class NotComparable(Exception):
    """Two results cannot be compared on one unit; the message states why."""


# ---- results


@dataclass(frozen=True)
class Run:
    """A finished run: its directory, configuration, overrides and records."""

    directory: Path
    config: dict[str, Any]  # by dotted key
    overrides: dict[str, str]
    records: list[dict[str, Any]]

    @classmethod
    def load(cls, directory: Path) -> "Run":
        """Load the files of a run. Raises ConfigError for an unfinished run."""
        records = read_records(directory / METRICS)
        if not is_finished(records):
            raise ConfigError(f"{directory}: unfinished; continue the run with resume=auto")
        config = dict(leaves(read_yaml(directory / CONFIG)))
        return cls(directory, config, saved_overrides(directory), records)

    @property
    def final(self) -> dict[str, Any]:
        return self.records[-1]

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def setting(self) -> tuple[tuple[str, str], ...]:
        """The configuration without the seed and keys that may differ between continued runs."""
        entries = []
        for key, value in self.config.items():
            if key != "seed" and not f"{key}.".startswith(FREE_KEYS):
                entries.append((key, str(value)))
        return tuple(sorted(entries))


@dataclass(frozen=True)
class Result:
    """Runs with one configuration and different seeds."""

    runs: dict[int, Run]  # by seed

    @property
    def first(self) -> Run:
        return next(iter(self.runs.values()))

    @property
    def metric(self) -> str:
        return self.first.final["metric"]

    @property
    def sign(self) -> int:
        """1 if a larger metric is better, else -1."""
        return -1 if self.first.final["direction"] == "minimize" else 1


def run_directories(place: str) -> list[Path]:
    """Return the directories of the runs in a folder, or the folder itself if it is a run.

    Raises ConfigError if there is no run.
    """
    folder = Path(place).expanduser()
    if (folder / METRICS).is_file():
        return [folder]
    runs = [path.parent for path in folder.glob(f"**/{METRICS}")]
    if not runs:
        raise ConfigError(f"{place}: no run; expected a directory with {METRICS}, or a sweep")
    return sorted(runs, key=lambda path: (len(str(path)), str(path)))


def load_results(places: Sequence[str]) -> list[Result]:
    """Load runs, in their order, and join those that differ only in the seed.

    Raises ConfigError for an unfinished run, a run that occurs twice, and fewer than two results.
    """
    runs: dict[Path, Run] = {}
    for place in places:
        for directory in run_directories(place):
            runs.setdefault(directory.resolve(), Run.load(directory))
    results: dict[Any, Result] = {}
    for run in runs.values():
        result = results.setdefault(run.setting, Result({}))
        if run.seed in result.runs:
            raise ConfigError(
                f"{run.directory}: configuration and seed of {result.runs[run.seed].directory}; remove one"
            )
        result.runs[run.seed] = run
    if len(results) < 2:
        raise ConfigError(
            f"{' '.join(places)}: one result, runs that differ only in the seed; expected two or more"
        )
    return [*results.values()]


def name_of(result: Result, results: Sequence[Result]) -> str:
    """Return the overrides that differ between the results, or else the directory."""
    varied = []
    for key, value in result.first.overrides.items():
        values = {other.first.overrides.get(key) for other in results}
        if len(values) > 1 and key != "seed" and not f"{key}.".startswith(("hydra.", *FREE_KEYS)):
            varied.append(f"{key}={value}")
    return " ".join(varied) or str(result.first.directory)


# ---- comparisons


@dataclass(frozen=True)
class Comparison:
    """The mean paired difference of two results on one unit.

    wins, losses: units on which the second result is better or worse.
    """

    unit: str
    metric: str
    difference: float
    interval: Interval
    n: int
    p: float
    test: str
    wins: int
    losses: int


def compare(first: Result, second: Result) -> tuple[list[Comparison], list[str]]:
    """Return the comparisons second - first, and why others are impossible."""
    try:
        check_comparable(first, second)
    except NotComparable as error:
        return [], [str(error)]
    comparisons = []
    reasons = []
    for unit, compare_units in UNITS.items():
        try:
            comparisons.append(compare_units(first, second))
        except NotComparable as error:
            reasons.append(f"{unit}: {error}")
    return comparisons, reasons


def check_comparable(first: Result, second: Result) -> None:
    """Raise NotComparable for different tasks, metrics or data."""
    one, two = first.first, second.first
    for key in ("task._target_", *DATA):
        values = [run.config.get(key) for run in (one, two)]
        if values[0] != values[1] and key != "task.data_dir":
            raise NotComparable(f"{key}: {values[0]} and {values[1]}")
    if first.metric != second.metric:
        raise NotComparable(f"metric: {first.metric} and {second.metric}")
    parts = [run.final.get(PARTIAL) for run in (one, two)]
    if parts[0] != parts[1]:
        raise NotComparable(f"trainer.evaluate: {parts[0]} and {parts[1]} batches")


def common_seeds(first: Result, second: Result) -> list[int]:
    """Return the seeds of both results. Raises NotComparable if there are none."""
    seeds = [seed for seed in first.runs if seed in second.runs]
    if not seeds:
        lists = [", ".join(map(str, result.runs)) for result in (first, second)]
        raise NotComparable(f"no common seed: {' and '.join(lists)}")
    return seeds


def compare_seeds(first: Result, second: Result) -> Comparison:
    seeds = common_seeds(first, second)
    if len(seeds) == 1:
        raise NotComparable(f"one common seed ({seeds[0]}); expected two or more")
    values = []
    for result in (first, second):
        values.append([result.runs[seed].final[result.metric] for seed in seeds])
    return mean_difference(SEEDS, first, *values, test="paired t test")


def compare_splits(first: Result, second: Result) -> Comparison:
    """Compare on random splits, which have a record with the split "split" and a `repeat`."""
    seeds = common_seeds(first, second)
    one, two = [split_scores(result, seeds) for result in (first, second)]
    if not one or not two:
        raise NotComparable("no records of random splits")
    parts, others = [result.first.config.get("task.split") for result in (first, second)]
    if parts != others:
        raise NotComparable(f"task.split: {parts} and {others}")
    splits = [split for split in one if split in two]
    if len(splits) < 2:
        raise NotComparable(f"{len(splits)} common splits; expected two or more")
    values = []
    for scores in (one, two):
        values.append([np.mean(scores[split]) for split in splits])
    train, _, test = parts
    name = "t test for overlapping splits (Nadeau and Bengio)"
    return mean_difference(SPLITS, first, *values, test=name, overlap=test / train)


def split_scores(result: Result, seeds: Sequence[int]) -> dict[tuple[int, int], list[float]]:
    """Return the metrics of each split, by seed and number of the split."""
    scores: dict[tuple[int, int], list[float]] = {}
    for seed in seeds:
        for record in result.runs[seed].records:
            if record["split"] == "split":
                scores.setdefault((seed, record["repeat"]), []).append(record[result.metric])
    return scores


def mean_difference(
    unit: str,
    first: Result,
    one: Sequence[float],
    two: Sequence[float],
    test: str,
    overlap: float = 0.0,
) -> Comparison:
    """Student's test of two - one; the interval stays within the scale of a difference."""
    metric = first.metric
    sign = first.sign
    if unit == EXAMPLES and metric == "r2":
        metric = "squared error"
        sign = -1
    differences = np.asarray(two, float) - np.asarray(one, float)
    if not np.isfinite(differences).all():
        raise NotComparable("a value is not finite; the run diverged")
    mean = mean_ci(differences, overlap=overlap)
    scale = scale_of(metric)
    widest = scale.high - scale.low
    low = max(mean.mean - mean.half, -widest)
    high = min(mean.mean + mean.half, widest)
    interval = Interval(float(low), float(high))
    wins = int((sign * differences > 0).sum())
    losses = int((sign * differences < 0).sum())
    return Comparison(unit, metric, mean.mean, interval, mean.n, mean.p, test, wins, losses)


# ---- examples


def compare_examples(first: Result, second: Result) -> Comparison:
    """Compare on equal test examples; scores of an example are averaged over seeds and splits."""
    pairs = paired_predictions(first, second)
    labels = pairs["label"].to_numpy()
    answers = [pairs[f"prediction_{number}"].to_numpy() for number in (1, 2)]
    metric = first.metric
    if metric in EXAMPLE_SCORES:
        for name, answer in zip(("one", "two"), answers):
            pairs[name] = EXAMPLE_SCORES[metric](labels, answer)
        means = pairs.groupby("example", sort=False)[["one", "two"]].mean()
        if metric == "accuracy" and means.isin([0.0, 1.0]).all(axis=None):
            return mcnemar(means["one"].to_numpy(bool), means["two"].to_numpy(bool))
        return mean_difference(EXAMPLES, first, means["one"], means["two"], "paired t test")
    values = []
    for answer in answers:
        by_seed = []
        for rows in pairs.groupby("seed", sort=False).indices.values():
            by_seed.append(pseudo_values(first, labels[rows], answer[rows]))
        values.append(np.mean(by_seed, axis=0))
    return mean_difference(EXAMPLES, first, *values, "paired t test of jackknife values")


def squared_error(labels: np.ndarray, answers: np.ndarray) -> np.ndarray:
    return (numbers(answers) - numbers(labels)) ** 2


# metrics that compare a value of each example
EXAMPLE_SCORES = {"accuracy": operator.eq, "r2": squared_error}


def paired_predictions(first: Result, second: Result) -> "DataFrame":
    """Return the common predictions of both results: label, prediction_1 and prediction_2.

    Raises NotComparable if a run has none, if there are fewer than two, or if labels differ.
    """
    from pandas import concat

    pairs = []
    for seed in common_seeds(first, second):
        frames = []
        for result in (first, second):
            directory = result.runs[seed].directory
            frames.append(read_predictions(directory))
            if frames[-1] is None:
                raise NotComparable(f"{directory} has no predictions.csv.gz")
        keys = [name for name in frames[0] if name not in ANSWERS]
        if keys != [name for name in frames[1] if name not in ANSWERS]:
            raise NotComparable("predictions.csv.gz has other columns")
        both = frames[0].merge(frames[1], on=keys, suffixes=("_1", "_2"))
        if "split" in both:  # several are recorded
            both = both[both["split"] == first.first.final["split"]]
        pairs.append(both.assign(seed=seed))
    joined = concat(pairs, ignore_index=True)
    different = joined["label_1"] != joined["label_2"]
    if different.any():
        raise NotComparable(
            f"{different.sum()} of {len(joined)} common examples have other labels; the test data differ"
        )
    if joined["example"].nunique() < 2:
        raise NotComparable("less than two common test examples")
    return joined.rename(columns={"label_1": "label"})


def mcnemar(one: np.ndarray, two: np.ndarray) -> Comparison:
    """Exact test of the examples that only one of two results predicts correctly."""
    from scipy import stats

    wins = int((two & ~one).sum())
    losses = int((one & ~two).sum())
    p = 1.0
    if wins + losses:
        p = float(stats.binomtest(wins, wins + losses).pvalue)
    difference = (wins - losses) / len(one)
    interval = paired_shares_interval(two, one)
    name = "exact McNemar test"
    return Comparison(EXAMPLES, "accuracy", difference, interval, len(one), p, name, wins, losses)


def pseudo_values(result: Result, labels: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Return the jackknife values of the metric.

    Raises NotComparable for a metric that is no function of the predictions.
    """
    from crt_exp.experiments.data.glue import TASKS
    from crt_exp.experiments.tasks.base import METRICS as SCORES
    from crt_exp.experiments.tasks.base import jackknife_values

    metric = result.metric
    if metric == "wer":
        return word_error_values(labels, answers)
    if metric not in SCORES:
        raise NotComparable(f"{metric} does not follow from predictions")
    dataset = result.first.config.get("task.dataset")
    names = TASKS[dataset].names if dataset in TASKS else ()
    parts = min(JACKKNIFE_PARTS, len(labels))
    values = jackknife_values(metric, numbers(answers, names), numbers(labels, names), parts)
    return np.array(values)


def numbers(values: np.ndarray, names: Sequence[str] = ()) -> np.ndarray:
    """Labels or predictions (n,) as numbers. Raises NotComparable for unknown names of classes."""
    if names:
        return np.array([names.index(name) for name in values])
    try:
        return values.astype(float)
    except ValueError as error:
        raise NotComparable(f"the metric needs numbers ({error})") from None


def word_error_values(labels: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Return jackknife values of the word error rate, one for each utterance.

    >>> word_error_values(np.array(["one two", "six"]), np.array(["one", "six"])).round(3)
    array([0.667, 0.167])
    """
    import jiwer

    errors = []
    words = []
    for label, answer in zip(labels, answers):
        counts = jiwer.process_words(label, answer)
        errors.append(counts.substitutions + counts.deletions + counts.insertions)
        words.append(counts.hits + counts.substitutions + counts.deletions)
    errors = np.array(errors)
    words = np.array(words)
    n = len(words)
    without = (errors.sum() - errors) / (words.sum() - words)
    return n * errors.sum() / words.sum() - (n - 1) * without


UNITS = {SEEDS: compare_seeds, SPLITS: compare_splits, EXAMPLES: compare_examples}


# ---- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    if arguments is None:
        arguments = sys.argv[1:]
    if not arguments or {"--help", "-h"} & {*arguments}:
        print(__doc__)
        return 0 if arguments else 2
    try:
        results = load_results(arguments)
        text, is_compared = report(results)
    except (ConfigError, OSError, ValueError) as error:
        message = user_message(error)
        if message is None:
            raise
        print(f"crt_exp compare: error: {message}", file=sys.stderr)
        return 2
    if not is_compared:
        print(text, file=sys.stderr)
        return 2
    print(text)
    return 0


def report(results: Sequence[Result]) -> tuple[str, bool]:
    """Format the comparisons with the first result; return whether there is any."""
    from pandas import DataFrame

    first, *others = results
    better = "lower" if first.sign < 0 else "higher"
    lines = [f"{first.metric} ({better} is better), differences to: {title(first, results)}"]
    is_compared = False
    for other in others:
        comparisons, reasons = compare(first, other)
        lines += ["", title(other, results)]
        if comparisons:
            is_compared = True
            table = DataFrame([row_of(comparison) for comparison in comparisons])
            lines.append(table.to_string(index=False))
        for reason in reasons:
            lines.append(f"not compared, {reason}")
    return "\n".join(lines), is_compared


def title(result: Result, results: Sequence[Result]) -> str:
    """Return name, mean and directories of a result."""
    values = [run.final[result.metric] for run in result.runs.values()]
    mean = "nan"
    if None not in values:
        mean = f"{np.mean(values):.4f}"
    places = [str(run.directory) for run in result.runs.values()]
    return f"{name_of(result, results)}: {result.metric} {mean} ({', '.join(places)})"


def row_of(comparison: Comparison) -> dict[str, Any]:
    return {
        "over": comparison.unit,
        "n": comparison.n,
        "metric": comparison.metric,
        "difference": f"{comparison.difference:+.4f}",
        "95% CI": f"{comparison.interval.low:+.4f} to {comparison.interval.high:+.4f}",
        "p": f"{comparison.p:.2g}",
        "better/worse": f"{comparison.wins}/{comparison.losses}",
        "test": comparison.test,
    }


if __name__ == "__main__":
    sys.exit(main())
