"""Sampled softmax: times, and bias and variance of the gradient."""

import pandas as pd

from crt_exp.experiments.report import (
    Page,
    PlannedRun,
    Rows,
    dot_plot,
    filters_over,
    geometric_interval,
    line_plot,
    mean_table,
    panels,
    quoted_override,
    sweep,
)

NAMES = [
    "uniform",
    "log_uniform",
    "unigram",
    "exact",
    "favorpp m=64",
    "favorpp m=256",
    "favorpp m=1024",
    "favorpp m=64 flatter=2",
    "favorpp m=256 flatter=2",
    "favorpp m=1024 flatter=2",
    "favor m=32",
    "favor m=128",
    "favor m=512",
]
GRADIENTS = [*NAMES, "quadratic"]
STEPS = {
    "full": "full softmax",
    "dense m=64": "dense FAVOR++, m = 64",
    "adaptive": "torch's adaptive softmax",
    "tree m=64": "FAVOR++ in a tree, m = 64",
    "uniform": "uniform",
    "log_uniform": "log-uniform",
}
SIZES = {
    classes: f"task.classes={classes} task.rounds={rounds}"
    for classes, rounds in [(1000, 25), (10_000, 15), (100_000, 7), (1_000_000, 3)]
}
LARGEST = {
    10_000_000: "task.classes=10000000 task.rounds=3 task.methods=[tree,uniform,log_uniform]"
}


def sweeps(seeds: int) -> dict[str, list[PlannedRun]]:
    return {
        "sampling/steps": sweep(
            "task=sampling_times task.what=step task.methods=[full,adaptive,tree,uniform,log_uniform,dense]",
            alone=True,
            classes={**SIZES, **LARGEST},
        ),
        "sampling/draws": sweep(
            "task=sampling_times task.what=draw task.methods=[dense,tree]",
            alone=True,
            classes=SIZES,
        ),
        "sampling/gradients": sweep(
            "task=sampled_gradients task.classes=10000 task.queries=64 task.repeats=200",
            methods={
                "all": quoted_override("task.methods", NAMES),
                "quadratic": "task.methods=[quadratic]",
            },
            **{"task.length": [4, 8]},
            seed=range(seeds),
        ),
    }


def time_table(rows: Rows, sweep_name: str) -> pd.DataFrame:
    classes = [*SIZES, *LARGEST]
    columns = filters_over("classes", classes, "{:,}", metric="ms", sweep=sweep_name)
    return mean_table(rows, columns, STEPS, spec=".1f", geometric=True)


def finding(rows: Rows) -> str:
    where = {"sweep": "sampling/steps", "classes": 1_000_000}
    tree = rows.values("ms", "tree m=64", **where)
    full = rows.values("ms", "full", **where) / 1000
    return (
        f"With a million classes, a training step takes {geometric_interval(tree, '.0f')} ms with FAVOR++ negatives "
        f"from a tree (95% CI) and {geometric_interval(full, '.1f')} s with the full softmax. FAVOR++ with m = 256 has "
        "less squared bias than log-uniform negatives."
    )


def tables(rows: Rows):
    gradients = {}
    for length in [4, 8]:
        for metric, name in [("bias_sq", "squared bias"), ("variance", "variance")]:
            column = f"{name}, queries of length {length}"
            gradients[column] = {"metric": metric, "length": length}
    return {
        "Time of a training step, ms, by number of classes (lower is better)": time_table(
            rows, "sampling/steps"
        ),
        "Time of drawing negatives, ms, by number of classes": time_table(rows, "sampling/draws"),
        "Gradient, over the squared length of the full softmax's gradient": mean_table(
            rows, gradients, GRADIENTS, spec=".4f"
        ),
    }


def figure(rows: Rows):
    fig, (left, right) = panels(2)
    line_plot(left, rows, "classes", "ms", STEPS, log="xy", sweep="sampling/steps")
    left.set(title="Time of a training step", xlabel="classes", ylabel="ms (lower is better)")
    dot_plot(right, rows.by_method("variance", GRADIENTS, length=8))
    right.set_title("Variance of the gradient, queries of length 8")
    right.set_xlabel("relative to the squared full gradient (lower is better)")
    return fig


page = Page(
    "sampling",
    title="Sampled softmax: time and gradient against the full softmax",
    finding=finding,
    small=sweeps(8),
    full=sweeps(24),
    reduced=False,
    columns=["classes", "length", "method"],
    metrics=["bias_sq", "variance", "ms"],
    measured=[
        "Synthetic classes in 32 groups, d = 64, Zipf biases and targets; 40 negatives per query. No trained model.",
        "Gradients: 10,000 classes, 64 queries, two halves of 200 repetitions; 8 seeds, each with its own data.",
        "The kernel of FAVOR++ is the softmax at the mean lengths; flatter = 2 doubles its temperature.",
        "Times: 700 queries, one process per number of classes, methods in turn; geometric means (95% CI) over rounds.",
        "A step is forward, backward, SGD and the update of the tables; sampled methods have sparse gradients.",
    ],
    tables=tables,
    figure=figure,
)
