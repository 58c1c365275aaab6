"""Speed and memory of near-far attention compared with exact attention and FAVOR++, printed:
`python -m crt_exp.report.bench_nearfar [time|memory] [--lengths 1024 ...] [--causal] [--forward] [--half] [--bounded]
[--threads 1] [--turns 5] [--without exact]`. Of all methods: `task=speed`, and the page of `make speed`.

Batch 1, 8 heads, d = 64, m = 256, float32 on the CPU, forward and backward. All methods take turns, so that load from
outside hits them alike; a line has the median of milliseconds with the quartiles, and in brackets the median of its
ratio, within a turn, to near-far attention. --half: also of queries, keys and values in bfloat16. --bounded: preset
`bounded` in the place of `default`. `memory`: the peak beyond inputs, incoming gradient, output and gradients, each in
a process of its own.
"""

import argparse
import os
import statistics
from collections.abc import Sequence
from functools import partial

import torch

from crt_exp.memory import in_new_process
from crt_exp.studies.speed import CAUSAL, forward, forward_backward, held_by, inputs, methods
from crt_exp.studies.timing import turns

NEAR_FAR, OTHERS = "nearfar", ("exact", "favorpp")
LENGTHS, LONG, HALF = (1024, 2048, 4096, 8192, 16384), 65536, ", bfloat16"
TURNS = {1024: 41, 2048: 21, 4096: 11, 8192: 7}  # others: 5


def print_times(lengths: Sequence[int], ours: str, others: Sequence[str], rounds: int | None = None,
                alone: bool = False, half: bool = False) -> None:
    """alone: the forward pass."""
    run = forward if alone else forward_backward
    for length in lengths:
        made, tensors = methods(length, [ours, *others]), inputs(length)
        calls = {name: partial(run, method, tensors) for name, method in made.items()}
        if half:
            low = tuple(t.detach().bfloat16().requires_grad_(t.requires_grad) for t in tensors)
            calls |= {name + HALF: partial(run, made[name], low) for name in made if not name.startswith("favor")}
        times = turns(calls, rounds or TURNS.get(length, 5))
        print(f"\n{run.__name__}, L = {length}, {len(times[ours])} turns, ratio to {ours}; "
              f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
        for name, t in times.items():
            print(f"  {name:<26}{line(t, times[ours + HALF if name.endswith(HALF) else ours])}", flush=True)


def line(times: Sequence[float], base: Sequence[float]) -> str:
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    ratio = statistics.median(a / b for a, b in zip(times, base))
    return f"{statistics.median(times):10.1f} ms  ({low:.1f} to {high:.1f}; {ratio:.3f})"


def print_memory(lengths: Sequence[int], names: Sequence[str]) -> None:
    """Each case in a new process: the allocator would keep what an earlier one freed."""
    for length in lengths:
        print(f"\npeak memory beyond inputs, output and gradients, L = {length}")
        for name in names:
            mib = in_new_process(held_by, name=name, length=length, threads=torch.get_num_threads())
            print(f"  {name:<26}{mib:7.0f} MiB", flush=True)


def command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="time", choices=["time", "memory"])
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--turns", type=int)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--forward", action="store_true", help="no backward pass")
    parser.add_argument("--half", action="store_true", help="also in bfloat16")
    parser.add_argument("--bounded", action="store_true", help="preset bounded")
    parser.add_argument("--without", nargs="*", default=[], choices=OTHERS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    end = CAUSAL * args.causal
    ours = NEAR_FAR + " bounded" * args.bounded + end
    others = [name + end for name in OTHERS if name not in args.without]
    if args.what == "time":
        print_times(args.lengths or LENGTHS, ours, others, args.turns, args.forward, args.half)
    else:
        print_memory(args.lengths or [LONG], [ours, *others[-1:]])
