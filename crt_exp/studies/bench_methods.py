"""Speed and memory of attention, printed: `python -m crt_exp.studies.bench_methods [time|memory] [--lengths 1024 ...]`,
and of near-far attention with the bars that it is to reach: `python -m crt_exp.report.bench_nearfar`, which takes
[--causal] [--forward] [--half] [--bounded] [--threads 1] [--turns 5] [--without exact] too.

Batch 1, 8 heads, d = 64, m = 256, float32 on the CPU, forward and backward. All methods take turns, so that load from
outside hits them alike; a line has the median of milliseconds with the quartiles, and in brackets the median of its
ratio, within a turn, to the plain product of features (the floor), or to near-far attention. --half: also of queries,
keys and values in bfloat16. --bounded: preset `bounded` in the place of `default`. `memory`: the peak beyond inputs,
incoming gradient, output and gradients, each in a process of its own.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from crt_exp.memory import in_new_process
from crt_exp.studies.speed import CAUSAL, forward, forward_backward, held_by, inputs, methods
from crt_exp.studies.timing import turns

LENGTHS, TURNS = (1024, 4096, 16384), 11
HELD = ("favorp", "favorpp", f"favorp{CAUSAL}", f"favorpp{CAUSAL}", "floor", "performer-pytorch")
NEAR_FAR = ("nearfar", "exact", "favorpp")
NEAR_FAR_LENGTHS = (1024, 2048, 4096, 8192, 16384)
NEAR_FAR_TURNS = {1024: 41, 2048: 21, 4096: 11, 8192: 7}                       # others: 5
FASTER = {1024: 1.0, 2048: 1.0, 4096: 3.0, 8192: 3.0, 16384: 10.0}             # than exact attention, at least
FASTER_CAUSAL = {1024: 0.95, 2048: 0.95, 4096: 2.0, 16384: 7.0}
FAVORS = {16384: 2.0}                                                          # of the time of FAVOR++, at most
LONG, HALF = 65536, ", bfloat16"
MEMORY = {"nearfar": 400, f"nearfar{CAUSAL}": 300}                             # MiB, at most, at LONG


def print_times(lengths: Sequence[int], rounds: int, only: Sequence[str]) -> None:
    """Of all methods, or some, compared with the floor."""
    for title, run in (("forward and backward", forward_backward), ("forward", forward)):
        for length in lengths:
            names = [name for name in methods(length) if not only or name in (*only, "floor")]
            print_lines(title, length, measured(run, length, names, max(3, round(rounds * min(1, 4096 / length)))),
                        "floor")


def print_near_far(lengths: Sequence[int], rounds: int | None = None, causal: bool = False, alone: bool = False,
                   half: bool = False, bounded: bool = False, without: Sequence[str] = ()) -> None:
    """alone: the forward pass."""
    end, bars = (CAUSAL, FASTER_CAUSAL) if causal else ("", FASTER)
    ours = f"nearfar{' bounded' if bounded else ''}{end}"
    names = [ours, *(name + end for name in NEAR_FAR[1:] if name not in without)]
    for length in lengths:
        times = measured(forward if alone else forward_backward, length, names,
                         rounds or NEAR_FAR_TURNS.get(length, 5), half)
        medians = print_lines("forward" if alone else "forward and backward", length, times, ours)
        if length in bars and f"exact{end}" in medians and not bounded:
            _say(f"{bars[length]:g} times as fast as exact attention",
                 medians[f"exact{end}"] / medians[ours] >= bars[length])
        if length in FAVORS and f"favorpp{end}" in medians and not causal:
            _say(f"{FAVORS[length]:g} times the time of FAVOR++", medians[ours] / medians["favorpp"] <= FAVORS[length])


def measured(run: Callable[..., Any], length: int, names: Sequence[str], rounds: int,
             half: bool = False) -> dict[str, list[float]]:
    made, tensors = methods(length, names), inputs(length)
    calls = {name: partial(run, method, tensors) for name, method in made.items()}
    if half:
        low = tuple(t.detach().bfloat16().requires_grad_(t.requires_grad) for t in tensors)
        calls |= {name + HALF: partial(run, made[name], low) for name in made if not name.startswith("favor")}
    return turns(calls, rounds)


def print_lines(title: str, length: int, times: dict[str, list[float]], base: str) -> dict[str, float]:
    """Returns the medians."""
    print(f"\n{title}, L = {length}, {len(times[base])} turns, ratio to {base}; {torch.get_num_threads()} threads, "
          f"load {os.getloadavg()[0]:.1f}")
    for name, t in times.items():
        low, _, high = statistics.quantiles(t, n=4) if len(t) > 1 else (t[0],) * 3
        other = times.get(base + HALF if name.endswith(HALF) else base, times[base])
        ratio = statistics.median(a / b for a, b in zip(t, other))
        print(f"  {name:<26}{statistics.median(t):10.1f} ms  ({low:.1f} to {high:.1f}; {ratio:.3f})", flush=True)
    return {name: statistics.median(t) for name, t in times.items()}


def print_memory(lengths: Sequence[int], names: Sequence[str]) -> None:
    """Each case in a new process: the allocator would keep what an earlier one freed."""
    for length in lengths:
        print(f"\npeak memory beyond inputs, output and gradients, L = {length}")
        for name in names:
            mib = in_new_process(held_by, name=name, length=length, threads=torch.get_num_threads())
            print(f"  {name:<26}{mib:7.0f} MiB", flush=True)
            if length == LONG and name in MEMORY:
                _say(f"{MEMORY[name]} MiB", mib <= MEMORY[name])


def _say(bar: str, reached: bool) -> None:
    print(f"  bar, {bar}: {'reached' if reached else 'not reached'}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("what", nargs="?", default="time", choices=["time", "memory"])
    made.add_argument("--lengths", type=int, nargs="+")
    made.add_argument("--turns", type=int)
    made.add_argument("--threads", type=int, default=torch.get_num_threads())
    return made


def command_line() -> None:
    made = parser()
    made.add_argument("--only", nargs="+", default=[])
    args = made.parse_args()
    torch.set_num_threads(args.threads)
    if args.what == "time":
        print_times(args.lengths or LENGTHS, args.turns or TURNS, args.only)
    else:
        print_memory(args.lengths or [LONG], args.only or HELD)


def near_far_command_line() -> None:
    made = parser()
    made.add_argument("--causal", action="store_true")
    made.add_argument("--forward", action="store_true", help="no backward pass")
    made.add_argument("--half", action="store_true", help="also in bfloat16")
    made.add_argument("--bounded", action="store_true", help="preset bounded")
    made.add_argument("--without", nargs="*", default=[], choices=NEAR_FAR[1:])
    args = made.parse_args()
    torch.set_num_threads(args.threads)
    if args.what == "time":
        print_near_far(args.lengths or NEAR_FAR_LENGTHS, args.turns, args.causal, args.forward, args.half, args.bounded,
                       args.without)
    else:
        print_memory(args.lengths or [LONG], [name + CAUSAL * args.causal for name in ("nearfar", "favorpp")])


if __name__ == "__main__":
    command_line()
