"""Times on the GPU of this machine: attention alone, a BERT-base step, and the slowest launches.

`make gpu-check` runs the GPU tests, then this module. Both take at most 6 minutes. Estimates stand beside times: they
count the bytes and products of each kernel from its sizes, for a GPU of 3.3 TB/s and 400 TFLOP/s.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec

import pandas as pd
import torch

from crt_exp.experiments.measure.speed import CAUSAL, CHUNKED, HEADS, D, M, Speed, attention_work
from crt_exp.experiments.measure.times import in_turns, milliseconds
from crt_exp.mechanism import Mechanism, swap_attention

LENGTHS = (256, 1024, 4096, 16384, 65536)
NAMES = ("exact", "favorpp", "favorp", "favorsharp", "nearfar", "favormix")
METHODS = [*NAMES, *(name + CAUSAL for name in NAMES), CHUNKED]
NEAR_FAR_UP_TO = 16384  # tokens
ROUNDS = 5
BYTES_PER_SECOND = 3.3e12
OPERATIONS_PER_SECOND = 4e14


def estimate_milliseconds(length: int, causal: bool, chunk: int = 64) -> float:
    """Estimate a training step of the Triton kernels, in bfloat16: the larger of traffic and products.

    >>> 0.1 < estimate_milliseconds(65536, causal=False) < estimate_milliseconds(65536, causal=True) < 6
    True
    """
    tokens = HEADS * length
    # logits of queries and keys count twice, for the high and the low part of the directions
    logits = 2 * 2 * D * M
    product = 2 * D * M
    # forward: two logits, sums, outputs; backward: six logits, sums, and two products for each gradient
    operations = tokens * (8 * logits + 10 * product)
    traffic = tokens * D * 2 * (3 + 1 + 3 * 4)  # q, k, v, out, and what five kernels read and write
    if causal:
        states = HEADS * (length // chunk) * (D + 1) * M * 4
        traffic += 13 * states  # sums and scan, twice; gradients and their scan; four readers
        # keys of the own chunk: logits for each block of features, and products with 64 keys
        operations += tokens * (4 * logits + 6 * 2 * chunk * M)
    seconds = max(traffic / BYTES_PER_SECOND, operations / OPERATIONS_PER_SECOND)
    return 1e3 * seconds


def time_attention() -> pd.DataFrame:
    """Return median milliseconds of a training step by length and method, and the estimates."""
    records = []
    for length in LENGTHS:
        methods = [name for name in METHODS if length <= NEAR_FAR_UP_TO or "nearfar" not in name]
        speed = Speed("attention", [length], ROUNDS, methods, "cuda")
        records += speed.rows(Mechanism.of("exact"), seed=0)
    table = pd.DataFrame(records).pivot_table("training", "length", "method", "median", sort=False)
    for name, causal in (("estimate", False), (f"estimate{CAUSAL}", True)):
        table[name] = [estimate_milliseconds(length, causal) for length in table.index]
    return table.T


def time_linear_attention(length: int) -> float:
    """Milliseconds of flash-linear-attention's causal kernels on M features, forward and backward."""
    from fla.ops.linear_attn import chunk_linear_attn

    shape = (1, length, HEADS)
    features = torch.rand(2, *shape, M, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    v = torch.randn(*shape, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        out = chunk_linear_attn(features[0], features[1], v, normalize=True)
        out = out[0] if isinstance(out, tuple) else out
        out.sum().backward()

    return min(milliseconds(step) for _ in range(ROUNDS))


def time_bert() -> pd.Series:
    """Return median milliseconds of a training step of BERT-base, 32 rows of 128 tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    tokens = torch.randint(1000, (32, 128), device="cuda")
    labels = torch.randint(2, (32,), device="cuda")
    steps: dict[str, Callable[[], None]] = {}
    for name in ("exact", "favorp", "favorpp"):
        model = BertForSequenceClassification(BertConfig()).cuda()
        if name != "exact":
            swap_attention(model, name, m=128)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(model=model, optimizer=optimizer) -> None:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        steps[name] = step
    return pd.DataFrame(in_turns(steps, ROUNDS + 2, warm=2)).median()


def profile_launches(method: str, length: int) -> str:
    """Return the launches of a training step that take longest."""
    from torch.profiler import ProfilerActivity, profile

    work = attention_work(method, length, "cuda")
    work.times()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        work.times()
    return profiled.key_averages().table(sort_by="self_cuda_time_total", row_limit=12)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("gpu-check: expected a CUDA GPU")
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    print("milliseconds of a training step, attention alone, 8 heads, d = 64, m = 256, bfloat16:")
    print(time_attention().to_string(float_format="%.2f"), flush=True)
    if find_spec("fla"):
        for length in LENGTHS:
            print(f"chunk_linear_attn, {length} tokens: {time_linear_attention(length):.2f} ms")
    print("milliseconds of a training step of BERT-base, 32 x 128 tokens:")
    print(time_bert().to_string(float_format="%.1f"), flush=True)
    for method in ("favorpp", f"favorpp{CAUSAL}"):
        print(f"slowest launches of {method}, 16384 tokens:")
        print(profile_launches(method, 16384), flush=True)


if __name__ == "__main__":
    main()
