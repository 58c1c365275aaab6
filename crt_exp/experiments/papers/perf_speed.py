"""Time and memory of attention: Performers Figure 3, CRT Figure 4 (right)."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from crt_exp.experiments.report import (
    Claim,
    Page,
    PlannedRun,
    Rows,
    Tables,
    filters_over,
    geometric_interval,
    label,
    line_plot,
    mean_table,
    panels,
    quoted_override,
    sweep,
)

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
) -> list[PlannedRun]:
    runs = []
    for what, lengths in rounds.items():
        for length, count in lengths.items():
            options = f"task=speed task.what={what} task.rounds={count}"
            if methods:
                options += " " + quoted_override("task.methods", methods)
            runs += sweep(
                options,
                alone=True,
                what=what,
                seed=range(seeds),
                length={length: f"task.lengths=[{length}]"},
            )
    return runs


def memory_runs(
    what: str, methods: Sequence[str], lengths: Sequence[int], seeds: int = 1
) -> list[PlannedRun]:
    return sweep(
        f"task=memory task.what={what}",
        alone=True,
        what=what,
        **{"task.length": lengths},
        seed=range(seeds),
        method={name: quoted_override("task.method", name) for name in methods},
    )


LINEAR = [*BOTH[2:], *CAUSAL[2:]]

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


PLOTTED_ON_GPU = ["exact", "favorpp", "exact causal", "favorpp causal", "chunked causal"]
GPU_OPTIONS = "task.device=cuda task.rounds=9 task.lengths=[256,1024,4096,16384,65536]"
GPU_RUNS = sweep(
    f"task=speed {GPU_OPTIONS} {quoted_override('task.methods', ON_GPU)}",
    alone=True,
    what=GPU,
    seed=range(2),
)
NEARFAR = ["nearfar", "nearfar causal"]
MEMORY = [
    *memory_runs("attention", LINEAR, [65536]),
    *memory_runs("attention", NEARFAR, [65536], 5),
    *memory_runs("attention", ["exact"], [4096]),
]
SMALL = {"speed": time_runs(ROUNDS, 5), "speed/memory": MEMORY, "speed-gpu": GPU_RUNS, **FIG4}
FULL = {
    "speed": time_runs(ROUNDS, 10) + time_runs(LONG, 10),
    "speed/memory": memory_runs("attention", LINEAR + NEARFAR, [4096, 16384, 65536, 131072]),
    **FIG4,
}


def finding(rows: Rows) -> str:
    times = {}
    for direction in ("", " causal"):
        for length in (1024, 4096):
            methods = f"exact{direction}", f"nearfar{direction}"
            ratio = rows.ratio(*methods, "training", what="attention", length=length)
            times[f"{length}{direction}"] = geometric_interval(np.exp(ratio), ".2g")
    return (
        "One attention layer alone, on two CPU cores: a training step with exact attention takes "
        f"{times['1024']} times as long as with near-far attention at 1024 tokens and {times['4096']} times at 4096 "
        f"(95% CI, n = {len(ratio)} processes). Causal: {times['1024 causal']} and {times['4096 causal']} times."
    )


def memory_growth(rows: Rows) -> str:
    """State the exponents of the memory of a ViT in its tokens."""
    growth = []
    for method, words in GROWTH.items():
        frame = rows.select("mib", method, what="vit_ti")[["length", "value"]]
        if len(frame) > 1:
            lengths, mib = np.log(frame.to_numpy(float)).T
            growth.append(f"as L^{np.polyfit(lengths, mib, 1)[0]:.2f} {words}")
    return f"memory grows {', '.join(growth)}" if growth else "no run measured memory"


SMALL_LAYERS = (
    "the small Transformer (d = 64, one head) has little to compute but its 256 features, on two CPU cores; the paper "
    "times a V100"
)
COMPARISONS = [  # text, methods, cases, largest ratio, the paper's result
    (
        "a training step with FAVOR+ takes at most 1.25 times that with identity",
        ("favorp", "identity"),
        {
            "large Transformer, L = 2048": {"what": "large", "length": 2048},
            "small Transformer, L = 4096": {"what": "small", "length": 4096},
        },
        1.25,
        "close to X (OPT), the line of attention that returns V",
    ),
    (
        "FAVOR++ takes at most 1.05 times the time of FAVOR+",
        ("favorpp", "favorp"),
        {"ViT, L = 3136": {"what": "vit", "length": 3136}},
        1.05,
        "steps per second alike",
    ),
    (
        "FAVOR++ takes less time than exact attention",
        ("favorpp", "exact"),
        {"ViT, L = 784": {"what": "vit", "length": 784}},
        1,
        "exact softmax is slower from some hundred tokens on",
    ),
    (
        "a training step with FAVOR++ takes less than 1.1 times that of FAVOR+",
        ("favorpp", "favorp"),
        {"ViT, 16384 tokens": {"what": "vit_ti", "length": 16384}},
        1.1,
        "very similar computation time",
    ),
]


GROWTH_CASES = {  # case -> model, two lengths
    "large Transformer, L = 1024 to 2048": ("large", 1024, 2048),
    "small Transformer, L = 1024 to 4096": ("small", 1024, 4096),
    "attention alone, L = 4096 to 16384": ("attention", 4096, 16384),
}


def growth_exponent(rows: Rows, what: str, short: int, long: int) -> pd.Series:
    """Exponent of the time of FAVOR+ in the number of tokens, by process."""
    logs = []
    for length in (short, long):
        logs.append(rows.values("training", "favorp", log=True, what=what, length=length))
    return (logs[1] - logs[0]).dropna() / np.log(long / short)


def claims(rows: Rows) -> list[Claim]:
    claims = []
    for text, methods, cases, below, paper in COMPARISONS:
        metric = "ms" if "ViT, 16384 tokens" in cases else "training"
        ratios = rows.paired_by_case(*methods, metric, cases, log=True)
        needs = "" if below == 1 else "more processes on a quiet machine"
        reason = SMALL_LAYERS if methods[1] == "identity" else ""
        claims.append(
            Claim(text, ratios, paper, needs, below=below, log=True, unit="times", reason=reason)
        )
    growth = {}
    for case, (what, short, long) in GROWTH_CASES.items():
        growth[case] = growth_exponent(rows, what, short, long)
    claims.append(
        Claim(
            "the time of a training step with FAVOR+ grows as L^1.1 at most",
            growth,
            below=1.1,
            unit="(exponent)",
            paper="nearly linear time, to L = 2^15 (Figure 3)",
            needs="the large Transformer at L = 2^15: 16 GB of GPU memory",
        )
    )
    claims.append(
        Claim(
            "training a ViT above 1000 tokens fails for lack of memory",
            not_judged=memory_growth(rows),
            paper="out of memory",
            needs="a TPU, and exact attention that forms its matrix",
        )
    )
    return claims


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
    title = NAMES.get(what, "") + "L = {}"
    columns = filters_over("length", lengths, title, metric=metric, what=what)
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


def tables(rows: Rows) -> Tables:
    lengths = (256, 1024, 4096, 16384)
    both = [*BOTH, *CAUSAL]
    title = "Attention alone: speed-up over exact attention in a training step (higher is faster)"
    tables = {title: speedup_table(rows, lengths)}
    title = "Attention alone: milliseconds of a training step (lower is faster)"
    tables[title] = length_table(rows, "training", "attention", both, lengths)
    title = "Attention alone on a GPU (H200, bfloat16): milliseconds of a training step"
    tables[title] = length_table(rows, "training", GPU, ON_GPU, (*lengths, 65536), ".1f")
    models = []
    for what in NAMES:
        models.append(length_table(rows, "training", what, MODEL, [*ROUNDS[what]][-2:]))
    tables["Models: milliseconds of a training step"] = models[0].join(models[1:])
    title = "ViT-Ti/16 (CRT Figure 4): milliseconds of a training step"
    tables[title] = length_table(rows, "ms", "vit_ti", VIT, [784, 3136, 16384])
    columns = {"MiB, L = 65536": {"metric": "mib", "length": 65536}}
    memory = mean_table(rows, columns, labels(both), format=mebibytes)
    tables["Attention alone: peak memory of a training step"] = memory
    return tables


def mebibytes(values: pd.Series) -> str:
    return f"{max(0, values.mean()):.0f}"


def figure(rows: Rows):
    fig, axes = panels(4, columns=2)
    plots = [
        ("attention, both directions", "training", "attention", [*BOTH, "uniform"]),
        ("causal attention", "training", "attention", [*CAUSAL, "uniform causal"]),
        ("ViT-Ti/16 (CRT Figure 4)", "ms", "vit_ti", VIT[:-1]),
        ("attention on a GPU (H200, bfloat16)", "training", GPU, PLOTTED_ON_GPU),
    ]
    for ax, (title, metric, what, methods) in zip(axes, plots):
        names = labels(methods)
        if what == "attention":
            names = {name: label(name.removesuffix(" causal")) for name in methods}
        causal = [name for name in methods if what == GPU and name.endswith("causal")]
        line_plot(ax, rows, "length", metric, names, log="xy", dotted=causal, what=what)
        ax.set(title=title, xlabel="tokens L", ylabel="training step, ms (lower is faster)")
    return fig


page = Page(
    "perf_speed",
    title="Performers Figure 3 and CRT Figure 4 (right): speed and memory of attention",
    finding=finding,
    small=SMALL,
    full=FULL,
    columns=["what", "method", "length"],
    metrics=["training", "ms", "mib"],
    measured=[
        "Batch 1, float32, 2 threads of an AMD EPYC. A sample is a process; methods take turns in every round.",
        "GPU: one NVIDIA H200, bfloat16, torch 2.11, two processes, before the Triton kernels. Exact attention is "
        "FlashAttention.",
        "Attention alone: 8 heads, d = 64, m = 256, |x + y|^2 of about 10, fits to statistics included. FAVOR# has 2m "
        "features. chunked: causal FAVOR+ in PyTorch. large: 6 layers, d = 512; small: 6 layers, d = 64.",
        "CRT Figure 4: ViT-Ti/16 with AdamW's update. A row is the median of 5 processes, so claims have one sample.",
        "Memory: peak of one training step, in addition to inputs, output and gradients (ViT: weights, gradients and "
        "optimiser). Values near 0 are too small to be measured.",
    ],
    tables=tables,
    claims=claims,
    figure=figure,
)
