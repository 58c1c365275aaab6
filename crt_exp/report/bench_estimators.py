"""make bench-estimators: RandomFeatures against scikit-learn's RBFSampler, fit and transform,
at equal columns and at equal projections, interleaved."""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sklearn.exceptions import DataDimensionalityWarning
from sklearn.kernel_approximation import RBFSampler
from sklearn.random_projection import GaussianRandomProjection

from crt_exp.estimators import RandomFeatures
from crt_exp import drawing as palette
from crt_exp.drawing import markdown
from crt_exp.report.draws import csv_text
from crt_exp.report.evidence import Claim, Interval, judged, of_processes, paired, won_by
from crt_exp.runner.run import write_atomic
from crt_exp.studies.cells import short_commit, versions
from crt_exp.studies.memory import in_new_process

ROWS, COLUMNS, WIDTH = 100_000, 64, 256
PROCESSES, ROUNDS = 5, 3  # rounds of each process
REST = 0.2  # seconds between timings, in which the threads of the library before stop spinning
WITHOUT = palette.DENSE | dict.fromkeys(("gerf", *palette.HYBRIDS), "its features differ for the two sides of the "
                                        "kernel, which one transform cannot give")
MAPS = palette.maps(WITHOUT)
PEER, CONTROL = "RBFSampler", "GaussianRandomProjection"  # the control: a product with a matrix, and no kernel at all
STEPS, DTYPES = ("fit", "transform"), ("float32", "float64")


class Arm(NamedTuple):
    """A map, or one of scikit-learn's, with so many output columns."""

    name: str
    columns: int = WIDTH


Seconds = dict[tuple[str, Arm, str], list[float]]  # dtype, arm, step -> of each round, process by process


def main(size: str, folder: Path) -> None:
    start = time.perf_counter()
    seconds: Seconds = {}
    for process in range(PROCESSES):
        for dtype in DTYPES[::-1 if process % 2 else 1]:
            for place, values in in_new_process(measure, dtype=dtype, process=process).items():
                seconds[place] = seconds.get(place, []) + values
    verdicts = judged(claims(seconds))
    said = "\n".join([controls_that_win(seconds), "", *map(str, verdicts), "",
                      *(table(seconds, dtype) for dtype in DTYPES)])
    rows = [{"features": arm.name, "columns": arm.columns, "dtype": dtype, "step": step,
             "seconds": float(np.median(values))} for (dtype, arm, step), values in seconds.items()]
    facts = (f"{ROWS:,} x {COLUMNS} standard normal inputs, gamma = 0.005, orthogonal noise, to {WIDTH} columns; maps "
             f"that make two columns of a projection also to {2 * WIDTH}, which are as many projections as {PEER} has. "
             f"{PROCESSES} processes for each dtype with {ROUNDS} interleaved rounds in rotating order, {REST} s of "
             f"rest before each; medians and quartiles of all rounds; the ratio is over {PEER} in the same process, "
             "geometric mean with its 95% interval over processes; p by Holm. "
             f"{CONTROL}, also of scikit-learn, is the product alone, which every map computes as well: the control."
             f"{palette.left_out(WITHOUT)}")
    facts += (f" {versions()}; commit {short_commit()}. Written: {date.today()}, {time.perf_counter() - start:.0f} s "
              "of computing. Command: `make bench-estimators`.")
    path = folder / "bench-estimators.md"
    write_atomic(path, f"# Speed of RandomFeatures compared with {PEER}\n\n{said.rstrip()}\n\n{facts}\n")
    write_atomic(path.with_suffix(".csv"), csv_text([*rows, *(v.row() for v in verdicts)]))
    print(f"{said}\nwritten: {path}")


def arms() -> list[Arm]:
    doubled = [Arm(name, 2 * WIDTH) for name in MAPS if palette.feature_map(name).width(1) == 2]
    return [Arm(PEER), Arm(CONTROL), *map(Arm, MAPS), *doubled]


def measure(dtype: str, process: int) -> Seconds:
    """Of one process, by its number: its rounds begin where the last one's ended."""
    warnings.filterwarnings("ignore", category=DataDimensionalityWarning)  # the control may widen its input as maps do
    X = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(dtype)
    models = {arm: model_of(arm) for arm in arms()}
    for model in models.values():
        model.fit(X[:1000]).transform(X[:1000])
    seconds: Seconds = {(dtype, arm, step): [] for arm in models for step in STEPS}
    for turn in range(process * ROUNDS, (process + 1) * ROUNDS):
        for arm, model in rotated(list(models.items()), turn):
            for step in STEPS:
                seconds[dtype, arm, step].append(timed(getattr(model, step), X))
    return seconds


def model_of(arm: Arm) -> RBFSampler | GaussianRandomProjection | RandomFeatures:
    if arm.name == CONTROL:
        return GaussianRandomProjection(n_components=arm.columns, random_state=0)
    if arm.name == PEER:
        return RBFSampler(gamma=0.005, n_components=arm.columns, random_state=0)
    return RandomFeatures(arm.name, n_components=arm.columns, gamma=0.005, random_state=0)


def timed(call: Callable, X: np.ndarray) -> float:
    time.sleep(REST)
    start = time.perf_counter()
    call(X)
    return time.perf_counter() - start


def rotated(items: list, by: int) -> list:
    by %= len(items)
    return items[by:] + items[:by]


def claims(seconds: Seconds) -> list[Claim]:
    """Of this library, not of a paper: as many columns take no longer than scikit-learn's."""
    return [Claim(f"{dtype}: {name} transforms to {WIDTH} columns in less time than {PEER}",
                  against(seconds, dtype, Arm(PEER), Arm(name), "transform"), "in the logarithm")
            for dtype in DTYPES for name in MAPS]


def against(seconds: Seconds, dtype: str, first: Arm, second: Arm, step: str) -> Interval:
    """The logarithm of the time of the first over that of the second, over processes."""
    return paired(*(np.log(of_processes(seconds[dtype, arm, step], PROCESSES)) for arm in (first, second)))


def controls_that_win(seconds: Seconds) -> str:
    """Transforms that take longer than the product alone, by medians."""
    median = {place: float(np.median(values)) for place, values in seconds.items()}
    mine = [arm for arm in arms() if arm.name not in (PEER, CONTROL)]
    beaten = {dtype: [f"{arm.name} ({arm.columns} columns)" for arm in mine
                      if median[dtype, arm, "transform"] > median[dtype, Arm(CONTROL), "transform"]]
              for dtype in DTYPES}
    return won_by(f"the product alone ({CONTROL} to {WIDTH} columns)", beaten, 2 * len(mine))


def table(seconds: Seconds, dtype: str) -> str:
    rows = []
    for arm in arms():
        cells = [cell for step in STEPS for cell in (
            spread(seconds[dtype, arm, step]),
            ratio(against(seconds, dtype, arm, Arm(PEER), step)))]
        rows.append([arm.name, arm.columns, *cells])
    header = ["features", "columns", *(text for step in STEPS for text in (f"{step}, s", f"of {PEER}'s"))]
    return f"## {dtype}\n\n" + markdown(header, rows)


def ratio(log: Interval) -> str:
    return f"{math.exp(log.mean):.2f} ({math.exp(log.low):.2f} to {math.exp(log.high):.2f})"


def spread(values: Sequence[float]) -> str:
    low, mid, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"{mid:.3f} ({low:.3f} to {high:.3f})"
