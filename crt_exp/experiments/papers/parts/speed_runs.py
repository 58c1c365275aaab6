"""Runs of the page on time and memory of attention."""

from collections.abc import Mapping

from crt_exp.experiments.report import PlannedRun, quoted_override, sweep

FORMED = "exact, matrix formed"
BOTH = ["exact", "nearfar", "favorpp", "favorp", "favorsharp", "performer-pytorch"]
CAUSAL = [f"{name} causal" for name in (*BOTH[:5], "chunked")]
VIT = ["exact", "favorp", "favorpp", "uniform"]
MEMORY = ["exact", FORMED, "favorpp"]
GPU = "attention, GPU"
ON_GPU = ["exact", "favorpp", "favorp", "uniform", "exact causal", "favorpp causal"]
ON_GPU += ["favorp causal", "chunked causal"]
ROUNDS = {
    "attention": {256: 4, 512: 4, 1024: 2, 2048: 2, 4096: 1, 16384: 1},
    "large": {1024: 2, 2048: 2},
    "small": {1024: 2, 4096: 1},
    "vit": {784: 2, 3136: 1},
}  # of each length
LONG = {
    "attention": {n: 1 for n in (8192, 32768, 65536, 131072)},
    "large": {4096: 1},
    "small": {16384: 1},
}


def time_runs(
    rounds: Mapping[str, Mapping[int, int]], seeds: int, methods: str = ""
) -> list[PlannedRun]:
    runs = []
    for what, counts in rounds.items():
        options = f"task=speed task.what={what} {methods}"
        lengths = {n: f"task.lengths=[{n}] task.rounds={count}" for n, count in counts.items()}
        runs += sweep(options, alone=True, what=what, seed=range(seeds), length=lengths)
    return runs


VIT_ROUNDS = {64: 6, 196: 6, 784: 4, 1024: 3, 3136: 1, 4096: 1, 12544: 1, 16384: 1}
VIT_TIMES = time_runs({"vit_ti": VIT_ROUNDS}, 5, quoted_override("task.methods", VIT))
VIT_MEMORY = sweep(
    "task=memory task.what=vit_ti",
    alone=True,
    what="vit_ti",
    **{"task.length": [784, 3136]},
    seed=[0],
    method={name: quoted_override("task.method", name) for name in MEMORY},
)
FIG4 = {"fig4-right": VIT_TIMES, "fig4-right/memory": VIT_MEMORY}
GPU_OPTIONS = "task=speed task.device=cuda task.rounds=9 task.lengths=[256,1024,4096,16384,65536]"
GPU_OPTIONS += " " + quoted_override("task.methods", ON_GPU)
GPU_RUNS = sweep(GPU_OPTIONS, alone=True, what=GPU, seed=range(2))
