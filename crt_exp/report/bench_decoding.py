"""One cached token of a swapped causal model beside the model's own:
`python -m crt_exp.report.bench_decoding [positions ...]`.

A Llama of 8 layers, 8 heads, d = 64, random weights, float32, batch 1; favorpp with m = 256. The swapped model with its
recurrent state, the same with all keys in its cache, and the model's own attention take turns, so that load from
outside hits them alike: a cell is the median of milliseconds a token after a prompt of that length and the fastest, and
in brackets the median of its ratio to the model's own of the same turn and that of the fastest. Below, the sizes of all
tensors in the caches.
"""

import argparse
import copy
import os
import statistics
import time
import warnings

import torch
from torch import Tensor

from crt_exp.mechanism import swap_attention
from crt_exp.report.writing import markdown

POSITIONS = (256, 1024, 4096, 8192)
TURNS = 25
STATE, KEYS, OWN = "recurrent state", "all keys", "the model's own"


def models() -> tuple:
    """One of exact attention, and the same swapped."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    own = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, intermediate_size=1408,
        vocab_size=8000, max_position_embeddings=2 * max(POSITIONS))).eval()
    return own, swap_attention(copy.deepcopy(own), "favorpp", m=256)


def caches(own, swapped, prompt: Tensor) -> dict:
    """The model and its cache after the prompt, by the name of the column."""
    from transformers import DynamicCache

    given = {STATE: (swapped, None), KEYS: (swapped, DynamicCache()), OWN: (own, None)}
    return {name: (model, model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values)
            for name, (model, cache) in given.items()}


def timed(after: dict, turns: int) -> dict[str, list[float]]:
    """Milliseconds of every turn after a warm-up."""
    times, token = {name: [] for name in after}, torch.zeros(1, 1, dtype=torch.long)
    for turn in range(turns + 3):
        for name, (model, cache) in after.items():
            start = time.perf_counter()
            model(token, past_key_values=cache, use_cache=True)
            if turn > 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def cell(times: list[float], own: list[float]) -> str:
    ratio = statistics.median(a / b for a, b in zip(times, own))
    return f"{statistics.median(times):.1f}, fastest {min(times):.1f} ({ratio:.2f}, {min(times) / min(own):.2f})"


def size(cache) -> float:
    """MiB of all tensors in a cache."""
    return sum(layer.nbytes() if hasattr(layer, "nbytes") else layer.keys.nbytes + layer.values.nbytes
               for layer in cache.layers) / 2**20


@torch.no_grad()
def main(size: str = "small", positions: tuple[int, ...] = POSITIONS, turns: int = TURNS) -> None:
    warnings.filterwarnings("ignore", message=".*has no statistics yet.*")  # which features, matters not to the time
    own, swapped = models()
    rows, sizes = [], []
    for position in positions:
        after = caches(own, swapped, torch.randint(8000, (1, position)))
        times = timed(after, turns)
        rows.append([str(position), *(cell(t, times[OWN]) for t in times.values())])
        sizes.append([str(position), *(f"{size(cache):.1f}" for _, cache in after.values())])
    print(f"ms a token (ratios to the model's own); {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}\n")
    print(markdown(["position", STATE, KEYS, OWN], rows))
    print("\nMiB of the cache\n")
    print(markdown(["position", STATE, KEYS, OWN], sizes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("positions", type=int, nargs="*", default=list(POSITIONS))
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    main(positions=tuple(args.positions), turns=args.turns)
