"""One cached token of a swapped causal model, and its prompt, compared with the model's own:
`python -m crt_exp.report.bench_decoding [positions ...]`.

A Llama of 8 layers, 8 heads, d = 64, random weights, float32, batch 1; favorpp with m = 256, near-far attention with
its preset `default`. The swapped models with their states, favorpp with all keys in its cache, and the own attention of
the model take turns, so that load from outside hits them alike: a cell is the median of milliseconds a token after a
prompt of that length and the fastest, and in brackets the median of its ratio to the own one of the same turn and that
of the fastest. Then the same of the prompts, and the sizes of all tensors in the caches.
"""

import argparse
import copy
import os
import statistics
import time
import warnings
from functools import partial

import torch
from torch import Tensor

from crt_exp.mechanism import swap_attention
from crt_exp.drawing import markdown
from crt_exp.studies.timing import turns

POSITIONS = (256, 1024, 2048, 4096, 8192)
TURNS, PROMPT_TURNS = 25, 3
NEAR_FAR, STATE, KEYS, OWN = "near-far", "recurrent state", "all keys", "the model's own"


def models() -> tuple:
    """One of exact attention, and the same swapped: by favorpp, by near-far attention."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    own = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, intermediate_size=1408,
        vocab_size=8000, max_position_embeddings=2 * max(POSITIONS))).eval()
    return own, swap_attention(copy.deepcopy(own), "favorpp", m=256), swap_attention(copy.deepcopy(own), "nearfar")


def after(prompt: Tensor, own, swapped, near_far) -> tuple[dict, dict[str, list[float]]]:
    """The model and its cache after the prompt, by the name of the column, and the milliseconds of every turn."""
    from transformers import DynamicCache

    given = {NEAR_FAR: (near_far, lambda: None), STATE: (swapped, lambda: None), KEYS: (swapped, DynamicCache),
             OWN: (own, lambda: None)}
    times, caches = {name: [] for name in given}, {}
    for turn in range(PROMPT_TURNS + 1):
        for name, (model, cache) in given.items():
            start = time.perf_counter()
            out = model(prompt, past_key_values=cache(), use_cache=True, logits_to_keep=1)
            caches[name] = model, out.past_key_values
            times[name] += [1e3 * (time.perf_counter() - start)] * (turn > 0)      # the first warms up
    return caches, times


def timed(caches: dict, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every turn after a warm-up."""
    token = torch.zeros(1, 1, dtype=torch.long)
    return turns({name: partial(model, token, past_key_values=cache, use_cache=True)
                  for name, (model, cache) in caches.items()}, rounds)


def cell(times: list[float], own: list[float]) -> str:
    ratio = statistics.median(a / b for a, b in zip(times, own))
    return f"{statistics.median(times):.1f}, fastest {min(times):.1f} ({ratio:.2f}, {min(times) / min(own):.2f})"


def cache_size(cache) -> float:
    """MiB of all tensors in a cache."""
    return sum(layer.nbytes() if hasattr(layer, "nbytes") else layer.keys.nbytes + layer.values.nbytes
               for layer in cache.layers) / 2**20


@torch.no_grad()
def main(positions: tuple[int, ...] = POSITIONS, rounds: int = TURNS) -> None:
    warnings.filterwarnings("ignore", message=".*has no statistics yet.*")  # which features, matters not to the time
    made = models()
    tokens, prompts, sizes = [], [], []
    for position in positions:
        caches, prompt = after(torch.randint(8000, (1, position)), *made)
        token = timed(caches, rounds)
        for rows, times in ((tokens, token), (prompts, prompt)):
            rows.append([str(position), *(cell(t, times[OWN]) for t in times.values())])
        sizes.append([str(position), *(f"{cache_size(cache):.1f}" for _, cache in caches.values())])
    names = ["position", NEAR_FAR, STATE, KEYS, OWN]
    for what, rows in (("ms a token", tokens), ("ms of the prompt", prompts), ("MiB of the cache", sizes)):
        print(f"{what}; {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}\n\n{markdown(names, rows)}\n")


def command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("positions", type=int, nargs="*", default=list(POSITIONS))
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    main(tuple(args.positions), args.turns)


if __name__ == "__main__":
    command_line()
