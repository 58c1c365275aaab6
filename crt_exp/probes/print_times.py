"""Times and memory that are printed, of which no page is made.

nearfar: near-far attention compared with exact attention and FAVOR++. Batch 1, 8 heads, d = 64, m = 256, float32 on the
CPU, forward and backward. A line has the median of milliseconds with the quartiles, and in brackets the median of its
ratio, within a turn, to near-far attention. With `memory` the peak beyond inputs, incoming gradient, output and
gradients, each in a process of its own. Of all methods: `task=speed`, and the page of `make speed`.

decoding: one cached token of a swapped causal model, and its prompt, compared with the model's own. A Llama of 8
layers, 8 heads, d = 64, random weights, or `--model`, float32, batch 1; favorpp with m = 256 and its state, the same
with all keys in its cache, near-far attention with its preset `default`. A cell is the median of milliseconds a token
after a prompt of that length and the fastest, and in brackets the median of its ratio to the own one of the same turn
and that of the fastest. Then the same of the prompts, and the sizes of all tensors in the caches. With `--gguf` a
column more is llama.cpp's, of the same model in that file, whose weights have mostly fewer bits.

All take turns, so that load from outside hits them alike.
"""

import argparse
import copy
import os
import statistics
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

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
COLUMNS = ("near-far", "recurrent state", "all keys", OWN := "the model's own")


# ---- near-far attention


def nearfar(args: argparse.Namespace) -> None:
    end = CAUSAL * args.causal
    ours = NEAR_FAR + end
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
    longest = 2 * max(args.positions)
    made = models(longest, args.model) | ({} if args.gguf is None else {"llama.cpp": LlamaCpp(args.gguf, longest)})
    tables: dict[str, list[list[str]]] = {"ms a token": [], "ms of the prompt": [], "MiB of the cache": []}
    for position in args.positions:
        prompt = torch.randint(8000, (1, position))
        read = in_turns({column: partial(each.read, prompt) for column, each in made.items()}, PROMPT_TURNS)
        tokens = in_turns({column: each.token for column, each in made.items()}, args.turns or TOKEN_TURNS)
        for table, row in zip(tables.values(), (cells(tokens), cells(read), [each.size() for each in made.values()])):
            table.append([str(position), *row])
    for what, table in tables.items():
        print(f"{what}; {conditions()}\n\n{markdown(['position', *made], table)}\n")


class Swapped:
    """A causal model of transformers and what it keeps behind a prompt, in a cache of this kind."""

    def __init__(self, model: nn.Module, cache: Callable[[], Any] = lambda: None):
        self.model, self.empty = model, cache

    def read(self, prompt: Tensor) -> None:
        self.cache = self.model(prompt, past_key_values=self.empty(), use_cache=True, logits_to_keep=1).past_key_values

    def token(self) -> None:
        self.model(torch.zeros(1, 1, dtype=torch.long), past_key_values=self.cache, use_cache=True)

    def size(self) -> str:
        """MiB of all tensors in the cache."""
        return f"{sum(of_layer(layer) for layer in self.cache.layers) / 2**20:.1f}"


class LlamaCpp:
    """The same model out of a GGUF file, by llama.cpp with its own flash attention and as many threads; its cache is of
    16 bits, and does not tell its size."""

    def __init__(self, file: str, longest: int):
        try:
            from llama_cpp import Llama
        except ImportError:
            raise SystemExit("--gguf takes llama.cpp: pip install llama-cpp-python") from None
        count = torch.get_num_threads()
        self.model = Llama(file, n_ctx=longest, n_threads=count, n_threads_batch=count, flash_attn=True, verbose=False)

    def read(self, prompt: Tensor) -> None:
        self.model.reset()
        self.model.eval(prompt[0].tolist())

    def token(self) -> None:
        self.model.eval([0])

    def size(self) -> str:
        return ""


def models(longest: int, folder: str | None) -> dict[str, Swapped]:
    """By column: a model, of exact attention or the same swapped, and how its cache is made before a prompt."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    own = llama(longest) if folder is None else opened(folder).model
    near_far, swapped = (swap_attention(copy.deepcopy(own), *given, **m) for given, m in
                         ((["nearfar"], {}), (["favorpp"], {"m": 256})))
    return dict(zip(COLUMNS, (Swapped(near_far), Swapped(swapped), Swapped(swapped, transformers.DynamicCache),
                              Swapped(own))))


def llama(longest: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, intermediate_size=1408,
        vocab_size=8000, max_position_embeddings=longest)).eval()


def cells(times: dict[str, list[float]]) -> list[str]:
    own = times[OWN]
    return [f"{statistics.median(each):.1f}, fastest {min(each):.1f} ({ratio(each, own):.2f}, "
            f"{min(each) / min(own):.2f})" for each in times.values()]


def of_layer(layer: Any) -> int:
    """Bytes of what a cache keeps of a layer."""
    return layer.nbytes() if hasattr(layer, "nbytes") else layer.keys.nbytes + layer.values.nbytes


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
    ours.add_argument("--without", nargs="*", default=[], choices=OTHERS)
    tokens.add_argument("positions", type=int, nargs="*", default=POSITIONS)
    tokens.add_argument("--gguf", help="a file of the same model for llama.cpp, which then has a column")
    tokens.add_argument("--model", help="a causal one, such as models/smollm2-135m, in the place of the Llama")
    return made


def command_line(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    with threads(args.threads):
        args.run(args)


if __name__ == "__main__":
    command_line()
