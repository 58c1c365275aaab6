"""Time and memory of attention: Performers Figure 3, CRT Figure 4 (right)."""

import numpy as np
import pandas as pd

from crt_exp.experiments.papers.parts.speed_runs import (
    BOTH,
    CAUSAL,
    FIG4,
    GPU,
    GPU_RUNS,
    LONG,
    MEMORY,
    ON_GPU,
    ROUNDS,
    VIT,
    time_runs,
)
from crt_exp.experiments.report import (
    Claim,
    Page,
    Rows,
    Tables,
    filters_over,
    line_plot,
    mean_table,
    panels,
    ratio_interval,
)


def finding(rows: Rows) -> str:
    times = {}
    for direction in ("", " causal"):
        for length in (1024, 4096):
            methods = f"exact{direction}", f"nearfar{direction}"
            ratio = rows.ratio(*methods, "training", what="attention", length=length)
            times[f"{length}{direction}"] = ratio_interval(ratio, ".2g")
    return (
        "One attention layer alone, on two CPU cores: a training step with exact attention takes "
        f"{times['1024']} times as long as with near-far attention at 1024 tokens and {times['4096']} times at 4096 "
        f"(95% CI, n = {len(ratio)} processes). Causal: {times['1024 causal']} and {times['4096 causal']} times."
    )


CASES = {
    "large Transformer, L = 2048": {"metric": "training", "what": "large", "length": 2048},
    "small Transformer, L = 4096": {"metric": "training", "what": "small", "length": 4096},
    "ViT, L = 784": {"metric": "training", "what": "vit", "length": 784},
    "ViT, L = 3136": {"metric": "training", "what": "vit", "length": 3136},
    "ViT, 16384 tokens": {"metric": "ms", "what": "vit_ti", "length": 16384},
}
GROWTH = {  # case -> model, two lengths
    "large Transformer, L = 1024 to 2048": ("large", 1024, 2048),
    "small Transformer, L = 1024 to 4096": ("small", 1024, 4096),
    "attention alone, L = 4096 to 16384": ("attention", 4096, 16384),
}
SMALL_LAYERS = (
    "the small Transformer (d = 64) computes little but 256 features; the paper times a V100"
)
TIMES = {"log": True, "needs": "more processes on a quiet machine"}


def ratios(rows: Rows, method: str, baseline: str, *cases: str) -> dict[str, pd.Series]:
    """Logarithms of the time of a method over that of a baseline, by case and process."""
    return {case: rows.ratio(method, baseline, **CASES[case]) for case in cases}


def exponent(rows: Rows, metric: str, method: str, what: str, short: int, long: int) -> pd.Series:
    """Exponent of the time or memory of a method in the number of tokens, by process."""
    logs = []
    for length in (short, long):
        logs.append(rows.values(metric, method, log=True, what=what, length=length))
    return (logs[1] - logs[0]).dropna() / np.log(long / short)


def claims(rows: Rows) -> list[Claim]:
    growth = {case: exponent(rows, "training", "favorp", *where) for case, where in GROWTH.items()}
    memory = [exponent(rows, "mib", name, "vit_ti", 784, 3136).mean() for name in MEMORY]
    measured = (
        "memory grows as L^{:.2f} (exact, fused), L^{:.2f} (matrix formed), L^{:.2f} (FAVOR++)"
    )
    transformers = "large Transformer, L = 2048", "small Transformer, L = 4096"
    return [
        Claim(
            "a training step with FAVOR+ takes at most 1.25 times that with identity",
            ratios(rows, "favorp", "identity", *transformers),
            "close to X (OPT), the line of attention that returns V",
            below=1.25,
            reason=SMALL_LAYERS,
            **TIMES,
        ),
        Claim(
            "FAVOR++ takes at most 1.05 times the time of FAVOR+",
            ratios(rows, "favorpp", "favorp", "ViT, L = 3136"),
            "steps per second alike",
            below=1.05,
            **TIMES,
        ),
        Claim(
            "FAVOR++ takes less time than exact attention",
            ratios(rows, "favorpp", "exact", "ViT, L = 784"),
            "exact softmax is slower from some hundred tokens on",
            below=1,
            **TIMES,
        ),
        Claim(
            "a training step with FAVOR++ takes less than 1.1 times that of FAVOR+",
            ratios(rows, "favorpp", "favorp", "ViT, 16384 tokens"),
            "very similar computation time",
            below=1.1,
            **TIMES,
        ),
        Claim(
            "the time of a training step with FAVOR+ grows as L^1.1 at most",
            growth,
            "nearly linear time, to L = 2^15 (Figure 3)",
            "the large Transformer at L = 2^15: 16 GB of GPU memory",
            below=1.1,
            unit="(exponent)",
        ),
        Claim(
            "training a ViT above 1000 tokens fails for lack of memory",
            paper="out of memory",
            needs="a TPU, and exact attention that forms its matrix",
            not_judged=measured.format(*memory),
        ),
    ]


def tables(rows: Rows) -> Tables:
    lengths = (256, 1024, 4096, 16384)
    columns = filters_over("length", lengths, "L = {}", metric="training", what="attention")
    speedups = []
    for exact, methods in {"exact": BOTH, "exact causal": CAUSAL}.items():
        speedups.append(mean_table(rows, columns, methods, format=two_digits, over=exact))
    title = "Attention alone: speed-up over exact attention in a training step (higher is faster)"
    return {title: pd.concat(speedups)}


def two_digits(logs: pd.Series) -> str:
    return f"{np.exp(logs.mean()):.2g}"


def figure(rows: Rows):
    fig, axes = panels(4, columns=2)
    plots = {
        "attention, both directions": ("training", "attention", [*BOTH, "uniform"]),
        "causal attention": ("training", "attention", [*CAUSAL, "uniform causal"]),
        "ViT-Ti/16 (CRT Figure 4)": ("ms", "vit_ti", VIT),
        "attention on a GPU (H200, bfloat16)": ("training", GPU, ON_GPU),
    }
    for ax, (title, (metric, what, methods)) in zip(axes, plots.items()):
        causal = [name for name in methods if what == GPU and name.endswith("causal")]
        line_plot(ax, rows, "length", metric, methods, log="xy", dotted=causal, what=what)
        ax.set(title=title, xlabel="tokens L", ylabel="training step, ms (lower is faster)")
    return fig


page = Page(
    "perf_speed",
    title="Performers Figure 3 and CRT Figure 4 (right): speed and memory of attention",
    finding=finding,
    small={"speed": time_runs(ROUNDS, 5), "speed-gpu": GPU_RUNS, **FIG4},
    full={"speed": time_runs(ROUNDS, 10) + time_runs(LONG, 10), **FIG4},
    columns=["what", "method", "length"],
    metrics=["training", "ms", "mib"],
    measured=[
        "Batch 1, float32, 2 threads of an AMD EPYC. A sample is a process; methods take turns in every round.",
        "GPU: NVIDIA H200, torch 2.11, two processes, before the Triton kernels. Exact attention is FlashAttention.",
        "Attention alone: 8 heads, d = 64, m = 256, |x + y|^2 of about 10, fits to statistics included. FAVOR# has 2m "
        "features. chunked: causal FAVOR+ in PyTorch. large: 6 layers, d = 512; small: 6 layers, d = 64.",
        "CRT Figure 4: ViT-Ti/16 with AdamW's update. A row is the median of 5 processes, so claims have one sample. "
        "Memory is in addition to weights, gradients and optimiser.",
    ],
    tables=tables,
    claims=claims,
    figure=figure,
)
