"""Performers Figure 3, CRT Figure 4 (right): time and memory of attention against length."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from crt_exp.report import Claim, Page, Rows, label, line_plot, mean_ci, mean_table, sweep
from crt_exp.report.plots import panels

FORMED = "exact, matrix formed"
LABELS = {"exact": "exact (SDPA)", "floor": "plain product", "chunked": "chunked PyTorch",
          "hrf_angular m=8": "angular hybrid, m = 8", "hrf_gaussian m=4": "Gaussian hybrid, m = 4",
          "hrf_cluster m=64": "clustered hybrid, m = 64"}
BOTH = ["exact", "nearfar", "favorpp", "favorp", "favorsharp", "floor", "performer-pytorch"]
CAUSAL = [f"{name} causal" for name in (*BOTH[:5], "chunked", BOTH[-1])]
LINEAR = [*BOTH[1:], "favorsharp m=128", "hrf_angular m=8", "hrf_gaussian m=4", "hrf_cluster m=64", *CAUSAL[1:]]
TRIG = ["trig m=256", "trig m=136", "trig m=128"]  # as many features as the hybrids, at 4096 tokens
ALL = ["exact", "exact causal", *LINEAR, *TRIG, "identity", "uniform", "uniform causal"]
MODEL = ["exact", "identity", "favorp", "favorpp", "favorsharp", "nearfar"]
VIT = ["exact", "favorp", "favorpp", "uniform", FORMED]
ROUNDS = {"attention": {256: 4, 512: 4, 1024: 2, 2048: 2, 4096: 1, 16384: 1}, "large": {256: 4, 1024: 2, 2048: 2},
          "small": {256: 4, 1024: 2, 4096: 1}, "vit": {196: 4, 784: 2, 3136: 1}}  # of each length
LONG = {"attention": dict.fromkeys([8192, 32768, 65536, 131072], 1), "large": {4096: 1}, "small": {16384: 1}}
NAMES = {"attention": "attention", "large": "large Transformer", "small": "small Transformer", "vit": "ViT-Ti/16"}


def times(what: str, rounds: dict[int, int], seeds: int, methods: Sequence[str] = ()):
    """Without methods all take part that are not too slow there."""
    named = f'"task.methods={[*methods]}"' if methods else ""
    return [run for length, count in rounds.items() for run in sweep(
        f"task=speed task.what={what} task.rounds={count} {named}", alone=True, what={what: ""}, seed=range(seeds),
        length={length: f"task.lengths=[{length}]"})]


def all_times(seeds: int, longer: dict[str, dict[int, int]]):
    known = [name for name in ALL if name != "performer-pytorch causal"]  # at 4096 tokens with the trigonometric maps
    return [run for what, rounds in ROUNDS.items() for length, count in (rounds | longer.get(what, {})).items()
            for run in times(what, {length: count}, seeds, known if (what, length) == ("attention", 4096) else ())]


def peaks(what: str, methods: Sequence[str], lengths: Sequence[int], **seed):
    return sweep(f"task=memory task.what={what}", alone=True, what={what: ""}, **{"task.length": lengths}, **seed,
                 method={name: f'''"task.method='{name}'"''' for name in methods})


LEAN = [name for name in LINEAR if not name.startswith(("nearfar", "performer"))]
FIG4 = {"fig4-right": [*times("vit_ti", {64: 6, 196: 6, 784: 4, 1024: 3, 3136: 1}, 5, VIT),
                       *times("vit_ti", {4096: 1, 12544: 1, 16384: 1}, 5, VIT[:-1])],
        "fig4-right/memory": [*peaks("vit_ti", VIT, [784, 1024, 3136]), *peaks("vit_ti", VIT[:-1], [4096, 16384])]}
page = Page(
    "perf_speed",
    title="Performers Figure 3 and CRT Figure 4 (right): speed and memory of attention",
    finding="Near-far attention and FAVOR++ take less time than exact attention from 1024 tokens on, causal near-far "
            "from 4096 on. In a ViT, a training step with FAVOR++ takes as long as one with FAVOR+.",
    small={"speed": all_times(5, {}), "speed/memory": [
        *peaks("attention", [*LEAN, "performer-pytorch"], [65536], seed=[0]),
        *peaks("attention", ["nearfar", "nearfar causal"], [65536], seed=range(5)),
        *peaks("attention", ["exact", "exact causal", "favorpp", "favorpp causal"], [4096], seed=[0]),
        *peaks("attention", ["favorp causal", "chunked causal", "performer-pytorch causal"], [1024], seed=[0])]} | FIG4,
    full={"speed": all_times(10, LONG), "speed/memory": peaks(
        "attention", [*LEAN, "nearfar", "nearfar causal"], [4096, 16384, 65536, 131072], seed=[0])} | FIG4,
    columns=["what", "method", "length"], metrics=["training", "backward", "inference", "ms", "mib"],
    measured=[
        "Batch 1, float32, 2 threads of an AMD EPYC (AVX-512, VNNI). A sample is a process: all methods take their "
        "turn in every round, in an order that the process rotates, after a round at L <= 1024 that does not count. Up "
        "to L = 2048 attention alone had one process for all lengths, as had the three models.",
        "Attention alone: 8 heads, d = 64, m = 256, |x + y|^2 of about 10, fits to statistics included. A training "
        "step is forward and backward.",
        "FAVOR# has antithetic pairs, so 2m features; clusters are fitted before. Near-far attention has its preset "
        "`default`. Plain product: exp(Q W^T) (exp(K W^T)^T V), without norms and denominator. Chunked PyTorch: causal "
        "FAVOR+ in whole-tensor operations, chunks of 128.",
        "(heads, layers, ffn, dim): large (8, 6, 2048, 512), small (1, 6, 64, 64); ViT: timm's vit_tiny_patch16_224.",
        "CRT Figure 4: the same ViT with AdamW's update; tokens are patches of 16 pixels. Of 5 processes only medians "
        "and quartiles over all rounds were kept, and of the ratio that is tested its mean, interval and number of "
        "processes; the test uses five stand-in values that have this mean and interval.",
        "Memory: peak of resident memory of one training step in a process of its own, beyond inputs, output and "
        "gradients; of the ViT beyond weights, gradients and the optimiser's state. Values around 0 are too "
        "small to be seen."])


def claims(rows: Rows) -> list[Claim]:
    def ratio(first: str, second: str, what: str, length: int):
        return rows.ratio(first, second, "training", what=what, length=length)
    grows = {name: exponent(rows, name) for name in ("exact", FORMED, "favorpp")}
    return [
        Claim("a training step with FAVOR+ takes at most 1.25 times that with identity", {
            f"{NAMES[what]}, L = {length}": ratio("favorp", "identity", what, length)
            for what, length in (("large", 2048), ("small", 4096))}, below=1.25, log=True, unit="times",
            paper="close to X (OPT), the line of attention that returns V"),
        Claim("FAVOR++ takes at most 1.05 times the time of FAVOR+", {"ViT, L = 3136": ratio(
            "favorpp", "favorp", "vit", 3136)}, below=1.05, log=True, unit="times", paper="steps per second alike"),
        Claim("FAVOR++ takes less time than exact attention", {"ViT, L = 784": ratio("favorpp", "exact", "vit", 784)},
              below=1, log=True, unit="times", paper="exact softmax is slower from some hundred tokens on"),
        Claim("a training step with FAVOR++ takes less than 1.1 times that of FAVOR+", {
            "ViT, 16384 tokens": longest_ratio(rows)}, below=1.1, unit="times", paper="very similar computation time"),
        Claim("exact attention runs out of memory above L = 1000 (ViT, TPU)",
              not_measured="torch's fused exact attention forms no matrix: at L = 4096 its training step holds "
              f"{rows.values('mib', 'exact', what='attention', length=4096).mean():.0f} MiB"),
        Claim("training a ViT above 1000 tokens fails for lack of memory",
              not_measured=f"memory grows as L^{grows['exact']:.2f} with exact attention, which forms no matrix, as "
              f"L^{grows[FORMED]:.2f} where one is formed, as L^{grows['favorpp']:.2f} with FAVOR++")]


def longest_ratio(rows: Rows):
    """Samples of the time of FAVOR++ over that of FAVOR+; of a kept mean and interval, stand-ins that have both."""
    kept = [rows.values(f"over_favorp{end}", "favorpp", length=16384) for end in ("", "_ci95", "_processes")]
    if not len(kept[0]):
        return np.exp(rows.ratio("favorpp", "favorp", "ms", what="vit_ti", length=16384))
    mean, half, n = (each.item() for each in kept)
    places = np.arange(int(n)) - (n - 1) / 2
    return mean + half * n**0.5 / stats.t.isf(0.025, n - 1) * places / places.std(ddof=1)


def exponent(rows: Rows, method: str) -> float:
    """The slope of log(memory) against log(tokens), least squares."""
    frame = rows.select("mib", method, what="vit_ti")
    return float(np.polyfit(np.log(frame["length"].astype(float)), np.log(frame["value"].astype(float)), 1)[0])


def named(method: str) -> str:
    name = method.removesuffix(" causal")
    return LABELS.get(name, label(name)) + ", causal" * (name != method)


def tables(rows: Rows):
    def of(metric: str, what: str, methods: list[str], spec: str = ".0f", wanted: Sequence[int] = ()):
        lengths = wanted or sorted({*rows.select(metric, what=what)["length"]})
        return mean_table(rows, {f"L = {n}": {"metric": metric, "what": what, "length": n} for n in lengths},
                          {name: named(name) for name in methods}, spec=spec)
    passes = {"training": "a training step", "backward": "backward pass", "inference": "pass without gradients"}
    return {
        "Attention alone: milliseconds of a training step": of("training", "attention", [
            name for name in [*BOTH, *CAUSAL] if name not in ("floor", "performer-pytorch causal")], wanted=(
                1024, 4096, 16384)),
        "From which length on a method is faster than exact attention": overtaken(rows),
        **{f"{NAMES[what]}: {words}, ms": of(metric, what, ALL if what == "attention" else MODEL, ".1f")
           for what in NAMES for metric, words in passes.items()},
        "ViT-Ti/16 with AdamW's update (CRT Figure 4): a training step, ms": of("ms", "vit_ti", VIT),
        **{f"The same, the {word} quartile of all rounds, ms": of(f"ms_quartile_{i}", "vit_ti", VIT)
           for i, word in ((1, "first"), (3, "third")) if len(rows.select(f"ms_quartile_{i}"))},
        "The same: peak memory of a step, MiB": of("mib", "vit_ti", VIT),
        "Attention alone: peak memory of a training step, MiB": of("mib", "attention", ALL)}


def overtaken(rows: Rows) -> pd.DataFrame:
    """The least measured L from which on every 95% interval is below exact attention's time; the last L above it."""
    def cell(method: str, metric: str) -> str:
        exact, signs = "exact causal" if method.endswith("causal") else "exact", {}
        for length in sorted({*rows.select(metric, exact, what="attention")["length"]}):
            found = mean_ci(rows.ratio(method, exact, metric, what="attention", length=length))
            if found.n:
                signs[length] = np.sign(found.mean) * (abs(found.mean) > np.nan_to_num(found.half))
        faster = [n for n in signs if all(signs[other] < 0 for other in signs if other >= n)]
        return f"{min(faster, default='never')}; {max((n for n in signs if signs[n] > 0), default='never')}"
    table = {f"{metric}: faster from; slower up to": [cell(method, metric) for method in LINEAR]
             for metric in ("training", "inference")}
    return pd.DataFrame(table, index=map(named, LINEAR)).rename_axis("method")


def figure(rows: Rows):
    fig, axes = panels(3)
    for ax, title, metric, what, methods in [
            (axes[0], "attention, both directions", "training", "attention", [*BOTH, "uniform"]),
            (axes[1], "causal attention", "training", "attention", [*CAUSAL, "uniform causal"]),
            (axes[2], "ViT-Ti/16 (CRT Figure 4)", "ms", "vit_ti", VIT[:-1])]:
        labels = {name: named(name).removesuffix(", causal") for name in methods}
        line_plot(ax, rows, "length", metric, labels, log="xy", what=what)
        ax.set(title=title, xlabel="tokens L", ylabel="training step, ms")
    fig.tight_layout()
    return fig
