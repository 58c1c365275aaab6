"""Times and memory that are printed, of which no page is made.

nearfar: near-far attention compared with exact attention and FAVOR++. Batch 1, 8 heads, d = 64, m = 256, float32 on the
CPU, forward and backward. A line has the median of milliseconds with the quartiles, and in brackets the median of its
ratio, within a turn, to near-far attention. With `memory` the peak beyond inputs, incoming gradient, output and
gradients, each in a process of its own. Of all methods: `task=speed`, and the page of `make speed`.

decoding: one cached token of a swapped causal model, and its prompt, compared with the model's own. A Llama of 8
layers, 8 heads, d = 64, random weights, or `--model`, float32, batch 1; favorpp with m = 256 and its state, the same
with all keys in its cache, near-far attention with its preset `default`. A cell is the median of milliseconds a token
after a prompt of that length and the fastest, and in brackets the median of its ratio to the own one of the same turn
and that of the fastest. Then the same of the prompts, and the sizes of all tensors in the caches.

All take turns, so that load from outside hits them alike.
"""

import argparse
import copy
import os
import statistics
import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from crt_exp.drawing import markdown
from crt_exp.mechanism import swap_attention
from crt_exp.probes.pretrained import opened
from crt_exp.probes.speed import CAUSAL, forward, forward_backward, held_by, inputs, methods
from crt_exp.times import in_new_process, in_turns, ratio, threads

NEAR_FAR, OTHERS = "nearfar", ("exact", "favorpp")
LENGTHS, LONGEST, HALF = (1024, 2048, 4096, 8192, 16384), 65536, ", bfloat16"
TURNS = {1024: 41, 2048: 21, 4096: 11, 8192: 7}  # others: 5
POSITIONS = (256, 1024, 2048, 4096, 8192)
TOKEN_TURNS, PROMPT_TURNS = 25, 3
COLUMNS = ("near-far", "recurrent state", "all keys", "the model's own")


# ---- near-far attention


def nearfar(args: argparse.Namespace) -> None:
    end = CAUSAL * args.causal
    ours = NEAR_FAR + " bounded" * args.bounded + end
    others = [name + end for name in OTHERS if name not in args.without]
    if args.what == "memory":
        print_memory(args.lengths or [LONGEST], [ours, *others[-1:]])
        return
    for length in args.lengths or LENGTHS:
        print_times(length, ours, others, args.turns or TURNS.get(length, 5), args.forward, args.half)


def print_times(length: int, ours: str, others: Sequence[str], rounds: int, alone: bool, half: bool) -> None:
    """alone: the forward pass."""
    run, made, tensors = forward if alone else forward_backward, methods(length, [ours, *others]), inputs(length)
    calls = {name: partial(run, method, tensors) for name, method in made.items()}
    if half:
        low = tuple(t.detach().bfloat16().requires_grad_(t.requires_grad) for t in tensors)
        calls |= {name + HALF: partial(run, made[name], low) for name in made if not name.startswith("favor")}
    times = in_turns(calls, rounds)
    print(f"\n{run.__name__}, L = {length}, {rounds} turns, ratio to {ours}; {conditions()}")
    for name, each in times.items():
        print(f"  {name:<26}{line(each, times[ours + HALF if name.endswith(HALF) else ours])}", flush=True)


def line(times: Sequence[float], base: Sequence[float]) -> str:
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return f"{statistics.median(times):10.1f} ms  ({low:.1f} to {high:.1f}; {ratio(times, base):.3f})"


def print_memory(lengths: Sequence[int], names: Sequence[str]) -> None:
    for length in lengths:
        print(f"\npeak memory beyond inputs, output and gradients, L = {length}")
        for name in names:
            mib = in_new_process(held_by, arm=name, length=length, threads=torch.get_num_threads())["mib"]
            print(f"  {name:<26}{mib:7.0f} MiB", flush=True)


# ---- a decoded token


@torch.no_grad()
def decoding(args: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore", message=".*has no statistics yet.*")  # which features, matters not to the time
    made = models(2 * max(args.positions), args.model)
    tables: dict[str, list[list[str]]] = {"ms a token": [], "ms of the prompt": [], "MiB of the cache": []}
    for position in args.positions:
        caches, prompt = after(torch.randint(8000, (1, position)), made)
        rows = (cells(of_token(caches, args.turns or TOKEN_TURNS)), cells(prompt),
                [f"{cache_size(cache):.1f}" for _, cache in caches.values()])
        for table, row in zip(tables.values(), rows):
            table.append([str(position), *row])
    for what, table in tables.items():
        print(f"{what}; {conditions()}\n\n{markdown(['position', *COLUMNS], table)}\n")


def models(longest: int, folder: str | None) -> dict[str, tuple]:
    """By column: a model, of exact attention or the same swapped, and how its cache is made before a prompt."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    own = llama(longest) if folder is None else opened(folder).model
    near_far, swapped = (swap_attention(copy.deepcopy(own), *given, **m) for given, m in
                         ((["nearfar"], {}), (["favorpp"], {"m": 256})))
    caches = (lambda: None, lambda: None, transformers.DynamicCache, lambda: None)
    return dict(zip(COLUMNS, zip((near_far, swapped, swapped, own), caches)))


def llama(longest: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, intermediate_size=1408,
        vocab_size=8000, max_position_embeddings=longest)).eval()


def after(prompt: Tensor, made: dict[str, tuple]) -> tuple[dict[str, tuple], dict[str, list[float]]]:
    """The model and its cache after the prompt, by column, and the milliseconds of every turn."""
    caches = {}

    def read(column: str) -> None:
        model, cache = made[column]
        caches[column] = model, model(prompt, past_key_values=cache(), use_cache=True, logits_to_keep=1).past_key_values
    times = in_turns({column: partial(read, column) for column in made}, PROMPT_TURNS)
    return caches, times


def of_token(caches: dict[str, tuple], rounds: int) -> dict[str, list[float]]:
    token = torch.zeros(1, 1, dtype=torch.long)
    return in_turns({column: partial(model, token, past_key_values=cache, use_cache=True)
                     for column, (model, cache) in caches.items()}, rounds)


def cells(times: dict[str, list[float]]) -> list[str]:
    own = times[COLUMNS[-1]]
    return [f"{statistics.median(each):.1f}, fastest {min(each):.1f} ({ratio(each, own):.2f}, "
            f"{min(each) / min(own):.2f})" for each in times.values()]


def cache_size(cache) -> float:
    """MiB of all tensors in a cache."""
    return sum(layer.nbytes() if hasattr(layer, "nbytes") else layer.keys.nbytes + layer.values.nbytes
               for layer in cache.layers) / 2**20


# ---- the command


def conditions() -> str:
    return f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m crt_exp.probes.print_times", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    whats = made.add_subparsers(required=True)
    ours, tokens = (whats.add_parser(run.__name__) for run in (nearfar, decoding))
    for each, run in ((ours, nearfar), (tokens, decoding)):
        each.set_defaults(run=run)
        each.add_argument("--turns", type=int)
        each.add_argument("--threads", type=int, default=torch.get_num_threads())
    ours.add_argument("what", nargs="?", default="time", choices=["time", "memory"])
    ours.add_argument("--lengths", type=int, nargs="+")
    ours.add_argument("--causal", action="store_true")
    ours.add_argument("--forward", action="store_true", help="no backward pass")
    ours.add_argument("--half", action="store_true", help="also of queries, keys and values in bfloat16")
    ours.add_argument("--bounded", action="store_true", help="preset bounded in the place of default")
    ours.add_argument("--without", nargs="*", default=[], choices=OTHERS)
    tokens.add_argument("positions", type=int, nargs="*", default=POSITIONS)
    tokens.add_argument("--model", help="a causal one, such as models/smollm2-135m, in the place of the Llama")
    return made


def command_line(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    with threads(args.threads):
        args.run(args)


if __name__ == "__main__":
    command_line()
