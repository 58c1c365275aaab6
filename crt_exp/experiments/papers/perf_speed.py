"""Time and memory of attention: Performers Figure 3, CRT Figure 4 (right)."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd

from crt_exp.experiments.report import (
    Claim,
    Page,
    Rows,
    label,
    line_plot,
    mean_table,
    quoted_override,
    sweep,
)
from crt_exp.experiments.report.plots import panels
from crt_exp.experiments.report.sweeps import Run

FORMED = "exact, matrix formed"
BOTH = ["exact", "nearfar", "favorpp", "favorp", "favorsharp", "performer-pytorch"]
CAUSAL = [f"{name} causal" for name in (*BOTH[:5], "chunked")]
MODEL = [*BOTH[:5], "identity"]
VIT = ["exact", "favorp", "favorpp", "uniform", FORMED]
ROUNDS = {
    "attention": {256: 4, 512: 4, 1024: 2, 2048: 2, 4096: 1, 16384: 1},
    "large": {256: 4, 1024: 2, 2048: 2},
    "small": {256: 4, 1024: 2, 4096: 1},
    "vit": {196: 4, 784: 2, 3136: 1},
}  # of each length
LONG = {
    "attention": {n: 1 for n in (8192, 32768, 65536, 131072)},
    "large": {4096: 1},
    "small": {16384: 1},
}
NAMES = {"large": "large Transformer, ", "small": "small Transformer, ", "vit": "ViT, "}


def time_runs(
    rounds: dict[str, dict[int, int]], seeds: int, methods: Sequence[str] = ()
) -> list[Run]:
    runs = []
    for what, lengths in rounds.items():
        for length, count in lengths.items():
            options = f"task=speed task.what={what} task.rounds={count}"
            if methods:
                options += " " + quoted_override("task.methods", methods)
            runs += sweep(
                options,
                alone=True,
                what={what: ""},
                seed=range(seeds),
                length={length: f"task.lengths=[{length}]"},
            )
    return runs


def memory_runs(
    what: str, methods: Sequence[str], lengths: Sequence[int], seeds: int = 1
) -> list[Run]:
    return sweep(
        f"task=memory task.what={what}",
        alone=True,
        what={what: ""},
        **{"task.length": lengths},
        seed=range(seeds),
        method={name: quoted_override("task.method", name) for name in methods},
    )


LINEAR = [*BOTH[2:], *CAUSAL[2:]]
RATIO = {"log": True, "unit": "times"}
FIG4 = {
    "fig4-right": [
        *time_runs({"vit_ti": {64: 6, 196: 6, 784: 4, 1024: 3, 3136: 1}}, 5, VIT),
        *time_runs({"vit_ti": {4096: 1, 12544: 1, 16384: 1}}, 5, VIT[:-1]),
    ],
    "fig4-right/memory": [
        *memory_runs("vit_ti", VIT, [784, 1024, 3136]),
        *memory_runs("vit_ti", VIT[:-1], [4096, 16384]),
    ],
}
GROWTH = {
    "exact": "with fused exact attention",
    FORMED: "where the matrix is formed",
    "favorpp": "with FAVOR++",
}
GPU = "attention, GPU"
ON_GPU = [
    "exact",
    "favorpp",
    "favorp",
    "uniform",
    "exact causal",
    "favorpp causal",
    "favorp causal",
    "chunked causal",
]
page = Page(
    "perf_speed",
    title="Performers Figure 3 and CRT Figure 4 (right): speed and memory of attention",
    finding="On two CPU cores, a training step with near-far attention is 2.9 [2.8, 2.9] times as fast as with "
    "exact attention at 1024 tokens and 13 [12, 14] times at 4096 (95% CI, n = 5 processes). Causal: 1.0 "
    "[0.9, 1.1] and 2.0 [1.8, 2.2] times.",
    small={
        "speed": time_runs(ROUNDS, 5),
        "speed/memory": [
            *memory_runs("attention", LINEAR, [65536]),
            *memory_runs("attention", ["nearfar", "nearfar causal"], [65536], 5),
            *memory_runs("attention", ["exact"], [4096]),
        ],
        "speed-gpu": sweep(
            "task=speed task.device=cuda task.rounds=9 task.lengths=[256,1024,4096,16384,65536] "
            + quoted_override("task.methods", ON_GPU),
            alone=True,
            what={GPU: ""},
            seed=range(2),
        ),
    }
    | FIG4,
    full={
        "speed": time_runs(ROUNDS, 10) + time_runs(LONG, 10),
        "speed/memory": memory_runs(
            "attention", [*LINEAR, "nearfar", "nearfar causal"], [4096, 16384, 65536, 131072]
        ),
    }
    | FIG4,
    columns=["what", "method", "length"],
    metrics=["training", "ms", "mib"],
    measured=[
        "Batch 1, float32, 2 threads of an AMD EPYC. A sample is a process; methods take turns in every round.",
        "GPU: one NVIDIA H200, bfloat16, torch 2.11, two processes; exact attention is FlashAttention. Needs a GPU.",
        "Attention alone: 8 heads, d = 64, m = 256, |x + y|^2 of about 10, fits to statistics included. FAVOR# has 2m "
        "features. chunked: causal FAVOR+ in PyTorch. large: 6 layers, d = 512; small: 6 layers, d = 64.",
        "CRT Figure 4: ViT-Ti/16 with AdamW's update. A row is the median of 5 processes, so claims have one sample.",
        "Memory: peak of one training step, in addition to inputs, output and gradients (ViT: weights, gradients and "
        "optimiser). Values near 0 are too small to be measured.",
    ],
)


MORE = "more processes on a quiet machine"


def claims(rows: Rows) -> list[Claim]:
    ratio = partial(rows.ratio, metric="training")

    growth = []
    for method, words in GROWTH.items():
        frame = rows.select("mib", method, what="vit_ti")[["length", "value"]]
        if len(frame) > 1:
            lengths, mib = np.log(frame.to_numpy(float)).T
            growth.append(f"as L^{np.polyfit(lengths, mib, 1)[0]:.2f} {words}")
    memory = f"memory grows {', '.join(growth)}" if growth else "no run measured memory"
    identity = {}
    for what, length in (("large", 2048), ("small", 4096)):
        ratios = ratio("favorp", "identity", what=what, length=length)
        identity[f"{NAMES[what]}L = {length}"] = ratios
    return [
        Claim(
            "a training step with FAVOR+ takes at most 1.25 times that with identity",
            identity,
            below=1.25,
            **RATIO,
            paper="close to X (OPT), the line of attention that returns V",
            needs=MORE,
        ),
        Claim(
            "FAVOR++ takes at most 1.05 times the time of FAVOR+",
            {"ViT, L = 3136": ratio("favorpp", "favorp", what="vit", length=3136)},
            below=1.05,
            paper="steps per second alike",
            needs=MORE,
            **RATIO,
        ),
        Claim(
            "FAVOR++ takes less time than exact attention",
            {"ViT, L = 784": ratio("favorpp", "exact", what="vit", length=784)},
            below=1,
            **RATIO,
            paper="exact softmax is slower from some hundred tokens on",
        ),
        Claim(
            "a training step with FAVOR++ takes less than 1.1 times that of FAVOR+",
            {
                "ViT, 16384 tokens": rows.ratio(
                    "favorpp", "favorp", "ms", what="vit_ti", length=16384
                )
            },
            below=1.1,
            paper="very similar computation time",
            needs=MORE,
            **RATIO,
        ),
        Claim(
            "training a ViT above 1000 tokens fails for lack of memory",
            not_measured=memory,
            paper="out of memory",
            needs="a TPU, and exact attention that forms its matrix",
        ),
    ]


def labels(methods: Sequence[str]) -> dict[str, str]:
    labels = {}
    for name in methods:
        labels[name] = label(name.removesuffix(" causal"))
        if name.endswith("causal"):
            labels[name] += ", causal"
    return labels


def length_table(
    rows: Rows,
    metric: str,
    what: str,
    methods: Sequence[str],
    lengths: Sequence[int],
    spec: str = ".0f",
) -> pd.DataFrame:
    columns = {}
    for n in lengths:
        columns[f"{NAMES.get(what, '')}L = {n}"] = {"metric": metric, "what": what, "length": n}
    return mean_table(rows, columns, labels(methods), spec=spec)


def speedup_table(rows: Rows, lengths: Sequence[int]) -> pd.DataFrame:
    """Tabulate the time of exact attention over that of the method."""
    table = {}
    for n in lengths:
        column = table.setdefault(f"L = {n}", {})
        for method, name in labels([*BOTH, *CAUSAL]).items():
            exact = "exact causal" if method.endswith("causal") else "exact"
            ratio = rows.ratio(exact, method, "training", what="attention", length=n)
            column[name] = f"{np.exp(ratio.mean()):.2g}" if len(ratio) else ""
    return pd.DataFrame(table).rename_axis("method")


def tables(rows: Rows) -> dict[str, pd.DataFrame]:
    lengths = (256, 1024, 4096, 16384)
    title = "Attention alone: time of exact attention over the method's, of a training step (higher is faster)"
    tables = {title: speedup_table(rows, lengths)}
    tables["Attention alone: milliseconds of a training step (lower is faster)"] = length_table(
        rows, "training", "attention", [*BOTH, *CAUSAL], lengths
    )
    if len(rows.select("training", what=GPU)):
        title = "Attention alone on a GPU (H200, bfloat16): milliseconds of a training step"
        tables[title] = length_table(rows, "training", GPU, ON_GPU, (*lengths, 65536), ".1f")
    large, small, vit = [
        length_table(rows, "training", what, MODEL, [*ROUNDS[what]][-2:]) for what in NAMES
    ]
    tables["Models: milliseconds of a training step"] = large.join([small, vit])
    tables["ViT-Ti/16 (CRT Figure 4): milliseconds of a training step"] = length_table(
        rows, "ms", "vit_ti", VIT, [784, 3136, 16384]
    )
    tables["Attention alone: peak memory of a training step"] = mean_table(
        rows,
        {"MiB, L = 65536": {"metric": "mib", "length": 65536}},
        labels([*BOTH, *CAUSAL]),
        format=lambda mib: f"{max(0, mib.mean()):.0f}",
    )
    return tables


def figure(rows: Rows):
    fig, axes = panels(3)
    for ax, title, metric, what, methods in [
        (axes[0], "attention, both directions", "training", "attention", [*BOTH, "uniform"]),
        (axes[1], "causal attention", "training", "attention", [*CAUSAL, "uniform causal"]),
        (axes[2], "ViT-Ti/16 (CRT Figure 4)", "ms", "vit_ti", VIT[:-1]),
    ]:
        line_plot(
            ax,
            rows,
            "length",
            metric,
            {name: text.removesuffix(", causal") for name, text in labels(methods).items()},
            log="xy",
            what=what,
        )
        ax.set(title=title, xlabel="tokens L", ylabel="training step, ms (lower is faster)")
    fig.tight_layout()
    return fig
