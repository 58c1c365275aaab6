"""Speed and memory of hybrids beside trigonometric maps of as many features:
`python -m crt_exp.report.bench_hybrids [time|memory] [--length 4096] [--turns 11]`.

Batch 1, 8 heads, d = 64, float32 on the CPU, forward and backward. All take turns; a line has the median of
milliseconds, the median of the ratios to `trig` with as many features within a turn, and the multiply-adds of a token
and head in the forward pass: projections, and products with the values, of queries and keys. `memory`: the peak beyond
inputs, output and gradients, each in a process of its own.
"""

import argparse
import statistics
from typing import NamedTuple

from crt_exp.features import AngularHybrid, ClusteredHybrid, FeatureMap, GaussianHybrid, TrigRF
from crt_exp.studies.memory import in_new_process
from crt_exp.studies.speed import D, fitted, forward_backward, held, inputs
from crt_exp.studies.timing import timed

LENGTH, TURNS = 4096, 11


class Case(NamedTuple):
    phi: FeatureMap
    m: int
    twin: str          # the trigonometric map of as many features
    projected: int     # projections that a token takes

    @property
    def work(self) -> int:
        return 2 * (self.projected * D + self.phi.width(self.m) * (D + 1))


CASES = {"trig, M = 512": Case(TrigRF(), 256, "trig, M = 512", 256),
         "angular (8, 8)": Case(AngularHybrid(n=8), 8, "trig, M = 512", 16),
         "trig, M = 256": Case(TrigRF(), 128, "trig, M = 256", 128),
         "clusters (2, 2), m = 64": Case(ClusteredHybrid(), 64, "trig, M = 256", 128),
         "trig, M = 544": Case(TrigRF(), 272, "trig, M = 544", 272),
         "gaussian (8, 8)": Case(GaussianHybrid(n=8), 8, "trig, M = 544", 16)}


def print_times(length: int, turns: int) -> None:
    methods = {name: fitted(case.phi, case.m) for name, case in CASES.items()}
    times = timed(forward_backward, methods, inputs(length), turns)
    for name, case in CASES.items():
        ratio = statistics.median(a / b for a, b in zip(times[name], times[case.twin]))
        print(f"  {name:<26}{statistics.median(times[name]):10.1f} ms  ({ratio:6.3f})  {case.work:8d} multiply-adds")


def print_memory(length: int) -> None:
    for name in CASES:
        print(f"  {name:<26}{in_new_process(held_in, name=name, length=length):.0f} MiB")


def held_in(name: str, length: int) -> float:
    return held(fitted(CASES[name].phi, CASES[name].m), length)


def command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="time", choices=["time", "memory"])
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--turns", type=int, default=TURNS)
    args = parser.parse_args()
    if args.what == "time":
        print_times(args.length, args.turns)
    else:
        print_memory(args.length)


if __name__ == "__main__":
    command_line()
