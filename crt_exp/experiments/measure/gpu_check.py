"""Times on the GPU of this machine: attention alone, a BERT-base step, and the slowest launches.

`make gpu-check` runs the GPU tests, then this module. Both take at most 6 minutes. Estimates come first and need no
GPU: bytes, products and exponents of each launch of the Triton engine, and the time of the slowest on an H100.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

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
CHUNK = 64  # tokens of a program of the Triton engine
BYTES_PER_SECOND = 3.3e12
OPERATIONS_PER_SECOND = 4e14
EXPONENTS_PER_SECOND = 3.7e12  # 132 processors, 16 a cycle, 1.75 GHz


class Work(NamedTuple):
    """Work of a launch in half precision, for a token of a head."""

    logits: float  # products with the directions, which have a high and a low part
    products: float  # of d and M
    exponents: float  # of M features
    vectors: float  # of d columns in bfloat16, read or written
    states: float = 0  # sums of a chunk in float32, read or written

    def cost(self, length: int) -> dict[str, float]:
        """Return bytes, operations, exponents, and the milliseconds of the slowest of them."""
        tokens = HEADS * length
        state = (D + 1) * M * 4 / CHUNK
        traffic = tokens * (self.vectors * D * 2 + self.states * state)
        operations = tokens * (2 * self.logits + self.products) * 2 * D * M
        exponents = tokens * self.exponents * M
        seconds = max(
            traffic / BYTES_PER_SECOND,
            operations / OPERATIONS_PER_SECOND,
            exponents / EXPONENTS_PER_SECOND,
        )
        return {
            "bytes": traffic,
            "operations": operations,
            "exponents": exponents,
            "milliseconds": 1e3 * seconds,
        }


BIDIRECTIONAL = {
    "key_sums": Work(1, 1, 1, 2),
    "outputs": Work(1, 2, 1, 2),
    "query_sums": Work(1, 1, 1, 3),
    "query_gradients": Work(1, 3, 1, 4),
    "key_gradients (keys)": Work(1, 3, 1, 3),
    "key_gradients (values)": Work(1, 2, 1, 2),
}
# Tokens of a chunk also meet its three other tiles of 16: logits of 3/4 of a chunk, exponents of 3 and 3/4, pairs over
# M features (3/4 of a product), and their products with values for each block of 16 features (3). Within a tile each
# feature of a token has 16 exponents.
CAUSAL_LAUNCHES = {
    "diagonal_logs": Work(2, 0, 16, 2.5),
    "key_sums": Work(1, 1, 1, 2, 1),
    "scan": Work(0, 0, 0, 0, 2),
    "outputs": Work(1.75, 5.75, 4.75, 4.5, 1),
    "key_sums (backward)": Work(1, 1, 1, 2, 1),
    "scan (backward)": Work(0, 0, 0, 0, 2),
    "diagonal_gradients": Work(2, 2, 16, 9),
    "query_sums": Work(1, 1, 1, 3, 1),
    "scan_back": Work(0, 0, 0, 0, 2),
    "query_gradients": Work(1.75, 6.75, 4.75, 8, 1),
    "key_gradients (keys)": Work(1.75, 6.75, 4.75, 8, 1),
    "key_gradients (values)": Work(1.75, 5.75, 4.75, 4.5, 1),
}


def estimate(length: int, causal: bool) -> pd.DataFrame:
    """Estimate each launch of a training step in bfloat16, if all vectors and sums are read once.

    >>> both = estimate(65536, causal=False).milliseconds.sum()
    >>> bool(0.5 < both < estimate(65536, causal=True).milliseconds.sum() < 6)
    True
    """
    launches = CAUSAL_LAUNCHES if causal else BIDIRECTIONAL
    return pd.DataFrame({name: work.cost(length) for name, work in launches.items()}).T


def time_attention() -> pd.DataFrame:
    """Return median milliseconds of a training step by method and length."""
    records = []
    for length in LENGTHS:
        methods = [name for name in METHODS if length <= NEAR_FAR_UP_TO or "nearfar" not in name]
        speed = Speed("attention", [length], ROUNDS, methods, "cuda")
        records += speed.rows(Mechanism.of("exact"), seed=0)
    return pd.DataFrame(records).pivot_table("training", "method", "length", "median", sort=False)


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
    print("a training step of attention alone, 8 heads, d = 64, m = 256, bfloat16")
    for causal in (False, True):
        print(f"estimate of each launch, {LENGTHS[-1]} tokens, causal={causal}:")
        print(estimate(LENGTHS[-1], causal).to_string(float_format="%.3g"))
        for length in LENGTHS:
            total = estimate(length, causal).milliseconds.sum()
            print(f"estimate of all launches, {length} tokens: {total:.3f} ms", flush=True)
    if not torch.cuda.is_available():
        sys.exit("gpu-check: expected a CUDA GPU")
    print(torch.cuda.get_device_name(), torch.__version__)
    print("milliseconds:")
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
