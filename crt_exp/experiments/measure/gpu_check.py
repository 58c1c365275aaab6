"""Times on the GPU of this machine: attention alone, a BERT-base step, and the slowest launches.

`make gpu-check` runs the GPU tests, then this module. Both take at most 6 minutes.
"""

import sys
from collections.abc import Callable

import pandas as pd
import torch

from crt_exp.experiments.measure.speed import CAUSAL, CHUNKED, Speed, attention_work
from crt_exp.experiments.measure.times import in_turns
from crt_exp.mechanism import Mechanism, swap_attention

LENGTHS = (256, 1024, 4096, 16384, 65536)
NAMES = ("exact", "favorpp", "favorp", "favorsharp", "nearfar", "favormix")
METHODS = [*NAMES, *(name + CAUSAL for name in NAMES), CHUNKED]
NEAR_FAR_UP_TO = 16384  # tokens
ROUNDS = 5


def time_attention() -> pd.DataFrame:
    """Return median milliseconds of a training step by method and length."""
    records = []
    for length in LENGTHS:
        methods = [name for name in METHODS if length <= NEAR_FAR_UP_TO or "nearfar" not in name]
        speed = Speed("attention", [length], ROUNDS, methods, "cuda")
        records += speed.rows(Mechanism.of("exact"), seed=0)
    return pd.DataFrame(records).pivot_table("training", "method", "length", "median", sort=False)


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
    print(torch.cuda.get_device_name(), torch.__version__)
    print("milliseconds of a training step of attention alone, 8 heads, d = 64, m = 256, bfloat16:")
    print(time_attention().to_string(float_format="%.2f"), flush=True)
    print("milliseconds of a training step of BERT-base, 32 x 128 tokens:")
    print(time_bert().to_string(float_format="%.1f"), flush=True)
    for method in ("favorpp", f"favorpp{CAUSAL}"):
        print(f"slowest launches of {method}, 16384 tokens:")
        print(profile_launches(method, 16384), flush=True)


if __name__ == "__main__":
    main()
