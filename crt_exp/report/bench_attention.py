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
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from crt_exp.studies.memory import peak, reset_peak
from crt_exp.studies.speed import Method, forward, forward_backward, inputs, methods

LENGTHS, TURNS = (1024, 4096, 16384), 11


def timed(run: Callable, all_methods: dict[str, Method], tensors, turns: int) -> dict[str, list[float]]:
    """Milliseconds of every turn after a warm-up."""
    times = {name: [] for name in all_methods}
    for turn in range(turns + 1):
        for name, method in all_methods.items():
            start = time.perf_counter()
            run(method, tensors)
            if turn:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


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
        for name in only or ("favor+", "favor++", "favor+ causal", "favor++ causal", "floor", "performer-pytorch"):
            print(f"  {name:<26}{peak_memory(length, name):7.0f} MiB", flush=True)


def peak_memory(length: int, name: str) -> float:
    """MiB beyond inputs, output and gradients of one forward and backward pass, measured in a process of its own."""
    command = [sys.executable, "-m", "crt_exp.report.bench_attention", "peak", "--lengths", str(length), "--only", name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"measuring {name} at L = {length} failed: {(done.stderr.strip() or 'killed').splitlines()[-1]}")
    return float(done.stdout.split()[-2])


def print_peak(length: int, name: str) -> None:
    print_peak_of(methods(length)[name], length)


def print_peak_of(method: Method, length: int) -> None:
    tensors = inputs(length)
    forward_backward(method, inputs(256))  # libraries and threads
    theirs = 4 * tensors[0].numel() * 4    # output and three gradients, float32
    before = reset_peak()
    out = method(*tensors[:3])
    out.backward(tensors[3])
    print(f"{(peak() - before - theirs) / 2**20:.0f} MiB")


def main(size: str) -> None:
    print_times(list(LENGTHS), TURNS, [])


def command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="time", choices=["time", "memory", "peak"])
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.what == "time":
        print_times(args.lengths or list(LENGTHS), args.turns, args.only)
    elif args.what == "memory":
        print_memory(args.lengths or [65536], args.only)
    else:
        print_peak(args.lengths[0], args.only[0])


if __name__ == "__main__":
    command_line()
