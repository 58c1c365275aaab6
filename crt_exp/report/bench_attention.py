"""Speed and memory of attention: `python -m crt_exp.report.bench_attention [time|memory] [--lengths 1024 4096 ...]`.

Batch 1, 8 heads, d = 64, m = 256, float32 on the CPU. All methods take turns, so that load from outside hits them
alike; a cell is the median of milliseconds, and in brackets the median of its ratio to the eager floor
exp(Q W^T) (exp(K W^T)^T V) of the same turn. `memory` runs each case in a process of its own and prints the peak of
resident memory beyond inputs, incoming gradient, output and gradients, in MiB.
"""

import argparse
import math
import os
import statistics

import torch

from crt_exp.studies.memory import in_new_process
from crt_exp.studies.speed import forward, forward_backward, held_by, inputs, methods
from crt_exp.studies.timing import timed

LENGTHS, TURNS = (1024, 4096, 16384), 11
HELD = ("favorp", "favorpp", "favorp causal", "favorpp causal", "floor", "performer-pytorch")


def print_times(lengths: list[int], turns: int, only: list[str]) -> None:
    for title, run in (("forward + backward", forward_backward), ("forward", forward)):
        for length in lengths:
            chosen = {n: f for n, f in methods(length).items() if not only or n in only or n == "floor"}
            times = timed(run, chosen, inputs(length), max(3, math.ceil(turns * min(1, 4096 / length))))
            print(f"\n{title}, L = {length}; load {os.getloadavg()[0]:.1f}")
            for name, t in times.items():
                ratio = statistics.median(a / b for a, b in zip(t, times["floor"]))
                fastest = min(t) / min(times["floor"])
                print(f"  {name:<26}{statistics.median(t):10.1f} ms  ({ratio:6.3f}, fastest {fastest:6.3f})",
                      flush=True)


def print_memory(lengths: list[int], only: list[str]) -> None:
    """Each case in a new process: the allocator would keep what an earlier one freed."""
    for length in lengths:
        print(f"\npeak memory beyond inputs, output and gradients, L = {length}")
        for name in only or HELD:
            mib = in_new_process(held_by, name=name, length=length, threads=torch.get_num_threads())
            print(f"  {name:<26}{mib:7.0f} MiB", flush=True)


def main(size: str) -> None:
    print_times(list(LENGTHS), TURNS, [])


def command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="time", choices=["time", "memory"])
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.what == "time":
        print_times(args.lengths or list(LENGTHS), args.turns, args.only)
    else:
        print_memory(args.lengths or [65536], args.only)


if __name__ == "__main__":
    command_line()
