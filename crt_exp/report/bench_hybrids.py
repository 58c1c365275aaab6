"""Speed and memory of hybrids beside trigonometric maps of as many features:
`python -m crt_exp.report.bench_hybrids [time|memory] [--length 4096] [--turns 11]`.

Batch 1, 8 heads, d = 64, float32 on the CPU, forward and backward. All take turns; a line has the median of
milliseconds, the median of the ratios to `trig` with as many features within a turn, and the multiply-adds of a token
and head in the forward pass: projections, and products with the values, of queries and keys. `memory`: the peak beyond
inputs, output and gradients, each in a process of its own.
"""

import argparse
import statistics
import subprocess
import sys
from typing import NamedTuple

import torch

from crt_exp import samplers
from crt_exp.attention import attention
from crt_exp.attention.partials import DenominatorCount
from crt_exp.features import AngularHybrid, ClusteredHybrid, FeatureMap, GaussianHybrid, Statistics, TrigRF
from crt_exp.report.bench_attention import print_peak_of, timed
from crt_exp.studies.speed import HEADS, D, Method, forward_backward, inputs

LENGTH, TURNS = 4096, 11


class Case(NamedTuple):
    phi: FeatureMap
    m: int
    twin: str          # the trigonometric map of as many features
    projected: int     # projections that a token takes

    @property
    def work(self) -> int:
        return 2 * (self.projected * D + self.phi.width(self.m) * (D + 1))


CASES = {"trig, M = 288": Case(TrigRF(), 144, "trig, M = 288", 144),
         "angular (8, 8)": Case(AngularHybrid(n=8), 8, "trig, M = 288", 16),
         "trig, M = 256": Case(TrigRF(), 128, "trig, M = 256", 128),
         "clusters (2, 2), m = 64": Case(ClusteredHybrid(), 64, "trig, M = 256", 128),
         "trig, M = 544": Case(TrigRF(), 272, "trig, M = 544", 272),
         "gaussian (8, 8)": Case(GaussianHybrid(n=8), 8, "trig, M = 544", 16)}


def method(case: Case, length: int) -> Method:
    """Clusters are fitted before, as in a layer; other fits are part of the time."""
    generator = torch.Generator().manual_seed(0)
    phi = case.phi
    noise = phi.noise(case.m, lambda p: samplers.orthogonal(p.m, D, generator, batch=(HEADS,)))
    q, k = (t.detach()[0, :, :512] for t in inputs(length)[:2])
    kept = phi.fit(Statistics.of(q, k)) if phi.on_vectors or not phi.fitted else None

    def run(q, k, v):
        params = phi.fit(Statistics.of(q, k)) if kept is None else kept
        return attention(q, k, v, phi, noise, params, counter=DenominatorCount())
    return run


def print_times(length: int, turns: int) -> None:
    times = timed(forward_backward, {name: method(case, length) for name, case in CASES.items()}, inputs(length), turns)
    for name, case in CASES.items():
        ratio = statistics.median(a / b for a, b in zip(times[name], times[case.twin]))
        print(f"  {name:<26}{statistics.median(times[name]):10.1f} ms  ({ratio:6.3f})  {case.work:8d} multiply-adds")


def print_memory(length: int) -> None:
    for name in CASES:
        options = ["--length", str(length), "--only", name]
        done = subprocess.run([sys.executable, "-m", "crt_exp.report.bench_hybrids", "peak", *options],
                              capture_output=True, text=True, check=True)
        print(f"  {name:<26}{done.stdout.strip()}")


def command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="time", choices=["time", "memory", "peak"])
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--only", default=next(iter(CASES)), choices=list(CASES))
    args = parser.parse_args()
    if args.what == "time":
        print_times(args.length, args.turns)
    elif args.what == "memory":
        print_memory(args.length)
    else:
        print_peak_of(method(CASES[args.only], args.length), args.length)


if __name__ == "__main__":
    command_line()
