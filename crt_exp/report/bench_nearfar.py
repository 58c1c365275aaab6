"""Speed and memory of near-far attention beside exact attention (SDPA) and FAVOR++, with the bars that it is to reach:
`python -m crt_exp.report.bench_nearfar [time|memory] [--causal] [--forward] [--half] [--bounded] [--threads 1]
[--lengths 1024 4096 16384] [--turns 5] [--without exact]`.

Preset `default`, m = 256, batch 1, 8 heads, d = 64, float32 on the CPU, forward and backward. All take turns, so that
load from outside hits them alike; a line has the median of milliseconds with the quartiles, and its ratio to the median
of near-far attention. SDPA, whose time grows with the square, is warmed up at 4096 tokens at most. --half: also of
queries, keys and values in bfloat16. --bounded: preset `bounded` in the place of `default`.
`memory`: the peak beyond inputs, output and gradients, each in a process of its own.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Sequence

import torch

from crt_exp.studies.memory import in_new_process
from crt_exp.studies.speed import CAUSAL, forward, forward_backward, held_by, inputs, methods
from crt_exp.studies.timing import milliseconds


NAMES = OURS, SDPA, FAVOR = "nearfar", "exact", "favorpp"
LENGTHS, LONG = (1024, 2048, 4096, 8192, 16384), 65536
TURNS = {1024: 41, 2048: 21, 4096: 11, 8192: 7}   # others: 5
LONGEST_WARM_UP = 4096
FASTER = {1024: 1.0, 2048: 1.0, 4096: 3.0, 8192: 3.0, 16384: 10.0}    # than SDPA, at least
FASTER_CAUSAL = {1024: 0.95, 2048: 0.95, 4096: 2.0, 16384: 7.0}
FAVORS = {16384: 2.0}                                                 # of the time of FAVOR++, at most
LOW = ", bfloat16"
MEMORY, MEMORY_CAUSAL = 400, 300                                      # MiB, at most, at LONG


def measured(length: int, turns: int, names: Sequence[str], run: Callable, half: bool) -> dict[str, list[float]]:
    """Milliseconds of every turn."""
    lowered = lambda tensors: tuple(t.detach().bfloat16().requires_grad_(t.requires_grad) for t in tensors)
    made, tensors = methods(length, names), inputs(length)
    chosen = {name: (method, tensors) for name, method in made.items()}
    if half:
        chosen |= {name + LOW: (made[name], lowered(tensors)) for name in made if not name.startswith(FAVOR)}
    for name, (method, _) in chosen.items():
        warm = inputs(min(length, LONGEST_WARM_UP) if name.startswith(SDPA) else length)
        run(method, lowered(warm) if name.endswith(LOW) else warm)
    times = {name: [] for name in chosen}
    for _ in range(turns):
        for name, (method, given) in chosen.items():
            times[name].append(milliseconds(run, method, given))
    return times


def print_times(lengths: Sequence[int], turns: int | None = None, names: Sequence[str] = NAMES, causal: bool = False,
                alone: bool = False, half: bool = False) -> None:
    """alone: the forward pass."""
    end, bars = (CAUSAL, FASTER_CAUSAL) if causal else ("", FASTER)
    ours, sdpa, favor = (name + end for name in (names[0], *NAMES[1:]))
    for length in lengths:
        run = forward if alone else forward_backward
        times = measured(length, turns or TURNS.get(length, 5), [name + end for name in names], run, half)
        medians = {name: statistics.median(t) for name, t in times.items()}
        print(f"\nL = {length}, {len(times[ours])} turns, {'forward' if alone else 'forward and backward'}, "
              f"{torch.get_num_threads()} threads; load {os.getloadavg()[0]:.1f}")
        for name, t in times.items():
            low, _, high = statistics.quantiles(t, n=4) if len(t) > 1 else (t[0],) * 3
            base = ours + LOW if name.endswith(LOW) else ours
            print(f"  {name:<26}{medians[name]:10.1f} ms  ({low:.1f} to {high:.1f})"
                  f"{medians[name] / medians[base]:8.2f}", flush=True)
        if length in bars and sdpa in times and names[0] == OURS:
            _say(f"{bars[length]:g} times as fast as SDPA", medians[sdpa] / medians[ours] >= bars[length])
        if length in FAVORS and favor in times and not causal:
            _say(f"{FAVORS[length]:g} times the time of FAVOR++", medians[ours] / medians[favor] <= FAVORS[length])


def print_memory(length: int, causal: bool = False) -> None:
    end, most = (CAUSAL, MEMORY_CAUSAL) if causal else ("", MEMORY)
    print(f"\npeak memory beyond inputs, output and gradients, L = {length}")
    for name in (OURS, FAVOR):
        found = in_new_process(held_by, name=name + end, length=length, threads=torch.get_num_threads())
        print(f"  {name + end:<16}{found:10.0f} MiB", flush=True)
        if name == OURS and length == LONG:
            _say(f"{most} MiB", found <= most)


def _say(bar: str, reached: bool) -> None:
    print(f"  bar, {bar}: {'reached' if reached else 'not reached'}")


def main(size: str) -> None:
    print_times(LENGTHS)
    print_memory(LONG)


def command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="time", choices=["time", "memory"])
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--turns", type=int)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--forward", action="store_true", help="no backward pass")
    parser.add_argument("--half", action="store_true", help="also in bfloat16")
    parser.add_argument("--bounded", action="store_true", help="preset bounded")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--without", nargs="*", default=[], choices=[SDPA, FAVOR])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.what == "time":
        names = [name for name in NAMES if name not in args.without]
        names[0] += " bounded" * args.bounded
        print_times(args.lengths or LENGTHS, args.turns, names, args.causal, args.forward, args.half)
        return
    for length in args.lengths or [LONG]:
        print_memory(length, args.causal)


if __name__ == "__main__":
    command_line()
