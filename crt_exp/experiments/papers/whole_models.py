"""Time of whole models: exact attention against other attention, on processors with and without AVX-512."""

from itertools import product

import numpy as np
import pandas as pd

from crt_exp.experiments.drawing import colour
from crt_exp.experiments.report import (
    Page,
    PlannedRun,
    Rows,
    Tables,
    filters_over,
    label,
    mean_table,
    panels,
    quoted_override,
    ratio_interval,
    sweep,
)

METHODS = ["exact", "nearfar", "favorpp", "favormix", "window"]
WITHOUT_MIXTURE = ["exact", "nearfar", "favorpp", "window"]
OTHERS = METHODS[1:]
AVX2 = {
    "CC": "cc -mno-avx512f",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
BUILDS = {"AVX-512": {}, "AVX2": AVX2}
LINES = {"AVX-512": "-", "AVX2": "--"}
PASSES = {"inference": "forward", "training": "forward and backward"}
SMOLLM2 = "SmolLM2-135M"
MINILM = "MiniLM"
WHISPER = "Whisper-tiny encoder"
VIT = "ViT-S/16"
MODELS = {
    SMOLLM2: "task.what=pretrained task.model=models/smollm2-135m",
    MINILM: "task.what=pretrained task.model=models/minilm",
    WHISPER: "task.what=pretrained task.model=models/whisper-tiny.en",
    VIT: "task.what=vit_s",
}
TIMINGS = [  # model, lengths, rounds, methods
    (SMOLLM2, [512], 1, METHODS),
    (SMOLLM2, [1024, 4096], 1, WITHOUT_MIXTURE),
    (MINILM, [512], 5, METHODS),
    (WHISPER, [1500], 3, METHODS),
    (VIT, [196, 784, 3136], 1, METHODS),
]
CASES = {}  # filters of the rows
for model, lengths, _, _ in TIMINGS:
    for length in lengths:
        CASES[f"{model}, {length}"] = {"model": model, "length": length}
LONGEST = CASES[f"{SMOLLM2}, 4096"]


def time_runs(seeds: int) -> list[PlannedRun]:
    """One process for each seed, build and entry of TIMINGS; its methods take turns."""
    runs = []
    for seed, build, timing in product(range(seeds), BUILDS, TIMINGS):
        model, lengths, rounds, methods = timing
        options = f"task=speed {MODELS[model]} task.rounds={rounds}"
        options += f" {quoted_override('task.lengths', lengths)}"
        options += f" {quoted_override('task.methods', methods)}"
        columns = {"model": model, "build": build, "up_to": str(lengths[-1])}
        runs += sweep(options, alone=True, environment=BUILDS[build], **columns, seed=[seed])
    return runs


MEMORY = sweep(
    f"task=memory {MODELS[SMOLLM2]}",
    alone=True,
    model=SMOLLM2,
    build="AVX-512",
    **{"task.length": [1024, 4096]},
    seed=[0],
    method={name: quoted_override("task.method", name) for name in METHODS},
)
SMALL = {"whole-models": time_runs(3), "whole-models/memory": MEMORY}
FULL = {"whole-models": time_runs(10), "whole-models/memory": MEMORY}


def finding(rows: Rows) -> str:
    texts = {}
    for build, metric in product(BUILDS, PASSES):
        speedups = rows.ratio("exact", "nearfar", metric, **LONGEST, build=build)
        texts[build, metric] = ratio_interval(speedups, ".2f")
    return (
        "SmolLM2-135M at 4096 tokens, two cores: with near-far attention the forward pass is "
        f"{texts['AVX-512', 'inference']} times as fast as with exact attention with AVX-512, and "
        f"{texts['AVX2', 'inference']} times without. A training step is {texts['AVX-512', 'training']} and "
        f"{texts['AVX2', 'training']} times as fast (95% CI, n = {len(speedups)} processes)."
    )


def speedup_table(rows: Rows, metric: str) -> pd.DataFrame:
    columns = {}
    for (case, where), build in product(CASES.items(), BUILDS):
        columns[f"{case}, {build}"] = {"metric": metric, **where, "build": build}
    table = mean_table(rows, columns, OTHERS, spec=".2f", over="exact")
    return table.T.rename_axis("model, tokens, build")


def seconds_table(rows: Rows) -> pd.DataFrame:
    """The median seconds of exact attention, to which the speed-ups refer."""
    table = {}
    for case, where in CASES.items():
        texts = table.setdefault(case, {})
        for build, (metric, name) in product(BUILDS, PASSES.items()):
            seconds = rows.values(metric, "exact", **where, build=build) / 1000
            if len(seconds):
                texts[f"{name}, {build}"] = f"{seconds.median():.2f}"
    return pd.DataFrame.from_dict(table, orient="index").fillna("").rename_axis("model, tokens")


def tables(rows: Rows) -> Tables:
    tables = {}
    for metric, name in PASSES.items():
        title = f"{name.capitalize()} pass: speed-up over exact attention (above 1 is faster)"
        tables[title] = speedup_table(rows, metric)
    tables["Exact attention: median seconds"] = seconds_table(rows)
    columns = filters_over("length", [1024, 4096], "{} tokens", metric="mib")
    title = "SmolLM2-135M: peak memory of a forward and backward pass, MiB, beside weights and gradients"
    tables[title] = mean_table(rows, columns, METHODS, spec=".0f")
    return tables


def figure(rows: Rows):
    fig, axes = panels(2)
    lengths = [512, 1024, 4096]
    for ax, (metric, name) in zip(axes, PASSES.items()):
        for method, build in product(("nearfar", "favorpp", "window"), BUILDS):
            means = []
            for length in lengths:
                where = {"model": SMOLLM2, "length": length, "build": build}
                means.append(np.exp(rows.ratio("exact", method, metric, **where).mean()))
            style = {"color": colour(method), "ls": LINES[build], "marker": "o", "ms": 3}
            ax.plot(lengths, means, label=f"{label(method)}, {build}", **style)
        ax.axhline(1, color="grey", lw=0.8)
        ax.set_xscale("log")
        ax.set_xticks(lengths, lengths)
        ax.minorticks_off()
        ax.set(title=f"SmolLM2-135M, {name}", xlabel="tokens")
        ax.set_ylabel("speed-up over exact attention (higher is faster)")
    axes[0].legend(fontsize=6)
    return fig


page = Page(
    "whole_models",
    title="Whole models: time with exact and with other attention",
    finding=finding,
    small=SMALL,
    full=FULL,
    reduced=False,
    columns=["model", "build", "method", "length"],
    metrics=["inference", "training", "mib"],
    measured=[
        "Batch 1, float32, 2 threads of an AMD EPYC. A sample is a process; methods take turns in every round.",
        "AVX2: the same processor without AVX-512, in C (-mno-avx512f), PyTorch, oneDNN and MKL.",
        "SmolLM2-135M-Instruct (4-bit weights), MiniLM and Whisper-tiny.en: real weights. ViT-S/16: random weights, "
        "images of 14 x 14, 28 x 28 and 56 x 56 patches.",
        "SmolLM2 computes its loss on WikiText-2, output head included. Causal near-far attention is exact up to 1536 "
        "tokens, in both directions up to 512.",
        "Where near-far attention is exact (512 and 1024 tokens, ViT-S at 196), its speed-up is 1 but for noise "
        "between processes.",
        "A training step has no optimiser, and no dropout of attention weights. FAVOR++ and the mixture have m = 256.",
    ],
    tables=tables,
    figure=figure,
)
