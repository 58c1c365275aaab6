"""make bench-estimators: RandomFeatures.transform against scikit-learn's RBFSampler
at equal output columns, interleaved."""

import statistics
import time

import numpy as np
from sklearn.kernel_approximation import RBFSampler

from crt_exp.estimators import RandomFeatures
from crt_exp.report import palette
from crt_exp.report.writing import markdown, write_report

ROWS, COLUMNS, WIDTH, ROUNDS = 100_000, 64, 256, 11
REST = 0.2  # seconds between timings, in which the threads of the library before stop spinning
WITHOUT = palette.DENSE | dict.fromkeys(("gerf", *palette.HYBRIDS), "its features differ for the two sides of the "
                                        "kernel, which one transform cannot give")
MAPS = palette.maps(WITHOUT)


def main(size: str) -> None:
    start = time.perf_counter()
    rows = [row for dtype in (np.float32, np.float64) for row in measure(dtype)]
    table = markdown(["features", "float32, s", "of RBFSampler", "float64, s", "of RBFSampler"], [
        [a["features"], f"{a['seconds']:.3f}", f"{a['ratio']:.2f}", f"{b['seconds']:.3f}", f"{b['ratio']:.2f}"]
        for a, b in zip(rows[:len(rows) // 2], rows[len(rows) // 2:])])
    facts = (f"transform of {ROWS:,} x {COLUMNS} standard normal inputs to {WIDTH} columns, gamma = 0.005, orthogonal "
             f"noise; medians of {ROUNDS} interleaved rounds in rotating order, {REST} s of rest before each; the "
             f"ratio is the median of those within a round.{palette.left_out(WITHOUT)}")
    path = write_report("bench-estimators", "Speed of RandomFeatures beside RBFSampler", table, rows, None, facts,
                        time.perf_counter() - start)
    print(f"{table}\nwritten: {path}")


def measure(dtype) -> list[dict]:
    X = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(dtype)
    models = {"RBFSampler": RBFSampler(gamma=0.005, n_components=WIDTH, random_state=0),
              **{n: RandomFeatures(n, n_components=WIDTH, gamma=0.005, random_state=0) for n in MAPS}}
    for model in models.values():
        model.fit(X).transform(X[:1000])
    seconds = {name: [] for name in models}
    for turn in range(ROUNDS):
        for name, model in rotated(list(models.items()), turn):
            time.sleep(REST)
            start = time.perf_counter()
            model.transform(X)
            seconds[name].append(time.perf_counter() - start)
    ratio = lambda name: statistics.median(t / base for t, base in zip(seconds[name], seconds["RBFSampler"]))
    return [{"features": n, "dtype": np.dtype(dtype).name, "seconds": statistics.median(seconds[n]), "ratio": ratio(n)}
            for n in models]


def rotated(items: list, by: int) -> list:
    by %= len(items)
    return items[by:] + items[:by]
