"""Sampled softmax: what drawing negatives costs, and how far the gradient is from that of the full softmax."""

from crt_exp.report import Page, Rows, dot_plot, geometric_mean_ci, line_plot, mean_table, sweep
from crt_exp.report.plots import panels

FAVORPP = ["favorpp m=64", "favorpp m=256", "favorpp m=1024"]
FLATTER = [f"{name} flatter=2" for name in FAVORPP]
TRIG = ["favor m=32", "favor m=128", "favor m=512"]
METHODS = ["uniform", "log_uniform", "unigram", "exact", *FAVORPP, *FLATTER, *TRIG]
LABELS = {"uniform": "uniform", "log_uniform": "log-uniform", "unigram": "unigram", "exact": "exact softmax",
          **{name: f"FAVOR++, {name[8:].replace('=', ' = ')}" for name in FAVORPP},
          **{name: f"FAVOR++, {name[8:].replace('=', ' = ').replace(' flatter = 2', ', flatter')}" for name in FLATTER},
          **{name: f"trigonometric, {name[6:].replace('=', ' = ')}" for name in TRIG}, "quadratic": "quadratic kernel"}
STEPS = {"full": "full softmax", "dense m=64": "dense FAVOR++, m = 64", "adaptive": "torch's adaptive softmax",
         "tree m=64": "FAVOR++ in a tree, m = 64", "uniform": "uniform", "log_uniform": "log-uniform"}
DRAWS = {f"{kind} m={m}": f"{name}, m = {m}" for m in [64, 256, 1024] for kind, name in [
    ("dense", "dense FAVOR++"), ("tree", "FAVOR++ in a tree"), ("signed_tree", "trigonometric in a tree")]
    if kind != "signed_tree" or m == 64}
CLASSES = {1000: 25, 10_000: 15, 100_000: 7, 1_000_000: 3}  # classes -> rounds
SIZES = {classes: f"task.classes={classes} task.rounds={rounds}" for classes, rounds in CLASSES.items()}
LONGEST = {10_000_000: "task.classes=10000000 task.rounds=3 task.methods=[tree,uniform,log_uniform]"}
LENGTHS = [4, 8]


def sweeps(seeds: int):
    listed = ",".join(f'"{name}"' for name in METHODS)
    return {
        "sampling/draws": sweep("task=sampling_times task.what=draw", alone=True, classes=SIZES, m={
            64: "task.m=64 task.methods=[dense,tree,signed_tree]", **{
                m: f"task.m={m} task.methods=[dense,tree]" for m in [256, 1024]}}),
        "sampling/steps": sweep(
            "task=sampling_times task.what=step task.methods=[full,adaptive,tree,uniform,log_uniform,dense]",
            alone=True, classes={**SIZES, **LONGEST}),
        "sampling/gradients": sweep("task=sampled_gradients task.classes=10000 task.queries=64 task.repeats=200", of={
            "all": f"'task.methods=[{listed}]'", "quadratic": "task.methods=[quadratic]"},
            **{"task.length": LENGTHS}, seed=range(seeds))}


page = Page(
    "sampling",
    title="Sampled softmax, sublinear in the classes",
    finding="Drawing down a tree takes a thousandth of the time of a dense draw at a million classes. FAVOR++ with "
            "enough features has less bias than log-uniform negatives.",
    small=sweeps(8), full=sweeps(24), reduced=False,
    columns=["classes", "length", "method"],
    metrics=["bias_sq", "variance", "ms", "update_ms"],
    measured=[
        "Synthetic classes: vectors of length about 1 in 32 groups, d = 64, biases and targets by Zipf's law, float32; "
        "40 negatives a query. No data set and no trained model.",
        "Gradients by the queries: 10,000 classes, 64 queries of length 4 or 8 whose cosine with the target's vector "
        "is about 0.7, two halves of 200 repetitions, over the squared length of the full softmax's gradient; 8 seeds, "
        "each with its own classes, batch and noise.",
        "The kernel of features is the softmax of vectors of the mean lengths, exp(|h| |e| cos), or, flatter, "
        "exp(|h| |e| cos / 2). The quadratic kernel, with alpha = 100, is the sampler of another paper, set once and "
        "measured after the others.",
        "Times: a batch of 700 queries; each number of classes in a process of its own, in which all methods take "
        "turns; geometric means over rounds with 95% intervals. Dense and tree hold the same table; the trigonometric "
        "map has as many features. A step is forward, backward, SGD and the update of the tables; sampled ones have "
        "sparse gradients.",
        "The full softmax is formed for as many queries at once as have 2^28 pairs with the classes; above 1,000,000 "
        "classes methods that take all classes are left out."])


def tables(rows: Rows):
    def of_classes(sweep: str, metric: str, methods: dict[str, str]):
        return mean_table(rows, {f"{classes:,}": {"metric": metric, "sweep": sweep, "classes": classes}
                                 for classes in [*SIZES, *(LONGEST if sweep == "sampling/steps" else [])]}, methods,
                          format=lambda values: "{:.1f} ({:.1f} to {:.1f})".format(*geometric_mean_ci(values)))
    return {
        "Gradients over the squared length of the full softmax's": mean_table(rows, {
            f"{name}, queries of length {length}": {"metric": metric, "length": length} for length in LENGTHS
            for metric, name in [("bias_sq", "squared bias"), ("variance", "variance")]}, LABELS, spec=".4f"),
        "Time of a step, ms, by classes": of_classes("sampling/steps", "ms", STEPS),
        "Time of a draw, ms, by classes": of_classes("sampling/draws", "ms", DRAWS),
        "Time of an update of the classes drawn, ms, by classes": of_classes("sampling/draws", "update_ms", DRAWS)}


def figure(rows: Rows):
    fig, (left, right) = panels(2)
    line_plot(left, rows, "classes", "ms", STEPS, log="xy", sweep="sampling/steps")
    left.set(title="Time of a training step", xlabel="classes", ylabel="ms")
    dot_plot(right, {name: rows.values("variance", name, length=8) for name in LABELS}, labels=LABELS)
    right.set(title="Variance of the gradient, queries of length 8", xlabel="over the squared full gradient")
    fig.tight_layout()
    return fig
